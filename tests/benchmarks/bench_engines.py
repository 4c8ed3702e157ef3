"""Speed and memory of the engines beside the plain fused forward pass; writes RESULTS.md.

Every figure is a ratio to the plain pass of the same round, so that a busy machine slows both. Run by
``make bench``.
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import networkx
import numpy as np
import pytest
import torch

from audit.methods import attention_flow
from tests import tiny_audits
from tests.benchmarks import engine_cases as cases
from tests.benchmarks.engine_cases import Engine, Subject
from tests.tiny_audits import run_command, text_rows, write_config, write_rows

RESULTS = Path(__file__).with_name("RESULTS.md")
LINES: list[str] = []
MEGABYTE = 2**20
AGREEMENT = 1e-5
LAYERS = int(os.environ.get("BENCH_LAYERS", "12"))
"""Fewer for a short run, which flatters `row` and `streaming`: each is cheap in one layer."""
FEW = (
    "Fewer than 12 layers flatter two engines: `row` needs one query of the last layer, `streaming` no "
    "product in the first, so both are dearer with 12; regions and eager cost the same in every layer."
)
SHARED = os.getloadavg()[0] > (os.cpu_count() or 1)


@pytest.fixture(scope="module", autouse=True)
def results():
    """Write down what was measured, also where a case failed."""
    LINES[:] = heading()
    yield
    note(f"\nLoad average at the end: {os.getloadavg()[0]:.1f}.")


def heading() -> list[str]:
    machine = (
        f"{date.today()}, {processor()}, {torch.get_num_threads()} threads of {os.cpu_count()} processors, "
        f"torch {torch.__version__}, Python {platform.python_version()}; load average at the start "
        f"{os.getloadavg()[0]:.1f}."
    )
    shared = (
        "The machine was shared with other work, so times are CPU time of this process, not time on the wall."
        if SHARED
        else "Times are time on the wall."
    )
    return [
        "# Measured speed and memory",
        "",
        "Written by `make bench` (tests/benchmarks/bench_engines.py). Ratios are to the plain fused forward",
        "pass of the same round: medians, with the lowest and highest. Memory is the median peak",
        "of the process above that of the plain pass. Random weights, float32. `eager` keeps every layer's",
        "weights and multiplies them afterwards. Memory scatters by some tens of MB.",
        "",
        machine,
        shared,
        "" if LAYERS >= 12 else FEW,
        "",
        "| case | engine | ratio (lowest–highest) | rounds | memory above plain | goal |",
        "|---|---|---|---|---|---|",
    ]


def processor() -> str:
    names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


def timed(work: Callable[[], object]) -> float:
    clock = time.process_time if SHARED else time.perf_counter
    start = clock()
    work()
    return clock() - start


def watched(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that `work` takes, and by how many MB the process's resident memory rises."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    seconds = timed(work)
    return seconds, (status("VmHWM") - before) / MEGABYTE


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def note(line: str) -> None:
    print(line)
    LINES.append(line)
    RESULTS.write_text("\n".join(LINES) + "\n")


def measure(name: str, one: Subject, engines: dict[str, tuple[Engine, str]], rounds: int) -> None:
    """Time the engines in turns, each beside the plain pass of its round, and note them."""
    ratios: dict[str, list[float]] = {engine: [] for engine in engines}
    memory: dict[str, list[float]] = {engine: [] for engine in engines}
    for _ in range(rounds):
        base, base_memory = watched(lambda: cases.plain(one))
        for engine, (run, _) in engines.items():
            seconds, peak = watched(lambda run=run: run(one))
            ratios[engine].append(seconds / base)
            memory[engine].append(peak - base_memory)
    for engine, (_, goal) in engines.items():
        found = ratios[engine]
        note(
            f"| {name} | {engine} | {statistics.median(found):.2f}× ({min(found):.2f}–{max(found):.2f}) "
            f"| {rounds} | {statistics.median(memory[engine]):+,.0f} MB | {goal or '–'} |"
        )


def test_vit_base_at_197_positions():
    one = cases.vit(8, layers=LAYERS)
    torch.testing.assert_close(cases.streaming(one), cases.eager(one), atol=AGREEMENT, rtol=0)
    torch.testing.assert_close(cases.row(one), cases.eager(one), atol=AGREEMENT, rtol=0)
    engines = {
        "streaming": (cases.streaming, "≤ 1.05×"),
        "row": (cases.row, "≤ 1.05×"),
        "eager": (cases.eager, ""),
    }
    measure(f"ViT-B, {LAYERS} layers, n = 197, batch 8", one, engines, 5)


@pytest.mark.parametrize(("n", "batch", "goal", "rounds"), [(128, 8, "≤ 1.06×", 5), (512, 4, "≤ 1.15×", 3)])
def test_bert_base(n, batch, goal, rounds):
    one = cases.bert(n, batch, layers=LAYERS)
    torch.testing.assert_close(cases.row(one), cases.eager(one), atol=AGREEMENT, rtol=0)
    engines = {
        "streaming": (cases.streaming, goal),
        "row": (cases.row, goal),
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
    share = statistics.median(cases.attention_share(one) for _ in range(3))
    engines = {
        "regions": (cases.regions, f"≤ {1 + 1.1 * share:.2f}× (attention's share {share:.2f}), ≤ +16 MB"),
        "row": (cases.row, "≤ 1.9×, ≤ +250 MB"),
        "64 rows": (cases.many_rows, ""),
        "row, top-k by query blocks": (cases.top_k_row, "≤ 2.5×, ≤ +300 MB"),
        "eager": (cases.eager, ""),
    }
    measure(f"BERT-base, {LAYERS} layers, n = 2,048, batch 1", one, engines, 2)


def test_memory_of_regions_grows_with_positions_alone():
    sizes = (1024, 2048, 4096)
    above = []
    for n in sizes:
        one = cases.bert(n, 1, layers=1)
        above.append(watched(lambda one=one: cases.regions(one))[1])
    exponent = float(np.polyfit(np.log(sizes), np.log(above), 1)[0])
    note(
        f"\nMemory of one layer with regions at n = {sizes}: {', '.join(f'{x:.0f} MB' for x in above)}; "
        f"exponent of n {exponent:.2f} (1 = linear, 2 = as many as weights)."
    )
    assert exponent < 1.5


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
    large = random_attention(12, 128)
    seconds = statistics.median(timed(lambda: attention_flow(large, rows=[0])) for _ in range(3))
    note(
        f"\nAttention flow, 12 layers: n = 32, {ours * 1e3:.2f} ms a value against {theirs * 1e3:.0f} ms by "
        f"networkx ({theirs / ours:,.0f} times; warm, the same values); n = 128, {seconds:.2f} s a row of "
        "128 values."
    )


def test_cold_start(tmp_path):
    models = tiny_audits.save_family(tmp_path / "models")
    write_rows(tmp_path / "probes.jsonl", text_rows())
    write_config(tmp_path, models=models)
    assert run_command("run", cwd=tmp_path).code in (0, 3, 4)
    for name in ("gate", "list"):
        wall, spent = [], []
        for _ in range(5):
            before, start = children_time(), time.perf_counter()
            run_command(name, cwd=tmp_path)
            wall.append(time.perf_counter() - start)
            spent.append(children_time() - before)
        note(
            f"\nCold start of `audit {name}` on a small store: {statistics.median(spent):.2f} s of CPU, "
            f"{statistics.median(wall):.2f} s on the wall (goal ≤ 1.2 s)."
        )


def children_time() -> float:
    times = os.times()
    return times.children_user + times.children_system


def test_one_layer_at_8192_positions():
    one = cases.bert(8192, 1, layers=1)
    share = cases.attention_share(one)
    goal = f"≤ {1 + 1.1 * share:.2f}× (attention's share {share:.2f}), ≤ +64 MB"
    engines = {"regions": (cases.regions, goal)}  # a row of one layer is one query, which says nothing
    measure("BERT-base, 1 layer, n = 8,192, batch 1", one, engines, 1)
