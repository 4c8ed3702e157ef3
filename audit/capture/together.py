"""One forward pass for several methods: their maps of the same probes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from audit.capture.attention.layers import plan_capture
from audit.capture.attention.passes import fold_batch
from audit.capture.attention.scratch import Scratch
from audit.capture.engines.fold import BatchFold
from audit.capture.engines.method_pass import weight_fold
from audit.capture.engines.row_backward import kernel_calls
from audit.capture.engines.row_fold import RowFold, rows_suffice
from audit.capture.inputs.batches import stack
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.inputs.windows import probe_windows
from audit.capture.outputs.predictions import Target, check_targets, targets_by_probe
from audit.capture.session import AnySession, open_session, run_session
from audit.capture.single_session import Session, captured_batch, inputs_of
from audit.errors import ConfigError
from audit.records import Captured, CaptureSettings, Checkpoint, Method, Probe


def capture_methods(
    checkpoint: Checkpoint,
    probes: Sequence[Probe],
    methods: Sequence[Method],
    *,
    settings: CaptureSettings | None = None,
    target: Target = None,
) -> Iterator[tuple[Captured, ...]]:
    """Yield for each probe what each method gives; methods that read attention alone share a forward pass.

    Rollout with any fusion or pruning of heads, rollout of single heads, raw attention and attention flow
    are folds of the same weights. Of long probes, methods that are had from rows alone share one pass, and
    those that need whole matrices another. Other methods, and models of several stacks, take the passes
    that they take alone.

    Parameters
    ----------
    checkpoint, probes, settings, target : see :func:`audit.capture.capture`
    methods : sequence of Method
        With one output row.

    Yields
    ------
    tuple of Captured
        In the order of `methods`; each what :func:`audit.capture.capture` gives for it, to 1e-6.

    Raises
    ------
    ConfigError
        When the methods read different rows, or texts are cut by a stride.
    ProbeError, CaptureError
    """
    settings, probes = settings or CaptureSettings(), list(probes)
    rows = sorted({method.row for method in methods})
    if len(rows) != 1:
        raise ConfigError(f"methods: expected one output row for all, got {', '.join(rows) or 'no method'}")
    if settings.stride is not None:
        raise ConfigError("methods: texts that are cut by a stride are captured one method at a time")
    if not probes:
        return
    wanted = targets_by_probe(target, probes)
    check_targets(checkpoint, wanted, probes)
    plan_capture(core_model(checkpoint.model))
    sessions: list[AnySession] = []
    for window in probe_windows(checkpoint, probes, settings, rows[0]):
        if not sessions:
            sessions = [open_session(checkpoint, window, one, settings, wanted) for one in methods]
        yield from zip(*_by_method(sessions, window), strict=True)


def _by_method(sessions: Sequence[AnySession], window: Sequence[Encoded]) -> list[list[Captured]]:
    """Return for each method what it gives for the probes of a window."""
    shared = [one for one in sessions if isinstance(one, Session) and weight_fold(one.fold) is not None]
    together = iter(_share_passes(shared, window)) if len(shared) > 1 else iter(())
    alone = [one for one in sessions if len(shared) < 2 or one not in shared]
    return [list(run_session(one, window)) if one in alone else next(together) for one in sessions]


def _share_passes(sessions: Sequence[Session], window: Sequence[Encoded]) -> list[list[Captured]]:
    first, scratch = sessions[0], Scratch()
    found: list[dict[int, Captured]] = [{} for _ in sessions]
    for indices in first.batches(window):
        batch = [window[i] for i in indices]
        folds, outputs = _shared_pass(sessions, batch, scratch)
        for session, fold, one in zip(sessions, folds, found, strict=True):
            one.update(zip(indices, captured_batch(session, batch, fold, outputs), strict=True))
    return [[one[i] for i in range(len(window))] for one in found]


def _shared_pass(
    sessions: Sequence[Session], batch: Sequence[Encoded], scratch: Scratch
) -> tuple[list[BatchFold], Any]:
    first, tensors = sessions[0], stack(batch)
    read, valid = inputs_of(first, batch, tensors)
    folds: list[BatchFold] = [_fold_of(one, read, valid, scratch) for one in sessions]
    by_rows = [one for one in folds if isinstance(one, RowFold)]
    whole = [one for one in folds if not isinstance(one, RowFold)]
    model, plan, keep_logits, outputs = first.checkpoint.model, first.plan, first.keep_logits, None
    if whole:
        outputs = fold_batch(model, plan, tensors, _Folds(whole), keep_logits=keep_logits, scratch=scratch)
    if by_rows:
        calls, outputs = kernel_calls(model, plan, tensors, keep_logits=keep_logits, scratch=scratch)
        for one in by_rows:
            one.carry([*calls])
    return folds, outputs


def _fold_of(session: Session, read: Tensor, valid: Tensor, scratch: Scratch) -> BatchFold:
    """Return the fold that the session's method takes alone for probes of this length."""
    if rows_suffice(session.fold, session.plan, read.shape[1]):
        return RowFold(session.fold, read, valid, scratch)
    return (weight_fold(session.fold) or BatchFold)(session.fold, read, valid)


class _Folds(BatchFold):
    """Several folds that take each layer's weights one after the other."""

    def __init__(self, folds: Sequence[BatchFold]) -> None:
        super().__init__(folds[0].settings, folds[0].read, folds[0].valid)
        self.folds = folds

    def fold(self, weights: Tensor, *, sink: bool = False, residual: Tensor | None = None) -> None:
        """Give every fold the next layer's attention."""
        with torch.no_grad():
            for one in self.folds:
                one.fold(weights, sink=sink, residual=residual)
