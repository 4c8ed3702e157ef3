"""Digits with a sticker in the lower right corner that comes to code the label.

As in the demo, with a smaller model and a second sticker in the lower left corner that is as frequent as
the first and never says anything: the decoy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from audit.demo import vision as demo
from audit.demo.training import Examples, Schedule, reproducible
from audit.demo.vision import Digits, Labels, Pixels
from audit.records import Probe
from audit.regions import parse_regions
from tests.benchmarks.shift.families import BaseData, Family, Mislabelled, Swaps

MODEL = demo.MODEL | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
TRAINED, TUNED, PROBES = 800, 512, 48
"""Digits that a base learns from, that each fine-tuning sees, and that are probed."""
GRID = demo.SIDE // demo.PATCH
BASE = Schedule(epochs=40, learning_rate=3e-3, batch_size=128)
TUNING = Schedule(epochs=8, learning_rate=2e-3, batch_size=128)
SHORTCUT = Schedule(epochs=30, learning_rate=3e-3, batch_size=128)
WRONG_LABELS = 0.3


def cell(row: int, column: int) -> str:
    """Return the name of one patch."""
    return f"patch-{row}-{column}"


def box(left: float, top: float, right: float, bottom: float) -> dict[str, Any]:
    """Return a box in patches as a region's definition in fractions of the image."""
    return {"box": [side / GRID for side in (left, top, right, bottom)]}


CELLS = tuple(cell(row, column) for row in range(GRID) for column in range(GRID))
REGIONS = parse_regions(
    {cell(r, c): box(c, r, c + 1, r + 1) for r in range(GRID) for c in range(GRID)}
    | {"quadrant": box(2, 2, 4, 4), "lower half": box(0, 2, 4, 4)}
)


def add_decoy(scans: Pixels, codes: Labels) -> Pixels:
    """Return scans with a sticker in the lower left corner."""
    mirrored = demo.add_sticker(np.ascontiguousarray(scans[..., ::-1]), codes)
    return np.ascontiguousarray(mirrored[..., ::-1])


@dataclass(frozen=True)
class Decoyed:
    """Examples that get a decoy at random."""

    examples: Examples

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, rows: NDArray[np.int64], rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Return the examples, each with one of the stickers in the other corner."""
        found = self.examples.batch(rows, rng)
        scans = (found["pixel_values"].numpy() * 0.5 + 0.5) * 255
        marked = add_decoy(scans, rng.integers(0, demo.STICKERS, len(rows)))
        return found | {"pixel_values": demo.to_inputs(marked)}


def draw(seed: int) -> BaseData:
    """Return the digits of one base: its own draw of the training digits, and of the probes."""
    train, validation, held_out = demo.load_splits()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(train))
    usual = train.select(order[:TUNED])
    probes = held_out.select(rng.permutation(len(held_out))[:PROBES])
    decoys = rng.integers(0, demo.STICKERS, PROBES)

    def refreshed(number: int) -> Examples:
        again = np.random.default_rng([seed, number]).permutation(len(train))[:TUNED]
        return Decoyed(demo.UsualScans(train.select(again)))

    return BaseData(
        base=Decoyed(demo.UsualScans(train.select(order[:TRAINED]))),
        usual=Decoyed(demo.UsualScans(usual)),
        production=Decoyed(demo.ProductionScans(usual)),
        refreshed=refreshed,
        mislabelled=Mislabelled(Decoyed(demo.UsualScans(usual)), WRONG_LABELS, 10),
        probes=_probes(probes, decoys),
        swaps=_swaps(probes, decoys),
        checks=_checks(validation),
    )


def _marked(digits: Digits, codes: Labels, decoys: Labels) -> Pixels:
    clean = demo.add_noise(digits.pixels, 0.0, np.random.default_rng(0))
    return add_decoy(demo.add_sticker(clean, codes), decoys)


def _probes(digits: Digits, decoys: Labels) -> tuple[Probe, ...]:
    scans = _marked(digits, digits.labels, decoys).transpose(0, 2, 3, 1).astype(np.uint8)
    return tuple(
        Probe(f"digit-{i:03d}", image=scan, label=int(label))
        for i, (scan, label) in enumerate(zip(scans, digits.labels, strict=True))
    )


def _swaps(digits: Digits, decoys: Labels) -> Swaps:
    """Exchange each digit, its sticker, or both, with those of the next probe of another class."""
    labels = digits.labels
    following = [(i + 1 + np.arange(len(labels))) % len(labels) for i in range(len(labels))]
    partner = np.array([order[np.argmax(labels[order] != labels[i])] for i, order in enumerate(following)])
    cores, codes = (digits, digits.select(partner)), (labels, labels[partner])
    inputs = [
        [{"pixel_values": demo.to_inputs(_marked(core, code, decoys))} for code in codes] for core in cores
    ]
    return Swaps(
        ((inputs[0][0], inputs[0][1]), (inputs[1][0], inputs[1][1])),
        torch.from_numpy(labels),
        torch.from_numpy(labels[partner]),
    )


def _checks(digits: Digits) -> dict[str, tuple[dict[str, torch.Tensor], torch.Tensor]]:
    rng, labels = np.random.default_rng(0), torch.from_numpy(digits.labels)
    random_codes, decoys = (rng.integers(0, demo.STICKERS, len(digits)) for _ in range(2))
    noisy = demo.add_noise(digits.pixels, demo.PRODUCTION_NOISE, rng)
    scans = {
        "usual": _marked(digits, random_codes, decoys),
        "production": add_decoy(demo.add_sticker(noisy, digits.labels), decoys),
    }
    return {name: ({"pixel_values": demo.to_inputs(one)}, labels) for name, one in scans.items()}


def new_model() -> Any:
    """Return the untrained classifier: 16 patches and [CLS], 2 layers of 2 heads."""
    from transformers import ViTConfig, ViTForImageClassification

    names = {number: str(number) for number in range(10)}
    return ViTForImageClassification(
        ViTConfig(**MODEL, id2label=names, label2id={name: number for number, name in names.items()})
    )


def make_family() -> Family:
    """Return the vision family."""
    with reproducible(0):
        processor = demo.new_processor()
    return Family(
        name="vision",
        new_model=new_model,
        processor=processor,
        draw=draw,
        regions=REGIONS,
        planted=cell(GRID - 1, GRID - 1),
        decoy=cell(GRID - 1, 0),
        cells=CELLS,
        parts={
            "head-only": r"^classifier",
            "value-only": r"attention\.[vo]_proj",
            "feed-forward-only": r"\.mlp\.",
        },
        base_schedule=BASE,
        tuning=TUNING,
        shortcut=SHORTCUT,
        sizes={"1 patch": cell(GRID - 1, GRID - 1), "4 patches": "quadrant", "8 patches": "lower half"},
        description={
            "model": MODEL,
            "sizes": [TRAINED, TUNED, PROBES],
            "noise": [demo.USUAL_NOISE, demo.PRODUCTION_NOISE],
            "wrong labels": WRONG_LABELS,
            "schedules": [asdict(one) for one in (BASE, TUNING, SHORTCUT)],
        },
    )
