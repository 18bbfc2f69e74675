"""Reservation on both ends: all or nothing, bounded, once."""

from __future__ import annotations

import asyncio

import pytest

from kvbridge.api.directory import PairRequest
from kvbridge.api.rooms import AdmissionRequest
from kvbridge.bootstrap.directory import absences
from kvbridge.bootstrap.stores.base import PairingState
from kvbridge.core.errors import (
    CapacityError,
    ClientLimitError,
    ConflictError,
    DeadlineError,
    FingerprintMismatchError,
    InvalidInputError,
    NamespaceError,
    NotReadyError,
    PeerError,
    UnknownRoomError,
)
from kvbridge.core.ids import Role
from kvbridge.core.prefixes import ModelIdentity, Namespaces, Retention
from kvbridge.core.session.states import RoomState
from kvbridge.telemetry.events import PairingEnded
from tests.unit.bootstrap.fleet import FLEET, TIMES, FakeDaemons, half, node

pytestmark = pytest.mark.asyncio

REQUEST = PairRequest(room=7, prompt_tokens=1000, max_new_tokens=100, client="c")


async def test_both_ends_are_reserved_prefill_first(world):
    port = FakeDaemons()
    ticket = await (await world.pairing(port, clock=port.clock)).pair(REQUEST)
    assert port.calls == [("admit", "http://p1", 1), ("admit", "http://d1", 1)]
    assert (ticket.room, ticket.generation, ticket.expires_in_s) == (7, 1, 60.0)
    assert (ticket.prefill.http_urls, ticket.decode.http_urls) == (("http://p1",), ("http://d1",))
    prefill, decode = port.admitted["http://p1"][7], port.admitted["http://d1"][7]
    assert (prefill.prefill, prefill.max_new_tokens) == ((), 0)
    assert [peer.endpoint for peer in decode.prefill] == ["tcp://p1:1"]
    assert (decode.max_new_tokens, decode.client) == (100, "c")


async def test_every_node_of_both_instances_is_reserved(world):
    port = FakeDaemons()
    fleet = (
        half("p", Role.PREFILL, 0),
        half("p", Role.PREFILL, 1),
        half("d", Role.DECODE, 0),
        half("d", Role.DECODE, 1),
    )
    ticket = await (await world.pairing(port, *fleet)).pair(REQUEST)
    assert [url for _, url, _ in port.calls] == ["http://p-0", "http://p-1", "http://d-0", "http://d-1"]
    assert ticket.decode.http_urls == ("http://d-0", "http://d-1")
    endpoints = [peer.endpoint for peer in port.admitted["http://d-1"][7].prefill]
    assert endpoints == ["tcp://p-0:1", "tcp://p-1:1"]


async def test_both_ends_and_the_ticket_have_the_same_end(world):
    port = FakeDaemons()
    port.takes_s = {"http://p1": 3.0, "http://d1": 1.5}
    pairing = await world.pairing(port, clock=port.clock, ticket_s=20.0)
    ticket = await pairing.pair(REQUEST)
    prefill, decode = port.admitted["http://p1"][7], port.admitted["http://d1"][7]
    assert (prefill.begin_within_s, decode.begin_within_s, ticket.expires_in_s) == (20.0, 17.0, 15.5)
    world.advance(10)
    # Redis has a clock of its own, which goes on.
    assert 0 < (await pairing.report(7)).ticket.expires_in_s <= 5.5
    world.advance(10)
    assert (await pairing.report(7)).ticket.expires_in_s == 0.0


async def test_each_attempt_has_a_whole_ticket(world):
    port = FakeDaemons()
    port.takes_s = {"http://p1": 3.0}
    port.refuse["http://d1"] = CapacityError("full")
    ticket = await (await world.pairing(port, clock=port.clock, ticket_s=20.0)).pair(REQUEST)
    assert (ticket.decode.instance, ticket.expires_in_s) == ("d2", 17.0)


