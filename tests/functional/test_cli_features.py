"""Audits of a model that reads an image as features of a detector's boxes, from probe file to report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from audit.capture import capture
from audit.capture.pairs.methods import methods_of
from audit.errors import ExitCode, ProbeError
from audit.models import load_checkpoint
from audit.probes import read_probes
from audit.records import Probe
from audit.store import Store
from tests import tiny_audits as tiny
from tests.integration import test_co_attention as co_attention

REGIONS = 6
ASKED = 'opinion = { terms = ["good", "bad"] }\nleft = { box = [0, 0, 0.5, 1] }\n'
RULES = (
    '[[gate.rules]]\nregion = "left"\nkind = "limit"\nfail = 0.0001\n'
    '[[gate.rules]]\nregion = "opinion"\nkind = "limit"\nfail = 0.9\n'
)


def boxes_of(shift: float) -> Any:
    """Return boxes in three columns and two rows, which overlap a little."""
    columns, rows = np.meshgrid(np.arange(3) / 3, np.arange(2) / 2)
    left, top = columns.flatten() * (1 - shift), rows.flatten()
    return np.stack([left, top, np.minimum(left + 0.4, 1), top + 0.5], axis=1)


def write_probes(folder: Path, *, count: int = 20, size: int = 16) -> Path:
    """Write probes with an image and features beside them; every third has one region less."""
    draw, rows = np.random.default_rng(0), tiny.text_rows(count)
    for i, row in enumerate(rows):
        boxes = boxes_of(0.02 * (i % 3))[: REGIONS - (i % 3 == 0)]
        np.savez(folder / f"{i}.npz", features=draw.standard_normal((len(boxes), size)), boxes=boxes)
        Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        row |= {"features": f"{i}.npz", "image": f"{i}.png", "label": str(i % 5)}
        row["regions"] = {"thing": {"box": [0.5, 0.5, 1.0, 1.0]}}
    return tiny.write_rows(folder / "probes.jsonl", rows)


@pytest.fixture(scope="module")
def lxmert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base model and one whose weights were moved."""
    folder = tmp_path_factory.mktemp("lxmert")
    tiny.save(co_attention.lxmert(), folder / "base")
    tiny.save(co_attention.lxmert(), folder / "shifted", seed=13, noise=0.4)
    return folder


def configured(folder: Path, models: Path, method: str = "rollout", **changes: Any) -> Path:
    given = {"shap": "samples = 2\n", "lime": "samples = 8\n", "integrated_gradients": "steps = 8\n"}
    more = f'[method]\nname = "{method}"\n{given.get(method, "")}[report]\ncontent = "excerpt"\n'
    return tiny.write_config(folder, models=models, regions=ASKED, rules=RULES, more=more, **changes)


@pytest.mark.parametrize("name", ["rollout", "attention_flow", "gradient_rollout", "alti", "occlusion"])
def test_an_audit_judges_both_streams_and_reports_them(
    audit: Any, lxmert: Path, tmp_path: Path, name: str
) -> None:
    probes = write_probes(tmp_path)
    config = configured(tmp_path, lxmert, name)
    done = audit("run", config, "--json", "--html", tmp_path / "report.html")
    assert done.code in (ExitCode.FAIL, ExitCode.INCONCLUSIVE), done.err
    rules = {rule["region"]: rule for rule in done.json["rules"]}
    assert {name: rule["stream"] for name, rule in rules.items()} == {"left": "image", "opinion": "text"}
    assert rules["left"]["n_probes"] == 20
    page = (tmp_path / "report.html").read_text()
    assert "JS distance of the maps of the image" in page
    assert "JS distance of the maps of the text" in page
    assert "% across" in page
    assert "data:image/png;base64" in page  # the image behind the boxes

    store = Store(tmp_path / "store")
    (run,) = [one["run_id"] for one in store.runs() if one["spec"]["checkpoint"]["ref"].endswith("base")]
    subject, probe = load_checkpoint(str(lxmert / "base")), read_probes(probes).probes[3]
    method = store.spec(run).method
    (captured,) = capture(subject, [probe], method=method, target=probe.label)
    stored = store.map_of(run, probe.id, "image")
    np.testing.assert_allclose(stored.weights, captured.maps[1].weights, atol=1e-6)
    assert stored.positions.boxes is not None
    np.testing.assert_allclose(stored.positions.boxes, boxes_of(0)[:5], atol=1e-6)
    inside = np.clip(0.5 - boxes_of(0)[:5, 0], 0, 0.4) / (boxes_of(0)[:5, 2] - boxes_of(0)[:5, 0])
    reliance = store.reliance(run).filter(probe_id=probe.id, region="left", stream="image")
    assert reliance["share"].item() == pytest.approx(float(stored.weights @ inside), abs=1e-5)


