"""The regions of two ranks that meet, the rows that each writer owes, page ids to runs; checksums and the digests of a request."""

from collections import Counter

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, strategies as st

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ComponentKind, ComponentKind as Kind
from kvbridge.core.ids import MOST_PAGES, IndexSpace as Space, Rank
from kvbridge.core.plan import digests
from kvbridge.core.plan.operations import Section, byte_intervals, find_runs
from kvbridge.core.plan.pairing import Demand, Pairing, Stripe, shortfall
from kvbridge.core.wire.codec import PEER, Envelope
from kvbridge.core.wire.messages import Digests
from tests.helpers.geometries import flash, gqa
from tests.helpers.manifests import Instance
from tests.helpers.rooms import all_rows

PAGES = {Space.FULL: 16, Space.SWA: 4, Space.REQUEST: 2, Space.HOST: 16}


def create(source, destination, **changes) -> Pairing:
    where = {"destination_ordinal": 0, "destination_count": 1} | changes
    return Pairing.create(flash(), source, destination, **where)


def test_layers_of_different_forms_are_groups_of_their_own():
    source, destination = (Instance(gqa(), PAGES, base=base).manifests()[0] for base in (1 << 40, 1 << 50))
    odd = source.regions[1].model_copy(update={"page_stride_bytes": source.regions[1].page_stride_bytes * 2})
    source = source.model_copy(update={"regions": (source.regions[0], odd, source.regions[2])})
    pairing = Pairing.create(gqa(), source, destination, destination_ordinal=0, destination_count=1)
    assert [group.layers for group in pairing.groups] == [(0, 2), (1,)]


def test_the_host_copy_is_the_destination_where_both_are_listed():
    host = Instance(flash(), PAGES, base=1 << 50).with_host(Kind.C4_KV).manifests()[0]
    device = Instance(flash(), PAGES, base=1 << 52).manifests()[0]
    both = host.model_copy(update={"regions": (*device.regions, *[r for r in host.regions if r.space is Space.HOST])})
    pairing = create(Instance(flash(), PAGES).manifests()[0], both)
    spaces = {group.component.kind: group.destination.form.space for group in pairing.groups}
    assert (spaces[Kind.C4_KV], spaces[Kind.C4_INDEXER]) == (Space.HOST, Space.FULL)


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (((0, 64),), [(0, 37_376)]),
        (((3, 5),), [(3 * 576, 2 * 576), (64 * 576 + 3 * 8, 2 * 8)]),
        (((0, 2), (60, 64)), [(0, 1_152), (60 * 576, 4 * 576 + 16), (64 * 576 + 480, 32)]),
    ],
)
def test_parts_lie_apart_unless_they_touch(slots, expected):
    assert byte_intervals(flash().component(Kind.C4_KV), 1, slots) == expected


@pytest.mark.parametrize(
    ("source", "destination", "borders", "lengths"),
    [
        ([1, 2, 3, 4], [7, 8, 9, 10], (0, 0), [4]),
        ([1, 2, 3, 4], [7, 8, 3, 4], (0, 0), [2, 2]),
        ([1, 2, 9, 10], [5, 6, 7, 8], (0, 0), [2, 2]),
        ([4, 3, 2], [4, 3, 2], (0, 0), [1, 1, 1]),
        ([2, 3, 4, 5], [6, 7, 8, 9], (4, 0), [2, 2]),
        ([2, 3, 4, 5], [6, 7, 8, 9], (0, 8), [2, 2]),
        ([2, 3, 4, 5], [7, 8, 9, 10], (4, 8), [1, 1, 2]),
        ([5], [5], (0, 0), [1]),
        ([], [], (0, 0), []),
    ],
)
def test_runs(source, destination, borders, lengths):
    found = find_runs(np.array(source, dtype=np.int64), np.array(destination, dtype=np.int64), borders)
    assert found.pages.tolist() == lengths
    begins = np.cumsum([0, *lengths[:-1]])[: len(lengths)]
    assert found.source.tolist() == [source[begin] for begin in begins]
    assert found.destination.tolist() == [destination[begin] for begin in begins]


def demand(instance: Instance) -> Demand:
    return Demand(instance.geometry, instance.manifests())


def expected(instance: Instance, prompt_tokens: int, prefix_tokens: int = 0):
    return all_rows(instance.geometry, demand(instance), prompt_tokens, prefix_tokens)


