"""Manifests that a hostile peer makes up: each is refused by a BridgeError, or planned with, and no other exception is raised."""

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvbridge.core.errors import BridgeError
from kvbridge.core.geometry.manifest import check_manifest
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, PageTable, Tables
from kvbridge.core.plan.operations import Section
from kvbridge.core.plan.pairing import Pairing
from kvbridge.core.plan.planner import page_operations, plan
from kvbridge.core.wire.codec import pack_rank, unpack_rank
from kvbridge.core.wire.messages import RankDescription
from tests.helpers.manifests import Instance, Layout

MODELS = ("tiny-gqa", "tiny-v4")
PAGES = dict.fromkeys(IndexSpace, 6)
TOKENS = 300
EDGES = st.sampled_from([0, 1, 2, 3, 4, 2**31, 2**32, *range(2**61, 2**61 + 3), 2**62 - 1, 2**62, 2**63, 2**64 - 1])
NUMBERS = EDGES | st.integers(0, 2**64 - 1)
TEXTS = st.sampled_from(["", "vram", "full", "host", "x"]) | (NUMBERS | st.just(10**30)).map(str)


def packed(model: str) -> dict[str, Any]:
    """The description of a true decode rank, unpacked as far as bytes are."""
    layouts = {component.kind: Layout(pages_per_extent=4) for component in preset(model).components}
    [manifest] = Instance(preset(model), PAGES, layouts=layouts).manifests()
    return msgpack.unpackb(pack_rank(RankDescription(manifest=manifest, endpoints=())))


def tables(model: str) -> Tables:
    """Pages of every space, of which a manifest need not have all."""
    ids = np.array([0, 1, 2, 5, 3, 4], dtype=np.int32)
    return {component.space: PageTable(component.space, ids) for component in preset(model).components}


def try_out(model: str, rank: dict[str, Any]) -> None:
    """Handle a packed rank as a prefill node and its rank worker do, until operations are there to submit."""
    geometry = preset(model)
    [source] = Instance(geometry, PAGES, base=1 << 36).manifests()
    try:
        manifest = unpack_rank(msgpack.packb(rank)).manifest
        check_manifest(manifest, geometry)
        pairing = Pairing.create(geometry, source, manifest, destination_ordinal=0, destination_count=1)
    except BridgeError:
        return
    page_operations(pairing.groups)
    section = Section(prompt_tokens=TOKENS, start_token=0, stop_token=TOKENS)
    try:
        operations = plan(pairing, section, tables(model), tables(model), max_operation_bytes=1 << 20).operations
    except BridgeError:
        return
    held = sorted(extent for region in manifest.regions for extent in region.extents())
    for begin, length in zip(operations.destination.tolist(), operations.length.tolist(), strict=True):
        assert any(address <= begin and begin + length <= address + size for address, _, size in held)


@pytest.mark.parametrize("model", MODELS)
def test_a_true_manifest_is_planned_with(model: str):
    rank = packed(model)
    check_manifest(unpack_rank(msgpack.packb(rank)).manifest, preset(model))
    try_out(model, rank)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("pages", "per_extent", "stride"),
    [(1, 2**62, None), (4, 4, 2**62), (2, 2, 2**62), (1, 1, 2**62), (2**40, 2**40, 2**22)],
    ids=["an extent of more pages than there are", "strides that wrap", "strides of half", "one page", "many pages"],
)
def test_pages_that_reach_beyond_every_address_end_no_worker(model, pages, per_extent, stride):
    """A product of two numbers that are each in bounds may be more than any integer of the plan holds."""
    rank = packed(model)
    for group in rank["groups"]:
        form = group["form"] | {"page_count": pages, "pages_per_extent": per_extent}
        group["form"] = form | {"page_stride_bytes": stride or form["page_bytes"]}
        addresses = [(1 + index) << 30 for index in range(len(group["layers"]))]
        group["addresses"] = np.array(addresses, dtype="<u8").tobytes()
    try_out(model, rank)


@given(data=st.data())
@pytest.mark.parametrize("model", MODELS)
def test_whatever_a_manifest_says_it_is_refused_or_planned_with(model: str, data: st.DataObject):
    rank = packed(model)
    for _ in range(data.draw(st.integers(1, 4))):
        group = data.draw(st.sampled_from(rank["groups"]))
        match data.draw(st.sampled_from(("form", "form", "form", "alike", "addresses", "manifest", "layers"))):
            case "form":
                name = data.draw(st.sampled_from(sorted(group["form"])))
                group["form"][name] = data.draw(NUMBERS | TEXTS)
            case "alike":  # one extent of any length, with any stride: what the numbers of one region have in common
                pages = data.draw(NUMBERS)
                stride = data.draw(NUMBERS | st.just(group["form"]["page_bytes"]))
                group["form"] |= {"page_count": pages, "pages_per_extent": pages, "page_stride_bytes": stride}
                group["addresses"] = group["addresses"][: 8 * len(group["layers"])]
            case "addresses":
                count = len(group["addresses"]) // 8
                found = data.draw(st.lists(NUMBERS, min_size=count, max_size=count))
                group["addresses"] = np.array(found, dtype="<u8").tobytes()
            case "manifest":
                name = data.draw(st.sampled_from(sorted(rank["manifest"])))
                rank["manifest"][name] = data.draw(NUMBERS | TEXTS)
            case "layers":
                group["layers"] = data.draw(st.lists(st.integers(0, 6) | NUMBERS, min_size=1, max_size=4))
    try_out(model, rank)
