"""Spans of tokens and boxes of patches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from audit.capture.inputs.positions import (
    ImageGeometry,
    image_geometry,
    patch_positions,
    spans_by_decoding,
    token_positions,
    trim_span,
)
from audit.errors import CaptureError


@pytest.mark.parametrize(
    ("text", "span", "expected"),
    [
        ("a bird", (1, 6), (2, 6)),
        ("a  b ", (1, 5), (3, 4)),
        ("a\n\nb", (1, 3), (1, 3)),
        ("ab", (0, 2), (0, 2)),
    ],
)
def test_trim_span_drops_white_space_around_words_only(
    text: str, span: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert trim_span(text, *span) == expected


def test_token_positions_of_a_pair_refer_to_their_own_text() -> None:
    spans = [(0, 0), (0, 2), (0, 0), (0, 3), (0, 0)]
    positions = token_positions(spans, [-1, 0, -1, 1, -1], [True, False, True, False, True], ("ab", " cd"))
    assert positions.starts is not None
    assert positions.ends is not None
    assert positions.starts.tolist() == [-1, 0, -1, 1, -1]
    assert positions.ends.tolist() == [-1, 2, -1, 3, -1]
    assert positions.content.tolist() == [False, True, False, True, False]


class _Bytes:
    """The smallest tokenizer without offsets: one token for each byte."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_spans_by_decoding_give_every_byte_of_a_letter_its_span() -> None:
    text = "é😀x"
    spans = spans_by_decoding(_Bytes(), list(text.encode()), text)
    assert spans == [(0, 1), (0, 1), (1, 2), (1, 2), (1, 2), (1, 2), (2, 3)]


def test_spans_by_decoding_refuse_text_that_does_not_come_back() -> None:
    assert spans_by_decoding(_Bytes(), list(b"ab"), "AB") is None
    assert spans_by_decoding(_Bytes(), list(b"ab"), "abc") is None


def test_boxes_of_a_centre_crop_stay_inside_the_stored_image() -> None:
    # 640×480 resized to 298×224, then the middle 224×224: 37 of 298 columns are cut on either side.
    processor = SimpleNamespace(
        do_resize=True,
        size={"shortest_edge": 224},
        do_center_crop=True,
        crop_size={"height": 224, "width": 224},
        do_pad=None,
    )
    geometry = image_geometry(processor, (480, 640), (224, 224))
    assert geometry == ImageGeometry((224, 298), (224, 224), (0, 37))
    boxes = geometry.boxes(7, 7)
    np.testing.assert_allclose(boxes[0], [37 / 298, 0, 69 / 298, 1 / 7], rtol=1e-6)
    np.testing.assert_allclose(boxes[-1], [229 / 298, 6 / 7, 261 / 298, 1], rtol=1e-6)
    assert boxes[:, 2].max() < 0.9  # the right tenth of the image is not seen at all


def test_patches_that_show_only_padding_are_special() -> None:
    geometry = ImageGeometry(resized=(16, 16), processed=(32, 32), offset=(-8, -8))
    positions = patch_positions(geometry, (4, 4), leading=1, trailing=0)
    assert positions.boxes is not None
    inside = positions.content[1:].reshape(4, 4)
    assert inside[1:3, 1:3].all()
    assert inside.sum() == 4
    np.testing.assert_allclose(positions.boxes[1 + 5], [0, 0, 0.5, 0.5])


def test_image_geometry_refuses_a_size_it_cannot_explain() -> None:
    processor = SimpleNamespace(do_resize=True, size={"height": 32, "width": 32})
    with pytest.raises(CaptureError, match="made a 30×32 image of 50×50 where its settings say 32×32"):
        image_geometry(processor, (50, 50), (30, 32))
