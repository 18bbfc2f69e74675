"""Rooms and figures of running daemons with an engine attached to each; `serves` asks whether the next good room still crosses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import IndexSpace
from kvbridge.core.plan.operations import Section
from kvbridge.engine import DecodeEngine, DecodeRoom, PrefillEngine, PrefillRoom
from tests.helpers import synthetic
from tests.helpers.cluster import Cluster, DaemonProcess, cluster, eventually
from tests.helpers.rank_harness import Case

CALL_S = 20.0
FREE_S = 20.0
UNDER_WAY = ("admitted", "offered", "transferring", "committed", "claimed")
Headers = dict[str, str]


def http(
    method: str, daemon: DaemonProcess, path: str, *, headers: Headers | None = None, **more: Any
) -> httpx.Response:
    # Nothing here speaks TLS, and loading its certificates would take longer than the call.
    options = {"timeout": CALL_S, "trust_env": False, "verify": False}
    return httpx.request(method, f"{daemon.url}{path}", headers=headers, **options, **more)


def control_of(daemon: DaemonProcess) -> dict[str, str]:
    found = daemon.endpoint().control
    assert found is not None
    return found.model_dump()


def reserve(daemon: DaemonProcess, body: dict[str, Any], headers: Headers | None = None) -> int:
    answer = http("POST", daemon, "/v1/requests", json=body, headers=headers)
    assert answer.status_code == 201, answer.text
    return int(answer.json()["room"])


def status(daemon: DaemonProcess, headers: Headers | None = None) -> dict[str, Any]:
    answer = http("GET", daemon, "/status", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def metric(daemon: DaemonProcess, name: str, *, headers: Headers | None = None, **labels: str) -> float:
    answer = http("GET", daemon, "/metrics", headers=headers)
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    return 0.0


def frames_refused(daemon: DaemonProcess, reason: str, headers: Headers | None = None) -> float:
    return metric(daemon, "kvbridge_control_frames_refused_total", reason=reason, headers=headers)


@contextmanager
def refuses(daemon: DaemonProcess, reason: str, times: int = 1, headers: Headers | None = None) -> Iterator[None]:
    """See that the block counts as that many refused frames."""
    before = frames_refused(daemon, reason, headers)
    yield
    eventually(f"{times} frames refused as {reason}", lambda: frames_refused(daemon, reason, headers) - before >= times)
    assert frames_refused(daemon, reason, headers) - before == times


def busy_pages(daemon: DaemonProcess, headers: Headers | None = None) -> dict[str, dict[str, int]]:
    """The pages of spaces of which somebody has or reads some, by state; empty when every page is free, or cached and not read."""
    found = status(daemon, headers)
    pools, available = found["pools"], found["available_pages"]
    return {
        space: {state: count for state, count in states.items() if count and state != "free"}
        for space, states in pools.items()
        if sum(states.values()) != available[space]
    }


def all_free(daemon: DaemonProcess, headers: Headers | None = None) -> None:
    last: list[object] = []

    def look() -> bool:
        last[:] = [busy_pages(daemon, headers)]
        return not last[0]

    try:
        eventually(f"all pages of {daemon.name} free", look, FREE_S)
    except AssertionError as error:
        raise AssertionError(f"{error}; busy: {last}; log:\n{daemon.log(5)}") from None


def report(daemon: DaemonProcess, room: int, headers: Headers | None = None) -> dict[str, Any]:
    answer = http("GET", daemon, f"/v1/requests/{room}", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ends(daemon: DaemonProcess, room: int, state: str, code: str = "", headers: Headers | None = None) -> str:
    def look() -> dict[str, Any] | None:
        answer = http("GET", daemon, f"/v1/requests/{room}?wait=15", headers=headers)
        assert answer.status_code == 200, answer.text
        return None if answer.json()["state"] in UNDER_WAY else answer.json()

    found = eventually(f"the end of room {room}", look)
    assert (found["state"], found["reason_code"]) == (state, code), found
    return str(found["reason"])


@dataclass
class LiveCluster:
    """A cluster and its engines. Engines attach when they are first asked for, and again after `detach`."""

    cluster: Cluster
    headers: Headers = field(default_factory=dict)
    """Sent to the two nodes, and to bootstrap unless it has a token of its own."""
    bootstrap_headers: Headers = field(default_factory=dict)
    begun: dict[int, PrefillRoom] = field(default_factory=dict)
    claimed: dict[int, DecodeRoom] = field(default_factory=dict)
    _prefill: PrefillEngine | None = None
    _decode: DecodeEngine | None = None

    @property
    def prefill(self) -> DaemonProcess:
        return self.cluster.prefill

    @property
    def decode(self) -> DaemonProcess:
        return self.cluster.decode

    @property
    def nodes(self) -> tuple[DaemonProcess, DaemonProcess]:
        return self.prefill, self.decode

    @property
    def sender(self) -> PrefillEngine:
        if self._prefill is None:
            self._prefill = PrefillEngine.attach(self.prefill.runtime_dir)
        return self._prefill

    @property
    def reader(self) -> DecodeEngine:
        if self._decode is None:
            self._decode = DecodeEngine.attach(self.decode.runtime_dir)
        return self._decode

    def detach(self) -> None:
        for engine in (self._prefill, self._decode):
            if engine is not None:
                engine.close()
        self._prefill = self._decode = None

    def pair(self, prompt_tokens: int) -> int:
        """Reserve a room on both sides, without asking bootstrap; returns its id."""
        room = reserve(self.prefill, {"prompt_tokens": prompt_tokens}, self.headers)
        return self.admit_on_decode(prompt_tokens, room=room)

    def ticket(self, prompt_tokens: int, **more: Any) -> dict[str, Any]:
        """Ask bootstrap for a pair, again while its knowledge of free pages is behind; returns the ticket."""
        body, headers = {"prompt_tokens": prompt_tokens, **more}, self.bootstrap_headers or self.headers

        def look() -> dict[str, Any] | None:
            answer = http("POST", self.cluster.bootstrap, "/v1/requests", json=body, headers=headers)
            assert answer.status_code in {201, 503}, answer.text
            return answer.json() if answer.is_success else None

        return dict(eventually("a ticket", look))

    @property
    def address(self) -> dict[str, str]:
        return control_of(self.prefill)

    @property
    def control(self) -> str:
        return self.address["endpoint"]

    def admit_on_decode(self, prompt_tokens: int, **more: Any) -> int:
        """Reserve a room on the decode side alone, to be written by the prefill daemon; returns its id."""
        body = {"prompt_tokens": prompt_tokens, "prefill": [self.address], **more}
        return reserve(self.decode, body, self.headers)

    def write(self, room: int, tokens: int, start: int = 0, stop: int | None = None) -> None:
        """Begin a room (at its start), and fill and publish some of it."""
        stop = tokens if stop is None else stop
        if start == 0:
            self.begun[room] = self.sender.begin(room, prompt_tokens=tokens)
        fill(self.sender, self.begun[room], start, stop)
        self.begun[room].publish(stop)

    def read(self, room: int, tokens: int) -> DecodeRoom:
        claimed = self.claimed[room] = self.reader.claim(room, timeout_s=CALL_S)
        assert claimed.prompt_tokens == tokens
        check_rows(self.reader, claimed)
        return claimed

    def cross(self, tokens: int = 1000, room: int | None = None) -> int:
        room = self.pair(tokens) if room is None else room
        assert self.reader is not None  # attached before the commit is told
        self.write(room, tokens)
        self.begun[room].finish(metadata=b"first token")
        claimed = self.read(room, tokens)
        assert set(claimed.metadata.values()) == {b"first token"}
        claimed.release()
        return room

    def take(self, daemon: DaemonProcess, full_pages: int) -> None:
        """Have a room take so many pages of one node and end unwritten: what is cached on those pages is evicted."""
        tokens = full_pages * self.sender.geometry.tokens_per_page
        room = (
            self.admit_on_decode(tokens)
            if daemon is self.decode
            else reserve(daemon, {"prompt_tokens": tokens}, self.headers)
        )
        assert http("DELETE", daemon, f"/v1/requests/{room}", headers=self.headers).status_code == 200
        ends(daemon, room, "aborted", "aborted", headers=self.headers)
        all_free(daemon, self.headers)

    def overwrite(self, full_pages: int) -> None:
        """Have a request that shares nothing write so many pages of each device, and spoil all windows and states."""
        self.cross(full_pages * self.sender.geometry.tokens_per_page)
        for engine in (self.sender, self.reader):
            for views in engine.views.values():
                for part in views.geometry.components:
                    for layer in views.layers(part.kind) if part.space is IndexSpace.SWA else ():
                        view = views.region(part.kind, layer, space=part.space)
                        for page_id in range(view.region.page_count):
                            view.page(page_id).fill_(0xA5)

    def end_rooms(self) -> None:
        self.detach()
        for daemon in (self.prefill, self.decode):
            with suppress(httpx.HTTPError, BridgeError):
                query = {"state": list(UNDER_WAY), "limit": 200}
                listed = http("GET", daemon, "/v1/requests", params=query, headers=self.headers)
                for room in listed.json()["rooms"]:
                    http("DELETE", daemon, f"/v1/requests/{room['room']}", headers=self.headers)

    def no_traceback(self) -> None:
        for daemon in self.cluster.all():
            assert "Traceback" not in daemon.log_path.read_text(), f"{daemon.name}:\n{daemon.log(40)}"

    def serves(self) -> None:
        for daemon in (self.prefill, self.decode):
            all_free(daemon, self.headers)
            assert http("GET", daemon, "/ready").status_code == 200, http("GET", daemon, "/ready").text
        self.cross()
        for daemon in (self.prefill, self.decode):
            all_free(daemon, self.headers)


@contextmanager
def live_cluster(*, model: str = "tiny-v4", **settings: Any) -> Iterator[LiveCluster]:
    """A running cluster over the local transport; ended, and its daemons' exit codes looked at, afterwards."""
    with cluster({"preset": model}, **settings) as started:
        live = LiveCluster(started)
        try:
            yield live
        finally:
            live.detach()


