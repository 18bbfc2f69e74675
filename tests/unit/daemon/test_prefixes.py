"""Which nodes keep prefixes, and that device memory takes them along when it goes."""

from __future__ import annotations

import pytest

from kvbridge.config.schema import DecodeConfig
from kvbridge.core.ids import IndexSpace, Rank, Role
from kvbridge.daemon.parts import NodeParts
from kvbridge.pool.accounts.page_states import Owner, PageState
from kvbridge.tier.keys import Keys

FULL, HOST = IndexSpace.FULL, IndexSpace.HOST
RANKS = [{"pp": 0, "tp": 0, "device": "cpu"}, {"pp": 0, "tp": 1, "device": "cuda:3"}]
TIER = {"enabled": True, "model_name": "tiny", "model_revision": "1"}


def parts(tier=TIER, **pools) -> NodeParts:
    fields = {
        "instance": "d",
        "model": {"preset": "tiny-v4"},
        "parallelism": {"tp_size": 2, "ranks": RANKS},
        "pools": pools or {"device": {"full": 8, "swa": 4, "request": 2}, "host": {"pages": 4}},
        "tier": tier,
    }
    return NodeParts.build(DecodeConfig.model_validate(fields), Role.DECODE)


def test_a_page_of_a_prompt_is_one_in_each_space_that_grows():
    made = parts().prefixes
    assert made is not None
    assert made.spaces == (FULL, HOST)


def test_nodes_that_are_not_to_or_whose_engines_bring_the_memory_keep_none():
    assert parts(tier={}).prefixes is None
    assert parts(memory="adopted", host={"pages": 4}).prefixes is None


@pytest.mark.parametrize(("tp", "left"), [(0, 2), (1, 0)])
def test_the_end_of_a_worker_takes_all_prefixes_when_it_had_made_device_memory(tp, left):
    node = parts()
    cache, owner, keys = node.prefixes, Owner(1, 1), Keys.of([b"0" * 16, b"1" * 16])
    assert cache is not None
    own = cache.admit(owner, keys, lambda _: {FULL: 2, HOST: 2}).own
    cache.keep(owner, keys, 0, own)
    cache.let_go(owner)
    node.book.free(owner)
    node.memory_lost(Rank(pp=0, tp=tp), "a test")
    assert cache.pages() == (0, left)
    assert [node.book.counts()[space][PageState.CACHED] for space in (FULL, HOST)] == [left, left]
    cache.check_integrity()
