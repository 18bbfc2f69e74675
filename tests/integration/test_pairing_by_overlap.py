"""A conversation's next turn goes where its last one is, through real daemons: two of each role, two bootstraps over one Redis.

Every prompt is first paired while the instances that come first are busy, so that load alone would choose others afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kvbridge.cli.local_cluster import DaemonProcess, daemon_config, wait_all_ready
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
from kvbridge.tier.keys import Keys
from tests.helpers.cluster import START_S, eventually
from tests.helpers.conversation import PAGE, TIER, begin, compute, named, read, tokens_of
from tests.helpers.live_rooms import LiveCluster, all_free, ends, http, live_cluster, metric
from tests.helpers.redis_server import redis_server

POOL = {"full": 32, "swa": 12, "request": 6}
FIRST, SECOND = 4 * PAGE + 5, 6 * PAGE + 9
BIG = {"prompt_tokens": 24 * PAGE}
HTTP_CREATED = 201


@dataclass
class Fleet:
    """Two prefill and two decode instances, and engines attached to each."""

    live: LiveCluster
    bootstraps: list[DaemonProcess]
    nodes: dict[str, DaemonProcess]
    engines: dict[str, Any]

    def engine(self, instance: str) -> Any:
        if instance not in self.engines:
            kind = PrefillEngine if instance.startswith("prefill") else DecodeEngine
            self.engines[instance] = kind.attach(self.nodes[instance].runtime_dir)
        return self.engines[instance]

    def detach(self, instance: str) -> None:
        if engine := self.engines.pop(instance, None):
            engine.close()

    def keys(self, conversation: int, tokens: int) -> Keys:
        return self.engine("prefill-0").page_keys(tokens_of(conversation, tokens))

    def pair(self, conversation: int, tokens: int, replica: int = 0) -> dict[str, Any]:
        body = {"prompt_tokens": tokens, **named(self.keys(conversation, tokens))}

        def look() -> dict[str, Any] | None:
            answer = http("POST", self.bootstraps[replica], "/v1/requests", json=body)
            assert answer.status_code in {HTTP_CREATED, 503}, answer.text
            return answer.json() if answer.is_success else None

        return dict(eventually("a ticket", look))

    def cross(self, ticket: dict[str, Any], conversation: int, tokens: int) -> tuple[int, int]:
        """Take a paired room through its life, check every byte, and return what decode and prefill have held."""
        room, keys = ticket["room"], self.keys(conversation, tokens)
        sender, reader = (self.engine(ticket[side]["instance"]) for side in ("prefill", "decode"))
        begun = begin(sender, room, tokens, keys)
        compute(sender, begun, keys)
        claimed = read(reader, room, tokens, keys)
        reader.release(room)
        for side in ("prefill", "decode"):
            ends(self.nodes[ticket[side]["instance"]], room, "completed")
            all_free(self.nodes[ticket[side]["instance"]])
        return claimed.prefix_tokens, begun.computed_tokens

    @contextmanager
    def busy(self, number: int) -> Iterator[None]:
        """Most of the pages of the two instances of this number are a room's, and every bootstrap knows."""
        prefill, decode = (self.nodes[f"{role}-{number}"] for role in ("prefill", "decode"))
        answer = http("POST", prefill, "/v1/requests", json=BIG)
        assert answer.status_code == HTTP_CREATED, answer.text
        room, control = answer.json()["room"], prefill.endpoint().control
        assert control is not None
        answer = http("POST", decode, "/v1/requests", json={**BIG, "room": room, "prefill": [control.model_dump()]})
        assert answer.status_code == HTTP_CREATED, answer.text
        self.know(lambda one, free: (free < POOL["full"] / 2) == one.endswith(str(number)))
        yield
        for node in (decode, prefill):
            http("DELETE", node, f"/v1/requests/{room}")
        self.settled()

    def settled(self) -> None:
        """Every page of every node is available, and every bootstrap knows."""
        for node in self.nodes.values():
            all_free(node)
        self.know(lambda _, free: free == POOL["full"])

    def know(self, holds: Callable[[str, int], bool]) -> None:
        """Wait until every bootstrap says so of each instance and its available pages, with no room charged that has ended."""

        def look() -> bool:
            listings = [http("GET", bootstrap, "/v1/instances").json() for bootstrap in self.bootstraps]
            loads = [
                (one["instance"], one["nodes"][0]["load"]) for listing in listings for one in listing if one["ready"]
            ]
            return len(loads) == len(self.nodes) * len(self.bootstraps) and all(
                holds(instance, load["available_pages"]["full"])
                and (load["rooms"] > 0) == (load["available_pages"]["full"] < POOL["full"])
                for instance, load in loads
            )

        eventually("bootstrap knows how full all are", look)

    def first_turn(self, conversation: int) -> None:
        """Leave a prompt on the second instances of both roles."""
        with self.busy(0):
            ticket = self.pair(conversation, FIRST)
            assert sides(ticket) == ("prefill-1", "decode-1")
            assert self.cross(ticket, conversation, FIRST) == (0, 0)


def sides(ticket: dict[str, Any]) -> tuple[str, str]:
    return ticket["prefill"]["instance"], ticket["decode"]["instance"]


