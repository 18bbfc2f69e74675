"""The calls of engines and their answers, and the end of rooms whose engine or memory is gone."""

from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from kvbridge.config.limits import AdmissionConfig
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import NotReadyError
from kvbridge.core.ids import Role
from kvbridge.core.session.tables import RoomState
from kvbridge.core.wire import engine_messages as calls
from kvbridge.core.wire.messages import Done, Failed, Features, Heartbeat, Intend, Offer, to_wire
from kvbridge.node.admission import AdmissionController
from kvbridge.node.engines import Engines
from kvbridge.telemetry.facts import EngineAttached, EngineEnded, EngineFact, EngineLost, SparseDecoded
from tests.helpers.node_bench import DecodeBench, PrefillBench
from tests.helpers.rooms import ADDRESS, DECODE, GEOMETRY, PAGE, R0, R1, TOKENS, full_amounts, pages_table

PROMPT = {"room": 1, "prompt_tokens": TOKENS}
PLACES = (PeerAddress(endpoint=ADDRESS.endpoint),)


def names(*ids: int, first: int = 0):
    return to_wire(pages_table(*ids, first=first))


class Api:
    """An API in front of a bench's rooms, whose engines are those attached here."""

    def __init__(self, bench: PrefillBench | DecodeBench, ranks=(R0,), **limits: object) -> None:
        self.bench = bench
        self.messages: list[tuple[str, object]] = []
        admission = AdmissionController(
            bench.service,
            bench.book,
            limits=AdmissionConfig(**limits),
            events=bench.events,
            clock=bench.clock,
            draw=lambda: 0.0,
        )
        self.api = self.engines = Engines(ranks, bench.events, settle_s=0)
        self.engines._server = SimpleNamespace(
            send=lambda engine, message: self.messages.append((engine, message)),
            process=lambda _: SimpleNamespace(pid=77),
        )
        self.engines.serve(bench.service, admission, attached=self.describe)

    def describe(self, call: int, ranks) -> calls.Attached:
        facts = {"instance": "i", "incarnation": "x", "geometry": GEOMETRY, "pp_size": 1, "tp_size": 1}
        return calls.Attached(call=call, **facts, ranks=ranks, layers={}, features=Features())

    def call(self, message, engine: str = "engine"):
        self.api.handle(engine, message)
        return self.messages[-1][1]

    def attach(self, engine: str = "engine", role: Role | None = None, **fields) -> object:
        return self.call(calls.Attach(call=1, role=role or self.bench.service.book.role, **fields), engine)


def prefill(limits=None, **fields) -> Api:
    api = Api(PrefillBench(**fields), fields.get("ranks", (R0,)), **(limits or {}))
    api.attach()
    return api


def decode(**fields) -> Api:
    api = Api(DecodeBench(**fields))
    api.bench.nodes.know()
    api.attach()
    return api


def test_an_engine_attaches_for_ranks_of_this_node():
    api = Api(PrefillBench(ranks=(R0, R1)), (R0, R1))
    for fields, text in (
        ({"role": Role.DECODE}, "this is a prefill daemon"),
        ({"ranks": (R0.model_copy(update={"tp": 9}),)}, "do not live on this node"),
    ):
        assert text in api.attach(**fields).message
    assert api.engines.serving() == {}
    assert isinstance(api.attach(ranks=(R1,)), calls.Attached)
    assert api.engines.status()[0].ranks == (str(R1),)
    assert api.attach("b").ranks == (R0, R1)
    api.engines.push(calls.RoomEvent(room=1, generation=1, kind="failed"))
    assert [engine for engine, message in api.messages if isinstance(message, calls.RoomEvent)] == ["engine", "b"]


def test_an_engine_without_memory_attaches_when_the_engines_that_bring_memory_are_served():
    api = Api(PrefillBench(adopted=True))
    api.bench.workers.lacking = "pp0.tp0 is starting"
    refused = api.attach("commands")
    assert isinstance(refused, calls.Refused)
    assert (refused.code, "pp0.tp0 is starting" in refused.message) == (NotReadyError.code, True)
    assert isinstance(api.attach("of one rank", ranks=(R0,)), calls.Refused)
    assert isinstance(api.attach("brings", ranks=(R0,), brings_memory=True), calls.Attached)
    api.bench.workers.lacking = ""
    assert isinstance(api.attach("commands"), calls.Attached)


