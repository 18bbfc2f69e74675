"""Frames to messages and back: msgpack outside, pydantic inside, limits before either.

A frame between nodes is one msgpack array: version, sender, recipient, link, sequence, acknowledged, body. The codec checks
everything before it returns anything. Each fault is a `FrameError`, which names the field and never repeats the sender's text.

Two releases may meet, so a receiver ignores unknown fields of messages and elements behind the body. Only equal versions talk, and
`PROTOCOL_VERSION` rises only when the envelope changes its meaning. A new field has a default that means what its absence meant. A
side that depends on a new type of message, or on a field that older receivers must not ignore, requires a new feature
(`messages.Features`).
"""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Generic, NamedTuple, NoReturn, TypeVar

import msgpack
import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from kvbridge.core.errors import InvalidInputError, ProtocolError
from kvbridge.core.geometry.manifest import REGION_PLACE, RankManifest, Region
from kvbridge.core.ids import FrozenModel, NonNegative
from kvbridge.core.wire.engine_messages import EngineToNode, NodeToEngine
from kvbridge.core.wire.messages import (
    MAX_PACKED_RANK_BYTES,
    MAX_TABLE_BYTES,
    PROTOCOL_VERSION,
    PeerMessage,
    RankDescription,
    TransportEndpoint,
)
from kvbridge.core.wire.worker_messages import NodeToWorker, WorkerToNode

MessageT = TypeVar("MessageT", bound=FrozenModel)

MAX_FRAME_BYTES = (1 << 20) + 8 * MAX_TABLE_BYTES
"""1 MiB of anything, and the tables of four index spaces on two sides of a room."""
MAX_ARRAY_ITEMS = 16_384
MAX_MAP_ITEMS = 1_024
MAX_TEXT_BYTES = 65_536
MAX_BINARY_BYTES = 1 << 20
"""The limits of a frame. Msgpack's own stack (1,024) bounds nesting while parsing, then the schema does."""
MAX_NAME_CHARACTERS = 200
_MAX_NUMBER = 2**62
_ENVELOPE_BYTES = 4_096
"""No envelope is longer without its body."""
_MAX_ERROR_CHARACTERS = 200
_BODY = 5
"""The place of the body in an `Envelope`. The fields before the body go on the wire as they are."""
_FIELDS = ("version", "sender", "recipient", "link", "sequence", "acknowledged", "body")


class FrameFault(StrEnum):
    """The fault of a frame; the label of the refusal counter."""

    OVERSIZED = "oversized"
    MALFORMED = "malformed"
    """Not msgpack, cut short, or beyond a limit of depth or length."""
    VERSION = "version"
    ENVELOPE = "envelope"
    TYPE = "type"
    FIELD = "field"


