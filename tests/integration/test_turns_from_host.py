"""Conversations with a real model, of which the devices keep nothing between two turns: every logit is the model's all the same.

As in test_turns, but what both nodes held has been pushed off their devices, so that all of it comes back from host memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from kvbridge.engine import load_back
from tests.helpers.cluster import cluster, eventually
from tests.helpers.live_rooms import LiveCluster, busy_pages, status
from tests.helpers.matrices import kept
from tests.helpers.turn_engines import PAGE, ModelAlone, Turn, TurnEngines, turn_engines
from tests.integration.test_turns import DIFFERS, POOL_PAGES, Conversation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ENDS = (2 * PAGE + 252, 0, 3, 252)
"""Where prompts end in a page: answers end exactly on one, too."""
KERNEL = {"layout": "layer_first"}
DIRECT = {"layout": "page_first_direct", "backend": "direct"}
SETTINGS = [
    "local 2:1 kernel kept",
    *(kept(setting, False) for setting in ("local 2:1 direct", "mooncake 2:1 kernel", "local 2:3 direct kept")),
]
"""Transport, pipeline stages of prefill and of decode, copy backend, and whether decode keeps answers."""


@pytest.fixture(scope="module")
def alone() -> Iterator[ModelAlone]:
    threads = torch.get_num_threads()
    yield ModelAlone()  # on one thread
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=SETTINGS)
def engines(request: pytest.FixtureRequest, alone: ModelAlone, tmp_path_factory: Any) -> Iterator[TurnEngines]:
    transport, stages, backend, *answers = request.param.split()
    prefill_pp, decode_pp = map(int, stages.split(":"))
    file: Path = tmp_path_factory.mktemp("model") / "tiny.json"
    file.write_text(json.dumps(alone.facts))
    host = {"pages": 2 * POOL_PAGES, **(DIRECT if backend == "direct" else KERNEL)}
    tier = {"enabled": True, "model_name": "tiny", "model_revision": "1"}
    with cluster(
        {"hf_config": str(file), "encoding": "native"},
        transport=transport,
        prefill={"tier": tier | {"host": host | {"checkpoint_pages": 24}}},
        decode={"tier": tier | {"host": host, "generated": bool(answers)}},
        pages={"full": POOL_PAGES, "swa": 24, "request": 4},
        device_layout="page_first" if backend == "direct" else "layer_first",
        host_pages=2 * POOL_PAGES,
        prefill_pp=prefill_pp,
        decode_pp=decode_pp,
    ) as started:
        live = LiveCluster(started)
        try:
            with turn_engines(live, alone) as running:
                running.keeps_answers = bool(answers)
                yield running
            live.no_traceback()
        finally:
            live.detach()


class Forgotten(Conversation):
    """Between two turns everything moves down and the devices lose it."""

    def goes_on(self, end: int) -> Turn:
        for daemon in (self.engines.live.prefill, self.engines.live.decode):
            eventually(f"{daemon.name} has backed up", lambda daemon=daemon: settled(daemon))
        self.engines.live.overwrite(POOL_PAGES)
        turn = super().goes_on(end)
        assert turn.host_tokens == (turn.computed_tokens, turn.prefix_tokens), "not all of it came from the host"
        return turn


def settled(daemon: Any) -> bool:
    """Whether all that the device keeps is on the host; checkpoints too, whose copies are told by pages that somebody has."""
    tier = status(daemon)["host_tier"]
    return not (tier["device_pages"] or tier["waiting_prompts"] or tier["in_flight_pages"] or busy_pages(daemon))


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_every_turn_out_of_the_host_equals_the_model_alone(engines: TurnEngines, sparse: bool) -> None:
    turns = Forgotten(engines, 1 + sparse, sparse=sparse)
    found = [turns.goes_on(end) for end in ENDS]
    assert all(min(turn.host_tokens) > 0 for turn in found[1:]), "nothing came back"


@pytest.mark.parametrize("left_out", ["full", "swa"])
def test_what_is_not_loaded_is_seen(engines: TurnEngines, left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what both engines are to load, pages or checkpoints stay where they are."""
    turns = Forgotten(engines, 3 + (left_out == "swa"))
    turns.goes_on(ENDS[0])
    real = load_back.page_moves

    def moves(pages: Any) -> Any:
        return {space: ids for space, ids in real(pages).items() if space.value != left_out}

    monkeypatch.setattr(load_back, "page_moves", moves)
    with pytest.raises(AssertionError, match=DIFFERS):
        turns.goes_on(ENDS[1])
