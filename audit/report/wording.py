"""Numbers and untrusted text as they are printed, the same in every format."""

from __future__ import annotations

import math
import unicodedata

from audit.records import Rule, RuleVerdict

MISSING = "–"
POINTS = frozenset({"shift"})
SHARES = frozenset({"level"})
SIGNED = frozenset({"shift", "center_of_mass_shift", "entropy", "entropy_change", "sink_share"})
JOINERS = "\u200c\u200d"


def finite(value: float | None) -> bool:
    """Return whether `value` is a number that can be printed and drawn."""
    return value is not None and math.isfinite(value)


def _fixed(value: float, decimals: int, signed: bool) -> str:
    if math.isinf(value):
        return "+∞" if value > 0 else "−∞"
    text = f"{abs(value):,.{decimals}f}"
    if value == 0 or (not signed and value > 0):
        return text
    return ("+" if value > 0 else "−") + text


def _number(measure: str, value: float, signed: bool | None) -> str:
    sign = measure in SIGNED if signed is None else signed
    if measure in POINTS | SHARES:
        return _fixed(100 * value, 2, sign)
    if measure == "ratio":
        return _fixed(value, 2, sign)
    small = 0 < abs(value) < 0.001
    return f"{value:.2g}".replace("-", "−") if small else _fixed(value, 3, sign)


def quantity(measure: str, value: float | None, *, signed: bool | None = None) -> str:
    """Return `value` of `measure` with its unit.

    Examples
    --------
    >>> quantity("shift", 0.0512), quantity("level", 0.1043), quantity("ratio", 1.97)
    ('+5.12 pp', '10.43%', '×1.97')
    >>> quantity("js_distance", 0.1234), quantity("shift", None)
    ('0.123', '–')
    """
    if value is None or math.isnan(value):
        return MISSING
    text = _number(measure, value, signed)
    if measure in POINTS:
        return f"{text} pp"
    if measure in SHARES:
        return f"{text}%"
    return f"×{text}" if measure == "ratio" else text


def span(measure: str, interval: tuple[float, float] | None) -> str:
    """Return an interval in the unit of :func:`quantity`, which stands beside it.

    Examples
    --------
    >>> span("shift", (-0.001, 0.02))
    '[−0.10, +2.00]'
    """
    if interval is None or any(math.isnan(end) for end in interval):
        return ""
    low, high = (_number(measure, end, None) for end in interval)
    return f"[{low}, {high}]"


def change(measure: str, before: float | None, after: float | None) -> str:
    """Return "before → after"; shares for a shift, a level or a ratio.

    Examples
    --------
    >>> change("shift", 0.053, 0.1043)
    '5.30% → 10.43%'
    """
    if before is None and after is None:
        return MISSING
    unit = "level" if measure in POINTS | SHARES | {"ratio"} else measure
    return f"{quantity(unit, before, signed=False)} → {quantity(unit, after, signed=False)}"


def noise(measure: str, floor: tuple[float, float] | None, replicates: int) -> str:
    """Return the noise floor as "mean ± SD (k)".

    Examples
    --------
    >>> noise("shift", (0.0005, 0.002), 5)
    '+0.05 ± 0.20 pp (5)'
    """
    if floor is None or not all(map(finite, floor)):
        return f"{MISSING} ({replicates})" if replicates else MISSING
    mean, sd = _number(measure, floor[0], None), quantity(measure, floor[1], signed=False)
    return f"{mean} ± {sd} ({replicates})"


def limit(found: RuleVerdict) -> str:
    """Return the condition that the rule sets, in words.

    Examples
    --------
    >>> from audit.records import Outcome
    >>> rule = Rule("corner", "limit", fail=0.02)
    >>> limit(RuleVerdict(rule, "corner", Outcome.FAIL, "", limit=0.02))
    'within ±2.00 pp'
    """
    rule = found.rule
    bound = found.limit if found.limit is not None else rule.fail
    if rule.kind == "excess":
        return _excess_limit(rule, found.limit)
    if bound is None:
        return MISSING
    if rule.measure in SIGNED:
        size = quantity(rule.measure, abs(bound), signed=False)
        return {"both": f"within ±{size}", "increase": f"at most +{size}", "decrease": f"at least −{size}"}[
            rule.direction
        ]
    word = "at least" if rule.direction == "decrease" else "at most"
    return f"{word} {quantity(rule.measure, bound, signed=False)}"


def _excess_limit(rule: Rule, resolved: float | None) -> str:
    if isinstance(rule.within, str):
        known = f" ({quantity(rule.measure, abs(resolved), signed=False)})" if resolved is not None else ""
        return f"excess within ±{clean(rule.within)}{known}"
    bound = resolved if resolved is not None else rule.within
    if bound is None:
        return "excess over the noise floor"
    return f"excess within ±{quantity(rule.measure, abs(bound), signed=False)}"


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
    """Return `text` on one line, with every invisible or reordering character made visible.

    Control characters become their pictures (``␛``), bidirectional overrides, zero-width characters
    and lone surrogates become ``⟨U+202E⟩``; joiners inside emoji or a joining script stay.

    Examples
    --------
    >>> clean("a\\x1b[31m\\u202eb")
    'a␛[31m⟨U+202E⟩b'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(text, i) if _hidden(c) else c for i, c in enumerate(text))


def columns(text: str) -> int:
    """Return how many character cells `text` takes (wide characters take two, marks none).

    Examples
    --------
    >>> columns("corner"), columns("角")
    (6, 2)
    """
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
    text = clean(text[: 20 * width])
    if columns(text) <= width:
        return text
    kept, used = [], 0
    for character in text:
        used += columns(character)
        if used >= width:
            break
        kept.append(character)
    return "".join(kept) + "…"