def raises_code(code: str, call: Callable[[], object]) -> str:
    with pytest.raises(BridgeError) as caught:
        call()
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"
    return str(caught.value)


def bearer(token: str) -> Headers:
    return {"Authorization": f"Bearer {token}"}


FULL_PAGES, WINDOW_PAGES, REQUEST_PAGES, HOST_PAGES = 64, 24, 8, 12
EARLY_OFFER_S = 6.0
"""Rooms that are on decode alone end after this: long enough for what tests do with them on a busy machine."""
MEET_S = 5.0
DELIVERY_S = 8.0


@contextmanager
def shared_cluster() -> Iterator[LiveCluster]:
    """A running cluster; afterwards nothing may have escaped to a daemon's loop."""
    delivery = {"control_resend_s": 0.2, "control_delivery_s": DELIVERY_S}
    with live_cluster(
        prefill={"timeouts": {"early_offer_s": EARLY_OFFER_S, **delivery}},
        decode={"timeouts": {"handshake_s": MEET_S, **delivery}},
        pages={"full": FULL_PAGES, "swa": WINDOW_PAGES, "request": REQUEST_PAGES},
        host_pages=HOST_PAGES,
    ) as running:
        running.serves()  # the two nodes have met, whichever test is the first
        running.detach()
        yield running
        running.no_traceback()


