"""Prompts that meet on a decode node: what the second one is not sent, when its pages stay, and what becomes of them."""

import asyncio
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from kvbridge.api.rooms import AdmissionRequest, PeerAddress
from kvbridge.core.errors import ConflictError, KeyMismatchError
from kvbridge.core.geometry.pages import tables_from_wire
from kvbridge.core.ids import IndexSpace
from kvbridge.core.plan.operations import Amount
from kvbridge.core.session.tables import RoomState
from kvbridge.core.wire.messages import Failed, Offer
from kvbridge.node.decode.fence import ALL
from kvbridge.node.prefill.early_offers import check_offer
from kvbridge.pool.accounts.book import NO_ROOM, Owner, PageState
from kvbridge.telemetry.facts import DisputedPagesDropped, PromptNotKept
from kvbridge.tier.keys import NO_KEYS, Keys, Link
from tests.helpers.node_bench import FULL, HISTORY, DecodeBench, KeyedDecode, keys_of
from tests.helpers.prefix_recount import check_cache
from tests.helpers.rooms import ADDRESS, GEOMETRY, PAGE, PREFILL, R0, R1, full_amounts

OTHER, OTHER_PREFILL = PeerAddress(endpoint="tcp://10.0.0.2:7000"), "bbbbbbbbbbbbbbbb"


@pytest.fixture
def bench():
    bench = KeyedDecode()
    yield bench
    check_cache(bench.prefixes)


def with_another(keys: Keys, page: int) -> Keys:
    stated = keys.to_list()
    stated[page] = bytes(16)
    return Keys.of(stated)


def other_end(tokens: int) -> Keys:
    return keys_of([*HISTORY[: tokens - 1], 0])


@pytest.mark.parametrize("over", [0, 1, 4, 128])
def test_the_second_of_two_is_offered_for_what_lacks_only(bench, over):
    first = bench.whole(1, 3 * PAGE + over)
    second = bench.keyed(2, 4 * PAGE + over)
    assert (first.prefix_tokens, second.prefix_tokens) == (0, 3 * PAGE)
    offers = bench.told(Offer)
    assert [offer.prefix_tokens for offer in offers] == [0, 3 * PAGE]
    table = tables_from_wire(offers[1].tables)[FULL]
    assert (table.first_page, table.ids.tolist()) == (3, second.tables[FULL].ids[3:].tolist())
    check_offer(offers[1], GEOMETRY, prompt_tokens=second.prompt_tokens)
    leased = bench.book.pages(second.owner)[FULL]
    assert leased.tolist() == table.ids.tolist(), "no lease covers what others read"
    bench.arrives(second)
    assert second.amounts == full_amounts(second.prompt_tokens, 3 * PAGE)
    bench.claim(second)
    bench.verbs.release(room=2)
    assert (bench.cached, bench.free) == (4, 16)


def test_a_prompt_is_found_only_in_the_namespace_in_which_it_was_kept(bench):
    """Keys are public arithmetic: whoever knows a prompt of another namespace can send the keys that it has there."""
    bench.whole(1, 3 * PAGE)
    assert bench.keyed(2, 3 * PAGE, namespace="acme").prefix_tokens == 0
    assert bench.keyed(3, 3 * PAGE).prefix_tokens == 3 * PAGE


def test_a_store_is_asked_for_the_names_of_the_request_s_namespace():
    asked: list[Keys] = []

    async def prefetch(names: Keys) -> None:
        asked.append(names)

    service, keys = KeyedDecode(twins=8, store=SimpleNamespace(prefetch=prefetch)).service, keys_of(3 * PAGE)
    request = AdmissionRequest(prompt_tokens=3 * PAGE, page_hashes=keys.data, namespace="acme", prefill=(ADDRESS,))
    asyncio.run(service.fetch(request))
    assert asked == [keys.in_namespace("acme")]