def test_device_copies_count_for_each_rank_and_the_host_pool_once():
    decode = Instance(flash(), PAGES, tp_size=4).with_host(Kind.C4_KV)
    assert expected(decode, 2_049) == {
        Kind.C4_KV: 21 * 512,
        Kind.C4_INDEXER: 4 * 21 * 512,
        Kind.C4_STATE: 4 * 21 * 5,
        Kind.C4_INDEXER_STATE: 4 * 21 * 5,
        Kind.C128_KV: 4 * 20 * 16,
        Kind.C128_STATE: 4 * 20 * 1,
        Kind.SWA_KV: 4 * 43 * 128,
    }


def test_shortfall_names_the_first_difference():
    due = {Kind.C4_KV: 100, Kind.SWA_KV: 10, Kind.C128_STATE: 0}
    right = {Kind.C4_KV: 100, Kind.SWA_KV: 10}
    assert shortfall(due, right) is None
    less = shortfall(due, right | {Kind.C4_KV: 93})
    assert less == "c4_kv: 93 of 100 rows were reported as written, 7 are missing"
    assert shortfall(due, {Kind.C4_KV: 100}) == ("swa_kv: 0 of 10 rows were reported as written, 10 are missing")
    more = shortfall(due, right | {Kind.SWA_KV: 12})
    assert more == "swa_kv: 12 rows were reported as written where 10 were due, 2 too many"
    unknown = shortfall(due, right | {Kind.MHA_KV: 1})
    assert unknown == "mha_kv: 1 rows were reported as written where 0 were due, 1 too many"


def of(share, tokens: int, prefix: int = 0):
    return share.rows(prompt_tokens=tokens, prefix_tokens=prefix)


def test_the_shares_of_replicas_have_no_row_in_common_and_are_everything():
    decode = Instance(flash(), PAGES, tp_size=2).with_host(Kind.C4_KV)
    due = demand(decode)
    for tp_size in (1, 2, 4):
        shares = [due.share(Rank(pp=0, tp=tp), tp_size=tp_size, layers=range(43)) for tp in range(tp_size)]
        assert due.uncovered(shares) is None
        for tokens, prefix in ((2_049, 0), (4_096, 1_024), (3, 0)):
            together = Counter()
            for share in shares:
                together.update(of(share, tokens, prefix))
            assert shortfall(expected(decode, tokens, prefix), together) is None
    assert due.uncovered(shares[1:]) == "c4_indexer: 126 lanes of layers where 168 are due"


def test_what_no_rank_can_be_written_through_is_not_covered():
    """Were a layer of the host pool listed by one rank only, a writer that goes through another would leave it out."""
    one, two = Instance(flash(), PAGES, tp_size=2).with_host(Kind.C4_KV).manifests()
    lacking = two.model_copy(update={"regions": tuple(region for region in two.regions if region.space != Space.HOST)})
    due = Demand(flash(), [one, lacking])
    shares = [due.share(Rank(pp=0, tp=tp), tp_size=2, layers=range(43)) for tp in range(2)]
    assert due.uncovered(shares).startswith("c4_kv: ")


@given(st.integers(1, 8), st.integers(0, 100), st.integers(-5, 100))
def test_a_stripe_counts_the_pages_that_it_owns(count, start, length):
    pages = range(start, start + length)
    for index in range(count):
        stripe = Stripe(index, count)
        assert stripe.count_pages(pages) == sum(stripe.owns_page(page) for page in pages)


GEOMETRY = gqa(layers=3, heads=4, tokens_per_page=16)
MHA = ComponentKind.MHA_KV
ALL = digests.DigestKey(MHA, 0, 4)


def room(prompt: int = 40, prefix: int = 0, geometry=GEOMETRY, **fields) -> digests.DigestSums:
    whole = Section(prompt_tokens=prompt, prefix_tokens=prefix, start_token=0, stop_token=prompt)
    return digests.DigestSums(geometry, whole, **fields)


def entry(layers=(0,), first: int = 0, values=(1,), lanes=(0, 4), kind=MHA) -> digests.PageDigests:
    return digests.PageDigests(
        component=kind,
        lane_start=lanes[0],
        lane_stop=lanes[1],
        layers=layers,
        first_page=first,
        values=np.array(values, dtype="<u4").tobytes(),
    )


def put(sums: digests.DigestSums, layers, pages, values, key: digests.DigestKey = ALL) -> None:
    sums.add(key, np.array(layers), np.array(pages), np.array(values, dtype=np.uint32))


