"""Page keys: the published vectors by a second implementation, written from the module's description alone."""

from __future__ import annotations

import hashlib
import json
from importlib import resources

import numpy as np
import pytest
from pydantic import ValidationError

from kvbridge.core.errors import InvalidInputError
from kvbridge.tier.keys import Keys, PrefixIdentity, extend_keys, page_keys

VECTORS = json.loads(resources.files("kvbridge.tier").joinpath("page_key_vectors.json").read_text(encoding="utf-8"))
FIELDS = ("model", "revision", "fingerprint", "tokens_per_page", "adapter", "namespace")


def naive_hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def naive_keys(identity: dict, tokens: list[int]) -> tuple[bytes, list[bytes]]:
    text = b"kvbridge page keys v1\n"
    for field in FIELDS:
        value = str(identity[field]).encode("utf-8")
        text += len(value).to_bytes(4, "little") + value
    root = previous = naive_hash(text)
    size, keys = identity["tokens_per_page"], []
    for page in range(len(tokens) // size):
        ids = tokens[page * size : (page + 1) * size]
        previous = naive_hash(previous + b"".join(token.to_bytes(4, "little") for token in ids))
        keys.append(previous)
    return root, keys


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["what"])
def test_the_published_vectors(vector):
    root, keys = naive_keys(vector["identity"], vector["tokens"])
    assert [root.hex(), *(key.hex() for key in keys)] == [vector["root"], *vector["keys"]]
    identity = PrefixIdentity(**vector["identity"])
    assert identity.root == root
    for tokens in (vector["tokens"], np.array(vector["tokens"], dtype=np.uint32)):
        assert page_keys(identity, tokens).to_list() == keys


def test_the_vectors_tell_identities_apart():
    assert len({vector["root"] for vector in VECTORS}) == 7
    first, second = VECTORS[:2]
    assert first["keys"][0] == second["keys"][0]
    assert first["keys"][1] != second["keys"][1]


def identity(**changes) -> PrefixIdentity:
    return PrefixIdentity(**{"model": "m", "revision": "r", "fingerprint": "f", "tokens_per_page": 4} | changes)


def test_no_two_divisions_of_one_text_into_fields_are_the_same():
    assert identity(model="ab", revision="c").root != identity(model="a", revision="bc").root
    assert identity(adapter="x").root != identity(namespace="x").root


@pytest.mark.parametrize("wrong", [{"tokens_per_page": 0}, {"tenant": "x"}, {"model": None}])
def test_an_identity_is_whole(wrong):
    with pytest.raises(ValidationError):
        identity(**wrong)


@pytest.mark.parametrize("cut", range(0, 17, 4))
def test_keys_are_extended_by_what_follows(cut):
    tokens = list(range(18))
    whole = page_keys(identity(), tokens)
    assert len(whole) == 4
    assert extend_keys(identity(), page_keys(identity(), tokens[:cut]), tokens[cut:]) == whole


@pytest.mark.parametrize("length", [1, 3, 4, 9, 12])
def test_the_tokens_behind_the_last_whole_page_have_an_end_key(length):
    """It names them with all that is before them; a prompt that ends with a page has none."""
    tokens = list(range(length))
    found = page_keys(identity(), tokens)
    root, keys = naive_keys(identity().model_dump(), tokens)
    rest = b"".join(token.to_bytes(4, "little") for token in tokens[len(keys) * 4 :])
    assert found.end == (naive_hash((keys or [root])[-1] + rest) if rest else b"")
    assert found == Keys(found.data), "lists of keys are the same, however the prompts end"


def test_a_digest_names_every_key_and_their_number():
    keys = page_keys(identity(), list(range(12)))
    others = [
        keys[:2],
        Keys.of([*keys, keys[0]]),
        *(Keys.of([*keys[:at], bytes(16), *keys[at + 1 :]]) for at in range(3)),
    ]
    assert len({keys.digest, *(other.digest for other in others)}) == 6
    assert keys.digest == hashlib.blake2b(b"\3\0\0\0" + keys.data, digest_size=32).digest()
    assert Keys().digest == b""


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


@pytest.mark.parametrize("same", range(5))
def test_shared_pages_are_counted_from_the_start(same):
    ours = page_keys(identity(), list(range(16)))
    theirs = page_keys(identity(), [*range(4 * same), *range(100, 120)])
    assert ours.shared_with(theirs) == theirs.shared_with(ours) == same
    assert ours.shared_with(ours[:same]) == same


def test_a_copy_with_another_namespace_has_other_keys():
    """Whoever changes one field of an identity must not go on with the keys of the former one."""
    ours = PrefixIdentity(model="m", revision="1", fingerprint="f", tokens_per_page=2, namespace="a")
    tokens = [1, 2, 3, 4]
    assert page_keys(ours, tokens)
    theirs = ours.model_copy(update={"namespace": "b"})
    assert not page_keys(ours, tokens).shared_with(page_keys(theirs, tokens))


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
