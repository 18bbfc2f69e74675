"""The node of this configuration while it runs: its engines, ranks, pages, rooms, quarantine and store."""

from __future__ import annotations

from collections.abc import Iterator

from kvbridge.api.rooms import RoomReport
from kvbridge.api.status import NodeStatus
from kvbridge.core.ids import FrozenModel
from kvbridge.doctor.findings import Finding, Needs, fine, not_here, warning

FEW_PAGES = 0.05
"""Share of a space's pages below which the space is nearly full."""
OLD_S = 60.0


class RunningNode(FrozenModel):
    """The documents of a node about itself."""

    status: NodeStatus
    oldest: RoomReport | None = None
    """The room that has been under way for longest."""


def check_node(node: RunningNode | None, needs: Needs) -> Iterator[Finding]:
    """A node that runs has engines and ranks, room for requests, and nothing that waits for somebody."""
    if node is None:
        why = f"{needs.name} does not run here" if needs.instance else "no configuration of a node was given"
        yield not_here("no running node was looked at", why)
        return
    troubles = [*_parts(node.status), *_pages(node.status), *_rooms(node)]
    yield from troubles
    if not troubles:
        yield fine(f"{needs.name} runs: engines and ranks are there, and pages are free")


def _parts(status: NodeStatus) -> Iterator[Finding]:
    attached = [engine for engine in status.engines if not engine.gone]
    if not attached:
        last = "; ".join(f"{engine.name} (pid {engine.pid}): {engine.gone}" for engine in status.engines)
        yield warning(
            "no engine is attached" + (f"; pages wait for the end of {last}" if last else ""),
            "rooms are admitted, and end when no engine takes them in time",
            "start the engine with this node's runtime_dir, and look at the engine's log",
            subject="engines",
        )
    for rank in status.ranks:
        if rank.state != "ready":
            yield warning(
                f"rank worker {rank.rank} (pid {rank.pid}) is {rank.state}" + (f": {rank.error}" if rank.error else ""),
                "no room is admitted until every rank is ready",
                "wait while it registers memory; otherwise look for worker_gone in the node's log",
                subject=rank.rank,
            )
    if (store := status.store) is not None and store.state != "closed":
        yield warning(
            f"the {store.kind} store below host memory is not asked ({store.state})"
            + (f": {store.why_not}" * bool(store.why_not)),
            "prompts that only the store has are computed again; requests do not fail by it",
            "runbook.md#kvbridgeprefixstoreaway; look for store_ in the node's log",
            subject="store",
        )


def _pages(status: NodeStatus) -> Iterator[Finding]:
    for space, counts in status.pools.items():
        total, available = sum(counts.values()), status.available_pages.get(space, 0)
        if total and available <= FEW_PAGES * total:
            yield warning(
                f"{available} of {total} pages of the space {space} are available",
                "requests that need more wait or are answered 503",
                "kvbridge rooms shows who holds pages and what each room waits for",
                subject=space,
            )
    for reason, owners in status.quarantine.items():
        yield warning(
            f"pages of {', '.join(owners)} are in quarantine: {reason}",
            "nobody may use these pages before there is proof that no transfer writes to them any more",
            "the end of the process that is named is such a proof; otherwise wait for it to go on",
            subject="quarantine",
        )


def _rooms(node: RunningNode) -> Iterator[Finding]:
    queue, oldest = node.status.admission, node.oldest
    if queue.starved_since:
        yield warning(
            f"for {node.status.at - queue.starved_since:.0f} s not even the smallest waiting request fits",
            "requests wait until pages are released",
            "kvbridge rooms shows who holds pages",
            subject="admission",
        )
    if oldest is not None and oldest.age_s >= OLD_S and oldest.waits_for:
        limit = f", for at most {oldest.expires_in_s:.0f} s more ({oldest.limit})" if oldest.expires_in_s else ""
        yield warning(
            f"room {oldest.room} has been under way for {oldest.age_s:.0f} s and waits for {oldest.waits_for}{limit}",
            "its pages are taken until then",
            f"kvbridge room {oldest.room} shows its events",
            subject=f"room {oldest.room}",
        )
