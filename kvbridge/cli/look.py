"""`kvbridge status`, `kvbridge rooms` and `kvbridge room`: running daemons from a terminal. They change nothing."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import TypeAdapter
from rich.filesize import decimal

from kvbridge.api.client import BlockingClient, Params
from kvbridge.api.rooms import MAX_LISTED, RoomPage, RoomReport, RoomTimeline
from kvbridge.api.status import BootstrapStatus, DaemonStatus, NodeStatus, PrefillNodeStatus, RouterStatus
from kvbridge.cli.config import EXIT_FAILED, DaemonRole, JsonOption, aligned, fail, with_options
from kvbridge.cli.up import named_daemons
from kvbridge.config.endpoints import TokenConfig
from kvbridge.config.loading import read_token
from kvbridge.core.errors import BridgeError, UnknownRoomError
from kvbridge.core.session.tables import RoomState
from kvbridge.pool.accounts.book import PageState

FoundT = TypeVar("FoundT")

CALL_S = 5.0
RECENT_S = 900.0
"""Problems of this time before the look are shown; `/status` has older ones."""
SILENT_S, MINUTE_S = 5.0, 60.0
OPEN = frozenset(state for state in RoomState if not state.final)
DOCUMENTS: Mapping[str, type[DaemonStatus]] = {
    "prefill": NodeStatus,
    "decode": NodeStatus,
    "bootstrap": BootstrapStatus,
    "router": RouterStatus,
}
TargetsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="URL|DIR...",
        help="Daemons, as http://127.0.0.1:7901; a daemon's runtime_dir; or the DIR of `kvbridge up`.",
    ),
]
TokenOption = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="File with the daemons' token (http.token_file).")
]


def status(targets: TargetsArgument, token_file: TokenOption = None, as_json: JsonOption = False) -> None:
    """Show whether daemons are ready, and what keeps them busy or from it.

    A node shows its engines, ranks, rooms, pools, peers, store, quarantine, and the
    problems of the last fifteen minutes. Bootstrap shows instances, and why they are
    not ready. A router shows its servers.

    Exit codes: 0: all are ready; 1: one is not, or does not answer; 2: wrong usage.
    """
    found = _ask_all(_targets(targets, token_file), _status)
    if as_json:
        _print_json(found)
    else:
        typer.echo("\n\n".join("\n".join(_lines_of(url, one)) for url, one in found.items()))
    if not all(isinstance(one, DaemonStatus) and one.ready.ready for one in found.values()):
        raise typer.Exit(EXIT_FAILED)


@dataclass(frozen=True, kw_only=True)
class RoomsOptions:
    """The options of `kvbridge rooms`."""

    targets: TargetsArgument
    state: Annotated[list[RoomState] | None, typer.Option(help="Only rooms in this state. May be repeated.")] = None
    peer: Annotated[str, typer.Option("--peer", metavar="INSTANCE[/NODE]", help="Only rooms with this node.")] = ""
    client: Annotated[str | None, typer.Option("--client", help="Only rooms of this client.")] = None
    ended: Annotated[bool, typer.Option("--ended", help="Rooms that have ended, too.")] = False
    token_file: TokenOption = None
    as_json: JsonOption = False


@with_options(RoomsOptions)
def rooms(options: RoomsOptions) -> None:
    """List the rooms of nodes, the oldest first: what each one waits for, and who has to act.

    Exit codes: 0: listed; 1: a node does not answer; 2: wrong usage.
    """
    states = frozenset(options.state or (RoomState if options.ended else OPEN))
    query: Params = {"state": [one.value for one in states], "limit": MAX_LISTED, "peer": options.peer}
    if options.client is not None:
        query["client"] = options.client
    targets = _targets(options.targets, options.token_file, nodes_only=True)
    found = _ask_all(targets, lambda calls, url: _all_rooms(calls, url, query))
    if options.as_json:
        _print_json(found)
    else:
        told = {url: one if isinstance(one, BridgeError) else _rooms_table(one) for url, one in found.items()}
        typer.echo("\n\n".join(f"{url}: {one}" for url, one in told.items()))
    _fail_if_silent(found)


def room(
    number: Annotated[int, typer.Argument(metavar="ROOM", min=0, help="The room's id.")],
    targets: TargetsArgument,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one room as each node sees it: its report, and its events in their order.

    Exit codes: 0: a node knows the room; 1: none does, or a node does not answer;
    2: wrong usage.
    """
    found = _ask_all(_targets(targets, token_file, nodes_only=True), lambda calls, url: _room(calls, url, number))
    known = {url: one for url, one in found.items() if not isinstance(one, UnknownRoomError)}
    if as_json:
        _print_json(found)
    else:
        told = {url: one if isinstance(one, BridgeError) else _story(*one) for url, one in found.items()}
        typer.echo("\n\n".join(f"{url}: {one}" for url, one in told.items()))
    if not known:
        raise typer.Exit(EXIT_FAILED)
    _fail_if_silent(known)


