"""A decode daemon whose pages run short, a prefill daemon that will write late, and another that fills what becomes free."""

import mmap
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvbridge.cli.local_cluster import DaemonProcess
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import Role
from kvbridge.daemon.memory import file_prefix
from kvbridge.tier.keys import NO_KEYS
from tests.faults.fault_cluster import FaultCluster
from tests.helpers.cluster import eventually
from tests.helpers.gated_copies import Gate
from tests.helpers.live_rooms import all_free, control_of, http, reserve, status
from tests.helpers.obedient_engines import ObedientEngine
from tests.helpers.prompts import Prompt
from tests.helpers.synthetic import expected_rows

MODEL = "tiny-gqa"
PAGES = 192
"""Pages of every pool: 36 MiB."""
LATE_TOKENS = 128 * 256
"""Tokens of the late room: 24 MiB, more than sockets hold."""
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
        room = self._named(reserve(self.second, body), prompt)
        named = {"room": room, "prefill": [control_of(self.second)]}
        answer = http("POST", self.decode, "/v1/requests", json=body | named)
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
        for room in self.filled:
            self.reader.call("check", room, FILL_TOKENS)
        if self.sibling:
            self.reader.call("check", self.sibling, SIBLING_TOKENS)

    def _empty(self) -> None:
        for room in self.filled:
            self.reader.call("release", room)
        self.filled.clear()

    def next_turn(self) -> None:
        """The next sibling finds the shared pages where they were, each byte right, and all let go of them."""
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


SLICES_BEFORE = 2
"""The gate closes after so many slices, of the 24 of a late room."""
AWAKE_S = 0.6
"""A late writer has so long to do its worst; it writes 24 MiB in a tenth of that."""


def over(stage: LateWriterCluster, room: int) -> None:
    for daemon in stage.nodes:
        eventually("over", lambda daemon=daemon: stage.state(daemon, room) in {"aborting", "aborted", "failed"})


def freed(stage: LateWriterCluster) -> None:
    eventually("freed", lambda: status(stage.decode)["available_pages"]["full"] >= LATE_TOKENS // 256)


def frozen_node(stage: LateWriterCluster, *, fenced: bool) -> int:
    """Freeze a prefill node and its busy worker until decode gives both up, wake the worker; returns how many late rows came."""
    room = stage.begin_late()
    worker, node = stage.worker_pid(stage.prefill), stage.pid(stage.prefill)
    stage.freeze(worker)
    stage.sender.call("publish", room, LATE_TOKENS)
    stage.freeze(node)
    stage.letter(stage.decode, room, "L")
    if fenced:
        freed(stage)
    assert stage.fill_free_pages()
    stage.resume(worker)
    if not fenced:
        eventually("the late writer writes", lambda: stage.rows_landed(room))
    time.sleep(AWAKE_S)
    landed = stage.rows_landed(room)
    stage.check_filled()
    stage.resume(node)
    stage.letter(stage.prefill, room, "L")
    stage.sender.call("abort", room)
    stage.check_filled()
    return landed


def copying(stage: LateWriterCluster) -> int:
    """A late room of which a part has come, and of which the rest is with the late worker and its GPU, at a gate."""
    room = stage.begin_late()
    assert stage.gate is not None
    held = stage.gate.close_behind(SLICES_BEFORE)
    stage.sender.call("publish", room, LATE_TOKENS)
    eventually("copies at the gate", lambda gate=stage.gate: gate.come >= held)
    return room


def killed_while_copying(stage: LateWriterCluster) -> None:
    """The late worker is killed: what its GPU had been given may still come, until its process has ended."""
    room = copying(stage)
    os.kill(stage.worker_pid(stage.prefill), signal.SIGKILL)
    stage.gate.open()
    stage.sender.call("let_go")
    stage.detach(stage.sender.role)
    for daemon in stage.nodes:
        stage.letter(daemon, room, "W")
    freed(stage)
    assert stage.fill_free_pages(), "no page became free: this test has looked at nothing"
    time.sleep(AWAKE_S)
    stage.check_filled()
    stage.cluster.wait_ready()


def frozen_while_copying(stage: LateWriterCluster) -> None:
    """The late worker is frozen and decode gives the room up: its GPU goes on, into pages that nobody else may have."""
    room, worker = copying(stage), stage.worker_pid(stage.prefill)
    stage.freeze(worker)
    stage.cancel(stage.decode, room)
    over(stage, room)
    stage.fill_free_pages()
    before = stage.rows_landed(room)
    stage.gate.open()
    time.sleep(AWAKE_S)
    print(f"{before} rows had come when the worker was frozen, {stage.rows_landed(room)} while it is")
    stage.check_filled()
    free = status(stage.decode)["available_pages"]["full"]
    assert free < FILL_TOKENS // 256, f"{free} pages are free while a writer that was given them lives"
    stage.resume(worker)
    eventually("quiet", lambda: stage.state(stage.prefill, room) == "aborted")
    stage.sender.call("abort", room)
    freed(stage)
    assert stage.fill_free_pages()
    stage.check_filled()


def exporter_killed_while_copying(stage: LateWriterCluster) -> None:
    """The decode worker, whose memory is being written, is killed: the writer lives, and reaches the next one's memory."""
    writer, room = stage.worker_pid(stage.prefill), copying(stage)
    os.kill(stage.worker_pid(stage.decode), signal.SIGKILL)
    stage.reader.call("let_go")
    stage.detach(stage.reader.role)
    stage.gate.open()
    stage.letter(stage.decode, room, "W")
    stage.letter(stage.prefill, room, "w")
    stage.sender.call("abort", room)
    stage.cluster.wait_ready()
    assert stage.worker_pid(stage.prefill) == writer


def exporter_frozen_while_copying(stage: LateWriterCluster) -> None:
    """The decode worker is frozen for a while: nobody needs it to write its memory, and the room ends well."""
    room, exporter = copying(stage), stage.worker_pid(stage.decode)
    stage.freeze(exporter)
    stage.gate.open()
    stage.sender.call("finish", room)
    stage.letter(stage.prefill, room, "C")
    stage.resume(exporter)
    stage.claim(room, LATE_TOKENS)
    stage.reader.call("release", room)


WHILE_COPYING = (
    killed_while_copying,
    frozen_while_copying,
    exporter_killed_while_copying,
    exporter_frozen_while_copying,
)


FREE_BY_TIMER = """
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.book import PageState

def quarantine(book, owner, reason):
    if book.state(owner) is PageState.LEASED:
        book.move(owner, PageState.LEASED, PageState.HELD)
    if book.state(owner) is PageState.HELD:
        book.free(owner)

PageBook.quarantine = quarantine
"""
"""Pages that nobody has proved to be quiet are given to the next room instead of being quarantined."""

BELIEVE_QUIET = """
from kvbridge.transport.base import TransferState
from tests.helpers import faulty_transport

class Believer:
    FAILED_NOT_QUIET = TransferState.FAILED_QUIET

    def __getattr__(self, name):
        return getattr(TransferState, name)

faulty_transport.TransferState = Believer()
"""
"""A transport that may still write is taken for one that does not (in the rank workers)."""