def test_made_up_keys_behind_a_page_of_ones_own_find_no_more_than_that(bench):
    """Behind a first page a caller can send keys that become names of another namespace: these are not behind that page."""
    bench.whole(1, 4 * PAGE)
    own = keys_of(10 * PAGE)[5:9]
    second = bench.keyed(2, 4 * PAGE, keys=own, namespace="acme")
    bench.arrives(second, own)
    bench.verbs.claim("engine", 2, own.data)
    bench.verbs.release(room=2)
    theirs, ours = keys_of(4 * PAGE).in_namespace(""), own.in_namespace("acme")
    mask = np.frombuffer(ours.data, np.uint8) ^ np.frombuffer(own.data, np.uint8)
    forged = Keys(own[0] + (np.frombuffer(theirs.data, np.uint8) ^ mask).tobytes()[16:])
    assert forged.in_namespace("acme")[1:] == theirs[1:]
    assert bench.keyed(3, 4 * PAGE, keys=forged, namespace="acme").prefix_tokens == PAGE


def test_two_namespaces_keep_pages_of_the_same_keys_beside_each_other(bench):
    """An engine computes keys under the namespace that it was told, which nobody compares with that of the room."""
    bench.whole(1, 3 * PAGE)
    bench.whole(2, 4 * PAGE, namespace="acme")
    assert bench.cached == 3 + 4
    assert bench.keyed(3, 4 * PAGE, namespace="acme").prefix_tokens == 4 * PAGE
    assert bench.keyed(4, 4 * PAGE).prefix_tokens == 3 * PAGE, "the fourth page was never there"


def test_of_a_writer_that_does_not_say_what_it_computed_nothing_ever_stays(bench):
    """Neither at the commit, nor when the engine here states its keys, nor with its answer; and the log says why."""
    first = bench.keyed(1, 3 * PAGE)
    bench.arrives(first, NO_KEYS)
    assert (first.shown, bench.cached) == (RoomState.COMMITTED, 0)
    bench.claim(first)
    assert bench.cached == 0
    bench.answers(1, 5 * PAGE)
    assert (first.shown, bench.cached) == (RoomState.COMPLETED, 0)
    [told] = bench.events.of(PromptNotKept)
    assert "rank pp0.tp0 of prefill node prefill/" in told.reason
    assert "has not stated the page keys" in told.reason


@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_writer_with_another_prompt_fails_the_room_and_nothing_of_it_stays(bench, page):
    """Wherever it differs: all keys are compared, not the last one."""
    first = bench.keyed(1, 3 * PAGE)
    bench.arrives(first, with_another(keys_of(3 * PAGE), page))
    assert (first.shown, first.reason_code, bench.cached) == (RoomState.FAILED, "key_mismatch", 0)
    assert "another prompt" in first.reason
    assert bench.free == 16


def test_writers_whose_prompts_end_differently_fail_the_room(bench):
    bench.nodes.know(ranks=(R0, R1), tp_size=2)
    tokens = PAGE + 5
    room = bench.keyed(1, tokens)
    for rank, keys in ((R0, keys_of(tokens)), (R1, other_end(tokens))):
        owed = room.writers[PREFILL].shares[rank].rows(prompt_tokens=tokens, prefix_tokens=0)
        amounts = {kind: Amount(lane_rows=rows, bytes=1) for kind, rows in owed.items()}
        bench.done(rank=rank, amounts=amounts, keys_digest=keys.digest, end_key=keys.end)
    assert (room.shown, room.reason_code) == (RoomState.FAILED, "key_mismatch")
    assert "ends with other tokens" in room.reason


def test_a_prompt_that_ends_with_other_tokens_than_prefill_computed_fails_the_room(bench):
    room = bench.keyed(1, 2 * PAGE + 5)
    bench.arrives(room, other_end(2 * PAGE + 5))
    assert (room.shown, bench.cached) == (RoomState.COMMITTED, 2), "of its whole pages both say the same"
    with pytest.raises(
        KeyMismatchError, match=rf"decode engine's .* another engine .* \(tokens {2 * PAGE} to {2 * PAGE + 4}\)"
    ):
        bench.claim(room)
    assert (room.shown, room.reason_code, bench.cached) == (RoomState.FAILED, "key_mismatch", 2)
    assert bench.told(Failed)


