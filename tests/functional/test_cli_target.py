"""target = "prediction": every run explains what the checkpoint before answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit.errors import ExitCode
from audit.store import Store
from tests import tiny_audits as tiny
from tests.integration import tiny_models
from tests.tiny_audits import LIMIT, write_config

GRADIENT = '[method]\nname = "gradient_rollout"\n[[replicates]]\npath = "{models}/seed-1"\n'
PROBES = 'path = "probes.jsonl"\ntarget = "prediction"'


@pytest.fixture
def unlabelled(tmp_path: Path) -> Path:
    rows = [{key: value for key, value in row.items() if key != "label"} for row in tiny.text_rows()]
    tiny.write_rows(tmp_path / "probes.jsonl", rows)
    return tmp_path


def answers(store: Store, run_id: str, column: str) -> list[str]:
    return store.predictions(run_id)[column].to_list()


def test_every_run_explains_what_the_checkpoint_before_answered(audit, unlabelled, models):
    tiny.save(tiny_models.text_checkpoint("bert", seed=1), unlabelled / "asked")  # answers all three classes
    pair = {"before": 'path = "./asked"', "after": 'path = "{models}/base"'}
    write_config(
        unlabelled, models=models, **pair, probes=PROBES, more=GRADIENT, rules=LIMIT.format(fail=0.9)
    )
    assert audit("capture", "--role", "after").code == ExitCode.NOTHING_EVALUATED  # nobody has answered yet
    runs = audit("capture", "--json").json
    store = Store(unlabelled / "store")
    answered = answers(store, runs["before"], "predicted")
    assert len(set(answered)) == 3
    assert len(set(answers(store, runs["after"], "predicted"))) == 1
    for run_id in runs.values():
        assert answers(store, run_id, "target") == answered  # the list is kept with each run
    done = audit("run", "--json")
    assert done.code == ExitCode.PASS, done.err
    assert done.json["comparison"]["mismatches"] == []
    assert audit("verify", "--store", "store").code == 0
    base = store.spec(runs["after"])
    write_config(unlabelled, models=models, before='path = "{models}/benign"', after=pair["after"],
                 probes=PROBES, more=GRADIENT)  # fmt: skip
    again = audit("capture", "--role", "before", "--json").json["before"]
    other = store.spec(audit("capture", "--role", "after", "--json").json["after"])
    assert other.checkpoint == base.checkpoint
    assert other.targets_digest != base.targets_digest  # another baseline asks other questions
    write_config(
        unlabelled, models=models, before=f'run = "{runs["before"]}"', after=f'run = "{other.id}"',
        probes=PROBES, more='[method]\nname = "gradient_rollout"\n',
    )  # fmt: skip
    refused = audit("gate", "audit.toml")
    assert refused.code == ExitCode.CONFIG
    assert "target: predictions of" in refused.out
    assert again != runs["before"]


def test_a_failing_region_is_confirmed_on_what_was_answered(audit, unlabelled, models):
    write_config(unlabelled, models=models, probes=PROBES, rules=LIMIT.format(fail=0.001))
    done = audit("run", "--json")
    assert done.code == ExitCode.FAIL
    assert done.json["comparison"]["confirmations"][0]["n_probes"] == 24


def test_a_baseline_by_approval_cannot_be_asked(audit, unlabelled, models):
    write_config(unlabelled, models=models, before="approved = true", probes=PROBES)
    assert "name [checkpoints.before] by path or run" in audit("capture").error
