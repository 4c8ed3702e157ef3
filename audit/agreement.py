"""Whether a map points at an annotated region: pointing game, IoU at area, AUPRC.

Rollout is claimed to localise objects and to agree with what people marked; these three numbers say how
far it does on one's own probes. Maps and regions run along the last axis; leading axes are broadcast and
give the shape of the result (a float for a single pair). A region is a weight in [0, 1] for each position:
for a patch the part of its area that the region covers. All three are 1 for a map that is largest at the
whole positions of the region, and do not change when a map is multiplied by a number.

What they cannot tell: whether the model uses the region. A person's marks are no ground truth about a
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from audit.metrics.maps import Result, as_result
from audit.records import Map, Probe, Region
from audit.regions import region_weights, reliance

__all__ = ["Agreement", "auprc", "iou_at_area", "map_agreement", "pointing_game"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Agreement:
    """How far one map agrees with one annotated region; None with a `reason` where it is undefined.

    `size` is the share of the content that the region covers: what `pointing` and `auprc` are by chance.
    """

    probe_id: str
    region: str
    stream: str = "input"
    pointing: float | None = None
    iou: float | None = None
    auprc: float | None = None
    size: float | None = None
    reason: str | None = None


def pointing_game(weights: ArrayLike, region: ArrayLike, *, content: ArrayLike | None = None) -> Result:
    """Return whether the largest weight of a map lies in the region: 1 for a hit, 0 for a miss.

    The mean over probes is the accuracy hits / (hits + misses) of Zhang et al. (Top-down neural attention
    by excitation backprop, IJCV 126, 2018, section 4.2), with positions in the place of pixels and no margin.
    The point is drawn in the largest position, evenly among ties: a patch that the region covers by half is
    half a hit.

    Parameters
    ----------
    weights : (..., n)
        Maps: non-negative, of any sum above 0.
    region : (..., n)
        In [0, 1], the part of each position that the region covers.
    content : bool (..., n), optional
        Which positions count; all by default.

    Returns
    -------
    float or (...)
        In [0, 1]; the region's share of the content for a uniform map.

    Raises
    ------
    ValueError
        When shapes do not fit, weights are negative, not finite or all 0, or a region has no position
        among the content.

    Examples
    --------
    >>> pointing_game([0.2, 0.7, 0.1], [0, 1, 1])
    1.0
    >>> pointing_game([0.4, 0.4, 0.2], [0, 1, 1])
    0.5
    """
    scores, inside, _ = _checked(weights, region, content)
    largest = scores == scores.max(-1, keepdims=True)
    return as_result((inside * largest).sum(-1) / largest.sum(-1))


def iou_at_area(
    weights: ArrayLike, region: ArrayLike, *, content: ArrayLike | None = None, area: float | None = None
) -> Result:
    r"""Return the intersection over union of the region and the top of the map.

    .. math:: \mathrm{IoU} = \frac{\sum_i \min(s_i, g_i)}{\sum_i \max(s_i, g_i)}

    (Jaccard 1912, for weights in [0, 1]), where g is the region and s the top of the map: its largest
    positions, until their area is that of the region, so that no threshold is chosen. The last position,
    or the last ties together, enter with the part that is left. With whole positions this is the overlap
    of explanation and rationale that DeYoung et al. (ERASER, ACL 2020, section 5) threshold at 0.5.

    Parameters
    ----------
    weights, region, content
        As for :func:`pointing_game`.
    area : float, optional
        Share of the content that is kept instead of the region's own, in (0, 1].

    Returns
    -------
    float or (...)
        In [0, 1]. With the region's own area, a share a that a uniform map keeps everywhere gives
        a / (2 - a) for a region of whole positions.

    Raises
    ------
    ValueError
        As for :func:`pointing_game`, and for an area outside (0, 1].

    Examples
    --------
    >>> iou_at_area([0.5, 0.3, 0.1, 0.1], [1, 0, 1, 0])
    0.3333333333333333
    """
    scores, inside, counted = _checked(weights, region, content)
    if area is not None and not 0 < area <= 1:
        raise ValueError(f"area: expected a share in (0, 1], got {area!r}")
    wanted = inside.sum(-1) if area is None else area * counted.sum(-1)
    kept = _top(scores, counted, wanted)
    return as_result(np.minimum(kept, inside).sum(-1) / np.maximum(kept, inside).sum(-1))


def auprc(weights: ArrayLike, region: ArrayLike, *, content: ArrayLike | None = None) -> Result:
    r"""Return the area under the precision-recall curve of a map as a detector of the region.

    .. math:: \mathrm{AP} = \sum_k (R_k - R_{k-1})\, P_k

    over the distinct weights in falling order: precision P and recall R of all positions with at least
    that weight. The step curve, not the trapezoid, which is too hopeful (Davis & Goadrich, ICML 2006,
    section 3); equal weights are one step. A position that the region covers by a part counts with that
    part as inside, and with the rest as outside. Used for soft rationales by DeYoung et al. (ERASER,
    ACL 2020, section 5).

    Parameters
    ----------
    weights, region, content
        As for :func:`pointing_game`.

    Returns
    -------
    float or (...)
        In (0, 1]; the region's share of the content for a uniform map.

    Raises
    ------
    ValueError
        As for :func:`pointing_game`.

    Examples
    --------
    >>> round(auprc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]), 4)
    0.8333
    """
    scores, inside, counted = _checked(weights, region, content)
    order = np.argsort(-scores, axis=-1, kind="stable")
    ranked, found, seen = (np.take_along_axis(each, order, -1) for each in (scores, inside, counted))
    hits, shown = found.cumsum(-1), seen.cumsum(-1)
    last = np.ones(ranked.shape, bool)  # of its ties
    last[..., :-1] = ranked[..., 1:] != ranked[..., :-1]
    ends = np.where(last, hits, 0.0)
    before = np.maximum.accumulate(ends, axis=-1)
    steps = ends - np.concatenate([np.zeros_like(before[..., :1]), before[..., :-1]], axis=-1)
    precision = hits / np.maximum(shown, 1)
    area = (np.where(last, steps, 0.0) * precision).sum(-1) / hits[..., -1]
    return as_result(np.clip(area, 0.0, 1.0))


def map_agreement(one_map: Map, probe: Probe, regions: Sequence[Region]) -> tuple[Agreement, ...]:
    """Return how far a map agrees with each annotated region of its probe, over its content positions.

    Parameters
    ----------
    one_map : Map
    probe : Probe
        The map's probe, with its masks loaded.
    regions : sequence of Region
        From :func:`audit.regions.expand_regions`; those that are not annotated are left out.

    Returns
    -------
    tuple of Agreement
        None for all three, with a reason, where the probe has no such region or the map no mass.

    Raises
    ------
    ValueError
        When the map belongs to another probe.

    Examples
    --------
    >>> from audit.records import Positions
    >>> spans = Positions("token", np.zeros(2, bool), starts=np.array([0, 4]), ends=np.array([3, 8]))
    >>> film = Probe("p", text="the film", regions={"film": [[4, 8]]})
    >>> region = Region("film", "annotated", {"annotated": "film"})
    >>> map_agreement(Map("p", np.array([0.2, 0.8]), spans), film, [region])[0].iou
    1.0
    """
    annotated = {region.name: region for region in regions if region.kind == "annotated"}
    shares = reliance(one_map, probe, list(annotated.values()))
    content, found = one_map.positions.content, []
    for share in shares:
        one = Agreement(probe.id, share.region, one_map.stream, size=share.size, reason=share.reason)
        if share.share is not None:
            inside = region_weights(annotated[share.region], one_map.positions, probe)
            arguments = one_map.weights, inside
            one = Agreement(
                probe.id,
                share.region,
                one_map.stream,
                pointing=float(pointing_game(*arguments, content=content)),
                iou=float(iou_at_area(*arguments, content=content)),
                auprc=float(auprc(*arguments, content=content)),
                size=share.size,
            )
        found.append(one)
    return tuple(found)


def _top(scores: Array, counted: Array, wanted: Array) -> Array:
    """Return which part of each position is kept so that the largest fill the area `wanted`; ties share."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    ranked = np.take_along_axis(scores, order, -1)
    tied = np.concatenate([np.zeros_like(ranked[..., :1], bool), ranked[..., 1:] == ranked[..., :-1]], -1)
    place = np.broadcast_to(np.arange(ranked.shape[-1]), ranked.shape)
    first = np.maximum.accumulate(np.where(tied, 0, place), axis=-1)
    ends = np.where(np.concatenate([tied[..., 1:], np.zeros_like(tied[..., :1])], -1), place[..., -1:], place)
    last = np.minimum.accumulate(ends[..., ::-1], axis=-1)[..., ::-1]
    parts = np.clip((wanted[..., None] - first) / (last + 1 - first), 0.0, 1.0)
    kept: Array = np.empty_like(parts)
    np.put_along_axis(kept, order, parts, -1)
    return np.multiply(kept, counted)


