"""A pair is upgraded under load: a second pair joins, the first is told to end, and no request is lost."""

import contextlib
import queue
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Self

import pytest

from kvbridge.engine import DecodeEngine, PrefillEngine
from tests.helpers.cluster import Cluster, DaemonProcess, cluster, daemon_config, eventually
from tests.helpers.live_rooms import CLAIM_S, check_rows, http, write
from tests.helpers.rank_harness import Case

pytestmark = pytest.mark.thorough

MODEL = {"preset": "tiny-v4"}
POOLS = {"device": {"full": 64, "swa": 16, "request": 8}}
TOKENS, OUTSTANDING = 300, 4


@dataclass
class Load:
    """A router that always has some requests under way, and the engines of all nodes, in a thread of their own."""

    made: Cluster
    nodes: dict[str, DaemonProcess]
    issued: int = 0
    done: dict[tuple[str, str], int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tickets: queue.Queue[dict[str, Any] | None] = queue.Queue(OUTSTANDING)
        self._stop = threading.Event()
        self._engines: dict[str, Any] = {}
        self._threads = [threading.Thread(target=self._route), threading.Thread(target=self._serve)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def served_by(self, name: str) -> int:
        return sum(count for pair, count in self.done.items() if name in pair)

    def _route(self) -> None:
        while not self._stop.is_set():
            answer = http("POST", self.made.bootstrap, "/v1/requests", json={"prompt_tokens": TOKENS})
            if answer.status_code == 201:
                self.issued += 1
                self._tickets.put(answer.json())
            elif answer.status_code == 503:  # to be asked again: nothing is lost
                time.sleep(0.05)
            else:
                self.lost.append(f"{answer.status_code}: {answer.text}")
        self._tickets.put(None)

    def _serve(self) -> None:
        while (ticket := self._tickets.get()) is not None:
            pair = ticket["prefill"]["instance"], ticket["decode"]["instance"]
            try:
                self._cross(ticket["room"], self._engine(PrefillEngine, pair[0]), self._engine(DecodeEngine, pair[1]))
                self.done[pair] = self.done.get(pair, 0) + 1
            except Exception as error:  # noqa: BLE001 - each is a lost request
                self.lost.append(f"{pair} room {ticket['room']}: {type(error).__name__}: {error}")
        for engine in self._engines.values():
            with contextlib.suppress(Exception):  # its daemon may have ended
                engine.close()

    def _engine(self, kind: type, name: str) -> Any:
        if name not in self._engines:
            self._engines[name] = kind.attach(self.nodes[name].runtime_dir)
        return self._engines[name]

    def _cross(self, room: int, sender: PrefillEngine, reader: DecodeEngine) -> None:
        write(sender, room, Case(TOKENS))
        claimed = reader.claim(room, timeout_s=CLAIM_S)
        check_rows(reader, claimed)
        claimed.release()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_pair_is_replaced_under_load_and_no_request_is_lost():
    with cluster(MODEL) as made:
        nodes = {"prefill-0": made.prefill, "decode-0": made.decode}
        for role, pools in (("prefill", POOLS), ("decode", {**POOLS, "host": {"pages": 64}})):
            joining = DaemonProcess(role, f"the new {role} daemon", made.folder / f"{role[0]}1")
            joining.config = daemon_config(
                MODEL, instance=f"{role}-1", runtime_dir=joining.runtime_dir, transport="local", pools=pools
            )
            joining.config["bootstrap"] = {"url": made.bootstrap.url, "heartbeat_interval_s": 0.5}
            nodes[f"{role}-1"] = joining
            made.others.append(joining)
        with Load(made, nodes) as load:
            eventually("requests are served", lambda: load.served_by("decode-0") >= 5 or load.lost, 60)
            for joining in made.others:
                joining.start()
            joined = ("prefill-1", "decode-1")
            eventually("the new pair takes requests", lambda: all(map(load.served_by, joined)) or load.lost, 60)
            leaving = [made.prefill, made.decode]
            for daemon in leaving:
                daemon.kill(signal.SIGTERM)
            eventually("the old pair has ended", lambda: not any(daemon.running for daemon in leaving), 60)
            enough = load.done.get(joined, 0) + 5
            eventually("the new pair serves alone", lambda: load.done.get(joined, 0) >= enough or load.lost, 60)
        assert not load.lost
        assert sum(load.done.values()) == load.issued
        assert [daemon.process.returncode for daemon in leaving] == [0, 0]
        assert "rooms_aborted" not in made.prefill.log(500) + made.decode.log(500)
        print(load.done)