# ---------------------------------------------------------------------------------------------- whom to ask


def _targets(given: Sequence[str], token_file: Path | None, *, nodes_only: bool = False) -> dict[str, BlockingClient]:
    """Return a client for each URL that the arguments name, or end the command with the mistake in them."""
    found = {}
    try:
        shown = read_token(TokenConfig(token_file=token_file), key="--token-file")
        for url, daemon in itertools.chain.from_iterable(map(named_daemons, given)):
            if daemon is None or not (nodes_only and daemon.role is DaemonRole.BOOTSTRAP):
                token = shown or (read_token(daemon.config.http, key="http.token_file") if daemon else "")
                found[url] = BlockingClient(timeout_s=CALL_S, timeout_key="a limit of this command", token=token)
    except BridgeError as error:
        fail(error)
    return found


def _ask_all(
    targets: Mapping[str, BlockingClient], ask: Callable[[BlockingClient, str], FoundT]
) -> dict[str, FoundT | BridgeError]:
    """Ask all daemons, one after another. A daemon that does not answer keeps the others from nothing."""
    found: dict[str, FoundT | BridgeError] = {}
    for url, calls in targets.items():
        try:
            found[url] = ask(calls, url)
        except BridgeError as error:
            found[url] = error
    return found


def _fail_if_silent(found: Mapping[str, object]) -> None:
    if any(isinstance(one, BridgeError) for one in found.values()):
        raise typer.Exit(EXIT_FAILED)


def _print_json(found: Mapping[str, Any]) -> None:
    typer.echo(json.dumps({url: _plain(one) for url, one in found.items()}, indent=1))


def _plain(one: Any) -> Any:  # noqa: ANN401 - documents, and lists of documents
    if isinstance(one, BridgeError):
        return {"error": str(one), "code": one.code}
    return [each.model_dump(mode="json") for each in one] if isinstance(one, list) else one.model_dump(mode="json")


# ---------------------------------------------------------------------------------------------- daemons


def _status(calls: BlockingClient, url: str) -> DaemonStatus:

    found = calls.ask(dict[str, Any], "GET", f"{url}/status")
    kind = DOCUMENTS.get(str(found.get("role")), DaemonStatus)
    return TypeAdapter(kind).validate_json(json.dumps(found), extra="ignore")


def _lines_of(url: str, found: DaemonStatus | BridgeError) -> Iterator[str]:
    if isinstance(found, BridgeError):
        yield f"{url}: {found}"
        return
    node = f" {found.instance}/{found.node}" if isinstance(found, NodeStatus) else ""
    state = "ready" if found.ready.ready else "NOT READY"
    yield f"{url}: {getattr(found, 'role', '')}{node}: {state}, up {_span(found.at - found.started_at)}, kvbridge {found.version}"
    yield from (f"  ! {reason}" for reason in found.ready.reasons)
    if isinstance(found, NodeStatus):
        yield from _node_lines(found)
    elif isinstance(found, BootstrapStatus):
        yield from _bootstrap_lines(found)
    elif isinstance(found, RouterStatus):
        yield from _router_lines(found)


