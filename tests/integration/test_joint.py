"""Checkpoints captured in one pass over the probes have the runs that each has alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import audit
from audit.capture.inputs import windows
from audit.pipeline import capture_all, plan_audit
from audit.store import Store
from tests import tiny_audits
from tests.tiny_audits import text_rows, write_config, write_rows

REPLICATES = '[[replicates]]\npath = "{models}/seed-*"\nkind = "seed"\n'


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_audits.save_family(tmp_path_factory.mktemp("models") / "models")


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note how many texts are encoded each time."""
    sizes: list[int] = []
    real = windows.encode_texts

    def counted(checkpoint, probes, settings):
        sizes.append(len(probes))
        return real(checkpoint, probes, settings)

    monkeypatch.setattr(windows, "encode_texts", counted)
    return sizes


def capture_in(
    folder: Path, models: Path, *, together: bool, target: str = "", more: str = REPLICATES
) -> dict[str, tuple[str, set[str]]]:
    """Capture an audit in a store of its own; return each role's run and the hashes of its files."""
    folder.mkdir()
    write_rows(folder / "probes.jsonl", text_rows())
    section = f"[capture]\nshard_probes = 10\ntogether = {str(together).lower()}\n"
    probes = f'path = "probes.jsonl"\n{target}'
    config = audit.load_config(write_config(folder, models=models, probes=probes, more=section + more))
    runs = capture_all(plan_audit(config), together=config.capture.together)
    root = Store(config.store.url).root
    return {role: (run_id, hashes(root / "runs" / run_id)) for role, run_id in runs.items()}


def hashes(run: Path) -> set[str]:
    return {entry["sha256"] for entry in json.loads((run / "manifest.json").read_text())["files"]}


def test_runs_together_are_those_of_each_alone_and_texts_are_encoded_once(tmp_path, models, encoded):
    alone = capture_in(tmp_path / "alone", models, together=False)
    apart = sorted(size for size in encoded if size != 16)  # 16 are passed twice for determinism
    encoded.clear()
    assert capture_in(tmp_path / "together", models, together=True) == alone
    assert len(alone) == 7
    assert apart == sorted([4, 10, 10] * 7)
    assert sorted(size for size in encoded if size != 16) == [4, 10, 10]


def test_answers_of_the_checkpoint_before_come_first(tmp_path, models):
    target = 'target = "prediction"'
    alone, together = (
        capture_in(tmp_path / str(each), models, together=each, target=target, more="")
        for each in (False, True)
    )
    assert together == alone


def test_other_tokenizers_have_a_pass_of_their_own(tmp_path, models, encoded):
    other = tiny_audits.bert(tmp_path / "models" / "base")
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 500}))
    (tmp_path / "audit").mkdir()
    write_rows(tmp_path / "audit" / "probes.jsonl", text_rows())
    path = write_config(
        tmp_path / "audit", before=f'path = "{other}"', models=models, more="[capture]\ntogether = true\n"
    )
    capture_all(plan_audit(audit.load_config(path)), together=True)
    assert sorted(size for size in encoded if size != 16) == [24, 24]
