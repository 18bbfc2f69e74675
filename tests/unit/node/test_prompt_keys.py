"""Page keys of rooms and of the engines that work on them: nothing is kept under a key that no writer has stated."""

import pytest

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.config.limits import AdmissionConfig
from kvbridge.core.errors import ConflictError, InvalidInputError, KeyMismatchError, NamespaceError, RoomFailedError
from kvbridge.core.prefixes import Namespaces
from kvbridge.core.session.tables import RoomState
from kvbridge.core.wire.messages import Failed
from kvbridge.node.admission import AdmissionController
from kvbridge.pool.accounts.book import Owner
from kvbridge.tier.keys import NO_KEYS, Keys
from tests.helpers.node_bench import HISTORY, DecodeBench, PrefillBench, keys_of
from tests.helpers.room_simulation import World
from tests.helpers.rooms import PAGE, R0, R1, full_amounts
from tests.helpers.simulated_memory import keys_of as label_keys

PROMPT = 3 * PAGE + 5
"""Three whole pages."""
KEYS = keys_of(PROMPT).data
KEYED = {"page_hashes": KEYS, "namespace": "acme"}


def other_from(page: int) -> bytes:
    """The keys of the prompt when one token of a page is another one."""
    tokens = HISTORY[:PROMPT]
    tokens[page * PAGE + 7] += 1
    return keys_of(tokens).data


def prefill(**fields) -> PrefillBench:
    bench = PrefillBench(**fields)
    bench.admit(1, PROMPT, **KEYED)
    return bench


def begin(bench: PrefillBench, page_hashes: bytes = b"", ranks=(R0,), engine: str = "engine", **fields):
    return bench.verbs.begin(engine, ranks, prompt_tokens=PROMPT, page_hashes=page_hashes, **fields)


def committed(*engines: str) -> DecodeBench:
    bench = DecodeBench()
    bench.engines.names = {*engines} or {"engine"}
    bench.nodes.know()
    bench.admit(1, PROMPT, max_new_tokens=2 * PAGE - 5, **KEYED)
    bench.done(amounts=full_amounts(PROMPT))
    return bench


@pytest.mark.parametrize("shares_prefixes", [True, False])
def test_another_number_of_keys_than_the_prompt_has_whole_pages_is_refused(shares_prefixes):
    bench = PrefillBench(shares_prefixes=shares_prefixes)
    for count in (1, 4):
        text = rf"page_hashes has {16 * count} bytes; {PROMPT} tokens are 3 whole pages of {PAGE}, .* 48 bytes"
        with pytest.raises(InvalidInputError, match=text):
            bench.admit(1, PROMPT, page_hashes=bytes(16 * count))
    assert (len(bench.service.book), bench.free) == (0, 16)


@pytest.mark.parametrize("wait_s", [0.0, 1.0])
async def test_a_namespace_that_may_not_be_named_is_a_counted_refusal(wait_s):
    bench = PrefillBench()
    admission = AdmissionController(
        bench.service, bench.book, limits=AdmissionConfig(), events=bench.events, clock=bench.clock
    )
    asked = {"room": 1, "prompt_tokens": PROMPT} | KEYED
    with pytest.raises(NamespaceError, match="'acme': it may name the default one"):
        await admission.admit(AdmissionRequest(**asked, wait_s=wait_s), Namespaces())
    assert bench.events.refusals == {"namespace_forbidden": 1}
    assert bench.free == 16
    assert (await admission.admit(AdmissionRequest(**asked), Namespaces(frozenset({"acme"})))).room == 1


def test_an_engine_that_states_none_is_told_what_to_do_and_the_room_goes_on():
    bench, decode = prefill(), committed()
    with pytest.raises(InvalidInputError, match=r"admitted with page keys.*give page_keys=engine\.page_keys"):
        begin(bench)
    with pytest.raises(InvalidInputError, match="page_hashes has 16 bytes"):
        begin(bench, KEYS[:16])
    assert bench.report().state is RoomState.ADMITTED
    assert begin(bench, KEYS).tables
    with pytest.raises(InvalidInputError, match="admitted with page keys"):
        decode.verbs.claim()
    assert decode.verbs.claim("engine", 1, KEYS).users == {"engine"}


