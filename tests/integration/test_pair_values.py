"""GlobEnc and value zeroing on encoder-decoders and LXMERT, against loops over the model's own modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from audit.capture import capture
from audit.capture.inputs.encoded import Encoded
from audit.capture.session import capture_prepared
from audit.errors import CaptureError
from audit.records import Checkpoint, Map, Method
from tests.integration.test_capture_streams import seq2seq
from tests.integration.test_co_attention import inputs
from tests.integration.test_co_attribution import nudged
from tests.integration.test_co_contributions import STREAMS, carried, pieces
from tests.integration.test_co_contributions import check as check_joint
from tests.integration.test_pair_methods import PROBES, STEP, blocks_of
from tests.integration.test_pair_relevance import nudged as nudged_pair
from tests.integration.test_pair_relevance import with_steps
from tests.integration.tiny_sound import sound_probes, whisper

ROW = f"decoder:{STEP}"


# --- value zeroing ----------------------------------------------------------------------------


def layers_of(subject: Checkpoint) -> list[tuple[nn.Module, dict[str, nn.Module]]]:
    """Return every layer, the encoder's first, with the value projections of its attentions."""
    encoder, decoder = subject.model.get_encoder(), subject.model.get_decoder()
    if subject.model.config.model_type == "t5":
        return [
            *((block, {"self": block.layer[0].SelfAttention.v}) for block in encoder.block),
            *(
                (block, {"self": block.layer[0].SelfAttention.v, "cross": block.layer[1].EncDecAttention.v})
                for block in decoder.block
            ),
        ]
    return [
        *((layer, {"self": layer.self_attn.v_proj}) for layer in encoder.layers),
        *(
            (layer, {"self": layer.self_attn.v_proj, "cross": layer.encoder_attn.v_proj})
            for layer in decoder.layers
        ),
    ]


def outputs_of(subject: Checkpoint, item: Encoded, layer: nn.Module, zeroed: Any = None) -> Tensor:
    """Run the whole model, with one value of one layer zeroed, and return what this layer gives."""
    kept: list[Tensor] = []
    handles = [
        layer.register_forward_hook(
            lambda _m, _a, out: kept.append(out[0] if isinstance(out, tuple) else out)
        )
    ]
    if zeroed is not None:
        projection, key = zeroed
        change = torch.ones(1, 1, 1)

        def drop(_module: Any, _args: Any, given: Tensor) -> Tensor:
            mask = change.repeat(1, given.shape[1], 1)
            mask[:, key] = 0
            return given * mask

        handles.append(projection.register_forward_hook(drop))
    with torch.no_grad():
        subject.model(**item.tensors, use_cache=False)
    for handle in handles:
        handle.remove()
    return kept[0][0].double()


def slow_zeroing(subject: Checkpoint, item: Encoded) -> tuple[Any, Any]:
    """Return S and D from 1 − cos of whole runs without one value at a time."""
    source, steps = (item.tensors[name].shape[1] for name in ("input_ids", "decoder_input_ids"))
    top, S, D = np.eye(source), np.zeros((steps, source)), np.eye(steps)
    for layer, values in layers_of(subject):
        whole, encoder = outputs_of(subject, item, layer), "cross" not in values
        parts = []
        for kind, projection in values.items():
            keys = source if encoder or kind == "cross" else steps
            columns = [
                1
                - nn.functional.cosine_similarity(outputs_of(subject, item, layer, (projection, key)), whole)
                for key in range(keys)
            ]
            parts.append(torch.stack(columns, dim=1).clamp_min(0).numpy())
        matrix = np.hstack(parts)
        matrix /= matrix.sum(1, keepdims=True)
        if encoder:
            top = matrix @ top
        else:
            S, D = matrix[:, :steps] @ S + matrix[:, steps:] @ top, matrix[:, :steps] @ D
    return S, D


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_zeroed_values_turn_the_whole_layers_output_as_far_as_runs_without_them_do(family: str) -> None:
    slow = nudged_pair(seq2seq(family))
    S, D = slow_zeroing(slow, with_steps(slow))
    subject = nudged_pair(seq2seq(family, "sdpa"))
    found = next(iter(capture(subject, PROBES[:1], method=Method("value_zeroing", ROW))))
    check(found.maps, S[STEP], D[STEP])
    assert 0.02 < found.maps[0].share < 0.98
    assert [round(float(one.share), 2) for one in found.maps] != [0.75, 0.25]  # ρ = ½ in two layers


def check(maps: tuple[Map, ...], source: Any, prefix: Any) -> None:
    assert sum(one.share for one in maps) == pytest.approx(1, abs=1e-4)
    for one, expected in zip(maps, (source, prefix), strict=True):
        np.testing.assert_allclose(one.weights * one.share, expected, atol=1e-3)


def test_value_zeroing_of_whisper_tells_what_a_generated_token_heard() -> None:
    method = Method("value_zeroing", "decoder:1")
    (found,) = capture(whisper(attention="sdpa"), sound_probes("whisper", 1), method=method)
    assert [len(one.weights) for one in found.maps] == [50, 2]
    assert found.maps[0].weights.max() > 1.1 * found.maps[0].weights.mean()


