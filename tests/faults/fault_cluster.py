"""The stage of the fault suite: three daemons, an engine on each side, rooms in every state, and the look afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kvbridge.cli.local_cluster import Cluster, DaemonProcess
from kvbridge.core.ids import Role
from kvbridge.daemon.memory import file_prefix
from tests.faults.cells import ENDS, LOST, State
from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import all_free, busy_pages, control_of, http, reserve, status
from tests.helpers.obedient_engines import ObedientEngine
from tests.helpers.prompts import Prompt

TOKENS = 768
"""Tokens of every room: three whole pages, so that each row of a growing component is live."""
HALF = 400
SHARED_TOKENS = 256
"""Every prompt begins alike so far, where rooms share prefixes: one page, whose end is known for a checkpoint."""
DEVICE_PAGES = {"full": 96, "swa": 96, "request": 24}
HOST_PAGES = 96
FDS_MORE = 12
"""A survivor may hold so many more descriptors than before: connections that are about to be closed."""

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Gpus:
    prefill: int = 0
    decode: int = 0
    prepare_engine: Callable[[], object] | None = None

    @staticmethod
    def section(gpus: Gpus | None, role: Role) -> Settings:
        if gpus is None:
            return {}
        gpu = gpus.prefill if role is Role.PREFILL else gpus.decode
        return {"parallelism": {"ranks": [{"pp": 0, "tp": 0, "device": f"cuda:{gpu}"}]}}


@dataclass
class Facts:
    pid: int
    incarnation: str
    worker_pid: int
    descriptors: int


@dataclass
class FaultCluster:
    cluster: Cluster
    engines: dict[Role, ObedientEngine] = field(default_factory=dict)
    shares: bool = False
    """Prompts begin alike, and their pages stay on both nodes."""
    prompts: dict[int, Prompt] = field(default_factory=dict)
    shared_tokens: int = SHARED_TOKENS
    model: str = "tiny-v4"
    gpus: Gpus | None = None
    _last_prompt: int = 0
    _ports: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prefill, self.decode, self.bootstrap = self.cluster.prefill, self.cluster.decode, self.cluster.bootstrap
        self.nodes = self.prefill, self.decode

    @property
    def sender(self) -> ObedientEngine:
        return self._engine(Role.PREFILL)

    @property
    def reader(self) -> ObedientEngine:
        return self._engine(Role.DECODE)

    def _engine(self, role: Role) -> ObedientEngine:
        if role not in self.engines:
            daemon = self.prefill if role is Role.PREFILL else self.decode
            self.engines[role] = self.attach(role, daemon)
        return self.engines[role]

    def attach(self, role: Role, daemon: DaemonProcess) -> ObedientEngine:
        return ObedientEngine(role, daemon.runtime_dir, prepare=self.gpus.prepare_engine if self.gpus else None)

    def detach(self, *roles: Role) -> None:
        """End engines (all, unless named); they attach anew when they are asked for."""
        for role in roles or tuple(self.engines):
            engine = self.engines.pop(role, None)
            if engine is not None:
                engine.close()

    def close(self) -> None:
        self.detach()
        self.cluster.stop(timeout_s=8, force_after_s=0.2)
        shutil.rmtree(self.cluster.folder, ignore_errors=True)

    def pid(self, daemon: DaemonProcess) -> int:
        assert daemon.process is not None
        return daemon.process.pid

    def worker_pid(self, daemon: DaemonProcess) -> int:
        return int(status(daemon)["ranks"][0]["pid"])

    def facts(self, daemon: DaemonProcess) -> Facts:
        shown, pid = status(daemon), self.pid(daemon)
        return Facts(pid, shown["incarnation"], shown["ranks"][0]["pid"], psutil.Process(pid).num_fds())

    def restart(self, daemon: DaemonProcess, *, other_port: bool = False) -> None:
        """Start a killed daemon again, with the same configuration and, unless told otherwise, at the same addresses."""
        if daemon is self.bootstrap:
            daemon.config = daemon.config | {"http": {"port": int(self.ports[daemon.name].rpartition(":")[2])}}
        elif daemon is self.prefill:
            daemon.config = daemon.config | {
                "control": {"bind": "tcp://127.0.0.1:0" if other_port else self.ports[daemon.name]}
            }
        daemon.start()
        self.cluster.wait_ready()

    @property
    def ports(self) -> dict[str, str]:
        """Where bootstrap and the prefill daemon have been since this was first asked."""
        if not self._ports:
            self._ports = {self.bootstrap.name: self.bootstrap.url, self.prefill.name: self.address["endpoint"]}
        return self._ports

    @property
    def address(self) -> dict[str, str]:
        return control_of(self.prefill)

    def next_prompt(self) -> Prompt | None:
        """A prompt that begins like all others and goes on like none, where rooms share; else none."""
        if not self.shares:
            return None
        self._last_prompt += 1
        return Prompt(begin=0, own=self._last_prompt, shared_tokens=self.shared_tokens)

    def body(self, tokens: int, prompt: Prompt | None) -> dict[str, Any]:
        return {"prompt_tokens": tokens} | (prompt.asked(self.model, tokens) if prompt is not None else {})

    def admit_on_prefill(
        self, tokens: int = TOKENS, prompt: Prompt | None = None, daemon: DaemonProcess | None = None
    ) -> int:
        prompt = prompt or self.next_prompt()
        return self._named(reserve(daemon or self.prefill, self.body(tokens, prompt)), prompt)

    def _named(self, room: int, prompt: Prompt | None) -> int:
        if prompt is not None:
            self.prompts[room] = prompt
        return room

    def admit_on_decode(self, room: int, tokens: int = TOKENS, **more: Any) -> int:
        body = self.body(tokens, self.prompts.get(room)) | {"room": room, "prefill": [self.address]} | more
        return reserve(self.decode, body)

    def pair(self, tokens: int = TOKENS, prompt: Prompt | None = None, **more: Any) -> int:
        return self.admit_on_decode(self.admit_on_prefill(tokens, prompt), tokens, **more)

    def ticket(self) -> int:
        """Ask bootstrap for a pair, again while its knowledge of the daemons is behind; returns the room."""
        prompt = self.next_prompt()

        def look() -> int:
            answer = http("POST", self.bootstrap, "/v1/requests", json=self.body(TOKENS, prompt))
            assert answer.status_code in {201, 503}, answer.text
            return int(answer.json()["room"]) if answer.is_success else 0

        return self._named(int(eventually("a ticket", look)), prompt)

    def begin(self, room: int, tokens: int = TOKENS) -> int:
        return int(self.sender.call("begin", room, tokens, self.prompts.get(room)))

    def claim(self, room: int, tokens: int = TOKENS) -> int:
        return int(self.reader.call("claim", room, tokens, self.prompts.get(room)))

    def state(self, daemon: DaemonProcess, room: int) -> str:
        answer = http("GET", daemon, f"/v1/requests/{room}")
        return "" if answer.status_code == 404 else str(answer.json()["state"])

    def end(self, daemon: DaemonProcess, room: int, wait_s: float = 15.0) -> tuple[str, str, str]:
        """State, code and reason of a room once it is over; three empty texts when it is not known."""
        answer = http("GET", daemon, f"/v1/requests/{room}?wait={wait_s}")
        if answer.status_code == 404:
            return "", "", ""
        found = answer.json()
        return found["state"], found["reason_code"], found["reason"]

    def letter(self, daemon: DaemonProcess, room: int, allowed: str, wait_s: float = 15.0) -> str:
        """How a room ended, as `cells` writes it. Fails unless it is one of `allowed`."""
        found = self.end(daemon, room, wait_s)
        letters = [letter for letter, end in ENDS.items() if end == found[:2]]
        assert letters, f"{daemon.name}: an end that no cell knows: {found}"
        assert letters[0] in allowed, f"{daemon.name}: {found}, expected one of '{allowed}'"
        return letters[0]

    def cancel(self, daemon: DaemonProcess, room: int) -> None:
        answer = http("DELETE", daemon, f"/v1/requests/{room}?reason=told+so")
        assert answer.is_success, answer.text

    def taken(self, rooms: Iterable[int]) -> None:
        for room in rooms:
            eventually("the offer", lambda room=room: self.state(self.prefill, room) in {"offered", "transferring"})

    def cross(self, room: int = 0) -> int:
        room = room or self.pair()
        self.turn(room)
        return room

    def turn(self, room: int, tokens: int = TOKENS) -> tuple[int, int]:
        """The same; returns how many tokens were computed before, and how many decode held."""
        assert self.reader  # attached before the commit is told
        computed = self.begin(room, tokens)
        self.sender.call("write", room, tokens, 0, tokens)
        self.sender.call("finish", room)
        held = self.claim(room, tokens)
        self.reader.call("release", room)
        return computed, held

    def nobody_reads(self, daemon: DaemonProcess) -> None:
        eventually("no page read", lambda: not (shown := status(daemon)["prefixes"])["readers"] + shown["read_pages"])

    def bring(self, states: Iterable[State], *, paired: bool = False) -> dict[State, int]:
        """Bring a room into each of these states, all at once; `paired`: by bootstrap."""
        sender, reader, order = self.sender, self.reader, list(State)
        rooms = {state: self.ticket() if paired else self.admit_on_prefill() for state in states}

        def beyond(state: State) -> list[int]:
            return [room for reached, room in rooms.items() if order.index(reached) >= order.index(state)]

        for room in () if paired else beyond(State.OFFERED):
            self.admit_on_decode(room)
        self.taken(beyond(State.OFFERED))
        for room in beyond(State.BEGUN):
            self.begin(room)
        if State.PARTIAL in rooms:
            sender.call("write", rooms[State.PARTIAL], TOKENS, 0, HALF)
        for room in beyond(State.COMMITTED):
            sender.call("write", room, TOKENS, 0, TOKENS)
            sender.call("finish", room)
        for room in beyond(State.CLAIMED):
            self.claim(room)
        if State.COMPLETED in rooms:
            reader.call("release", rooms[State.COMPLETED])
        if State.CANCELLED in rooms:
            self.cancel(self.decode, rooms[State.CANCELLED])
        if State.COMMITTED in rooms:
            eventually("committed", lambda: self.state(self.decode, rooms[State.COMMITTED]) == "committed")
        return rooms

    def furnish(self) -> dict[State, int]:
        """Bring a room into every state, freeze the prefill rank worker and, on GPUs, have kernels write pages."""
        rooms = self.bring(State)
        if self.gpus is not None:
            self.sender.call("compute", rooms[State.BEGUN])
            self.reader.call("compute", rooms[State.CLAIMED])
        os.kill(self.worker_pid(self.prefill), signal.SIGSTOP)
        self.sender.call("write", rooms[State.MOVING], TOKENS, 0, HALF)
        self.cancel(self.decode, rooms[State.DRAINING])
        eventually("aborting", lambda: self.state(self.prefill, rooms[State.DRAINING]) == "aborting")
        return rooms

    def conclude(self, state: State, room: int, outcome: str, *, begun_by: int) -> None:
        """Bring a room of `furnish` to the end that it still can have; `begun_by` is the prefill engine that began it."""
        sender, reader = self.sender, self.reader
        prefill_end, _, decode_end = outcome.partition("/")
        unfinished = list(State).index(state) < list(State).index(State.DRAINING)
        if unfinished and prefill_end == "C":
            if state is State.ADMITTED:
                self.admit_on_decode(room)
            if state in {State.ADMITTED, State.OFFERED}:
                self.begin(room)
            start = HALF if state in {State.PARTIAL, State.MOVING} else 0
            sender.call("write", room, TOKENS, start, TOKENS)
            sender.call("finish", room)
        elif set(prefill_end) & (LOST | {"A"}) and begun_by == sender.pid:
            sender.call("abort", room)
        if decode_end == "C" and state is State.CLAIMED:
            reader.call("check", room, TOKENS)
        elif decode_end == "C" and state is not State.COMPLETED:
            self.claim(room)
        if (decode_end == "C" and state is not State.COMPLETED) or (
            state is State.CANCELLED and self.state(self.decode, room) == "aborting"
        ):
            reader.call("release", room)

    def recovered(self, before: Mapping[str, Facts], *, struck: DaemonProcess | None, worker_struck: bool) -> None:
        """Survivors are who they were, everybody is ready, all pages are free, a new room crosses, nothing is left over."""
        self.cluster.wait_ready()
        for daemon in self.nodes:
            assert not http("GET", daemon, "/ready").json()["reasons"]
            all_free(daemon)
            shown = status(daemon)
            assert not shown["quarantine"], shown["quarantine"]
            if self.shares:
                self.nobody_reads(daemon)
        self.cross(self.ticket())
        for daemon in self.nodes:
            all_free(daemon)
            self._same(daemon, before[daemon.name], struck=struck, worker_struck=worker_struck)
            self.check_files(daemon)
            assert "Traceback" not in daemon.log_path.read_text(), daemon.log()
        for role, daemon in zip((Role.PREFILL, Role.DECODE), self.nodes, strict=True):
            shown = status(daemon)
            assert [engine["pid"] for engine in shown["engines"]] == [self.engines[role].pid]
            assert len(shown["peers"]) == 1, shown["peers"]

    def _same(self, daemon: DaemonProcess, was: Facts, *, struck: DaemonProcess | None, worker_struck: bool) -> None:
        found = self.facts(daemon)
        if daemon is not struck:
            assert (found.pid, found.incarnation, found.worker_pid) == (was.pid, was.incarnation, was.worker_pid)
            assert found.descriptors <= was.descriptors + FDS_MORE, (daemon.name, was.descriptors, found.descriptors)
        else:
            assert not psutil.pid_exists(was.worker_pid)
            assert found.worker_pid != was.worker_pid
            assert (found.pid == was.pid) == worker_struck
            assert (found.incarnation == was.incarnation) == worker_struck

    def check_files(self, daemon: DaemonProcess) -> None:
        prefix = file_prefix(str(daemon.config["instance"]), f"{daemon.role}-node-0")
        names = [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(prefix)]
        incarnation = status(daemon)["incarnation"]
        assert names or self.gpus
        assert all(incarnation in name for name in names), names

    def accounted(self, daemon: DaemonProcess) -> None:
        """Free, leased, held and quarantined pages are all pages; what is quarantined is explained."""
        shown = status(daemon)
        total = dict(DEVICE_PAGES) | ({"host": HOST_PAGES} if daemon is self.decode else {})
        assert {space: sum(states.values()) for space, states in shown["pools"].items()} == total
        quarantined = any(states.get("quarantined") for states in shown["pools"].values())
        assert quarantined == bool(shown["quarantine"]), shown["quarantine"]

    def describe(self) -> str:
        lines = []
        for daemon in self.nodes:
            try:
                lines.append(f"{daemon.name}: {busy_pages(daemon)} {status(daemon)['quarantine']}")
            except Exception as error:  # noqa: BLE001 - it may be the one that does not answer
                lines.append(f"{daemon.name}: {error!r}")
            lines.append(daemon.log(12))
        return "\n".join(lines)


def seconds_since(moment_s: float) -> float:
    return round(time.monotonic() - moment_s, 2)
