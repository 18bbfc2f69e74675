"""The stream of facts: order and time."""

from __future__ import annotations

from kvbridge.core.ids import Rank
from kvbridge.telemetry.events import Fact, MemoryRegistered, MessagesResent, PeerFact, PeerLost, WorkerStarted
from kvbridge.telemetry.stream import EventStream
from tests.helpers.manual_clock import ManualClock


def test_every_reader_has_every_fact_in_order_with_its_time() -> None:
    clock = ManualClock(5.0)
    stream = EventStream(clock)
    first: list[tuple[float, Fact]] = []
    second: list[tuple[float, Fact]] = []
    stream.add_reader({Fact: lambda now_s, fact: first.append((now_s, fact))})
    one, two = MessagesResent(count=2), MemoryRegistered(rank=Rank(pp=0, tp=0), share=0.5)
    stream.emit(one)
    clock.advance(1)
    stream.add_reader({Fact: lambda now_s, fact: second.append((now_s, fact))})
    stream.emit(two)
    assert first == [(5.0, one), (6.0, two)]
    assert second == [(6.0, two)]


def test_a_reader_has_the_facts_of_its_table_and_of_the_kinds_below() -> None:
    stream, heard = EventStream(), []
    stream.emit(MessagesResent(count=1))  # before anybody reads
    stream.add_reader({MessagesResent: lambda _, fact: heard.append(fact.count)})
    stream.add_reader(
        {PeerFact: lambda _, fact: heard.append(fact.peer), MemoryRegistered: lambda *_: heard.append("m")}
    )
    for fact in (MessagesResent(count=2), PeerLost(peer="p", reason="r"), WorkerStarted(rank=Rank(pp=0, tp=0), pid=1)):
        stream.emit(fact)
    assert heard == [2, "p"]