@pytest.mark.parametrize("page", [0, 1, 2])
def test_other_tokens_fail_the_room_and_the_first_other_page_is_named(page):
    bench = prefill()
    with pytest.raises(
        KeyMismatchError, match=rf"prefill engine's tokens .*page {page} \(tokens {page * PAGE} to "
    ) as error:
        begin(bench, other_from(page))
    assert (bench.report().state, bench.report().reason_code) == (RoomState.FAILED, "key_mismatch")
    assert bench.report().reason in str(error.value)
    assert ("namespace" in str(error.value)) is (page == 0)
    secrets = (str(HISTORY[page * PAGE]), KEYS[:16].hex(), other_from(page)[:16].hex())
    assert not any(secret in str(error.value) for secret in secrets)
    assert bench.free == 16


def test_engines_of_a_node_that_end_the_prompt_differently_fail_the_room():
    """No key names the tokens behind the last whole page, so they are compared with each other."""
    bench = prefill(ranks=(R0, R1))
    begin(bench, KEYS, end_key=b"a" * 16)
    with pytest.raises(KeyMismatchError, match=rf"\(tokens {3 * PAGE} to {PROMPT - 1}\)"):
        begin(bench, KEYS, (R1,), "other", end_key=b"b" * 16)
    assert bench.report().reason_code == "key_mismatch"


def test_a_claim_with_other_tokens_fails_the_room_on_both_sides():
    bench = committed()
    with pytest.raises(KeyMismatchError, match=r"decode engine's tokens .*page 2"):
        bench.verbs.claim("engine", 1, other_from(2))
    assert (bench.report().state, bench.free) == (RoomState.FAILED, 16)
    (told,) = bench.told(Failed)
    assert (told.code, told.message) == ("key_mismatch", bench.report().reason)
    with pytest.raises(RoomFailedError, match="page 2"):
        bench.verbs.claim("engine", 1, KEYS)


WHOLE = 5 * PAGE - 1
"""Tokens of the prompt and those fed after it: four whole pages, and one that lacks a row."""
ANSWER = keys_of(WHOLE).data


@pytest.fixture
def claimed(monkeypatch):
    """A room that engines have claimed, and a list of what stands as its answer when its pages are given back."""

    def claim(*engines: str):
        bench, found = committed(*engines), []
        for engine in bench.engines.names:
            bench.verbs.claim(engine, 1, KEYS)
        pages = type(bench.service.pages)
        give_back = pages.give_back

        def noted(self, room):
            found.append(room.answer)
            give_back(self, room)

        monkeypatch.setattr(pages, "give_back", noted)
        return bench, found

    return claim


SAID, LESS = {"valid_tokens": WHOLE, "page_hashes": ANSWER}, {"valid_tokens": PROMPT, "page_hashes": KEYS}


@pytest.mark.parametrize(
    ("one", "two", "refused", "kept"),
    [(SAID, SAID, False, True), (SAID, {}, False, False), (SAID, LESS, True, False), ({}, SAID, True, False)],
)
def test_all_engines_have_to_say_the_same(claimed, one, two, refused, kept):
    bench, found = claimed("a", "b")
    bench.verbs.release("a", **one)
    if refused:
        with pytest.raises(ConflictError, match=r"engine a has released it with .* have to say the same"):
            bench.verbs.release("b", **two)
    else:
        bench.verbs.release("b", **two)
    assert [answer is not None for answer in found] == [kept]
    assert (bench.report().state, bench.free) == (RoomState.COMPLETED, 16)


