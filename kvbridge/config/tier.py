"""Settings of cached prefixes: the model of their pages, host memory below the device, a store below host memory."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ByteSize, Field, model_validator

from kvbridge.config.endpoints import Seconds, endpoint_host
from kvbridge.config.pools import HostLayout
from kvbridge.config.transports import MooncakeProtocol
from kvbridge.core.addresses import is_loopback
from kvbridge.core.ids import FrozenModel, NonNegative, Positive
from kvbridge.core.prefixes import ModelIdentity


class FileStoreSettings(FrozenModel):
    """Pages as files of one directory of this host, which several daemons may share."""

    kind: Literal["files"] = "files"
    """Kind of the store."""
    directory: Path
    """Directory of the files, made with mode 0700 if it is not there. Only the daemon's user may have access."""
    max_bytes: Annotated[ByteSize, Field(gt=0)]
    """Most bytes of all files in the directory together. Each daemon that shares the directory has a bound of its own."""


class MooncakeStoreSettings(FrozenModel):
    """A Mooncake Store with memory of other processes: this node only puts and gets."""

    kind: Literal["mooncake"] = "mooncake"
    """Kind of the store."""
    master: Annotated[str, Field(pattern=r"^[^\s:]+:[0-9]{1,5}$")]
    """host:port of mooncake_master."""
    host: str = "127.0.0.1"
    """The address of this node that the store's other hosts reach."""
    protocol: MooncakeProtocol = MooncakeProtocol.TCP
    device_name: str = ""
    """RDMA adapters to use, separated by commas; empty: all."""
    replicas: Positive = 1
    """Copies that are kept of each page."""


class StoreLimits(FrozenModel):
    """Waits for a store, which has a process of its own."""

    start_s: Seconds = 120.0
    """Its process is ready. Longer than Mooncake waits for its master."""
    put_s: Seconds = 10.0
    """One order to store pages has ended. For fetches see `tier.prefetch_s`."""
    drop_s: Seconds = 60.0
    """All objects of the model are dropped (`DELETE /v1/prefixes`), after the writes under way."""
    settle_s: Seconds = 2.0
    """Pages of an order that is past its deadline are settled, or else the process is ended."""
    failures: Positive = 3
    """Failures in a row after which the store is not asked for a while."""
    remember_s: Annotated[float, Field(ge=0)] = 5.0
    """A missing or bad object is not asked for again for so long."""


StoreSettings = Annotated[FileStoreSettings | MooncakeStoreSettings, Field(discriminator="kind")]


Text = Annotated[str, Field(max_length=200)]


class CopyBackend(StrEnum):
    """Engine of copies between a device and host memory."""

    KERNEL = "kernel"
    DIRECT = "direct"


class BackupPolicy(StrEnum):
    """Time at which cached pages are copied to the host."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class HostBackup(FrozenModel):
    """Pages that are copied to the host, the time of the copies, and their share of the link to the device."""

    policy: BackupPolicy = BackupPolicy.WRITE_THROUGH
    """`write_through`: every page as it comes. `write_through_selective`: pages that were used `uses` times. `write_back`: the
    oldest pages, while the device can give less than `low_share` of its pages without losing a prefix. A request waits only for
    a copy of the very pages that it needs."""
    uses: Positive = 2
    """`write_through_selective`: number of uses, the request that computed the page included."""
    low_share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """`write_back`: share of the device's pages that are to be free, or cached on the host as well."""
    order_pages: Positive = 256
    """Pages of `tokens_per_page` tokens that are copied at one time, for all requests together."""
    link_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Largest share of the time in which a rank copies to the host. The rest is for transfers and for loads of sparse rows."""


class HostTier(FrozenModel):
    """Host memory for prefixes below the device: host pages with copies of device pages.

    Prefill copies everything that a prefix takes; decode all but the components of the host pool (`pools.host`). The pages are
    made where the host pool is made, and page-locked like it.
    """

    pages: NonNegative = 0
    """Size in pages of `tokens_per_page` tokens; or give `size_bytes`."""
    size_bytes: ByteSize = ByteSize(0)
    """Size in bytes ("64GiB" is understood) with checkpoints, rounded down to whole pages; or give `pages`."""
    checkpoint_pages: NonNegative = 0
    """Prefill, models with windows: number of checkpoints of windows and states. A prefix is of no use without one at or near its
    end, so count one for each prompt that is to be kept."""
    layout: HostLayout = HostLayout.LAYER_FIRST
    """`layer_first`; `page_first`: a page is one stretch of memory; `page_first_direct`: the same with backend `direct`."""
    backend: CopyBackend | None = None
    """`direct`: the GPU's copy engines, in one batch and without multiprocessors; it needs `page_first` both on the device
    (`pools.device_layout`) and on the host. `kernel`: one launch for all pages, layers and components, on few multiprocessors.
    Null: `direct` where that is possible, else `kernel`."""
    backup: HostBackup = HostBackup()

    @model_validator(mode="before")
    @classmethod
    def _read_direct(cls, given: object) -> object:
        if isinstance(given, dict) and given.get("layout") == "page_first_direct":
            if given.get("backend") not in {None, CopyBackend.DIRECT}:
                raise ValueError("layout page_first_direct asks for backend direct; for the kernel say page_first")
            return {**given, "layout": HostLayout.PAGE_FIRST, "backend": CopyBackend.DIRECT}
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.pages) == bool(self.size_bytes):
            raise ValueError("set exactly one of pages and size_bytes")
        return self


Endpoint = Annotated[str, Field(pattern=r"^(tcp://[^/\s]+:\d{1,5}|ipc:///\S+)$", max_length=200)]


class KvEventSettings(FrozenModel):
    """Events that tell routers which pages are cached here, over ZeroMQ in the format of vLLM and SGLang."""

    endpoint: Endpoint = "tcp://127.0.0.1:5557"
    """Where subscribers connect to; port 0 takes a free one, `tcp://*:5557` listens on all addresses. Subscribers prove nothing."""
    replay_endpoint: Annotated[str, Field(pattern=r"^(|tcp://[^/\s]+:\d{1,5}|ipc:///\S+)$", max_length=200)] = ""
    """Where subscribers ask for batches that they have missed; empty: nowhere."""
    topic: Text = ""
    """Topic of all messages; llm-d's router expects `kv@ADDRESS:PORT@MODEL`."""
    checkpoints: bool = True
    """Whether windows and states at the end of pages are told as group 1. False for routers that do not look at `group_idx`, as
    those made for SGLang: they would take the end of a checkpoint for the end of its page."""
    replay_batches: Annotated[int, Field(ge=1, le=5_000)] = 1_000
    """Last batches that are kept for replays. Whoever has missed more is told everything that is cached."""

    @property
    def exposed(self) -> list[str]:
        """The endpoints that other machines can reach."""
        return [each for each in (self.endpoint, self.replay_endpoint) if each and not is_loopback(endpoint_host(each))]


