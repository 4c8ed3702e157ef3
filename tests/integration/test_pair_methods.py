"""Every method on encoder-decoders: maps against attentions and gradients that models return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from audit import compute_maps
from audit.capture import capture
from audit.capture.attention.interface import interface_capture
from audit.capture.attention.layers import plan_capture
from audit.capture.attention.passes import active_plan
from audit.capture.inputs.decoding import with_decoder_steps
from audit.capture.inputs.encoded import Encoded
from audit.capture.inputs.texts import encode_texts
from audit.capture.pairs.gradient import RelevanceFold, relevance_batch
from audit.capture.pairs.methods import methods_of
from audit.errors import ProbeError
from audit.methods import encoder_decoder_relevance, encoder_decoder_rollout, two_stream_relevance
from audit.methods.two_stream import CoAttention, SelfAttention
from audit.records import CaptureSettings, Checkpoint, Method
from tests.integration.test_capture_streams import SEQ2SEQ, seq2seq
from tests.integration.test_methods_gradient import _Alive
from tests.integration.tiny_models import text_probes

STEP, TARGET = 2, 7
PROBES = text_probes()[:2]


def with_steps(subject: Checkpoint, row: str = f"decoder:{STEP}") -> list[Encoded]:
    items = encode_texts(subject, PROBES, CaptureSettings())
    return [with_decoder_steps(subject, item, row) for item in items]


def kept(subject: Checkpoint, item: Encoded, target: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Attentions of encoder, decoder and cross blocks with the gradient of one logit, all retained."""
    out = subject.model(**item.tensors, output_attentions=True, use_cache=False)
    stacks = [out.encoder_attentions, out.decoder_attentions, out.cross_attentions]
    for attention in (a for stack in stacks for a in stack):
        attention.retain_grad()
    out.logits[0, STEP, target].backward()
    subject.model.zero_grad()
    attentions = [[a.detach().double() for a in stack] for stack in stacks]
    return attentions, [[a.grad.double() for a in stack] for stack in stacks]


@pytest.mark.parametrize(
    ("family", "attention"), [(f, "eager") for f in SEQ2SEQ] + [("bart", "sdpa"), ("t5", "sdpa")]
)
def test_streamed_relevance_equals_the_one_of_kept_gradients(family: str, attention: str) -> None:
    slow = seq2seq(family)
    subject = seq2seq(family, attention)
    token = subject.processor.decode([TARGET])
    method = Method("gradient_rollout", f"decoder:{STEP}")
    for item, found in zip(
        with_steps(slow), capture(subject, PROBES, method=method, target=token), strict=True
    ):
        stacks, slopes = kept(slow, item, TARGET)
        source = encoder_decoder_relevance(*stacks, *slopes)[0, STEP]
        steps: list[Any] = [SelfAttention("second", *pair) for pair in zip(stacks[0], slopes[0], strict=True)]
        for own, cross in zip(*(list(zip(stacks[i], slopes[i], strict=True)) for i in (1, 2)), strict=True):
            steps += [SelfAttention("first", *own), CoAttention(*cross)]
        prefix = two_stream_relevance(steps).first_first[0, STEP] - torch.eye(STEP + 1)[STEP]
        for one, expected in zip(found.maps, (source, prefix), strict=True):
            np.testing.assert_allclose(one.weights, expected / expected.sum(), atol=2e-5)
            assert one.diagnostics["relevance"] == pytest.approx(float(expected.sum()), rel=1e-3)
        assert found.prediction.target == token
        assert found.maps[1].positions.causal


