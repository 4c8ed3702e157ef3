"""Capture a list of probes with a model of two stacks: streams source and prefix, or text and image."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit.capture.batches import length_batches, stack, valid_positions
from audit.capture.inputs import Encoded, core_model
from audit.capture.layers import CapturePlan
from audit.capture.maps import stream_map
from audit.capture.mixing import check_mixing
from audit.capture.multi import PairFold, StreamRows, check_pair_settings, fold_pair
from audit.capture.passes import exclusive, run_model
from audit.capture.predictions import first_tensor, predictions
from audit.capture.settings import FoldSettings
from audit.capture.towers import check_independent, tower_reads
from audit.errors import CaptureError, ConfigError, ProbeError
from audit.records import Captured, CaptureSettings, Checkpoint, Map, Positions
from audit.records import Stream as StreamName

VERIFIED_PROBES = 2
_IMAGE = re.compile(r"vision|visual|image", re.IGNORECASE)


@dataclass(frozen=True)
class PairSession:
    """A checkpoint with two stacks and everything that is decided once for all of its batches."""

    checkpoint: Checkpoint
    settings: CaptureSettings
    fold: FoldSettings
    plan: CapturePlan
    row: str
    wanted: dict[str, Any]

    @property
    def names(self) -> tuple[StreamName, StreamName]:
        """Return the streams of the two stacks, in the order of the stacks."""
        if self.plan.wiring == "encoder-decoder":
            return ("source", "prefix")
        first, second = (_IMAGE.search(name) is not None for name in self.plan.stacks)
        if first == second:
            raise CaptureError(
                f"cannot tell the text tower from the image tower among {', '.join(self.plan.stacks)}; "
                "only pairs of text and image are supported"
            )
        return ("image", "text") if first else ("text", "image")

    def batches(self, window: Sequence[Encoded]) -> list[list[int]]:
        """Cut a window into batches, as indices into it."""
        size = 1 if self.plan.alone else None
        return length_batches(window, self.settings.batch_tokens, max_size=size)

    def positions(self, item: Encoded) -> tuple[Positions, Positions]:
        """Return the positions of a probe in the order of the stacks."""
        if item.second is None:
            raise CaptureError(f"probe {item.probe.id} has one stream, but the model has two")
        if self.names == ("image", "text"):
            return item.second, item.positions
        return item.positions, item.second


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
    ready: dict[int, Captured] = {}
    cursor = 0
    for indices in session.batches(window):
        batch = [window[i] for i in indices]
        fold, outputs = _fold(session, batch)
        ready |= dict(zip(indices, _captured(session, batch, fold, outputs), strict=True))
        while cursor in ready:
            yield ready.pop(cursor)
            cursor += 1


def verify_pairs(session: PairSession, window: Sequence[Encoded]) -> None:
    """Check on the first probes what :func:`audit.capture.session.verify` checks, in both stacks.

    Towers must not see each other: another text must leave the image's attention alone, and the reverse.

    Raises
    ------
    CaptureError
    """
    check_pair_settings(session.fold)
    model = session.checkpoint.model
    indices = session.batches(window)[0][:VERIFIED_PROBES]
    batch = [window[i] for i in indices]
    fold, outputs = _fold(session, batch, verify=True)
    again, outputs_again = _fold(session, batch)
    for one, two in zip(fold.streams(), again.streams(), strict=True):
        if not torch.equal(one.final, two.final):
            raise CaptureError("determinism: two identical passes disagree; no shift can be judged")
    for name, positions in zip(session.plan.stacks, session.positions(batch[0]), strict=True):
        check_mixing(model, session.plan, batch[0].tensors, len(positions), name)
    if session.plan.wiring == "towers":
        check_independent(model, session.plan, batch[0].tensors)
    with exclusive(model, session.plan.configs):
        plain = first_tensor(run_model(model, stack(batch), keep_logits=True))
    for seen in (first_tensor(outputs), first_tensor(outputs_again)):
        if not torch.allclose(plain, seen, rtol=0.0, atol=0.0, equal_nan=True):
            raise CaptureError(
                f"{type(core_model(model)).__name__}: capturing changes the model's own output"
            )


def _fold(session: PairSession, batch: Sequence[Encoded], *, verify: bool = False) -> tuple[PairFold, Any]:
    model, tensors = session.checkpoint.model, stack(batch)
    device = core_model(model).device
    lengths = [len(positions) for positions in session.positions(batch[0])]
    masks = _masks(session, tensors, len(batch), lengths, device)
    read = _reads(session, batch, tensors, masks, device)
    fold = PairFold(session.plan, session.fold, masks, read, verify)
    return fold, fold_pair(model, tensors, fold)


def _masks(
    session: PairSession, tensors: Mapping[str, Tensor], size: int, lengths: Sequence[int], device: Any
) -> tuple[Tensor, Tensor]:
    masks = []
    for name, length in zip(session.names, lengths, strict=True):
        key = {"prefix": "decoder_attention_mask", "image": ""}.get(name, "attention_mask")
        given = {"attention_mask": tensors[key]} if key in tensors else {}
        first = {**given, "": next(iter(tensors.values()))}
        masks.append(valid_positions(first, size, length).to(device))
    return masks[0], masks[1]


def _reads(
    session: PairSession,
    batch: Sequence[Encoded],
    tensors: Mapping[str, Tensor],
    masks: tuple[Tensor, Tensor],
    device: Any,
) -> tuple[Tensor, Tensor]:
    if session.plan.wiring == "towers":
        return tower_reads(session.checkpoint.model, session.plan, tensors, masks, session.row)
    first = masks[0].float() / masks[0].sum(dim=1, keepdim=True)
    rows = [
        decoder_row(session.row, int(mask.sum()), item.probe.id)
        for mask, item in zip(masks[1], batch, strict=True)
    ]
    second = np.zeros(tuple(masks[1].shape), np.float32)
    for i, row in enumerate(rows):
        second[i, : len(row)] = row
    return first, torch.from_numpy(second).to(device)


def decoder_row(row: str, steps: int, probe_id: str) -> NDArray[np.float32]:
    """Return which decoder rows are read, as weights over the `steps` rows of a probe.

    Parameters
    ----------
    row : str
        ``decoder:<i>`` (the row that predicts generated token i, from 0), ``last``, or ``auto`` and
        ``mean``, the average over all rows.
    steps : int
        Rows of the decoder.
    probe_id : str

    Examples
    --------
    >>> decoder_row("decoder:1", 3, "p").tolist()
    [0.0, 1.0, 0.0]
    """
    weights = np.zeros(steps, np.float32)
    match = re.fullmatch(r"decoder:(\d+)", row)
    if match is None and row not in ("auto", "mean", "last"):
        raise ConfigError(
            f"[method] row = {row!r} is unknown for an encoder-decoder; use auto, mean, last or decoder:<i>"
        )
    if match is None:
        weights[slice(-1, None) if row == "last" else slice(None)] = 1
    elif int(match[1]) < steps:
        weights[int(match[1])] = 1
    else:
        raise ProbeError(
            f"probe {probe_id} has {steps} decoder rows, none is row {row!r}; mend [method] row or remove it"
        )
    share: NDArray[np.float32] = weights / weights.sum()
    return share


def _captured(session: PairSession, batch: Sequence[Encoded], fold: PairFold, outputs: Any) -> list[Captured]:
    last = fold.valid[1].sum(dim=1) - 1
    answers = predictions(session.checkpoint, batch, outputs, session.wanted, last)
    streams, found = fold.streams(), []
    for i, item in enumerate(batch):
        maps = tuple(
            _map(item, i, stream, positions, valid=mask, name=name, with_layers=session.settings.layer_maps)
            for stream, positions, mask, name in zip(
                streams, session.positions(item), fold.valid, session.names, strict=True
            )
        )
        found.append(Captured(maps, answers[i]))
    return found


def _map(
    item: Encoded,
    i: int,
    stream: StreamRows,
    positions: Positions,
    *,
    valid: Tensor,
    name: StreamName,
    with_layers: bool,
) -> Map:
    keep = valid[i].cpu().numpy()
    row = stream.final[i].double().cpu().numpy()[keep]
    layers = None
    if with_layers:
        rows = np.stack([layer[i].double().cpu().numpy()[keep] for layer in stream.layers])
        layers = rows if (rows.sum(axis=1) > 0).all() else None
    causal = bool(stream.causal[i]) and len(positions) > 1
    return stream_map(item, row, layers, replace(positions, causal=causal), {}, stream=name)
