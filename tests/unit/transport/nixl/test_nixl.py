"""The nixl backend over a scripted agent; the contract suite tests the library itself."""

import contextlib
from pathlib import Path

import numpy as np
import pytest

from kvbridge.config.transports import NixlSettings
from kvbridge.core.errors import TransportError
from kvbridge.core.ids import MemoryKind
from kvbridge.core.plan.operations import Operations
from kvbridge.pool.memory.layout import Extent
from kvbridge.transport.base import Endpoint, Extents, Stretch
from kvbridge.transport.nixl import agent as nixl_agent
from kvbridge.transport.nixl.agent import Side, UnclearPostError, environment
from kvbridge.transport.nixl.transport import NixlPeer, NixlTransport, _Batch, _place, _Writes
from kvbridge.transport.windowed import DONE, PENDING, Check, Progress, Window, WindowLimits
from tests.helpers.shared_buffer import connect

FAILED, STALLED = Check(Progress.FAILED, "gone"), Check(Progress.STALLED, "odd")


class ScriptedAgent:
    """Remembers what was posted; `answers` is what each request number is answered with."""

    def __init__(self) -> None:
        self.posted: list[tuple[Side, Side]] = []
        self.refusals: dict[int, TransportError] = {}
        self.answers: dict[int, Check] = {}
        self.asked: list[int] = []

    def post(self, peer: str, local: Side, remote: Side) -> int:
        number = len(self.posted)
        self.posted.append((local, remote))
        if number in self.refusals:
            raise self.refusals[number]
        return number

    def check(self, request: int) -> Check:
        self.asked.append(request)
        return self.answers.get(request, PENDING)


HOST = Stretch(0x1000, 0x1000, _place(MemoryKind.DRAM, 0))
DEVICE = Stretch(0x8000, 0x1000, _place(MemoryKind.VRAM, 3))


@pytest.fixture
def agent() -> ScriptedAgent:
    return ScriptedAgent()


@pytest.fixture
def writes(agent: ScriptedAgent) -> _Writes:
    """Four operations: host to host, host to device, device to host, host to host."""
    window = Window(WindowLimits(operations=8, bytes=1 << 20, quiet_timeout_s=1.0))
    known = [DEVICE, HOST]
    peer = NixlPeer("peer", "peer", Extents("peer", known), window)
    source, target = np.array([0x1000, 0x1100, 0x8000, 0x1FF0]), np.array([0x1000, 0x8FF0, 0x1200, 0x1300])
    operations = Operations(
        source.astype(np.uint64), target.astype(np.uint64), np.array([16, 16, 32, 16], dtype=np.uint64)
    )
    return _Writes(agent, peer, Extents("us", known), operations)


def test_each_pair_of_memory_kinds_is_a_request_and_rows_name_their_devices(writes: _Writes, agent: ScriptedAgent):
    writes.start(0, 4)
    found = [(local[0], remote[0], local[1][:, 2].tolist(), remote[1][:, 2].tolist()) for local, remote in agent.posted]
    host, device = MemoryKind.DRAM, MemoryKind.VRAM
    assert found == [(host, host, [0, 0], [0, 0]), (host, device, [0], [3]), (device, host, [3], [0])]
    assert agent.posted[0][0][1][:, 0].tolist() == [0x1000, 0x1FF0]


def test_refused_first_request_started_nothing(writes: _Writes, agent: ScriptedAgent) -> None:
    agent.refusals = {0: TransportError("refused")}
    with pytest.raises(TransportError, match="refused"):
        writes.start(0, 4)
    batch = writes.start(3, 4)
    agent.answers = {1: DONE}
    assert writes.check(batch) == DONE


@pytest.mark.parametrize("number", [0, 1])
def test_unclear_post_never_counts_as_quiet(writes: _Writes, agent: ScriptedAgent, number: int) -> None:
    agent.refusals = {number: UnclearPostError("half posted")}
    agent.answers = {0: DONE, 1: DONE, 2: DONE}
    batch = writes.start(0, 4)
    for _ in range(3):
        assert writes.check(batch) == Check(Progress.STALLED, "half posted")


def test_later_refusal_fails_the_batch_that_has_begun(writes: _Writes, agent: ScriptedAgent) -> None:
    agent.refusals = {1: TransportError("connection gone")}
    batch = writes.start(0, 4)
    assert isinstance(batch, _Batch)
    agent.answers = {0: FAILED}
    assert writes.check(batch).progress is Progress.FAILED


