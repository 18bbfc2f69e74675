"""Bytes moved to a peer for a trial: a `Lender` lends memory, a `Trial` writes there, measures, and compares every byte.

Bytes go from a scratch buffer to scattered places of the lent one. Before each measured round the lent buffer is overwritten,
and after it the checksums of both sides are compared; the time for both is not counted. Mooncake lets anybody who reaches its
port write into the lent memory, so nothing relies on its content.
"""

from __future__ import annotations

import base64
import os
import secrets
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import crc32c
import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from kvbridge import __version__
from kvbridge.config.transports import TransportSettings
from kvbridge.control.requests import RequestClient
from kvbridge.core import errors
from kvbridge.core.ids import FrozenModel, NonNegative
from kvbridge.core.plan.operations import Operations
from kvbridge.core.process import Clock, Closing, monotonic
from kvbridge.pool.memory.leftovers import POOL_PREFIX
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY, SharedMapping
from kvbridge.transport import create_transport
from kvbridge.transport.base import Endpoint, Peer, TransferState, Transport

MIB = 1 << 20
BUFFER_BYTES = 64 * MIB
SIZES_BYTES = (37_440, 256 << 10, MIB, 16 * MIB)
"""A page of the compressed cache, and rounder numbers up to the length of one operation for a pool's extent."""
IDLE_S = 30.0
"""A trial that says nothing for so long gives way to another one."""
POLL_PAUSE_S = 0.0001
LATENCY_ROUNDS = 30
CONNECT_S = 30.0
ROUND_S = 60.0
"""Longest round; at the end of it the transfer counts as failed."""


class Question(FrozenModel):
    """A trial's question: make a transport and say where the memory is; fill it; say the CRC-32C of its first bytes; end."""

    ask: Literal["open", "fill", "checksum", "close"]
    trial: str
    transport: str = ""
    value: Annotated[int, Field(ge=0, le=255)] = 0
    length_bytes: NonNegative = 0


class Answer(FrozenModel):
    """Answer to a question; only the fields that the question asks for are set."""

    error: str = ""
    version: str = ""
    endpoint: str = ""
    """The transport's endpoint, in base64."""
    address: NonNegative = 0
    length_bytes: NonNegative = 0
    checksum: NonNegative = 0


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


def make_buffer(directory: Path = DEFAULT_DIRECTORY, length_bytes: int = BUFFER_BYTES) -> SharedMapping:
    """Return scratch memory; named like a pool, so that `kvbridge clean` removes it when this process is killed."""
    name = f"{POOL_PREFIX}{secrets.token_hex(6)}-{secrets.token_hex(8)}.bench-{os.getpid()}"
    return SharedMapping.create(directory, name, length_bytes)


class Lender(Closing):
    """Answers the questions of one trial at a time. It owns its buffer."""

    def __init__(self, buffer: SharedMapping, settings: TransportSettings, *, clock: Clock = monotonic) -> None:
        self._buffer, self._settings, self._clock = buffer, settings, clock
        self._transports: dict[str, Transport] = {}
        self._trial, self._heard_s = "", 0.0
        self._closing = ExitStack()
        self._closing.callback(buffer.close)

    def close(self) -> None:
        """Close every transport and free the memory; harmless when closed."""
        self._closing.close()

    def answer(self, packed: bytes) -> bytes:
        """Answer a question, with the error where there is one."""
        try:
            answer = self._answer(Question.model_validate_json(packed, extra="ignore"))
        except ValidationError as error:
            unknown = f"this release ({__version__}) does not know the question: {error.errors()[0]['msg']}"
            answer = Answer(error=unknown)
        except errors.BridgeError as error:
            answer = Answer(error=str(error))
        return answer.model_dump_json().encode()

    def _answer(self, question: Question) -> Answer:
        now_s = self._clock()
        if self._trial not in {"", question.trial} and now_s - self._heard_s < IDLE_S:
            raise errors.CapacityError(
                f"another trial is under way; try again when it ends, or {IDLE_S:g} s after its last word"
            )
        self._trial, self._heard_s = question.trial, now_s
        length_bytes, own_bytes = question.length_bytes, self._buffer.length_bytes
        if length_bytes > own_bytes:
            raise errors.InvalidInputError(f"the buffer has {own_bytes} bytes, asked for {length_bytes}")
        match question.ask:
            case "open":
                endpoint = base64.b64encode(self._transport(question.transport).endpoint().data).decode()
                address = self._buffer.extent.address
                return Answer(version=__version__, endpoint=endpoint, address=address, length_bytes=own_bytes)
            case "fill":
                np.frombuffer(self._buffer.buffer, dtype=np.uint8)[:] = question.value
            case "checksum":
                with self._buffer.buffer as whole, whole[:length_bytes] as part:
                    return Answer(checksum=crc32c.crc32c(part))
            case "close":
                self._trial = ""
        return Answer()

    def _transport(self, name: str) -> Transport:
        found = self._transports.get(name)
        if found is None:
            found = create_transport(name, self._settings)
            self._closing.callback(found.close)
            found.register([self._buffer.extent])
            self._transports[name] = found
        return found


