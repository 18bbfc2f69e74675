"""What owners ask for the prefixes that they read: that these stay for a while.

Owns: which owner asks what, and whether it counts. Must not know: which pages go first, how a priority falls (`retention.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvbridge.core.clock import Clock
from kvbridge.core.errors import IntegrityError
from kvbridge.core.prefixes import Evicted
from kvbridge.pool.accounts.page_states import Owner
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.records import RecordArray
from kvbridge.tier.retention import Claim


class Claims:
    """The claims of the owners of one prefix cache. Each counts anew with every use, until its owner has let go."""

    def __init__(self, index: PrefixIndex, clock: Clock) -> None:
        self._index, self._clock = index, clock
        self._of: dict[Owner, Claim] = {}
        self._forgotten: Counter[Evicted] = Counter()
        self.refused = 0
        """Owners whose namespace, or all together, retained as many pages as they may: what they ask does not count any more."""

    def make(self, owner: Owner, path: RecordArray, claim: Claim) -> None:
        """An owner asks this for what it reads, now and later."""
        self._of[owner] = claim
        self.used(owner, path)

    def used(self, owner: Owner, path: RecordArray) -> None:
        """An owner uses a path; without effect when it has asked nothing."""
        claim = self._of.get(owner)
        if claim and not self._index.retain(path, self._clock(), claim):
            del self._of[owner]
            self.refused += 1

    def end(self, owner: Owner, path: RecordArray) -> None:
        """An owner uses a path for the last time."""
        self.used(owner, path)
        self._of.pop(owner, None)

    def forgotten(self, pages: int, why: Evicted) -> None:
        """So many pages of prompts were dropped."""
        self._forgotten[why] += pages

    def check_integrity(self, readers: Collection[Owner]) -> None:
        """Raise IntegrityError unless every owner with a claim is one of these."""
        if not self._of.keys() <= set(readers):
            raise IntegrityError(f"owners claim pages that they do not read: {self._of.keys() - set(readers)}")

    def gone(self) -> Counter[Evicted]:
        """How many pages of prompts are not cached any more, so far, by why."""
        return self._index.evicted + self._forgotten

    def retained(self) -> Counter[str]:
        """How many pages of prompts each namespace has retained now."""
        self._index.decay(self._clock())
        return self._index.retentions.by_namespace