@pytest.mark.parametrize("name", methods_of("co-attention"))
def test_every_method_runs_on_few_probes(audit: Any, lxmert: Path, tmp_path: Path, name: str) -> None:
    write_probes(tmp_path, count=4)
    done = audit("run", configured(tmp_path, lxmert, name), "--json")
    assert done.code in (ExitCode.FAIL, ExitCode.INCONCLUSIVE), done.err
    for run in Store("store").runs():
        maps = Store("store").maps(run["run_id"])
        assert sorted(maps["stream"].unique()) == ["image", "text"]
        sums = [sum(row) for row in maps["weights"].to_list()]
        assert len(sums) == 8
        # Where nothing speaks for the target Grad-CAM has no map; a norm behind features that have no bias
        # leaves nothing of them to integrate.
        without = 0 if name not in ("grad_cam", "integrated_gradients") else sums.count(0.0)
        assert sorted(sums) == pytest.approx([0.0] * without + [1.0] * (8 - without), abs=1e-5)
        assert without <= 4


def test_text_alone_is_told_what_the_model_reads(lxmert: Path) -> None:
    with pytest.raises(ProbeError, match="reads an image as features of the boxes of a detector; give"):
        list(capture(load_checkpoint(str(lxmert / "base")), [Probe("p", text="was it good")]))


@pytest.mark.parametrize(
    ("change", "code", "why"),
    [
        (
            {"features": None},
            ExitCode.PROBES,
            "'left' is a box or a grid, and every probe is text alone",
        ),
        ({"features": "gone.npz"}, ExitCode.PROBES, "features 'gone.npz' does not exist in"),
        ({"features": "nan.npz"}, ExitCode.PROBES, "features hold NaN or infinite numbers"),
        ({"features": "wide.npz"}, ExitCode.PROBES, "have 8 numbers a region, the checkpoint takes 16"),
    ],
)
def test_probes_without_usable_features_are_refused_in_one_line(
    audit: Any, lxmert: Path, tmp_path: Path, change: dict[str, Any], code: int, why: str
) -> None:
    write_probes(tmp_path, count=2)
    np.savez(tmp_path / "nan.npz", features=np.full((6, 16), np.nan), boxes=boxes_of(0))
    np.savez(tmp_path / "wide.npz", features=np.ones((6, 8)), boxes=boxes_of(0))
    rows = [{"id": f"p-{i}", "text": "was it good", "features": "0.npz", **change} for i in range(2)]
    tiny.write_rows(tmp_path / "probes.jsonl", rows)
    done = audit("run", configured(tmp_path, lxmert))
    assert done.code == code, done.err
    assert why in done.error


def test_a_model_that_takes_no_features_says_so(audit: Any, models: Path, tmp_path: Path) -> None:
    write_probes(tmp_path, count=2)
    done = audit("run", configured(tmp_path, models))
    assert done.code == ExitCode.PROBES, done.err
    assert "has features of an image, but BertForSequenceClassification takes none" in done.error
