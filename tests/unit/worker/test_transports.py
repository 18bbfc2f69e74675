"""A rank's transports are replaced and closed beside its work: it beats, and rooms go on, however long that takes."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvbridge.core.errors import DeadlineError, RegistrationError, TransportError
from kvbridge.core.wire import worker_messages
from kvbridge.core.wire.messages import Heartbeat
from kvbridge.worker import loop as rank_worker
from kvbridge.worker.loop import HEARTBEAT_INTERVAL_S
from kvbridge.worker.transports import RETRY_S, in_background
from tests.helpers.worker_bench import DONE, NOT_QUIET, Bench, FakeTransport, at_once, node_ranks

LIMIT_S = 20.0


class Elsewhere:
    """Work for other threads, which is done when a test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], Any], str, Future[Any]]] = []

    def __call__(self, work: Callable[[], Any], name: str) -> Future[Any]:
        outcome: Future[Any] = Future()
        self.waiting.append((work, name, outcome))
        return outcome

    @property
    def names(self) -> list[str]:
        return [name for _, name, _ in self.waiting]

    def go_on(self) -> None:
        """Do the waiting work."""
        waiting, self.waiting = self.waiting, []
        for work, name, outcome in waiting:
            done = at_once(work, name)
            error = done.exception()
            outcome.set_result(done.result()) if error is None else outcome.set_exception(error)


@pytest.fixture
def elsewhere() -> Elsewhere:
    return Elsewhere()


def ready_bench(elsewhere: Elsewhere, *transports: str) -> Bench:
    bench = Bench(*transports, background=elsewhere)
    bench.connect(ranks=node_ranks(*transports) if transports else None)
    bench.open()
    bench.link.said.clear()
    return bench


def sends_a_room(bench: Bench, transport: FakeTransport) -> bool:
    """Whether the worker beats, and a room goes through a transport from its order to its report."""
    bench.clock.advance(HEARTBEAT_INTERVAL_S)
    bench.order()
    transport.transfers[-1].state = DONE
    bench.worker.step()
    return bool(bench.link.take(Heartbeat)) and [sent.error_code for sent in bench.sent()] == [""]


def test_rooms_go_on_while_endpoints_are_renewed(elsewhere):
    """Registering a pool anew may take minutes, so the node gets new endpoints only when they are there."""
    bench = ready_bench(elsewhere, "one", "two")
    old = bench.transport()
    bench.say(worker_messages.RenewEndpoints(epoch=1), steps=2)
    assert elsewhere.names == ["build transports"]
    assert sends_a_room(bench, old)
    assert bench.link.take(worker_messages.WorkerReady) == []
    elsewhere.go_on()
    bench.worker.step()
    [ready] = bench.link.take(worker_messages.WorkerReady)
    assert ready.epoch == 1
    assert [(each.transport, each.epoch) for each in ready.description.endpoints] == [("one", 1), ("two", 1)]
    assert ready.description.endpoints[0].data == b"me, epoch 1"
    bench.say(steps=2)
    assert (old.closed, elsewhere.names) == (False, []), "peers write by it until it is revoked"
    bench.say(worker_messages.RevokeEndpoints(before_epoch=1))
    assert elsewhere.names == ["close one", "close two"]


def test_rooms_go_on_while_the_successor_of_a_transport_that_was_not_quiet_is_built(elsewhere):
    bench = ready_bench(elsewhere)
    old = bench.transport()
    bench.order()
    bench.end(NOT_QUIET)
    assert bench.sent()[0].quiet is False
    bench.say(worker_messages.CloseRoom(room=1, generation=1))
    bench.open(room=2)
    bench.order(room=2)
    old.transfers[-1].state = DONE
    bench.clock.advance(HEARTBEAT_INTERVAL_S)
    bench.worker.step()
    assert [(sent.room, sent.error_code) for sent in bench.sent()] == [(2, "")]
    assert bench.link.take(Heartbeat)
    assert elsewhere.names == ["build transports"], "once, though the order is looked at again"
    elsewhere.go_on()
    bench.say(steps=2)
    assert elsewhere.names == ["close one"]
    assert [one.quiet for one in bench.link.take(worker_messages.RoomClosed)] == [False], "its end is the proof"
    elsewhere.go_on()
    bench.worker.step()
    assert old.closed
    assert [message.quiet for message in bench.link.take(worker_messages.RoomClosed)] == [True]


def test_endpoints_that_cannot_be_renewed_work_on_and_are_tried_again(elsewhere):
    """The fence waits, its node tells why, and rooms that write by the earlier endpoints go on."""
    bench = ready_bench(elsewhere)
    old = bench.transport()
    bench.refuse_build = RegistrationError("no memory can be locked")
    with capture_logs() as lines:
        bench.say(worker_messages.RenewEndpoints(epoch=1))
        elsewhere.go_on()
        bench.worker.step()
    [told] = bench.link.take(worker_messages.TransportsNotBuilt)
    assert (told.transports, told.error_code) == (("one",), "registration_failed")
    assert [line["reason"] for line in lines if line["event"] == "transports_not_built"] == ["no memory can be locked"]
    assert sends_a_room(bench, old)
    assert (bench.link.take(worker_messages.WorkerReady), elsewhere.names) == ([], [])
    bench.refuse_build = None
    bench.clock.advance(RETRY_S)
    bench.worker.step()
    elsewhere.go_on()
    bench.worker.step()
    assert [ready.epoch for ready in bench.link.take(worker_messages.WorkerReady)] == [1]