@pytest.mark.parametrize(
    ("valid_tokens", "page_hashes", "error"),
    [
        (PROMPT - 1, KEYS, InvalidInputError),
        (WHOLE, KEYS, InvalidInputError),
        (WHOLE, b"123", InvalidInputError),
        (6 * PAGE, ANSWER + bytes(32), InvalidInputError),
        (WHOLE, other_from(0) + ANSWER[48:], KeyMismatchError),
    ],
)
def test_a_wrong_answer_is_not_kept_and_the_pages_come_back(claimed, valid_tokens, page_hashes, error):
    bench, found = claimed()
    with pytest.raises(error):
        bench.verbs.release(valid_tokens=valid_tokens, page_hashes=page_hashes)
    assert found == [None]
    assert (bench.report().state, bench.free) == (RoomState.COMPLETED, 16)


ATTACKED = 3 * PAGE
ATTACK, VICTIM = Owner(1, 1), Owner(2, 1)
COMPUTED, WANTED = label_keys(ATTACK, ATTACKED), label_keys(VICTIM, ATTACKED)
"""Keys of the prompt that prefill's engine gets, and of the one whose pages are to be forged; the first page is the same."""


@pytest.fixture
def world():
    world = World(adopted=False, shares=True)
    yield world
    world.check()


def attack(world: World, *, on_prefill: Keys, on_decode: Keys) -> None:
    """A router admits a room under other keys on each side, and prefill's engine computes its prompt."""
    world.admit(ATTACK, ATTACKED, on_prefill=True, keys=on_prefill)
    world.admit(ATTACK, ATTACKED, on_prefill=False, keys=on_decode)
    world.settle()
    world.bring(ATTACK, ATTACKED, ("begun", "published", "finished"))
    world.settle()


def victim_gets(world: World) -> int:
    """How many tokens a decode node says that it holds of the victim's prompt. All that is read is right, or the world tells."""
    world.bring(VICTIM, ATTACKED)
    room = world.decode.book.get(VICTIM.room)
    assert room.shown is RoomState.CLAIMED
    return room.prefix_tokens


@pytest.mark.parametrize("last", ["the same last key", "another last key"])
def test_a_room_whose_keys_differ_in_the_middle_leaves_nothing_on_decode(world, last):
    """The router wants the victim's pages to hold what another prompt computed, and ends its list as prefill's ends."""
    forged = Keys.of([*WANTED[:2], COMPUTED[2]]) if last == "the same last key" else WANTED
    attack(world, on_prefill=COMPUTED, on_decode=forged)
    room = world.decode.book.get(ATTACK.room)
    assert (room.shown, room.reason_code) == (RoomState.FAILED, "key_mismatch")
    assert "the page_hashes of both admissions differ" in room.reason
    assert world.prefixes.known(WANTED.in_namespace("")) == 0
    assert victim_gets(world) == 0


@pytest.mark.parametrize("claimed", [False, True])
def test_a_room_whose_prompt_prefill_has_not_stated_leaves_nothing_on_decode(world, claimed):
    """Only decode has keys. Its engine has the victim's tokens and says so, which tells nothing of what prefill computed."""
    attack(world, on_prefill=NO_KEYS, on_decode=WANTED)
    assert world.decode.book.get(ATTACK.room).shown is RoomState.COMMITTED
    if claimed:
        for engine in sorted(world.engines.names):
            world.decode_verbs.claim(engine, ATTACK.room, WANTED.data)
        for engine in sorted(world.engines.names):
            world.decode_verbs.release(engine, ATTACK.room, valid_tokens=ATTACKED, page_hashes=WANTED.data)
    else:
        world.decode.stop(world.decode.book.get(ATTACK.room), "by its client")
    world.check()
    assert world.prefixes.known(WANTED.in_namespace("")) == 0
    assert victim_gets(world) == 0


def test_a_prompt_that_all_writers_have_stated_is_found(world):
    """Else the tests above show nothing."""
    attack(world, on_prefill=COMPUTED, on_decode=COMPUTED)
    assert world.prefixes.known(COMPUTED.in_namespace("")) == 3
    assert victim_gets(world) == PAGE
