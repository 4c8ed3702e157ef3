"""Long texts in overlapping windows: the map of the whole text, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from audit.capture import capture, check_probes, occlude
from audit.errors import ConfigError, ProbeError
from audit.records import CaptureSettings, Method, Probe
from tests.integration.tiny_models import TEXTS, text_checkpoint

LONG = " ".join(TEXTS)
SETTINGS = CaptureSettings(max_length=10, stride=3)


@pytest.fixture(scope="module")
def bert():
    return text_checkpoint("bert")


def test_map_covers_the_whole_text_once_and_sums_to_one(bert):
    whole = next(iter(capture(bert, [Probe("a", text=LONG)]))).maps[0].positions
    (found,) = capture(bert, [Probe("a", text=LONG)], settings=SETTINGS)
    (one,) = found.maps
    assert one.weights.sum() == pytest.approx(1)
    assert one.layers.sum(axis=1) == pytest.approx(np.ones(len(one.layers)))
    assert one.positions.special.tolist() == whole.special.tolist()
    assert one.positions.starts.tolist() == whole.starts.tolist()


def test_a_long_text_may_follow_a_pair(bert):
    pair, alone = Probe("pair", text="the film", text_pair=LONG), Probe("alone", text=LONG)
    (_, after) = capture(bert, [pair, alone], settings=SETTINGS)
    (expected,) = capture(bert, [alone], settings=SETTINGS)
    assert after.maps[0].weights == pytest.approx(expected.maps[0].weights, abs=1e-6)


def test_map_is_the_mean_of_the_windows_captured_by_themselves(bert):
    text = "the film was good the film was bad the food was good"
    (merged,) = capture(bert, [Probe("a", text=text)], settings=SETTINGS)
    encoding = bert.processor(
        text, truncation=True, max_length=10, stride=3,
        return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    by_start = {start: i for i, start in enumerate(merged.maps[0].positions.starts) if start >= 0}
    expected, logits = np.zeros(len(merged.maps[0].weights)), []
    for offsets in encoding["offset_mapping"]:
        spans = [span for span in offsets if span[1] > span[0]]
        first, last = spans[0][0], spans[-1][1]
        (window,) = capture(bert, [Probe("w", text=text[first:last])])
        weights = window.maps[0].weights / len(encoding["offset_mapping"])
        expected[0] += weights[0]
        expected[-1] += weights[-1]
        for start, weight in zip(window.maps[0].positions.starts[1:-1], weights[1:-1], strict=True):
            expected[by_start[start + first]] += weight
        logits.append(window.prediction.logits)
    assert merged.maps[0].weights == pytest.approx(expected, abs=1e-6)
    assert merged.prediction.logits == pytest.approx(np.mean(logits, axis=0), abs=1e-6)


def test_short_probes_are_as_without_stride_and_the_order_is_kept(bert):
    probes = [Probe("long", text=LONG), Probe("short", text=TEXTS[0]), Probe("again", text=LONG)]
    settings = CaptureSettings(max_length=14, stride=4)
    found = list(capture(bert, probes, settings=settings, progress=(counted := []).append))
    assert [one.prediction.probe_id for one in found] == ["long", "short", "again"]
    assert counted == [1, 2, 3]
    assert found[0].maps[0].weights == pytest.approx(found[2].maps[0].weights, abs=1e-6)
    (alone,) = capture(bert, probes[1:2])
    assert found[1].maps[0].weights == pytest.approx(alone.maps[0].weights, abs=1e-6)


def test_long_probes_are_no_error_with_stride(bert):
    check_probes(bert, [Probe("a", text=LONG)], SETTINGS)
    with pytest.raises(ProbeError, match="more than 10 tokens"):
        check_probes(bert, [Probe("a", text=LONG)], CaptureSettings(max_length=10))


def test_pairs_are_cut_in_their_second_text(bert):
    (found,) = capture(bert, [Probe("a", text="the film", text_pair=LONG)], settings=SETTINGS)
    parts = found.maps[0].positions.parts
    assert (parts == 0).sum() == 2
    assert found.maps[0].weights.sum() == pytest.approx(1)


@pytest.mark.parametrize(("stride", "row"), [(10, "auto"), (3, "token:2"), (3, "mask")])
def test_windows_that_cannot_work_are_refused(bert, stride, row):
    settings = CaptureSettings(max_length=10, stride=stride)
    with pytest.raises(ConfigError, match="stride") as caught:
        list(capture(bert, [Probe("a", text=LONG)], settings=settings, method=Method(row=row)))
    assert "\n" not in str(caught.value)


def test_occlusion_says_that_it_has_no_windows(bert):
    with pytest.raises(ProbeError, match="stride"):
        occlude(bert, [Probe("a", text=LONG)], [np.ones(3)], targets=0, settings=SETTINGS)
