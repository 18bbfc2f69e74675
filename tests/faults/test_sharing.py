"""Rooms that share pages, and what goes wrong with one of them: the others and the pages stay as they were."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.faults.cells import BEGUN_HERE, LOST, Fault, State, Victim, outcomes
from tests.faults.fault_cluster import HALF, SHARED_TOKENS, TOKENS, FaultCluster
from tests.faults.stages import late_writer_cluster, scene
from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import all_free, http, report, status
from tests.helpers.prompts import Prompt

short = pytest.mark.faults_short
PAGE = 256


@pytest.fixture(scope="module")
def stage() -> Iterator[FaultCluster]:
    with scene(shares=True) as opened:
        for _ in range(2):  # the second leaves a checkpoint where it leaves the first
            opened.cross()
        yield opened


@pytest.fixture(autouse=True)
def shared_as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """The next turn starts from the same page on both sides, and nobody goes on reading it."""
    yield
    if "stage" in request.fixturenames:
        stage = request.getfixturevalue("stage")
        assert stage.turn(stage.pair()) == (SHARED_TOKENS, SHARED_TOKENS)
        for daemon in stage.nodes:
            all_free(daemon)
            stage.nobody_reads(daemon)


@pytest.mark.parametrize("victim", [pytest.param(Victim.PREFILL, marks=short), Victim.PREFILL_WORKER])
def test_rooms_of_another_writer_go_on(victim: Victim) -> None:
    """The writer of some rooms is killed, in every state of them, while another writes rooms that share their beginning."""
    with late_writer_cluster("local", shares=True) as stage:
        stage.shared_tokens = SHARED_TOKENS
        claimed = stage.admit_by_filler(TOKENS, stage.next_prompt())
        stage.cross_by_filler(claimed, TOKENS)
        under_way = stage.admit_by_filler(TOKENS, stage.next_prompt())
        stage.filler.call("write", under_way, TOKENS, 0, HALF)
        rooms, began, expected = stage.furnish(), stage.sender.pid, outcomes("local", victim, Fault.KILL)
        held = [report(stage.decode, room)["prefix_tokens"] for state, room in rooms.items() if state != State.ADMITTED]
        assert set(held) == {SHARED_TOKENS}, held
        worker = stage.worker_pid(stage.prefill)
        if victim is Victim.PREFILL:
            stage.prefill.kill()
            stage.detach(stage.sender.role)
            os.kill(worker, signal.SIGCONT)
            stage.restart(stage.prefill)
        else:
            os.kill(worker, signal.SIGKILL)
        for state, room in rooms.items():
            if (letters := expected[state].split("/")[1]) in LOST:
                stage.letter(stage.decode, room, letters)
        stage.reader.call("check", claimed, TOKENS)
        assert stage.cross_by_filler(under_way, TOKENS, HALF) == SHARED_TOKENS
        stage.cluster.wait_ready()
        for state, room in rooms.items():
            stage.conclude(state, room, expected[state], begun_by=began if state in BEGUN_HERE else 0)
        stage.reader.call("check", claimed, TOKENS)
        for room in (claimed, under_way):
            stage.reader.call("release", room)
        for daemon in (*stage.nodes, stage.second):
            all_free(daemon)
            stage.nobody_reads(daemon)
        after = stage.admit_by_filler(TOKENS, stage.next_prompt())
        assert stage.cross_by_filler(after, TOKENS) == SHARED_TOKENS


@pytest.mark.parametrize("proof", ["the worker says so", "the worker's end"])
def test_a_source_that_is_still_read_stays_with_its_reader(proof: str) -> None:
    """Rows that decode lacks go out of shared pages. Until the worker is proved to read no more, nobody gets these pages."""
    with scene(shares=True, timeouts={"worker_silence_s": 60.0, "drain_s": 60.0}) as stage:
        stage.cross()  # so that both know each other
        before = status(stage.prefill)["prefixes"]["unread_pages"]
        prompt = Prompt(begin=1 << 22, own=1 << 22, shared_tokens=SHARED_TOKENS)
        first = stage.admit_on_prefill(prompt=prompt)
        stage.begin(first)
        stage.sender.call("write", first, TOKENS, 0, TOKENS)
        stage.sender.call("finish", first)
        stage.sender.call("abort", first)  # so decode holds nothing of it
        eventually("kept", lambda: status(stage.prefill)["prefixes"]["unread_pages"] == before + TOKENS // PAGE)
        worker = stage.worker_pid(stage.prefill)
        os.kill(worker, signal.SIGSTOP)
        tokens = TOKENS + PAGE
        room = stage.pair(tokens, prompt)
        stage.taken([room])
        assert report(stage.prefill, room)["computed_tokens"] == TOKENS
        stage.cancel(stage.decode, room)
        eventually("aborting", lambda: stage.state(stage.prefill, room) == "aborting")
        _take_every_page(stage)
        shown = status(stage.prefill)["prefixes"]
        assert (shown["readers"], shown["read_pages"], shown["unread_pages"]) == (1, TOKENS // PAGE, 0), shown
        assert stage.state(stage.decode, room) == "aborting"
        os.kill(worker, signal.SIGCONT if proof == "the worker says so" else signal.SIGKILL)
        for daemon in stage.nodes:
            eventually("over", lambda daemon=daemon: stage.state(daemon, room) in {"aborted", "failed"})
        stage.nobody_reads(stage.prefill)
        stage.cluster.wait_ready()
        again = stage.pair(tokens, prompt)
        assert stage.turn(again, tokens) == (TOKENS, 0), "every byte came out of the pages that were read so long"
        for daemon in stage.nodes:
            all_free(daemon)
            stage.nobody_reads(daemon)


def _take_every_page(stage: FaultCluster) -> None:
    """Give a room every page of prefill that can be had, cached ones too, and have it cancelled."""
    prompt = Prompt(begin=1 << 23, own=1 << 23, shared_tokens=SHARED_TOKENS)
    room = stage.admit_on_prefill(status(stage.prefill)["available_pages"]["full"] * PAGE, prompt)
    refused = http("POST", stage.prefill, "/v1/requests", json=stage.body(TOKENS, stage.next_prompt()))
    assert refused.status_code == 503, refused.text
    stage.cancel(stage.prefill, room)


@pytest.mark.parametrize("dies", [pytest.param(True, marks=short), False])
def test_an_answer_stays_unless_its_engine_dies_in_the_middle_of_it(stage: FaultCluster, dies: bool) -> None:
    """Its prompt's pages stay whatever becomes of the engine, and a sibling that reads with it goes on."""
    prompt, tokens = stage.next_prompt(), TOKENS + PAGE
    assert prompt is not None
    room = stage.pair(TOKENS, prompt, max_new_tokens=2 * PAGE)
    stage.begin(room)
    stage.sender.call("write", room, TOKENS, 0, TOKENS)
    stage.sender.call("finish", room)
    assert stage.claim(room) == SHARED_TOKENS
    sibling = stage.pair(TOKENS, prompt)
    stage.reader.call("answer", room, TOKENS, tokens, prompt)
    if dies:
        stage.detach(stage.reader.role)
        assert stage.letter(stage.decode, room, "L")
    else:
        stage.reader.call("release", room, tokens, prompt)
    assert stage.turn(sibling)[1] == TOKENS
    assert stage.turn(stage.pair(tokens, prompt), tokens)[1] == (TOKENS if dies else tokens)
