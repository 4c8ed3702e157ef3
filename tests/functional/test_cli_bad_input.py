"""Bad input: one clear line that says what, where and the remedy, the right exit code, an untouched store."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from audit import __version__
from audit.errors import ExitCode
from audit.store import Store
from tests import tiny_audits as tiny
from tests.integration import tiny_models
from tests.tiny_audits import Done, write_config


def refused(done: Done, code: ExitCode, folder: Path, *words: str) -> None:
    """Check the exit code, the one line, an empty stdout, and that the store holds nothing."""
    assert done.code == code, done.err
    assert done.out == ""
    missing = [word for word in words if word not in done.error]
    assert not missing, f"{missing} not in: {done.error}"
    assert not list((folder / "store").rglob("*")), "the store was written to"


@pytest.fixture
def damaged(models: Path, project: Path) -> Path:
    """Return a copy of the base that a test may damage; the configuration audits it."""
    write_config(project, models=models, after='path = "./damaged"')
    return Path(shutil.copytree(models / "base", project / "damaged"))


def test_a_missing_model_directory_is_named(audit, project, models):
    write_config(project, models=models, after='path = "./modles/after"')
    refused(audit("run"), ExitCode.CHECKPOINT, project, "modles/after", "no such directory", "mend")


def test_a_directory_without_weights_is_named(audit, project, damaged):
    (damaged / "model.safetensors").unlink()
    refused(audit("run"), ExitCode.CHECKPOINT, project, str(damaged), "no weights", "safetensors")


def test_a_missing_tokenizer_is_named(audit, project, damaged):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (damaged / name).unlink()
    refused(audit("run"), ExitCode.CHECKPOINT, project, str(damaged), "tokenizer", "save")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(audit, project, damaged, value):
    weights = load_file(damaged / "model.safetensors")
    name = next(key for key in weights if key.endswith("query.weight"))
    weights[name][0, 0] = value
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    write_config(project, before='path = "./damaged"', after='path = "./damaged"')
    refused(audit("run"), ExitCode.CHECKPOINT, project, str(damaged), name)


def test_a_missing_probe_file_is_named(audit, project, models):
    write_config(project, models=models, probes='path = "porbes.jsonl"')
    refused(audit("run"), ExitCode.PROBES, project, "porbes.jsonl", "does not exist", "mend")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("has no probes", "add at least one")),
        ("not json\n", ("line 1", "not JSON", "one JSON object a line")),
        ('{"id": "a", "text": "x"}\n{"id": "b", "txet": "y"}\n', ("line 2", "txet", "text")),
        ('{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}\n', ("line 2", "same id as line 1", "(a)")),
    ],
    ids=["empty", "no JSON", "unknown field", "duplicate id"],
)
def test_an_unusable_probe_file_is_named_with_its_line(audit, project, models, text, words):
    (project / "probes.jsonl").write_text(text)
    write_config(project, models=models)
    refused(audit("run"), ExitCode.PROBES, project, "probes.jsonl", *words)


def test_an_unreadable_probe_file_is_named(audit, project, models):
    (project / "probes.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    write_config(project, models=models)
    refused(audit("run"), ExitCode.PROBES, project, "probes.jsonl", "UTF-8")


def test_probes_longer_than_the_model_allows_are_all_named(audit, project, models):
    rows = tiny.text_rows()
    for i in (3, 17):
        rows[i]["text"] = "the film was good and " * 20
    tiny.write_rows(project / "probes.jsonl", rows)
    write_config(project, models=models)
    refused(audit("run"), ExitCode.PROBES, project, "2 of 24", "64 tokens", "r-3", "r-17", "truncate = true")


def test_longer_probes_are_cut_counted_and_recorded_where_that_is_allowed(audit, project, models):
    rows = tiny.text_rows()
    for i in (3, 17):
        rows[i]["text"] = "the film was good and " * 20
    tiny.write_rows(project / "probes.jsonl", rows)
    write_config(project, models=models, probes='path = "probes.jsonl"\ntruncate = true')
    done = audit("run", "--json")
    assert done.code == ExitCode.FAIL, done.err
    comparison = done.json["comparison"]
    assert comparison["predictions"]["truncated"] == 2
    assert any("2 of 24 probes" in note for note in done.json["context"]["notes"])
    stored = Store(project / "store").predictions(comparison["before"]["run_id"])
    assert stored.filter(stored["truncated"])["probe_id"].to_list() == ["r-3", "r-17"]


def test_regions_that_match_nothing_are_all_named(audit, project, models):
    regions = tiny.REGIONS + 'zebras = { terms = ["zebra"] }\ngnus = { terms = ["gnu"] }\n'
    write_config(project, models=models, regions=regions)
    refused(audit("run"), ExitCode.PROBES, project, "'zebras', 'gnus'", "24 probes", "[regions]")


def test_a_region_that_matches_in_some_probes_only_is_counted(audit, project, models):
    write_config(project, models=models)
    done = audit("run", "--json")
    (cell,) = [
        one
        for one in done.json["comparison"]["cells"]
        if (one["region"], one["measure"], one["layer"]) == ("people", "shift", None)
    ]
    with_people = sum(
        bool({"she", "he", "her"} & set(row["text"].lower().split())) for row in tiny.text_rows()
    )
    assert (cell["n_probes"], cell["n_missing"]) == (with_people, 24 - with_people)
    counts = Store(project / "store").runs()[0]["counts"]
    assert counts["matches"]["people"] == with_people
    assert counts["matches"]["opinion"] == 24


def test_an_unknown_region_in_a_rule_is_refused_before_anything_is_captured(audit, project, models):
    write_config(project, models=models, rules=tiny.LIMIT.format(fail=0.02).replace("opinion", "opinoin"))
    refused(audit("run"), ExitCode.CONFIG, project, "'opinoin' does not exist", "did you mean 'opinion'?")


@pytest.mark.parametrize(("pattern", "role"), [("s*", "after"), ("base", "before")])
def test_a_replicate_that_is_before_or_after_is_refused(audit, project, models, pattern, role):
    write_config(project, models=models, more=f'[[replicates]]\npath = "{models}/{pattern}"\n')
    twin = "shifted" if role == "after" else "base"
    words = (f"replicate {models}/{twin}", f"[checkpoints.{role}]", "narrow the glob")
    refused(audit("run"), ExitCode.CONFIG, project, *words)


@pytest.mark.parametrize("target", ['"label"', '"positive"'])
def test_different_label_sets_are_refused_where_a_target_class_is_needed(audit, project, models, target):
    labels = {0: "negative", 1: "positive", 2: "mixed"}
    tiny.bert(project / "other", id2label=labels, label2id={v: k for k, v in labels.items()})
    write_config(
        project,
        models=models,
        after='path = "./other"',
        probes=f'path = "probes.jsonl"\ntarget = {target}',
    )
    refused(audit("run"), ExitCode.CHECKPOINT, project, "label sets", "'mixed'", "'neutral'", "id2label")
    write_config(project, models=models, after='path = "./other"')
    assert audit("run").code in (ExitCode.PASS, ExitCode.FAIL, ExitCode.INCONCLUSIVE)


def test_a_target_class_that_the_model_does_not_have_is_named(audit, project, models):
    write_config(project, models=models, probes='path = "probes.jsonl"\ntarget = "great"')
    refused(audit("run"), ExitCode.PROBES, project, "'great'", "negative, positive, neutral")


def test_runs_of_different_probe_sets_are_not_compared(audit, project, models):
    write_config(project, models=models)
    tiny.write_rows(project / "fewer.jsonl", tiny.text_rows(21))
    write_config(project, models=models, probes='path = "fewer.jsonl"', name="fewer.toml")
    one = audit("capture", "--role", "before", "--json").json["before"]
    two = audit("capture", "fewer.toml", "--role", "after", "--json").json["after"]
    before = tiny.files_below(project / "store")
    done = audit("compare", one, two, "--store", "store")
    assert done.code == ExitCode.PROBES
    assert done.out == ""
    assert all(word in done.error for word in (one, two, "different probe sets", "[domain]"))
    assert tiny.files_below(project / "store") == before


PROBES = '[probes]\npath = "probes.jsonl"\n'


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (PROBES + "[checkpints.after]\n", ('"checkpints"', 'did you mean "checkpoints"')),
        (PROBES + "truncat = true\n", ('"probes.truncat"', 'did you mean "truncate"')),
        (PROBES + "[store\n", ("not readable as TOML",)),
        (PROBES + '[method]\nname = "rolout"\n', ("rolout", "rollout")),
    ],
)
def test_a_wrong_configuration_names_the_key_and_the_nearest_valid_one(audit, project, lines, words):
    (project / "audit.toml").write_text(f'[checkpoints.before]\npath = "./a"\n{lines}')
    refused(audit("run"), ExitCode.CONFIG, project, "audit.toml", *words)


def test_a_missing_configuration_says_how_to_get_one(audit, project):
    refused(audit("run", "nowhere.toml"), ExitCode.CONFIG, project, "nowhere.toml", "audit init")
    assert audit("gate", ".").code == ExitCode.CONFIG


def test_an_architecture_without_attention_is_refused_by_name(audit, project, models):
    checkpoint = tiny_models.checkpoint(
        tiny_models.build(
            "FNetForSequenceClassification", attention=None, vocab_size=40, **tiny_models.LABELS
        ),
        tiny_models.word_tokenizer(),
    )
    tiny.save(checkpoint, project / "fnet")
    write_config(project, models=models, before='path = "./fnet"', after='path = "./fnet"')
    refused(audit("run"), ExitCode.CAPTURE, project, "FNet")


def test_outputs_that_overflow_are_refused_by_probe(audit, project, damaged):
    weights = load_file(damaged / "model.safetensors")
    weights["classifier.weight"] = torch.full_like(weights["classifier.weight"], 3e38)
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    write_config(project, models=project, before='path = "./damaged"', after='path = "./damaged"')
    refused(audit("run"), ExitCode.CAPTURE, project, "NaN or infinite", "probe r-")


@pytest.mark.parametrize("command", ["compare", "report", "gate", "verify"])
def test_what_is_not_stored_is_named_with_the_store(audit, project, models, command):
    (project / "store").mkdir()
    names = {"compare": ("run-000000000000", "run-000000000001")}.get(command, ("cmp-000000000000",))
    done = audit(command, *names, "--store", "store")
    assert done.code == ExitCode.STORE
    assert names[0] in done.err + done.out
    assert "audit list" in done.err + done.out
    assert "Traceback" not in done.err


def test_a_store_that_does_not_exist_is_named(audit, project):
    for command in (("list",), ("gate", "cmp-000000000000"), ("report", "cmp-000000000000"), ("verify",)):
        done = audit(*command, "--store", "stroe")
        assert done.code == ExitCode.STORE
        assert "stroe does not exist" in done.error
        assert not (project / "stroe").exists()
    assert audit("verify").code == ExitCode.NOTHING_EVALUATED
    assert "mend --store" in audit("verify").error


def test_help_keeps_square_brackets_and_the_version_is_told(audit):
    assert "command of [[replicates]]" in " ".join(audit("replicate", "--help").out.split())
    done = audit("--version")
    assert (done.code, done.out.strip()) == (ExitCode.PASS, f"rollout-audit {__version__}")


def test_a_corrupted_part_is_named_and_refused(audit, project, models):
    write_config(project, models=models)
    run_id = audit("capture", "--json").json["after"]
    (part,) = (project / "store" / "runs" / run_id / "maps").glob("*.parquet")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    before = tiny.files_below(project / "store")
    for command in (("run",), ("gate",), ("gate", "--json")):
        done = audit(*command)
        assert done.code == ExitCode.STORE, done.err
        assert done.out == ""
        assert str(part) in done.error
        assert "damaged" in done.error
    assert tiny.files_below(project / "store") == before
    verified = audit("verify", "--store", "store", "--json")
    assert verified.code == ExitCode.STORE
    assert [str(part) in problem for problem in verified.json["problems"]] == [True]


def test_an_output_that_cannot_be_written_is_named(audit, project, models):
    write_config(project, models=models)
    (project / "file").write_text("")
    done = audit("run", "--junit", "file/gate.xml")
    assert done.code == ExitCode.CONFIG
    assert "cannot write file/gate.xml" in done.error


def test_a_floor_that_was_edited_is_refused(audit, project, models):
    write_config(project, models=models, more='[[replicates]]\npath = "{models}/seed-*"\n')
    assert audit("capture").code == 0
    assert audit("floor").code == 0
    frozen = json.loads((project / "floor.json").read_text())
    frozen["columns"][0][0] = "people"
    (project / "floor.json").write_text(json.dumps(frozen))
    write_config(project, models=models, more='[[replicates]]\nfloor = "floor.json"\n')
    done = audit("gate")
    assert done.code == ExitCode.CONFIG
    assert "floor.json was changed after it was frozen" in done.error
