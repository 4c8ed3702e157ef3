"""Model selection: two different models on the same probes, with other tokenizers and patch grids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from audit.errors import ExitCode
from audit.store import Store
from tests import tiny_audits as tiny
from tests.integration import tiny_models
from tests.tiny_audits import LIMIT, write_config

WHOLE = '[[gate.rules]]\nregion = "*"\nmeasure = "{measure}"\nkind = "{kind}"\n{bound}\n'
WORDS = "aligned on words that no token of any run crosses"


JUDGED = (
    ("js_distance", "limit", "fail = 0.9"),
    ("entropy_change", "limit", "fail = 0.9"),
    ("spearman", "limit", "fail = -0.9"),
    ("js_distance", "excess", "within = 0.5"),
)


def rules(*wanted: tuple[str, str, str]) -> str:
    quiet = "[report]\nconfirm = false\n"
    return quiet + "".join(WHOLE.format(measure=m, kind=k, bound=b) for m, k, b in wanted)


@pytest.fixture(scope="module")
def selection(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a decoder of two layers that reads bytes, where the family reads words."""
    folder = tmp_path_factory.mktemp("selection")
    tiny.save(tiny_models.text_checkpoint("qwen2", num_hidden_layers=2), folder / "other")
    tiny.write_rows(folder / "probes.jsonl", tiny.text_rows())
    more = '[[replicates]]\npath = "{models}/seed-[123]"\n'
    write_config(folder, models=models, after='path = "./other"', rules=rules(*JUDGED), more=more)
    excess = '[[gate.rules]]\nregion = "opinion"\nkind = "excess"\nwithin = 0.02\n'
    write_config(folder, models=models, after='path = "./other"', rules=excess, name="alone.toml")
    return folder


def test_models_with_other_tokenizers_are_compared_on_words(audit, selection):
    done = audit("run", selection / "audit.toml", "--json", "--html", selection / "report.html")
    assert done.code == ExitCode.INCONCLUSIVE, done.err  # what re-training moves one model says nothing here
    assert [rule["outcome"] for rule in done.json["rules"]] == ["PASS", "PASS", "PASS", "INCONCLUSIVE"]
    assert "replicates of one say nothing about the other" in done.json["rules"][3]["reason"]
    assert done.json["rules"][3]["excess"] is None
    assert [rule["n_probes"] for rule in done.json["rules"]] == [24] * 4
    told = done.json["comparison"]["alignment"]
    assert WORDS in told[0]
    assert "3 and 2 layers" in told[1]
    page = (selection / "report.html").read_text()
    assert WORDS in page
    assert "JS distance of the maps" in page  # examples are drawn on the words
    identifier = done.json["verdict"]["comparison_id"]
    comparison = Store(selection / "store").comparison(identifier)
    assert not [cell for cell in comparison.cells if cell.layer is not None]
    assert all(0 < one < 0.1 for one in next(comparison.find("*", "js_distance")).replicates)
    assert audit("verify", identifier, "--store", selection / "store").code == 0
    table = Store(selection / "store").comparison_probes(identifier)
    rows = table.filter(table["region"] == "opinion")
    assert (np.abs(rows["shift"]) <= np.sqrt(2 * np.log(2)) * rows["js_distance"]).all()  # Pinsker


def test_without_replicates_an_excess_rule_on_another_model_stays_open(audit, selection):
    done = audit("run", selection / "alone.toml", "--json")
    assert done.code == ExitCode.INCONCLUSIVE
    assert done.json["rules"][0]["needed"] == "a limit rule instead"


def test_vision_models_with_other_patches_are_compared_on_a_common_grid(audit, tmp_path):
    crop = tiny_models.image_processor(
        size={"height": 40, "width": 40}, do_center_crop=True, crop_size={"height": 36, "width": 36}
    )
    small = tiny_models.vision_checkpoint("vit", patch_size=6, image_size=36, processor=crop)
    tiny.save(tiny_models.vision_checkpoint("vit"), tmp_path / "base")
    tiny.save(small, tmp_path / "small")
    tiny.write_images(tmp_path / "images")
    judged = rules(("js_distance", "limit", "fail = 0.9"), ("earth_mover_distance", "limit", "fail = 0.9"))
    write_config(
        tmp_path,
        before='path = "./base"',
        after='path = "./small"',
        probes='path = "images"',
        regions="corner = { box = [0.75, 0.75, 1.0, 1.0] }\n",
        rules=judged + LIMIT.format(fail=0.9).replace("opinion", "corner"),
    )
    done = audit("run", "--json")
    assert done.code == ExitCode.PASS, done.err
    assert "a common patch grid" in done.json["comparison"]["alignment"][0]
    assert [rule["n_probes"] for rule in done.json["rules"]] == [20] * 3
    comparison = Store(tmp_path / "store").comparison(done.json["verdict"]["comparison_id"])
    assert {cell.layer for cell in comparison.cells} == {None, 0, 1, 2}  # equally many layers
    assert audit("verify", "--store", "store").code == 0


def test_maps_that_do_not_know_where_they_lie_are_refused_with_a_remedy(audit, project, models):
    places = {f"r-{i}": np.full(5, 0.2) for i in range(24)}
    np.savez(project / "five.npz", **places)
    np.savez(project / "six.npz", **{name: np.full(6, 1 / 6) for name in places})
    regions = "opening = { quantile = [0.0, 0.25] }\n"
    write_config(
        project, models=models, regions=regions, rules=LIMIT.format(fail=0.1).replace("opinion", "*")
    )
    names = [
        audit("import", f"{name}.npz", "--name", name, "--config", "audit.toml").out.strip()
        for name in ("five", "six")
    ]
    done = audit("compare", *names, "--store", "store")
    assert done.code == ExitCode.PROBES
    assert "cannot be aligned (positions: expected character spans of the tokens, got none)" in done.error
    assert "import maps with starts and ends" in done.error
