"""Writers that write late, and what decode does about them: played on a stage, whatever its transport and its pools."""

from __future__ import annotations

import os
import signal
import time

from tests.faults.late_writer_cluster import FILL_TOKENS, LATE_TOKENS, LateWriterCluster
from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import status

SLICES_BEFORE = 2
"""Of the 24 of a late room: so many come before the gate closes."""
AWAKE_S = 0.6
"""What a late writer is given to do its worst; it writes 24 MiB in a tenth of that."""


def over(stage: LateWriterCluster, room: int) -> None:
    """Wait until a room has ended for users on both sides."""
    for daemon in stage.nodes:
        eventually("over", lambda daemon=daemon: stage.state(daemon, room) in {"aborting", "aborted", "failed"})


def freed(stage: LateWriterCluster) -> None:
    """Wait until the decode daemon has shut the writer out and given the late room's pages back."""
    eventually("freed", lambda: status(stage.decode)["available_pages"]["full"] >= LATE_TOKENS // 256)


def frozen_node(stage: LateWriterCluster, *, fenced: bool) -> int:
    """A prefill node that is frozen with an order in its worker's hands, long enough to be given up by decode.

    The worker wakes first, and knows nothing of all that: it writes. `fenced`: decode can shut it out without its help.
    Returns how many of the rows looked for have come.
    """
    room = stage.begin_late()
    worker, node = stage.worker_pid(stage.prefill), stage.pid(stage.prefill)
    stage.freeze(worker)
    stage.sender.call("publish", room, LATE_TOKENS)
    stage.freeze(node)
    stage.letter(stage.decode, room, "L")
    if fenced:
        freed(stage)
    assert stage.fill_free_pages()
    stage.resume(worker)
    if not fenced:
        eventually("the late writer writes", lambda: stage.rows_landed(room))
    time.sleep(AWAKE_S)
    landed = stage.rows_landed(room)
    stage.check_filled()
    stage.resume(node)
    stage.letter(stage.prefill, room, "L")
    stage.sender.call("abort", room)
    stage.check_filled()
    return landed


def copying(stage: LateWriterCluster) -> int:
    """A late room of which a part has come, and of which the rest is with the late worker and its GPU, at a gate."""
    room = stage.begin_late()
    assert stage.gate is not None
    held = stage.gate.close_behind(SLICES_BEFORE)
    stage.sender.call("publish", room, LATE_TOKENS)
    eventually("copies at the gate", lambda gate=stage.gate: gate.come >= held)
    return room


def killed_while_copying(stage: LateWriterCluster) -> None:
    """The late worker is killed: what its GPU had been given may still come, until its process has ended."""
    room = copying(stage)
    os.kill(stage.worker_pid(stage.prefill), signal.SIGKILL)
    stage.gate.open()
    stage.sender.call("let_go")
    stage.detach(stage.sender.role)
    for daemon in stage.nodes:
        stage.letter(daemon, room, "W")
    freed(stage)
    assert stage.fill_free_pages(), "no page became free: this test has looked at nothing"
    time.sleep(AWAKE_S)
    stage.check_filled()
    stage.wait_ready()


def frozen_while_copying(stage: LateWriterCluster) -> None:
    """The late worker is frozen and decode gives the room up: its GPU goes on, into pages that nobody else may have."""
    room, worker = copying(stage), stage.worker_pid(stage.prefill)
    stage.freeze(worker)
    stage.cancel(stage.decode, room)
    over(stage, room)
    stage.fill_free_pages()
    before = stage.rows_landed(room)
    stage.gate.open()
    time.sleep(AWAKE_S)
    print(f"{before} rows had come when the worker was frozen, {stage.rows_landed(room)} while it is")
    stage.check_filled()
    free = status(stage.decode)["available_pages"]["full"]
    assert free < FILL_TOKENS // 256, f"{free} pages are free while a writer that was given them lives"
    stage.resume(worker)
    eventually("quiet", lambda: stage.state(stage.prefill, room) == "aborted")
    stage.sender.call("abort", room)
    freed(stage)
    assert stage.fill_free_pages()
    stage.check_filled()


def exporter_killed_while_copying(stage: LateWriterCluster) -> None:
    """The decode worker, whose memory is being written, is killed: the writer lives, and reaches the next one's memory."""
    writer, room = stage.worker_pid(stage.prefill), copying(stage)
    os.kill(stage.worker_pid(stage.decode), signal.SIGKILL)
    stage.reader.call("let_go")
    stage.detach(stage.reader.role)
    stage.gate.open()
    stage.letter(stage.decode, room, "W")
    stage.letter(stage.prefill, room, "w")
    stage.sender.call("abort", room)
    stage.wait_ready()
    assert stage.worker_pid(stage.prefill) == writer


def exporter_frozen_while_copying(stage: LateWriterCluster) -> None:
    """The decode worker is frozen for a while: nobody needs it to write its memory, and the room ends well."""
    room, exporter = copying(stage), stage.worker_pid(stage.decode)
    stage.freeze(exporter)
    stage.gate.open()
    stage.sender.call("finish", room)
    stage.letter(stage.prefill, room, "C")
    stage.resume(exporter)
    stage.claim(room, LATE_TOKENS)
    stage.reader.call("release", room)


WHILE_COPYING = (
    killed_while_copying,
    frozen_while_copying,
    exporter_killed_while_copying,
    exporter_frozen_while_copying,
)
