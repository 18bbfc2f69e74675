"""Pairs of SGLang servers: what a router tells both of a request.

Both servers get a request at once, with a room and the address of the prefill server's directory. Decode asks there for the
node that has the prompt's KV cache. `/server_info` says which server is one of a pair, and the directory's port.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from kvbridge.core.errors import PeerError
from kvbridge.core.ids import Role

INFO = "/server_info"
HOST, PORT, ROOM = BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
MODES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
ROOMS = (1 << 63) - (1 << 22)
"""Rooms have 63 bits. SGLang gives the room to the first prompt of a list, and the numbers behind the room to the others."""

Directory = Mapping[str, Any]
"""Address of a prefill server's directory, as members of a request."""


def read_directory(role: Role, url: str, info: bytes) -> Directory | None:
    """Return the directory of a server of SGLang from its answer to `INFO`; None when the server is none of a pair.

    Raises PeerError when it has the other role.
    """
    try:
        found = json.loads(info)
        mode = MODES.get(found.get("disaggregation_mode"))
        port = int(found["disaggregation_bootstrap_port"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if mode is None:
        return None
    if mode is not role:
        raise PeerError(f"it runs with --disaggregation-mode {mode}: name it as a {mode} server")
    return {HOST: urlsplit(url).hostname, PORT: port}


def members(directory: Directory) -> dict[str, Any]:
    """Return the members for both servers, with a room for one request: never 0, which SGLang takes for none."""
    return {**directory, ROOM: 1 + secrets.randbelow(ROOMS)}
