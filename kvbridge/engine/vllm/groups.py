"""The order of a prompt's blocks in its room, for one KV cache group and for several. Pure.

vLLM has one pool of blocks for all groups, and a block id has one owner at a time. A room's pages are therefore the blocks of all
groups that a prompt needs, in the order of the tokens at which the blocks end. Both sides compute this list from the number of
tokens and from the groups, which are in the fingerprint. Blocks that decode has already are a leading run of the list.

vLLM computes the last token of a prompt once more on decode, to have something to sample from. This token needs the window before
it, or the state before it, and prefill has neither any more when it has computed the whole prompt. Prefill therefore leaves the
last token out wherever there is a window or a state (`step_back`).
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from kvbridge.engine.kit.node import refuse

NULL_BLOCK = 0
"""vLLM's id for a block that is not there."""
LAST = math.inf
"""End of a block whose content changes with every token."""
DIGEST_BYTES = 8


class GroupKind(StrEnum):
    """The blocks that a group keeps of a request."""

    FULL = "full attention"
    WINDOW = "sliding window"
    CHUNK = "chunked local attention"
    STATE = "state"
    RING = "circular buffer"


_KINDS = {
    "SlidingWindowSpec": GroupKind.WINDOW,
    "ChunkedLocalAttentionSpec": GroupKind.CHUNK,
    "MambaSpec": GroupKind.STATE,
    "CircularBufferSpec": GroupKind.RING,
    "FullAttentionSpec": GroupKind.FULL,
}
"""vLLM's classes and their subclasses. A group of a subclass such as MLAAttentionSpec keeps the same blocks."""
_REFUSED = {
    "SinkFullAttentionSpec": "keeps tokens of the layer in front of those of the prompt",
    "HiddenStateCacheSpec": "keeps hidden states, which only this server needs",
}


