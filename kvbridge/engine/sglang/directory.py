"""The nodes of a prefill server: a small HTTP directory in the server's launcher, and its readers in decode's schedulers."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

import structlog

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.ids import FrozenModel, NonNegative, Positive
from kvbridge.telemetry.logs import Seldom

log = structlog.get_logger(__name__)

PATH = "/kvbridge/nodes"
ASK_S = 5.0
GENERATE_S = 600.0
"""Longest wait for a prompt that is computed again."""
LOOK_S = 1.0
"""Between two looks at a directory, or at the address of the own node."""
FORGET_S = 600.0
"""A prefill server that no request has named for so long is not asked any more."""
BODY_BYTES = 1 << 16
"""Limit of a registration and of an answer: clients name the servers that decode asks."""
CONNECTIONS = 64
"""Open connections of a directory, each of which has a thread. A further one is closed: its client asks again."""
MOST_NAMED = 256
"""Prefill servers that are asked. The one that no request has named for longest makes room for another."""
ROOMS_TOLD, ROOMS_KEPT = 1_000, 65_536
"""Limits of rooms in one announcement, and in a directory: the oldest go."""
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
"""Nodes are reached without a proxy, whatever the environment names."""


class GroupNode(FrozenModel):
    """The node of one data-parallel group, and the rooms that the group has got since it told of them last."""

    dp_rank: NonNegative
    dp_size: Positive
    follows_room: bool
    address: PeerAddress
    http_port: NonNegative
    """The port of the prefill server itself."""
    rooms: tuple[int, ...] = ()
    """SGLang's numbers."""


class RoomQuery(FrozenModel):
    """SGLang's question which data-parallel ranks have got some rooms (`query_prefill_dp_ranks`)."""

    bootstrap_rooms: tuple[int, ...]


SaidT = TypeVar("SaidT", GroupNode, RoomQuery)


class PrefillServer(FrozenModel):
    """Answer of the directory: all groups of a prefill server."""

    dp_size: Positive
    follow_bootstrap_room: bool
    """SGLang reads this name."""
    nodes: dict[int, PeerAddress]
    """By data-parallel rank."""
    http_port: NonNegative


