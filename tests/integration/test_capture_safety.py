"""Capture leaves models as it found them, works from several threads, and refuses what it cannot see."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from audit.capture import capture, check_determinism
from audit.capture.attention.check import check_values
from audit.capture.attention.hooks import hook_capture
from audit.capture.attention.interface import AttentionCall, interface_capture
from audit.capture.attention.layers import plan_capture
from audit.capture.attention.passes import fold_batch
from audit.capture.engines.fold import BatchFold
from audit.capture.engines.settings import FoldSettings
from audit.errors import CaptureError
from audit.records import Captured, Checkpoint
from tests.integration.tiny_models import (
    SIZES,
    build,
    checkpoint,
    image_probes,
    text_checkpoint,
    text_probes,
    vision_checkpoint,
    word_tokenizer,
)


def implementations(model: Any) -> list[str]:
    return [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]


def state(model: Any) -> tuple[Any, ...]:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    training = [m.training for m in model.modules()]
    return implementations(model), hooks, training, torch.get_rng_state().tolist(), torch.is_grad_enabled()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_capture_restores_everything(attention: str) -> None:
    subject = text_checkpoint("bert", attention=attention)
    subject.model.train()
    subject.model.bert.embeddings.eval()
    before = state(subject.model)
    list(capture(subject, text_probes()))
    assert state(subject.model) == before
    assert "sdpa" in before[0] or "eager" in before[0]


def test_capture_restores_everything_after_an_exception_in_the_middle() -> None:
    subject = text_checkpoint("bert", attention="sdpa")
    expected = maps(capture(subject, text_probes()))
    before = state(subject.model)

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    handle = subject.model.bert.encoder.layer[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        list(capture(subject, text_probes()))
    handle.remove()
    assert state(subject.model) == before
    np.testing.assert_array_equal(maps(capture(subject, text_probes())), expected)


def test_an_abandoned_capture_leaves_the_model_as_it_was() -> None:
    subject = text_checkpoint("bert", attention="sdpa")
    before = state(subject.model)
    running = capture(subject, text_probes())
    next(running)
    assert state(subject.model) == before  # nothing stays switched while the caller works
    running.close()
    assert state(subject.model) == before


def maps(captured: Iterator[Captured]) -> Any:
    return np.concatenate([np.concatenate([m.weights for m in c.maps]) for c in captured])


def in_threads(*work: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(work)
    barrier = threading.Barrier(len(work))

    def run(index: int) -> None:
        barrier.wait()
        results[index] = work[index]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("family", ["bert", "deberta-v2"])
def test_two_threads_capture_one_model(family: str) -> None:
    subject = text_checkpoint(family, attention=None if family == "deberta-v2" else "sdpa")
    first, second = text_probes(), list(reversed(text_probes()))
    expected = [maps(capture(subject, first)), maps(capture(subject, second))]
    before = state(subject.model)[:3]

    def work(probes: Any) -> Callable[[], Any]:
        return lambda: [maps(capture(subject, probes)) for _ in range(4)]

    for found, wanted in zip(in_threads(work(first), work(second)), expected, strict=True):
        for one in found:
            np.testing.assert_array_equal(one, wanted)
    assert state(subject.model)[:3] == before


def test_two_models_that_share_a_config_are_captured_at_once() -> None:
    one = text_checkpoint("bert", attention="sdpa")
    other = checkpoint(
        build("BertForSequenceClassification", attention="sdpa", seed=5, vocab_size=99), one.processor
    )
    for module in other.model.modules():
        if hasattr(module, "config"):
            module.config = one.model.config
    expected = [maps(capture(one, text_probes())), maps(capture(other, text_probes()))]
    assert not np.array_equal(*expected)
    found = in_threads(
        *[lambda s=s: [maps(capture(s, text_probes())) for _ in range(4)] for s in (one, other)]
    )
    for several, wanted in zip(found, expected, strict=True):
        for single in several:
            np.testing.assert_array_equal(single, wanted)
    assert set(implementations(one.model)) == {"sdpa"}


def test_calls_of_other_threads_and_modules_are_not_seen() -> None:
    subject = text_checkpoint("bert", attention="sdpa")
    tensors = {"input_ids": torch.tensor([[2, 7, 8, 9, 3]])}
    with torch.no_grad():
        expected = subject.model(**tensors).logits
        plan = plan_capture(subject.model)
        only = dict(list(plan.modules().items())[1:2])
        seen: list[str] = []
        with interface_capture(only, plan.configs, lambda call: seen.append(call.path)):
            (from_thread,) = in_threads(lambda: no_grad(lambda: subject.model(**tensors).logits))
            assert seen == []
            here = subject.model(**tensors).logits
        assert seen == list(only)
    assert torch.equal(from_thread, expected)
    assert torch.equal(here, expected)


def no_grad(work: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return work()


def test_a_capture_inside_a_capture_sees_its_own_calls() -> None:
    subject = text_checkpoint("bert", attention="sdpa")
    tensors = {"input_ids": torch.tensor([[2, 7, 8, 9, 3]])}
    plan = plan_capture(subject.model)
    outer: list[str] = []
    inner: list[str] = []
    with torch.no_grad(), interface_capture(plan.modules(), plan.configs, lambda c: outer.append(c.path)):
        with interface_capture(plan.modules(), plan.configs, lambda c: inner.append(c.path)):
            subject.model(**tensors)
        assert (len(outer), len(inner)) == (0, 3)
        subject.model(**tensors)
    assert (len(outer), len(inner)) == (3, 3)
    assert set(implementations(subject.model)) == {"sdpa"}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("family", "attention"), [("bert", "sdpa"), ("bert", "eager"), ("deberta-v2", None), ("llama", "sdpa")]
)
def test_padding_on_either_side_changes_no_map(family: str, attention: str | None, side: str) -> None:
    subject = text_checkpoint(family, attention=attention)
    ids = torch.tensor([[2, 7, 8, 9, 3]])
    pads = torch.zeros(1, 3, dtype=torch.long)
    order = (pads, ids) if side == "left" else (ids, pads)
    real = slice(3, 8) if side == "left" else slice(0, 5)
    mask = torch.zeros(1, 8, dtype=torch.long)
    mask[:, real] = 1
    tensors = {"input_ids": torch.cat(order, 1), "attention_mask": mask}
    # Positions count from the first real token, or absolute embeddings would see another input.
    if family == "bert":
        tensors["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    plan = plan_capture(subject.model)

    def final(inputs: dict[str, torch.Tensor], valid: torch.Tensor) -> torch.Tensor:
        read = torch.zeros(valid.shape)
        read[0, int(valid[0].nonzero()[-1])] = 1
        fold = BatchFold(FoldSettings(), read, valid)
        fold_batch(subject.model, plan, inputs, fold, verify=True)
        return fold.final_row()

    padded = final(tensors, mask.bool())
    alone = final(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.ones(1, 5, dtype=torch.bool)
    )
    np.testing.assert_allclose(padded[:, real], alone, atol=1e-6)
    assert float(padded[~mask.bool()].abs().sum()) == 0


# --- refusals ---------------------------------------------------------------------------------


def refused(model: Any, match: str, processor: Any = None, probes: Any = None) -> None:
    with pytest.raises(CaptureError, match=match):
        list(capture(checkpoint(model, processor or word_tokenizer()), probes or text_probes()))


@pytest.mark.parametrize(
    ("architecture", "changes", "match"),
    [
        (
            "MambaForCausalLM",
            {},
            r"MambaForCausalLM mixes positions without softmax attention in backbone.layers.0.mixer",
        ),
        (
            "FNetForSequenceClassification",
            {},
            r"fnet.encoder.layer.0.fourier.self \(FNetBasicFourierTransform\)",
        ),
        (
            "BartForSequenceClassification",
            {
                "d_model": 32,
                "encoder_layers": 1,
                "decoder_layers": 1,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
            },
            "encoder-decoder",
        ),
        ("CLIPModel", {}, "CLIPModel cannot run on input_ids, attention_mask: "),
        ("RwkvForCausalLM", {"attention_hidden_size": 32}, "mixes positions without softmax attention"),
    ],
)
def test_models_without_an_exact_rollout_are_refused_by_layer(
    architecture: str, changes: dict[str, Any], match: str
) -> None:
    cls = getattr(transformers, architecture)
    plain = architecture in ("CLIPModel", "BartForSequenceClassification")
    small = {} if plain else {k: SIZES[k] for k in ("hidden_size", "num_hidden_layers")}
    if architecture.startswith(("Bert", "FNet")):
        small |= {"num_attention_heads": 4, "intermediate_size": 37}
    if architecture == "CLIPModel":
        tiny = {**SIZES, "projection_dim": 8}
        changes = {"text_config": tiny, "vision_config": {**tiny, "image_size": 32, "patch_size": 16}}
    refused(
        cls(
            cls.config_class(
                **{"vocab_size": 40, **small, **changes} if architecture != "CLIPModel" else changes
            )
        ),
        match,
    )


class Blurring(torch.nn.Module):
    """Lets neighbours see each other beside the attention, as a convolution in a block does."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + 0.1 * hidden.roll(1, dims=1)


