"""How processes of one host name memory, and points in a GPU's work, to each other."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import FrozenModel, IndexSpace, NonNegative, Positive

HANDLE_BYTES = 64
"""Length of CUDA's interprocess handles, of memory and of events."""

IpcHandle = Annotated[bytes, Field(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
DeviceUuid = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""Names a GPU in every process of the host; ordinals depend on CUDA_VISIBLE_DEVICES."""


class FileOrigin(FrozenModel):
    """Memory behind a shared file."""

    kind: Literal["file"] = "file"
    path: str


class CudaOrigin(FrozenModel):
    """Memory in a device allocation of another process, to be opened by CUDA IPC."""

    model_config = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex")  # added to FrozenModel's

    kind: Literal["cuda"] = "cuda"
    handle: IpcHandle
    device_uuid: DeviceUuid
    length_bytes: Positive
    """Length of the whole allocation."""


Origin = Annotated[FileOrigin | CudaOrigin, Field(discriminator="kind")]
"""The place of memory that another process of the host has made."""


class SharedRegion(FrozenModel):
    """A region as another process of the node reaches it.

    `extent_addresses` of `region` are offsets, each into the memory of the same position in `origins`. A region of VRAM has CUDA
    origins only, and its `device` is the ordinal of the process that made it.
    """

    region: Region
    origins: tuple[Origin, ...]


class DeviceAllocationRequest(FrozenModel):
    """The device memory that a rank worker is to allocate, as `pool.memory.layout.device_placement` lays it out."""

    device: NonNegative
    """CUDA ordinal, as the node and its workers count."""
    page_counts: dict[IndexSpace, Positive]
    exclude: tuple[ComponentKind, ...] = ()
    """Components that live in the node's host pool instead."""
    page_first: bool = False
    """Whether a page of all layers is one stretch of memory."""


class StreamPoint(FrozenModel):
    """An interprocess event in the work of an engine's GPU. Recorded again, it is reached later, which is still right."""

    model_config = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex")

    ring: Annotated[str, Field(min_length=1, max_length=100)]
    """Names the set of events, and with it the incarnation of the process that made them."""
    handle: IpcHandle
    device_uuid: DeviceUuid
