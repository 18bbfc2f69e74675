"""Prefixes of a prefill instance of two nodes, a pipeline stage each: real daemons whose caches differ, and engines that agree.

Each node has a cache and a host tier of its own. Their engines start where both can: they ask what is there (`restorable`) and
begin with the largest that both have (`at_most`).
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from kvbridge.engine import DecodeEngine, PrefillEngine, PrefillRoom
from tests.helpers.cluster import DaemonProcess, cluster, daemon_config, eventually
from tests.helpers.conversation import MODEL, PAGE, begin, compute, named, read, tokens_of
from tests.helpers.host_tiers import drop, on_host
from tests.helpers.live_rooms import all_free, busy_pages, ends, http, status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

POOL = {"full": 12, "swa": 16, "request": 4}
"""For one long prompt or two short ones."""
HOST = {"pages": 96}


def stage(number: int) -> dict[str, Any]:
    parallelism = {"pp_size": 2, "ranks": [{"pp": number, "tp": 0}]}
    return {"tier": MODEL | {"host": HOST | {"checkpoint_pages": 24}}, "parallelism": parallelism}


@dataclass
class Instance:
    """Two prefill nodes with an engine each, and a decode node with its own."""

    nodes: list[DaemonProcess]
    engines: list[PrefillEngine]
    reader: DecodeEngine

    def leave(self, node: int, number: int, tokens: int) -> None:
        """Have one node alone know a prompt, which leaves a checkpoint at its last page's end."""
        keys = self.reader.page_keys(tokens_of(number, tokens))
        room = _admitted(self.nodes[node], {"prompt_tokens": tokens, **named(keys)})
        compute(self.engines[node], begin(self.engines[node], room, tokens, keys), keys)
        http("DELETE", self.nodes[node], f"/v1/requests/{room}")
        eventually("let go of", lambda: not busy_pages(self.nodes[node]))
        on_host(self.nodes[node])

    def cross(self, number: int, tokens: int) -> tuple[list[PrefillRoom], tuple[int, int], list[tuple[int, ...]]]:
        """A turn of a conversation over all nodes, until it is on all hosts.

        Returns what prefill's engines were told, tokens that decode held and had from its host, and where each node could start.
        """
        keys = self.reader.page_keys(tokens_of(number, tokens))
        body: dict[str, Any] = {"prompt_tokens": tokens, **named(keys)}
        controls = [node.endpoint().control for node in self.nodes[:2]]
        writers = {"prefill": [control.model_dump() for control in controls if control]}
        room = body["room"] = _admitted(self.nodes[2], body | writers)
        for node in self.nodes[:2]:
            _admitted(node, body)
        choices = [engine.restorable(room) for engine in self.engines]
        common = max({*choices[0]} & {*choices[1]})
        begun = [begin(engine, room, tokens, keys, at_most=common) for engine in self.engines]
        for engine, each in zip(self.engines, begun, strict=True):
            compute(engine, each, keys)
        claimed = read(self.reader, room, tokens, keys)
        claimed.release()
        for node in self.nodes:
            ends(node, room, "completed")
            eventually("let go of", lambda node=node: not busy_pages(node))
        on_host(*self.nodes)
        return begun, (claimed.held_by_decode, claimed.host_tokens), choices


def _admitted(daemon: DaemonProcess, body: dict[str, Any]) -> int:
    answer = http("POST", daemon, "/v1/requests", json=body)
    assert answer.status_code == 201, answer.text
    return int(answer.json()["room"])


@pytest.fixture(scope="module")
def instance() -> Iterator[Instance]:
    model, decode = {"preset": "tiny-v4"}, {"tier": MODEL | {"host": HOST}}
    with (
        cluster(model, prefill=stage(0), decode=decode, pages=POOL, host_pages=96, wait=False) as running,
        ExitStack() as stack,
    ):
        other = DaemonProcess("prefill", "the second prefill daemon", running.folder / "q")
        pools = {"device": POOL}
        other.config = daemon_config(
            model, instance="prefill-0", runtime_dir=other.runtime_dir, transport="local", pools=pools
        )
        other.config |= {"node": "node-1", **stage(1)}
        running.others.append(other)
        other.start()
        for daemon in running.all()[1:]:
            daemon.wait_ready()
        nodes = [running.prefill, other, running.decode]
        engines = [stack.enter_context(PrefillEngine.attach(node.runtime_dir)) for node in nodes[:2]]
        yield Instance(nodes, engines, stack.enter_context(DecodeEngine.attach(running.decode.runtime_dir)))
        for daemon in running.all():
            assert "Traceback" not in daemon.log_path.read_text(), daemon.log(40)


@pytest.fixture(autouse=True)
def nothing_is_left(instance: Instance) -> Iterator[None]:
    """Each test begins with empty caches, and ends with every page free or cached."""
    drop(*instance.nodes)
    yield
    for node in instance.nodes:
        all_free(node)
        assert not status(node)["quarantine"]


def starts(begun: list[PrefillRoom]) -> list[tuple[int, int]]:
    """Tokens from which each engine went on, and those of them that were on the host."""
    return [(room.held_by_prefill, room.host_tokens) for room in begun]


def test_nodes_that_have_not_kept_the_same_start_at_the_same_token(instance: Instance) -> None:
    """One node goes on from less than its host has, out of the same twins; then one whose host has nothing."""
    for node, lengths in enumerate(((300, 600, 1500), (300, 1000))):
        for tokens in lengths:
            instance.leave(node, 3, tokens)
    instance.cross(4, 12 * PAGE)
    begun, held, choices = instance.cross(3, 2000)
    assert choices == [(0, 256, 512, 1280), (0, 256, 768)]
    assert (starts(begun), held) == ([(256, 256)] * 2, (0, 0))
    assert starts(instance.cross(3, 2100)[0]) == [(1792, 0)] * 2
    drop(instance.nodes[1])
    assert starts(instance.cross(3, 2101)[0]) == [(0, 0)] * 2
