"""Numbers and untrusted text as they are printed, the same in every format.

Shares and shifts are fractions of content mass without a leading zero, as in the sentences of the
gate and the limits of a policy: ``.053 → .104, +.051 [+.047, +.055], ±.02``.
"""

from __future__ import annotations

import math
import unicodedata
from typing import TypeGuard

from audit.records import Rule, RuleVerdict
from audit.statistics.measures import SIGNED as SIGNED_MEASURES
from audit.statistics.measures import SIMILARITIES

MISSING = "–"
SIGNED = SIGNED_MEASURES | {"logit"}
JOINERS = "\u200c\u200d"


def finite(value: float | None) -> TypeGuard[float]:
    """Return whether `value` is a number that can be printed and drawn."""
    return value is not None and math.isfinite(value)


def decimals(*values: float | None) -> int:
    """Return decimals that show two figures of the largest value; three for a usual share.

    Examples
    --------
    >>> decimals(0.052), decimals(0.0006, 0.0021), decimals(1.94)
    (3, 4, 2)
    """
    largest = max((abs(value) for value in values if finite(value)), default=0.0)
    if largest == 0:
        return 3
    return 2 if largest >= 1 else min(8, max(3, 1 - math.floor(math.log10(largest))))


def number(value: float, places: int = 3, *, signed: bool = False) -> str:
    """Return a number without a leading zero, with a true minus sign.

    Examples
    --------
    >>> number(0.0521), number(-0.0521), number(0.0521, signed=True), number(float("inf"), signed=True)
    ('.052', '−.052', '+.052', '+∞')
    """
    if math.isnan(value):
        return MISSING
    text = "∞" if math.isinf(value) else f"{abs(value):,.{places}f}"
    if not text.strip("0."):
        return text[1:] if text.startswith("0.") else text
    text = text[1:] if text.startswith("0.") else text
    return ("−" if value < 0 else "+" if signed else "") + text


def given(value: float) -> str:
    """Return the size of a limit as its owner wrote it.

    Examples
    --------
    >>> given(0.02), given(1.5)
    ('.02', '1.5')
    """
    text = "∞" if math.isinf(value) else f"{abs(value):.4g}"
    return text[1:] if text.startswith("0.") else text


def _places(measure: str, value: float | None, interval: tuple[float, float] | None) -> int:
    """Return the decimals of a value and its interval; a logit's end near 0 is not rounded onto it."""
    if measure not in ("ratio", "logit"):
        return decimals(value, *(interval or ()))
    known = [abs(end) for end in interval or () if finite(end) and end != 0]
    if measure == "ratio" or not known:
        return 2
    return min(8, max(2, -math.floor(math.log10(min(known)))))


def quantity(
    measure: str,
    value: float | None,
    *,
    signed: bool | None = None,
    like: tuple[float, float] | None = None,
) -> str:
    """Return `value` of `measure`, with as many decimals as the interval `like` it needs.

    Examples
    --------
    >>> quantity("shift", 0.0512), quantity("level", 0.1043), quantity("ratio", 1.97)
    ('+.051', '.104', '×1.97')
    >>> quantity("shift", 0.0004, like=(-0.0036, 0.0044)), quantity("shift", None)
    ('+.0004', '–')
    """
    if value is None or math.isnan(value):
        return MISSING
    places = _places(measure, value, like)
    text = number(value, places, signed=measure in SIGNED if signed is None else signed)
    return f"×{text}" if measure == "ratio" else text


def span(measure: str, interval: tuple[float, float] | None) -> str:
    """Return an interval with the decimals of the value that stands beside it.

    Examples
    --------
    >>> span("shift", (-0.001, 0.02))
    '[−.001, +.020]'
    >>> span("logit", (0.0012, 0.0131)), span("logit", (0.4, 1.25))
    ('[+.001, +.013]', '[+.40, +1.25]')
    """
    if interval is None or any(math.isnan(end) for end in interval):
        return ""
    places = _places(measure, None, interval)
    low, high = (number(end, places, signed=measure in SIGNED) for end in interval)
    return f"[{low}, {high}]"


def change(before: float | None, after: float | None) -> str:
    """Return "before → after".

    Examples
    --------
    >>> change(0.053, 0.1043)
    '.053 → .104'
    """
    if before is None and after is None:
        return MISSING
    places = decimals(before, after)
    left, right = (MISSING if end is None else number(end, places) for end in (before, after))
    return f"{left} → {right}"


