"""From positions to regions: weights of a region, and the share of a map that falls on it.

How regions behave:

- A region is a weight in [0, 1] for each position: 1 or 0 for tokens, the covered fraction of the
  area for patches and of the duration for audio frames.
- Content regions count content positions only, and their shares are shares of the content mass.
  ``special`` and ``first`` lie outside content; their shares are shares of the whole mass.
- Regions may overlap; a position then counts fully for each. Shares add up to 1 for a partition
  (regions whose weights add up to 1 at every content position: grids, bands, or any disjoint regions
  together with ``rest``).
- ``rest`` has weight 1 - min(1, sum of the other content regions' weights) at each content position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from audit.records import FloatArray, Map, Positions, Probe, Region, Reliance, Stream
from audit.regions.parse import expand_regions, parse_regions
from audit.regions.weights import (
    OUTSIDE_CONTENT,
    Weights,
    find_spans,
    part_texts,
    region_weights,
    rest_weights,
)

__all__ = [
    "check_regions_match",
    "column_reliance",
    "count_matches",
    "expand_regions",
    "parse_regions",
    "part_texts",
    "region_columns",
    "region_weights",
    "reliance",
]


def reliance(one_map: Map, probe: Probe, regions: Sequence[Region]) -> tuple[Reliance, ...]:
    """Return the share of a map's mass in each region.

    Parameters
    ----------
    one_map : Map
    probe : Probe
        The map's probe, with its masks loaded.
    regions : sequence of Region
        From :func:`expand_regions`.

    Returns
    -------
    tuple of Reliance
        share = Σ_i w_i m_i / Σ_(i in content) m_i for content regions, Σ_i w_i m_i / Σ_i m_i for
        ``special`` and ``first``. None, with a reason, where the region has no position. Regions that
        cannot lie on this stream (a word list on an image), and automatic regions without a position,
        are left out.

    Raises
    ------
    ValueError
        When the map belongs to another probe, or a region needs character offsets that are not there.
    """
    if one_map.probe_id != probe.id:
        raise ValueError(f"map and probe must belong together, got map of {one_map.probe_id} and {probe.id}")
    kept, weights = _kept(regions, one_map.positions, probe, one_map.stream)
    if not kept:
        return ()
    stacked, bases = np.stack(weights), _bases(kept, one_map.positions)
    whole, layers = _rates(one_map.weights[None], stacked, bases)[0], None
    if one_map.layers is not None:
        layers = _rates(one_map.layers, stacked, bases)
    return _shares(kept, stacked, one_map.positions, probe, whole=whole, layers=layers, stream=one_map.stream)


def region_columns(
    positions: Positions, probe: Probe, regions: Sequence[Region], *, width: int | None = None
) -> Weights:
    """Return what a linear engine carries: the weights of the regions, then content, then ones.

    Parameters
    ----------
    positions : Positions
        Of the stream ``input``.
    probe : Probe
    regions : sequence of Region
    width : int, optional
        Number of columns, filled up with zeros, so that probes of one batch have the same.

    Returns
    -------
    float64 array (position, column)
        One column for each region that lies here, and the last two; see :func:`column_reliance`.
    """
    _, weights = _kept(regions, positions, probe, "input")
    columns = [*weights, positions.content.astype(np.float64), np.ones(len(positions))]
    blank = [np.zeros(len(positions))] * (0 if width is None else width - len(columns))
    return np.stack([*columns[:-2], *blank, *columns[-2:]], axis=1)


def column_reliance(
    masses: FloatArray, positions: Positions, probe: Probe, regions: Sequence[Region]
) -> tuple[Reliance, ...]:
    """Return what :func:`reliance` returns, from the masses on the columns of :func:`region_columns`.

    Parameters
    ----------
    masses : float array (layer, column)
        The output row of each cumulative R_l times the columns.
    positions, probe, regions
        Those that the columns were made of.
    """
    kept, weights = _kept(regions, positions, probe, "input")
    if not kept:
        return ()
    inside = masses[:, : len(kept)].astype(np.float64)
    outside = [-1 if region.kind in OUTSIDE_CONTENT else -2 for region in kept]
    layers = _divided(inside, masses[:, outside].astype(np.float64))
    return _shares(kept, np.stack(weights), positions, probe, whole=layers[-1], layers=layers, stream="input")


def _kept(
    regions: Sequence[Region], positions: Positions, probe: Probe, stream: str
) -> tuple[list[Region], list[Weights]]:
    """Return the regions that lie on this stream, with their weights."""
    _check_offsets(positions, stream, regions)
    here = [region for region in regions if _applies(region, positions)]
    weights = _weigh(here, positions, probe)
    kept = [r for r in here if weights[r.name].any() or not r.params.get("automatic")]
    return kept, [weights[region.name] for region in kept]


def _bases(regions: Sequence[Region], positions: Positions) -> NDArray[np.bool_]:
    content = positions.content
    return np.stack([np.ones_like(content) if r.kind in OUTSIDE_CONTENT else content for r in regions])


def _check_offsets(positions: Positions, stream: str, regions: Sequence[Region]) -> None:
    if positions.kind != "token" or positions.starts is not None or stream == "prefix":
        return
    for region in regions:
        if region.kind in {"terms", "pattern"} or "text" in region.params.get("on", ()):
            raise ValueError(
                f"region {region.name!r} lies on characters, but the tokenizer gives no character offsets; "
                "use a fast tokenizer, or remove the region"
            )


def _applies(region: Region, positions: Positions) -> bool:
    """Return whether a region of this kind can lie on positions of this kind."""
    if region.kind in {"terms", "pattern"}:
        return positions.starts is not None
    if region.kind in {"box", "grid"}:
        return positions.boxes is not None
    if region.kind == "annotated":
        carried = {"text": positions.starts, "image": positions.boxes, "audio": positions.times}
        return any(carried[on] is not None for on in region.params.get("on", carried))
    return True


def _weigh(regions: Sequence[Region], positions: Positions, probe: Probe) -> dict[str, Weights]:
    """Return the weights of each region by name; ``rest`` is made from those of the others."""
    weights = {
        region.name: region_weights(region, positions, probe) for region in regions if region.kind != "rest"
    }
    inner = [weights[region.name] for region in regions if region.kind not in {"rest", *OUTSIDE_CONTENT}]
    for region in regions:
        if region.kind == "rest":
            pointless = not inner and region.params.get("automatic")  # it would be all content
            weights[region.name] = np.zeros(len(positions)) if pointless else rest_weights(inner, positions)
    return weights


def _shares(
    regions: Sequence[Region],
    weights: Weights,
    positions: Positions,
    probe: Probe,
    *,
    whole: Weights,
    layers: Weights | None,
    stream: Stream,
) -> tuple[Reliance, ...]:
    """Return the records of shares `whole` (region,) and `layers` (layer, region)."""
    sizes = weights.sum(axis=1) / np.maximum(_bases(regions, positions).sum(axis=1), 1)
    found = []
    for i, region in enumerate(regions):
        reason = None if weights[i].any() else _missing_reason(region, positions, probe)
        if reason is None and np.isnan(whole[i]):
            reason = "the map has no mass on content"
        one = Reliance(probe.id, region.name, None, stream=stream, reason=reason)
        if reason is None:
            shares = None if layers is None else _defined(layers[:, i])
            one = replace(one, share=float(whole[i]), size=float(min(sizes[i], 1.0)), layers=shares)
        found.append(one)
    return tuple(found)


def _defined(layers: Weights) -> tuple[float, ...] | None:
    """Return the share at each layer, or None where a layer has no mass to share."""
    return None if np.isnan(layers).any() else tuple(layers.tolist())


def _rates(maps: FloatArray, weights: Weights, bases: NDArray[np.bool_]) -> Weights:
    """Return (map, region) Σ_i w_i m_i / Σ_(i in base) m_i, and NaN where the base has no mass."""
    rows = maps.astype(np.float64)
    inside, mass = rows @ weights.T, rows @ bases.T.astype(np.float64)
    return _divided(inside, mass)


def _divided(inside: Weights, mass: Weights) -> Weights:
    rates = np.divide(inside, mass, out=np.full_like(inside, np.nan), where=mass > 0)
    return np.clip(rates, 0.0, 1.0)


def _missing_reason(region: Region, positions: Positions, probe: Probe) -> str:
    """Return why a region has no position in a probe."""
    if not positions.content.any() and region.kind != "special":
        return "the probe has no content position"
    if region.kind in {"special", "first"}:
        return f"no position is {region.kind}"
    if region.kind == "rest":
        return "the other regions cover all content"
    if region.kind in {"terms", "pattern"} and not any(find_spans(region, probe)):
        return "no match in the probe"
    if region.kind == "annotated" and region.params["annotated"] not in probe.regions:
        return "not annotated in the probe"
    if positions.boxes is not None:
        return "cropped away, or empty"
    return "no content position there (truncated away, special, or the first of a causal model)"


def count_matches(regions: Iterable[Region], probes: Iterable[Probe]) -> dict[str, int]:
    """Return in how many probes each region has something to lie on, before any model is loaded.

    Only term lists, patterns and annotations are counted: whether a box or a band has a position
    is known after capture.

    Examples
    --------
    >>> she = Region("she", "terms", {"terms": ["she"]})
    >>> count_matches([she], [Probe("p", text="He"), Probe("q", text="she")])
    {'she': 1}
    """
    counted = [region for region in regions if region.kind in {"terms", "pattern", "annotated"}]
    counts = {region.name: 0 for region in counted}
    for probe in probes:
        for region in counted:
            if region.kind == "annotated":
                counts[region.name] += region.params["annotated"] in probe.regions
            else:
                counts[region.name] += any(find_spans(region, probe))
    return counts


def check_regions_match(
    regions: Iterable[Region], probes: Sequence[Probe], *, boxes_in_text: bool = False
) -> dict[str, int]:
    """Return :func:`count_matches`, and refuse regions that match nothing in any probe.

    So do boxes where every probe is text alone, unless `boxes_in_text` says that its maps may be grids.

    Raises
    ------
    ValueError
        Naming every such region at once.
    """
    regions = tuple(regions)
    counts = count_matches(regions, probes)
    empty = [name for name, count in counts.items() if count == 0]
    boxes = [] if boxes_in_text else _boxes_in_text(regions, probes)
    if boxes:
        raise ValueError(
            f"region {', '.join(map(repr, boxes))} is a box or a grid, and every probe is text alone; give "
            "the probes images or features, or remove it"
        )
    if empty:
        names = ", ".join(repr(name) for name in empty)
        raise ValueError(
            f"region {names} matches nothing in any of the {len(probes)} probes; "
            "mend its definition in [regions], or remove it"
        )
    return counts


def _boxes_in_text(regions: Iterable[Region], probes: Sequence[Probe]) -> list[str]:
    """Return the boxes where every probe is nothing but text."""
    if any(
        not isinstance(p.text, str) or p.image is not None or p.audio is not None or p.features is not None
        for p in probes
    ):
        return []
    return [region.name for region in regions if region.kind in {"box", "grid"}]
