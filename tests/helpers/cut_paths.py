"""A prefill rank worker whose connections by one transport the kernel ends in the middle of a transfer, and for a while after."""

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from kvbridge.config.transports import TransportSettings
from kvbridge.core.ids import FrozenModel
from kvbridge.core.plan.operations import Operations
from kvbridge.transport.base import Peer, Transfer, TransferStatus, Transport
from kvbridge.worker import lifecycle
from tests.helpers.zygote import installed

PAUSE_S = 0.001


class CutSettings(FrozenModel):
    transport: str
    addresses: tuple[str, ...]
    """Addresses of the peer: connections to them are ended."""
    after_share: float
    """The cut begins once this share of the operations of one transfer has been confirmed, and the flag is up."""
    flag: str
    """A file: while it exists, the path is to be cut, and stays cut."""


def cut_worker(*cuts: CutSettings) -> str:
    return installed("cut_paths", *(cut.model_dump_json() for cut in cuts))


def install(*told: str) -> None:
    cuts = {settings.transport: Cut(settings) for settings in map(CutSettings.model_validate_json, told)}
    create = lifecycle.create_transport

    def create_watched(name: str, settings: TransportSettings, *, epoch: int = 0) -> Transport:
        transport = create(name, settings, epoch=epoch)
        if name in cuts:
            watch(transport, cuts[name])
        return transport

    lifecycle.create_transport = create_watched


class Cut:
    def __init__(self, settings: CutSettings) -> None:
        self._settings = settings
        self._flag = Path(settings.flag)
        self._begun = threading.Event()
        threading.Thread(target=self._run, name=f"cut {settings.transport}", daemon=True).start()

    def look(self, confirmed: int, operations: int) -> None:
        far = self._settings.after_share * operations <= confirmed < operations
        if far and not self._begun.is_set() and self._flag.exists():
            self._end_connections()
            self._begun.set()

    def _run(self) -> None:
        while True:
            self._begun.wait()
            while self._flag.exists():
                self._end_connections()
                time.sleep(PAUSE_S)
            self._begun.clear()

    def _end_connections(self) -> None:
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if entry.readlink().name.startswith("socket:"):
                    self._end(int(entry.name))

    def _end(self, descriptor: int) -> None:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            of_ip = connection.family in {socket.AF_INET, socket.AF_INET6}
            if of_ip and connection.getpeername()[0].removeprefix("::ffff:") in self._settings.addresses:
                connection.shutdown(socket.SHUT_RDWR)


def watch(transport: Transport, cut: Cut) -> None:
    submit = transport.submit

    def watched(peer: Peer, operations: Operations, *, deadline_s: float) -> Transfer:
        return _Watched(submit(peer, operations, deadline_s=deadline_s), cut)

    transport.submit = watched  # type: ignore[method-assign]


class _Watched(Transfer):
    def __init__(self, inner: Transfer, cut: Cut) -> None:
        self._inner = inner
        self._cut = cut

    def poll(self) -> TransferStatus:
        windowed: Any = self._inner
        self._cut.look(windowed._done, windowed._count)
        return self._inner.poll()

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)
