"""A decode daemon whose pages run short, a prefill daemon that will write late, and another that fills what becomes free."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvbridge.cli.local_cluster import (
    ClusterSpec,
    DaemonProcess,
    NodeSpec,
    daemon_config,
    plan_cluster,
    transport_section,
)
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import Role
from kvbridge.daemon.memory import file_prefix
from kvbridge.tier.keys import NO_KEYS
from tests.faults.fault_cluster import TIMEOUTS, FaultCluster, Gpus, Settings
from tests.helpers.cluster import eventually
from tests.helpers.faulty_transport import faulty_worker
from tests.helpers.gated_copies import Gate, gated_worker
from tests.helpers.live_rooms import all_free, http, status
from tests.helpers.mutated_daemon import mutated
from tests.helpers.obedient_engines import ObedientEngine
from tests.helpers.prompts import TIER, Prompt
from tests.helpers.synthetic import expected_rows

MODEL = "tiny-gqa"
PAGES = 192
"""Of every pool: 36 MiB."""
LATE_TOKENS = 128 * 256
"""Of the late room: 24 MiB, which is more than sockets hold."""
FILL_TOKENS = 64 * 256
SLICE_BYTES = 1 << 20
"""Of the late daemon's copies where pools are on GPUs: a late room takes 24 of them."""
NEEDLE_BYTES = 32
"""A piece of a row that no other row of any room has."""
ROWS_LOOKED_FOR = 64
SHARED_BY_LATE_TOKENS = 16 * 256
"""With which late rooms begin, where rooms share."""
SIBLING_TOKENS = SHARED_BY_LATE_TOKENS
"""All of the sibling: beside a late room's pages and its own there is space for one that fills."""

CANARY_TIMEOUTS = {
    "worker_silence_s": 60.0,  # a frozen worker is to wake, not to be killed
    "control_delivery_s": 60.0,
    "fence_s": 1.5,
}
EXPIRING = {"transfer_s": 4.0, "room_s": 5.0}
"""For late rooms that are to end by themselves."""
QUIET_S = 1.0
"""How long a transfer that has failed may stay loud before its transport is given up."""


