"""The daemons of a random load, with pools that run short and one store; and engines, which are killed at any time."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import numpy.typing as npt
import psutil

from kvbridge.cli.local_cluster import Cluster, DaemonProcess, daemon_config, plan_cluster
from kvbridge.core.errors import DetachedError, PeerError
from kvbridge.core.ids import Role
from tests.helpers.cluster import mutated
from tests.helpers.cut_paths import CutSettings, cut_worker
from tests.helpers.live_rooms import http, status
from tests.helpers.obedient_engines import ObedientEngine
from tests.helpers.prompts import TIER, Keyed

ENGINE_CALL_S = 60.0
MODEL = "tiny-v4"
PAGES = {"full": 28, "swa": 18, "request": 10}
HOST_PAGES, HOST_COPIES, CHECKPOINTS = 44, 40, 16
STORE_BYTES = "30MB"
KEEP_S = 600


@contextmanager
def load_cluster(transport: str) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    cut = CutSettings(transport="mooncake", addresses=("127.0.0.1",), after_share=0.0, flag=str(folder / "cut"))
    order = ["mooncake", "local"] if transport == "mooncake" else [transport]

    def more(**host: Any) -> dict[str, Any]:
        tier = TIER["tier"] | {"host": {"pages": HOST_COPIES} | host}
        tier["store"] = {"kind": "files", "directory": str(folder / "store"), "max_bytes": STORE_BYTES}
        return {
            "transports": {"order": order, "mooncake": {"host": "127.0.0.1"}},
            "tier": tier,
            "timeouts": {"claim_s": 20.0, "offer_s": 20.0, "begin_s": 15.0, "peer_silence_s": 4.0, "drain_s": 5.0},
        }

    def pools(**host: Any) -> dict[str, Any]:
        return {"device": PAGES, "keep_s": KEEP_S} | host

    common: dict[str, Any] = {"model": {"preset": MODEL}, "transport": order[0]}
    with_host = pools(host={"pages": HOST_PAGES})
    cluster = plan_cluster(
        folder,
        prefill=daemon_config(**common, instance=f"prefill-{folder.name}", pools=pools())
        | more(checkpoint_pages=CHECKPOINTS),
        decode=daemon_config(**common, instance=f"decode-{folder.name}", pools=with_host) | more(),
        ends_with_us=True,
    )
    second = DaemonProcess("decode", "the second decode daemon", folder / "e", ends_with_us=True)
    second.config = (
        daemon_config(**common, instance=f"second-{folder.name}", runtime_dir=second.runtime_dir, pools=with_host)
        | more()
    )
    cluster.others.append(second)
    if transport == "mooncake":
        cluster.prefill = mutated(cluster.prefill, worker_code=cut_worker(cut))
    try:
        cluster.start()
        cluster.wait_ready()
        # The nodes have been told where bootstrap is: the next one is there, too.
        cluster.bootstrap.config["http"] = {"port": httpx.URL(cluster.bootstrap.url).port}
        yield cluster
    finally:
        cluster.stop(force_after_s=5.0)
        for path in Path("/dev/shm").glob(f"kvbridge-*{folder.name}*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


class Seat:
    """The place of one node's engine: filled when a room needs it, and anew once the engine or its daemon is gone."""

    def __init__(self, role: Role, node: DaemonProcess, violation: Callable[[str], None]) -> None:
        self._role, self._node, self._violation = role, node, violation
        self._lock = threading.Lock()
        self._engine: ObedientEngine | None = None
        self._struck: ObedientEngine | None = None

    def taken(self) -> Callable[..., Any]:
        """Return what carries out verbs for one room; it raises DetachedError once the engine that is there now is gone."""
        with self._lock:
            if self._engine is None:
                self._engine = ObedientEngine(self._role, self._node.runtime_dir)
            return partial(self._call, self._engine)

    def _call(self, engine: ObedientEngine, verb: str, *arguments: Any) -> Any:
        with self._lock:
            if self._engine is not engine:
                raise DetachedError(f"the engine of {self._node.name} is another by now")
            try:
                return engine.call(verb, *arguments, timeout_s=ENGINE_CALL_S)
            except (EOFError, OSError, DetachedError, PeerError) as error:
                if isinstance(error, EOFError | OSError) and engine is not self._struck:
                    self._violation(f"the engine of {self._node.name} has ended by itself")
                self._engine = None
                engine.close()
                raise DetachedError(f"the engine of {self._node.name} is gone") from error
            except AssertionError:  # its late answer would be taken for that to the next call
                self._engine = None
                engine.close()
                raise

    @property
    def pid(self) -> int | None:
        with self._lock:
            return self._engine.pid if self._engine is not None else None

    def kill(self) -> None:
        """kill -9, in the middle of a call as it may be."""
        self._struck = self._engine
        if self._struck is not None:
            with suppress(ValueError, ProcessLookupError):  # it has just been closed
                self._struck.signal(signal.SIGKILL)

    def close(self) -> None:
        with self._lock:
            if self._engine is not None:
                self._engine.close()
                self._engine = None


