"""One run of the doctor: read, ask, move; then judge.

Owns: the order, and which peers are asked. Must not know: how a configuration is found, how findings are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvbridge.api.endpoint_file import read_endpoint
from kvbridge.config.endpoints import is_wildcard
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig
from kvbridge.core.errors import ConfigError
from kvbridge.doctor.facts import Answer, Handshake, Host, KeyFact, Moved, Reach
from kvbridge.doctor.host.devices import read_devices
from kvbridge.doctor.host.memory import read_memory
from kvbridge.doctor.host.network import read_network, read_routes
from kvbridge.doctor.host.process import read_process, read_software
from kvbridge.doctor.host.reach import MOST_PEERS, Asking, Credentials, other_side
from kvbridge.doctor.host.transfers import move_here, move_to
from kvbridge.doctor.needs import Needs
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY

Config = PrefillConfig | DecodeConfig | BootstrapConfig
LIBRARY_OF = {"mooncake": "mooncake-transfer-engine", "nixl": "nixl-cu"}
"""How the names of the distributions begin that a transport needs."""


@dataclass(frozen=True)
class Visit:
    """What one run looks at."""

    config: Config | None = None
    needs: Needs = field(default_factory=Needs)
    credentials: Credentials = field(default_factory=Credentials)
    keys: tuple[KeyFact, ...] = ()
    peers: Sequence[str] = ()
    """As given: `http://HOST:PORT` of a daemon, `tcp://HOST:PORT` of a control socket, HOST:PORT of a bench-peer."""
    bench_flags: Sequence[str] = ()
    transfer: bool = True


def read_host(visit: Visit, tell: Callable[[str], None]) -> Host:
    """Read and ask everything. `tell` is called with what is done next."""
    needs, config = visit.needs, visit.config
    tell("reading this host")
    directories = [Path(needs.directory), DEFAULT_DIRECTORY, Path(needs.settings.local.proof_directory)]
    runtime = config.runtime_dir if isinstance(config, PrefillConfig | DecodeConfig) else None
    host = Host(
        memory=read_memory(directories),
        devices=read_devices(needs.gpus),
        network=read_network(needs),
        process=read_process(runtime, visit.keys),
        software=read_software(),
    )
    tell("asking bootstrap and peers")
    with closing(Asking(visit.credentials)) as asking:
        reach = _ask(visit, asking)
    urls = [answer.url for answer in reach.peers]
    host = host.model_copy(
        update={"network": host.network.model_copy(update={"routes": tuple(read_routes(host, needs, urls))})}
    )
    moved = tuple(_move(visit, host, tell)) if visit.transfer else ()
    return host.model_copy(update={"reach": reach.model_copy(update={"moved": moved})})


def _ask(visit: Visit, asking: Asking) -> Reach:
    needs, own = visit.needs, "" if visit.config is None else _own_url(visit.config)
    running = asking.running(own, needs) if own else ""
    urls = (own,) if needs.role == "bootstrap" and running else needs.bootstraps
    bootstraps: list[Answer] = []
    peers: list[Answer] = []
    shaken: list[Handshake] = []
    for url in urls:
        answer = asking.ready("bootstrap", url)
        listed, problem = asking.instances(url) if not answer.problem else ((), "")
        bootstraps.append(answer.model_copy(update={"problem": answer.problem or problem}))
        if peers:
            continue
        for name, peer_url, control, encrypted in list(other_side(needs, listed))[:MOST_PEERS]:
            peers.append(asking.ready(name, peer_url))
            if control and needs.role == "decode":
                shaken.append(asking.shake(name, control, encrypted=encrypted))
    for given in visit.peers:
        if given.startswith("tcp://"):
            shaken.append(asking.shake(given, given, encrypted=None))
        elif "://" in given:
            peers.append(asking.ready(given, given))
    return Reach(running=running, bootstraps=tuple(bootstraps), peers=tuple(peers), handshakes=tuple(shaken))


def _own_url(config: Config) -> str:
    """Where this configuration's daemon answers, if it runs: as it has written down, else as configured."""
    if isinstance(config, PrefillConfig | DecodeConfig):
        with suppress(ConfigError):  # of another user: a finding of its own
            if (written := read_endpoint(config.runtime_dir)) is not None:
                return written.http_url
    scheme = "https" if config.http.tls_certificate_file else "http"
    host = "127.0.0.1" if is_wildcard(config.http.host) else config.http.host.strip("[]")
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.http.port}"


def _move(visit: Visit, host: Host, tell: Callable[[str], None]) -> list[Moved]:
    installed = [
        name
        for name in visit.needs.transports
        if name not in LIBRARY_OF or any(each.startswith(LIBRARY_OF[name]) for each in host.software.packages)
    ]
    tell(f"moving bytes within this host by {', '.join(installed)}")
    found = move_here(installed, visit.bench_flags)
    reaching = [name for name in installed if name != "local"]
    for peer in visit.peers:
        if "://" in peer:
            continue
        tell(f"moving bytes to {peer}")
        found += move_to(peer, reaching, visit.bench_flags)
        if not reaching:
            missing = ", ".join(name for name in visit.needs.transports if name in LIBRARY_OF)
            found.append(
                Moved(name=peer, transport=missing, problem="no library of these transports is installed here")
            )
    return found
