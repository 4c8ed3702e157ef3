"""`audit init`: what it infers, and that the file it writes runs as it is."""

import csv
import tomllib
from pathlib import Path

import pytest

from audit.config import load_config
from audit.errors import ExitCode
from tests import tiny_audits as tiny
from tests.integration import tiny_models


def test_text_in_columns_of_another_name(audit, project, models):
    rows = [
        {
            "idx": str(i),
            "sentence": row["text"],
            "sentiment": row["label"],
            "source": ("web", "shop")[i % 2],
            "n": i,
        }
        for i, row in enumerate(tiny.text_rows())
    ]
    tiny.write_rows(project / "sst.jsonl", rows)
    done = audit("init", models / "base", "sst.jsonl", "--after", models / "shifted", "--json")
    assert done.code == 0, done.err
    assert done.json["task"] == "sequence-classification"
    assert done.json["config"] == "audit.toml"
    columns = load_config("audit.toml").probes.columns
    assert columns == {"text": "sentence", "label": "sentiment", "id": "idx", "segments.source": "source"}
    run = audit("run", "--json")
    assert run.code in (ExitCode.FAIL, ExitCode.INCONCLUSIVE), run.err
    assert {cell["segment"] for cell in run.json["comparison"]["cells"]} >= {None, "source=web"}


def test_one_checkpoint_runs_at_once_and_passes_as_the_same_checkpoint(audit, project, models):
    done = audit("init", models / "base", "probes.jsonl", "--out", "configs/mine.toml")
    assert done.code == 0, done.err
    assert "sequence-classification" in done.out
    run = audit("run", "configs/mine.toml")
    assert run.code == ExitCode.PASS, run.err
    assert "same checkpoint" in " ".join(run.out.lower().split())
    assert (project / "configs" / "data" / "store").is_dir()


def test_replicates_add_excess_rules(audit, project, models):
    arguments = ("--after", models / "shifted", "--replicates", f"{models}/seed-*")
    assert audit("init", models / "base", "probes.jsonl", *arguments).code == 0
    config = load_config("audit.toml")
    assert {rule.kind for rule in config.gate.rules} == {"limit", "excess"}
    assert len(config.replicates) == 5
    assert audit("run").code == ExitCode.FAIL


def test_text_pairs_of_a_csv_file(audit, project, models):
    with (project / "nli.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["premise", "hypothesis", "label"])
        for row in tiny.text_rows():
            writer.writerow([row["text"], "she liked the plot", row["label"]])
    assert audit("init", models / "base", "nli.csv").code == 0
    assert load_config("audit.toml").probes.columns == {"text": "premise", "text_pair": "hypothesis"}
    assert audit("run").code == ExitCode.PASS


def test_a_folder_of_images(audit, project):
    tiny.write_images(project / "images")
    tiny.save(tiny_models.vision_checkpoint("vit"), project / "vit")
    done = audit("init", "vit", "images", "--json")
    assert done.code == 0, done.err
    assert done.json["task"] == "image-classification"
    assert done.json["probes"] == "20 of image"
    assert {"corner", "centre", "quarter"} == set(load_config("audit.toml").regions)
    assert audit("run").code == ExitCode.PASS


def test_a_causal_language_model_is_read_at_its_last_token(audit, project):
    tiny.save(tiny_models.text_checkpoint("gpt2"), project / "gpt2")
    done = audit("init", "gpt2", "probes.jsonl", "--json")
    assert (done.json["task"], done.json["row"]) == ("causal-lm", "auto: the last non-pad token")
    assert audit("run").code == ExitCode.PASS


@pytest.mark.parametrize(
    ("text", "row"), [("the film was [MASK] .", "auto"), ("the film was good .", "mean")]
)
def test_a_masked_language_model_is_read_at_its_mask_where_every_probe_has_one(audit, project, text, row):
    tokenizer = tiny_models.word_tokenizer()
    model = tiny_models.build("BertForMaskedLM", vocab_size=len(tokenizer), pad_token_id=0)
    tiny.save(tiny_models.checkpoint(model, tokenizer), project / "mlm")
    texts = [row["text"] for row in tiny.text_rows()]
    tiny.write_rows(project / "probes.jsonl", [{"text": f"{one} {text}"} for one in texts])
    done = audit("init", "mlm", "probes.jsonl")
    assert done.code == 0, done.err
    assert load_config("audit.toml").method.row == row
    run = audit("run")
    assert run.code == ExitCode.PASS, run.err


def test_annotated_regions_get_the_rules(audit, project, models):
    rows = [{**row, "regions": {"opening": [[0, 3]], "he said": [[0, 2]]}} for row in tiny.text_rows()]
    tiny.write_rows(project / "probes.jsonl", rows)
    assert audit("init", models / "base", "probes.jsonl").code == 0
    rules = tomllib.loads(Path("audit.toml").read_text())["gate"]["rules"]
    assert [rule["region"] for rule in rules] == ["he said", "opening"]
    run = audit("run")
    assert run.code == ExitCode.PASS, run.err


def test_other_columns_are_left_out_when_nothing_needs_renaming(audit, project, models):
    tiny.write_rows(project / "probes.jsonl", [{**row, "score": 0.5} for row in tiny.text_rows()])
    assert audit("init", models / "base", "probes.jsonl").code == 0
    assert load_config("audit.toml").probes.columns == {"text": "text"}
    assert audit("run").code == ExitCode.PASS


def test_an_existing_file_is_not_overwritten_without_being_told(audit, project, models):
    (project / "audit.toml").write_text("mine")
    done = audit("init", models / "base", "probes.jsonl")
    assert done.code == ExitCode.CONFIG
    assert "audit.toml exists; pass --force" in done.error
    assert (project / "audit.toml").read_text() == "mine"
    assert audit("init", models / "base", "probes.jsonl", "--force").code == 0


@pytest.mark.parametrize(
    ("model", "probes"), [("nowhere/at/all", "probes.jsonl"), ("{models}/base", "absent.jsonl")]
)
def test_nothing_is_written_for_what_cannot_be_read(audit, project, models, model, probes):
    done = audit("init", model.format(models=models), probes, "--out", "new/audit.toml")
    assert done.code in (ExitCode.CHECKPOINT, ExitCode.PROBES)
    assert done.error
    assert not (project / "new").exists()


def test_probes_that_the_model_does_not_read_are_refused(audit, project, models):
    tiny.write_images(project / "images")
    done = audit("init", models / "base", "images")
    assert done.code == ExitCode.PROBES
    assert "images holds image but BertForSequenceClassification reads text" in done.error
    assert not (project / "audit.toml").exists()
