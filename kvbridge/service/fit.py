"""Which pair of instances suits a request: a pure choice.

Owns: demand, fit, order of preference. Must not know: HTTP, reservations, time.

An instance is *free* by the share of its scarcest pool that would be left after the request. Pairs are tried in the
order of the sum of both shares, the freest first; equal ones by fewer rooms, then by name, so that the order is the
same wherever it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from kvbridge.core.errors import CapacityError, FingerprintMismatchError, InvalidInputError, NotReadyError
from kvbridge.core.geometry.manifest import first_difference
from kvbridge.core.geometry.pages import pages_needed
from kvbridge.core.ids import IndexSpace, Role
from kvbridge.service.directory import Instance
from kvbridge.service.ports import Load, PairRequest, PeerAddress


@dataclass(frozen=True, slots=True)
class Candidate:
    """Two instances that both have room, by the directory's knowledge."""

    prefill: Instance
    decode: Instance

    @property
    def controls(self) -> tuple[PeerAddress, ...]:
        """Where the decode side meets the prefill nodes."""
        found = (record.registration.control for record in self.prefill.nodes)
        return tuple(control for control in found if control is not None)


def demand(instance: Instance, request: PairRequest) -> dict[str, int]:
    """Return the pages that the request needs on each node of the instance, by index space.

    Which components a decode node keeps on its host is its own affair; a host page covers as many tokens as a full one,
    so the host pool is asked for as many.
    """
    appended = request.max_new_tokens if instance.role is Role.DECODE else 0
    pages = pages_needed(
        instance.geometry, tokens=request.prompt_tokens + appended, prompt_tokens=request.prompt_tokens
    )
    needed: dict[str, int] = {space.value: count for space, count in pages.items()}
    if instance.role is Role.DECODE and IndexSpace.FULL in pages:
        held = request.prefix_tokens // instance.geometry.tokens_per_page
        needed[IndexSpace.FULL.value] = max(0, needed[IndexSpace.FULL.value] - held)
        needed[IndexSpace.HOST.value] = needed[IndexSpace.FULL.value]
    return needed


def free_share(load: Load, needed: dict[str, int]) -> float:
    """Return the share of the scarcest pool that the request would leave; negative when it does not fit.

    Pools that a node does not report, or reports as empty of pages altogether, set no limit here.
    """
    shares = [
        (load.free_pages.get(space, 0) - count) / load.total_pages[space]
        for space, count in needed.items()
        if load.total_pages.get(space, 0)
    ]
    return min(shares, default=1.0)


def candidates(instances: tuple[Instance, ...], request: PairRequest, *, retry_after_s: float) -> tuple[Candidate, ...]:
    """Return every pair that could take the request now, the best first; never empty.

    Raises NotReadyError when a role has no ready instance, FingerprintMismatchError when no two ready instances hold
    the same model, InvalidInputError when the request is larger than every pool, CapacityError when it is full.
    """
    prefill = _ready(instances, Role.PREFILL, request, retry_after_s)
    decode = _ready(instances, Role.DECODE, request, retry_after_s)
    matching = [pair for pair in product(prefill, decode) if pair[0].fingerprint == pair[1].fingerprint]
    if not matching:
        raise _mismatch(prefill[0], decode[0])
    ranked = []
    for sender, receiver in matching:
        shares = _share(sender, request), _share(receiver, request)
        if min(shares) >= 0:
            order = (-sum(shares), sender.rooms + receiver.rooms, sender.name, receiver.name)
            ranked.append((order, Candidate(prefill=sender, decode=receiver)))
    if ranked:
        return tuple(pair for _, pair in sorted(ranked, key=lambda entry: entry[0]))
    if not any(
        _could_ever_fit(sender, request) and _could_ever_fit(receiver, request) for sender, receiver in matching
    ):
        raise InvalidInputError(
            f"a request of {request.prompt_tokens} prompt and {request.max_new_tokens} new tokens is larger than the "
            f"pools of every pair of instances ({_names(matching)}): enlarge pools.* or shorten the request"
        )
    raise CapacityError(
        f"no pair of instances has room for {request.prompt_tokens} prompt and {request.max_new_tokens} new tokens now "
        f"(tried {_names(matching)})",
        retry_after_s=retry_after_s,
    )


def _ready(instances: tuple[Instance, ...], role: Role, request: PairRequest, retry_after_s: float) -> list[Instance]:
    of_role = [
        instance
        for instance in instances
        if instance.role is role and request.fingerprint in {"", instance.fingerprint}
    ]
    ready = [instance for instance in of_role if not instance.reasons()]
    if ready:
        return ready
    model = f" with fingerprint {request.fingerprint}" if request.fingerprint else ""
    reasons = "; ".join(f"'{instance.name}': {', '.join(instance.reasons())}" for instance in of_role)
    raise NotReadyError(
        f"no {role} instance{model} is ready: {reasons or 'none is registered'}", retry_after_s=retry_after_s
    )


def _mismatch(sender: Instance, receiver: Instance) -> FingerprintMismatchError:
    difference = first_difference(sender.geometry, receiver.geometry)
    return FingerprintMismatchError(
        f"no prefill instance holds the same model as a decode instance; between '{sender.name}' (here) and "
        f"'{receiver.name}' (peer) the first difference is: {difference}; give both the same model and encoding"
    )


def _share(instance: Instance, request: PairRequest) -> float:
    needed = demand(instance, request)
    return min(free_share(record.load, needed) for record in instance.nodes)


def _could_ever_fit(instance: Instance, request: PairRequest) -> bool:
    needed = demand(instance, request)
    return all(
        count <= total
        for record in instance.nodes
        for space, count in needed.items()
        if (total := record.load.total_pages.get(space, 0))
    )


def _names(pairs: list[tuple[Instance, Instance]]) -> str:
    shown = ", ".join(f"'{sender.name}' + '{receiver.name}'" for sender, receiver in pairs[:4])
    return shown if len(pairs) <= 4 else f"{shown} and {len(pairs) - 4} more"
