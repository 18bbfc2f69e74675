"""What a peer must know of a rank, packed into bytes: small on the wire, small to keep, opened only by whoever needs it.

Regions of one component mostly differ in their layer and their addresses only. So they travel as groups: the form once, the layers,
and eight bytes for each extent. What it costs to open a packed rank follows from its length.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field, ValidationError

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.manifest import REGION_PLACE, RankManifest, Region
from kvbridge.core.ids import FrozenModel, NonNegative
from kvbridge.core.wire.codec import MessageCodec
from kvbridge.core.wire.messages import MAX_PACKED_RANK_BYTES, RankDescription, TransportEndpoint


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
    """Return the description that was packed; regions come by groups. Raises BridgeError for bytes that are none."""
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
