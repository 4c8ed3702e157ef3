r"""Does a map order the positions by what the target logit depends on? Perturbation curves and their area.

Positions are occluded in the order of the map, largest first (deletion), or revealed in that order on the
wholly occluded input (insertion), and the target logit f is read on the way. Maps carry no signs, so the
distance to the whole input counts, up or down:

.. math:: C(q) = |f(x) - f(x \setminus \mathrm{top}_q)|, \qquad S(q) = |f(x) - f(\mathrm{top}_q)|

with top_q the first ⌈qn⌉ of n content positions. C and S are comprehensiveness and sufficiency
(DeYoung et al., ERASER, ACL 2020, section 5) of the logit at q = 1, 5, 10, 20 and 50 %; the areas under
them are those of deletion and insertion (Petsiuk, Das & Saenko, RISE, BMVC 2018, section 4). A faithful map
makes the area of C large and that of S small. Both are compared with random orders of the same positions.

What they cannot tell: occluded inputs are unusual ones, on which a model may do what it never does on real
ones; a random order suffers from that alike, which is why the difference to it decides, not the area.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from audit.compare import compare_tables
from audit.metrics import spearman
from audit.records import Advantage, Column, Faithfulness, ShareTable

__all__ = [
    "FRACTIONS",
    "GRID",
    "Score",
    "agreement",
    "curve_scores",
    "masks",
    "ranking",
    "summarise",
    "unproven",
]

Array = NDArray[np.float64]

FRACTIONS = (0.01, 0.05, 0.1, 0.2, 0.5)
"""Parts of the positions at which comprehensiveness and sufficiency are told."""
GRID = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Parts of the positions between which the areas are summed by trapezoids."""
LEAST_PROBES = 8
"""Fewer probes (or groups) show nothing."""
INSENSITIVE = 0.9
"""Mean rank correlation with the map of shuffled weights from which on a map does not depend on them."""


@dataclass(frozen=True)
class Score:
    """One number of one probe: the grain of the stored table. `value` is None where it is undefined."""

    role: str
    method: str
    probe_id: str
    measure: str
    value: float | None


def ranking(
    weights: NDArray[np.floating], content: NDArray[np.bool_], rng: np.random.Generator
) -> NDArray[np.intp]:
    """Return the content positions from the largest weight to the smallest; ties are drawn.

    A map that says nothing (all weights equal) is a random order.

    Parameters
    ----------
    weights : (n,)
    content : bool (n,)
    rng : numpy.random.Generator

    Returns
    -------
    int array (content,)

    Examples
    --------
    >>> weights, content = np.array([0.1, 0.6, 0.3]), np.array([True, False, True])
    >>> ranking(weights, content, np.random.default_rng(0)).tolist()
    [2, 0]
    """
    places = np.flatnonzero(content)
    order: NDArray[np.intp] = places[np.lexsort((rng.random(len(places)), -weights[places]))]
    return order


def counts(n: int, parts: Sequence[float] = GRID) -> list[int]:
    """Return how many of n positions each part takes: at least one for any part above 0.

    >>> counts(30, FRACTIONS)
    [1, 2, 3, 6, 15]
    """
    return [math.ceil(round(part * n, 9)) for part in parts]


def masks(order: NDArray[np.integer], n: int) -> tuple[Array, Array]:
    """Return what is occluded at each part of :data:`GRID`: deletion and insertion, each (part, n).

    Parameters
    ----------
    order : int array (content,)
        Positions that may be occluded, the first to go first.
    n : int
        All positions.

    Examples
    --------
    >>> deletion, insertion = masks(np.array([2, 0]), 3)
    >>> deletion[GRID.index(0.5)].tolist(), insertion[GRID.index(0.5)].tolist()
    ([0.0, 0.0, 1.0], [1.0, 0.0, 0.0])
    """
    place = np.full(n, len(order))
    place[order] = np.arange(len(order))
    taken = place[None] < np.array(counts(len(order)))[:, None]
    movable = place < len(order)
    return taken.astype(np.float64), (movable & ~taken).astype(np.float64)


