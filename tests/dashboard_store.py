"""Stores that the dashboard's tests look at: real audits of tiny checkpoints, text and vision."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

NOISE = {"seed-1": 0.01, "seed-2": 0.01, "seed-3": 0.01, "after": 0.09}
RULES = """
[[gate.rules]]
region = "{region}"
kind = "limit"
fail = {limit}
[[gate.rules]]
region = "*"
kind = "excess"
within = 0.02
"""


@dataclass(frozen=True)
class Audited:
    """A store with a text and a vision comparison, and the configurations that made them."""

    store: Path
    text: Path
    vision: Path
    text_comparison: str
    vision_comparison: str


def build(root: Path) -> Audited:
    """Train nothing, perturb tiny random checkpoints, audit them, and return what there is to see."""
    root.mkdir(parents=True, exist_ok=True)
    text = _write_config(root, "text", _text_probes(root), region="name", limit=0.001)
    vision = _write_config(root, "vision", _vision_probes(root), region="corner", limit=0.5)
    _save_checkpoints(root)
    return Audited(root / "store", text, vision, _audit(text), _audit(vision))


def _audit(config: Path) -> str:
    from audit.config import load_config
    from audit.pipeline import run_audit

    return str(run_audit(load_config(config)).comparison_id)


def _write_config(root: Path, name: str, probes: Path, *, region: str, limit: float) -> Path:
    path = root / f"{name}.toml"
    path.write_text(
        f"""
[store]
url = "store"
[checkpoints.before]
path = "./{name}/base"
[checkpoints.after]
path = "./{name}/after"
[[replicates]]
path = "{name}/seed-*"
[probes]
path = "{probes.relative_to(root)}"
[statistics]
resamples = 499
"""
        + ("[regions]\ncorner = { box = [0.75, 0.75, 1.0, 1.0] }\n" if name == "vision" else "")
        + RULES.format(region=region, limit=limit)
    )
    return path


def _text_probes(root: Path) -> Path:
    """Return probes with names marked; the first carries text that must not reach the page as HTML."""
    names, words = ("Clara", "Nils", "Anna", "Omar"), ("good", "bad", "fine", "dull", "very good", "not bad")
    rows: list[dict[str, Any]] = []
    for i in range(48):
        name, word = names[i % 4], words[i % 6]
        hostile = " <script>document.title='owned'</script> \u202e<b>שלום</b> 🙂\x07" if i == 0 else ""
        text = f"The film that {name} liked was {word}.{hostile}"
        rows.append(
            {
                "id": f"t-{i:03d}",
                "text": text,
                "label": "negative" if word in ("bad", "dull") else "positive",
                "group": f"g-{i % 12}",
                "segments": {"source": "web" if i % 3 else "mail"},
                "regions": {"name": [[14, 14 + len(name)]]},
            }
        )
    path = root / "text.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def _vision_probes(root: Path) -> Path:
    """Return small pictures of two bright bars whose place is the class."""
    folder = root / "images"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = []
    for i in range(40):
        pixels = rng.integers(20, 70, (32, 32, 3))
        pixels[4 + 8 * (i % 3) : 10 + 8 * (i % 3), 5:27] = (230, 190, 90)
        pixels[26:, 26:] = (60, 200, 220)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i:03d}.png")
        label = ("negative", "positive", "neutral")[i % 3]
        rows.append({"id": f"v-{i:03d}", "image": f"images/{i:03d}.png", "label": label})
    path = root / "vision.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _save_checkpoints(root: Path) -> None:
    import torch

    from tests.integration.tiny_models import text_checkpoint, vision_checkpoint

    for kind, one in (("text", text_checkpoint("bert")), ("vision", vision_checkpoint("vit"))):
        clean = {name: value.clone() for name, value in one.model.state_dict().items()}
        for i, (name, size) in enumerate({"base": 0.0, **NOISE}.items()):
            torch.manual_seed(i)
            one.model.load_state_dict(clean)
            with torch.no_grad():
                for parameter in one.model.parameters():
                    parameter.add_(torch.randn_like(parameter) * size)
            one.model.save_pretrained(root / kind / name)
            one.processor.save_pretrained(root / kind / name)
