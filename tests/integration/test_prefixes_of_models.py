"""Prefixes of other models, through real daemons: without windows every page end will do, with long ones there are checkpoints."""

import json
from collections.abc import Iterator

import pytest

from kvbridge.core.geometry.tiers import needs_checkpoints
from kvbridge.core.ids import IndexSpace
from tests.helpers.cluster import cluster, eventually
from tests.helpers.conversation import TIER, Conversation
from tests.helpers.live_rooms import LiveCluster, busy_pages
from tests.helpers.matrices import kept

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PAGE = 64
GROUPED = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
LATENT = {"num_hidden_layers": 2, "kv_lora_rank": 48, "qk_rope_head_dim": 16}
SLIDING = {"num_hidden_layers": 4, "num_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
WINDOW = 150
"""At a page's end it reaches back over three pages."""
MODELS = {
    "gqa": GROUPED | {"num_key_value_heads": 2},
    "mla": LATENT | {"model_type": "deepseek_v3"},
    "windows": GROUPED | SLIDING | {"model_type": "gpt_oss", "sliding_window": WINDOW},
}


@pytest.fixture(scope="module", params=[kept(name, name == "windows") for name in MODELS])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(MODELS[request.param]))
    pages = {"full": 48} | ({"swa": 32, "request": 4} if request.param == "windows" else {})
    model = {"hf_config": str(file), "encoding": "bf16", "tokens_per_page": PAGE}
    decode = TIER | {"pools": {"device": pages, "host": {"components": []}}}
    with cluster(model, pages=pages, prefill=TIER, decode=decode) as started:
        live = LiveCluster(started)
        try:
            yield live
            live.no_traceback()
        finally:
            live.detach()


@pytest.mark.parametrize("over", [0, 1, PAGE - 1])
def test_the_next_turn_computes_and_sends_what_is_new(live: LiveCluster, over: int) -> None:
    talk, lengths = Conversation(live, 1 + over), (4 * PAGE + over, 6 * PAGE + over, 6 * PAGE + over + 5)
    expected = [(0, 0), (4 * PAGE, 4 * PAGE), (6 * PAGE, 6 * PAGE)]
    assert [talk.cross(tokens).reused for tokens in lengths] == expected


def test_long_windows_have_checkpoints_of_as_many_pages(live: LiveCluster) -> None:
    """One that lies in the prompt, as the room of a prompt that leaves a known prefix is given it."""
    talk, needed = Conversation(live, 200), needs_checkpoints(live.sender.geometry)
    talk.cross(5 * PAGE)
    turn = talk.parts(4 * PAGE + 3, 201).turn(5 * PAGE + 3)
    spans = {stop: len(tables[IndexSpace.SWA].ids) for stop, tables in turn.begin().checkpoints.items()}
    turn.abort()
    eventually("let go of", lambda: not busy_pages(live.prefill))
    assert spans == ({4 * PAGE: 3, 5 * PAGE: 3} if needed else {})
