"""Routers that name other prompts than engines compute: nothing is kept under a key that no writer has stated.

Two whole nodes in memory; what each page holds is followed, and the simulation looks at all that is cached after each step.
"""

import pytest

from kvbridge.core.session.tables import RoomState
from kvbridge.pool.accounts.book import Owner
from kvbridge.tier.keys import NO_KEYS, Keys
from tests.helpers.room_simulation import World
from tests.helpers.rooms import PAGE
from tests.helpers.simulated_memory import keys_of

TOKENS = 3 * PAGE
ATTACK, VICTIM = Owner(1, 1), Owner(2, 1)
COMPUTED, WANTED = keys_of(ATTACK, TOKENS), keys_of(VICTIM, TOKENS)
"""Keys of the prompt that prefill's engine gets, and of the one whose pages are to be forged; the first page is the same."""


@pytest.fixture
def world():
    world = World(adopted=False, shares=True)
    yield world
    world.check()


def attack(world: World, *, on_prefill: Keys, on_decode: Keys) -> None:
    """A router admits a room under other keys on each side, and prefill's engine computes its prompt."""
    world.admit(ATTACK, TOKENS, on_prefill=True, keys=on_prefill)
    world.admit(ATTACK, TOKENS, on_prefill=False, keys=on_decode)
    world.settle()
    world.bring(ATTACK, TOKENS, ("begun", "published", "finished"))
    world.settle()


def victim_gets(world: World) -> int:
    """How many tokens a decode node says that it holds of the victim's prompt. All that is read is right, or the world tells."""
    world.bring(VICTIM, TOKENS)
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
            world.decode_verbs.release(engine, ATTACK.room, valid_tokens=TOKENS, page_hashes=WANTED.data)
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
