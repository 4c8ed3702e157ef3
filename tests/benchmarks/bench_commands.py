"""Commands as a user runs them: cold start, and a capture from probes to the store."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import pytest
import torch
import transformers

import audit
from audit.capture.attention.passes import frozen, run_model
from audit.capture.inputs.batches import length_batches, stack
from audit.capture.inputs.encoded import core_model
from audit.capture.inputs.texts import encode_texts
from audit.pipeline import capture_run, plan_run
from audit.probes import read_probes
from audit.records import CaptureSettings
from tests import tiny_audits
from tests.benchmarks.measuring import Section, children_time
from tests.tiny_audits import run_command, text_rows, write_config, write_rows

COMMANDS = Section("Commands")
PROBES = 2_000
WORDS = 62
"""With [CLS] and [SEP] 64 positions."""


def test_cold_start(tmp_path):
    models = tiny_audits.save_family(tmp_path / "models")
    write_rows(tmp_path / "probes.jsonl", text_rows())
    write_config(tmp_path, models=models)
    assert run_command("run", cwd=tmp_path).code in (0, 3, 4)
    for name in ("gate", "list"):
        wall, spent = [], []
        for _ in range(5):
            before, start = children_time(), time.perf_counter()
            run_command(name, cwd=tmp_path)
            wall.append(time.perf_counter() - start)
            spent.append(children_time() - before)
        COMMANDS.note(
            f"- cold start of `audit {name}` on a small store: {statistics.median(wall):.2f} s on the wall, "
            f"{statistics.median(spent):.2f} s of CPU (goal ≤ 1.2 s on the wall)"
        )


def save_model(folder: Path, *, layers: int = 6, width: int = 384) -> Path:
    """Save a random classifier with 12 heads; of MiniLM's shape unless said otherwise."""
    from tests.integration.tiny_models import word_tokenizer

    tokenizer = word_tokenizer()
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=4 * width,
        num_labels=2,
    )
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_probes(path: Path, words: list[str]) -> None:
    lines = [
        json.dumps({"id": f"p-{i:05d}", "text": " ".join(words[(i + j) % len(words)] for j in range(WORDS))})
        for i in range(PROBES)
    ]
    path.write_text("\n".join(lines) + "\n")


def bare_loop(folder: Path, probes: Path) -> float:
    """Return the seconds of the plain forward passes over the same batches, encoding not counted."""
    checkpoint = audit.load_checkpoint(str(folder))
    settings = CaptureSettings()
    encoded = encode_texts(checkpoint, list(read_probes(probes).probes), settings)
    batches = [
        stack([encoded[i] for i in indices]) for indices in length_batches(encoded, settings.batch_tokens)
    ]
    with frozen(core_model(checkpoint.model)):
        run_model(checkpoint.model, batches[0])
        start = time.perf_counter()
        for tensors in batches:
            run_model(checkpoint.model, tensors)
        return time.perf_counter() - start


@pytest.mark.parametrize(("layers", "width", "rounds"), [(6, 384, 3), (12, 768, 2)])
def test_capture_from_probes_to_the_store(tmp_path, layers, width, rounds):
    folder = save_model(tmp_path / "model", layers=layers, width=width)
    words = [w for w in audit.load_checkpoint(str(folder)).processor.get_vocab() if w.isalpha()]
    write_probes(tmp_path / "probes.jsonl", words)
    ratios = []
    for i in range(rounds):
        (tmp_path / "audit.toml").write_text(
            f'[store]\nurl = "store-{i}"\n[checkpoints.before]\npath = "model"\n'
            '[checkpoints.after]\npath = "model"\n[probes]\npath = "probes.jsonl"\n'
            "[regions]\nhalf = { quantile = [0.0, 0.5] }\n"
        )
        config = audit.load_config(tmp_path / "audit.toml")
        start = time.perf_counter()
        capture_run(plan_run(config, "before"))
        spent = time.perf_counter() - start
        ratios.append(bare_loop(folder, tmp_path / "probes.jsonl") / spent)
    shape = "BERT-base's shape (goal ≥ 90 %)" if width == 768 else "MiniLM's shape, whose passes are short"
    COMMANDS.note(
        f"- `audit capture`, {PROBES:,} probes of 64 positions, {layers} layers of {width}, {shape}: "
        f"{100 * statistics.median(ratios):.0f} % ({100 * min(ratios):.0f}–{100 * max(ratios):.0f}) of the "
        "bare forward loop's probes per second, everything but the start of Python counted"
    )
