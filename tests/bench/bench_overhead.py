"""What the service adds to a request: from the offer to the first byte, and around the transfer, on loopback.

Each request is published in full before decode admits it, so that nothing waits for an engine. Three figures a request:

- `offer_to_first_byte`: on prefill, from the offer's arrival to the first submit (planning included);
- `offer_to_commit`: on decode, from sending the offer to the commit;
- `overhead`: the second less the time in which bytes moved. It holds both ways of the control messages, so it is an upper bound
  of what the design's budget names.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import httpx

from kvbridge.core.plan.operations import Section
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
from tests.bench.output import percentile
from tests.bench.output import table as text
from tests.helpers import synthetic
from tests.helpers.cluster import Cluster, cluster

PROMPT_TOKENS = 256
WARM_UP = 20
REQUESTS = 200
BUDGETS_MS = {"offer_to_first_byte_ms": 2.0}
"""Of the median."""


def run(*, requests: int = REQUESTS, transports: tuple[str, ...] = ("local", "mooncake", "nixl")) -> dict[str, Any]:
    """Return the milliseconds of each request by figure, for each transport."""
    return {transport: _measure(transport, requests) for transport in transports}


def _measure(transport: str, requests: int) -> dict[str, Any]:
    with (
        cluster({"preset": "tiny-v4"}, transport=transport) as running,
        PrefillEngine.attach(running.prefill.runtime_dir) as prefill,
        DecodeEngine.attach(running.decode.runtime_dir) as decode,
        httpx.Client(timeout=10) as client,
    ):
        rooms = [_request(running, client, prefill, decode, number) for number in range(1, WARM_UP + requests + 1)]
    kept = rooms[WARM_UP:]
    return {name: [room[name] for room in kept] for name in kept[0]}


def _request(
    running: Cluster, client: httpx.Client, prefill: PrefillEngine, decode: DecodeEngine, room: int
) -> dict[str, float]:
    prefill.admit(room, prompt_tokens=PROMPT_TOKENS)
    tables = prefill.begin(room, prompt_tokens=PROMPT_TOKENS).tables
    whole = Section(prompt_tokens=PROMPT_TOKENS, start_token=0, stop_token=PROMPT_TOKENS)
    for views in prefill.views.values():
        synthetic.fill(views, room=room, tables=tables, section=whole)
    prefill.publish(room, PROMPT_TOKENS)
    prefill.finish(room)
    control = running.prefill.endpoint().control
    assert control is not None
    body = {"room": room, "prompt_tokens": PROMPT_TOKENS, "prefill": [control.model_dump()]}
    begun_s = time.monotonic()
    client.post(f"{running.decode.url}/v1/requests", json=body).raise_for_status()
    claimed = decode.wait_claim(room, timeout_s=20)
    total_ms = (time.monotonic() - begun_s) * 1e3
    decode.release(room)
    phases = {name: seconds * 1e3 for name, seconds in claimed.phases_s.items()}
    return {
        "offer_to_first_byte_ms": phases["offer_to_order"] + phases["first_byte"],
        "offer_to_commit_ms": phases["offer_to_commit"],
        "overhead_ms": phases["offer_to_commit"] - phases["move"],
        "http_admit_to_claim_ms": total_ms,
    }


def table(results: dict[str, Any]) -> str:
    """Lay the figures out for reading."""
    rows = [
        (transport, name.removesuffix("_ms"), statistics.median(ms), percentile(ms, 99), BUDGETS_MS.get(name))
        for transport, figures in results.items()
        for name, ms in figures.items()
    ]
    return text(("transport", "figure", "median ms", "p99 ms", "budget ms"), rows)