if TYPE_CHECKING:
    from tests.faults.random_load import RandomLoad

EVERY_S = (1.0, 5.0)
STOP_S = (0.5, 6.0)
CUT_S = 0.5
RETURN_S = 90.0


class Chaos:
    def __init__(self, load: RandomLoad, seed: int) -> None:
        self._load = load
        self._drawn = random.Random(seed)
        self._due_s = time.monotonic() + EVERY_S[1]
        self.done: Counter[str] = Counter()
        self._strikes: dict[str, tuple[int, Callable[[DaemonProcess], object]]] = {
            "engine killed": (4, lambda node: load.seats[node.name].kill()),
            "worker killed": (2, self._kill_worker),
            "node killed": (3, lambda node: self._restart(node, node.kill)),
            "node ended": (1, lambda node: self._restart(node, node.stop)),
            "bootstrap killed": (1, lambda _: self._restart(load.cluster.bootstrap, load.cluster.bootstrap.kill)),
            "store process killed": (2, self._kill_store),
            "process stopped": (5, self._stop),
            "prefixes dropped": (2, lambda node: http("DELETE", node, "/v1/prefixes")),
            "store damaged": (4, self._damage_store),
        }
        if load.prefill.config["transports"]["order"][0] == "mooncake":
            self._strikes["connections cut"] = (8, self._cut)

    def strike(self) -> None:
        if time.monotonic() < self._due_s:
            return
        names = list(self._strikes)
        [name] = self._drawn.choices(names, [self._strikes[each][0] for each in names])
        self._strikes[name][1](self._drawn.choice(self._load.nodes))
        for node in self._load.nodes:
            node.wait_ready(RETURN_S)
        self.done[name] += 1
        self._due_s = time.monotonic() + self._drawn.uniform(*EVERY_S)

    def _kill_worker(self, node: DaemonProcess) -> None:
        for worker in _worker(node):
            worker.kill()

    def _restart(self, daemon: DaemonProcess, end: Callable[[], object]) -> None:
        end()
        time.sleep(self._drawn.random())
        daemon.start()
        daemon.wait_ready(RETURN_S)

    def _kill_store(self, node: DaemonProcess) -> None:
        for child in _process(node).children():
            if "stores" in " ".join(child.cmdline()):
                child.kill()

    def _stop(self, node: DaemonProcess) -> None:
        victim = self._drawn.choice([_process(node), *_worker(node), *_found(self._load.seats[node.name].pid)])
        try:
            victim.send_signal(signal.SIGSTOP)
            time.sleep(self._drawn.uniform(*STOP_S))
        finally:
            victim.send_signal(signal.SIGCONT)

    def _damage_store(self, _: DaemonProcess) -> None:
        files = [path for path in self._load.store.rglob("*") if path.is_file() and path.stat().st_size > 1_000]
        for path in self._drawn.sample(files, min(3, len(files))):
            try:
                data = bytearray(path.read_bytes())
                match self._drawn.randrange(4):
                    case 0:
                        data[self._drawn.randrange(len(data))] ^= 1 << self._drawn.randrange(8)
                    case 1:
                        del data[self._drawn.randrange(len(data)) :]
                    case 2:
                        data[:] = bytes(len(data))
                    case 3:
                        data[:] = self._drawn.choice(files).read_bytes()
                path.write_bytes(data)
            except OSError:
                continue  # the store has just dropped it

    def _cut(self, _: DaemonProcess) -> None:
        self._load.cut_flag.touch()
        time.sleep(CUT_S)
        self._load.cut_flag.unlink(missing_ok=True)


