"""A directory of configurations, as `kvbridge init` writes it: one file for each daemon, named after its role."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvbridge.cli.config import ROLES, DaemonRole
from kvbridge.config.loading import load_config
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig
from kvbridge.core.errors import ConfigError


@dataclass(frozen=True)
class ConfiguredDaemon:
    """One file of the directory."""

    name: str
    """The file's, as `prefill` or `prefill-1`."""
    role: DaemonRole
    path: Path
    config: PrefillConfig | DecodeConfig | BootstrapConfig

    @property
    def url(self) -> str:
        """Where others reach its HTTP API."""
        http = self.config.http
        scheme = "http" if http.tls_key_file is None else "https"
        host = f"[{http.host}]" if ":" in http.host else http.host
        return http.advertised(f"{scheme}://{host}:{http.port}")


def read_cluster(folder: Path) -> list[ConfiguredDaemon]:
    """Return the daemons of ROLE.yaml and ROLE-ANYTHING.yaml, bootstrap first. Raises ConfigError for what is wrong or missing."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no directory; `kvbridge init {folder}` makes one that can be run")
    found = []
    for role in (DaemonRole.BOOTSTRAP, DaemonRole.PREFILL, DaemonRole.DECODE):
        paths = [*folder.glob(f"{role}.yaml"), *sorted(folder.glob(f"{role}-*.yaml"))]
        if not paths:
            raise ConfigError(f"{folder} has no {role}.yaml; `kvbridge init` writes one for each role")
        found += [_read(path, role) for path in paths]
    return found


def _read(path: Path, role: DaemonRole) -> ConfiguredDaemon:
    try:
        config = load_config(role.schema, file=path, environment={}, roles=ROLES)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    assert isinstance(config, PrefillConfig | DecodeConfig | BootstrapConfig)
    if not config.http.port:
        raise ConfigError(f"{path}: http.port is 0, a port that is chosen at each start: give it a number")
    return ConfiguredDaemon(path.stem, role, path, config)
