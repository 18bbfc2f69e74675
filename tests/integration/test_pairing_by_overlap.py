"""A conversation's next turn goes where its last one is, through real daemons: two of each role.

Every prompt is first paired while the instances that come first are busy, so that load alone would choose others afterwards.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvbridge.cli.local_cluster import DaemonProcess, daemon_config, wait_all_ready
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
from tests.helpers.cluster import START_S, eventually
from tests.helpers.conversation import PAGE, TIER, begin, compute, named, read, tokens_of
from tests.helpers.live_rooms import LiveCluster, all_free, ends, http, live_cluster

POOL = {"full": 32, "swa": 12, "request": 6}
FIRST, SECOND = 4 * PAGE + 5, 6 * PAGE + 9
BIG = {"prompt_tokens": 24 * PAGE}


@dataclass
class Fleet:
    live: LiveCluster
    nodes: dict[str, DaemonProcess]
    engines: dict[str, Any] = field(default_factory=dict)

    def engine(self, instance: str) -> Any:
        if instance not in self.engines:
            kind = PrefillEngine if instance.startswith("prefill") else DecodeEngine
            self.engines[instance] = kind.attach(self.nodes[instance].runtime_dir)
        return self.engines[instance]

    def detach(self, instance: str) -> None:
        if engine := self.engines.pop(instance, None):
            engine.close()

    def pair(self, conversation: int, tokens: int) -> dict[str, Any]:
        keys = self.engine("prefill-0").page_keys(tokens_of(conversation, tokens))
        return self.live.ticket(tokens, **named(keys))

    def cross(self, ticket: dict[str, Any], conversation: int, tokens: int) -> tuple[int, int]:
        """Take a paired room through its life, check every byte, and return what decode and prefill have held."""
        room, (prefill, decode) = ticket["room"], sides(ticket)
        sender, reader = self.engine(prefill), self.engine(decode)
        keys = sender.page_keys(tokens_of(conversation, tokens))
        begun = begin(sender, room, tokens, keys)
        compute(sender, begun, keys)
        claimed = read(reader, room, tokens, keys)
        claimed.release()
        for instance in (prefill, decode):
            ends(self.nodes[instance], room, "completed")
        self.settled()
        return claimed.held_by_decode, begun.held_by_prefill

    def settled(self, busy: str = "") -> None:
        """Wait until bootstrap knows of every node how full it is: all pages are free, but where the name ends with `busy`."""
        for name, node in self.nodes.items():
            if not busy or not name.endswith(busy):
                all_free(node)

        def look() -> bool:
            listed = http("GET", self.live.cluster.bootstrap, "/v1/instances").json()
            loads = {one["instance"]: one["nodes"][0]["load"] for one in listed if one["ready"]}
            return len(loads) == len(self.nodes) and all(
                (load["available_pages"]["full"] < POOL["full"] / 2 and load["rooms"] > 0)
                if busy and name.endswith(busy)
                else (load["available_pages"]["full"] == POOL["full"] and not load["rooms"])
                for name, load in loads.items()
            )

        eventually("bootstrap knows how full all are", look)

    @contextmanager
    def first_instances_busy(self) -> Iterator[None]:
        """Most of the pages of the first two instances are a room's."""
        room = self.live.pair(BIG["prompt_tokens"])
        self.settled(busy="-0")
        yield
        for node in (self.live.decode, self.live.prefill):
            http("DELETE", node, f"/v1/requests/{room}")
        self.settled()

    def first_turn(self, conversation: int) -> None:
        """Leave a prompt on the second instances of both roles."""
        with self.first_instances_busy():
            ticket = self.pair(conversation, FIRST)
            assert sides(ticket) == ("prefill-1", "decode-1")
            room, keys = ticket["room"], self.engine("prefill-1").page_keys(tokens_of(conversation, FIRST))
            begun = begin(self.engine("prefill-1"), room, FIRST, keys)
            compute(self.engine("prefill-1"), begun, keys)
            read(self.engine("decode-1"), room, FIRST, keys).release()


def sides(ticket: dict[str, Any]) -> tuple[str, str]:
    return ticket["prefill"]["instance"], ticket["decode"]["instance"]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with live_cluster(wait=False, prefill=TIER, decode=TIER, pages=POOL) as live:
        cluster = live.cluster
        nodes = {"prefill-0": cluster.prefill, "decode-0": cluster.decode}
        for role, pools in (("prefill", {}), ("decode", {"host": {"pages": 64}})):
            name = f"{role}-1"
            node = nodes[name] = DaemonProcess(role, name, cluster.folder / f"{role[0]}1")
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
            node.start()
        wait_all_ready(cluster.all(), timeout_s=START_S)
        with ExitStack() as stack:
            running = Fleet(live, nodes)
            for name in nodes:
                stack.callback(running.detach, name)
            yield running
            live.no_traceback()


def test_the_second_turn_goes_where_the_first_one_is(fleet: Fleet) -> None:
    fleet.first_turn(1)
    ticket = fleet.pair(1, SECOND)
    assert sides(ticket) == ("prefill-1", "decode-1")
    assert (ticket["prefix_tokens"], ticket["computed_tokens"]) == (4 * PAGE, 4 * PAGE)
    assert fleet.cross(ticket, 1, SECOND) == (4 * PAGE, 4 * PAGE)
    other = fleet.pair(2, SECOND)
    assert sides(other) == ("prefill-0", "decode-0"), "one that nobody has seen goes by load"
    assert fleet.cross(other, 2, SECOND) == (0, 0)


def test_a_stale_guess_costs_the_prefix_and_no_byte(fleet: Fleet) -> None:
    """The first turn was paired, but ended before anything of it was written: nobody holds what was noted."""
    with fleet.first_instances_busy():
        ticket = fleet.pair(4, FIRST)
        assert sides(ticket) == ("prefill-1", "decode-1")
        assert http("DELETE", fleet.live.cluster.bootstrap, f"/v1/requests/{ticket['room']}").status_code == 200
    ticket = fleet.pair(4, SECOND)
    assert sides(ticket) == ("prefill-1", "decode-1")
    assert (ticket["prefix_tokens"], ticket["computed_tokens"]) == (0, 0)
    assert fleet.cross(ticket, 4, SECOND) == (0, 0)
