"""Reports of demos that never ran."""

from __future__ import annotations

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.plan.operations import Amount
from kvbridge.testbed.demo.job import SparseFigures
from kvbridge.testbed.demo.report import DemoReport, HotBuffer, RequestReport
from kvbridge.testbed.demo.verdict import Comparison, verdict_line

KIB = 1024


def request(number: int = 1, *, first_difference: int | None = None, tokens: int = 4099) -> RequestReport:
    """One request with everything that a table can show."""
    amounts = {
        kind: Amount(lane_rows=10, bytes=KIB * (index + 1) * tokens, operations=index + 1)
        for index, kind in enumerate(list(ComponentKind)[:7])
    }
    return RequestReport(
        number=number,
        prompt_tokens=tokens,
        steps=16,
        amounts=amounts,
        moving_s=0.5,
        after_prefill_s=0.0125,
        source_pages={"full": (4, 5), "swa": (2,), "request": (1,)},
        destination_pages={"full": (0, 1), "host": (4, 5), "swa": (1,), "request": (1,)},
        comparison=Comparison(number=number, positions=17, first_difference=first_difference),
    )


def sparse_request(number: int = 1, *, tokens: int = 4099, loaded: int = 20_000) -> RequestReport:
    """One request that was decoded sparsely for 320 steps."""
    figures = SparseFigures(
        selected=61_440,
        in_ring=6_000,
        in_hot_slots=55_440 - loaded,
        loaded=loaded,
        evicted=loaded - 384,
        backed_up=192,
        rows=(tokens + 320) // 4,
    )
    comparison = Comparison(number=number, positions=321)
    more = {"steps": 320, "sparse": figures, "comparison": comparison, "share_of_rounding": 4.5e-4}
    return request(number, tokens=tokens).model_copy(update=more)


HOT_BUFFER = HotBuffer(hot_rows=128, ring_rows=128, top_k=64, layers=3, request_bytes=1_600_000, row_bytes=2048)


def report(*requests: RequestReport, **more: object) -> DemoReport:
    """A whole demo."""
    requests = requests or (request(),)
    facts = {
        "verdict": verdict_line([each.comparison for each in requests], reference="the model alone"),
        "transport": "mooncake",
        "encoding": "native",
        "prefill_stages": ((0, 1, 2, 3), (4, 5, 6)),
        "model": "tiny_deepseek_v4",
        "weights": "0" * 32,
        "versions": {"torch": "1", "transformers": "2"},
        "requests": requests,
        "most_in_flight": 4,
        "seconds": {"start": 10.0, "requests": 20.0},
    }
    return DemoReport.model_validate(facts | more)
