"""What an operator can set, and where each value came from.

Owns: the schema of the three daemons and the way from files, variables and flags to a valid object.
Must not know: what is done with a setting.
"""

from __future__ import annotations

from kvbridge.config.loading import load_config, read_secret, read_secrets, render_config
from kvbridge.config.schema import BootstrapConfig, DaemonConfig, DecodeConfig, PrefillConfig

__all__ = [
    "BootstrapConfig",
    "DaemonConfig",
    "DecodeConfig",
    "PrefillConfig",
    "load_config",
    "read_secret",
    "read_secrets",
    "render_config",
]
