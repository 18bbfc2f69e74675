"""A path that is lost in the middle of a request, against the same request undisturbed, from publication to claim.

With half of its operations confirmed, the kernel ends every connection of the prefill rank worker by the first transport.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbridge.cli.local_cluster import DaemonProcess
from kvbridge.core.plan.operations import Section
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
from tests.bench.output import spread, table as text
from tests.helpers import synthetic
from tests.helpers.cluster import Cluster, cluster, eventually, mutated
from tests.helpers.cut_paths import CutSettings, cut_worker
from tests.helpers.live_rooms import check_rows, status

MODEL = "deepseek-v4-flash"
TOKENS = 131_072
PAGES = {"full": TOKENS // 256 + 16, "swa": 16, "request": 4}
ORDERS = (("mooncake", "nixl"), ("nixl", "mooncake"))
ADDRESSES = {"mooncake": "127.0.0.2", "nixl": "127.0.0.1"}
TURNS = 5
MOST_TRIES = 4
"""For a turn, until a path was lost under the request."""
RETRY_S = 0.5
WAIT_S = 180.0
BUDGET_S = 1.0


@dataclass
class _Pair:
    running: Cluster
    sender: PrefillEngine
    reader: DecodeEngine
    flag: Path
    order: tuple[str, str]

    def whole(self) -> bool:
        """Whether the first path is used and the second stands by."""
        [peer] = status(self.running.prefill)["peers"]
        return [*peer["transports"].values()] == [[self.order[0]]] and [*peer["standby"].values()] == [[self.order[1]]]

    def losses(self) -> int:
        return sum(problem["what"] == "path lost" for problem in status(self.running.prefill)["problems"])

    def cross(self, *, compared: bool) -> float:
        room = int(self.running.pair(TOKENS)["room"])
        begun = self.sender.begin(room, prompt_tokens=TOKENS)
        section = Section(prompt_tokens=TOKENS, start_token=0, stop_token=TOKENS)
        for views in self.sender.views.values():
            synthetic.fill(views, room=room, tables=begun.tables, section=section)
        begun_s = time.monotonic()
        begun.publish(TOKENS)
        begun.finish()
        claimed = self.reader.claim(room, timeout_s=WAIT_S)
        seconds = time.monotonic() - begun_s
        if compared:
            check_rows(self.reader, claimed)
        claimed.release()
        return seconds

    def disturbed(self) -> float:
        for _ in range(MOST_TRIES):
            before = self.losses()
            self.flag.touch()
            try:
                seconds = self.cross(compared=True)
            finally:
                self.flag.unlink()
            lost = self.losses() > before
            eventually("both paths again", self.whole, WAIT_S)
            if lost:
                return seconds
        raise AssertionError(f"no path was lost under {MOST_TRIES} requests")


@contextmanager
def _pair(order: tuple[str, str], folder: Path) -> Iterator[_Pair]:
    flag = folder / "flag"
    cut = CutSettings(transport=order[0], addresses=(ADDRESSES[order[0]],), after_share=0.5, flag=str(flag))
    code = cut_worker(cut) + f"\nfrom kvbridge.worker import peers\npeers.RETRY_S = {RETRY_S}\n"
    section = {
        "order": list(order),
        "mooncake": {"host": ADDRESSES["mooncake"]},
        # Batches of few: what a batch has brought over shows when all of it has.
        "nixl": {"ucx_tls": "tcp", "ucx_net_devices": "lo", "batch_operations": 4},
    }

    def change(daemon: DaemonProcess) -> DaemonProcess:
        return mutated(daemon, worker_code=code) if daemon.role == "prefill" else daemon

    more = {"prefill": {"transports": section}, "decode": {"transports": section}}
    with (
        cluster(
            {"preset": MODEL}, transport=order[0], pages=PAGES, host_pages=PAGES["full"], change=change, **more
        ) as running,
        PrefillEngine.attach(running.prefill.runtime_dir) as sender,
        DecodeEngine.attach(running.decode.runtime_dir) as reader,
    ):
        made = _Pair(running, sender, reader, flag, order)
        made.cross(compared=False)
        eventually("both paths", made.whole, WAIT_S)
        yield made


def run(*, quick: bool) -> dict[str, Any]:
    turns = 1 if quick else TURNS
    found = {}
    for order in ORDERS:
        with tempfile.TemporaryDirectory() as folder, _pair(order, Path(folder)) as pair:
            times_s = [(pair.cross(compared=False), pair.disturbed()) for _ in range(turns)]
        plain_s, lost_s = map(list, zip(*times_s, strict=True))
        added_s = statistics.median(lost_s) - statistics.median(plain_s)
        found[" then ".join(order)] = {"undisturbed_s": plain_s, "disturbed_s": lost_s, "added_s": added_s}
    return {"tokens": TOKENS, "budget_s": BUDGET_S, "orders": found}


def table(found: dict[str, Any]) -> str:
    rows = [
        (order, spread(one["undisturbed_s"]), spread(one["disturbed_s"]), one["added_s"], found["budget_s"])
        for order, one in found["orders"].items()
    ]
    title = f"{found['tokens']:,} tokens of {MODEL}; every byte of the disturbed requests was as written"
    return text(("transports", "undisturbed s", "path lost in the middle s", "added s", "budget s"), rows, title)
