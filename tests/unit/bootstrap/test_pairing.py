"""Reservation on both ends: all or nothing, bounded, once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvbridge.core.clock import ManualClock
from kvbridge.core.errors import (
    CapacityError,
    ConflictError,
    DeadlineError,
    InvalidInputError,
    NotReadyError,
    PeerError,
    UnknownRoomError,
)
from kvbridge.core.ids import Role
from kvbridge.service.pairing import PairingService
from kvbridge.service.ports import AdmissionRequest, PairRequest, RoomState
from tests.unit.bootstrap.fleet import LIMITS, FakeDaemons, directory_of, half, node

pytestmark = pytest.mark.asyncio

REQUEST = PairRequest(room=7, prompt_tokens=1000, max_new_tokens=100, prefix_tokens=256, client="c")
FLEET = (
    node("p1", Role.PREFILL, free=90),
    node("p2", Role.PREFILL, free=80),
    node("d1", Role.DECODE, free=90),
    node("d2", Role.DECODE, free=80),
)


def service(port: FakeDaemons, *fleet, clock: ManualClock | None = None, **limits) -> PairingService:
    clock = clock or ManualClock()
    directory = directory_of(*(fleet or FLEET), clock=clock)
    return PairingService(directory, port, limits=replace(LIMITS, **limits), clock=clock)


async def test_both_ends_are_reserved_prefill_first():
    port = FakeDaemons()
    ticket = await service(port).pair(REQUEST)
    assert port.calls == [("admit", "http://p1", 1), ("admit", "http://d1", 1)]
    assert (ticket.room, ticket.generation, ticket.expires_in_s) == (7, 1, 60.0)
    assert (ticket.prefill.http_urls, ticket.decode.http_urls) == (("http://p1",), ("http://d1",))
    prefill, decode = port.admitted["http://p1"][7], port.admitted["http://d1"][7]
    assert (prefill.prefill, prefill.prefix_tokens, prefill.max_new_tokens) == ((), 0, 0)
    assert [peer.endpoint for peer in decode.prefill] == ["tcp://p1:1"]
    assert (decode.prefix_tokens, decode.max_new_tokens, decode.client) == (256, 100, "c")


async def test_every_node_of_both_instances_is_reserved():
    port = FakeDaemons()
    fleet = (
        half("p", Role.PREFILL, 0),
        half("p", Role.PREFILL, 1),
        half("d", Role.DECODE, 0),
        half("d", Role.DECODE, 1),
    )
    ticket = await service(port, *fleet).pair(REQUEST)
    assert [url for _, url, _ in port.calls] == ["http://p-0", "http://p-1", "http://d-0", "http://d-1"]
    assert ticket.decode.http_urls == ("http://d-0", "http://d-1")
    endpoints = [peer.endpoint for peer in port.admitted["http://d-1"][7].prefill]
    assert endpoints == ["tcp://p-0:1", "tcp://p-1:1"]


async def test_a_room_is_drawn_when_none_is_given():
    pairing = service(FakeDaemons())
    first, second = [await pairing.pair(PairRequest(prompt_tokens=10)) for _ in range(2)]
    assert first.room != second.room


async def test_a_refusing_instance_is_avoided_and_its_partner_given_back():
    port = FakeDaemons()
    port.refuse["http://d1"] = CapacityError("full", retry_after_s=9.0)
    ticket = await service(port).pair(REQUEST)
    assert (ticket.decode.instance, ticket.generation) == ("d2", 2)
    assert port.rooms() == {"http://p1": [7], "http://d2": [7]}
    assert [call for call in port.calls if call[0] == "admit"] == [
        ("admit", "http://p1", 1),
        ("admit", "http://d1", 1),
        ("admit", "http://p1", 2),
        ("admit", "http://d2", 2),
    ]


async def test_when_nobody_has_room_nothing_stays_reserved():
    port = FakeDaemons()
    for url in ("http://d1", "http://d2"):
        port.refuse[url] = CapacityError("full", retry_after_s=9.0)
    with pytest.raises(CapacityError, match="'d1': full; 'd2': full") as raised:
        await service(port).pair(REQUEST)
    assert (raised.value.code, raised.value.retry_after_s) == ("capacity", 9.0)
    assert port.rooms() == {}


async def test_unreachable_daemons_are_not_called_full():
    port = FakeDaemons()
    for url in ("http://p1", "http://p2"):
        port.refuse[url] = PeerError("no route")
    with pytest.raises(NotReadyError, match="no route"):
        await service(port).pair(REQUEST)


async def test_attempts_are_bounded():
    port = FakeDaemons()
    for url in ("http://d1", "http://d2"):
        port.refuse[url] = CapacityError("full")
    with pytest.raises(CapacityError):
        await service(port, attempts=1).pair(REQUEST)
    assert len([call for call in port.calls if call[0] == "admit"]) == 2


@pytest.mark.parametrize("error", [InvalidInputError("bad prefix"), ConflictError("room in use there")])
async def test_a_refusal_of_the_request_itself_ends_the_pairing(error):
    port = FakeDaemons()
    port.refuse["http://d1"] = error
    with pytest.raises(type(error), match=str(error)):
        await service(port).pair(REQUEST)
    assert port.rooms() == {}


async def test_a_daemon_that_refused_is_not_robbed_of_another_room_of_that_id():
    port = FakeDaemons()
    elsewhere = REQUEST.model_dump(exclude={"fingerprint"}) | {"generation": 5, "prefix_tokens": 0}
    await port.admit("http://p1", AdmissionRequest(**elsewhere))
    port.refuse["http://p1"] = ConflictError("room in use there")
    with pytest.raises(ConflictError):
        await service(port).pair(REQUEST)
    assert port.rooms() == {"http://p1": [7]}


async def test_a_daemon_that_answers_too_late_is_given_back():
    port = FakeDaemons()
    port.late.add("http://d1")
    ticket = await service(port, reserve_s=0.02).pair(REQUEST)
    assert ticket.decode.instance == "d2"
    assert port.rooms() == {"http://p1": [7], "http://d2": [7]}


async def test_pairing_as_a_whole_has_a_deadline():
    port = FakeDaemons()
    port.late.add("http://d1")
    with pytest.raises(DeadlineError, match=r"timeouts\.pair_s"):
        await service(port, pair_s=0.02).pair(REQUEST)
    assert port.rooms() == {}


async def test_a_cancelled_pairing_leaves_nothing_behind():
    port = FakeDaemons()
    port.late.add("http://d1")
    pairing = service(port)
    task = asyncio.create_task(pairing.pair(REQUEST))
    await asyncio.wait_for(port.stuck.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert port.rooms() == {}
    port.late.clear()
    assert (await pairing.pair(REQUEST)).generation == 2


async def test_a_pairing_that_is_cancelled_while_it_gives_back_still_gives_back():
    port = FakeDaemons()
    port.refuse["http://d1"] = InvalidInputError("bad prefix")
    port.cancel_gate = asyncio.Event()
    task = asyncio.create_task(service(port).pair(REQUEST))
    await asyncio.wait_for(port.stuck.wait(), 5)
    task.cancel()
    await asyncio.sleep(0)
    port.cancel_gate.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert port.rooms() == {}


async def test_a_cancel_that_fails_does_not_hide_the_cause():
    port = FakeDaemons()
    port.refuse["http://d1"] = InvalidInputError("bad prefix")
    port.cancel_errors["http://p1"] = PeerError("gone")
    with pytest.raises(InvalidInputError, match="bad prefix"):
        await service(port).pair(REQUEST)


async def test_a_room_in_use_cannot_be_paired_again():
    pairing = service(FakeDaemons())
    await pairing.pair(REQUEST)
    with pytest.raises(ConflictError, match="room 7 is in use"):
        await pairing.pair(REQUEST)


async def test_a_room_that_is_being_paired_cannot_be_paired_again():
    port = FakeDaemons()
    port.hang.add("http://p1")
    pairing = service(port)
    task = asyncio.create_task(pairing.pair(REQUEST))
    await asyncio.wait_for(port.stuck.wait(), 5)
    with pytest.raises(ConflictError):
        await pairing.pair(REQUEST)
    assert pairing.counts() == {"pairing": 1, "paired": 0, "cancelled": 0}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_failed_room_can_be_paired_again_in_a_later_generation():
    port = FakeDaemons()
    port.refuse["http://p1"] = port.refuse["http://p2"] = CapacityError("full")
    pairing = service(port)
    with pytest.raises(CapacityError):
        await pairing.pair(REQUEST)
    port.refuse.clear()
    assert (await pairing.pair(REQUEST)).generation == 3


async def test_cancel_reaches_both_ends_and_frees_the_id():
    port = FakeDaemons()
    pairing = service(port)
    await pairing.pair(REQUEST)
    report = await pairing.cancel(7, "user left")
    assert report.state is RoomState.ABORTED
    assert [end.report.reason for end in (*report.decode, *report.prefill)] == ["user left"] * 2
    assert port.calls[-2:] == [("cancel", "http://d1", 1), ("cancel", "http://p1", 1)]
    assert (await pairing.pair(REQUEST)).generation == 2


async def test_a_room_that_could_not_be_cancelled_stays_in_use():
    port = FakeDaemons()
    pairing = service(port)
    await pairing.pair(REQUEST)
    port.cancel_errors["http://d1"] = PeerError("gone")
    report = await pairing.cancel(7, "x")
    assert (report.decode[0].error_code, report.prefill[0].report.state) == ("peer_failed", RoomState.ABORTED)
    with pytest.raises(ConflictError):
        await pairing.pair(REQUEST)


async def test_a_report_asks_both_ends():
    port = FakeDaemons()
    pairing = service(port)
    await pairing.pair(REQUEST)
    report = await pairing.report(7)
    assert (report.decode[0].report.role, report.prefill[0].report.role) == (Role.DECODE, Role.PREFILL)
    port.admitted["http://d1"].clear()
    assert (await pairing.report(7)).decode[0].error_code == "unknown_room"
    with pytest.raises(UnknownRoomError):
        await pairing.report(8)


async def test_rooms_are_forgotten_by_age_and_by_number():
    clock = ManualClock()
    pairing = service(FakeDaemons(), *(node("p", Role.PREFILL), node("d", Role.DECODE)), clock=clock, max_rooms=2)
    for room in (1, 2, 3):
        await pairing.pair(REQUEST.model_copy(update={"room": room}))
    assert pairing.sweep() == 1
    with pytest.raises(UnknownRoomError):
        await pairing.report(1)
    clock.advance(LIMITS.room_keep_s)
    assert pairing.sweep() == 2
    assert repr(pairing) == "PairingService(0 rooms remembered, 0 being paired)"


async def test_a_room_that_is_paired_again_is_young_again():
    clock = ManualClock()
    pairing = service(FakeDaemons(), clock=clock, room_keep_s=10_000.0)
    directory = pairing._directory
    directory._expire_after_s = 1e9
    await pairing.pair(REQUEST)
    await pairing.cancel(7, "x")
    clock.advance(100)
    await pairing.pair(REQUEST.model_copy(update={"room": 8}))
    clock.advance(400)
    await pairing.pair(REQUEST)
    clock.advance(9_700)
    assert pairing.sweep() == 1
    assert (await pairing.report(7)).generation == 2


async def test_requests_between_two_heartbeats_are_spread():
    pairing = service(FakeDaemons(), node("p", Role.PREFILL), node("d1", Role.DECODE), node("d2", Role.DECODE))
    chosen = [(await pairing.pair(PairRequest(prompt_tokens=5000))).decode.instance for _ in range(4)]
    assert chosen == ["d1", "d2", "d1", "d2"]
