"""Processes that matter to this host: the node of the configuration, bootstrap, peers, control sockets. Asking disturbs none."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import TypeAdapter, ValidationError

from kvbridge.api.directory import InstanceView
from kvbridge.api.rooms import RoomPage, RoomReport
from kvbridge.api.status import NodeStatus, Readiness
from kvbridge.control.keys import CurveKeys
from kvbridge.control.requests import RequestClient
from kvbridge.core.addresses import parse_tcp
from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import FrozenModel
from kvbridge.core.session.tables import RoomState
from kvbridge.doctor.findings import Finding, Needs, breaks, fine, not_here, warning

ANSWER_S = 5.0
HANDSHAKE_S = 3.0
MOST_KEYS = 8
"""Most public keys that are tried at one control socket."""
MOST_PEERS = 64
FEW_PAGES = 0.05
"""Share of a space's pages below which the space is nearly full."""
OLD_S = 60.0
"""Age from which the oldest room is shown with the event that it waits for."""
OTHER = {"prefill": "decode", "decode": "prefill"}

_LISTING = TypeAdapter(tuple[InstanceView, ...])


class Answer(FrozenModel):
    """Answer of an HTTP endpoint, or of a control socket."""

    name: str
    """Name of the daemon: `bootstrap`, `decode-0/node-0`."""
    url: str
    problem: str = ""
    """Why it cannot be reached or does not answer."""
    took_s: float = 0
    ready: bool = True
    reasons: tuple[str, ...] = ()
    how: str = "handshake not encrypted"
    """Control sockets: how far the handshake went."""


class RunningNode(FrozenModel):
    """The documents of a node about itself."""

    status: NodeStatus
    oldest: RoomReport | None = None
    """The room that has been under way for longest."""


class Reach(FrozenModel):
    """Answers of other processes."""

    running: str = ""
    """`decode-0/node-0, up for 42 s` when the daemon of this configuration runs already."""
    node: RunningNode | None = None
    """The node of this configuration, when it runs already."""
    bootstraps: tuple[Answer, ...] = ()
    peers: tuple[Answer, ...] = ()
    handshakes: tuple[Answer, ...] = ()


