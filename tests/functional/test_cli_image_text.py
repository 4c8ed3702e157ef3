"""Audits of models that read an image with text through the command, by every method that is theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from audit.errors import ExitCode
from audit.records import Checkpoint
from audit.store import Store
from tests import tiny_audits as tiny
from tests.integration import tiny_image_text

METHODS = (
    ("rollout", "start_layer = 1"),
    ("rollout", 'residual = "measured"'),
    ("raw_attention", "layer = 0"),
    ("per_head_rollout", "head = 1"),
    ("gradient_rollout", ""),
    ("attention_flow", ""),
    ("norms", ""),
    ("alti", ""),
)
ATTRIBUTED = {
    "shap": "samples = 2",
    "lime": "samples = 8",
    "grad_cam": "layer = 0",
    "lrp": "",
}
ASKED = 'opinion = { terms = ["good", "bad"] }\nleft = { box = [0, 0, 0.5, 1] }\n'
RULES = '[[gate.rules]]\nregion = "left"\nkind = "limit"\nfail = 0.0001\n'


def saved(folder: Path, make: Callable[[], Checkpoint]) -> Path:
    """Return a folder with a base model, one whose weights were moved, and probes."""
    draw = np.random.default_rng(0)
    tiny.save(make(), folder / "base")
    tiny.save(make(), folder / "shifted", seed=13, noise=0.4)
    rows = tiny.text_rows(4)
    for i, row in enumerate(rows):
        Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        row |= {"image": f"{i}.png", "label": None}
    tiny.write_rows(folder / "probes.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def blip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("blip"), tiny_image_text.blip)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llava"), tiny_image_text.llava)


@pytest.mark.parametrize(("name", "parameter"), METHODS)
def test_a_captioner_is_audited_by_its_cross_attention(
    audit: Any, blip: Path, tmp_path: Path, name: str, parameter: str
) -> None:
    check_audited(audit, blip, tmp_path, f'name = "{name}"\n{parameter}', "good")


@pytest.mark.parametrize("name", ATTRIBUTED)
def test_a_model_with_the_image_among_its_text_is_audited_by_attributions(
    audit: Any, llava: Path, tmp_path: Path, name: str
) -> None:
    check_audited(audit, llava, tmp_path, f'name = "{name}"\n{ATTRIBUTED[name]}', "a")


def check_audited(audit: Any, models: Path, tmp_path: Path, method: str, target: str) -> None:
    config = tiny.write_config(
        tmp_path,
        models=models,
        probes=f'path = "{models}/probes.jsonl"\ntarget = "{target}"',
        regions=ASKED,
        rules=RULES + "[gate]\nmin_probes = 2\n",
        more=f"[method]\n{method}\n[report]\nconfirm = false\n",
    )
    done = audit("run", config, "--json", "--html", tmp_path / "report.html")
    assert done.code in (ExitCode.FAIL, ExitCode.INCONCLUSIVE), done.err
    (rule,) = done.json["rules"]
    assert rule["stream"] == "image"
    assert rule["n_probes"] >= (2 if "grad_cam" in method else 3)  # Grad-CAM may have no map of a probe
    assert rule["value"] != 0
    store = Store(tmp_path / "store")
    for one in store.runs():
        for stream in ("image", "text"):
            found = store.map_of(one["run_id"], "r-0", stream)
            assert found.weights.sum() == pytest.approx(1, abs=1e-5)
    assert "JS distance of the maps of the image" in (tmp_path / "report.html").read_text()


def test_init_writes_an_audit_of_a_model_that_answers_questions_with_a_label(
    audit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, tiny_image_text.vilt)
    monkeypatch.chdir(tmp_path)
    found = audit("init", "base", "probes.jsonl", "--after", "shifted", "--json")
    assert (found.code, found.json["task"]) == (0, "visual-question-answering"), found.err
    done = audit("run", "--json")
    assert done.code in (ExitCode.PASS, ExitCode.FAIL, ExitCode.INCONCLUSIVE), done.err
    runs = Store("data/store").runs()
    assert len(runs) == 2
    kept = Store("data/store").predictions(runs[0]["run_id"])
    assert set(kept["predicted"].to_list()) <= {"LABEL_0", "LABEL_1", "LABEL_2"}
