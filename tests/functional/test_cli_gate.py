"""The CI gate: exit codes, and a machine that has neither torch nor models nor probes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from audit.errors import ExitCode
from audit.store import Store
from tests import tiny_audits as tiny
from tests.tiny_audits import LIMIT, Done, write_config

EXCESS = '[[gate.rules]]\nregion = "opinion"\nkind = "excess"\nwithin = 0.02\n'
REPLICATES = '[[replicates]]\npath = "{models}/seed-*"\n'
FLOOR = '[[replicates]]\nfloor = "floor.json"\n'
ABSENT = ("torch", "transformers", "peft", "safetensors", "tokenizers", "prefect", "streamlit")
FRESH = f"""
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(name + " is not installed")


sys.meta_path.insert(0, Absent())
from audit.cli import main
main()
"""


@pytest.fixture(scope="module")
def frozen(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what a capture job uploads: the floor, and a store with the candidates' runs alone."""
    job, artifact = tmp_path_factory.mktemp("job"), tmp_path_factory.mktemp("artifact")
    tiny.write_rows(job / "probes.jsonl", tiny.text_rows())
    write_config(job, models=models, rules=EXCESS, more=REPLICATES)
    write_config(job, models=models, rules=EXCESS, after='path = "{models}/benign"', name="benign.toml")
    assert tiny.run_command("capture", cwd=job).code == 0
    assert tiny.run_command("capture", "benign.toml", "--role", "after", cwd=job).code == 0
    assert tiny.run_command("floor", "--out", artifact / "floor.json", cwd=job).code == 0
    shutil.copytree(job / "store", artifact / "store")
    for name in Store(job / "store").run_ids():
        if not Store(job / "store").spec(name).checkpoint.ref.endswith(("benign", "shifted")):
            shutil.rmtree(artifact / "store" / "runs" / name)
    return artifact


@pytest.fixture
def machine(frozen: Path, tmp_path: Path) -> Path:
    """Return a fresh machine to which the artifact was downloaded; it has no model and no probe file."""
    return Path(shutil.copytree(frozen, tmp_path / "machine"))


def run_of(machine: Path, checkpoint: str) -> str:
    runs = Store(machine / "store").runs()
    return next(run["run_id"] for run in runs if run["spec"]["checkpoint"]["ref"].endswith(checkpoint))


def gate_there(machine: Path, *arguments: object) -> Done:
    return tiny.run_command("gate", *arguments, cwd=machine, python=("-c", FRESH))


@pytest.mark.parametrize(("checkpoint", "code"), [("shifted", ExitCode.FAIL), ("benign", ExitCode.PASS)])
def test_a_fresh_machine_gates_a_run_captured_elsewhere_against_a_floor(machine, checkpoint, code):
    write_config(
        machine,
        after=f'run = "{run_of(machine, checkpoint)}"',
        rules=EXCESS + LIMIT.format(fail=0.02),
        more=FLOOR,
        probes='path = "not/here.jsonl"',
    )
    done = gate_there(machine, "--json", "--markdown", "summary.md", "--junit", "gate.xml")
    assert done.code == code, done.err
    verdict = done.json
    assert [rule["outcome"] for rule in verdict["rules"]] == [code.name] * 2
    assert verdict["rules"][0]["n_replicates"] == 5
    assert "baseline frozen in the floor is used: " in done.err
    assert "audit capture" not in done.err  # the floor stands in for the baseline: nothing is to be done
    assert code.name in (machine / "summary.md").read_text()
    assert (machine / "gate.xml").exists()
    assert tiny.run_command("verify", "--store", "store", cwd=machine).code in (0, ExitCode.STORE)


