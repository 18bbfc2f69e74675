"""Stages of the fault suite, built and taken down."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from kvbridge.cli.local_cluster import DaemonProcess, daemon_config, plan_cluster, transport_section
from kvbridge.core.ids import Role
from tests.faults.cells import HEARTBEAT_S, PEER_SILENCE_S, WORKER_SILENCE_S
from tests.faults.fault_cluster import DEVICE_PAGES, HOST_PAGES, FaultCluster, Gpus, Settings
from tests.faults.late_writer_cluster import MODEL, PAGES, SHARED_BY_LATE_TOKENS, LateWriterCluster
from tests.helpers.cluster import faulty_worker, mutated
from tests.helpers.gated_copies import Gate
from tests.helpers.prompts import TIER
from tests.helpers.zygote import installed

TIMEOUTS = {
    "control_heartbeat_s": HEARTBEAT_S,
    "control_resend_s": 0.1,
    "peer_silence_s": PEER_SILENCE_S,
    "worker_silence_s": WORKER_SILENCE_S,
    "drain_s": 1.0,
    "shutdown_rooms_s": 2.0,
    "shutdown_close_s": 4.0,
}
EXPIRE_S = 2.0
"""Bootstrap forgets a silent daemon after this."""
SLICE_BYTES = 1 << 20
"""Slices of the late daemon's copies where pools are on GPUs: a late room takes 24."""
CANARY_TIMEOUTS = {
    "worker_silence_s": 60.0,  # a frozen worker is to wake, not to be killed
    "control_delivery_s": 60.0,
    "fence_s": 1.5,
}
EXPIRING = {"transfer_s": 4.0, "room_s": 5.0}
"""For late rooms that are to end by themselves."""
QUIET_S = 1.0
"""How long a transfer that has failed may stay loud before its transport is given up."""


StageT = TypeVar("StageT", bound=FaultCluster)


@contextmanager
def scene(
    *,
    transport: str = "local",
    shares: bool = False,
    prefill: Settings | None = None,
    timeouts: Settings | None = None,
    faults: Settings | None = None,
    gpus: Gpus | None = None,
) -> Iterator[FaultCluster]:
    """A stage of its own; ended, with all that it left, at exit. `faults`: of the prefill daemon's transports."""
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    waits = {"timeouts": TIMEOUTS | dict(timeouts or {})} | (TIER if shares else {})
    # Names that no other run on this machine has: each start sweeps what is left of its own name.
    common = {"model": {"preset": "tiny-v4"}, "transport": transport, **waits}
    pools, host = {"device": DEVICE_PAGES}, {"host": {"pages": HOST_PAGES}}
    cluster = plan_cluster(
        folder,
        bootstrap={"directory": {"expire_after_s": EXPIRE_S}},
        prefill=daemon_config(**common, instance=f"prefill-{folder.name}", pools=pools)
        | {**Gpus.section(gpus, Role.PREFILL), **dict(prefill or {})},
        decode=daemon_config(**common, instance=f"decode-{folder.name}", pools=pools | host)
        | {**Gpus.section(gpus, Role.DECODE)},
        ends_with_us=True,
    )
    if faults:
        cluster.prefill = mutated(cluster.prefill, worker_code=faulty_worker(faults))
    with started(FaultCluster(cluster, shares=shares, gpus=gpus)) as stage:
        yield stage


@contextmanager
def started(stage: StageT) -> Iterator[StageT]:
    try:
        stage.cluster.start()
        stage.cluster.wait_ready()
        assert stage.ports
        yield stage
    finally:
        stage.close()


class ClusterCache(Generic[StageT]):
    """One stage at a time, by the key that it was built with. It serves one test after another: building takes seconds."""

    def __init__(self, build: Callable[[str], AbstractContextManager[StageT]]) -> None:
        self._build = build
        self._key = ""
        self._stage: StageT | None = None
        self._context: AbstractContextManager[StageT] | None = None

    @contextmanager
    def on(self, key: str) -> Iterator[StageT]:
        """The stage for one test; whoever fails on it is the last."""
        if self._stage is None or key != self._key:
            self.clear()
            self._context = self._build(key)
            self._key, self._stage = key, self._context.__enter__()
        try:
            yield self._stage
        except BaseException:
            print(self._stage.describe())
            self.clear()
            raise

    def clear(self) -> None:
        context, self._context, self._stage = self._context, None, None
        if context is not None:
            context.__exit__(None, None, None)


@contextmanager
def late_writer_cluster(
    transport: str,
    *,
    expiring: bool = False,
    shares: bool = False,
    faults: Settings | None = None,
    daemon_mistake: str = "",
    worker_mistake: str = "",
    gpus: Gpus | None = None,
) -> Iterator[LateWriterCluster]:
    """`transport` leads from the late prefill daemon to decode, `local` from the filling one.

    `faults` are those of the late prefill daemon's transports; the mistakes are put into the decode daemon and into the late
    prefill daemon's workers. With `gpus` the late daemon's copies come in small slices, through a gate.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    tier = TIER if shares else {}
    waits = {"timeouts": TIMEOUTS | CANARY_TIMEOUTS} | tier
    section = transport_section(transport)
    for name in ("mooncake", "nixl"):
        section[name] = dict(transport_section(name).get(name, {})) | {"quiet_timeout_s": QUIET_S}
    if gpus is not None:
        section["local"] = {"device_slice_bytes": SLICE_BYTES, "slice_bytes": SLICE_BYTES}
    both = {"transports": section | {"order": list(dict.fromkeys([transport, "local"]))}}
    pools = {"device": {"full": PAGES}}
    model = {"preset": MODEL}
    common = {"model": model, "transport": transport, **waits}
    prefill = {"transports": section, "timeouts": waits["timeouts"] | (EXPIRING if expiring else {})}
    cluster = plan_cluster(
        folder,
        prefill=daemon_config(**common, instance=f"late-{folder.name}", pools=pools)
        | {**prefill, **Gpus.section(gpus, Role.PREFILL)},
        decode=daemon_config(**common, instance=f"decode-{folder.name}", pools=pools | {"host": {"components": []}})
        | {**both, **Gpus.section(gpus, Role.DECODE)},
        ends_with_us=True,
    )
    gate = Gate(Path("/dev/shm") / f"{folder.name}-gate", create=True) if gpus is not None else None
    changed = (faulty_worker(faults) if faults else "") + (installed("gated_copies", str(gate.path)) if gate else "")
    cluster.prefill = mutated(cluster.prefill, worker_code=changed + worker_mistake)
    cluster.decode = mutated(cluster.decode, daemon_code=daemon_mistake)
    second = DaemonProcess("prefill", "the filling daemon", folder / "q", ends_with_us=True)
    second.config = (
        daemon_config(
            model, instance=f"fill-{folder.name}", runtime_dir=second.runtime_dir, transport="local", pools=pools
        )
        | waits
        | dict(Gpus.section(gpus, Role.PREFILL))
    )
    cluster.others.append(second)
    late = LateWriterCluster(
        cluster,
        second=second,
        faulty=bool(faults),
        shares=shares,
        shared_tokens=SHARED_BY_LATE_TOKENS,
        model=MODEL,
        gpus=gpus,
        gate=gate,
    )
    with started(late) as stage:
        stage.meet()
        yield stage
