"""LRP and Grad-CAM of encoder-decoders against slow loops and models whose factors are held fixed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from audit.capture import capture
from audit.capture.inputs.decoding import with_decoder_steps
from audit.capture.inputs.encoded import Encoded
from audit.capture.inputs.texts import encode_texts
from audit.errors import CaptureError, ConfigError
from audit.records import CaptureSettings, Checkpoint, Method
from tests.integration.test_capture_streams import SIZES, seq2seq
from tests.integration.test_image_text_attribution import (
    held_softmaxes,
    slow_grad_cam,
    taken,
    with_constants,
)
from tests.integration.tiny_models import build, checkpoint, text_probes, word_tokenizer
from tests.integration.tiny_sound import sound_probes, whisper

STEP, TARGET = 2, 7
PROBES = text_probes()[:2]
ROW = f"decoder:{STEP}"


M2M100 = {"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0, "vocab_size": 30}


def with_steps(subject: Checkpoint) -> Encoded:
    (item,) = encode_texts(subject, PROBES[:1], CaptureSettings())
    return with_decoder_steps(subject, item, ROW)


def scaled_marian(attention: str = "eager") -> Checkpoint:
    """Return a Marian as they are published: scaled embeddings, and a bias of its logits."""
    subject = seq2seq("marian", attention, scale_embedding=True)
    with torch.no_grad():
        subject.model.final_logits_bias.copy_(torch.linspace(-1, 1, subject.model.config.vocab_size))
    return subject


SUBJECTS = {
    "t5": lambda: seq2seq("t5", "sdpa"),
    "t5-gated": lambda: seq2seq("t5", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "bart": lambda: seq2seq("bart", scale_embedding=True),
    "marian": scaled_marian,
    "mbart": lambda: seq2seq("mbart", "sdpa"),
    "m2m_100": lambda: checkpoint(  # its sinusoids are no parameters
        build("M2M100ForConditionalGeneration", attention="eager", **SIZES, **M2M100), word_tokenizer()
    ),
    "whisper": whisper,
}


def nudged(subject: Checkpoint) -> Checkpoint:
    """Give every bias and norm a value of its own, as training does."""
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in subject.model.named_parameters():
            if parameter.dim() == 1 and ("bias" in name or "norm" in name):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))
    return subject


@pytest.mark.parametrize("family", SUBJECTS)
def test_relevances_of_source_and_prefix_and_all_constants_add_up_to_the_logit(family: str) -> None:
    subject = nudged(SUBJECTS[family]())
    flags = [p.requires_grad for p in (*subject.model.parameters(), *subject.model.buffers())]
    probes = sound_probes("whisper", 2) if family == "whisper" else PROBES
    for found in capture(subject, probes, method=Method("lrp", ROW), target="film"):
        assert sum(one.share for one in found.maps) == pytest.approx(1.0)
        for one in found.maps:
            assert one.diagnostics["conservation_error"] < 1e-5
            assert one.share > 0.01
            assert one.weights.max() > 1.02 * one.weights.mean()
    assert [p.requires_grad for p in (*subject.model.parameters(), *subject.model.buffers())] == flags


@pytest.mark.parametrize("family", ["bart", "marian"])
def test_relevance_equals_input_times_gradient_of_a_model_with_its_factors_held(family: str) -> None:
    subject = nudged(SUBJECTS[family]())
    item = with_steps(subject)
    model: Any = with_constants(subject.model)
    leaves = embedded(model, item)
    with held_softmaxes():
        score = model(**item.tensors, use_cache=False).logits[0, STEP, TARGET]
    slopes = torch.autograd.grad(score, leaves)
    sizes = [(x * g)[0].sum(-1).detach().abs() for x, g in zip(leaves, slopes, strict=True)]
    whole = float(sum(one.sum() for one in sizes))
    token = subject.processor.decode([TARGET])
    found = next(iter(capture(subject, PROBES[:1], method=Method("lrp", ROW), target=token)))
    for one, expected in zip(found.maps, sizes, strict=True):
        np.testing.assert_allclose(one.weights * one.share, expected / whole, atol=1e-6)


def embedded(model: Any, item: Encoded) -> list[Tensor]:
    """Return what both tables give as leaves; they stand in every call that follows, source before prefix."""
    tables = [model.get_encoder().get_input_embeddings(), model.get_decoder().get_input_embeddings()]
    ids = [item.tensors[name] for name in ("input_ids", "decoder_input_ids")]
    leaves = [table(x).detach().requires_grad_() for table, x in zip(tables, ids, strict=True)]
    left = list(leaves)
    for table in {id(table): table for table in tables}.values():
        table.register_forward_hook(lambda *_: left.pop(0).clone())
    return leaves


@pytest.mark.parametrize("family", ["marian", "t5", "bart"])
def test_input_times_gradient_is_of_the_embeddings_as_the_model_scales_them(family: str) -> None:
    subject = SUBJECTS[family]()
    item = with_steps(subject)
    token = subject.processor.decode([TARGET])
    maps = next(iter(capture(subject, PROBES[:1], method=Method("input_x_gradient", ROW), target=token))).maps
    leaves = embedded(subject.model, item)
    score = subject.model(**item.tensors, use_cache=False).logits[0, STEP, TARGET]
    slopes = torch.autograd.grad(score, leaves)
    for one, x, g in zip(maps, leaves, slopes, strict=True):
        expected = (x * g)[0].sum(-1).detach().abs()
        np.testing.assert_allclose(one.weights, expected / expected.sum(), atol=1e-5)


@pytest.mark.parametrize("family", ["bart", "t5"])
@pytest.mark.parametrize("layer", [0, -1])
def test_grad_cam_reads_what_self_attention_of_either_stack_takes(family: str, layer: int) -> None:
    subject = SUBJECTS[family]()
    item = with_steps(subject)
    token = subject.processor.decode([TARGET])
    method = Method("grad_cam", ROW, {"layer": layer})
    found = next(iter(capture(subject, PROBES[:1], method=method, target=token)))
    for one, module in zip(found.maps, own_attention(subject.model, layer), strict=True):
        with taken(module) as kept:
            logits = subject.model(**item.tensors, use_cache=False).logits
        expected = slow_grad_cam(logits[0, STEP, TARGET], *kept)
        assert one.share == pytest.approx(1)
        if expected.sum() > 0:
            np.testing.assert_allclose(one.weights, expected / expected.sum(), atol=1e-5)
        else:
            assert one.diagnostics["undefined"] == 1.0


def own_attention(model: Any, layer: int) -> list[nn.Module]:
    stacks = model.get_encoder(), model.get_decoder()
    if model.config.model_type == "t5":
        return [stack.block[layer].layer[0].SelfAttention for stack in stacks]
    return [stack.layers[layer].self_attn for stack in stacks]


def test_grad_cam_of_whisper_is_over_the_frames() -> None:
    method = Method("grad_cam", "decoder:1", {"layer": 0})
    (found,) = capture(whisper(), sound_probes("whisper", 1), method=method, target="film")
    assert [len(one.weights) for one in found.maps] == [50, 2]
    assert found.maps[0].weights.sum() == pytest.approx(1, abs=1e-5)


def test_a_layer_that_one_stack_lacks_is_refused() -> None:
    method = Method("grad_cam", ROW, {"layer": 2})  # three layers in the encoder, two in the decoder
    with pytest.raises(ConfigError, match="layer = 2, but the checkpoint has 2 attention layers"):
        list(capture(seq2seq("bart"), PROBES, method=method))


def test_a_step_without_a_rule_is_refused() -> None:
    subject = seq2seq("bart")
    decoder = subject.model.get_decoder()
    decoder.layernorm_embedding.register_forward_hook(lambda _m, _a, out: out.exp())
    with pytest.raises(CaptureError, match="has a step that LRP has no rule for"):
        list(capture(subject, PROBES[:1], method=Method("lrp", ROW)))
