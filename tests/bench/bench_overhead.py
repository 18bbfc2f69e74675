"""The time that the service adds to a request of one page: from the offer to the first byte, and around the transfer, on loopback.

Each request is published in full before decode admits it, so that nothing waits for an engine:

- `offer_to_first_byte`: on prefill, from the offer's arrival to the first submit (planning included);
- `offer_to_commit`: on decode, from sending the offer to the commit;
- `http_admit_to_claim`: the transfer and two calls of HTTP.
"""

import statistics
import time
from typing import Any

import httpx

from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
from tests.bench.output import percentile, table as text
from tests.helpers.cluster import Cluster, cluster
from tests.helpers.live_rooms import control_of, write
from tests.helpers.rank_harness import Case

PROMPT_TOKENS = 256
WARM_UP = 20
REQUESTS = 200
BUDGETS_MS = {"offer_to_first_byte_ms": 2.0}
"""As a share of the median."""


def run(*, quick: bool) -> dict[str, Any]:
    return {transport: _measure(transport, 5 if quick else REQUESTS) for transport in ("local", "mooncake", "nixl")}


def _measure(transport: str, requests: int) -> dict[str, list[float]]:
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
    write(prefill, room, Case(PROMPT_TOKENS))
    body = {"room": room, "prompt_tokens": PROMPT_TOKENS, "prefill": [control_of(running.prefill)]}
    begun_s = time.monotonic()
    client.post(f"{running.decode.url}/v1/requests", json=body).raise_for_status()
    claimed = decode.claim(room, timeout_s=20)
    phases_s = claimed.phases_s
    total_s = time.monotonic() - begun_s
    claimed.release()
    return {
        "offer_to_first_byte_ms": (phases_s["offer_to_order"] + phases_s["first_byte"]) * 1e3,
        "offer_to_commit_ms": phases_s["offer_to_commit"] * 1e3,
        "http_admit_to_claim_ms": total_s * 1e3,
    }


def table(found: dict[str, Any]) -> str:
    rows = [
        (transport, name.removesuffix("_ms"), statistics.median(ms), percentile(ms, 99), BUDGETS_MS.get(name))
        for transport, figures in found.items()
        for name, ms in figures.items()
    ]
    return text(("transport", "figure", "median ms", "p99 ms", "budget ms"), rows)
