"""Documents of `/status` for operators. Field names are the JSON names; moments are Unix seconds."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from kvbridge.api.directory import InstanceView
from kvbridge.core.ids import FrozenModel, IndexSpace, NonNegative, Positive, Role
from kvbridge.core.prefixes import Evicted, ModelIdentity
from kvbridge.pool.accounts.book import PageState
from kvbridge.telemetry.recent import Moment, PeerTraffic, Problem


class Readiness(FrozenModel):
    """Whether a node can admit new rooms, or bootstrap pair them, with every reason why not."""

    ready: bool
    reasons: tuple[str, ...] = ()


class ModelStatus(FrozenModel):
    """The model that a node serves."""

    name: str
    fingerprint: str
    tokens_per_page: Positive
    identity: ModelIdentity | None = None
    """Name and revision in page keys (`tier.model_name`, `tier.model_revision`); null: not stated."""


class RegistrationState(StrEnum):
    """A node's state in the directory by bootstrap's last answer."""

    NONE = "none"
    """No announcement: `bootstrap.url` is empty, or the node is shutting down."""
    REGISTERED = "registered"
    UNREACHABLE = "unreachable"
    """Bootstrap has not answered yet, or does not answer now."""
    REFUSED = "refused"
    REPLACED = "replaced"
    """Another process has the node's name now."""


class BootstrapLinkStatus(FrozenModel):
    """A node's entry in the directory."""

    state: RegistrationState
    url: str
    problem: str
    """Why the entry is out of date or refused; else empty."""


class RankStatus(FrozenModel):
    """One rank of a node and its worker."""

    rank: str
    state: str
    """`absent`, `starting` or `ready`."""
    pid: int
    layers: int
    registered: float
    """Share of its memory that is registered with its transports, 0 to 1."""
    restarts: int
    error: str
    transports: tuple[str, ...]


class EngineStatus(FrozenModel):
    """An engine process: attached, or gone while pages wait for its end."""

    name: str
    pid: int
    """0: another pid namespace."""
    ranks: tuple[str, ...]
    gone: str
    """Why it is gone; empty while it is attached."""


class DecodeNodeStatus(FrozenModel):
    """A decode node, as a prefill node knows it. Ranks without a remark are those of the prefill node."""

    instance: str
    node: str
    incarnation: str
    transports: dict[str, tuple[str, ...]]
    """By rank, the transports to each rank of the decode node."""
    standby: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """By rank, the transports that could replace the former."""
    connecting: tuple[str, ...]
    """Ranks that are not connected yet."""
    features: tuple[str, ...]


class PrefillNodeStatus(FrozenModel):
    """A prefill node, as a decode node knows it. Its name is empty before its first answer."""

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
    """Transports that are being shut; empty: all of them, or none in phase `idle`."""
    rooms: tuple[str, ...]
    waits_for_rooms: int
    waits_for_ranks: tuple[str, ...]


class ClientStatus(FrozenModel):
    """Rooms and requests of one client at a node. A limit of 0 is none."""

    client: str
    rooms: int
    waiting: int
    head_since: Moment | None
    """Begin of its longest wait."""
    max_rooms: int
    max_waiting: int


class AdmissionStatus(FrozenModel):
    """The queue of admission, and the clients with most requests in the queue or most rooms."""

    waiting: int
    oldest_since: Moment | None
    """Begin of the longest wait."""
    starved_since: Moment | None
    """Begin of the time in which not even the smallest request fits."""
    clients: tuple[ClientStatus, ...]


class DaemonStatus(FrozenModel):
    """The document of any daemon. It tells moments and no ages, so a copy stays right for a while."""

    at: Moment
    """Moment of this document."""
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
    """All pools together."""
    bootstrap: BootstrapLinkStatus
    control: str
    """Endpoint for decode nodes; empty on a decode node."""
    ranks: tuple[RankStatus, ...]
    engines: tuple[EngineStatus, ...]
    peers: PeerStatuses
    rooms: dict[str, int]
    """By state, with the ended rooms that are still known."""
    admission: AdmissionStatus
    pools: dict[IndexSpace, dict[PageState, int]]
    available_pages: dict[IndexSpace, int]
    """Free pages, and cached pages that nobody reads."""
    prefixes: PrefixStatus | None = None
    """Null without `tier.enabled`."""
    host_tier: HostTierStatus | None = None
    """Null without `tier.host`."""
    kept_pools: KeptPoolsStatus | None = None
    """Null without `pools.keep_s`."""
    store: PrefixStoreStatus | None = None
    """Null without `tier.store`."""
    quarantine: dict[str, tuple[str, ...]]
    """By reason, the owners of pages that nobody may use yet."""
    problems: tuple[Problem, ...]
    """Failures of the last quarter of an hour, the oldest kind first."""
    traffic: dict[str, PeerTraffic]
    """By the peer's incarnation."""
    fence: FenceStatus | None = None
    """Null on a prefill node."""


