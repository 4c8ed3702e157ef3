"""What importing loads: gates run where torch is absent, and start fast."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torch",
    "transformers",
    "peft",
    "scipy.stats",
    "polars",
    "prefect",
    "streamlit",
    "duckdb",
    "pyarrow",
)
PURE = (
    "records",
    "errors",
    "serialize",
    "metrics",
    "regions",
    "agreement",
    "alignment",
    "faithfulness",
    "statistics.sensitivity",
    "statistics.changes",
    "statistics.domain",
    "compare",
    "calibrate",
    "verdicts.rules",
    "gate",
    "report",
)


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(statement: str) -> set[str]:
    """Return which heavy modules are loaded after `statement` in a fresh interpreter."""
    return set(
        run_python(f"import sys; {statement}; print(*(m for m in {HEAVY} if sys.modules.get(m)))").split()
    )


def test_import_audit_loads_nothing_heavy():
    assert loaded_by("import audit; dir(audit)") == set()


def test_import_of_the_command_line_loads_nothing_heavy():
    assert loaded_by("import audit.cli") == set()


def test_what_a_gate_needs_runs_where_torch_is_absent_and_loads_no_slow_statistics():
    absent = ("torch", "transformers", "peft", "prefect", "streamlit")
    modules = (
        "audit.pipeline, audit.models, audit.probes, audit.store, audit.report, audit.gate, audit.config"
    )
    slow = loaded_by(f"sys.modules.update(dict.fromkeys({absent})); import {modules}")
    assert slow <= {"duckdb", "pyarrow"}


def test_pure_modules_import_where_torch_and_databases_are_absent():
    blocked = (
        "torch",
        "transformers",
        "peft",
        "duckdb",
        "pyarrow",
        "polars",
        "pandas",
        "prefect",
        "streamlit",
    )
    run_python(
        "import sys, importlib\n"
        f"sys.modules.update(dict.fromkeys({blocked}))\n"
        f"for name in {PURE}: importlib.import_module('audit.' + name)\n"
    )


def test_public_names_load_their_own_module_only():
    assert loaded_by("import audit; audit.js_distance; audit.evaluate_gate; audit.load_checkpoint") == set()
