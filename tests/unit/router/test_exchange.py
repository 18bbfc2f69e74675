"""A request's way, with servers that do what the test says, in any order; which server is next, and how the servers are."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvbridge.config.schema import DispatchOrder, RouterConfig, RouterTimeouts
from kvbridge.core.errors import CapacityError, DeadlineError, NotReadyError, PeerError
from kvbridge.core.ids import Role
from kvbridge.router.bodies import Asked, Body
from kvbridge.router.exchange import Answer, FailedAttemptError, Router
from kvbridge.router.servers import LOST_AFTER, OpenAiServers, Server, Servers, UpstreamError
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.registry import Metrics
from tests.helpers import examples

WAIT_S = 60.0
ADDRESSES = ["there"]


@dataclass
class Call:
    """One request, its answer, and when each ended."""

    url: str
    body: dict[str, Any]
    answer: asyncio.Future[Any] = field(default_factory=asyncio.Future)
    """A status and a body; an exception instead."""
    closed: bool = False

    @property
    def room(self) -> str:
        return self.body["kv_transfer_params"]["kvbridge"]["room"]


class Answered:
    def __init__(self, status: int, content: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self.status = status
        self.headers = headers or []
        self._content = content

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self._content

    async def read(self) -> bytes:
        return self._content


class Net:
    def __init__(self, prefill: int = 1, decode: int = 1, order: DispatchOrder = DispatchOrder.PAIRED) -> None:
        self.calls: list[Call] = []
        self.failures: list[FailedAttemptError] = []
        self.servers = Servers(self, RouterTimeouts())
        self.servers.use(Role.PREFILL, [f"p{number}" for number in range(prefill)])
        self.servers.use(Role.DECODE, [f"d{number}" for number in range(decode)])
        for role in Role:
            for server in self.servers.of(role):
                server.is_well()
                server.addresses = ADDRESSES
        rooms = iter(range(1, 1000))
        config = RouterConfig.model_construct(order=order)
        seldom = Seldom(lambda _event: None)
        self.router = Router(config, self.servers, Metrics(role="router"), seldom, draw_room=lambda: next(rooms))
        self.router._attempt_failed = self.failures.append
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def get(self, url: str, headers: dict[str, str]) -> AsyncIterator[Answered]:
        """A server that says nothing of its models."""
        del url, headers
        answer = Answered(200, b"")
        answer.read = asyncio.Event().wait
        yield answer

    @asynccontextmanager
    async def post(self, url: str, body: Body, asked: Asked) -> AsyncIterator[Answered]:
        del asked
        call = Call(url, json.loads(b"".join(body)))
        self.calls.append(call)
        try:
            yield Answered(*await call.answer)
        finally:
            call.closed = True

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not true():  # noqa: ASYNC110 - anything may become true
                await asyncio.sleep(0)

    async def call(self, number: int) -> Call:
        await self.until(lambda: len(self.calls) > number)
        return self.calls[number]

    async def ask_whole(self) -> Answer:
        """Return an answer with its body as `first`. It does not end before it may."""
        async with self.router.answer(Asked.read("/v1/completions", b'{"prompt": "p"}', {})) as found:
            self.begun.set()
            await self.may_end.wait()
            found.first += b"".join([piece async for piece in found.rest])
            return found

    async def ask(self) -> bytes:
        self.may_end.set()
        return (await self.ask_whole()).first

    def check_nothing_left(self) -> None:
        assert all(call.closed for call in self.calls)
        for role in Role:
            assert all((one.outstanding, one.load) == (0, 0) for one in self.servers.of(role))


def held(room: str, addresses: Any = ADDRESSES) -> tuple[int, bytes]:
    params = {"do_remote_prefill": True, "kvbridge": {"room": room, "prefill": addresses}}
    return 200, json.dumps({"kv_transfer_params": params}).encode()


ANSWER = 200, b"answer"


async def test_an_answer_of_decode_that_comes_first_is_taken_and_that_of_prefill_still_teaches():
    net = Net()
    asking = asyncio.create_task(net.ask_whole())
    prefill, decode = await net.call(0), await net.call(1)
    decode.answer.set_result(ANSWER)
    await asyncio.wait_for(net.begun.wait(), WAIT_S)
    assert not prefill.closed
    prefill.answer.set_result(held(prefill.room, ["moved"]))
    server = net.servers.of(Role.PREFILL)[0]
    await net.until(lambda: server.addresses == ["moved"])
    net.may_end.set()
    assert (await asking).first == b"answer"
    net.check_nothing_left()


async def test_a_prefill_that_is_still_under_way_at_the_end_of_the_answer_is_closed():
    net = Net()
    asking = asyncio.create_task(net.ask())
    prefill, decode = await net.call(0), await net.call(1)
    decode.answer.set_result(ANSWER)
    assert await asking == b"answer"
    assert prefill.closed
    net.check_nothing_left()
    assert net.failures == []


async def test_the_only_decode_is_asked_again_about_what_another_prefill_holds():
    """It may have failed because the first one ended before all was loaded."""
    net = Net(prefill=2, order=DispatchOrder.PLAIN)
    asking = asyncio.create_task(net.ask())
    for number, name in enumerate(("p0", "p1")):
        prefill = await net.call(2 * number)
        assert prefill.url == name
        prefill.answer.set_result(held(f"of {name}"))
        decode = await net.call(2 * number + 1)
        assert decode.room == f"of {name}"
        decode.answer.set_result((500, b"the load has failed") if name == "p0" else ANSWER)
    assert await asking == b"answer"
    net.check_nothing_left()


def fails(reason: str) -> tuple[int, bytes] | UpstreamError:
    if reason in {"broken", "connect"}:
        return UpstreamError(reason, refused=reason == "connect")
    return {"status": 500, "busy": 429}[reason], b"no"


def end(call: Call, result: Any) -> None:
    (call.answer.set_exception if isinstance(result, Exception) else call.answer.set_result)(result)


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize(
    ("reasons", "visited"),
    [
        (["broken"] * 9, 2),
        (["status"] * 9, 3),
        (["busy", "status"] * 5, 3),
        (["status", "broken", "status", "status"], 3),
        (["broken", "status", "status"], 2),
        (["connect"] * 4 + ["status"] * 5, 7),
        (["connect", "broken", "connect", "status", "status"], 4),
    ],
)
async def test_a_request_that_may_have_ended_a_server_visits_few(role, reasons, visited):
    """A prompt that ends an engine must not end the whole fleet, and what was never sent ends nobody."""
    net = Net(prefill=9, decode=9, order=DispatchOrder.PLAIN)
    asking = asyncio.create_task(net.ask())
    for number in range(visited):
        if role is Role.DECODE:
            prefill = await net.call(2 * number)
            prefill.answer.set_result(held("7"))
        end(await net.call(number if role is Role.PREFILL else 2 * number + 1), fails(reasons[number]))
    with pytest.raises(PeerError, match=f"{visited} attempts have failed"):
        await asyncio.wait_for(asking, WAIT_S)
    assert [failure.reason for failure in net.failures] == reasons[:visited]
    assert len({failure.server for failure in net.failures}) == visited
    net.check_nothing_left()


@pytest.mark.parametrize(("others", "answered"), [(["busy"], True), (["connect"], True), (["status"], False)])
async def test_what_all_servers_say_of_their_load_is_passed_on(others, answered):
    net = Net(prefill=1 + len(others), order=DispatchOrder.PLAIN)
    net.may_end.set()
    asking = asyncio.create_task(net.ask_whole())
    for number, reason in enumerate(others):
        end(await net.call(number), fails(reason))
    (await net.call(len(others))).answer.set_result((429, b"busy", [(b"retry-after", b"7")]))
    if answered:
        found = await asking
        assert (found.status, found.headers, found.first) == (429, [(b"retry-after", b"7")], b"busy")
    else:
        with pytest.raises(PeerError):
            await asking
    net.check_nothing_left()


OUTCOMES = ("fine", "status", "busy", "broken", "refused", "moved", "nothing", "other_room", "other_connector")


@examples.more(3)
@given(data=st.data())
def test_whatever_fails_in_whatever_order_each_room_is_used_once_and_nothing_is_left(data):
    asyncio.run(_whatever_fails(data))


async def _whatever_fails(data: st.DataObject) -> None:
    net = Net(*(data.draw(each) for each in (st.integers(1, 3), st.integers(1, 3), st.sampled_from(DispatchOrder))))
    asking = asyncio.create_task(net.ask())
    leaves_after = data.draw(st.integers(0, 20))
    while not asking.done():
        for _ in range(20):  # turns of the loop, for all that follows from the last answer
            await asyncio.sleep(0)
        under_way = [call for call in net.calls if not call.closed and not call.answer.done()]
        assert len([call for call in net.calls if not call.closed and call.url[0] == "d"]) <= 1
        assert len([call for call in net.calls if not call.closed and call.url[0] == "p"]) <= 1
        if len(net.calls) > leaves_after:
            asking.cancel()
            break
        if under_way:
            _end(data.draw(st.sampled_from(under_way)), data.draw(st.sampled_from(OUTCOMES)))
    (result,) = await asyncio.gather(asking, return_exceptions=True)
    if isinstance(result, bytes):
        assert result == b"answer" or {failure.reason for failure in net.failures} <= {"busy", "connect"}
    else:
        assert isinstance(result, (PeerError, asyncio.CancelledError)), result
    net.check_nothing_left()
    _check_rooms(net)
    out = [failure.server for failure in net.failures if failure.avoid and failure.server.role is Role.PREFILL]
    assert len(out) == len(set(out)), "a server that had failed was asked again"
    sent = [failure.reason for failure in net.failures if failure.reason != "connect"]
    assert len(sent) <= 3
    assert "broken" not in sent[:-2]
    if isinstance(result, PeerError):
        assert all(str(failure) in str(result) for failure in net.failures)


def _end(call: Call, outcome: str) -> None:
    if outcome in {"broken", "refused"}:
        call.answer.set_exception(UpstreamError(outcome, refused=outcome == "refused"))
    elif outcome == "status":
        call.answer.set_result((503, b"no"))
    elif outcome == "busy":
        call.answer.set_result((429, b"busy"))
    elif call.url.startswith("d"):
        call.answer.set_result(ANSWER)
    elif outcome == "nothing":
        call.answer.set_result((200, b"{}"))
    elif outcome == "other_connector":
        call.answer.set_result((200, b'{"kv_transfer_params": {"remote_host": "a"}}'))
    else:
        given = call.body["kv_transfer_params"].get("kvbridge", {}).get("room")
        drawn = f"drawn-{id(call)}"
        room = drawn if outcome == "other_room" or given is None else given
        call.answer.set_result(held(room, ["moved"] if outcome == "moved" else ADDRESSES))


def _check_rooms(net: Net) -> None:
    for role in "pd":
        rooms = [
            ours["room"]
            for call in net.calls
            if call.url.startswith(role) and (ours := call.body.get("kv_transfer_params", {}).get("kvbridge"))
        ]
        assert len(rooms) == len(set(rooms)), f"a room was named twice to {role}"


def servers(prefill: int = 2, decode: int = 2) -> Servers:
    made = Servers(None, RouterTimeouts())
    made.use(Role.PREFILL, [f"http://p{number}" for number in range(prefill)])
    made.use(Role.DECODE, [f"http://d{number}" for number in range(decode)])
    for role in Role:
        for server in made.of(role):
            assert server.is_well()
    return made


def names(pair: tuple[Server | None, Server]) -> tuple[str, str]:
    prefill, decode = pair
    return (prefill.url if prefill else "", decode.url)


def test_equals_take_turns():
    made = servers(prefill=3)
    assert [names(made.choose_pair()) for _ in range(4)] == [
        ("http://p0", "http://d0"),
        ("http://p1", "http://d1"),
        ("http://p2", "http://d0"),
        ("http://p0", "http://d1"),
    ]


def test_only_those_that_are_well_and_have_not_failed_the_request():
    made = servers()
    first, second = made.of(Role.PREFILL)
    assert first.is_ill("/health answered 503")
    assert not first.is_ill("/health answered 503")  # no news
    assert made.choose_pair()[0] is second
    with pytest.raises(NotReadyError, match="http://p0: /health answered 503"):
        made.choose_pair({second})
    assert made.obstacles() == ()
    second.is_gone("nobody listens there")
    (obstacle,) = made.obstacles()
    assert "no prefill server is well" in obstacle
    assert made.choose_pair(alone=True)[0] is None


def test_a_server_is_lost_after_some_bad_checks_in_a_row():
    server = Server(Role.DECODE, "http://d")
    for _ in range(LOST_AFTER - 1):
        server.is_ill("slow")
    server.is_well()
    for _ in range(LOST_AFTER - 1):
        server.is_ill("slow")
    lost = server.lost
    assert not lost.is_set()
    server.is_ill("slow")
    assert lost.is_set()
    server.is_well()
    assert not server.lost.is_set()
    assert lost.is_set()  # whoever waits for the former one is told all the same


def test_an_empty_list_is_an_obstacle():
    made = Servers(None, RouterTimeouts())
    assert [("prefill" in one, "engine_url" in one) for one in made.obstacles()] == [(True, True), (False, True)]


def test_a_process_of_both_roles_does_not_send_to_itself():
    made = Servers(None, RouterTimeouts())
    for role in Role:
        made.use(role, ["http://a", "http://b"])
        for server in made.of(role):
            server.is_well()
    for _ in range(6):
        prefill, decode = names(made.choose_pair())
        assert {prefill, decode} == {"http://a", "http://b"}
    (_, other) = made.of(Role.DECODE)
    other.is_ill("out")
    made.of(Role.PREFILL)[1].is_ill("out")
    assert names(made.choose_pair()) == ("", "http://a")


async def test_an_address_that_nobody_can_ask_is_a_server_that_is_not_well():
    """A node tells its engine's address. A wrong one must not end what looks after the server, unseen."""
    upstream = OpenAiServers(RouterTimeouts())
    server = Server(Role.PREFILL, "http://prefill:port")
    try:
        await Servers(upstream, RouterTimeouts()).look(server)
    finally:
        await upstream.close()
    assert "InvalidURL" in server.problem


async def test_a_list_of_models_that_does_not_end_takes_a_place_and_is_given_up():
    net = Net()
    net.router.config = config = net.router.config.model_copy(update={"limit": 1})
    listing = asyncio.create_task(net.router.models({}))
    await net.until(lambda: net.router.under_way == 1)
    with pytest.raises(CapacityError), net.router.place():
        pass
    listing.cancel()
    await asyncio.gather(listing, return_exceptions=True)
    timeouts = config.timeouts.model_copy(update={"health_s": 0.001})
    net.router.config = config.model_copy(update={"timeouts": timeouts})
    with pytest.raises(DeadlineError, match=r"timeouts\.health_s"):
        await asyncio.wait_for(net.router.models({}), WAIT_S)
    assert net.router.under_way == 0
