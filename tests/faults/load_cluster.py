"""The daemons of a random load: pools that run short, host memory below them, and a store that all share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from kvbridge.cli.local_cluster import Cluster, ClusterSpec, DaemonProcess, NodeSpec, daemon_config, plan_cluster
from tests.helpers.cut_paths import CutSettings, cut_worker
from tests.helpers.mutated_daemon import mutated
from tests.helpers.prompts import TIER

MODEL = "tiny-v4"
PAGES = {"full": 28, "swa": 18, "request": 10}
HOST_PAGES, TWINS, CHECKPOINTS = 44, 40, 16
STORE_BYTES = "30MB"
KEEP_S = 600


@contextmanager
def load_cluster(transport: str) -> Iterator[Cluster]:
    """Start bootstrap, a prefill and two decode daemons over one store; end and remove all at exit."""
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    cut = CutSettings(transport="mooncake", addresses=("127.0.0.1",), after_share=0.0, flag=str(folder / "cut"))
    order = ["mooncake", "local"] if transport == "mooncake" else [transport]

    def more(**host: Any) -> dict[str, Any]:
        tier = TIER["tier"] | {"host": {"pages": TWINS} | host}
        tier["store"] = {"kind": "files", "directory": str(folder / "store"), "max_bytes": STORE_BYTES}
        return {
            "transports": {"order": order, "mooncake": {"host": "127.0.0.1"}},
            "tier": tier,
            "timeouts": {
                "claim_s": 20.0,
                "offer_s": 20.0,
                "begin_s": 15.0,
                "peer_silence_s": 4.0,
                "drain_s": 5.0,
            },
        }

    def pools(**host: Any) -> dict[str, Any]:
        return {"device": PAGES, "keep_s": KEEP_S} | host

    spec = ClusterSpec(
        model={"preset": MODEL},
        transport=order[0],
        ends_with_us=True,
        prefill=NodeSpec(instance=f"prefill-{folder.name}", pools=pools(), more=more(checkpoint_pages=CHECKPOINTS)),
        decode=NodeSpec(instance=f"decode-{folder.name}", pools=pools(host={"pages": HOST_PAGES}), more=more()),
    )
    cluster = plan_cluster(folder, spec)
    second = DaemonProcess("decode", "the second decode daemon", folder / "e", ends_with_us=True)
    second.config = (
        daemon_config(
            spec.model,
            instance=f"second-{folder.name}",
            runtime_dir=second.runtime_dir,
            transport=order[0],
            pools=pools(host={"pages": HOST_PAGES}),
        )
        | more()
    )
    cluster.others.append(second)
    if transport == "mooncake":
        cluster.prefill = mutated(cluster.prefill, worker_code=cut_worker(cut))
    try:
        cluster.start()
        cluster.wait_ready()
        # The nodes have been told where bootstrap is: the next one is there, too.
        cluster.bootstrap.config["http"] = {"port": httpx.URL(cluster.bootstrap.url).port}
        yield cluster
    finally:
        cluster.stop(force_after_s=5.0)
        for path in Path("/dev/shm").glob(f"kvbridge-*{folder.name}*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