def test_the_floor_gives_the_numbers_that_the_replicates_give(machine, models, audit):
    folder = machine.parent
    tiny.write_rows(folder / "probes.jsonl", tiny.text_rows())
    write_config(folder, models=models, rules=EXCESS, more=REPLICATES)
    whole = audit("run", "--json").json["rules"][0]
    write_config(machine, after=f'run = "{run_of(machine, "shifted")}"', rules=EXCESS, more=FLOOR)
    small = audit("gate", machine / "audit.toml", "--json").json["rules"][0]
    for name in ("value", "minimum_detectable_shift", "adjusted_pvalue"):
        assert small[name] == pytest.approx(whole[name], rel=1e-4), name
    assert small["interval"] == pytest.approx(whole["interval"], rel=1e-4)
    assert small["excess"]["interval"] == pytest.approx(whole["excess"]["interval"], rel=1e-4)


def test_a_floor_of_another_baseline_is_refused(machine, models, audit):
    tiny.write_rows(machine / "probes.jsonl", tiny.text_rows())
    write_config(
        machine,
        models=models,
        before='path = "{models}/seed-1"',
        after='path = "{models}/benign"',
        more=FLOOR,
    )
    done = audit("run", machine / "audit.toml")
    assert done.code == ExitCode.CONFIG
    assert "floor" in done.error
    assert "audit floor" in done.error


def test_a_machine_without_the_baseline_captures_the_candidate_alone(machine, models, audit):
    tiny.write_rows(machine / "probes.jsonl", tiny.text_rows())
    write_config(machine, models=models, before='path = "./gone"', rules=EXCESS, more=FLOOR)
    done = audit("run", machine / "audit.toml", "--json")
    assert done.code == ExitCode.FAIL, done.err
    assert "baseline frozen in the floor" in done.err
    assert "capture before" not in done.err


@pytest.mark.parametrize(("checkpoint", "code"), [("shifted", ExitCode.FAIL), ("benign", ExitCode.PASS)])
def test_a_runner_with_a_floor_and_an_empty_store_runs_and_the_next_job_gates(
    machine, models, audit, checkpoint, code
):
    shutil.rmtree(machine / "store")
    tiny.write_rows(machine / "probes.jsonl", tiny.text_rows())
    write_config(machine, models=models, after=f'path = "{models}/{checkpoint}"', rules=EXCESS, more=FLOOR)
    done = audit("run", machine / "audit.toml", "--json")
    assert done.code == code, done.err
    comparison = done.json["comparison"]
    counts = {cell["measure"]: len(cell["replicates"]) for cell in comparison["cells"]}
    assert (counts["shift"], counts["js_distance"]) == (5, 0)
    assert bool(comparison["confirmations"]) is (checkpoint == "shifted")
    next_job = gate_there(machine, done.json["verdict"]["comparison_id"], "--store", "store", "--json")
    assert next_job.code == code, next_job.err
    assert next_job.json["rules"] == done.json["rules"]


def test_the_same_maps_from_other_weights_never_pass_against_a_floor(machine, models, audit, tmp_path):
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(models / "base")
    model.classifier.weight.data += 1.0
    model.save_pretrained(tmp_path / "head")
    transformers.AutoTokenizer.from_pretrained(models / "base").save_pretrained(tmp_path / "head")
    tiny.write_rows(machine / "probes.jsonl", tiny.text_rows())
    write_config(machine, before='path = "./gone"', after=f'path = "{tmp_path}/head"', more=FLOOR)
    done = audit("run", machine / "audit.toml")
    assert done.code == ExitCode.INCONCLUSIVE, done.out
    assert "nothing this method can see changed" in " ".join(done.out.lower().split())


# --- exit codes ---------------------------------------------------------------------------------


def test_too_few_probes_are_inconclusive_with_4_unless_allowed_and_recorded(audit, project, models):
    tiny.write_rows(project / "probes.jsonl", tiny.text_rows(12))
    write_config(project, models=models)
    assert audit("run").code == ExitCode.INCONCLUSIVE
    allowed = audit("run", "--allow", "inconclusive", "--json")
    assert allowed.code == ExitCode.PASS
    assert allowed.json["verdict"]["outcome"] == "INCONCLUSIVE"
    assert allowed.json["verdict"]["allowed"] == ["inconclusive"]
    (first,) = [
        one["comparison_id"]
        for one in Store(project / "store").comparisons()
        if one["comparison_id"] != allowed.json["verdict"]["comparison_id"]
    ]
    again = audit("gate", first, "--store", "store", "--allow", "inconclusive", "--json")
    assert again.code == ExitCode.PASS
    assert again.json["verdict"]["comparison_id"] == allowed.json["verdict"]["comparison_id"]


