"""Host tiers of real daemons when something goes wrong: nothing is lost or leaked, nothing is wrong, and requests go on.

Copies to the host are held in the rank worker of the prefill node, which is then killed, or let go; or decode's engine
is killed while it loads.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.helpers.cluster import DaemonProcess, eventually, mutated
from tests.helpers.conversation import PAGE, Conversation, Turn
from tests.helpers.host_tiers import (
    adds_up,
    copies,
    forget,
    host_tier,
    host_tiers,
    let_go as rooms_let_go,
    on_host,
    quiet,
)
from tests.helpers.live_rooms import LiveCluster, http, report, status

_CODE = """
from pathlib import Path
from kvbridge.worker.copies import BackupCopier

done = BackupCopier.done
BackupCopier.done = lambda copier, ticket: not Path({file!r}).exists() and done(copier, ticket)
"""


def with_held_copies(daemon: DaemonProcess) -> DaemonProcess:
    """The same daemon, whose rank workers' copies `hold` and `let_go` end; bootstrap as it is."""
    if daemon.role == "bootstrap":
        return daemon
    return mutated(daemon, worker_code=_CODE.format(file=str(daemon.folder / "hold")))


def hold(daemon: DaemonProcess) -> None:
    """No copy of this daemon's rank workers ends from now on."""
    (daemon.folder / "hold").touch()


def let_go(daemon: DaemonProcess) -> None:
    (daemon.folder / "hold").unlink(missing_ok=True)


POOL = {"full": 16, "swa": 8, "request": 4}
COPY_S = 30.0
"""`timeouts.copy_s`: long enough for a room to cross and to be looked at while a copy is held."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def live() -> Iterator[LiveCluster]:
    limits = {"timeouts": {"copy_s": COPY_S}}
    with host_tiers(
        host={"pages": 32}, checkpoint_pages=8, pages=POOL, prefill=limits, decode=limits, change=with_held_copies
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def all_is_well(live: LiveCluster) -> Iterator[None]:
    yield
    let_go(live.prefill)
    live.detach()
    for daemon in live.nodes:
        daemon.wait_ready()
        eventually("settled", lambda daemon=daemon: settled(daemon))
        adds_up(daemon)
        assert http("DELETE", daemon, "/v1/prefixes").status_code == 200


def settled(daemon: DaemonProcess) -> bool:
    """Whether nothing is to be copied and nothing is in quarantine."""
    return quiet(daemon) is not None and not status(daemon)["quarantine"]


def copies_held(live: LiveCluster, number: int, tokens: int) -> Turn:
    """Have a room cross of whose pages a copy is under way that does not end."""
    hold(live.prefill)
    turn = Conversation(live, number).cross(tokens)
    eventually("an order", lambda: host_tier(live.prefill)["in_flight_pages"])
    return turn


def twins(daemon: DaemonProcess, state: str) -> int:
    return int(status(daemon)["pools"]["full_twin"][state])


def test_a_worker_that_is_killed_in_the_middle_of_a_backup(live: LiveCluster) -> None:
    before = copies(live.prefill, "backup", "worker_gone")
    turn = copies_held(live, 1, 1000)
    assert twins(live.prefill, "leased") == 3
    os.kill(status(live.prefill)["ranks"][0]["pid"], signal.SIGKILL)
    eventually("rolled back", lambda: copies(live.prefill, "backup", "worker_gone") == before + 1)
    found = host_tier(live.prefill)
    assert "died" in found["last_failure"]
    assert (found["device_pages"], found["both_pages"]) == (3, 0), "the device's memory is the node's"
    shown = status(live.prefill)
    assert shown["quarantine"] == {}
    # A worker that is back already has been asked again.
    assert bool(shown["pools"]["full_twin"]["leased"]) == bool(shown["host_tier"]["in_flight_pages"])
    let_go(live.prefill)
    live.prefill.wait_ready()
    live.detach()
    eventually("tried again", lambda: host_tier(live.prefill)["both_pages"] == 3)
    assert turn.talk.cross(1500).reused[0] == 768, "what was not lost is of use"


KILLED = """
import sys, os
from pathlib import Path
from kvbridge.core.wire.engine_messages import *
from kvbridge.core.wire.messages import FEATURES
from kvbridge.core.ids import Role
from kvbridge.engine.link import EngineLink
folder, room, keys = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
link = EngineLink(Path(folder), timeout_s=20)
link.call(Attach(call=link.number(), role=Role.DECODE, features=FEATURES), Attached)
pages = link.call(Claim(call=link.number(), room=room, page_hashes=keys), Pages)
print(len(pages.load), flush=True)
sys.stdin.read()
"""
"""An engine that is told what to load, and never says that it has."""


def test_an_engine_that_is_killed_while_it_loads_leaves_nothing_behind(live: LiveCluster) -> None:
    talk = Conversation(live, 40)
    talk.cross(3 * PAGE + 9)
    on_host(*live.nodes)
    forget(live)
    turn, daemon = talk.turn(5 * PAGE), live.decode
    turn.compute()
    eventually("committed", lambda: report(daemon, turn.room)["state"] == "committed")
    told = [str(daemon.runtime_dir), str(turn.room), turn.keys.data.hex()]
    with subprocess.Popen([sys.executable, "-c", KILLED, *told], stdin=-1, stdout=-1, text=True) as process:
        try:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == 1, "nothing was to be loaded"
            assert status(daemon)["prefixes"]["readers"] == 1
        finally:
            process.kill()
    eventually("its end", lambda: report(daemon, turn.room)["state"] == "failed")
    rooms_let_go(live)
    assert talk.cross(5 * PAGE + 1).from_host[1] == 3 * PAGE
