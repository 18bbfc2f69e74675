"""The side of a trial that lends memory: a scratch buffer, and a transport of each kind that is asked for.

Owns: the buffer, the transports, whose trial it is. Must not know: what is measured.

The memory is scratch: Mooncake lets anybody who reaches its port write into it, and nothing believes what is in it.
"""

from __future__ import annotations

import base64
import os
import secrets
from contextlib import ExitStack
from pathlib import Path

import crc32c
import numpy as np
from pydantic import ValidationError

from kvbridge import __version__
from kvbridge.config.transports import TransportSettings
from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.closing import Closing
from kvbridge.core.errors import BridgeError, CapacityError, InvalidInputError
from kvbridge.doctor.bench.questions import QUESTION, Answer, Checksum, Close, Fill, Open, Question
from kvbridge.pool.memory.leftovers import POOL_PREFIX
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY, SharedMapping
from kvbridge.transport.base import Transport
from kvbridge.transport.registry import create_transport

BUFFER_BYTES = 64 << 20
IDLE_S = 30.0
"""A trial of which nothing was heard for so long gives way to another one."""


def make_buffer(directory: Path = DEFAULT_DIRECTORY, length_bytes: int = BUFFER_BYTES) -> SharedMapping:
    """Return scratch memory; named like a pool, so that `kvbridge clean` sweeps it when this process is killed."""
    name = f"{POOL_PREFIX}{secrets.token_hex(6)}-{secrets.token_hex(8)}.bench-{os.getpid()}"
    return SharedMapping.create(directory, name, length_bytes)


class Lender(Closing):
    """Answers the questions of one trial at a time."""

    def __init__(self, buffer: SharedMapping, settings: TransportSettings, *, clock: Clock = monotonic) -> None:
        """Owns `buffer` from then on."""
        self._buffer = buffer
        self._settings = settings
        self._clock = clock
        self._transports: dict[str, Transport] = {}
        self._trial = ""
        self._heard_s = -IDLE_S
        self._closing = ExitStack()
        self._closing.callback(buffer.close)

    def close(self) -> None:
        """Close every transport and free the memory; harmless when closed."""
        self._closing.close()

    def answer(self, packed: bytes) -> bytes:
        """Answer a question. What goes wrong is in the answer."""
        try:
            answer = self._answer(QUESTION.validate_json(packed, extra="ignore"))
        except ValidationError as error:
            answer = Answer(
                error=f"this release ({__version__}) does not know the question: {error.errors()[0]['msg']}"
            )
        except BridgeError as error:
            answer = Answer(error=str(error))
        return answer.model_dump_json().encode()

    def _answer(self, question: Question) -> Answer:
        self._admit(question)
        match question:
            case Open(transport=name):
                transport = self._transport(name)
                endpoint = base64.b64encode(transport.endpoint().data).decode()
                place = self._buffer.extent
                return Answer(
                    version=__version__, endpoint=endpoint, address=place.address, length_bytes=place.length_bytes
                )
            case Fill(value=value):
                np.frombuffer(self._buffer.buffer, dtype=np.uint8)[:] = value
            case Checksum(length_bytes=length_bytes):
                if length_bytes > self._buffer.length_bytes:
                    raise InvalidInputError(
                        f"the buffer has {self._buffer.length_bytes} bytes, asked for {length_bytes}"
                    )
                with self._buffer.buffer as whole, whole[:length_bytes] as part:
                    return Answer(checksum=crc32c.crc32c(part))
            case Close():
                self._trial = ""
        return Answer()

    def _admit(self, question: Question) -> None:
        now_s = self._clock()
        if self._trial not in {"", question.trial} and now_s - self._heard_s < IDLE_S:
            raise CapacityError(
                f"another trial is under way; try again when it has ended, {IDLE_S:g} s after its last word"
            )
        self._trial, self._heard_s = question.trial, now_s

    def _transport(self, name: str) -> Transport:
        found = self._transports.get(name)
        if found is None:
            found = create_transport(name, self._settings)
            self._closing.callback(found.close)
            found.register([self._buffer.extent])
            self._transports[name] = found
        return found
