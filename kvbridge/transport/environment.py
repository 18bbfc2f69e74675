"""The environment of a library that reads it once a process.

Owns: that it is set once, and that nobody is given a library with other settings than his. Must not know: any library.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvbridge.core.errors import ConfigError


def set_environment(read: dict[str, str], wanted: Mapping[str, str], reader: str, of: str, settings: str) -> None:
    """Set what the library is about to read, and note it in `read`; ConfigError when it was loaded with something else.

    `reader`, `of`, `settings`: who reads it, whose settings it is made from, and which, for the message.
    """
    if not read:
        os.environ.update(wanted)
        read.update(wanted)
    elif read != wanted:
        changed = sorted(name for name in wanted.keys() | read.keys() if wanted.get(name) != read.get(name))
        raise ConfigError(
            f"{reader} reads {', '.join(changed)} once a process and was loaded with other values; give every {of} of a process "
            f"the same {settings}"
        )
