"""The verbs of engines: what is said when pools are on a GPU, and of page keys. The node and the GPU are this test's."""

from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvbridge.core.errors import DeadlineError, DetachedError, InvalidInputError, UnsupportedError
from kvbridge.core.geometry.components import Liveness
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.models import preset
from kvbridge.core.geometry.pages import tables_from_wire
from kvbridge.core.ids import IndexSpace, Rank
from kvbridge.core.prefixes import ModelIdentity, Retention
from kvbridge.core.wire.engine_messages import Accepted, Begin, Finish, Pages, Publish, Release, RoomEvent
from kvbridge.core.wire.messages import StreamPoint
from kvbridge.engine.decode import DecodeEngine, DecodeRoom
from kvbridge.engine.prefill import PrefillEngine, PrefillRoom
from kvbridge.engine.streams import StreamOrder
from kvbridge.tier.keys import PrefixIdentity, page_keys
from tests.helpers.rooms import ADDRESS
from tests.helpers.torch_pools import make_pools

GEOMETRY, TINY = preset("tiny-gqa"), preset("tiny-v4")
MODEL = ModelIdentity(name="m", revision="r")
POINT = StreamPoint(ring="ring", handle=bytes(64), device_uuid="0" * 32)


class Link:
    """A node that accepts everything, and whose answers about pages say `held`, too."""

    def __init__(self, **held: object) -> None:
        self.held = held
        self.said: list[object] = []
        self.coming: deque[RoomEvent] = deque()
        self.lost = ""
        self.closed, self.timeout_s = False, 0.05

    def number(self) -> int:
        return len(self.said) + 1

    def call(self, message, answer):
        assert not self.closed
        self.said.append(message)
        if answer is Pages:
            tokens = getattr(message, "prompt_tokens", 1200)  # a claim names none
            given = {"generation": 3, "prompt_tokens": tokens, "tables": ()} | self.held
            return Pages(call=message.call, room=message.room, **given)
        return answer(call=message.call) if answer is Accepted else None

    def events(self, timeout_s: float) -> list[RoomEvent]:
        found = list(self.coming)
        self.coming.clear()
        return found

    def close(self) -> None:
        self.closed = True


class Gpu:
    """A GPU that comes as far as the test says. `None` is its current stream."""

    devices = (0,)

    def __init__(self) -> None:
        self.streams: list[object] = []
        self.asked = 0
        self.reached_after = 10**9
        self.is_past = False
        self.closed = False

    def points(self, stream) -> dict[str, StreamPoint]:
        self.streams.append(stream)
        return {"pp0.tp0": POINT}

    def reached(self, stream, also=frozenset()):
        self.streams.append(stream)

        def ask() -> bool:
            self.asked += 1
            return self.asked > self.reached_after

        return ask

    def passed(self, points) -> bool:
        self.points_asked = points
        return self.is_past

    def close(self) -> None:
        self.closed = True


class Memory:
    twins, views = (), {}

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def engine(kind, *, gpu: Gpu | None = None):
    gpu = gpu or Gpu()
    made = kind(Link(), SimpleNamespace(geometry=GEOMETRY), Memory(), gpu)
    return made, made._link, gpu


def event(room: int, kind: str = "committed") -> RoomEvent:
    return RoomEvent(room=room, generation=1, kind=kind)


def claimed(gpu: Gpu | None = None) -> tuple[DecodeRoom, Link, Gpu]:
    decode, link, gpu = engine(DecodeEngine, gpu=gpu)
    return DecodeRoom(decode, 1, 3, 1200, {}), link, gpu


def test_a_publication_names_the_point_of_its_stream():
    prefill, link, gpu = engine(PrefillEngine)
    room = prefill.begin(1, prompt_tokens=512)
    room.publish(256)
    room.publish(512, stream=7)
    assert [message.after for message in link.said if isinstance(message, Publish)] == [{"pp0.tp0": POINT}] * 2
    assert gpu.streams == [None, 7]


def test_a_finished_room_is_let_go_of_when_the_gpu_is_past_what_was_published():
    prefill, link, gpu = engine(PrefillEngine)
    room = prefill.begin(1, prompt_tokens=512)
    room.publish(512)
    room.finish()
    assert [type(message) for message in link.said] == [Begin, Publish, Finish]
    assert (link.said[0].by_gpu, link.said[2].by_gpu) == (True, True)
    gpu.is_past = True
    prefill.events()
    assert isinstance(link.said[-1], Release)
    assert (link.said[-1].room, link.said[-1].generation, gpu.points_asked) == (1, 3, {POINT})


