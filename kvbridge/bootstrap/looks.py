"""Candidate sampling: among which instances a pair is chosen, a few, however large the fleet is.

A few instances of each role are drawn at random, and the best pair of those is as good as the best of all, or better: what is known
is as old as a heartbeat, so that whoever takes the best of all sends everybody to the same ones, and a fleet that is filled quite
evenly has place for a very long prompt nowhere (`docs/performance.md` has the figures). Whoever is thought to hold the beginning of
the prompt comes too. When no pair of those has place, more are drawn, together with the instances that had the most free pages when
all were looked at last. Only before it is said that no two instances are a pair at all, every instance is looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvbridge.api.directory import PairRequest, Ticket
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.fit import Ranking
from kvbridge.bootstrap.nodes import Instance
from kvbridge.bootstrap.prefixes import guess_held_pages, holders, judge, keeps_prefixes, noted_keys
from kvbridge.bootstrap.stores.base import RoomStore
from kvbridge.core.errors import FingerprintMismatchError, InvalidInputError, NotReadyError
from kvbridge.core.ids import Role
from kvbridge.telemetry.facts import PrefixGuessed
from kvbridge.tier.keys import Keys

DRAWN: Final = (5, 64)
"""Instances of each role that are drawn for a request: at first, and with the freest ones when no pair of those has place."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was looked at for one request."""

    instances: tuple[Instance, ...]
    guessed: dict[str, int]
    """How many pages of the prompt they are likely to hold, by name."""
    ranking: Ranking

    def judged(self, ticket: Ticket) -> Iterator[PrefixGuessed]:
        """Return what became of the guesses, by the word of both ends."""
        ends = (
            (Role.PREFILL, ticket.prefill, ticket.computed_tokens),
            (Role.DECODE, ticket.decode, ticket.prefix_tokens),
        )
        for role, end, held_tokens in ends:
            of_role = (instance.name for instance in self.instances if instance.role is role)
            yield PrefixGuessed(role=role.value, guess=judge(end.instance, held_tokens, self.guessed, of_role).value)


class Looks:
    """Looks at instances for requests."""

    def __init__(self, directory: Directory, rooms: RoomStore) -> None:
        self._directory = directory
        self._rooms = rooms
        self._whole = asyncio.Lock()
        """Held while all instances are looked at: of a large fleet that takes so long that heartbeats have to come in between."""

    async def look(self, request: PairRequest, keys: Keys) -> Look:
        """Return instances of which two are a pair for the request. Raises as `Ranking` when no two of all are."""
        found: Look | None = None
        for count, names in zip(DRAWN, ((), self._directory.freest(request.fingerprint)), strict=True):
            drawn = await self._directory.draw(count, request.fingerprint, names)
            instances, guessed = await self._guess(request, keys, drawn)
            with contextlib.suppress(NotReadyError, FingerprintMismatchError, InvalidInputError):
                found = _ranked(request, keys, instances, guessed)
                if not found.ranking.looks_full:
                    break
        if found is not None:
            return found
        async with self._whole:
            return _ranked(request, keys, *await self._guess(request, keys, await self._directory.instances()))

    async def _guess(
        self, request: PairRequest, keys: Keys, instances: tuple[Instance, ...]
    ) -> tuple[tuple[Instance, ...], dict[str, int]]:
        """Return `instances` and those that may hold the prompt, and how many pages of it each is likely to hold, by name."""
        if not (keys and any(map(keeps_prefixes, instances))):
            return instances, {}
        notes = await self._rooms.noted(noted_keys(keys, request.namespace))
        known = {instance.name for instance in instances}
        if others := [name for name in holders(notes) if name not in known]:
            instances = (*instances, *await self._directory.draw(0, names=others))
        return instances, guess_held_pages(instances, notes, len(keys))


def _ranked(request: PairRequest, keys: Keys, instances: tuple[Instance, ...], guessed: dict[str, int]) -> Look:
    shares = {name: pages / len(keys) for name, pages in guessed.items()}
    return Look(instances, guessed, Ranking(instances, request, shares))
