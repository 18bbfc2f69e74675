"""The prefill engine of a replay: writes prompts chunk by chunk into the pages of a prefill daemon.

Owns: one engine process that serves every rank of its node. Must not know: where the pages go.
"""

from __future__ import annotations

import time

import torch

from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import Tables
from kvbridge.core.plan.operations import Section
from kvbridge.engine import PrefillEngine, PrefillRoom
from kvbridge.engine.adapters import synthetic
from kvbridge.testbed.engines.messages import Attached, Computed, Finished, RoomEnded
from kvbridge.testbed.replay.job import Job, Note, ReplayChannel, Restored, Serve, joined
from kvbridge.tier.keys import Keys


def serve(job: Job, channel: ReplayChannel) -> None:
    """Serve the requests that are ordered, one after another, until there are no more orders."""
    torch.set_num_threads(1)  # the daemons need the other cores
    with PrefillEngine.attach(job.prefill_runtime_dir) as engine:
        channel.report(Attached())
        while (order := channel.next_order()) is not None:
            try:
                _prefill(job, channel, engine, order)
            except BridgeError as error:
                engine.abort(order.room, f"could not be written: {error}")
                channel.report(RoomEnded(room=order.room, reason=f"on prefill: {error}"))
            engine.events()  # what happened to rooms is told by decode; unread, it would fill the connection


def _prefill(job: Job, channel: ReplayChannel, engine: PrefillEngine, order: Serve) -> None:
    tokens = order.prompt_tokens
    begun_s = time.monotonic()
    keys = order.keys(job, engine, tokens=tokens)
    begun = engine.begin(order.room, prompt_tokens=tokens, page_hashes=keys)
    if begun.computed_tokens:
        channel.report(_restored(engine, order, begun, keys))
    for held, tables in begun.checkpoints.items():
        _fill(engine, order.room, tables, Section(prompt_tokens=held, start_token=held, stop_token=held), keys)
    for start in range(begun.computed_tokens, tokens, job.chunk_tokens):
        stop = min(start + job.chunk_tokens, tokens)
        _fill(engine, order.room, begun.tables, Section(prompt_tokens=tokens, start_token=start, stop_token=stop), keys)
        engine.publish(order.room, stop)
        channel.report(Computed(tokens=stop - start))
    note = Note(
        number=order.number,
        room=order.room,
        prompt_tokens=tokens,
        computed_tokens=begun.computed_tokens,
        host_tokens=begun.host_tokens,
        finished_s=time.monotonic(),
    )
    channel.report(Finished(number=order.number, begun_s=begun_s, finished_s=note.finished_s))
    engine.finish(order.room, metadata=note.model_dump_json().encode(), checkpoints=tuple(begun.checkpoints))


def _fill(engine: PrefillEngine, room: int, tables: Tables, section: Section, keys: Keys) -> None:
    for views in engine.views.values():
        synthetic.fill(views, room=room, tables=tables, section=section, keys=keys)


def _restored(engine: PrefillEngine, order: Serve, begun: PrefillRoom, keys: Keys) -> Restored:
    """Look at all that an engine would start from."""
    found = {
        rank: synthetic.compare(views, room=order.room, tables=begun.restore, tokens=begun.computed_tokens, keys=keys)
        for rank, views in engine.views.items()
    }
    compared = joined(found, number=order.number, room=order.room)
    return Restored(number=order.number, **dict(compared))
