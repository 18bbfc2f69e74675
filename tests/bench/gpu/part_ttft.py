"""From the offer to the first swap-in of decode: directly into the host pool, and staged through decode's GPU memory.

Owns: both ways, through real daemons (prefill on cuda:0, decode on cuda:1 where there is one) with the local transport, at the
geometry of DeepSeek-V4-Flash; this process is the engine of both sides. The prompt is published before decode admits it, so nothing
waits for an engine. Both ways take turns.

- direct: the decode node keeps C4 in its host pool, and prefill writes it there;
- staged: the decode node keeps C4 in GPU memory; when it is there, one page copy of all layers brings it to host memory.

After that both admit the request to the hot buffer (short requests are loaded whole) and swap in the first selection of all 21
layers. At one length rows are filled and compared. Pools are fresh, so pages come in long runs on both sides.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import torch

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import IndexSpace, MemoryKind
from kvbridge.core.plan.operations import Section
from kvbridge.engine.decode import DecodeEngine, DecodeRoom
from kvbridge.engine.prefill import PrefillEngine
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.page_copies import CudaPageCopier
from kvbridge.kernels.places import IdPairs, PageMemory, PagePair
from kvbridge.pool.memory.host_registration import HostRegistration
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY, SharedMapping
from kvbridge.sparse import SparseCache, SparseSettings
from tests.bench.gpu.recorder import Recorder
from tests.helpers import synthetic
from tests.helpers.cluster import Cluster, cluster

LENGTHS = (8192, 32_768, 131_072)
CHECKED_TOKENS = 32_768
PAGES = {"full": 640, "swa": 16, "request": 4}
HOST_PAGES = 1024
TURNS = 11
SETTINGS = SparseSettings(max_requests=2, hot_rows=4096, top_k=512, max_tokens=132_096)
C4 = ComponentKind.C4_KV


def run(recorder: Recorder, *, quick: bool) -> None:
    """Measure both ways at each length."""
    two = runtime.device_count() > 1 and runtime.can_reach(0, 1)
    decode_device = 1 if two else 0
    if not two:
        recorder.skip("prefill and decode on two GPUs: this machine has one, so both are on cuda:0")
    torch.cuda.set_device(decode_device)
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=60, trust_env=False))
        ways = [stack.enter_context(open_way(name, client, decode_device)) for name in ("direct", "staged")]
        for tokens in LENGTHS[:1] if quick else LENGTHS:
            found: dict[str, list[dict[str, float]]] = {way.name: [] for way in ways}
            wrong = {way.name: way.check(tokens) if tokens == CHECKED_TOKENS else "" for way in ways}
            for turn in range(3 if quick else TURNS + 1):
                for way in ways:
                    phases = way.request(tokens)
                    if turn:  # the first one connects and registers
                        found[way.name].append(phases)
            for way in ways:
                recorder.case(
                    way=way.name,
                    tokens=tokens,
                    devices=[0, decode_device],
                    repetitions=len(found[way.name]),
                    ms={name: median(one[name] for one in found[way.name]) for name in found[way.name][0]},
                    wrong=wrong[way.name],
                )


@contextmanager
def open_way(name: str, client: httpx.Client, device: int) -> Iterator[Way]:
    """Daemons and engines of one way; `device` is decode's."""
    direct = name == "direct"
    pools = {"device": PAGES, "host": {"pages": HOST_PAGES} if direct else {"components": []}}
    with ExitStack() as stack:
        running = stack.enter_context(
            cluster(
                {"preset": "deepseek-v4-flash"},
                prefill={"parallelism": _on(0), "pools": {"device": PAGES}},
                decode={"parallelism": _on(device), "pools": pools},
            )
        )
        prefill = stack.enter_context(PrefillEngine.attach(running.prefill.runtime_dir, call_timeout_s=60))
        decode = stack.enter_context(DecodeEngine.attach(running.decode.runtime_dir, call_timeout_s=60))
        staging = None if direct else stack.enter_context(Staging.open(decode, device))
        hosts = staging.hosts if staging else _regions(decode, IndexSpace.HOST)
        component = decode.geometry.component(C4)
        cache = stack.enter_context(SparseCache(SETTINGS, component, hosts, torch.device("cuda", device)))
        yield Way(name, running, client, prefill, decode, cache, staging)


