"""Live: type an input and see both checkpoints' maps at once; edit it and see what moves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import streamlit as st

from audit.errors import AuditError
from audit.records import Captured, Map, Probe, RunSpec
from audit.report.wording import number
from dashboards import blocks, content, data, state
from dashboards.content import Content
from dashboards.views import compare
from dashboards.views.maps import draw_pair
from dashboards.views.probe import WHOLE

LIMIT_VARIABLE = "ROLLOUT_AUDIT_LIVE_GB"
DEFAULT_LIMIT = 4.0
LONGEST = 2000
KEYS = ("comparison", "layer", "unit", "overlay")


def page() -> None:
    """Draw the live page of the chosen comparison."""
    st.title("Live", anchor=False)
    manifests = [one for one in reversed(data.comparisons().manifests) if one["before"] and one["after"]]
    if not manifests:
        st.info(
            "There is no comparison in this store yet; `audit run audit.toml` makes one.",
            icon=":material/inbox:",
        )
        return
    name = compare.choose_comparison(manifests)
    specs = _specs(name)
    if not specs:
        return
    if not st.session_state.get("live on") and not _start(specs):
        state.publish(*KEYS)
        return
    with blocks.section():
        checkpoints = [load(spec.id, spec.checkpoint.digest) for spec in specs]
        _draw(specs, checkpoints)
    state.publish(*KEYS)


def _specs(name: str) -> list[RunSpec]:
    comparison = data.comparison(name)
    assert comparison.before is not None
    assert comparison.after is not None
    where = data.store()
    missing = [ref.run_id for ref in (comparison.before, comparison.after) if not where.has_run(ref.run_id)]
    if missing:
        st.info(
            f"{missing[0]} is no longer in the store, so its checkpoint is unknown.", icon=":material/info:"
        )
        return []
    specs = [where.spec(ref.run_id) for ref in (comparison.before, comparison.after)]
    from audit.pipeline import memory_estimate

    need, limit = memory_estimate(*specs), float(os.environ.get(LIMIT_VARIABLE) or DEFAULT_LIMIT)
    if need > limit:
        st.info(
            f"Both checkpoints together need about {need:.1f} GB, more than the {limit:g} GB this page "
            "may take; "
            f"set {LIMIT_VARIABLE} higher to allow it.",
            icon=":material/memory:",
        )
        return []
    return specs


def _start(specs: Sequence[RunSpec]) -> bool:
    """Ask before models are loaded, since that takes memory and some seconds."""
    from audit.pipeline import memory_estimate

    blocks.note(
        f"This loads both checkpoints into memory (about {max(0.01, memory_estimate(*specs)):.2f} GB) "
        "on this machine. "
        "What you type is not stored."
    )
    started = st.button("Load both checkpoints", icon=":material/bolt:", type="primary")
    if started:
        st.session_state["live on"] = True
    return started


@st.cache_resource(max_entries=2, show_spinner="Loading the checkpoint …")
def load(run_id: str, digest: str) -> Any:  # noqa: ARG001 (part of the cache's key)
    """Return the loaded checkpoint of a run; the two last used are kept."""
    from audit.pipeline import load_run_checkpoint

    return load_run_checkpoint(data.store().spec(run_id))


def _draw(specs: Sequence[RunSpec], checkpoints: Sequence[Any]) -> None:
    probe = _input(specs[0], checkpoints[0])
    if probe is None:
        return
    begun = perf_counter()
    try:
        answers = [_answer(one, spec, probe) for one, spec in zip(checkpoints, specs, strict=True)]
    except AuditError as error:
        blocks.warn(error)
        return
    took = perf_counter() - begun
    _predictions(answers, took)
    layer = _controls(answers[0].maps[0])
    for before, after in zip(answers[0].maps, answers[1].maps, strict=False):
        with blocks.section(None if len(answers[0].maps) == 1 else f"Stream: {before.stream}"):
            draw_pair(before, after, Content(probe), layer)
    _previous(answers, probe)


def _input(spec: RunSpec, checkpoint: Any) -> Probe | None:
    if "image" in checkpoint.task:
        return _image_input()
    if "audio" in checkpoint.task or "speech" in checkpoint.task or checkpoint.task == "ctc":
        st.info("Sound cannot be given here yet; its probes stand on the probe page.", icon=":material/info:")
        return None
    example = _example(spec)
    text = st.text_area("Text", example, key=f"live text {spec.id}", height=90, max_chars=LONGEST)
    blocks.note("Ctrl-Enter, or a click outside, draws it.")
    return Probe("live", text=text) if text.strip() else None


def _image_input() -> Probe | None:
    import io

    from PIL import Image, UnidentifiedImageError

    file = st.file_uploader("Image", ["png", "jpg", "jpeg", "webp"], max_upload_size=10)
    if file is None:
        blocks.note("Give an image to see both maps.")
        return None
    try:
        pixels = np.asarray(Image.open(io.BytesIO(file.getvalue())).convert("RGB"))
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError):
        st.warning(
            "This file is not an image that can be read; give a PNG or JPEG.", icon=":material/broken_image:"
        )
        return None
    return Probe("live", image=pixels)


def _example(spec: RunSpec) -> str:
    """Return the text of a probe to begin with, where the probe file is at hand."""
    for source in content.sources():
        if source.digest == spec.inputs_digest and source.probes:
            return str(next(iter(source.probes.values())).text or "")
    return ""


def _answer(checkpoint: Any, spec: RunSpec, probe: Probe) -> Captured:
    from audit.pipeline import capture_one

    image = probe.image if isinstance(probe.image, np.ndarray) else None
    return capture_one(checkpoint, spec, text=probe.text, image=image)


def _predictions(answers: Sequence[Captured], took: float) -> None:
    items = []
    for side, one in zip(("before", "after"), answers, strict=True):
        logits = one.prediction.logits
        sure = ""
        if logits and len(logits) > 1:
            shares = np.exp(np.asarray(logits) - max(logits))
            sure = f"confidence {number(float(shares.max() / shares.sum()), 2)}"
        items.append(
            (f"Predicted {side}", blocks.text(one.prediction.predicted or "no prediction", 60), sure)
        )
    items.append(("Both maps took", f"{took:.2f} s", "on the CPU"))
    blocks.html(f'<div class="bare">{blocks.figures(items)}</div>')


def _controls(one: Map) -> int | None:
    chosen: int | None = None
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        if one.layers is not None and len(one.layers):
            options = [*map(str, range(len(one.layers))), WHOLE]
            value = state.pick(st.select_slider, "Up to layer", "layer", options, default=WHOLE, width=200)
            chosen = int(value) if value is not None and value != WHOLE else None
        if one.positions.kind == "token":
            state.pick(
                st.segmented_control, "Show", "unit", ["words", "tokens"], default="words", required=True
            )
        else:
            state.pick(
                st.segmented_control,
                "Overlay",
                "overlay",
                ["patches", "smooth"],
                default="patches",
                required=True,
            )
    return chosen


def _previous(answers: Sequence[Captured], probe: Probe) -> None:
    """Say what the last edit did to both predictions."""
    if probe.text is None:
        return
    now = (probe.text, tuple(one.prediction.predicted for one in answers))
    last = st.session_state.get("live last")
    if last is not None and last[0] != now[0]:
        st.session_state["live edit"] = last
    st.session_state["live last"] = now
    before_edit = st.session_state.get("live edit")
    if before_edit is None or before_edit[0] == now[0]:
        return
    turned = [
        f"{side}: {old} → {new}"
        for side, old, new in zip(("before", "after"), before_edit[1], now[1], strict=True)
        if old != new
    ]
    what = "; ".join(turned) if turned else "neither checkpoint changed its answer"
    blocks.note(f"Since your last edit (“{blocks.text(before_edit[0], 80)}”): {blocks.text(what)}.")
