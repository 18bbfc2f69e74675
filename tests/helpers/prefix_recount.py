"""Recounts prefixes: whether index, residences, page book and readers agree with each other."""

import numpy as np

from kvbridge.core.ids import Pages
from kvbridge.pool.accounts.book import PageState
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.prefix_cache import PrefixCache
from kvbridge.tier.records import _UNUSED, NO_RECORD, Records, join, merged
from kvbridge.tier.residence import Residence
from kvbridge.tier.retention import Retentions
from tests.helpers.accounts import cached_pages


def check_cache(cache: PrefixCache) -> None:
    index, copies = cache.index, cache.copies
    check_index(index)
    cached, known = cached_pages(cache._book), all_pages(index)
    for space in cached.keys() | known.keys():
        differing = np.setxor1d(cached.get(space, ()), known.get(space, ()))
        assert not len(differing), f"pages of {space} are cached or in the index, not both: {differing.tolist()[:8]}"
    readers = [*cache._readers.values()]
    if copies is not None:
        readers += [one.reader for one in (*copies.backups.values(), *copies._pinned)]
        copied = [backup.records for backup in copies.backups.values()]
        assert np.count_nonzero(copies._is_copied) == sum(map(len, copied)), "records that no backup copies"
        assert all(copies._is_copied[one].all() for one in copied), "copied records that are not noted"
        states = {cache._book.state(owner) for owner in copies.backups}
        assert states <= {PageState.LEASED, PageState.QUARANTINED}, f"host pages of backups are {states}"
    for residence in index.residences:
        pins, checkpoint_pins = residence._pins, {at: one.pins for at, one in residence._checkpoints.items()}
        expected, restoring = np.zeros_like(pins), dict.fromkeys(checkpoint_pins, 0)
        for reader in readers:
            stop = {id(index.device): reader.device, id(index.host): reader.host}.get(id(residence))
            expected[reader.path[:stop]] += 1  # a path has no record twice
            for where, record in reader.checkpoints:
                if where is residence:
                    restoring[record] = restoring.get(record, 0) + 1
        assert np.array_equal(pins, expected), f"pins are not those of the readers in {residence!r}"
        assert restoring == checkpoint_pins, f"pins of checkpoints are not those of the readers in {residence!r}"


def all_pages(index: PrefixIndex) -> Pages:
    """Return every page that is the index's, also those of checkpoints and of unreachable records."""
    ends = [{one.checkpoint_space: end.pages} for one in index.residences for end in one._checkpoints.values()]
    return merged([*(one.pages(one.all()) for one in index.residences), *ends])


def check_index(index: PrefixIndex) -> None:
    records, there = index.records, index.records.all()
    _check_records(records)
    _check_retentions(index.retentions)
    is_hidden = np.zeros(records.capacity, dtype=np.bool_)
    is_hidden[there] = records.is_hidden(there)
    for residence in index.residences:
        _check_residence(residence, is_hidden)
    everywhere = index.device.has(there) if index.host is None else index.device.has(there) | index.host.has(there)
    assert everywhere.all(), f"records are nowhere: {index!r}"
    assert index.home is None or index.home.has(there).all(), f"records are not in their home: {index!r}"


def _check_records(records: Records) -> None:
    there, unused = records.all(), np.sort(records._unused[: records._unused_count])
    seen = there[~records._is_hidden[there]]
    parents = records.parent[there]
    inner = parents != NO_RECORD
    assert np.array_equal(unused, np.flatnonzero(records.parent == _UNUSED)), "used and unused numbers"
    assert records._record_of == dict(zip(records.keys(seen).to_list(), seen.tolist(), strict=True)), "keys"
    assert (records.parent[parents[inner]] != _UNUSED).all(), "parents"
    assert (records._depth[there] == np.where(inner, records._depth[parents] + 1, 0)).all(), "depths"
    assert not (records._is_hidden[parents] & inner & ~records._is_hidden[there]).any(), "hidden records"


def _check_residence(residence: Residence, is_hidden: np.ndarray) -> None:
    """Hidden records are in a residence while somebody pins them."""
    there, checkpoints, pins = residence.all(), residence._checkpoints, residence._pins
    parents = residence._parent[there]
    inner = parents != NO_RECORD
    children = np.bincount(parents[inner], minlength=len(pins))
    assert len(there) == len(residence)
    assert (parents >= NO_RECORD).all()
    assert (residence._children[parents[inner]] > 0).all(), "a record without its parent"
    assert (residence._children[there] == children[there]).all(), "children"
    assert residence._leaf_count == np.count_nonzero(residence._children == 0), "leaves"
    leaves = residence.leaves()
    assert set(residence._candidates).issuperset(zip(residence._rank[leaves].tolist(), leaves.tolist(), strict=True))
    assert np.array_equal(residence._record_at[residence._pages[0, there]], there), "places"
    assert np.count_nonzero(residence._record_at != NO_RECORD) == len(there), "places"
    by_children = np.bincount(parents[inner], weights=pins[there[inner]], minlength=len(pins))
    assert (pins[there] >= np.maximum(by_children[there], is_hidden[there])).all(), "pins of records and their children"
    assert residence.pinned == np.count_nonzero(pins[there]) == np.count_nonzero(pins), "pinned records"
    assert all(len(np.unique(ids)) == len(ids) for ids in residence.pages(there).values()), "a page of two records"
    assert sorted(checkpoints) == np.flatnonzero(residence._has_checkpoint).tolist()
    assert residence._has_checkpoint[there].sum() == len(checkpoints), "checkpoints of records that are elsewhere"
    assert all(0 <= one.pins <= pins[record] for record, one in checkpoints.items()), "pins of checkpoints"
    ids = join([checkpoint.pages for checkpoint in checkpoints.values()])
    assert len(np.unique(ids)) == len(ids), "a page of two checkpoints"
    unpinned = sum(len(checkpoint.pages) for checkpoint in checkpoints.values() if not checkpoint.pins)
    assert residence._unpinned_checkpoint_pages == unpinned
    lost = residence._is_lost
    assert residence._lost_count == lost.sum() == np.count_nonzero(pins[lost]), "lost records"


def _check_retentions(retentions: Retentions) -> None:
    numbers, counts = np.unique(retentions._number[retentions._priority > 0], return_counts=True)
    found = {retentions._names[number]: count for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)}
    assert found == {name: count for name, count in retentions.by_namespace.items() if count}
    assert not (retentions._until_s[1:] > retentions._until_s[:-1]).any(), "a higher priority lasts longer"
    assert all(count <= retentions.limit for count in found.values()), "a namespace has more than its share"
    assert len(retentions) <= retentions.together, "all namespaces have more than they may"
