"""Probes of a text with what a detector found in an image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from audit.errors import ProbeError
from audit.media import load_features, save_image
from audit.probes import as_probes, read_probes, write_probes
from audit.records import ProbeSet, digest

FEATURES = np.arange(6, dtype=np.float32).reshape(2, 3)
BOXES = np.array([[0.0, 0.0, 0.5, 0.5], [0.25, 0.5, 1.0, 1.0]], np.float32)


def probe_file(folder: Path, record: dict[str, Any] | None = None, **arrays: Any) -> Path:
    """Write one probe and its features."""
    np.savez(folder / "f.npz", **({"features": FEATURES, "boxes": BOXES} | arrays))
    path = folder / "probes.jsonl"
    path.write_text(json.dumps({"id": "x", "text": "what is it", "features": "f.npz"} | (record or {})))
    return path


def read(folder: Path, record: dict[str, Any] | None = None, **arrays: Any) -> ProbeSet:
    return read_probes(probe_file(folder, record, **arrays))


def test_features_are_found_beside_the_probe_file(tmp_path: Path) -> None:
    (probe,) = read(tmp_path, {"regions": {"corner": {"box": [0.5, 0.5, 1, 1]}}})
    assert probe.features == str(tmp_path / "f.npz")
    assert probe.modality == "features+text"
    features, boxes = load_features(probe.features)
    np.testing.assert_array_equal(features, FEATURES)
    np.testing.assert_array_equal(boxes, BOXES)
    assert probe.regions["corner"] == {"box": [0.5, 0.5, 1.0, 1.0]}


def test_digest_covers_features_and_boxes_by_value(tmp_path: Path) -> None:
    plain = read(tmp_path).inputs_digest
    (other := tmp_path / "other").mkdir()
    np.savez_compressed(other / "g.npz", boxes=BOXES.astype(np.float64), features=FEATURES.astype(np.int64))
    (other / "p.jsonl").write_text('{"id": "x", "text": "what is it", "features": "g.npz"}')
    assert read_probes(other / "p.jsonl").inputs_digest == plain
    assert read(tmp_path, features=FEATURES + 1e-6 * np.eye(2, 3)).inputs_digest != plain
    assert read(tmp_path, boxes=BOXES * 0.999).inputs_digest != plain
    in_memory = {"id": "x", "text": "what is it", "features": {"features": FEATURES, "boxes": BOXES.tolist()}}
    assert as_probes([in_memory]).inputs_digest == plain


def test_probes_without_features_keep_their_digests() -> None:
    """Stored runs are found again."""
    (probe,) = as_probes(["It was great."])
    assert probe.id == digest({"text": "It was great."})[:16]


@pytest.mark.parametrize("in_memory", [False, True])
def test_written_probes_are_read_again_with_equal_digests(tmp_path: Path, in_memory: bool) -> None:
    save_image(tmp_path / "i.png", np.zeros((2, 2, 3), np.uint8))
    probes = read(tmp_path, {"image": "i.png"})
    if in_memory:
        content = {"features": FEATURES, "boxes": BOXES}
        probes = as_probes([{"id": "y", "text": "what", "features": content}])
    write_probes(tmp_path / "out" / "again.jsonl", probes)
    again = read_probes(tmp_path / "out" / "again.jsonl")
    assert again.inputs_digest == probes.inputs_digest
    assert again.probes[0].modality == "features+text"


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"features": FEATURES[0]}, "expected features (region, dim) and boxes (region, 4), got (3,)"),
        ({"boxes": BOXES[:1]}, "got (2, 3) and (1, 4); mend the file"),
        ({"features": np.zeros((0, 3)), "boxes": np.zeros((0, 4))}, "got (0, 3) and (0, 4)"),
        ({"features": FEATURES * np.nan}, "features hold NaN or infinite numbers"),
        ({"features": np.full((2, 3), 1e300)}, "features hold NaN or infinite numbers"),
        ({"boxes": BOXES * 640}, "boxes reach from 0 to 640, expected fractions in [0, 1]; divide them"),
        ({"boxes": BOXES[:, ::-1]}, "boxes must be left, top, right, bottom"),
        ({"features": np.array([["a"], ["b"]])}, "features must be one array of numbers"),
    ],
)
def test_arrays_that_are_no_features_are_refused(tmp_path: Path, arrays: dict[str, Any], why: str) -> None:
    with pytest.raises(ProbeError) as refused:
        read(tmp_path, **arrays)
    assert why in str(refused.value)
    assert "line 1" in str(refused.value)
    assert "\n" not in str(refused.value)


def _no_boxes(path: Path) -> None:
    np.savez(path, features=FEATURES)


def _single(path: Path) -> None:
    with path.open("wb") as stream:
        np.save(stream, FEATURES)


def _objects(path: Path) -> None:
    np.savez(path, features=np.array([{}], dtype=object), boxes=BOXES)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (Path.unlink, "features 'f.npz' does not exist in"),
        (_no_boxes, "lack the array 'boxes'; write it with numpy.savez(path, features=…, boxes=…)"),
        (_single, "hold a single array; write it with numpy.savez"),
        (_objects, "cannot be read"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: path.write_bytes(b"PK\x03\x04 cut short"), "cannot be read"),
        (lambda path: path.write_bytes(b"no arrays"), "cannot be read"),
    ],
)
def test_files_that_hold_no_features_are_refused(tmp_path: Path, spoil: Any, why: str) -> None:
    path = probe_file(tmp_path)
    spoil(tmp_path / "f.npz")
    with pytest.raises(ProbeError) as refused:
        read_probes(path)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"text": None}, "cannot make one probe"),
        ({"text_pair": "b"}, "cannot make one probe"),
        ({"features": 3}, "features must be the path of a file"),
        ({"regions": {"r": {"mask": "m.png"}}}, "is a box or a mask, but the probe has no image"),
    ],
)
def test_content_that_does_not_go_with_features_is_refused(
    tmp_path: Path, record: dict[str, Any], why: str
) -> None:
    with pytest.raises(ProbeError, match=why):
        read(tmp_path, record)