@pytest.mark.parametrize(
    ("geometry", "tokens"),
    [(flash(), 1 << 21), (gqa(tokens_per_page=1), MOST_PAGES)],
    ids=["two million tokens of a large model", "as many pages as a table names"],
)
def test_digests_go_into_several_messages(geometry, tokens):
    sums = room(tokens, geometry=geometry)
    random = np.random.default_rng(1)
    total = 0
    for component in geometry.components:
        rows = component.live_rows(tokens)
        if not rows.count:
            continue
        pages = np.arange(rows.start, rows.stop, component.rows_per_logical_page) // component.rows_per_logical_page
        layers = np.repeat(component.layers, len(pages))
        values = random.integers(0, 2**32, len(layers), dtype=np.uint32)
        put(sums, layers, np.tile(pages, len(component.layers)), values, digests.DigestKey(component.kind, 0, 1))
        total += 4 * len(values)
    parts = list(sums.parts())
    sizes = [sum(len(one.values) for one in part) for part in parts]
    assert sum(sizes) == total > digests.MAX_PART_BYTES >= max(sizes)
    for number, part in enumerate(parts):
        message = Digests(room=1, generation=1, writer=Rank(pp=0, tp=0), part=number, digests=part)
        assert PEER.decode(PEER.encode(Envelope(sender="a", body=message))).body == message
    again = room(tokens, geometry=geometry)
    for part in parts:
        again.merge(part)
    for component in geometry.components:
        assert not list(sums.mismatches(again, digests.DigestKey(component.kind, 0, 1), component.layers))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (entry(kind=ComponentKind.C4_KV), "not this model's"),
        (entry(lanes=(0, 5)), "not this model's"),
        (entry(lanes=(2, 2)), "not this model's"),
        (entry(lanes=(0, 2)), "no rank keeps"),
        (entry(layers=(3,)), "layers that the component does not have"),
        (entry(layers=(1, 1), values=(1, 2)), "one twice"),
        (entry(values=(1, 2, 3, 4)), r"pages \[0, 3\)"),
        (entry(first=3), r"pages \[0, 3\)"),
        (entry(values=()), "0 bytes"),
        (entry(layers=(0, 1), values=(1, 2, 3)), "12 bytes for 2 layers"),
    ],
)
def test_what_cannot_be_of_the_request_is_refused_and_changes_nothing(wrong, text):
    sums = room(allowed=frozenset({ALL}))
    with pytest.raises(InvalidInputError, match=text):
        sums.merge([wrong])
    assert list(sums.parts()) == []


WORDS = st.integers(0, 2**32 - 1)


def bitwise(data: bytes) -> int:
    """The raw checksum by its definition: one bit at a time, register 0 at the start, no inversion."""
    register = 0
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (digests.GENERATOR if register & 1 else 0)
    return register


@given(WORDS, WORDS, WORDS)
def test_products_are_those_of_a_ring(left, right, third):
    assert digests.product(left, digests.ONE) == left
    assert digests.product(left, right) == digests.product(right, left)
    assert digests.product(digests.product(left, right), third) == digests.product(left, digests.product(right, third))
    assert digests.product(left, right ^ third) == digests.product(left, right) ^ digests.product(left, third)


@given(st.binary(max_size=40), st.integers(0, 300))
def test_zeros_that_follow_multiply(data, count):
    found = digests.followed_by(np.array([bitwise(data)], dtype=np.uint32), np.array([count]))
    assert found.tolist() == [bitwise(data + bytes(count))]
    assert digests.product(bitwise(data), digests.bytes_power(count)) == bitwise(data + bytes(count))


@given(st.lists(st.tuples(WORDS, st.sampled_from([0, 1, 7, 8, 500])), min_size=1, max_size=30))
def test_many_checksums_are_multiplied_as_one_is(pairs):
    checksums, counts = zip(*pairs, strict=True)
    found = digests.followed_by(np.array(checksums, dtype=np.uint32), np.array(counts))
    assert found.dtype == np.uint32
    assert found.tolist() == [digests.product(one, digests.bytes_power(count)) for one, count in pairs]


@given(st.binary(max_size=60))
def test_the_library_computes_the_same_once_its_inversions_are_undone(data):
    assert crc32c(data, 0xFFFFFFFF) ^ 0xFFFFFFFF == bitwise(data)
