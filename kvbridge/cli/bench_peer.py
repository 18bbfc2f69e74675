"""`kvbridge bench-peer`: bytes a second and latency from this host to another one, by each transport."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import signal
import socket
import sys
import timeit
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer

from kvbridge.cli.config import (
    EXIT_CONFIG,
    EXIT_FAILED,
    DaemonRole,
    FileOption,
    InsecureOption,
    JsonOption,
    SetOption,
    aligned,
    fail,
    load_or_exit,
    with_options,
)
from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.config.transports import TransportName, TransportSettings
from kvbridge.control.keys import CurveKeys
from kvbridge.control.peers import PeerIdentity
from kvbridge.control.requests import RequestClient, RequestServer
from kvbridge.core.addresses import is_loopback, parse_tcp
from kvbridge.core.errors import BridgeError
from kvbridge.daemon.links import curve_keys
from kvbridge.doctor.bench import MIB, SIZES_BYTES, Effort, Lender, Measured, Trial, make_buffer
from kvbridge.doctor.findings import rate
from kvbridge.doctor.network import read_interfaces

DEFAULT_ADDRESS = "127.0.0.1:7909"
ANSWER_S = 20.0
BRIEF = Effort(sizes_bytes=(SIZES_BYTES[0], MIB), round_bytes=16 * MIB, rounds=2)
MEMCPY_ROUNDS = 5
BEYOND = 1.1


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of `kvbridge bench-peer`."""

    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Address of the other side; with --listen: of this one.")
    ] = DEFAULT_ADDRESS
    listen: Annotated[bool, typer.Option("--listen", help="Lend memory to the other side until Ctrl-C.")] = False
    transport: Annotated[
        list[TransportName] | None,
        typer.Option(
            help="Only this transport. May be repeated. Default: transports.order, or all; local within a host."
        ),
    ] = None
    config: FileOption = None
    role: Annotated[DaemonRole | None, typer.Option(help="The daemon whose transports and keys are used.")] = None
    overrides: SetOption = None
    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="This host's address for Mooncake. Default: configured, or routed."),
    ] = ""
    server_key: Annotated[
        str, typer.Option(metavar="KEY", help="Public key of the other side. Default: that of our own pair.")
    ] = ""
    insecure: InsecureOption = False
    brief: Annotated[bool, typer.Option("--brief", help="Two sizes, 16 MiB a round: takes some seconds.")] = False
    as_json: JsonOption = False


@with_options(BenchOptions)
def bench_peer(options: BenchOptions) -> None:
    """Measure how many bytes a second go from this host to another one, by each transport.

    On one host: kvbridge bench-peer --listen 10.0.0.2:7909; on the other: kvbridge
    bench-peer 10.0.0.2:7909. The second writes into scratch memory of the first, in
    operations of 37,440 B (a page), 256 KiB, 1 MiB and 16 MiB, compares every byte, and
    shows the rate beside that of the network card (within one host: of a copy).
    Transports are set up as in a daemon. Beyond loopback it needs CURVE keys
    (--config, --role), or --insecure: the scratch memory is then open to the network.

    Exit codes: 0: every transport moved every byte; 1: one did not; 2: wrong usage.
    """
    host = _host_of(options.address)
    if not host or (options.config is None) != (options.role is None):
        typer.echo("kvbridge bench-peer: HOST:PORT is needed, and --config and --role belong together", err=True)
        raise typer.Exit(EXIT_CONFIG)
    try:
        settings, keys, names = _loaded(options, host)
        if options.listen:
            asyncio.run(_listen(options, settings, keys))
            code = 0
        else:
            code = _measure(options, settings, keys, names)
    except BridgeError as error:
        fail(error, EXIT_CONFIG if options.listen else EXIT_FAILED)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: some transfer libraries crash in their own exit handlers


def _host_of(address: str) -> str:

    try:
        found = parse_tcp(f"tcp://{address}")
    except BridgeError:
        return ""
    return found.host if found else ""


def _loaded(options: BenchOptions, peer: str) -> tuple[TransportSettings, CurveKeys | None, list[TransportName]]:
    """Return the settings of the transports, the keys, and the transports to use."""
    own, target = _way(peer)
    settings, keys, host = TransportSettings(order=tuple(TransportName)), None, options.host or own
    if options.role is not None:
        config = load_or_exit(options.role.schema, options.config, options.overrides)
        if not isinstance(config, PrefillConfig | DecodeConfig):
            typer.echo("kvbridge bench-peer: --role is prefill or decode: bootstrap moves no bytes", err=True)
            raise typer.Exit(EXIT_CONFIG)
        settings, keys = config.transports, curve_keys(config.control.curve)
        host = options.host or settings.mooncake.host
    mooncake = settings.mooncake.model_copy(update={"host": host, "ipv6": ":" in host})
    is_here = is_loopback(target) or own == target
    usual = [name for name in settings.order if name is not TransportName.LOCAL or is_here]
    return settings.model_copy(update={"mooncake": mooncake}), keys, list(options.transport or usual)