@contextmanager
def fleet(**bootstrap: Any) -> Iterator[Fleet]:
    settings: dict[str, Any] = {"prefill": TIER, "decode": TIER, "pages": POOL, "bootstrap": bootstrap}
    with live_cluster(wait=False, **settings) as live:
        cluster = live.cluster
        nodes = {"prefill-0": cluster.prefill, "decode-0": cluster.decode}
        for role, pools in (("prefill", {}), ("decode", {"host": {"pages": 64}})):
            name = f"{role}-1"
            node = DaemonProcess(role, name, cluster.folder / f"{role[0]}1")
            node.config = daemon_config(
                {"preset": "tiny-v4"},
                instance=name,
                runtime_dir=node.runtime_dir,
                transport="local",
                pools={"device": POOL, **pools},
                bootstrap={"url": cluster.bootstrap.url, "heartbeat_interval_s": 0.5},
                **TIER,
            )
            cluster.others.append(node)
            nodes[name] = node
            node.start()
        wait_all_ready(cluster.all(), timeout_s=START_S)
        running = Fleet(live, [cluster.bootstrap], nodes, {})
        try:
            yield running
            live.no_traceback()
        finally:
            for instance in list(running.engines):
                running.detach(instance)


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    with fleet() as found:
        yield found


def guesses(found: Fleet, outcome: str) -> list[float]:
    name, bootstrap = "kvbridge_pairing_prefixes_total", found.bootstraps[0]
    return [metric(bootstrap, name, role=role, outcome=outcome) for role in ("prefill", "decode")]


def test_the_second_turn_goes_where_the_first_one_is(running: Fleet) -> None:
    running.first_turn(1)
    before = guesses(running, "right")
    ticket = running.pair(1, SECOND)
    assert sides(ticket) == ("prefill-1", "decode-1")
    assert (ticket["prefix_tokens"], ticket["computed_tokens"]) == (4 * PAGE, 4 * PAGE)
    assert running.cross(ticket, 1, SECOND) == (4 * PAGE, 4 * PAGE)
    assert guesses(running, "right") == [count + 1 for count in before]
    running.settled()
    other = running.pair(2, SECOND)
    assert sides(other) == ("prefill-0", "decode-0"), "one that nobody has seen goes by load"
    assert running.cross(other, 2, SECOND) == (0, 0)
    running.settled()


def test_a_holder_that_is_much_fuller_is_passed_over(running: Fleet) -> None:
    running.first_turn(3)
    with running.busy(1):
        ticket = running.pair(3, SECOND)
        assert sides(ticket) == ("prefill-0", "decode-0")
        assert running.cross(ticket, 3, SECOND) == (0, 0)


def test_a_stale_guess_costs_the_prefix_and_no_byte(running: Fleet) -> None:
    """The first turn was paired, but ended before anything of it was written: nobody holds what was noted."""
    with running.busy(0):
        ticket = running.pair(4, FIRST)
        assert sides(ticket) == ("prefill-1", "decode-1")
        assert http("DELETE", running.bootstraps[0], f"/v1/requests/{ticket['room']}").status_code == 200
    before = guesses(running, "stale")
    ticket = running.pair(4, SECOND)
    assert sides(ticket) == ("prefill-1", "decode-1")
    assert (ticket["prefix_tokens"], ticket["computed_tokens"]) == (0, 0)
    assert running.cross(ticket, 4, SECOND) == (0, 0)
    assert guesses(running, "stale") == [count + 1 for count in before]
    running.settled()


def test_a_holder_that_was_killed_is_served_by_another_and_started_again_it_is_not_believed(running: Fleet) -> None:
    running.first_turn(5)
    running.detach("decode-1")
    node = running.nodes["decode-1"]
    node.kill()
    ticket = running.pair(5, SECOND)  # bootstrap may still know it; it refuses the connection then
    assert sides(ticket) == ("prefill-1", "decode-0")
    assert running.cross(ticket, 5, SECOND) == (0, 4 * PAGE)
    node.start()
    wait_all_ready([node], timeout_s=START_S)
    running.settled()
    again = running.pair(5, SECOND)
    assert sides(again) == ("prefill-1", "decode-0"), "decode-0 got it meanwhile"
    assert running.cross(again, 5, SECOND) == (6 * PAGE, 6 * PAGE)
    running.settled()


@pytest.mark.thorough
def test_replicas_over_one_redis_know_the_same() -> None:
    with redis_server() as server:
        directory = {"store": "redis", "redis_url": server.url, "namespace": "overlap", "expire_after_s": 8.0}
        with fleet(directory=directory) as found:
            second = DaemonProcess("bootstrap", "the second bootstrap", found.live.cluster.folder / "b2")
            second.config = dict(found.bootstraps[0].config)
            second.arguments = ("--endpoint-dir", str(second.runtime_dir))
            found.live.cluster.others.append(second)
            second.start()
            second.wait_ready()
            found.bootstraps.append(second)
            found.first_turn(1)
            ticket = found.pair(1, SECOND, replica=1)
            assert sides(ticket) == ("prefill-1", "decode-1")
            assert found.cross(ticket, 1, SECOND) == (4 * PAGE, 4 * PAGE)