class PrefixStatus(FrozenModel):
    """Cached prompts and answers; figures count from the daemon's start. A page is one in each space that grows with the tokens."""

    read_pages: NonNegative
    unread_pages: NonNegative
    """Pages that can be evicted."""
    readers: NonNegative
    """Rooms with page keys that still read cached pages."""
    evicted_pages: dict[Evicted, NonNegative]
    """By reason."""
    hit_tokens: NonNegative
    """Prompt tokens of rooms with page keys that were cached at admission; `miss_tokens` are the others."""
    miss_tokens: NonNegative
    host_tokens: NonNegative = 0
    """Hit tokens in host memory alone."""
    checkpoints: NonNegative
    """Prefill: kept windows and states. An engine continues a prefix only from a checkpoint at its end."""
    retained_pages: dict[str, NonNegative]
    """By namespace, the eight with most: pages that are evicted after others, as requests asked by `retention`."""
    retention_refused: NonNegative
    """Requests whose `retention` had no effect: their namespace, or all together, had reached the limit."""


class HostTierStatus(FrozenModel):
    """Places of the pages of `prefixes`, and copies between device and host memory since the daemon's start."""

    device_pages: NonNegative
    """Pages on the device alone."""
    both_pages: NonNegative
    """Pages on the device and, proved, on the host."""
    host_pages: NonNegative
    """Pages on the host alone."""
    waiting_prompts: NonNegative
    """Prompts and answers that wait for their copies."""
    in_flight_pages: NonNegative
    backed_up_pages: NonNegative
    backed_up_bytes: NonNegative
    failed_orders: NonNegative
    """Failed orders to copy pages to the host; the pages are on the device as before."""
    last_failure: str
    longest_order_s: float
    """Slowest order to the host: the longest wait of a request for pages that were being copied."""
    refused_prompts: NonNegative
    """Prompts without copies because rooms read every host page."""
    loaded_back_pages: NonNegative
    failed_loads: NonNegative
    """Rooms given up because the copies to the device failed."""
    last_failed_load: str
    evicted_read_back_pages: NonNegative
    """Pages evicted from the host after a copy back to the device."""
    evicted_unused_pages: NonNegative
    """Pages evicted from the host without one."""


class KeptPoolsStatus(FrozenModel):
    """Cached pages in the pools of the former daemon (`pools.keep_s`)."""

    waiting_pages: NonNegative
    """Pages before the comparison with their digests; nobody gets them."""
    restored_pages: NonNegative
    restored_bytes: NonNegative
    lost_pages: NonNegative
    """Pages with another digest, and the pages behind them in a prefix."""
    refused_pages: NonNegative
    """Pages in pools that could not be reused."""
    refused: str
    """Why pools could not be reused; empty when they could, or when there were none."""
    seconds: float
    """Duration of the comparison."""


class PrefixStoreStatus(FrozenModel):
    """The store below host memory, with this node's figures since its start."""

    kind: str
    """`files` or `mooncake`."""
    state: str
    """As in the metric `kvbridge_prefix_store_state`."""
    why_not: str
    """Why the store's process is not ready, if so."""
    pid: NonNegative
    """The store's process; 0: none."""
    objects: dict[str, dict[str, NonNegative]]
    """Calls by verb and outcome."""
    fetched_pages: NonNegative
    prefetches: dict[str, NonNegative]
    """Searches for prompts by outcome, as in `kvbridge_prefix_store_prefetches_total`."""
    waiting_prompts: NonNegative
    unsettled: NonNegative
    """Orders under way in the store, which may still read or write their pages."""


class StoreStatus(FrozenModel):
    """The store of the directory."""

    kind: str
    problem: str
    """Why the store does not answer; empty when it does. Other fields then are from its last answer."""


class LostNode(FrozenModel):
    """A node that has left the directory within the last hour and has not come back."""

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
    """Paired rooms by state, with those that have ended on their nodes."""
    requests: dict[str, int]
    """Answers of the last quarter of an hour: `paired`, `cancelled`, or an error's code."""
    problems: tuple[Problem, ...]
    """Refused requests and lost nodes of the last quarter of an hour, the oldest kind first."""
    lost: tuple[LostNode, ...]


class ServerStatus(FrozenModel):
    """A prefill or decode server, as the router sees it."""

    role: Role
    url: str
    problem: str
    """Why the server gets no request; empty when it is well."""
    outstanding: NonNegative
    """Requests under way."""
    load_tokens: NonNegative
    """Estimated prompt tokens of these requests."""
    paired: bool
    """Prefill: requests go to this server and to decode at once."""


class RouterStatus(DaemonStatus):
    """A router."""

    role: str = "router"
    order: str
    """`paired` or `plain`."""
    outstanding: NonNegative
    limit: Positive
    directory_problem: str = ""
    """Why the directory does not answer, if so; the servers are those of its last answer."""
    servers: tuple[ServerStatus, ...]
    requests: dict[str, int]
    """Ended requests of the last quarter of an hour by outcome, as in `kvbridge_router_requests_total`."""
    problems: tuple[Problem, ...]
    """Failed requests, attempts and health checks of the last quarter of an hour, the oldest kind first."""