def noise(measure: str, floor: tuple[float, float] | None, replicates: int = 0) -> str:
    """Return the noise floor as "mean ± SD", with "(k)" where the number of replicates is given.

    Examples
    --------
    >>> noise("shift", (0.0005, 0.002), 5)
    '+.0005 ± .0020 (5)'
    """
    extra = f" ({replicates})" if replicates else ""
    if floor is None or not all(map(finite, floor)):
        return MISSING + extra
    places = decimals(*floor)
    return f"{number(floor[0], places, signed=measure in SIGNED)} ± {number(floor[1], places)}{extra}"


def limit(found: RuleVerdict) -> str:
    """Return what the rule allows: of the shift, or for an ``excess`` rule of the excess shift.

    Examples
    --------
    >>> from audit.records import Outcome
    >>> rule = Rule("corner", "limit", fail=0.02)
    >>> limit(RuleVerdict(rule, "corner", Outcome.FAIL, "", limit=0.02))
    '±.02'
    """
    rule = found.rule
    bound = found.limit if found.limit is not None else rule.fail
    if rule.kind == "excess":
        return _excess_limit(rule, found.limit)
    if bound is None:
        return MISSING
    size = given(bound)
    if rule.measure in SIGNED:
        return {"both": f"±{size}", "increase": f"≤ +{size}", "decrease": f"≥ −{size}"}[rule.direction]
    sign = "×" if rule.measure == "ratio" else ""
    lowest = rule.direction != "increase" if rule.measure in SIMILARITIES else rule.direction == "decrease"
    return f"{'≥' if lowest else '≤'} {sign}{size}"


def _excess_limit(rule: Rule, resolved: float | None) -> str:
    if isinstance(rule.within, str):
        known = f" ({number(abs(resolved), decimals(resolved))})" if resolved is not None else ""
        return f"±{clean(rule.within)}{known}"
    bound = resolved if resolved is not None else rule.within
    return "noise floor" if bound is None else f"±{given(bound)}"


def count(number: int, noun: str) -> str:
    """Return the number with its noun in the right form.

    Examples
    --------
    >>> count(1, "probe"), count(1200, "probe")
    ('1 probe', '1,200 probes')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _visible(text: str, index: int) -> str:
    character = text[index]
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    neighbours = text[index - 1 : index] + text[index + 1 : index + 2]
    if character in JOINERS and len(neighbours) == 2 and not any(c.isascii() for c in neighbours):
        return character
    return f"⟨U+{code:04X}⟩"


def _hidden(character: str) -> bool:
    code = ord(character)
    unprintable = unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
    return unprintable or (code & 0xFFFE) == 0xFFFE or 0xFDD0 <= code <= 0xFDEF


def clean(text: str) -> str:
    r"""Return `text` on one line, with every invisible or reordering character made visible.

    Control characters become their pictures (``␛``), bidirectional overrides, zero-width characters
    and lone surrogates become ``⟨U+202E⟩``; joiners inside emoji or a joining script stay.

    Examples
    --------
    >>> clean("a\x1b[31m\u202eb")
    'a␛[31m⟨U+202E⟩b'
    """
    if text.isprintable():
        return text
    return "".join(_visible(text, i) if _hidden(c) else c for i, c in enumerate(text))


def columns(text: str) -> int:
    """Return how many character cells `text` takes (wide characters take two, marks none).

    Examples
    --------
    >>> columns("corner"), columns("角")
    (6, 2)
    """
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def clip(text: str, width: int) -> str:
    """Return `text` cleaned and cut to `width` character cells, with an ellipsis where it was cut.

    Examples
    --------
    >>> clip("a very long region name", 10)
    'a very lo…'
    """
    cut = text[: 4 * width]  # marks take no cell: there may be more characters than cells
    if cut.isascii() and cut.isprintable():
        return text if len(text) <= width else f"{cut[: width - 1]}…"
    kept: list[str] = []
    used = 0
    for index, character in enumerate(cut):
        shown = _visible(cut, index) if _hidden(character) else character
        kept.append(shown)
        used += columns(shown)
        if used > width:
            break
    if used <= width and len(cut) == len(text):
        return "".join(kept)
    while used > width - 1:
        used -= columns(kept.pop())
    return "".join(kept) + "…"
