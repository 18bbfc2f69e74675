"""The facts of a host that the checks judge: plain values, as they were read.

Owns: their form, which is also that of the recorded hosts in the tests. Must not know: where they are read, what is good.

The defaults are a host without anything special, so that a test names what it is about. None means that it could not be read.
"""

from __future__ import annotations

from pydantic import Field

from kvbridge.core.ids import FrozenModel


class Limit(FrozenModel):
    """A resource limit of this process; None: unlimited."""

    soft: int | None = None
    hard: int | None = None


class SharedDirectory(FrozenModel):
    """A directory for shared memory."""

    path: str
    problem: str = ""
    """Why files in it would not be shared memory."""
    total_bytes: int = 0
    free_bytes: int = 0


class Available(FrozenModel):
    """What one limit of memory leaves."""

    name: str
    available_bytes: int
    cure: str


class HugePages(FrozenModel):
    """Reserved huge pages of the default size, and whether shared memory may use transparent ones."""

    page_bytes: int = 0
    total: int = 0
    free: int = 0
    shared_memory: str = ""
    """The chosen word of transparent_hugepage/shmem_enabled."""


class NumaNode(FrozenModel):
    """Memory of one NUMA node."""

    number: int
    total_bytes: int
    free_bytes: int
    """With what the page cache would give back."""


class LeftFile(FrozenModel):
    """A file that a dead daemon has left in shared memory."""

    path: str
    size_bytes: int
    user_id: int
    ours: bool
    """Whether a sweep of this user would remove it."""
    why: str = ""


class Memory(FrozenModel):
    """Memory of this host, and the limits of this process."""

    locked: Limit = Limit()
    may_lock_any: bool = False
    """CAP_IPC_LOCK: the limit does not count."""
    shared: tuple[SharedDirectory, ...] = ()
    limits: tuple[Available, ...] = ()
    """Of the machine and of the control groups."""
    huge_pages: HugePages = HugePages()
    nodes: tuple[NumaNode, ...] = ()
    allowed_nodes: tuple[int, ...] = ()
    left: tuple[LeftFile, ...] = ()


class Gpu(FrozenModel):
    """One GPU that this process sees."""

    ordinal: int
    name: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    node: int | None = None
    """Its NUMA node."""
    reaches: tuple[int, ...] = ()
    """Ordinals of the other GPUs whose memory it can read and write directly."""


class Devices(FrozenModel):
    """GPUs and their driver."""

    accelerator: bool = False
    """Whether a driver has made its device node."""
    driver: str = ""
    problem: str = ""
    """Why this process cannot use a GPU."""
    gpus: tuple[Gpu, ...] = ()
    ipc_problem: str | None = None
    """Why another process could not open device memory of this one; None: not tried."""


class Gid(FrozenModel):
    """One address of an RDMA port."""

    index: int
    address: str
    kind: str = ""
    """`RoCE v2`, `IB/RoCE v1`."""
    interface: str = ""


class RdmaPort(FrozenModel):
    """One port of an RDMA device."""

    device: str
    port: int
    state: str = "ACTIVE"
    link_layer: str = "Ethernet"
    rate_gbit: float = 0
    node: int | None = None
    gids: tuple[Gid, ...] = ()
    """Without the unset ones."""
    partition_keys: tuple[int, ...] = ()


class Interface(FrozenModel):
    """A network interface."""

    name: str
    up: bool = True
    speed_mbit: int = 0
    """0: not known."""
    mtu: int = 1500
    addresses: tuple[str, ...] = ()
    node: int | None = None


class Listener(FrozenModel):
    """A TCP socket that somebody listens on."""

    host: str
    port: int
    pid: int = 0
    """0: whose it is cannot be seen."""
    command: str = ""


class Route(FrozenModel):
    """Whether a peer's address answers from one address of this host."""

    source: str
    interface: str
    peer: str
    problem: str = ""


class Network(FrozenModel):
    """How this host is connected."""

    rdma: tuple[RdmaPort, ...] = ()
    verbs_nodes: bool = False
    """Whether /dev/infiniband is here (in containers: was passed in)."""
    interfaces: tuple[Interface, ...] = ()
    listeners: tuple[Listener, ...] = ()
    routes: tuple[Route, ...] = ()
    """From each RDMA card's own address."""
    foreign: tuple[str, ...] = ()
    """Addresses of the configuration that are none of this host's."""


class Directory(FrozenModel):
    """A directory or what lies in its place."""

    path: str
    problem: str = ""
    """Why it could not be used."""
    exists: bool = True


class KeyFact(FrozenModel):
    """A line of `kvbridge keys check`."""

    good: bool
    text: str


class Process(FrozenModel):
    """What this process may do."""

    open_files: Limit = Limit()
    ptrace_scope: int | None = None
    may_trace_any: bool = False
    """CAP_SYS_PTRACE."""
    runtime: Directory | None = None
    keys: tuple[KeyFact, ...] = ()


class Software(FrozenModel):
    """Versions and settings of what kvbridge runs on."""

    python: tuple[int, int, int] = (3, 11, 0)
    packages: dict[str, str] = Field(default_factory=dict)
    """Installed distributions, of those that matter, with their versions."""
    libraries: tuple[str, ...] = ()
    """System libraries that were found, of those that are needed."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables that the transfer libraries read."""


class Answer(FrozenModel):
    """What an HTTP endpoint said."""

    name: str
    """What it is: `bootstrap`, `decode-0/node-0`."""
    url: str
    problem: str = ""
    """Why it cannot be reached or does not answer."""
    took_s: float = 0
    ready: bool = True
    reasons: tuple[str, ...] = ()
    clock_ahead_s: float | None = None
    """Its clock against ours, to a second."""


class Handshake(FrozenModel):
    """A control socket that was connected to, and left again."""

    name: str
    endpoint: str
    problem: str = ""
    took_s: float = 0
    how: str = "handshake in the clear"
    """How far it went."""


class Moved(FrozenModel):
    """A small verified transfer."""

    name: str
    """To whom: `this host`, or the peer's address."""
    transport: str
    problem: str = ""
    bytes_per_s: float = 0
    latency_s: float = 0
    """Of one operation."""
    operation_bytes: int = 0
    wire: str = ""
    wire_bytes_per_s: float = 0
    """0: not known."""


class Reach(FrozenModel):
    """What was asked of others."""

    running: str = ""
    """`decode-0/node-0 (process 42)` when the daemon of this configuration runs already."""
    bootstraps: tuple[Answer, ...] = ()
    peers: tuple[Answer, ...] = ()
    handshakes: tuple[Handshake, ...] = ()
    moved: tuple[Moved, ...] = ()


class Host(FrozenModel):
    """Everything that was read."""

    memory: Memory = Memory()
    devices: Devices = Devices()
    network: Network = Network()
    process: Process = Process()
    software: Software = Software()
    reach: Reach = Reach()
