"""The process that uses a store for its node: `python -m kvbridge.tier.stores.process`. Only `client` starts it.

A store's calls may take a minute and more, and go on moving bytes after their caller has given up. They happen here: the end of
this process is the proof that none of its pages is read or written any more.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
import threading
from itertools import accumulate, pairwise
from typing import BinaryIO

import numpy as np
import structlog
from pydantic import TypeAdapter

from kvbridge.config.tier import FileStoreSettings, StoreSettings
from kvbridge.core.errors import BridgeError
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.pool.memory.pools import MappedRegions
from kvbridge.processes import end_with_parent
from kvbridge.telemetry.logs import configure_logs
from kvbridge.tier.keys import Keys
from kvbridge.tier.stores.base import (
    BAD,
    LENGTH,
    NODE_TO_STORE,
    STORE_TO_NODE,
    Answer,
    ObjectStore,
    StoreFailed,
    StoreOrder,
    StoreReady,
    StoreReport,
    StoreSetup,
    Verb,
    framed,
    length_of,
)
from kvbridge.tier.stores.objects import object_name
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


def main(arguments: list[str] | None = None) -> int:
    """Serve until the pipe ends. Returns the exit code."""
    # Signals that end services are the node's, which ends this process when its pages are settled.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="kvbridge store process")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--log-level", default="info")
    given = parser.parse_args(arguments)
    end_with_parent(given.parent, signal.SIGKILL)
    # What libraries print goes to the log, not between our messages.
    link = _Link(sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    configure_logs(names={}, level=given.log_level, form="json")
    try:
        setup = link.receive()
        if not isinstance(setup, StoreSetup):
            return EXIT_FAILED
        serving = _Serving(link, setup)
    except BridgeError as error:
        log.error("store_cannot_serve", code=error.code, reason=str(error))
        link.send(StoreFailed(message=str(error)[:REASON_CHARS]))
        return EXIT_FAILED
    while isinstance(order := link.receive(), StoreOrder):
        serving.orders.put(order)
    serving.store.close()
    return 0


class _Serving:
    """The store of a setup, and the threads that carry out orders, each one at a time. They end with the process."""

    def __init__(self, link: _Link, setup: StoreSetup) -> None:
        self._mapped = mapped = MappedRegions(region for form in setup.forms for region in form)
        ends = accumulate((len(form) for form in setup.forms), initial=0)
        forms = [mapped.regions[start:stop] for start, stop in pairwise(ends)]
        settings: StoreSettings = TypeAdapter(StoreSettings).validate_json(setup.settings)
        self.store = PageStore(open_store(settings), forms, model=setup.model, calls=setup.calls)
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
                report = StoreReport(
                    number=order.number,
                    outcomes=answer.outcomes,
                    settled=answer.settled,
                    detail=answer.detail[:REASON_CHARS],
                    cleared=answer.cleared,
                )
                self._link.send(report)
        except BridgeError as error:
            log.error("store_cannot_go_on", code=error.code, reason=str(error))
            self._link.send(StoreFailed(message=str(error)[:REASON_CHARS]))
            os._exit(EXIT_FAILED)
        except Exception:  # nobody knows any more what other calls do, but they end with this process
            log.exception("store_thread_failed")
            os._exit(EXIT_FAILED)

    def _carry_out(self, order: StoreOrder) -> Answer:
        if order.verb is Verb.CLEAR:
            return self.store.clear(order.form, order.until_s)
        keys = Keys(order.keys)
        pages = np.frombuffer(order.pages, dtype="<i4").reshape(len(keys), -1)
        match order.verb:
            case Verb.PUT:
                return self.store.put(order.form, keys, pages, order.until_s)
            case Verb.HAS:
                return self.store.has(order.form, keys, order.until_s)
            case Verb.DROP:
                return self.store.drop(order.form, keys, order.until_s)
        answer = self.store.get(order.form, keys, pages, order.until_s)
        bad = [at for at, outcome in enumerate(answer.outcomes) if outcome in BAD]
        if bad:
            name, outcome = object_name(self.store.forms[order.form], keys[bad[0]]), answer.outcomes[bad[0]]
            log.warning("store_objects_refused", objects=len(bad), first=name, outcome=outcome.value)
        return answer


class _Link:
    """This process's ends of the pipes: one thread receives, any thread sends."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source, self._sink = source, sink
        self._sending = threading.Lock()

    def send(self, message: StoreReady | StoreFailed | StoreReport) -> None:
        """Send a message. When the node is gone nobody wants it, and the receiving thread sees the end."""
        with self._sending:
            try:
                self._sink.write(framed(STORE_TO_NODE.encode_body(message)))
                self._sink.flush()
            except OSError as error:
                log.debug("store_report_unread", reason=str(error))

    def receive(self) -> StoreSetup | StoreOrder | None:
        """Wait for the next message; None when the node has ended the pipe. Raises FrameError for what is no message."""
        head = self._source.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        body = self._source.read(length := length_of(head))
        return NODE_TO_STORE.decode_body(body) if len(body) == length else None


if __name__ == "__main__":
    # Mooncake runs threads of its own that do not like the interpreter's orderly end.
    code = main()
    sys.stderr.flush()
    os._exit(code)