@pytest.mark.parametrize("slow", ["http://p1", "http://d1"])
async def test_a_ticket_that_runs_out_while_it_is_made_is_none(world, slow):
    port = FakeDaemons()
    port.takes_s = dict.fromkeys([slow, slow.replace("1", "2")], 3.0)
    pairing = await world.pairing(port, clock=port.clock, ticket_s=3.0)
    with pytest.raises((DeadlineError, NotReadyError), match=r"its ticket had run out .*timeouts\.ticket_s"):
        await pairing.pair(REQUEST)
    assert port.rooms() == {}


async def test_a_room_is_drawn_when_none_is_given(world):
    pairing = await world.pairing(FakeDaemons())
    first, second = [await pairing.pair(PairRequest(prompt_tokens=10)) for _ in range(2)]
    assert first.room != second.room


async def test_a_refusing_instance_is_avoided_and_its_partner_given_back(world):
    port = FakeDaemons()
    port.refuse["http://d1"] = CapacityError("full", retry_after_s=9.0)
    ticket = await (await world.pairing(port)).pair(REQUEST)
    assert (ticket.decode.instance, ticket.generation) == ("d2", 2)
    assert port.rooms() == {"http://p1": [7], "http://d2": [7]}
    assert [call for call in port.calls if call[0] == "admit"] == [
        ("admit", "http://p1", 1),
        ("admit", "http://d1", 1),
        ("admit", "http://p1", 2),
        ("admit", "http://d2", 2),
    ]


async def test_when_nobody_has_room_nothing_stays_reserved(world):
    port = FakeDaemons()
    for url in ("http://d1", "http://d2"):
        port.refuse[url] = CapacityError("full", retry_after_s=9.0)
    with pytest.raises(CapacityError, match="'d1': full; 'd2': full") as raised:
        await (await world.pairing(port)).pair(REQUEST)
    assert (raised.value.code, raised.value.retry_after_s) == ("capacity", 9.0)
    assert port.rooms() == {}


async def test_unreachable_daemons_are_not_called_full(world):
    port = FakeDaemons()
    for url in ("http://p1", "http://p2"):
        port.refuse[url] = PeerError("no route")
    with pytest.raises(NotReadyError, match="no route"):
        await (await world.pairing(port)).pair(REQUEST)


@pytest.mark.parametrize("wrong", [{"room": 8}, {"generation": 9}, {"role": Role.DECODE}], ids=str)
async def test_a_daemon_that_admits_something_else_is_avoided(world, wrong):
    port = FakeDaemons()
    port.misreports["http://p1"] = wrong
    ticket = await (await world.pairing(port)).pair(REQUEST)
    assert ticket.prefill.instance == "p2"
    port.misreports["http://p2"] = wrong
    with pytest.raises(NotReadyError, match=r"'p2': http://p2 has admitted room . generation . as \w+, asked for 6"):
        await (await world.pairing(port)).pair(REQUEST.model_copy(update={"room": 6}))


async def test_attempts_are_bounded(world):
    port = FakeDaemons()
    for url in ("http://d1", "http://d2"):
        port.refuse[url] = CapacityError("full")
    with pytest.raises(CapacityError):
        await (await world.pairing(port, attempts=1)).pair(REQUEST)
    assert len([call for call in port.calls if call[0] == "admit"]) == 2


@pytest.mark.parametrize("error", [InvalidInputError("bad prefix"), ConflictError("room in use there")])
async def test_a_refusal_of_the_request_itself_ends_the_pairing(world, error):
    port = FakeDaemons()
    port.refuse["http://d1"] = error
    with pytest.raises(type(error), match=str(error)):
        await (await world.pairing(port)).pair(REQUEST)
    assert port.rooms() == {}


async def test_a_daemon_that_refused_is_not_robbed_of_another_room_of_that_id(world):
    port = FakeDaemons()
    elsewhere = REQUEST.model_dump(exclude={"fingerprint"}) | {"generation": 5}
    await port.admit("http://p1", AdmissionRequest(**elsewhere))
    port.refuse["http://p1"] = ConflictError("room in use there")
    with pytest.raises(ConflictError):
        await (await world.pairing(port)).pair(REQUEST)
    assert port.rooms() == {"http://p1": [7]}


async def test_a_daemon_that_answers_too_late_is_given_back(world):
    port = FakeDaemons()
    port.late.add("http://d1")
    ticket = await (await world.pairing(port, reserve_s=0.02)).pair(REQUEST)
    assert ticket.decode.instance == "d2"
    assert port.rooms() == {"http://p1": [7], "http://d2": [7]}


