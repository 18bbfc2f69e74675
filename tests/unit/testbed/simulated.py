"""The report of a replay that nobody ran: queues of two engines, simulated. For looking at the picture, and for its test.

`python -m tests.unit.testbed.simulated FILE.png` draws it.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.plan.operations import Amount
from kvbridge.testbed.replay.job import Arrived
from kvbridge.testbed.replay.plot import draw
from kvbridge.testbed.replay.report import Ending, ReplayReport
from tests.unit.testbed.replays import ledger

COUNT, IN_FLIGHT = 300, 6
POOL_PAGES = {
    "prefill": {"full": 1600, "swa": 32, "request": 16},
    "decode": {"full": 1600, "host": 1600, "swa": 32, "request": 16},
}
BYTES_PER_TOKEN = 4400


@dataclass
class Timed:
    """When what happened to one request, in seconds."""

    number: int
    tokens: int
    due: float
    admitted: float
    begun: float
    finished: float
    committed: float
    claimed: float
    checked: float
    released: float


def requests() -> list[Timed]:
    """Two engines that serve one request at a time, and a bridge between them."""
    chance = random.Random(11)
    free = [0.0] * IN_FLIGHT
    prefill_free = decode_free = 0.0
    made = []
    for number in range(1, COUNT + 1):
        free.sort()
        due = free[0]
        tokens = min(120_000, int(chance.lognormvariate(9.1, 0.9)))
        admitted = due + chance.lognormvariate(-4.4, 0.4)
        begun = max(admitted, prefill_free) + 1e-4
        finished = prefill_free = begun + tokens / 116_000
        committed = finished + 0.01 + min(tokens, 30_000) / 250_000 * chance.uniform(0.6, 1.6)
        claimed = max(committed, decode_free)
        checked = decode_free = claimed + tokens / 128_000
        free[0] = released = checked + 0.004
        made.append(Timed(number, tokens, due, admitted, begun, finished, committed, claimed, checked, released))
    return made


def report(folder: Path) -> ReplayReport:
    """Tell a ledger of all of it in the order of time."""
    book = ledger(folder, COUNT, speed=0.0, max_in_flight=IN_FLIGHT)
    timed = requests()
    events: list[tuple[float, int, Callable[[], object]]] = []
    for each in timed:
        events += [
            (each.due, 1, lambda at=each.due: book.due(at)),
            (each.admitted, 2, lambda it=each: admit(book, it)),
            (each.finished, 3, lambda it=each: book.finished(it.number, begun_s=it.begun, finished_s=it.finished)),
            (each.checked, 4, lambda it=each: book.arrived(arrival(it))),
            (each.released, 0, lambda it=each: book.released(it.number, it.released)),
        ]
    end = timed[-1].released
    events += [(float(at), 5, lambda at=at: book.sample(at, used_pages(timed, at))) for at in (*range(int(end)), end)]
    for _, _, happen in sorted(events, key=lambda event: event[:2]):
        happen()
    made = book.report(Ending.COMPLETED, "", pool_bytes=0, pages_left=0, seconds={"replay": end})
    settings = {**made.settings, "model": "deepseek-v4-flash", "transport": "mooncake"}
    return made.model_copy(update={"trace": "a simulated trace", "settings": settings, "pool_pages": POOL_PAGES})


def admit(book, each: Timed) -> None:
    book.admitted(book._requests[each.number - 1], each.number, asked_s=each.due, now_s=each.admitted)


def arrival(each: Timed) -> Arrived:
    moved, wait = each.tokens / 90_000, each.begun - each.admitted
    return Arrived(
        number=each.number,
        amounts={ComponentKind.C4_KV: Amount(lane_rows=1, bytes=each.tokens * BYTES_PER_TOKEN, operations=1)},
        phases_s={
            "admit_to_offer": 0.0003 * (1 + wait),
            "offer_to_order": wait + 0.03,
            "plan": each.tokens / 4e6,
            "first_byte": each.tokens / 3.4e6,
            "move": moved,
            "offer_to_commit": each.committed - each.admitted,
            "commit_to_claim": each.claimed - each.committed,
        },
        after_prefill_s=each.committed - each.finished,
        computed_tokens=0,
        prefix_tokens=0,
        check_s=each.checked - each.claimed,
        checked_bytes=9,
        wrong_bytes=0,
    )


def used_pages(timed: list[Timed], at: float) -> dict[str, dict[str, int]]:
    prefill = [each for each in timed if each.admitted <= at < each.committed]
    decode = [each for each in timed if each.admitted <= at < each.released]
    used = {}
    for role, rooms in (("prefill", prefill), ("decode", decode)):
        pages = sum(math.ceil(each.tokens / 256) for each in rooms)
        used[role] = {"full": pages, "swa": 2 * len(rooms), "request": len(rooms)}
    used["decode"]["host"] = used["decode"]["full"]
    return used


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        draw(report(Path(folder)), Path(sys.argv[1]))
