"""Messages of a later release of kvbridge: every message with a field that this one does not know, at every level."""

from __future__ import annotations

from typing import Any

import msgpack
from pydantic import BaseModel

from kvbridge.core.wire.codec import Envelope, MessageCodec

UNKNOWN = {"of_a_later_release": {"numbers": [1, 2.5], "nothing": None}}


def later(value: Any) -> Any:
    """A message or a record as a later release dumps it; maps whose keys are data stay as they are."""
    match value:
        case BaseModel():
            return {name: later(getattr(value, name)) for name in type(value).model_fields} | UNKNOWN
        case tuple() | list():
            return [later(item) for item in value]
        case dict():
            return {key: later(item) for key, item in value.items()}
    return value


class LaterCodec(MessageCodec[Any]):
    """Encodes as a later release does, with a longer envelope too; decodes as this one."""

    @classmethod
    def of(cls, codec: MessageCodec[Any]) -> LaterCodec:
        other = cls.__new__(cls)
        other.__dict__.update(vars(codec))
        return other

    def encode_body(self, message: Any) -> bytes:
        return msgpack.packb(later(message))

    def encode(self, envelope: Envelope[Any], body: bytes = b"") -> bytes:
        frame = super().encode(envelope, body)
        assert frame[0] == 0x97, "an array of seven"
        return b"\x98" + frame[1:] + msgpack.packb({"trace": "0123"})
