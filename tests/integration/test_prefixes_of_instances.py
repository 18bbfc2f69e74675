"""Prefixes of a prefill instance of two nodes, a pipeline stage each: real daemons whose caches differ, and engines that agree.

Each node has a cache of its own. Their engines start where both can: they ask what is there (`restorable`) and begin with the
largest that both have (`at_most`).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvbridge.core.geometry.presets import preset
from kvbridge.core.plan.operations import Section
from kvbridge.engine.decode import DecodeEngine, DecodeRoom
from kvbridge.engine.prefill import PrefillEngine, PrefillRoom
from kvbridge.tier.keys import Keys
from tests.helpers import synthetic
from tests.helpers.cluster import Cluster, DaemonProcess, cluster, daemon_config, eventually
from tests.helpers.live_rooms import busy_pages, ends, http

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TINY = preset("tiny-v4")
PAGE = TINY.tokens_per_page
TIER = {"enabled": True, "model_name": "tiny", "model_revision": "1"}
POOL = {"full": 24, "swa": 16, "request": 4}
HISTORY = list(range(10 * PAGE))


def stage(number: int, tier: dict[str, Any]) -> dict[str, Any]:
    return {"tier": tier, "parallelism": {"pp_size": 2, "ranks": [{"pp": number, "tp": 0}]}}


@dataclass
class Instance:
    """Two prefill nodes with an engine each, and a decode node with its own."""

    cluster: Cluster
    nodes: list[DaemonProcess]
    engines: list[PrefillEngine]
    reader: DecodeEngine
    history: list[int] = field(default_factory=lambda: HISTORY)
    """The tokens of the present conversation."""

    def keys(self, length: int) -> Keys:
        return self.reader.page_keys(self.history[:length])

    def admit(self, length: int, nodes: list[DaemonProcess], *, on_decode: bool = True) -> int:
        body: dict[str, Any] = {
            "prompt_tokens": length,
            "page_hashes": base64.b64encode(self.keys(length).data).decode(),
        }
        if on_decode:
            controls = [node.endpoint().control for node in self.nodes]
            named = {"prefill": [control.model_dump() for control in controls if control]}
            body["room"] = self._admitted(self.cluster.decode, body | named)
        for node in nodes:
            body["room"] = self._admitted(node, body)
        return int(body["room"])

    @staticmethod
    def _admitted(daemon: DaemonProcess, body: dict[str, Any]) -> int:
        answer = http("POST", daemon, "/v1/requests", json=body)
        assert answer.status_code == 201, answer.text
        return int(answer.json()["room"])

    def write(self, engine: PrefillEngine, room: int, length: int, at_most: int | None = None) -> PrefillRoom:
        """An engine's part on one node; what it starts from is looked at, byte by byte."""
        keys = self.keys(length)
        begun = engine.begin(room, prompt_tokens=length, page_hashes=keys, at_most=at_most)
        start = begun.computed_tokens
        for views in engine.views.values():
            if start:
                held = {"tables": begun.restore, "tokens": start, "keys": keys[: start // PAGE]}
                found = synthetic.compare(views, room=room, **held)
                assert found.checked_bytes
                assert not found.mismatches, found.mismatches[0]
            for stop, tables in begun.checkpoints.items():
                at_end = Section(prompt_tokens=stop, prefix_tokens=stop, start_token=0, stop_token=stop)
                synthetic.fill(views, room=room, tables=tables, section=at_end, keys=keys[: stop // PAGE])
            section = Section(prompt_tokens=length, start_token=start, stop_token=length)
            synthetic.fill(views, room=room, tables=begun.tables, section=section, keys=keys)
        engine.publish(room, length)
        engine.finish(room, checkpoints=list(begun.checkpoints))
        return begun

    def leave(self, number: int, length: int) -> None:
        """Have one node alone know a prompt, which leaves a checkpoint at its last page's end."""
        node = self.nodes[number]
        room = self.admit(length, [node], on_decode=False)
        self.write(self.engines[number], room, length)
        http("DELETE", node, f"/v1/requests/{room}")
        eventually("let go of", lambda: not busy_pages(node))

    def cross(self, length: int) -> tuple[list[tuple[int, ...]], list[int], int]:
        """A request over all: where each node could start, where it did, what decode held."""
        choices, begun, claimed = self.crossed(length)
        return choices, [one.computed_tokens for one in begun], claimed.prefix_tokens

    def crossed(self, length: int) -> tuple[list[tuple[int, ...]], list[PrefillRoom], DecodeRoom]:
        """The same, with all that the engines were told."""
        room = self.admit(length, self.nodes)
        choices = [engine.restorable(room) for engine in self.engines]
        common = max(set(choices[0]).intersection(*choices[1:]))
        begun = [self.write(engine, room, length, at_most=common) for engine in self.engines]
        claimed = self.reader.wait_claim(room, 30, page_hashes=self.keys(length))
        for views in self.reader.views.values():
            found = synthetic.compare(views, room=room, tables=claimed.tables, tokens=length, keys=self.keys(length))
            assert not found.mismatches, found.mismatches[0]
        self.reader.release(room)
        for node in self.nodes:
            ends(node, room, "completed")
            eventually("let go of", lambda node=node: not busy_pages(node))
        return choices, begun, claimed


@pytest.fixture(scope="module")
def instance() -> Iterator[Instance]:
    with running_instance(TIER, TIER, pages=POOL) as made:
        yield made


@contextmanager
def running_instance(
    prefill: dict[str, Any], decode: dict[str, Any], *, pages: dict[str, int], host_pages: int = 24
) -> Iterator[Instance]:
    """Nodes with these sections `tier` and device pools, and an engine each."""
    model = {"preset": "tiny-v4"}
    settings = {"pages": pages, "host_pages": host_pages, "wait": False}
    with cluster(model, prefill=stage(0, prefill), decode={"tier": decode}, **settings) as running:
        other = DaemonProcess("prefill", "the second prefill daemon", running.folder / "q")
        other.config = daemon_config(
            model, instance="prefill-0", runtime_dir=other.runtime_dir, transport="local", pools={"device": pages}
        )
        other.config |= {"node": "node-1", **stage(1, prefill)}
        running.others.append(other)
        other.start()
        for daemon in running.all()[1:]:
            daemon.wait_ready()
        with ExitStack() as stack:
            nodes = [running.prefill, other]
            engines = [stack.enter_context(PrefillEngine.attach(node.runtime_dir)) for node in nodes]
            yield Instance(
                running, nodes, engines, stack.enter_context(DecodeEngine.attach(running.decode.runtime_dir))
            )


def test_nodes_whose_caches_differ_start_at_the_same_token(instance: Instance) -> None:
    for number, lengths in enumerate(((300, 600, 1500), (300, 1000))):
        for length in lengths:
            instance.leave(number, length)
    choices, started, held = instance.cross(2000)
    assert choices == [(0, 256, 512, 1280), (0, 256, 768)]
    assert started == [256, 256]
    assert held == 0
    choices, started, held = instance.cross(2100)
    assert started == [1792, 1792], choices
    assert held == 1792
