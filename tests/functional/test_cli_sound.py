"""Audits of sound from the command line: every attribution, regions in seconds."""

from __future__ import annotations

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