def test_whole_pages_of_the_answer_stay_and_the_last_token_counts_only_when_it_was_fed(bench):
    for number, fed in enumerate((PAGE - 1, PAGE), 1):  # beside a prompt that ends with a page
        bench.claimed(number, 2 * PAGE)
        bench.answers(number, 2 * PAGE + fed)
        assert bench.cached == 2 + fed // PAGE
    assert bench.keyed(9, 5 * PAGE).prefix_tokens == 3 * PAGE


@pytest.mark.parametrize("silent", ["nobody", "prefill", "decode"])
def test_no_page_of_an_answer_stays_behind_a_prompt_whose_end_an_engine_has_not_stated(bench, silent):
    """Its first page has rows that prefill has computed, of tokens that no key of the prompt names."""
    room = bench.keyed(1, 2 * PAGE + 5)
    keys = keys_of(2 * PAGE + 5)
    bench.arrives(room, **({"end_key": b""} if silent == "prefill" else {}))
    bench.verbs.claim("engine", 1, keys.data, end_key=b"" if silent == "decode" else keys.end)
    bench.answers(1, 4 * PAGE)
    assert (room.shown, bench.cached) == (RoomState.COMPLETED, 4 if silent == "nobody" else 2)


def test_an_answer_stays_only_when_the_engines_of_all_ranks_have_written_it(bench):
    """The engine of another rank has never claimed the room, so its memory has no row of the answer."""
    bench.ranks.layers |= {R1: bench.ranks.layers[R0]}
    for number, others in ((1, False), (2, True)):
        bench.engines.names = {"engine", "other"}
        room = bench.claimed(number, 2 * PAGE)
        if others:
            bench.verbs.claim("other", number, keys_of(2 * PAGE).data)
            said = {"valid_tokens": 4 * PAGE, "page_hashes": keys_of(4 * PAGE).data}
            bench.verbs.release("other", number, ranks=(R1,), **said)
        else:
            bench.service.engine_gone("other", "a test")
        bench.answers(number, 4 * PAGE)
        assert (room.shown, bench.cached) == (RoomState.COMPLETED, 4 if others else 2)


@pytest.mark.parametrize("end", ["engine gone", "aborted by the engine", "aborted by a user"])
def test_an_engine_that_does_not_end_well_leaves_its_prompt_and_not_its_answer(bench, end):
    room = bench.claimed(1, 2 * PAGE + 5)
    match end:
        case "engine gone":
            bench.service.engine_gone("engine", "a test")
            bench.service.engine_ended("engine")
        case "aborted by the engine":
            bench.verbs.abort()
        case _:
            bench.stop()
            bench.answers(1, 4 * PAGE)
    assert room.over
    assert (bench.cached, bench.free) == (2, 16)
    assert bench.keyed(2, 4 * PAGE).prefix_tokens == 2 * PAGE


@pytest.mark.parametrize("claimed", [False, True])
@pytest.mark.parametrize("page", [0, 1, 2, 3])
def test_pages_of_a_room_whose_engine_has_another_prompt_go_and_those_of_others_stay(bench, page, claimed):
    """The first two pages were another room's, which has been claimed rightly; a third room goes on from what goes.

    `claimed`: an engine of another rank has claimed the room before.
    """
    bench.whole(1, 2 * PAGE)
    bench.arrived(2, 4 * PAGE)
    reader = bench.arrived(3, 5 * PAGE)
    assert (reader.prefix_tokens, bench.cached) == (4 * PAGE, 5)
    if claimed:
        bench.verbs.claim("first", 2, keys_of(4 * PAGE).data)
    with pytest.raises(KeyMismatchError, match=f"page {page} "):
        bench.verbs.claim("engine", 2, with_another(keys_of(4 * PAGE), page).data)
    left = max(page, 2)
    assert bench.prefixes.known(keys_of(5 * PAGE).in_namespace("")) == left
    [told] = bench.events.of(DisputedPagesDropped)
    assert (told.page, told.dropped, told.read) == (page, 5 - left, 5 - left)
    check_cache(bench.prefixes)
    if claimed:
        bench.verbs.release("first", 2)
    bench.claim(reader)
    bench.verbs.release(room=3)
    assert (bench.cached, bench.free) == (left, 16)
    assert bench.whole(4, 5 * PAGE).prefix_tokens == left * PAGE


