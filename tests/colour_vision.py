"""How colours look to people with a colour-vision deficiency, and how far two colours lie apart.

Sources: Machado, Oliveira & Fernandes (2009), "A physiologically-based model for simulation of color vision
deficiency", IEEE TVCG 15(6), table 1, severity 1.0; IEC 61966-2-1 (sRGB); CIE 15 (Lab under D65); Sharma, Wu
& Dalal (2005), "The CIEDE2000 color-difference formula", Color Research & Application 30(1), equations 2–22;
WCAG 2.2 (contrast).
"""

from __future__ import annotations

from math import atan2, cos, degrees, exp, hypot, radians, sin

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

DEFICIENCIES = {
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = np.array([0.95047, 1.0, 1.08883])


def linear(colour: str) -> Vector:
    """Return linear red, green and blue from 0 to 1 of a colour like ``#1f63b0``."""
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def seen(colour: str, deficiency: str | None) -> Vector:
    """Return the linear colour as it is seen; None is the vision of most people."""
    values = linear(colour)
    return values if deficiency is None else np.clip(np.array(DEFICIENCIES[deficiency]) @ values, 0, 1)


def lab(values: Vector) -> Vector:
    """Return CIE L*, a*, b* of a linear colour."""
    ratio = XYZ @ values / WHITE
    f = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def difference(one: str, other: str, deficiency: str | None = None) -> float:
    """Return how far two colours lie apart as they are seen (CIEDE2000)."""
    return ciede2000(lab(seen(one, deficiency)), lab(seen(other, deficiency)))


def ciede2000(one: Vector, other: Vector) -> float:
    """Return the CIEDE2000 difference of two Lab colours."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean = (hypot(a1, b1) + hypot(a2, b2)) / 2
    g = 0.5 * (1 - (mean**7 / (mean**7 + 25**7)) ** 0.5)
    a1, a2 = (1 + g) * a1, (1 + g) * a2
    c1, c2 = hypot(a1, b1), hypot(a2, b2)
    h1, h2 = (degrees(atan2(b, a)) % 360 if a or b else 0.0 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    dl, dc, dh = l2 - l1, c2 - c1, 2 * (c1 * c2) ** 0.5 * sin(radians(turn / 2))
    light, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    hue = h1 + turn / 2 if c1 * c2 else h1 + h2
    t = (
        1
        - 0.17 * cos(radians(hue - 30))
        + 0.24 * cos(radians(2 * hue))
        + 0.32 * cos(radians(3 * hue + 6))
        - 0.20 * cos(radians(4 * hue - 63))
    )
    sl = 1 + 0.015 * (light - 50) ** 2 / (20 + (light - 50) ** 2) ** 0.5
    sc, sh = 1 + 0.045 * chroma, 1 + 0.015 * chroma * t
    around = 60 * exp(-((((hue % 360) - 275) / 25) ** 2))
    rt = -sin(radians(around)) * 2 * (chroma**7 / (chroma**7 + 25**7)) ** 0.5
    return float(((dl / sl) ** 2 + (dc / sc) ** 2 + (dh / sh) ** 2 + rt * (dc / sc) * (dh / sh)) ** 0.5)


def contrast(one: Vector, other: Vector) -> float:
    """Return the WCAG 2 contrast ratio of two linear colours, from 1 to 21."""
    bright, dark = sorted((float(XYZ[1] @ one), float(XYZ[1] @ other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)
