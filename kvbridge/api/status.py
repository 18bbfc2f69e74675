"""Documents for the operators of any daemon. Field names are the JSON names; moments are Unix seconds."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from kvbridge.api.directory import InstanceView
from kvbridge.core.ids import FrozenModel, IndexSpace, NonNegative, Positive, Role
from kvbridge.core.prefixes import Evicted, ModelIdentity
from kvbridge.pool.accounts.pages import PageState
from kvbridge.telemetry.recent import Moment, PeerTraffic, Problem


class Readiness(FrozenModel):
    """Whether new rooms can be admitted here, or paired by bootstrap, and every reason why not."""

    ready: bool
    reasons: tuple[str, ...] = ()


class ModelStatus(FrozenModel):
    """The model that a node serves; with an adapter and a namespace, all that enters the keys of its pages."""

    name: str
    fingerprint: str
    tokens_per_page: Positive
    identity: ModelIdentity | None = None
    """Name and revision that enter page keys (`tier.model_name`, `tier.model_revision`); null: it does not say."""


class RegistrationState(StrEnum):
    """Where a node stands with the directory, by what it was last told."""

    NONE = "none"
    """It announces itself to no directory, since `bootstrap.url` is empty or it is shutting down."""
    REGISTERED = "registered"
    UNREACHABLE = "unreachable"
    """Bootstrap has not answered yet, or not lately."""
    REFUSED = "refused"
    """Bootstrap would not have it; `problem` says why."""
    REPLACED = "replaced"
    """Another process has its name now."""


class BootstrapLinkStatus(FrozenModel):
    """A node's entry in the directory."""

    state: RegistrationState
    url: str
    """Empty: the node announces itself to no directory."""
    problem: str
    """Why the entry is not fresh; empty when it is."""


class RankStatus(FrozenModel):
    """One rank of a node and its worker."""

    rank: str
    state: str
    """`absent`, `starting` or `ready`."""
    pid: int
    layers: int
    registered: float
    """The share of its memory that its transports know, from 0 to 1."""
    restarts: int
    error: str
    transports: tuple[str, ...]


class EngineStatus(FrozenModel):
    """One engine process that is attached, or gone while pages wait for its end."""

    name: str
    pid: int
    """0: it is in another pid namespace."""
    ranks: tuple[str, ...]
    gone: str
    """Why it is not attached any more; empty while it is."""


class DecodeNodeStatus(FrozenModel):
    """A decode node, as a prefill node knows it."""

    instance: str
    node: str
    incarnation: str
    transports: dict[str, tuple[str, ...]]
    """Transports that reach each of its ranks, by rank of this node."""
    standby: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Transports that would reach all of its ranks if the former were lost, by rank of this node."""
    connecting: tuple[str, ...]
    """Ranks of this node that are not connected to it yet."""
    features: tuple[str, ...]


class PrefillNodeStatus(FrozenModel):
    """A prefill node, as a decode node knows it; without a name while it has not answered."""

    endpoint: str
    node: str
    incarnation: str
    ranks: tuple[str, ...]
    features: tuple[str, ...]


PeerStatuses = tuple[DecodeNodeStatus, ...] | tuple[PrefillNodeStatus, ...]


class FenceStatus(FrozenModel):
    """How far a decode node has shut out writers that gave no proof."""

    epoch: int
    phase: str
    """`idle`, `renewing`, `waiting` or `revoking`."""
    transports: tuple[str, ...] = ()
    """Transports that are being shut; empty: all, or none while it is idle."""
    rooms: tuple[str, ...]
    waits_for_rooms: int
    waits_for_ranks: tuple[str, ...]


class ClientStatus(FrozenModel):
    """One client's rooms and requests at a node; caps of 0 are none."""

    client: str
    rooms: int
    waiting: int
    head_since: Moment | None
    """When its longest waiting request began to wait."""
    max_rooms: int
    max_waiting: int


class AdmissionStatus(FrozenModel):
    """The queue of admission, and the clients with the most in it or in use."""

    waiting: int
    oldest_since: Moment | None
    """When the longest waiting request began to wait."""
    starved_since: Moment | None
    """Since when not even the smallest request fits."""
    clients: tuple[ClientStatus, ...]


class DaemonStatus(FrozenModel):
    """The status document of any daemon. It tells moments and no ages, so it can be kept for a while and still be right."""

    at: Moment
    """When this document was made."""
    started_at: Moment
    version: str
    ready: Readiness


class NodeStatus(DaemonStatus):
    """A prefill or decode daemon."""

    role: Role
    instance: str
    node: str
    incarnation: str
    model: ModelStatus
    memory_bytes: int
    """Bytes of all pools together."""
    bootstrap: BootstrapLinkStatus
    control: str
    """Where decode nodes connect; empty on a decode node."""
    ranks: tuple[RankStatus, ...]
    engines: tuple[EngineStatus, ...]
    peers: PeerStatuses
    rooms: dict[str, int]
    """Rooms that are known now, by state."""
    admission: AdmissionStatus
    pools: dict[IndexSpace, dict[PageState, int]]
    available_pages: dict[IndexSpace, int]
    """Pages that a request can have now: free ones, and cached ones that nobody reads."""
    prefixes: PrefixStatus | None = None
    """Null where none stay (`tier.enabled`)."""
    host_tier: HostTierStatus | None = None
    """Null where prefixes are kept on the device alone (`tier.host`)."""
    kept_pools: KeptPoolsStatus | None = None
    """Null where pools end with the daemon (`pools.keep_s`)."""
    store: PrefixStoreStatus | None = None
    """Null where nothing is kept below host memory (`tier.store`)."""
    quarantine: dict[str, tuple[str, ...]]
    """Owners of pages that nobody may use yet, by reason."""
    problems: tuple[Problem, ...]
    """The oldest first."""
    traffic: dict[str, PeerTraffic]
    """By the peer's incarnation."""
    fence: FenceStatus | None = None
    """Null on a prefill node, to which nobody writes."""


