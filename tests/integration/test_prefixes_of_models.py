"""Prefixes of other models, through real daemons: without windows every page end will do, with long ones there are checkpoints.

Bytes follow from the keys of pages (the synthetic engine's), so each byte of a shared page and of a checkpoint has one right value.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvbridge.core.geometry.checkpoints import needs_checkpoints, why_no_prefixes
from kvbridge.core.geometry.components import Component, ComponentKind, Encoding, Liveness, ModelGeometry
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace
from kvbridge.core.plan.operations import Section
from tests.helpers import synthetic
from tests.helpers.cluster import START_S, DaemonProcess, cluster, eventually
from tests.helpers.live_rooms import LiveCluster, busy_pages, ends
from tests.helpers.matrices import kept
from tests.helpers.mutated_daemon import mutated

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PAGE = 64
GROUPED = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
LATENT = {"num_hidden_layers": 2, "kv_lora_rank": 48, "qk_rope_head_dim": 16}
SLIDING = {"num_hidden_layers": 4, "num_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
WINDOW = 150
"""At a page's end it reaches back over three pages."""
MODELS = {
    "mha": GROUPED,
    "gqa": GROUPED | {"num_key_value_heads": 2},
    "mla": LATENT | {"model_type": "deepseek_v3"},
    "dsa": LATENT | {"model_type": "deepseek_v32", "index_head_dim": 128},
    "windows": GROUPED | SLIDING | {"model_type": "gpt_oss", "sliding_window": WINDOW},
}
TIER = {"enabled": True, "model_name": "other", "model_revision": "1"}
POOL = {"full": 48, "swa": 32, "request": 4}


@contextmanager
def nodes(model: dict[str, Any], pages: dict[str, int], **more: Any) -> Iterator[LiveCluster]:
    settings = {"prefill": {"tier": TIER}, "decode": {"tier": TIER}} | more
    settings["decode"] |= {"pools": {"device": pages, "host": {"components": []}}}
    with cluster(model, pages=pages, **settings) as started:
        live = LiveCluster(started)
        try:
            yield live
            live.no_traceback()
        finally:
            live.detach()


@pytest.fixture(scope="module", params=[kept(name, name == "windows") for name in MODELS])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(MODELS[request.param]))
    pages = POOL if request.param == "windows" else {"full": POOL["full"]}
    model = {"hf_config": str(file), "encoding": "bf16", "tokens_per_page": PAGE}
    with nodes(model, pages) as running:
        yield running


