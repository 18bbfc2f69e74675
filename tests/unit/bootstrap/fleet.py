"""Nodes and daemons to pair, without sockets."""

from __future__ import annotations

import asyncio

from kvbridge.core.clock import ManualClock
from kvbridge.core.errors import BridgeError, StaleError, UnknownRoomError
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import Rank, Role
from kvbridge.service.directory import Directory, MemoryStore
from kvbridge.service.pairing import PairingLimits
from kvbridge.service.ports import AdmissionRequest, Load, NodeRegistration, PeerAddress, RoomReport, RoomState

EXPIRE_AFTER_S = 8.0
LIMITS = PairingLimits(
    reserve_s=5.0, cancel_s=5.0, report_s=5.0, pair_s=20.0, ticket_s=60.0, room_keep_s=600.0, retry_after_s=2.0
)


def node(name: str, role: Role, *, model: str = "tiny-v4", free: int = 100, **changes) -> NodeRegistration:
    """One node that is a whole instance called `name`, with pools of 100 pages."""
    geometry = preset(model)
    spaces = ("full", "swa", "request") if role is Role.PREFILL else ("full", "swa", "request", "host")
    values = {
        "instance": name,
        "node": "node-0",
        "role": role,
        "incarnation": f"{name}-life-1",
        "http_url": f"http://{name}",
        "control": PeerAddress(endpoint=f"tcp://{name}:1"),
        "pp_size": 1,
        "tp_size": 1,
        "ranks": (Rank(pp=0, tp=0),),
        "fingerprint": fingerprint(geometry),
        "geometry": geometry,
        "load": Load(free_pages=dict.fromkeys(spaces, free), total_pages=dict.fromkeys(spaces, 100)),
    }
    return NodeRegistration(**{**values, **changes})


def half(name: str, role: Role, number: int, **changes) -> NodeRegistration:
    """One node of a two-node instance, tensor-parallel rank `number`."""
    own = {
        "node": f"node-{number}",
        "tp_size": 2,
        "ranks": (Rank(pp=0, tp=number),),
        "incarnation": f"{name}-{number}-life-1",
        "http_url": f"http://{name}-{number}",
        "control": PeerAddress(endpoint=f"tcp://{name}-{number}:1"),
    }
    return node(name, role, **{**own, **changes})


def directory_of(*registrations: NodeRegistration, clock: ManualClock | None = None) -> Directory:
    directory = Directory(MemoryStore(), expire_after_s=EXPIRE_AFTER_S, clock=clock or ManualClock())
    for registration in registrations:
        directory.register(registration)
    return directory


class FakeDaemons:
    """All daemons at once: admits what it is not told to refuse, and keeps a log of calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []
        self.admitted: dict[str, dict[int, AdmissionRequest]] = {}
        self.refuse: dict[str, BridgeError] = {}
        self.hang: set[str] = set()
        self.late: set[str] = set()
        """Daemons that admit but whose answer is lost."""
        self.cancel_gate: asyncio.Event | None = None
        """Cancels wait for it."""
        self.cancel_errors: dict[str, BridgeError] = {}
        self.stuck = asyncio.Event()
        """Set once a call hangs."""

    async def admit(self, url: str, request: AdmissionRequest) -> RoomReport:
        self.calls.append(("admit", url, request.generation))
        if url in self.refuse:
            raise self.refuse[url]
        if url not in self.hang:
            self.admitted.setdefault(url, {})[request.room] = request
        if url in self.hang or url in self.late:
            self.stuck.set()
            await asyncio.Event().wait()
        return self._report(url, request.room)

    async def report(self, url: str, room: int) -> RoomReport:
        return self._report(url, room)

    async def cancel(self, url: str, room: int, reason: str, *, generation: int) -> RoomReport:
        self.calls.append(("cancel", url, generation))
        if self.cancel_gate is not None:
            self.stuck.set()
            await self.cancel_gate.wait()
        if url in self.cancel_errors:
            raise self.cancel_errors[url]
        report = self._report(url, room)
        if report.generation != generation:
            raise StaleError("another generation")
        del self.admitted[url][room]
        return report.model_copy(update={"state": RoomState.ABORTED, "reason": reason})

    def rooms(self) -> dict[str, list[int]]:
        """What is reserved, by daemon."""
        return {url: list(rooms) for url, rooms in self.admitted.items() if rooms}

    def _report(self, url: str, room: int) -> RoomReport:
        request = self.admitted.get(url, {}).get(room)
        if request is None:
            raise UnknownRoomError(f"no room {room} at {url}")
        role = Role.DECODE if request.prefill else Role.PREFILL
        return RoomReport(
            room=room,
            generation=request.generation,
            role=role,
            state=RoomState.ADMITTED,
            prompt_tokens=request.prompt_tokens,
        )