def _node_lines(node: NodeStatus) -> Iterator[str]:
    yield f"  model {node.model.name}, {node.model.tokens_per_page} tokens a page, {decimal(node.memory_bytes)} of pools"
    attached = [f"{one.name} (pid {one.pid}, {', '.join(one.ranks)})" for one in node.engines if not one.gone]
    yield f"  engines: {'; '.join(attached) or 'none is attached'}"
    yield from (f"  ! engine {one.name} (pid {one.pid}): {one.gone}" for one in node.engines if one.gone)
    for rank in node.ranks:
        restarts = f", {rank.restarts} restarts" if rank.restarts else ""
        yield f"  rank {rank.rank}: {rank.state}, pid {rank.pid}, {', '.join(rank.transports) or 'no transport'}{restarts}"
        if rank.error:
            yield f"  ! rank {rank.rank}: {rank.error}"
    yield f"  rooms: {_counts(node.rooms) or 'none'}"
    queue = node.admission
    if queue.waiting:
        yield f"  ! {queue.waiting} requests wait for pages, the first for {_since(node.at, queue.oldest_since)}"
    if queue.starved_since:
        yield f"  ! for {_since(node.at, queue.starved_since)} not even the smallest request fits"
    yield from _indented([("pages", *PageState, "available"), *_pool_rows(node)])
    if node.bootstrap.url:
        yield f"  bootstrap {node.bootstrap.url}: {node.bootstrap.state}" + _why(node.bootstrap.problem)
    yield f"  peers: {'; '.join(_peer(one, node) for one in node.peers) or 'none'}"
    if (store := node.store) is not None:
        yield f"  store {store.kind}: {store.state}, {store.waiting_prompts} prompts to write" + _why(store.why_not)
    for reason, owners in node.quarantine.items():
        yield f"  ! quarantine of {', '.join(owners)}: {reason}"
    groups = Counter((one.what, one.whom, one.reason) for one in node.problems if node.at - one.at <= RECENT_S)
    last = {(one.what, one.whom, one.reason): one.at for one in node.problems}
    for (what, whom, reason), times in groups.items():
        often = f"{times} times, the last " if times > 1 else ""
        yield f"  ! {often}{_since(node.at, last[what, whom, reason])} ago: {what}: {whom}: {reason}"


def _pool_rows(node: NodeStatus) -> Iterator[tuple[str, ...]]:
    for space, counts in node.pools.items():
        available = node.available_pages.get(space, 0)
        states = (f"{counts.get(state, 0):,}" for state in PageState)
        yield space, *states, f"{available:,} of {sum(counts.values()):,}"


def _peer(peer: Any, node: NodeStatus) -> str:  # noqa: ANN401 - one of two documents
    name = peer.node if isinstance(peer, PrefillNodeStatus) else f"{peer.instance}/{peer.node}"
    if isinstance(peer, PrefillNodeStatus) and not peer.node:
        return f"{peer.endpoint} has not answered yet"
    traffic = node.traffic.get(peer.incarnation)
    if traffic is None:
        return name
    moved = decimal(traffic.sent_bytes + traffic.received_bytes)
    return f"{name} ({traffic.rooms_completed} rooms completed, {traffic.rooms_failed} failed, {moved})"


def _bootstrap_lines(bootstrap: BootstrapStatus) -> Iterator[str]:
    yield f"  directory in {bootstrap.store.kind}" + _why(bootstrap.store.problem)
    yield f"  rooms: {_counts(bootstrap.rooms) or 'none'}"
    for instance in bootstrap.instances:
        yield f"  {instance.role} {instance.instance}: {'ready' if instance.ready else 'NOT READY'}, {instance.model}"
        yield from (f"  ! {instance.instance}: {reason}" for reason in instance.reasons)
        for node in instance.nodes:
            silent = f", silent for {_span(node.silent_s)}" if node.silent_s >= SILENT_S else ""
            yield f"    {node.node} at {node.http_url}: {node.load.rooms} rooms{silent}"


