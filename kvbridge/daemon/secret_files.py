"""Secrets of a running daemon in files: read at the start, and again whenever a file has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from kvbridge.core.errors import BridgeError

log = structlog.get_logger(__name__)

SecretT = TypeVar("SecretT")
Stamp = tuple[tuple[int, ...], ...]

LOOK_S = 1.0
"""Time between two checks of the files."""


class FollowedSecret(Generic[SecretT]):
    """One secret and the files that it is read from."""

    def __init__(self, key: str, files: Iterable[Path | None], read: Callable[[], SecretT]) -> None:
        """`key` names the secret in logs. `read` must not change anything; its ConfigError is raised here, too."""
        self._key = key
        self._files = tuple(file for file in files if file is not None)
        self._read = read
        self._stamp = self._look()
        self.current = read()
        self.on_change: Callable[[SecretT], None] = lambda _: None
        """Called with each new secret."""

    def follow(self) -> None:
        """Check the files, and read the secret again when they have changed. An unreadable secret changes nothing."""
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            fresh = self._read()
        except BridgeError as error:
            log.error("secret_unreadable", key=self._key, effect="the former secret stays in force", reason=str(error))
            return
        if fresh != self.current:
            self.current = fresh
            self.on_change(fresh)
            log.info("secret_changed", key=self._key)

    def _look(self) -> Stamp:
        return tuple(_stamp(file) for file in self._files)


class SecretFiles:
    """All followed secrets of a daemon. Used in one running loop."""

    def __init__(self) -> None:
        self._followed: list[FollowedSecret[Any]] = []

    def add(self, key: str, files: Iterable[Path | None], read: Callable[[], SecretT]) -> FollowedSecret[SecretT]:
        """Read a secret and follow it from now on. Raises what `read` does."""
        secret = FollowedSecret(key, files, read)
        self._followed.append(secret)
        return secret

    async def run(self) -> None:
        """Follow all of them until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for secret in self._followed:
                secret.follow()


def _stamp(file: Path) -> tuple[int, ...]:
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode
