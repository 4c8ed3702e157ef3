"""Gradient rollout in step with backward, against gradients that are all kept, and finite differences."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

import audit
from audit.capture import capture
from audit.capture.attention.interface import KernelCall, interface_capture, original_kernel
from audit.capture.attention.layers import plan_capture
from audit.capture.engines import gradient as engine
from audit.capture.inputs.encoded import encode_image
from audit.capture.inputs.texts import encode_texts
from audit.errors import CheckpointError, ExitCode, ProbeError
from audit.methods import gradient_rollout
from audit.methods.gradient import gradient_map
from audit.records import CaptureSettings, Checkpoint, Method, Probe
from tests.integration.test_capture_families import ROWS, family_checkpoint, family_probes, read_weights
from tests.integration.tiny_models import (
    TEXT_FAMILIES,
    build,
    checkpoint,
    text_checkpoint,
    text_probes,
    vision_checkpoint,
    word_tokenizer,
)

FAMILIES = (*TEXT_FAMILIES, "vit", "deit-teacher", "dinov2")
RELEVANCE = Method("gradient_rollout")


def encode(subject: Checkpoint, probe: Probe) -> Any:
    if probe.modality == "image":
        return encode_image(subject, probe)
    return encode_texts(subject, [probe], CaptureSettings())[0]


def kept_gradients(
    subject: Checkpoint, tensors: dict[str, torch.Tensor], target: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Attentions of an eager pass and the gradient of one logit, every layer's retained."""
    outputs = subject.model(**tensors, output_attentions=True)
    for attention in outputs.attentions:
        attention.retain_grad()
    logits = outputs.logits[0] if outputs.logits.dim() == 2 else outputs.logits[0, -1]
    logits[target].backward()
    attentions = [attention.detach() for attention in outputs.attentions]
    gradients = [attention.grad for attention in outputs.attentions]
    subject.model.zero_grad()
    return attentions, gradients


def slow_map(subject: Checkpoint, probe: Probe, target: int, form: str, row: str) -> NDArray[np.float64]:
    item = encode(subject, probe)
    n = len(item)
    special = 0 if item.positions.grid is None else n - item.positions.grid[0] * item.positions.grid[1]
    read = torch.tensor(read_weights(row, n, special))[None]
    attentions, gradients = kept_gradients(subject, dict(item.tensors), target)
    matrix = gradient_rollout([a.double() for a in attentions], [g.double() for g in gradients], form=form)
    rows = torch.einsum("bq,bqk->bk", read, matrix)
    weights, defined = gradient_map(rows, read if form == "relevance" else None)
    assert bool(defined.all())
    return weights[0].numpy()