def _checked(weights: ArrayLike, region: ArrayLike, content: ArrayLike | None) -> tuple[Array, Array, Array]:
    """Return scores (-1 outside the content), the region (0 there), and 1 or 0 for what counts."""
    scores, inside = np.asarray(weights, np.float64), np.asarray(region, np.float64)
    counted = np.ones_like(scores) if content is None else np.asarray(content, np.float64)
    if scores.ndim == 0 or scores.shape[-1] == 0:
        raise ValueError(f"weights: expected positions along the last axis, got shape {scores.shape}")
    for name, array in (("region", inside), ("content", counted)):
        if array.ndim == 0 or array.shape[-1] != scores.shape[-1]:
            raise ValueError(f"{name}: expected {scores.shape[-1]} positions like weights, got {array.shape}")
        if not np.isfinite(array).all() or (array < 0).any() or (array > 1).any():
            raise ValueError(f"{name}: expected values in [0, 1], got some outside")
    if not np.isfinite(scores).all() or (scores < 0).any():
        raise ValueError("weights: expected finite weights >= 0, got NaN, infinity or negative ones")
    try:
        scores, inside, counted = np.broadcast_arrays(scores, inside, counted > 0)
    except ValueError:
        raise ValueError(f"region: expected leading axes like weights, {scores.shape}") from None
    if not (inside * counted).sum(-1).all():
        raise ValueError("region: expected a position among the content in each, got a region without any")
    if not (scores * counted).sum(-1).all():
        raise ValueError("weights: expected mass on the content of each map, got a map without any")
    return np.where(counted, scores, -1.0), np.where(counted, inside, 0.0), counted.astype(np.float64)