def _on(device: int) -> dict[str, Any]:
    return {"pp_size": 1, "tp_size": 1, "ranks": [{"pp": 0, "tp": 0, "device": f"cuda:{device}"}]}


def _regions(decode: DecodeEngine, space: IndexSpace) -> list[Region]:
    views = decode.views[decode.ranks[0]]
    return [views.region(C4, layer, space=space).region for layer in views.layers(C4)]


@dataclass
class Staging:
    """Host memory of our own, and the copy that brings pages there from decode's GPU."""

    hosts: list[Region]
    copier: CudaPageCopier
    device: int

    @classmethod
    @contextmanager
    def open(cls, decode: DecodeEngine, device: int) -> Iterator[Staging]:
        """Create and register the host memory."""
        regions = _regions(decode, IndexSpace.FULL)
        page_bytes = regions[0].page_bytes
        layer_bytes = HOST_PAGES * page_bytes
        name = f"kvbridge-bench-{os.getpid()}-{secrets.token_hex(4)}"
        threads = min(16, os.cpu_count() or 1)
        with (
            SharedMapping.create(Path(DEFAULT_DIRECTORY), name, len(regions) * layer_bytes, threads=threads) as mapping,
            HostRegistration([mapping], device=device),
        ):
            mapping.path.unlink()
            hosts = [
                Region(
                    component=C4,
                    layer=region.layer,
                    space=IndexSpace.HOST,
                    memory=MemoryKind.DRAM,
                    extent_addresses=(mapping.address + position * layer_bytes,),
                    pages_per_extent=HOST_PAGES,
                    page_count=HOST_PAGES,
                    page_bytes=page_bytes,
                    page_stride_bytes=page_bytes,
                )
                for position, region in enumerate(regions)
            ]
            pairs = [
                PagePair(PageMemory.of(region), PageMemory.of(host), page_bytes, group)
                for group, (region, host) in enumerate(zip(regions, hosts, strict=True))
            ]
            with CudaPageCopier(device, pairs) as copier:
                yield cls(hosts, copier, device)

    def back_up(self, device_pages: np.ndarray) -> np.ndarray:
        """Copy pages of all layers to consecutive host pages, as the daemon gives them out too; return these. Waits."""
        host_pages = np.arange(len(device_pages), dtype=np.int32)
        ids = torch.from_numpy(np.stack([device_pages.astype(np.int32), host_pages])).to(f"cuda:{self.device}")
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self.copier.copy([IdPairs(ids[0].data_ptr(), ids[1].data_ptr(), len(device_pages))], stream=stream)
        torch.cuda.synchronize(self.device)
        return host_pages


