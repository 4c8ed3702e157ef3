"""Whole audits of other kinds: images, text pairs, groups, segments, second probe sets, language models."""

import re
from pathlib import Path

import pytest

from audit.config import load_config
from audit.errors import CheckpointError, ConfigError, NothingEvaluatedError
from audit.pipeline import plan_audit, plan_sensitivity, run_audit
from audit.records import Outcome
from audit.report import to_html
from audit.store import Store
from tests import tiny_audits as tiny
from tests.integration import tiny_models
from tests.tiny_audits import LIMIT, write_config

IMAGE_REGIONS = "corner = { box = [0.75, 0.75, 1.0, 1.0] }\ncentre = { box = [0.25, 0.25, 0.75, 0.75] }\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.bert(folder / "base")
    tiny.bert(folder / "shifted", seed=13, noise=0.4)
    tiny.save(tiny_models.vision_checkpoint("vit"), folder / "vit")
    tiny.save(tiny_models.vision_checkpoint("vit"), folder / "vit-shifted", seed=13, noise=0.5)
    tiny.save(tiny_models.text_checkpoint("gpt2"), folder / "gpt2")
    tiny.save(tiny_models.text_checkpoint("gpt2"), folder / "gpt2-shifted", seed=13, noise=0.4)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    tiny.write_rows(tmp_path / "probes.jsonl", tiny.text_rows())
    return tmp_path


def audited(path: Path):
    """Return verdict and comparison of a configuration."""
    config = load_config(path)
    verdict = run_audit(config)
    return verdict, Store(config.store.url).comparison(str(verdict.comparison_id))


def shift(comparison, region: str, **where):
    (cell,) = comparison.find(region, "shift", **{"effect": "model", **where})
    return cell


def test_images_are_audited_by_boxes_and_confirmed_by_occlusion(project, models):
    tiny.write_images(project / "images")
    images = {
        "models": models,
        "before": 'path = "{models}/vit"',
        "after": 'path = "{models}/vit-shifted"',
        "probes": 'path = "images"',
        "regions": IMAGE_REGIONS,
        "rules": LIMIT.format(fail=0.001).replace("opinion", "corner"),
    }
    verdict, comparison = audited(write_config(project, **images))
    assert verdict.outcome is Outcome.FAIL
    assert shift(comparison, "corner").n_probes == 20
    assert [one.region for one in comparison.confirmations] == ["corner"]
    assert comparison.predictions["n"] == 20
    again, blurred = audited(write_config(project, **images, more='[report]\nocclusion = "blur"\n'))
    assert again.comparison_id != verdict.comparison_id
    kinds = [one.confirmations[0].occlusion for one in (comparison, blurred)]
    assert kinds == ["mean colour", "blur"]


def without_head(models: Path, folder: Path, name: str) -> Path:
    import transformers

    whole = transformers.AutoModelForSequenceClassification.from_pretrained(models / name)
    whole.bert.save_pretrained(folder / name)
    transformers.AutoTokenizer.from_pretrained(models / name).save_pretrained(folder / name)
    return folder / name


def test_an_encoder_without_a_head_says_why_nothing_was_confirmed(project, models):
    for name in ("base", "shifted"):
        without_head(models, project / "encoders", name)
    verdict, comparison = audited(write_config(project, models="encoders"))
    assert verdict.outcome is Outcome.FAIL
    assert comparison.confirmations == ()
    (note,) = verdict.notes
    assert note.startswith("Not confirmed by occlusion (opinion): the checkpoint has no task head")
    assert not re.search(r"(?i)<dt>\s*occlusion\s*<", to_html(comparison, verdict))
    again, _ = audited(project / "audit.toml")
    assert again.notes == verdict.notes


def test_labels_that_are_no_classes_say_why_nothing_was_confirmed(project, models):
    tiny.write_rows(project / "probes.jsonl", tiny.text_rows(label="no such class"))
    verdict, _ = audited(write_config(project, models=models))
    (note,) = verdict.notes
    assert "no target logit to watch" in note
    assert "no such class" in note


