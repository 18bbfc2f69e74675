"""Byte for byte through real daemons: owned pools over every transport, and pools that an engine brings on either side.

One engine process (this one) serves all ranks of a node. `test_bytes_exact` goes through every split and length; here it is the
daemons in between that must not mix anything up.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import numpy.typing as npt
import pytest

from kvbridge.core.errors import InvalidInputError, RoomFailedError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, Tables
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.decode import DecodeEngine, DecodeRoom
from kvbridge.engine.prefill import PrefillEngine, PrefillRoom
from tests.contract.harness import BACKENDS, require_library
from tests.helpers.cluster import Cluster, cluster, eventually, live_rows_only
from tests.helpers.live_rooms import check_rows, ends, live_cluster, metric, report, write
from tests.helpers.matrices import kept
from tests.helpers.rank_harness import Case, Setting, draw_tables
from tests.helpers.rank_pools import CANARY, Canvas, EngineMemory, Form, Ranks

TINY = preset("tiny-v4")
FULL, SWA, REQUEST, HOST = IndexSpace.FULL, IndexSpace.SWA, IndexSpace.REQUEST, IndexSpace.HOST
C4_KV = frozenset({ComponentKind.C4_KV})
CLAIM_S = 20.0
LONG = Case(4354, (1025, 3001))

pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def with_logs(running: Cluster) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        for daemon in (running.prefill, running.decode):
            error.add_note(f"{daemon.name}:\n{daemon.log(20)}")
        raise


def check_room(reader: DecodeEngine, room: DecodeRoom, *, host_copies: int = 1) -> None:
    """Every rank's device copy and the host pool hold what prefill wrote.

    C4 entries cross once for each host memory of the node, the others once for each of the two decode ranks.
    """
    check_rows(reader, room)
    assert set(room.metadata.values()) == {b"first token"}
    for component in TINY.components:
        copies = host_copies if component.kind in C4_KV else 2
        rows = component.live_rows(room.prompt_tokens).count
        due = rows * len(component.layers) * copies
        amount = room.amounts.get(component.kind)
        assert (amount.lane_rows if amount else 0) == due
        padding = rows // component.slots_per_page * (component.page_bytes() - component.lane_block_bytes)
        least, most = due * component.row_bytes, due * component.row_bytes + padding * len(component.layers) * copies
        assert least <= (amount.bytes if amount else 0) <= most


def mapped_memory(engine: DecodeEngine) -> list[npt.NDArray[np.uint8]]:
    return [np.frombuffer(mapping.buffer, dtype=np.uint8) for mapping in engine._memory.mapped.mappings]


@pytest.mark.parametrize(
    "setting",
    [
        "mooncake layer_first",
        "local page_first",
        *(kept(setting, False) for setting in ("nixl layer_first", "mooncake page_first", "nixl page_first")),
    ],
)
def test_four_prefill_ranks_reach_two_decode_ranks(setting: str) -> None:
    """Rooms of many lengths cross, with digests, one of them kept; and nothing beside their rows is touched."""
    transport, layout = setting.split()
    require_library(BACKENDS[transport])
    device = {"device": {"full": 64, "swa": 16, "request": 8}, "device_layout": layout}
    with (
        cluster(
            {"preset": "tiny-v4"},
            transport=transport,
            prefill_pp=2,
            prefill_tp=2,
            decode_tp=2,
            prefill={"pools": device} | live_rows_only(transport),
            decode={"pools": device | {"host": {"pages": 64, "layout": layout}}, "integrity": {"digest": "crc32c"}},
        ) as running,
        with_logs(running),
        PrefillEngine.attach(running.prefill.runtime_dir) as sender,
        DecodeEngine.attach(running.decode.runtime_dir) as reader,
        closing(Canvas(list(reader.views.values()), mapped_memory(reader), CANARY)) as canvas,
    ):
        assert (len(sender.ranks), len(reader.ranks)) == (4, 2)
        canvas.paint()
        held: DecodeRoom | None = None
        for case in (Case(700), Case(3, (2,)), Case(130, (57,)), Case(259, (256,)), Case(1023, (333, 777)), LONG):
            room = running.pair(case.tokens, max_new_tokens=10)["room"]
            begun = sender.begin(room, prompt_tokens=case.tokens)
            write(sender, room, case, begun)
            claimed = reader.claim(room, timeout_s=CLAIM_S)
            check_room(reader, claimed)
            if held is None:
                held = claimed
                continue
            # Decode keeps the first room, prefill does not: ever since their ids differ.
            assert not any(begun.tables[space].ids[0] == claimed.tables[space].ids[0] for space in (FULL, SWA, REQUEST))
            canvas.paint_request(claimed.tables, tokens=case.tokens)
            claimed.release()
        check_rows(reader, held)
        canvas.paint_request(held.tables, tokens=held.prompt_tokens)
        assert canvas.stray() is None
        held.release()


@pytest.mark.parametrize("transport", ["local", kept("mooncake", False), kept("nixl", False)])
def test_a_flipped_bit_fails_the_room_by_name_and_the_next_one_crosses(transport: str) -> None:
    require_library(BACKENDS[transport])
    digest, flip = {"integrity": {"digest": "crc32c"}}, {"flip_bit_in_operation": 1}
    with live_cluster(transport=transport, faults=flip, decode=digest) as live:
        room = live.pair(1000)
        assert live.reader is not None
        live.write(room, 1000)
        live.begun[room].finish()
        reason = ends(live.decode, room, "failed", "digest_mismatch")
        # The first operation is the first component of the model, in the first layer that has it.
        assert "c4_kv of layer 2, logical page 0" in reason
        assert "space 'host' in the host pool" in reason
        assert "pages differ" not in reason
        with pytest.raises(RoomFailedError, match="c4_kv of layer 2"):
            live.reader.claim(room, timeout_s=5.0)
        eventually("prefill is told", lambda: report(live.prefill, room)["reason_code"] == "digest_mismatch")
        assert reason in report(live.prefill, room)["reason"]
        assert metric(live.decode, "kvbridge_digest_mismatches_total", component="c4_kv") == 1
        phases = report(live.decode, live.cross(1000))["phases_s"]
        assert phases["digest"] > 0, "prefill computed nothing"
        assert phases["verify"] >= phases["verify_busy"] > 0, "decode computed nothing"
        live.serves()


SETTING = Setting(
    TINY,
    Ranks(pp=2),
    Ranks(tp=2),
    Form({FULL: 8, SWA: 4, REQUEST: 3}),
    Form({FULL: 9, SWA: 4, REQUEST: 3, HOST: 48}, host=C4_KV),
    "mooncake",
)
RANDOM = np.random.default_rng(5)


def draw(case: Case, *, own_host: bool) -> tuple[Tables, Tables]:
    """Page ids of the two engines; those of the node's host pool are the daemon's."""
    source, destination = draw_tables(SETTING, case, RANDOM)
    return source, {space: table for space, table in destination.items() if own_host or space is not HOST}


def ending(engine: PrefillEngine | DecodeEngine, room: int) -> RoomEvent:
    """Wait until an engine is told that a room is over, so that its pages are its own again."""

    def look() -> list[RoomEvent]:
        events = engine.events(0.1)
        assert {event.room for event in events} <= {room}
        return [event for event in events if event.kind != "committed"]

    (event,) = eventually(f"the end of room {room}", look)
    return event


def handed_over(reader: DecodeEngine, room: int, tokens: int, tables: Tables) -> DecodeRoom:
    """A committed room all of whose pages are the engine's, so that nobody claims it."""
    [event] = reader.events(CLAIM_S)
    assert (event.kind, event.room) == ("committed", room)
    return DecodeRoom(reader, room, 1, tokens, tables, 0, "", metadata=event.metadata, amounts=event.amounts)


