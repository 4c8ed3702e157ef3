"""What each position adds where blocks attend to an image, gates included, by every block written out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from audit.capture import capture
from audit.errors import CaptureError, ConfigError
from audit.records import Checkpoint, Method
from tests.integration.test_capture_image_text import attentions
from tests.integration.test_joined_cross import TILE, Matrix, check, decoder, gated, inputs
from tests.integration.tiny_image_text import blip, mllama, question_probes


@contextmanager
def traced(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Keep what each module takes first and gives first, position by position."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = []
    for path, module in model.named_modules():

        def keep(_m: Any, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            taken = args[0] if args else kwargs.get("hidden_states")
            given = output[0] if isinstance(output, tuple) else output
            if isinstance(taken, Tensor) and isinstance(given, Tensor):
                seen[path] = taken.flatten(0, -2).clone(), given.flatten(0, -2).clone()

        handles.append(module.register_forward_hook(keep, with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def run(subject: Checkpoint) -> dict[str, tuple[Tensor, Tensor]]:
    with traced(subject.model) as seen, torch.no_grad():
        subject.model(**inputs(subject))
    return seen


def product(layers: list[Matrix]) -> Matrix:
    R = np.eye(len(layers[0]))
    for layer in layers:
        R = layer @ R
    return R


def composed(steps: list[tuple[str, Matrix]], keys: Matrix) -> tuple[Matrix, Matrix]:
    """Return the last row; the last column of a cross-attention is what it keeps."""
    n = len(steps[0][1])
    source, prefix = np.zeros((n, keys.shape[1])), np.eye(n)
    for kind, A in steps:
        if kind == "self":
            source, prefix = A @ source, A @ prefix
        else:
            source, prefix = A[:, -1:] * source + A[:, :-1] @ keys, A[:, -1:] * prefix
    return source[-1], prefix[-1]


# --- Llama 3.2: every norm stands before its attention ----------------------------------------

LLAMA = (
    *((f"model.vision_model.transformer.layers.{i}", "self_attn", None) for i in range(3)),
    ("model.vision_model.global_transformer.layers.0", "self_attn", "gate_attn"),
    ("model.language_model.layers.0", "self_attn", None),
    ("model.language_model.layers.1", "cross_attn", "cross_attn_attn_gate"),
    ("model.language_model.layers.2", "self_attn", None),
)


def matrices(subject: Checkpoint, size: Callable[[Tensor, Tensor], Tensor]) -> list[Matrix]:
    """Return each layer's contributions, rows summing to 1; `size` is that of (key, dim) beside their sum."""
    kept, seen, modules = (
        attentions(subject, inputs(subject)),
        run(subject),
        dict(subject.model.named_modules()),
    )
    found = []
    for weights, (block, name, gate) in zip(kept, LLAMA, strict=True):
        scale = 1.0 if gate is None else float(getattr(modules[block], gate).detach().tanh())
        heads, hidden = weights.shape[1], seen[block][0].double()
        values = seen[f"{block}.{name}.v_proj"][1].double().reshape(weights.shape[-1], -1, 8)
        values = values.repeat_interleave(heads // values.shape[1], dim=1)
        output = modules[f"{block}.{name}.o_proj"].weight.detach().double().T.reshape(heads, 8, -1)
        rows = []
        for i in range(weights.shape[2]):
            vectors = scale * torch.einsum("hj,jhd,hde->je", weights[0, :, i].double(), values, output)
            if name == "cross_attn":
                vectors = torch.cat([vectors, hidden[i : i + 1]])
            else:
                vectors[i] += hidden[i]
            row = size(vectors, vectors.sum(0))
            rows.append(row / row.sum())
        found.append(torch.stack(rows).numpy())
    return found


SIZES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "norms": lambda vectors, _: vectors.norm(dim=1),
    "alti": lambda vectors, y: (y.abs().sum() - (y - vectors).abs().sum(dim=1)).clamp_min(0),
}


@pytest.mark.parametrize("name", SIZES)
def test_what_a_gate_lets_through_is_scaled_by_it(name: str) -> None:
    subject = gated()
    layers = matrices(subject, SIZES[name])
    keys = (0.5 * product(layers[:4]) + 0.5 * product(layers[:2]))[TILE]
    expected = composed(decoder(gated, layers), keys)
    (captured,) = capture(subject, question_probes(1), method=Method(name))
    check(captured.maps, *expected, atol=2e-6)
    assert captured.maps[0].share + captured.maps[1].share == pytest.approx(1.0)


