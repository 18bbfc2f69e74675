"""Documents for the operators of any daemon. Field names are the JSON names; moments are Unix seconds."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from kvbridge.api.directory import InstanceView
from kvbridge.core.ids import FrozenModel, IndexSpace, NonNegative, Positive, Role
from kvbridge.core.prefixes import Evicted, ModelIdentity
from kvbridge.pool.accounts.book import PageState
from kvbridge.telemetry.recent import Moment, PeerTraffic, Problem


class Readiness(FrozenModel):
    """Whether a node can admit new rooms, or bootstrap pair them, and every reason why not."""

    ready: bool
    reasons: tuple[str, ...] = ()


class ModelStatus(FrozenModel):
    """The model that a node serves. Page keys cover it, the adapter and the namespace."""

    name: str
    fingerprint: str
    tokens_per_page: Positive
    identity: ModelIdentity | None = None
    """Name and revision in page keys (`tier.model_name`, `tier.model_revision`); null: the node states none."""


class RegistrationState(StrEnum):
    """A node's state in the directory, by the last answer of bootstrap."""

    NONE = "none"
    """The node announces itself to no directory: `bootstrap.url` is empty, or the node is shutting down."""
    REGISTERED = "registered"
    UNREACHABLE = "unreachable"
    """Bootstrap has not answered yet, or not lately."""
    REFUSED = "refused"
    """Bootstrap refuses the node; `problem` says why."""
    REPLACED = "replaced"
    """Another process has the node's name now."""


class BootstrapLinkStatus(FrozenModel):
    """A node's entry in the directory."""

    state: RegistrationState
    url: str
    """Empty: the node announces itself to no directory."""
    problem: str
    """Why the entry is not up to date; empty when it is."""


class RankStatus(FrozenModel):
    """One rank of a node and its worker."""

    rank: str
    state: str
    """`absent`, `starting` or `ready`."""
    pid: int
    layers: int
    registered: float
    """The share of its memory that is registered with its transports, from 0 to 1."""
    restarts: int
    error: str
    transports: tuple[str, ...]


class EngineStatus(FrozenModel):
    """An engine process that is attached, or gone while pages wait for its end."""

    name: str
    pid: int
    """0: a process of another pid namespace."""
    ranks: tuple[str, ...]
    gone: str
    """Why the engine is not attached any more; empty while it is."""


class DecodeNodeStatus(FrozenModel):
    """A decode node, as a prefill node knows it. Ranks are those of the prefill node."""

    instance: str
    node: str
    incarnation: str
    transports: dict[str, tuple[str, ...]]
    """By rank, the transports that reach each rank of the decode node."""
    standby: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """By rank, the transports that would reach all of its ranks if the former were lost."""
    connecting: tuple[str, ...]
    """Ranks that are not connected yet."""
    features: tuple[str, ...]


class PrefillNodeStatus(FrozenModel):
    """A prefill node, as a decode node knows it; its name is empty until it answers."""

    endpoint: str
    node: str
    incarnation: str
    ranks: tuple[str, ...]
    features: tuple[str, ...]


PeerStatuses = tuple[DecodeNodeStatus, ...] | tuple[PrefillNodeStatus, ...]


class FenceStatus(FrozenModel):
    """A decode node's fence against writers that gave no proof."""

    epoch: int
    phase: str
    """`idle`, `renewing`, `waiting` or `revoking`."""
    transports: tuple[str, ...] = ()
    """Transports that are being shut; empty: all of them, or none while `idle`."""
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
    """The queue of admission, and the clients with most requests in the queue or most rooms."""

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
    """The endpoint to which decode nodes connect; empty on a decode node."""
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
    """Null without `tier.enabled`."""
    host_tier: HostTierStatus | None = None
    """Null without `tier.host`."""
    kept_pools: KeptPoolsStatus | None = None
    """Null without `pools.keep_s`."""
    store: PrefixStoreStatus | None = None
    """Null without `tier.store`."""
    quarantine: dict[str, tuple[str, ...]]
    """Owners of pages that nobody may use yet, by reason."""
    problems: tuple[Problem, ...]
    """Failures of the last quarter of an hour, the oldest kind first."""
    traffic: dict[str, PeerTraffic]
    """By the peer's incarnation."""
    fence: FenceStatus | None = None
    """Null on a prefill node."""


class PrefixStatus(FrozenModel):
    """Cached prompts and answers. A page is one in each space that grows with the tokens."""

    read_pages: NonNegative
    unread_pages: NonNegative
    """These can be evicted."""
    readers: NonNegative
    """Rooms with page keys that still read cached pages."""
    evicted_pages: dict[Evicted, NonNegative]
    """Pages evicted since the start of the daemon, by reason; the token figures count from there too."""
    hit_tokens: NonNegative
    """Prompt tokens of rooms with page keys that were cached at admission; `miss_tokens` are the others."""
    miss_tokens: NonNegative
    host_tokens: NonNegative = 0
    """The part of `hit_tokens` whose pages came from host memory alone."""
    checkpoints: NonNegative
    """Prefill: windows and states that are kept now; an engine continues a prefix only from a checkpoint at its end."""
    retained_pages: dict[str, NonNegative]
    """Pages that are evicted after others because requests asked for `retention`, of the eight namespaces with most."""
    retention_refused: NonNegative
    """Requests whose `retention` had no effect, because their namespace or all together had reached the limit."""