def test_texts_for_an_image_classifier_are_refused_without_a_word_on_their_labels(project, models, caplog):
    tiny.write_rows(project / "probes.jsonl", tiny.text_rows(label="no such class"))
    pair = {"before": 'path = "{models}/vit"', "after": 'path = "{models}/vit-shifted"'}
    with (
        caplog.at_level("WARNING", logger="audit"),
        pytest.raises(CheckpointError, match="has no tokenizer but the probes are text"),
    ):
        audited(write_config(project, models=models, **pair))
    assert caplog.records == []


def test_labels_that_are_no_classes_are_told_once_and_count_in_no_accuracy(project, models, caplog):
    rows = tiny.text_rows()
    wrong = [{**row, "label": "good" if i < 6 else row["label"]} for i, row in enumerate(rows)]
    tiny.write_rows(project / "probes.jsonl", wrong)
    with caplog.at_level("WARNING", logger="audit"):
        _, comparison = audited(write_config(project, models=models))
    (line,) = [record.getMessage() for record in caplog.records if "no class" in record.getMessage()]
    assert line.startswith("6 of 24 labels in probes.jsonl are no class of ")
    assert "('good'; its classes are negative, positive, neutral)" in line
    predicted = Store(project / "store").predictions(comparison.before.run_id)["predicted"].to_list()
    right = [row["label"] == one for row, one in zip(rows[6:], predicted[6:], strict=True)]
    assert comparison.predictions["accuracy_before"] == pytest.approx(sum(right) / 18)
    assert comparison.predictions["probes_with_a_known_label"] == 18


def test_text_pairs_have_regions_in_each_part(project, models):
    rows = [
        {
            **row,
            "text_pair": "she liked the plot",
            "regions": {"claim": {"text": [[0, 3]], "text_pair": [[0, 9]]}},
        }
        for row in tiny.text_rows()
    ]
    tiny.write_rows(project / "probes.jsonl", rows)
    verdict, comparison = audited(
        write_config(
            project, models=models, regions="", rules=LIMIT.replace("opinion", "claim").format(fail=0.02)
        )
    )
    assert verdict.rules[0].region == "claim"
    assert shift(comparison, "claim").n_probes == 24
    positions = Store(project / "store").map_of(comparison.before.run_id, "r-0").positions
    assert set(positions.parts[~positions.special]) == {0, 1}


def test_a_probe_without_a_group_is_a_group_of_its_own_everywhere(project, models):
    rows = [{**row, **({"group": f"g-{i % 4}"} if i < 16 else {})} for i, row in enumerate(tiny.text_rows())]
    tiny.write_rows(project / "probes.jsonl", rows)
    path = write_config(project, models=models)
    (planned,) = plan_sensitivity(load_config(path)).rules  # nothing is stored yet
    _, comparison = audited(path)
    assert shift(comparison, "opinion").n_clusters == comparison.n_clusters == planned.spread.units == 4 + 8
    tiny.write_rows(project / "domain.jsonl", [{**row, "group": "one"} for row in tiny.text_rows(6)])
    more = '[domain]\npath = "domain.jsonl"\n'
    _, comparison = audited(write_config(project, models=models, after=None, more=more))
    assert shift(comparison, "opinion", effect="data").n_clusters == comparison.n_clusters == 1


def test_groups_are_the_unit_and_segments_have_rules_of_their_own(project, models):
    rows = [
        {**row, "group": f"g-{i % 8}", "segments": {"source": ("web", "shop")[i % 2]}}
        for i, row in enumerate(tiny.text_rows(48))
    ]
    tiny.write_rows(project / "probes.jsonl", rows)
    rules = LIMIT.format(fail=0.02) + LIMIT.format(fail=0.02) + 'segment = "source=web"\n'
    verdict, comparison = audited(write_config(project, models=models, rules=rules))
    assert comparison.n_clusters == 8
    assert shift(comparison, "opinion", segment=None).n_clusters == 8
    assert shift(comparison, "opinion", segment="source=web").n_probes == 24
    assert [rule.outcome for rule in verdict.rules] == [Outcome.FAIL, Outcome.INCONCLUSIVE]


