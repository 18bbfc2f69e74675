"""What a store process does from its start to its exit code. Loaded by `process`, once that is safe from signals.

Owns: the store, the mapped pools, the threads that wait for the store. Must not know: why pages are put or wanted.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from itertools import accumulate, pairwise

import numpy as np
import structlog
from pydantic import TypeAdapter

from kvbridge.config.stores import FileStoreSettings, StoreSettings
from kvbridge.core.errors import BridgeError
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.pool.memory.sharing import MappedRegions
from kvbridge.telemetry.logs import configure_logs
from kvbridge.tier.keys import Keys
from kvbridge.tier.stores.base import Answer, ObjectStore, Verb
from kvbridge.tier.stores.messages import (
    LENGTH,
    NODE_TO_STORE,
    STORE_TO_NODE,
    StoreFailed,
    StoreOrder,
    StoreReady,
    StoreReport,
    StoreSetup,
    framed,
    length_of,
)
from kvbridge.tier.stores.pages import PageStore

EXIT_FAILED = 3
"""It could not serve; the reason was told to the node, or is in the log."""

log = structlog.get_logger(__name__)


def open_store(settings: StoreSettings) -> ObjectStore:
    """Open the store of a configuration section. Raises BridgeError, with cause and cure."""
    if isinstance(settings, FileStoreSettings):
        from kvbridge.tier.stores.files import FileStore  # noqa: PLC0415 - only the one that is asked for

        return FileStore(settings)
    from kvbridge.tier.stores.mooncake import MooncakeStore  # noqa: PLC0415

    return MooncakeStore(settings)


def serve(descriptor: int, log_level: str) -> int:
    """Serve the node at the other end of a connection until that ends. Returns the exit code."""
    configure_logs(names={}, level=log_level, form="json")
    with socket.socket(fileno=descriptor) as connection:
        link = _Link(connection)
        try:
            setup = link.receive()
            if not isinstance(setup, StoreSetup):
                return EXIT_FAILED
            serving = _Serving(link, setup)
        except BridgeError as error:
            log.error("store_cannot_serve", code=error.code, reason=str(error))
            link.send(StoreFailed(code=error.code, message=str(error)[:REASON_CHARS]))
            return EXIT_FAILED
        while isinstance(order := link.receive(), StoreOrder):
            serving.orders.put(order)
        serving.store.close()
    return 0


class _Serving:
    """The store of a setup, and the threads that carry out orders, each one at a time. They end with the process."""

    def __init__(self, link: _Link, setup: StoreSetup) -> None:
        mapped = MappedRegions(region for form in setup.forms for region in form)
        ends = accumulate((len(form) for form in setup.forms), initial=0)
        forms = [mapped.regions[start:stop] for start, stop in pairwise(ends)]
        settings: StoreSettings = TypeAdapter(StoreSettings).validate_json(setup.settings)
        self.store = PageStore(open_store(settings), forms, calls=setup.calls)
        self._mapped = mapped  # as long as the process
        self._link = link
        self.orders: queue.SimpleQueue[StoreOrder] = queue.SimpleQueue()
        link.send(StoreReady(capabilities=self.store.capabilities))
        for number in range(setup.calls):
            threading.Thread(target=self._work, name=f"store {number}", daemon=True).start()

    def _work(self) -> None:
        try:
            while True:
                order = self.orders.get()
                answer = self._carry_out(order)
                detail = answer.detail[:REASON_CHARS]
                self._link.send(
                    StoreReport(number=order.number, outcomes=answer.outcomes, settled=answer.settled, detail=detail)
                )
        except Exception:  # what is left of other calls is not known any more, but it ends with this process
            log.exception("store_thread_failed")
            os._exit(EXIT_FAILED)

    def _carry_out(self, order: StoreOrder) -> Answer:
        keys = Keys(order.keys)
        pages = np.frombuffer(order.pages, dtype="<i4").reshape(len(keys), -1)
        match order.verb:
            case Verb.PUT:
                return self.store.put(order.form, keys, pages, order.until_s)
            case Verb.GET:
                return self.store.get(order.form, keys, pages, order.until_s)
            case Verb.HAS:
                return self.store.has(order.form, keys, order.until_s)
            case Verb.DROP:
                return self.store.drop(order.form, keys, order.until_s)


class _Link:
    """This process's end of the connection: one thread receives, any thread sends."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: StoreReady | StoreFailed | StoreReport) -> None:
        """Send a message. When the node is gone nobody wants it, and the receiving thread sees the end."""
        data = framed(STORE_TO_NODE.encode_body(message))
        with self._sending:
            try:
                self._connection.sendall(data)
            except OSError as error:
                log.debug("store_report_unread", reason=str(error))

    def receive(self) -> StoreSetup | StoreOrder | None:
        """Wait for the next message; None when the node has ended the connection. Raises FrameError for what is no message."""
        try:
            return NODE_TO_STORE.decode_body(self._exactly(length_of(self._exactly(LENGTH.size))))
        except (OSError, _EndError):
            return None

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            more = self._connection.recv(count - len(data))
            if not more:
                raise _EndError
            data += more
        return bytes(data)


class _EndError(Exception):
    """The connection has ended."""
