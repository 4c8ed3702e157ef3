"""Capture probes through a model of one stack: decide once, verify on the first probes, then run batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit.capture.attention.check import check_alone, same_tensors
from audit.capture.attention.layers import CapturePlan, plan_capture
from audit.capture.attention.mixing import check_mixing
from audit.capture.attention.passes import active_plan, exclusive, run_model
from audit.capture.attention.switching import fewest_positions
from audit.capture.engines.maps import stream_map, undefined_map
from audit.capture.engines.method_pass import Engine, Fold
from audit.capture.engines.settings import FLOW, FoldSettings
from audit.capture.inputs.batches import beginning, in_order, length_batches, stack, valid_positions
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.inputs.positions import with_sink_position
from audit.capture.outputs.predictions import (
    class_names,
    first_tensor,
    predictions,
)
from audit.capture.outputs.rows import OutputRow, decide_row, row_weights
from audit.capture.outputs.spans import Span, answer_ends
from audit.capture.outputs.targets import require_head
from audit.errors import CaptureError
from audit.records import Captured, CaptureSettings, Checkpoint, Method

Progress = Callable[[int], None]
VERIFIED_PROBES = 2


@dataclass(frozen=True)
class Session:
    """A checkpoint with everything that is decided once for all of its batches."""

    checkpoint: Checkpoint
    settings: CaptureSettings
    fold: FoldSettings
    plan: CapturePlan
    row: OutputRow
    wanted: dict[str, Any]

    @property
    def keep_logits(self) -> bool:
        """Return whether a language model must give the logits of every position."""
        return self.row.name != "last"

    @property
    def alone(self) -> bool:
        """Return whether the model takes one probe at a time.

        Decoders with a classification head refuse several at once when they know no pad token.
        """
        config = core_model(self.checkpoint.model).config
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        unpadded = self.checkpoint.task == "sequence-classification" and text_config.pad_token_id is None
        return self.plan.alone or unpadded

    @property
    def class_names(self) -> list[str]:
        """Return the names of the checkpoint's classes."""
        return class_names(self.checkpoint, len(core_model(self.checkpoint.model).config.id2label))

    def batches(self, window: Sequence[Encoded]) -> list[list[int]]:
        """Return the batches of a window, as indices into it."""
        return length_batches(window, self.settings.batch_tokens, max_size=1 if self.alone else None)

    @cached_property
    def engine(self) -> Engine:
        """Return what runs a batch by the method."""
        return Engine(
            self.checkpoint,
            self.plan,
            self.fold,
            self.wanted,
            self.settings.batch_tokens,
            keep_logits=self.keep_logits,
            alone=self.alone,
        )

    def checking(self) -> Session:
        """Return the session whose passes are compared: max-flows twice would prove nothing more."""
        return replace(self, fold=FoldSettings()) if self.fold.method == FLOW else self


def open_single(
    checkpoint: Checkpoint,
    window: Sequence[Encoded],
    method: Method,
    settings: CaptureSettings,
    wanted: dict[str, Any],
) -> Session:
    """Decide what is the same for all batches, from the first probes."""
    fold = FoldSettings.from_method(method)
    if fold.needs_target:
        require_head(checkpoint, fold.method)
    plan = window_plan(checkpoint, window)
    row = _decide(checkpoint, plan, method.row, window)
    return Session(checkpoint, settings, fold, plan, row, wanted)


def window_plan(checkpoint: Checkpoint, window: Sequence[Encoded]) -> CapturePlan:
    """Return where attention is computed, as the first probes show it."""
    plan = plan_capture(core_model(checkpoint.model))
    return active_plan(checkpoint.model, plan, window[0].tensors)


def _decide(checkpoint: Checkpoint, plan: CapturePlan, row: str, window: Sequence[Encoded]) -> OutputRow:
    with exclusive(checkpoint.model, plan.configs):
        return decide_row(checkpoint, row, max(window, key=len))


def capture_single(
    session: Session, window: Sequence[Encoded], progress: Progress | None
) -> Iterator[Captured]:
    """Yield the map and prediction of each probe of a window, in order."""
    done = 0

    def captured(indices: Sequence[int]) -> list[Captured]:
        nonlocal done
        batch = [window[i] for i in indices]
        found = captured_batch(session, batch, *_fold(session, batch))
        done += len(indices)
        if progress is not None:
            progress(done)
        return found

    yield from in_order(session.batches(window), captured)


def captured_batch(session: Session, batch: Sequence[Encoded], fold: Fold, outputs: Any) -> list[Captured]:
    """Return the maps and predictions of a batch."""
    wanted = {**session.wanted, **fold.targets}
    at, labelled = fold.read.argmax(dim=1), session.row.kind == "labelled"
    answers = predictions(session.checkpoint, batch, outputs, wanted, at, labelled=labelled)
    final, layers = fold.final_row().double().cpu().numpy(), None
    if session.settings.layer_maps and fold.rows:
        layers = torch.stack(fold.rows, dim=1).double().cpu().numpy()
    diagnostics = {name: values.tolist() for name, values in fold.diagnostics().items()}
    causal = fold.causal.tolist()
    keep = np.pad(fold.valid.cpu().numpy(), ((0, 0), (0, int(fold.sink))), constant_values=True)
    found = []
    for i, item in enumerate(batch):
        positions = replace(item.positions, causal=is_causal(session, causal[i], len(item)))
        positions = with_sink_position(positions) if fold.sink else positions
        rows = None if layers is None else layers[i][:, keep[i]]
        extra = {name: float(values[i]) for name, values in diagnostics.items()}
        row = final[i][keep[i]]
        if session.fold.needs_target and not row.sum() > 0:
            one = undefined_map(item, positions, extra)
        else:
            one = stream_map(item, row, rows, positions, extra)
        found.append(Captured((one,), answers[i]))
    return found


