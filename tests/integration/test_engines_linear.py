"""The linear-memory engines give what the dense product gives."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import audit
from audit.capture.attention.interface import KernelCall, Replacing, interface_capture
from audit.capture.attention.layers import plan_capture
from audit.capture.attention.passes import exclusive, fold_batch, run_model
from audit.capture.engines import query_blocks
from audit.capture.engines.fold import BatchFold
from audit.capture.engines.region_forward import RegionFold, region_batch
from audit.capture.engines.row_backward import row_batch, rows_times_attention
from audit.capture.engines.settings import FoldSettings
from audit.capture.inputs.batches import valid_positions
from audit.capture.inputs.encoded import core_model
from audit.capture.inputs.texts import encode_texts
from audit.errors import CaptureError
from audit.methods import attention_rollout
from audit.records import CaptureSettings, Checkpoint, Method, Probe
from tests.integration.tiny_models import (
    build,
    checkpoint,
    image_probes,
    text_checkpoint,
    text_probes,
    vision_checkpoint,
    word_tokenizer,
)

REGIONS = {"she": {"terms": ["she", "her"]}, "film": {"terms": ["film"]}, "half": {"quantile": [0.0, 0.5]}}
BOX = {"corner": {"box": [0.5, 0.5, 1.0, 1.0]}, "grid": {"grid": [2, 2]}}


def subject_of(family: str, attention: str) -> tuple[Checkpoint, list[Probe], dict[str, Any]]:
    if family == "vit":
        return vision_checkpoint("vit", attention=attention), image_probes(), BOX
    return text_checkpoint(family, attention=attention), text_probes(), REGIONS


def both(
    subject: Checkpoint, probes: list[Probe], regions: dict[str, Any], **options: Any
) -> tuple[Any, Any]:
    dense, linear = (
        list(audit.compute_reliance(subject, probes, regions, engine=engine, **options))
        for engine in ("dense", "linear")
    )
    return dense, linear


def assert_same(dense: list[Any], linear: list[Any]) -> None:
    assert [(r.probe_id, r.region, r.reason) for r in dense] == [
        (r.probe_id, r.region, r.reason) for r in linear
    ]
    shares = 0
    for one, other in zip(dense, linear, strict=True):
        if one.share is None:
            assert other.share is None
            continue
        shares += 1
        assert other.share == pytest.approx(one.share, abs=1e-5)
        assert other.size == one.size
        assert (other.layers is None) == (one.layers is None)
        if one.layers is not None:  # below the first layer, CLS draws on no content
            np.testing.assert_allclose(other.layers, one.layers, atol=1e-5)
    assert shares


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["bert", "vit", "gpt2", "llama", "qwen2"])
def test_region_forward_equals_the_dense_engine(family, attention):
    assert_same(*both(*subject_of(family, attention)))


@pytest.mark.parametrize(
    "params", [{"residual": [0.2, 0.5, 0.9]}, {"start_layer": 1}, {"residual": 0.0}], ids=str
)
def test_region_forward_keeps_residuals_and_the_first_layer(params):
    assert_same(*both(*subject_of("bert", "sdpa"), method=Method("rollout", params=params)))


def padded_case(family: str, side: str) -> tuple[Checkpoint, dict[str, torch.Tensor], torch.Tensor]:
    """Return a checkpoint and one padded batch of two lengths."""
    subject = text_checkpoint(family, attention="sdpa")
    items = encode_texts(subject, text_probes()[:2], CaptureSettings())
    n = max(map(len, items))
    batch: dict[str, list[torch.Tensor]] = {"input_ids": [], "attention_mask": []}
    for item in items:
        pad = (n - len(item), 0) if side == "left" else (0, n - len(item))
        for name, rows in batch.items():
            rows.append(torch.nn.functional.pad(item.tensors[name], pad))
    tensors = {name: torch.cat(rows) for name, rows in batch.items()}
    return subject, tensors, valid_positions(tensors, 2, n)


@pytest.mark.parametrize(
    ("family", "side"), [("bert", "right"), ("gpt2", "left"), ("llama", "right"), ("llama", "left")]
)
def test_region_forward_gives_all_rows_of_all_layers_beside_padding(family, side):
    subject, tensors, valid = padded_case(family, side)
    settings = FoldSettings()
    plan = plan_capture(core_model(subject.model))
    torch.manual_seed(0)
    columns = torch.rand(*valid.shape, 11)  # more than the 8 of a head: two calls
    read = valid / valid.sum(dim=1, keepdim=True)
    fold = RegionFold(settings, read, valid, columns)
    region_batch(subject.model, plan, tensors, fold, verify=True)

    eager = text_checkpoint(family, attention="eager")
    with torch.no_grad():
        weights = eager.model(**tensors, output_attentions=True).attentions
    for sample in range(2):
        keep = valid[sample]
        layers = [layer[sample, :, keep][:, :, keep][None] for layer in weights]
        inside = columns[sample, keep]
        for depth in range(1, len(layers) + 1):
            expected = attention_rollout(layers[:depth])[0] @ inside
            np.testing.assert_allclose(
                fold.masses[depth - 1][sample], read[sample, keep] @ expected, atol=1e-5
            )
        np.testing.assert_allclose(fold.columns[sample, keep], expected, atol=1e-5)
        assert not fold.columns[sample, ~keep].any()


def test_region_forward_leaves_the_outputs_as_they_are():
    subject, tensors, valid = padded_case("bert", "right")
    plan = plan_capture(core_model(subject.model))
    fold = RegionFold(
        FoldSettings(), valid.float() / valid.sum(1, keepdim=True), valid, valid[..., None].float()
    )
    with torch.no_grad():
        plain = run_model(subject.model, tensors)
    assert torch.equal(region_batch(subject.model, plan, tensors, fold).logits, plain.logits)


@pytest.mark.parametrize(
    ("family", "method", "reason"),
    [
        ("bert", Method("rollout", params={"top_k": 3}), "row by row"),
        ("bert", Method("raw_attention"), "no product"),
        ("deberta-v2", Method("rollout"), "not on the attention interface"),
    ],
)
def test_linear_engine_falls_back_with_its_reason(family, method, reason):
    subject, probes, regions = subject_of(family, "eager")
    dense = list(audit.compute_reliance(subject, probes, regions, engine="dense", method=method))
    with pytest.warns(UserWarning, match=reason):
        assert list(audit.compute_reliance(subject, probes, regions, engine="linear", method=method)) == dense


def test_linear_engine_refuses_capped_scores_and_sinks():
    subject = checkpoint(
        build("Gemma2ForCausalLM", attention="eager", vocab_size=40, num_key_value_heads=2, head_dim=8,
              attn_logit_softcapping=5.0, sliding_window=4, max_position_embeddings=64),
        word_tokenizer(),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="caps its scores"):
        assert list(
            audit.compute_reliance(subject, text_probes()[:2], {"film": {"terms": ["film"]}}, engine="linear")
        )


def test_auto_engine_stays_dense_for_short_probes_and_turns_linear_for_long_ones(monkeypatch):
    from audit.capture import region_session

    subject, probes, regions = subject_of("bert", "sdpa")
    dense = list(audit.compute_reliance(subject, probes, regions, engine="dense"))
    assert list(audit.compute_reliance(subject, probes, regions)) == dense
    longest = max(len(item) for item in encode_texts(subject, probes, CaptureSettings()))
    monkeypatch.setattr(region_session, "LEAST_POSITIONS", longest)
    linear = list(audit.compute_reliance(subject, probes, regions, engine="linear"))
    assert list(audit.compute_reliance(subject, probes, regions)) == linear
    assert linear != dense  # they differ in the last digits alone


def test_unknown_engine_is_refused():
    subject, probes, regions = subject_of("bert", "sdpa")
    with pytest.raises(ValueError, match="engine: expected"):
        list(audit.compute_reliance(subject, probes, regions, engine="fast"))


VARIANTS = [
    {},
    {"residual": [0.2, 0.5, 0.9]},
    {"start_layer": 1},
    {"head_fusion": "max"},
    {"head_fusion": "min", "top_k": 3},
    {"discard_ratio": 0.5},
    {"head_fusion": "weighted", "head_weights": [[0.1, 0.2, 0.3, 0.4]] * 3},
]


def dense_rows(
    family: str,
    tensors: dict[str, torch.Tensor],
    read: torch.Tensor,
    valid: torch.Tensor,
    settings: FoldSettings,
) -> torch.Tensor:
    """Return the rows of the dense engine, from a model that runs eagerly."""
    subject = text_checkpoint(family, attention="eager")
    fold = BatchFold(settings, read[:, 0], valid)
    fold_batch(subject.model, plan_capture(core_model(subject.model)), tensors, fold)
    assert fold.matrix is not None
    return read @ fold.matrix


@pytest.mark.parametrize("block", [2**20, 1], ids=["whole", "single-queries"])
@pytest.mark.parametrize("rows", [1, 3, 11])
@pytest.mark.parametrize("params", VARIANTS, ids=str)
@pytest.mark.parametrize(("family", "side"), [("bert", "right"), ("gpt2", "left"), ("llama", "right")])
def test_rows_equal_the_dense_engine(family, side, params, rows, block, monkeypatch):
    monkeypatch.setattr(query_blocks, "BLOCK_ENTRIES", block)
    monkeypatch.setattr(query_blocks, "FEWEST_QUERIES", 1)
    subject, tensors, valid = padded_case(family, side)
    torch.manual_seed(1)
    read = torch.rand(2, rows, valid.shape[1]) * valid[:, None]
    read /= read.sum(dim=-1, keepdim=True)
    settings = FoldSettings.from_method(Method("rollout", params=params))
    plan = plan_capture(core_model(subject.model))
    found, _ = row_batch(subject.model, plan, tensors, read, valid, settings=settings)
    np.testing.assert_allclose(found, dense_rows(family, tensors, read, valid, settings), atol=1e-5)


@pytest.mark.parametrize("params", VARIANTS, ids=str)
@pytest.mark.parametrize(("family", "side"), [("bert", "right"), ("gpt2", "left"), ("llama", "right")])
def test_rows_that_draw_on_few_positions_equal_the_dense_engine(family, side, params):
    subject, tensors, valid = padded_case(family, side)
    positions = [row.nonzero()[:, 0] for row in valid]
    read = torch.zeros(2, 2, valid.shape[1])
    for sample, at in enumerate(positions):
        read[sample, 0, at[-1]] = 1
        read[sample, 1, at[[1, -2]]] = 0.5
    settings = FoldSettings.from_method(Method("rollout", params=params))
    plan = plan_capture(core_model(subject.model))
    found, _ = row_batch(subject.model, plan, tensors, read, valid, settings=settings)
    np.testing.assert_allclose(found, dense_rows(family, tensors, read, valid, settings), atol=1e-5)


@pytest.mark.parametrize("masked", ["none", "causal", "one for all", "each its own"])
@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 2.0}, {"s_aux": torch.tensor([0.3, -1.0, 2.0, 0.0])}, {"position_bias": None}],
    ids=["plain", "capped", "sink", "bias"],
)
@pytest.mark.parametrize("drawn", [1, 4, 12])
def test_one_step_of_rows_equals_the_product_with_all_weights(options, masked, drawn, monkeypatch):
    monkeypatch.setattr(query_blocks, "BLOCK_ENTRIES", 3 * 12 * 4)
    monkeypatch.setattr(query_blocks, "FEWEST_QUERIES", 3)
    torch.manual_seed(0)
    n, module = 12, torch.nn.Module()
    module.is_causal = masked == "causal"
    query, key = torch.randn(2, 4, n, 8), torch.randn(2, 2, n, 8)
    mask = None
    if masked in ("one for all", "each its own"):
        mask = torch.rand(1 if masked == "one for all" else 2, 1, n, n) < 0.6
        mask |= torch.eye(n, dtype=torch.bool)
    options = {**options, "scaling": 0.4}
    if "position_bias" in options:
        options["position_bias"] = torch.randn(1, 4, n, n)
    call = KernelCall("layer", module, None, query, key, key, mask, options)
    rows = torch.zeros(2, 3, n)
    rows[:, :, torch.randperm(n)[:drawn]] = torch.rand(2, 3, drawn)
    valid = torch.ones(2, n, dtype=torch.bool)
    found = query_blocks.rows_by_blocks(call, rows, valid, FoldSettings(), 0)
    expected = rows @ call.weights().mean(dim=1)
    torch.testing.assert_close(found[..., : expected.shape[-1]], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("drawn", "computed"), [([0], 1), ([0, 5, 9], 3), (range(12), 12), ([], 0)])
def test_queries_on_which_no_row_draws_are_not_computed(drawn, computed, monkeypatch):
    module, n = torch.nn.Module(), 12
    module.is_causal = False
    query = torch.randn(1, 2, n, 4)
    call = KernelCall("layer", module, None, query, query, query, None, {})
    rows = torch.zeros(1, 3, n)
    rows[..., list(drawn)] = 1.0
    seen, real = [], query_blocks.block_weights

    def noted(call: Any, block: Any, scratch: Any = None) -> Any:
        weights = real(call, block, scratch)
        seen.append(weights.shape[2])
        return weights

    monkeypatch.setattr(query_blocks, "block_weights", noted)
    query_blocks.rows_by_blocks(call, rows, torch.ones(1, n, dtype=torch.bool), FoldSettings(), 0)
    assert sum(seen) == computed


@pytest.mark.parametrize("rows", [1, 8, 11])
@pytest.mark.parametrize(("family", "side"), [("bert", "right"), ("gpt2", "left"), ("llama", "right")])
def test_vector_jacobian_product_gives_the_rows_of_each_layer(family, side, rows):
    subject, tensors, valid = padded_case(family, side)
    torch.manual_seed(2)
    drawn = torch.rand(2, rows, valid.shape[1]) * valid[:, None]
    shares = torch.tensor([0.1, 0.2, 0.3, 0.4])
    seen = []

    def attend(call: Any) -> Any:
        weights = call.weights().masked_fill(~valid[:, None, :, None], 0)
        for head_weights, fused in (
            (None, weights.mean(dim=1)),
            (shares, torch.einsum("h,bhqk->bqk", shares, weights)),
        ):
            found = rows_times_attention(call, drawn, head_weights)
            np.testing.assert_allclose(found, drawn @ fused, atol=1e-5)
        seen.append(call.path)
        return call.run()

    plan = plan_capture(core_model(subject.model))
    with (
        exclusive(subject.model, plan.configs),
        interface_capture(plan.modules(), plan.configs, Replacing(attend)),
    ):
        run_model(subject.model, tensors)
    assert len(seen) == 3


@pytest.mark.parametrize("params", [{}, {"top_k": 2}], ids=str)
def test_rows_beside_sinks_equal_the_dense_engine(params):
    subject = checkpoint(
        build("GptOssForCausalLM", attention="eager", vocab_size=40, num_key_value_heads=2, head_dim=8,
              num_local_experts=2, num_experts_per_tok=1, sliding_window=4, intermediate_size=32),
        word_tokenizer(),
    )  # fmt: skip
    (item,) = encode_texts(subject, text_probes()[3:4], CaptureSettings())
    n = len(item)
    torch.manual_seed(0)
    valid, read = torch.ones(1, n, dtype=torch.bool), torch.rand(1, 1, n).softmax(-1)
    settings = FoldSettings.from_method(Method("rollout", params=params))
    plan = plan_capture(core_model(subject.model))
    fold = BatchFold(settings, read[:, 0], valid)
    fold_batch(subject.model, plan, dict(item.tensors), fold)
    found, _ = row_batch(subject.model, plan, dict(item.tensors), read, valid, settings=settings)
    assert found.shape[-1] == n + 1
    np.testing.assert_allclose(found[:, 0], fold.final_row(), atol=1e-5)


def test_rows_refuse_what_is_no_product():
    subject, tensors, valid = padded_case("bert", "right")
    settings = FoldSettings.from_method(Method("attention_flow"))
    plan = plan_capture(core_model(subject.model))
    with pytest.raises(CaptureError, match="no row engine"):
        row_batch(subject.model, plan, tensors, valid[:, None].float(), valid, settings=settings)


MEMORY = """
import resource, sys, torch, transformers
from audit.capture.attention.interface import Replacing, interface_capture
from audit.capture.attention.layers import plan_capture
from audit.capture.engines.region_forward import RegionFold, region_batch
from audit.capture.engines.row_backward import row_batch, rows_times_attention
from audit.capture.engines.settings import FoldSettings
n = int(sys.argv[1])
torch.set_num_threads(1)
config = transformers.BertConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=8,
    intermediate_size=64, max_position_embeddings=n, attn_implementation="sdpa")
model = transformers.BertModel(config).eval()
plan = plan_capture(model)
def run(size):
    valid = torch.ones(1, size, dtype=torch.bool)
    read = torch.zeros(1, size); read[0, 0] = 1
    fold = RegionFold(FoldSettings(), read, valid, torch.rand(1, size, 5))
    region_batch(model, plan, {"input_ids": torch.ones(1, size, dtype=torch.long)}, fold)
run(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(n)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_region_forward_memory_is_linear_in_the_number_of_positions():
    sizes = (1024, 2048, 4096)
    peaks = [
        int(subprocess.run([sys.executable, "-c", MEMORY, str(n)], check=True, capture_output=True).stdout)
        for n in sizes
    ]
    assert peaks[-1] < 4096 * 4096 * 4 / 1024 / 2, peaks  # half of one head's matrix, of 16
    for small, large in pairwise(peaks):
        assert large < 3 * small + 2048, peaks  # n² would be 4
