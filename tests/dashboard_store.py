"""Stores that the dashboard's tests look at: real audits of tiny checkpoints, text and vision."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from audit.media import save_audio
from audit.probes import read_probes
from audit.records import Captured, Map, Positions, Prediction
from audit.store import Store
from audit.store._files import seal
from tests.synthetic import publish_run

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
    other_method: str


def build(root: Path) -> Audited:
    """Train nothing, perturb tiny random checkpoints, audit them, and return what there is to see."""
    root.mkdir(parents=True, exist_ok=True)
    text = _write_config(root, "text", _text_probes(root), region="name", limit=0.001)
    vision = _write_config(root, "vision", _vision_probes(root), region="corner", limit=0.5)
    _save_checkpoints(root)
    other = _write_config(
        root, "text", root / "text.jsonl", region="name", limit=0.001, method="raw_attention"
    )
    first, again = _audit(text), _audit(other)
    return Audited(root / "store", text, vision, first, _audit(vision), again)


def build_streams(root: Path) -> tuple[Path, str, Path, str]:
    """Write audits of an encoder-decoder and of a sound model without any model: configuration and id."""
    root.mkdir(parents=True, exist_ok=True)
    texts = [{"id": f"s-{i:02d}", "text": "the brief film was a bore"} for i in range(24)]
    sounds = [{"id": f"a-{i:02d}", "audio": f"clips/{i:02d}.wav"} for i in range(24)]
    for row in sounds:
        time = np.arange(16000) / 16000
        tone = np.sin(2 * np.pi * (300 + 2500 * time) * time) * (time > 0.3)
        save_audio(root / row["audio"], tone.astype(np.float32), 16000)
    found: list[Any] = []
    for name, rows, regions, maps in (
        ("seq2seq", texts, {"opening": {"quantile": [0.0, 0.5]}}, _two_streams),
        ("sound", sounds, {"opening": {"quantile": [0.0, 0.5]}}, _frames),
    ):
        probes = root / f"{name}.jsonl"
        probes.write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs = [_publish(root, f"{name}-{i}", probes, regions, maps, 0.1 * i) for i in (1, 2)]
        config = root / f"{name}.toml"
        config.write_text(
            '[store]\nurl = "store"\n'
            f'[checkpoints.before]\nrun = "{runs[0]}"\n[checkpoints.after]\nrun = "{runs[1]}"\n'
            f'[probes]\npath = "{name}.jsonl"\n[regions]\nopening = {{ quantile = [0.0, 0.5] }}\n'
            '[statistics]\nresamples = 199\n[[gate.rules]]\nregion = "opening"\nkind = "limit"\nfail = 0.02\n'
        )
        found += [config, _gate(config)]
    return found[0], found[1], found[2], found[3]


def build_many(source: Path, target: Path, *, runs: int, comparisons: int) -> Path:
    """Copy the manifest of one run, and one whole comparison, under many ids; return the new store."""
    for kind, number in (("runs", runs), ("comparisons", comparisons)):
        one = sorted((source / kind).glob("*/manifest.json"))[0]
        manifest = json.loads(one.read_text())
        sealed = ("digest", "provenance", "seal")
        content = {key: value for key, value in manifest.items() if key not in sealed}
        for i in range(number):
            name = f"{one.parent.name[:4]}{i:012x}"
            folder = target / kind / name
            folder.mkdir(parents=True)
            for path in one.parent.iterdir() if kind == "comparisons" else ():
                (folder / path.name).write_bytes(path.read_bytes())
            own = {**content, "run_id" if kind == "runs" else "comparison_id": name}
            (folder / "manifest.json").write_bytes(seal(own, manifest["provenance"]))
    return target


def _gate(config: Path) -> str:
    from audit.config import load_config
    from audit.pipeline import gate_runs

    return str(gate_runs(load_config(config)).comparison_id)


def _publish(root: Path, name: str, path: Path, regions: Any, maps: Any, share: float) -> str:
    """Publish a run whose maps have more of their mass in the first half the larger `share` is."""
    probes = read_probes(path)
    random = np.random.default_rng([*name.encode()])
    captured = [
        Captured(maps(probe.id, share + 0.1 * random.random()), Prediction(probe.id)) for probe in probes
    ]
    return publish_run(Store(root / "store"), name, probes, regions, captured)


def _leaning(n: int, share: float) -> np.ndarray[Any, Any]:
    weights = np.linspace(1 + share, 1 - share, n)
    return (weights / weights.sum()).astype(np.float32)


def _two_streams(probe_id: str, share: float) -> tuple[Map, ...]:
    starts = np.array([0, 4, 10, 15, 19, 21], dtype=np.int32)
    ends = np.array([3, 9, 14, 18, 20, 25], dtype=np.int32)
    none = np.full(3, -1, dtype=np.int32)
    first = np.zeros(6, dtype=np.int8)
    source = Positions("token", np.zeros(6, dtype=bool), starts=starts, ends=ends, parts=first)
    special = np.array([True, False, False])
    prefix = Positions("token", special, starts=none, ends=none, parts=none.astype(np.int8), causal=True)
    one, two = _leaning(6, share), _leaning(3, share)
    return (
        Map(probe_id, one, source, "source", 0.7 - share, np.stack([_leaning(6, 0), one])),
        Map(probe_id, two, prefix, "prefix", 0.3 + share, np.stack([_leaning(3, 0), two])),
    )


def _frames(probe_id: str, share: float) -> tuple[Map, ...]:
    times = np.stack([np.arange(50) * 0.02, np.arange(1, 51) * 0.02], axis=1).astype(np.float32)
    return (Map(probe_id, _leaning(50, share), Positions("frame", np.zeros(50, dtype=bool), times=times)),)


def _audit(config: Path) -> str:
    from audit.config import load_config
    from audit.pipeline import run_audit

    return str(run_audit(load_config(config)).comparison_id)


def _write_config(
    root: Path, name: str, probes: Path, *, region: str, limit: float, method: str = ""
) -> Path:
    path = root / f"{name}{method}.toml"
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
        + (f'[method]\nname = "{method}"\n' if method else "")
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
    from tests.integration.tiny_models import text_checkpoint, vision_checkpoint

    for kind, one in (("text", text_checkpoint("bert")), ("vision", vision_checkpoint("vit"))):
        for i, (name, size) in enumerate({"base": 0.0, **NOISE}.items()):
            _perturb(one, root / kind / name, size, seed=i)


def _perturb(one: Any, folder: Path, size: float, *, seed: int) -> None:
    """Save a checkpoint with noise of this size added to every weight; the checkpoint stays as it is."""
    import torch

    clean = {name: value.clone() for name, value in one.model.state_dict().items()}
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in one.model.parameters():
            parameter.add_(torch.randn_like(parameter) * size)
    one.model.save_pretrained(folder)
    one.processor.save_pretrained(folder)
    one.model.load_state_dict(clean)


@dataclass(frozen=True)
class Kind:
    """An audit of one kind of model: its configuration and comparison."""

    config: Path
    comparison: str


def build_kinds(root: Path) -> dict[str, Kind]:
    """Audit a tiny encoder-decoder, a tiny sound model and two tiny towers in one store."""
    from audit.config import load_config
    from audit.pipeline import run_audit

    found = {}
    for name, (checkpoint, rows) in _kinds(root).items():
        for side, size in (("base", 0.0), ("after", 0.05)):
            _perturb(checkpoint, root / name / side, size, seed=len(side))
        path = root / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = root / f"{name}.toml"
        config.write_text(
            f'[store]\nurl = "store"\n[checkpoints.before]\npath = "./{name}/base"\n'
            f'[checkpoints.after]\npath = "./{name}/after"\n[probes]\npath = "{name}.jsonl"\n'
            "[regions]\nopening = { quantile = [0.0, 0.5] }\n[statistics]\nresamples = 99\n"
            '[[gate.rules]]\nregion = "opening"\nkind = "limit"\nfail = 0.02\n'
        )
        found[name] = Kind(config, str(run_audit(load_config(config)).comparison_id))
    return found


def _kinds(root: Path) -> dict[str, tuple[Any, list[dict[str, Any]]]]:
    import transformers

    from tests.integration import tiny_models as tiny

    tokenizer = tiny.word_tokenizer()
    ids = {"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0, "vocab_size": len(tokenizer)}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}
    conv = {
        "conv_dim": (32, 32),
        "conv_stride": (10, 8),
        "conv_kernel": (10, 8),
        "num_feat_extract_layers": 2,
    }
    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
    text = {
        **tower,
        "vocab_size": len(tokenizer),
        "eos_token_id": 3,
        "bos_token_id": 2,
        "max_position_embeddings": 64,
    }
    vision = {**tower, "image_size": 32, "patch_size": 8}
    sound = tiny.build(
        "Wav2Vec2ForSequenceClassification", num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2,
        vocab_size=40, **conv, **tiny.LABELS,
    )  # fmt: skip
    clip = tiny.build("CLIPModel", text_config=text, vision_config=vision)
    return {
        "seq2seq": (
            tiny.checkpoint(tiny.build("T5ForConditionalGeneration", **ids, **t5), tokenizer),
            [{"id": f"s-{i:02d}", "text": tiny.TEXTS[i % 6] + " it" * (i // 6)} for i in range(20)],
        ),
        "sound": (
            tiny.checkpoint(sound, transformers.Wav2Vec2FeatureExtractor()),
            [{"id": f"a-{i:02d}", "audio": _tone(root, i)} for i in range(20)],
        ),
        "towers": (
            tiny.checkpoint(clip, transformers.CLIPProcessor(tiny.image_processor(), tokenizer)),
            [{"id": f"c-{i:02d}", "text": tiny.TEXTS[i % 6], "image": _picture(root, i)} for i in range(20)],
        ),
    }


def _tone(root: Path, i: int) -> str:
    time = np.arange(3200) / 16000
    save_audio(
        root / f"clips/{i:02d}.wav", np.sin(2 * np.pi * (300 + 40 * i) * time).astype(np.float32), 16000
    )
    return f"clips/{i:02d}.wav"


def _picture(root: Path, i: int) -> str:
    pixels = np.random.default_rng(i).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    (root / "pictures").mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(root / f"pictures/{i:02d}.png")
    return f"pictures/{i:02d}.png"
