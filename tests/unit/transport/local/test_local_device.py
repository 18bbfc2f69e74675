"""The local transport with device memory, where devices are played by the processor: what tests/contract shows on a GPU.

Device memory is ordinary memory here, its handle names its address, and streams copy when they are asked after.
"""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvbridge.config.transports import LocalSettings
from kvbridge.core.errors import InvalidInputError, RegistrationError, TransportError, UnsupportedError
from kvbridge.core.ids import MemoryKind
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.wire.messages import CudaOrigin
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.layout import Extent
from kvbridge.transport.base import TransferState
from kvbridge.transport.local import gpu as local_gpu, memory as local_memory, transport as local
from kvbridge.transport.local.gpu import Route, Way
from kvbridge.transport.local.transport import LocalTransport
from tests.contract.harness import wait
from tests.helpers.cluster import eventually
from tests.helpers.fake_cuda import FakeStream
from tests.helpers.manual_clock import ManualClock
from tests.helpers.shared_buffer import SharedBuffer, connect, operations
from tests.unit.transport.local.conftest import check_revocation

SIZE = 1 << 20
BELOW = 4096
UUID = "ab" * 16
UNREACHABLE = "cd" * 16


class DeviceArray:
    """Device memory that the processor can look at."""

    def __init__(self, length_bytes: int = SIZE, *, uuid: str = UUID) -> None:
        self.bytes = np.zeros(length_bytes, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self._uuid = uuid

    def memory(self, offset: int = 0, length: int | None = None, *, device: int = 0, private: bool = False) -> Extent:
        handle = self.address.to_bytes(8, "little") + len(self.bytes).to_bytes(8, "little") + bytes(48)
        return Extent(
            address=self.address + offset,
            length_bytes=len(self.bytes) - offset if length is None else length,
            kind=MemoryKind.VRAM,
            device=device,
            origin=None if private else CudaOrigin(handle=handle, device_uuid=self._uuid, length_bytes=len(self.bytes)),
            offset_bytes=offset,
            label="window pool",
        )


World = SimpleNamespace
"""The calls that the fakes have seen."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    seen = World(opened=0, closed=0, registered=[], refusal="", streams={}, gpu=True)

    class Opened:
        def __init__(self, origin: CudaOrigin, *, device: int | None) -> None:
            address = int.from_bytes(origin.handle[:8], "little")
            lengths[address] = int.from_bytes(origin.handle[8:16], "little")
            self.extent = Extent(address=address, length_bytes=lengths[address], device=device or 0)
            seen.opened += 1

        def close(self) -> None:
            seen.closed += 1

    lengths: dict[int, int] = {}

    class Registration:
        def __init__(self, memory: list, *, extents: list, device: int, on_progress: Callable[[int, int], None]):
            if seen.refusal:
                raise RegistrationError(seen.refusal)
            seen.registered += [each.address for each in memory]

        def close(self) -> None:
            pass

    def reach(device: int | None, uuid: str) -> None:
        if uuid == UNREACHABLE:
            raise UnsupportedError("cuda:0 cannot reach the memory of cuda:1 directly")

    def stream(route: Route, *, kernel_blocks: int) -> FakeStream:
        seen.streams[route] = FakeStream(route, at_once=True, slice_operations=64)
        return seen.streams[route]

    monkeypatch.setattr(runtime, "reason_without_device", lambda: "")
    monkeypatch.setattr(local_memory, "OpenedAllocation", Opened)
    monkeypatch.setattr(local_memory, "allocation_of", lambda device, at: (at, lengths[at]))
    monkeypatch.setattr(local_memory, "_require_reach", reach)
    monkeypatch.setattr(local_gpu, "HostRegistration", Registration)
    monkeypatch.setattr(local, "has_accelerator", lambda: seen.gpu)
    monkeypatch.setattr(local, "CopyStream", stream)
    return seen


@pytest.fixture
def make(tmp_path: Path):
    made: list[LocalTransport] = []

    def build(*, epoch: int = 0, clock: Clock = monotonic, **settings: object) -> LocalTransport:
        chosen = LocalSettings(proof_directory=str(tmp_path), copy_kernel_below_bytes=BELOW, **settings)
        made.append(LocalTransport(chosen, epoch=epoch, clock=clock))
        return made[-1]

    yield build
    for transport in made:
        transport.close()


@pytest.fixture
def joined(make):
    """Connects a writer with some memory to a reader with other memory: both transports, and the peer."""

    def join(own: list[Extent], theirs: list[Extent], **of_reader: object):
        writer, reader = make(), make(**of_reader)
        writer.register(own)
        reader.register(theirs)
        return writer, reader, connect(writer, reader.endpoint())

    return join


@pytest.mark.parametrize(("length", "way"), [(BELOW - 1, Way.KERNEL), (3 * BELOW, Way.ENGINES)])
def test_each_end_wherever_it_is(world: World, joined, tmp_path: Path, length: int, way: Way) -> None:
    """One submission from host and device memory to host and device memory: one way for all, and every byte in its place."""
    source, own, target = DeviceArray(), SharedBuffer(tmp_path / "own", SIZE), DeviceArray()
    pool = SharedBuffer(tmp_path / "pool", SIZE)
    rng = np.random.default_rng(0)
    for array in (source.bytes, own.bytes):
        array[:] = rng.integers(1, 256, SIZE, dtype=np.uint8)
    writer, _, peer = joined([source.memory(), own.memory()], [pool.memory(), target.memory(4096)])
    rows, offset = [], 8192
    expected = {pool.address: np.zeros(SIZE, np.uint8), target.address: np.zeros(SIZE, np.uint8)}
    for size in (100, 2 * length - 100):  # the mean decides
        for origin in (source, own):
            for goal in (pool, target):
                rows.append((origin.address + offset, goal.address + offset, size))
                expected[goal.address][offset : offset + size] = origin.bytes[offset : offset + size]
                offset += size
    assert wait(writer.submit(peer, operations(*rows), deadline_s=5.0)).state is TransferState.DONE
    for goal in (pool, target):
        np.testing.assert_array_equal(goal.bytes, expected[goal.address])
    copied = {route: len(stream.started) for route, stream in world.streams.items() if stream.started}
    assert copied == {Route(way, 0, over_host_link=True): 1}
    assert own.address in world.registered
    between = operations((source.address, target.address + 4096, length))
    assert wait(writer.submit(peer, between, deadline_s=5.0)).state is TransferState.DONE
    assert world.streams[Route(way, 0)].started, "what stays on devices does not wait for the host link"
    on_host = operations((own.address, pool.address, length))
    assert wait(writer.submit(peer, on_host, deadline_s=5.0)).state is TransferState.DONE
    assert sum(len(stream.started) for stream in world.streams.values()) == 2, "the processor copies on the host"


def test_device_memory_beyond_what_was_named_is_refused(world: World, make, joined) -> None:
    source, target = DeviceArray(), DeviceArray()
    writer, _, peer = joined([source.memory()], [target.memory(4096, 4096)])
    with pytest.raises(InvalidInputError, match="leave the registered memory of process"):
        writer.submit(peer, operations((source.address, target.address, 4096)), deadline_s=5.0)
    lying = make()
    lying.register([target.memory(SIZE - 4096, 4097)])
    with pytest.raises(TransportError, match="4097 bytes that its file or allocation does not have"):
        connect(writer, lying.endpoint())
    assert world.closed == 1, "what was opened for a refused peer is closed again"


def test_peers_out_of_reach_are_refused_with_the_reason(world: World, make, monkeypatch) -> None:
    writer = make()
    writer.register([DeviceArray().memory()])
    for memory, reason in (
        (DeviceArray(uuid=UNREACHABLE).memory(), "cannot reach the memory of cuda:1 directly"),
        (DeviceArray().memory(private=True), "not shared \\(window pool\\)|no shared memory"),
    ):
        reader = make()
        reader.register([memory])
        with pytest.raises(TransportError, match=reason):
            connect(writer, reader.endpoint())
    reader = make()
    reader.register([DeviceArray().memory()])
    monkeypatch.setattr(runtime, "reason_without_device", lambda: "the driver is on holiday")
    with pytest.raises(TransportError, match=r"from here: this process has no device \(the driver is on holiday"):
        connect(writer, reader.endpoint())


def test_extents_of_a_pool_that_is_registered_as_a_whole_cost_nothing(world, joined, tmp_path, monkeypatch):
    """A pool has hundreds of extents: neither a thread for each, nor a line of the log that says that memory is registered."""
    source, target, extents = SharedBuffer(tmp_path / "own", SIZE), DeviceArray(), 8
    source.bytes[:] = 7
    span = source.address, SIZE
    monkeypatch.setattr(local_gpu, "registered_range", lambda _: span)
    each = SIZE // extents
    writer, _, peer = joined([source.memory(at * each, each) for at in range(extents)], [target.memory()])
    started: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (started.append(self.name), start(self))[1])
    rows = [(source.address + at * each, target.address + at * each, BELOW) for at in range(extents)]
    with capture_logs() as lines:
        assert wait(writer.submit(peer, operations(*rows), deadline_s=5.0)).state is TransferState.DONE
        writer.close()
    assert (target.bytes == 7).sum() == extents * BELOW
    assert not [name for name in started if name.startswith(("kvbridge-register", "kvbridge-unregister"))]
    assert not [line for line in lines if line["event"] == "registering_memory"]


def test_a_submission_that_cannot_be_made_leaves_nothing_behind(world: World, joined, monkeypatch) -> None:
    """No operation of it is started, and it keeps neither the peer's memory nor a share of a stream."""
    source, target = DeviceArray(), DeviceArray()
    writer, _, peer = joined([source.memory()], [target.memory()])

    def refuse(*_: object) -> None:
        raise TransportError("no more today")

    writer._devices._streams.pop(Route(Way.KERNEL, 0))
    monkeypatch.setattr(writer._devices, "_make_stream", refuse)
    with pytest.raises(TransportError, match="no more today"):
        writer.submit(peer, operations((source.address, target.address, 64)), deadline_s=5.0)
    assert not target.bytes.any()
    assert {len(window.transfers) for _, window in writer._devices._streams.values()} == {0}
    writer.disconnect(peer)
    eventually("the peer's memory is let go", lambda: world.closed == 1)


def test_a_transport_serves_one_device(world: World, make) -> None:
    writer, first, second = make(), DeviceArray(), DeviceArray()
    writer.register([first.memory()])
    with pytest.raises(RegistrationError, match="cuda:0, cuda:1"):
        writer.register([second.memory(device=1)])


def test_host_memory_that_cannot_be_registered_is_refused_when_connecting(world: World, make, tmp_path: Path) -> None:
    writer, reader, beside = make(), make(), make()
    writer.register([DeviceArray().memory()])
    pool = SharedBuffer(tmp_path / "pool", SIZE)
    reader.register([pool.memory()])
    beside.register([pool.memory()])
    connect(beside, reader.endpoint())  # keeps the file mapped
    world.refusal = "raise the memlock limit"
    with pytest.raises(TransportError, match="cannot be written by cuda:0: raise the memlock limit"):
        connect(writer, reader.endpoint())
    world.refusal = ""
    connect(writer, reader.endpoint())  # it is tried again
    assert len(world.registered) == 1


def test_an_endpoint_without_files_is_revoked_like_one_with_files(world: World, make, tmp_path: Path) -> None:
    """Device memory has no file to lock, so a lock file stands for it, which outlives the transports that name it."""
    world.gpu = False
    own, target, other = DeviceArray(), DeviceArray(), DeviceArray()
    writer, beside = make(), make(epoch=1)
    writer.register([own.memory()])
    beside.register([other.memory()])
    connect(writer, beside.endpoint())
    check_revocation(writer, make(epoch=3), make(epoch=4), target.memory())


def test_a_lock_file_whose_folder_is_gone_is_made_again_and_the_old_one_still_counts(world: World, tmp_path: Path):
    """Later memory can have the address of earlier one, and the earlier proof's folder need not be there any more."""
    world.gpu = False
    target, writer = DeviceArray(), LocalTransport(LocalSettings())
    writer.register([DeviceArray().memory()])
    readers, peers = [], []
    for epoch in (1, 2):
        folder = tmp_path / str(epoch)
        folder.mkdir()
        readers.append(LocalTransport(LocalSettings(proof_directory=str(folder)), epoch=epoch))
        readers[-1].register([target.memory()])
        peers.append(connect(writer, readers[-1].endpoint()))
        if epoch == 1:
            readers[-1].close()
            shutil.rmtree(folder)
    assert not readers[1].revoked(2), "who has the old endpoint may still write"
    writer.disconnect(peers[0])
    assert readers[1].revoked(2)
    assert not readers[1].revoked(3)
    writer.close()
    assert readers[1].revoked(3)
    readers[1].close()


def test_on_a_host_with_a_gpu_writers_must_have_been_gone_for_a_while(world: World, joined) -> None:
    """A device may finish some copies for a process that was killed, after the kernel has taken its locks away."""
    clock = ManualClock()
    writer, reader, peer = joined([DeviceArray().memory()], [DeviceArray().memory()], clock=clock)
    clock.advance(100.0)
    assert not reader.revoked(1)
    writer.disconnect(peer)
    assert not reader.revoked(1)
    clock.advance(0.49)
    assert not reader.revoked(1)
    clock.advance(0.01)
    assert reader.revoked(1)
