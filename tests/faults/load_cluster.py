"""The daemons of a random load, with pools that run short and one store; and engines, which are killed at any time."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from kvbridge.cli.local_cluster import Cluster, DaemonProcess, daemon_config, plan_cluster
from kvbridge.core.errors import DetachedError, PeerError
from kvbridge.core.ids import Role
from tests.helpers.cut_paths import CutSettings, cut_worker
from tests.helpers.mutated_daemon import mutated
from tests.helpers.obedient_engines import ObedientEngine
from tests.helpers.prompts import TIER

ENGINE_CALL_S = 60.0
"""Longest call of an engine, which may be stopped, as may its daemon."""
MODEL = "tiny-v4"
PAGES = {"full": 28, "swa": 18, "request": 10}
HOST_PAGES, HOST_COPIES, CHECKPOINTS = 44, 40, 16
STORE_BYTES = "30MB"
KEEP_S = 600


@contextmanager
def load_cluster(transport: str) -> Iterator[Cluster]:
    """Start bootstrap, a prefill and two decode daemons over one store; end and remove all at exit."""
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    cut = CutSettings(transport="mooncake", addresses=("127.0.0.1",), after_share=0.0, flag=str(folder / "cut"))
    order = ["mooncake", "local"] if transport == "mooncake" else [transport]

    def more(**host: Any) -> dict[str, Any]:
        tier = TIER["tier"] | {"host": {"pages": HOST_COPIES} | host}
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

    common: dict[str, Any] = {"model": {"preset": MODEL}, "transport": order[0]}
    with_host = pools(host={"pages": HOST_PAGES})
    cluster = plan_cluster(
        folder,
        prefill=daemon_config(**common, instance=f"prefill-{folder.name}", pools=pools())
        | more(checkpoint_pages=CHECKPOINTS),
        decode=daemon_config(**common, instance=f"decode-{folder.name}", pools=with_host) | more(),
        ends_with_us=True,
    )
    second = DaemonProcess("decode", "the second decode daemon", folder / "e", ends_with_us=True)
    second.config = (
        daemon_config(**common, instance=f"second-{folder.name}", runtime_dir=second.runtime_dir, pools=with_host)
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


class Seat:
    """The place of one node's engine: filled when a room needs it, and anew once the engine or its daemon is gone."""

    def __init__(self, role: Role, node: DaemonProcess, violation: Callable[[str], None]) -> None:
        self._role, self._node, self._violation = role, node, violation
        self._lock = threading.Lock()
        self._engine: ObedientEngine | None = None
        self._struck: ObedientEngine | None = None

    def taken(self) -> Callable[..., Any]:
        """Return what carries out verbs for one room; it raises DetachedError once the engine that is there now is gone."""
        with self._lock:
            if self._engine is None:
                self._engine = ObedientEngine(self._role, self._node.runtime_dir)
            return partial(self._call, self._engine)

    def _call(self, engine: ObedientEngine, verb: str, *arguments: Any) -> Any:
        with self._lock:
            if self._engine is not engine:
                raise DetachedError(f"the engine of {self._node.name} is another by now")
            try:
                return engine.call(verb, *arguments, timeout_s=ENGINE_CALL_S)
            except (EOFError, OSError, DetachedError, PeerError) as error:
                if isinstance(error, EOFError | OSError) and engine is not self._struck:
                    self._violation(f"the engine of {self._node.name} has ended by itself")
                self._engine = None
                engine.close()
                raise DetachedError(f"the engine of {self._node.name} is gone") from error

    @property
    def pid(self) -> int | None:
        with self._lock:
            return self._engine.pid if self._engine is not None else None

    def kill(self) -> None:
        """kill -9, in the middle of a call as it may be."""
        self._struck = self._engine
        if self._struck is not None:
            with suppress(ValueError, ProcessLookupError):  # it has just been closed
                self._struck.signal(signal.SIGKILL)

    def close(self) -> None:
        with self._lock:
            if self._engine is not None:
                self._engine.close()
                self._engine = None
