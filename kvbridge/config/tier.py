"""Settings of prefixes that stay: which model their pages belong to, the host memory below the device, the stores below that."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ByteSize, Field, model_validator

from kvbridge.config.endpoints import Seconds
from kvbridge.config.pools import HostLayout
from kvbridge.config.transports import MooncakeProtocol
from kvbridge.core.ids import FrozenModel, NonNegative, Positive
from kvbridge.core.prefixes import ModelIdentity


class FileStoreSettings(FrozenModel):
    """Pages as files of one directory of this host, which several daemons may share."""

    kind: Literal["files"] = "files"
    """What it is."""
    directory: Path
    """Made with mode 0700 if it is not there. It must belong to the daemon's user, and to nobody else."""
    max_bytes: Annotated[ByteSize, Field(gt=0)]
    """Most bytes that all files in the directory take together. Of daemons that share a directory each has a bound of its own."""


class MooncakeStoreSettings(FrozenModel):
    """A Mooncake Store, whose memory others provide: this node only puts and gets."""

    kind: Literal["mooncake"] = "mooncake"
    """What it is."""
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
    """How long a store is waited for, and how much it is given to do. It is used in a process of its own."""

    start_s: Seconds = 120.0
    """For a process to be ready: longer than Mooncake waits for its master."""
    put_s: Seconds = 10.0
    """For an order to store pages; who fetches some waits `tier.prefetch_s`."""
    drop_s: Seconds = 60.0
    """For all objects of the model to be dropped (`DELETE /v1/prefixes`), and for what is being written to end before."""
    settle_s: Seconds = 2.0
    """From the deadline of an order to the end of the process, if its pages are not settled by then."""
    failures: Positive = 3
    """In a row, after which the store is not asked for a while."""
    remember_s: Annotated[float, Field(ge=0)] = 5.0
    """How long what was missing or bad is not asked for again."""


StoreSettings = Annotated[FileStoreSettings | MooncakeStoreSettings, Field(discriminator="kind")]


Text = Annotated[str, Field(max_length=200)]


class CopyBackend(StrEnum):
    """What copies pages between a device and their twins on the host."""

    KERNEL = "kernel"
    """One launch of a kernel for all pages, layers and components, on few of the GPU's multiprocessors."""
    DIRECT = "direct"
    """The GPU's copy engines, in one batch, without any multiprocessor; they need pages that are one stretch of memory."""


class BackupPolicy(StrEnum):
    """When cached pages are copied to the host."""

    WRITE_THROUGH = "write_through"
    """As they come."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """Once they have been used `uses` times."""
    WRITE_BACK = "write_back"
    """The oldest, ahead of need: while the device has less than `low_share` of its pages to give without losing anything."""


class HostBackup(FrozenModel):
    """Which pages are copied to the host, when, and how much of the link to the device that may take."""

    policy: BackupPolicy = BackupPolicy.WRITE_THROUGH
    """`write_through`: every page as it comes. `write_through_selective`: what was used `uses` times. `write_back`: the oldest,
    while fewer than `low_share` of the device's pages could be given away without losing a prefix. A request waits for none but one
    that is copying the very pages it needs."""
    uses: Positive = 2
    """`write_through_selective`: so often, the request that computed the page included."""
    low_share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """`write_back`: share of the device's pages that are free, or cached on the host as well."""
    order_pages: Positive = 256
    """Pages of `tokens_per_page` tokens that are on their way at one time, of all requests together."""
    link_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the time in which a rank copies to the host. The rest is left to transfers and to loads of sparse rows."""


class HostTier(FrozenModel):
    """Host memory for prefixes below the device: *twins*, host pages that hold what device pages hold.

    On prefill, of everything that a prefix takes; on decode, of what is not in the host pool anyway (`pools.host`). They are made
    where the host pool is made, and page-locked like it.
    """

    pages: NonNegative = 0
    """Size in pages of `tokens_per_page` tokens; or give `size_bytes`."""
    size_bytes: ByteSize = ByteSize(0)
    """Size in bytes ("64GiB" is understood) with checkpoints, rounded down to whole pages; or give `pages`."""
    checkpoint_pages: NonNegative = 0
    """Prefill, models with windows: how many checkpoints of windows and states. Without one at its end, or close to it, a prefix is
    of no use, so count one for each prompt that is to be kept."""
    layout: HostLayout = HostLayout.LAYER_FIRST
    """`layer_first`; `page_first`: a page is one stretch of memory; `page_first_direct`: the same, with backend `direct`."""
    backend: CopyBackend | None = None
    """`direct`: the copy engines, for pages of `page_first` on the device (`pools.device_layout`) as on the host; `kernel`: for
    all. Null: `direct` where that is possible, else `kernel`."""
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


class TierConfig(FrozenModel):
    """Prefixes that stay. Page keys begin with the model: pages of two models, or of two revisions of one, are never mixed up."""

    enabled: bool = False
    """Whether pages stay here, under the page keys of requests. Needs `model_name` and `model_revision`. Engines of a prefill node
    that only says which model it holds have to state their keys all the same: decode keeps nothing without them."""
    model_name: Text = ""
    """Name of the model, the same on all nodes that hold it and in what computes page keys."""
    model_revision: Text = ""
    """Revision of the model, or a digest of its weights. A decode node that says one takes pages only from prefill nodes that say
    the same: set it on prefill nodes first."""

    retained_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of all pages that can be cached which one namespace may have retained at once: its requests say with `retention` that
    their pages are to go after others. Beyond it they count as without, also beyond half of all pages for all namespaces together
    (or this share, if it is larger). 0: `retention` is without effect here."""

    checkpoint_interval_tokens: NonNegative = 0
    """Prefill, models with windows: so often in a prompt its engine is asked to keep windows and states, from which others go on
    that have the same tokens so far, rounded down to whole pages. Each takes pages of `pools.device.swa`. 0: only at a prompt's end
    and where a second one has left what is known of it."""

    generated: bool = True
    """Decode: whether pages of answers stay too, as far as engines say with `release` what is in them. Their rows were computed one
    token at a time, so whoever goes on from them gets other roundings than one who computes the whole prompt; false: the prompt's
    pages only."""

    host: HostTier | None = None
    """Host memory below the device, to which prefixes move when the device has no room for them. Null: none; what the device has no
    room for is gone."""

    store: StoreSettings | None = None
    """Where prefixes go below host memory, so that they outlive this daemon, or are found by others: `files` or `mooncake`. Needs
    `host`. Null: nowhere."""
    store_limits: StoreLimits = StoreLimits()
    prefetch_s: Seconds = 0.5
    """A request waits at most so long, before it is admitted, for what the store has of its prompt; it goes on with what came."""

    @property
    def model(self) -> ModelIdentity | None:
        """What the node says it holds; None: nothing."""
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
                "under the same key would be wrong answers; set both"
            )
        if self.host is not None and not self.enabled:
            raise ValueError("host is set but nothing stays: set enabled to true, or host to null")
        if self.store is not None and self.host is None:
            raise ValueError(
                "store is set but host is not: what a store has comes to host memory first; set host, or store to null"
            )
        return self