async def test_pairing_as_a_whole_has_a_deadline(world):
    port = FakeDaemons()
    port.late.add("http://d1")
    with pytest.raises(DeadlineError, match=r"timeouts\.pair_s"):
        await (await world.pairing(port, pair_s=0.02)).pair(REQUEST)
    assert port.rooms() == {}


async def test_a_cancelled_pairing_leaves_nothing_behind(world):
    port = FakeDaemons()
    port.late.add("http://d1")
    pairing = await world.pairing(port)
    task = asyncio.create_task(pairing.pair(REQUEST))
    await asyncio.wait_for(port.stuck.wait(), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert port.rooms() == {}
    port.late.clear()
    assert (await pairing.pair(REQUEST)).generation == 2


async def test_a_pairing_that_is_cancelled_while_it_gives_back_still_gives_back(world):
    port = FakeDaemons()
    port.refuse["http://d1"] = InvalidInputError("bad prefix")
    port.cancel_gate = asyncio.Event()
    task = asyncio.create_task((await world.pairing(port)).pair(REQUEST))
    await asyncio.wait_for(port.stuck.wait(), 20)
    task.cancel()
    await asyncio.sleep(0)
    port.cancel_gate.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 20)
    assert port.rooms() == {}


async def test_a_cancel_that_fails_does_not_hide_the_cause(world):
    port = FakeDaemons()
    port.refuse["http://d1"] = InvalidInputError("bad prefix")
    port.cancel_errors["http://p1"] = PeerError("gone")
    with pytest.raises(InvalidInputError, match="bad prefix"):
        await (await world.pairing(port)).pair(REQUEST)


async def test_no_more_are_paired_at_once_than_may_be(world):
    port = FakeDaemons()
    port.hang.add("http://p1")
    pairing = await world.pairing(port, max_under_way=1)
    task = asyncio.create_task(pairing.pair(REQUEST))
    await asyncio.wait_for(port.stuck.wait(), 20)
    with pytest.raises(
        CapacityError, match=r"1 requests are being paired already \(pairing\.max_under_way\)"
    ) as caught:
        await pairing.pair(REQUEST.model_copy(update={"room": 8}))
    assert caught.value.retry_after_s == 1.0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    port.hang.clear()
    assert (await pairing.pair(REQUEST.model_copy(update={"room": 8}))).room == 8


async def test_a_room_that_is_being_paired_cannot_be_paired_again(world):
    port = FakeDaemons()
    port.hang.add("http://p1")
    pairing = await world.pairing(port)
    task = asyncio.create_task(pairing.pair(REQUEST))
    await asyncio.wait_for(port.stuck.wait(), 20)
    with pytest.raises(ConflictError):
        await pairing.pair(REQUEST)
    assert await world.store.room_counts() == {
        PairingState.PAIRING: 1,
        PairingState.PAIRED: 0,
        PairingState.CANCELLED: 0,
    }
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_failed_room_can_be_paired_again_in_a_later_generation(world):
    port = FakeDaemons()
    port.refuse["http://p1"] = port.refuse["http://p2"] = CapacityError("full")
    pairing = await world.pairing(port)
    with pytest.raises(CapacityError):
        await pairing.pair(REQUEST)
    port.refuse.clear()
    assert (await pairing.pair(REQUEST)).generation == 3


async def test_cancel_reaches_both_ends_and_frees_the_id(world):
    port = FakeDaemons()
    pairing = await world.pairing(port)
    await pairing.pair(REQUEST)
    report = await pairing.cancel(7, "user left")
    assert report.state is RoomState.ABORTED
    assert [end.report.reason for end in (*report.decode, *report.prefill)] == ["user left"] * 2
    assert port.calls[-2:] == [("cancel", "http://d1", 1), ("cancel", "http://p1", 1)]
    assert (await pairing.pair(REQUEST)).generation == 2


