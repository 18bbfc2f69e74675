"""Pictures of the status page for the documentation, `python -m tests.page.pictures`; and a Chromium for tests of the page."""

from __future__ import annotations

import base64
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import axe_core_python
import pytest

from tests.helpers.fleet import fleet
from tests.helpers.live_rooms import LiveCluster, http, live_cluster

FOLDER = Path(__file__).parents[2] / "docs" / "images"
CURVES_S = 12.0
"""For the small curves to have something to show."""


def main() -> None:
    with browser() as tab:
        pages = {"full": 256, "swa": 64, "request": 32}
        with live_cluster(pages=pages, host_pages=96, prefill={"timeouts": {"begin_s": 6}}) as live:
            picture_pair(tab, live)
        with fleet(100) as large:
            tab.size(1320)
            show(tab, large.url, 5.0)
            tab.screenshot(FOLDER / "status-page-200-instances.png")


def picture_pair(tab: Browser, live: LiveCluster) -> None:
    """Decode's page while rooms cross, two wait, one is held and some have failed; and the way of one room."""
    live.cross(1000)
    cancelled = live.pair(900)
    http("DELETE", live.decode, f"/v1/requests/{cancelled}", params={"reason": "the client went away"})
    for _ in range(2):
        live.pair(700)
    time.sleep(7.0)  # nobody begins them
    held, half = live.pair(1500), live.pair(4000)
    live.write(held, 1500)
    live.begun[held].finish(metadata=b"x")
    live.read(held, 1500)
    live.write(half, 4000, 0, 1000)
    ended = threading.Event()

    def cross() -> None:
        while not ended.is_set():
            live.cross(1500)

    crossing = threading.Thread(target=cross)
    crossing.start()
    try:
        for look in ("light", "dark"):
            tab.size(1320, dark=look == "dark")
            show(tab, live.decode.url, CURVES_S)
            tab.screenshot(FOLDER / f"status-page-{look}.png")
        tab.size(1320)
        show(tab, live.decode.url, 1.0)
        tab.js(
            "document.querySelector('#find-room').value = arguments[0]; document.querySelector('#find').requestSubmit()",
            str(held),
        )
        tab.until("the timeline", lambda: tab.texts("#room .timeline .what"))
        tab.screenshot(FOLDER / "status-page-room.png", whole=False)
    finally:
        ended.set()
        crossing.join()
    live.claimed[held].release()


def show(tab: Browser, url: str, seconds: float) -> None:
    tab.open(url)
    tab.live()
    time.sleep(seconds)


LOAD_S = 20.0
AXE = Path(axe_core_python.__file__).with_name("axe.min.js")


class Browser:
    """One tab. Errors of the console are collected until they are asked for."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def size(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Be a screen of so many CSS pixels, light or dark; a narrow one is a phone, with its viewport."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1.0, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {
            "name": "prefers-reduced-motion",
            "value": "reduce",
        }  # many pages share the processor of a test machine
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature, still]})

    def open(self, url: str) -> None:
        self.driver.get(url)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write a picture of the page; of the part on the screen when not `whole`."""
        size = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
        clip = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}} if whole else {}
        picture = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": whole, **clip})
        path.write_bytes(base64.b64decode(picture["data"]))

    def text(self, selector: str) -> str:
        """Return the visible text of an element; empty when there is none."""
        return str(
            self.js(
                "return document.querySelector(arguments[0])?.innerText ?? document.querySelector(arguments[0])?.textContent ?? ''",
                selector,
            )
        )

    def texts(self, selector: str) -> list[str]:
        return list(self.js("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector))

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def focused(self) -> str:
        """Name the element that has the focus, as a screen reader would."""
        script = """
          const e = document.activeElement;
          return `${e.tagName.toLowerCase()} ${e.getAttribute('aria-label') || e.innerText || e.id}`.trim()"""
        return str(self.js(script))

    def until(self, what: str, look: Callable[[], Any], timeout_s: float = LOAD_S) -> Any:
        """Return the first true value of `look`, or fail with what the page shows."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if found := look():
                return found
            time.sleep(0.05)
        raise AssertionError(f"{what}: not within {timeout_s} s; console: {self.errors()}; page:\n{self.text('body')}")

    def live(self) -> None:
        """Wait until the page shows what its daemon says."""
        self.until("a live page", lambda: self.text("#connection") == "live")

    def errors(self) -> list[str]:
        """Return the console's lines since the last call, but for advice."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in {"SEVERE", "WARNING"}]

    def axe(self) -> list[str]:
        """Return the findings of axe-core, for readers with and without a screen: each rule and the first element."""
        self.js(AXE.read_text())
        script = """
          const told = (v) => `${v.id}: ${v.help}: ${v.nodes[0].html} (${v.nodes[0].failureSummary})`;
          axe.run(document).then((result) => arguments[0](result.violations.map(told)))"""
        return list(self.driver.execute_async_script(script))


@contextmanager
def browser() -> Iterator[Browser]:
    """Start Debian's Chromium; skip where there is none (`make browser` installs it)."""
    from selenium import webdriver

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromium-driver")
    folder = tempfile.mkdtemp(prefix="kvb-browser-")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder}"]
    arguments += ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses root
    for argument in arguments:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    started.set_script_timeout(LOAD_S)
    started.set_page_load_timeout(LOAD_S)
    try:
        yield Browser(started)
    finally:
        started.quit()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
