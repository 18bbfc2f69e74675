"""Pictures of the status page for the documentation: `python -m tests.page.pictures` writes docs/images/status-page-*.png.

Real daemons with rooms of every kind, and bootstrap with 200 instances that only its heartbeats are of.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tests.helpers.browser import Browser, browser
from tests.helpers.fleet import fleet
from tests.helpers.live_rooms import LiveCluster, http, live_cluster

FOLDER = Path(__file__).parents[2] / "docs" / "images"
CURVES_S = 12.0
"""For the small curves to have something to show."""


def main() -> None:
    """Write every picture."""
    with browser() as tab:
        pages = {"full": 256, "swa": 64, "request": 32}
        with live_cluster(pages=pages, host_pages=96, prefill={"timeouts": {"begin_s": 6}}) as live:
            picture_pair(tab, live)
        with fleet(100) as large:
            tab.size(1320)
            show(tab, large.url, 5.0)
            tab.screenshot(FOLDER / "status-page-200-instances.png")
            tab.size(390, 844, scale=1.5)
            show(tab, large.url, 3.0)
            tab.screenshot(FOLDER / "status-page-200-instances-phone.png")


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
        for look, width, dark in (("light", 1320, False), ("dark", 1320, True), ("phone", 390, False)):
            tab.size(width, 900, dark=dark, scale=1.5 if width == 390 else 1)
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
    """Open a page and let it run."""
    tab.open(url)
    tab.live()
    time.sleep(seconds)


if __name__ == "__main__":
    main()