async def test_a_room_that_could_not_be_cancelled_stays_in_use(world):
    port = FakeDaemons()
    pairing = await world.pairing(port)
    await pairing.pair(REQUEST)
    port.cancel_errors["http://d1"] = PeerError("gone")
    report = await pairing.cancel(7, "x")
    assert (report.decode[0].error_code, report.prefill[0].report.state) == ("peer_failed", RoomState.ABORTED)
    with pytest.raises(ConflictError):
        await pairing.pair(REQUEST)


async def test_a_report_asks_both_ends(world):
    port = FakeDaemons()
    pairing = await world.pairing(port)
    await pairing.pair(REQUEST)
    report = await pairing.report(7)
    assert (report.decode[0].report.role, report.prefill[0].report.role) == (Role.DECODE, Role.PREFILL)
    port.admitted["http://d1"].clear()
    assert (await pairing.report(7)).decode[0].error_code == "unknown_room"
    with pytest.raises(UnknownRoomError):
        await pairing.report(8)


async def test_a_room_that_is_paired_again_is_young_again(world):
    pairing = await world.pairing(FakeDaemons())
    await pairing.pair(REQUEST)
    await pairing.cancel(7, "x")
    world.advance(1)
    await pairing.pair(REQUEST.model_copy(update={"room": 8}))
    world.advance(20)
    await pairing.pair(REQUEST)
    world.advance(TIMES.keep_s - 10)
    assert (await pairing.report(7)).generation == 2
    with pytest.raises(UnknownRoomError):
        await pairing.report(8)


async def test_a_pairing_whose_claim_was_taken_over_reserves_nothing(world):
    port = FakeDaemons()
    port.pauses["http://d1"] = asyncio.Event()
    pairing = await world.pairing(port)
    slow = asyncio.create_task(pairing.pair(REQUEST))
    await asyncio.wait_for(port.stuck.wait(), 20)
    world.advance(TIMES.claim_s + 0.1)
    await world.directory(*FLEET)  # the nodes' heartbeats have gone on meanwhile
    answer = port.pauses.pop("http://d1")
    second = await pairing.pair(REQUEST)
    answer.set()
    with pytest.raises(NotReadyError, match="nothing is reserved"):
        await asyncio.wait_for(slow, 20)
    assert second.generation == 4
    assert port.generations() == {("http://p1", 7, 4), ("http://d1", 7, 4)}
    assert (await pairing.report(7)).generation == 4


async def test_a_full_looking_pair_is_tried_once_and_the_daemon_decides(world):
    port = FakeDaemons()
    fleet = (node("p1", Role.PREFILL), node("d1", Role.DECODE, free=0), node("d2", Role.DECODE, free=1))
    pairing = await world.pairing(port, *fleet)
    assert (await pairing.pair(REQUEST)).decode.instance == "d2"
    port.refuse["http://d1"] = port.refuse["http://d2"] = CapacityError("2 of 5 host pages are free", retry_after_s=3.5)
    before = len(port.calls)
    with pytest.raises(CapacityError, match="2 of 5 host pages") as raised:
        await pairing.pair(REQUEST.model_copy(update={"room": 8}))
    assert raised.value.retry_after_s == 3.5
    assert len([call for call in port.calls[before:] if call[0] == "admit"]) == 2


async def test_a_clients_limit_is_passed_on(world):
    port = FakeDaemons()
    pairing = await world.pairing(port)
    for url in ("http://p1", "http://p2"):
        port.refuse[url] = ClientLimitError("client 'c' has 4 rooms here", retry_after_s=6.0)
    with pytest.raises(ClientLimitError, match="client 'c' has 4 rooms") as raised:
        await pairing.pair(REQUEST)
    assert (raised.value.http_status, raised.value.retry_after_s) == (429, 6.0)
    port.refuse["http://p2"] = CapacityError("full", retry_after_s=1.0)
    with pytest.raises(CapacityError) as raised:
        await pairing.pair(REQUEST)
    assert raised.value.code == "capacity"


async def test_requests_between_two_heartbeats_are_spread(world):
    pairing = await world.pairing(
        FakeDaemons(), node("p", Role.PREFILL), node("d1", Role.DECODE), node("d2", Role.DECODE)
    )
    chosen = [(await pairing.pair(PairRequest(prompt_tokens=5000))).decode.instance for _ in range(4)]
    assert chosen == ["d1", "d2", "d1", "d2"]


