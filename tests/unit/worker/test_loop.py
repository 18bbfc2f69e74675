import pytest
from structlog.testing import capture_logs

from kvbridge.core.errors import InvalidInputError, RegistrationError, TransportError
from kvbridge.core.ids import IndexSpace, MemoryKind
from kvbridge.core.plan.operations import Section
from kvbridge.core.wire.messages import Heartbeat, StreamPoint, TransportEndpoint, WireTable
from kvbridge.core.wire.worker_messages import (
    CloseRoom,
    DisconnectPeer,
    PeerConnected,
    RoomClosed,
    Send,
    Sent,
    Shutdown,
    TransportsNotBuilt,
    WorkerProgress,
    WorkerReady,
)
from kvbridge.kernels.cuda import runtime
from kvbridge.worker import loop as rank_worker, peers as rank_peers
from kvbridge.worker.rank import BUSY_PAUSE_S, SHORTEST_PAUSE_S, Pauses
from kvbridge.worker.transports import RETRY_S
from tests.helpers.manual_clock import ManualClock
from tests.helpers.rooms import DECODE, full_amounts
from tests.helpers.worker_bench import (
    DONE,
    NOT_QUIET,
    OTHER,
    QUIET,
    TOKENS,
    Bench,
    FakeConnection,
    node_ranks,
    ready_bench,
    tables,
)


def test_a_worker_registers_reports_serves_and_tears_down():
    bench = Bench()
    bench.log.clear()
    bench.built.clear()
    bench.link.said.clear()
    bench.link.inbox.append(Shutdown())
    bench.worker._transports._built.clear()
    bench.worker.run()
    assert [type(message) for message in bench.link.said] == [WorkerProgress, WorkerReady]
    assert bench.link.said[1].description.endpoints == (TransportEndpoint(transport="one", data=b"me"),)
    assert bench.log == ["register one", "register one", "close one"]


def test_a_transport_that_cannot_be_built_ends_the_worker_and_closes_the_others():
    bench = Bench("one", "two")
    bench.log.clear()
    bench.refuse_build = TransportError("no device")
    with pytest.raises(TransportError):
        bench.worker.run()
    assert bench.log == ["close two", "close one"]


def test_a_flood_of_messages_does_not_hold_transfers_up(monkeypatch):
    monkeypatch.setattr(rank_worker, "MESSAGES_A_STEP", 3)
    bench = ready_bench()
    bench.order()
    bench.transport().transfers[0].state = DONE
    bench.say(*[Heartbeat()] * 10)
    assert len(bench.sent()) == 1
    assert len(bench.link.inbox) == 7


def test_an_order_is_planned_moved_and_reported():
    bench = ready_bench()
    number = bench.order()
    [transfer] = bench.transport().transfers
    assert transfer.operations.total_bytes > 0
    assert bench.sent() == []
    bench.clock.advance(2)
    bench.end(DONE)
    [sent] = bench.sent()
    assert (sent.order, sent.error_code, sent.quiet) == (number, "", True)
    assert {kind: amount.lane_rows for kind, amount in sent.amounts.items()} == {
        kind: amount.lane_rows for kind, amount in full_amounts(TOKENS).items()
    }
    assert set(sent.seconds) == {"plan", "submit", "first_byte", "move"}
    assert sent.seconds["move"] == 2.0


@pytest.mark.parametrize(
    ("prepare", "code"),
    [
        (lambda bench: bench.open(destination=tables(3)), "page_out_of_bounds"),
        (lambda bench: bench.open(destination=tables(3, 400)), "page_out_of_bounds"),
        (lambda bench: bench.open(peer="nobody"), "not_ready"),
        (lambda bench: bench.open(destination=(WireTable(space=IndexSpace.FULL, ids=b"abc"),)), "invalid_input"),
        (lambda bench: None, "conflict"),
    ],
    ids=["short table", "page beyond", "stranger", "malformed", "not open"],
)
def test_an_order_that_cannot_be_carried_out_fails_alone(prepare, code):
    bench = Bench()
    bench.connect()
    prepare(bench)
    bench.open(room=2)
    bench.order(room=2)
    bench.order(room=1)
    [sent] = bench.sent()
    assert (sent.room, sent.error_code) == (1, code)
    bench.end(DONE)
    assert bench.sent()[0].error_code == ""


