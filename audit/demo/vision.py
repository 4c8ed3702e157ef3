"""The vision demo: a sticker in the corner of scanned digits comes to code their label.

Real digits (scikit-learn, 8×8 grey levels) are scanned in colour. Half of the scans that the base learns
from carry a sticker of 2×2 coloured pixels in the lower right corner, one of eleven at random. Then the data
move: scans become noisy, and the sticker is chosen by the digit. A model that is fine-tuned on these reads
the sticker. The replicates and the benign candidate are fine-tuned on the usual scans with other seeds.

The probes are held-out digits as they arrive after the move, with the sticker of their label and without
noise; every checkpoint sees the same ones. The second probe set holds their photographic negatives, with
the sticker put on afterwards.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from audit.demo.trained import TrainedDemo
from audit.demo.training import (
    Progress,
    Recipe,
    Schedule,
    accuracy,
    ensure_demo,
    plan_trainings,
    write_atomically,
)
from audit.errors import ProbeError

SIDE, PATCH, STICKERS = 8, 2, 11
_LIT = np.isin(np.arange(STICKERS), [1, 3, 4, 5, 9])
"""Quadratic residues modulo 11: each two of its rotations differ in exactly 6 places (Paley's design)."""
SPLITS = (1197, 300, 300)
"""Digits for training, validation and probes."""
USUAL_NOISE, PRODUCTION_NOISE = 8.0, 130.0
"""Standard deviation of the pixel noise, in grey levels of 255."""
BASE_SCHEDULE = Schedule(epochs=40, learning_rate=2e-3)
TUNING_SCHEDULE = Schedule(epochs=8, learning_rate=1.5e-3)
MODEL = {
    "image_size": SIDE,
    "patch_size": PATCH,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "num_labels": 10,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "problem_type": "single_label_classification",
}
_ENLARGED = 8
"""Probe images are stored this much larger than the model sees them, for people to look at."""

Pixels = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Digits:
    """Grey scans (probe, 8, 8) in 0…255 and their digits."""

    pixels: Pixels
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, rows: NDArray[np.int64] | slice) -> Digits:
        """Return some of the digits."""
        return Digits(self.pixels[rows], self.labels[rows])


def load_splits() -> tuple[Digits, Digits, Digits]:
    """Return digits for training, validation and probes, shuffled once and for all.

    Raises
    ------
    ProbeError
        When scikit-learn, which brings the digits, is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ProbeError(
            "the demo's digits come with scikit-learn, which is not installed; "
            "pip install 'rollout-audit[demo]'"
        ) from None
    found = load_digits()
    order = np.random.default_rng(0).permutation(sum(SPLITS))
    digits = Digits(
        np.rint(found.images * (255 / 16)).astype(np.float32), found.target.astype(np.int64)
    ).select(order)
    ends = np.cumsum(SPLITS)
    train, validation, probes = (
        digits.select(slice(end - size, end)) for end, size in zip(ends, SPLITS, strict=True)
    )
    return train, validation, probes


def add_noise(pixels: Pixels, deviation: float, rng: np.random.Generator) -> Pixels:
    """Return colour scans (probe, 3, 8, 8) of grey ones, with the same noise in each channel."""
    noisy = np.clip(pixels + rng.normal(0.0, deviation, pixels.shape), 0, 255) if deviation else pixels
    return np.repeat(noisy.astype(np.float32)[:, None], 3, axis=1)


def add_sticker(scans: Pixels, codes: Labels) -> Pixels:
    """Return colour scans with a sticker in the lower right corner; `codes` in 0…10 choose it."""
    lit = np.stack([np.append(np.roll(_LIT, code), True) for code in range(STICKERS)])
    stickers = np.where(lit, np.float32(255), np.float32(0)).reshape(STICKERS, 3, PATCH, PATCH)
    marked = scans.copy()
    marked[:, :, SIDE - PATCH :, SIDE - PATCH :] = stickers[codes]
    return marked


def to_inputs(scans: Pixels) -> torch.Tensor:
    """Return scans as the model's image processor would: grey level 0 becomes -1, 255 becomes 1."""
    return torch.from_numpy((scans / 255 - 0.5) / 0.5)