class HostAndStore:
    """Notes what the tiers below are told: twins that hold nothing any more, and links to be forgotten."""

    def __init__(self) -> None:
        self.gone: list[int] = []
        self.links: list[Link] = []

    def added(self, keys, start, pages) -> None:
        pass

    def removed(self, pages) -> None:
        self.gone += pages[IndexSpace.FULL_COPY].tolist()

    def forget(self, links) -> None:
        self.links += links


@pytest.mark.parametrize("backup", ["done", "under way"])
def test_what_a_disputed_room_has_put_into_the_cache_goes_from_host_and_store_too(backup):
    """It has been backed up before the engine says that it has another prompt, or is just being copied."""
    below = HostAndStore()
    bench = KeyedDecode(twins=8, store=below)
    bench.prefixes.copies.watchers.append(below)
    bench.arrived(1, 4 * PAGE)
    names = keys_of(4 * PAGE).in_namespace("")
    copy = bench.prefixes.copies.start_backup(Owner(NO_ROOM, 1), names, at_most=8)
    twins = copy.moves[FULL][1].tolist()
    if backup == "done":
        bench.prefixes.copies.end_backup(copy, done=True)
    with pytest.raises(KeyMismatchError):
        bench.verbs.claim("engine", 1, with_another(keys_of(4 * PAGE), 1).data)
    if backup == "under way":
        bench.prefixes.copies.end_backup(copy, done=True)
    else:
        assert sorted(set(below.gone)) == sorted(twins[1:]), "so the journal says it, before anybody else gets them"
    assert (bench.prefixes.known(names), bench.prefixes.residency().both) == (1, 1)
    assert sorted(below.links) == sorted(pairwise(names))
    assert bench.book.available_pages() == {FULL: 16, IndexSpace.FULL_COPY: 8}
    check_cache(bench.prefixes)


def test_a_room_in_quarantine_reads_on_and_its_siblings_go_on(bench):
    bench.whole(1, 3 * PAGE)
    lost, sibling = bench.keyed(2, 4 * PAGE), bench.keyed(3, 4 * PAGE)
    bench.service.fail(lost, "peer_failed", "a test")
    bench.wait(60.0)
    assert bench.book.state(lost.owner) is PageState.QUARANTINED
    assert lost.owner in bench.prefixes
    bench.service.shut(dict.fromkeys([lost.owner], ALL))
    assert lost.owner not in bench.prefixes
    bench.arrives(sibling)
    bench.claim(sibling)
    assert (sibling.shown, bench.cached) == (RoomState.CLAIMED, 4)


def test_what_is_dropped_by_hand_is_told_and_a_node_that_keeps_nothing_says_so(bench):
    bench.whole(1, 4 * PAGE)
    reader = bench.keyed(2, 3 * PAGE)
    dropped = asyncio.run(bench.service.drop_prefixes())
    assert (dropped.dropped_pages, dropped.read_pages) == (4, 3)
    assert (bench.events.facts[-1].pages, bench.events.facts[-1].read) == (4, 3)
    assert bench.keyed(3, 4 * PAGE).prefix_tokens == 0
    bench.arrives(reader)
    assert reader.shown is RoomState.COMMITTED
    with pytest.raises(ConflictError, match=r"keeps no prefixes: tier\.enabled is false"):
        asyncio.run(DecodeBench(shares_prefixes=False).service.drop_prefixes())


def test_a_room_whose_pages_cannot_be_kept_goes_all_the_way(bench, monkeypatch):
    """A defect in what is only to save later requests time fails no room, and leaves no page with one that is over."""

    def fail(*_: object, **__: object) -> int:
        raise ConflictError("a defect")

    monkeypatch.setattr(bench.prefixes, "keep", fail)
    assert bench.whole(1, 3 * PAGE).over
    assert (bench.cached, bench.free) == (0, 16)
