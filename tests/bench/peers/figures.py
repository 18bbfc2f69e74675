"""The figures of `docs/performance.md` that stand beside SGLang's, from a committed result.

Owns: which of them are shown. Must not know: how they were measured, where on the page they go.
"""

from __future__ import annotations

import statistics
from typing import Any

from tests.bench.gpu.tables import Table, markdown

STEPS = {
    "request": "the router's request until decode has the room, and decode's answer to the claim",
    "admission": "decode reserves pages and knows the prefill node, until the offer is sent",
    "offer_to_order": "prefill takes the offer and orders what has been published",
    "plan": "the prefill rank plans",
    "submit": "it takes the order and gives the first operations to the library",
    "move": "bytes move",
    "rank": "between prefill's node and its rank: the order, and that it has ended",
    "nodes": "between the nodes: the offer, and that all was sent; and the commit",
    "claim": "the engine hears of the commit and claims",
}


def section(results: dict[str, Any]) -> str:
    """The comparison, where the time of the shortest request goes, and what of it is the library's."""
    found = results["peers"]
    before, after = found["load"]
    rows = tuple(
        (
            case["shape"],
            f"{case['tokens']:,}",
            *(f"{statistics.median(each):.1f} ({min(each):.1f} - {max(each):.1f})" for each in case["ms"].values()),
            " / ".join(f"{each / 1e6:.2f}" for each in case["bytes"].values()),
            " / ".join(f"{each:.2f}" for each in case["ms_a_mb"].values()),
            f"{case['sglang_over_kvbridge']:.2f}",
            f"{case['budget']:g}",
        )
        for case in [*found["one_page"], *found["long"]]
    )
    headings = ("pages", "tokens", "kvbridge ms", "SGLang ms", "MB", "ms a MB", "times as fast", "budget")
    ones = found["one_page"]
    steps = tuple(
        (
            said,
            *(
                f"{statistics.median(one['steps_ms'][name]):.2f} (from {min(one['steps_ms'][name]):.2f})"
                for one in ones
            ),
        )
        for name, said in STEPS.items()
    )
    said = (
        f"SGLang {results['sglang']['sglang']}. Medians and ranges of {found['turns']} turns (one page: "
        f"{ones[0]['turns']}); long prompts with pools {found['layout']}. Load average {before:.1f} before, {after:.1f} after."
    )
    columns = (
        "step of the one page, ms",
        *(f"{one['shape'].split()[-1]}, {one['operations']} operations" for one in ones),
    )
    ways = {
        "kvbridge": "kvbridge's transport, ms (processor ms of both ends)",
        "transfer_submit_write": "bare library, one by one",
        "batch_transfer_sync_write": "bare library, in a batch",
    }
    moved = tuple(
        (
            str(case["operations"]),
            *(
                f"{statistics.median(case['ms'][way]):.1f} ({statistics.median(case['processor_ms'][way]):.1f})"
                for way in ways
            ),
        )
        for case in found["library"]
    )
    library = Table("", ("operations for the bytes of the one page", *ways.values()), moved)
    tables = (Table("", headings, rows), Table("", columns, steps), library)
    return "\n\n".join((said, *map(markdown, tables)))