@dataclass
class Trial:
    """A connected pair of buffers. Use it as a context manager."""

    client: RequestClient
    source: SharedMapping
    settings: TransportSettings
    name: str
    """The transport."""
    _id: str = field(default_factory=lambda: secrets.token_hex(8))
    _rng: np.random.Generator = field(default_factory=np.random.default_rng)
    _closing: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        """Make a transport on each side and connect them. Raises TransportError, PeerError, DeadlineError."""
        with ExitStack() as opened:
            lent = self._ask("open", transport=self.name)
            opened.callback(self._ask, "close")
            self._transport = create_transport(self.name, self.settings)
            opened.callback(self._transport.close)
            self._transport.register([self.source.extent])
            self._peer = self._connect(Endpoint(transport=self.name, data=base64.b64decode(lent.endpoint)))
            self._target, self._length_bytes = lent.address, min(lent.length_bytes, self.source.length_bytes)
            self._closing = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def measure(self, size_bytes: int, effort: Effort) -> Measured:
        """Move operations of one size. Raises DigestMismatchError when other bytes arrive than were sent."""
        count = max(1, min(effort.round_bytes, self._length_bytes) // size_bytes)
        times_s = [self._round(size_bytes, count) for _ in range(effort.rounds + 1)][1:]  # the first opens connections
        alone = self._operations(np.zeros(1, dtype=np.int64), size_bytes)
        latencies_s = [self._move(alone, pause_s=0) for _ in range(LATENCY_ROUNDS)]
        return Measured(
            transport=self.name,
            operation_bytes=size_bytes,
            operations=count,
            bytes_per_s=count * size_bytes / statistics.median(times_s),
            slowest_bytes_per_s=count * size_bytes / max(times_s),
            latency_s=statistics.median(latencies_s),
            latency_worst_s=max(latencies_s),
        )

    def _round(self, size_bytes: int, count: int) -> float:
        """Move `count` operations to scattered places, compare every byte, and return the seconds of the move."""
        places, used = self._rng.permutation(count), count * size_bytes
        with self.source.buffer as whole, whole[:used] as part:
            sent: npt.NDArray[np.uint8] = np.frombuffer(part, dtype=np.uint8)
            sent[:] = np.frombuffer(self._rng.bytes(used), dtype=np.uint8)
            expected = np.empty_like(sent).reshape(count, size_bytes)
            expected[places] = sent.reshape(count, size_bytes)
            del sent
        self._ask("fill", value=int(self._rng.integers(256)))
        took_s = self._move(self._operations(places, size_bytes))
        if self._ask("checksum", length_bytes=used).checksum != crc32c.crc32c(expected.reshape(-1).data):
            raise errors.DigestMismatchError(
                f"{self.name} reported {count} operations of {size_bytes} B as done, and other bytes arrived"
            )
        return took_s

    def _operations(self, places: npt.NDArray[np.int64], size_bytes: int) -> Operations:
        """Return operations to slot `places[i]` each; those that are too long for the backend are cut."""
        cut = np.arange(0, size_bytes, self._transport.max_operation_bytes, dtype=np.uint64)
        lengths = np.minimum(np.uint64(self._transport.max_operation_bytes), np.uint64(size_bytes) - cut)
        slots = np.arange(len(places), dtype=np.uint64)[:, None] * np.uint64(size_bytes)
        targets = places.astype(np.uint64)[:, None] * np.uint64(size_bytes)
        return Operations(
            (slots + cut + np.uint64(self.source.address)).ravel(),
            (targets + cut + np.uint64(self._target)).ravel(),
            np.tile(lengths, len(places)),
        )

    def _move(self, operations: Operations, *, pause_s: float = POLL_PAUSE_S) -> float:
        begun_s = time.perf_counter()
        transfer = self._transport.submit(self._peer, operations, deadline_s=ROUND_S)
        while not (status := transfer.poll()).state.terminal:
            time.sleep(pause_s)
        if status.state is not TransferState.DONE:
            raise errors.TransportError(f"{self.name} could not move {operations.total_bytes} bytes: {status.error}")
        return time.perf_counter() - begun_s

    def _connect(self, endpoint: Endpoint) -> Peer:
        connection = self._transport.connect(endpoint)
        until_s = time.monotonic() + CONNECT_S
        while (peer := connection.poll()) is None:
            if time.monotonic() > until_s:
                raise errors.DeadlineError(f"{self.name} is still connecting after {CONNECT_S:g} s")
            time.sleep(POLL_PAUSE_S)
        return peer

    def _ask(self, ask: Any, **asked: Any) -> Answer:  # noqa: ANN401 - the fields of Question
        question = Question(ask=ask, trial=self._id, **asked)
        try:
            answer = Answer.model_validate_json(self.client.ask(question.model_dump_json().encode()), extra="ignore")
        except ValidationError as error:
            raise errors.PeerError("the other side answers something else; is it bench-peer --listen?") from error
        if answer.error:
            raise errors.PeerError(f"the other side: {answer.error}")
        return answer