def test_calls_before_attach_unknown_calls_and_heartbeats():
    api = Api(PrefillBench())
    refused = api.call(calls.Begin(call=4, room=1, prompt_tokens=1))
    assert (refused.call, refused.code) == (4, "conflict")
    api.attach()
    assert "does not know the call 'Claim'" in api.call(calls.Claim(call=5, room=1)).message
    count = len(api.messages)
    api.api.handle("engine", Heartbeat())
    assert len(api.messages) == count


def test_engines_are_one_client_of_their_own_and_are_told_when_to_come_back():
    api = prefill({"client_max_rooms": 2}, pages=3)
    api.call(calls.Admit(call=2, room=1, prompt_tokens=TOKENS))
    refused = api.call(calls.Admit(call=3, room=2, prompt_tokens=TOKENS))
    assert (refused.code, refused.retry_after_s) == ("capacity", 0.1), "nothing has been released yet: soon"
    api.call(calls.Admit(call=4, room=2, prompt_tokens=1))
    refused = api.call(calls.Admit(call=5, room=3, prompt_tokens=1))
    assert (refused.code, "client 'engine' has 2 rooms" in refused.message) == ("client_limit", True)


def test_decode_that_waits_for_a_room_hears_at_once_that_it_is_not_admitted():
    api = prefill(adopted=True)
    api.bench.hear(Intend(generation=1, **PROMPT))
    assert api.bench.peers.messages == []
    api.call(calls.Hold(call=2, room=1, prompt_tokens=99 * PAGE))
    [(_, failed)] = api.bench.peers.messages
    assert (type(failed), failed.room, failed.code) == (Failed, 1, "invalid_input")
    assert "prefill did not admit the room" in failed.message


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tables": names(4), "published_tokens": TOKENS}, "needs 2 pages"),
        ({"tables": names(4, 99)}, "page 99 is not in"),
        ({"published_tokens": PAGE}, "was not begun"),
        ({"tables": names(4, 5), "computed_tokens": TOKENS + 1}, "computed_tokens must be at most"),
    ],
)
def test_what_is_refused_of_a_held_room_leaves_nothing_of_it(fields, text):
    api = prefill(adopted=True)
    assert text in api.call(calls.Hold(call=2, **PROMPT, **fields)).message
    assert (api.bench.free, api.bench.report().state) == (16, RoomState.FAILED)
    assert isinstance(api.call(calls.Hold(call=3, **PROMPT, generation=2, tables=names(4, 5))), calls.Accepted)


def test_a_room_of_another_prompt_is_refused_and_held_for_whoever_it_is_for():
    api = prefill(adopted=True)
    bench, whole = api.bench, {"tables": names(4, 5), "published_tokens": TOKENS}
    api.call(calls.Hold(call=2, **PROMPT, **whole, prompt_digest=b"of this one"))
    for digest in (b"of that one", b""):
        asked = PROMPT | {"generation": 1, "prompt_digest": digest}
        for message in (Intend(**asked), Offer(**asked, tables=names(7, 8))):
            bench.hear(message, "eeee000000000001")
            failed = bench.told(Failed, "eeee000000000001")[-1]
            assert failed.code == "key_mismatch"
            assert f"and prefill holds {b'of this one'.hex()}" in failed.message
    assert bench.report().state is RoomState.ADMITTED
    bench.offer(peer=DECODE, prompt_digest=b"of this one")
    assert len(bench.orders()) == 1


@pytest.fixture
def stages() -> Api:
    """Two engines, each of which computes the layers of one rank."""
    api = Api(PrefillBench(adopted=True, ranks=(R0, R1)), (R0, R1))
    for engine, rank in (("first", R0), ("second", R1)):
        api.attach(engine, ranks=(rank,))
    return api


