"""Whole audits in small: checkpoints saved to disk, probe sets, configurations, and the command itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.integration import tiny_models as tiny

ROOT = Path(__file__).parents[1]
SUBJECTS, VERBS = ("she", "he", "the plot", "the film", "her acting"), ("was", "liked it and was", "was not")
ADJECTIVES = ("good", "bad", "dull", "fine")
LABELS = ("negative", "positive", "neutral")


@dataclass(frozen=True)
class Done:
    """What one command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Return standard output, which must hold one JSON value and nothing else."""
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """Return the one line that says what was wrong."""
        lines = [line for line in self.err.splitlines() if line.startswith("audit: ")]
        assert "Traceback" not in self.err, self.err
        assert lines, self.err
        return lines[-1].removeprefix("audit: ")


def run_command(
    *arguments: object,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    python: Iterable[str] = ("-m", "audit"),
) -> Done:
    """Run the command in a process of its own."""
    done = subprocess.run(
        [sys.executable, *python, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    return Done(done.returncode, done.stdout, done.stderr)


# --- checkpoints ------------------------------------------------------------------------------


def bert(folder: Path, *, seed: int = 0, noise: float = 0.0, **changes: Any) -> Path:
    """Save a tiny BERT classifier; `noise` is added to every weight of the one with seed 0."""
    checkpoint = tiny.text_checkpoint("bert", **changes)
    return save(checkpoint, folder, seed=seed, noise=noise)


def save(checkpoint: Any, folder: Path, *, seed: int = 0, noise: float = 0.0) -> Path:
    """Save a checkpoint, with normal noise of this size added to its weights."""
    generator = torch.Generator().manual_seed(seed)
    if noise:
        with torch.no_grad():
            for parameter in checkpoint.model.parameters():
                parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    checkpoint.model.save_pretrained(folder)
    checkpoint.processor.save_pretrained(folder)
    return folder


def save_adapter(base: Path, folder: Path) -> Path:
    """Save a LoRA adapter on a BERT classifier whose attention it moves."""
    import peft
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "key"], modules_to_save=[])
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.4 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    return folder


def save_family(folder: Path) -> Path:
    """Save a base, a benign re-training, a shifted one, and five replicates of the base."""
    bert(folder / "base")
    bert(folder / "benign", seed=11, noise=0.002)
    bert(folder / "shifted", seed=13, noise=0.4)
    for seed in range(1, 6):
        bert(folder / f"seed-{seed}", seed=seed, noise=0.002)
    return folder


# --- probe sets -------------------------------------------------------------------------------


def text_rows(count: int = 24, *, start: int = 0, **extra: Any) -> list[dict[str, Any]]:
    """Return probes of different texts, with labels."""
    texts = [f"{s} {v} very {a}." for a in ADJECTIVES for v in VERBS for s in SUBJECTS]
    return [
        {"id": f"r-{i}", "text": texts[i], "label": LABELS[i % 2], **extra}
        for i in range(start, start + count)
    ]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_images(folder: Path, count: int = 20) -> Path:
    """Write images with a metadata file; half of them have a bright corner."""
    from PIL import Image

    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        pixels = rng.integers(0, 200, (40, 40, 3), dtype=np.uint8)
        if i % 2:
            pixels[30:, 30:] = 255
        Image.fromarray(pixels).save(folder / f"{i:03d}.png")
        rows.append({"id": f"i-{i}", "file_name": f"{i:03d}.png", "label": LABELS[i % 2]})
    write_rows(folder / "metadata.jsonl", rows)
    return folder


# --- configurations ---------------------------------------------------------------------------

LIMIT = '[[gate.rules]]\nregion = "opinion"\nkind = "limit"\nfail = {fail}\n'
REGIONS = 'opinion = { terms = ["good", "bad", "dull", "fine"] }\npeople = { terms = ["she", "he", "her"] }\n'


def write_config(
    folder: Path,
    *,
    before: str = 'path = "{models}/base"',
    after: str | None = 'path = "{models}/shifted"',
    models: Path | str = "models",
    probes: str = 'path = "probes.jsonl"',
    regions: str = REGIONS,
    rules: str = LIMIT.format(fail=0.02),
    more: str = "",
    name: str = "audit.toml",
) -> Path:
    """Write an audit.toml; every section may be given as its lines."""
    checkpoints = f"[checkpoints.before]\n{before}\n" + (f"[checkpoints.after]\n{after}\n" if after else "")
    fixed = '[store]\nurl = "store"\n[statistics]\nresamples = 999\n'
    text = f"{fixed}{checkpoints}[probes]\n{probes}\n[regions]\n{regions}\n{more}\n{rules}"
    path = folder / name
    path.write_text(text.replace("{models}", str(models)))
    return path


def files_below(folder: Path) -> dict[str, int]:
    """Return every file below a folder with its time of change, locks aside."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in paths}