class HostTierStatus(FrozenModel):
    """The places of the pages of `prefixes`, and the copies between device and host memory since the start of the daemon."""

    device_pages: NonNegative
    """Pages on the device alone, evicted when others need the place."""
    both_pages: NonNegative
    """Pages on the device and, by proof, on the host."""
    host_pages: NonNegative
    """Pages on the host alone."""
    waiting_prompts: NonNegative
    """Prompts and answers whose pages wait to be copied."""
    in_flight_pages: NonNegative
    backed_up_pages: NonNegative
    backed_up_bytes: NonNegative
    failed_orders: NonNegative
    """Orders to copy pages to the host that failed; their pages are on the device as before."""
    last_failure: str
    longest_order_s: float
    """Duration of the slowest order to the host: the longest wait of a request for pages that were being copied."""
    refused_prompts: NonNegative
    """Prompts that were not copied because rooms read every host page."""
    loaded_back_pages: NonNegative
    failed_loads: NonNegative
    """Rooms that were given up because their pages could not be copied to the device."""
    last_failed_load: str
    evicted_read_back_pages: NonNegative
    """Pages that left the host to make room after they had been copied to the device at least once."""
    evicted_unused_pages: NonNegative
    """Pages that left the host to make room and had never been copied back."""


class KeptPoolsStatus(FrozenModel):
    """Cached pages in the pools of the former daemon (`pools.keep_s`)."""

    waiting_pages: NonNegative
    """Pages still to be compared with their digests; nobody gets them before."""
    restored_pages: NonNegative
    restored_bytes: NonNegative
    lost_pages: NonNegative
    """Pages whose digest no longer matched, and pages that depend on them."""
    refused_pages: NonNegative
    """Pages in pools that could not be taken over."""
    refused: str
    """Why pools could not be taken over; empty when they could, or when there were none."""
    seconds: float
    """Duration of the comparison so far."""


class PrefixStoreStatus(FrozenModel):
    """The store below host memory, with this node's figures since its start."""

    kind: str
    """`files` or `mooncake`."""
    state: str
    """A word of the metric `kvbridge_prefix_store_state`, which explains them."""
    why_not: str
    """Why the store's process is not ready; empty when it is."""
    pid: NonNegative
    """The store's process, 0 while there is none."""
    objects: dict[str, dict[str, NonNegative]]
    """Calls by verb (`put`, `get`, `has`, `drop`) and outcome."""
    fetched_pages: NonNegative
    """Pages of prompts that came from the store."""
    prefetches: dict[str, NonNegative]
    """Requests whose prompts were looked up, by outcome as in `kvbridge_prefix_store_prefetches_total`."""
    waiting_prompts: NonNegative
    """Prompts and answers that wait to be written."""
    unsettled: NonNegative
    """Orders whose pages the store may still read or write."""


class StoreStatus(FrozenModel):
    """The store in which bootstrap keeps the directory."""

    kind: str
    problem: str
    """Why the store does not answer; empty when it does. The document then has the store's last answer."""


class LostNode(FrozenModel):
    """A node that the directory has had."""

    role: Role
    instance: str
    node: str
    http_url: str
    at: Moment
    reason: str


class BootstrapStatus(DaemonStatus):
    """A bootstrap daemon."""

    role: str = "bootstrap"
    incarnation: str
    store: StoreStatus
    instances: tuple[InstanceView, ...]
    rooms: dict[str, int]
    """Rooms that bootstrap paired and remembers, by state; those that have ended on their nodes are among them."""
    requests: dict[str, int]
    """Answers to requests in the last quarter of an hour: `paired`, `cancelled`, or an error's code."""
    problems: tuple[Problem, ...]
    """Refused requests and lost nodes of the last quarter of an hour, the oldest kind first."""
    lost: tuple[LostNode, ...]
    """Nodes that have gone within the last hour, and have not come back."""


class ServerStatus(FrozenModel):
    """A prefill or decode server, as the router sees it."""

    role: Role
    url: str
    problem: str
    """Why no request is sent to the server; empty when it is well."""
    outstanding: NonNegative
    """Requests under way there."""
    load_tokens: NonNegative
    """Estimated prompt tokens of these requests."""
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
    """Why the directory does not answer; the servers are then those of its last answer."""
    servers: tuple[ServerStatus, ...]
    requests: dict[str, int]
    """Requests that ended in the last quarter of an hour, by outcome as in `kvbridge_router_requests_total`."""
    problems: tuple[Problem, ...]
    """Failed requests, attempts and health checks of the last quarter of an hour, the oldest kind first."""