class NodeDirectory(ThreadingHTTPServer):
    """The directory of one prefill server, in its launcher. SGLang makes it and never closes it."""

    request_queue_size = CONNECTIONS

    def __init__(self, host: str, port: int) -> None:
        """Listen. Raises OSError when the port is taken."""
        self.nodes: dict[int, GroupNode] = {}
        self.group_of: dict[int, int] = {}
        """The data-parallel rank that computes a room, for the latest rooms."""
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__((host, port), _Handler)
        threading.Thread(target=self.serve_forever, name="kvbridge-directory", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class _Handler(BaseHTTPRequestHandler):
    timeout = ASK_S
    server: NodeDirectory

    def do_PUT(self) -> None:
        if self.client_address[0] != self.connection.getsockname()[0]:
            self._answer(403, {"error": "nodes of this prefill server register from its own host only"})
        elif (node := self._said(GroupNode)) is not None:
            group_of = self.server.group_of
            self.server.nodes[node.dp_rank] = node
            group_of.update(dict.fromkeys(node.rooms, node.dp_rank))
            for room in list(group_of)[: max(0, len(group_of) - ROOMS_KEPT)]:
                group_of.pop(room, None)
            self._answer(200, {})

    def do_POST(self) -> None:
        if (asked := self._said(RoomQuery)) is not None:
            group_of = self.server.group_of
            self._answer(200, {str(room): group_of[room] for room in asked.bootstrap_rooms if room in group_of})

    def do_GET(self) -> None:
        nodes = self.server.nodes
        first = next(iter(nodes.values()), None)
        if self.path != PATH or first is None or len(nodes) < first.dp_size:
            self._answer(404, {"error": f"{len(nodes)} nodes of this prefill server have registered"})
            return
        addresses = {rank: node.address for rank, node in sorted(nodes.items())}
        facts = {"dp_size": first.dp_size, "follow_bootstrap_room": first.follows_room, "http_port": first.http_port}
        self._answer(200, PrefillServer(nodes=addresses, **facts).model_dump(mode="json"))

    def _said(self, kind: type[SaidT]) -> SaidT | None:
        try:
            size = int(self.headers.get("Content-Length") or 0)
            return kind.model_validate_json(self.rfile.read(max(0, min(size, BODY_BYTES))))
        except ValueError as error:
            self._answer(400, {"error": str(error)})
            return None

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as its base names it
        """Decode asks each second."""


class _Rounds:
    """A thread that does its work every second, and at once when something has changed."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            self._changed.clear()
            self._work()
            self._changed.wait(LOOK_S)

    def _work(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._stop = True
        self._changed.set()
        self._thread.join(ASK_S + LOOK_S)


class Announcement(_Rounds):
    """Tells the directory the address of a node every second, and at once the rooms that the node's group has got."""

    def __init__(self, url: str, node: Callable[[], GroupNode | None]) -> None:
        self._url, self._node = url, node
        self._rooms: deque[int] = deque(maxlen=ROOMS_KEPT)
        self._why_not = ""
        super().__init__("kvbridge-announce")

    def computes(self, room: int) -> None:
        """The group has got a room, whose number does not say so. This does not wait."""
        self._rooms.append(room)
        self._changed.set()

    def _work(self) -> None:
        rooms: list[int] = []
        try:
            if (node := self._node()) is not None:
                rooms = [self._rooms.popleft() for _ in range(min(len(self._rooms), ROOMS_TOLD))]
                told = node.model_copy(update={"rooms": tuple(rooms)})
                request = urllib.request.Request(  # noqa: S310 - the URL is made of SGLang's own host and port
                    f"{self._url}{PATH}", data=told.model_dump_json().encode(), method="PUT"
                )
                _open(request, timeout=ASK_S).close()
                self._why_not = ""
        except Exception as error:  # noqa: BLE001 - without this thread the node would never be announced again
            self._rooms.extendleft(reversed(rooms))
            if str(error) != self._why_not:
                self._why_not = str(error)
                log.warning("not_announced", directory=self._url, reason=self._why_not)


class PrefillServers(_Rounds, dict[str, PrefillServer]):
    """The prefill servers that requests name, by `host:port` of their directories. A thread asks; readers never wait.

    SGLang's scheduler reads this as `prefill_info_table`.
    """

    def __init__(self) -> None:
        self._named: dict[str, float] = {}
        self._why_not: dict[str, str] = {}
        self._seldom = Seldom(lambda _: None)
        super().__init__("kvbridge-directories")

    def name(self, address: str) -> bool:
        """A request names a server: have the thread ask for it. Returns whether its nodes are known."""
        if address not in self._named:
            self._changed.set()
        self._named[address] = time.monotonic()
        if len(self._named) > MOST_NAMED:
            self._forget(min(self._named, key=self._named.__getitem__))
        return address in self

    def _forget(self, address: str) -> None:
        for known in (self._named, self._why_not, self):
            known.pop(address, None)

    def _work(self) -> None:
        for address, named_s in self._named.copy().items():
            if time.monotonic() - named_s > FORGET_S:
                self._forget(address)
            else:
                self._ask(address)
        self._seldom.tell()

    def _ask(self, address: str) -> None:
        try:
            with _open(f"http://{address}{PATH}", timeout=ASK_S) as answer:
                found = PrefillServer.model_validate_json(answer.read(BODY_BYTES))
            if address in self._named:
                self[address] = found
            self._why_not.pop(address, None)
        except Exception as error:  # noqa: BLE001 - the servers of other requests are asked as well
            if self._why_not.get(address) != str(error):
                self._why_not[address] = str(error)
                if self._seldom.admits("directory_not_reached"):
                    log.warning("directory_not_reached", directory=address, reason=str(error))


def generate(address: str, server: PrefillServer | None, payload: Mapping[str, Any]) -> str:
    """Ask a prefill server for an answer, and wait for it. Returns why there is none, or ''. `address`: of its directory."""
    if server is None:
        return f"the prefill server at {address} is not known any more"
    url = f"http://{address.rpartition(':')[0]}:{server.http_port}/generate"
    try:
        request = urllib.request.Request(url, json.dumps(payload).encode(), {"Content-Type": "application/json"})
        _open(request, timeout=GENERATE_S).close()
    except urllib.error.HTTPError as error:
        return f"{url} answered {error.code}: {error.read(BODY_BYTES).decode(errors='replace')}"
    except Exception as error:  # noqa: BLE001 - a room waits for the answer
        return f"{url}: {type(error).__name__}: {error}"
    return ""
