"""The rounds by which writers that give no proof are shut out."""

from types import SimpleNamespace

import pytest

from kvbridge.core.ids import Rank
from kvbridge.core.wire.worker_messages import RenewEndpoints, RevokeEndpoints
from kvbridge.node.decode.fence import Fence, FencePhase
from kvbridge.pool.accounts.book import Owner
from tests.helpers.manual_clock import ManualClock
from tests.helpers.rooms import RecordedEvents

ONE, TWO = Rank(pp=0, tp=0), Rank(pp=0, tp=1)
FAILED, OTHER, LATER = Owner(1, 1), Owner(2, 1), Owner(3, 1)


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.events = RecordedEvents()
        self.sent: list[tuple[Rank, object]] = []
        self.offers: set[Owner] = set()
        self.shut: list[set[Owner]] = []
        self.gone: set[Rank] = set()
        workers = SimpleNamespace(
            layers=(ONE, TWO),
            send=lambda rank, message: self.sent.append((rank, message)),
            has_endpoints=lambda rank: rank not in self.gone,
        )
        self.fence = Fence(workers, self.events, fence_s=30.0, clock=self.clock)
        self.fence.rooms = SimpleNamespace(
            open_offers=lambda: set(self.offers), shut=lambda owners: self.shut.append(set(owners))
        )

    def orders(self) -> dict[Rank, object]:
        found, self.sent = dict(self.sent), []
        return found

    def renewed(self, epoch: int = 1) -> None:
        for rank in (ONE, TWO):
            self.fence.ready(rank, epoch)

    def revoked(self, epoch: int = 1) -> None:
        for rank in (ONE, TWO):
            self.fence.revoked(rank, epoch)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("in_time", [True, False])
def test_rooms_that_are_being_written_end_in_peace_or_are_cut_off(bench, in_time):
    bench.offers = {OTHER}
    bench.fence.ask(FAILED)
    bench.renewed()
    bench.orders()
    bench.offers |= {LATER}  # offered with the new endpoints: nobody waits for it
    bench.clock.advance(29)
    bench.fence.tick()
    assert bench.orders() == {}
    assert bench.fence.status().waits_for_rooms == 1
    if in_time:
        bench.offers = {LATER}
    else:
        bench.clock.advance(1)
    bench.fence.tick()
    assert set(bench.orders()) == {ONE, TWO}
    assert bench.fence.phase is FencePhase.REVOKING


@pytest.mark.parametrize("phase", list(FencePhase)[1:])
def test_a_room_that_asks_during_a_round_is_served_by_the_next(bench, phase):
    bench.offers = {OTHER}
    bench.fence.ask(FAILED)
    if phase is not FencePhase.RENEWING:
        bench.renewed()
    if phase is FencePhase.REVOKING:
        bench.offers = set()
        bench.fence.tick()
    assert bench.fence.phase is phase
    bench.fence.ask(LATER)
    bench.fence.ask(LATER)
    bench.fence.ask(FAILED)
    bench.offers = set()
    bench.renewed()
    bench.fence.tick()
    bench.revoked()
    assert bench.shut == [{FAILED}]
    bench.renewed(2)
    bench.revoked(1)
    assert len(bench.shut) == 1
    bench.revoked(2)
    assert bench.shut == [{FAILED}, {LATER}]
    assert bench.fence.epoch == 2


def test_a_worker_that_took_another_s_place_answers_for_it(bench):
    bench.fence.ask(FAILED)
    bench.fence.ready(ONE, 0)  # it became ready before it heard of the new epoch
    bench.fence.ready(TWO, 1)
    assert bench.fence.phase is FencePhase.RENEWING
    bench.fence.ready(ONE, 1)
    bench.fence.revoked(TWO, 1)
    bench.orders()
    bench.fence.ready(ONE, 1)
    assert bench.orders() == {ONE: RevokeEndpoints(before_epoch=1)}
    bench.fence.ready(TWO, 1)
    assert bench.orders() == {}
    bench.fence.revoked(ONE, 1)
    assert bench.shut == [{FAILED}]


