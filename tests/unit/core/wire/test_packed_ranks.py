"""Descriptions of ranks as bytes: nothing is lost, a whole node fits into one frame, nonsense is named."""

import time
import tracemalloc

import msgpack
import pytest

from kvbridge.core.errors import BridgeError, InvalidInputError
from kvbridge.core.geometry.manifest import check_manifest
from kvbridge.core.geometry.models import PRESETS, preset
from kvbridge.core.ids import IndexSpace, Role
from kvbridge.core.wire import messages
from kvbridge.core.wire.codec import PEER, Envelope, pack_rank, unpack_rank
from tests.helpers.manifests import Instance, Layout

PAGES = dict.fromkeys(IndexSpace, 4_000)
ENDPOINTS = (
    messages.TransportEndpoint(transport="mooncake", data=bytes(2000)),
    messages.TransportEndpoint(transport="local", data=b"x"),
)


def described(name: str, **fields) -> list[messages.RankDescription]:
    instance = Instance(preset(name), PAGES, **fields)
    return [messages.RankDescription(manifest=manifest, endpoints=ENDPOINTS) for manifest in instance.manifests()]


def by_place(description: messages.RankDescription) -> dict[object, object]:
    return {(region.component, region.layer, region.space): region for region in description.manifest.regions}


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_is_lost(name):
    for layout in (Layout(), Layout(page_first=True), Layout(pages_per_extent=90, stride_extra_bytes=64)):
        layouts = {component.kind: layout for component in preset(name).components}
        for one in described(name, tp_size=2, layouts=layouts):
            found = unpack_rank(pack_rank(one))
            assert found.manifest.model_dump(exclude={"regions"}) == one.manifest.model_dump(exclude={"regions"})
            assert (by_place(found), found.endpoints) == (by_place(one), one.endpoints)
            check_manifest(found.manifest, preset(name))


def test_the_longest_description_of_a_node_fits_too():
    ranks = (bytes(messages.MAX_PACKED_NODE_BYTES // messages.MAX_NODE_RANKS),) * messages.MAX_NODE_RANKS
    node = messages.NodeDescription(
        instance="d" * 200,
        node="n" * 200,
        role=Role.DECODE,
        incarnation="d" * 16,
        geometry=preset("deepseek-v4-pro"),
        ranks=ranks,
    )
    PEER.encode(Envelope(sender="d" * 200, recipient="p" * 200, sequence=1, body=messages.Hello(node=node)))


def test_one_that_is_too_long_says_so():
    [one] = described("tiny-gqa")
    long = one.model_copy(
        update={
            "endpoints": (messages.TransportEndpoint(transport="nixl", data=bytes(messages.MAX_PACKED_RANK_BYTES)),)
        }
    )
    with pytest.raises(InvalidInputError, match=r"packed rank message .* bytes long"):
        pack_rank(long)


def test_opening_one_takes_no_more_than_its_length_allows():
    """One group of as many layers and extents as fit, and as many groups as fit."""
    [one] = described("tiny-gqa")
    body = msgpack.unpackb(pack_rank(one))
    [group] = body["groups"]
    extents = 100_000 // len(group["layers"])
    form = group["form"] | {"pages_per_extent": 1, "page_count": extents}
    wide = [group | {"form": form, "addresses": bytes(8 * extents * len(group["layers"]))}]
    for groups in (wide, [group | {"layers": [layer], "addresses": bytes(8)} for layer in range(4_000)]):
        packed = msgpack.packb(body | {"groups": groups})
        tracemalloc.start()
        began_s = time.process_time()
        try:
            unpack_rank(packed)
            took_s, (_, peak_bytes) = time.process_time() - began_s, tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert took_s < 5.0
        assert peak_bytes < (1 << 20) + 200 * len(packed)


def changed(**fields) -> bytes:
    [one] = described("tiny-gqa")
    body = msgpack.unpackb(pack_rank(one))
    body["groups"][0] |= fields
    return msgpack.packb(body)


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (b"", "packed rank message refused"),
        (b"\xc1", "packed rank message refused"),
        (msgpack.packb({}), "field 'manifest'"),
        (changed(addresses=bytes(8)), "8 bytes of addresses do not divide among 3 layers"),
        (changed(addresses=b""), "extent_addresses: Tuple should have at least 1 item"),
        (changed(layers=[]), "field 'groups.0.layers'"),
        (changed(layers=[0, 0, 1]), "listed twice"),
        (changed(form={}), r"manifest|Field required"),
    ],
)
def test_nonsense_is_named(packed, words):
    with pytest.raises(BridgeError, match=words):
        unpack_rank(packed)