@dataclass
class Asking:
    """Asks the questions of one run, with the secrets of a configuration."""

    bootstrap_token: str = ""
    daemon_token: str = ""
    keys: CurveKeys | None = None
    peer_key: str = ""
    """Public key of control sockets; empty: those of our own pair and of the list of allowed keys are tried."""
    http: httpx.Client = field(default_factory=lambda: httpx.Client(trust_env=False, timeout=ANSWER_S))

    def reach(self, needs: Needs, own_url: str, named: Iterable[str]) -> Reach:
        """Ask this configuration's daemon, its bootstraps, the peers that a bootstrap knows, and the `named` URLs."""
        named = tuple(named)
        bootstraps: list[Answer] = []
        peers: list[Answer] = []
        shaken: list[Answer] = []
        running, node = self.running(own_url, needs) if own_url else ("", None)
        for url in (own_url,) if needs.role == "bootstrap" and running else needs.bootstraps:
            answer = self.ready("bootstrap", url)
            listed, problem = self.instances(url) if not answer.problem else ((), "")
            bootstraps.append(answer.model_copy(update={"problem": answer.problem or problem}))
            if peers:
                continue
            for name, peer_url, control, encrypted in list(_other_side(needs, listed))[:MOST_PEERS]:
                peers.append(self.ready(name, peer_url))
                if control and needs.role == "decode":
                    shaken.append(self.shake(name, control, encrypted=encrypted))
        shaken += [self.shake(given, given, encrypted=None) for given in named if given.startswith("tcp://")]
        peers += [self.ready(given, given) for given in named if "://" in given and not given.startswith("tcp://")]
        asked = {"bootstraps": tuple(bootstraps), "peers": tuple(peers), "handshakes": tuple(shaken)}
        return Reach(running=running, node=node, **asked)

    def ready(self, name: str, url: str) -> Answer:
        """Ask an endpoint whether it is ready."""
        url, begun_s = url.rstrip("/"), time.monotonic()
        response, problem = self._get(f"{url}/ready")
        took_s = time.monotonic() - begun_s
        if response is None:
            return Answer(name=name, url=url, problem=problem)
        try:
            said = Readiness.model_validate_json(response.content, extra="ignore")
        except ValidationError:
            return Answer(name=name, url=url, problem=f"something else answers there (HTTP {response.status_code})")
        return Answer(name=name, url=url, took_s=took_s, ready=said.ready, reasons=said.reasons)

    def instances(self, url: str) -> tuple[tuple[InstanceView, ...], str]:
        """Return the instances in a bootstrap's directory, and the problem where there is one."""
        response, problem = self._get(f"{url.rstrip('/')}/v1/instances", self.bootstrap_token)
        if response is None:
            return (), problem
        if response.status_code == 401:
            return (), "it refuses our token (bootstrap.token_file must hold its http.token)"
        if not response.is_success:
            return (), f"it answers {response.status_code}: {response.text[:200]}"
        try:
            return _LISTING.validate_json(response.content, extra="ignore"), ""
        except ValidationError:
            return (), "it lists its instances in a way that this release does not understand"

    def running(self, url: str, needs: Needs) -> tuple[str, RunningNode | None]:
        """Return name and uptime of this configuration's daemon, and what a node says; ("", None) for another daemon, or none."""
        response, _ = self._get(f"{url}/status", self.daemon_token)
        if response is None or not response.is_success:
            return "", None
        try:
            said: dict[str, Any] = response.json()
        except ValueError:
            return "", None
        found = said.get("role"), said.get("instance", ""), said.get("node", "")
        if found != (needs.role, needs.instance, needs.node):
            return "", None
        uptime_s = float(said.get("at", 0)) - float(said.get("started_at", 0))
        return f"{needs.name}, up for {uptime_s:.0f} s", self._node(url, response.content) if needs.instance else None

    def _node(self, url: str, status: bytes) -> RunningNode | None:
        query = "&".join(f"state={state}" for state in RoomState if not state.final)
        response, _ = self._get(f"{url}/v1/requests?{query}&limit=1", self.daemon_token)
        try:
            rooms = () if response is None else RoomPage.model_validate_json(response.content, extra="ignore").rooms
            node = NodeStatus.model_validate_json(status, extra="ignore")
        except ValidationError:  # of another release
            return None
        return RunningNode(status=node, oldest=next(iter(rooms), None))

    def shake(self, name: str, endpoint: str, *, encrypted: bool | None) -> Answer:
        """Connect to a control socket and leave it. `encrypted`: whether the directory says so; None: not known."""
        begun_s = time.monotonic()
        keys = self.keys if encrypted is not False else None
        if encrypted and keys is None:
            return Answer(name=name, url=endpoint, problem="wants CURVE keys, and this configuration has none")
        how, problems = "handshake encrypted" if keys else "handshake not encrypted", list[str]()
        tried = [self.peer_key] if self.peer_key or keys is None else [keys.public, *sorted(keys.allowed)][:MOST_KEYS]
        for public in tried if keys else [""]:
            try:
                RequestClient(endpoint, keys=keys, server_key=public, timeout_s=HANDSHAKE_S).close()
            except BridgeError as error:
                problems.append(str(error).removeprefix(f"{endpoint} "))
                if not _reached(endpoint):
                    break
            else:
                return Answer(name=name, url=endpoint, took_s=time.monotonic() - begun_s, how=how)
        if keys and not self.peer_key and _reached(endpoint):
            how = "TCP only: its public key is not known here (bootstrap hands it out with requests; --peer-key)"
            return Answer(name=name, url=endpoint, took_s=time.monotonic() - begun_s, how=how)
        return Answer(name=name, url=endpoint, problem=problems[-1])

    def _get(self, url: str, token: str = "") -> tuple[httpx.Response | None, str]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            return self.http.get(url, headers=headers), ""
        except httpx.HTTPError as error:
            return None, str(error) or type(error).__name__