def test_gradient_of_cross_attention_equals_finite_differences() -> None:
    """Raise one weight C[i, j] by ε: the output of its head at i moves by ε·v_j, and so does the logit."""
    subject = seq2seq("bart")
    subject.model.double()
    item = with_steps(subject)[1]
    plan = active_plan(subject.model, plan_capture(subject.model), item.tensors)
    path = next(layer.path for layer in plan.layers if layer.kind == "cross")
    read = torch.eye(STEP + 1, dtype=torch.float64)[STEP : STEP + 1]
    taken: dict[int, Tensor] = {}

    class Keeping(RelevanceFold):
        def block(self, start: int, weights: Tensor, gradient: Tensor) -> None:
            taken[self._left[-1]] = gradient.clone()
            super().block(start, weights, gradient)

    masks = torch.ones(1, len(item)).bool(), torch.ones(1, STEP + 1).bool()
    fold = Keeping(plan, masks, read)
    relevance_batch(subject, plan, [item], item.tensors, fold, wanted={item.probe.id: TARGET})
    slope = taken[fold.order.index(path)][0]

    def logit(head: int, i: int, j: int, step: float) -> float:
        def push(call: Any) -> Tensor | None:
            if call.path != path:
                return None
            output = call.output.clone()
            output[0, i, head] += step * call.value[0, head, j]
            return output

        with torch.no_grad(), interface_capture(plan.modules(), plan.configs, push):
            return float(subject.model(**item.tensors, use_cache=False).logits[0, STEP, TARGET])

    for head, i, j in ((0, 0, 1), (1, STEP, 3), (3, 1, 0)):
        expected = (logit(head, i, j, 1e-5) - logit(head, i, j, -1e-5)) / 2e-5
        assert float(slope[head, i, j]) == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_one_layers_heads_are_alive_at_a_time() -> None:
    peaks = []
    for layers in (2, 6):
        subject = seq2seq("bart", "sdpa", encoder_layers=layers)
        item = with_steps(subject)[1]
        plan = active_plan(subject.model, plan_capture(subject.model), item.tensors)
        masks = torch.ones(1, len(item)).bool(), torch.ones(1, STEP + 1).bool()
        fold = RelevanceFold(plan, masks, torch.eye(STEP + 1)[STEP : STEP + 1])
        with _Alive(4 * len(item) ** 2) as alive:
            relevance_batch(subject, plan, [item], item.tensors, fold, wanted={item.probe.id: TARGET})
        peaks.append(alive.peak)
    assert peaks[0] == peaks[1] > 0


def test_targets_are_the_following_token_a_given_one_or_a_difference() -> None:
    subject = seq2seq("bart")
    method = Method("gradient_rollout", f"decoder:{STEP}")
    item = with_steps(subject)[0]
    with torch.no_grad():
        logits = subject.model(**item.tensors).logits[0]
    (own,) = capture(subject, PROBES[:1], method=method)
    following = int(logits[STEP].argmax())
    assert own.prediction.target == subject.processor.decode([following])
    assert own.prediction.target_logit == pytest.approx(float(logits[STEP, following]))
    (pair,) = capture(subject, PROBES[:1], method=method, target=["film", "dull"])
    one, two = (subject.processor.convert_tokens_to_ids(name) for name in ("film", "dull"))
    assert pair.prediction.target_logit == pytest.approx(
        float(logits[STEP, one] - logits[STEP, two]), rel=1e-4
    )
    with pytest.raises(ProbeError, match="is 2 tokens, expected 1"):
        list(capture(subject, PROBES[:1], method=method, target="film dull"))


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_measured_residuals_are_ratios_of_norms_in_every_block(family: str) -> None:
    subject = seq2seq(family)
    item = with_steps(subject)[0]
    shares: dict[str, list[Tensor]] = {"encoder": [], "decoder": [], "cross": []}

    def watch(kind: str, adds: Any, norm: Any) -> None:
        """Compare what an attention adds with the rest of the sum that the next norm takes."""
        kept: list[Tensor] = []
        adds.register_forward_hook(lambda _m, _a, out: kept.append(out[0] if isinstance(out, tuple) else out))

        def take(_module: Any, args: Any) -> None:
            added, total = kept[-1], args[0]
            rest = (total - added).norm(dim=-1)
            shares[kind].append(rest / (rest + added.norm(dim=-1)))

        norm.register_forward_pre_hook(take)

    core = subject.model.model if family == "bart" else subject.model
    if family == "bart":
        for layer in core.encoder.layers:
            watch("encoder", layer.self_attn, layer.self_attn_layer_norm)
        for layer in core.decoder.layers:
            watch("decoder", layer.self_attn, layer.self_attn_layer_norm)
            watch("cross", layer.encoder_attn, layer.encoder_attn_layer_norm)
    else:
        for block in core.encoder.block:
            watch("encoder", block.layer[0].SelfAttention, block.layer[1].layer_norm)
        for block in core.decoder.block:
            watch("decoder", block.layer[0].SelfAttention, block.layer[1].layer_norm)
            watch("cross", block.layer[1].EncDecAttention, block.layer[2].layer_norm)
    with torch.no_grad():
        out = subject.model(**item.tensors, output_attentions=True, use_cache=False)
    stacks = [
        [a.double() for a in x]
        for x in (out.encoder_attentions, out.decoder_attentions, out.cross_attentions)
    ]
    encoder, decoder, cross = (torch.stack(shares[kind]).double() for kind in shares)
    source, prefix = encoder_decoder_rollout(
        *stacks, residual=encoder, cross_residual=cross, decoder_residual=decoder
    )
    method = Method("rollout", f"decoder:{STEP}", {"residual": "measured"})
    (found,) = capture(seq2seq(family), PROBES[:1], method=method)
    for one, expected in zip(found.maps, (source[0, STEP], prefix[0, STEP]), strict=True):
        assert one.share == pytest.approx(float(expected.sum()), abs=1e-5)
        np.testing.assert_allclose(one.weights, expected / expected.sum(), atol=1e-5)
    fixed = next(iter(capture(seq2seq(family), PROBES[:1], method=Method(row=f"decoder:{STEP}"))))
    assert abs(found.maps[0].share - fixed.maps[0].share) > 0.02


