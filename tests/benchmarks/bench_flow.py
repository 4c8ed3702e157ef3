"""Attention flow beside the library that the published code uses."""

from __future__ import annotations

import statistics

import networkx
import numpy as np

from audit.methods import attention_flow
from tests.benchmarks.measuring import Section, timed

FLOW = Section("Attention flow")
LEAST_GAIN = 100


def random_attention(layers: int, n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.dirichlet(np.full(n, 0.3), (1, 4, n)) for _ in range(layers)]


def networkx_flow(attentions: list[np.ndarray], output: int, source: int) -> float:
    """Return one value of attention flow by the library of the published code."""
    n = attentions[0].shape[-1]
    graph = networkx.DiGraph()
    for layer, weights in enumerate(attentions):
        mixed = 0.5 * weights[0].mean(0) + 0.5 * np.eye(n)
        for i, j in zip(*np.nonzero(mixed), strict=True):
            graph.add_edge((layer + 1, int(i)), (layer, int(j)), capacity=float(mixed[i, j]))
    value: float = networkx.maximum_flow_value(graph, (len(attentions), output), (0, source))
    return value


def test_attention_flow():
    small, inputs = random_attention(12, 32), 4
    expected = [networkx_flow(small, 0, j) for j in range(inputs)]
    np.testing.assert_allclose(attention_flow(small, rows=[0])[0, 0, :inputs], expected, atol=1e-6)
    ours = statistics.median(timed(lambda: attention_flow(small, rows=[0])) for _ in range(5)) / 32
    theirs = timed(lambda: [networkx_flow(small, 0, j) for j in range(inputs)]) / inputs
    FLOW.note(
        f"- 12 layers, n = 32: {ours * 1e3:.2f} ms a value against {theirs * 1e3:.0f} ms by networkx, "
        f"{theirs / ours:,.0f} times (goal ≥ {LEAST_GAIN}; warm, the same values)"
    )


def test_one_row_of_attention_flow():
    for n, rounds, goal in ((128, 3, " (goal < 5 s)"), (256, 1, ""), (512, 1, "")):
        large = random_attention(12, n)
        seconds = statistics.median(
            timed(lambda large=large: attention_flow(large, rows=[0])) for _ in range(rounds)
        )
        FLOW.note(f"- 12 layers, n = {n}: {seconds:.2f} s for one row of {n} values{goal}")
