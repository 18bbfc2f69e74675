"""SGLang's own sender and receiver as a pair of processes: `SglangPair`."""

from __future__ import annotations

import itertools
import json
import os
import select
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

from kvbridge.core.errors import DeadlineError
from kvbridge.processes import ChildProcess, stop_all
from tests.helpers.local_servers import free_ports

END = Path(__file__).with_name("sglang_end.py")
START_S, CALL_S = 600.0, 120.0
CHUNK_PAGES = 32
"""A chunk of 8,192 tokens, as both engines publish by default."""
WINDOW = 1

Pages = list[int]


class _End(ChildProcess):
    def __init__(self, role: str, folder: Path) -> None:
        super().__init__(f"SGLang's {role} end", folder / f"sglang-{role}.log", ends_with_us=True)
        self._role, self._held = role, b""

    def start(self, python: Path, port: int, pages: int) -> None:
        self.launch([str(python), str(END), self._role, str(port), str(pages)], piped=True)

    def tell(self, **command: Any) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = CALL_S) -> dict[str, Any]:
        """Return the next line. Raises PeerError when the process has ended, DeadlineError."""
        assert self.process is not None
        assert self.process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._held:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self.process.stdout], [], [], left_s)[0]:
                raise DeadlineError(f"{self.name} said nothing for {timeout_s:g} s; its log ends:\n{self.log(20)}")
            found = os.read(self.process.stdout.fileno(), 1 << 20)
            if not found:
                self.process.wait(CALL_S)
                self.check_running()
            self._held += found
        line, self._held = self._held.split(b"\n", 1)
        return dict(json.loads(line))

    def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return self.answer()


class SglangPair(AbstractContextManager["SglangPair"]):
    """Both ends, as processes from the beginning; see `connect`. Pages are ids of both pools, which have `pages` of them."""

    def __init__(self, python: Path, folder: Path, pages: int) -> None:
        self._ends = self._prefill, self._decode = _End("prefill", folder), _End("decode", folder)
        self._python, self._pages = python, pages
        self._rooms = itertools.count(1)
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> Self:
        [port] = free_ports(1)
        try:
            for end in self._ends:
                end.start(self._python, port, self._pages)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def connect(self) -> None:
        """Wait until both are there, which takes a while, and know each other. Raises PeerError, DeadlineError."""
        for end in self._ends:
            end.answer(START_S)
        self._decode.ask(do="connect")
        self.facts = self._decode.ask(do="facts")

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            if end.process is not None and end.process.stdin is not None:
                end.process.stdin.close()
        stop_all(self._ends, timeout_s=20.0)

    def sent_bytes(self, pages: int) -> int:
        return int(pages * self.facts["page_bytes"] + self.facts["window_bytes"] + self.facts["aux_bytes"])

    def whole_request(self, page: int) -> float:
        """One page: seconds from the receiver's creation until it is told that all is there; the sender exists already."""
        room = next(self._rooms)
        self._prefill.ask(do="request", room=room, chunks=[[page]], window=WINDOW, held=False)
        told = self._decode.ask(do="request", room=room, pages=[page], window=WINDOW)
        self._prefill.answer()
        return float(told["done_s"] - told["begun_s"])

    def published_request(self, source: Pages, destination: Pages) -> float:
        """Seconds from the first chunk's `send` until the receiver is told that all is there; both ends were waiting for it."""
        room = next(self._rooms)
        chunks = [source[first : first + CHUNK_PAGES] for first in range(0, len(source), CHUNK_PAGES)]
        self._prefill.ask(do="request", room=room, chunks=chunks, window=WINDOW, held=True)
        self._decode.tell(do="request", room=room, pages=destination, window=WINDOW)
        if "waiting" not in self._prefill.answer():
            raise RuntimeError(f"{self._prefill.name} did not wait")
        self._prefill.tell()
        sent, received = self._prefill.answer(), self._decode.answer()
        return float(received["done_s"] - sent["begun_s"])

    def wipe(self, pages: Pages) -> None:
        self._decode.ask(do="wipe", pages=pages, window=WINDOW)

    def check(self, source: Pages, destination: Pages) -> None:
        """Compare all bytes of a request by their checksums, buffer by buffer. Raises RuntimeError."""
        sent = self._prefill.ask(do="digests", pages=source, window=WINDOW)
        came = self._decode.ask(do="digests", pages=destination, window=WINDOW)
        if sent != came:
            raise RuntimeError(
                f"SGLang delivered other bytes than were sent, pages {source[:8]}... to {destination[:8]}..."
            )
