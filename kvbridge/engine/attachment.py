"""What an engine process gets when it attaches: the node's answer, its memory mapped, and views of it.

Owns: the link, the mappings and the views of one engine process, and their order of closing. Must not know: the verbs.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from kvbridge.core.errors import NotReadyError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.engine_messages import Attach, Attached, RoomEvent
from kvbridge.engine.link import EngineLink
from kvbridge.engine.views import PoolViews
from kvbridge.pool.adopted_pool import AdoptedPool
from kvbridge.pool.layout import RankPart
from kvbridge.pool.sharing import MappedRegions

DEFAULT_CALL_TIMEOUT_S = 10.0
RETRY_PAUSE_S = 0.05


@dataclass
class Attachment:
    """One engine process on one node. Used by one thread. Views are valid until `close`."""

    link: EngineLink
    answer: Attached
    mapped: MappedRegions
    views: dict[Rank, PoolViews]
    """For each rank that this engine serves: its device pools and the node's host pool."""
    closers: list[Callable[[], None]] = field(default_factory=list)
    """What else ends with the attachment, and before it (adopted pools: the workers)."""

    @property
    def geometry(self) -> ModelGeometry:
        """The model that the node serves."""
        return self.answer.geometry

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks that this engine serves."""
        return self.answer.ranks

    def layers(self, rank: Rank) -> tuple[int, ...]:
        """Global layer ids of a rank."""
        return self.answer.layers[str(rank)]

    def events(self, timeout_s: float = 0.0) -> list[RoomEvent]:
        """Return what the node has told since the last call, waiting up to `timeout_s` for the first event."""
        return self.link.events(timeout_s)

    def close(self) -> None:
        """Drop the views, unmap the memory and leave the node. Tensors that came from the views must not be used any more."""
        for close in self.closers:
            close()
        self.closers.clear()
        self.views.clear()
        self.mapped.close()
        self.link.close()


def attach(
    runtime_dir: Path | str,
    role: Role,
    *,
    ranks: Iterable[Rank] = (),
    call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S,
    adopted: Mapping[Rank, Sequence[Region]] | None = None,
) -> Attachment:
    """Attach to the daemon whose runtime directory this is, for `ranks` (none named: every rank of the node).

    `adopted` is the device memory that this process brings for its ranks. Raises DeadlineError when no daemon answers,
    NotReadyError when the node's memory is not there within `call_timeout_s`, InvalidInputError for ranks of other nodes,
    the wrong role, or adopted memory that does not fit the model.
    """
    link = EngineLink(Path(runtime_dir), name=f"engine-{os.getpid()}-{secrets.token_hex(4)}", timeout_s=call_timeout_s)
    try:
        answer = _call_attach(link, role, tuple(ranks), timeout_s=call_timeout_s)
        brought = {rank: _adopted_regions(answer, rank, given) for rank, given in (adopted or {}).items()}
        devices = [region for rank in answer.ranks for region in answer.device.get(str(rank), ())]
        mapped = MappedRegions((*answer.host, *devices))
    except BaseException:
        link.close()
        raise
    left = iter(mapped.regions)
    host = tuple(islice(left, len(answer.host)))
    views = {}
    for rank in answer.ranks:
        owned = tuple(islice(left, len(answer.device.get(str(rank), ()))))
        views[rank] = PoolViews(answer.geometry, owned + brought.get(rank, ()) + host)
    return Attachment(link, answer, mapped, views)


def _call_attach(link: EngineLink, role: Role, ranks: tuple[Rank, ...], *, timeout_s: float) -> Attached:
    """Ask until the node has its memory: it cannot become ready before engines that bring theirs have attached."""
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            return link.call(Attach(call=link.number(), role=role, ranks=ranks, pid=os.getpid()), Attached)
        except NotReadyError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(RETRY_PAUSE_S)


def _adopted_regions(answer: Attached, rank: Rank, given: Sequence[Region]) -> tuple[Region, ...]:
    """Check an adopted rank's memory here as well as in its worker, so that the caller hears what is wrong with it."""
    part = RankPart(rank=rank, pp_size=answer.pp_size, tp_size=answer.tp_size, layers=answer.layers[str(rank)])
    on_host = {shared.region.component for shared in answer.host}
    return AdoptedPool(answer.geometry, part, given, exclude=on_host).regions()