class FrameError(ProtocolError):
    """A frame that no correct sender makes."""

    def __init__(self, fault: FrameFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class Envelope(NamedTuple, Generic[MessageT]):
    """A message with the data of its delivery. Without a body it is an acknowledgement only."""

    sender: str
    """The sender's incarnation (on local sockets: its name)."""
    recipient: str = ""
    """The incarnation that the sender believes it talks to; empty before the first answer on this link."""
    link: int = 0
    """Names one conversation of this sender and recipient; -n says "I do not know your link n"."""
    sequence: int = 0
    """From 1; 0 marks a message that is not delivered reliably."""
    acknowledged: int = 0
    """The sender has taken every message of the recipient up to this one."""
    body: MessageT | None = None


class MessageCodec(Generic[MessageT]):
    """Frames of one conversation, whose message types are the closed, tagged `union`. One instance serves every thread.

    `decode` raises FrameError only, `encode` InvalidInputError for a frame beyond the limit.
    """

    def __init__(self, union: Any, name: str, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:  # noqa: ANN401 - a type form
        self.name = name
        self.max_frame_bytes = max_frame_bytes
        self._union = union

    @cached_property
    def _validator(self) -> Any:  # noqa: ANN401 - pydantic's
        # Made for the first body, since a process imports more unions than it speaks.
        return TypeAdapter(self._union).validator

    def encode_body(self, message: MessageT) -> bytes:
        """Return the body of a frame, for `encode`. A message that may be sent several times is encoded once."""
        body: bytes = msgpack.packb(message.model_dump())
        if len(body) > self.max_frame_bytes - _ENVELOPE_BYTES:
            raise InvalidInputError(
                f"{self.name} message {type(message).__name__} is {len(body)} bytes long, a frame takes at most "
                f"{self.max_frame_bytes} with its envelope; send less"
            )
        return body

    def encode(self, envelope: Envelope[MessageT], body: bytes = b"") -> bytes:
        """Return the frame of an envelope. `body`: in place of the envelope's own."""
        head: bytes = msgpack.packb((PROTOCOL_VERSION, *envelope[:_BODY], None))
        if not body:
            if envelope.body is None:
                return head
            body = self.encode_body(envelope.body)
        # The head ends with the one byte of nil, where the body belongs.
        return head[:-1] + body

    def decode(self, frame: bytes) -> Envelope[MessageT]:
        """Return the envelope of a frame; every field is valid, and binary fields stay bytes."""
        parts = self._unpack(frame)
        if not isinstance(parts, tuple):
            self._refuse(FrameFault.MALFORMED, f"expected an array, got {type(parts).__name__}")
        sender, recipient, link, sequence, acknowledged, body = self._envelope_fields(parts)
        message = None if body is None else self._validate(body)
        return Envelope(sender, recipient, link, sequence, acknowledged, message)

    def decode_body(self, body: bytes) -> MessageT:
        """Return the message that `encode_body` has encoded."""
        return self._validate(self._unpack(body))

    def _unpack(self, frame: bytes) -> Any:  # noqa: ANN401 - whatever msgpack holds
        size = len(frame)
        if size > self.max_frame_bytes:
            self._refuse(FrameFault.OVERSIZED, f"frame of {size} bytes, at most {self.max_frame_bytes} are taken")
        try:
            return msgpack.unpackb(
                frame,
                use_list=False,
                strict_map_key=True,
                # No array can have more items than the frame has bytes: a short frame cannot ask for much memory.
                max_array_len=min(MAX_ARRAY_ITEMS, size),
                max_map_len=min(MAX_MAP_ITEMS, size),
                max_str_len=MAX_TEXT_BYTES,
                max_bin_len=MAX_BINARY_BYTES,
                max_ext_len=0,
            )
        except (ValueError, msgpack.UnpackException) as error:
            self._refuse(FrameFault.MALFORMED, f"{size} bytes are not a frame: {_reason(error)}")

    def _envelope_fields(self, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the fields behind the version, each of its type and within its limits. Only the type of the body is checked."""
        version = parts[0] if parts else None
        if version != PROTOCOL_VERSION or type(version) is not int:
            theirs = version if type(version) is int else "none"
            self._refuse(
                FrameFault.VERSION,
                f"we speak protocol version {PROTOCOL_VERSION}, the sender {theirs}; upgrade the older side",
            )
        if len(parts) < len(_FIELDS):
            self._refuse(FrameFault.ENVELOPE, f"expected {len(_FIELDS)} envelope fields, got {len(parts)}")
        _, *found = parts[: len(_FIELDS)]
        sender, recipient, link, sequence, acknowledged, body = found
        checks = (  # written out: each process does this for each of its messages
            type(sender) is str and 0 < len(sender) <= MAX_NAME_CHARACTERS and sender.isprintable(),
            type(recipient) is str and len(recipient) <= MAX_NAME_CHARACTERS and recipient.isprintable(),
            type(link) is int and -_MAX_NUMBER <= link <= _MAX_NUMBER,
            type(sequence) is int and 0 <= sequence <= _MAX_NUMBER,
            type(acknowledged) is int and 0 <= acknowledged <= _MAX_NUMBER,
            body is None or type(body) is dict,
        )
        if not all(checks):
            field = _FIELDS[1 + checks.index(False)]
            self._refuse(FrameFault.ENVELOPE, f"envelope field '{field}' is out of range or of the wrong type")
        return tuple(found)

    def _validate(self, body: object) -> MessageT:
        try:
            message: MessageT = self._validator.validate_python(body, extra="ignore")
        except ValidationError as error:
            fault, text = _first_fault(error)
            self._refuse(fault, text)
        return message

    def _refuse(self, fault: FrameFault, text: str) -> NoReturn:
        raise FrameError(fault, f"{self.name} message refused: {text}"[:_MAX_ERROR_CHARACTERS]) from None


def _reason(error: Exception) -> str:
    if isinstance(error, msgpack.ExtraData):
        return "bytes follow its end"
    if isinstance(error, UnicodeDecodeError):
        return "text is not UTF-8"
    if isinstance(error, msgpack.StackError):
        return "nested too deeply"
    return str(error) or type(error).__name__


def _first_fault(error: ValidationError) -> tuple[FrameFault, str]:
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] in {"union_tag_invalid", "union_tag_not_found"}:
        return FrameFault.TYPE, "the body's 'type' is missing or names no message of this conversation"
    steps = [str(step) for step in first["loc"]]
    path = ".".join(step if step.isprintable() else "?" for step in steps)
    # The text of our own validators may repeat values; pydantic's own texts name the rule only.
    rule = first["type"] if first["type"] in {"value_error", "assertion_error"} else first["msg"]
    return FrameFault.FIELD, f"field '{path[:100]}': {rule}"


PEER: MessageCodec[PeerMessage] = MessageCodec(PeerMessage, "peer")
NODE_TO_WORKER: MessageCodec[NodeToWorker] = MessageCodec(NodeToWorker, "node-to-worker")
WORKER_TO_NODE: MessageCodec[WorkerToNode] = MessageCodec(WorkerToNode, "worker-to-node")
ENGINE_TO_NODE: MessageCodec[EngineToNode] = MessageCodec(EngineToNode, "engine-to-node")
NODE_TO_ENGINE: MessageCodec[NodeToEngine] = MessageCodec(NodeToEngine, "node-to-engine")


# ---------------------------------------------------------------------------------------------- packed ranks

# A peer gets the description of a rank as packed bytes, which are small to send and to keep, and unpacks them only where it needs
# them. Regions of one component mostly differ in layer and addresses alone, so they travel as groups: the form once, the layers,
# and eight bytes for each extent. The time and memory of unpacking follow from the length.


class _RegionGroup(FrozenModel):
    """Regions that differ in layer and addresses only."""

    form: dict[str, str | int]
    """Every other field of a region."""
    layers: Annotated[tuple[NonNegative, ...], Field(min_length=1)]
    addresses: bytes
    """uint64, little-endian: the extents of each layer, layer after layer."""


class _PackedRank(FrozenModel):
    manifest: dict[str, str | int | dict[str, int]]
    """Every field but the regions."""
    groups: tuple[_RegionGroup, ...]
    endpoints: tuple[TransportEndpoint, ...]


_CODEC: MessageCodec[_PackedRank] = MessageCodec(_PackedRank, "packed rank", max_frame_bytes=MAX_PACKED_RANK_BYTES)


def pack_rank(description: RankDescription) -> bytes:
    """Return a description as bytes. Raises InvalidInputError when they are more than MAX_PACKED_RANK_BYTES."""
    groups: dict[tuple[object, ...], list[Region]] = {}
    for region in description.manifest.regions:
        groups.setdefault((*region.form, len(region.extent_addresses)), []).append(region)
    packed = _PackedRank(
        manifest=description.manifest.model_dump(exclude={"regions"}),
        groups=tuple(
            _RegionGroup(
                form=regions[0].model_dump(exclude=REGION_PLACE),
                layers=tuple(region.layer for region in regions),
                addresses=np.array([region.extent_addresses for region in regions], dtype="<u8").tobytes(),
            )
            for regions in groups.values()
        ),
        endpoints=description.endpoints,
    )
    return _CODEC.encode_body(packed)


def unpack_rank(packed: bytes) -> RankDescription:
    """Return the description that was packed; regions come by groups. Raises BridgeError for other bytes."""
    rank = _CODEC.decode_body(packed)
    regions = []
    for group in rank.groups:
        extents, rest = divmod(len(group.addresses), 8 * len(group.layers))
        if rest:
            raise InvalidInputError(
                f"packed rank: {len(group.addresses)} bytes of addresses do not divide among {len(group.layers)} layers"
            )
        addresses = np.frombuffer(group.addresses, dtype="<u8").reshape(len(group.layers), extents).tolist()
        regions += [
            {**group.form, "layer": layer, "extent_addresses": found}
            for layer, found in zip(group.layers, addresses, strict=True)
        ]
    try:
        return RankDescription(
            manifest=RankManifest.model_validate({**rank.manifest, "regions": regions}, extra="ignore"),
            endpoints=rank.endpoints,
        )
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        raise InvalidInputError(f"packed rank: {'.'.join(map(str, found['loc']))}: {found['msg']}"[:400]) from None
