"""Audits of models whose decoder attends to the image, by every method that runs there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from audit.errors import ExitCode
from audit.store import Store
from tests import tiny_audits as tiny
from tests.integration import tiny_image_text

METHODS = {
    "rollout": "start_layer = 1",
    "raw_attention": "layer = 0",
    "per_head_rollout": "head = 1",
    "gradient_rollout": "",
}
ASKED = 'opinion = { terms = ["good", "bad"] }\nleft = { box = [0, 0, 0.5, 1] }\n'
RULES = '[[gate.rules]]\nregion = "left"\nkind = "limit"\nfail = 0.0001\n'


@pytest.fixture(scope="module")
def blip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base model, one whose weights were moved, and probes."""
    folder, draw = tmp_path_factory.mktemp("blip"), np.random.default_rng(0)
    tiny.save(tiny_image_text.blip(), folder / "base")
    tiny.save(tiny_image_text.blip(), folder / "shifted", seed=13, noise=0.4)
    rows = tiny.text_rows(4)
    for i, row in enumerate(rows):
        Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        row |= {"image": f"{i}.png", "label": None}
    tiny.write_rows(folder / "probes.jsonl", rows)
    return folder


@pytest.mark.parametrize("name", METHODS)
def test_a_captioner_is_audited_by_its_cross_attention(
    audit: Any, blip: Path, tmp_path: Path, name: str
) -> None:
    config = tiny.write_config(
        tmp_path,
        models=blip,
        probes=f'path = "{blip}/probes.jsonl"\ntarget = "good"',
        regions=ASKED,
        rules=RULES + "[gate]\nmin_probes = 2\n",
        more=f'[method]\nname = "{name}"\n{METHODS[name]}\n[report]\nconfirm = false\n',
    )
    done = audit("run", config, "--json", "--html", tmp_path / "report.html")
    assert done.code in (ExitCode.FAIL, ExitCode.INCONCLUSIVE), done.err
    (rule,) = done.json["rules"]
    assert (rule["stream"], rule["n_probes"]) == ("image", 4)
    assert rule["value"] != 0
    store = Store(tmp_path / "store")
    for one in store.runs():
        for stream in ("image", "text"):
            found = store.map_of(one["run_id"], "r-0", stream)
            assert found.weights.sum() == pytest.approx(1, abs=1e-5)
    assert "JS distance of the maps of the image" in (tmp_path / "report.html").read_text()
