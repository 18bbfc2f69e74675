"""One request through two engines, with the synthetic engine's bytes: written on one side, each of them compared on the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvbridge.engine import DecodeEngine, DecodeRoom, PrefillEngine, PrefillRoom
from tests.helpers import synthetic
from tests.helpers.cluster import Cluster, cluster
from tests.helpers.rank_harness import Case

CLAIM_S = 30.0


@contextmanager
def nodes(prefill: dict[str, Any], decode: dict[str, Any], **more: Any) -> Iterator[Cluster]:
    """Daemons over the `local` transport; what they said is shown when a test fails."""
    with cluster({"preset": "tiny-v4"}, transport="local", prefill=prefill, decode=decode, **more) as running:
        try:
            yield running
        except BaseException as error:
            for daemon in (running.prefill, running.decode):
                error.add_note(f"{daemon.name}:\n{daemon.log(30)}")
            raise


def write(engine: PrefillEngine, room: int, case: Case, begun: PrefillRoom | None = None) -> None:
    """Compute a request chunk by chunk, and finish."""
    begun = begun or engine.begin(room, prompt_tokens=case.tokens)
    for section in case.sections(range(engine.geometry.layer_count)):
        for views in engine.views.values():
            synthetic.fill(views, room=room, tables=begun.tables, section=section)
        begun.publish(section.stop_token, layers=section.layers)
    begun.finish(metadata=b"first token")


def check_rows(engine: DecodeEngine, room: DecodeRoom) -> None:
    for rank, views in engine.views.items():
        wrong = synthetic.compare(views, room=room.id, tables=room.tables, tokens=room.prompt_tokens).mismatches
        assert not wrong, f"rank {rank}: " + "; ".join(map(str, wrong))


def cross(running: Cluster, sender: PrefillEngine, reader: DecodeEngine, case: Case) -> DecodeRoom:
    """One request, all of it compared."""
    room = running.pair(case.tokens, max_new_tokens=10)["room"]
    write(sender, room, case)
    claimed = reader.claim(room, timeout_s=CLAIM_S)
    check_rows(reader, claimed)
    assert set(claimed.metadata.values()) == {b"first token"}
    return claimed
