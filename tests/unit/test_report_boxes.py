"""Example maps of an image whose positions are boxes, not a grid."""

from __future__ import annotations

import numpy as np
import pytest

from audit.report import Example
from audit.report.maps import LEVELS, PANEL, box_paths, drawing, patch_paths

BOXES = np.array([[0.0, 0.0, 0.5, 0.5], [0.25, 0.5, 1.0, 1.0]])
BEFORE, AFTER = np.array([0.25, 0.75]), np.array([0.5, 0.5])


def example(**changes: object) -> Example:
    return Example("p", "c", "image", BEFORE, AFTER, **{"boxes": BOXES, **changes})  # type: ignore[arg-type]


def test_boxes_are_drawn_where_they_lie() -> None:
    one, two = box_paths(np.array([1.0, 0.5]), BOXES, 120.0, "mass")
    assert (two.path, two.opacity) == (f"M0.0 0.0h{PANEL / 2}v60.0h-{PANEL / 2}z", 1.0)
    assert (one.path, one.opacity) == ("M60.0 60.0h180.0v60.0h-180.0z", 0.5)


def test_boxes_that_tile_an_image_are_drawn_as_its_grid() -> None:
    values = np.arange(6) / LEVELS
    rows, columns = np.divmod(np.arange(6), 3)
    tiles = np.stack([columns / 3, rows / 2, (columns + 1) / 3, (rows + 1) / 2], axis=1)
    assert box_paths(values, tiles, 160.0, "up") == patch_paths(values, (2, 3), 160.0, "up")


def test_what_moved_most_is_named_by_its_box() -> None:
    drawn = drawing(example())
    assert drawn.movers == (
        "box 0 to 50 % across, 0 to 50 % down: .250 → .500",
        "box 25 to 100 % across, 50 to 100 % down: .750 → .500",
    )
    assert drawn.height == PANEL
    assert drawn.notes == ("Boxes on a square: no image is shown.",)
    assert [len(panel.patches) for panel in drawn.panels] == [2, 1, 2]


@pytest.mark.parametrize("boxes", [BOXES[:1], BOXES[:, :3]])
def test_boxes_of_another_number_of_positions_are_refused(boxes: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"boxes: expected shape \(2, 4\)"):
        example(boxes=boxes)
