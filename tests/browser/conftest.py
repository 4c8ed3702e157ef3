"""A real browser on a real dashboard: `streamlit run` on a store that was just audited."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.dashboard_store import Audited, build

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "artifacts" / "screenshots"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """Return a store with a text and a vision audit of tiny checkpoints."""
    return build(tmp_path_factory.mktemp("dashboard"))


@pytest.fixture(scope="session")
def dashboard(audited: Audited, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a dashboard on that store."""
    configs = os.pathsep.join(map(str, (audited.text, audited.vision)))
    with serving(audited.store, tmp_path_factory.mktemp("log"), configs=configs) as address:
        yield address


class serving:  # noqa: N801
    """Run the dashboard on a store while the block lasts; gives its address."""

    def __init__(self, store: Path, folder: Path, *, configs: str = "") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.log = folder / "dashboard.log"
        self.environment = {
            **os.environ,
            "ROLLOUT_AUDIT_STORE": str(store),
            "ROLLOUT_AUDIT_CONFIGS": configs,
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> str:
        command = [sys.executable, "-m", "streamlit", "run", str(ROOT / "dashboards" / "app.py")]
        options = [f"--server.port={self.port}", "--server.headless=true", "--browser.gatherUsageStats=false"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *options], env=self.environment, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = monotonic() + 120
        while not self._healthy():
            if self.process.poll() is not None or monotonic() > deadline:
                self.__exit__()
                raise RuntimeError(f"the dashboard did not start:\n{self.log.read_text()}")
        return self.address

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/_stcore/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            self.process.poll()
            return False

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Yield a Chromium."""
    if not Path(CHROMIUM).exists():
        pytest.fail(f"{CHROMIUM} is missing; install chromium, or name another one as CHROMIUM")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Yield a fresh page of 1280 pixels in the light theme."""
    yield from _page(browser, 1280, "light")


@pytest.fixture(params=[(1280, "light"), (800, "dark")], ids=str)
def any_page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """Yield a fresh page, wide and light or narrow and dark."""
    yield from _page(browser, *request.param)


def _page(browser: Browser, width: int, theme: str) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)  # type: ignore[arg-type]
    yield context.new_page()
    context.close()


def settle(page: Page) -> None:
    """Wait until the script has run and every chart is drawn."""
    page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]", timeout=60_000)
    page.wait_for_function("document.querySelectorAll('[data-testid=stSkeleton]').length === 0")
    page.wait_for_function(
        "[...document.querySelectorAll('[data-testid=stVegaLiteChart]')].every(c => "
        "c.querySelector('svg, canvas'))"
    )


def screenshot(page: Page, name: str) -> Path:
    """Keep the whole page as an image; returns its path."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    viewport = page.viewport_size
    assert viewport is not None
    height = int(page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight"))
    page.set_viewport_size({"width": viewport["width"], "height": min(height + 40, 8000)})
    settle(page)
    path = SCREENSHOTS / f"{name}.png"
    page.screenshot(path=path)
    page.set_viewport_size(viewport)
    return path
