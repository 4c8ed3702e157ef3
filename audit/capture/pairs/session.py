"""Capture a list of probes with a model of two streams: source and prefix, or text and image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from audit.capture.attention.check import check_alone, same_tensors
from audit.capture.attention.mixing import check_mixing
from audit.capture.attention.passes import exclusive, run_model
from audit.capture.engines.maps import stream_map, undefined_map
from audit.capture.inputs.batches import in_order, stack, valid_positions
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.outputs.predictions import first_tensor, predictions
from audit.capture.outputs.targets import require_head
from audit.capture.pairs.co_attention import input_stacks
from audit.capture.pairs.co_checks import check_streams
from audit.capture.pairs.method_pass import run_method
from audit.capture.pairs.methods import check_pair_settings
from audit.capture.pairs.multi import PairFold, StreamRows
from audit.capture.pairs.setup import PairSession
from audit.capture.pairs.targets import explained_logits, with_target
from audit.capture.pairs.towers import check_independent
from audit.capture.single_session import VERIFIED_PROBES
from audit.errors import CaptureError
from audit.records import Captured, Map, Positions
from audit.records import Stream as StreamName


def capture_pairs(session: PairSession, window: Sequence[Encoded]) -> Iterator[Captured]:
    """Yield the two maps and the prediction of each probe of `window`, in order.

    Parameters
    ----------
    session : PairSession
    window : sequence of Encoded
        With positions of both streams.

    Raises
    ------
    CaptureError
        When attention cannot be captured exactly; the message names the layer.
    ProbeError
        When a probe has no such row.
    """

    def captured(indices: Sequence[int]) -> list[Captured]:
        batch = [window[i] for i in indices]
        return _captured(session, batch, *_fold(session, batch))

    yield from in_order(session.batches(window), captured)


def verify_pairs(session: PairSession, window: Sequence[Encoded]) -> None:
    """Check on the first probes what :func:`audit.capture.single_session.verify` checks, in both streams.

    Towers must not see each other: another text must leave the image's attention alone, and the reverse.

    Raises
    ------
    CaptureError
    """
    check_pair_settings(session.fold, session.plan.wiring)
    if session.fold.needs_target and session.plan.wiring != "towers":
        require_head(session.checkpoint, session.fold.method)
    model, batch = session.checkpoint.model, [window[i] for i in session.batches(window)[0][:VERIFIED_PROBES]]
    checking = session.checking()
    (fold, outputs), (again, outputs_again) = _fold(checking, batch, verify=True), _fold(checking, batch)
    first = fold.streams()
    for one, two in zip(first, again.streams(), strict=True):
        if not same_tensors(one.final, two.final):
            raise CaptureError("determinism: two identical passes disagree; no shift can be judged")
    if len(batch) > 1:
        for one, two in zip(first, _fold(checking, batch[-1:])[0].streams(), strict=True):
            check_alone(one.final[-1:], two.final)
    _check_architecture(session, batch[0])
    with exclusive(model, session.plan.configs):
        plain = first_tensor(run_model(model, stack(batch), keep_logits=True))
    for seen in (first_tensor(outputs), first_tensor(outputs_again)):
        if not same_tensors(plain, seen):
            raise CaptureError(
                f"{type(core_model(model)).__name__}: capturing changes the model's own output"
            )


def _check_architecture(session: PairSession, item: Encoded) -> None:
    """Check that positions mix through the captured attention alone, and the streams as the plan says."""
    model, plan = session.checkpoint.model, session.plan
    for name, positions in zip(input_stacks(plan), session.positions(item), strict=True):
        check_mixing(model, plan, item.tensors, len(positions), name)
    if plan.wiring == "towers":
        check_independent(model, plan, item.tensors)
    if plan.wiring == "co-attention":
        check_streams(model, plan, item.tensors)


def _fold(session: PairSession, batch: Sequence[Encoded], *, verify: bool = False) -> tuple[PairFold, Any]:
    tensors = stack(batch)
    device = core_model(session.checkpoint.model).device
    lengths = [len(positions) for positions in session.positions(batch[0])]
    masks = _masks(session, tensors, len(batch), lengths, device)
    return run_method(session, batch, tensors, masks, verify=verify)


def _masks(
    session: PairSession, tensors: Mapping[str, Tensor], size: int, lengths: Sequence[int], device: Any
) -> tuple[Tensor, Tensor]:
    masks = []
    for name, length in zip(session.names, lengths, strict=True):
        key = {"prefix": "decoder_attention_mask", "image": "visual_attention_mask"}.get(
            name, "attention_mask"
        )
        given = {"attention_mask": tensors[key]} if key in tensors else {}
        first = {**given, "": next(iter(tensors.values()))}
        masks.append(valid_positions(first, size, length).to(device))
    return masks[0], masks[1]


def _captured(session: PairSession, batch: Sequence[Encoded], fold: PairFold, outputs: Any) -> list[Captured]:
    masks = _masks(
        session,
        stack(batch),
        len(batch),
        [len(positions) for positions in session.positions(batch[0])],
        core_model(session.checkpoint.model).device,
    )
    last = masks[1].sum(dim=1) - 1
    answers = predictions(session.checkpoint, batch, outputs, session.wanted, last)
    logits = explained_logits(outputs) if fold.targets else None
    streams, found = fold.streams(), []
    for i, item in enumerate(batch):
        maps = tuple(
            _map(session, item, i, stream, positions, valid=mask, name=name)
            for stream, positions, mask, name in zip(
                streams, session.positions(item), masks, session.names, strict=True
            )
        )
        score = fold.targets.get(item.probe.id)
        answer = answers[i] if logits is None else with_target(answers[i], score, logits[i])
        found.append(Captured(maps, answer))
    return found


def _map(
    session: PairSession,
    item: Encoded,
    i: int,
    stream: StreamRows,
    positions: Positions,
    *,
    valid: Tensor,
    name: StreamName,
) -> Map:
    keep = valid[i].cpu().numpy()
    row = stream.final[i].double().cpu().numpy()[keep]
    layers = None
    if session.settings.layer_maps and stream.layers:
        rows = np.stack([layer[i].double().cpu().numpy()[keep] for layer in stream.layers])
        layers = rows if (rows.sum(axis=1) > 0).all() else None
    placed = replace(positions, causal=bool(stream.causal[i]) and len(positions) > 1)
    extra = {key: float(values[i]) for key, values in stream.diagnostics.items()}
    if row.sum() == 0:  # nothing speaks for the target, or nothing is drawn from this stream
        share = 1.0 if session.fold.needs_target else 0.0
        return replace(undefined_map(item, placed, extra), stream=name, share=share)
    return stream_map(item, row, layers, placed, extra, stream=name)