class PrefixStatus(FrozenModel):
    """Cached prompts and answers. A page is one in each space that grows with the tokens."""

    read_pages: NonNegative
    unread_pages: NonNegative
    """These can be evicted."""
    readers: NonNegative
    """Rooms with page keys that have not let go of what they read."""
    evicted_pages: dict[Evicted, NonNegative]
    """Pages evicted since the daemon was started, by reason. The following figures also count from its start."""
    hit_tokens: NonNegative
    """Prompt tokens of rooms with page keys that were cached when these were admitted."""
    miss_tokens: NonNegative
    """The other prompt tokens of these rooms."""
    host_tokens: NonNegative = 0
    """Those of `hit_tokens` whose pages were in host memory alone and came back from there."""
    checkpoints: NonNegative
    """Prefill: windows and states that are kept now; an engine continues a prefix only from one at its end."""
    retained_pages: dict[str, NonNegative]
    """Pages that are evicted after others, as requests asked with `retention`: the eight namespaces that have most."""
    retention_refused: NonNegative
    """Requests whose `retention` had no effect: their namespace, or all together, had as many retained pages as they may."""


class HostTierStatus(FrozenModel):
    """Where the pages of `prefixes` are, and copies between the device and host memory. Pages as there."""

    device_pages: NonNegative
    """On the device alone: evicted when others need the place."""
    both_pages: NonNegative
    """On the device and, by proof, on the host."""
    host_pages: NonNegative
    """On the host alone."""
    waiting_prompts: NonNegative
    """Prompts and answers whose pages wait to be copied."""
    in_flight_pages: NonNegative
    """Being copied now."""
    backed_up_pages: NonNegative
    """Copied to the host since the daemon was started. The following figures also count from its start."""
    backed_up_bytes: NonNegative
    failed_orders: NonNegative
    """Orders to copy that have failed; their pages are on the device as before."""
    last_failure: str
    longest_order_s: float
    """Seconds of the slowest order: a request that needed pages which were being copied has waited no longer."""
    refused_prompts: NonNegative
    """Not copied, since there was no host page that nobody reads."""
    loaded_back_pages: NonNegative
    """Copied from the host to the device."""
    failed_loads: NonNegative
    """Rooms that were given up since their pages could not be copied to the device."""
    last_failed_load: str
    evicted_read_back_pages: NonNegative
    """Pages that left the host to make room, and had been copied to the device at least once."""
    evicted_unused_pages: NonNegative
    """Pages that left the host to make room, and never had been copied back."""


class KeptPoolsStatus(FrozenModel):
    """Cached pages in the pools of the former daemon (`pools.keep_s`)."""

    waiting_pages: NonNegative
    """Still to be compared with the digests that they had; nobody is given them meanwhile."""
    restored_pages: NonNegative
    restored_bytes: NonNegative
    lost_pages: NonNegative
    """Pages whose digest no longer matched, and pages that depend on them."""
    refused_pages: NonNegative
    """Pages in pools that could not be taken over."""
    refused: str
    """Why pools could not be taken over; empty when they could, or when there were none."""
    seconds: float
    """Seconds that the comparison took, or has taken so far."""


class PrefixStoreStatus(FrozenModel):
    """The store below host memory, as this node has found it since it was started."""

    kind: str
    """`files` or `mooncake`."""
    state: str
    """`starting`: its process is not ready; `closed`: it is asked; `open`: it has failed too often, and is not asked for a while;
    `half_open`: one request tries whether it works again."""
    why_not: str
    """Why its process is not ready; empty when it is."""
    pid: NonNegative
    """The process of the store, 0 while there is none."""
    objects: dict[str, dict[str, NonNegative]]
    """Calls by verb (`put`, `get`, `has`, `drop`) and outcome."""
    fetched_pages: NonNegative
    """Pages of prompts that came from the store."""
    prefetches: dict[str, NonNegative]
    """Requests whose prompts were looked for: `found`, all that there was; `late`, `tier.prefetch_s` was over before; `part`, the
    rest was missing or bad; `nothing`; `failed`, by a defect, whose traceback is in the log."""
    waiting_prompts: NonNegative
    """Prompts and answers that wait to be written."""
    unsettled: NonNegative
    """Orders whose pages the store may still read or write."""


class StoreStatus(FrozenModel):
    """Where bootstrap keeps the directory."""

    kind: str
    problem: str
    """Why the store cannot be asked; empty when it can. The page then shows the store's last answer."""


class BootstrapStatus(DaemonStatus):
    """A bootstrap daemon."""

    role: str = "bootstrap"
    incarnation: str
    store: StoreStatus
    instances: tuple[InstanceView, ...]
    rooms: dict[str, int]
    """Rooms that it paired and remembers, by state."""


class ServerStatus(FrozenModel):
    """A prefill or decode server, as the router sees it."""

    role: Role
    url: str
    problem: str
    """Why no request is sent there; empty: it is well."""
    outstanding: NonNegative
    """Requests under way there."""
    load_tokens: NonNegative
    """Prompt tokens of these requests, estimated."""
    paired: bool
    """Whether requests go to this prefill server and to decode at once."""


class RouterStatus(DaemonStatus):
    """A router."""

    role: str = "router"
    order: str
    """`paired` or `plain`."""
    outstanding: NonNegative
    """Requests under way."""
    limit: Positive
    directory_problem: str = ""
    """Why the directory cannot be asked; the servers are then those that it named last."""
    servers: tuple[ServerStatus, ...]
