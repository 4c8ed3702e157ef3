"""audit import: maps of any method become runs that are compared and gated like captured ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from audit.config import load_config
from audit.errors import ProbeError
from audit.pipeline import gate_runs, import_maps
from audit.probes import read_probes
from audit.records import Outcome, Region
from audit.regions import expand_regions, parse_regions
from audit.store import Store
from tests.integration.test_approvals import cli
from tests.synthetic import REGIONS, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def weights(world: World, opening: float, seed: int) -> dict[str, np.ndarray]:
    """Return a map of 8 positions for each probe with about `opening` on the first two."""
    random = np.random.default_rng(seed)
    found = {}
    for i in range(world.n):
        share = opening + 0.01 * random.standard_normal()
        found[f"p-{i:03d}"] = np.array([share / 2] * 2 + [(1 - share) / 6] * 6)
    return found


def npz(path: Path, arrays: dict[str, Any]) -> Path:
    np.savez(path, **arrays)
    return path


def parquet(path: Path, arrays: dict[str, np.ndarray], **columns: Any) -> Path:
    table = {"probe_id": list(arrays), "weights": [a.tolist() for a in arrays.values()], **columns}
    pq.write_table(pa.table(table), path)
    return path


def import_(world: World, path: Path, **given: Any) -> str:
    probes = read_probes(world.probes)
    return import_maps(
        path, world.store, probes, expand_regions(parse_regions(REGIONS), probes.probes), **given
    )


def runs(world: World, *openings: float) -> list[str]:
    return [
        import_(world, npz(world.root / f"m{i}.npz", weights(world, opening, i)))
        for i, opening in enumerate(openings)
    ]


def test_imported_maps_are_compared_and_gated(world):
    base, after, *seeds = runs(world, 0.25, 0.30, 0.249, 0.25, 0.251, 0.252, 0.248)
    verdict = gate_runs(load_config(world.config(base, after, seeds)))
    assert (verdict.outcome, verdict.exit_code) == (Outcome.FAIL, 3)
    stored = world.store.comparison(str(verdict.comparison_id))
    assert stored.same_weights is None
    opening = next(stored.find("opening"))
    assert opening.value == pytest.approx(0.05, abs=0.01)
    harmless = gate_runs(load_config(world.config(base, seeds[0], seeds[1:])))
    assert (harmless.outcome, harmless.exit_code) == (Outcome.PASS, 0)


def test_identical_imported_maps_never_pass(world):
    arrays = weights(world, 0.25, 0)
    one, two = (import_(world, npz(world.root / f"{name}.npz", arrays)) for name in ("one", "two"))
    assert one != two
    verdict = gate_runs(load_config(world.config(one, two)))
    assert (verdict.outcome, verdict.exit_code) == (Outcome.INCONCLUSIVE, 4)
    assert "whether the weights differ is unknown" in verdict.rules[0].sentence


def test_parquet_and_npz_give_the_same_maps(world):
    arrays = weights(world, 0.25, 3)
    one = import_(world, npz(world.root / "a.npz", arrays), name="same")
    two = import_(world, parquet(world.root / "b.parquet", arrays), name="same")
    assert one == two
    for found in world.store.iter_maps(one):
        np.testing.assert_allclose(found.weights, arrays[found.probe_id], rtol=1e-6)


def test_the_same_file_twice_is_one_run(world):
    first, second = runs(world, 0.25)[0], runs(world, 0.25)[0]
    assert first == second
    assert world.store.run_ids() == [first]


def test_probes_may_stand_in_any_order(world):
    arrays = weights(world, 0.25, 3)
    turned = dict(reversed(arrays.items()))
    one = import_(world, npz(world.root / "a.npz", arrays), name="same")
    assert import_(world, npz(world.root / "b.npz", turned), name="same") == one
    assert world.store.share_table(one).probe_ids == tuple(arrays)


def test_spans_let_term_regions_be_measured(world):
    arrays = weights(world, 0.25, 0)
    starts = [[4 * i for i in range(8)] for _ in arrays]
    path = parquet(
        world.root / "s.parquet", arrays, starts=starts, ends=[[s + 3 for s in row] for row in starts]
    )
    probes = read_probes(world.probes)
    run = import_maps(path, world.store, probes, (Region("one", "terms", {"terms": ["one"]}),))
    shares = world.store.share_table(run)
    np.testing.assert_allclose(shares.values[:, 0], [a[0] for a in arrays.values()], rtol=1e-5)


def test_saliency_grids_are_measured_by_boxes(world):
    random = np.random.default_rng(0)
    grids = {f"p-{i:03d}": random.dirichlet(np.ones(16)).reshape(4, 4) for i in range(world.n)}
    probes = read_probes(world.probes)
    regions = parse_regions({"corner": {"box": [0.75, 0.75, 1.0, 1.0]}})
    run = import_maps(npz(world.root / "g.npz", grids), world.store, probes, regions)
    shares = world.store.share_table(run)
    np.testing.assert_allclose(shares.values[:, 0], [g[3, 3] for g in grids.values()], rtol=1e-5)
    assert next(world.store.iter_maps(run)).positions.grid == (4, 4)


def test_layers_and_unnormalised_weights(world):
    arrays = weights(world, 0.25, 0)
    loud = {key: 7 * value for key, value in arrays.items()}
    layers = {f"{key}/layers": np.stack([value, value[::-1]]) for key, value in loud.items()}
    run = import_(world, npz(world.root / "l.npz", {**loud, **layers}), normalize=True)
    found = next(world.store.iter_maps(run))
    assert found.layers is not None
    np.testing.assert_allclose(found.layers.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(found.weights, arrays["p-000"], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda maps: maps.pop("p-003"), "probe p-003 without a map"),
        (lambda maps: maps.update({"p-999": maps["p-000"]}), "probe p-999 not in the probe set"),
        (lambda maps: maps.update({"p-000": maps["p-000"] * 2}), "sum to 2, not 1; pass --normalize"),
        (lambda maps: maps.update({"p-000": maps["p-000"] * np.nan}), "NaN or infinite"),
        (lambda maps: maps.update({"p-000": maps["p-000"] - 0.2}), "negative; give absolute"),
        (lambda maps: maps.update({"p-000": np.zeros(8)}), "all weights are 0"),
        (lambda maps: maps.update({"p-000": np.ones((2, 2, 2)) / 8}), "got shape"),
        (lambda maps: maps.update({"p-000/layers": np.ones((2, 3)) / 3}), r"layers must be \(layer, 8\)"),
        (lambda maps: maps.update({"p-000/starts": np.arange(8)}), "give both"),
        (lambda maps: maps.update({"p-000/special": np.zeros(3, bool)}), "special must have 8 entries"),
    ],
)
def test_a_wrong_map_is_refused_and_nothing_is_stored(world, change, said):
    arrays = weights(world, 0.25, 0)
    change(arrays)
    with pytest.raises(ProbeError, match=said) as error:
        import_(world, npz(world.root / "bad.npz", arrays))
    assert "bad.npz" in str(error.value)
    assert "\n" not in str(error.value)
    assert world.store.run_ids() == []


def test_a_region_that_needs_spans_says_so(world):
    path = npz(world.root / "a.npz", weights(world, 0.25, 0))
    with pytest.raises(ProbeError, match="p-000"):
        import_maps(
            path, world.store, read_probes(world.probes), (Region("one", "terms", {"terms": ["one"]}),)
        )
    assert world.store.run_ids() == []


@pytest.mark.parametrize(
    "name", ["nowhere.npz", "text.csv", "broken.npz", "broken.parquet", "no_column.parquet"]
)
def test_an_unreadable_file_exits_11_in_one_line(world, name):
    path = world.root / name
    if name == "no_column.parquet":
        pq.write_table(pa.table({"id": ["a"]}), path)
    elif not name.startswith("nowhere"):
        path.write_bytes(b"not what it seems")
    done = cli("import", path, "--probes", world.probes, "--store", world.root / "store")
    assert (done.returncode, done.stderr.count("\n")) == (11, 1), done.stderr


def test_import_and_gate_on_the_command_line(world):
    ids = []
    config = world.config("run-000000000000", "run-000000000001")
    for name, opening in (("before", 0.25), ("after", 0.30)):
        path = npz(world.root / f"{name}.npz", weights(world, opening, len(ids)))
        done = cli("import", path, "--config", config, "--method", "shap", "--json")
        assert done.returncode == 0, done.stderr
        ids.append(json.loads(done.stdout)["run_id"])
    assert Store(world.root / "store").spec(ids[0]).method.name == "shap"
    assert cli("gate", world.config(*ids)).returncode == 3


def test_maps_of_different_methods_are_not_compared(world):
    one = import_(world, npz(world.root / "a.npz", weights(world, 0.25, 0)), method="shap")
    two = import_(world, npz(world.root / "b.npz", weights(world, 0.25, 1)), method="lime")
    verdict = gate_runs(load_config(world.config(one, two)))
    assert verdict.exit_code == 10
    assert "method: shap against lime" in verdict.sentence