def test_a_gpu_that_is_done_already_costs_no_delay():
    room, link, gpu = claimed()
    gpu.reached_after = 0
    room.release()
    assert len(link.said) == 1


def test_every_call_sends_what_is_due_before_it():
    room, link, gpu = claimed()
    room.release()
    gpu.reached_after = gpu.asked
    room.engine.fetch(2, pages={})
    assert [message.room for message in link.said] == [1, 2]


def test_closing_waits_for_the_gpu_and_leaves_all_the_same():
    room, link, gpu = claimed()
    room.release()
    gpu.reached_after = gpu.asked + 3
    room.engine.close()
    assert ([message.type for message in link.said], link.closed, gpu.closed) == (["release", "detach"], True, True)
    room.engine.close()
    stuck, link, gpu = claimed()
    stuck.release()
    with pytest.raises(DeadlineError, match="release of room 1, close"):
        stuck.engine.close()
    assert (link.said, link.closed, stuck.engine._memory.closed) == ([], True, True)


@pytest.mark.parametrize("end", ["nothing", "release", "abort", "error"])
def test_the_end_of_a_with_block_releases_a_room_that_is_not_over(end):
    room, link, gpu = claimed()
    gpu.reached_after = 0
    with pytest.raises(ZeroDivisionError) if end == "error" else nullcontext(), room:
        if end == "release":
            room.release(valid_tokens=7)
        elif end == "abort":
            room.abort("enough")
        elif end == "error":
            raise ZeroDivisionError
    assert [message.type for message in link.said] == ["abort_room" if end == "abort" else "release"]
    assert getattr(link.said[0], "valid_tokens", 7) == (7 if end in {"release", "abort"} else 0)


@pytest.mark.parametrize("kind", [PrefillEngine, DecodeEngine])
def test_an_engine_without_memory_hears_of_it_after_the_last_event(kind):
    made, link, gpu = engine(kind)
    gpu.reached_after = 0
    link.lost = "rank worker pp0.tp0 is gone"
    link.coming.append(event(5, "failed"))
    assert [found.room for found in made.events()] == [5]
    with pytest.raises(DetachedError, match=r"pp0\.tp0 is gone; close it and attach again"):
        made.events(1.0)
    made.abort(5, "lost")
    assert [message.room for message in link.said] == [5]
    made.close()


PAGE = GEOMETRY.tokens_per_page
TOKENS = list(range(2 * PAGE + 1))


def keyed(kind, model: ModelIdentity | None = MODEL):
    """An engine in host memory, at a node that holds a page of every prompt."""
    answer = SimpleNamespace(geometry=GEOMETRY, instance="prefill-0", model_identity=model)
    link = Link(prefix_tokens=PAGE, computed_tokens=2)
    return kind(link, answer, Memory(), StreamOrder({})), link


def test_keys_begin_with_what_the_node_holds():
    prefill, _ = keyed(PrefillEngine)
    own = {"model": "m", "revision": "r", "fingerprint": fingerprint(GEOMETRY), "tokens_per_page": PAGE}
    assert prefill.page_keys(TOKENS) == page_keys(PrefixIdentity(**own), TOKENS)
    assert prefill.page_keys(np.array(TOKENS)) == prefill.page_keys(TOKENS)
    named = prefill.page_keys(TOKENS, adapter="lora", namespace="acme")
    assert named == page_keys(PrefixIdentity(**own, adapter="lora", namespace="acme"), TOKENS)
    assert len({prefill.page_keys(TOKENS).data, named.data, prefill.page_keys(TOKENS, namespace="acme").data}) == 3
    with pytest.raises(UnsupportedError, match=r"prefill-0 does not say .*tier\.model_name and tier\.model_revision"):
        keyed(PrefillEngine, None)[0].page_keys(TOKENS)


