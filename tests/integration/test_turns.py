"""Conversations over real daemons with a real model: every logit of every turn is the model's, whatever was kept or evicted.

With answers not kept, the reference is the model alone on the whole prompt, computed from its start with the same cuts: a hit
equals a cold run, bit by bit. With answers kept it is the model alone over the rows that decode had kept. With host tiers, the
devices lose everything between two turns, so that all of it comes back from host memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from tests.contract.harness import BACKENDS, require_library
from tests.helpers.cluster import cluster, eventually
from tests.helpers.conversation import MODEL
from tests.helpers.host_tiers import quiet
from tests.helpers.live_rooms import LiveCluster, busy_pages
from tests.helpers.matrices import kept
from tests.helpers.tiny_model import prompt_tokens
from tests.helpers.turn_engines import PAGE, Answer, ModelAlone, Tokens, Turn, TurnEngines, turn_engines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 4
ENDS = (252, 0, 255, 1, 127, 4, 128, 2, 3, 129, 252)
"""Where prompts end in a page, turn by turn: the first is shorter than a page, its answer and the last one's end exactly on one."""
SPARSE_ENDS = (4 * PAGE + 127, 0, 3, 252, 1)
LEAST_NEW_TOKENS = 20
POOL_PAGES = 32


@pytest.fixture(scope="module")
def alone() -> Iterator[ModelAlone]:
    threads = torch.get_num_threads()
    yield ModelAlone()  # on one thread
    torch.set_num_threads(threads)


HOST_ENDS = (2 * PAGE + 252, 0, 3, 252)
LOCAL, FROM_HOST = "local 2:1 kept", "local 2:1 kept kernel"
ON_DEVICES = [
    LOCAL,
    "mooncake 2:1 page_first",
    *(
        kept(setting, False)
        for setting in ("nixl 2:1", "nixl 2:1 kept", "mooncake 2:1 kept", "local 1:1", "local 3:2", "local 2:3 kept")
    ),
]
ON_HOSTS = [
    FROM_HOST,
    *(kept(setting, False) for setting in ("local 2:1 page_first direct", "local 2:3 kept page_first direct")),
]
"""Transport, pipeline stages of prefill and of decode; whether decode keeps answers, whether pages of all pools are one stretch,
and what copies pages to host tiers and back."""


@pytest.fixture(scope="module", params=[LOCAL, kept("local 2:1", False)])
def engines(request: pytest.FixtureRequest, alone: ModelAlone, tmp_path_factory: Any) -> Iterator[TurnEngines]:
    """Of one of the settings."""
    transport, stages, *words = request.param.split()
    require_library(BACKENDS[transport])
    prefill_pp, decode_pp = map(int, stages.split(":"))
    file: Path = tmp_path_factory.mktemp("model") / "tiny.json"
    file.write_text(json.dumps(alone.facts))
    layout = "page_first" if "page_first" in words else "layer_first"
    pools = {"device": {"full": POOL_PAGES, "swa": 24, "request": 4}, "device_layout": layout}
    prefill, decode = dict(MODEL), MODEL | {"generated": "kept" in words}
    for backend in {"kernel", "direct"} & {*words}:
        host = {"pages": 2 * POOL_PAGES, "layout": layout, "backend": backend}
        prefill["host"], decode["host"] = host | {"checkpoint_pages": 24}, host
    with cluster(
        {"hf_config": str(file), "encoding": "native"},
        transport=transport,
        prefill={"tier": prefill, "pools": pools},
        decode={"tier": decode, "pools": pools | {"host": {"pages": 2 * POOL_PAGES, "layout": layout}}},
        prefill_pp=prefill_pp,
        decode_pp=decode_pp,
    ) as started:
        live = LiveCluster(started)
        try:
            with turn_engines(live, alone) as running:
                running.keeps_answers = "kept" in words
                yield running
            live.no_traceback()
        finally:
            live.detach()