def curve_scores(deletion: Array, insertion: Array, n: int) -> dict[str, float]:
    """Return the areas and the values at :data:`FRACTIONS` of one order's two curves.

    Parameters
    ----------
    deletion, insertion : (part,)
        The target logit at each part of :data:`GRID`; `deletion` starts and `insertion` ends with that
        of the whole input.
    n : int
        Content positions, by whose number parts become steps.

    Returns
    -------
    dict
        ``deletion`` and ``insertion``, the areas; ``comprehensiveness_<per cent>`` and
        ``sufficiency_<per cent>``. All in units of the logit, ≥ 0.

    Examples
    --------
    >>> linear = np.array([1 - part for part in GRID])
    >>> found = curve_scores(linear, linear[::-1], 100)
    >>> round(found["deletion"], 3), round(found["comprehensiveness_20"], 3)
    (0.5, 0.2)
    """
    removed, kept = np.abs(deletion - deletion[0]), np.abs(insertion - insertion[-1])
    share = np.array(counts(n)) / n
    found = {"deletion": float(np.trapezoid(removed, share)), "insertion": float(np.trapezoid(kept, share))}
    for name, curve in (("comprehensiveness", removed), ("sufficiency", kept)):
        found |= {f"{name}_{round(100 * q)}": float(curve[GRID.index(q)]) for q in FRACTIONS}
    return found


def agreement(
    one: NDArray[np.floating], two: NDArray[np.floating], content: NDArray[np.bool_]
) -> float | None:
    """Return the rank correlation of two maps over content; None where either is constant or has no mass."""
    first, second = (np.asarray(each, np.float64)[content] for each in (one, two))
    if len(first) < 2 or not (first.sum() > 0 and second.sum() > 0):
        return None
    found = spearman(first / first.sum(), second / second.sum())
    return None if found is None else float(found)


def summarise(
    scores: Iterable[Score],
    *,
    audited: str,
    groups: Mapping[str, str | None] | None = None,
    alpha: float = 0.05,
    resamples: int = 9999,
    seed: int = 0,
) -> tuple[Faithfulness, ...]:
    """Return the faithfulness of each method on each checkpoint.

    Parameters
    ----------
    scores : iterable of Score
        For each role × method × probe the names of :func:`curve_scores`, the same with ``random_`` in front,
        ``spearman:<method>``, ``randomised:<stage>``, ``sink`` and ``depth_collapse`` where there are any.
    audited : str
        The method that the runs were made with.
    groups : mapping of probe id to group, optional
        Groups are resampled whole.
    alpha, resamples, seed
        Of the intervals, which have level 1 − 2 alpha.

    Returns
    -------
    tuple of Faithfulness
        In the order in which role and method first come.
    """
    tables: dict[tuple[str, str], dict[str, dict[str, float | None]]] = {}
    for one in scores:
        by_probe = tables.setdefault((one.role, one.method), {})
        by_probe.setdefault(one.probe_id, {})[one.measure] = one.value
    options = {"alpha": alpha, "resamples": resamples, "seed": seed}
    return tuple(
        _summary(role, method, table, groups or {}, audited=method == audited, options=options)
        for (role, method), table in tables.items()
    )


