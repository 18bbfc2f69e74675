"""The side of a trial that writes: how many bytes a second, how long one operation takes, and whether every byte arrived.

Owns: the course of a trial. Must not know: who asked for it, how it is shown.

Bytes go from a scratch buffer to scattered places of the lent one. Before each measured round the lent buffer is overwritten,
and afterwards its checksum is compared with that of what should be there; the time for both is not counted.
"""

from __future__ import annotations

import base64
import secrets
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

import crc32c
import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from kvbridge.config.transports import TransportSettings
from kvbridge.control.requests import RequestClient
from kvbridge.core.errors import DeadlineError, DigestMismatchError, PeerError, TransportError
from kvbridge.core.ids import FrozenModel
from kvbridge.core.plan.operations import Operations
from kvbridge.doctor.bench.questions import Answer, Checksum, Close, Fill, Open, Question
from kvbridge.pool.memory.shared_mapping import SharedMapping
from kvbridge.transport.base import Endpoint, Peer, TransferState, Transport
from kvbridge.transport.registry import create_transport

MIB = 1 << 20
SIZES_BYTES = (37_440, 256 << 10, MIB, 16 * MIB)
"""A page of the compressed cache, and rounder numbers up to what a pool's extent moves at once."""
POLL_PAUSE_S = 0.0001
LATENCY_ROUNDS = 30
CONNECT_S = 30.0
ROUND_S = 60.0
"""Longest round; at the end of it the transfer counts as failed."""


@dataclass(frozen=True)
class Effort:
    """How much is moved."""

    sizes_bytes: Sequence[int] = SIZES_BYTES
    round_bytes: int = 64 * MIB
    rounds: int = 5


class Measured(FrozenModel):
    """One transport with operations of one size. These are the names of the JSON output."""

    transport: str
    operation_bytes: int
    operations: int
    bytes_per_s: float
    """Median of the rounds."""
    slowest_bytes_per_s: float
    latency_s: float
    """Median time of one operation alone, from handing it over to knowing that it is there."""
    latency_worst_s: float


class Trial:
    """A connected pair of buffers. Use it as a context manager."""

    def __init__(
        self, client: RequestClient, source: SharedMapping, settings: TransportSettings, transport: str
    ) -> None:
        self._client = client
        self._source = source
        self._name = transport
        self._settings = settings
        self._id = secrets.token_hex(8)
        self._rng = np.random.default_rng()
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        """Have the other side make its transport, make ours and connect. Raises TransportError, PeerError, DeadlineError."""
        with ExitStack() as opened:
            lent = self._ask(Open(trial=self._id, transport=self._name))
            opened.callback(self._ask, Close(trial=self._id))
            self._transport = create_transport(self._name, self._settings)
            opened.callback(self._transport.close)
            self._transport.register([self._source.extent])
            self._peer = self._connect(Endpoint(transport=self._name, data=base64.b64decode(lent.endpoint)))
            self._target, self._length_bytes = lent.address, min(lent.length_bytes, self._source.length_bytes)
            self._closing = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def measure(self, size_bytes: int, effort: Effort) -> Measured:
        """Move operations of one size. Raises DigestMismatchError when what arrived is not what was sent."""
        count = max(1, min(effort.round_bytes, self._length_bytes) // size_bytes)
        times_s = [self._round(size_bytes, count) for _ in range(effort.rounds + 1)][1:]  # the first opens connections
        alone = self._operations(np.zeros(1, dtype=np.int64), size_bytes)
        latencies_s = [self._move(alone, pause_s=0) for _ in range(LATENCY_ROUNDS)]
        return Measured(
            transport=self._name,
            operation_bytes=size_bytes,
            operations=count,
            bytes_per_s=count * size_bytes / statistics.median(times_s),
            slowest_bytes_per_s=count * size_bytes / max(times_s),
            latency_s=statistics.median(latencies_s),
            latency_worst_s=max(latencies_s),
        )

    def _round(self, size_bytes: int, count: int) -> float:
        """Move `count` operations, scattered over the target, and return the seconds; every byte is compared."""
        places, used = self._rng.permutation(count), count * size_bytes
        with self._source.buffer as whole, whole[:used] as part:
            sent: npt.NDArray[np.uint8] = np.frombuffer(part, dtype=np.uint8)
            sent[:] = np.frombuffer(self._rng.bytes(used), dtype=np.uint8)
            expected = np.empty_like(sent).reshape(count, size_bytes)
            expected[places] = sent.reshape(count, size_bytes)
            del sent
        self._ask(Fill(trial=self._id, value=int(self._rng.integers(256))))
        took_s = self._move(self._operations(places, size_bytes))
        arrived = self._ask(Checksum(trial=self._id, length_bytes=used)).checksum
        if arrived != crc32c.crc32c(expected.reshape(-1).data):
            raise DigestMismatchError(
                f"{self._name} reported {count} operations of {size_bytes} bytes as done, and other bytes are there"
            )
        return took_s

    def _operations(self, places: npt.NDArray[np.int64], size_bytes: int) -> Operations:
        """Operation i goes to slot `places[i]`; those that are too long for the backend are cut."""
        cut = np.arange(0, size_bytes, self._transport.max_operation_bytes, dtype=np.uint64)
        lengths = np.minimum(np.uint64(self._transport.max_operation_bytes), np.uint64(size_bytes) - cut)
        slots = np.arange(len(places), dtype=np.uint64)[:, None] * np.uint64(size_bytes)
        targets = places.astype(np.uint64)[:, None] * np.uint64(size_bytes)
        return Operations(
            (slots + cut + np.uint64(self._source.address)).ravel(),
            (targets + cut + np.uint64(self._target)).ravel(),
            np.tile(lengths, len(places)),
        )

    def _move(self, operations: Operations, *, pause_s: float = POLL_PAUSE_S) -> float:
        begun_s = time.perf_counter()
        transfer = self._transport.submit(self._peer, operations, deadline_s=ROUND_S)
        while not (status := transfer.poll()).state.terminal:
            time.sleep(pause_s)
        if status.state is not TransferState.DONE:
            raise TransportError(f"{self._name} could not move {operations.total_bytes} bytes: {status.error}")
        return time.perf_counter() - begun_s

    def _connect(self, endpoint: Endpoint) -> Peer:
        connection = self._transport.connect(endpoint)
        until_s = time.monotonic() + CONNECT_S
        while (peer := connection.poll()) is None:
            if time.monotonic() > until_s:
                raise DeadlineError(f"{self._name} is still connecting after {CONNECT_S:g} s")
            time.sleep(POLL_PAUSE_S)
        return peer

    def _ask(self, question: Question) -> Answer:
        try:
            answer = Answer.model_validate_json(self._client.ask(question.model_dump_json().encode()), extra="ignore")
        except ValidationError as error:
            raise PeerError(
                f"the other side answers something else: is it `kvbridge bench-peer --listen`? ({error})"
            ) from error
        if answer.error:
            raise PeerError(f"the other side: {answer.error}")
        return answer

    _transport: Transport
    _peer: Peer
    _target: int
    _length_bytes: int
