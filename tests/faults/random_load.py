"""A random load for minutes or hours: two tenants with shared prefixes, lies about keys, kills, stops, cuts and a damaged store.

python -m tests.faults.random_load --minutes 30 --transport mooncake

Every byte that an engine is given is compared with what its own tokens demand. The run is red with the first wrong byte, with the
first lie that passes, when pages do not come back after the load has stopped, and with a traceback in any daemon's log.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import shutil
import sys
import tempfile
import threading
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kvbridge.cli.local_cluster import Cluster, ClusterSpec, DaemonProcess, NodeSpec, daemon_config, plan_cluster
from kvbridge.core.errors import BridgeError
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import Role
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys
from tests.faults.load_cases import LIES, LoadCase
from tests.faults.load_chaos import Chaos
from tests.faults.load_engines import CLAIM_S, LoadEngine, Order, Outcome
from tests.faults.load_prompts import MOST_TOKENS, PAGE, TokenSequence, drawn_prompt
from tests.helpers.cluster import eventually
from tests.helpers.cut_paths import CutSettings, cut_worker
from tests.helpers.live_rooms import busy_pages, status
from tests.helpers.mutated_daemon import mutated

MODEL = "tiny-v4"
IDENTITY = {"model_name": "a model", "model_revision": "1"}
PAGES = {"full": 28, "swa": 18, "request": 10}
HOST_PAGES, TWINS, CHECKPOINTS = 44, 40, 16
STORE_BYTES = "30MB"
KEEP_S = 600
CALL_S = 20.0
ROOM_S = CLAIM_S + 15.0
"""A client gives a room up whose engines have said nothing for so long: they may have been killed with its order."""
REST_S = 90.0
"""After the load has stopped every page comes back within this time."""
LIE_SHARE = 0.15
CONVERSATIONS = 4
WRONG_NAMED = 5


@dataclass
class Tally:
    """What has happened so far. Written by all threads under `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    rooms: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    looks: int = 0
    compared_bytes: int = 0
    shared_rooms: int = 0
    violations: list[str] = field(default_factory=list)

    def end(self, kind: str, outcome: Outcome) -> None:
        """Count an outcome, and keep what is wrong with it."""
        with self.lock:
            self.ends[f"{outcome.role}: {outcome.code or 'through'}"] += 1
            self.looks += outcome.looks
            self.compared_bytes += outcome.compared_bytes
            self.shared_rooms += outcome.shared_tokens > 0
            if outcome.wrong:
                rows = "; ".join(outcome.wrong[:WRONG_NAMED])
                self.violations.append(
                    f"{kind} room {outcome.room}: the {outcome.role} engine found {len(outcome.wrong)} wrong rows: {rows}"
                )

    def violation(self, text: str) -> None:
        """Keep what must never happen."""
        with self.lock:
            self.violations.append(text)


@dataclass(eq=False)
class _Room:
    """One room under way, as its client sees it."""

    kind: str
    awaited: set[Role]
    changed: threading.Event = field(default_factory=threading.Event)
    outcomes: dict[Role, Outcome] = field(default_factory=dict)


class RandomLoad:
    """One load over one set of daemons: `run` it. Made by `random_load`."""

    def __init__(self, cluster: Cluster, folder: Path, seed: int) -> None:
        self.cluster, self.folder, self.seed = cluster, folder, seed
        self.prefill = cluster.prefill
        self.decodes = [cluster.decode, *cluster.others]
        self.nodes = [self.prefill, *self.decodes]
        self.store = folder / "store"
        self.cut_flag = folder / "cut"
        self.tally = Tally()
        self.lies: Sequence[str] = LIES
        self.lie_share = LIE_SHARE
        self._geometry = preset(MODEL)
        self._engines: dict[str, LoadEngine] = {}
        self._engine_lock = threading.Lock()
        self._seeds = random.Random(seed)
        self._rooms: dict[tuple[str, int], _Room] = {}
        """By the daemon's name and the room: each engine is told of a room once."""
        self._stopping, self._paused = threading.Event(), threading.Event()
        self._under_way = 0
        self._address = self._find_address()
        for node in self.nodes:
            self.start_engine(node)

    # ------------------------------------------------------------------ engines

    def start_engine(self, node: DaemonProcess) -> None:
        """Start the engine of a node, the first one or another after the last was killed."""
        role = Role.PREFILL if node is self.prefill else Role.DECODE
        engine = LoadEngine(role, str(node.runtime_dir), self._seeds.getrandbits(32))
        with self._engine_lock:
            former, self._engines[node.name] = self._engines.get(node.name), engine
        if former is not None:
            former.kill()

    def engine(self, node: DaemonProcess) -> LoadEngine:
        """The engine that a node has now."""
        with self._engine_lock:
            return self._engines[node.name]

    def _order(self, node: DaemonProcess, room: _Room, order: Order) -> None:
        with self._engine_lock:
            self._rooms[node.name, order.room] = room
            self._engines[node.name].order(order)

    def _collect(self) -> None:
        """Hand outcomes to the clients that wait for them, until the load is over."""
        while not self._stopping.wait(0.01):
            with self._engine_lock:
                found = [(name, each) for name, engine in self._engines.items() for each in engine.outcomes()]
                rooms = [(self._rooms.pop((name, outcome.room), None), outcome) for name, outcome in found]
            for room, outcome in rooms:
                self.tally.end(room.kind if room else "given up", outcome)
                if room is not None:
                    room.outcomes[outcome.role] = outcome
                    room.changed.set()

    # ------------------------------------------------------------------ clients

    def _client(self, seed: int) -> None:
        drawn = random.Random(seed)
        answered: TokenSequence | None = None
        with httpx.Client(timeout=CALL_S, trust_env=False, verify=False) as calls:
            while not self._stopping.is_set():
                if self._paused.is_set():
                    time.sleep(0.05)
                    continue
                with self.tally.lock:
                    self._under_way += 1
                try:
                    answered = self._ask(calls, drawn, answered)
                except (httpx.HTTPError, BridgeError):
                    time.sleep(0.1)  # a daemon is down
                except Exception as error:  # noqa: BLE001 - a client that ends in silence would make the load look good
                    self.tally.violation(f"a client failed by a defect of the load: {type(error).__name__}: {error}")
                finally:
                    with self.tally.lock:
                        self._under_way -= 1

    def _ask(self, calls: httpx.Client, drawn: random.Random, answered: TokenSequence | None) -> TokenSequence | None:
        """Take one room from its admission to its end; returns its prompt with the answer that stayed, if any."""
        prompt = drawn_prompt(drawn, CONVERSATIONS)
        if answered is not None and answered.tokens < MOST_TOKENS - 1 and drawn.random() < 0.3:
            prompt = answered.longer(11, drawn.randint(1, MOST_TOKENS - answered.tokens))
        kind = drawn.choice(self.lies) if drawn.random() < self.lie_share else "honest"
        if kind != "honest" and prompt.tokens < 2 * PAGE:
            kind = "honest"
        case = LoadCase.of(kind, prompt, drawn)
        decode = drawn.choice(self.decodes)
        room = self._admit(calls, drawn, case, decode)
        with self.tally.lock:
            self.tally.rooms[kind if room else "refused"] += 1
        if not room:
            time.sleep(drawn.random() * 0.2)
            return None
        number, decode = room
        decode_order = case.decode_order(number)
        waited = _Room(kind, {Role.PREFILL, Role.DECODE} if decode_order else {Role.PREFILL})
        if decode_order:
            self._order(decode, waited, decode_order)
        self._order(self.prefill, waited, case.prefill_order(number))
        if drawn.random() < 0.08:
            time.sleep(drawn.random() * 0.3)
            self._cancel(calls, drawn.choice((self.prefill, decode)), number)
        self._await(waited)
        if len(waited.outcomes) < len(waited.awaited):
            with self.tally.lock:
                self.tally.rooms["given up"] += 1
        self._judge(calls, case, number, decode, waited)
        if len(waited.outcomes) < len(waited.awaited) or kind != "honest":
            for node in (self.prefill, decode):
                self._cancel(calls, node, number)
        through = kind == "honest" and all(not outcome.code for outcome in waited.outcomes.values())
        return prompt.longer(7, case.answer_tokens) if through and case.answer_tokens else None

    def _await(self, room: _Room) -> None:
        deadline_s = time.monotonic() + ROOM_S
        while room.awaited - room.outcomes.keys() and (left_s := deadline_s - time.monotonic()) > 0:
            room.changed.wait(min(left_s, 0.5))
            room.changed.clear()
            refused = room.outcomes.get(Role.PREFILL)
            if refused is not None and refused.code:
                deadline_s = min(deadline_s, time.monotonic() + CLAIM_S)

    def _admit(
        self, calls: httpx.Client, drawn: random.Random, case: LoadCase, decode: DaemonProcess
    ) -> tuple[int, DaemonProcess] | None:
        """Admit a room at both ends; None when a daemon has no room for it."""
        more: dict[str, Any] = {"client": f"client {drawn.randrange(4)}", "max_new_tokens": case.answer_tokens}
        if drawn.random() < 0.3:
            more["wait_s"] = drawn.random() * 2
        if drawn.random() < 0.2:
            more["retention"] = {"priority": drawn.randint(0, 2), "for_s": 5}
        body = {"prompt_tokens": case.prompt.tokens, "namespace": case.prompt.namespace} | more
        if case.kind == "honest" and drawn.random() < 0.33:
            answer = calls.post(
                f"{self.cluster.bootstrap.url}/v1/requests", json=body | self._named(self._keys(case.decode_keys))
            )
            if not answer.is_success:
                return None
            ticket = answer.json()
            chosen = [node for node in self.decodes if node.config["instance"] == ticket["decode"]["instance"]]
            return int(ticket["room"]), chosen[0]
        keys = self._keys(case.prefill_keys) if case.prefill_keys else Keys()
        answer = calls.post(f"{self.prefill.url}/v1/requests", json=body | self._named(keys))
        if not answer.is_success:
            return None
        room = int(answer.json()["room"])
        decode_keys = self._keys(case.decode_keys)
        if case.kind == "split":  # the last key is the one that prefill's engine will state
            decode_keys = Keys(decode_keys.data[:-16] + keys.data[-16:])
        answer = calls.post(
            f"{decode.url}/v1/requests",
            json=body | self._named(decode_keys) | {"room": room, "prefill": [self._address]},
        )
        if not answer.is_success:
            self._cancel(calls, self.prefill, room)
            return None
        return room, decode

    def _judge(self, calls: httpx.Client, case: LoadCase, room: int, decode: DaemonProcess, found: _Room) -> None:
        """Keep a lie that passed."""
        codes = {role: outcome.code for role, outcome in found.outcomes.items()}
        said = f"{case.kind} room {room} of {decode.name}"
        if case.kind == "liar_at_begin" and codes.get(Role.PREFILL) == "":
            self.tally.violation(
                f"{said}: the prefill engine stated keys that the room does not have, and was believed"
            )
        if case.kind in {"liar_at_claim", "foreign_keys"} and codes.get(Role.DECODE) == "":
            self.tally.violation(f"{said}: the decode engine stated keys that the room does not have, and was believed")
        if case.kind in {"split", "foreign_keys"}:
            report = calls.get(f"{decode.url}/v1/requests/{room}?wait=0")
            state = report.json()["state"] if report.is_success else "unknown"
            if state in {"committed", "claimed", "completed"}:
                self.tally.violation(f"{said} is {state}, though prefill's engine never stated its keys")
        if case.kind == "foreign_keys":
            for node, name in ((self.prefill, "computed_tokens"), (decode, "prefix_tokens")):
                answer = calls.get(f"{node.url}/v1/requests/{room}?wait=0")
                if answer.is_success and (shown := answer.json()[name]):
                    self.tally.violation(f"{said}: {node.name} shows {name} {shown} of another namespace")

    def _keys(self, prompt: TokenSequence) -> Keys:
        names = {"model": IDENTITY["model_name"], "revision": IDENTITY["model_revision"]}
        identity = PrefixIdentity(
            **names,
            fingerprint=fingerprint(self._geometry),
            tokens_per_page=self._geometry.tokens_per_page,
            namespace=prompt.namespace,
        )
        return page_keys(identity, prompt.ids())

    @staticmethod
    def _named(keys: Keys) -> dict[str, str]:
        return {"page_hashes": b64encode(keys.data).decode()}

    def _cancel(self, calls: httpx.Client, node: DaemonProcess, room: int) -> None:
        with suppress(httpx.HTTPError, BridgeError):  # the daemon may be down
            calls.delete(f"{node.url}/v1/requests/{room}", params={"reason": "the load has given it up"})

    def _find_address(self) -> dict[str, str]:
        found = self.prefill.endpoint().control
        assert found is not None
        return found.model_dump()

    def node_returned(self, node: DaemonProcess) -> None:
        """A daemon was started again: it may listen elsewhere."""
        if node is self.prefill:
            self._address = self._find_address()

    # ------------------------------------------------------------------ the run

    def run(self, seconds: float, *, clients: int, rest_every_s: float, chaos: Chaos | None) -> dict[str, Any]:
        """Load the daemons for so long, with rests; returns what happened."""
        threads = [threading.Thread(target=self._collect, daemon=True)]
        threads += [
            threading.Thread(target=self._client, args=(self._seeds.getrandbits(32),), daemon=True)
            for _ in range(clients)
        ]
        for thread in threads:
            thread.start()
        started_s = time.monotonic()
        try:
            while (left_s := started_s + seconds - time.monotonic()) > 0 and not self.tally.violations:
                self._load_until(time.monotonic() + min(left_s, rest_every_s), chaos)
                self._rest()
        finally:
            self._stopping.set()
            for thread in threads:
                thread.join(ROOM_S + CALL_S)
        for daemon in self.cluster.all():
            if "Traceback" in daemon.log_path.read_text():
                self.tally.violation(f"{daemon.name} has a traceback in its log {daemon.log_path}")
        return self._summary(time.monotonic() - started_s, chaos)

    def _load_until(self, moment_s: float, chaos: Chaos | None) -> None:
        self._paused.clear()
        while time.monotonic() < moment_s and not self.tally.violations:
            if chaos is not None:
                chaos.strike()
            time.sleep(0.2)
        self._paused.set()

    def _rest(self) -> None:
        """Wait until all rooms have ended and every page is free or cached."""
        eventually("no room under way", lambda: not self._under_way, ROOM_S + 2 * CALL_S)
        self.cluster.wait_ready()
        for node in self.nodes:
            if not self.engine(node).runs:
                self.tally.violation(
                    f"the engine of {node.name} has ended by itself; its traceback is on standard error"
                )
            try:
                eventually(f"all pages of {node.name}", lambda node=node: not busy_pages(node), REST_S, 0.2)
            except AssertionError:
                shown = status(node)
                self.tally.violation(f"{node.name} does not get pages back: {busy_pages(node)}, {shown['quarantine']}")
            if quarantine := status(node)["quarantine"]:
                self.tally.violation(f"{node.name} has pages in quarantine: {quarantine}")

    def _summary(self, seconds: float, chaos: Chaos | None) -> dict[str, Any]:
        tally = self.tally
        return {
            "seed": self.seed,
            "seconds": round(seconds),
            "rooms": dict(sorted(tally.rooms.items())),
            "ends": dict(sorted(tally.ends.items())),
            "looks": tally.looks,
            "compared_mb": round(tally.compared_bytes / 1e6),
            "rooms_with_shared_tokens": tally.shared_rooms,
            "chaos": dict(sorted(chaos.done.items())) if chaos else {},
            "violations": tally.violations,
        }

    def close(self) -> None:
        """End all engines."""
        for engine in self._engines.values():
            engine.kill()


@contextmanager
def random_load(transport: str, seed: int) -> Iterator[RandomLoad]:
    """Start bootstrap, a prefill and two decode daemons over one store, and their engines; end and remove all at exit."""
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    cut = CutSettings(transport="mooncake", addresses=("127.0.0.1",), after_share=0.0, flag=str(folder / "cut"))
    order = ["mooncake", "local"] if transport == "mooncake" else [transport]

    def more(**host: Any) -> dict[str, Any]:
        tier = IDENTITY | {"enabled": True, "host": {"pages": TWINS} | host}
        tier["store"] = {"kind": "files", "directory": str(folder / "store"), "max_bytes": STORE_BYTES}
        return {
            "transports": {"order": order, "mooncake": {"host": "127.0.0.1"}},
            "tier": tier,
            "timeouts": {
                "claim_s": 20.0,
                "offer_s": 20.0,
                "begin_s": 15.0,
                "peer_silence_s": 4.0,
                "drain_s": 5.0,
            },
        }

    def pools(**host: Any) -> dict[str, Any]:
        return {"device": PAGES, "keep_s": KEEP_S} | host

    spec = ClusterSpec(
        model={"preset": MODEL},
        transport=order[0],
        ends_with_us=True,
        prefill=NodeSpec(instance=f"prefill-{folder.name}", pools=pools(), more=more(checkpoint_pages=CHECKPOINTS)),
        decode=NodeSpec(instance=f"decode-{folder.name}", pools=pools(host={"pages": HOST_PAGES}), more=more()),
    )
    cluster = plan_cluster(folder, spec)
    second = DaemonProcess("decode", "the second decode daemon", folder / "e", ends_with_us=True)
    second.config = (
        daemon_config(
            spec.model,
            instance=f"second-{folder.name}",
            runtime_dir=second.runtime_dir,
            transport=order[0],
            pools=pools(host={"pages": HOST_PAGES}),
        )
        | more()
    )
    cluster.others.append(second)
    if transport == "mooncake":
        cluster.prefill = mutated(cluster.prefill, worker_code=cut_worker(cut))
    load: RandomLoad | None = None
    try:
        cluster.start()
        cluster.wait_ready()
        # The nodes have been told where bootstrap is: the next one is there, too.
        cluster.bootstrap.config["http"] = {"port": httpx.URL(cluster.bootstrap.url).port}
        load = RandomLoad(cluster, folder, seed)
        yield load
    finally:
        if load is not None:
            load.close()
        cluster.stop(force_after_s=5.0)
        for path in Path("/dev/shm").glob(f"kvbridge-*{folder.name}*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run the load and print what happened; 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.random_load", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--transport", choices=["local", "mooncake"], default="local")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rest-minutes", type=float, default=5.0, help="between two looks at all pages")
    parser.add_argument("--seed", type=int, default=None, help="of what is asked and struck; drawn when not given")
    parser.add_argument("--output", type=Path, help="a file for what happened, as JSON")
    given = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if given.seed is None else given.seed
    with random_load(given.transport, seed) as load:
        rest_every_s = given.rest_minutes * 60
        found = load.run(
            given.minutes * 60,
            clients=given.clients,
            rest_every_s=rest_every_s,
            chaos=Chaos(load, seed),
        )
        if found["violations"]:
            kept = Path(tempfile.mkdtemp(prefix="kvb-red-", dir="/tmp"))
            for daemon in load.cluster.all():
                shutil.copy(daemon.log_path, kept / f"{daemon.name.replace(' ', '-')}.jsonl")
            found["logs"] = str(kept)
    text = json.dumps({"transport": given.transport} | found, indent=1)
    print(text)
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(text + "\n")
    return 1 if found["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
