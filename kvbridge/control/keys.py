"""CURVE keys: the peers that may talk to a node, and the instances for which they may speak.

A key is 32 bytes, written as 40 characters of Z85. A key file is one line, the key; the file of a secret has mode 0600. An entry of
the allow-list is a public key and optionally an instance for which it may speak. A key may have an entry for each of its instances.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import zmq
from zmq.utils import z85

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError, ConfigError, ConflictError, UnauthorizedError, UnavailableError

log = structlog.get_logger(__name__)

KEY_CHARACTERS = 40
SECRET_FILE_MODE = 0o600
_MAX_KEY_FILE_BYTES = 1_024
_MAX_ALLOW_FILE_BYTES = 4 << 20
_OTHERS_READ = 0o077
_OTHERS_WRITE = 0o022
_INSTANCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

AllowList = Mapping[str, frozenset[str]]
"""For each public key the instances that it may speak for; an empty set: any."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A process's key pair, and the public keys that may connect to it.

    The own public key is always allowed, and may speak for any instance. With an empty `allowed` it is the only allowed key.
    """

    public: str
    secret: str = field(repr=False)
    allowed: AllowList = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_key(self.public, "public key")
        check_key(self.secret, "secret key")
        for key in self.allowed:
            check_key(key, "allowed public key")
        if zmq.curve_public(self.secret.encode()) != self.public.encode():
            raise ConfigError("the public key is not the one that belongs to the secret key; give both of one pair")
        if self.secret in self.allowed:
            raise ConfigError(
                "the list of allowed keys names this node's own secret key: list public keys, and draw a new pair, "
                "since the secret has been in a file that is not secret"
            )

    def __str__(self) -> str:
        return repr(self)


def generate_keys(allowed: Iterable[str] = ()) -> CurveKeys:
    """Draw a new key pair. `allowed` may speak for any instance."""
    public, secret = zmq.curve_keypair()
    return CurveKeys(public.decode(), secret.decode(), dict.fromkeys(allowed, frozenset()))


def check_key(key: str, what: str) -> None:
    """Raise ConfigError, which never shows the key, unless `key` is 40 characters of Z85."""
    if len(key) != KEY_CHARACTERS or not key.isascii():
        raise ConfigError(f"{what}: a CURVE key is {KEY_CHARACTERS} characters of Z85, got {len(key)} characters")
    try:
        decoded = z85.decode(key)
    except Exception as error:
        raise ConfigError(f"{what}: has characters that Z85 does not know") from error
    if z85.encode(decoded) != key.encode():
        raise ConfigError(f"{what}: is not Z85")


# ------------------------------------------------------------------------------------------- files


def load_keys(secret_path: Path, *, public: str = "", allowed: AllowList | None = None) -> CurveKeys:
    """Read a secret key and derive its public key, which must be `public` where that is given.

    Raises ConfigError when the file cannot be read, holds no key, or when others than its owner can read it.
    """
    what = f"secret key file {secret_path}"
    secret = _read(secret_path, what, _MAX_KEY_FILE_BYTES, forbidden=_OTHERS_READ, otherwise="; run: chmod 600").strip()
    check_key(secret, what)
    return CurveKeys(public or zmq.curve_public(secret.encode()).decode(), secret, allowed or {})


def write_keys(keys: CurveKeys, secret_path: Path) -> Path:
    """Write the secret (mode 0600) and, beside it with suffix `.pub`, the public key, whose path is returned.

    Raises ConflictError when either file exists: a key in use is never overwritten.
    """
    public_path = secret_path.with_suffix(".pub")
    if secret_path == public_path:
        raise ConfigError(f"key file {secret_path}: '.pub' is the suffix of the public key's file; name it otherwise")
    if public_path.exists():
        raise ConflictError(f"key file {public_path} exists; remove it first if nothing uses that key any more")
    write_secret(keys.secret, secret_path)
    with os.fdopen(_create(public_path, 0o644), "w") as file:
        file.write(keys.public + "\n")
    return public_path


def write_secret(secret: str, path: Path) -> None:
    """Write one line to a new file that only its owner can read. Raises ConflictError when the file exists."""
    with os.fdopen(_create(path, SECRET_FILE_MODE), "w") as file:
        file.write(secret + "\n")


def public_key_beside(secret_path: Path) -> str:
    """Return the content of the `.pub` file that `write_keys` puts beside a secret, or an empty text."""
    try:
        return secret_path.with_suffix(".pub").read_text()[:_MAX_KEY_FILE_BYTES].strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _create(path: Path, mode: int) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except FileExistsError as error:
        raise ConflictError(
            f"file {path} exists and is never overwritten; remove it first if nothing uses what is in it any more"
        ) from error
    except OSError as error:
        raise ConfigError(f"file {path} cannot be written: {error.strerror}") from error


# ------------------------------------------------------------------------------------------- who is allowed


def read_allowed(entries: Iterable[str], path: Path | None) -> AllowList:
    """Return the allow-list of a configuration's own entries and of a file (one entry a line, `# ` comments).

    Raises ConfigError, which names the line, for a malformed entry and for a key both with and without an instance, and an error
    for a file that others than its owner can write: they could let anybody in.
    """
    named = [
        (text, f"control.curve.allowed_public_keys entry {number}") for number, text in enumerate(entries, start=1)
    ]
    if path is not None:
        what, why = f"allowed keys file {path}", ": whoever can write it decides who gets in; run: chmod 644"
        text = _read(path, what, _MAX_ALLOW_FILE_BYTES, forbidden=_OTHERS_WRITE, otherwise=why)
        named += [(line, f"{path} line {number}") for number, line in enumerate(text.splitlines(), start=1)]
    found: dict[str, set[str]] = {}
    for text, where in named:
        entry = parse_entry(text, where)
        if entry is None:
            continue
        instances = found.setdefault(entry[0], set())
        instances.add(entry[1])
        if "" in instances and len(instances) > 1:
            raise ConfigError(
                f"{where}: the key is listed both with an instance ({', '.join(sorted(instances - {''}))}) and without, "
                "which would let it speak for any; keep one"
            )
    return {key: frozenset(instances - {""}) for key, instances in found.items()}


def parse_entry(text: str, where: str) -> tuple[str, str] | None:
    """Return (key, instance or ""), or None for an empty line or a comment. Raises ConfigError naming `where`."""
    words = text.split()
    # '#' is a character of Z85, so a comment begins with a mark that stands alone.
    if "#" in words:
        words = words[: words.index("#")]
    if not words:
        return None
    check_key(words[0], where)
    if len(words) > 2 or (len(words) == 2 and not _INSTANCE.fullmatch(words[1])):
        raise ConfigError(f"{where}: expected a public key and at most one instance name, as '<key> decode-0'")
    return words[0], words[1] if len(words) == 2 else ""


def readable_by_design(facts: os.stat_result) -> int:
    """Return the mode bits for others that a secret's file may have: root gives secrets to daemons by their group (Kubernetes)."""
    return stat.S_IRGRP if facts.st_uid == 0 != os.geteuid() else 0


