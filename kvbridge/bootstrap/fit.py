"""The pair of instances that suits a request best.

An instance is *free* by the share of its scarcest pool that would be left after the request; below zero the instance looks full.
Cached pages that nobody reads count as left. An instance that is likely to hold the beginning of the prompt gets half of the share
that it holds on top: holding all of the prompt is worth half a free pool, and never a pool that looks full. The best pair has the
largest sum of both; equal pairs go by fewer rooms, then by name. Each sum has one term for each side, so the best pair is the best
prefill instance with the best decode instance, and nobody has to look at all pairs.

Bootstrap guesses who holds a prompt from its own notes: no node tells of single pages. Each heartbeat says for how long the node
keeps what it was given, and bootstrap believes younger notes. Rooms fail, engines die, and rooms that were admitted without
bootstrap are not noted; so a guess only orders instances, and a wrong one costs what a request without a guess does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from kvbridge.api.directory import NodeRegistration, PairRequest, Ticket
from kvbridge.bootstrap.nodes import Instance, NodeRecord, Way, mismatch
from kvbridge.core.errors import BridgeError, InvalidInputError, NotReadyError
from kvbridge.core.geometry.pages import pages_needed
from kvbridge.core.ids import Role
from kvbridge.telemetry.facts import PrefixGuessed
from kvbridge.tier.keys import Keys

Pages = dict[str, int]
"""Pages by index space."""
Notes = Mapping[str, float]
"""For one beginning of a prompt: the instances that were given such prompts, and how many seconds ago."""

HELD_WEIGHT = 0.5
"""The worth of holding a whole prompt, in shares of a free pool."""
HOLDERS: Final = 16
"""The most instances that are looked at because they may hold the beginning of a prompt."""
SHOWN = 8
"""The most instances that a refusal names."""


class Option(NamedTuple):
    """One instance for one request. The smaller option is better: fields stand in the order of preference, and names differ."""

    looks_full: bool
    """The instance has no room for the request, by what the directory knows."""
    cost: float
    """The share that would be free, and the worth of what the instance is likely to hold, negated."""
    rooms: int
    name: str
    instance: Instance
    needed: Pages
    """Pages that the request needs on each node of the instance."""


class Pair(NamedTuple):
    """Two instances that could serve one request."""

    prefill: Option
    decode: Option

    @property
    def looks_full(self) -> bool:
        """One of the two looks full."""
        return self.prefill.looks_full or self.decode.looks_full

    def order(self) -> tuple[bool, float, int, str, str]:
        """Return what pairs are ordered by, the best first."""
        one, other = self
        return self.looks_full, one.cost + other.cost, one.rooms + other.rooms, one.name, other.name


class Ranking:
    """The instances that were looked at for one request, and the pairs among them that could serve it."""

    def __init__(
        self, instances: Iterable[Instance], request: PairRequest, guessed: Mapping[str, int], page_count: int
    ) -> None:
        """Rate each instance. `guessed`: how many of the prompt's `page_count` pages an instance is likely to hold, by name.

        Raises NotReadyError when a role has no ready instance, FingerprintMismatchError when no two ready instances
        hold the same model, InvalidInputError when the request is larger than every pool.
        """
        self._instances, self._guessed = tuple(instances), guessed
        prefill, decode = (_ready(self._instances, role, request) for role in (Role.PREFILL, Role.DECODE))
        known: dict[tuple[str, ...], Pages] = {}
        ways: dict[Way, tuple[list[Option], list[Option]]] = {}
        for side, of_role in enumerate((prefill, decode)):
            for instance in of_role:
                held = guessed.get(instance.name, 0) / max(1, page_count)
                if option := _option(instance, request, known, held):
                    for way in instance.ways:
                        ways.setdefault(way, ([], []))[side].append(option)
        self._sides = [both for both in ways.values() if all(both)]
        """Prefill and decode options, for each way to be a pair."""
        if not self._sides:
            raise _no_pair(prefill, decode, request)

    @property
    def looks_full(self) -> bool:
        """Every pair looks full."""
        return all(Pair(min(senders), min(receivers)).looks_full for senders, receivers in self._sides)

    def best(self, *, without: Collection[str] = ()) -> Pair | None:
        """Return the best pair of instances that are not named in `without`; None when none is left."""
        left = ([[one for one in side if one.name not in without] for side in both] for both in self._sides)
        pairs = (Pair(min(senders), min(receivers)) for senders, receivers in left if senders and receivers)
        return min(pairs, key=Pair.order, default=None)

    def judged(self, ticket: Ticket) -> Iterator[PrefixGuessed]:
        """Return how the guesses turned out, by what both ends say."""
        held = {Role.PREFILL: ticket.computed_tokens, Role.DECODE: ticket.prefix_tokens}
        for (role, held_tokens), end in zip(held.items(), (ticket.prefill, ticket.decode), strict=True):
            of_role = (instance.name for instance in self._instances if instance.first.role is role)
            yield PrefixGuessed(role=role.value, guess=judge(end.instance, held_tokens, self._guessed, of_role).value)


def _option(one: Instance, request: PairRequest, known: dict[tuple[str, ...], Pages], held: float) -> Option | None:
    """Return None when the pools could never hold the request. `known`: the demands of nodes by kind, so far."""
    needed: Pages = {}
    share = 1.0
    for record in one.nodes:
        entry = record.entry
        if (found := known.get(entry.kind)) is None:
            found = known[entry.kind] = demand(entry.registration, request)
        needed = found
        share = min(share, _share_left(record, needed))
        if share < 0 and any(0 < record.beat.load.total_pages.get(space, 0) < count for space, count in needed.items()):
            return None
    return Option(share < 0, -share - HELD_WEIGHT * held, one.rooms, one.name, one, needed)


def demand(registration: NodeRegistration, request: PairRequest) -> Pages:
    """Return the pages that the request needs on a node."""
    pages = pages_needed(
        registration.geometry,
        tokens=request.prompt_tokens + (request.max_new_tokens if registration.role is Role.DECODE else 0),
        prompt_tokens=request.prompt_tokens,
        host=frozenset(registration.host),
    )
    return {space.value: count for space, count in pages.items()}


def _share_left(record: NodeRecord, needed: Pages) -> float:
    """Return the share of the scarcest pool that would be left. Pools that the node does not report set no limit."""
    totals = record.beat.load.total_pages
    limited = ((space, count) for space, count in needed.items() if totals.get(space))
    return min(((record.free_pages(space) - count) / totals[space] for space, count in limited), default=1.0)


def _ready(instances: tuple[Instance, ...], role: Role, request: PairRequest) -> list[Instance]:
    of_role = [instance for instance in instances if instance.first.role is role]
    if request.fingerprint:
        of_role = [instance for instance in of_role if instance.first.fingerprint == request.fingerprint]
    ready = [instance for instance in of_role if instance.ready]
    if ready:
        return ready
    model = f" with fingerprint {request.fingerprint}" if request.fingerprint else ""
    reasons = "; ".join(f"'{instance.name}': {', '.join(instance.reasons())}" for instance in of_role[:SHOWN])
    if len(of_role) > SHOWN:
        reasons += f"; and {len(of_role) - SHOWN} more"
    raise NotReadyError(f"no {role} instance{model} is ready: {reasons or 'none is registered'}")


def _no_pair(prefill: list[Instance], decode: list[Instance], request: PairRequest) -> BridgeError:
    """Return why no two of the ready instances are a pair for a request."""
    ways = [{way for instance in side for way in instance.ways} for side in (prefill, decode)]
    if common := set.intersection(*ways):
        names = [f"'{one.name}'" for one in (*prefill, *decode) if not common.isdisjoint(one.ways)]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return InvalidInputError(
            f"a request of {request.prompt_tokens} prompt and {request.max_new_tokens} new tokens is larger than "
            f"the pools of every pair of instances ({', '.join(names[:SHOWN])}{more}): enlarge pools.* or shorten the request"
        )
    errors = [mismatch(instance, decode) for instance in prefill[:SHOWN]]
    # An instance that only cannot meet is nearer to a pair than one that holds another model.
    return next((error for error in errors if isinstance(error, NotReadyError)), errors[0])


class Guess(StrEnum):
    """How the guess who holds the beginning of a prompt turned out, for one side of a pair."""

    NONE = "none"
    """No instance was thought to hold any of the prompt."""
    PASSED_OVER = "passed_over"
    """The request went elsewhere: to a much emptier instance, or because the holder could not take the room."""
    RIGHT = "right"
    """The request went to an instance that was thought to hold some of the prompt, and does."""
    STALE = "stale"
    """The request went to an instance that was thought to hold some of the prompt, and does not (any more)."""


def noted_pages(page_count: int) -> list[int]:
    """Return the lengths of beginnings that a prompt is noted by: 1, 2, 3, 4, 6, 8, 12, ... pages, two for each doubling.

    A later prompt may share any number of pages with this one; bootstrap sees at least two thirds of them.
    """
    found, pages = [1], 2
    while pages <= page_count:
        found += [pages, pages * 3 // 2]
        pages *= 2
    return [count for count in found if count <= page_count]


def noted_keys(keys: Keys, namespace: str) -> list[bytes]:
    """Return the keys under which a prompt of a namespace is noted, the shortest beginning first.

    Anybody can compute page keys, and nobody has proved yet that the prompt is of that namespace. Each key is therefore noted under
    the name that it has in the namespace as a first key, to which no key of another namespace leads.
    """
    return [keys[pages - 1 : pages].in_namespace(namespace).data for pages in noted_pages(len(keys))]


def holders(notes: Sequence[Notes]) -> list[str]:
    """Return the instances that were given the longest beginnings of a prompt, the latest of equal ones first; at most HOLDERS."""
    found: dict[str, None] = {}
    for ages_s in reversed(notes):
        found |= dict.fromkeys(sorted(ages_s, key=ages_s.__getitem__))
        if len(found) >= HOLDERS:
            break
    return list(found)[:HOLDERS]


def guess_held_pages(instances: Iterable[Instance], notes: Sequence[Notes], page_count: int) -> dict[str, int]:
    """Return how many pages of a prompt each instance is likely to hold, by its name; those that hold none are left out.

    `notes`: of each of `noted_pages(page_count)`.
    """
    found: dict[str, int] = {}
    for instance in instances:
        if not instance.keeps_prefixes:
            continue
        # A heartbeat's word is some seconds old, and the notes have aged by as much.
        believed_s = min((record.beat.load.prefixes_kept_s or 0.0) + record.silent_s for record in instance.nodes)
        for pages, ages_s in zip(noted_pages(page_count), notes, strict=True):
            if ages_s.get(instance.name, believed_s) < believed_s:
                found[instance.name] = pages
    return found


def judge(chosen: str, held_tokens: int, guessed: Mapping[str, int], of_role: Iterable[str]) -> Guess:
    """Return how a guess turned out. `held_tokens`: what the `chosen` instance says. `of_role`: those that could be chosen."""
    if chosen in guessed:
        return Guess.RIGHT if held_tokens else Guess.STALE
    return Guess.PASSED_OVER if any(name in guessed for name in of_role) else Guess.NONE
