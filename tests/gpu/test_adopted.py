"""Engines that bring their own tensors: every byte of a request, and an engine that is killed while a peer's GPU writes there."""

import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, Role
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
from tests.gpu.test_cuda_daemons import all_free, on_devices
from tests.helpers.cluster import DaemonProcess, eventually, mutated
from tests.helpers.gated_copies import Gate
from tests.helpers.gpu_children import child
from tests.helpers.live_rooms import CLAIM_S, check_rows, nodes, write
from tests.helpers.rank_harness import Case, Setting, draw_tables
from tests.helpers.rank_pools import EngineMemory, Form, Ranks
from tests.helpers.zygote import installed

pytestmark = pytest.mark.gpu
TINY = preset("tiny-v4")
FULL, SWA, REQUEST, HOST = IndexSpace.FULL, IndexSpace.SWA, IndexSpace.REQUEST, IndexSpace.HOST
C4_KV = frozenset({ComponentKind.C4_KV})

SETTING = Setting(
    TINY,
    Ranks(),
    Ranks(),
    Form({FULL: 8, SWA: 4, REQUEST: 3}),
    Form({FULL: 9, SWA: 4, REQUEST: 3, HOST: 48}, host=C4_KV),
    "local",
)


def decode_into_own(pipe, runtime_dir, pages, exclude, device):
    """The target of a process: a decode engine with tensors of its own that takes each room it is told through its life."""
    memory = EngineMemory.make(TINY, Ranks(), pages, exclude=exclude, device=f"cuda:{device}")
    torch.cuda.synchronize(device)
    with DecodeEngine.adopt(runtime_dir, memory.regions) as engine:
        pipe.send("there")
        while True:
            try:
                room, tables = pipe.recv()
            except EOFError:
                break
            while ("wanted", room) not in {(event.kind, event.room) for event in engine.events(CLAIM_S)}:
                pass
            engine.fetch(room, pages=tables)
            pipe.send("provided")
            claimed = engine.claim(room, timeout_s=CLAIM_S)
            check_rows(engine, claimed)
            claimed.release()
            pipe.send("released")
    del memory


def test_engines_bring_their_own_tensors(device: int) -> None:
    adopted = {"memory": "adopted"}
    where = {"device": f"cuda:{device}"}
    theirs = EngineMemory.make(TINY, Ranks(), SETTING.source_form.pages, **where)
    ours = EngineMemory.make(TINY, Ranks(), SETTING.destination_form.pages, exclude=C4_KV, **where)
    torch.cuda.synchronize(device)
    host = {"host": {"pages": SETTING.destination_form.pages[HOST]}}
    random = np.random.default_rng(5)
    with nodes(
        on_devices(device) | {"pools": adopted}, on_devices(device) | {"pools": adopted | host}, wait=False
    ) as running:
        for daemon in (running.prefill, running.decode):
            daemon.endpoint()
        with (
            PrefillEngine.adopt(running.prefill.runtime_dir, theirs.regions) as sender,
            DecodeEngine.adopt(running.decode.runtime_dir, ours.regions) as reader,
        ):
            running.wait_ready()
            for case in (Case(3), Case(130, (57,)), Case(1023, (333, 777), longest_run=3)):
                source, destination = draw_tables(SETTING, case, random)
                del destination[HOST]
                room = running.pair(case.tokens)["room"]
                assert [(event.kind, event.room) for event in reader.events(CLAIM_S)] == [("wanted", room)]
                reader.fetch(room, pages=destination)
                write(sender, room, case, sender.begin(room, prompt_tokens=case.tokens, pages=source))
                claimed = reader.claim(room, timeout_s=CLAIM_S)
                check_rows(reader, claimed)
                claimed.release()
                for engine in (sender, reader):
                    eventually("the end", lambda engine=engine: "completed" in {e.kind for e in engine.events(0.1)})
    del theirs, ours


def test_an_engine_that_brought_its_tensors_is_killed_while_copies_into_them_are_under_way(device: int) -> None:
    """Its memory was exported, and a peer's GPU has been given copies into it: the peer lives, and the next engine is served."""
    gate = Gate(Path(f"/dev/shm/kvb-{os.getpid()}-gate"), create=True)
    host = {"host": {"pages": SETTING.destination_form.pages[HOST]}}
    random, case = np.random.default_rng(6), Case(130, (57,))
    theirs = (SETTING.destination_form.pages, C4_KV, device)
    with (
        nodes(
            on_devices(device),
            on_devices(device) | {"pools": {"memory": "adopted"} | host},
            wait=False,
            change=lambda daemon: mutated(
                daemon, worker_code=installed("gated_copies", str(gate.path)) if daemon.role == Role.PREFILL else ""
            ),
        ) as running,
        ExitStack() as stack,
    ):
        stack.callback(gate.path.unlink)
        stack.callback(gate.open)
        running.decode.endpoint()
        running.prefill.wait_ready()
        worker = running.prefill.get("/status")["ranks"][0]["pid"]
        sender = stack.enter_context(PrefillEngine.attach(running.prefill.runtime_dir))
        for dies in (True, False):
            with child(decode_into_own, str(running.decode.runtime_dir), *theirs) as engine:
                assert engine.hear() == "there"
                running.wait_ready()
                destination = draw_tables(SETTING, case, random)[1]
                del destination[HOST]
                room = running.pair(case.tokens)["room"]
                engine.pipe.send((room, destination))
                assert engine.hear() == "provided"
                held = gate.close_behind(0) if dies else 0
                write(sender, room, case)
                if not dies:
                    assert engine.hear() == "released"
                    continue
                eventually("copies at the gate", lambda held=held: gate.come >= held)
                engine.kill()
                gate.open()
                for daemon in (running.prefill, running.decode):
                    assert running_end(daemon, room) in {"failed", "aborted"}
                sender.abort(room, "its peer is gone")
        assert running.prefill.get("/status")["ranks"][0]["pid"] == worker
        eventually("all pages back", lambda: all_free(running.prefill, sender))


def running_end(daemon: DaemonProcess, room: int) -> str:
    return str(daemon.get(f"/v1/requests/{room}?wait=15")["state"])
