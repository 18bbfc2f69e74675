"""A room that is cancelled, given up or expired gives back everything on both sides, whatever its state."""

import socket
from collections.abc import Callable, Iterator

import pytest

from tests.faults.cells import State
from tests.faults.fault_cluster import TOKENS, FaultCluster
from tests.faults.stages import scene
from tests.helpers.live_rooms import all_free, http, reserve
from tests.helpers.local_servers import held_ports

STATES = (State.ADMITTED, State.OFFERED, State.BEGUN, State.PARTIAL, State.COMMITTED, State.CLAIMED)

Ending = Callable[[FaultCluster, int], object]
ENDINGS: dict[str, tuple[Ending, str]] = {
    # in the order of STATES:                                             adm off beg par com cla
    "DELETE on prefill": (lambda stage, room: stage.cancel(stage.prefill, room), "A/- A/a A/a A/a C/C C/C"),
    "DELETE on decode": (lambda stage, room: stage.cancel(stage.decode, room), "-/- A/A A/A A/A C/A C/A"),
    "DELETE on bootstrap": (lambda stage, room: stage.cancel(stage.bootstrap, room), "-/- A/Aa A/Aa A/Aa C/A C/A"),
    "prefill engine aborts": (lambda stage, room: stage.sender.call("abort", room), "A/- A/a A/a A/a C/C C/C"),
    "decode engine aborts": (lambda stage, room: stage.reader.call("abort", room), "-/- A/A A/A A/A C/A C/A"),
}


@pytest.fixture(scope="module")
def stage() -> Iterator[FaultCluster]:
    with scene() as opened:
        yield opened


@pytest.mark.faults_short
@pytest.mark.parametrize("ending", list(ENDINGS))
def test_an_ending_in_every_state(stage: FaultCluster, ending: str) -> None:
    end, row = ENDINGS[ending]
    expected = dict(zip(STATES, row.split(), strict=True))
    rooms = stage.bring([state for state in STATES if expected[state] != "-/-"], paired=ending == "DELETE on bootstrap")
    for room in rooms.values():
        end(stage, room)
    for state, room in rooms.items():
        _let_go(stage, state, room, ending)
        for daemon, letters in zip(stage.nodes, expected[state].split("/"), strict=True):
            assert stage.letter(daemon, room, letters)
    for daemon in stage.nodes:
        all_free(daemon)
        stage.accounted(daemon)
        assert not http("GET", daemon, "/ready").json()["reasons"]
    stage.cross(stage.ticket())


def _let_go(stage: FaultCluster, state: State, room: int, ending: str) -> None:
    """Engines stop using what they were told to stop using; the one that gave the room up has done so already."""
    if state in {State.BEGUN, State.PARTIAL} and ending != "prefill engine aborts":
        stage.sender.call("abort", room)
    if state is State.COMMITTED and stage.state(stage.decode, room) == "committed":
        stage.reader.call("claim", room, TOKENS)
        stage.reader.call("release", room)
    if state is State.CLAIMED and ending != "decode engine aborts":
        stage.reader.call("check", room, TOKENS)
        stage.reader.call("release", room)


LIMITS = {
    "begin_s": 12.0,
    "offer_s": 6.0,
    "early_offer_s": 3.0,
    "handshake_s": 6.0,
    "transfer_s": 12.0,
    "room_s": 18.0,
    "claim_s": 9.0,
}


def test_every_deadline() -> None:
    """A room for each limit, all at once: it fails with the name of the limit, and nothing stays behind."""
    server = socket.create_server(("127.0.0.1", 0))
    with server as listener, held_ports(1) as (closed,), scene(timeouts=LIMITS) as stage:
        silent, nobody = (f"tcp://127.0.0.1:{port}" for port in (listener.getsockname()[1], closed))
        rooms = stage.bring([State.ADMITTED, State.OFFERED, State.BEGUN, State.PARTIAL, State.COMMITTED])
        unknown = stage.admit_on_decode(1 << 40)
        unmet, lonely = (
            reserve(stage.decode, {"prompt_tokens": TOKENS, "prefill": [{"endpoint": endpoint}]})
            for endpoint in (silent, nobody)
        )
        cases = [
            (stage.prefill, rooms[State.ADMITTED], "deadline", "timeouts.offer_s"),
            (stage.prefill, rooms[State.OFFERED], "deadline", "timeouts.begin_s"),
            (stage.decode, rooms[State.OFFERED], "deadline", "timeouts.begin_s"),
            (stage.decode, unknown, "unknown_room", "timeouts.early_offer_s"),
            (stage.decode, lonely, "peer_failed", "timeouts.control_heartbeat_s"),
            (stage.decode, unmet, "deadline", "timeouts.handshake_s"),
            (stage.decode, rooms[State.COMMITTED], "deadline", "timeouts.claim_s"),
            (stage.prefill, rooms[State.BEGUN], "deadline", "timeouts.room_s"),
            (stage.decode, rooms[State.BEGUN], "deadline", "timeouts.room_s"),
            (stage.prefill, rooms[State.PARTIAL], "deadline", "timeouts.room_s"),
            (stage.decode, rooms[State.PARTIAL], "deadline", "timeouts.room_s"),
        ]
        for daemon, room, code, limit in cases:
            state, found, reason = stage.end(daemon, room)
            assert state in {"failed", "aborted"}, (limit, state, reason)
            assert found == code, (limit, reason)
            assert limit in reason
        for state in (State.BEGUN, State.PARTIAL):
            stage.sender.call("abort", rooms[state])
        for daemon in stage.nodes:
            all_free(daemon)
            stage.accounted(daemon)
        stage.cross(stage.ticket())
