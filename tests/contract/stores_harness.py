"""Stores for the contract suite: each asked directly and through a store process, in the same words. Every wait has a limit."""

import asyncio
import ctypes
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvbridge.config.tier import FileStoreSettings, MooncakeStoreSettings, StoreLimits, StoreSettings
from kvbridge.tier.keys import NO_KEYS, Keys
from kvbridge.tier.stores.client import Operation, StoreClient
from kvbridge.tier.stores.objects import NO_PAGES, Answer, Verb
from kvbridge.tier.stores.process import ObjectStore, PageStore
from tests.helpers.local_servers import MooncakeServers
from tests.helpers.stored_pages import StoredPages, ids, stored_object

KINDS = ("files", "mooncake")
WAYS = ("direct", "process")
TIMEOUT_S = 20.0
"""For an order that is to succeed, however busy the machine is."""
READY_S = 90.0
LIMITS = StoreLimits(start_s=READY_S, settle_s=1.0, remember_s=0.0)


@contextmanager
def settings_of(kind: str, folder: Path) -> Iterator[tuple[StoreSettings, MooncakeServers | None]]:
    if kind == "files":
        yield FileStoreSettings(directory=folder / "store", max_bytes=64 << 20), None
        return
    servers = MooncakeServers(folder)
    try:
        servers.start()
        yield MooncakeStoreSettings(master=servers.address), servers
    finally:
        servers.stop()


class Looped:
    """Something that needs a loop, for tests without one: the loop runs while they wait."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def run(self, work: Awaitable[Any], limit_s: float = READY_S) -> Any:
        async def wait() -> Any:
            return await asyncio.wait_for(work, limit_s)

        return self.loop.run_until_complete(wait())

    def until(self, what: str, look: Callable[[], object]) -> None:
        async def wait() -> None:
            ends_s = time.monotonic() + READY_S
            while not look():
                assert time.monotonic() < ends_s, f"{what}: not within {READY_S:g} s"
                await asyncio.sleep(0.005)

        self.run(wait(), READY_S + 5)

    def close_loop(self) -> None:
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


class Client(Looped):
    def __init__(self, settings: StoreSettings, pages: StoredPages, limits: StoreLimits = LIMITS) -> None:
        super().__init__()
        self.client = StoreClient(settings, pages.shared, limits, log_level="warning")
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self.client.start()

    def close(self, timeout_s: float = 6.0) -> None:
        self.run(self.client.close(timeout_s))
        self.close_loop()

    def begin(
        self, verb: str, keys: Keys, pages: np.ndarray = NO_PAGES, timeout_s: float = TIMEOUT_S, form: int = 0
    ) -> Operation:
        async def call() -> Operation:
            return self.client.begin(Verb(verb), form, keys, pages, timeout_s=timeout_s)

        return self.loop.run_until_complete(call())

    def answer(self, operation: Operation) -> Answer:
        return self.run(asyncio.shield(operation.answer))

    def settled(self, operation: Operation) -> None:
        self.run(asyncio.shield(operation.settled))

    def rest(self, seconds: float) -> None:
        """Between two looks at what cannot be waited for otherwise."""
        self.run(asyncio.sleep(seconds))

    def until_ready(self) -> None:
        self.until("the store process is ready", lambda: not self.client.why_not)


@dataclass
class Asked:
    """A store, asked in one of the ways."""

    kind: str
    way: str
    raw: ObjectStore
    """The same store without anything above it: to put lies into it."""
    pages: StoredPages
    direct: PageStore | None = None
    process: Client | None = None
    planted: list[object] = field(default_factory=list)

    def __call__(self, verb: str, keys: Keys, *pages: int, form: int = 0, timeout_s: float = TIMEOUT_S) -> list[str]:
        found = self.ask(
            verb, keys, ids(*pages) if verb in {"put", "get"} else NO_PAGES, form=form, timeout_s=timeout_s
        )
        assert found.settled, found
        return [outcome.value for outcome in found.outcomes]

    def clear(self, form: int = 0) -> Answer:
        return self.ask("clear", NO_KEYS, form=form)

    def ask(
        self, verb: str, keys: Keys, pages: np.ndarray = NO_PAGES, *, form: int = 0, timeout_s: float = TIMEOUT_S
    ) -> Answer:
        if self.process is not None:
            return self.process.answer(self.process.begin(verb, keys, pages, timeout_s, form))
        assert self.direct is not None
        return self.direct.ask(Verb(verb), form, keys, pages, until_s=time.monotonic() + timeout_s)

    def plant(self, name: str, data: bytes) -> None:
        """Put any bytes under a name."""
        held = ctypes.create_string_buffer(data, len(data))
        self.planted.append(held)  # the library may look at it as long as it likes
        until_s = time.monotonic() + TIMEOUT_S
        self.raw.remove([name], until_s)
        answer = self.raw.write([stored_object(name, held)], until_s)
        assert answer.outcomes[0] == "stored", answer

    def taken(self, name: str, length: int) -> bytes:
        held = ctypes.create_string_buffer(length)
        answer = self.raw.read([stored_object(name, held)], time.monotonic() + TIMEOUT_S)
        assert answer.outcomes[0] == "hit", answer
        return held.raw


@contextmanager
def asked_of(kind: str, way: str, raw: ObjectStore, settings: StoreSettings, pages: StoredPages) -> Iterator[Asked]:
    """A store that answers, asked in one way."""
    if way == "direct":
        direct = PageStore(raw, pages.forms)
        yield Asked(kind, way, raw, pages, direct=direct)
        direct.close()
        return
    client = Client(settings, pages)
    try:
        client.until_ready()
        yield Asked(kind, way, raw, pages, process=client)
    finally:
        client.close()
