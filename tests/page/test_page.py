"""The status page in a real browser: of a pair of daemons and bootstrap while rooms go through, and of a fleet of 200 instances."""

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.helpers.cluster import eventually
from tests.helpers.conversation import MODEL, PAGE, Conversation
from tests.helpers.fleet import Fleet, fleet
from tests.helpers.live_rooms import LiveCluster, ends, http, live_cluster, status
from tests.helpers.local_servers import held_ports
from tests.integration.router.test_command import NOBODY, running
from tests.page.pictures import Browser, browser

pytestmark = pytest.mark.thorough

HOSTILE = "<img src=x onerror=alert(1)><b>gone</b>"
"""A reason that its client chose."""


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture
def tab(chromium: Browser) -> Iterator[Browser]:
    chromium.size(1280, 900)
    chromium.errors()
    yield chromium
    chromium.open("about:blank")


@dataclass
class Pair:
    """A cluster with a room in each situation that the page has to show."""

    live: LiveCluster
    cancelled: int
    waiting: int
    """Offered, and nobody begins it."""
    claimed: int

    def url(self, daemon: str) -> str:
        return (self.live.cluster.bootstrap if daemon == "bootstrap" else getattr(self.live, daemon)).url + "/"


def on_host(**more: int) -> dict[str, dict[str, object]]:
    """A node whose cached pages are copied to host memory."""
    return {"tier": {**MODEL, "host": {"pages": 8, **more}}}


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    patient = {"timeouts": {"begin_s": 600.0}}  # the room that nobody begins is to be there for all tests
    with live_cluster(prefill=on_host(checkpoint_pages=4) | patient, decode=on_host()) as live:
        live.cross(1000)
        for over in (0, 1):
            Conversation(live, 1).cross(3 * PAGE + over)
            eventually("prefill keeps it", lambda: status(live.prefill)["prefixes"]["checkpoints"] == 1)
        cancelled = live.pair(900)
        http("DELETE", live.decode, f"/v1/requests/{cancelled}", params={"reason": HOSTILE})
        ends(live.decode, cancelled, "aborted", "aborted")
        waiting, claimed = live.pair(700), live.pair(700)
        live.write(claimed, 700)
        live.begun[claimed].finish(metadata=b"x")
        live.read(claimed, 700)
        yield Pair(live, cancelled, waiting, claimed)
        live.claimed[claimed].release()
        http("DELETE", live.decode, f"/v1/requests/{waiting}")


def rooms_shown(tab: Browser) -> dict[str, str]:
    """The phase of each room in the list, in its order."""
    script = """
      return [...document.querySelectorAll('.rooms tbody tr')].map((r) => [r.querySelector('button').textContent, r.className])"""
    return dict(tab.js(script))


@pytest.mark.parametrize("daemon", ["decode", "prefill", "bootstrap"])
def test_it_shows_its_daemon_and_what_goes_between_the_instances(pair: Pair, tab: Browser, daemon: str) -> None:
    tab.open(pair.url(daemon))
    tab.live()
    name = "Bootstrap" if daemon == "bootstrap" else f"{daemon}-0 / node-0"
    assert tab.text("#name") == name
    assert tab.js("return document.title") == f"{name} · kvbridge"
    assert tab.text("#readiness") == "Ready"
    assert tab.texts(".end .name") == ["prefill-0", "decode-0"]

    def moves() -> bool:
        pair.live.cross(1000)
        return tab.js("return document.querySelector('.curves .flows') !== null")

    tab.until("a rate on the link", moves)
    assert any(unit in tab.text(".labels text") for unit in ("kB/s", "MB/s", "GB/s"))
    assert tab.errors() == []


def test_rooms_that_failed_come_first_then_the_slowest(pair: Pair, tab: Browser) -> None:
    tab.open(pair.url("decode"))
    tab.live()
    shown = rooms_shown(tab)
    order = list(shown)
    assert shown[str(pair.waiting)] == "offered"
    assert shown[str(pair.claimed)] == "claimed"
    assert shown[str(pair.cancelled)] == "aborted"
    assert order.index(str(pair.waiting)) < order.index(str(pair.claimed)) < order.index(str(pair.cancelled))
    assert order.index(str(pair.cancelled)) < list(shown.values()).index("completed")

    def counts() -> dict[str, int]:
        shown = zip(tab.texts(".phase .word"), tab.texts(".phase .amount"), strict=True)
        return {phase: int(amount) for phase, amount in shown if amount != "0"}

    # A page begins with what was told to the one before it, up to a second ago.
    tab.until("all rooms are counted", lambda: counts() == status(pair.live.decode)["rooms"])


def test_what_a_stranger_wrote_is_text(pair: Pair, tab: Browser) -> None:
    tab.open(pair.url("decode"))
    tab.live()
    assert HOSTILE in tab.text("#rooms")
    assert tab.js("return document.querySelectorAll('#problems img, #rooms img').length") == 0
    assert tab.errors() == []


