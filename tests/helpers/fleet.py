"""A real bootstrap daemon in a thread, and a fleet that only its heartbeats are of: instances that send as a model says."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvbridge.api.directory import Load, NodeHeartbeat, NodeRegistration
from kvbridge.config.schema import BootstrapConfig
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import Rank, Role
from kvbridge.daemon.bootstrap import BootstrapDaemon

BEAT_S = 0.5
PAGES = {"full": 4096, "swa": 512, "request": 256}
START_S = 60.0


@dataclass
class Fleet:
    """A number of instances of each role; number 7 of each role is not ready."""

    pairs: int
    url: str = ""
    beats: int = 0
    silent: set[str] = field(default_factory=set)
    """Instances that send no heartbeat any more."""
    _loop: asyncio.AbstractEventLoop | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    def load(self, role: Role, number: int) -> Load:
        free = {space: int(pages * (1 - (0.15 + 0.8 * ((number * 37) % 100) / 100))) for space, pages in PAGES.items()}
        sent = {}
        if role is Role.PREFILL:
            for step in range(5):
                to = (number * 3 + step * 7) % self.pairs
                sent[f"decode-{to}"] = self.beats * int(2e6 * (1 + (number * 13 + step * 29) % 40))
        return Load(rooms=3 + number % 9, available_pages=free, total_pages=PAGES, sent_bytes=sent)

    def registration(self, role: Role, number: int) -> NodeRegistration:
        geometry = preset("tiny-v4")
        return NodeRegistration(
            instance=f"{role}-{number}",
            node="node-0",
            role=role,
            incarnation=f"{role}-{number}-a",
            http_url=f"http://127.0.0.1:{9 if role is Role.PREFILL else 10}",
            control=PeerAddress(endpoint="tcp://127.0.0.1:9") if role is Role.PREFILL else None,
            pp_size=1,
            tp_size=1,
            ranks=(Rank(pp=0, tp=0),),
            fingerprint=fingerprint(geometry),
            geometry=geometry,
            load=self.load(role, number),
        )

    async def beat(self, daemon: BootstrapDaemon) -> None:
        self.beats += 1
        for role in Role:
            for number in range(self.pairs):
                if f"{role}-{number}" in self.silent:
                    continue
                ready = number != 7
                beat = NodeHeartbeat(
                    incarnation=f"{role}-{number}-a",
                    ready=ready,
                    reasons=() if ready else ("rank worker pp0.tp0 is starting again: killed by SIGKILL",),
                    load=self.load(role, number),
                )
                await daemon.directory.heartbeat(f"{role}-{number}", "node-0", beat)

    async def run(self, started: threading.Event, config: dict[str, Any]) -> None:
        daemon = BootstrapDaemon(BootstrapConfig.model_validate({"http": {"port": 0}, **config}))
        await daemon.start()
        try:
            for role in Role:
                for number in range(self.pairs):
                    await daemon.directory.register(self.registration(role, number))
            await self.beat(daemon)
            self.url, self._loop = daemon.url, asyncio.get_running_loop()
            started.set()
            while not self._ended.is_set():
                try:
                    await asyncio.wait_for(self._ended.wait(), BEAT_S)
                except TimeoutError:
                    await self.beat(daemon)
        finally:
            await daemon.close()

    def end(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._ended.set)


@contextmanager
def fleet(pairs: int, **config: Any) -> Iterator[Fleet]:
    made, started = Fleet(pairs), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(made.run(started, config)), name="fleet")
    thread.start()
    try:
        assert started.wait(START_S), "bootstrap has not started"
        yield made
    finally:
        made.end()
        thread.join(START_S)
