"""Saved datasets are read as probes, with a real `datasets`."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from audit.errors import ProbeError
from audit.probes import as_probes, read_probes

datasets = pytest.importorskip("datasets")


def test_saved_text_dataset_agrees_with_probes_in_memory(tmp_path):
    records = [
        {"id": "a", "text": "She is up", "label": 1, "regions": {"name": [[0, 3]]}},
        {"id": "b", "text": "He is", "label": 0, "regions": {"name": None}},
    ]
    datasets.Dataset.from_list(records).save_to_disk(tmp_path / "set")
    probes = read_probes(tmp_path / "set")
    assert probes.annotations_digest == as_probes(records).annotations_digest
    assert probes.inputs_digest == as_probes(records).inputs_digest


def test_saved_images_are_decoded(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 6, 3)).astype(np.uint8)
    features = datasets.Features(
        {"picture": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y"])}
    )
    rows = {"picture": [Image.fromarray(image) for image in pixels], "label": [0, 1]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "set")
    probes = read_probes(tmp_path / "set", columns={"image": "picture"})
    np.testing.assert_array_equal(probes.probes[1].image, pixels[1])
    assert [probe.label for probe in probes] == [0, 1]


def test_damaged_dataset_is_named(tmp_path):
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / "set")
    (tmp_path / "set" / "state.json").write_text("{}")
    with pytest.raises(ProbeError, match="not a readable saved dataset"):
        read_probes(tmp_path / "set")