@pytest.mark.parametrize(
    "method", [Method("norms"), Method("alti"), Method("rollout", params={"residual": "measured"})]
)
def test_behind_a_closed_gate_there_is_no_image(method: Method) -> None:
    """Plain rollout gives it a half all the same: a gate is no attention weight."""
    (captured,) = capture(mllama(), question_probes(1), method=method)
    image, text = captured.maps
    assert (image.share, image.diagnostics["undefined"]) == (0.0, 1.0)
    assert text.share == pytest.approx(1.0)


def test_a_gate_that_opens_gives_the_image_more() -> None:
    shares = []
    for gate in (0.1, 0.7, 2.0):
        subject = gated()
        with torch.no_grad():
            subject.model.model.language_model.layers[1].cross_attn_attn_gate.fill_(gate)
        (captured,) = capture(subject, question_probes(1), method=Method("norms"))
        shares.append(captured.maps[0].share)
    assert shares == sorted(shares)
    assert shares[-1] > 2 * shares[0]


# --- measured residuals -----------------------------------------------------------------------


def kept_share(x: Tensor, added: Tensor) -> Matrix:
    """Return ‖x‖ / (‖x‖ + ‖attention‖) of each position."""
    own, other = x.norm(dim=-1), added.norm(dim=-1)
    return (own / (own + other)).double().numpy()[:, None]


def blip_parts(seen: dict[str, tuple[Tensor, Tensor]]) -> list[Matrix]:
    shares = []
    for i in range(3):
        block = f"vision_model.encoder.layers.{i}"
        shares.append(kept_share(seen[block][0], seen[f"{block}.self_attn.projection"][1]))
    for i in range(2):
        block = f"text_decoder.bert.encoder.layer.{i}"
        shares.append(kept_share(seen[block][0], seen[f"{block}.attention.output.dense"][1]))
        own = seen[f"{block}.attention.output.LayerNorm"][1]
        shares.append(kept_share(own, seen[f"{block}.crossattention.output.dense"][1]))
    return shares


def llama_parts(subject: Checkpoint, seen: dict[str, tuple[Tensor, Tensor]]) -> list[Matrix]:
    modules, shares = dict(subject.model.named_modules()), []
    for block, name, gate in LLAMA:
        scale = 1.0 if gate is None else float(getattr(modules[block], gate).detach().tanh())
        shares.append(kept_share(seen[block][0], scale * seen[f"{block}.{name}.o_proj"][1]))
    return shares


@pytest.mark.parametrize("make", [blip, gated])
def test_the_measured_residual_is_that_of_each_sum(make: Callable[[], Checkpoint]) -> None:
    subject = make()
    kept, seen = attentions(subject, inputs(subject)), run(subject)
    shares = blip_parts(seen) if make is blip else llama_parts(subject, seen)
    kinds = ["tower"] * (len(kept) - len(decoder(make, kept))) + [kind for kind, _ in decoder(make, kept)]
    mixed = []
    for weights, rho, kind in zip(kept, shares, kinds, strict=True):
        A = (1 - rho) * weights[0].mean(0).double().numpy()
        mixed.append(np.concatenate([A, rho], axis=1) if kind == "cross" else A + rho * np.eye(len(A)))
    keys = product(mixed[:3])
    if make is gated:
        keys = (0.5 * product(mixed[:4]) + 0.5 * product(mixed[:2]))[TILE]
    method = Method("rollout", params={"residual": "measured"})
    (captured,) = capture(subject, question_probes(1), method=method)
    check(captured.maps, *composed(decoder(make, mixed), keys), atol=2e-6)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("globenc", "it takes the layers of an encoder and of a decoder alone; use norms or alti"),
        ("value_zeroing", "it takes the layers of an encoder and of a decoder alone; use norms or alti"),
    ],
)
def test_what_does_not_tell_two_attentions_apart_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.* is not available for blocks that attend.*{why}"):
        next(capture(blip(), question_probes(1), method=Method(name)))


def test_a_scale_that_is_no_gate_is_refused() -> None:
    subject = gated()
    layer = subject.model.model.language_model.layers[1]
    attend = layer.cross_attn.forward
    layer.cross_attn.forward = lambda **given: (0.3 * attend(**given)[0], attend(**given)[1])
    with pytest.raises(CaptureError):
        next(capture(subject, question_probes(1), method=Method("norms")))