def _process(node: DaemonProcess) -> psutil.Process:
    assert node.process is not None
    return psutil.Process(node.process.pid)


def _worker(node: DaemonProcess) -> list[psutil.Process]:
    return _found(status(node)["ranks"][0]["pid"])


def _found(pid: int | None) -> list[psutil.Process]:
    return [psutil.Process(pid)] if pid and psutil.pid_exists(pid) else []


TENANTS = ("acme", "globex")
PAGE = 256
CUTS = (300, 700)
"""In tokens: where the branches of a conversation part."""
MOST_TOKENS = 2_000
EDGES = tuple(page + near for page in range(PAGE, MOST_TOKENS, PAGE) for near in (-1, 0, 1, 2, 3))
"""Lengths at which the number of pages of a space changes."""

LIES = ("split", "keyless", "liar_at_begin", "liar_at_claim", "foreign_keys")
"""Prefill is told of another prompt than decode, with the same last key; prefill is told no keys; an engine has other tokens than
the room's keys name; the keys are those of the other tenant."""
FORGED = "forged"
"""A lie that only the next reader can notice: prefill's engine writes another prompt than the one whose keys the engine states.
Only the test which shows that wrong bytes are found has this lie."""


@dataclass(frozen=True)
class Branch(Keyed):
    """Tokens of one tenant: (token id, stop) for each segment, with ascending stops."""

    namespace: str
    segments: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        return self.segments[-1][1]

    def tokens(self, count: int) -> npt.NDArray[np.uint32]:
        counts = np.diff([0, *(stop for _, stop in self.segments)])
        return np.repeat(np.array([value for value, _ in self.segments], dtype=np.uint32), counts)[:count]

    def until(self, tokens: int) -> Branch:
        kept = [(value, min(stop, tokens)) for value, stop in self.segments]
        count = next(number for number, (_, stop) in enumerate(kept, 1) if stop == tokens)
        return replace(self, segments=tuple(kept[:count]))

    def longer(self, value: int, more: int) -> Branch:
        return replace(self, segments=(*self.segments, (value, self.length + more)))

    def with_other_tokens(self) -> Branch:
        """Return a prompt of the same length and tenant that no client sends, with other tokens from the first on."""
        return replace(self, segments=tuple((value + 500_000, stop) for value, stop in self.segments))

    def of_other_tenant(self) -> Branch:
        return replace(self, namespace=next(name for name in TENANTS if name != self.namespace))


def drawn_prompt(drawn: random.Random, conversations: int) -> Branch:
    """Draw a prompt: a tenant, one of its conversations, a branch at each cut, and a length that is often at a page's edge."""
    # Both tenants have the same tokens: only the namespace tells their pages apart.
    whole = Branch(drawn.choice(TENANTS), ((1_000 + drawn.randrange(conversations), CUTS[0]),))
    for cut, stop in zip(CUTS, (*CUTS[1:], MOST_TOKENS), strict=True):
        whole = whole.longer(10 * cut + drawn.randrange(2), stop - cut)
    return whole.until(drawn.choice(EDGES) if drawn.random() < 0.5 else drawn.randint(1, MOST_TOKENS))


@dataclass(frozen=True)
class Case:
    kind: str
    prompt: Branch
    to_prefill: Branch | None
    to_decode: Branch
    begun: Branch | None
    claimed: Branch | None
    """None: no engine comes."""

    @classmethod
    def of(cls, kind: str, prompt: Branch) -> Case:
        other, theirs = prompt.with_other_tokens(), prompt.of_other_tenant()
        lies: dict[str, tuple[Branch | None, Branch, Branch | None, Branch | None]] = {
            "split": (other, prompt, other, None),
            "keyless": (None, prompt, None, prompt),
            "liar_at_begin": (prompt, prompt, other, prompt),
            "liar_at_claim": (prompt, prompt, prompt, other),
            "foreign_keys": (theirs, theirs, prompt, prompt),
        }
        return cls(kind, prompt, *lies.get(kind, (prompt,) * 4))