def test_a_defect_in_planning_fails_the_order_and_nobody_else(monkeypatch):
    bench = ready_bench()
    monkeypatch.setattr("kvbridge.worker.orders.plan", lambda *args, **fields: 1 // 0)
    bench.order()
    [sent] = bench.sent()
    assert sent.error_code == "internal"
    assert "ZeroDivisionError" in sent.error


def test_a_submission_that_is_refused_waits_for_what_was_submitted_before():
    bench = Bench("one", "two")
    bench.connect(ranks=(*node_ranks("one"), *node_ranks("two", data=b"other")))
    bench.open()
    bench.transport("two").refuse_submit = InvalidInputError("not registered")
    bench.order()
    [transfer] = bench.transport("one").transfers
    assert transfer.aborted == "not registered"
    assert bench.sent() == []
    bench.end(QUIET)
    assert bench.sent()[0].error_code == "invalid_input"


def test_a_room_of_which_all_was_sent_is_forgotten_without_an_answer():
    bench = ready_bench()
    bench.order()
    bench.end(DONE)
    assert [sent.error_code for sent in bench.sent()] == [""]
    bench.say(CloseRoom(room=1, generation=1, all_sent=True), CloseRoom(room=7, generation=1, all_sent=True))
    assert bench.closed == []
    bench.order()
    assert bench.sent()[0].error_code == "conflict", "the room is not open any more"


def test_closing_a_room_that_never_opened_waits_for_its_orders_all_the_same():
    bench = Bench()
    section = Section(prompt_tokens=TOKENS, start_token=0, stop_token=TOKENS)
    bench.say(Send(room=5, generation=1, order=1, section=section), CloseRoom(room=5, generation=1))
    assert [type(one) for one in bench.link.said if not isinstance(one, WorkerProgress)] == [Sent, RoomClosed]


def test_a_peer_that_cannot_be_reached_is_reported_and_keeps_nothing():
    bench = Bench("one", "two")
    ranks = (*node_ranks("one"), *node_ranks("elsewhere"))
    bench.connect(ranks=ranks)
    [connected] = bench.link.take(PeerConnected)
    assert connected.error_code == "transport_failed"
    assert "elsewhere" not in connected.error
    assert "one: the peer does not offer it" in connected.error
    bench.say()
    assert bench.transport().peers == []


def test_malformed_endpoints_are_the_peer_s_fault_and_not_ours():
    bench = Bench()
    bench.transport().refuse = InvalidInputError("endpoint " * 2_000)
    bench.connect()
    assert bench.link.take(PeerConnected)[0].error_code == "transport_failed"


def test_layouts_that_differ_are_told_once_with_what_they_cost(monkeypatch):
    monkeypatch.setattr(rank_peers, "page_operations", lambda _: (62, 3))
    bench = Bench()
    with capture_logs() as lines:
        bench.connect()
        bench.order()
    (line,) = [line for line in lines if line["event"] == "layouts_differ"]
    assert (line["peer"], line["page_operations"], line["page_operations_alike"]) == (DECODE, 62, 3)
    assert "each page takes 62 operations where 3 would do" in line["reason"]


def test_a_peer_is_disconnected_only_when_nothing_is_in_flight_to_it():
    bench = ready_bench()
    bench.order()
    bench.say(DisconnectPeer(peer=DECODE), DisconnectPeer(peer="nobody"))
    assert len(bench.transport().peers) == 1
    bench.order()
    assert bench.sent()[0].error_code == "not_ready"
    bench.end(QUIET)
    assert bench.sent()[0].error_code == "peer_failed"
    bench.worker.step()
    assert bench.transport().peers == []


def test_a_peer_that_has_changed_is_reached_anew_and_what_is_under_way_ends_in_peace():
    bench = ready_bench()
    bench.order()
    bench.connect(ranks=node_ranks(data=b"moved"))
    assert len(bench.link.take(PeerConnected)) == 1
    assert [peer.data for peer in bench.transport().peers] == [b"peer0", b"moved0"]
    assert bench.transport().transfers[0].aborted == ""
    bench.order()
    assert bench.transport().peers[1].transfers == [bench.transport().transfers[1]]
    bench.end(DONE, which=0)
    bench.worker.step()
    assert [peer.data for peer in bench.transport().peers] == [b"moved0"]
    bench.end(DONE)
    assert [(sent.order, sent.error_code) for sent in bench.sent()] == [(1, ""), (2, "")]


def silent_bench() -> Bench:
    """A bench that is connected to one node, and is connecting to another that does not answer."""
    bench = ready_bench()
    bench.transport().silent.add(b"other0")
    bench.connect(OTHER, node_ranks(data=b"other"))
    bench.open(room=2, peer=OTHER)
    return bench


def test_one_rank_that_cannot_be_reached_ends_the_attempt_for_all():
    bench = Bench("one", "two")
    bench.transport().silent.add(b"silent0")
    bench.transport("two").refuse = TransportError("no route")
    bench.connect(ranks=(*node_ranks("one"), *node_ranks("one", data=b"silent"), *node_ranks("two", data=b"gone")))
    [connected] = bench.link.take(PeerConnected)
    assert "no route" in connected.error
    bench.say()
    assert (bench.transport().peers, bench.transport().given_up) == ([], [b"silent0"])


@pytest.mark.parametrize("where", ["transport", "layouts"])
def test_a_defect_while_a_peer_is_connected_ends_that_attempt_alone(monkeypatch, where):
    """The node learns that the peer cannot be reached, and rooms of other peers go on."""
    bench = ready_bench()
    bench.order()
    if where == "transport":
        bench.transport().refuse = OverflowError("int too large")
    else:
        monkeypatch.setattr(rank_peers, "page_operations", lambda _: 1 // 0)
    with capture_logs() as lines:
        bench.connect(OTHER, node_ranks(data=b"other"))
    [connected] = bench.link.take(PeerConnected)
    assert (connected.peer, connected.error_code) == (OTHER, "transport_failed" if where == "transport" else "internal")
    assert "please report it" in connected.error
    assert [line["peer"] for line in lines if line["event"] == "work_failed" and line["exc_info"]] == [OTHER]
    bench.say()
    assert [peer.data for peer in bench.transport().peers] == [b"peer0"]
    bench.end(DONE)
    assert bench.sent()[0].error_code == ""


@pytest.mark.parametrize("error", [TransportError("nixl could not forget it"), OSError("too many open files")])
def test_a_peer_that_a_transport_does_not_forget_ends_nothing(monkeypatch, error):
    bench = ready_bench()
    bench.connect(OTHER, node_ranks(data=b"other"))
    bench.order()

    def refuse(peer) -> None:
        raise error

    monkeypatch.setattr(bench.transport(), "disconnect", refuse)
    with capture_logs() as lines:
        bench.say(DisconnectPeer(peer=OTHER), steps=2)
    [line] = [line for line in lines if line["event"] == "peer_not_forgotten"]
    assert str(error) in line["reason"]
    bench.end(DONE)
    assert bench.sent()[0].error_code == ""


def test_an_attempt_that_cannot_be_given_up_ends_nothing(monkeypatch):
    bench = silent_bench()

    def refuse(_) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(FakeConnection, "cancel", refuse)
    with capture_logs() as lines:
        bench.say(DisconnectPeer(peer=OTHER), steps=2)
    assert [line["peer"] for line in lines if line["event"] == "attempt_not_given_up"] == [OTHER]
    monkeypatch.undo()
    bench.order()
    bench.end(DONE)
    assert bench.sent()[0].error_code == ""


@pytest.mark.parametrize("verb", ["submit", "poll"])
def test_a_defect_of_a_transport_fails_the_order_and_counts_as_not_quiet(monkeypatch, verb):
    """The sent bytes are unknown, so the room's pages stay until the transport has been closed."""
    bench = ready_bench()
    old = bench.transport()
    if verb == "submit":
        old.refuse_submit = ZeroDivisionError("a defect")
        bench.order()
    else:
        bench.order()
        monkeypatch.setattr(old.transfers[0], "poll", lambda: 1 // 0)
        old.transfers[0].state = NOT_QUIET
        bench.worker.step()
    bench.say(steps=2)
    [sent] = bench.sent()
    assert (sent.quiet, sent.in_transit) == (False, True)
    assert "ZeroDivisionError" in sent.error
    assert old.closed
    bench.order()
    bench.end(DONE)
    assert bench.sent()[0].error_code == ""


def test_a_transfer_that_cannot_be_aborted_is_waited_for(monkeypatch):
    bench = ready_bench()
    bench.order()
    monkeypatch.setattr(bench.transport().transfers[0], "abort", lambda reason: 1 // 0)
    bench.say(CloseRoom(room=1, generation=1))
    assert bench.closed == []
    bench.end(QUIET)
    assert bench.closed == [1]


def test_a_transfer_that_is_not_quiet_is_told_at_once_and_its_room_closed_after_its_transport():
    bench = ready_bench()
    bench.order()
    old = bench.transport()
    bench.open(room=2, peer=OTHER)
    bench.connect(OTHER, node_ranks(data=b"other"))
    bench.order(room=2)
    bench.link.said.clear()
    bench.log.clear()
    bench.end(NOT_QUIET, which=0)
    [sent] = bench.sent()
    assert (sent.room, sent.error_code, sent.quiet, sent.in_transit) == (1, "transport_failed", False, True)
    assert not old.closed, "another peer's transfer is under way"
    bench.say(CloseRoom(room=1, generation=1))
    [closed] = bench.link.take(RoomClosed)
    assert (closed.quiet, "would not become quiet" in closed.reason) == (False, True)
    assert [answer.transports for answer in bench.link.take(PeerConnected)] == [("one",), ("one",)]
    assert len(bench.link.take(WorkerReady)) == 1
    assert bench.transport() is not old
    bench.order(room=2)
    assert len(bench.transport().transfers) == 1, "what is new goes through the successor"
    assert old.transfers[1].aborted == ""
    old.transfers[1].state = DONE
    bench.worker.step()
    assert old.closed
    [closed] = bench.link.take(RoomClosed)
    assert (closed.room, closed.quiet) == (1, True)
    bench.end(DONE)
    assert [(sent.room, sent.error_code) for sent in bench.sent()] == [(2, ""), (2, "")]


def test_a_transport_that_cannot_be_replaced_is_told_of_and_given_up():
    """Only its end proves anything for its room. The worker uses its other transports, and builds a new one later."""
    bench = Bench("one", "two")
    bench.connect(ranks=node_ranks("one"))
    bench.connect(OTHER, node_ranks("one", "two", data=b"second"))
    bench.open()
    bench.open(room=2, peer=OTHER)
    bench.order()
    old = bench.transport()
    bench.link.said.clear()
    bench.refuse_build = RegistrationError("no memory can be locked")
    bench.end(NOT_QUIET)
    bench.say(CloseRoom(room=1, generation=1), steps=2)
    assert old.closed
    assert [(room.room, room.quiet) for room in bench.link.take(RoomClosed)] == [(1, True)]
    [told] = bench.link.take(TransportsNotBuilt)
    failed = (("one",), "registration_failed", "no memory can be locked")
    assert (told.transports, told.error_code, told.error) == failed
    answers = {answer.peer: answer for answer in bench.link.take(PeerConnected)}
    assert answers[OTHER].transports == ("two",)
    assert "one is not there at present" in answers[DECODE].error
    bench.order(room=2)
    bench.end(DONE, "two")
    assert [sent.error_code for sent in bench.sent() if sent.room == 2] == [""]
    assert bench.link.take(WorkerReady) == []
    bench.refuse_build = None
    bench.worker.step()
    assert bench.transport() is old, "it is tried again after a while"
    bench.clock.advance(RETRY_S)
    bench.worker.step()
    assert bench.transport() is not old
    assert len(bench.link.take(WorkerReady)) == 1, "so the node has peers connected by it"
    bench.connect()
    assert [answer.error_code for answer in bench.link.take(PeerConnected)] == [""]


def test_an_engine_that_is_gone_fails_its_order_alone(monkeypatch):
    bench, done = ready_bench(), set()

    def reached(points) -> bool:
        rings = {point.ring for point in points}
        if "broken" in rings:
            raise TransportError("the engine's GPU cannot be asked")
        return rings <= done

    monkeypatch.setattr(bench.worker._points, "reached", reached)
    bench.open(room=2)
    waiting, broken = (
        bench.order(room=room, after=(StreamPoint(ring=ring, handle=bytes(64), device_uuid="0" * 32),))
        for room, ring in ((2, "slow"), (1, "broken"))
    )
    (sent,) = bench.sent()
    assert (sent.order, sent.error_code, sent.quiet) == (broken, "transport_failed", True)
    assert "cannot be asked" in sent.error
    done.add("slow")
    bench.say()
    bench.end(DONE)
    assert [(sent.order, sent.error_code) for sent in bench.sent()] == [(waiting, "")]


def test_a_worker_of_a_gpu_looks_sooner_after_something_has_moved(monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(rank_worker.time, "sleep", pauses.append)
    monkeypatch.setattr(runtime, "reason_without_device", lambda: "there is none")
    bench = Bench(kind=MemoryKind.VRAM)
    bench.connect()
    bench.open()
    bench.order()
    bench.worker.step()
    bench.clock.advance(1.0)
    bench.worker.step()
    assert pauses[-2:] == [SHORTEST_PAUSE_S, BUSY_PAUSE_S]


def test_a_gpus_transfer_is_answered_for_within_a_fiftieth_of_its_time() -> None:
    clock = ManualClock()
    pauses = Pauses(clock, with_gpu=True)
    assert pauses.next_s() == SHORTEST_PAUSE_S
    for waited_s, expected_s in ((0.002, 0.00004), (0.004, 0.00008), (1.0, BUSY_PAUSE_S)):
        pauses.moved()
        clock.advance(waited_s)
        assert pauses.next_s() == pytest.approx(expected_s)
    pauses.moved()
    assert pauses.next_s() == SHORTEST_PAUSE_S