class TierConfig(FrozenModel):
    """Cached prefixes. Page keys begin with the model, so pages of two models, or of two revisions of one, are never mixed up."""

    enabled: bool = False
    """Whether pages are cached here, under the page keys of requests. Needs `model_name` and `model_revision`. A prefill node
    that sets these two alone caches nothing, but its engines must state page keys: decode caches nothing without them."""
    model_name: Text = ""
    """Name of the model, the same on all its nodes and wherever page keys are computed."""
    model_revision: Text = ""
    """Revision of the model, or a digest of its weights. A decode node with a revision takes pages only from prefill nodes with
    the same: set it on prefill nodes first."""
    retained_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of all pages that one namespace may have retained at once. Requests say with `retention` that their pages are evicted
    after others; beyond the share it has no effect, nor beyond half of all pages (or this share, if larger) for all namespaces
    together. 0: `retention` has no effect here."""
    checkpoint_interval_tokens: NonNegative = 0
    """Prefill, models with windows: distance in a prompt, rounded down to whole pages, at which the engine is asked to keep
    windows and states, so that prompts with the same tokens can continue there. Each takes pages of `pools.device.swa`. 0: only
    at a prompt's end, and where a later prompt left the known prefix."""
    generated: bool = True
    """Decode: whether pages of answers are cached too, as far as engines state their keys with `release`. Their rows were
    computed one token at a time, so their roundings differ from those of a computed prompt. False: the prompt's pages only."""
    host: HostTier | None = None
    """Host memory below the device, for prefixes that the device has no room for. Null: none; such prefixes are lost."""
    store: StoreSettings | None = None
    """Store below host memory; its prefixes outlive this daemon and are shared: `files` or `mooncake`; needs `host`. Null: none."""
    store_limits: StoreLimits = StoreLimits()
    events: KvEventSettings | None = None
    """Events for routers about pages that come and go here. Null: none."""
    prefetch_s: Seconds = 0.5
    """Longest wait of a request, before its admission, for pages of its prompt from the store."""

    @property
    def model(self) -> ModelIdentity | None:
        """The model that the node states; None: it states none."""
        if not self.model_name:
            return None
        return ModelIdentity(name=self.model_name, revision=self.model_revision)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.model_name) != bool(self.model_revision):
            raise ValueError("model_name and model_revision belong together: set both or neither")
        if self.enabled and not self.model_revision:
            raise ValueError(
                "enabled without model_name and model_revision: geometry does not tell weights apart, and pages of other weights "
                "under the same key would give wrong answers; set both"
            )
        for key in ("host", "events"):
            if getattr(self, key) is not None and not self.enabled:
                raise ValueError(f"{key} is set but nothing is cached: set enabled to true, or {key} to null")
        if self.store is not None and self.host is None:
            raise ValueError("store is set but host is not: pages go through host memory; set host, or store to null")
        return self
