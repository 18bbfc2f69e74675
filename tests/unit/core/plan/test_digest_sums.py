from __future__ import annotations

import numpy as np
import pytest

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import Rank
from kvbridge.core.plan.digests import MAX_PART_BYTES, DigestKey, DigestSums, PageDigests
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