def _reached(endpoint: str) -> bool:
    """Whether any process accepts connections there."""
    address = parse_tcp(endpoint)
    try:
        if address is not None:
            socket.create_connection(address, timeout=HANDSHAKE_S).close()
    except OSError:
        return False
    return True


def _other_side(needs: Needs, listed: Iterable[InstanceView]) -> Iterator[tuple[str, str, str, bool]]:
    """Yield (name, URL, control endpoint, encrypted) of the nodes of the other role; for bootstrap, of all nodes."""
    for instance in listed:
        if instance.role.value != needs.role:
            for node in instance.nodes:
                encrypted = any(mode.value == "curve" for mode in instance.meets_by)
                yield f"{instance.instance}/{node.node}", node.http_url, node.control_endpoint, encrypted


def check_bootstrap(reach: Reach, needs: Needs) -> Iterator[Finding]:
    """A node that cannot announce itself to bootstrap is never paired."""
    for answer in reach.bootstraps:
        if answer.problem:
            yield breaks(
                f"bootstrap at {answer.url}: {answer.problem}",
                "this node cannot announce itself there, so no request is paired with it",
                f"curl -v {answer.url}/health; check bootstrap.url, name resolution, the firewall and bootstrap.token_file",
                subject=answer.url,
            )
        else:
            reasons = f", not ready: {'; '.join(answer.reasons)}" if not answer.ready else ""
            took = f"{answer.took_s * 1e3:.0f} ms{reasons}"
            yield fine(f"bootstrap at {answer.url} answers in {took}", subject=answer.url)
    if not reach.bootstraps:
        alone = "whoever picks the two ends of a request admits it on both"
        yield not_here("no bootstrap is configured", "it is bootstrap itself" if needs.role == "bootstrap" else alone)


def check_peers(reach: Reach, needs: Needs) -> Iterator[Finding]:
    """Peers that bootstrap knows, or that the command line names, answer and are ready."""
    for answer in reach.peers:
        if answer.problem:
            yield breaks(
                f"{answer.name} at {answer.url}: {answer.problem}",
                "requests that are paired with it fail or are refused",
                f"curl -v {answer.url}/ready from this host; check http.advertise_url there and the firewall between",
                subject=answer.name,
            )
        elif not answer.ready:
            reasons = "; ".join(answer.reasons) or "it does not say why"
            yield warning(
                f"{answer.name} at {answer.url} answers, and is not ready: {reasons}",
                "no room is admitted there until it is",
                f"curl {answer.url}/status",
                subject=answer.name,
            )
        else:
            yield fine(f"{answer.name} at {answer.url} is ready ({answer.took_s * 1e3:.0f} ms)", subject=answer.name)
    asked = [answer.url for answer in reach.bootstraps if not answer.problem]
    if not reach.peers and asked and needs.role in OTHER:
        yield warning(
            f"bootstrap knows no {OTHER[needs.role]} node",
            "until one announces itself there, no request can be paired",
            f"curl {asked[0]}/v1/instances; start one whose bootstrap.url is {asked[0]}",
        )
    elif not reach.peers:
        yield not_here("no peer was asked", "none is known by --peer or bootstrap.url")


def check_control(reach: Reach, needs: Needs) -> Iterator[Finding]:
    """Control sockets accept a connection and its handshake. No message is sent, and a running daemon is not disturbed."""
    for each in reach.handshakes:
        if each.problem:
            yield breaks(
                f"{each.name}: the control socket {each.url} {each.problem}",
                "decode nodes meet a prefill node there: every room with it fails",
                "kvbridge keys check on both ends; check control.advertise there, control.curve.allowed_keys_file, the firewall",
                subject=each.name,
            )
        else:
            took = f"{each.took_s * 1e3:.0f} ms; no bytes were moved"
            yield fine(f"{each.name}: {each.url} is reached, {each.how} ({took})", subject=each.name)
    if not reach.handshakes:
        other_way = "decode nodes connect to prefill nodes, not the other way"
        why = other_way if needs.role == "prefill" else "no prefill node is known"
        yield not_here("no control socket was tried", why)


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