@dataclass(frozen=True)
class CacheGroup:
    """Layers with one block table."""

    kind: GroupKind
    block_tokens: int
    reach: int = 0
    """Tokens of a window or of a chunk."""

    def blocks(self, tokens: int) -> range:
        """Return the numbers of the blocks that are needed to go on after so many tokens."""
        size, stop = self.block_tokens, -(-tokens // self.block_tokens)
        match self.kind:
            case GroupKind.FULL:
                return range(stop)
            case GroupKind.WINDOW:
                return range(max(0, tokens - self.reach + 1) // size, stop)
            case GroupKind.CHUNK:
                return range(tokens // self.reach * self.reach // size, stop)
            case GroupKind.STATE:
                return range(max(0, stop - 1), stop)
            case GroupKind.RING:
                return range(1)

    @property
    def holds_tokens(self) -> bool:
        """Whether a block holds certain tokens, and is final when they are computed."""
        return self.kind not in {GroupKind.STATE, GroupKind.RING}

    def __str__(self) -> str:
        reach = f" of {self.reach}" if self.reach else ""
        return f"{self.kind}{reach}, {self.block_tokens} tokens a block"


class RoomBlocks:
    """The blocks of one prompt in the order of its room's pages."""

    def __init__(self, groups: Sequence[CacheGroup], tokens: int) -> None:
        places = sorted(
            ((block + 1) * group.block_tokens if group.holds_tokens else LAST, number, block)
            for number, group in enumerate(groups)
            for block in group.blocks(tokens)
        )
        self._ends = [end for end, _, _ in places]
        self._places = [(number, block) for _, number, block in places]

    def __len__(self) -> int:
        return len(self._places)

    def within(self, tokens: int) -> int:
        """Return how many of the first blocks end within the first `tokens` of the prompt."""
        return bisect_right(self._ends, tokens)

    def pick(self, groups: Sequence[Sequence[int]], start: int = 0, stop: int | None = None) -> tuple[int, ...]:
        """Return ids of these blocks, up to the first that is not there. `groups`: vLLM's list of each group, from block 0 on."""
        found: list[int] = []
        for number, block in self._places[start:stop]:
            has = groups[number]
            if block >= len(has) or has[block] == NULL_BLOCK:
                break
            found.append(has[block])
        return tuple(found)


@dataclass(frozen=True)
class CacheGroups:
    """All groups of an instance."""

    groups: tuple[CacheGroup, ...]
    facts: dict[str, str]
    """Facts of the groups for the fingerprint; none for a single group of full attention."""
    blocks: int = 0
    """Blocks of the pool."""

    @cached_property
    def is_plain(self) -> bool:
        """Whether the blocks of a prompt are those of its tokens, one after another."""
        return [group.kind for group in self.groups] == [GroupKind.FULL]

    @cached_property
    def has_states(self) -> bool:
        return any(group.kind is GroupKind.STATE for group in self.groups)

    @cached_property
    def step_back(self) -> int:
        """Tokens at the end of a prompt that prefill leaves to decode."""
        return int(any(group.kind is not GroupKind.FULL for group in self.groups))

    @cached_property
    def block_tokens(self) -> int:
        """Tokens of a block of attention, or of the blocks of all groups together: cached prompts are as many times this."""
        return math.lcm(*(group.block_tokens for group in self.groups if group.holds_tokens))

    @cached_property
    def page_tokens(self) -> int:
        """Tokens of a page as the node counts them. With several groups a page is of no certain number, and counts as one."""
        return self.block_tokens if self.is_plain else 1

    def of(self, tokens: int) -> RoomBlocks:
        return RoomBlocks(self.groups, tokens)

    def tokens(self, prompt_tokens: int) -> int:
        """Return the tokens of a prompt whose KV cache is moved."""
        return max(0, prompt_tokens - self.step_back)


def read_groups(config: Any) -> CacheGroups:
    """Read a KVCacheConfig. Raises UnsupportedError for groups that cannot be transferred."""
    if not config.kv_cache_groups:
        refuse("the model has none")
    groups = tuple(_read(group) for group in config.kv_cache_groups)
    plain = CacheGroups(groups, {}, config.num_blocks)
    if plain.is_plain:
        return plain
    facts = {
        f"kv_group_{number}": f"{group}, {_layers(said)}"
        for number, (group, said) in enumerate(zip(groups, config.kv_cache_groups, strict=True))
    }
    facts |= {"kv_layout": str(config.kv_cache_layout), "kv_step_back": f"{plain.step_back} token"}
    return CacheGroups(groups, facts, config.num_blocks)


def _read(group: Any) -> CacheGroup:
    if group.host_resident or not group.enable_kv_transfer:
        refuse(
            "a KV cache group is in host memory, or made again by each server (HiSparse): leave --hisparse-config out"
        )
    specs = _specs(group)
    found = {_read_spec(spec) for spec in specs}
    if len(found) != 1:
        refuse(f"layers of one KV cache group keep different blocks: {', '.join(sorted(map(str, found)))}")
    return found.pop()


def _specs(group: Any) -> Sequence[Any]:
    """Return the specs of its layers, of which vLLM's scheduler has only one."""
    spec = group.kv_cache_spec
    return tuple(getattr(spec, "kv_cache_specs", {"": spec}).values())


def _read_spec(spec: Any) -> CacheGroup:
    names = [each.__name__ for each in type(spec).__mro__]
    for name, reason in _REFUSED.items():
        if name in names:
            refuse(f"a KV cache group ({name}) {reason}")
    kind = next((_KINDS[name] for name in names if name in _KINDS), None)
    if kind is None:
        refuse(f"nothing is known about KV cache groups of the kind {names[0]}")
    reach = 0
    if kind is GroupKind.WINDOW:
        reach = spec.sliding_window + spec.extra_retained_tokens
    elif kind is GroupKind.CHUNK:
        reach = spec.attention_chunk_size
    return CacheGroup(kind, spec.block_size, reach)


def _layers(group: Any) -> str:
    """Return the form of a group's layers, as one fact: the names in their order, and the form of their states."""
    names = "\n".join(group.layer_names).encode()
    digest = hashlib.blake2b(names, digest_size=DIGEST_BYTES).hexdigest()
    spec = _specs(group)[0]
    told = f"{len(group.layer_names)} layers {digest}"
    if hasattr(spec, "shapes"):
        told += f", {' '.join(map(_form, spec.shapes, spec.dtypes))}"
    return told


def _form(shape: Iterable[int], dtype: Any) -> str:
    return f"{'x'.join(map(str, shape))}:{str(dtype).removeprefix('torch.')}"
