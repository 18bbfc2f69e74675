"""The links of a node to its peers: how many there are, when they end, and what looking at them takes."""

import asyncio
import contextlib
import itertools
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbridge.config.schema import DecodeConfig
from kvbridge.control.link import PeerCallbacks, PeerSettings
from kvbridge.control.peers import PeerIdentity, PeerServer
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError, CapacityError, FingerprintMismatchError, NotReadyError, PeerError
from kvbridge.core.ids import Role
from kvbridge.core.wire.engine_messages import Accepted, Pages, Refused
from kvbridge.core.wire.messages import MAX_INSTANCE_NODES, Hello, PeerMessage, Rejected, Welcome
from kvbridge.daemon.decode import PrefillLinks
from kvbridge.daemon.node import NodeDaemon
from kvbridge.node.decode.prefill_nodes import LINKS_A_TURN, PrefillNodes
from kvbridge.node.engines import Engines
from kvbridge.telemetry.facts import EventStream
from tests.helpers.local_servers import held_ports
from tests.helpers.node_bench import FakeServer

WAIT_S = 20.0


def address(number: int) -> PeerAddress:
    return PeerAddress(endpoint=f"tcp://127.0.0.1:{number}")


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Prefill:
    """A prefill node's control socket, which refuses whoever says hello, or welcomes him."""

    def __init__(self, number: int) -> None:
        self.incarnation = f"{number:016x}"
        self.welcomes = False
        self.resets: list[str] = []
        """Decode nodes whose conversation began anew: all that they had here is void then."""
        callbacks = PeerCallbacks(self._answer, on_reset=self.resets.append)
        self.server = PeerServer(PeerIdentity(self.incarnation), callbacks, "tcp://127.0.0.1:0")
        self.address = PeerAddress(endpoint=self.server.endpoint)

    def _answer(self, peer: str, message: PeerMessage) -> None:
        if isinstance(message, Hello) and self.welcomes:
            self.server.send(
                peer, Welcome(instance="p", node="n", incarnation=self.incarnation, pp_size=1, tp_size=1, ranks=())
            )
        elif isinstance(message, Hello):
            self.server.send(peer, Rejected(code="fingerprint_mismatch", message="another model"))


class Decode:
    """The links of a decode node, and the nodes that it knows behind them."""

    def __init__(self, settings: PeerSettings) -> None:
        config = DecodeConfig.model_validate(
            {
                "instance": "d",
                "model": {"preset": "tiny-v4"},
                "pools": {"device": {"full": 4, "swa": 4, "request": 1}, "host": {"pages": 4}},
                "runtime_dir": "/tmp/kvbridge-test-links",  # short, as a path of sockets has to be; nothing is made there
            }
        )
        node = NodeDaemon(config, Role.DECODE)
        self.links = PrefillLinks(node)
        self.nodes = PrefillNodes(node.description, self.links, node.events)
        self.hears(lambda: None)
        self.links.serve(self.nodes, None, SimpleNamespace(tick=None, status=None))
        self.links.open(PeerIdentity(node.identity.incarnation))
        self.links.settings = settings

    def hears(self, nodes_changed: Callable[[], None]) -> None:
        self.nodes.rooms = SimpleNamespace(nodes_changed=nodes_changed, peer_gone=lambda _peer, _reason: None)


@pytest.fixture
async def opened() -> AsyncIterator[Callable[[PeerSettings], Decode]]:
    async with contextlib.AsyncExitStack() as stack:

        def make(settings: PeerSettings) -> Decode:
            node = Decode(settings)
            stack.push_async_callback(node.links.close, 0.01)
            return node

        yield make


async def answer_of(node: Decode, where: PeerAddress) -> Welcome | BridgeError:
    """Return the node, or the error, that a room gets that waits for it."""
    answer: asyncio.Queue[Welcome | BridgeError] = asyncio.Queue()

    def look() -> None:
        try:
            found = node.nodes.known_node(where)
        except BridgeError as error:
            answer.put_nowait(error)
        else:
            if found is not None:
                answer.put_nowait(found)

    node.hears(look)
    look()
    return await asyncio.wait_for(answer.get(), WAIT_S)


async def test_links_are_bounded_and_one_that_is_given_up_makes_room(opened):
    node = opened(PeerSettings(max_connections=2))
    for number in (1, 2):
        assert node.nodes.known_node(address(number)) is None
    with pytest.raises(CapacityError, match=r"2 links to prefill addresses.*control\.max_connections"):
        node.nodes.known_node(address(3))
    node.nodes.lost(address(1), "silent")
    assert node.nodes.known_node(address(3)) is None


async def test_many_links_are_opened_a_few_a_turn(opened):
    """Each link takes the loop milliseconds, so the node does other work in between."""
    node = opened(PeerSettings())
    addresses = [address(number) for number in range(1, 1 + MAX_INSTANCE_NODES)]
    assert [node.nodes.known_node(each) for each in addresses] == [None] * MAX_INSTANCE_NODES
    had = [0]
    while had[-1] < MAX_INSTANCE_NODES:
        had.append(sum(each in node.links for each in addresses))
        assert len(had) < 100
        await asyncio.sleep(0)
    assert max(after - before for before, after in itertools.pairwise(had)) <= LINKS_A_TURN