@pytest.fixture
def no_infiniband(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("UCX_TLS", "UCX_NET_DEVICES", "UCX_MODULES", "UCX_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(nixl_agent, "INFINIBAND_DEVICES", tmp_path / "infiniband")
    return tmp_path / "infiniband"


@pytest.fixture(scope="module")
def transport():
    made = NixlTransport(NixlSettings(ucx_tls="tcp", ucx_net_devices="lo", connect_timeout_s=1.0, quiet_timeout_s=1.0))
    yield made
    made.close()


@pytest.mark.outside
def test_endpoint_whose_metadata_names_somebody_else_is_refused(transport: NixlTransport) -> None:
    other = NixlTransport(NixlSettings(ucx_tls="tcp", ucx_net_devices="lo", connect_timeout_s=1.0, quiet_timeout_s=1.0))
    memory = np.zeros(4096, np.uint8)
    other.register([Extent(address=int(memory.ctypes.data), length_bytes=4096)])
    endpoint = other.endpoint()
    false = endpoint.data.replace(other._agent.name.encode(), b"somebody-else")
    with pytest.raises(TransportError, match="metadata names"):
        connect(transport, Endpoint(transport="nixl", data=false))
    peer = connect(transport, endpoint)
    transport.disconnect(peer)
    other.close()


def test_registration_that_the_library_refuses_leaves_nothing_behind(transport, monkeypatch):
    memory = np.zeros(4096, np.uint8)
    part = Extent(address=int(memory.ctypes.data), length_bytes=4096, label="pool")

    def refuse(*_: object) -> None:
        raise TransportError("no")

    with monkeypatch.context() as patched:
        patched.setattr(transport._agent, "register", refuse)
        with pytest.raises(TransportError, match="pool"):
            transport.register([part])
    assert not transport._memory
    transport.register([part])


def test_a_peer_whose_name_is_no_text_is_named_all_the_same():
    """The library takes any bytes for a name: the transport refuses it as another one than the endpoint's."""
    agent = object.__new__(nixl_agent.NixlAgent)
    agent._errors = (RuntimeError,)
    agent.device = None

    class Library:
        def loadRemoteMD(self, metadata: bytes) -> bytes:
            return b"kvbridge-\xff\x80"

    agent._agent = Library()
    assert agent.load_peer(b"") == "kvbridge-\ufffd\ufffd"


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ("tcp", "tcp,cuda_copy,cuda_ipc"),
        ("rc,cuda_copy", "rc,cuda_copy,cuda_ipc"),
        ("tcp,cuda", "tcp,cuda"),
        ("^rc", "^rc"),
        ("all", "all"),
        ("", ""),
    ],
)
def test_device_transports_are_added_where_there_is_a_gpu(no_infiniband, monkeypatch, asked, wanted):
    settings = NixlSettings(ucx_tls=asked)
    monkeypatch.setattr(nixl_agent, "has_accelerator", lambda: False)
    assert environment(settings).get("UCX_TLS", "") == asked
    monkeypatch.setattr(nixl_agent, "has_accelerator", lambda: True)
    assert environment(settings).get("UCX_TLS", "") == wanted


@pytest.mark.parametrize(
    ("installed", "driver", "chosen"),
    [
        ({"nixl_cu12"}, "580.159.04", "nixl_cu12"),
        ({"nixl_cu13"}, "", "nixl_cu13"),
        ({"nixl_cu12", "nixl_cu13"}, "580.159.04", "nixl_cu13"),
        ({"nixl_cu12", "nixl_cu13"}, "for x86_64  590.44.01", "nixl_cu13"),
        ({"nixl_cu12", "nixl_cu13"}, "575.51.03", "nixl_cu12"),
        ({"nixl_cu12", "nixl_cu13"}, "", "nixl_cu12"),
    ],
)
def test_the_build_that_the_driver_suits_is_loaded(monkeypatch, tmp_path, installed, driver, chosen):
    monkeypatch.setattr(nixl_agent.importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(nixl_agent, "has_accelerator", lambda: bool(driver))
    monkeypatch.setattr(nixl_agent, "DRIVER_VERSION", tmp_path / "version")
    if driver:
        (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Wed\n")
    assert nixl_agent._package() == chosen


def test_device_memory_is_used_with_its_device_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX looks for a CUDA context on the thread that calls it."""
    used: list[int] = []
    monkeypatch.setattr(nixl_agent.runtime, "use", used.append)
    agent = object.__new__(nixl_agent.NixlAgent)
    agent._errors = (RuntimeError,)
    agent._device = None
    agent._agent = None  # so every call ends once it has chosen the device
    host = (MemoryKind.DRAM, np.array([[1, 2, 0]], dtype=np.uint64))
    for device, call in enumerate((agent.register, agent._enter_device), start=3):
        with contextlib.suppress(TransportError):
            call(*host)
        with contextlib.suppress(TransportError):
            call(MemoryKind.VRAM, np.array([[1, 2, device]], dtype=np.uint64))
    assert used == [3, 4]
