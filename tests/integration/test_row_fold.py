"""Maps from rows, of long inputs, are those of the whole matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.gpt2 import modeling_gpt2

import audit
from audit.capture.attention.interface import KernelCall
from audit.capture.engines import method_pass, query_blocks, row_fold, split_rows
from audit.capture.engines.row_fold import RowFold, check_blocks
from audit.capture.engines.split_rows import SplitRowFold
from audit.errors import CaptureError
from audit.records import CaptureSettings, Checkpoint, Map, Method, Probe
from tests.integration.tiny_models import (
    build,
    checkpoint,
    image_probes,
    text_checkpoint,
    text_probes,
    vision_checkpoint,
    word_tokenizer,
)

VARIANTS: list[dict[str, Any]] = [
    {},
    {"start_layer": 1},
    {"residual": 0.3},
    {"head_fusion": "max"},
    {"discard_ratio": 0.5},
    {"top_k": 2},
]
EMPTYING: list[dict[str, Any]] = [
    {"head_fusion": "min", "discard_below": 0.5},
    {"discard_below": 0.5},
    {"discard_below": 0.5, "residual": "measured"},
]


@pytest.fixture
def rows_only(monkeypatch: pytest.MonkeyPatch) -> list[RowFold]:
    """Take maps of any length from rows, and say which were."""
    made: list[RowFold] = []

    class Noted(RowFold):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    class NotedSplit(SplitRowFold):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(row_fold, "LEAST_POSITIONS", 1)
    monkeypatch.setattr(split_rows, "LEAST_POSITIONS", 1)
    monkeypatch.setattr(method_pass, "RowFold", Noted)
    monkeypatch.setattr(method_pass, "SplitRowFold", NotedSplit)
    monkeypatch.setattr(query_blocks, "BLOCK_ENTRIES", 64)
    monkeypatch.setattr(query_blocks, "FEWEST_QUERIES", 1)
    return made


def maps_of(subject: Checkpoint, probes: list[Probe], params: dict[str, Any]) -> list[Map]:
    return list(audit.compute_maps(subject, probes, method=Method("rollout", params=params)))


def sinks() -> Checkpoint:
    config = {"vocab_size": 40, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}
    model = build("GptOssForCausalLM", attention="eager", **config, **experts)
    return checkpoint(model, word_tokenizer())


SUBJECTS: dict[str, Any] = {
    "bert": lambda: (text_checkpoint("bert"), text_probes()),
    "gpt2": lambda: (text_checkpoint("gpt2"), text_probes()),
    "llama": lambda: (text_checkpoint("llama"), text_probes()),
    "sinks": lambda: (sinks(), text_probes()),
    "vit": lambda: (vision_checkpoint("vit"), image_probes()),
}


@pytest.mark.parametrize("params", VARIANTS, ids=str)
@pytest.mark.parametrize("family", SUBJECTS)
def test_rows_give_the_maps_of_the_whole_matrix(family, params, request):
    subject, probes = SUBJECTS[family]()
    whole = maps_of(subject, probes, params)
    made = request.getfixturevalue("rows_only")
    found = maps_of(subject, probes, params)
    assert made
    for one, other in zip(found, whole, strict=True):
        np.testing.assert_allclose(one.weights, other.weights, atol=2e-6)
        assert one.layers is not None
        np.testing.assert_allclose(one.layers, other.layers, atol=2e-6)
        assert one.positions.causal == other.positions.causal
        assert one.diagnostics["empty_rows"] == other.diagnostics["empty_rows"] == 0
        assert set(one.diagnostics) == set(other.diagnostics)


@pytest.mark.parametrize("params", EMPTYING, ids=str)
@pytest.mark.parametrize("family", ["bert", "llama", "sinks"])
def test_rows_left_empty_are_counted_without_the_matrix(family, params, request):
    subject, probes = SUBJECTS[family]()
    whole = maps_of(subject, probes, params)
    assert sum(one.diagnostics["empty_rows"] for one in whole) > 0
    made = request.getfixturevalue("rows_only")
    found = maps_of(subject, probes, params)
    assert made
    for one, other in zip(found, whole, strict=True):
        np.testing.assert_allclose(one.weights, other.weights, atol=2e-6)
        assert one.diagnostics["empty_rows"] == other.diagnostics["empty_rows"]


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_batches_of_any_length_use_the_same_memory_one_after_the_other(family, request):
    subject, texts = text_checkpoint(family), text_probes()
    probes = [replace(texts[i], id=str(k)) for k, i in enumerate((3, 0, 1, 3, 2, 0, 3, 1))]
    settings = CaptureSettings(batch_tokens=16)  # so that most batches are one probe
    whole = list(audit.compute_maps(subject, probes, settings=settings))
    made = request.getfixturevalue("rows_only")
    found = list(audit.compute_maps(subject, probes, settings=settings))
    assert len({one.read.shape[1] for one in made}) > 1
    assert len({id(one.scratch) for one in made}) < len(made) / 2
    for one, other in zip(found, whole, strict=True):
        np.testing.assert_allclose(one.weights, other.weights, atol=2e-6)
        np.testing.assert_allclose(one.layers, other.layers, atol=2e-6)


def test_depth_collapse_from_every_row_is_that_of_the_matrix(request, monkeypatch):
    subject, probes = vision_checkpoint("vit"), image_probes()
    whole = maps_of(subject, probes, {})
    request.getfixturevalue("rows_only")
    monkeypatch.setattr(row_fold, "COLLAPSE_ROWS", len(whole[0].positions))
    for one, other in zip(maps_of(subject, probes, {}), whole, strict=True):
        assert one.diagnostics["depth_collapse"] == pytest.approx(
            other.diagnostics["depth_collapse"], abs=1e-7
        )


@pytest.mark.parametrize(
    "method",
    [
        Method("rollout", params={"head_fusion": "min", "start_layer": 1}),
        Method("rollout", params={"discard_below": 0.1, "residual": "measured", "start_layer": 1}),
        Method("per_head_rollout"),
    ],
    ids=str,
)
def test_rows_are_not_taken_where_something_would_be_lost(method, rows_only):
    list(audit.compute_maps(text_checkpoint("bert"), text_probes(), method=method))
    assert not rows_only


def no_kernel(*_: Any, **__: Any) -> Any:
    raise AssertionError("the kernel is not called again")


def test_outputs_that_are_not_weights_times_values_are_refused():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 5, 4)
    options = {"is_causal": False}
    call = KernelCall("layer.0", torch.nn.Identity(), no_kernel, query, key, value, None, options)
    valid = torch.ones(1, 5, dtype=torch.bool)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    check_blocks(call, output.transpose(1, 2), valid)
    with pytest.raises(CaptureError, match=r"layer\.0: its weights times its values"):
        check_blocks(call, 1.01 * output.transpose(1, 2), valid)


def test_long_probes_are_verified_beside_short_ones(monkeypatch):
    """The shortest probes have weights that the kernel returned; longer ones are computed again."""
    plain = modeling_gpt2.eager_attention_forward

    def sharper(module, query, *rest, **options):
        return plain(module, 1.1 * query, *rest, **options)

    monkeypatch.setattr(modeling_gpt2, "eager_attention_forward", sharper)
    subject = text_checkpoint("gpt2", max_position_embeddings=400)
    short, long = text_probes()[0], Probe("long", text="the film " * 48)
    assert maps_of(subject, [short], {})
    with pytest.raises(CaptureError, match="its weights times its values differ"):
        maps_of(subject, [short, long], {})


def test_softmax_in_float32_does_for_float64():
    subject = text_checkpoint("llama", max_position_embeddings=400)
    subject.model.double()
    long = Probe("long", text="the film " * 48)
    (found,) = maps_of(subject, [long], {})
    ids = subject.processor(long.text, return_tensors="pt")["input_ids"]
    row = np.eye(len(found.weights))[-1]
    for layer in reversed(subject.model(ids, output_attentions=True).attentions):
        row = 0.5 * row @ layer[0].mean(0).detach().numpy() + 0.5 * row
    np.testing.assert_allclose(found.weights, row, atol=1e-7)
    assert list(audit.compute_reliance(subject, [long], engine="linear"))
