"""Checksums as polynomials, and what the digests of a request add up to."""

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, strategies as st

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import Rank
from kvbridge.core.plan.digests import (
    GENERATOR,
    MAX_PART_BYTES,
    ONE,
    DigestKey,
    DigestSums,
    PageDigests,
    bytes_power,
    followed_by,
    product,
)
from kvbridge.core.wire.codec import PEER, Envelope
from kvbridge.core.wire.messages import Digests
from tests.helpers.geometries import flash, gqa

GEOMETRY = gqa(layers=3, heads=4, tokens_per_page=16)
MHA = ComponentKind.MHA_KV
ALL = DigestKey(MHA, 0, 4)


def room(prompt: int = 40, prefix: int = 0, **fields) -> DigestSums:
    return DigestSums.of_room(GEOMETRY, prompt_tokens=prompt, prefix_tokens=prefix, **fields)


def entry(layers=(0,), first: int = 0, values=(1,), lanes=(0, 4), kind=MHA) -> PageDigests:
    return PageDigests(
        component=kind,
        lane_start=lanes[0],
        lane_stop=lanes[1],
        layers=layers,
        first_page=first,
        values=np.array(values, dtype="<u4").tobytes(),
    )


def put(sums: DigestSums, layers, pages, values, key: DigestKey = ALL) -> None:
    sums.add(key, np.array(layers), np.array(pages), np.array(values, dtype=np.uint32))


def test_a_million_tokens_of_a_large_model_go_into_several_messages():
    geometry, tokens = flash(), 1 << 20
    sums = DigestSums.of_room(geometry, prompt_tokens=tokens, prefix_tokens=0)
    random = np.random.default_rng(1)
    total = 0
    for component in geometry.components:
        rows = component.live_rows(tokens)
        if not rows.count:
            continue
        pages = np.arange(rows.start, rows.stop, component.rows_per_logical_page) // component.rows_per_logical_page
        layers = np.repeat(component.layers, len(pages))
        values = random.integers(0, 2**32, len(layers), dtype=np.uint32)
        put(sums, layers, np.tile(pages, len(component.layers)), values, DigestKey(component.kind, 0, 1))
        total += 4 * len(values)
    parts = list(sums.parts())
    sizes = [sum(len(one.values) for one in part) for part in parts]
    assert sum(sizes) == total > MAX_PART_BYTES >= max(sizes)
    for number, part in enumerate(parts):
        message = Digests(room=1, generation=1, writer=Rank(pp=0, tp=0), part=number, digests=part)
        assert PEER.decode(PEER.encode(Envelope(sender="a", body=message))).body == message
    again = DigestSums.of_room(geometry, prompt_tokens=tokens, prefix_tokens=0)
    for part in parts:
        again.merge(part)
    for component in geometry.components:
        assert not list(sums.mismatches(again, DigestKey(component.kind, 0, 1), component.layers))


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
            register = register >> 1 ^ (GENERATOR if register & 1 else 0)
    return register


@given(WORDS, WORDS, WORDS)
def test_products_are_those_of_a_ring(left, right, third):
    assert product(left, ONE) == left
    assert product(left, right) == product(right, left)
    assert product(product(left, right), third) == product(left, product(right, third))
    assert product(left, right ^ third) == product(left, right) ^ product(left, third)


@given(st.binary(max_size=40), st.integers(0, 300))
def test_zeros_that_follow_multiply(data, count):
    found = followed_by(np.array([bitwise(data)], dtype=np.uint32), np.array([count]))
    assert found.tolist() == [bitwise(data + bytes(count))]
    assert product(bitwise(data), bytes_power(count)) == bitwise(data + bytes(count))


@given(st.lists(st.tuples(WORDS, st.sampled_from([0, 1, 7, 8, 500])), min_size=1, max_size=30))
def test_many_checksums_are_multiplied_as_one_is(pairs):
    checksums, counts = zip(*pairs, strict=True)
    found = followed_by(np.array(checksums, dtype=np.uint32), np.array(counts))
    assert found.dtype == np.uint32
    assert found.tolist() == [product(one, bytes_power(count)) for one, count in pairs]


@given(st.binary(max_size=60))
def test_the_library_computes_the_same_once_its_inversions_are_undone(data):
    assert crc32c(data, 0xFFFFFFFF) ^ 0xFFFFFFFF == bitwise(data)