WAITING = REQUEST.model_copy(update={"wait_s": 10.0})


async def test_a_request_that_waits_is_given_pages_at_once_where_there_are_any(world):
    port = FakeDaemons()
    port.full = {"http://d1"}
    pairing = await world.pairing(port, clock=port.clock)
    ticket = await pairing.pair(WAITING)
    assert ticket.decode.instance == "d2"
    assert {one.wait_s for rooms in port.admitted.values() for one in rooms.values()} == {0.0}
    assert ticket.expires_in_s == 60.0


async def test_a_request_waits_at_both_ends_for_what_is_left_and_its_ticket_is_whole(world):
    port = FakeDaemons()
    port.full = {"http://p1", "http://p2", "http://d1", "http://d2"}
    port.takes_s = {"http://p1": 4.0, "http://d1": 2.0}
    pairing = await world.pairing(port, clock=port.clock, ticket_s=20.0, attempts=1)
    ticket = await pairing.pair(WAITING)
    prefill, decode = port.admitted["http://p1"][7], port.admitted["http://d1"][7]
    assert (prefill.wait_s, decode.wait_s) == (6.0, 2.0), "what the first look took counts too"
    # All three end at the same moment, at the latest.
    assert (prefill.begin_within_s, decode.begin_within_s, ticket.expires_in_s) == (26.0, 22.0, 20.0)
    assert ticket.generation == 2
    assert (await pairing.report(7)).ticket.room == 7


async def test_who_does_not_wait_is_refused_at_once(world):
    port = FakeDaemons()
    port.full = {"http://d1", "http://d2"}
    with pytest.raises(CapacityError, match="full now"):
        await (await world.pairing(port)).pair(REQUEST)
    assert port.rooms() == {}


async def test_a_wait_that_ends_without_pages_leaves_nothing_behind(world):
    port = FakeDaemons()
    port.refuse = {"http://d1": CapacityError("not within 10 s"), "http://d2": CapacityError("not within 10 s")}
    pairing = await world.pairing(port)
    with pytest.raises(CapacityError, match="not within 10 s"):
        await pairing.pair(WAITING)
    assert port.rooms() == {}
    port.refuse = {}
    assert (await pairing.pair(REQUEST)).generation > 1