def _read(path: Path, what: str, most_bytes: int, *, forbidden: int, otherwise: str) -> str:
    """Return a regular file's text, unless its mode has `forbidden` bits. Errors never show the text."""
    try:
        # O_NONBLOCK: where the path is a pipe that nobody writes to, an open without it would wait for ever.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            facts = os.fstat(file.fileno())
            mode = facts.st_mode & ~readable_by_design(facts)
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{what} is no regular file")
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise UnavailableError(f"{what} cannot be read: {error.strerror}") from error
    if len(content) > most_bytes:
        raise ConfigError(f"{what} is longer than {most_bytes} bytes: it is another file")
    if mode & forbidden:
        raise UnavailableError(f"{what} has mode {stat.S_IMODE(mode):04o}{otherwise} {path}")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{what} cannot be read: it is not UTF-8 text") from None


class Gate:
    """The keys that a node accepts, and the instances for which they may speak. A node without keys accepts everybody."""

    def __init__(self, keys: CurveKeys | None, entries: Iterable[str] = (), path: Path | None = None) -> None:
        """Begin with `keys.allowed`, or with the list of `entries` and the file `path`. Raises as `read_allowed`."""
        self._own = keys.public if keys else ""
        self._entries, self._path = tuple(entries), path if keys else None
        self._stamp = self._look()
        self.allowed = read_allowed(self._entries, path) if self._path else keys.allowed if keys else {}

    def allows(self, key: str) -> bool:
        """Return whether the holder of a key may connect and stay connected. `key` is empty where there are no keys."""
        return key == self._own or key in self.allowed

    def names_of(self, key: str) -> frozenset[str]:
        """Return the instances that a key may speak for; empty: any."""
        return self.allowed.get(key, frozenset())

    def check_server(self, address: PeerAddress) -> None:
        """Raise UnauthorizedError for a prefill node that may not write this decode node's memory.

        With an empty list the clients that may admit requests choose: they name the prefill node and its key.
        """
        if self.allowed and not self.allows(address.public_key):
            raise UnauthorizedError(
                f"the prefill node at {address.endpoint} has key {address.public_key or '(none)'}, which this decode node "
                "does not accept: list it in control.curve.allowed_keys_file, or leave the list empty to accept every "
                "node that a request names"
            )

    def follow(self) -> bool:
        """Read a file that has changed; return whether another list is in force now. An unreadable file changes nothing."""
        stamp = self._look()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            fresh = read_allowed(self._entries, self._path)
        except BridgeError as error:
            log.error("allowed_keys_unreadable", effect="the former list stays in force", reason=str(error))
            return False
        changed, self.allowed = fresh != self.allowed, fresh
        if changed:
            log.info("allowed_keys_changed", keys=len(fresh))
        return changed

    def _look(self) -> tuple[int, ...]:
        try:
            found = self._path.stat() if self._path else None
        except OSError:
            return (0,)
        return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode) if found else ()