@dataclass
class LateWriterCluster(FaultCluster):
    """See the module. `late` is the prefill daemon of the base class."""

    second: DaemonProcess = field(kw_only=True)
    faulty: bool = False
    """Nothing that the late daemon sends arrives in time."""
    sibling: int = 0
    """A room that shares the late rooms' beginning, written by the filling daemon and claimed, on a cluster whose rooms share."""
    gate: Gate | None = None
    """At which the late daemon's copies wait, where pools are on GPUs."""
    _filler: ObedientEngine | None = None
    filled: list[int] = field(default_factory=list)

    @property
    def filler(self) -> ObedientEngine:
        """The prefill engine that fills pages."""
        if self._filler is None:
            self._filler = self.attach(Role.PREFILL, self.second)
        return self._filler

    def close(self) -> None:
        if self.gate is not None:
            self.gate.open()
            self.gate.path.unlink(missing_ok=True)
        if self._filler is not None:
            self._filler.close()
        super().close()

    def begin_late(self, tokens: int = LATE_TOKENS) -> int:
        """A room that is begun and filled, and of which nothing has been published; it may have a sibling."""
        if self.shares and not self.sibling:
            self.sibling = self.admit_by_filler(SIBLING_TOKENS, self.next_prompt())
            self.cross_by_filler(self.sibling, SIBLING_TOKENS)
        room = self.pair(tokens)
        self.begin(room, tokens)
        self.sender.call("fill", room, tokens, 0, tokens)
        self.taken([room])
        return room

    def meet(self) -> None:
        """Have a room cross on each way, so that every connection is made that late writers and fillers will need."""
        self._fill_one()
        if not self.faulty:
            self.cross()
        self._empty()

    def fill_free_pages(self) -> int:
        """Give every free page of the decode daemon to rooms with bytes of their own; returns how many rooms there are."""
        while self._fill_one():
            pass
        return len(self.filled)

    def _fill_one(self) -> bool:
        """One more room, which shares nothing, committed and claimed; whether there was space."""
        room = self.admit_by_filler(FILL_TOKENS)
        if room:
            self.filled.append(room)
            self.cross_by_filler(room, FILL_TOKENS)
        return bool(room)

    def admit_by_filler(self, tokens: int, prompt: Prompt | None = None) -> int:
        """A room that the filling daemon is to write, begun there; 0 when decode has no space."""
        body = self.body(tokens, prompt)
        found = self.second.endpoint().control
        assert found is not None
        admitted = http("POST", self.second, "/v1/requests", json=body)
        assert admitted.status_code == 201, admitted.text
        room = self._named(int(admitted.json()["room"]), prompt)
        answer = http("POST", self.decode, "/v1/requests", json=body | {"room": room, "prefill": [found.model_dump()]})
        if answer.status_code == 503:
            self.cancel(self.second, room)
            return 0
        assert answer.status_code == 201, answer.text
        self.filler.call("begin", room, tokens, prompt)
        return room

    def cross_by_filler(self, room: int, tokens: int, start: int = 0) -> int:
        """Have such a room written to its end and claimed; returns how many tokens of it decode held before."""
        self.filler.call("write", room, tokens, start, tokens)
        self.filler.call("finish", room)
        return self.claim(room, tokens)

    def check_filled(self) -> None:
        """Every byte of every room that was given pages is its own, and the sibling's are."""
        for room in self.filled:
            self.reader.call("check", room, FILL_TOKENS)
        if self.sibling:
            self.reader.call("check", self.sibling, SIBLING_TOKENS)

    def _empty(self) -> None:
        for room in self.filled:
            self.reader.call("release", room)
        self.filled.clear()

    def next_turn(self) -> None:
        """What siblings share is where it was: the next one gets it, finds each byte right, and all let go of it."""
        after = self.admit_by_filler(SIBLING_TOKENS, self.next_prompt())
        assert self.cross_by_filler(after, SIBLING_TOKENS) == self.shared_tokens
        for room in (after, self.sibling):
            self.reader.call("release", room)
        self.sibling = 0
        self.nobody_reads(self.decode)

    def everything_given_back(self) -> None:
        """The filling rooms end, and every page of everybody is free, or kept and read by nobody."""
        self._empty()
        if self.sibling:
            self.next_turn()
        for daemon in (self.prefill, self.decode, self.second):
            all_free(daemon)
        assert not status(self.decode)["quarantine"]

    def needles(self, room: int, layer: int = -1) -> list[bytes]:
        """A piece of some rows of a late room's own, from its beginning to its end, in a layer (by its position)."""
        component = preset(MODEL).components[0]
        prompt = self.prompts.get(room)
        keys = prompt.keys(MODEL, LATE_TOKENS) if prompt is not None else NO_KEYS
        return [
            expected_rows(
                component,
                room=int.from_bytes(keys[row // 256][:8], "little") if keys else room,
                layer=component.layers[layer],
                lanes=(0, 1),
                start_row=row,
                stop_row=row + 1,
            ).tobytes()[:NEEDLE_BYTES]
            for row in range(self.shared_tokens if keys else 0, LATE_TOKENS, LATE_TOKENS // ROWS_LOOKED_FOR)
        ]

    def rows_landed(self, room: int) -> int:
        """How many of some rows of a late room's own are anywhere in the decode daemon's memory."""
        if self.gpus is not None:
            return int(self.reader.call("holds", self.needles(room, 0)))  # that layer goes first
        needles = self.needles(room)
        prefix = file_prefix(str(self.decode.config["instance"]), "decode-node-0")
        found = 0
        for path in Path("/dev/shm").iterdir():
            if path.name.startswith(prefix):
                with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
                    found += sum(memory.find(needle) >= 0 for needle in needles)
        return found

    def unread_bytes(self, pid: int) -> int:
        """Bytes that lie in the TCP sockets of a process, come and not yet read."""
        inodes = {str(entry.readlink())[8:-1] for entry in Path(f"/proc/{pid}/fd").iterdir() if _is_socket(entry)}
        rows = [line.split() for name in ("tcp", "tcp6") for line in _lines(Path(f"/proc/{pid}/net/{name}"))]
        return sum(int(row[4].partition(":")[2], 16) for row in rows if row[9] in inodes)

    def freeze(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        eventually("frozen", lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def resume(self, pid: int) -> None:
        os.kill(pid, signal.SIGCONT)


def _lines(table: Path) -> list[str]:
    return table.read_text().splitlines()


def _is_socket(entry: Path) -> bool:
    try:
        return str(entry.readlink()).startswith("socket:[")
    except FileNotFoundError:
        return False


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
    spec = ClusterSpec(
        model=model,
        transport=transport,
        ends_with_us=True,
        prefill=NodeSpec(
            instance=f"late-{folder.name}",
            pools=pools,
            more={
                "transports": section,
                "timeouts": waits["timeouts"] | (EXPIRING if expiring else {}),
                **tier,
                **Gpus.section(gpus, Role.PREFILL),
            },
        ),
        decode=NodeSpec(
            instance=f"decode-{folder.name}",
            pools=pools | {"host": {"components": []}},
            more={**both, **waits, **Gpus.section(gpus, Role.DECODE)},
        ),
    )
    cluster = plan_cluster(folder, spec)
    gate = Gate(Path("/dev/shm") / f"{folder.name}-gate", create=True) if gpus is not None else None
    changed = (faulty_worker(faults) if faults else "") + (gated_worker(gate.path) if gate else "")
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
    stage = LateWriterCluster(
        cluster,
        second=second,
        faulty=bool(faults),
        shares=shares,
        shared_tokens=SHARED_BY_LATE_TOKENS,
        model=MODEL,
        gpus=gpus,
        gate=gate,
    )
    try:
        cluster.start()
        stage.wait_ready()
        assert stage.ports
        stage.meet()
        yield stage
    finally:
        stage.close()
        shutil.rmtree(folder, ignore_errors=True)