@pytest.mark.parametrize("early", ["first", "second"])
def test_engines_of_further_ranks_hold_the_same_room_in_any_order(stages, early):
    bench, late = stages.bench, {"first": "second", "second": "first"}[early]
    for engine in (early, late):
        assert isinstance(stages.call(calls.Hold(call=2, **PROMPT, tables=()), engine), calls.Accepted)
    bench.offer()
    for engine, upto, ids in ((early, PAGE, (4,)), (early, TOKENS, (5,)), (late, PAGE, (4,)), (late, TOKENS, (5,))):
        pages = names(*ids, first=ids[0] - 4)
        assert isinstance(
            stages.call(calls.Publish(call=3, room=1, upto_token=upto, tables=pages), engine), calls.Accepted
        )
    ranks = {"first": R0, "second": R1}
    assert [len(bench.orders(rank)) for rank in (R0, R1)] == [2, 2]
    for engine in (late, early):
        assert not bench.told(Done)[1:]
        assert isinstance(stages.call(calls.Finish(call=4, room=1, metadata=engine.encode()), engine), calls.Accepted)
        for order in bench.orders(ranks[engine]):
            bench.sent(order, ranks[engine])
    assert {done.writer: done.metadata for done in bench.told(Done)} == {R0: b"first", R1: b"second"}
    assert (bench.report().state, bench.free) == (RoomState.COMPLETED, 16)


def test_nobody_joins_a_room_that_is_anothers_or_over(stages):
    hold = calls.Hold(call=2, **PROMPT, prompt_digest=b"this", tables=())
    stages.call(hold, "first")
    for engine, message, text in (
        ("first", hold, "already in flight"),
        ("second", hold.model_copy(update={"prompt_digest": b"that"}), "already in flight"),
    ):
        assert text in stages.call(message, engine).message
    assert stages.bench.report().state is RoomState.ADMITTED
    stages.call(calls.AbortRoom(call=3, room=1, reason="the client has left"), "first")
    assert "has already ended" in stages.call(hold, "second").message


def test_rooms_that_an_engine_admitted_end_with_it():
    for api, message in (
        (decode(adopted=True), calls.Fetch(call=2, **PROMPT, prefill=PLACES)),
        (prefill(adopted=True), calls.Hold(call=2, **PROMPT, tables=names(4, 5), published_tokens=TOKENS)),
    ):
        api.attach("another")
        api.call(message)
        api.api.gone("another", "killed", followed=True)
        assert api.bench.report().state is RoomState.ADMITTED
        api.api.gone("engine", "killed", followed=True)
        assert (api.bench.report().state, api.bench.free) == (RoomState.FAILED, 16)


@pytest.mark.parametrize("adopted", [False, True])
def test_a_room_of_the_nodes_own_pages_or_of_the_other_role_is_not_an_engines_to_admit(adopted):
    hold, fetch = calls.Hold(call=2, **PROMPT, tables=names(4, 5)), calls.Fetch(call=2, **PROMPT, prefill=PLACES)
    for api, message in ((prefill(adopted=adopted), fetch if adopted else hold), (decode(adopted=adopted), hold)):
        assert isinstance(api.call(message), calls.Refused)
        assert not api.bench.service.book.open


