"""The rank workers of a node as its node sees them: whoever says hello gets a setup, and what is sent to it is written down."""

from __future__ import annotations

from kvbridge.core.ids import Rank
from kvbridge.core.wire.messages import RankDescription, TransportEndpoint
from kvbridge.core.wire.worker_messages import WorkerHello, WorkerReady, WorkerSetup
from kvbridge.node.workers import WorkerSet
from tests.helpers.rooms import GEOMETRY, R0, R1, RecordedEvents, manifest


def setup(rank: Rank) -> WorkerSetup:
    """What a rank worker is told when it comes."""
    return WorkerSetup(
        geometry=GEOMETRY,
        rank=rank,
        pp_size=1,
        tp_size=2,
        layers=(0,),
        device=(),
        host=(),
        transports="{}",
        transfer_timeout_s=1.0,
    )


class WorkerBench:
    """Two ranks."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, object]] = []
        self.events = RecordedEvents()
        self.workers = WorkerSet({R0: (0, 1), R1: (0, 1)}, self.events)
        self.workers.connect(lambda link, message: self.messages.append((link, message)))

    def hello(self, rank: Rank = R0, link: str = "link") -> str:
        return self.workers.hello(link, WorkerHello(rank=rank, pid=11), setup)

    def ready(self, rank: Rank = R0, **fields) -> None:
        endpoint = TransportEndpoint(transport="local", data=b"1")
        described = RankDescription(manifest=manifest(rank=rank, tp_size=2), endpoints=(endpoint,))
        self.workers.ready(WorkerReady(rank=rank, pid=11, description=described, **fields))
