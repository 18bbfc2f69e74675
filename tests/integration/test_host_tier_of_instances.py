"""A prefill instance of two nodes, a pipeline stage each, with host tiers and device pools too small for the conversations.

Real daemons: what the devices have lost comes back from the hosts of both nodes, byte for byte, states included, and the engines
start at the same token, also where the two hosts have not kept the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbridge.engine import DecodeRoom, PrefillRoom
from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.live_rooms import busy_pages, http, metric, status
from tests.integration.test_prefixes_of_instances import PAGE, TIER, Instance, running_instance

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.thorough]

POOL = {"full": 12, "swa": 16, "request": 4}
HOST = {"pages": 96}
CHECKPOINTS = 24


@pytest.fixture(scope="module")
def instance() -> Iterator[Instance]:
    """With a device pool that holds one long prompt or two short ones."""
    prefill, decode = {**HOST, "checkpoint_pages": CHECKPOINTS}, HOST
    with running_instance(TIER | {"host": prefill}, TIER | {"host": decode}, pages=POOL, host_pages=96) as made:
        yield made
        for daemon in made.cluster.all():
            assert "Traceback" not in daemon.log_path.read_text(), daemon.log(40)


@pytest.fixture(autouse=True)
def nothing_is_left(instance: Instance) -> Iterator[None]:
    """Each test begins with empty caches, and ends with every page free or cached."""
    for daemon in everybody(instance):
        assert http("DELETE", daemon, "/v1/prefixes").is_success
    yield
    eventually("all let go of", lambda: not any(map(busy_pages, everybody(instance))))
    assert not any(status(daemon)["quarantine"] for daemon in everybody(instance))


def everybody(instance: Instance) -> list[DaemonProcess]:
    return [*instance.nodes, instance.cluster.decode]


def on_host(instance: Instance) -> None:
    """Wait until all that the devices keep is on the hosts as well."""

    def settled(daemon: DaemonProcess) -> bool:
        tier = status(daemon)["host_tier"]
        return not (tier["device_pages"] or tier["waiting_prompts"] or tier["in_flight_pages"])

    for daemon in everybody(instance):
        eventually(f"{daemon.name} has backed up", lambda daemon=daemon: settled(daemon))


def turn(instance: Instance, conversation: int, length: int) -> tuple[list[PrefillRoom], DecodeRoom]:
    """A turn of a conversation over all nodes, until it is on all hosts."""
    instance.history = [conversation * 100_000 + place for place in range(length)]
    _, begun, claimed = instance.crossed(length)
    on_host(instance)
    return begun, claimed


def leave(instance: Instance, number: int, conversation: int, length: int) -> None:
    """Have one node alone know a prompt."""
    instance.history = [conversation * 100_000 + place for place in range(length)]
    instance.leave(number, length)
    on_host(instance)


def loads(instance: Instance) -> list[float]:
    """How many load-backs each node has counted."""
    labels = {"direction": "load_back", "outcome": "done"}
    return [metric(daemon, "kvbridge_host_tier_copies_total", **labels) for daemon in everybody(instance)]


def test_turns_come_back_from_the_hosts_of_both_nodes(instance: Instance) -> None:
    turn(instance, 1, 5 * PAGE + 40)
    turn(instance, 2, 12 * PAGE)  # every page of every device
    for daemon in instance.nodes:
        assert status(daemon)["host_tier"]["host_pages"] >= 5
    before = loads(instance)
    begun, claimed = turn(instance, 1, 7 * PAGE + 9)
    assert [room.computed_tokens for room in begun] == [5 * PAGE, 5 * PAGE]
    assert [room.host_tokens for room in begun] == [5 * PAGE, 5 * PAGE]
    assert (claimed.prefix_tokens, claimed.host_tokens) == (5 * PAGE, 5 * PAGE)
    assert [after - one for one, after in zip(before, loads(instance), strict=True)] == [1, 1, 1]
    begun, _ = turn(instance, 1, 8 * PAGE + 9)
    assert [(room.computed_tokens, room.host_tokens) for room in begun] == [(7 * PAGE, 0), (7 * PAGE, 0)]


def test_hosts_that_have_not_kept_the_same_start_at_the_same_token(instance: Instance) -> None:
    """One node goes on from less than its host has, out of the same twins; then one whose host has nothing."""
    for number, lengths in enumerate(((300, 600, 1500), (300, 1000))):
        for length in lengths:
            leave(instance, number, 3, length)
    turn(instance, 4, 12 * PAGE)
    instance.history = [3 * 100_000 + place for place in range(2000)]
    choices, begun, _ = instance.crossed(2000)
    assert choices == [(0, 256, 512, 1280), (0, 256, 768)]
    assert [(room.computed_tokens, room.host_tokens) for room in begun] == [(256, 256), (256, 256)]
    on_host(instance)
    assert http("DELETE", instance.nodes[1], "/v1/prefixes").is_success
    begun, _ = turn(instance, 3, 2100)
    assert [(room.computed_tokens, room.host_tokens) for room in begun] == [(0, 0), (0, 0)]


def test_conversations_in_turn_that_no_device_holds_together(instance: Instance) -> None:
    came_back, before = [0, 0], dict.fromkeys((10, 11, 12), 0)
    for step in range(1, 5):
        for conversation, had in before.items():
            length = step * 2 * PAGE + 30 * conversation
            begun, _ = turn(instance, conversation, length)
            assert [room.computed_tokens for room in begun] == [had, had]
            came_back = [tokens + room.host_tokens for tokens, room in zip(came_back, begun, strict=True)]
            before[conversation] = length // PAGE * PAGE
    assert min(came_back) >= 12 * PAGE
