"""Audits of sound from the command line: every attribution, regions in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.io import wavfile

from audit.errors import ExitCode
from audit.store import Store
from tests import tiny_audits as tiny
from tests.integration.tiny_sound import RATE, noise, sound_checkpoint, whisper

LENGTH, WORD = 640, (200, 320)
"""Samples of a sound, and of the loud part that is annotated: a whole number of frames."""
SAMPLED = {"shap": "samples = 2", "lime": "samples = 20"}
METHODS = ("input_x_gradient", "integrated_gradients", "occlusion", "shap", "lime", "grad_cam", "lrp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two checkpoints of wav2vec2 and of Whisper, six sounds and twenty-four."""
    where = tmp_path_factory.mktemp("sounds")
    for name, change in (("before", 0.0), ("after", 1.0)):  # the rollout moves by an eighth of its mass
        tiny.save(sound_checkpoint("wav2vec2"), where / f"wave-{name}", noise=change)
        tiny.save(whisper(), where / f"whisper-{name}", noise=change / 10)
    rows = []
    for i in range(24):
        samples = noise(LENGTH, seed=i)
        samples[slice(*WORD)] *= 3
        wavfile.write(where / f"{i}.wav", RATE, samples.astype(np.float32))
        spans = [[edge / RATE for edge in WORD]]
        label = tiny.LABELS[i % 2]
        rows.append({"id": f"s-{i}", "audio": f"{i}.wav", "label": label, "regions": {"word": spans}})
    tiny.write_rows(where / "few.jsonl", rows[:6])
    tiny.write_rows(where / "many.jsonl", rows)
    return where


def config(
    folder: Path, to: Path, method: str, *, model: str = "wave", more: str = "", count: str = "few"
) -> Path:
    target = 'target = "film"\n' if model == "whisper" else ""
    return tiny.write_config(
        to,
        before=f'path = "{folder}/{model}-before"',
        after=f'path = "{folder}/{model}-after"',
        probes=f'path = "{folder}/{count}.jsonl"\n{target}',
        regions='word = { annotated = "word" }\n',
        rules='[[gate.rules]]\nregion = "word"\nkind = "limit"\nfail = 0.0001\n',
        more=f"[method]\n{method}\n{more}",
    )


@pytest.mark.parametrize("name", METHODS)
def test_sound_is_audited_by_every_attribution(audit, folder, tmp_path, name):
    method = f'name = "{name}"\n{SAMPLED.get(name, "")}'
    done = audit("run", config(folder, tmp_path, method, more="[report]\nconfirm = false\n"), "--json")
    assert done.code in (ExitCode.FAIL, ExitCode.INCONCLUSIVE, 0), done.err
    runs = Store("store").runs()
    assert len(runs) == 2
    for run in runs:
        maps = Store("store").maps(run["run_id"])
        assert len(maps) == 6
        assert all(abs(sum(row) - 1) < 1e-5 for row in maps["weights"].to_list())


def test_a_region_in_seconds_is_confirmed_by_silence_and_faithfulness_is_measured(audit, folder, tmp_path):
    more = '[faithfulness]\nprobes = 8\norders = 2\nmethods = ["occlusion"]\n'
    done = audit("run", config(folder, tmp_path, 'name = "rollout"', more=more, count="many"))
    assert done.code == ExitCode.FAIL, done.err
    assert "Occlusion of word (silence) moves the target logit by" in done.out
    assert "Faithfulness was not measured" not in done.out + done.err
    assert "not for sound" not in done.out + done.err


def test_a_token_of_whisper_is_explained_by_what_was_heard(audit, folder, tmp_path):
    method = 'name = "integrated_gradients"\nrow = "decoder:1"'
    done = audit("capture", config(folder, tmp_path, method, model="whisper"), "--json")
    assert done.code == 0, done.err
    streams = Store("store").maps(Store("store").runs()[0]["run_id"])["stream"].to_list()
    assert sorted(set(streams)) == ["prefix", "source"]


def without_regions(folder: Path, to: Path, measure: str) -> Path:
    rows = (folder / "few.jsonl").read_text().splitlines()
    bare = [{key: row[key] for key in ("id", "audio")} for row in map(json.loads, rows)]
    tiny.write_rows(folder / "bare.jsonl", bare)
    return tiny.write_config(
        to,
        before=f'path = "{folder}/wave-before"',
        after=f'path = "{folder}/wave-after"',
        probes=f'path = "{folder}/bare.jsonl"',
        regions="",
        rules=f'[[gate.rules]]\nregion = "*"\nkind = "limit"\nmeasure = "{measure}"\nfail = 0.0001\n'
        "[gate]\nmin_probes = 2\n",
        more="[report]\nconfirm = false\n",
    )


def test_rules_on_regions_are_refused_before_capture_where_sound_has_none(audit, folder, tmp_path):
    done = audit("run", without_regions(folder, tmp_path, "shift"))
    assert done.code == ExitCode.NOTHING_EVALUATED
    assert "bare.jsonl has no region for the rules to judge" in done.err
    assert not Store("store").runs()


def test_whole_maps_are_judged_without_any_region(audit, folder, tmp_path):
    done = audit("run", without_regions(folder, tmp_path, "js_distance"), "--json")
    assert done.code == ExitCode.FAIL, done.err
    (rule,) = done.json["rules"]
    assert (rule["region"], rule["n_probes"]) == ("*", 6)
    assert rule["value"] > 0.0001