def test_a_room_opens_and_closes_by_keyboard_alone(pair: Pair, tab: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    tab.open(pair.url("decode"))
    tab.live()
    passed = []
    for _ in range(60):
        tab.press(Keys.TAB)
        passed.append(tab.focused())
        outlined = """
          const e = document.activeElement;
          return getComputedStyle(e).outlineStyle !== 'none' || e.closest('.end') !== null"""
        assert tab.js(outlined), f"no visible focus on {passed[-1]}"
        if passed[-1] == f"button {pair.claimed}":
            break
    else:
        raise AssertionError(f"Tab never reaches the room: {passed}")
    assert passed[0] == "a Skip to the figures"
    assert any(step.startswith("g ") and "prefill-0" in step for step in passed), passed
    tab.press(Keys.ENTER)
    timeline = tab.until("the timeline", lambda: tab.texts("#room .timeline .what"))
    assert timeline[:2] == ["admitted", "offered"]
    assert timeline[-1] == "claimed"
    assert tab.js("return document.querySelector('.gantt svg').ariaLabel").startswith("Time in each phase: admitted")
    tab.press(Keys.ESCAPE)
    assert tab.js("return document.querySelector('#room').open") is False
    assert tab.focused() == f"button {pair.claimed}"
    assert tab.errors() == []


def test_bootstrap_asks_both_ends_of_a_room(pair: Pair, tab: Browser) -> None:
    ticket = pair.live.ticket(200)
    tab.open(pair.url("bootstrap"))
    tab.live()
    find = "const i = document.querySelector('#find-room'); i.value = arguments[0]; i.form.requestSubmit()"
    tab.js(find, str(ticket["room"]))
    tab.until("both ends", lambda: len(tab.texts("#room h3")) == 2)
    assert "from prefill-0 to decode-0" in tab.text("#room")
    http("DELETE", pair.live.cluster.bootstrap, f"/v1/requests/{ticket['room']}")
    tab.js("document.querySelector('#room').close()")
    tab.errors()
    tab.js(find, "5")
    tab.until("what bootstrap said", lambda: "room 5" in tab.text("#room .notice"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("daemon", ["decode", "bootstrap"])
def test_it_is_accessible(pair: Pair, tab: Browser, daemon: str, *, dark: bool) -> None:
    tab.size(1280, 900, dark=dark)
    tab.open(pair.url(daemon))
    tab.live()
    assert tab.js("return getComputedStyle(document.body).backgroundColor") == (
        "rgb(15, 21, 28)" if dark else "rgb(244, 246, 249)"
    )
    assert tab.axe() == []
    if daemon == "decode":
        tab.js(
            "[...document.querySelectorAll('button.open')].find(e => e.textContent === arguments[0]).click()",
            str(pair.cancelled),
        )
        tab.until("the timeline", lambda: tab.texts("#room .timeline .what"))
        assert tab.axe() == []


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


def test_the_page_asks_for_the_token_and_sends_it_as_a_header_only(tab: Browser) -> None:
    with fleet(1, http={"port": 0, "token": TOKEN}) as running:
        assert httpx.get(f"{running.url}/", trust_env=False).status_code == 200
        for path in ("/v1/page", "/status", "/v1/instances"):
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


def test_bootstrap_shows_who_has_gone_and_why_requests_are_refused(tab: Browser) -> None:
    with fleet(2, directory={"expire_after_s": 1.5}) as running:
        for _ in range(3):
            answer = httpx.post(f"{running.url}/v1/requests", json={"prompt_tokens": 10}, trust_env=False)
            assert answer.status_code == 503
        running.silent.add("prefill-1")
        tab.open(running.url)
        tab.live()
        tab.until("the loss", lambda: "node lost" in tab.text("#problems"))
        assert "prefill-1/node-0" in tab.text("#problems")
        assert "it was silent for 1.5 s (directory.expire_after_s)" in tab.text("#problems")
        assert "3 \N{MULTIPLICATION SIGN} request refused: not_ready" in tab.text("#problems")
        assert "100 %" in tab.texts(".tile .value")
        assert "1 of 2" in tab.texts(".tile .value")
        assert "gone for" in tab.text("svg .end.bad .sub")
        assert tab.axe() == []
        assert tab.errors() == []


def test_a_node_without_an_engine_says_so(tab: Browser) -> None:
    with live_cluster(decode={"admission": {"needs_engine": True}}, wait=False) as live:

        def why() -> str:
            answer = http("GET", live.decode, "/ready")
            return "; ".join(answer.json()["reasons"]) if answer.status_code == 503 else ""

        eventually("the reason", lambda: why() == "no engine is attached to pp0.tp0 (admission.needs_engine)")
        for daemon, word in ((live.decode, "Not ready"), (live.prefill, "Ready, no engine")):
            tab.open(daemon.url)
            tab.live()
            tab.until("its colour", lambda word=word: tab.text("#readiness") == word)
            assert "no engine is attached" in tab.text("#notice")
            assert "no engine" in tab.text("#about")
        assert live.reader
        eventually("decode is ready", lambda: http("GET", live.decode, "/ready").status_code == 200)


def test_a_router_shows_its_servers_and_what_has_failed(tab: Browser) -> None:
    with running("--prefill", NOBODY, "--decode", NOBODY) as (_, url):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=30, trust_env=False)
        assert answer.status_code == 503
        tab.open(url)
        tab.live()
        assert tab.text("#name") == "Router"
        assert tab.text("#readiness") == "Not ready"
        assert tab.texts(".end .name") == ["127.0.0.1:9"] * 2
        tab.until("the failures", lambda: "request failed" in tab.text("#problems"))
        assert "0 of 1" in tab.texts(".tile .value")
        assert "measuring" not in tab.text("#topology")
        tab.size(390)
        assert tab.js("return document.documentElement.scrollWidth") <= 390
        assert tab.axe() == []
        assert tab.errors() == []