def _summary(
    role: str,
    method: str,
    table: Mapping[str, Mapping[str, float | None]],
    groups: Mapping[str, str | None],
    *,
    audited: bool,
    options: Mapping[str, float | int],
) -> Faithfulness:
    names = list(dict.fromkeys(name for row in table.values() for name in row))
    means = {name: _mean(row.get(name) for row in table.values()) for name in names}
    found = {kind: _advantage(table, kind, groups, options) for kind in ("deletion", "insertion")}
    stages = sorted(int(name.split(":")[1]) for name in names if name.startswith("randomised:"))
    shuffled = tuple(means[f"randomised:{stage}"] for stage in stages)
    n_probes = sum(row.get("deletion") is not None for row in table.values())
    units = {groups[key] for key, row in table.items() if row.get("deletion") is not None and groups.get(key)}
    reason = _reason(found["deletion"], shuffled, len(units) or n_probes)
    return Faithfulness(
        role=role,
        method=method,
        audited=audited,
        faithful=reason is None,
        reason=reason,
        deletion=found["deletion"],
        insertion=found["insertion"],
        comprehensiveness=_at_fractions(means, "comprehensiveness"),
        sufficiency=_at_fractions(means, "sufficiency"),
        random_comprehensiveness=_at_fractions(means, "random_comprehensiveness"),
        random_sufficiency=_at_fractions(means, "random_sufficiency"),
        spearman={n.split(":", 1)[1]: value for n, value in means.items() if n.startswith("spearman:")},
        randomised=shuffled,
        sink=means.get("sink"),
        depth_collapse=means.get("depth_collapse"),
        n_probes=n_probes,
        n_missing=len(table) - n_probes,
    )


def _at_fractions(means: Mapping[str, float | None], name: str) -> tuple[float | None, ...]:
    return tuple(means.get(f"{name}_{round(100 * part)}") for part in FRACTIONS)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _advantage(
    table: Mapping[str, Mapping[str, float | None]],
    kind: str,
    groups: Mapping[str, str | None],
    options: Mapping[str, float | int],
) -> Advantage | None:
    """Return by how much the map's order beats random ones: larger for deletion, smaller for insertion."""
    pairs = {
        key: (row.get(kind), row.get(f"random_{kind}"))
        for key, row in table.items()
        if row.get(kind) is not None and row.get(f"random_{kind}") is not None
    }
    if not pairs:
        return None
    own, chance = (np.array([pair[side] for pair in pairs.values()], np.float64) for side in (0, 1))
    low, high = (chance, own) if kind == "deletion" else (own, chance)
    ids, columns = tuple(pairs), (Column(kind),)
    given = [groups.get(key) for key in ids]
    cells = compare_tables(
        ShareTable(ids, columns, low[:, None]),
        ShareTable(ids, columns, high[:, None]),
        groups=given if any(one is not None for one in given) else None,
        alpha=float(options["alpha"]),
        resamples=int(options["resamples"]),
        seed=int(options["seed"]),
    )
    cell = next(cell for cell in cells if cell.measure == "shift")
    return Advantage(float(own.mean()), float(chance.mean()), float((high - low).mean()), cell.interval)


def _reason(deletion: Advantage | None, shuffled: Sequence[float | None], units: int) -> str | None:
    """Return why a map is not shown to be faithful, None where it is."""
    if deletion is None:
        return "no probe has a map and a target logit to watch"
    if units < LEAST_PROBES or deletion.interval is None:
        return f"{units} probes or groups are too few to tell; at least {LEAST_PROBES} are needed"
    low, high = deletion.interval
    if high <= 0:
        return "occluding positions in the map's order moves the target logit less than a random order does"
    if low <= 0:
        return (
            "occluding positions in the map's order is not shown to move the target logit more than a random "
            "order does"
        )
    last = next((one for one in reversed(shuffled) if one is not None), None)
    if last is not None and last > INSENSITIVE:
        return f"the map stays the same when the weights are shuffled (rank correlation {last:.2f})"
    return None


def unproven(found: Sequence[Faithfulness]) -> str | None:
    """Return why a shift of the audited method's map proves no change of reliance; None where it may.

    The map must be faithful on both checkpoints. None, too, where nothing was measured.

    Examples
    --------
    >>> unproven([Faithfulness("after", "rollout", True, False, "no probe has a target")])
    'on the checkpoint after, no probe has a target'
    """
    reasons: dict[str, list[str]] = {}
    for one in found:
        if one.audited and not one.faithful:
            reasons.setdefault(one.reason or "its map is not faithful", []).append(one.role)
    parts = [
        f"on {'both checkpoints' if len(roles) > 1 else f'the checkpoint {roles[0]}'}, {reason}"
        for reason, roles in reasons.items()
    ]
    return "; ".join(parts) or None