# --- GlobEnc ----------------------------------------------------------------------------------


def through(norms: list[tuple[nn.Module, Tensor]], vectors: list[Tensor]) -> Any:
    """Return the sizes of vectors that go through linearised norms, given what each norm takes, as shares."""
    for norm, taken in norms:
        spread = (taken.var(unbiased=False) + norm.eps).sqrt()
        vectors = [norm.weight * (v - v.mean()) / spread for v in vectors]
    sizes = np.array([float(v.detach().norm()) for v in vectors])
    return sizes / sizes.sum()


def slow_globenc(piece: Any, first: Tensor, second: Any, *, cross: bool) -> Any:
    """Return one attention's matrix; `first` is what its norm takes, `second` the next norm and its input."""
    weights, value, project, x, norm = piece
    heads, queries, keys = weights.shape
    parts, rows = value.view(keys, heads, -1), []
    for i in range(queries):
        with torch.no_grad():
            vectors = [
                project((weights[:, i, j, None] * parts[j]).reshape(-1)) - project.bias for j in range(keys)
            ]
        vectors = [*vectors, x[i]] if cross else [v + x[i] * (i == j) for j, v in enumerate(vectors)]
        norms = [(norm, first[i])] + ([] if second is None else [(second[0], second[1][i])])
        rows.append(through(norms, vectors))
    return np.array(rows)


def taken_by(norms: list[nn.Module]) -> list[list[Tensor]]:
    kept: list[list[Tensor]] = [[] for _ in norms]
    for norm, to in zip(norms, kept, strict=True):
        norm.register_forward_pre_hook(lambda _m, args, to=to: to.append(args[0][0].detach()))
    return kept


def test_globenc_sends_the_sum_before_the_feed_forward_block_through_the_norm_behind_it() -> None:
    subject = nudged_pair(seq2seq("bart"))
    item = with_steps(subject)
    encoder, decoder = subject.model.get_encoder().layers, subject.model.get_decoder().layers
    firsts = [layer.self_attn_layer_norm for layer in encoder]
    seconds: list[Any] = [layer.final_layer_norm for layer in encoder]
    for layer in decoder:
        firsts += [layer.self_attn_layer_norm, layer.encoder_attn_layer_norm]
        seconds += [None, layer.final_layer_norm]
    first = taken_by(firsts)
    second = taken_by([nn.Identity() if norm is None else norm for norm in seconds])
    top = source = prefix = None
    for i, (kind, *piece) in enumerate(blocks_of(subject, item)):
        then = None if seconds[i] is None else (seconds[i], second[i][0])
        matrix = slow_globenc(piece, first[i][0], then, cross=kind == "cross")
        if kind == "encoder":
            top = matrix if top is None else matrix @ top
        elif kind == "decoder":
            source = np.zeros((STEP + 1, len(top))) if source is None else matrix @ source
            prefix = matrix if prefix is None else matrix @ prefix
        else:
            source, prefix = matrix[:, -1:] * source + matrix[:, :-1] @ top, matrix[:, -1:] * prefix
    found = next(iter(capture(nudged_pair(seq2seq("bart")), PROBES[:1], method=Method("globenc", ROW))))
    check(found.maps, source[STEP], prefix[STEP])
    norms = next(iter(capture(nudged_pair(seq2seq("bart")), PROBES[:1], method=Method("norms", ROW))))
    assert (
        np.abs(
            found.maps[0].weights * found.maps[0].share - norms.maps[0].weights * norms.maps[0].share
        ).max()
        > 1e-3
    )


def test_globenc_of_two_streams_takes_the_norm_behind_each_feed_forward_block() -> None:
    subject = nudged()
    item = inputs(subject)[0]
    core = subject.model.lxmert.encoder
    order = [*core.layer, *core.r_layers]
    firsts = [layer.attention.output.LayerNorm for layer in order]
    seconds: list[Any] = [layer.output.LayerNorm for layer in order]
    for layer in core.x_layers:
        firsts += [layer.visual_attention.output.LayerNorm] * 2
        firsts += [layer.lang_self_att.output.LayerNorm, layer.visn_self_att.output.LayerNorm]
        seconds += [None, None, layer.lang_output.LayerNorm, layer.visn_output.LayerNorm]
    first = taken_by(firsts)
    second = taken_by([nn.Identity() if norm is None else norm for norm in seconds])
    matrices = []
    for i, (ends, piece) in enumerate(zip(STREAMS, pieces(subject, item), strict=True)):
        # One norm takes the text, then the image, where streams cross.
        then = None if seconds[i] is None else (seconds[i], second[i][0])
        matrices.append(slow_globenc(piece, first[i][ends == "it"], then, cross=ends in ("ti", "it")))
    (found,) = capture_prepared(nudged(), [item], method=Method("globenc"))
    check_joint(found.maps, carried(matrices, len(item))[-1][0], len(item))


def test_globenc_without_a_norm_behind_the_feed_forward_block_is_refused() -> None:
    with pytest.raises(CaptureError, match="so globenc would be norms; use the method norms"):
        list(capture(seq2seq("t5"), PROBES[:1], method=Method("globenc", ROW)))
