"""Engines in processes of their own that do what they are told, so that they can be killed and frozen."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kvbridge.core.errors import BridgeError, DetachedError, errors_by_code
from kvbridge.core.geometry.components import Liveness
from kvbridge.core.ids import MemoryKind, Role, Tables
from kvbridge.core.plan.operations import Section
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.base import Engine
from kvbridge.engine.decode import DecodeEngine, DecodeRoom
from kvbridge.engine.prefill import PrefillEngine, PrefillRoom
from kvbridge.tier.keys import NO_KEYS, Keys
from tests.helpers import synthetic
from tests.helpers.prompts import Keyed

CALL_S = 20.0
BUSY_PAGES = 16
IDLE_S = 0.02
"""Pause of an idle engine between two looks at calls of its own that wait for its GPU."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.helpers.obedient_engines"])


class ObedientEngine:
    """One engine process, attached to a daemon. `close` ends it, however it is."""

    def __init__(self, role: Role, runtime_dir: Path, *, prepare: Callable[[], object] | None = None) -> None:
        """Start and attach. `prepare`, a function of some module, is called there before. Raises what attaching raises."""
        self.role = role
        self._pipe, theirs = _processes.Pipe()
        self._process = _processes.Process(target=_serve, args=(role, str(runtime_dir), theirs, prepare), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._answer(2 * CALL_S)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def call(self, verb: str, *arguments: Any, timeout_s: float = CALL_S + 5) -> Any:
        self._pipe.send((verb, arguments))
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise AssertionError(f"the {self.role} engine {self.pid} did not answer within {timeout_s} s")
        good, *found = self._pipe.recv()
        if good:
            return found[0]
        code, text = found
        kind = errors_by_code().get(code)
        if kind is None:
            raise AssertionError(f"in the {self.role} engine: {text}")
        raise kind(text)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(5)
        assert not self._process.is_alive()

    def close(self) -> None:
        """End the process without a word to the daemon, which sees its connection end."""
        self.kill()
        self._pipe.close()
        self._process.close()


def _serve(role: Role, runtime_dir: str, pipe: Connection, prepare: Callable[[], object] | None) -> None:
    engine: _Prefill | _Decode | None = None
    while True:
        try:
            if engine is None:
                if prepare is not None:
                    prepare()
                found: Any = None
                engine = _Prefill(runtime_dir) if role is Role.PREFILL else _Decode(runtime_dir)
            else:
                while not pipe.poll(IDLE_S):
                    engine.idle()
                verb, arguments = pipe.recv()
                found = getattr(engine, verb)(*arguments)
        except (EOFError, OSError):
            return
        except BridgeError as error:
            pipe.send((False, error.code, str(error)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is to see it
            pipe.send((False, "", f"{type(error).__name__}: {error}"))
        else:
            pipe.send((True, found))


class _Idle:
    """The work of an engine between two commands: nothing else sends calls that had to wait for its GPU."""

    def __init__(self, engine: Engine) -> None:
        self._attached = engine
        self._kept: list[RoomEvent] = []

    def idle(self) -> None:
        """Send what is due, and keep what the node said meanwhile for `events`."""
        with suppress(DetachedError):  # `let_go` looks for that
            self._kept += self._attached.events()

    def events(self, timeout_s: float) -> list[tuple[int, str, str]]:
        """Return the node's events since the last call: room, kind, code."""
        found, self._kept = self._kept or self._attached.events(timeout_s), []
        return [(event.room, event.kind, event.code) for event in found]


class _Prefill(_Idle):
    def __init__(self, runtime_dir: str) -> None:
        self._engine = PrefillEngine.attach(runtime_dir)
        super().__init__(self._engine)
        self._begun: dict[int, PrefillRoom] = {}
        self._keys: dict[int, Keys] = {}
        self._busy: dict[int, BusyPages] = {}

    def begin(self, room: int, tokens: int, prompt: Keyed | None = None) -> int:
        """Begin a room, and check every byte that it starts from; returns where that is, in tokens."""
        self._keys[room] = _keys(self._engine, prompt, tokens)
        self._begun[room] = self._engine.begin(room, prompt_tokens=tokens, page_keys=self._keys[room])
        self.check(room)
        return self._begun[room].held_by_prefill

    def check(self, room: int) -> None:
        begun = self._begun[room]
        for view in self._engine.views.values() if begun.held_by_prefill else ():
            wrong = synthetic.compare(
                view, room=room, tables=begun.restore, tokens=begun.held_by_prefill, keys=self._keys[room]
            ).mismatches
            assert not wrong, f"wrong bytes before room {room}: {wrong[0]}, and {len(wrong) - 1} more"

    def compute(self, room: int) -> None:
        """Have the GPU write anything to pages of a begun room, again and again, until rows of it are filled."""
        self._busy[room] = BusyPages(_pages(self._engine, self._begun[room].tables), scribble)

    def fill(self, room: int, tokens: int, start: int, stop: int) -> None:
        """Write rows of a begun room, those that are not there already, without telling anybody."""
        if room in self._busy:
            self._busy.pop(room).stop()
        begun = self._begun[room]
        self._fill(room, begun.tables, tokens, max(start, begun.held_by_prefill), stop)

    def _fill(self, room: int, tables: Tables, tokens: int, start: int, stop: int) -> None:
        section = Section(prompt_tokens=tokens, start_token=start, stop_token=stop)
        for view in self._engine.views.values():
            synthetic.fill(view, room=room, tables=tables, section=section, keys=self._keys[room])

    def write(self, room: int, tokens: int, start: int, stop: int) -> None:
        self.fill(room, tokens, start, stop)
        self._begun[room].publish(stop)

    def compute_as(self, room: int, tokens: int, prompt: Keyed) -> None:
        """Write the rows of another prompt from now on than the one whose keys were stated."""
        self._keys[room] = _keys(self._engine, prompt, tokens)

    def publish(self, room: int, upto: int) -> None:
        self._begun[room].publish(upto)

    def finish(self, room: int) -> None:
        """Write the checkpoints that are wanted, and say that everything is published."""
        wanted = self._begun[room].checkpoints
        for tokens, tables in wanted.items():
            self._fill(room, tables, tokens, tokens, tokens)
        self._begun.pop(room).finish(metadata=b"first token", checkpoints=tuple(wanted))

    def abort(self, room: int) -> None:
        if room in self._busy:
            self._busy.pop(room).stop()
        self._engine.abort(room, "told so")
        self._begun.pop(room, None)

    def let_go(self) -> None:
        """Wait until the node says that the device memory is gone, and give up every room that was begun."""
        _await_detached(self._engine)
        for room in tuple(self._begun):
            self.abort(room)


class _Decode(_Idle):
    def __init__(self, runtime_dir: str) -> None:
        self._engine = DecodeEngine.attach(runtime_dir)
        super().__init__(self._engine)
        self._claims: dict[int, DecodeRoom] = {}
        self._keys: dict[int, Keys] = {}
        self._busy: dict[int, BusyPages] = {}

    def claim(self, room: int, tokens: int, prompt: Keyed | None = None) -> int:
        """Claim a room once it is committed, and check every byte of it; returns how many tokens were here before."""
        keys = _keys(self._engine, prompt, tokens)
        held = self._claimed(room, keys, self._engine.claim(room, timeout_s=CALL_S, page_keys=keys))
        self.check(room, tokens)
        return held

    def claim_now(self, room: int, tokens: int, prompt: Keyed) -> int:
        """Claim a room and look at none of its bytes. Raises ConflictError while the room is not committed."""
        keys = _keys(self._engine, prompt, tokens)
        return self._claimed(room, keys, self._engine.claim(room, page_keys=keys))

    def _claimed(self, room: int, keys: Keys, claimed: DecodeRoom) -> int:
        assert set(claimed.metadata.values()) == {b"first token"}, claimed.metadata
        self._keys[room], self._claims[room] = keys, claimed
        return claimed.held_by_decode

    def compute(self, room: int) -> None:
        """Have the GPU read and write back pages of a claimed room, again and again, until this engine lets go of it."""
        self._busy[room] = BusyPages(_pages(self._engine, self._claims[room].tables), write_back)

    def holds(self, needles: list[bytes]) -> int:
        """How many of these are in the memory of this engine's node: each is known by its first 8 bytes, at a multiple of 8."""
        wanted = [int.from_bytes(needle[:8], "little", signed=True) for needle in needles]
        found: set[int] = set()
        for view in self._engine.views.values():
            for region in view.regions:
                pages = view.region(region.component, region.layer, space=region.space)
                words = torch.stack([pages.page(page) for page in range(region.page_count)]).view(torch.int64)
                found.update(word for word in wanted if word not in found and bool((words == word).any()))
        return len(found)

    def check(self, room: int, tokens: int) -> None:
        for view in self._engine.views.values():
            wrong = synthetic.compare(
                view, room=room, tables=self._claims[room].tables, tokens=tokens, keys=self._keys[room]
            ).mismatches
            assert not wrong, f"wrong bytes in room {room}: {wrong[0]}, and {len(wrong) - 1} more"

    def extend(self, room: int, tokens: int) -> None:
        self._claims[room].extend(tokens)

    def answer(self, room: int, prompt_tokens: int, tokens: int, prompt: Keyed) -> None:
        write_answer(self._engine, self._claims[room].tables, _keys(self._engine, prompt, tokens), prompt_tokens)

    def release(self, room: int, valid_tokens: int = 0, prompt: Keyed | None = None) -> None:
        if room in self._busy:
            self._busy.pop(room).stop()
        claimed = self._claims.pop(room)
        if valid_tokens:
            claimed.release(valid_tokens=valid_tokens, page_keys=_keys(self._engine, prompt, valid_tokens))
        else:
            claimed.release()

    def abort(self, room: int) -> None:
        self._claims.pop(room, None)
        self._engine.abort(room, "told so")

    def let_go(self) -> None:
        """Wait until the node says that the device memory is gone, and release every room that was claimed."""
        _await_detached(self._engine)
        for room in tuple(self._claims):
            self.release(room)


def _pages(engine: Engine, tables: Tables) -> list[torch.Tensor]:
    """Some pages of a room's growing components: uint8 each, shared with the pool."""
    found = [
        home.page(int(page))
        for view in engine.views.values()
        for part in view.geometry.components
        if part.liveness is Liveness.GROWING
        for layer in view.layers(part.kind)
        if (home := view.home(part.kind, layer, tables=tables)).region.memory is MemoryKind.VRAM or view.device is None
        for page in home.table(tables).ids
    ]
    return found[:: max(1, len(found) // BUSY_PAGES)]


def write_answer(engine: DecodeEngine, tables: Tables, keys: Keys, prompt_tokens: int) -> None:
    """Write the growing rows of whole pages behind the last whole page of a prompt. `keys`: of the prompt and its answer."""
    page = engine.geometry.tokens_per_page
    start, stop = prompt_tokens // page * page, len(keys) * page
    answer = Section(
        prompt_tokens=stop + 1, start_token=start, stop_token=stop
    )  # with the last token come windows and states
    for view in engine.views.values():
        synthetic.fill(view, room=0, tables=tables, section=answer, keys=keys)


def _await_detached(engine: Engine) -> None:
    deadline_s = time.monotonic() + CALL_S
    while time.monotonic() < deadline_s:
        try:
            engine.events(0.1)
        except DetachedError:
            return
    raise AssertionError("the engine was not told that its device memory is gone")


def _keys(engine: Engine, prompt: Keyed | None, tokens: int) -> Keys:
    return NO_KEYS if prompt is None else engine.page_keys(prompt.tokens(tokens), namespace=prompt.namespace)


KERNELS_AT_ONCE = 500
"""Kernels of one CUDA graph: about a millisecond, so that a GPU does not wait for a process that is being killed."""
GRAPHS_AHEAD = 4
HOST_PAUSE_S = 0.002
STOP_S = 20.0

Write = Callable[[torch.Tensor], object]


def scribble(page: torch.Tensor) -> None:
    """Leave anything in a page before its rows are final."""
    page.fill_(0xA5)


def write_back(page: torch.Tensor) -> None:
    """Write what is there: harmless to whoever owns the page, and visible when somebody else has got it meanwhile."""
    page.bitwise_xor_(0)


class BusyPages:
    """Pages (uint8 each) of one place that are written again and again, from the making of this object until `stop`."""

    def __init__(self, pages: Sequence[torch.Tensor], write: Write) -> None:
        self._pages, self._write = pages, write
        self._stopped = threading.Event()
        place = pages[0].device
        if place.type == "cuda":
            write(pages[0])  # its code is loaded before anything is captured
            self._graph = torch.cuda.CUDAGraph()
            with (
                torch.cuda.device(place),
                torch.cuda.graph(self._graph),
            ):  # here: no other thread may ask CUDA meanwhile
                for number in range(KERNELS_AT_ONCE):
                    write(pages[number % len(pages)])
        self._thread = threading.Thread(target=self._on_gpu if place.type == "cuda" else self._on_host, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(STOP_S)
        assert not self._thread.is_alive(), "the GPU does not come to the end of its kernels"

    def _on_gpu(self) -> None:
        with torch.cuda.device(self._pages[0].device):
            stream = torch.cuda.Stream()
            ends: list[torch.cuda.Event] = []
            while not self._stopped.is_set():
                with torch.cuda.stream(stream):
                    self._graph.replay()
                    ends.append(torch.cuda.Event())
                    ends[-1].record(stream)
                if len(ends) >= GRAPHS_AHEAD:
                    ends.pop(0).synchronize()
            stream.synchronize()

    def _on_host(self) -> None:
        while not self._stopped.wait(HOST_PAUSE_S):
            for page in self._pages:
                self._write(page)
