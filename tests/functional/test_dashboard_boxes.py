"""Maps over boxes that are no grid, on the page and as a file."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np

from dashboards import map_svg, probe_view
from dashboards.theme import LIGHT

BOXES = np.array([[0.0, 0.0, 0.5, 0.5], [0.25, 0.5, 1.0, 1.0], [0.1, 0.1, 0.2, 0.9]])
BEFORE, AFTER = np.array([0.2, 0.3, 0.5]), np.array([0.5, 0.3, 0.2])
PANELS = probe_view.pair_of_lines(BEFORE, AFTER, (0.5, 0.3))


def test_boxes_stand_where_they_lie_on_the_page() -> None:
    drawn = probe_view.panels_html(PANELS, (1, 1), None, smooth=False, others=(BEFORE, AFTER), boxes=BOXES)
    placed = re.findall(
        r'<i class="(\w)" style="--a:([\d.]+);position:absolute;left:([\d.]+)%;top:([\d.]+)%;'
        r'width:([\d.]+)%;height:([\d.]+)%" title="([^"]+)"',
        drawn,
    )
    assert len(placed) == 9
    for _, _, left, top, width, height, title in placed[3:6]:
        found = np.array([left, top, width, height], float) / 100
        box = np.concatenate([found[:2], found[:2] + found[2:]])
        assert np.abs(BOXES - box).max(axis=1).min() < 1e-3
        assert title.startswith("box ")
    assert [kind for kind, *_ in placed[6:]] == ["u", "d", "d"]
    assert placed[3][1] == "1.000"
    assert placed[0][-1] == "box 0 to 50 % across, 0 to 50 % down: .2000 → .5000"


def test_boxes_stand_where_they_lie_in_the_file() -> None:
    svg = map_svg.panels_svg(PANELS, (1, 1), None, LIGHT, smooth=False, boxes=BOXES)
    rects = ElementTree.fromstring(svg).findall(".//{http://www.w3.org/2000/svg}rect")
    frames = [one for one in rects if one.get("fill") == LIGHT.wash]
    boxes = [one for one in rects if one.get("fill-opacity")]
    assert (len(frames), len(boxes)) == (3, 9)
    x, y, width, height = (float(frames[0].get(name) or 0) for name in ("x", "y", "width", "height"))
    for rect, (left, top, right, bottom) in zip(boxes, BOXES, strict=False):
        found = [float(rect.get(name) or 0) for name in ("x", "y", "width", "height")]
        wanted = [x + left * width, y + top * height, (right - left) * width, (bottom - top) * height]
        np.testing.assert_allclose(found, wanted, atol=0.06)
