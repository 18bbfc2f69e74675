"""What becomes of facts in metrics, in logs, and in what `/status` keeps of the recent past."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import Rank
from kvbridge.core.plan.operations import Amount
from kvbridge.core.session.states import RoomState
from kvbridge.telemetry.events import (
    CheckpointKept,
    EngineLost,
    Fact,
    FrameRefused,
    MemoryRegistered,
    MessagesResent,
    MessageUndelivered,
    OrderBegan,
    OrderEnded,
    PagesDiffer,
    PeerAccepted,
    PeerLost,
    PeerRejected,
    PhasesEnded,
    PrefixesDropped,
    PrefixMatched,
    RankReceived,
    RequestRefused,
    RequestWaited,
    RoomEntered,
    RoomMessageRefused,
    RoomQuarantined,
    RoomRejected,
    SparseDecoded,
    WaitOutcome,
    WorkerLost,
)
from kvbridge.telemetry.logs import LINES, Seldom
from kvbridge.telemetry.path_events import PathLost, SuccessorsFailed
from kvbridge.telemetry.readers import LogReader, MetricsReader, PeerNames
from kvbridge.telemetry.recent import RECENT_PEERS, RECENT_PROBLEMS, StatusReader
from kvbridge.telemetry.registry import Metrics
from kvbridge.telemetry.stream import EventStream
from tests.helpers.manual_clock import ManualClock

R0, R1 = Rank(pp=0, tp=0), Rank(pp=0, tp=1)
ROOM = {"room": 1, "generation": 2, "peer": "dddd"}
AMOUNTS = {ComponentKind.C4_KV: Amount(lane_rows=1, bytes=584, operations=2)}


def began(order: int, transport: str = "mooncake") -> OrderBegan:
    return OrderBegan(**ROOM, rank=R0, order=order, transport=transport)


def ended(order: int, transport: str = "mooncake", **fields: object) -> OrderEnded:
    return OrderEnded(**ROOM, rank=R0, order=order, transport=transport, **fields)


class Counted:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.metrics = Metrics(role="prefill", clock=self.clock)
        self.events = EventStream(self.clock)
        names = PeerNames()
        self.events.add_reader(names.table)
        self.events.add_reader(MetricsReader(self.metrics, names).table)
        self.events.emit(PeerAccepted(peer="dddd", name="decode-0/node-0", features=()))

    def sample(self, name: str, **labels: str) -> float:
        return sum(
            found.value
            for family in self.metrics.registry.collect()
            for found in family.samples
            if found.name == name and labels.items() <= found.labels.items()
        )


@pytest.fixture
def counted() -> Counted:
    return Counted()


def test_overlapping_orders_count_the_time_once_and_every_byte(counted: Counted) -> None:
    counted.events.emit(began(1))
    counted.clock.advance(1)
    counted.events.emit(began(2))
    counted.clock.advance(1)
    counted.events.emit(ended(1, amounts=AMOUNTS))
    counted.clock.advance(1)
    counted.events.emit(ended(2))
    counted.clock.advance(10)
    assert counted.sample("kvbridge_transfer_busy_seconds_total", transport="mooncake") == 3
    assert counted.sample("kvbridge_transferred_bytes_total", direction="sent", transport="mooncake") == 584
    whose = {"peer": "decode-0/node-0", "direction": "sent", "transport": "mooncake"}
    assert counted.sample("kvbridge_peer_busy_seconds_total", **whose) == 3
    assert counted.sample("kvbridge_peer_transferred_bytes_total", **whose) == 584


def test_time_on_the_receiving_side_is_what_the_writers_tell(counted: Counted) -> None:
    counted.clock.advance(100)
    for under_way_ago_s in (((10.0, 8.0), (5.0, 4.0)), ((9.0, 7.0),)):
        fact = RankReceived(**ROOM, rank=R0, amounts=AMOUNTS, transport="mooncake", under_way_ago_s=under_way_ago_s)
        counted.events.emit(fact)
    received = {"direction": "received", "transport": "mooncake"}
    assert counted.sample("kvbridge_transfer_busy_seconds_total", **received) == 4.0
    assert counted.sample("kvbridge_peer_busy_seconds_total", peer="decode-0/node-0", **received) == 4.0
    assert counted.sample("kvbridge_transferred_bytes_total", **received) == 2 * 584
    assert counted.sample("kvbridge_peer_transferred_bytes_total", peer="decode-0/node-0", **received) == 2 * 584


def test_a_peer_is_called_by_its_name_also_when_it_fails(counted: Counted) -> None:
    counted.events.emit(RoomEntered(**ROOM, state=RoomState.FAILED, code="peer_failed", reason="gone"))
    counted.events.emit(RoomEntered(**ROOM, state=RoomState.ABORTED, code="aborted"))
    counted.events.emit(PeerLost(peer="dddd", reason="silent"))
    counted.events.emit(PeerRejected(peer="eeee", code="fingerprint_mismatch", reason="another model"))
    for peer, code in (
        ("decode-0/node-0", "peer_failed"),
        ("decode-0/node-0", "lost"),
        ("unknown", "fingerprint_mismatch"),
    ):
        assert counted.sample("kvbridge_peer_failures_total", peer=peer, code=code) == 1
    assert counted.sample("kvbridge_peer_failures_total") == 3


def test_an_ended_room_is_counted_with_the_code_of_its_first_cause(counted: Counted) -> None:
    counted.events.emit(RoomEntered(**ROOM, state=RoomState.OFFERED))
    counted.events.emit(RoomEntered(**ROOM, state=RoomState.FAILED, code="peer_failed", reason="gone"))
    assert counted.sample("kvbridge_rooms_ended_total") == 1
    assert counted.sample("kvbridge_rooms_ended_total", state="failed", code="peer_failed") == 1
    fact = RoomEntered(**ROOM, state=RoomState.FAILED, code="deadline", reason="late", limit="timeouts.offer_s")
    counted.events.emit(fact)
    assert counted.sample("kvbridge_rooms_ended_by_limit_total") == 1
    assert counted.sample("kvbridge_rooms_ended_by_limit_total", limit="timeouts.offer_s") == 1


def test_a_node_is_registered_as_far_as_its_slowest_rank(counted: Counted) -> None:
    for rank, share in ((R0, 0.5), (R1, 0.25), (R0, 1.0)):
        counted.events.emit(MemoryRegistered(rank=rank, share=share))
    assert counted.sample("kvbridge_registration_progress_ratio") == 0.25


@pytest.mark.parametrize(
    ("fact", "name", "labels", "value"),
    [
        (RequestRefused(code="capacity"), "kvbridge_admissions_refused_total", {"code": "capacity"}, 1),
        (
            RoomMessageRefused(**ROOM, code="stale_done"),
            "kvbridge_room_messages_refused_total",
            {"code": "stale_done"},
            1,
        ),
        (
            RequestWaited(outcome=WaitOutcome.TIMEOUT, seconds=2.0),
            "kvbridge_admission_wait_seconds_sum",
            {"outcome": "timeout"},
            2,
        ),
        (FrameRefused(kind="stale", detail="x"), "kvbridge_control_frames_refused_total", {"reason": "stale"}, 1),
        (MessagesResent(count=3), "kvbridge_control_resends_total", {}, 3),
        (MessageUndelivered(peer="dddd", message="done", age_s=1.0), "kvbridge_control_undelivered_total", {}, 1),
        (
            PhasesEnded(**ROOM, phases_s={"offer_to_sent": 1.0}),
            "kvbridge_phase_duration_seconds_sum",
            {"phase": "offer_to_sent"},
            1,
        ),
        (RoomRejected(**ROOM, code="c", reason="r"), "kvbridge_rooms_ended_total", {}, 0),
        (WorkerLost(rank=R0, cause="killed", reason="killed by SIGKILL"), "kvbridge_worker_restarts_total", {}, 1),
        (WorkerLost(rank=R0, cause="", reason="its engine has closed it"), "kvbridge_worker_restarts_total", {}, 0),
        (
            SuccessorsFailed(rank=R0, transports=("nixl", "local"), reason="no memory can be locked"),
            "kvbridge_transport_successors_failed_total",
            {"transport": "nixl"},
            1,
        ),
    ],
)
def test_facts_count_in_their_metric(counted: Counted, fact: Fact, name: str, labels: dict[str, str], value: float):
    counted.events.emit(fact)
    assert counted.sample(name, **labels) == value


@pytest.mark.parametrize(
    ("fact", "line"),
    [
        (
            PagesDiffer(**ROOM, component=ComponentKind.C4_KV, pages=2),
            b'kvbridge_digest_mismatches_total{component="c4_kv"} 2.0\n',
        ),
        (SparseDecoded(**ROOM, rows={"hit": 7, "loaded": 3}), b'kvbridge_sparse_rows_total{outcome="loaded"} 3.0\n'),
    ],
)
def test_what_only_a_decode_node_counts(fact: Fact, line: bytes) -> None:
    metrics = Metrics(role="decode")
    events = EventStream()
    events.add_reader(MetricsReader(metrics, PeerNames()).table)
    events.emit(fact)
    assert line in b"".join(metrics.render()[0])


def test_what_a_prefix_saves_is_counted_on_both_roles_and_its_bytes_where_they_are_saved() -> None:
    for role, saved in (("prefill", 0), ("decode", 4096)):
        metrics, events = Metrics(role=role), EventStream()
        events.add_reader(MetricsReader(metrics, PeerNames()).table)
        events.emit(PrefixMatched(**ROOM, hit_tokens=512, miss_tokens=88, hit_bytes=saved))
        page = b"".join(metrics.render()[0])
        assert b'kvbridge_prefix_tokens_total{outcome="hit"} 512.0' in page
        assert b'kvbridge_prefix_tokens_total{outcome="miss"} 88.0' in page
        assert (b"kvbridge_prefix_saved_bytes_total 4096.0" in page) == bool(saved)


def test_what_only_a_prefill_node_counts() -> None:
    metrics, events = Metrics(role="prefill"), EventStream()
    events.add_reader(MetricsReader(metrics, PeerNames()).table)
    events.emit(PrefixMatched(**ROOM, hit_tokens=512, miss_tokens=88, hit_bytes=0, from_checkpoint=True))
    events.emit(CheckpointKept(**ROOM, cause="divergence"))
    page = b"".join(metrics.render()[0])
    assert b'kvbridge_prefix_checkpoints_kept_total{reason="divergence"} 1.0' in page
    assert b'kvbridge_prefix_checkpoints_kept_total{reason="interval"} 0.0' in page
    assert b"kvbridge_prefix_checkpoints_used_total 1.0" in page


class Logged:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.metrics = Metrics(role="prefill")
        names = PeerNames()
        self.seldom = Seldom(self.metrics.line_left_out, clock=self.clock)
        self.events = EventStream(self.clock)
        for reader in (names, LogReader(names, self.seldom)):
            self.events.add_reader(reader.table)
        self.events.emit(PeerAccepted(peer="dddd", name="decode-0/node-0", features=()))


def test_the_log_has_a_line_for_each_room_that_ended_and_says_why_it_failed() -> None:
    logged = Logged()
    about = {"age_s": 0.25, "prompt_tokens": 5, "prefix_tokens": 4, "computed_tokens": 2, "bytes": 584}
    ids = {"request_id": "r-1", "trace_id": "4bf9"}
    with capture_logs() as lines:
        logged.events.emit(RoomEntered(**ROOM, state=RoomState.COMPLETED, **about, ids=ids))
        late = RoomEntered(
            **ROOM, state=RoomState.FAILED, code="deadline", reason="late", limit="timeouts.room_s", **about
        )
        logged.events.emit(late)
        logged.events.emit(OrderBegan(**ROOM, rank=R0, order=1, transport="local"))
    told = {"event": "room_ended", **ROOM, "peer_name": "decode-0/node-0", **about}
    assert lines == [
        {**told, "log_level": "info", "state": "completed", **ids},
        {
            **told,
            "log_level": "warning",
            "state": "failed",
            "code": "deadline",
            "reason": "late",
            "limit": "timeouts.room_s",
        },
    ]


def test_the_log_says_how_many_pages_were_dropped() -> None:
    logged = Logged()
    with capture_logs() as lines:
        logged.events.emit(PrefixesDropped(pages=12, read=3))
    assert lines == [{"event": "prefixes_dropped", "log_level": "info", "pages": 12, "read_pages": 3}]


def test_status_counts_hits() -> None:
    stream, recent = EventStream(), StatusReader()
    stream.add_reader(recent.table)
    for _ in range(2):
        stream.emit(PrefixMatched(**ROOM, hit_tokens=512, miss_tokens=88, hit_bytes=0))
    assert (recent.hit_tokens, recent.miss_tokens) == (1024, 176)


def test_at_high_rates_the_log_says_how_many_rooms_it_left_out() -> None:
    logged = Logged()
    with capture_logs() as lines:
        for number in range(1_000):
            logged.events.emit(RoomEntered(room=number, generation=1, state=RoomState.COMPLETED))
        for number in range(100):
            logged.events.emit(RoomEntered(room=number, generation=1, state=RoomState.FAILED, code="peer_failed"))
        logged.seldom.tell()
        assert len(lines) == 2 * LINES, "nothing is told before the second is over"
        logged.clock.advance(1.0)
        logged.seldom.tell()
        logged.seldom.tell()
    assert lines[2 * LINES :] == [
        {
            "event": "lines_left_out",
            "log_level": "warning",
            "of": "room_ended",
            "kind": kind,
            "lines": count - LINES,
            "seconds": 1.0,
        }
        for kind, count in (("completed", 1_000), ("peer_failed", 100))
    ]
    left_out = b'kvbridge_log_lines_left_out_total{event="room_ended"} ' + str(float(1_100 - 2 * LINES)).encode()
    assert left_out in b"".join(logged.metrics.render()[0])


def test_what_strangers_can_cause_is_logged_seldom() -> None:
    logged = Logged()
    with capture_logs() as lines:
        for _ in range(100):
            logged.events.emit(FrameRefused(kind="malformed", detail="x"))
            logged.events.emit(RoomMessageRefused(**ROOM, code="foreign_done"))
    assert len(lines) == 2 * LINES


def test_status_keeps_the_last_problems_with_their_time() -> None:
    clock = ManualClock(7.0)
    stream, recent = EventStream(clock), StatusReader()
    stream.add_reader(recent.table)
    for number in range(RECENT_PROBLEMS):
        stream.emit(RoomEntered(room=number, generation=1, state=RoomState.FAILED, code="c", reason="r"))
    clock.advance(1)
    stream.emit(PeerLost(peer="dddd", reason="silent"))
    stream.emit(WorkerLost(rank=R0, cause="killed", reason="killed by SIGKILL"))
    stream.emit(EngineLost(engine="e", reason="its connection has ended"))
    stream.emit(RoomQuarantined(**ROOM, cause="not_quiet", reason="q"))
    stream.emit(RoomRejected(**ROOM, code="c", reason="digests"))
    problems = recent.problems()
    assert len(problems) == RECENT_PROBLEMS
    assert (problems[0].at_s, problems[0].what, problems[0].whom) == (7.0, "room failed", "5")
    assert [problem.reason for problem in problems[-5:]] == [
        "silent",
        "killed by SIGKILL",
        "its connection has ended",
        "q",
        "digests",
    ]


def test_status_knows_the_traffic_with_each_peer_and_forgets_the_longest_unheard_of() -> None:
    stream, recent = EventStream(), StatusReader()
    stream.add_reader(recent.table)
    stream.emit(ended(1, amounts=AMOUNTS))
    stream.emit(RankReceived(**ROOM, rank=R0, amounts=AMOUNTS, transport="local"))
    stream.emit(RoomEntered(**ROOM, state=RoomState.COMPLETED))
    stream.emit(RoomEntered(**ROOM, state=RoomState.FAILED, code="c"))
    peer = recent.traffic()["dddd"]
    assert (peer.sent_bytes, peer.received_bytes, peer.rooms_completed, peer.rooms_failed) == (584, 584, 1, 1)
    for number in range(RECENT_PEERS):
        stream.emit(RoomEntered(room=number, generation=1, peer=str(number), state=RoomState.COMPLETED))
    assert len(recent.traffic()) == RECENT_PEERS
    assert "dddd" not in recent.traffic()


def test_a_lost_path_is_counted_logged_and_shown() -> None:
    stream, recent = EventStream(), StatusReader()
    stream.add_reader(recent.table)
    fact = PathLost(peer="dddd", rank=R0, transport="mooncake", transports=("nixl",), reason="cable")
    stream.emit(fact)
    [problem] = recent.problems()
    assert (problem.what, problem.whom) == ("path lost", "dddd")
    assert problem.reason == "mooncake of rank pp0.tp0: cable"
