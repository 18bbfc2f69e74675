"""Bootstrap's page with a fleet of 200 instances, its token, and a daemon that ends and comes back."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.helpers.browser import Browser
from tests.helpers.fleet import Fleet, fleet
from tests.helpers.held_ports import held_ports

TOKEN = "a-token-of-the-page"


@pytest.fixture(scope="module")
def large() -> Iterator[Fleet]:
    with fleet(100) as running:
        yield running


def boxes(tab: Browser) -> list[dict[str, float]]:
    script = """
      return [...document.querySelectorAll('.end .box')].map((e) => e.getBoundingClientRect())
        .map((r) => ({l: r.left, r: r.right, t: r.top, b: r.bottom}))"""
    return list(tab.js(script))


@pytest.mark.parametrize("width", [390, 1280, 1900])
def test_200_instances_are_all_there_and_none_covers_another(large: Fleet, tab: Browser, width: int) -> None:
    tab.size(width)
    tab.open(large.url)
    tab.live()
    found = boxes(tab)
    assert len(found) == 200
    assert min(box["l"] for box in found) >= 0
    assert max(box["r"] for box in found) <= width
    for index, one in enumerate(found):
        for other in found[:index]:
            apart = one["l"] >= other["r"] or other["l"] >= one["r"] or one["t"] >= other["b"] or other["t"] >= one["b"]
            assert apart, (one, other)
    names = """return [...document.querySelectorAll('.end .name')]
      .filter((e) => e.getBoundingClientRect().height < 10 || e.textContent.includes('…')).length"""
    assert tab.js(names) == 0
    assert tab.js("return document.documentElement.scrollWidth") <= width
    assert tab.errors() == []


def test_a_name_too_long_for_its_box_does_not_run_into_the_rate(large: Fleet, tab: Browser) -> None:
    tab.open(large.url)
    tab.live()
    tab.until("rates", lambda: any(tab.texts(".end .sub")))
    overlap = """
      return [...document.querySelectorAll('.end')].filter((e) => {
        const [n, s] = ['.name', '.sub'].map((q) => e.querySelector(q).getBoundingClientRect());
        return s.width && s.left < n.right && s.top < n.bottom && n.top < s.bottom;
      }).map((e) => e.ariaLabel)"""
    assert tab.js(overlap) == []


def test_who_is_not_ready_is_told_with_the_reason(large: Fleet, tab: Browser) -> None:
    tab.open(large.url)
    tab.live()
    assert tab.js("return [...document.querySelectorAll('.end.bad')].map(e => e.dataset.key)") == [
        "prefill-7",
        "decode-7",
    ]
    assert "killed by SIGKILL" in tab.text("#problems")
    assert "99 of 100" in tab.text("#tiles")


def test_an_end_is_selected_by_arrow_keys_and_shows_its_links_alone(large: Fleet, tab: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    tab.open(large.url)
    tab.live()
    tab.until("links", lambda: tab.js("return document.querySelectorAll('.curves .flows').length") > 100)
    assert tab.js("return document.querySelectorAll('.end[tabindex=\"0\"]').length") == 1
    tab.js("document.querySelector('.end[tabindex=\"0\"]').focus()")
    tab.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert tab.focused().startswith("g prefill-2: ready, sends")
    tab.press(Keys.ENTER)
    assert tab.js("return document.querySelectorAll('.curves path').length") == 5
    assert tab.text("#selected h3") == "prefill-2"
    assert len(tab.texts("#selected .links li")) == 5
    assert tab.js("return document.querySelector('#selected a').href") == "http://127.0.0.1:9/"
    tab.press(Keys.ESCAPE)
    assert tab.js("return document.querySelector('#selected').hidden") is True


def test_a_large_fleet_is_accessible(large: Fleet, tab: Browser) -> None:
    tab.open(large.url)
    tab.live()
    assert tab.axe() == []


def test_the_page_asks_for_the_token_and_sends_it_as_a_header_only(tab: Browser) -> None:
    with fleet(1, http={"port": 0, "token": TOKEN}) as running:
        assert httpx.get(f"{running.url}/", trust_env=False).status_code == 200
        for path in ("/v1/events", "/status", "/v1/instances"):
            assert httpx.get(f"{running.url}{path}", trust_env=False).status_code == 401
        tab.open(running.url)
        tab.until("the question", lambda: tab.js("return document.querySelector('#token').open"))
        assert tab.errors() == []
        assert tab.texts(".tile") == []
        assert tab.axe() == []
        give = "document.querySelector('#token-value').value = arguments[0]; document.querySelector('#token-form').requestSubmit()"
        tab.js(give, "another")
        tab.until("the refusal", lambda: "does not take that token" in tab.text("#token-why"))
        tab.errors()  # the browser tells of the 401
        tab.js(give, TOKEN)
        tab.live()
        assert tab.text("#name") == "Bootstrap"
        urls = tab.js("return [location.href, ...performance.getEntriesByType('resource').map(e => e.name)]")
        assert not any(TOKEN in url for url in urls)
        assert tab.js("return [localStorage.length, document.cookie]") == [0, ""]
        tab.open(running.url)
        tab.live()  # the tab remembers it
        assert tab.errors() == []


def test_it_connects_again_when_the_daemon_is_back(tab: Browser) -> None:
    with held_ports(1) as [port]:
        with fleet(1, http={"port": port}) as running:
            tab.open(running.url)
            tab.live()
        tab.until("the loss", lambda: tab.text("#connection") == "not connected, trying again")
        assert tab.js("return document.body.classList.contains('stale')")
        with fleet(2, http={"port": port}):
            tab.live()
            tab.until("the new fleet", lambda: len(tab.texts(".end .name")) == 4)