def test_successors_are_taken_up_together_or_not_at_all(elsewhere, monkeypatch):
    """A successor that was built before another one failed is closed, so that its memory is not locked twice."""
    bench = ready_bench(elsewhere, "one", "two")
    register = FakeTransport.register

    def refuse(transport: FakeTransport, memory) -> None:
        if transport.name == "two":
            raise RegistrationError("no memory can be locked")
        register(transport, memory)

    monkeypatch.setattr(FakeTransport, "register", refuse)
    bench.say(worker_messages.RenewEndpoints(epoch=1))
    elsewhere.go_on()
    bench.worker.step()
    assert [[each.closed for each in bench.built[name]] for name in ("one", "two")] == [[False, True], [False, True]]
    assert bench.link.take(worker_messages.WorkerReady) == []


def revoking_bench(elsewhere: Elsewhere) -> tuple[Bench, FakeTransport]:
    """A bench whose earlier endpoints are being closed."""
    bench = ready_bench(elsewhere)
    old = bench.transport()
    bench.say(worker_messages.RenewEndpoints(epoch=1))
    elsewhere.go_on()
    bench.say(worker_messages.RevokeEndpoints(before_epoch=1))
    bench.connect()
    bench.say(steps=2)
    assert elsewhere.names == ["close one"]
    return bench, old


def test_rooms_go_on_while_a_transport_closes_and_endpoints_count_until_it_has(elsewhere):
    bench, old = revoking_bench(elsewhere)
    assert sends_a_room(bench, bench.transport())
    assert bench.link.take(worker_messages.EndpointsRevoked) == []
    bench.transport().writers_before = 1  # a process of this host has not let go
    elsewhere.go_on()
    bench.worker.step()
    assert old.closed
    assert bench.link.take(worker_messages.EndpointsRevoked) == []
    bench.transport().writers_before = 0
    bench.say(steps=2)
    assert [revoked.before_epoch for revoked in bench.link.take(worker_messages.EndpointsRevoked)] == [1]


def test_a_transport_that_does_not_close_ends_the_worker(monkeypatch):
    """The end of the process is the only proof that is left."""
    bench = Bench()
    monkeypatch.setattr(bench.transport(), "close", refuse_to_close)
    bench.say(worker_messages.RenewEndpoints(epoch=1))
    with pytest.raises(TransportError, match="did not return"):
        bench.say(worker_messages.RevokeEndpoints(before_epoch=1), steps=2)


def refuse_to_close() -> None:
    raise TransportError("the library did not return")


@pytest.fixture
def clock_runs(monkeypatch) -> Callable[[Bench], None]:
    """Advance a bench's clock with each pause of its worker."""

    def start(bench: Bench) -> None:
        monkeypatch.setattr(rank_worker.time, "sleep", lambda _: bench.clock.advance(1.0))

    return start


def test_transports_that_close_for_ever_are_given_one_limit_together(elsewhere, clock_runs):
    bench = ready_bench(elsewhere, "one", "two")
    clock_runs(bench)
    begun_s = bench.clock()
    with pytest.raises(DeadlineError, match="its transports have not closed within"):
        bench.worker.close()
    assert bench.clock() - begun_s <= bench.worker._limits.close_s + 1.0
    assert not bench.worker.closed
    assert elsewhere.names == ["close two", "close one"]


@pytest.mark.parametrize("ended", [True, False])
def test_a_worker_that_ends_while_a_successor_is_built_closes_that_too(elsewhere, clock_runs, ended):
    bench = ready_bench(elsewhere)
    clock_runs(bench)
    bench.say(worker_messages.RenewEndpoints(epoch=1))
    if ended:
        elsewhere.go_on()
    bench.link.send = lambda _: elsewhere.go_on()
    bench.worker.close()
    assert [transport.closed for transport in bench.built["one"]] == [True, True]
    assert bench.worker.closed


@pytest.mark.parametrize("error", [None, TransportError("the GPU has fallen off the bus")])
def test_a_gpu_that_hangs_keeps_no_transport_open_and_no_worker_from_ending(monkeypatch, clock_runs, error):
    """Peers' writers are shut out first; the GPU's own writes end with the process, which the worker asks for."""
    bench, closed = Bench(), []

    def idle() -> bool:
        assert bench.transport().closed
        if error is not None:
            raise error
        return False

    clock_runs(bench)
    monkeypatch.setattr(bench.worker._copies, "idle", idle)
    monkeypatch.setattr(bench.worker._copies, "close", lambda: closed.append(True))
    with pytest.raises(TransportError if error else DeadlineError, match="GPU"):
        bench.worker.close()
    assert bench.transport().closed
    assert (bench.worker.closed, closed) == (False, [])


def test_work_is_done_here_when_no_thread_can_be_started(monkeypatch):
    def refuse(_) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert in_background(threading.current_thread, "close one").result(0) is threading.current_thread()