@dataclass
class Way:
    """One way, with everything that it needs."""

    name: str
    running: Cluster
    client: httpx.Client
    prefill: PrefillEngine
    decode: DecodeEngine
    cache: SparseCache
    staging: Staging | None
    room: int = 0

    def request(self, tokens: int) -> dict[str, float]:
        """Take one request to its first swap-in; return milliseconds of each phase, and of all."""
        phases, _ = self._through(tokens, fill=False)
        self._release()
        return phases

    def check(self, tokens: int) -> str:
        """Take a filled request through and compare every row that was swapped in; empty when all are right."""
        _, places = self._through(tokens, fill=True)
        component, wrong, count = self.decode.geometry.component(C4), 0, 0
        for position, layer in enumerate(self.cache.layers):
            expected = synthetic.expected_rows(
                component, room=self.room, layer=layer, lanes=(0, 1), start_row=0, stop_row=tokens // 4
            )
            selected, found = places[position]
            held = self.cache.rows(layer, found).reshape(-1, component.row_bytes).cpu().numpy()
            wrong += int((held != expected[selected.flatten().cpu().numpy()]).any(axis=1).sum())
            count += len(held)
        self._release()
        return f"{wrong} of {count} rows have wrong bytes" if wrong else ""

    def _through(self, tokens: int, *, fill: bool) -> tuple[dict[str, float], list[tuple[torch.Tensor, torch.Tensor]]]:
        self.room += 1
        self._publish(tokens, fill=fill)
        rows = tokens // 4
        selections = self._selections(rows)
        marks = [time.monotonic()]
        claimed = self._claim(tokens)
        marks.append(time.monotonic())
        host_pages = self._to_host(claimed, rows)
        marks.append(time.monotonic())
        self.cache.admit(0, host_pages, rows)
        torch.cuda.synchronize()
        marks.append(time.monotonic())
        self.cache.begin_step([(0, rows)])
        found = [
            self.cache.swap_in(layer, selections[position], torch.empty_like(selections[position]))
            for position, layer in enumerate(self.cache.layers)
        ]
        self.cache.end_step()
        torch.cuda.synchronize()
        marks.append(time.monotonic())
        return _phases(claimed, marks), list(zip(selections, found, strict=True))

    def _publish(self, tokens: int, *, fill: bool) -> None:
        self.prefill.admit(self.room, prompt_tokens=tokens)
        tables = self.prefill.begin(self.room, prompt_tokens=tokens).tables
        if fill:
            whole = Section(prompt_tokens=tokens, start_token=0, stop_token=tokens)
            for views in self.prefill.views.values():
                synthetic.fill(views, room=self.room, tables=tables, section=whole)
        self.prefill.publish(self.room, tokens)
        self.prefill.finish(self.room)

    def _claim(self, tokens: int) -> DecodeRoom:
        control = self.running.prefill.endpoint().control
        assert control is not None
        body = {"room": self.room, "prompt_tokens": tokens, "prefill": [control.model_dump()]}
        self.client.post(f"{self.running.decode.url}/v1/requests", json=body).raise_for_status()
        return self.decode.wait_claim(self.room, timeout_s=60)

    def _to_host(self, claimed: DecodeRoom, rows: int) -> np.ndarray:
        if self.staging is None:
            return claimed.tables[IndexSpace.HOST].ids
        needed = -(-rows // self.decode.geometry.component(C4).slots_per_page)
        return self.staging.back_up(claimed.tables[IndexSpace.FULL].ids[:needed])

    def _selections(self, rows: int) -> torch.Tensor:
        """Random rows for each layer: int32 [layers, 1, k], on the device."""
        chosen = [torch.randperm(rows, device="cuda", dtype=torch.int32)[: SETTINGS.top_k] for _ in self.cache.layers]
        torch.cuda.synchronize()
        return torch.stack(chosen)[:, None]

    def _release(self) -> None:
        self.cache.release(0)
        torch.cuda.synchronize()
        self.decode.release(self.room)
        self.decode.events()
        self.prefill.events()


def _phases(claimed: DecodeRoom, marks: list[float]) -> dict[str, float]:
    """Milliseconds. `offer_to_first_swap_in` leaves out the HTTP call that admits, which is the same for both ways."""
    told = {name: 1e3 * seconds for name, seconds in claimed.phases_s.items()}
    backup, admission, swap_in = (1e3 * (after - before) for before, after in itertools.pairwise(marks[1:]))
    transfer = told["offer_to_commit"]
    claim = told.get("commit_to_claim", 0.0)
    return {
        "transfer": transfer,
        "moving": told.get("move", 0.0),
        "claim": claim,
        "backup": backup,
        "admission": admission,
        "swap_in": swap_in,
        "offer_to_first_swap_in": transfer + claim + backup + admission + swap_in,
        "with_http": 1e3 * (marks[-1] - marks[0]),
    }
