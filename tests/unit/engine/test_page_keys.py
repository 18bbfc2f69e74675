"""The page keys of an engine's tokens, and what its verbs carry of them."""

from __future__ import annotations

import numpy as np
import pytest

from kvbridge.core.errors import UnsupportedError
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import Rank
from kvbridge.core.prefixes import ModelIdentity, Retention
from kvbridge.core.wire.engine_messages import Attached, Pages
from kvbridge.engine import DecodeEngine, PrefillEngine
from kvbridge.engine.streams import StreamOrder
from kvbridge.tier.keys import PrefixIdentity, page_keys
from tests.unit.engine.test_engine_order import Link, Memory

GEOMETRY = preset("tiny-gqa")
PAGE = GEOMETRY.tokens_per_page
TOKENS = list(range(2 * PAGE + 1))


class KeyedLink(Link):
    """A node that holds a page of every prompt."""

    def call(self, message, answer):
        found = super().call(message, answer)
        return found.model_copy(update={"prefix_tokens": PAGE, "computed_tokens": 2}) if answer is Pages else found


def engine(kind, model: ModelIdentity | None):
    answer = Attached(
        call=1,
        instance="prefill-0",
        incarnation="i",
        geometry=GEOMETRY,
        model_identity=model,
        ranks=(Rank(pp=0, tp=0),),
        layers={},
        pp_size=1,
        tp_size=1,
    )
    link = KeyedLink()
    return kind(link, answer, Memory(), StreamOrder({})), link


MODEL = ModelIdentity(name="m", revision="r")


def test_keys_begin_with_what_the_node_holds():
    prefill, _ = engine(PrefillEngine, MODEL)
    own = {"model": "m", "revision": "r", "fingerprint": fingerprint(GEOMETRY), "tokens_per_page": PAGE}
    assert prefill.page_keys(TOKENS) == page_keys(PrefixIdentity(**own), TOKENS)
    assert prefill.page_keys(np.array(TOKENS)) == prefill.page_keys(TOKENS)
    named = prefill.page_keys(TOKENS, adapter="lora", namespace="acme")
    assert named == page_keys(PrefixIdentity(**own, adapter="lora", namespace="acme"), TOKENS)
    assert len({prefill.page_keys(TOKENS).data, named.data, prefill.page_keys(TOKENS, namespace="acme").data}) == 3


def test_without_a_model_there_are_no_keys():
    prefill, _ = engine(PrefillEngine, None)
    with pytest.raises(UnsupportedError, match=r"prefill-0 does not say .*tier\.model_name and tier\.model_revision"):
        prefill.page_keys(TOKENS)


KEEP = Retention(priority=1, for_s=60)


def test_the_verbs_carry_them():
    prefill, link = engine(PrefillEngine, MODEL)
    keys = prefill.page_keys(TOKENS)
    prefill.admit(1, prompt_tokens=len(TOKENS), page_keys=keys, namespace="acme", retention=KEEP)
    begun = prefill.begin(1, prompt_tokens=len(TOKENS), page_keys=keys)
    assert (begun.held_by_decode, begun.held_by_prefill) == (PAGE, 2)
    decode, other = engine(DecodeEngine, MODEL)
    assert decode.claim(1, page_keys=keys).held_by_decode == PAGE
    decode.claim(1, timeout_s=1.0, page_keys=keys).release(valid_tokens=len(TOKENS), page_keys=keys)
    said = [*link.said, *other.said]
    assert [message.type for message in said] == ["admit", "begin", "claim", "claim", "release"]
    assert {message.page_hashes for message in said} == {keys.data}
    assert (said[0].namespace, said[0].retention, said[-1].valid_tokens) == ("acme", KEEP, len(TOKENS))
