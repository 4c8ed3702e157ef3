"""The dashboard draws two models with other tokenizers on the words that both have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from audit.pipeline import compare_runs, import_maps, publish
from audit.probes import read_probes
from audit.regions import expand_regions, parse_regions
from tests.dashboard_app import fresh, open_page, said
from tests.synthetic import REGIONS, World


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield from fresh()


def imported(world: World, name: str, spans: list[tuple[int, int]] | None) -> str:
    """Store maps of one checkpoint, whose tokens have these spans in the text of every probe."""
    arrays: dict[str, np.ndarray] = {}
    size = 4 if spans is None else len(spans)
    for probe in read_probes(world.probes):
        arrays[probe.id] = np.arange(1.0, size + 1) / np.arange(1.0, size + 1).sum()
        if spans is not None:
            arrays[f"{probe.id}/starts"], arrays[f"{probe.id}/ends"] = np.array(spans).T
    np.savez(world.root / f"{name}.npz", **arrays)
    probes = read_probes(world.probes)
    regions = expand_regions(parse_regions(REGIONS), probes.probes)
    return import_maps(world.root / f"{name}.npz", world.store, probes, regions, name=name)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, n=8)


def test_maps_over_other_tokens_are_drawn_on_common_words(world):
    words = imported(world, "words", [(0, 3), (4, 7), (8, 13), (14, 18)])
    pieces = imported(world, "pieces", [(0, 2), (2, 3), (4, 7), (8, 13), (14, 16), (16, 18)])
    compared = publish(world.store, compare_runs(words, pieces, store=world.store), None)
    shown = said(open_page("probe", world.store.root, comparison=compared, probe="p-000"))
    assert "both maps are drawn on common ones" in shown
    assert "cannot be subtracted" not in shown
