"""A random load for minutes or hours: two tenants with shared prefixes, lies about keys, kills, stops, cuts and a damaged store.

`python -m tests.faults.random_load --minutes 30 --transport mooncake` is red with the first wrong byte or lie that passes, when
pages do not come back after the load has stopped, and with a traceback in any daemon's log.
"""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from kvbridge.cli.local_cluster import Cluster, DaemonProcess
from kvbridge.core.errors import BridgeError, ConflictError, DeadlineError, DetachedError
from kvbridge.core.ids import Role
from kvbridge.tier.keys import Keys
from tests.faults.load_cluster import (
    ENGINE_CALL_S,
    FORGED,
    LIES,
    MODEL,
    MOST_TOKENS,
    PAGE,
    Branch,
    Case,
    Chaos,
    Seat,
    drawn_prompt,
    load_cluster,
)
from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import busy_pages, control_of, status

CALL_S = 20.0
CLAIM_S = 30.0
"""A client gives up a room that is not committed so long after prefill's end."""
REST_S = 90.0
"""After the load has stopped every page comes back within this time."""
LIE_SHARE = 0.15
CONVERSATIONS = 4
CHUNK_TOKENS = (64, 256, 512)


class RandomLoad:
    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.seed = cluster, seed
        self.store, self.cut_flag = cluster.folder / "store", cluster.folder / "cut"
        self.prefill = cluster.prefill
        self.decodes = [cluster.decode, *cluster.others]
        self.nodes = [self.prefill, *self.decodes]
        self.lies: Sequence[str] = LIES
        self.lie_share = LIE_SHARE
        self.violations: list[str] = []
        self.seats = {
            node.name: Seat(Role.PREFILL if node is self.prefill else Role.DECODE, node, self.violations.append)
            for node in self.nodes
        }
        self._seeds = random.Random(seed)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._stopping, self._paused = threading.Event(), threading.Event()
        self._under_way = 0

    def _count(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def _client(self, seed: int) -> None:
        drawn = random.Random(seed)
        answered: Branch | None = None
        with httpx.Client(timeout=CALL_S, trust_env=False, verify=False) as calls:
            while not self._stopping.is_set():
                with self._lock:
                    rests = self._paused.is_set()
                    self._under_way += not rests
                if rests:
                    time.sleep(0.05)
                    continue
                try:
                    answered = self._ask(calls, drawn, answered)
                except (httpx.HTTPError, BridgeError):
                    time.sleep(0.1)  # a daemon is down
                except Exception as error:  # noqa: BLE001 - a client that ends in silence would make the load look good
                    self.violations.append(f"{type(error).__name__}: {error}")
                finally:
                    with self._lock:
                        self._under_way -= 1

    def _ask(self, calls: httpx.Client, drawn: random.Random, answered: Branch | None) -> Branch | None:
        prompt = drawn_prompt(drawn, CONVERSATIONS)
        if answered is not None and answered.length < MOST_TOKENS - 1 and drawn.random() < 0.3:
            prompt = answered.longer(11, drawn.randint(1, MOST_TOKENS - answered.length))
        lies = drawn.random() < self.lie_share and prompt.length >= 2 * PAGE
        case = Case.of(drawn.choice(self.lies) if lies else "honest", prompt)
        answer_tokens = drawn.randint(1, 300) if case.kind == "honest" and drawn.random() < 0.4 else 0
        admitted = self._admit(calls, drawn, case, answer_tokens)
        self._count(case.kind if admitted else "refused")
        if admitted is None:
            time.sleep(drawn.random() * 0.2)
            return None
        room, decode = admitted
        cancels = drawn.random() < 0.08
        canceller = threading.Timer(drawn.random() * 0.3, self._cancel, [drawn.choice((self.prefill, decode)), room])
        if cancels:
            canceller.start()
        gives_up = drawn.choice(list(Role)) if drawn.random() < 0.05 else None
        through = self._compute(drawn, case, room, gives_up is Role.PREFILL)
        if case.kind == "liar_at_begin" and through:
            self.violations.append(f"room {room}: the prefill engine stated keys that the room does not have")
        claimed = self._read(
            drawn, case, room, decode, answer_tokens=answer_tokens, gives_up=gives_up is Role.DECODE, computed=through
        )
        if case.kind in {"liar_at_claim", "foreign_keys"} and claimed:
            self.violations.append(f"{case.kind} room {room}: {decode.name}'s engine stated keys that the room lacks")
        self._judge(calls, case, room, decode)
        if cancels:
            canceller.join()
        if not claimed or case.kind != "honest":
            for node in (self.prefill, decode):
                self._cancel(node, room)
        return prompt.longer(7, answer_tokens) if claimed and answer_tokens else None

    def _admit(
        self, calls: httpx.Client, drawn: random.Random, case: Case, answer_tokens: int
    ) -> tuple[int, DaemonProcess] | None:
        tokens, decode = case.prompt.length, drawn.choice(self.decodes)
        body: dict[str, Any] = {"prompt_tokens": tokens, "namespace": case.prompt.namespace}
        body |= {"client": f"client {drawn.randrange(4)}", "max_new_tokens": answer_tokens}
        if drawn.random() < 0.3:
            body["wait_s"] = drawn.random() * 2
        if drawn.random() < 0.2:
            body["retention"] = {"priority": drawn.randint(0, 2), "for_s": 5}

        def ask(daemon: DaemonProcess, keys: Keys, **more: Any) -> dict[str, Any] | None:
            named = {"page_hashes": b64encode(keys.data).decode()}
            answer = calls.post(f"{daemon.url}/v1/requests", json=body | named | more)
            return answer.json() if answer.is_success else None

        keys = case.to_decode.keys(MODEL, tokens)
        if case.kind == "honest" and drawn.random() < 0.33:
            ticket = ask(self.cluster.bootstrap, keys)
            if ticket is None:
                return None
            instance = ticket["decode"]["instance"]
            return int(ticket["room"]), next(node for node in self.decodes if node.config["instance"] == instance)
        prefill_keys = case.to_prefill.keys(MODEL, tokens) if case.to_prefill else Keys()
        admitted = ask(self.prefill, prefill_keys)
        if admitted is None:
            return None
        if case.kind == "split":  # the last key is the one that prefill's engine will state
            keys = Keys(keys.data[:-16] + prefill_keys.data[-16:])
        if ask(decode, keys, room=admitted["room"], prefill=[control_of(self.prefill)]) is None:
            self._cancel(self.prefill, admitted["room"])
            return None
        return int(admitted["room"]), decode

    def _compute(self, drawn: random.Random, case: Case, room: int, gives_up: bool) -> bool:
        call, tokens = self.seats[self.prefill.name].taken(), case.prompt.length
        with self._let_go("prefill", call, room):
            start = computed = call("begin", room, tokens, case.begun)
            if case.kind == FORGED:
                call("compute_as", room, tokens, case.prompt.with_other_tokens())
            while start < tokens:
                stop = min(tokens, start + drawn.choice(CHUNK_TOKENS))
                call("write", room, tokens, start, stop)
                if gives_up and stop >= tokens // 2:
                    raise DeadlineError("the load gives the room up")
                start = stop
            if case.kind != FORGED:
                call("check", room)
            self._count("looks", 2 * bool(computed))
            self._count("rooms with shared tokens", bool(computed))
            call("finish", room)
            return True
        return False

    def _read(
        self,
        drawn: random.Random,
        case: Case,
        room: int,
        decode: DaemonProcess,
        *,
        answer_tokens: int,
        gives_up: bool,
        computed: bool,
    ) -> bool:
        """Have decode's engine claim a room, look at all bytes twice, write the answer and let go; whether it got there."""
        if case.claimed is None:
            return False
        call, tokens = self.seats[decode.name].taken(), case.prompt.length
        with self._let_go("decode", call, room):
            self._claim(call, case, room, CLAIM_S if computed else 0.0)
            for pause_s in (0.0, drawn.random() * 0.5):
                time.sleep(pause_s)
                if case.kind in {"honest", FORGED}:
                    call("check", room, tokens)
                    self._count("looks")
            if gives_up:
                raise DeadlineError("the load gives the room up")
            if answer_tokens:
                whole = case.prompt.longer(7, answer_tokens)
                call("answer", room, tokens, whole.length, whole)
                call("release", room, whole.length, whole)
            else:
                call("release", room)
            return True
        return False

    def _claim(self, call: Callable[..., Any], case: Case, room: int, wait_s: float) -> None:
        give_up_s = time.monotonic() + wait_s
        while True:
            try:
                held = call("claim_now", room, case.prompt.length, case.claimed)
            except DetachedError:
                raise
            except ConflictError:  # not committed yet
                if time.monotonic() > give_up_s:
                    raise
                time.sleep(0.05)
            else:
                self._count("rooms with shared tokens", bool(held))
                return

    @contextmanager
    def _let_go(self, role: str, call: Callable[..., Any], room: int) -> Iterator[None]:
        """Keep how a room ends for an engine, which gives the room up after an error."""
        try:
            yield
            self._count(f"{role}: through")
        except (BridgeError, AssertionError) as error:
            if isinstance(error, BridgeError):
                self._count(f"{role}: {error.code}")
            else:
                self.violations.append(f"room {room}: {error}")
            with suppress(BridgeError):
                call("abort", room)

    def _judge(self, calls: httpx.Client, case: Case, room: int, decode: DaemonProcess) -> None:
        said = f"{case.kind} room {room} of {decode.name}"
        if case.kind not in {"split", "foreign_keys"}:
            return
        for node, name in ((self.prefill, "computed_tokens"), (decode, "prefix_tokens")):
            answer = calls.get(f"{node.url}/v1/requests/{room}?wait=0")
            report = answer.json() if answer.is_success else {"state": "unknown", name: 0}
            if node is decode and report["state"] in {"committed", "claimed", "completed"}:
                self.violations.append(f"{said} is {report['state']}, though prefill's engine never stated its keys")
            if case.kind == "foreign_keys" and report[name]:
                self.violations.append(f"{said}: {node.name} shows {name} {report[name]} of another namespace")

    def _cancel(self, node: DaemonProcess, room: int) -> None:
        with suppress(httpx.HTTPError, BridgeError):  # the daemon may be down
            httpx.delete(
                f"{node.url}/v1/requests/{room}?reason=given+up", timeout=CALL_S, trust_env=False, verify=False
            )

    def run(self, seconds: float, *, clients: int, rest_every_s: float, chaos: Chaos | None) -> dict[str, Any]:
        """Load the daemons for so long, with rests; returns what happened."""
        threads = [
            threading.Thread(target=self._client, args=(self._seeds.getrandbits(32),), daemon=True)
            for _ in range(clients)
        ]
        for thread in threads:
            thread.start()
        started_s = time.monotonic()
        try:
            while (left_s := started_s + seconds - time.monotonic()) > 0 and not self.violations:
                self._paused.clear()
                rests_s = time.monotonic() + min(left_s, rest_every_s)
                while time.monotonic() < rests_s and not self.violations:
                    if chaos is not None:
                        chaos.strike()
                    time.sleep(0.2)
                self._paused.set()
                self._rest()
        except (BridgeError, AssertionError) as error:  # told with what came before
            self.violations.append(f"{type(error).__name__}: {error}")
        finally:
            self._stopping.set()
            for thread in threads:
                thread.join(CLAIM_S + 2 * ENGINE_CALL_S)
        for daemon in self.cluster.all():
            if "Traceback" in daemon.log_path.read_text():
                self.violations.append(f"{daemon.name} has a traceback in its log {daemon.log_path}")
        return {
            "seed": self.seed,
            "seconds": round(time.monotonic() - started_s),
            "looks": self._counts["looks"],
            "rooms": dict(sorted(self._counts.items())),
            "chaos": dict(sorted(chaos.done.items())) if chaos else {},
            "violations": self.violations,
        }

    def _rest(self) -> None:
        eventually("no room under way", lambda: not self._under_way, CLAIM_S + 2 * ENGINE_CALL_S)
        self.cluster.wait_ready()
        for node in self.nodes:
            try:
                eventually(f"all pages of {node.name}", lambda node=node: not busy_pages(node), REST_S, 0.2)
            except AssertionError:
                self.violations.append(f"{node.name} does not get pages back: {busy_pages(node)}")
            if quarantine := status(node)["quarantine"]:
                self.violations.append(f"{node.name} has pages in quarantine: {quarantine}")

    def close(self) -> None:
        for seat in self.seats.values():
            seat.close()


@contextmanager
def random_load(transport: str, seed: int) -> Iterator[RandomLoad]:
    with load_cluster(transport) as cluster:
        load = RandomLoad(cluster, seed)
        try:
            yield load
        finally:
            load.close()


def main() -> int:
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
        found = load.run(given.minutes * 60, clients=given.clients, rest_every_s=rest_every_s, chaos=Chaos(load, seed))
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
