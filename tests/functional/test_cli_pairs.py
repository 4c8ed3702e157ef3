"""Methods on models of two streams from the command line: maps in the store, refusals in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit.errors import ExitCode
from tests import tiny_audits as tiny
from tests.integration.test_capture_streams import seq2seq
from tests.integration.test_tower_methods import PROBES, siglip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("pairs")
    for name, noise in (("bart", 0.0), ("bart-after", 0.01)):
        tiny.save(seq2seq("bart", "sdpa"), where / name, noise=noise)
    for name, noise in (("siglip", 0.0), ("siglip-after", 0.01)):
        tiny.save(siglip("sdpa"), where / name, noise=noise)
    tiny.write_rows(where / "text.jsonl", tiny.text_rows()[:3])
    rows = []
    for probe in PROBES:
        from PIL import Image

        Image.fromarray(probe.image).save(where / f"{probe.id}.png")
        rows.append({"id": probe.id, "text": probe.text, "image": f"{probe.id}.png"})
    tiny.write_rows(where / "pairs.jsonl", rows)
    return where


def config(folder: Path, to: Path, model: str, method: str, probes: str = "") -> Path:
    file = "text.jsonl" if model == "bart" else "pairs.jsonl"
    to.write_text(
        f'[store]\nurl = "store"\n[checkpoints.before]\npath = "{folder / model}"\n'
        f'[checkpoints.after]\npath = "{folder / model}-after"\n'
        f'[probes]\npath = "{folder / file}"\n{probes}[method]\n{method}\n'
    )
    return to


def streams(audit, path: Path) -> list[str]:
    done = audit("capture", path, "--json")
    assert done.code == 0, done.err
    from audit.store import Store

    before, after = Store("store").runs()
    assert before["run_id"] != after["run_id"]
    return sorted(set(Store("store").maps(before["run_id"])["stream"]))


def test_encoder_decoder_explains_a_named_token(audit, folder, tmp_path):
    path = config(
        folder,
        tmp_path / "audit.toml",
        "bart",
        'name = "gradient_rollout"\nrow = "decoder:0"',
        'target = "film"\n',
    )
    assert streams(audit, path) == ["prefix", "source"]


def test_an_encoder_decoder_that_answers_no_class_is_told_to_name_a_token(audit, folder, tmp_path):
    path = config(
        folder, tmp_path / "audit.toml", "bart", 'name = "gradient_rollout"', 'target = "prediction"\n'
    )
    refused = audit("capture", path)
    assert refused.code == ExitCode.PROBES
    assert "[probes] target: one token, where the checkpoint generates text" in refused.err


def test_towers_explain_their_similarity_without_target_or_label(audit, folder, tmp_path):
    path = config(folder, tmp_path / "audit.toml", "siglip", 'name = "gradient_rollout"')
    assert streams(audit, path) == ["image", "text"]


@pytest.mark.parametrize("name", ["grad_cam", "lrp", "globenc", "value_zeroing"])
def test_an_audit_judges_the_share_of_a_word_of_the_source(audit, folder, tmp_path, name):
    rule = '[[gate.rules]]\nregion = "word"\nkind = "limit"\nfail = 0.9\n[report]\nconfirm = false\n'
    regions = 'target = "film"\n[regions]\nword = { terms = ["very"] }\n'
    method = f'name = "{name}"\nrow = "decoder:0"\n{rule}'
    path = config(folder, tmp_path / "audit.toml", "bart", method, regions)
    done = audit("run", path, "--json")
    assert done.code in (ExitCode.FAIL, ExitCode.INCONCLUSIVE, 0), done.err
    streams = {rule["stream"] for rule in done.json["rules"]}
    assert "source" in streams
    assert all(rule["n_probes"] for rule in done.json["rules"] if rule["stream"] == "source")


@pytest.mark.parametrize(
    ("model", "method", "code", "why"),
    [
        ("bart", 'name = "gradient_rollout"', 11, "target 'negative' is no token of the checkpoint"),
        ("bart", 'name = "rollout"\nstart_layer = 1', 10, "start_layer is not available"),
        ("siglip", 'name = "rollout"\nrow = "decoder:1"', 13, "'decoder:1' is not available for two towers"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(audit, folder, tmp_path, model, method, code, why):
    done = audit("capture", config(folder, tmp_path / "audit.toml", model, method))
    assert (done.code, why in done.error) == (code, True), done.err
