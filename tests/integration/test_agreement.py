"""Agreement of stored maps with annotated regions, and of our AUPRC with scikit-learn's."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from audit.agreement import auprc, iou_at_area, pointing_game
from audit.config import load_config
from audit.errors import ProbeError
from audit.pipeline import region_agreement, report_context, run_audit
from audit.probes import read_probes
from audit.store import Store
from tests import tiny_audits as tiny
from tests.tiny_audits import LIMIT, write_config

MEASURES = (pointing_game, iou_at_area, auprc)


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory):
    """Return the store, its comparison and the configuration of an audit whose probes are annotated."""
    folder = tmp_path_factory.mktemp("agreement")
    tiny.bert(folder / "base")
    tiny.bert(folder / "shifted", seed=13, noise=0.4)
    rows = tiny.text_rows()
    for row in rows[:20]:
        row["regions"] = {"ending": [[row["text"].index("very"), len(row["text"])]]}
    tiny.write_rows(folder / "probes.jsonl", rows)
    config = load_config(write_config(folder, models=folder, rules=LIMIT.format(fail=0.02)))
    verdict = run_audit(config, confirm=False)
    store = Store(config.store.url)
    return store, store.comparison(str(verdict.comparison_id)), config, folder


def test_agreement_is_the_mean_over_the_stored_maps(audited):
    store, comparison, _, folder = audited
    run_id, probes = comparison.before.run_id, read_probes(folder / "probes.jsonl")
    (found,) = region_agreement(store, run_id, probes)
    assert (found.region, found.n_probes, found.n_missing) == ("ending", 20, 4)
    values = []
    for probe, one in zip(probes, store.iter_maps(run_id), strict=True):
        if probe.regions:
            inside = one.positions.starts >= probe.regions["ending"][0][0]
            arguments = one.weights, inside & one.positions.content
            values.append([measure(*arguments, content=one.positions.content) for measure in MEASURES])
    assert (found.pointing, found.iou, found.auprc) == pytest.approx(tuple(np.mean(values, axis=0)))
    assert found.pointing > 0


def test_reports_tell_both_checkpoints_agreement(audited):
    store, comparison, config, _ = audited
    (line,) = [one for one in report_context(store, comparison, None, config).notes if "Agreement" in one]
    assert line.startswith("Agreement with ending: pointing game ")
    assert "20 probes" in line
    assert not any("Agreement" in one for one in report_context(store, comparison, None).notes)


def test_another_probe_set_is_refused(audited, tmp_path: Path):
    store, comparison, _, _ = audited
    other = read_probes(tiny.write_rows(tmp_path / "other.jsonl", tiny.text_rows(5)))
    with pytest.raises(ProbeError, match="is not what run-"):
        region_agreement(store, comparison.before.run_id, other)


def test_auprc_is_the_average_precision_of_scikit_learn():
    rng = np.random.default_rng(0)
    for n in range(2, 40):
        weights = rng.dirichlet(np.ones(n)) if n % 2 else rng.integers(1, 4, n).astype(float)
        region = rng.random(n) if n % 3 else rng.permutation(np.arange(n) % 2).astype(float)
        expected = average_precision_score(
            np.repeat([1, 0], n), np.tile(weights, 2), sample_weight=np.concatenate([region, 1 - region])
        )
        assert auprc(weights, region) == pytest.approx(expected, abs=1e-9)
