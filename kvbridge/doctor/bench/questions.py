"""What the writing side of a trial asks of the side that lends its memory.

Owns: the messages (JSON over `control/requests.py`). Must not know: transports, sockets.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from kvbridge.core.ids import FrozenModel, NonNegative, Positive


class Open(FrozenModel):
    """Make a transport and say where its memory is. Begins a trial, which ends when nothing is asked for some seconds."""

    ask: Literal["open"] = "open"
    trial: str
    transport: str


class Fill(FrozenModel):
    """Set every byte of the memory to one value."""

    ask: Literal["fill"] = "fill"
    trial: str
    value: Annotated[int, Field(ge=0, le=255)]


class Checksum(FrozenModel):
    """Say the CRC-32C of the first bytes."""

    ask: Literal["checksum"] = "checksum"
    trial: str
    length_bytes: Positive


class Close(FrozenModel):
    """The trial has ended: others may begin theirs."""

    ask: Literal["close"] = "close"
    trial: str


class Answer(FrozenModel):
    """What is answered; only what was asked for is set."""

    error: str = ""
    version: str = ""
    endpoint: str = ""
    """Of the transport, in base64."""
    address: NonNegative = 0
    length_bytes: NonNegative = 0
    checksum: NonNegative = 0


Question = Annotated[Open | Fill | Checksum | Close, Field(discriminator="ask")]
QUESTION: TypeAdapter[Question] = TypeAdapter(Question)
