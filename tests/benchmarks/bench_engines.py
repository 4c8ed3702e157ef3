"""Speed and memory of the engines beside the plain fused forward pass."""

from __future__ import annotations

import os
import statistics

import pytest
import torch

from audit.capture.engines.row_fold import LEAST_POSITIONS
from tests.benchmarks import engine_cases as cases
from tests.benchmarks.measuring import Section, exponent, watched

AGREEMENT = 1e-5
LAYERS = int(os.environ.get("BENCH_LAYERS", "12"))
"""Fewer for a short run, which flatters `row` and `streaming`: each is cheap in one layer."""
ENGINES = Section("Engines", table=True)
GROWTH = Section("Growth with positions and layers")
REGION_SHARE = 1.1
"""Attention calls that regions may cost: one extra call is the floor."""


def measure(name: str, one: cases.Subject, engines: dict[str, tuple[cases.Engine, str]], rounds: int) -> None:
    ENGINES.measure(name, one, cases.plain, engines, rounds)


def region_goal(one: cases.Subject, memory: str, rounds: int = 3) -> str:
    share = statistics.median(cases.attention_share(one) for _ in range(rounds))
    return f"≤ {1 + REGION_SHARE * share:.2f}× (attention's share {share:.2f}), ≤ {memory}"


def test_vit_base_at_197_positions():
    one = cases.vit(8, layers=LAYERS)
    expected = cases.eager(one)
    for engine in (cases.streaming, cases.row, cases.stored):
        torch.testing.assert_close(engine(one), expected, atol=AGREEMENT, rtol=0)
    engines = {
        "streaming": (cases.streaming, "≤ 1.05×"),  # as a run of this length does
        "row": (cases.row, ""),
        "eager": (cases.eager, ""),
    }
    measure(f"ViT-B, {LAYERS} layers, n = 197, batch 8", one, engines, 11)


def test_vit_base_gradient_rollout():
    one = cases.vit_classifier(8, layers=LAYERS)
    torch.testing.assert_close(
        cases.gradient(one), cases.gradient_reference(one), atol=AGREEMENT, rtol=AGREEMENT
    )
    engines = {
        "gradient rollout": (cases.gradient, "≤ 1.05×, ≤ +20 MB"),
        "eager, all kept": (cases.gradient_reference, ""),
    }
    name = f"ViT-B, {LAYERS} layers, n = 197, batch 8, to a forward and backward pass"
    ENGINES.measure(name, one, cases.forward_and_backward, engines, 9)


@pytest.mark.parametrize(("n", "batch", "goal", "rounds"), [(128, 8, "≤ 1.06×", 11), (512, 4, "≤ 1.15×", 9)])
def test_bert_base(n, batch, goal, rounds):
    one = cases.bert(n, batch, layers=LAYERS)
    torch.testing.assert_close(cases.row(one), cases.eager(one), atol=AGREEMENT, rtol=0)
    short = n < LEAST_POSITIONS  # then a run streams
    engines = {
        "row": (cases.row, "" if short else goal),
        "streaming": (cases.streaming, goal if short else ""),
        "rows that a run stores": (cases.stored, "" if short else goal),
        "regions": (cases.regions, ""),
        "eager": (cases.eager, ""),
    }
    measure(f"BERT-base, {LAYERS} layers, n = {n}, batch {batch}", one, engines, rounds)


def test_bert_base_at_2048_positions():
    one = cases.bert(2048, 1, layers=LAYERS)
    expected = cases.eager(one)
    torch.testing.assert_close(cases.row(one), expected, atol=AGREEMENT, rtol=0)
    carried = torch.einsum("bk,bkc->bc", expected, cases.region_columns(one))
    torch.testing.assert_close(cases.regions(one), carried, atol=AGREEMENT, rtol=0)
    pruned = "≤ 2.5×, ≤ +300 MB"
    engines = {
        "regions": (cases.regions, region_goal(one, "+16 MB")),
        "row": (cases.row, "≤ 1.9×, ≤ +250 MB"),
        "rows that a run stores": (cases.stored, "≤ 1.9×, ≤ +250 MB"),
        "64 rows": (cases.many_rows, ""),
        "row, top-k": (cases.pruned_row({"top_k": 16}), pruned),
        "row, discard": (cases.pruned_row({"discard_ratio": 0.9}), pruned),
        "row, max": (cases.pruned_row({"head_fusion": "max"}), pruned),
        "eager": (cases.eager, ""),
    }
    measure(f"BERT-base, {LAYERS} layers, n = 2,048, batch 1", one, engines, 3)


def test_bert_base_at_8192_positions():
    one = cases.bert(8192, 1, layers=LAYERS)
    engines = {
        "regions": (cases.regions, region_goal(one, "+64 MB")),
        "row": (cases.row, "≤ 2.8×, ≤ +800 MB"),
        "rows that a run stores": (cases.stored, "≤ 2.8×, ≤ +800 MB"),
    }
    measure(f"BERT-base, {LAYERS} layers, n = 8,192, batch 1", one, engines, 3)


@pytest.mark.parametrize(
    ("engines", "sizes"),
    [
        ({"plain": cases.plain, "regions": cases.regions, "row": cases.row}, (1024, 2048, 4096, 8192)),
        ({"norms": cases.norms}, (512, 1024, 2048, 4096)),
    ],
)
def test_growth_with_positions(engines, sizes):
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for n in sizes:
        one = cases.bert(n, 1, layers=2)
        for name, run in engines.items():
            found[name].append(watched(lambda run=run, one=one: run(one)))
    for name, values in found.items():
        times, memory = [x for x, _ in values], [x for _, x in values]
        GROWTH.note(
            f"- {name}, 2 layers, n = {', '.join(f'{n:,}' for n in sizes)}: "
            f"{', '.join(f'{x:.2f}' for x in times)} s (n^{exponent(sizes, times):.2f}), "
            f"{', '.join(f'{x:.0f}' for x in memory)} MB (n^{exponent(sizes, memory):.2f})"
        )
        assert exponent(sizes[1:], memory[1:]) < 1.5


def test_growth_with_layers():
    sizes = (2, 4, 8)
    for name, run in (("plain", cases.plain), ("regions", cases.regions), ("row", cases.row)):
        found = [
            watched(lambda run=run, one=one: run(one))
            for one in (cases.bert(1024, 1, layers=n) for n in sizes)
        ]
        times, memory = [x for x, _ in found], [x for _, x in found]
        GROWTH.note(
            f"- {name}, n = 1,024, {', '.join(map(str, sizes))} layers: "
            f"{', '.join(f'{x:.2f}' for x in times)} s (L^{exponent(sizes, times):.2f}), "
            f"{', '.join(f'{x:.0f}' for x in memory)} MB (L^{exponent(sizes, memory):.2f})"
        )
