"""A pair of daemons with a host tier on both sides: started, waited for, and what their devices hold pushed out."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.conversation import MODEL
from tests.helpers.live_rooms import LiveCluster, all_free, busy_pages, http, live_cluster, metric, status


@contextmanager
def host_tiers(
    *,
    host: Mapping[str, Any] | None = None,
    checkpoint_pages: int = 24,
    tier: Mapping[str, Any] | None = None,
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    pages: Mapping[str, int] | None = None,
    **more: Any,
) -> Iterator[LiveCluster]:
    """A running pair. `host`: more of `tier.host` on both sides; `tier`: more of `tier`; `prefill` and `decode`: of one node."""
    twins, settings = {"pages": 96, **(host or {})}, MODEL | dict(tier or {})
    checkpoints = {"checkpoint_pages": checkpoint_pages} if checkpoint_pages else {}
    with live_cluster(
        prefill={"tier": settings | {"host": twins | checkpoints}} | dict(prefill or {}),
        decode={"tier": settings | {"host": twins}} | dict(decode or {}),
        pages=dict(pages or {"full": 24, "swa": 12, "request": 6}),
        **{"host_pages": 96, **more},
    ) as running:
        assert running.sender
        assert running.reader
        yield running
        running.no_traceback()


def host_tier(daemon: DaemonProcess) -> dict[str, Any]:
    return dict(status(daemon)["host_tier"])


def copies(daemon: DaemonProcess, direction: str, outcome: str = "done") -> float:
    return metric(daemon, "kvbridge_host_tier_copies_total", direction=direction, outcome=outcome)


def quiet(daemon: DaemonProcess) -> dict[str, Any] | None:
    """Return a node's status of its host tier, once nothing is to be copied any more."""
    found = host_tier(daemon)
    return None if found["waiting_prompts"] or found["in_flight_pages"] else found


def on_host(*daemons: DaemonProcess) -> None:
    """Wait until all that devices keep is on the host as well."""
    for daemon in daemons:
        eventually(f"{daemon.name}'s backup", lambda daemon=daemon: (now := quiet(daemon)) and not now["device_pages"])


def let_go(live: LiveCluster) -> None:
    """Wait until no room has anything; engines with a GPU are given the chance to say what they still have to."""

    def look() -> bool:
        live.sender.events()
        live.reader.events()
        return not any(busy_pages(daemon) or status(daemon)["prefixes"]["readers"] for daemon in live.nodes)

    eventually("all let go of", look)


def forget(live: LiveCluster, *, leave: int = 0) -> None:
    """Push all that nobody reads off both devices but so many pages, by a request that writes everything else."""
    let_go(live)
    live.overwrite(sum(status(live.prefill)["pools"]["full"].values()) - leave)
    let_go(live)
    for daemon in live.nodes:
        assert status(daemon)["pools"]["full"]["cached"] <= leave


def drop(*daemons: DaemonProcess) -> None:
    """Have devices and hosts forget everything, once nobody has any page."""
    for daemon in daemons:
        all_free(daemon)
        eventually(f"{daemon.name} copies nothing", lambda daemon=daemon: quiet(daemon))
        assert http("DELETE", daemon, "/v1/prefixes", params={"store": "keep"}).is_success


def adds_up(daemon: DaemonProcess) -> None:
    """Nobody has a page but the cache, and the twins of the cache are as many as it says."""
    all_free(daemon)
    eventually(f"{daemon.name} copies nothing", lambda: quiet(daemon))
    found = status(daemon)
    where, pools = found["host_tier"], found["pools"]
    assert pools["full"]["cached"] == where["device_pages"] + where["both_pages"]
    assert pools["full_twin"]["cached"] == where["both_pages"] + where["host_pages"]
    assert not found["quarantine"]
