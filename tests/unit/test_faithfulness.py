"""Perturbation curves of functions that are known, and what is said when a map is no better than chance."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from audit.faithfulness import (
    FRACTIONS,
    GRID,
    Score,
    agreement,
    counts,
    curve_scores,
    masks,
    ranking,
    summarise,
    unproven,
)
from audit.gate import evaluate_gate
from audit.records import (
    Cell,
    Comparison,
    Confirmation,
    Faithfulness,
    Outcome,
    Policy,
    Rule,
    Verdict,
)
from audit.report import to_html, to_json, to_markdown, to_text
from audit.serialize import from_json
from audit.serialize import to_json as to_plain


def test_an_order_goes_from_the_largest_weight_down_and_draws_ties() -> None:
    weights, content = np.array([0.3, 0.1, 0.1, 0.1, 0.4]), np.array([1, 1, 1, 1, 0], bool)
    found = {tuple(ranking(weights, content, np.random.default_rng(seed)).tolist()) for seed in range(60)}
    assert {order[0] for order in found} == {0}
    assert {order[1:] for order in found} == {
        (a, b, 6 - a - b) for a in (1, 2, 3) for b in (1, 2, 3) if a != b
    }


def test_masks_occlude_the_first_positions_or_all_but_them_and_never_others() -> None:
    order = np.array([4, 1, 2])
    deletion, insertion = masks(order, 6)
    for part, taken, without, only in zip(GRID, counts(3), deletion, insertion, strict=True):
        assert taken == int(np.ceil(round(3 * part, 9)))
        assert np.flatnonzero(without).tolist() == sorted(order[:taken])
        assert np.flatnonzero(only).tolist() == sorted(order[taken:])
    assert counts(100, FRACTIONS) == [1, 5, 10, 20, 50]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_curves_of_a_sum_are_its_partial_sums(sign: float) -> None:
    """f(x) = Σ w_i over the positions that are shown: every number follows from the sorted weights."""
    n, weights = 20, np.arange(1.0, 21.0)
    order = ranking(weights, np.ones(n, bool), np.random.default_rng(0))
    value = [3 + sign * ((1 - mask) * weights).sum(-1) for mask in masks(order, n)]
    found = curve_scores(*value, n)
    gone = np.concatenate([[0.0], np.sort(weights)[::-1].cumsum()])
    at = counts(n)
    expected = sum((at[i + 1] - at[i]) / n * (gone[at[i]] + gone[at[i + 1]]) / 2 for i in range(len(at) - 1))
    total = gone[-1]
    assert found["deletion"] == pytest.approx(expected)
    assert found["insertion"] == pytest.approx(total - expected)
    assert [found[f"comprehensiveness_{p}"] for p in (1, 5, 10, 20, 50)] == [20, 20, 39, 74, 155]
    assert [found[f"sufficiency_{p}"] for p in (1, 5, 10, 20, 50)] == [
        total - x for x in (20, 20, 39, 74, 155)
    ]


def test_a_map_agrees_wholly_with_itself_not_at_all_with_its_reverse_and_is_unknown_when_constant() -> None:
    one, content = np.array([0.1, 0.2, 0.4, 0.3, 9.0]), np.array([1, 1, 1, 1, 0], bool)
    assert agreement(one, one**3, content) == pytest.approx(1)
    assert agreement(one, 1 / one, content) == pytest.approx(-1)
    assert agreement(one, np.ones(5), content) is None
    assert agreement(one, np.zeros(5), content) is None


def scores(role: str, gain: float, *, n: int = 30, spread: float = 0.5, method: str = "rollout", last=0.2):
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(n)
    rows = []
    for i in range(n):
        chance = 2 + rng.random()
        own = chance + gain + spread * float(noise[i] - noise.mean())
        numbers = {"deletion": own, "random_deletion": chance, "insertion": chance, "random_insertion": own}
        numbers |= {"spearman:occlusion": 0.5, "randomised:0": 0.9, "randomised:1": last, "sink": 0.25}
        rows += [Score(role, method, f"p{i}", name, value) for name, value in numbers.items()]
    return rows


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (scores("after", 0.6), None),
        (scores("after", 0.0, spread=2.0), "is not shown to move the target logit more than a random order"),
        (scores("after", -0.6), "less than a random order does"),
        (scores("after", 0.6, n=7), "7 probes or groups are too few"),
        (
            scores("after", 0.6, last=0.95),
            "stays the same when the weights are shuffled .rank correlation 0.95",
        ),
        ([Score("after", "rollout", "p", "deletion", None)], "no probe has a map and a target"),
    ],
)
def test_a_map_is_faithful_only_where_its_order_is_shown_to_beat_random_ones(rows, reason) -> None:
    (found,) = summarise(rows, audited="rollout", resamples=999)
    if reason is None:
        assert found.faithful
        assert found.reason is None
        assert found.deletion is not None
        assert found.deletion.value == pytest.approx(found.deletion.area - found.deletion.random)
        assert found.insertion is not None
        assert found.insertion.value == pytest.approx(found.insertion.random - found.insertion.area)
        assert found.spearman == {"occlusion": pytest.approx(0.5)}
        assert found.randomised == (pytest.approx(0.9), pytest.approx(0.2))
        assert (found.n_probes, found.n_missing, found.sink) == (30, 0, pytest.approx(0.25))
    else:
        assert not found.faithful
        assert re.search(reason, str(found.reason))


def test_groups_are_resampled_whole_and_counted() -> None:
    rows = scores("after", 0.3, n=32)
    groups = {f"p{i}": f"g{i % 4}" for i in range(32)}
    (few,) = summarise(rows, audited="rollout", groups=groups, resamples=999)
    assert str(few.reason).startswith("4 probes or groups are too few")


def test_random_orders_are_called_faithful_no_more_often_than_the_interval_allows() -> None:
    """Level 1 − 2 alpha, one side: alpha; the percentile bootstrap of 24 probes is a little bold."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        own, chance = rng.exponential(size=(2, 24))
        rows = [
            Score("after", "rollout", f"{i}", name, float(value[i]))
            for name, value in (("deletion", own), ("random_deletion", chance))
            for i in range(24)
        ]
        hits += summarise(rows, audited="rollout", resamples=199)[0].faithful
    assert 2 <= hits <= 22  # expected 10 to 14


