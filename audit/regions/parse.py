"""Read region definitions, and add the regions that follow from the probes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Literal, get_args

from audit.records import Probe, Region
from audit.regions.text import split_words

Kind = Literal["terms", "pattern", "box", "annotated", "special", "first", "quantile", "grid", "rest"]
AUTOMATIC: tuple[Kind, ...] = ("special", "first", "rest")
_KEYS: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
_OPTIONS = {"terms": ("case_sensitive",)}


def parse_regions(mapping: Mapping[str, Mapping[str, Any]]) -> tuple[Region, ...]:
    r"""Return the regions of the ``[regions]`` table of audit.toml.

    Parameters
    ----------
    mapping : name → definition
        A definition has one key, its kind:

        - ``terms = ["she", "New York"]``: words or phrases, on word boundaries, Unicode normalised,
          case folded unless ``case_sensitive = true``;
        - ``pattern = '\d+'``: a regular expression on the text as it is stored;
        - ``box = [left, top, right, bottom]``: fractions of the stored image;
        - ``annotated = true`` (or the name of an annotation): spans, boxes or masks of each probe;
        - ``special = true``, ``first = true``, ``rest = true``;
        - ``quantile = [0.0, 0.25]``: a band of the relative position among content positions, or
          ``quantile = 4`` for four equal bands;
        - ``grid = [rows, columns]``: cells of the stored image.

    Returns
    -------
    tuple of Region
        In the order of the table.

    Raises
    ------
    ValueError
        Naming the region, the key, and the nearest valid key.

    Examples
    --------
    >>> parse_regions({"corner": {"box": [0.75, 0.75, 1, 1]}})[0].params
    {'box': [0.75, 0.75, 1.0, 1.0]}
    """
    return tuple(_parse_region(name, definition) for name, definition in mapping.items())


def _parse_region(name: str, definition: Mapping[str, Any]) -> Region:
    if not name.strip() or name == "*":
        raise ValueError(f"region name {name!r} is not allowed; use a word ('*' means every region)")
    if not isinstance(definition, Mapping):
        raise ValueError(f"region {name!r}: expected a table such as {{ terms = [...] }}, got {definition!r}")
    kinds = [key for key in definition if key in _KEYS]
    options = _OPTIONS.get(kinds[0], ()) if kinds else ("case_sensitive",)
    for key in definition:
        if key not in _KEYS and key not in options:
            raise ValueError(f"region {name!r}: unknown key {key!r}{nearest(key, [*_KEYS, *options])}")
    if len(kinds) != 1:
        raise ValueError(f"region {name!r}: expected one of {', '.join(_KEYS)}, got {kinds or 'none'}")
    kind = _KEYS[kinds[0]]
    if name in AUTOMATIC and kind != name:
        raise ValueError(f"region {name!r}: the name is reserved for {name} = true; choose another")
    return Region(name, kind, _PARSERS[kind](name, definition))


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return ``; did you mean ...?``, or the list of valid words where none is near."""
    choices = list(dict.fromkeys(valid))
    close = get_close_matches(word, choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; valid: {', '.join(choices) or 'none'}"


def _terms(name: str, definition: Mapping[str, Any]) -> dict[str, Any]:
    terms, case_sensitive = definition["terms"], definition.get("case_sensitive", False)
    if not isinstance(terms, list | tuple) or not terms or not all(isinstance(term, str) for term in terms):
        raise ValueError(f"region {name!r}: terms must be a list of words, got {terms!r}")
    if not isinstance(case_sensitive, bool):
        raise ValueError(f"region {name!r}: case_sensitive must be true or false, got {case_sensitive!r}")
    for term in terms:
        if not split_words(term):
            raise ValueError(f"region {name!r}: term {term!r} has no visible character; remove it")
    return {"terms": list(terms), "case_sensitive": case_sensitive}


def _pattern(name: str, definition: Mapping[str, Any]) -> dict[str, Any]:
    pattern = definition["pattern"]
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"region {name!r}: pattern must be a regular expression, got {pattern!r}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"region {name!r}: pattern {pattern!r} is not a regular expression ({error})"
        ) from None
    return {"pattern": pattern}


def _box(name: str, definition: Mapping[str, Any]) -> dict[str, Any]:
    return {"box": check_box(definition["box"], f"region {name!r}")}


def check_box(box: Any, where: str) -> list[float]:
    """Return a box as four floats, or raise ValueError.

    A box is left, top, right, bottom in fractions of the stored image.
    """
    if not isinstance(box, list | tuple) or len(box) != 4 or not all(_is_number(value) for value in box):
        raise ValueError(f"{where}: box must be [left, top, right, bottom], got {box!r}")
    left, top, right, bottom = (float(value) for value in box)
    if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
        raise ValueError(
            f"{where}: box must lie in [0, 1] with left < right and top < bottom, in fractions of the image, "
            f"got {list(box)}"
        )
    return [left, top, right, bottom]


def _annotated(name: str, definition: Mapping[str, Any]) -> dict[str, Any]:
    value = definition["annotated"]
    if value is True:
        return {"annotated": name}
    if not isinstance(value, str) or not value:
        raise ValueError(
            f"region {name!r}: annotated must be true or the name of an annotation, got {value!r}"
        )
    return {"annotated": value}