def _router_lines(router: RouterStatus) -> Iterator[str]:
    yield f"  {router.outstanding} of {router.limit} requests under way, {router.order} order"
    if router.directory_problem:
        yield f"  ! directory: {router.directory_problem}"
    for server in router.servers:
        yield f"  {server.role} {server.url}: {server.outstanding} requests, {server.load_tokens:,} prompt tokens"
        if server.problem:
            yield f"  ! {server.url}: {server.problem}"


# ---------------------------------------------------------------------------------------------- rooms


def _all_rooms(calls: BlockingClient, url: str, query: Params) -> list[RoomReport]:
    found: list[RoomReport] = []
    after: int | None = 0
    while after is not None:
        page = calls.ask(RoomPage, "GET", f"{url}/v1/requests", params=query | {"after": after})
        found += page.rooms
        after = page.next
    return found


def _rooms_table(found: Sequence[RoomReport]) -> str:
    count = f"{len(found)} {'room' if len(found) == 1 else 'rooms'}"
    if not found:
        return count
    head = ("room", "state", "age", "tokens", "client", "peers", "waits for, or why it ended")
    rows = [
        (
            f"{one.room}" + (f"#{one.generation}" if one.generation > 1 else ""),
            one.state,
            _span(one.age_s),
            f"{one.prompt_tokens:,}",
            one.client or "-",
            ", ".join(one.peers) or "-",
            _waits(one),
        )
        for one in found
    ]
    return "\n".join([count, *_indented([head, *rows], right=(2, 3))])


def _waits(one: RoomReport) -> str:
    if one.reason_code:
        return f"{one.reason_code}: {one.reason}"
    limit = "" if one.expires_in_s is None else f" ({_span(one.expires_in_s)} more: {one.limit})"
    return f"{one.waits_for}{limit}" if one.waits_for else "-"


def _room(calls: BlockingClient, url: str, number: int) -> tuple[RoomReport, RoomTimeline]:
    path = f"{url}/v1/requests/{number}"
    report = calls.ask(RoomReport, "GET", path)
    return report, calls.ask(RoomTimeline, "GET", f"{path}/timeline", params={"generation": report.generation})


def _story(report: RoomReport, timeline: RoomTimeline) -> str:
    cached = f", {report.prefix_tokens:,} of them cached on decode" if report.prefix_tokens else ""
    lines = [
        f"{report.role} room {report.room}, generation {report.generation}: {report.state}, admitted {_span(report.age_s)} ago",
        f"  client {report.client or 'not named'}, peers {', '.join(report.peers) or 'none'}",
        f"  {report.prompt_tokens:,} prompt tokens{cached}; pages: {_counts(report.pages) or 'none'}",
    ]
    moved = sum(amount.bytes for amount in report.amounts.values())
    lines += [f"  {decimal(moved)} moved: {', '.join(report.amounts)}"] if moved else []
    lines += [f"  waits for {_waits(report)}"] if report.waits_for else []
    lines += [f"  ! {report.reason_code}: {report.reason}"] if report.reason_code else []
    lines += [f"  ! quarantine: {report.quarantine}"] if report.quarantine else []
    events = []
    for entry in timeline.entries:
        details = "; ".join(f"{key} {value}" for key, value in entry.details.items())
        events.append((f"{entry.after_s * 1000:,.1f} ms", entry.what, details))
    return "\n".join([*lines, *_indented(events, right=(0,))])


# ---------------------------------------------------------------------------------------------- words


def _indented(rows: Sequence[Sequence[str]], right: Sequence[int] | None = None) -> list[str]:
    return ["  " + line for line in aligned(rows, right).splitlines()] if rows else []


def _counts(found: Mapping[Any, int]) -> str:
    return ", ".join(f"{number:,} {what}" for what, number in found.items() if number)


def _why(problem: str) -> str:
    return f": {problem}" if problem else ""


def _since(now: float, moment: float | None) -> str:
    return _span(now - (moment or now))


def _span(seconds: float) -> str:
    if seconds < MINUTE_S:
        return f"{max(0.0, seconds):.1f} s"
    minutes = int(seconds // MINUTE_S)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
