"""Prefixes that come back from host memory, through real daemons: every byte, states included, whatever was evicted in between.

For every legal combination of layouts, copy backend and backup policy. Bytes follow from a conversation and the place of a row, so
what comes out of another conversation's page, or out of one that was not loaded, is seen.
"""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvbridge.config.pools import DeviceLayout, HostLayout
from kvbridge.config.tier import BackupPolicy, CopyBackend
from kvbridge.core.ids import TWINS
from kvbridge.core.plan.operations import Section
from kvbridge.engine import DecodeRoom, Engine, PrefillRoom
from kvbridge.tier.copies import Direction
from tests.helpers import synthetic
from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.live_rooms import LiveCluster, busy_pages, ends, http, live_cluster, metric, report, status
from tests.helpers.matrices import kept
from tests.helpers.twin_pools import COMBINATIONS

PAGE = 256
POOL_PAGES = 24
LOW_SHARE = 0.5
CLAIM_S = 30.0
WRITE_THROUGH, SELECTIVE, WRITE_BACK = BackupPolicy


@dataclass(frozen=True)
class Setting:
    """What a cluster is to do its copies with, and how many ranks."""

    host: HostLayout
    device: DeviceLayout
    backend: CopyBackend
    policy: BackupPolicy
    ranks: int = 1

    def __str__(self) -> str:
        ranks = "" if self.ranks == 1 else f" {self.ranks} ranks"
        return f"{self.host} on {self.device} by {self.backend} {self.policy}{ranks}"