async def test_who_leaves_while_it_waits_leaves_nothing_behind(world):
    port = FakeDaemons()
    port.full, port.pauses = {"http://d1", "http://d2"}, {"http://d1": asyncio.Event(), "http://d2": asyncio.Event()}
    pairing = await world.pairing(port)
    task = asyncio.create_task(pairing.pair(WAITING))
    await asyncio.wait_for(port.stuck.wait(), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert port.rooms() == {}
    assert (pairing._under_way, pairing._waiting) == (0, 0)


async def test_those_who_wait_are_no_burden_to_those_who_do_not_and_are_bounded(world):
    port = FakeDaemons()
    port.full = {"http://d1", "http://d2"}
    port.pauses = {url: asyncio.Event() for url in port.full}
    pairing = await world.pairing(port, max_under_way=1, max_waiting=1)
    waits = asyncio.create_task(pairing.pair(WAITING))
    await asyncio.wait_for(port.stuck.wait(), 20)
    with pytest.raises(CapacityError, match="full now"):
        await pairing.pair(WAITING.model_copy(update={"room": 8}))
    for pause in port.pauses.values():
        pause.set()
    assert (await waits).room == 7


async def test_a_wait_longer_than_is_served_is_refused(world):
    port = FakeDaemons()
    pairing = await world.pairing(port, max_wait_s=5.0)
    with pytest.raises(InvalidInputError, match=r"wait_s is 10 s, at most 5 s are served \(pairing.max_wait_s\)"):
        await pairing.pair(WAITING)
    assert port.calls == []


async def test_nobody_waits_for_instances_that_are_not_ready(world):
    port = FakeDaemons()
    pairing = await world.pairing(port, node("p", Role.PREFILL), node("d", Role.DECODE, ready=False))
    with pytest.raises(NotReadyError, match="no decode instance is ready"):
        await pairing.pair(WAITING)


# ------------------------------------------------------------------------------------- page keys, namespaces, models

MATTERS = Retention(priority=3, for_s=60)
KEYED = PairRequest(room=7, prompt_tokens=1000, namespace="acme", page_hashes=bytes(range(48)), retention=MATTERS)
ONE, TWO = ModelIdentity(name="v4", revision="1"), ModelIdentity(name="v4", revision="2")


def named(pair: AdmissionRequest) -> tuple[str, bytes, Retention | None]:
    return pair.namespace, pair.page_hashes, pair.retention


async def test_keys_and_namespace_go_to_instances_that_say_what_they_hold(world):
    fleet = (node("p", Role.PREFILL, model_identity=ONE), node("d", Role.DECODE, model_identity=ONE))
    port = FakeDaemons()
    await (await world.pairing(port, *fleet)).pair(KEYED)
    for url in ("http://p", "http://d"):
        assert named(port.admitted[url][7]) == ("acme", bytes(range(48)), MATTERS)


async def test_an_instance_that_does_not_say_is_asked_as_before(world):
    """It may be of a release that refuses requests with page keys."""
    fleet = (node("p", Role.PREFILL, model_identity=ONE), node("d", Role.DECODE))
    port = FakeDaemons()
    await (await world.pairing(port, *fleet)).pair(KEYED)
    assert named(port.admitted["http://p"][7]) == ("acme", bytes(range(48)), MATTERS)
    assert named(port.admitted["http://d"][7]) == ("", b"", None)


async def test_a_namespace_that_may_not_be_named_is_refused_before_anybody_is_asked(world):
    port, outcomes = FakeDaemons(), []
    pairing = await world.pairing(port)
    pairing.events.add_reader({PairingEnded: lambda _now_s, fact: outcomes.append(fact.outcome)})
    with pytest.raises(NamespaceError, match="'acme': it may name the default one"):
        await pairing.pair(KEYED, Namespaces())
    assert (port.calls, outcomes) == ([], ["namespace_forbidden"])
    await pairing.pair(KEYED, Namespaces(frozenset({"acme"})))


async def test_pages_of_other_weights_are_never_paired(world):
    fleet = (
        node("p1", Role.PREFILL, free=100, model_identity=ONE),
        node("p2", Role.PREFILL, free=90, model_identity=TWO),
        node("p3", Role.PREFILL, free=80),
        node("d", Role.DECODE, model_identity=TWO),
    )
    port = FakeDaemons()
    ticket = await (await world.pairing(port, *fleet)).pair(REQUEST)
    assert ticket.prefill.instance == "p2"
    listing = {one.instance: one for one in await (await world.directory()).listing()}
    assert (listing["p2"].ready, listing["d"].ready, listing["p2"].model_identity) == (True, True, TWO)
    for lonely in ("p1", "p3"):
        assert not listing[lonely].ready
        assert "the decode side holds 'v4' revision '2'" in listing[lonely].reasons[0]


async def test_a_decode_instance_that_does_not_say_takes_pages_of_any(world):
    fleet = (node("p", Role.PREFILL, model_identity=ONE), node("d", Role.DECODE))
    ticket = await (await world.pairing(FakeDaemons(), *fleet)).pair(REQUEST)
    assert (ticket.prefill.instance, ticket.decode.instance) == ("p", "d")


async def test_when_only_the_weights_differ_the_refusal_says_so(world):
    fleet = (node("p", Role.PREFILL, model_identity=ONE), node("d", Role.DECODE, model_identity=TWO))
    pairing = await world.pairing(FakeDaemons(), *fleet)
    with pytest.raises(FingerprintMismatchError, match=r"'v4' revision '2', the prefill side holds 'v4' revision '1'"):
        await pairing.pair(REQUEST)
    reasons = absences(await (await world.directory()).listing())
    assert any("tier.model_revision" in reason for reason in reasons)


async def test_nodes_of_one_instance_hold_one_model(world):
    directory = await world.directory(half("p", Role.PREFILL, 0, model_identity=ONE))
    with pytest.raises(ConflictError, match=r"its model_identity is 'v4' revision '2', that of node 'node-0' is"):
        await directory.register(half("p", Role.PREFILL, 1, model_identity=TWO))
