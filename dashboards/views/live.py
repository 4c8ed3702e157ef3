"""Live: give an input and see both checkpoints' maps at once; edit it and see what moves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import streamlit as st

from audit.errors import AuditError, ProbeError
from audit.records import Captured, Probe, RunSpec
from audit.report.wording import number
from dashboards import blocks, content, controls, data, loaded, state
from dashboards.content import Content
from dashboards.views import compare, edits
from dashboards.views.maps import draw_pair, on_common_positions

LONGEST = 2000
"""Characters of a text; longer ones are refused here, since the field would swallow them in silence."""
MEGABYTES = 10
IMAGES = ["png", "jpg", "jpeg", "webp"]
SOUNDS = ["wav", "flac", "ogg", "mp3"]
KEYS = ("comparison", "layer", "unit", "overlay", "head", "row", "method")


def page() -> None:
    """Draw the live page of the chosen comparison."""
    st.title("Live", anchor=False)
    manifests = [one for one in reversed(data.comparisons().manifests) if one["before"] and one["after"]]
    if not manifests:
        blocks.no_comparison()
        return
    name = compare.choose_comparison(manifests)
    comparison = data.comparison(name)
    specs = loaded.specs_of(comparison)
    if specs is None:
        loaded.explain(
            f"The runs of {name} are no longer in the store, or have lost their manifest, so that its "
            "checkpoints are unknown."
        )
    elif reason := loaded.obstacle(specs):
        loaded.explain(reason)
    else:
        if not loaded.asked():
            blocks.note(
                "Give a sentence, an image or a sound of your own and see the maps of both checkpoints at "
                "once. What you give stays on this machine and is not stored."
            )
        if loaded.ask(specs, "Load both checkpoints", primary=True):
            with blocks.section():
                _draw(specs)
    state.publish(*KEYS)


def _draw(specs: Sequence[RunSpec]) -> None:
    checkpoints = loaded.pair(specs)
    probe = _input(specs[0], checkpoints[0])
    if probe is None:
        return
    begun = perf_counter()
    try:
        answers = loaded.capture(specs, probe)
        took = perf_counter() - begun
        method = controls.live_method(specs[0], checkpoints[0], controls.rows_of(answers[0].maps, probe))
        if method is not None:
            begun = perf_counter()
            answers = loaded.capture(specs, probe, method)
            took = perf_counter() - begun
    except AuditError as error:
        blocks.warn(_shorten(error) or error)
        return
    _predictions(answers, took)
    blocks.meaning()
    layer = controls.view(answers[0].maps, answers[1].maps)
    _maps(answers, probe, layer)
    edits.since_last(answers, probe, layer)


def _shorten(error: AuditError) -> str | None:
    """Return what to do about a text of too many tokens; None for another error.

    The message of a run advises on its configuration, which does nothing on this page.
    """
    found = re.search(r"have more than (\d+) tokens: \S+ \((\d+)\)", str(error))
    if not isinstance(error, ProbeError) or found is None:
        return None
    limit, given = map(int, found.groups())
    return f"The text has {given:,} tokens; shorten the text to {limit:,} tokens."


def _maps(answers: Sequence[Captured], probe: Probe, layer: int | None) -> None:
    old, new = (one.maps for one in answers)
    for before, after in zip(old, new, strict=False):
        with blocks.section(None if len(old) == 1 else f"Stream: {before.stream}"):
            draw_pair(*on_common_positions(before, after), Content(probe), layer)


# --- what is given -----------------------------------------------------------------------------


def _input(spec: RunSpec, checkpoint: Any) -> Probe | None:
    """Draw the fields that the task needs; return what was given, None for nothing yet."""
    task = checkpoint.task
    if "audio" in task or "speech" in task or task == "ctc":
        return _sound()
    example = _example(spec)
    if "image" not in task:
        return _text(spec, example, pair=example is not None and example.text_pair is not None)
    image = _image()
    if not task.startswith(("zero-shot", "image-text")):
        return image
    words = _text(spec, example, pair=False)
    return None if image is None or words is None else replace(image, text=words.text)


def _text(spec: RunSpec, example: Probe | None, *, pair: bool) -> Probe | None:
    start = (example.text or "") if example is not None else ""
    text = st.text_area("Text", start, key=f"live text {spec.id}", height=90)
    second = None
    if pair and example is not None:
        second = st.text_area("Second text", example.text_pair or "", key=f"live pair {spec.id}", height=90)
    longest = max(len(text), len(second or ""))
    if longest > LONGEST:
        st.warning(
            f"The text has {longest:,} characters; shorten it to {LONGEST:,}.", icon=":material/content_cut:"
        )
        return None
    if not text.strip():
        blocks.note("Give a text to see both maps.")
        return None
    blocks.note("Ctrl-Enter, or a click outside, draws it. Change a word to see what moves.")
    return Probe("live", text=text, text_pair=second)


def _image() -> Probe | None:
    from audit.media import load_image

    file = st.file_uploader("Image", IMAGES, max_upload_size=MEGABYTES)
    if file is None:
        blocks.note("Give an image (PNG, JPEG or WebP) to see both maps.")
        return None
    try:
        return Probe("live", image=load_image(file.getvalue()))
    except AuditError:
        st.warning(
            "This file is not an image that can be read; give a PNG or JPEG.", icon=":material/broken_image:"
        )
        return None


def _sound() -> Probe | None:
    from audit.media import load_audio

    left, right = st.columns(2)
    recorded = left.audio_input("Record a sound", key="live recording")
    file = right.file_uploader("or give a file", SOUNDS, max_upload_size=MEGABYTES, key="live sound")
    given = file or recorded
    if given is None:
        blocks.note("Record a sound, or give one as a WAV file, to see both maps over its spectrogram.")
        return None
    try:
        samples, rate = load_audio(given.getvalue())
    except AuditError as error:
        reason = str(error).partition("(")[2].rpartition(")")[0] or "its format is not known here"
        st.warning(
            f"This file is not a sound that can be read ({blocks.plain(reason, 120)}); give a WAV file.",
            icon=":material/music_off:",
        )
        return None
    return Probe("live", audio=samples, sampling_rate=rate)


def _example(spec: RunSpec) -> Probe | None:
    """Return a probe to begin with, where the probe file is at hand."""
    for source in content.sources():
        if source.digest == spec.inputs_digest and source.probes:
            return next(iter(source.probes.values()))
    return None


# --- what comes out ----------------------------------------------------------------------------


def _predictions(answers: Sequence[Captured], took: float) -> None:
    items = []
    for side, one in zip(("before", "after"), answers, strict=True):
        logits = one.prediction.logits
        sure = ""
        if logits and len(logits) > 1:
            shares = np.exp(np.asarray(logits) - max(logits))
            sure = f"{blocks.term('confidence')} {number(float(shares.max() / shares.sum()), 2)}"
        items.append(
            (f"Predicted {side}", blocks.text(one.prediction.predicted or "no prediction", 60), sure)
        )
    items.append(("Both maps took", f"{took:.2f} s", "on the CPU"))
    blocks.html(f'<div class="bare">{blocks.figures(items)}</div>')
