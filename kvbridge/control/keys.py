"""CURVE keys: who may speak to whom.

Owns: key pairs, their files, and the rule that a secret is never printed. Must not know: sockets, peers.

A key is 32 bytes, written as 40 characters of Z85. A key file is one line: the key. The secret's file is mode 0600.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from kvbridge.core.errors import ConfigError, ConflictError

KEY_CHARACTERS = 40
_MAX_KEY_FILE_BYTES = 1_024


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One process's key pair, and the public keys of those who may connect to it.

    `allowed` empty means nobody but ourselves: the own public key is always allowed.
    """

    public: str
    secret: str = field(repr=False)
    allowed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_key(self.public, "public key")
        check_key(self.secret, "secret key")
        for key in self.allowed:
            check_key(key, "allowed public key")
        if zmq.curve_public(self.secret.encode()) != self.public.encode():
            raise ConfigError("the public key is not the one that belongs to the secret key; give both of one pair")

    def allows(self, public: str) -> bool:
        """Whether a peer that proved to hold the secret of `public` may connect."""
        return public == self.public or public in self.allowed

    def __str__(self) -> str:
        return repr(self)


def generate_keys(allowed: Iterable[str] = ()) -> CurveKeys:
    """Draw a new key pair."""
    public, secret = zmq.curve_keypair()
    return CurveKeys(public.decode(), secret.decode(), frozenset(allowed))


def check_key(key: str, what: str) -> None:
    """Raise ConfigError unless `key` is 40 characters of Z85. The text never repeats the key."""
    if len(key) != KEY_CHARACTERS or not key.isascii():
        raise ConfigError(f"{what}: a CURVE key is {KEY_CHARACTERS} characters of Z85, got {len(key)} characters")
    try:
        decoded = z85.decode(key)
    except Exception as error:
        raise ConfigError(f"{what}: has characters that Z85 does not know") from error
    if z85.encode(decoded) != key.encode():
        raise ConfigError(f"{what}: is not Z85")


def load_keys(secret_path: Path, allowed_path: Path | None = None) -> CurveKeys:
    """Read a secret key, derive its public key, and read who is allowed (one key a line, `#` comments).

    Raises ConfigError when a file cannot be read, holds no key, or when others than its owner can read the secret.
    """
    secret = _read_secret(secret_path)
    allowed = frozenset(_key_lines(allowed_path)) if allowed_path else frozenset()
    return CurveKeys(zmq.curve_public(secret.encode()).decode(), secret, allowed)


def write_keys(keys: CurveKeys, secret_path: Path) -> Path:
    """Write the secret (mode 0600) and, beside it with suffix `.pub`, the public key, whose path is returned.

    Raises ConflictError when the secret's file exists: a key in use is never overwritten.
    """
    public_path = secret_path.with_suffix(".pub")
    try:
        descriptor = os.open(secret_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ConflictError(
            f"key file {secret_path} exists; remove it first if nothing uses that key any more"
        ) from error
    except OSError as error:
        raise ConfigError(f"key file {secret_path} cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(keys.secret + "\n")
    public_path.write_text(keys.public + "\n")
    return public_path


def _read_secret(path: Path) -> str:
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_MAX_KEY_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"secret key file {path} cannot be read: {error}") from error
    if not stat.S_ISREG(mode) or stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"secret key file {path} has mode {stat.S_IMODE(mode):04o}; run: chmod 600 {path}")
    secret = text.strip()
    check_key(secret, f"secret key file {path}")
    return secret


def _key_lines(path: Path) -> list[str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"allowed keys file {path} cannot be read: {error}") from error
    keys = []
    for number, line in enumerate(lines, start=1):
        # '#' is a character of Z85, so a comment has a line of its own and a space after its mark.
        text = line.strip()
        if text and text != "#" and not text.startswith("# "):
            check_key(text, f"{path} line {number}")
            keys.append(text)
    return keys
