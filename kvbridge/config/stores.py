"""Settings of the stores below host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Field

from kvbridge.config.endpoints import Seconds
from kvbridge.config.transports import MooncakeProtocol
from kvbridge.core.ids import FrozenModel, Positive


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
