"""How fast the dashboard paints and switches pages, and how much memory it takes, on large stores."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from audit.records import Probe
from tests.benchmarks import dashboard_stores as stores
from tests.benchmarks.bench_commands import save_model
from tests.benchmarks.measuring import Section
from tests.browser.conftest import ARGUMENTS, CHROMIUM, serving, settle
from tests.dashboard_store import build_many

pytestmark = pytest.mark.timeout(1800)  # most of it is generating the stores
DASHBOARD = Section("Dashboard")
FIRST, SWITCH, LIVE = 2.0, 0.5, 1.0
"""Goals: seconds until the first page is drawn after start-up, until another page is, until live maps are."""
MENU = (
    "Comparison",
    "Probe",
    "Trends",
    "Runs & provenance",
    "Approvals & log",
    "Methods & limits",
    "Overview",
)
ROUNDS = 3


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        pytest.skip(f"{CHROMIUM} is missing; install chromium, or name another one as CHROMIUM")
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a store of 200 runs × 1,000 probes and two of 10,000, and the comparison of the latter."""
    root = tmp_path_factory.mktemp("large")
    stores.many(root, runs=200, probes=1000)
    return root / "store", stores.long(root, probes=10_000)[1]


def drawn(page: Page, title: str) -> None:
    """Wait until the page of that title is drawn whole."""
    page.wait_for_function(
        "title => document.querySelector('h1')?.innerText === title && "
        "document.querySelector('[data-testid=stApp][data-test-script-state=notRunning]')",
        arg=title,
        timeout=60_000,
    )
    settle(page)


@dataclass
class Clock:
    """Time on the wall, and CPU time of the dashboard's process, which a busy machine leaves alone."""

    server: psutil.Process
    wall: float = 0.0
    cpu: float = 0.0

    def __enter__(self) -> Clock:
        self._start = time.perf_counter(), self._spent()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall = time.perf_counter() - self._start[0]
        self.cpu = self._spent() - self._start[1]

    def _spent(self) -> float:
        times = self.server.cpu_times()
        return times.user + times.system


def first_paint(page: Page, address: str, server: psutil.Process) -> Clock:
    with Clock(server) as clock:
        page.goto(address)
        drawn(page, "Overview")
    return clock


def switches(page: Page, server: psutil.Process) -> dict[str, list[Clock]]:
    """Return how long each page's switches take: of the first round, then of the others."""
    found: dict[str, list[Clock]] = {title: [] for title in MENU}
    for _ in range(ROUNDS + 1):
        for title in MENU:
            with Clock(server) as clock:
                page.get_by_test_id("stSidebarNav").get_by_role("link", name=title).click()
                drawn(page, title)
            found[title].append(clock)
    return found


def memory(server: psutil.Process) -> float:
    """Return the resident megabytes of the dashboard's process and its children."""
    return sum(one.memory_info().rss for one in [server, *server.children(recursive=True)]) / 2**20


def note(name: str, paint: Clock | None, found: dict[str, list[Clock]], server: psutil.Process) -> None:
    later = {title: clocks[1:] for title, clocks in found.items()}
    wall = statistics.median(one.wall for clocks in later.values() for one in clocks)
    cpu = {title: statistics.median(one.cpu for one in clocks) for title, clocks in later.items()}
    slowest = max(cpu, key=lambda title: cpu[title])
    first = ""
    if paint is not None:
        first = f"first paint {paint.wall:.2f} s (server {paint.cpu:.2f} s of CPU; goal < {FIRST:g}); "
    DASHBOARD.note(
        f"- {name}: {first}page switch {wall:.2f} s (server {statistics.median(cpu.values()):.2f} s of CPU, "
        f"at most {cpu[slowest]:.2f} s on {slowest}; goal < {SWITCH:g}); memory of the server "
        f"{memory(server):.0f} MB; load average {os.getloadavg()[0]:.1f}."
    )


def test_pages_of_a_large_store(browser: Browser, store: tuple[Path, str], tmp_path: Path) -> None:
    where, comparison = store
    dashboard = serving(where, tmp_path)
    with dashboard as address:
        server = psutil.Process(dashboard.process.pid)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        paint = first_paint(page, address, server)
        note("200 runs × 1,000 probes", paint, switches(page, server), server)
        page.goto(f"{address}/compare?comparison={comparison}")
        drawn(page, "Comparison")
        note("a comparison of 10,000 probes", None, switches(page, server), server)
        page.close()


def test_pages_of_a_store_of_5000_runs(browser: Browser, store: tuple[Path, str], tmp_path: Path) -> None:
    dashboard = serving(build_many(store[0], tmp_path / "many", runs=5000, comparisons=500), tmp_path)
    with dashboard as address:
        server = psutil.Process(dashboard.process.pid)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        paint = first_paint(page, address, server)
        note("5,000 runs, 500 comparisons", paint, switches(page, server), server)
        page.close()


def test_live_maps_of_six_layers(tmp_path: Path) -> None:
    import audit
    from audit.pipeline import capture_both
    from audit.records import CaptureSettings, Method, RunSpec

    folder = save_model(tmp_path / "model")
    checkpoint = audit.load_checkpoint(str(folder))
    words = [w for w in checkpoint.processor.get_vocab() if w.isalpha()]
    spec = RunSpec(checkpoint.info, "", "", (), "auto", "", Method(), CaptureSettings(), {"capture": "1"})
    times, begun = [], time.process_time()
    for i in range(5):
        probe = Probe("live", text=" ".join(words[(i + j) % len(words)] for j in range(30)))
        start = time.perf_counter()
        capture_both((checkpoint, checkpoint), (spec, spec), probe)
        times.append(time.perf_counter() - start)
    spent = (time.process_time() - begun) / len(times)
    DASHBOARD.note(
        f"- live, both maps of a sentence of 30 words, 6 layers of 384 (MiniLM's shape): "
        f"{statistics.median(times):.2f} s ({spent:.2f} s of CPU; goal < {LIVE:g}); load average "
        f"{os.getloadavg()[0]:.1f}."
    )