def crossed(live: LiveCluster, tokens: list[int]) -> tuple[int, int]:
    """Take a prompt through both sides and look at every byte; returns what decode held and where prefill started."""
    sender, reader, length = live.sender, live.reader, len(tokens)
    keys = sender.page_keys(tokens)
    page = sender.geometry.tokens_per_page
    room = int(live.ticket(length, page_hashes=base64.b64encode(keys.data).decode())["room"])
    begun = sender.begin(room, prompt_tokens=length, page_hashes=keys)
    start = begun.computed_tokens
    for views in sender.views.values():
        if start:
            found = synthetic.compare(views, room=room, tables=begun.restore, tokens=start, keys=keys[: start // page])
            assert found.checked_bytes
            assert not found.mismatches, found.mismatches[0]
        for stop, tables in begun.checkpoints.items():
            at_end = Section(prompt_tokens=stop, prefix_tokens=stop, start_token=0, stop_token=stop)
            assert synthetic.fill(views, room=room, tables=tables, section=at_end, keys=keys[: stop // page])
        section = Section(prompt_tokens=length, start_token=start, stop_token=length)
        synthetic.fill(views, room=room, tables=begun.tables, section=section, keys=keys)
    sender.publish(room, length)
    sender.finish(room, checkpoints=list(begun.checkpoints))
    claimed = reader.wait_claim(room, 30, page_hashes=keys)
    for views in reader.views.values():
        found = synthetic.compare(views, room=room, tables=claimed.tables, tokens=length, keys=keys)
        assert not found.mismatches, found.mismatches[0]
    reader.release(room)
    ends(live.prefill, room, "completed")
    eventually("let go of", lambda: not busy_pages(live.prefill) and not busy_pages(live.decode))
    return claimed.prefix_tokens, start


def prompt(number: int, length: int) -> list[int]:
    return [number * 10_000 + place for place in range(length)]


@pytest.mark.parametrize("over", [0, 1, PAGE - 1])
def test_the_next_turn_computes_and_sends_what_is_new(live: LiveCluster, over: int) -> None:
    first, second = 4 * PAGE + over, 6 * PAGE + over
    assert crossed(live, prompt(1 + over, first)) == (0, 0)
    assert crossed(live, prompt(1 + over, second)) == (4 * PAGE, 4 * PAGE)
    assert crossed(live, prompt(1 + over, second + 5)) == (6 * PAGE, 6 * PAGE)


def test_where_others_part(live: LiveCluster) -> None:
    """Prompts that leave the first one at each of its page ends: who needs no checkpoint goes on from every one of them."""
    tokens = prompt(100, 5 * PAGE + 7)
    crossed(live, tokens)
    for pages in (4, 3, 2, 1):
        common = tokens[: pages * PAGE + 9]
        held = pages * PAGE
        first, second = (crossed(live, common + prompt(100 + 10 * pages + turn, 80)) for turn in (1, 2))
        assert first == (held, 0 if needs_checkpoints(live.sender.geometry) else held)
        assert second == (held, held)


def test_long_windows_have_checkpoints_of_as_many_pages(live: LiveCluster) -> None:
    """One that lies in the prompt, as the room of a prompt that leaves a known prefix is given it."""
    crossed(live, prompt(200, 5 * PAGE))
    tokens = prompt(200, 4 * PAGE + 3) + prompt(201, PAGE)
    keys = live.sender.page_keys(tokens)
    room = int(live.ticket(len(tokens), page_hashes=base64.b64encode(keys.data).decode())["room"])
    begun = live.sender.begin(room, prompt_tokens=len(tokens), page_hashes=keys)
    spans = {stop: len(tables[IndexSpace.SWA].ids) for stop, tables in begun.checkpoints.items()}
    live.sender.abort(room, "looked at")
    ends(live.decode, room, "failed", "aborted")
    eventually("let go of", lambda: not busy_pages(live.prefill))
    assert spans == ({4 * PAGE: 3, 5 * PAGE: 3} if needs_checkpoints(live.sender.geometry) else {})


# ---------------------------------------------------------------------------------------------- a state that outlives pages


def lasting_state() -> ModelGeometry:
    """A model that nobody's config.json describes yet: one row of state in its request slot, as linear attention has it."""
    known = preset("tiny-gqa")
    state = Component(
        kind=ComponentKind.C128_STATE,
        layers=(0,),
        space=IndexSpace.REQUEST,
        encoding=Encoding.FP32,
        liveness=Liveness.WHOLE,
        row_parts_bytes=(64,),
        slots_per_page=1,
        rows_per_logical_page=2**32,
    )
    return known.model_copy(update={"components": (*known.components, state)})


AS_PRESET = """
from kvbridge.core.geometry import presets
from kvbridge.core.geometry.components import ModelGeometry
presets._BUILDERS["tiny-gqa"] = lambda name: ModelGeometry.model_validate_json({geometry!r})
"""


def with_state(daemon: DaemonProcess) -> DaemonProcess:
    return mutated(daemon, daemon_code=AS_PRESET.format(geometry=lasting_state().model_dump_json()))


def test_a_state_that_outlives_pages_is_refused_on_prefill_and_kept_on_decode() -> None:
    off = {"tier": TIER | {"enabled": False}}
    assert why_no_prefixes(lasting_state())
    with nodes({"preset": "tiny-gqa"}, {"full": 48, "request": 4}, prefill=off, change=with_state) as live:
        page = live.sender.geometry.tokens_per_page
        assert live.sender.geometry == lasting_state()
        turns = [crossed(live, prompt(1, length)) for length in (2 * page + 5, 3 * page, 3 * page)]
        assert turns == [(0, 0), (2 * page, 0), (3 * page, 0)]
        refused = with_state(DaemonProcess("prefill", "one that keeps prefixes", live.cluster.folder / "r"))
        refused.config = {**live.prefill.config, "tier": TIER, "runtime_dir": str(live.cluster.folder / "r" / "run")}
        refused.start()
        refused.process.wait(START_S)
        assert refused.process.returncode != 0
        said = " ".join(refused.log_path.read_text().split())
        for words in ("tier.enabled", "c128_state", "decode nodes keep prefixes of this model all the same"):
            assert words in said
