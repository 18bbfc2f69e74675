"""Twins through real daemons: made by the node, mapped by its engines, shown by its status, and gone with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
from kvbridge.tier.copies import Direction, TwinCopier
from tests.helpers.cluster import cluster
from tests.helpers.live_rooms import LiveCluster, status
from tests.helpers.twin_pools import pages

TINY = preset("tiny-v4")
FULL, SWA = IndexSpace.FULL, IndexSpace.SWA
TIER = {"enabled": True, "model_name": "m", "model_revision": "1"}


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_engines_of_both_sides_reach_the_twins_and_rooms_cross_as_ever(layout: str) -> None:
    prefill = {"tier": TIER | {"host": {"pages": 6, "checkpoint_pages": 2, "layout": layout}}}
    decode = {"tier": TIER | {"host": {"size_bytes": "300KiB", "layout": layout}}}
    with cluster({"preset": "tiny-v4"}, prefill=prefill, decode=decode, prefill_pp=2, prefill_tp=2) as running:
        live = LiveCluster(running)
        with (
            PrefillEngine.attach(running.prefill.runtime_dir) as sender,
            DecodeEngine.attach(running.decode.runtime_dir) as reader,
        ):
            for engine, spaces in ((sender, {FULL, SWA}), (reader, {FULL})):
                twins = engine._attachment.twins
                for rank, views in engine.views.items():
                    moves = {space: (pages(3), pages(1)) for space in spaces}
                    with TwinCopier(TINY, views.regions, twins, direction=Direction.BACKUP) as backup:
                        assert backup.done(backup.copy(moves)), rank
            shown = [status(daemon)["pools"] for daemon in (running.prefill, running.decode)]
            assert (sum(shown[0]["full_twin"].values()), sum(shown[0]["swa_twin"].values())) == (6, 2)
            assert (sum(shown[1]["full_twin"].values()) > 6, "swa_twin" in shown[1]) == (True, False)
            answers = [engine._attachment.answer for engine in (sender, reader)]
            made = {Path(origin.path) for answer in answers for shared in answer.twins for origin in shared.origins}
            assert len(made) == 2
            assert all(path.exists() for path in made)
        live.cross(700)
        live.detach()
    assert not any(path.exists() for path in made)
