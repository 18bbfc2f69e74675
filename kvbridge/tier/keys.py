r"""Page keys: the names by which engines, routers and daemons know the same page of the same prompt.

A *page key* is 16 bytes. It names everything that decides the contents of a page: the model, the namespace that shares it, and
every token from the prompt's first to the page's last. A known key means that everything before it is known, and two prompts have
equal keys exactly as far as they share whole pages. To compute the keys of a prompt:

1. `H(x)` is BLAKE2b (RFC 7693) with an output of 16 bytes and neither key, salt nor personalisation. The output length enters
   BLAKE2b's parameters: a longer output cut to 16 bytes is another value.
2. `root = H(domain || field || field || ...)`. The domain is the 22 bytes `kvbridge page keys v1\n` (ASCII, with the line feed).
   The fields, in this order: `model`, `revision`, `fingerprint`, `tokens_per_page`, `adapter`, `namespace`. Each is its length in
   bytes as an unsigned 32-bit little-endian integer, then so many bytes of UTF-8, as they are: nothing is trimmed, folded or
   normalised, and an absent adapter or namespace is the empty string. `tokens_per_page` is written in decimal digits.
3. Cut the token ids into pages of `tokens_per_page`, from the first one on; a last page that is not whole has no key. Page `i` is
   written as its token ids, each an unsigned 32-bit little-endian integer, with nothing before, between or after.
4. `key[0] = H(root || page 0)` and `key[i] = H(key[i-1] || page i)`.
5. The tokens behind the last whole page, where there are any, have an *end key*: `H(key[last] || tokens)`, with the root in place
   of the key when no page is whole. Only engines state it: the page in which a prompt ends becomes whole with the answer.

The keys of a prompt travel as one string of bytes, in the order of the pages: 16 bytes for each. `page_key_vectors.json`, beside
this module, has prompts with their keys. A change to any of this needs a new domain.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self, overload

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.ids import FrozenModel, Positive

KEY_BYTES = 16
DOMAIN = b"kvbridge page keys v1\n"
_NAMESPACE_DOMAIN = b"kvbridge pages of a namespace v1\n"

TokenIds = Sequence[int] | npt.NDArray[np.integer]


class PrefixIdentity(FrozenModel):
    """The facts that a key names beside tokens: prefixes of two identities have no key in common."""

    model: str
    revision: str
    """A revision of the weights, or their digest. Weights that compute differently must have different revisions."""
    fingerprint: str
    """The fingerprint of the geometry: form and encoding of the rows."""
    tokens_per_page: Positive
    adapter: str = ""
    """The adapter (LoRA) of the model; empty: none."""
    namespace: str = ""
    """The group that shares prefixes. A namespace is no secret: nodes see to it that nobody finds pages by the keys of another
    namespace (`Keys.in_namespace`)."""

    @property  # not cached: a copy with another namespace would keep the value
    def root(self) -> bytes:
        """Stands for the key before the first page."""
        fields = (self.model, self.revision, self.fingerprint, str(self.tokens_per_page), self.adapter, self.namespace)
        encoded = [field.encode() for field in fields]
        return _hash(DOMAIN + b"".join(struct.pack("<I", len(field)) + field for field in encoded))


@dataclass(frozen=True, slots=True)
class Keys(Sequence[bytes]):
    """The keys of a prompt's first pages, in order: a sequence of 16-byte strings, kept as one string.

    Raises InvalidInputError for a number of bytes that is no multiple of 16.
    """

    data: bytes = b""
    end: bytes = field(default=b"", compare=False)
    """The end key of the prompt; empty: the prompt ends with a whole page, or nobody has stated the end."""

    def __post_init__(self) -> None:
        if len(self.data) % KEY_BYTES:
            raise InvalidInputError(f"page keys have {KEY_BYTES} bytes each, got {len(self.data)} bytes in all")

    @classmethod
    def of(cls, keys: Sequence[bytes]) -> Self:
        """Join keys. Raises InvalidInputError for a key that has not 16 bytes."""
        for key in keys:
            if len(key) != KEY_BYTES:
                raise InvalidInputError(f"a page key has {KEY_BYTES} bytes, got {len(key)}")
        return cls(b"".join(keys))

    def __len__(self) -> int:
        return len(self.data) // KEY_BYTES

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> bytes | Self:
        if isinstance(index, int):
            at = range(len(self))[index] * KEY_BYTES
            return self.data[at : at + KEY_BYTES]
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise InvalidInputError(f"keys are cut where a prompt is cut, in order; got a step of {step}")
        return type(self)(self.data[start * KEY_BYTES : max(start, stop) * KEY_BYTES])

    def to_list(self) -> list[bytes]:
        """Return all keys; much faster than one at a time."""
        found: list[bytes] = np.frombuffer(self.data, dtype=f"V{KEY_BYTES}").tolist()
        return found

    @property
    def digest(self) -> bytes:
        """32 bytes that name all of these keys and their number; empty for no keys.

        A digest is twice as long as a key, because an attacker may look for two lists with the same digest.
        """
        if not self.data:
            return b""
        return hashlib.blake2b(struct.pack("<I", len(self)) + self.data, digest_size=32, usedforsecurity=False).digest()

    def shared_with(self, other: Keys) -> int:
        """Return how many first pages are the same in both."""
        count = min(len(self), len(other))
        size = count * KEY_BYTES
        if self.data[:size] == other.data[:size]:
            return count
        ours, theirs = (np.frombuffer(keys.data, np.uint64, 2 * count).reshape(count, 2) for keys in (self, other))
        return int((ours != theirs).any(axis=1).argmax())

    def in_namespace(self, namespace: str) -> Self:
        """Return the names under which a node, its journal, its store and bootstrap keep these pages for a namespace.

        Each name is the key, exclusive or a hash of the namespace and the first key. Prompts of one namespace thus share names as
        far as they share pages. A caller who knows the keys of another namespace finds no first key that leads to its names, so a
        run of names from the first page on belongs to one namespace. A single name proves nothing unless it is that of a first
        page.
        """
        if not self.data:
            return self
        mask = np.frombuffer(_hash(_NAMESPACE_DOMAIN + namespace.encode() + self.data[:KEY_BYTES]), np.uint64)
        return type(self)((np.frombuffer(self.data, np.uint64).reshape(-1, 2) ^ mask).tobytes())

    def __repr__(self) -> str:
        last = f", the last {self[-1].hex()}" if self.data else ""
        return f"<{len(self)} page keys{last}>"


NO_KEYS = Keys()
Link = tuple[bytes, bytes]
"""The key of the page before, empty for the first page of a prompt, and the key of a page."""


def page_keys(identity: PrefixIdentity, tokens: TokenIds) -> Keys:
    """Return the keys of all whole pages of a prompt, and its end key, from its token ids (a sequence or one-dimensional array).

    Raises InvalidInputError unless the ids are unsigned 32-bit integers.
    """
    return extend_keys(identity, Keys(), tokens)


def extend_keys(identity: PrefixIdentity, keys: Keys, tokens: TokenIds) -> Keys:
    """Return `keys` and, behind them, the keys of the whole pages among `tokens`, the token ids that follow; see `page_keys`."""
    size = 4 * identity.tokens_per_page
    data = memoryview(_encoded(tokens))
    key = keys[-1] if keys else identity.root
    found = [keys.data]
    for start in range(0, len(data) - size + 1, size):
        state = hashlib.blake2b(key, digest_size=KEY_BYTES, usedforsecurity=False)
        state.update(data[start : start + size])
        key = state.digest()
        found.append(key)
    rest = data[len(data) - len(data) % size :]
    return Keys(b"".join(found), _hash(key + bytes(rest)) if rest else b"")


def _encoded(tokens: TokenIds) -> bytes:
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (len(ids) and not np.issubdtype(ids.dtype, np.integer)):
        raise InvalidInputError(f"token ids are a one-dimensional list of integers, got {ids.dtype}, shape {ids.shape}")
    if len(ids) and (ids.min() < 0 or ids.max() >= 2**32):
        wrong = ids[(ids < 0) | (ids >= 2**32)][0]
        raise InvalidInputError(f"a token id is an unsigned 32-bit integer, got {wrong}")
    return ids.astype("<u4", copy=False).tobytes()


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES, usedforsecurity=False).digest()
