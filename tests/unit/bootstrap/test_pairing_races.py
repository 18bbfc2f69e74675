"""Two replicas, few pages, the same and other ids, cancels and lost callers, all at once: no double ticket, nothing leaked."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvbridge.api.directory import PairRequest, Ticket
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.pairing import PairingService
from kvbridge.core.errors import CapacityError, ConflictError, StaleError, UnknownRoomError
from kvbridge.core.ids import Role
from kvbridge.core.session.tables import RoomState
from tests.unit.bootstrap.fleet import LIMITS, FakeDaemons, node

pytestmark = pytest.mark.asyncio

ROOMS_EACH = 3
CALLERS = 24
IDS = 8


class ScarceDaemons(FakeDaemons):
    """Daemons with place for few rooms, each of whose answers takes its time; a room in use there is not replaced."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    async def _think(self) -> None:
        for _ in range(self._chance.randrange(6)):
            await asyncio.sleep(0)

    async def admit(self, url: str, request: AdmissionRequest) -> RoomReport:
        await self._think()
        rooms = self.admitted.setdefault(url, {})
        if request.room in rooms:
            kind = StaleError if request.generation < rooms[request.room].generation else ConflictError
            raise kind(f"room {request.room} is in use at {url}")
        if len(rooms) >= ROOMS_EACH:
            raise CapacityError(f"{url} is full")
        rooms[request.room] = request
        await self._think()
        return self._report(url, request.room)

    async def cancel(self, url: str, room: int, reason: str, *, generation: int) -> RoomReport:
        await self._think()
        return await super().cancel(url, room, reason, generation=generation)


@pytest.mark.parametrize("seed", range(6))
async def test_no_double_ticket_and_no_leaked_reservation(world, seed):
    chance = random.Random(seed)
    port = ScarceDaemons(chance)
    fleet = [node(name, Role.PREFILL) for name in ("p1", "p2")] + [node(name, Role.DECODE) for name in ("d1", "d2")]
    await world.directory(*fleet)
    stores = [world.store, world.store if not hasattr(world, "replica") else world.replica()]
    replicas = [PairingService(Directory(store, FakeDaemons()), store, port, **LIMITS) for store in stores]
    live: dict[int, Ticket] = {}
    generations: dict[int, list[int]] = {}
    outcomes: dict[str, int] = {}

    def note(what: str) -> None:
        outcomes[what] = outcomes.get(what, 0) + 1

    async def caller(number: int) -> None:
        room = chance.randrange(IDS)
        pairing = asyncio.ensure_future(replicas[number % 2].pair(PairRequest(room=room, prompt_tokens=300)))
        if chance.random() < 0.2:  # a caller that goes away somewhere on the way
            for _ in range(chance.randrange(20)):
                await asyncio.sleep(0)
            pairing.cancel()
        try:
            ticket = await pairing
        except (CapacityError, ConflictError) as error:
            note(error.code)
            return
        except asyncio.CancelledError:
            note("gone")
            return
        assert room not in live, "two tickets for one room"
        live[room] = ticket
        generations.setdefault(room, []).append(ticket.generation)
        note("ticket")
        if chance.random() < 0.7:
            del live[room]
            report = await replicas[chance.randrange(2)].cancel(room, "done")
            assert report.state is RoomState.ABORTED
            note("cancelled")

    await asyncio.gather(*(caller(number) for number in range(CALLERS)))
    reserved = port.generations()
    expected = {
        (url, room, ticket.generation)
        for room, ticket in live.items()
        for url in (*ticket.prefill.http_urls, *ticket.decode.http_urls)
    }
    assert reserved == expected
    for used in generations.values():
        assert used == sorted(set(used)), "a generation was used twice, or one fell"
    for room in live:
        await replicas[0].cancel(room, "end")
    assert port.rooms() == {}
    with pytest.raises(UnknownRoomError):
        await replicas[1].report(IDS + 1)
    assert outcomes["ticket"] >= ROOMS_EACH
