"""Results that nobody measured, in the form that the GPU benchmark writes: for tests of tables and reports only."""

from __future__ import annotations

from typing import Any

from tests.bench.gpu.comparison import sglang


def results() -> dict[str, Any]:
    """One case of everything, and the whole swap-in table at half of SGLang's time."""
    swap_in = [{**case, "us": case["us"] / 2, "wrong": "", "layers": 8, "gb_s": 1.0} for case in sglang()["swap_in"]]
    parts = {
        "ceilings": [
            {"what": "d2h", "devices": [0], "bytes": 1 << 30, "gb_s": 55.0},
            {"what": "h2d", "devices": [0, 1], "bytes": 2 << 30, "gb_s": 106.0},
            {"what": "launch floor", "us": 1.25},
            {"what": "bare gather", "footprint_gib": 0.286, "rows": 2048, "us": 36.8, "gb_s": 32.5},
        ],
        "copy_pages": [
            _pages(way, layers, pages) for way in ("d2h", "h2d") for layers in (1, 21) for pages in (1, 8, 64, 512)
        ],
        "twin_copies": _twins(),
        "copy_rows": [
            {"rows": rows, "layers": 21, "order": order, "bytes": rows * 21 * 584, "us": 4.0 + rows / 5, "gb_s": 40.0}
            | {"link_us": 3.0, "link_gb_s": 50.0, "wrong": ""}
            for rows in (1, 64)
            for order in ("random", "contiguous")
        ],
        "digest": [{"pages": 4096, "bytes": 153_354_240, "us": 900.0, "gb_s": 170.0, "read_gb_s": 3000.0, "wrong": ""}],
        "transport": [
            {"to": to, "gpus": gpus, "tokens": 131_072, "layout": "layer_first", "bytes": 402_554_880}
            | {"operation_bytes": 37_440, "gb_s": 48.0 * gpus, "copy_gb_s": 55.0 * gpus, "wrong": ""}
            for to, gpus in (("host", 1), ("host", 2), ("cuda:1", 1))
        ],
        "copy_phases": [
            {"to": "host", "gpus": 1, "tokens": 32_768, "tried": "as it is", "submitted_s": 2e-4, "slices": 1}
            | {"device_began_s": 1.5e-4, "late_s": 1e-5, "waited_s": 0.0, "device_gb_s": 52.0, "gb_s": 48.0}
            | {"copy_gb_s": 54.0, "wrong": ""}
        ],
        "ttft": [_ttft(way, tokens) for tokens in (8192, 131_072) for way in ("direct", "staged")],
        "sparse_buys": _steps(),
        "swap_in_layouts": [
            {"batch": 8, "miss_percent": 10, "host_layout": layout, "us": us, "bare_gather_us": us - 1, "wrong": ""}
            for layout, us in (("layer_first", 20.0), ("page_first", 21.0))
        ],
        "swap_in": swap_in,
    }
    environment = {"devices": ["NVIDIA Imaginary"], "cpu_count": 16, "nvidia_smi": [{"driver_version": "1.2.3"}]}
    return {
        "environment": environment,
        "parts": {name: {"cases": cases, "skipped": [], "failed": "", "took_s": 1.0} for name, cases in parts.items()},
    }


def _steps() -> list[dict[str, Any]]:
    facts = {"tokens": 131_072, "device_bytes": 10**8, "host_bytes": 4 * 10**8, "least_ms": 5.0, "most_ms": 9.0}
    sparse = {"way": "sparse", "overlapped": True, "host_us": 300.0, "wrong": ""}
    cases = [("0 %", 64, 0.0, 6.0, False), ("2 %", 64, 2.0, 6.6, False), ("2 %", 400, 2.0, 16.0, True)]
    return [
        {**facts, "way": "device", "overlapped": False, "selections": "", "batch": 150, "fits": True, "ms": 9.0}
        | {"tokens_s": 150 / 9e-3},
        *(
            {**facts, **sparse, "selections": selections, "batch": batch, "missing_percent": missing, "ms": ms}
            | {"fits": fits, "tokens_s": 1e3 * batch / ms}
            for selections, batch, missing, ms, fits in cases
        ),
    ]


def _pages(way: str, layers: int, pages: int) -> dict[str, Any]:
    total = layers * pages * 37_440
    rate = 50.0 * total / (total + 400_000)
    facts = {"way": way, "layers": layers, "pages": pages, "blocks": 0, "bytes": total, "us": total / rate / 1e3}
    return facts | {"gb_s": rate, "link_us": total / 55e3, "link_gb_s": 55.0, "wrong": ""}


def _twins() -> list[dict[str, Any]]:
    facts = {"layout": "page_first", "device_layout": "page_first", "wrong": ""}
    load = facts | {"way": "load_back", "backend": "kernel"}
    rate = {"bytes": 8_000_000, "us": 160.0, "gb_s": 50.0, "link_us": 145.0, "link_gb_s": 55.0}
    return [
        *(
            {
                "what": "rate",
                **facts,
                "way": way,
                "backend": backend,
                "space": "full",
                "pages": pages,
                "blocks": 0,
                **rate,
            }
            for way in ("backup", "load_back")
            for backend in ("kernel", "direct")
            for pages in (8, 64, 512)
        ),
        {"what": "sweep", **load, "pages": 64, "blocks": 4, "loads": 4, **rate},
        {"what": "by layer", **load, "pages": 512, "layers": 41, "first_bytes": 800_000, "first_us": 100.0}
        | {"first_link_us": 20.0, "whole_us": 9600.0, "at_once_us": 9500.0},
        {"what": "enqueue", **load, "pages": 512, "us": 60.0},
        {"what": "compute", **load, "pages": 128, "compute_us": 80_000.0, "load_us": 2_400.0, "both_us": 81_000.0}
        | {"loads": 24, "beside_us": 82_000.0},
    ]


def _ttft(way: str, tokens: int) -> dict[str, Any]:
    transfer = tokens / 131_072 * 12
    ms = {
        "transfer": transfer,
        "moving": transfer - 1,
        "claim": 0.4,
        "backup": 0.0 if way == "direct" else transfer / 2,
    }
    ms |= {"admission": 0.3, "swap_in": 0.9}
    ms["offer_to_first_swap_in"] = sum(value for name, value in ms.items() if name != "moving")
    ms["with_http"] = ms["offer_to_first_swap_in"] + 3
    return {"way": way, "tokens": tokens, "devices": [0, 0], "repetitions": 11, "ms": ms, "wrong": ""}
