"""Reliance of a whole list of probes without a map: the linear engine, or the dense one with a reason."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit.capture.attention.check import check_alone, same_tensors
from audit.capture.attention.interface import KernelCall
from audit.capture.attention.layers import plan_capture
from audit.capture.attention.mixing import check_mixing
from audit.capture.attention.passes import exclusive, run_model
from audit.capture.engines.region_forward import (
    RegionFold,
    refusal,
    region_batch,
    sees_no_future,
    settings_refusal,
)
from audit.capture.engines.settings import FoldSettings
from audit.capture.inputs.batches import beginning, stack
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.inputs.windows import probe_windows
from audit.capture.outputs.predictions import Target, check_targets, first_tensor, targets_by_probe
from audit.capture.session import capture_windows
from audit.capture.single_session import (
    VERIFIED_PROBES,
    Session,
    inputs_of,
    is_causal,
    open_single,
    window_plan,
)
from audit.errors import CaptureError
from audit.records import Captured, CaptureSettings, Checkpoint, FloatArray, Method, Positions, Probe

EngineName = Literal["auto", "dense", "linear"]
LEAST_POSITIONS = 1024
"""From this length on, ``auto`` carries regions instead of the n × n map."""

Columns = Callable[[Probe, Positions], FloatArray]


@dataclass(frozen=True)
class RegionMasses:
    """What the row of one probe draws from each column, layer by layer.

    Attributes
    ----------
    probe_id : str
    positions : Positions
    masses : float64 array (layer, column)
        The output row of each cumulative R_l times the column.
    """

    probe_id: str
    positions: Positions
    masses: NDArray[np.float64]


def capture_regions(
    checkpoint: Checkpoint,
    probes: Sequence[Probe],
    columns: Columns,
    *,
    engine: EngineName = "auto",
    method: Method | None = None,
    settings: CaptureSettings | None = None,
    target: Target = None,
) -> Iterator[Captured | RegionMasses]:
    """Yield for each probe what its output row draws from each region, or its map where that is exact.

    Parameters
    ----------
    checkpoint, probes, method, settings, target : see :func:`audit.capture.capture`
    columns : function of a Probe and its Positions
        Returns float64 (position, column): weights of regions over the positions.
    engine : "auto", "dense" or "linear"
        ``auto`` is linear where the longest probe has 1024 positions or more and nothing speaks
        against it. Where something does, ``linear`` warns with the reason and gives maps.

    Yields
    ------
    RegionMasses from the linear engine, Captured from the dense one; in the order of `probes`

    Raises
    ------
    ProbeError, CaptureError
        As :func:`audit.capture.capture`.
    """
    method, settings = method or Method(), settings or CaptureSettings()
    wanted = targets_by_probe(target, probes)
    check_targets(checkpoint, wanted, probes)
    plan_capture(core_model(checkpoint.model))
    windows = probe_windows(checkpoint, probes, settings, method.row)
    window = next(windows, None)
    if window is None:
        return
    reason = _dense_reason(checkpoint, window, engine, FoldSettings.from_method(method))
    if reason is None:
        session = open_single(checkpoint, window, method, settings, wanted)
        look = _look(session, window)
        reason, causal = look.reason, bool(look.causal.all())
        if reason is None:
            yield from _linear(session, causal, chain([window], windows), columns)
            return
    _say(engine, str(reason))
    yield from capture_windows(checkpoint, chain([window], windows), method, settings, wanted)


def _say(engine: EngineName, reason: str) -> None:
    if engine == "linear":
        warnings.warn(f"the dense engine is used: {reason}", UserWarning, stacklevel=3)
    logging.getLogger("audit").info("the dense engine is used: %s", reason)


def _dense_reason(
    checkpoint: Checkpoint, window: Sequence[Encoded], engine: EngineName, fold: FoldSettings
) -> str | None:
    if engine == "dense":
        return "it was asked for"
    if (reason := settings_refusal(fold)) is not None:
        return reason
    if engine == "auto" and max(map(len, window)) < LEAST_POSITIONS:
        return f"probes have fewer than {LEAST_POSITIONS} positions"
    if window[0].picture is not None:
        return "images are read in one sequence with their text"
    plan = window_plan(checkpoint, window)
    if plan.wiring != "single":
        return f"its stacks are joined as {plan.wiring}"
    return "some layers are not on the attention interface" if plan.has_hooks else None


class _Look(RegionFold):
    """A fold that only looks at the calls."""

    reason: str | None = None

    def fold(self, call: KernelCall) -> None:
        """Note why the call is not one for the fused kernel, and whether it is causal."""
        self.reason = self.reason or refusal(call)
        self.causal &= sees_no_future(call)


def _look(session: Session, window: Sequence[Encoded]) -> _Look:
    batch = [max(window, key=len)]
    tensors, read, valid = _inputs(session, batch)
    look = _Look(session.fold, read, valid, read[..., None])
    region_batch(session.checkpoint.model, session.plan, tensors, look, keep_logits=session.keep_logits)
    return look


def _inputs(session: Session, batch: Sequence[Encoded]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    tensors = stack(batch)
    return (tensors, *inputs_of(session, batch, tensors))


@dataclass(frozen=True)
class _Carrier:
    """A session with the columns that it carries."""

    session: Session
    columns: Columns
    causal: bool

    def positions(self, item: Encoded) -> Positions:
        return replace(item.positions, causal=is_causal(self.session, self.causal, len(item)))

    def run(self, batch: Sequence[Encoded], *, verify: bool = False) -> tuple[RegionFold, Any]:
        session = self.session
        tensors, read, valid = _inputs(session, batch)
        fold = RegionFold(session.fold, read, valid, self._stacked(batch, valid))
        outputs = region_batch(
            session.checkpoint.model,
            session.plan,
            tensors,
            fold,
            verify=verify,
            keep_logits=session.keep_logits,
        )
        if not bool((fold.causal == self.causal).all()):
            raise CaptureError("some probes are masked causally and some are not; use engine = 'dense'")
        return fold, outputs

    def _stacked(self, batch: Sequence[Encoded], valid: Tensor) -> Tensor:
        """Return the columns of a batch, zero at its pads: (batch, position, column)."""
        each = [self.columns(item.probe, self.positions(item)) for item in batch]
        dtype = torch.promote_types(core_model(self.session.checkpoint.model).dtype, torch.float32)
        stacked = torch.zeros(*valid.shape, each[0].shape[1], dtype=dtype, device=valid.device)
        for i, one in enumerate(each):
            stacked[i, valid[i]] = torch.from_numpy(one).to(stacked)
        return stacked

    def masses(self, batch: Sequence[Encoded]) -> list[RegionMasses]:
        fold, _ = self.run(batch)
        whole = torch.stack(fold.masses, dim=1).double().cpu().numpy()
        return [
            RegionMasses(item.probe.id, self.positions(item), one)
            for item, one in zip(batch, whole, strict=True)
        ]


def _linear(
    session: Session, causal: bool, windows: Iterable[Sequence[Encoded]], columns: Columns
) -> Iterator[RegionMasses]:
    carrier, verified = _Carrier(session, columns, causal), False
    for window in windows:
        if not verified:
            _verify(carrier, window)
            verified = True
        found: dict[int, RegionMasses] = {}
        for indices in session.batches(window):
            found |= dict(zip(indices, carrier.masses([window[i] for i in indices]), strict=True))
        yield from (found[i] for i in range(len(window)))


def _verify(carrier: _Carrier, window: Sequence[Encoded]) -> None:
    """Check on the first probes what :func:`audit.capture.single_session.verify` checks, in linear memory."""
    session = carrier.session
    model, plan = session.checkpoint.model, session.plan
    batch = [window[i] for i in session.batches(window)[0][:VERIFIED_PROBES]]
    (first, answer), (second, again) = carrier.run(batch, verify=True), carrier.run(batch)
    if not (same_tensors(first.columns, second.columns) and _same_answers(answer, again)):
        raise CaptureError(
            "determinism: two identical passes disagree; no shift can be judged, use another device or "
            "attention implementation"
        )
    if len(batch) > 1:
        check_alone(first.masses[-1][-1:], carrier.run(batch[-1:])[0].masses[-1])
    check_mixing(model, plan, *beginning(batch[0]))
    with exclusive(model, plan.configs):
        plain = run_model(model, stack(batch), keep_logits=session.keep_logits)
    if not _same_answers(plain, answer):
        raise CaptureError(f"{type(core_model(model)).__name__}: capturing changes the model's own output")


def _same_answers(a: Any, b: Any) -> bool:
    return same_tensors(first_tensor(a), first_tensor(b))
