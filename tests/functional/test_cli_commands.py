"""Every command on one small audit: what it prints where, what it writes, and how it exits."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from audit.errors import ExitCode
from audit.store import Store
from tests import tiny_audits as tiny
from tests.tiny_audits import LIMIT, Done, files_below, write_config

EXCESS = '[[gate.rules]]\nregion = "opinion"\nkind = "excess"\nwithin = 0.02\n'
REPLICATES = '[[replicates]]\npath = "{models}/seed-*"\n'


@pytest.fixture(scope="module")
def audited(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which a shifted checkpoint was audited, in a process of its own."""
    folder = tmp_path_factory.mktemp("audited")
    tiny.write_rows(folder / "probes.jsonl", tiny.text_rows())
    rules = LIMIT.format(fail=0.02) + EXCESS
    write_config(folder, models=models, rules=rules, more=REPLICATES)
    write_config(
        folder,
        models=models,
        rules=rules,
        more=REPLICATES,
        after='path = "{models}/benign"',
        name="benign.toml",
    )
    done = tiny.run_command("run", "audit.toml", cwd=folder)
    (folder / "first.json").write_text(json.dumps(vars(done)))
    return folder


@pytest.fixture
def at(audited: Path, audit, monkeypatch: pytest.MonkeyPatch):
    """Return the command, run in the audited folder."""
    monkeypatch.chdir(audited)
    return audit


def verdicts(folder: Path) -> dict[str, str]:
    store = Store(folder / "store")
    judged = [one for one in store.comparisons() if one["outcome"] is not None]
    return {Path(one["after"]["checkpoint"]).name: one["comparison_id"] for one in judged}


def test_run_of_a_shifted_checkpoint_fails_with_3_and_says_so_on_stdout_alone(audited):
    done = Done(**json.loads((audited / "first.json").read_text()))
    assert done.code == ExitCode.FAIL, done.err
    assert done.out.startswith("FAIL")
    assert "the attention map moved" in " ".join(done.out.split())
    assert "capture before" not in done.out
    stages = " ".join(done.err.split())
    for stage in ("capture before 24/24", "capture after 24/24", "capture replicate-4 24/24", "compare 1/1"):
        assert stage in stages


def test_run_of_a_benign_checkpoint_passes_with_0_and_prints_one_json_value(at):
    done = at("run", "benign.toml", "--json")
    assert done.code == ExitCode.PASS, done.err
    assert done.json["verdict"]["outcome"] == "PASS"
    assert {rule["outcome"] for rule in done.json["rules"]} == {"PASS"}
    assert "capture after" in done.err
    assert "capture before" not in done.err


def test_the_same_run_twice_writes_nothing_and_gives_the_same_verdict(at, audited):
    before = files_below(audited / "store")
    assert at("run", "audit.toml").code == ExitCode.FAIL
    assert at("run", "benign.toml").code == ExitCode.PASS
    assert files_below(audited / "store") == before


def test_run_reports_in_every_format(at, audited, tmp_path):
    html, junit, markdown = tmp_path / "a/r.html", tmp_path / "b/r.xml", tmp_path / "c/r.md"
    done = at("run", "audit.toml", "--html", html, "--markdown", markdown, "--junit", junit, "--json")
    assert done.code == ExitCode.FAIL
    assert done.json["verdict"]["exit_code"] == 3
    assert "<html" in html.read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)', html.read_text())
    assert "FAIL" in markdown.read_text()
    assert list(ET.parse(junit).getroot().iter("failure"))
    once = markdown.read_text()
    at("run", "audit.toml", "--markdown", markdown)
    assert markdown.read_text() == once * 2


def test_capture_names_a_run_for_each_role(at, audited):
    done = at("capture", "audit.toml", "--json")
    assert done.code == 0
    assert set(done.json) == {"before", "after", *(f"replicate-{i}" for i in range(5))}
    assert set(done.json.values()) <= set(Store(audited / "store").run_ids())
    one = at("capture", "audit.toml", "--role", "after")
    assert one.out == f"after\t{done.json['after']}\n"


def test_compare_prints_cells_without_a_verdict(at):
    runs = at("capture", "audit.toml", "--json").json
    arguments = ("compare", runs["before"], runs["after"], "--replicate", runs["replicate-0"])
    done = at(*arguments, "--store", "store", "--json")
    assert done.code == 0
    assert done.json["verdict"] is None
    cells = {(cell["region"], cell["measure"]) for cell in done.json["comparison"]["cells"]}
    assert {("opinion", "shift"), ("people", "shift"), ("*", "js_distance")} <= cells
    assert "opinion" in at(*arguments, "--store", "store").out


def test_gate_judges_a_configuration_and_a_stored_comparison_alike(at, audited):
    for name, config, code in (("shifted", "audit.toml", 3), ("benign", "benign.toml", 0)):
        comparison = verdicts(audited)[name]
        first = at("gate", config, "--json")
        second = at("gate", comparison, "--store", "store", "--json")
        assert first.code == second.code == code
        assert first.json["rules"] == second.json["rules"]
        assert first.json["verdict"]["comparison_id"] == comparison


def test_gate_takes_another_store_than_the_configuration_names(at, tmp_path):
    done = at("gate", "audit.toml", "--store", tmp_path / "elsewhere")
    assert done.code == ExitCode.NOTHING_EVALUATED
    assert "audit capture" in done.error


def test_report_repeats_a_stored_verdict_and_exits_0(at, audited, tmp_path):
    comparison = verdicts(audited)["shifted"]
    done = at("report", comparison, "--store", "store", "--html", tmp_path / "r.html", "--json")
    assert done.code == 0
    assert done.json["verdict"]["outcome"] == "FAIL"
    assert (tmp_path / "r.html").stat().st_size < 1_000_000
    assert at("report", comparison, "--config", "audit.toml").out.startswith("FAIL")


def test_list_shows_runs_and_comparisons(at, audited):
    done = at("list", "--store", "store", "--json")
    assert {run["run_id"] for run in done.json["runs"]} == set(Store(audited / "store").run_ids())
    assert {"FAIL", "PASS"} <= {one["outcome"] for one in done.json["comparisons"]}
    text = at("list", "--store", "store").out
    assert all(name in text for name in Store(audited / "store").run_ids())


def test_verify_finds_an_intact_store_in_order(at):
    assert at("verify", "--store", "store").code == 0
    assert at("verify", "--store", "store", "--json").json["problems"] == []


def test_floor_freezes_baseline_and_replicates_into_one_small_file(at, tmp_path):
    path = tmp_path / "frozen" / "floor.json"
    done = at("floor", "audit.toml", "--out", path, "--json")
    assert done.code == 0
    assert done.json == {"floor": str(path), "bytes": path.stat().st_size}
    frozen = json.loads(path.read_text())
    assert len(frozen["runs"]) == 6
    assert path.stat().st_size < 50_000
    assert not [row["text"] for row in tiny.text_rows() if row["text"] in path.read_text()]


def test_prefect_is_not_needed_to_run(audited):
    blocked = "import sys; sys.modules['prefect'] = None; from audit.cli import main; main()"
    done = tiny.run_command("run", "benign.toml", cwd=audited, python=("-c", blocked))
    assert done.code == 0, done.err


def test_a_reader_that_stops_reading_is_no_bug(audited):
    import subprocess
    import sys

    command = f"{sys.executable} -m audit gate audit.toml --json | head -c 10; echo ${{PIPESTATUS[0]}}"
    environment = {"PYTHONPATH": str(tiny.ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=audited, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("3\n"), done.stdout
    assert "Traceback" not in done.stderr
