"""The messages between a node and its store process, and their form on the wire.

A message is its length as an unsigned 32-bit little-endian integer and so many bytes of its codec's making. They go over the
process's standard input and output, which only the two have: the end of either process is the end of them.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal

from pydantic import Field

from kvbridge.core.ids import FrozenModel, NonNegative, Positive
from kvbridge.core.wire.codec import MAX_FRAME_BYTES, FrameError, FrameFault, MessageCodec
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.core.wire.shared_memory import SharedRegion
from kvbridge.tier.keys import KEY_BYTES
from kvbridge.tier.stores.base import BATCH_LIMIT, Capabilities, Outcome, Verb

LENGTH = struct.Struct("<I")
_MOST_SPACES = 8

Reason = Annotated[str, Field(max_length=REASON_CHARS)]


class StoreSetup(FrozenModel):
    """Node to process, first message: what store, and what of the node's memory is kept in it."""

    type: Literal["store_setup"] = "store_setup"
    settings: Annotated[str, Field(max_length=10_000)]
    """A section of `config.stores`, as JSON."""
    forms: Annotated[tuple[tuple[SharedRegion, ...], ...], Field(min_length=1, max_length=256)]
    """For each kind of object, all regions that its pages lie in."""
    model: Annotated[str, Field(max_length=1_000)] = ""
    """Tells objects of other models apart, beside their page keys."""
    calls: Annotated[int, Field(ge=1, le=64)]
    """Requests that are under way at once."""


class StoreReady(FrozenModel):
    """Process to node: the store answers, the memory is mapped and registered."""

    type: Literal["store_ready"] = "store_ready"
    capabilities: Capabilities


class StoreFailed(FrozenModel):
    """Process to node: I cannot serve, and end; the text gives cause and cure."""

    type: Literal["store_failed"] = "store_failed"
    message: Reason


class StoreOrder(FrozenModel):
    """Node to process: do this with these objects."""

    type: Literal["store_order"] = "store_order"
    number: Positive
    verb: Verb
    form: NonNegative
    keys: Annotated[bytes, Field(max_length=BATCH_LIMIT * KEY_BYTES)]
    """Page keys, 16 bytes each; none to clear a form."""
    pages: Annotated[bytes, Field(max_length=BATCH_LIMIT * _MOST_SPACES * 4)] = b""
    """To put and get: for each key a page id of each space of the form, int32, little-endian."""
    until_s: float
    """Do not begin after this, by the clock that all processes of the host share (CLOCK_MONOTONIC)."""


class StoreReport(FrozenModel):
    """Process to node: how an order has ended. Unless `settled`, its pages may be touched as long as this process lives."""

    type: Literal["store_report"] = "store_report"
    number: Positive
    outcomes: Annotated[tuple[Outcome, ...], Field(max_length=BATCH_LIMIT)]
    settled: bool
    detail: Reason = ""
    cleared: NonNegative = 0


NodeToStore = Annotated[StoreSetup | StoreOrder, Field(discriminator="type")]
StoreToNode = Annotated[StoreReady | StoreFailed | StoreReport, Field(discriminator="type")]

NODE_TO_STORE: MessageCodec[NodeToStore] = MessageCodec(NodeToStore, "node-to-store")
STORE_TO_NODE: MessageCodec[StoreToNode] = MessageCodec(StoreToNode, "store-to-node")


def framed(body: bytes) -> bytes:
    """Return a message with its length in front."""
    return LENGTH.pack(len(body)) + body


def length_of(head: bytes) -> int:
    """Return how many bytes follow. Raises FrameError for more than a message may have."""
    length = int(LENGTH.unpack(head)[0])
    if length > MAX_FRAME_BYTES:
        raise FrameError(FrameFault.OVERSIZED, f"message of {length} bytes, at most {MAX_FRAME_BYTES} are taken")
    return length
