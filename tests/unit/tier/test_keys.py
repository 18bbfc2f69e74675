"""Page keys: the published vectors by a second implementation, written from the module's description alone."""

import json
from importlib import resources

import numpy as np
import pytest

from kvbridge.core.errors import InvalidInputError
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys

VECTORS = json.loads(resources.files("kvbridge.tier").joinpath("page_key_vectors.json").read_text(encoding="utf-8"))


def test_the_vectors_tell_identities_apart():
    assert len({vector["root"] for vector in VECTORS}) == 7
    first, second = VECTORS[:2]
    assert first["keys"][0] == second["keys"][0]
    assert first["keys"][1] != second["keys"][1]


def identity(**changes) -> PrefixIdentity:
    return PrefixIdentity(**{"model": "m", "revision": "r", "fingerprint": "f", "tokens_per_page": 4} | changes)


@pytest.mark.parametrize("wrong", [[-1] * 4, [2**32] * 4, [0.5] * 4, [[1, 2, 3, 4]], ["a"] * 4])
def test_tokens_that_are_none_are_refused(wrong):
    with pytest.raises(InvalidInputError, match="token id"):
        page_keys(identity(), wrong)


def test_keys_are_a_sequence_of_their_pages():
    keys = page_keys(identity(), list(range(20)))
    listed = keys.to_list()
    assert list(keys) == listed
    assert keys[-1] == listed[-1]
    assert keys[1:3] == Keys.of(listed[1:3])
    assert keys[3:2] == Keys()
    assert keys[2:].to_list() == listed[2:]
    with pytest.raises(IndexError):
        keys[5]
    with pytest.raises(InvalidInputError, match="step"):
        keys[::2]


def test_keys_of_other_lengths_are_refused():
    with pytest.raises(InvalidInputError, match="17 bytes in all"):
        Keys(bytes(17))
    with pytest.raises(InvalidInputError, match="got 15"):
        Keys.of([bytes(16), bytes(15)])


def test_a_namespace_has_names_of_its_own_for_the_pages_of_a_prompt():
    ours = page_keys(identity(), list(range(16)))
    longer = page_keys(identity(), [*range(12), *range(100, 108)])
    acme, globex = ours.in_namespace("acme"), ours.in_namespace("globex")
    assert len(acme) == len(ours)
    assert acme == ours.in_namespace("acme")
    assert acme.shared_with(longer.in_namespace("acme")) == 3, "what prompts share they go on sharing"
    assert acme[:2] == ours[:2].in_namespace("acme")
    found = [set(keys) for keys in (ours, acme, globex, ours.in_namespace(""))]
    assert len(set.union(*found)) == 4 * 4, "the default namespace is one, too"
    assert Keys().in_namespace("acme") == Keys()


def test_keys_that_are_made_up_do_not_reach_the_first_page_of_another_namespace():
    """Whoever knows the keys of a prompt elsewhere may send what would become its names, were it not for the first of them."""
    ours = page_keys(identity(), list(range(16)))
    theirs = ours.in_namespace("globex")
    difference = np.frombuffer(theirs.data, np.uint8) ^ np.frombuffer(ours.in_namespace("acme").data, np.uint8)
    forged = Keys((np.frombuffer(ours.data, np.uint8) ^ difference).tobytes())
    assert forged.in_namespace("acme")[0] != theirs[0]
    kept_first = Keys(ours[0] + forged[1:].data).in_namespace("acme")
    assert kept_first[1:] == theirs[1:], "so an index has to look at the whole run"
    assert kept_first[0] != theirs[0]
