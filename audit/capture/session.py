"""Capture a whole list of probes: from probes to maps and predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from audit.capture.attention.layers import plan_capture
from audit.capture.engines.settings import FoldSettings
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.inputs.strides import check_stride, merge_windows
from audit.capture.inputs.texts import check_texts, position_limit
from audit.capture.inputs.windows import has_two_towers, probe_windows
from audit.capture.joined.session import JoinedSession, capture_joined, open_joined, verify_joined
from audit.capture.outputs.predictions import (
    Target,
    check_targets,
    class_names,
    targets_by_probe,
)
from audit.capture.pairs.session import capture_pairs, verify_pairs
from audit.capture.pairs.setup import PairSession
from audit.capture.single_session import (
    Progress,
    Session,
    capture_single,
    check_repeats,
    open_single,
    verify,
    window_plan,
)
from audit.records import Captured, CaptureSettings, Checkpoint, Method, Probe


def capture(
    checkpoint: Checkpoint,
    probes: Sequence[Probe],
    *,
    method: Method | None = None,
    settings: CaptureSettings | None = None,
    target: Target = None,
    progress: Progress | None = None,
    windows: Iterator[list[Encoded]] | None = None,
    opened: Opened | None = None,
) -> Iterator[Captured]:
    """Run `probes` through a checkpoint and yield each one's maps and prediction, in order.

    Short inputs: the attention of each layer is folded into the rollout matrix of its batch as it is
    computed, and then dropped. Long ones: queries and keys are kept, and the rows that a run stores are
    carried down from the last layer (:mod:`audit.capture.engines.row_fold`). The model's own kernel
    computes its outputs, which stay the same to the last bit.

    Parameters
    ----------
    checkpoint : Checkpoint
        Its model and its config come back as they were, also after an exception.
    probes : sequence of Probe
        All of one modality.
    method : Method
        Name, parameters and output row; docs/methods.md describes the methods, docs/configuration.md the
        rows.
    settings : CaptureSettings
    target : "label", a class name, an index, two names, a list in the order of the probes, a mapping, or None
        Which class's logit the prediction holds as `target_logit`; two names mean the difference of their
        logits. See docs/methods.md.
    progress : callable, optional
        Called with the number of probes done.
    windows : iterator, optional
        What :func:`audit.capture.probe_windows` gives for these probes, where it is at hand.
    opened : Opened, optional
        Shared by calls for parts of one probe set; by the same checkpoint, method and settings.

    Yields
    ------
    Captured
        One map for each stream, whose weights sum to 1 over its positions, and the prediction. A probe's
        maps do not depend on the others (1e-6 in float32).

    Raises
    ------
    ConfigError
        When the method, one of its parameters, the row or the target is unknown or out of range.
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
        yield from capture_windows(
            checkpoint, windows, method, settings, wanted, progress=progress, opened=opened
        )
        return
    check_stride(settings.stride, position_limit(checkpoint, settings), method.row)
    cut = capture_windows(checkpoint, windows, method, settings, wanted, opened=opened)
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
    yield from capture_windows(checkpoint, windows, method or Method(), settings or CaptureSettings(), wanted)


def capture_windows(
    checkpoint: Checkpoint,
    windows: Iterator[list[Encoded]],
    method: Method,
    settings: CaptureSettings,
    wanted: dict[str, Any],
    *,
    progress: Progress | None = None,
    opened: Opened | None = None,
) -> Iterator[Captured]:
    """Yield what is captured window by window; the first one opens the session, unless `opened` has one."""
    session: AnySession | None = None
    opened = Opened() if opened is None else opened
    done = 0

    def report(count: int) -> None:
        if progress is not None:
            progress(done + count)

    for window in windows:
        if session is None:
            session = opened.session_for(checkpoint, window, method, settings, wanted)
        yield from run_session(session, window, report)
        done += len(window)
        report(0)


AnySession = Session | PairSession | JoinedSession


@dataclass
class Opened:
    """What is decided and verified once for all parts of a probe set: the session of the first part.

    A caller that keeps one says that the checkpoint stays as it is; another checkpoint is opened anew.
    """

    session: AnySession | None = None

    def session_for(
        self,
        checkpoint: Checkpoint,
        window: Sequence[Encoded],
        method: Method,
        settings: CaptureSettings,
        wanted: dict[str, Any],
    ) -> AnySession:
        """Return the session for a part, opened by its first window where there is none yet."""
        if self.session is None or self.session.checkpoint is not checkpoint:
            self.session = open_session(checkpoint, window, method, settings, wanted)
        return replace(self.session, wanted=wanted)


def run_session(
    session: AnySession, window: Sequence[Encoded], progress: Progress | None = None
) -> Iterator[Captured]:
    """Yield what a session gives for the probes of a window, in order."""
    if isinstance(session, PairSession):
        yield from capture_pairs(session, window)
    elif isinstance(session, JoinedSession):
        yield from capture_joined(session, window)
    else:
        yield from capture_single(session, window, progress)


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
    plan = window_plan(checkpoint, window)
    if plan.wiring != "single":
        pair = PairSession(checkpoint, settings, FoldSettings.from_method(method), plan, method.row, wanted)
        verify_pairs(pair, window)
        return pair
    session = open_single(checkpoint, window, method, settings, wanted)
    verify(session, window)
    return session


def check_probes(
    checkpoint: Checkpoint, probes: Sequence[Probe], settings: CaptureSettings | None = None
) -> None:
    """Raise ProbeError where probes are too long for the checkpoint; run no forward pass."""
    texts = [probe for probe in probes if probe.text is not None or probe.messages is not None]
    if texts and (has_two_towers(checkpoint) or all(probe.image is None for probe in texts)):
        check_texts(checkpoint, texts, settings or CaptureSettings())


def has_automatic_regions(
    checkpoint: Checkpoint, probes: Sequence[Probe], settings: CaptureSettings | None = None
) -> bool:
    """Tell whether maps have the regions ``special`` or ``first``; run no forward pass.

    Images and sound tell by their first probe. Text always counts as having them: it comes with special
    tokens, or with the first position of a causal model.
    """
    if probes[0].modality not in ("image", "audio") or getattr(
        core_model(checkpoint.model).config, "is_encoder_decoder", False
    ):
        return True
    first = next(probe_windows(checkpoint, probes[:1], settings or CaptureSettings()))[0]
    return bool(first.positions.special.any())


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
    if (plan := window_plan(checkpoint, window)).wiring != "single":
        verify_pairs(PairSession(checkpoint, settings, FoldSettings(), plan, method.row, {}), window)
        return
    check_repeats(open_single(checkpoint, window, method, settings, {}), window)