@pytest.mark.parametrize("own_host", [False, True], ids=["host pool of the node", "host memory of the engine"])
def test_engines_bring_their_own_memory_and_page_ids(own_host: bool) -> None:
    require_library(BACKENDS[SETTING.transport])
    adopted = {"memory": "adopted"}
    where = {"in_host" if own_host else "exclude": C4_KV}
    theirs = EngineMemory.make(TINY, SETTING.source, SETTING.source_form.pages)
    ours = EngineMemory.make(TINY, SETTING.destination, SETTING.destination_form.pages, **where)
    host = adopted if own_host else {"pages": SETTING.destination_form.pages[HOST]}
    ended_on = 1 if own_host else 2  # an engine that got a room with its commit hears no other end
    with (
        cluster(
            {"preset": "tiny-v4"},
            transport=SETTING.transport,
            prefill_pp=2,
            decode_tp=2,
            prefill={"pools": adopted} | live_rows_only(SETTING.transport),
            decode={"pools": adopted | {"host": host}},
            wait=False,
        ) as running,
        with_logs(running),
        ExitStack() as engines,
    ):
        for daemon in (running.prefill, running.decode):
            daemon.endpoint()
        lacking = {rank: regions[:-1] for rank, regions in theirs.regions.items()}
        with pytest.raises(InvalidInputError, match="no memory for"):
            PrefillEngine.adopt(running.prefill.runtime_dir, lacking)
        sender = engines.enter_context(PrefillEngine.adopt(running.prefill.runtime_dir, theirs.regions))
        reader = engines.enter_context(DecodeEngine.adopt(running.decode.runtime_dir, ours.regions))
        canvas = engines.enter_context(
            closing(Canvas(list(reader.views.values()), [*mapped_memory(reader), *ours.memory], CANARY))
        )
        canvas.paint()
        running.wait_ready()

        def begin(case: Case, source: Tables, destination: Tables) -> PrefillRoom:
            room = running.pair(case.tokens)["room"]
            assert [(event.kind, event.room) for event in reader.events(CLAIM_S)] == [("wanted", room)]
            if case.tokens >= TINY.tokens_per_page:
                reader.fetch(room, pages=destination, held_by_decode=TINY.tokens_per_page)
                [refused] = reader.events(CLAIM_S)
                assert (refused.kind, refused.room) == ("refused", room)
                assert "c4_kv of the room lies in host memory" in refused.reason
            reader.fetch(room, pages=destination)
            return sender.begin(room, prompt_tokens=case.tokens, pages=source)

        def cross(case: Case) -> None:
            source, destination = draw(case, own_host=own_host)
            begun = begin(case, source, destination)
            write(sender, begun.id, case, begun)
            if own_host:
                claimed = handed_over(reader, begun.id, case.tokens, destination)
            else:
                claimed = reader.claim(begun.id, timeout_s=CLAIM_S)
            check_room(reader, claimed, host_copies=1 + own_host)
            for space, table in destination.items():
                assert np.array_equal(claimed.tables[space].ids, table.ids)
            canvas.paint_request(claimed.tables, tokens=case.tokens)
            assert canvas.stray() is None
            if not own_host:
                claimed.release()
            for engine in (sender, reader)[:ended_on]:
                assert ending(engine, begun.id).kind == "completed"

        for case in (Case(3), Case(130, (57,)), Case(1023, (333, 777), longest_run=3), Case(1539, (1030,))):
            cross(case)

        # The engine leaves and comes back with the same memory.
        sender.close()
        sender = engines.enter_context(PrefillEngine.adopt(running.prefill.runtime_dir, theirs.regions))
        running.wait_ready()
        cross(Case(300))
