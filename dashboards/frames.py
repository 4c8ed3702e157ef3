"""Records as polars tables, for the tables and files of the pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from audit.records import Cell, RuleVerdict
from audit.report.rows import shown_outcome
from audit.report.wording import limit

if TYPE_CHECKING:
    import polars as pl


def cells(found: Sequence[Cell]) -> pl.DataFrame:
    """Return cells as a table, one row each."""
    return _frame(map(_cell, found))


def cells_by(name: str, found: Iterable[tuple[str, Cell]]) -> pl.DataFrame:
    """Return cells as a table with one more column in front: what each belongs to."""
    return _frame({name: value, **_cell(cell)} for value, cell in found)


def rules(found: Sequence[RuleVerdict], effect_floor: float | None = None) -> pl.DataFrame:
    """Return the rules of a verdict as a table, one row each.

    `value`, `low` and `high` are what was judged, which `judged` names: of an ``excess`` rule the excess,
    else the measure itself; `observed` is always the measure. `effect_floor` is that of the policy, from
    which on an ``excess`` rule may fail; empty for the other kind.
    """
    return _frame(_rule(one, effect_floor) for one in found)


def agreement(region: str, found: Mapping[tuple[str, str], float | None]) -> pl.DataFrame:
    """Return rank correlations of one region's shifts as a table, one row for each two methods."""
    return _frame(
        {"region": region, "method": one, "other": other, "rank_correlation": value}
        for (one, other), value in found.items()
    )


def _frame(rows: Iterable[dict[str, Any]]) -> pl.DataFrame:
    import polars as pl

    return pl.DataFrame(list(rows), infer_schema_length=None)


def _cell(cell: Cell) -> dict[str, Any]:
    low, high = cell.interval or (None, None)
    return {
        "measure": cell.measure,
        "region": cell.region,
        "stream": cell.stream,
        "layer": cell.layer,
        "effect": cell.effect,
        "segment": cell.segment,
        "before": cell.before,
        "after": cell.after,
        "value": cell.value,
        "low": low,
        "high": high,
        "sd": cell.sd,
        "size": cell.size,
        "pvalue": cell.pvalue,
        "excess": cell.excess.excess if cell.excess else None,
        "minimum_detectable_shift": cell.excess.minimum_detectable_shift if cell.excess else None,
        "replicates": list(cell.replicates),
        "n_probes": cell.n_probes,
        "n_missing": cell.n_missing,
        "reason": cell.reason,
    }


def _rule(found: RuleVerdict, effect_floor: float | None) -> dict[str, Any]:
    rule, mean, sd = found.rule, *(found.floor or (None, None))
    test = found.excess if rule.kind == "excess" else None
    judged, value, interval = rule.measure, found.value, found.interval
    if test is not None and test.excess is not None:
        judged, value, interval = "excess", test.excess, test.interval
    low, high = interval or (None, None)
    observed_low, observed_high = found.interval or (None, None)
    return {
        "rule": rule.label,
        "kind": rule.kind,
        "measure": rule.measure,
        "region": found.region,
        "stream": found.stream,
        "effect": found.effect,
        "layer": rule.layer,
        "segment": rule.segment,
        "outcome": shown_outcome(found),
        "judged": judged,
        "value": value,
        "low": low,
        "high": high,
        "allowed": limit(found),
        "limit": found.limit,
        "warn_limit": rule.warn,
        "effect_floor": effect_floor if rule.kind == "excess" else None,
        "adjusted_pvalue": found.adjusted_pvalue,
        "observed": found.value,
        "observed_low": observed_low,
        "observed_high": observed_high,
        "before": found.before,
        "after": found.after,
        "floor_mean": mean,
        "floor_sd": sd,
        "minimum_detectable_shift": found.minimum_detectable_shift,
        "n_probes": found.n_probes,
        "n_missing": found.n_missing,
        "n_groups": found.n_clusters,
        "n_replicates": found.n_replicates,
        "explained": found.explained,
        "approved_by": found.approved_by,
        "sentence": found.sentence,
        "needed": found.needed,
        "reason": found.reason,
    }