def faithfulness(role: str, *, faithful: bool) -> Faithfulness:
    return summarise(scores(role, 0.6 if faithful else -0.6), audited="rollout", resamples=199)[0]


def judged(comparison: Comparison, *, fail: float = 0.02) -> Verdict:
    return evaluate_gate(comparison, Policy((Rule("corner", "limit", fail=fail),)))


def moved(*found: Faithfulness, value: float = 0.05, half: float = 0.003) -> Comparison:
    cell = Cell("shift", "corner", value=value, interval=(value - half, value + half), n_probes=400)
    return Comparison("paired", (cell,), 0.05, 400, same_weights=False, faithfulness=found)


def test_a_shift_by_a_map_that_is_not_faithful_is_labelled_and_one_by_a_faithful_map_is_not() -> None:
    good, bad = (faithfulness("before", faithful=x) for x in (True, False))
    after = replace(good, role="after")
    plain = judged(moved())
    assert judged(moved(good, after)).sentence == plain.sentence
    assert unproven([good, after]) is unproven([]) is None
    found = judged(moved(bad, after))
    assert found.outcome is Outcome.FAIL
    assert found.sentence.startswith(plain.sentence)
    assert "; map changed, reliance unproven: on the checkpoint before, occluding positions" in found.sentence
    assert found.rules[0].unproven == unproven([bad, after])
    assert "on both checkpoints" in str(unproven([bad, replace(bad, role="after")]))
    other = replace(bad, method="occlusion", audited=False)
    assert judged(moved(good, after, other)).sentence == plain.sentence


def test_the_label_stands_with_every_shift_but_with_none_that_did_not_move_or_was_confirmed() -> None:
    bad = faithfulness("after", faithful=False)
    assert "reliance unproven" in judged(moved(bad), fail=0.2).sentence  # moved, within the limit
    assert "reliance unproven" not in judged(moved(bad, half=0.06), fail=0.2).sentence
    confirmed = Confirmation("corner", "mask token", 1.0, 2.0, 1.0, (0.8, 1.2), True, 400)
    assert "reliance unproven" not in judged(replace(moved(bad), confirmations=(confirmed,))).sentence
    failed = replace(confirmed, confirmed=False)
    assert "reliance unproven" in judged(replace(moved(bad), confirmations=(failed,))).sentence


def test_every_report_tells_what_was_measured() -> None:
    comparison = moved(faithfulness("before", faithful=True), faithfulness("after", faithful=False))
    verdict = judged(comparison)
    for text in (to_text(comparison, verdict, width=400), to_markdown(comparison, verdict)):
        assert "Faithfulness of the maps" in text
        assert "Before: the map of rollout orders positions better than chance" in text
        assert "After: the map of rollout is not shown to be faithful" in text
        assert "rank correlation with occlusion .50" in text
        assert "with its map of shuffled weights .90, .20" in text
    page = to_html(comparison, verdict)
    assert 'id="faithfulness"' in page
    assert "better than chance" in page
    assert '"randomised"' in to_json(comparison, verdict)
    bare = replace(comparison, faithfulness=())
    assert "Faithfulness" not in to_text(bare, None) + to_markdown(bare, None)
    assert 'id="faithfulness"' not in to_html(bare, None)


def test_what_was_measured_survives_storing() -> None:
    comparison = moved(faithfulness("before", faithful=True))
    assert from_json(Comparison, to_plain(comparison)) == comparison