def _flag(name: str, definition: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in definition.items():
        if value is not True:
            raise ValueError(f"region {name!r}: {key} must be true, got {value!r}; remove the region instead")
    return {}


def _quantile(name: str, definition: Mapping[str, Any]) -> dict[str, Any]:
    value = definition["quantile"]
    if _is_count(value) and value >= 2:
        return {"quantile": value}
    if isinstance(value, list | tuple) and len(value) == 2 and all(_is_number(edge) for edge in value):
        low, high = float(value[0]), float(value[1])
        if 0 <= low < high <= 1:
            return {"quantile": [low, high]}
    raise ValueError(
        f"region {name!r}: quantile must be [low, high] with 0 <= low < high <= 1, or a number of bands "
        f">= 2, got {value!r}"
    )


def _grid(name: str, definition: Mapping[str, Any]) -> dict[str, Any]:
    value = definition["grid"]
    if (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(_is_count(size) and size >= 1 for size in value)
    ):
        return {"grid": list(value)}
    raise ValueError(f"region {name!r}: grid must be [rows, columns], got {value!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_PARSERS = {
    "terms": _terms,
    "pattern": _pattern,
    "box": _box,
    "annotated": _annotated,
    "special": _flag,
    "first": _flag,
    "rest": _flag,
    "quantile": _quantile,
    "grid": _grid,
}


def expand_regions(regions: Sequence[Region], probes: Iterable[Probe]) -> tuple[Region, ...]:
    """Return the regions as they are measured: cells, bands, annotations and automatic ones added.

    Parameters
    ----------
    regions : sequence of Region
        From :func:`parse_regions`.
    probes : iterable of Probe
        Their annotations are regions too, whether the configuration names them or not.

    Returns
    -------
    tuple of Region
        In the order of `regions`, then annotations by name, then ``special``, ``first`` and, where
        there is any content region, ``rest`` (marked ``automatic`` in their parameters: they are
        left out of a map in which they have no position). A grid ``cells`` becomes ``cells-0-0``,
        ``cells-0-1``, ...; four bands ``band`` become ``band-0`` to ``band-3``.

    Raises
    ------
    ValueError
        When two regions have one name, a region names an annotation that no probe has, or an
        annotation has a reserved name.
    """
    carriers = _annotation_carriers(probes)
    given = [part for region in regions for part in _split(region)]
    given = [_locate(region, carriers) for region in given]
    taken = {region.params["annotated"] for region in given if region.kind == "annotated"}
    given += [
        Region(name, "annotated", {"annotated": name, "on": sorted(on)})
        for name, on in sorted(carriers.items())
        if name not in taken
    ]
    _check_names(given, carriers)
    kinds = {region.kind for region in given}
    wanted = [kind for kind in AUTOMATIC if kind not in kinds and (kind != "rest" or kinds - set(AUTOMATIC))]
    return (*given, *(Region(kind, kind, {"automatic": True}) for kind in wanted))


def _split(region: Region) -> list[Region]:
    """Return the cells of a grid or the bands of a number of quantiles, else the region itself."""
    if region.kind == "grid" and "cell" not in region.params:
        rows, columns = region.params["grid"]
        return [
            replace(
                region, name=f"{region.name}-{row}-{column}", params={**region.params, "cell": [row, column]}
            )
            for row in range(rows)
            for column in range(columns)
        ]
    if region.kind == "quantile" and isinstance(region.params["quantile"], int):
        bands = region.params["quantile"]
        return [
            replace(region, name=f"{region.name}-{i}", params={"quantile": [i / bands, (i + 1) / bands]})
            for i in range(bands)
        ]
    return [region]


def _annotation_carriers(probes: Iterable[Probe]) -> dict[str, set[str]]:
    """Return for each annotation what it lies on: ``text``, ``image`` or ``audio``."""
    carriers: dict[str, set[str]] = {}
    for probe in probes:
        for name, annotation in probe.regions.items():
            carriers.setdefault(name, set()).add(carrier(annotation, probe))
    return carriers


def carrier(annotation: Any, probe: Probe) -> str:
    """Return what an annotation of `probe` lies on: ``text``, ``image`` or ``audio``."""
    if isinstance(annotation, Mapping) and ("box" in annotation or "mask" in annotation):
        return "image"
    return "audio" if probe.modality == "audio" else "text"


def _locate(region: Region, carriers: Mapping[str, set[str]]) -> Region:
    if region.kind != "annotated":
        return region
    source = region.params["annotated"]
    if source not in carriers:
        raise ValueError(
            f"region {region.name!r}: no probe has an annotation {source!r}{nearest(source, carriers)}"
        )
    return replace(region, params={**region.params, "on": sorted(carriers[source])})


def _check_names(regions: Sequence[Region], carriers: Mapping[str, set[str]]) -> None:
    for name in carriers:
        if name in AUTOMATIC or name == "*":
            raise ValueError(f"annotation {name!r} in the probes has a reserved name; rename it")
    for name, count in Counter(region.name for region in regions).items():
        if count > 1:
            hint = (
                "it is in [regions] and annotated in the probes"
                if name in carriers
                else "it is defined twice"
            )
            raise ValueError(f"region {name!r} is ambiguous: {hint}; rename one")
