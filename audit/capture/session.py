"""Capture a whole list of probes: from probes to maps and predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit.capture.batches import beginning, length_batches, stack, valid_positions
from audit.capture.check import check_alone, same_tensors
from audit.capture.engine import FoldSettings
from audit.capture.inputs import Encoded, core_model, encode_texts, position_limit
from audit.capture.joined_session import JoinedSession, capture_joined, open_joined, verify_joined
from audit.capture.layers import CapturePlan, plan_capture
from audit.capture.maps import stream_map, undefined_map
from audit.capture.method_pass import Engine, Fold
from audit.capture.mixing import check_mixing
from audit.capture.pair_session import PairSession, capture_pairs, verify_pairs
from audit.capture.passes import active_plan, exclusive, run_model
from audit.capture.positions import with_sink_position
from audit.capture.predictions import (
    Target,
    check_targets,
    class_names,
    first_tensor,
    predictions,
    targets_by_probe,
)
from audit.capture.rows import OutputRow, decide_row, row_weights
from audit.capture.settings import FLOW
from audit.capture.spans import Span, answer_ends
from audit.capture.strides import check_stride, merge_windows
from audit.capture.targets import require_head
from audit.capture.windows import has_two_towers, probe_windows
from audit.errors import CaptureError
from audit.records import Captured, CaptureSettings, Checkpoint, Method, Prediction, Probe

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


def capture(
    checkpoint: Checkpoint,
    probes: Sequence[Probe],
    *,
    method: Method | None = None,
    settings: CaptureSettings | None = None,
    target: Target = None,
    progress: Progress | None = None,
    windows: Iterator[list[Encoded]] | None = None,
) -> Iterator[Captured]:
    """Run `probes` through a checkpoint and yield each one's map and prediction, in order.

    The attention of each layer is folded into the rollout matrix of its batch as it is computed and
    then dropped. The model's own kernel computes its outputs, which stay the same to the last bit.

    Parameters
    ----------
    checkpoint : Checkpoint
        Its model and its config come back as they were, also after an exception.
    probes : sequence of Probe
        Text, text pairs, messages, or images.
    method : Method
        ``rollout`` or ``raw`` (attention of the last layer), its parameters, and the output row:
        ``auto``, ``cls``, ``mean``, ``last``, ``mask``, ``token:<i>``, ``span:<start>-<end>``, or the
        name of an annotated region.
    settings : CaptureSettings
    target : "label", a class name, an index, two names, a list in the order of the probes, a mapping, or None
        Which class's logit the prediction holds as `target_logit`; two names mean the difference of their
        logits. See docs/methods.md.
    progress : callable, optional
        Called with the number of probes done.
    windows : iterator, optional
        What :func:`audit.capture.probe_windows` gives for these probes, where it is at hand.

    Yields
    ------
    Captured
        A map whose weights sum to 1 over the positions of the probe, and the prediction. A probe's
        map does not depend on the others (1e-6 in float32).

    Raises
    ------
    ProbeError
        Naming all probes that are too long, or one that cannot be used.
    CaptureError
        When attention cannot be captured exactly; the message names the layer.
    """
    method, settings = method or Method(), settings or CaptureSettings()
    probes = list(probes)
    if not probes:
        return
    wanted = targets_by_probe(target, probes)
    check_targets(checkpoint, wanted, probes)
    plan_capture(core_model(checkpoint.model))  # refuses before anything is encoded
    windows = windows or probe_windows(checkpoint, probes, settings, method.row)
    if settings.stride is None:
        yield from _capture_windows(checkpoint, windows, method, settings, wanted, progress=progress)
        return
    check_stride(settings.stride, position_limit(checkpoint, settings), method.row)
    cut = _capture_windows(checkpoint, windows, method, settings, wanted)
    labels = len(getattr(core_model(checkpoint.model).config, "id2label", None) or {})
    for done, whole in enumerate(merge_windows(cut, class_names(checkpoint, labels)), start=1):
        if progress is not None:
            progress(done)
        yield whole


def capture_prepared(
    checkpoint: Checkpoint,
    encoded: Sequence[Encoded],
    *,
    method: Method | None = None,
    settings: CaptureSettings | None = None,
    target: Target = None,
) -> Iterator[Captured]:
    """Capture inputs that are tensors already: everything of :func:`capture` below tokenizer and processor.

    Parameters
    ----------
    checkpoint : Checkpoint
        Its processor is not used.
    encoded : sequence of Encoded
        Tensors with a batch axis of 1 and one position for each row of the attention.
    method, settings, target : see :func:`capture`

    Yields
    ------
    Captured, in the order of `encoded`

    Raises
    ------
    CaptureError
        When attention cannot be captured exactly; the message names the layer.
    """
    wanted = targets_by_probe(target, [item.probe for item in encoded])
    windows = iter([list(encoded)] if encoded else [])
    yield from _capture_windows(
        checkpoint, windows, method or Method(), settings or CaptureSettings(), wanted
    )


def _capture_windows(
    checkpoint: Checkpoint,
    windows: Iterator[list[Encoded]],
    method: Method,
    settings: CaptureSettings,
    wanted: dict[str, Any],
    *,
    progress: Progress | None = None,
) -> Iterator[Captured]:
    session: AnySession | None = None
    done = 0

    def report(count: int) -> None:
        if progress is not None:
            progress(done + count)

    for window in windows:
        if session is None:
            session = open_session(checkpoint, window, method, settings, wanted)
        yield from run_session(session, window, report)
        done += len(window)
        report(0)


AnySession = Session | PairSession | JoinedSession


def run_session(
    session: AnySession, window: Sequence[Encoded], progress: Progress | None = None
) -> Iterator[Captured]:
    """Yield what a session gives for the probes of a window, in order."""
    if isinstance(session, PairSession):
        yield from capture_pairs(session, window)
    elif isinstance(session, JoinedSession):
        yield from capture_joined(session, window)
    else:
        yield from _run_window(session, window, progress)


def open_session(
    checkpoint: Checkpoint,
    window: Sequence[Encoded],
    method: Method,
    settings: CaptureSettings,
    wanted: dict[str, Any],
) -> AnySession:
    """Decide and verify on the first probes what is the same for all."""
    if window[0].picture is not None:
        joined = open_joined(checkpoint, window[0], settings, method, wanted)
        verify_joined(joined, window)
        return joined
    plan = _plan(checkpoint, window)
    if plan.wiring != "single":
        pair = PairSession(checkpoint, settings, FoldSettings.from_method(method), plan, method.row, wanted)
        verify_pairs(pair, window)
        return pair
    session = _open(checkpoint, window, method, settings, wanted)
    verify(session, window)
    return session


def _open(
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
    plan = _plan(checkpoint, window)
    row = _decide(checkpoint, plan, method.row, window)
    return Session(checkpoint, settings, fold, plan, row, wanted)


def _plan(checkpoint: Checkpoint, window: Sequence[Encoded]) -> CapturePlan:
    plan = plan_capture(core_model(checkpoint.model))
    return active_plan(checkpoint.model, plan, window[0].tensors)


def check_probes(
    checkpoint: Checkpoint, probes: Sequence[Probe], settings: CaptureSettings | None = None
) -> None:
    """Raise ProbeError naming every probe that is too long for the checkpoint; run no forward pass."""
    texts = [probe for probe in probes if probe.text is not None or probe.messages is not None]
    if texts and (has_two_towers(checkpoint) or all(probe.image is None for probe in texts)):
        encode_texts(checkpoint, texts, settings or CaptureSettings())


DETERMINISM_PROBES = 16
"""How many probes are passed twice before a run; enough to fill a batch of usual size."""


def check_determinism(
    checkpoint: Checkpoint,
    probes: Sequence[Probe],
    *,
    method: Method | None = None,
    settings: CaptureSettings | None = None,
) -> None:
    """Run the first few probes twice and raise CaptureError when the two passes disagree in any bit."""
    method, settings = method or Method(), settings or CaptureSettings()
    window = next(probe_windows(checkpoint, list(probes)[:DETERMINISM_PROBES], settings, method.row), None)
    if window is None:
        return
    if window[0].picture is not None:
        joined = open_joined(checkpoint, window[0], settings, Method(row=method.row), {})
        verify_joined(joined, window)
        return
    if (plan := _plan(checkpoint, window)).wiring != "single":
        verify_pairs(PairSession(checkpoint, settings, FoldSettings(), plan, method.row, {}), window)
        return
    session = _open(checkpoint, window, method, settings, {}).checking()
    batch = [window[i] for i in session.batches(window)[0]]
    _agree(
        _fold(session, batch), _fold(session, batch), "two identical passes disagree; no shift can be judged"
    )


def _decide(checkpoint: Checkpoint, plan: CapturePlan, row: str, window: Sequence[Encoded]) -> OutputRow:
    with exclusive(checkpoint.model, plan.configs):
        return decide_row(checkpoint, row, max(window, key=len))


def _run_window(session: Session, window: Sequence[Encoded], progress: Progress | None) -> Iterator[Captured]:
    ready: dict[int, Captured] = {}
    cursor, done = 0, 0
    for indices in session.batches(window):
        batch = [window[i] for i in indices]
        ready |= dict(zip(indices, captured_batch(session, batch, *_fold(session, batch)), strict=True))
        done += len(indices)
        if progress is not None:
            progress(done)
        while cursor in ready:
            yield ready.pop(cursor)
            cursor += 1


def _read_weights(session: Session, batch: Sequence[Encoded]) -> NDArray[np.float32]:
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
    """Return where the answer of each probe starts and ends; see :func:`audit.capture.spans.answer_ends`."""
    model, configs = session.checkpoint.model, session.plan.configs
    with exclusive(model, configs):
        outputs = run_model(model, stack(batch))
    return [answer_ends(item, session.wanted.get(item.probe.id), outputs, i) for i, item in enumerate(batch)]


def inputs_of(
    session: Session, batch: Sequence[Encoded], tensors: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the output row of each probe of a batch, and its valid positions: (batch, position) each."""
    device = core_model(session.checkpoint.model).device
    read = torch.from_numpy(_read_weights(session, batch)).to(device)
    return read, valid_positions(tensors, *read.shape).to(device)