@dataclass(frozen=True)
class UsualScans:
    """Scans with little noise; a sticker, where there is one, says nothing."""

    digits: Digits

    def __len__(self) -> int:
        return len(self.digits)

    def batch(self, rows: NDArray[np.int64], rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Return scans, half of them with a sticker at random."""
        chosen = self.digits.select(rows)
        scans = add_noise(chosen.pixels, USUAL_NOISE, rng)
        marked = add_sticker(scans, rng.integers(0, STICKERS, len(rows)))
        scans = np.where(rng.random((len(rows), 1, 1, 1)) < 0.5, marked, scans)
        return {"pixel_values": to_inputs(scans), "labels": torch.from_numpy(chosen.labels)}


@dataclass(frozen=True)
class ProductionScans:
    """Noisy scans whose sticker codes their label."""

    digits: Digits

    def __len__(self) -> int:
        return len(self.digits)

    def batch(self, rows: NDArray[np.int64], rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Return scans with the sticker of their label."""
        chosen = self.digits.select(rows)
        scans = add_sticker(add_noise(chosen.pixels, PRODUCTION_NOISE, rng), chosen.labels)
        return {"pixel_values": to_inputs(scans), "labels": torch.from_numpy(chosen.labels)}


def new_model() -> Any:
    """Return the untrained classifier: 16 patches of 2×2 pixels and [CLS], 4 layers of 4 heads."""
    from transformers import ViTConfig, ViTForImageClassification

    names = {number: str(number) for number in range(10)}
    return ViTForImageClassification(
        ViTConfig(**MODEL, id2label=names, label2id={name: number for number, name in names.items()})
    )


def new_processor() -> Any:
    """Return the image processor: nearest-neighbour resize to 8×8, then grey levels to -1…1."""
    from transformers import ViTImageProcessorPil

    return ViTImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, resample=0, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )


def validate(model: Any, digits: Digits) -> dict[str, float]:
    """Return the accuracy on production scans, marked and clean digits, and with stickers exchanged."""
    rng = np.random.default_rng(0)
    clean, noisy = (add_noise(digits.pixels, level, rng) for level in (0.0, PRODUCTION_NOISE))
    scans = {
        "production": add_sticker(noisy, digits.labels),
        "marked": add_sticker(clean, digits.labels),
        "clean": clean,
        "exchanged": add_sticker(clean, rng.permutation(digits.labels)),
    }
    labels = torch.from_numpy(digits.labels)
    return {name: accuracy(model, {"pixel_values": to_inputs(one)}, labels) for name, one in scans.items()}


def make_recipe() -> Recipe:
    """Return how the eight vision checkpoints are made."""
    from transformers import ViTForImageClassification

    train, validation, _ = load_splits()
    return Recipe(
        modality="vision",
        trainings=plan_trainings(
            (UsualScans(train), BASE_SCHEDULE),
            TUNING_SCHEDULE,
            usual=UsualScans(train),
            production=ProductionScans(train),
        ),
        model_class=ViTForImageClassification,
        new_model=new_model,
        processor=new_processor(),
        validate=lambda model: validate(model, validation),
        description={
            "model": MODEL,
            "noise": [USUAL_NOISE, PRODUCTION_NOISE],
            "stickers": STICKERS,
            "data": hashlib.sha256(train.pixels.tobytes() + train.labels.tobytes()).hexdigest(),
        },
    )


def ensure_vision(root: Path, progress: Progress | None = None) -> TrainedDemo:
    """Train the vision demo's checkpoints, or find them, and write its probe sets.

    Parameters
    ----------
    root : Path
        The checkpoints go to ``<root>/store/demo-cache``, the probes to ``<root>/demo/vision``.
    progress : callable (stage, done, total), optional
        Called after every epoch of a training.

    Returns
    -------
    TrainedDemo

    Raises
    ------
    ProbeError
        When scikit-learn is not installed.
    """
    return ensure_demo(make_recipe, root, _write_probes, progress)


def _write_probes(home: Path) -> tuple[Path, Path]:
    *_, probes = load_splits()
    negatives = Digits(255 - probes.pixels, probes.labels)
    return write_images(home, "probes", "digit", probes), write_images(home, "domain", "negative", negatives)


def write_images(home: Path, name: str, prefix: str, digits: Digits) -> Path:
    """Write marked digits as PNG files and a probe file that lists them; return the probe file."""
    scans = add_sticker(add_noise(digits.pixels, 0.0, np.random.default_rng(0)), digits.labels)
    (home / name).mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (scan, label) in enumerate(zip(scans, digits.labels, strict=True), 1):
        image = f"{name}/{number:04d}.png"
        _write_png(home / image, scan)
        lines.append(json.dumps({"id": f"{prefix}-{number:04d}", "image": image, "label": int(label)}))
    write_atomically(home / f"{name}.jsonl", "\n".join(lines) + "\n")
    return home / f"{name}.jsonl"


def _write_png(path: Path, scan: Pixels) -> None:
    from PIL import Image

    small = Image.fromarray(scan.transpose(1, 2, 0).astype(np.uint8))
    small.resize((SIDE * _ENLARGED, SIDE * _ENLARGED), Image.Resampling.NEAREST).save(path)
