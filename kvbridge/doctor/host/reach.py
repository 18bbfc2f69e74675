"""Asks those that this host depends on: bootstrap, peers, their control sockets. Nobody who serves is disturbed by it.

Owns: what is asked, and the limit of each wait. Must not know: what is made of the answers.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from pydantic import TypeAdapter, ValidationError

from kvbridge.api.directory import InstanceView
from kvbridge.api.status import Readiness
from kvbridge.control.keys import CurveKeys
from kvbridge.control.requests import try_handshake
from kvbridge.core.addresses import parse_tcp
from kvbridge.core.errors import BridgeError
from kvbridge.doctor.facts import Answer, Handshake
from kvbridge.doctor.needs import Needs

ANSWER_S = 5.0
HANDSHAKE_S = 3.0
MOST_KEYS = 8
"""Public keys that are tried at one control socket."""
MOST_PEERS = 64

_LISTING = TypeAdapter(tuple[InstanceView, ...])


@dataclass(frozen=True)
class Credentials:
    """What is shown to whom."""

    bootstrap_token: str = ""
    daemon_token: str = ""
    keys: CurveKeys | None = None
    peer_key: str = ""
    """Public key of control sockets; empty: our own pair's and those on the list of allowed keys are tried."""


@dataclass
class Asking:
    """Connections for the questions of one run."""

    credentials: Credentials
    http: httpx.Client = field(default_factory=lambda: httpx.Client(trust_env=False, timeout=ANSWER_S))

    def close(self) -> None:
        """Close all connections."""
        self.http.close()

    def ready(self, name: str, url: str) -> Answer:
        """Ask an endpoint whether it is ready."""
        url, begun_s, asked = url.rstrip("/"), time.monotonic(), datetime.now(UTC)
        response, problem = self._get(f"{url}/ready")
        took_s = time.monotonic() - begun_s
        if response is None:
            return Answer(name=name, url=url, problem=problem)
        try:
            said = Readiness.model_validate_json(response.content, extra="ignore")
        except ValidationError:
            return Answer(name=name, url=url, problem=f"something else answers there (HTTP {response.status_code})")
        return Answer(
            name=name,
            url=url,
            took_s=took_s,
            ready=said.ready,
            reasons=said.reasons,
            clock_ahead_s=clock_ahead_s(response.headers.get("date", ""), asked, datetime.now(UTC)),
        )

    def instances(self, url: str) -> tuple[tuple[InstanceView, ...], str]:
        """Return who is in a bootstrap's directory, and why that cannot be said."""
        response, problem = self._get(f"{url.rstrip('/')}/v1/instances", self.credentials.bootstrap_token)
        if response is None:
            return (), problem
        if not response.is_success:
            return (), _refusal(response)
        try:
            return _LISTING.validate_json(response.content, extra="ignore"), ""
        except ValidationError:
            return (), "it lists its instances in a way that this release does not understand"

    def running(self, url: str, needs: Needs) -> str:
        """Return what of this configuration's daemon answers at its own address, empty when it is not the one."""
        response, _ = self._get(f"{url}/status", self.credentials.daemon_token)
        if response is None or not response.is_success:
            return ""
        try:
            said: dict[str, Any] = response.json()
        except ValueError:
            return ""
        ours = (needs.role, needs.instance, needs.node)
        theirs = (said.get("role"), said.get("instance", ""), said.get("node", ""))
        return f"{needs.name}, up for {float(said.get('uptime_s', 0)):.0f} s" if ours == theirs else ""

    def shake(self, name: str, endpoint: str, *, encrypted: bool | None) -> Handshake:
        """Enter a control socket and leave it. `encrypted`: what the directory says of it."""
        begun_s = time.monotonic()
        keys = self.credentials.keys if encrypted is not False else None
        if encrypted and keys is None:
            problem = "wants CURVE keys, and this configuration has none"
            return Handshake(name=name, endpoint=endpoint, problem=problem)
        problems = []
        for public in self._candidates() if keys else [""]:
            try:
                try_handshake(endpoint, keys=keys, server_key=public, timeout_s=HANDSHAKE_S)
            except BridgeError as error:
                problems.append(str(error).removeprefix(f"{endpoint} "))
                if not _reached(endpoint):
                    break
            else:
                how = "handshake encrypted" if keys else "handshake in the clear"
                return Handshake(name=name, endpoint=endpoint, took_s=time.monotonic() - begun_s, how=how)
        if keys and not self.credentials.peer_key and _reached(endpoint):
            return Handshake(
                name=name,
                endpoint=endpoint,
                took_s=time.monotonic() - begun_s,
                how="TCP only: none of the public keys known here is its (bootstrap hands it out with requests; --peer-key)",
            )
        return Handshake(name=name, endpoint=endpoint, problem=problems[-1])

    def _candidates(self) -> list[str]:
        keys = self.credentials.keys
        if self.credentials.peer_key or keys is None:
            return [self.credentials.peer_key]
        return [keys.public, *sorted(keys.allowed)][:MOST_KEYS]

    def _get(self, url: str, token: str = "") -> tuple[httpx.Response | None, str]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            return self.http.get(url, headers=headers), ""
        except httpx.HTTPError as error:
            return None, str(error) or type(error).__name__


def _refusal(response: httpx.Response) -> str:
    if response.status_code == 401:
        return "it refuses our token (bootstrap.token_file must hold its http.token)"
    return f"it answers {response.status_code}: {response.text[:200]}"


def _reached(endpoint: str) -> bool:
    """Whether somebody accepts connections, whatever is behind."""
    address = parse_tcp(endpoint)
    try:
        if address is not None:
            socket.create_connection(address, timeout=HANDSHAKE_S).close()
    except OSError:
        return False
    return True


def clock_ahead_s(header: str, asked: datetime, answered: datetime) -> float | None:
    """How far the clock behind an HTTP Date header is ahead of ours; it is cut to whole seconds, so half of one is added.

    It was written at some time between question and answer: any of them would agree.
    """
    try:
        written = parsedate_to_datetime(header) + timedelta(seconds=0.5)
        return max(0.0, (written - answered).total_seconds()) + min(0.0, (written - asked).total_seconds())
    except (TypeError, ValueError):
        return None


def other_side(needs: Needs, listed: Iterable[InstanceView]) -> Iterator[tuple[str, str, str, bool]]:
    """Return (name, URL, control endpoint, encrypted) of the nodes that this one works with; of all for bootstrap."""
    for instance in listed:
        if instance.role.value != needs.role:
            for node in instance.nodes:
                encrypted = any(mode.value == "curve" for mode in instance.meets_by)
                yield f"{instance.instance}/{node.node}", node.http_url, node.control_endpoint, encrypted