@pytest.mark.parametrize("fails", ["at once", "when the room is there"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_call_that_fails_by_a_defect_is_refused_and_leaves_no_room_behind(fails, role, monkeypatch):
    """An engine that waits for an answer which never comes waits for ever."""
    api = prefill(adopted=True) if role == "prefill" else decode(adopted=True)

    def fail(*_, **__):
        raise RuntimeError("a defect " + "x" * 10_000)

    if fails == "at once":
        monkeypatch.setattr(AdmissionController, "admit_now", fail)
    else:
        monkeypatch.setitem(api.bench.service.calls, calls.Begin if role == "prefill" else calls.Provide, fail)
    asked = PROMPT | {"call": 2, "tables": names(4, 5)}
    with capture_logs() as lines:
        refused = api.call(calls.Hold(**asked) if role == "prefill" else calls.Fetch(**asked, prefill=PLACES))
    assert (refused.call, refused.code) == (2, "internal")
    assert "failed, please report it" in refused.message
    assert "RuntimeError: a defect" in refused.message
    [line] = [line for line in lines if line["event"] == "engine_call_failed"]
    assert (line["room"], line["exc_info"]) == (1, True)
    assert all(room.over for room in api.bench.service.book)
    assert api.bench.free == 16


def test_the_decode_verbs():
    api = decode()
    bench = api.bench
    bench.engines.names = set()
    bench.admit()
    assert api.call(calls.Claim(call=2, room=1)).code == "conflict"
    bench.done(metadata=b"first token")
    api.attach("late")
    pages = api.call(calls.Claim(call=3, room=1))
    api.attach("later")
    assert [(engine, event.kind) for engine, event in api.messages if isinstance(event, calls.RoomEvent)] == [
        ("late", "committed")
    ], "an engine hears of rooms that wait for one, although it comes after them"
    assert (pages.metadata, pages.amounts) == ({"pp0.tp0": b"first token"}, full_amounts(TOKENS))
    assert pages.phases_s["move"] == 1.0
    extended = api.call(calls.Extend(call=4, room=1, tokens=3 * PAGE))
    assert len(extended.tables[0].ids) == 3 * 4
    sparse = calls.SparseRows(hit=7, loaded=3, preloaded=64, backed_up=16)
    assert api.call(calls.Release(call=5, room=1, sparse=sparse)) == calls.Accepted(call=5)
    (told,) = bench.events.of(SparseDecoded)
    assert (told.room, told.rows) == (1, {"hit": 7, "loaded": 3, "preloaded": 64, "backed_up": 16})
    assert bench.free == 16
    assert api.call(calls.AbortRoom(call=6, room=1, reason="late")) == calls.Accepted(call=6)
    assert api.call(calls.Claim(call=7, room=1)).code == "room_failed"
    assert api.call(calls.Claim(call=8, room=2)).code == "unknown_room"


def using(role: str) -> Api:
    """An engine uses the two pages of room 1."""
    if role == "prefill":
        api = prefill()
        api.call(calls.Admit(call=2, **PROMPT))
        api.call(calls.Begin(call=3, **PROMPT))
        return api
    api = decode()
    api.bench.admit()
    api.bench.done()
    assert isinstance(api.call(calls.Claim(call=3, room=1)), calls.Pages)
    return api


def test_pages_of_an_engine_that_is_gone_wait_for_the_end_of_its_process():
    api = using("prefill")
    assert api.api.gone("engine", "its connection has ended", followed=True)
    assert (api.bench.report().state, api.bench.free) == (RoomState.FAILED, 14)
    [left] = api.engines.status()
    assert (left.pid, left.gone) == (77, "its connection has ended; its process has not ended")
    refused = api.attach()
    assert (refused.code, "take another name" in refused.message) == ("conflict", True)
    api.api.ended("engine")
    api.api.ended("engine")
    assert [fact for fact in api.bench.events.facts if isinstance(fact, EngineFact)] == [
        EngineAttached(engine="engine", pid=77, ranks=(R0,)),
        EngineLost(engine="engine", reason="its connection has ended", pages_wait=True),
        EngineEnded(engine="engine"),
    ]
    assert (api.bench.free, api.engines.status()) == (16, ())
    assert isinstance(api.attach(), calls.Attached)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_detaches_waits_for_nothing(role):
    api = using(role)
    assert api.call(calls.Detach(call=4)) == calls.Accepted(call=4)
    assert (api.bench.free, api.bench.report().state) == (16, RoomState.FAILED)
    assert not api.api.gone("engine", "its connection has ended", followed=True)
    assert api.call(calls.Detach(call=5)).code == "conflict"


def test_engines_of_a_rank_whose_memory_is_gone_may_only_let_go_until_they_attach_again():
    api = Api(PrefillBench(ranks=(R0, R1)), (R0, R1))
    api.attach("of both")
    api.attach("of the other", ranks=(R1,))
    for call in (calls.Admit(call=2, **PROMPT), calls.Begin(call=3, **PROMPT)):
        api.call(call, "of both")
    api.messages.clear()
    for _ in range(2):
        api.engines.memory_lost(R0, "rank worker pp0.tp0 is gone: killed")
    assert api.messages == [("of both", calls.Detached(reason="rank worker pp0.tp0 is gone: killed"))]
    api.bench.service.worker_gone(R0, "killed")
    refused = api.call(calls.Publish(call=4, room=1, upto_token=PAGE), "of both")
    assert (refused.code, "attach again" in refused.message) == ("detached", True)
    assert api.bench.free == 14
    assert isinstance(api.call(calls.AbortRoom(call=5, room=1, reason="lost"), "of both"), calls.Accepted)
    assert api.bench.free == 16
    assert isinstance(api.call(calls.Admit(call=2, room=2, prompt_tokens=PAGE), "of the other"), calls.Accepted)
    assert isinstance(api.attach("of both"), calls.Attached)
    assert isinstance(api.call(calls.Admit(call=2, room=3, prompt_tokens=PAGE), "of both"), calls.Accepted)