async def test_wrong_addresses_do_not_take_the_links_of_nodes_that_have_answered(opened):
    """An honest room needs a node that is not linked now, while somebody names addresses where nobody answers."""
    node = opened(PeerSettings(max_connections=8))
    honest = Prefill(1)
    honest.welcomes = True
    assert isinstance(await answer_of(node, honest.address), Welcome)
    node.nodes.lost(honest.address, "silent")
    assert honest.address not in node.links
    taken = []
    for number in range(1, 20):
        with contextlib.suppress(CapacityError):
            node.nodes.known_node(address(number))
            taken.append(number)
        await asyncio.sleep(0)
    assert len(taken) == 6
    assert isinstance(await answer_of(node, honest.address), Welcome)
    honest.server.close()


@pytest.mark.outside
async def test_a_room_does_not_wait_for_a_node_where_nobody_listens(opened):
    node = opened(PeerSettings())
    with held_ports(1) as (port,):
        nobody = PeerAddress(endpoint=f"tcp://127.0.0.1:{port}")
        answer = await answer_of(node, nobody)
        assert isinstance(answer, PeerError)
        assert re.search(
            rf"{port} cannot be reached: nobody listens there .*timeouts\.control_heartbeat_s", str(answer)
        )
        assert nobody not in node.links
        assert node.nodes.known_node(nobody) is None, "the next room says hello again"


async def test_a_link_to_a_node_that_refuses_is_closed_and_it_can_be_met_later(opened):
    node = opened(PeerSettings())
    first, *others = [Prefill(number) for number in range(12)]
    refused = await answer_of(node, first.address)
    assert isinstance(refused, FingerprintMismatchError)
    assert first.address not in node.links
    before = open_descriptors()  # ZeroMQ has made its thread by now
    for each in others:
        assert isinstance(await answer_of(node, each.address), FingerprintMismatchError)
    assert not any(each.address in node.links for each in others)
    async with asyncio.timeout(WAIT_S):
        while open_descriptors() > before + 5:  # noqa: ASYNC110 - ZeroMQ closes in its own time; one may be under way
            await asyncio.sleep(0.01)
    first.welcomes = True
    found = await answer_of(node, first.address)
    assert isinstance(found, Welcome)
    assert found.incarnation == first.incarnation
    node.links.watch()
    assert list(node.nodes._known) == [first.address]
    for each in (first, *others):
        each.server.close()


async def test_two_addresses_of_a_node_are_one_link_and_neither_voids_what_came_by_the_other(opened):
    """A host name and its address: two links of one incarnation would reset each other for ever."""
    node, prefill = opened(PeerSettings()), Prefill(1)
    prefill.welcomes = True
    by_name = PeerAddress(endpoint=prefill.address.endpoint.replace("127.0.0.1", "localhost"))
    for where in (prefill.address, by_name, prefill.address, by_name):
        found = await answer_of(node, where)
        assert isinstance(found, Welcome)
        assert found.incarnation == prefill.incarnation
    assert prefill.resets == []
    assert len(prefill.server.peers) == 1
    assert list(node.nodes._known) == [prefill.address]
    assert by_name not in node.links
    prefill.server.close()
    node.nodes.lost(prefill.address, "silent")
    assert node.nodes.known_node(by_name) is None, "the other address is asked anew, and may lead elsewhere by then"
    assert list(node.nodes._known) == [by_name]


async def test_a_node_that_is_lost_while_links_end_does_not_keep_the_others_open(opened):
    """Messages that come during the wait for acknowledgements close links, too."""
    node = opened(PeerSettings())
    for number in (1, 2, 3):
        assert node.nodes.known_node(address(number)) is None  # each has a Hello that nobody acknowledges
    ending = asyncio.create_task(node.links.close(0.2))
    await asyncio.sleep(0)  # the task waits from now on
    node.nodes.lost(address(1), "silent")
    async with asyncio.timeout(WAIT_S):
        await ending
    assert not any(address(number) in node.links for number in (1, 2, 3))
    with pytest.raises(NotReadyError, match="starting or ending"):
        node.links.connect(address(4))


async def test_an_engine_is_told_that_its_answer_does_not_fit_into_a_frame():
    engines = Engines((), EventStream(), settle_s=0)
    engines._server = server = FakeServer()
    engines.send("engine", Pages(call=7, room=1, generation=1, prompt_tokens=1, tables=()))
    [(engine, refused)] = server.sent
    assert isinstance(refused, Refused)
    assert (engine, refused.call, refused.code) == ("engine", 7, "invalid_input")
    assert "3145728" in refused.message
    engines.send("engine", Accepted(call=8))
    assert server.sent[-1] == ("engine", Accepted(call=8))
