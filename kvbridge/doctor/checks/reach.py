"""What others answered: bootstrap, peers, their control sockets, and bytes that were moved for a trial."""

from __future__ import annotations

from collections.abc import Iterator

from kvbridge.doctor.facts import Answer, Host
from kvbridge.doctor.findings import Finding, breaks, fine, not_here, rate, warning
from kvbridge.doctor.needs import Needs

SKEW_S = 2.0
"""The header tells whole seconds, and the answer takes a while."""
POOR_SHARE = 0.5
OTHER = {"prefill": "decode", "decode": "prefill"}


def bootstrap(host: Host, needs: Needs) -> Iterator[Finding]:
    """A node that cannot announce itself is never paired."""
    for answer in host.reach.bootstraps:
        if answer.problem:
            yield breaks(
                f"bootstrap at {answer.url}: {answer.problem}",
                "this node cannot announce itself there, so no request is paired with it",
                f"curl -v {answer.url}/health; check bootstrap.url, name resolution, the firewall and bootstrap.token_file",
                subject=answer.url,
            )
        else:
            reasons = f", not ready: {'; '.join(answer.reasons)}" if not answer.ready else ""
            yield fine(
                f"bootstrap at {answer.url} answers in {answer.took_s * 1e3:.0f} ms{reasons}", subject=answer.url
            )
    if not host.reach.bootstraps:
        why = (
            "it is bootstrap itself"
            if needs.role == "bootstrap"
            else "requests are admitted on both ends by whoever picks them"
        )
        yield not_here("no bootstrap is configured", why)


def clock(host: Host, needs: Needs) -> Iterator[Finding]:
    """Clocks that differ make logs and certificates lie."""
    del needs
    for answer in (*host.reach.bootstraps, *host.reach.peers):
        ahead_s = answer.clock_ahead_s
        if ahead_s is None:
            continue
        if abs(ahead_s) > SKEW_S:
            yield warning(
                f"the clock of {answer.name} ({answer.url}) is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} ours",
                "nothing in kvbridge is decided by it, but logs and traces of two hosts cannot be laid side by side, and "
                "certificates count as expired or not yet valid",
                "chronyc tracking (on both); systemctl enable --now chronyd",
                subject=answer.name,
            )
        else:
            yield fine(f"the clock of {answer.name} agrees to {SKEW_S:g} s", subject=answer.name)


def peers(host: Host, needs: Needs) -> Iterator[Finding]:
    """Peers that bootstrap knows or that were named: they answer, and are ready."""
    for answer in host.reach.peers:
        if answer.problem:
            yield breaks(
                f"{answer.name} at {answer.url}: {answer.problem}",
                "requests are paired with it, and fail or are refused",
                f"curl -v {answer.url}/ready from this host; check http.advertise_url there and the firewall between",
                subject=answer.name,
            )
        elif not answer.ready:
            yield _unready(answer)
        else:
            yield fine(f"{answer.name} at {answer.url} is ready ({answer.took_s * 1e3:.0f} ms)", subject=answer.name)
    asked = [answer.url for answer in host.reach.bootstraps if not answer.problem]
    if not host.reach.peers and asked and needs.role in OTHER:
        yield warning(
            f"bootstrap knows no {OTHER[needs.role]} node",
            "until one announces itself there, no request can be paired",
            f"curl {asked[0]}/v1/instances; start one whose bootstrap.url is {asked[0]}",
        )
    elif not host.reach.peers:
        yield not_here("no peer was asked", "none is known by --peer or bootstrap.url")


def _unready(answer: Answer) -> Finding:
    return warning(
        f"{answer.name} at {answer.url} answers, and is not ready: {'; '.join(answer.reasons) or 'it does not say why'}",
        "no room is admitted there until it is",
        f"curl {answer.url}/status",
        subject=answer.name,
    )


def control(host: Host, needs: Needs) -> Iterator[Finding]:
    """Control sockets: a connection and its handshake, no message. A running daemon takes no notice of it."""
    for each in host.reach.handshakes:
        if each.problem:
            yield breaks(
                f"{each.name}: the control socket {each.endpoint} {each.problem}",
                "decode nodes meet a prefill node there: every room with it fails",
                "kvbridge keys check on both ends; check control.advertise there, control.curve.allowed_keys_file, the firewall",
                subject=each.name,
            )
        else:
            text = (
                f"{each.name}: {each.endpoint} is reached, {each.how} ({each.took_s * 1e3:.0f} ms; no bytes were moved)"
            )
            yield fine(text, subject=each.name)
    if not host.reach.handshakes:
        why = (
            "decode nodes connect to prefill nodes, not the other way"
            if needs.role == "prefill"
            else "no prefill node is known"
        )
        yield not_here("no control socket was tried", why)


def transfers(host: Host, needs: Needs) -> Iterator[Finding]:
    """Bytes that were moved by each transport and compared."""
    del needs
    for each in host.reach.moved:
        subject = f"{each.transport} to {each.name}"
        if each.problem:
            yield breaks(
                f"{subject}: {each.problem}",
                "rooms that have no other transport in common with their peer fail in the same way",
                "kvbridge bench-peer --listen there and `kvbridge bench-peer ADDRESS` here show it alone; "
                f"or take {each.transport} out of transports.order",
                subject=subject,
            )
            continue
        known = each.wire_bytes_per_s > 0
        against = f", {each.bytes_per_s / each.wire_bytes_per_s:.0%} of {each.wire}" if known else ""
        text = (
            f"{subject}: {rate(each.bytes_per_s)} in operations of {each.operation_bytes:,} B{against}, "
            f"{each.latency_s * 1e6:.0f} us for one; verified"
        )
        if known and "memcpy" not in each.wire and each.bytes_per_s < POOR_SHARE * each.wire_bytes_per_s:
            yield warning(
                text,
                "less than half of what the card can: the transport uses another way than expected, or the way is shared",
                "kvbridge bench-peer ADDRESS for all sizes; UCX_PROTO_INFO=y or MC_LOG_LEVEL=INFO tell the way that is taken",
                subject=subject,
            )
        else:
            yield fine(text, subject=subject)
    if not host.reach.moved:
        yield not_here("no bytes were moved", "told so (--no-transfer), or the role moves none")
