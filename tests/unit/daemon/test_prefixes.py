"""Which nodes keep prefixes, and that device memory takes them along when it goes."""

from __future__ import annotations

import pytest

from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.core.errors import ConfigError
from kvbridge.core.geometry.components import Component, ComponentKind, Encoding, Liveness
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, Rank, Role
from kvbridge.daemon import parts as node_parts
from kvbridge.daemon.decode import decode_daemon
from kvbridge.daemon.parts import NodeParts
from kvbridge.daemon.prefill import prefill_daemon
from kvbridge.pool.accounts.pages import NO_ROOM, Owner, PageState
from kvbridge.tier.keys import Keys
from tests.helpers.prefix_recount import check_cache

FULL, HOST = IndexSpace.FULL, IndexSpace.HOST
TIER = {"enabled": True, "model_name": "tiny", "model_revision": "1"}


def test_a_model_with_a_state_that_has_no_checkpoint_keeps_prefixes_on_decode_alone(monkeypatch):
    model = preset("tiny-gqa")
    state = Component(
        kind=ComponentKind.C128_STATE,
        layers=(0,),
        space=IndexSpace.REQUEST,
        encoding=Encoding.FP32,
        liveness=Liveness.WHOLE,
        row_parts_bytes=(64,),
        slots_per_page=1,
        rows_per_logical_page=1 << 32,
    )
    stateful = model.model_copy(update={"components": (*model.components, state)})
    monkeypatch.setattr(node_parts, "load_geometry", lambda _: stateful)
    fields = {"instance": "i", "model": {"preset": "tiny-gqa"}, "tier": TIER}
    fields |= {"pools": {"device": {"full": 8, "request": 2}}}
    with pytest.raises(ConfigError, match=r"tier.enabled: .*c128_state.*decode nodes keep prefixes of this model"):
        prefill_daemon(PrefillConfig.model_validate(fields))
    decode_daemon(DecodeConfig.model_validate(fields | {"pools": fields["pools"] | {"host": {"components": []}}}))


def test_the_end_of_a_worker_takes_all_that_is_on_the_device_alone_when_it_had_made_device_memory():
    ranks = [{"pp": 0, "tp": 0, "device": "cpu"}, {"pp": 0, "tp": 1, "device": "cuda:3"}]
    fields = {
        "instance": "d",
        "model": {"preset": "tiny-v4"},
        "parallelism": {"tp_size": 2, "ranks": ranks},
        "pools": {"device": {"full": 8, "swa": 4, "request": 2}, "host": {"pages": 4}},
        "tier": TIER | {"host": {"pages": 4}},
    }
    node = NodeParts(DecodeConfig.model_validate(fields), Role.DECODE)
    cache, owner, keys = node.prefixes, Owner(1, 1), Keys.of([b"0" * 16, b"1" * 16, b"2" * 16])
    own = cache.admit(owner, keys, lambda _: {FULL: 3, HOST: 3}).own
    cache.keep(owner, keys, 0, own)
    cache.let_go(owner)
    node.book.free(owner)
    cache.copies.end_backup(cache.copies.start_backup(Owner(NO_ROOM, 1), keys, at_most=2), done=True)
    node.worker_gone(Rank(pp=0, tp=0), "its memory is the node's")
    assert cache.residency()[:3] == (1, 2, 0)
    node.worker_gone(Rank(pp=0, tp=1), "its memory was its own")
    assert cache.residency()[:3] == (0, 0, 2)
    assert [node.book.counts()[space][PageState.CACHED] for space in (FULL, HOST, IndexSpace.FULL_COPY)] == [0, 2, 2]
    check_cache(cache)