class Conversation:
    """Prompts that go on from the answers before, each compared with the model alone."""

    def __init__(self, engines: TurnEngines, number: int, *, sparse: bool = False, steps: int = STEPS) -> None:
        self.engines, self.number, self.sparse, self.steps = engines, number, sparse, steps
        self.said: Tokens = ()
        """The last prompt and what was fed as its answer."""
        self.former: Answer | None = None
        """What the reference answered last."""
        self.decode_pages, self.prefill_pages, self.checkpoints = 0, 0, {0}
        """What the nodes ought to hold of it, from its start; and at how many tokens prefill has left checkpoints."""

    def prompt(self, length: int) -> Tokens:
        new = length - len(self.said)
        return self.said + tuple(prompt_tokens(new, offset=331 * self.number + 17 * len(self.said)))

    def ask(self, prompt: Tokens) -> Turn:
        """A turn; its logits are the reference's."""
        turn = self.engines.turn(prompt, self.steps, sparse=self.sparse)
        expected = self._reference(prompt, turn)
        assert torch.equal(turn.answer.logits, expected.logits), "a hit differs from a cold run"
        assert turn.answer.fed == expected.fed
        self.said, self.former = prompt + turn.answer.fed, expected
        return turn

    def goes_on(self, end: int) -> Turn:
        """The next turn, of a prompt that ends `end` tokens into a page; what both nodes held is all that they could hold."""
        least = len(self.said) + LEAST_NEW_TOKENS if self.said else end
        prompt = self.prompt(least + (end - least) % PAGE)
        known = min(self.prefill_pages, (len(prompt) - 1) // PAGE) * PAGE
        computed = max(at for at in self.checkpoints if at <= known)
        held = self.decode_pages * PAGE
        turn = self.ask(prompt)
        assert (turn.prefix_tokens, turn.computed_tokens) == (held, computed), "something was not reused"
        whole = len(prompt) // PAGE
        # A prompt without a whole page has no keys, so nothing of its answer stays either.
        self.decode_pages = len(self.said) // PAGE if self.engines.keeps_answers and whole else whole
        self.prefill_pages, self.checkpoints = whole, self.checkpoints | {known, whole * PAGE}
        return turn

    def squeeze(self, *, decode: int | None = None, prefill: int | None = None) -> None:
        """Leave the nodes so many pages, of this conversation's beginning."""
        live = self.engines.live
        if decode is not None:
            live.take(live.decode, POOL_PAGES - decode)
            self.decode_pages = min(self.decode_pages, decode)
        if prefill is not None:
            live.take(live.prefill, POOL_PAGES - prefill)
            self.prefill_pages = min(self.prefill_pages, prefill)
            self.checkpoints = {at for at in self.checkpoints if at <= prefill * PAGE}

    def _reference(self, prompt: Tokens, turn: Turn) -> Answer:
        alone = self.engines.alone
        if self.former is None or not self.engines.keeps_answers:
            return alone.answer(prompt, self.steps, sparse=self.sparse)
        held = min(turn.prefix_tokens, len(self.said))
        return alone.answer_from_kept(self.engines.codec, prompt, self.former, held, sparse=self.sparse)


# ---------------------------------------------------------------------------------------------- turns


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("engines", ON_DEVICES, indirect=True, scope="module")
def test_every_turn_equals_the_model_alone(engines: TurnEngines, sparse: bool) -> None:
    """Prompts and answers that end everywhere in a page."""
    turns = Conversation(engines, 1 + sparse, sparse=sparse)
    found = [turns.goes_on(end) for end in (SPARSE_ENDS if sparse else ENDS)]
    assert min(found[-1].prefix_tokens, found[-1].computed_tokens) > 0


def test_a_prefix_that_is_the_whole_prompt(engines: TurnEngines) -> None:
    """Decode holds all of it and is sent windows and states; prefill has a token to compute all the same."""
    prompt = Conversation(engines, 3).prompt(3 * PAGE)
    found = [Conversation(engines, 3).ask(prompt) for _ in range(3)]
    assert [turn.prefix_tokens for turn in found] == [0, 3 * PAGE, 3 * PAGE]
    # The first leaves a checkpoint at its end, of no use to the same prompt; the second one at the last end that is of use.
    assert [turn.computed_tokens for turn in found] == [0, 0, 2 * PAGE]


def test_a_prompt_that_leaves_a_known_prefix_inside_a_page(engines: TurnEngines) -> None:
    """Several conversations begin alike; the second leaves a checkpoint where they part, so the third goes on from there."""
    begun = Conversation(engines, 4).prompt(2 * PAGE + 100)
    found = [
        Conversation(engines, number).ask(begun + tuple(prompt_tokens(200, offset=41 * number))) for number in (4, 5, 6)
    ]
    assert [turn.prefix_tokens for turn in found] == [0, 2 * PAGE, 2 * PAGE]
    assert [turn.computed_tokens for turn in found] == [0, 0, 2 * PAGE]


def test_a_prompt_shorter_than_a_page_shares_nothing(engines: TurnEngines) -> None:
    prompt = Conversation(engines, 7).prompt(PAGE - STEPS - 1)
    for turn in (Conversation(engines, 7).ask(prompt) for _ in range(2)):
        assert (turn.prefix_tokens, turn.computed_tokens) == (0, 0)


SQUEEZED = ((None, 0), (0, None), (1, 1), (None, 1), (0, 0), (2, None), (1, 0), (None, 2), (2, 1))
"""Pages that decode and prefill are left with between two turns; None: all."""


@pytest.mark.parametrize("first", [0, kept(4, False)])
def test_evictions_between_any_two_turns(engines: TurnEngines, first: int) -> None:
    """Ten turns. Whatever is left of a prefix is the beginning of it, and serves."""
    turns = Conversation(engines, 8 + first)
    turns.goes_on(2 * PAGE + 3)
    for on_decode, on_prefill in SQUEEZED[first:] + SQUEEZED[:first]:
        turns.squeeze(decode=on_decode, prefill=on_prefill)
        turns.goes_on(3)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("engines", ON_HOSTS, indirect=True, scope="module")
def test_every_turn_out_of_the_host_equals_the_model_alone(engines: TurnEngines, sparse: bool) -> None:
    turns, live = Conversation(engines, 1 + sparse, sparse=sparse), engines.live
    for end in HOST_ENDS:
        for daemon in live.nodes:
            eventually(
                f"{daemon.name} has backed up",  # checkpoints too, whose copies are told by pages that somebody has
                lambda daemon=daemon: (now := quiet(daemon)) and not (now["device_pages"] or busy_pages(daemon)),
            )
        live.overwrite(POOL_PAGES)
        turn = turns.goes_on(end)
        assert turn.host_tokens == (turn.computed_tokens, turn.prefix_tokens), "not all of it came from the host"
        assert end == HOST_ENDS[0] or min(turn.host_tokens) > 0, "nothing came back"