CLAIM_S = 30.0


@contextmanager
def nodes(prefill: dict[str, Any], decode: dict[str, Any], **more: Any) -> Iterator[Cluster]:
    """Daemons over the `local` transport; what they said is shown when a test fails."""
    with cluster({"preset": "tiny-v4"}, transport="local", prefill=prefill, decode=decode, **more) as running:
        try:
            yield running
        except BaseException as error:
            for daemon in (running.prefill, running.decode):
                error.add_note(f"{daemon.name}:\n{daemon.log(30)}")
            raise


def fill(engine: PrefillEngine, begun: PrefillRoom, start: int = 0, stop: int | None = None) -> None:
    """Write rows of a begun room, all of them unless told, and tell nobody."""
    stop = begun.prompt_tokens if stop is None else stop
    section = Section(prompt_tokens=begun.prompt_tokens, start_token=start, stop_token=stop)
    for views in engine.views.values():
        synthetic.fill(views, room=begun.id, tables=begun.tables, section=section)


def write(engine: PrefillEngine, room: int, case: Case, begun: PrefillRoom | None = None) -> None:
    begun = begun or engine.begin(room, prompt_tokens=case.tokens)
    for section in case.sections(range(engine.geometry.layer_count)):
        for views in engine.views.values():
            synthetic.fill(views, room=room, tables=begun.tables, section=section)
        begun.publish(section.stop_token, layers=section.layers)
    begun.finish(metadata=b"first token")


def check_rows(engine: DecodeEngine, room: DecodeRoom) -> None:
    for rank, views in engine.views.items():
        wrong = synthetic.compare(views, room=room.id, tables=room.tables, tokens=room.prompt_tokens).mismatches
        assert not wrong, f"rank {rank}: " + "; ".join(map(str, wrong))


def cross(running: Cluster, sender: PrefillEngine, reader: DecodeEngine, case: Case) -> DecodeRoom:
    room = running.pair(case.tokens, max_new_tokens=10)["room"]
    write(sender, room, case)
    claimed = reader.claim(room, timeout_s=CLAIM_S)
    check_rows(reader, claimed)
    assert set(claimed.metadata.values()) == {b"first token"}
    return claimed
