"""The library for inference engines. Import from here, and sparse decode from `kvbridge.sparse`; other modules are internal."""

from kvbridge.core.process import NEEDS_TORCH

try:
    import torch  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(NEEDS_TORCH, name="torch") from missing

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import (
    BridgeError,
    CapacityError,
    ConflictError,
    DeadlineError,
    DetachedError,
    InvalidInputError,
    NotReadyError,
    PageOutOfBoundsError,
    PeerError,
    RegistrationError,
    RoomFailedError,
    TransportError,
    UnknownRoomError,
    UnsupportedError,
)
from kvbridge.core.geometry.components import Component, ComponentKind, ModelGeometry, RowInterval
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.geometry.pages import rotate_window, window_pages
from kvbridge.core.ids import IndexSpace, PageTable, Rank, Tables
from kvbridge.core.plan.operations import Section
from kvbridge.core.prefixes import Retention
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.base import Engine, Room
from kvbridge.engine.decode import DecodeEngine, DecodeRoom
from kvbridge.engine.encodings import RowCodec, row_codec
from kvbridge.engine.memory import WorkerEnd, adopted_region
from kvbridge.engine.prefill import PrefillEngine, PrefillRoom
from kvbridge.engine.views import Part, PoolViews, RegionView, section_rows

__all__ = [
    "BridgeError",
    "CapacityError",
    "Component",
    "ComponentKind",
    "ConflictError",
    "DeadlineError",
    "DecodeEngine",
    "DecodeRoom",
    "DetachedError",
    "Engine",
    "IndexSpace",
    "InvalidInputError",
    "ModelGeometry",
    "NotReadyError",
    "PageOutOfBoundsError",
    "PageTable",
    "Part",
    "PeerAddress",
    "PeerError",
    "PoolViews",
    "PrefillEngine",
    "PrefillRoom",
    "Rank",
    "Region",
    "RegionView",
    "RegistrationError",
    "Retention",
    "Room",
    "RoomEvent",
    "RoomFailedError",
    "RowCodec",
    "RowInterval",
    "Section",
    "Tables",
    "TransportError",
    "UnknownRoomError",
    "UnsupportedError",
    "WorkerEnd",
    "adopted_region",
    "rotate_window",
    "row_codec",
    "section_rows",
    "window_pages",
]