def is_causal(session: Session, no_future: bool, length: int) -> bool:
    """Return whether positions see no later ones; a single position asks the layers."""
    if length > 1:
        return no_future
    return any(getattr(layer.module, "is_causal", False) for layer in session.plan.layers)


def _fold(session: Session, batch: Sequence[Encoded], *, check: bool = False) -> tuple[Fold, Any]:
    tensors = stack(batch)
    read, valid = inputs_of(session, batch, tensors)
    return session.engine.run(batch, tensors, read, valid, verify=check)


def inputs_of(
    session: Session, batch: Sequence[Encoded], tensors: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the output row of each probe of a batch, and its valid positions: (batch, position) each."""
    device = core_model(session.checkpoint.model).device
    read = torch.from_numpy(read_weights(session, batch)).to(device)
    return read, valid_positions(tensors, *read.shape).to(device)


def read_weights(session: Session, batch: Sequence[Encoded]) -> NDArray[np.float32]:
    """Return the output row of each probe of a batch: (batch, position)."""
    mask_id = getattr(
        getattr(session.checkpoint.processor, "tokenizer", session.checkpoint.processor),
        "mask_token_id",
        None,
    )
    ends: list[Span | None] = list(_answer_ends(session, batch)) if session.row.kind == "ends" else []
    names = session.class_names if session.row.kind == "labelled" else ()
    return np.stack(
        [
            row_weights(session.row, item, mask_id, ends=end, names=names)
            for item, end in zip(batch, ends or [None] * len(batch), strict=True)
        ]
    )


def _answer_ends(session: Session, batch: Sequence[Encoded]) -> list[Span]:
    """Return where the answer of each probe starts and ends; see :mod:`audit.capture.outputs.spans`."""
    model, configs = session.checkpoint.model, session.plan.configs
    with exclusive(model, configs):
        outputs = run_model(model, stack(batch))
    return [answer_ends(item, session.wanted.get(item.probe.id), outputs, i) for i, item in enumerate(batch)]


def verify(session: Session, window: Sequence[Encoded]) -> None:
    """Check on the first probes that capture sees what the model does and changes nothing.

    Attention × values must give every layer's own output, positions may mix through nothing else, the
    outputs must be those of a pass without capture to the last bit, and a second pass must agree with
    the first. Where longer probes are had by another engine, attention × values is checked for one of them
    as well.

    Raises
    ------
    CaptureError
    """
    batches = session.batches(window)
    batch = [window[i] for i in batches[0][:VERIFIED_PROBES]]
    checking = session.checking()
    first, second = _fold(checking, batch, check=True), _fold(checking, batch)
    _agree(first, second)
    if len(batch) > 1:
        check_alone(first[0].final_row()[-1:], _fold(checking, batch[-1:])[0].final_row())
    least = fewest_positions(session.checkpoint.model)
    check_mixing(session.checkpoint.model, session.plan, *beginning(batch[0], least))
    with exclusive(session.checkpoint.model, session.plan.configs):
        plain = run_model(session.checkpoint.model, stack(batch), keep_logits=session.keep_logits)
    if not same_tensors(first_tensor(plain), first_tensor(first[1])):
        name = type(core_model(session.checkpoint.model)).__name__
        raise CaptureError(
            f"{name}: capturing changes the model's own output; load the checkpoint with "
            "attention_implementation = 'eager'"
        )
    _verify_longer(checking, [window[one[0]] for one in batches])


def _verify_longer(session: Session, first_of_each: Sequence[Encoded]) -> None:
    """Check attention × values of the first probe that another engine takes than the shortest."""
    by_rows = [session.engine.by_rows(len(item)) for item in first_of_each]
    other = next(
        (item for item, long in zip(first_of_each, by_rows, strict=True) if long != by_rows[0]), None
    )
    if other is not None:
        _fold(session, [other], check=True)


def check_repeats(session: Session, window: Sequence[Encoded]) -> None:
    """Raise CaptureError when two passes of the first batch disagree in any bit."""
    checking = session.checking()
    batch = [window[i] for i in checking.batches(window)[0]]
    _agree(_fold(checking, batch), _fold(checking, batch))


def _agree(first: tuple[Fold, Any], second: tuple[Fold, Any]) -> None:
    same_maps = same_tensors(first[0].final_row(), second[0].final_row())
    if not (same_maps and same_tensors(first_tensor(first[1]), first_tensor(second[1]))):
        raise CaptureError(
            "determinism: two identical passes disagree; no shift can be judged, use another device or "
            "attention implementation"
        )
