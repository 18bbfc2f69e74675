"""Digests through real daemons: every transport, unequal parallelism, and a bit that flips on its way."""

from __future__ import annotations

import pytest

from kvbridge.core.errors import RoomFailedError
from tests.contract.harness import BACKENDS, require_library
from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import all_free, ends, live_cluster, metric, report
from tests.helpers.matrices import kept

TOKENS = 1_000
FLIP = {"flip_bit_in_operation": 1}
DIGEST = {"integrity": {"digest": "crc32c"}}


@pytest.mark.parametrize("transport", ["local", kept("mooncake", False), kept("nixl", False)])
def test_rooms_cross_once_both_sides_have_computed_the_same(transport):
    require_library(BACKENDS[transport])
    with live_cluster(transport=transport, decode=DIGEST) as live:
        room = live.cross(TOKENS)
        phases = report(live.decode, room)["phases_s"]
        assert phases["digest"] > 0, "prefill computed nothing"
        assert phases["verify"] >= phases["verify_busy"] > 0, "decode computed nothing"
        live.serves()


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("tiny-v4", {"prefill_pp": 2, "prefill_tp": 2, "decode_tp": 2}),
        ("tiny-gqa", {"prefill_tp": 2, "decode_tp": 1}),
        pytest.param("tiny-gqa", {"prefill_tp": 1, "decode_tp": 2}, marks=pytest.mark.thorough),
    ],
)
def test_digests_add_up_whatever_the_ranks_on_both_sides(model, sizes):
    host = {} if model == "tiny-v4" else {"pools": {"device": {"full": 256}, "host": {"components": []}}}
    prefill = {} if model == "tiny-v4" else {"pools": {"device": {"full": 256}}}
    with live_cluster(model=model, decode=DIGEST | host, prefill=prefill, **sizes) as live:
        room = live.cross(TOKENS)
        assert report(live.decode, room)["phases_s"]["verify"] > 0
        live.serves()


@pytest.mark.parametrize("transport", ["local", kept("mooncake", False), kept("nixl", False)])
def test_a_flipped_bit_fails_the_room_by_name_and_the_next_one_crosses(transport):
    require_library(BACKENDS[transport])
    with live_cluster(transport=transport, faults=FLIP, decode=DIGEST) as live:
        room = live.pair(TOKENS)
        assert live.reader is not None
        live.write(room, TOKENS)
        live.sender.finish(room)
        reason = ends(live.decode, room, "failed", "digest_mismatch")
        # The first operation is the first component of the model, in the first layer that has it.
        assert "c4_kv of layer 2, logical page 0" in reason
        assert "space 'host' in the host pool" in reason
        assert "pages differ" not in reason
        with pytest.raises(RoomFailedError, match="c4_kv of layer 2"):
            live.reader.wait_claim(room, 5.0)
        eventually("prefill is told", lambda: report(live.prefill, room)["reason_code"] == "digest_mismatch")
        assert reason in report(live.prefill, room)["reason"]
        assert metric(live.decode, "kvbridge_digest_mismatches_total", component="c4_kv") == 1
        for daemon in (live.prefill, live.decode):
            all_free(daemon)
        live.serves()


@pytest.mark.thorough
def test_without_digests_a_flipped_bit_passes_unseen():
    """What the check is for, and that nobody computes what nobody asked for."""
    with live_cluster(faults=FLIP) as live:
        room = live.pair(TOKENS)
        assert live.reader is not None
        live.write(room, TOKENS)
        live.sender.finish(room)
        with pytest.raises(AssertionError, match="c4_kv"):
            live.read(room, TOKENS)
        live.reader.release(room)
        assert "verify" not in report(live.decode, room)["phases_s"]