@pytest.mark.parametrize("form", ["relevance", "product"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_gradient_rollout_equals_the_one_of_kept_gradients(
    family: str, attention: str, form: str
) -> None:
    streamed, slow = family_checkpoint(family, attention), family_checkpoint(family, "eager")
    probes = family_probes(family)[:3]
    method = Method("gradient_rollout", params={"form": form})
    for probe, found in zip(probes, capture(streamed, probes, method=method, target=1), strict=True):
        (one,) = found.maps
        expected = slow_map(slow, probe, 1, form, ROWS.get(family, "cls"))
        np.testing.assert_allclose(one.weights, expected, atol=1e-5)
        assert one.layers is None
        assert one.positions.causal == (family in ("gpt2", "llama", "qwen2"))
        assert expected.max() > 1.3 * expected.min()


def test_sliding_windows_and_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}
    probes = text_probes()[:2]
    for family, extra in (("qwen2", changes), ("llama", {}), ("bert", {}), ("gpt2", {})):
        streamed, slow = text_checkpoint(family, attention="sdpa", **extra), text_checkpoint(family, **extra)
        monkeypatch.setattr(engine, "BLOCK_ENTRIES", 4 * 3 * 40)  # some three queries of 4 heads
        found = list(capture(streamed, probes, method=RELEVANCE, target=2))
        for probe, one in zip(probes, found, strict=True):
            expected = slow_map(slow, probe, 2, "relevance", ROWS.get(family, "cls"))
            np.testing.assert_allclose(one.maps[0].weights, expected, atol=1e-5)


def test_learned_sinks_take_part_in_the_backward_pass() -> None:
    sizes = {
        "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
        "intermediate_size": 32, "sliding_window": 64, "pad_token_id": 0,
    }  # fmt: skip
    tokenizer = word_tokenizer()
    model = build("GptOssForCausalLM", vocab_size=len(tokenizer), **sizes)
    subject, probes = checkpoint(model, tokenizer), text_probes()[:2]
    for probe, found in zip(probes, capture(subject, probes, method=RELEVANCE, target=7), strict=True):
        expected = slow_map(subject, probe, 7, "relevance", "last")
        np.testing.assert_allclose(found.maps[0].weights, expected, atol=1e-5)


def kernel_call(*, key_heads: int = 2, **options: Any) -> KernelCall:
    """A real fused call in float64, off any model."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, key_heads, key_heads)
    )
    layer = text_checkpoint("llama", attention="eager").model.model.layers[0].self_attn
    options = {"scaling": 0.7, "dropout": 0.0, **options}
    layer.num_key_value_groups = 4 // key_heads
    mask = options.pop("mask", None)
    return KernelCall("layer", layer, original_kernel(layer, "sdpa"), query, key, value, mask, options)


class Again(engine.GradientFold):
    """Lets one layer be passed many times, as gradcheck does."""

    def start_layer(self, layer: int) -> None:
        self._next, self._vector = None, torch.zeros_like(self.read)
        super().start_layer(layer)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_gradients_of_a_streamed_layer_equal_finite_differences(key_heads: int) -> None:
    mask = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    call = kernel_call(key_heads=key_heads, mask=mask)

    def layer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        read = torch.full((2, 5), 0.2, dtype=torch.float64)
        fold = Again(engine.FoldSettings(), read, torch.ones(2, 5, dtype=torch.bool))
        fold.calls = 1
        saved = engine._Saved(call, fold, 0)
        output: torch.Tensor = engine._StreamedAttention.apply(saved, query, key, value, mask, None, None)
        return output

    assert torch.autograd.gradcheck(layer, (call.query, call.key, call.value))


def test_gradient_of_the_weights_equals_finite_differences() -> None:
    """Raise one weight A[i, j] by ε: the output of its head at i moves by ε·v_j, and so does the logit."""
    subject = text_checkpoint("bert")
    subject.model.double()
    item = encode(subject, text_probes()[3])
    plan = plan_capture(subject.model)
    path = plan.layers[1].path
    _, gradients = kept_gradients(subject, dict(item.tensors), 1)

    def logit(head: int, i: int, j: int, step: float) -> float:
        def push(call: Any) -> torch.Tensor | None:
            if call.path != path or call.value is None:
                return None
            output = call.output.clone()
            output[0, i, head] += step * call.value[0, head, j]
            return output

        with torch.no_grad(), interface_capture(plan.modules(), plan.configs, push):
            return float(subject.model(**item.tensors).logits[0, 1])

    folded: list[torch.Tensor] = []

    class Keeping(engine.GradientFold):
        def block(self, start: int, weights: torch.Tensor, gradient: torch.Tensor) -> None:
            folded.append(gradient.clone())
            super().block(start, weights, gradient)

    n = len(item)
    fold = Keeping(engine.FoldSettings(), torch.eye(n, dtype=torch.float64)[:1], torch.ones(1, n).bool())
    engine.gradient_batch(subject, plan, [item], item.tensors, fold, wanted={item.probe.id: 1})
    streamed = folded[::-1][1][0]
    torch.testing.assert_close(streamed, gradients[1][0])
    for head, i, j in ((0, 0, 0), (1, 3, 5), (3, n - 1, 2), (2, 4, 4)):
        slope = (logit(head, i, j, 1e-5) - logit(head, i, j, -1e-5)) / 2e-5
        assert float(streamed[head, i, j]) == pytest.approx(slope, rel=1e-5, abs=1e-9)


def test_target_class_is_the_wanted_one_the_label_or_the_prediction() -> None:
    subject = text_checkpoint("bert", attention="sdpa")
    probes = text_probes()[:2]
    for target, expected in (
        ("neutral", ["neutral"] * 2),
        (0, ["negative"] * 2),
        ([2, 1], ["neutral", "positive"]),
    ):
        found = list(capture(subject, probes, method=RELEVANCE, target=target))
        assert [one.prediction.target for one in found] == expected
    assert [one.prediction.target for one in capture(subject, probes, method=RELEVANCE)] == [
        "negative", "positive",
    ]  # fmt: skip
    bare = [Probe("p", text=probes[0].text)]
    (alone,) = capture(subject, bare, method=RELEVANCE)
    assert alone.prediction.target == alone.prediction.predicted
    maps = [next(iter(capture(subject, bare, method=RELEVANCE, target=c))).maps[0].weights for c in (0, 1)]
    assert np.abs(maps[0] - maps[1]).max() > 0.01
    with pytest.raises(ProbeError, match="class 'gold' is not among"):
        list(capture(subject, probes, method=RELEVANCE, target="gold"))


@pytest.mark.parametrize("frozen", [False, True])
def test_capture_leaves_parameters_and_outputs_as_they_were(frozen: bool) -> None:
    for subject in (text_checkpoint("bert", attention="sdpa"), vision_checkpoint("vit", attention="sdpa")):
        subject.model.requires_grad_(not frozen)
        probes = family_probes("vit" if subject.task == "image-classification" else "bert")
        settings = CaptureSettings(batch_tokens=1)
        for probe, found in zip(
            probes, capture(subject, probes, method=RELEVANCE, settings=settings), strict=True
        ):
            with torch.no_grad():
                logits = subject.model(**encode(subject, probe).tensors).logits[0]
            assert found.prediction.logits == tuple(logits.double().tolist())
        assert all(p.grad is None and p.requires_grad != frozen for p in subject.model.parameters())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in subject.model.modules())
        assert subject.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "name", ["gradient_rollout", "occlusion", "integrated_gradients", "input_x_gradient"]
)
def test_a_backbone_without_a_head_is_refused(name: str) -> None:
    subject = checkpoint(build("BertModel", vocab_size=30), word_tokenizer())
    with pytest.raises(CheckpointError, match=f"no task head, so {name} has no logit") as caught:
        list(capture(subject, text_probes(), method=Method(name)))
    assert caught.value.exit_code == ExitCode.CHECKPOINT == 12


def test_a_target_that_no_attention_favours_has_no_map_but_a_reason() -> None:
    subject = text_checkpoint("bert", attention="sdpa")
    with torch.no_grad():
        subject.model.classifier.weight[1] = 0  # this logit is its bias, whatever the input
    for found in capture(subject, text_probes(), method=RELEVANCE, target=1):
        assert found.maps[0].weights.sum() == 0
        assert found.maps[0].diagnostics["undefined"] == 1.0


class _Alive(TorchDispatchMode):
    """Counts the n²-sized tensors of all heads that are alive at once."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.peak = size, 0
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(item, torch.Tensor) and item.numel() == self.size:
                self.seen.add(item.untyped_storage())
        self.peak = max(self.peak, len(self.seen))
        return result


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_one_layers_weights_are_alive_at_a_time(family: str) -> None:
    peaks = []
    for layers in (2, 9):
        subject = text_checkpoint(family, attention="sdpa", num_hidden_layers=layers)
        item = encode(subject, Probe("p", text="the film was so very good and the plot not bad " * 2))
        n = len(item)
        read, valid = torch.eye(n)[:1], torch.ones(1, n).bool()
        fold = engine.GradientFold(engine.FoldSettings(), read, valid)
        with _Alive(4 * n * n) as alive:
            engine.gradient_batch(
                subject, plan_capture(subject.model), [item], item.tensors, fold, wanted={"p": 1}
            )
        assert float(fold.final_row().sum()) == pytest.approx(1)
        peaks.append(alive.peak)
    assert peaks[0] == peaks[1] > 0
    with _Alive(4 * n * n) as alive:  # the meter does see what is kept
        kept = kept_gradients(text_checkpoint(family, num_hidden_layers=9), dict(item.tensors), 1)
    assert len(kept[0]) == 9
    assert alive.peak > 2 * peaks[1]


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_no_weights_of_all_queries_are_formed_to_verify(family, monkeypatch):
    def refuse(_call):
        raise AssertionError("a whole query × key matrix was formed")

    monkeypatch.setattr(KernelCall, "weights", refuse)
    subject = text_checkpoint(family)
    assert list(audit.compute_maps(subject, text_probes(), method="gradient_rollout", target=1))