def settings() -> list[Any]:
    """Each pair of layouts and backend once with some policy in `make test`, several ranks once; all of them in `make test-all`."""
    pairs = sorted(found[:3] for found in COMBINATIONS if found[3] is Direction.LOAD_BACK)
    assert {found[2] for found in pairs} == set(CopyBackend)
    policies, made = list(BackupPolicy), []
    for number, pair in enumerate(pairs):
        for policy in policies:
            always = number % 2 == 0 and policy is policies[number // 2 % len(policies)]
            made.append(kept(Setting(*pair, policy), always))
    several = Setting(HostLayout.PAGE_FIRST, DeviceLayout.LAYER_FIRST, CopyBackend.KERNEL, WRITE_THROUGH, ranks=2)
    return [*made, kept(several, True)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Tiers:
    """A cluster with a host tier on both sides, whose engines do what engines do."""

    live: LiveCluster
    setting: Setting
    by_layer: bool = False
    host_tokens: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    """That came back so far, as the engines were told."""

    @property
    def both(self) -> tuple[DaemonProcess, DaemonProcess]:
        return self.live.prefill, self.live.decode

    def let_go(self) -> bool:
        """Whether no room has anything; engines with a GPU are given the chance to say what they still have to."""
        self.live.sender.events()
        self.live.reader.events()
        return not any(busy_pages(daemon) or status(daemon)["prefixes"]["readers"] for daemon in self.both)

    def on_host(self) -> None:
        """Wait until all that the devices keep is on the host as well."""

        def settled(daemon: DaemonProcess) -> bool:
            tier = status(daemon)["host_tier"]
            return not (tier["device_pages"] or tier["waiting_prompts"] or tier["in_flight_pages"])

        for daemon in self.both:
            eventually(f"{daemon.name} has backed up", lambda daemon=daemon: settled(daemon))

    def forget(self, *, leave: int = 0) -> None:
        """Push all that nobody reads off both devices but so many pages, by a request that writes everything else."""
        eventually("all let go of", self.let_go)
        self.live.overwrite(POOL_PAGES - leave)
        eventually("all let go of", self.let_go)
        for daemon in self.both:
            assert status(daemon)["pools"]["full"]["cached"] <= leave


@pytest.fixture(scope="module", params=settings(), ids=str)
def tiers(request: pytest.FixtureRequest) -> Iterator[Tiers]:
    setting: Setting = request.param
    backup: dict[str, Any] = {"policy": setting.policy.value, "low_share": LOW_SHARE}
    host = {"pages": 96, "layout": setting.host.value, "backend": setting.backend.value, "backup": backup}
    tier = {"enabled": True, "model_name": "tiny", "model_revision": "1"}
    ranks = {} if setting.ranks == 1 else {"prefill_pp": 2, "prefill_tp": 2, "decode_tp": 2}
    with live_cluster(
        prefill={"tier": tier | {"host": host | {"checkpoint_pages": 24}}},
        decode={"tier": tier | {"host": host}},
        pages={"full": POOL_PAGES, "swa": 12, "request": 6},
        device_layout=setting.device.value,
        host_pages=96,
        **ranks,
    ) as running:
        made = Tiers(running, setting)
        assert running.sender
        assert running.reader
        yield made
        running.no_traceback()


@pytest.fixture(autouse=True)
def nothing_is_left(tiers: Tiers) -> Iterator[None]:
    """Each test begins with empty caches, and ends with every page free or cached."""
    for daemon in tiers.both:
        assert http("DELETE", daemon, "/v1/prefixes").is_success
    tiers.by_layer = False
    yield
    eventually("all let go of", tiers.let_go)
    assert not any(status(daemon)["quarantine"] for daemon in tiers.both)


class Conversation:
    """Prompts that begin alike, and the bytes that belong to them."""

    def __init__(self, tiers: Tiers, number: int) -> None:
        self.tiers, self.number, self.live = tiers, number, tiers.live
        self.begun: PrefillRoom | None = None

    def keys(self, tokens: int) -> Any:
        return self.live.sender.page_keys([self.number * 100_000 + place for place in range(tokens)])

    def admit(self, tokens: int) -> int:
        hashes = base64.b64encode(self.keys(tokens).data).decode()
        self.length, self.room = tokens, int(self.live.ticket(tokens, page_hashes=hashes)["room"])
        return self.room

    def begin(self) -> PrefillRoom:
        """Begin it and look at every byte that the engine starts from: windows and states, too."""
        sender, by_layer = self.live.sender, self.tiers.by_layer
        self.begun = sender.begin(
            self.room, prompt_tokens=self.length, page_hashes=self.keys(self.length), by_layer=by_layer
        )
        self._wait_layers(sender, self.room)
        self.tiers.host_tokens["prefill"] += self.begun.host_tokens
        if self.begun.computed_tokens:
            self._compare(sender, self.begun.restore, self.begun.computed_tokens)
        return self.begun

    def compute(self) -> None:
        """Write and publish what is new, cut where checkpoints are wanted, and finish."""
        begun = self.begun or self.begin()
        start, sender = begun.computed_tokens, self.live.sender
        for stop in [*begun.checkpoints, self.length]:
            section = Section(prompt_tokens=self.length, start_token=start, stop_token=stop)
            at_end = Section(prompt_tokens=stop, prefix_tokens=stop // PAGE * PAGE, start_token=0, stop_token=stop)
            for views in sender.views.values():
                synthetic.fill(views, room=self.number, tables=begun.tables, section=section)
                if stop in begun.checkpoints:
                    synthetic.fill(views, room=self.number, tables=begun.checkpoints[stop], section=at_end)
            sender.publish(self.room, stop)
            start = stop
        sender.finish(self.room, checkpoints=list(begun.checkpoints))

    def check(self) -> DecodeRoom:
        """Claim it and look at every byte that decode has."""
        reader = self.live.reader
        claimed = reader.wait_claim(
            self.room, CLAIM_S, page_hashes=self.keys(self.length), by_layer=self.tiers.by_layer
        )
        self._wait_layers(reader, self.room)
        self.tiers.host_tokens["decode"] += claimed.host_tokens
        self._compare(reader, claimed.tables, self.length)
        reader.release(self.room)
        return claimed

    def cross(self, tokens: int) -> tuple[PrefillRoom, DecodeRoom]:
        """A whole room, until both sides have let go of it."""
        self.admit(tokens)
        begun = self.begin()
        self.compute()
        claimed = self.check()
        self.end()
        for daemon, host_tokens in zip(self.tiers.both, (begun.host_tokens, claimed.host_tokens), strict=True):
            assert report(daemon, self.room)["host_tokens"] == host_tokens
        return begun, claimed

    def end(self) -> None:
        ends(self.live.prefill, self.room, "completed")

        def over() -> bool:
            self.live.sender.events()
            self.live.reader.events()
            return not any(report(daemon, self.room)["pages"] for daemon in self.tiers.both)

        eventually("let go of", over)

    def _wait_layers(self, engine: Engine, room: int) -> None:
        for rank in engine.ranks if self.tiers.by_layer else ():
            for layer in engine.layers(rank):
                engine.wait_layer(room, layer)

    def _compare(self, engine: Engine, tables: Any, tokens: int) -> None:
        for views in engine.views.values():
            found = synthetic.compare(views, room=self.number, tables=tables, tokens=tokens)
            assert found.checked_bytes
            assert not found.wrong_bytes, found.mismatches[0]


# ---------------------------------------------------------------------------------------------- one conversation


def warm(tiers: Tiers, conversation: Conversation, tokens: int) -> None:
    """Use a prompt until the host takes it; not for a policy that waits until pages are short."""
    conversation.cross(tokens)
    if tiers.setting.policy is SELECTIVE:
        assert status(tiers.live.decode)["host_tier"]["device_pages"] >= tokens // PAGE, "it was used once"
        conversation.cross(tokens)


def test_the_pair_is_the_one_that_is_named(tiers: Tiers) -> None:
    """What the engines have attached to: where pages lie on both sides, and what copies them."""
    for engine in (tiers.live.sender, tiers.live.reader):
        attachment = engine._attachment
        assert attachment.answer.copy_backend == tiers.setting.backend
        assert attachment.twins
        first = tiers.setting.host is not HostLayout.LAYER_FIRST
        assert all((twin.page_stride_bytes > twin.page_bytes) == first for twin in attachment.twins)
        for views in engine.views.values():
            geometry = views.geometry
            held = [
                views.region(each.kind, layer, space=each.space).region
                for each in geometry.components
                for layer in views.layers(each.kind)
                if each.space in TWINS
                and (each.kind, layer) in {(twin.component, twin.layer) for twin in attachment.twins}
            ]
            first = tiers.setting.device is DeviceLayout.PAGE_FIRST
            assert held
            assert all((region.page_stride_bytes > region.page_bytes) == first for region in held)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("left", [0, 1])
def test_what_the_device_has_lost_comes_back_from_the_host(tiers: Tiers, left: int, by_layer: bool) -> None:
    tiers.by_layer = by_layer
    turns = Conversation(tiers, 1 + left + 2 * by_layer)
    if tiers.setting.policy is WRITE_BACK:
        pytest.skip("what is backed up ahead of need is not known beforehand: see the others")
    warm(tiers, turns, 3 * PAGE + 40)
    tiers.on_host()
    tiers.forget(leave=left)
    copies = load_backs(tiers)
    begun, claimed = turns.cross(5 * PAGE + 7)
    assert (begun.computed_tokens, claimed.prefix_tokens) == (3 * PAGE, 3 * PAGE)
    assert 0 < begun.host_tokens <= 3 * PAGE
    assert 0 < claimed.host_tokens <= 3 * PAGE
    if not left:
        assert (begun.host_tokens, claimed.host_tokens) == (3 * PAGE, 3 * PAGE)
    assert [after - before for before, after in zip(copies, load_backs(tiers), strict=True)] == [1, 1]
    begun, claimed = turns.cross(5 * PAGE + 90)
    assert (begun.computed_tokens, claimed.prefix_tokens) == (5 * PAGE, 5 * PAGE)
    assert (begun.host_tokens, claimed.host_tokens) == (0, 0), (
        "what came back is on the device, and what went on from it"
    )


def load_backs(tiers: Tiers) -> list[float]:
    """How many each node has counted."""
    name, labels = "kvbridge_host_tier_copies_total", {"direction": "load_back", "outcome": "done"}
    return [metric(daemon, name, **labels) for daemon in tiers.both]


def test_an_abort_after_the_load_leaves_the_host_as_it_was(tiers: Tiers) -> None:
    if tiers.setting.policy is WRITE_BACK:
        pytest.skip("what is backed up ahead of need is not known beforehand")
    turns = Conversation(tiers, 20)
    warm(tiers, turns, 3 * PAGE + 9)
    tiers.on_host()
    tiers.forget()
    room = turns.admit(4 * PAGE)
    assert turns.begin().host_tokens
    tiers.live.sender.abort(room, "a test")
    ends(tiers.live.decode, room, "failed", "aborted")
    turns.begun = None
    eventually("all let go of", tiers.let_go)
    _, claimed = turns.cross(4 * PAGE + 1)
    assert (claimed.prefix_tokens, claimed.host_tokens) == (3 * PAGE, 3 * PAGE)


KILLED = """
import sys, os
from pathlib import Path
from kvbridge.core.wire.engine_messages import *
from kvbridge.core.wire.features import ENGINE_FEATURES
from kvbridge.core.ids import Role
from kvbridge.engine.link import EngineLink
folder, role, room, tokens, keys = sys.argv[1], Role(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
link = EngineLink(Path(folder), name=f"engine-{os.getpid()}", timeout_s=20)
link.call(Attach(call=link.number(), role=role, features=ENGINE_FEATURES), Attached)
said = {"call": link.number(), "room": room, "page_hashes": bytes.fromhex(keys)}
pages = link.call(Begin(**said, prompt_tokens=tokens) if role is Role.PREFILL else Claim(**said), Pages)
print(len(pages.load), flush=True)
sys.stdin.read()
"""
"""An engine that is told what to load, and never says that it has."""


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_is_killed_while_it_loads_leaves_nothing_behind(tiers: Tiers, role: str) -> None:
    if tiers.setting.policy is not WRITE_THROUGH:
        pytest.skip("the policy does not matter here")
    turns, live = Conversation(tiers, 40 + (role == "decode")), tiers.live
    warm(tiers, turns, 3 * PAGE + 9)
    tiers.on_host()
    tiers.forget()
    turns.begun = None
    room = turns.admit(5 * PAGE)
    if role == "decode":
        turns.compute()
    daemon = live.prefill if role == "prefill" else live.decode
    keys = turns.keys(turns.length).data.hex()
    if role == "decode":
        eventually("committed", lambda: report(daemon, room)["state"] == "committed")
    command = [sys.executable, "-c", KILLED, str(daemon.runtime_dir), role, str(room), str(turns.length), keys]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == (2 if role == "prefill" else 1), "nothing was to be loaded"
            assert status(daemon)["prefixes"]["readers"] == 1
        finally:
            process.kill()
    eventually("its end", lambda: report(daemon, room)["state"] == "failed")
    eventually("all let go of", tiers.let_go)
    turns.begun = None
    begun, claimed = turns.cross(5 * PAGE + 1)
    if role == "prefill":
        assert (begun.host_tokens, claimed.host_tokens) == (3 * PAGE, 3 * PAGE), "and the host has what it had"
    else:  # prefill has finished what the decode engine did not live to read
        assert claimed.host_tokens == 3 * PAGE


# ---------------------------------------------------------------------------------------------- many


def test_many_conversations_at_once_whatever_is_evicted(tiers: Tiers) -> None:
    """Eight of them, three in flight at a time, in a device that holds two; every byte of every turn is looked at."""
    talks = [Conversation(tiers, 100 + number) for number in range(8)]
    before = dict(tiers.host_tokens)
    counted = [status(daemon)["prefixes"]["host_tokens"] for daemon in tiers.both]
    earlier_rooms = [host_tokens(daemon).keys() for daemon in tiers.both]
    crossed: set[int] = set()
    for turn in range(4):
        for first in range(0, len(talks), 3):
            together = talks[first : first + 3]
            for number, talk in enumerate(together):
                talk.begun = None
                crossed.add(talk.admit(2 * PAGE + turn * (PAGE + 40) + 17 * (first + number)))
            for talk in together:
                talk.begin()
            for talk in reversed(together):
                talk.compute()
            for talk in together:
                talk.check()
            for talk in together:
                talk.end()
    for side, daemon, earlier, others in zip(("prefill", "decode"), tiers.both, counted, earlier_rooms, strict=True):
        came = tiers.host_tokens[side] - before[side]
        assert came > 0, f"nothing came back on {side}"
        rooms = {room: tokens for room, tokens in host_tokens(daemon).items() if room not in others}
        assert sum(rooms[room] for room in crossed) == came
        # Rooms that the other side had no pages for were admitted here, and asked for once more.
        assert status(daemon)["prefixes"]["host_tokens"] - earlier == sum(rooms.values())


def host_tokens(daemon: DaemonProcess) -> dict[int, int]:
    """What each room that a node still knows was to have from the host."""
    found: dict[int, int] = {}
    after: int | None = 0
    while after is not None:
        page = http("GET", daemon, f"/v1/requests?after={after}").json()
        found |= {room["room"]: room["host_tokens"] for room in page["rooms"]}
        after = page["next"]
    return found


def test_a_long_prompt_comes_back_whole(tiers: Tiers) -> None:
    """All but a page of the device."""
    turns = Conversation(tiers, 200)
    warm_pages = POOL_PAGES - 2
    turns.cross(warm_pages * PAGE + 3)
    if tiers.setting.policy is not WRITE_THROUGH:
        turns.cross(warm_pages * PAGE + 4)
    tiers.on_host() if tiers.setting.policy is not WRITE_BACK else eventually(
        "backed up", lambda: status(tiers.live.decode)["host_tier"]["both_pages"]
    )
    tiers.forget()
    begun, claimed = turns.cross(warm_pages * PAGE + 90)
    assert claimed.host_tokens == claimed.prefix_tokens > 0
    assert begun.host_tokens == begun.computed_tokens
