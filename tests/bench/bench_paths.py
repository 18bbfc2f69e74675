"""A path that is lost in the middle of a request, against the same request undisturbed, from publication to claim.

With half of its operations confirmed, the kernel ends every connection of the prefill rank worker by the first transport.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.output import spread, table as text
from tests.helpers.cluster import eventually
from tests.integration.test_paths import LOOK_S, Stage, stage

MODEL = "deepseek-v4-flash"
TOKENS = 131_072
ORDERS = (("mooncake", "nixl"), ("nixl", "mooncake"))
TURNS = 5
MOST_TRIES = 4
"""For a turn, until a path was lost under the request."""
BUDGET_S = 1.0


def disturbed(pair: Stage, order: tuple[str, str]) -> float:
    """The seconds of a request that a path is lost under; its bytes are compared."""
    for _ in range(MOST_TRIES):
        before = len(pair.problems())
        pair.flag.touch()
        try:
            seconds = pair.cross()
        finally:
            pair.flag.unlink()
        lost = len(pair.problems()) > before
        eventually("both paths again", lambda: pair.paths() == order, LOOK_S)
        if lost:
            return seconds
    raise AssertionError(f"no path was lost under {MOST_TRIES} requests")


def run(*, quick: bool) -> dict[str, Any]:
    """Return seconds for each order of transports, undisturbed and disturbed in turns."""
    turns = 1 if quick else TURNS
    found = {}
    for order in ORDERS:
        with (
            tempfile.TemporaryDirectory() as folder,
            stage(order, Path(folder), order[0], model=MODEL, tokens=TOKENS, after_share=0.5) as pair,
        ):
            times_s = [(pair.cross(compared=False), disturbed(pair, order)) for _ in range(turns)]
        plain_s, lost_s = map(list, zip(*times_s, strict=True))
        added_s = statistics.median(lost_s) - statistics.median(plain_s)
        found[" then ".join(order)] = {"undisturbed_s": plain_s, "disturbed_s": lost_s, "added_s": added_s}
    return {"tokens": TOKENS, "budget_s": BUDGET_S, "orders": found}


def table(found: dict[str, Any]) -> str:
    rows = [
        (order, spread(one["undisturbed_s"]), spread(one["disturbed_s"]), one["added_s"], found["budget_s"])
        for order, one in found["orders"].items()
    ]
    title = f"{found['tokens']:,} tokens of {MODEL}; every byte of the disturbed requests was as written"
    return text(("transports", "undisturbed s", "path lost in the middle s", "added s", "budget s"), rows, title)