@pytest.mark.parametrize("goes_in", [FencePhase.IDLE, FencePhase.RENEWING, FencePhase.REVOKING])
def test_a_rank_that_is_gone_has_nothing_to_close(bench, goes_in):
    """An engine may close one of its workers, and never open it again."""
    bench.gone = {TWO} if goes_in is FencePhase.IDLE else set()
    bench.fence.ask(FAILED)
    bench.fence.tick()
    assert bench.fence.phase is FencePhase.RENEWING
    if goes_in is FencePhase.REVOKING:
        bench.renewed()
    else:
        bench.gone = {TWO}
        bench.fence.ready(ONE, 1)
        bench.fence.tick()
    assert bench.fence.phase is FencePhase.REVOKING
    bench.fence.revoked(ONE, 1)
    bench.fence.tick()
    if goes_in is FencePhase.REVOKING:
        assert bench.shut == []
        bench.gone = {TWO}
        bench.fence.tick()
    assert bench.shut == [{FAILED}]


def test_a_lost_path_is_shut_alone_and_its_room_is_not_waited_for(bench):
    bench.offers = {OTHER, LATER}
    assert bench.fence.ask_path(OTHER, "nixl", 0)
    assert bench.orders() == dict.fromkeys((ONE, TWO), RenewEndpoints(epoch=1, transports=("nixl",)))
    bench.renewed()
    assert bench.fence.status().transports == ("nixl",)
    assert bench.fence.status().waits_for_rooms == 1, "the other room may still write by it"
    bench.offers = {OTHER}
    bench.fence.tick()
    assert bench.orders() == dict.fromkeys((ONE, TWO), RevokeEndpoints(before_epoch=1, transports=("nixl",)))
    bench.fence.ready(ONE, 1)
    assert bench.orders() == {ONE: RevokeEndpoints(before_epoch=1, transports=("nixl",))}
    bench.revoked()
    assert bench.shut == [{OTHER}]


def test_rooms_that_lose_an_endpoint_that_is_being_shut_are_served_at_once(bench):
    bench.offers = {OTHER, LATER}
    bench.fence.ask_path(OTHER, "nixl", 0)
    bench.renewed()
    assert bench.fence.ask_path(LATER, "nixl", 0)
    bench.fence.tick()
    assert bench.fence.phase is FencePhase.REVOKING
    assert bench.fence.ask_path(FAILED, "nixl", 0)
    bench.revoked()
    assert bench.shut == [{OTHER, LATER, FAILED}]
    assert bench.fence.phase is FencePhase.IDLE


def test_what_is_shut_already_is_not_shut_again(bench):
    bench.fence.ask_path(OTHER, "nixl", 0)
    bench.renewed()
    bench.revoked()
    assert not bench.fence.ask_path(LATER, "nixl", 0)
    assert bench.fence.phase is FencePhase.IDLE
    assert bench.fence.ask_path(LATER, "local", 0), "another transport's endpoint is as it was"
    bench.renewed(2)
    bench.revoked(2)
    bench.fence.ask(FAILED)
    bench.renewed(3)
    bench.revoked(3)
    assert not bench.fence.ask_path(LATER, "mooncake", 2)


@pytest.mark.parametrize(("transport", "epoch"), [("mooncake", 0), ("nixl", 1)])
def test_a_path_that_the_round_does_not_shut_is_served_by_the_next(bench, transport, epoch):
    """Another transport, or the new endpoint."""
    bench.fence.ask_path(OTHER, "nixl", 0)
    assert bench.fence.ask_path(OTHER, transport, epoch)
    bench.renewed()
    bench.orders()
    bench.revoked()
    assert bench.shut == [set()], "the room is not through"
    assert bench.orders() == dict.fromkeys((ONE, TWO), RenewEndpoints(epoch=2, transports=(transport,)))
    bench.renewed(2)
    bench.revoked(2)
    assert bench.shut == [set(), {OTHER}]
