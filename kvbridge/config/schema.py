"""The whole configuration of a prefill and of a decode daemon, and the relations between their sections."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from kvbridge.config.endpoints import (
    BootstrapLinkConfig,
    ConnectingControlConfig,
    ControlConfig,
    DecodeHttpConfig,
    HttpConfig,
    HttpUrl,
    ListeningControlConfig,
    PrefillHttpConfig,
    TelemetryConfig,
    is_wildcard,
    open_http_problem,
    refuse,
)
from kvbridge.config.limits import AdmissionConfig, DaemonTimeouts
from kvbridge.config.pools import DecodePools, MemoryOwner, ModelConfig, ParallelismConfig, PrefillPools
from kvbridge.config.tier import TierConfig
from kvbridge.config.transports import TransportSettings
from kvbridge.core.addresses import MAX_SOCKET_PATH_BYTES, is_loopback
from kvbridge.core.geometry.hot_buffer import SparseSettings
from kvbridge.core.ids import FrozenModel, Role
from kvbridge.core.plan.digests import DigestKind

SOCKET_NAME_BYTES = 40
"""Room that socket names need below `runtime_dir`."""
LONGEST_RUNTIME_DIR = MAX_SOCKET_PATH_BYTES - SOCKET_NAME_BYTES

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


def default_runtime_dir(role: Role, given: dict[str, Any]) -> Path:
    """Return a directory of this user's in `$XDG_RUNTIME_DIR`, or where temporary files are, that no other node has."""
    home = os.environ.get("XDG_RUNTIME_DIR")
    names = f"{role}-{given.get('instance')}-{given.get('node')}"
    if home:
        return Path(home) / f"kvbridge-{names}"
    return Path(tempfile.gettempdir()) / f"kvbridge-{os.getuid()}-{names}"


class DaemonConfig(FrozenModel):
    """What the prefill and the decode daemon have in common."""

    instance: Name
    """Names the copy of the model; equal on all nodes of the instance, and unlike any other instance's."""
    node: Name = "node-0"
    """Names this node inside its instance."""
    model: ModelConfig
    parallelism: ParallelismConfig = ParallelismConfig()
    transports: TransportSettings = TransportSettings()
    control: ControlConfig
    http: HttpConfig = HttpConfig()
    engine_url: HttpUrl = ""
    """Where the engine of this node answers requests of the OpenAI API, told to bootstrap for routers; empty: not told."""
    bootstrap: BootstrapLinkConfig = BootstrapLinkConfig()
    admission: AdmissionConfig = AdmissionConfig()
    tier: TierConfig = TierConfig()
    timeouts: DaemonTimeouts = DaemonTimeouts()
    telemetry: TelemetryConfig = TelemetryConfig()
    runtime_dir: Path
    """Directory of the sockets between this daemon, its workers and its engines, which attach to it; made with mode 0700.
    Default: kvbridge-ROLE-INSTANCE-NODE in $XDG_RUNTIME_DIR; without that, kvbridge-UID-ROLE-INSTANCE-NODE in the directory for
    temporary files."""
    runtime_group: Annotated[int, Field(ge=0)] | str | None = None
    """Group, by number or name, whose members may attach engines, though they are other users: the directory and the pools are
    opened to it. This daemon's user must be a member, too. Null: engines of this daemon's user only."""
    insecure: bool = False
    """Allow endpoints that the network can reach without keys and without a token."""

    @model_validator(mode="after")
    def _check_endpoints(self) -> Self:
        refuse(*self._problems())
        return self

    def _problems(self) -> list[str]:
        exposed = "" if self.insecure else open_http_problem(self.http)
        return [exposed, _unreachable(self.http, self.bootstrap), _runtime_dir(self.runtime_dir)]


class PrefillConfig(DaemonConfig):
    """A prefill daemon."""

    control: ListeningControlConfig = ListeningControlConfig()
    http: PrefillHttpConfig = PrefillHttpConfig()
    runtime_dir: Path = Field(default_factory=partial(default_runtime_dir, Role.PREFILL))
    pools: PrefillPools

    def _problems(self) -> list[str]:
        return [*super()._problems(), "" if self.insecure else _open_control(self.control)]


class IntegrityConfig(FrozenModel):
    """Whether a request's bytes are compared with those that were sent, before it can be claimed."""

    digest: DigestKind = DigestKind.NONE
    """`crc32c`: both sides compute a checksum of every page, and a room with a page that differs fails; `none`: rows are
    counted, their bytes are trusted."""


class DecodeConfig(DaemonConfig):
    """A decode daemon."""

    control: ConnectingControlConfig = ConnectingControlConfig()
    http: DecodeHttpConfig = DecodeHttpConfig()
    runtime_dir: Path = Field(default_factory=partial(default_runtime_dir, Role.DECODE))
    pools: DecodePools
    sparse: SparseSettings | None = None
    """Sparse decode: engines keep a hot buffer on the device for the component in the host pool. Null: they do not. At most
    `max_requests` rooms are then admitted at once: a room's request slot, the id in its `request` table, is its slot of the hot
    buffer, so pools.device.request must not be larger. `kvbridge fit` prints what this takes, and how many requests fit."""
    integrity: IntegrityConfig = IntegrityConfig()

    @model_validator(mode="after")
    def _check_sparse(self) -> Self:
        if self.sparse is None:
            return self
        if self.pools.memory is MemoryOwner.ADOPTED:
            raise ValueError(
                "sparse is set but pools.memory is adopted: the engine names its own request slots, so it limits them itself; "
                "set sparse to null"
            )
        if len(self.pools.host.components) != 1:
            raise ValueError(
                "sparse is set, so pools.host.components must name the one component that is decoded sparsely"
            )
        slots = self.pools.device.request
        if slots > self.sparse.max_requests:
            raise ValueError(
                f"pools.device.request gives out {slots} request slots, but the hot buffer has {self.sparse.max_requests} "
                "(sparse.max_requests): a request beyond them could not decode; make them equal"
            )
        return self


def _open_control(control: ListeningControlConfig) -> str:
    if control.curve.secret_key_file is not None or is_loopback(control.host):
        return ""
    remedy = "set control.curve.secret_key_file, bind a loopback address, or set insecure"
    return f"control.bind is {control.bind}, which others can reach, and there are no keys: {remedy}"


def _unreachable(http: HttpConfig, bootstrap: BootstrapLinkConfig) -> str:
    if not bootstrap.url or http.advertise_url or not is_wildcard(http.host):
        return ""
    return f"http.host is {http.host}, which bootstrap cannot pass on as an address: set http.advertise_url"


def fits_sockets(runtime_dir: Path) -> bool:
    """Whether the addresses of sockets below a runtime directory are short enough for the system."""
    return len(os.fsencode(runtime_dir)) <= LONGEST_RUNTIME_DIR


def _runtime_dir(path: Path) -> str:
    if fits_sockets(path):
        return ""
    size = len(os.fsencode(path))
    return f"runtime_dir has {size} bytes; sockets inside it need it to have at most {LONGEST_RUNTIME_DIR}"