def _fold(session: Session, batch: Sequence[Encoded], *, check: bool = False) -> tuple[Fold, Any]:
    tensors = stack(batch)
    read, valid = inputs_of(session, batch, tensors)
    return session.engine.run(batch, tensors, read, valid, verify=check)


def verify(session: Session, window: Sequence[Encoded]) -> None:
    """Check on the first probes that capture sees what the model does and changes nothing.

    Attention × values must give every layer's own output, positions may mix through nothing else, the
    outputs must be those of a pass without capture to the last bit, and a second pass must agree with
    the first.

    Raises
    ------
    CaptureError
    """
    batch = [window[i] for i in session.batches(window)[0][:VERIFIED_PROBES]]
    checking = session.checking()
    first, second = _fold(checking, batch, check=True), _fold(checking, batch)
    _agree(first, second, "two identical passes disagree; no shift can be judged")
    if len(batch) > 1:
        check_alone(first[0].final_row()[-1:], _fold(checking, batch[-1:])[0].final_row())
    check_mixing(session.checkpoint.model, session.plan, *beginning(batch[0]))
    with exclusive(session.checkpoint.model, session.plan.configs):
        plain = run_model(session.checkpoint.model, stack(batch), keep_logits=session.keep_logits)
    if not same_tensors(first_tensor(plain), first_tensor(first[1])):
        name = type(core_model(session.checkpoint.model)).__name__
        raise CaptureError(
            f"{name}: capturing changes the model's own output; load the checkpoint with "
            "attention_implementation = 'eager'"
        )


def _agree(first: tuple[Fold, Any], second: tuple[Fold, Any], message: str) -> None:
    same_maps = same_tensors(first[0].final_row(), second[0].final_row())
    if not (same_maps and same_tensors(first_tensor(first[1]), first_tensor(second[1]))):
        raise CaptureError(f"determinism: {message}, use another device or attention implementation")


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
        positions = replace(item.positions, causal=_is_causal(session, causal[i], len(item)))
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


def _is_causal(session: Session, no_future: bool, length: int) -> bool:
    if length > 1:
        return no_future
    return any(getattr(layer.module, "is_causal", False) for layer in session.plan.layers)


__all__ = ["Prediction", "capture", "capture_prepared", "check_determinism", "check_probes"]