def _way(peer: str) -> tuple[str, str]:
    """Return this host's address towards a peer, and the peer's address. Both are equal where the peer is this host."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: it only chooses the route
            return str(probe.getsockname()[0]), str(address[0])
    except OSError:
        return "127.0.0.1", peer


async def _listen(options: BenchOptions, settings: TransportSettings, keys: CurveKeys | None) -> None:
    identity = PeerIdentity(f"bench-{secrets.token_hex(4)}", keys, options.insecure)
    with ExitStack() as opened:
        lender = opened.enter_context(Lender(make_buffer(), settings))
        denied = lambda detail: typer.echo(f"refused: {detail}", err=True)  # noqa: E731 - one line, used once
        server = opened.enter_context(RequestServer(identity, f"tcp://{options.address}", lender.answer, denied))
        address = server.endpoint.removeprefix("tcp://")
        if options.as_json:
            typer.echo(json.dumps({"address": address}))
        else:
            key = f" --server-key {shlex.quote(keys.public)}" if keys else ""
            typer.echo(f"listening on {address}; on the other host: kvbridge bench-peer {address}{key}. Ctrl-C ends")
        sys.stdout.flush()
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await ended.wait()


def _measure(
    options: BenchOptions, settings: TransportSettings, keys: CurveKeys | None, names: list[TransportName]
) -> int:

    effort = BRIEF if options.brief else Effort()
    wire, wire_bytes_per_s = _wire(_host_of(options.address), effort.round_bytes)
    measured: list[Measured] = []
    problems: dict[str, str] = {}
    with (
        make_buffer() as source,
        RequestClient(
            f"tcp://{options.address}", keys=keys, server_key=options.server_key, timeout_s=ANSWER_S
        ) as client,
    ):
        for name in names:
            try:
                with Trial(client, source, settings, name) as trial:
                    measured.extend(trial.measure(size_bytes, effort) for size_bytes in effort.sizes_bytes)
            except BridgeError as error:
                problems[name.value] = str(error)
    if options.as_json:
        facts = {"peer": options.address, "wire": wire, "wire_bytes_per_s": wire_bytes_per_s, "problems": problems}
        typer.echo(json.dumps(facts | {"measured": [each.model_dump() for each in measured]}, indent=1))
    else:
        _print(options.address, measured, wire, wire_bytes_per_s)
    for failed, problem in problems.items():
        typer.echo(f"{failed}: {problem}", err=True)
    return EXIT_FAILED if problems else 0


def _wire(host: str, round_bytes: int) -> tuple[str, float]:
    """Return the name of the way to a host, and its highest rate (0: not known): of the card, or of a copy on this host."""
    own, target = _way(host)
    if is_loopback(target) or own == target:
        source, copy = np.ones(round_bytes, dtype=np.uint8), np.zeros(round_bytes, dtype=np.uint8)
        took_s = min(timeit.repeat(lambda: np.copyto(copy, source), number=1, repeat=MEMCPY_ROUNDS))
        return "memcpy on one core of this host", round_bytes / took_s
    card = next((each for each in read_interfaces() if own in each.addresses), None)
    if card is None or not card.speed_mbit:
        return card.name if card else "", 0.0
    return f"{card.name} at {card.speed_mbit / 1e3:g} Gbit/s", card.speed_mbit * 1e6 / 8


def _rows(measured: list[Measured], wire_bytes_per_s: float) -> Iterator[tuple[str, ...]]:
    yield "transport", "operation", "rate", "slowest round", "of the wire", "one operation", "worst"
    for each in measured:
        yield (
            each.transport,
            f"{each.operation_bytes:,} B",
            rate(each.bytes_per_s),
            rate(each.slowest_bytes_per_s),
            f"{each.bytes_per_s / wire_bytes_per_s:.0%}" if wire_bytes_per_s else "not known",
            f"{each.latency_s * 1e6:,.0f} us",
            f"{each.latency_worst_s * 1e6:,.0f} us",
        )


def _print(address: str, measured: list[Measured], wire: str, wire_bytes_per_s: float) -> None:
    typer.echo(f"From this host to {address}: every byte compared\n{aligned(_rows(measured, wire_bytes_per_s))}")
    if "memcpy" not in wire and any(each.bytes_per_s > BEYOND * wire_bytes_per_s > 0 for each in measured):
        typer.echo("Faster than the wire: those bytes did not take it. Both sides share a host, and so memory.")
    known = f"{wire}, {rate(wire_bytes_per_s)}" if wire_bytes_per_s else f"not known ({wire or 'no card found'})"
    typer.echo(f"The wire: {known}. One operation: from handing it over to knowing that it is there, median of 30.")
