"""The common work of all backends: memory taken in as a whole, peers by their handles, checks before a submission."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvbridge.core.errors import InvalidInputError, RegistrationError, TransportError
from kvbridge.core.ids import MemoryKind
from kvbridge.core.plan.operations import Operations
from kvbridge.core.process import monotonic
from kvbridge.pool.memory.layout import Extent
from kvbridge.transport.base import Backend, Endpoint, Extents, Peer, Transfer, TransferState, TransferStatus
from kvbridge.transport.threads import Call
from tests.helpers.shared_buffer import connect, operations

HERE, THERE, SIZE = 1 << 20, 1 << 30, 1 << 16


@dataclass
class Known:
    extents: Extents
    label: str = "peer"


class Started(Transfer):
    def __init__(self) -> None:
        self.reason = ""

    def poll(self) -> TransferStatus:
        return TransferStatus(TransferState.FAILED_QUIET if self.reason else TransferState.ACTIVE, self.reason)

    def abort(self, reason: str) -> None:
        self.reason = reason


class Plain(Backend[Known]):
    """A backend whose library takes everything, unless it is told to refuse."""

    name = "plain"

    def __init__(self) -> None:
        super().__init__(monotonic, max_operation_bytes=4096)
        self.registered: list[Extent] = []
        self.refusal = ""
        self.closed = False

    def endpoint(self) -> Endpoint:
        return Endpoint(transport=self.name, data=b"")

    def submit(self, peer: Peer, operations: Operations, *, deadline_s: float) -> Transfer:
        self._checked(peer, operations)
        transfer = Started()
        self._transfers[transfer] = peer
        return transfer

    def close(self) -> None:
        self.closed = True

    def _require_open(self) -> None:
        if self.closed:
            raise TransportError("closed")

    def _out_of_reach(self, part: Extent) -> str:
        return "it is device memory" if part.kind is MemoryKind.VRAM else ""

    def _register(self, memory: Sequence[Extent]) -> None:
        if self.refusal:
            raise RegistrationError(self.refusal)
        self.registered += memory

    def connect(self, endpoint: Endpoint) -> Call[Peer]:
        known = Known(Extents("peer", [(THERE, SIZE)]))
        return Call(lambda: known, name="connect", timeout_s=10.0, late="late", clock=monotonic, then=self._take)


def extent(address: int, kind: MemoryKind = MemoryKind.DRAM) -> Extent:
    return Extent(address=address, length_bytes=SIZE, kind=kind, label="pool")


@pytest.fixture
def plain() -> Plain:
    made = Plain()
    made.register([extent(HERE)])
    return made


def test_what_is_submitted_is_checked_first(plain: Plain) -> None:
    peer = connect(plain, plain.endpoint())
    with pytest.raises(InvalidInputError, match="leave the registered memory of this process"):
        plain.submit(peer, operations((THERE, THERE, 64)), deadline_s=1.0)
    with pytest.raises(InvalidInputError, match="leave the registered memory of peer"):
        plain.submit(peer, operations((HERE, HERE, 64)), deadline_s=1.0)
    with pytest.raises(InvalidInputError, match="4097 bytes is longer than max_operation_bytes"):
        plain.submit(peer, operations((HERE, THERE, 4097)), deadline_s=1.0)
    with pytest.raises(InvalidInputError, match="not connected to this plain transport"):
        plain.submit(Peer(), operations((HERE, THERE, 64)), deadline_s=1.0)
    plain.submit(peer, operations(), deadline_s=1.0)
    plain.close()
    with pytest.raises(TransportError, match="closed"):
        plain.submit(peer, operations((HERE, THERE, 64)), deadline_s=1.0)


def require(extents: Extents, *ranges: tuple[int, int]) -> None:
    addresses, lengths = np.array(ranges, dtype=np.uint64).reshape(-1, 2).T
    extents.require(addresses, lengths)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), max_size=8),
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 14)), min_size=1, max_size=10),
)
def test_agrees_with_counting_bytes(wanted: list[tuple[int, int]], ranges: list[tuple[int, int]]) -> None:
    extents, owner = Extents("us"), {}
    for start, length in wanted:
        bytes_ = range(start, start + length)
        if any(byte in owner for byte in bytes_):
            with pytest.raises(InvalidInputError):
                Extents("us", [*extents.stretches, (start, length)])
            continue
        extents = Extents("us", [*extents.stretches, (start, length)])
        owner |= dict.fromkeys(bytes_, start)
    inside = all(
        length and len({owner.get(byte) for byte in range(start, start + length)}) == 1 and owner.get(start)
        for start, length in ranges
    )
    if inside:
        require(extents, *ranges)
    else:
        with pytest.raises(InvalidInputError):
            require(extents, *ranges)