def test_the_verbs_carry_them():
    (prefill, link), (decode, other) = keyed(PrefillEngine), keyed(DecodeEngine)
    keys, keep = prefill.page_keys(TOKENS), Retention(priority=1, for_s=60)
    prefill.admit(1, prompt_tokens=len(TOKENS), page_keys=keys, namespace="acme", retention=keep)
    begun = prefill.begin(1, prompt_tokens=len(TOKENS), page_keys=keys)
    assert (begun.held_by_decode, begun.held_by_prefill) == (PAGE, 2)
    assert decode.claim(1, page_keys=keys).held_by_decode == PAGE
    decode.claim(1, timeout_s=1.0, page_keys=keys).release(valid_tokens=len(TOKENS), page_keys=keys)
    said = [*link.said, *other.said]
    assert [message.type for message in said] == ["admit", "begin", "claim", "claim", "release"]
    assert {message.page_hashes for message in said} == {keys.data}
    assert (said[0].namespace, said[0].retention, said[-1].valid_tokens) == ("acme", keep, len(TOKENS))


def painted(kind, room_of, tokens: int, **held: object):
    """A room of an engine over pools of tiny-v4, whose window and states lie in tables of their own for a checkpoint."""
    pools = make_pools(TINY, tokens=tokens)
    memory = Memory()
    memory.views = {Rank(pp=0, tp=0): pools.views}
    engine = kind(Link(), SimpleNamespace(geometry=TINY), memory, StreamOrder({}))
    return room_of(engine, 1, 1, tokens, pools.tables, **held), pools


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("held", [0, 256])
def test_parts_of_chunks_are_all_rows_once_and_come_back(by_layer, held):
    tokens, start = 700, {"held_by_prefill": held, "_published": held}
    room, pools = painted(PrefillEngine, PrefillRoom, tokens, **start)
    seen: dict[tuple, list[int]] = {}
    for stop in (300, 512, 513, tokens):
        for layers in [[layer] for layer in range(TINY.layer_count)] if by_layer else [None]:
            for part in room.final_parts(upto=stop, layers=layers):
                seen.setdefault((part.kind, part.layer), []).extend(range(part.rows.start, part.rows.stop))
                part.write(torch.full(part.shape, part.layer + 1, dtype=torch.uint8))
            room.publish(stop, layers=layers)
    due = {(part.kind, layer): part.live_rows(tokens, held) for part in TINY.components for layer in part.layers}
    assert seen == {place: list(range(rows.start, rows.stop)) for place, rows in due.items() if rows.count}
    read = DecodeRoom(room.engine, 1, 1, tokens, pools.tables)
    for part in read.parts(behind=held):
        assert (part.rows.start, part.rows.stop) == (due[part.kind, part.layer].start, due[part.kind, part.layer].stop)
        assert set(part.read().unique().tolist()) == {part.layer + 1}


def test_a_prefix_is_restored_whole_and_a_checkpoint_is_windows_and_states():
    room, pools = painted(PrefillEngine, PrefillRoom, 512, held_by_prefill=512)
    room.restore, room.checkpoints = pools.tables, {512: pools.tables}
    kinds = {part.kind for part in TINY.components if part.live_rows(512).count}
    assert {part.kind for part in room.restored_parts()} == kinds
    growing = {part.kind for part in TINY.components if part.liveness is Liveness.GROWING}
    assert {part.kind for part in room.checkpoint_parts(512)} == kinds - growing


def test_pages_are_block_ids_behind_those_that_were_named_or_ids_by_space():
    link, answer = Link(), SimpleNamespace(geometry=GEOMETRY)
    prefill = PrefillEngine(link, answer, Memory(), StreamOrder({}), workers=())
    link.post = link.said.append
    room = prefill.hold(1, prompt_tokens=3 * PAGE, pages=[7])
    room.publish(2 * PAGE, pages=[9, 8])
    tables = [tables_from_wire(message.tables)[IndexSpace.FULL] for message in link.said]
    assert [(table.first_page, table.ids.tolist()) for table in tables] == [(0, [7]), (1, [9, 8])]
    assert room.tables[IndexSpace.FULL].ids.tolist() == [7, 9, 8]
    decode = DecodeEngine(link, answer, Memory(), StreamOrder({}), workers=())
    decode.fetch(1, pages={IndexSpace.FULL: [4]}, held_by_decode=PAGE)
    assert tables_from_wire(link.said[-1].tables)[IndexSpace.FULL].first_page == 1
    for wrong, reason in (({}, "name the prefill nodes"), ({"prefill": [ADDRESS]}, "the length of its prompt")):
        with pytest.raises(InvalidInputError, match=reason):
            decode.fetch(2, **wrong)
    several = DecodeEngine(link, SimpleNamespace(geometry=TINY), Memory(), StreamOrder({}), workers=())
    with pytest.raises(InvalidInputError, match="are in the spaces full, request, swa: name them by space"):
        several.fetch(3, pages=[1])