def domain_rows(count: int = 24):
    rows = tiny.text_rows(count)
    return [{**row, "id": f"d-{i}", "text": f"the acting, {row['text']}"} for i, row in enumerate(rows)]


def test_a_replicate_plays_on_both_probe_sets(project, models):
    tiny.write_rows(project / "domain.jsonl", domain_rows())
    tiny.bert(project / "seed-1", seed=1, noise=0.002)
    more = '[domain]\npath = "domain.jsonl"\n[[replicates]]\npath = "seed-1"\nkind = "seed"\n'
    plans = plan_audit(load_config(write_config(project, models=models, more=more)))
    roles = ("before", "after", "replicate-0")
    assert {plan.role for plan in plans} == {*roles, *(f"{role}@domain" for role in roles)}


def test_one_checkpoint_on_two_probe_sets_is_a_domain_audit(project, models):
    tiny.write_rows(project / "domain.jsonl", domain_rows())
    domain = '[domain]\npath = "domain.jsonl"\n'
    verdict, comparison = audited(write_config(project, models=models, after=None, more=domain))
    assert comparison.kind == "unpaired"
    assert comparison.same_weights is None
    assert shift(comparison, "opinion", effect="data").value != 0
    assert verdict.outcome in (Outcome.FAIL, Outcome.PASS, Outcome.INCONCLUSIVE)
    assert len(Store(project / "store").run_ids()) == 2
    same = '[domain]\npath = "probes.jsonl"\n'
    with pytest.raises(NothingEvaluatedError, match="the same"):
        run_audit(load_config(write_config(project, models=models, after=None, more=same)))


def test_two_checkpoints_on_two_probe_sets_tell_model_from_data(project, models):
    tiny.write_rows(project / "domain.jsonl", domain_rows())
    more = '[domain]\npath = "domain.jsonl"\n'
    verdict, comparison = audited(write_config(project, models=models, more=more))
    found = {
        effect: shift(comparison, "opinion", effect=effect).value
        for effect in ("model", "data", "model_on_domain", "interaction")
    }
    assert found["interaction"] == pytest.approx(found["model_on_domain"] - found["model"], abs=1e-9)
    assert len(Store(project / "store").run_ids()) == 4
    assert verdict.rules


def test_stored_runs_play_their_roles_on_both_probe_sets(project, models):
    tiny.write_rows(project / "domain.jsonl", domain_rows())
    more = '[domain]\npath = "domain.jsonl"\n'
    first, comparison = audited(write_config(project, models=models, more=more))
    before, after = comparison.before.run_id, comparison.after.run_id
    second, _ = audited(
        write_config(project, before=f'run = "{before}"', after=f'run = "{after}"', more=more)
    )
    assert second.comparison_id == first.comparison_id


def test_a_floor_is_refused_beside_a_second_probe_set(project, models):
    from audit.pipeline import freeze_config_floor

    tiny.bert(project / "seed-1", seed=1, noise=0.002)
    replicates = '[[replicates]]\npath = "seed-1"\n'
    config = load_config(write_config(project, models=models, more=replicates))
    run_audit(config, confirm=False)
    freeze_config_floor(config, project / "floor.json")
    tiny.write_rows(project / "domain.jsonl", domain_rows())
    more = '[[replicates]]\nfloor = "floor.json"\n[domain]\npath = "domain.jsonl"\n'
    with pytest.raises(ConfigError, match="second probe set"):
        run_audit(load_config(write_config(project, models=models, more=more)))


def test_causal_language_models_keep_their_first_position_apart(project, models):
    verdict, comparison = audited(
        write_config(
            project, models=models, before='path = "{models}/gpt2"', after='path = "{models}/gpt2-shifted"'
        )
    )
    assert shift(comparison, "first").n_probes == 24
    assert verdict.rules[0].region == "opinion"