@pytest.mark.parametrize("family", ["bart", "t5"])
@pytest.mark.parametrize("name", ["norms", "alti"])
def test_contributions_equal_those_of_each_value_sent_through_the_projection_alone(
    family: str, name: str
) -> None:
    """Post-norm (BART) and pre-norm (T5) blocks, each vector by its own call of the model's modules."""
    subject = seq2seq(family)
    item = with_steps(subject)[0]
    pieces = blocks_of(subject, item)
    top: Any = None
    source = prefix = None
    for kind, weights, value, project, x, norm in pieces:
        matrix = slow_matrix(name, weights, value, project, x, norm, cross=kind == "cross")
        if kind == "encoder":
            top = matrix if top is None else matrix @ top
            continue
        source = np.zeros((STEP + 1, len(top))) if source is None else source
        prefix = np.eye(STEP + 1) if prefix is None else prefix
        if kind == "decoder":
            source, prefix = matrix @ source, matrix @ prefix
        else:
            source, prefix = matrix[:, -1:] * source + matrix[:, :-1] @ top, matrix[:, -1:] * prefix
    (found,) = capture(subject, PROBES[:1], method=Method(name, f"decoder:{STEP}"))
    assert source is not None
    assert prefix is not None
    for one, expected in zip(found.maps, (source[STEP], prefix[STEP]), strict=True):
        assert one.share == pytest.approx(float(expected.sum()), abs=1e-4)
        if expected.sum() > 0:
            np.testing.assert_allclose(one.weights, expected / expected.sum(), atol=1e-4)


def blocks_of(subject: Checkpoint, item: Encoded) -> list[tuple[Any, ...]]:
    """Kind, weights, values by position, projection, residual, norm (None in pre-norm) of every attention."""
    bart = subject.model.config.model_type == "bart"
    core = subject.model.model if bart else subject.model
    places: list[tuple[str, Any, Any, Any, Any]] = []
    if bart:
        for layer in core.encoder.layers:
            places.append(
                ("encoder", layer.self_attn, layer.self_attn.out_proj, layer.self_attn_layer_norm, None)
            )
        for layer in core.decoder.layers:
            own, cross = layer.self_attn, layer.encoder_attn
            places.append(("decoder", own, own.out_proj, layer.self_attn_layer_norm, None))
            places.append(("cross", cross, cross.out_proj, layer.encoder_attn_layer_norm, None))
    else:
        for block in core.encoder.block:
            own = block.layer[0].SelfAttention
            places.append(("encoder", own, own.o, None, block.layer[0].layer_norm))
        for block in core.decoder.block:
            own, cross = block.layer[0].SelfAttention, block.layer[1].EncDecAttention
            places.append(("decoder", own, own.o, None, block.layer[0].layer_norm))
            places.append(("cross", cross, cross.o, None, block.layer[1].layer_norm))
    values, residuals, handles = {}, {}, []
    for index, (_, module, _, _, before) in enumerate(places):
        project = module.v_proj if bart else module.v
        handles.append(
            project.register_forward_hook(lambda _m, _a, o, i=index: values.__setitem__(i, o.detach()))
        )
        taker = module.q_proj if bart else before
        handles.append(
            taker.register_forward_pre_hook(lambda _m, a, i=index: residuals.__setitem__(i, a[0].detach()))
        )
    with torch.no_grad():
        out = subject.model(**item.tensors, output_attentions=True, use_cache=False)
    for handle in handles:
        handle.remove()
    stacks = {
        "encoder": iter(out.encoder_attentions),
        "decoder": iter(out.decoder_attentions),
        "cross": iter(out.cross_attentions),
    }
    return [
        (kind, next(stacks[kind])[0], values[i][0], project, residuals[i][0], norm)
        for i, (kind, _, project, norm, _) in enumerate(places)
    ]