def test_nothing_to_evaluate_exits_5_and_captures_nothing(audit, project, models):
    write_config(project, models=models, rules="")
    assert "[[gate.rules]]" in audit("run").error
    write_config(project, models=models)
    done = audit("gate")
    assert done.code == ExitCode.NOTHING_EVALUATED
    assert "run `audit capture` first" in done.error
    assert not (project / "store").exists()


def test_without_an_approved_baseline_exits_5_before_anything_is_captured(audit, project, models):
    write_config(project, models=models, before="approved = true")
    for command in ("run", "gate"):
        done = audit(command)
        assert done.code == ExitCode.NOTHING_EVALUATED, done.err
        assert "approve" in done.error
        assert "[checkpoints.before] path" in done.error
    assert not list(project.glob("store/runs/*"))


def test_a_stored_run_that_is_missing_exits_14_before_anything_is_captured(audit, project, models):
    write_config(project, models=models, before='run = "run-0123456789ab"')
    done = audit("run")
    assert done.code == ExitCode.STORE
    assert "run-0123456789ab" in done.error
    assert not list(project.glob("store/runs/*"))


@pytest.mark.parametrize(
    "arguments",
    [("run", "--no-such-option"), ("gate", "--allow", "everything"), ("compare", "run-1"), ("fly",)],
)
def test_wrong_usage_exits_2_and_says_what_is_right(audit, arguments):
    done = audit(*arguments)
    assert done.code == ExitCode.USAGE
    assert done.out == ""
    assert "Traceback" not in done.err


def test_a_bug_exits_1_with_its_traceback(audit, project, monkeypatch):
    def broken(path: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("audit.config.load_config", broken)
    done = audit("run")
    assert done.code == ExitCode.BUG
    assert "ZeroDivisionError: a bug" in done.err
    assert "please report" in done.err


def test_an_interrupted_run_exits_130_says_how_to_go_on_and_goes_on(project, models):
    tiny.write_rows(project / "probes.jsonl", tiny.text_rows(60))
    write_config(project, models=models, more="[capture]\nshard_probes = 6\n")
    environment = {**os.environ, "PYTHONPATH": str(tiny.ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "audit", "run"]
    process = subprocess.Popen(
        command, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not list(project.glob("store/runs/run-*/staged/0*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED, err
    assert out == ""
    assert "run the same command again to resume" in err
    assert Store(project / "store").run_ids() == []
    done = tiny.run_command("run", "--json", cwd=project)
    assert done.code == ExitCode.FAIL, done.err
    assert json.loads(done.out)["comparison"]["n_probes"] == 60


# --- start-up -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["gate", "report", "list"])
def test_commands_of_a_gate_job_load_nothing_heavy(machine, command):
    write_config(machine, after=f'run = "{run_of(machine, "benign")}"', rules=EXCESS, more=FLOOR)
    comparison = gate_there(machine, "--json").json["verdict"]["comparison_id"]
    arguments = {
        "gate": ["audit.toml"],
        "report": [comparison, "--store", "store"],
        "list": ["--store", "store"],
    }
    code = (
        "import sys, runpy; sys.argv = ['audit', *sys.argv[1:]]\n"
        "import atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        "from audit.cli import main; main()"
    )
    done = tiny.run_command(command, *arguments[command], cwd=machine, python=("-c", code))
    assert done.code == 0, done.err
    loaded = {name.partition(".")[0] for name in done.err.split()} | set(done.err.split())
    assert not loaded & {*ABSENT, "pandas", "scipy.stats", "duckdb", "polars"}
