"""A decode daemon whose pages run short, a prefill daemon that will write late, and another that fills what becomes free."""

from __future__ import annotations

import mmap
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

from kvbridge.cli.local_cluster import (
    DaemonProcess,
)
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import Role
from kvbridge.daemon.memory import file_prefix
from kvbridge.tier.keys import NO_KEYS
from tests.faults.fault_cluster import FaultCluster
from tests.helpers.cluster import eventually
from tests.helpers.gated_copies import Gate
from tests.helpers.live_rooms import all_free, http, status
from tests.helpers.obedient_engines import ObedientEngine
from tests.helpers.prompts import Prompt
from tests.helpers.synthetic import expected_rows

MODEL = "tiny-gqa"
PAGES = 192
"""Of every pool: 36 MiB."""
LATE_TOKENS = 128 * 256
"""Of the late room: 24 MiB, which is more than sockets hold."""
FILL_TOKENS = 64 * 256
NEEDLE_BYTES = 32
"""A piece of a row that no other row of any room has."""
ROWS_LOOKED_FOR = 64
SHARED_BY_LATE_TOKENS = 16 * 256
"""With which late rooms begin, where rooms share."""
SIBLING_TOKENS = SHARED_BY_LATE_TOKENS
"""All of the sibling: beside a late room's pages and its own there is space for one that fills."""


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