def slow_matrix(
    name: str, weights: Tensor, value: Tensor, project: Any, x: Tensor, norm: Any, *, cross: bool
) -> Any:
    heads, queries, keys = weights.shape
    parts = value.view(keys, heads, -1)
    bias = torch.zeros(x.shape[-1]) if project.bias is None else project.bias.detach()
    rows = []
    for i in range(queries):
        with torch.no_grad():
            vectors = [project((weights[:, i, j, None] * parts[j]).reshape(-1)) - bias for j in range(keys)]
            vectors = [*vectors, x[i]] if cross else [v + x[i] * (i == j) for j, v in enumerate(vectors)]
            total = sum(vectors) + bias
            if norm is not None:
                scale = (total.var(unbiased=False) + norm.eps).sqrt()
                vectors = [norm.weight * (v - v.mean()) / scale for v in vectors]
                total = norm(total)
        if name == "norms":
            sizes = np.array([float(v.norm()) for v in vectors])
        else:
            sizes = np.array([max(0.0, float(total.abs().sum() - (total - v).abs().sum())) for v in vectors])
        empty = np.eye(len(vectors))[-1 if cross else i]
        rows.append(sizes / sizes.sum() if sizes.sum() > 0 else empty)
    return np.array(rows)


def test_occlusion_of_source_and_prefix_is_the_change_of_the_target_logit() -> None:
    subject = seq2seq("mbart")
    item = with_steps(subject)[1]
    token = subject.processor.mask_token_id
    method = Method("occlusion", f"decoder:{STEP}")
    found = list(capture(subject, PROBES, method=method, target=subject.processor.decode([TARGET])))[1]

    def logit(**changed: Tensor) -> float:
        with torch.no_grad():
            return float(subject.model(**{**item.tensors, **changed}).logits[0, STEP, TARGET])

    for one, name in zip(found.maps, ("input_ids", "decoder_input_ids"), strict=True):
        moved = np.zeros(len(one.weights))
        for place in np.flatnonzero(~one.positions.special):
            ids = item.tensors[name].clone()
            ids[0, place] = token
            moved[place] = abs(logit(**{name: ids}) - logit())
        assert moved.sum() > 0
        np.testing.assert_allclose(one.weights, moved / moved.sum(), atol=1e-4)


def test_integrated_gradients_of_a_shared_table_vary_one_stream_alone() -> None:
    subject = seq2seq("t5")
    method = Method("integrated_gradients", f"decoder:{STEP}")
    (found,) = capture(subject, PROBES[:1], method=method, target=subject.processor.decode([TARGET]))
    assert found.maps[0].diagnostics["completeness_error"] < 0.05
    assert found.maps[0].weights[found.maps[0].positions.special].sum() == 0


@pytest.mark.parametrize("name", methods_of("encoder-decoder"))
def test_every_method_runs_from_the_public_interface(name: str) -> None:
    params = {"samples": 8} if name in ("shap", "lime") else {}
    maps = list(compute_maps(seq2seq("bart"), PROBES, method=name, row="decoder:1", **params))
    assert [one.stream for one in maps] == ["source", "prefix"] * 2
    for one in maps:
        assert one.weights.sum() == pytest.approx(1, abs=1e-5) or one.diagnostics["undefined"] == 1.0


def test_a_prefix_that_gives_nothing_has_no_map_and_no_share() -> None:
    (found,) = capture(seq2seq("bart"), PROBES[:1], method=Method("rollout", "decoder:1", {"residual": 0.0}))
    source, prefix = found.maps
    assert (source.share, prefix.share) == (pytest.approx(1.0), 0.0)
    assert prefix.diagnostics["undefined"] == 1.0
