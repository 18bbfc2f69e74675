"""Instances that may hold the beginning of a prompt: bootstrap notes its pairings, and nodes say how long prefixes stay.

Nobody tells of single pages: a node of a million pages says in each heartbeat for how long it keeps what it was given, one number,
and bootstrap believes a younger note. The result is a guess: rooms fail, engines die, and rooms that were admitted without
bootstrap are not noted. So the guess only orders instances, and a wrong guess costs what a request without one does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final

from kvbridge.bootstrap.nodes import Instance
from kvbridge.tier.keys import Keys

HOLDERS: Final = 16
"""Instances that are looked at because they may hold the beginning of a prompt."""

Notes = Mapping[str, float]
"""Instances that were given a prompt that begins so, and how many seconds ago."""


class Guess(StrEnum):
    """How the guess where the beginning of a prompt is turned out, for one side of a pair."""

    NONE = "none"
    """Nobody was thought to hold any of it."""
    PASSED_OVER = "passed_over"
    """An instance was, but another one was so much emptier, or the first could not take the room."""
    RIGHT = "right"
    """It went to an instance that was thought to hold some of it, and does."""
    STALE = "stale"
    """It went to one that does not hold any (any more)."""


def noted_pages(page_count: int) -> list[int]:
    """Return after how many pages of a prompt it is noted: 1, 2, 3, 4, 6, 8, 12, ..., two for each doubling.

    A later prompt shares any number of pages with this one; of these at least two thirds are seen.
    """
    found, pages = [], 1
    while pages <= page_count:
        found.append(pages)
        if pages > 1 and pages * 3 // 2 <= page_count:
            found.append(pages * 3 // 2)
        pages *= 2
    return found


def noted_keys(keys: Keys, namespace: str) -> list[bytes]:
    """Return the keys under which a prompt of a namespace is noted, the shortest beginning first.

    Nobody has proved yet that the prompt is of that namespace, and anybody can compute keys. So each is noted under the name that
    it has there as a first key, to which no key of another namespace leads.
    """
    return [keys[pages - 1 : pages].in_namespace(namespace).data for pages in noted_pages(len(keys))]


def holders(notes: Sequence[Notes]) -> list[str]:
    """Return who was given the longest beginnings of a prompt, and of equal ones the latest: at most HOLDERS names, best first."""
    found: dict[str, None] = {}
    for ages_s in reversed(notes):
        found |= dict.fromkeys(sorted(ages_s, key=ages_s.__getitem__))
        if len(found) >= HOLDERS:
            break
    return list(found)[:HOLDERS]


def keeps_prefixes(instance: Instance) -> bool:
    """Whether all its nodes say that they keep prefixes."""
    return all(record.beat.load.prefixes_kept_s is not None for record in instance.nodes)


def guess_held_pages(instances: Iterable[Instance], notes: Sequence[Notes], page_count: int) -> dict[str, int]:
    """Return how many pages of a prompt each instance is likely to hold, by its name; those that hold none are left out.

    `notes`: of each of `noted_pages(page_count)`.
    """
    found: dict[str, int] = {}
    for instance in instances:
        if not keeps_prefixes(instance):
            continue
        # What was true at a heartbeat is some seconds older now, as the notes are.
        believed_s = min((record.beat.load.prefixes_kept_s or 0.0) + record.silent_s for record in instance.nodes)
        for pages, ages_s in zip(noted_pages(page_count), notes, strict=True):
            if ages_s.get(instance.name, believed_s) < believed_s:
                found[instance.name] = pages
    return found


def judge(chosen: str, held_tokens: int, guessed: Mapping[str, int], of_role: Iterable[str]) -> Guess:
    """Return how a guess turned out. `held_tokens` is the word of the `chosen` instance; `of_role` could have been chosen."""
    if chosen in guessed:
        return Guess.RIGHT if held_tokens else Guess.STALE
    return Guess.PASSED_OVER if any(name in guessed for name in of_role) else Guess.NONE