def test_positions_that_mix_outside_attention_are_refused() -> None:
    subject = text_checkpoint("bert", attention="sdpa")
    layer = subject.model.bert.encoder.layer[1]
    layer.output.dropout = torch.nn.Sequential(layer.output.dropout, Blurring())
    with pytest.raises(
        CaptureError, match=r"positions mix outside the captured attention in bert.encoder.layer"
    ):
        list(capture(subject, text_probes()))


class SideBySide(torch.nn.Module):
    """Gives a block the stream as it was before the block below it: two branches over one input."""

    def __init__(self, below: torch.nn.Module, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block
        below.register_forward_pre_hook(self.keep)

    def keep(self, _module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.before = args[0]

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        branch = self.block(self.before, *args, **kwargs)
        return branch + hidden if isinstance(branch, torch.Tensor) else (branch[0] + hidden, *branch[1:])


def test_layers_side_by_side_are_refused() -> None:
    subject = text_checkpoint("bert", attention="sdpa")
    layers = subject.model.bert.encoder.layer
    layers[1] = SideBySide(layers[0], layers[1])
    with pytest.raises(CaptureError, match=r"does not see what bert.encoder.layer.0.attention.self gives"):
        list(capture(subject, text_probes()))


@pytest.mark.parametrize("architecture", ["BloomForCausalLM", "FalconForCausalLM"])
def test_mixing_is_seen_in_layers_that_return_their_own_residual(architecture: str) -> None:
    names = {"n_layer": 3, "n_head": 4} if architecture == "BloomForCausalLM" else {}
    model = build(architecture, vocab_size=40, pad_token_id=0, **names)
    block = model.transformer.h[1]
    block.mlp = torch.nn.Sequential(block.mlp, Blurring()) if architecture.startswith("Falcon") else block.mlp
    block.post_attention_layernorm = torch.nn.Sequential(
        getattr(block, "post_attention_layernorm", torch.nn.Identity()), Blurring()
    )
    with pytest.raises(CaptureError, match=r"positions mix outside the captured attention in transformer.h"):
        list(capture(checkpoint(model, word_tokenizer()), text_probes()))


def test_cross_attention_without_an_encoder_rests_and_changes_no_map() -> None:
    plain = build("BertLMHeadModel", is_decoder=True, vocab_size=40)
    idle = build("BertLMHeadModel", is_decoder=True, add_cross_attention=True, vocab_size=40)
    idle.load_state_dict(plain.state_dict(), strict=False)
    found, expected = (maps(capture(checkpoint(m, word_tokenizer()), text_probes())) for m in (idle, plain))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_hybrid_models_are_refused_by_layer() -> None:
    config = transformers.Qwen3NextConfig(
        vocab_size=40,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        **SIZES,
    )
    refused(
        transformers.Qwen3NextForCausalLM(config), r"model.layers.0.linear_attn \(Qwen3NextGatedDeltaNet\)"
    )


def test_a_fused_kernel_off_the_interface_is_refused_and_not_silently_empty() -> None:
    sizes = {"vocab_size": 40, **SIZES}
    model = build("FalconForCausalLM", attention="sdpa", **sizes)
    refused(model, r"transformer.h.0.self_attention \(FalconAttention\) runs under 'sdpa'.*eager")


def test_a_layer_count_that_differs_from_the_config_is_refused() -> None:
    subject = text_checkpoint("bert", attention="sdpa")
    del subject.model.bert.encoder.layer[1]
    with pytest.raises(CaptureError, match="captured 2 attention layers, expected 3"):
        list(capture(subject, text_probes()))


def test_a_layer_that_never_runs_is_refused() -> None:
    subject = text_checkpoint("bert", attention="sdpa")
    layers = subject.model.bert.encoder.layer
    spare = copy.deepcopy(layers[2])
    layers.append(spare)
    spare.forward = lambda hidden, *_, **__: hidden
    with pytest.raises(CaptureError, match=r"bert.encoder.layer.3.attention.self never ran"):
        list(capture(subject, text_probes()))


def test_a_layer_that_hides_its_weights_is_refused() -> None:
    subject = text_checkpoint("deberta-v2", attention=None)
    attention = subject.model.deberta.encoder.layer[2].attention.self
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: (forward(*args, **kwargs)[0], None)
    with pytest.raises(
        CaptureError, match=r"deberta.encoder.layer.2.attention.self .* returned 0 weight tensors"
    ):
        list(capture(subject, text_probes()))


@contextmanager
def kernel(name: str, function: Any) -> Iterator[None]:
    original = ALL_ATTENTION_FUNCTIONS[name]
    type(ALL_ATTENTION_FUNCTIONS).register(name, function)
    try:
        yield
    finally:
        type(ALL_ATTENTION_FUNCTIONS).register(name, original)


def test_a_kernel_that_does_something_else_is_found_by_its_output() -> None:
    subject = text_checkpoint("bert", attention="sdpa")
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def sharper(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return original(module, query * 1.2, *args, **kwargs)

    with (
        kernel("sdpa", sharper),
        pytest.raises(CaptureError, match=r"layer.0.attention.self: its weights times"),
    ):
        list(capture(subject, text_probes()))


def test_hooked_values_reproduce_the_output_of_a_layer_off_the_interface() -> None:
    subject = text_checkpoint("deberta-v2", attention=None)
    calls: list[AttentionCall] = []
    ids = torch.tensor([[2, 7, 8, 9, 3]])
    with torch.no_grad(), hook_capture(plan_capture(subject.model).modules(), calls.append):
        subject.model(input_ids=ids, attention_mask=torch.ones_like(ids), output_attentions=True)
    valid = torch.ones(1, 5, dtype=torch.bool)
    for call in calls:
        assert call.value is not None
        check_values(call, valid)
        swapped = AttentionCall(call.path, call.weights.flip(1), call.output, call.value)
        with pytest.raises(CaptureError, match="its weights times its values differ"):
            check_values(swapped, valid)


def test_nan_weights_name_the_layer() -> None:
    subject = text_checkpoint("bert", attention="sdpa")
    with torch.no_grad():
        subject.model.bert.encoder.layer[1].attention.self.query.weight[0, 0] = float("nan")
    with pytest.raises(CaptureError, match=r"bert.encoder.layer.1.attention.self has NaN"):
        list(capture(subject, text_probes()))


def test_nan_logits_name_the_probe() -> None:
    subject = vision_checkpoint("vit")
    with torch.no_grad():
        subject.model.classifier.bias[0] = float("inf")
    with pytest.raises(CaptureError, match="probe i-0: the checkpoint's output is NaN or infinite"):
        list(capture(subject, image_probes()))


def test_a_model_that_answers_differently_each_time_is_refused() -> None:
    subject = text_checkpoint("bert", attention="sdpa")
    check_determinism(subject, text_probes())
    calls = iter(range(1, 1000))
    subject.model.bert.embeddings.register_forward_hook(lambda _m, _a, out: out * (1 + 1e-3 * next(calls)))
    with pytest.raises(CaptureError, match="determinism"):
        check_determinism(subject, text_probes())
    with pytest.raises(CaptureError, match="determinism"):
        list(capture(subject, text_probes()))


def test_a_capture_that_would_change_the_output_is_refused() -> None:
    subject = text_checkpoint("bert", attention="sdpa")

    def meddle(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        watched = subject.model.config._attn_implementation.startswith("rollout")
        return output + 1 if watched else output

    subject.model.classifier.register_forward_hook(meddle)
    with pytest.raises(CaptureError, match="capturing changes the model's own output"):
        list(capture(subject, text_probes()))


def test_a_path_around_the_interface_is_refused_by_layer() -> None:
    # This flag makes GPT-2's eager attention leave the interface; models compare the name of their kernel.
    subject: Checkpoint = text_checkpoint("gpt2", reorder_and_upcast_attn=True)
    with pytest.raises(CaptureError, match=r"transformer.h.0.attn ran 1 times but gave weights 0 times"):
        list(capture(subject, text_probes()))
