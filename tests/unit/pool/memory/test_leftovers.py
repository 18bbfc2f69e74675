import fcntl
import multiprocessing
import os
from pathlib import Path

import pytest

from kvbridge.pool.memory import leftovers
from kvbridge.pool.memory.leftovers import Leftover, Verdict, sweep
from kvbridge.pool.memory.shared_mapping import SharedMapping
from kvbridge.transport.local.host import LockFiles, Proof

POOL = "kvbridge-0123456789ab-0123456789abcdef.host.host"
PROOF = ".kvbridge-0123456789abcdef"
FORMS = [POOL, PROOF]


def verdicts(found: list[Leftover]) -> dict[str, Verdict]:
    return {each.path.name: each.verdict for each in found}


def _own(directory: Path, connection) -> None:
    mapping = SharedMapping.create(directory, POOL, 8192)
    proof = Proof(directory)
    connection.send(Path(proof.claim.file.path).name)
    connection.recv()
    mapping.close()


@pytest.fixture
def owner(shm):
    """Another process that owns a pool and a proof, and the proof's name; killed at the end, however the test ends."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_own, args=(shm, there), daemon=True)
    process.start()
    assert here.poll(30)
    yield process, here.recv()
    process.kill()
    process.join(30)
    process.close()
    here.close()
    there.close()
    sweep([shm])


def test_files_belong_to_their_owner_until_it_dies_and_then_to_nobody(shm, owner):
    process, proof = owner
    found = sweep([shm])
    assert verdicts(found) == {POOL: Verdict.IN_USE, proof: Verdict.IN_USE}
    assert [each.holder for each in found] == [process.pid, process.pid]
    assert [(each.kind, each.size_bytes, each.user_id) for each in found if each.path.name == POOL] == [
        ("pool", 8192, os.geteuid())
    ]
    process.kill()
    process.join(30)
    expected = {POOL: Verdict.REMOVED, proof: Verdict.REMOVED}
    assert verdicts(sweep([shm], dry_run=True)) == expected
    assert {path.name for path in shm.iterdir()} == set(expected)
    assert verdicts(sweep([shm])) == expected
    assert not list(shm.iterdir())
    SharedMapping.create(shm, POOL, 4096).close()


def test_lock_files_end_with_their_process_where_exit_handlers_do_not_run(shm):
    lock_files = LockFiles()
    lock_file = lock_files.to_name(99, 4096, shm)
    assert verdicts(sweep([shm])) == {Path(lock_file.identity.path).name: Verdict.IN_USE}
    lock_files.remove_names()
    assert not list(shm.iterdir())


@pytest.mark.parametrize("form", FORMS)
def test_a_name_that_a_new_owner_has_taken_meanwhile_stays_his(shm, monkeypatch, form):
    """Between opening the dead one's file and looking at its name: another sweep removes it, a new owner comes."""
    path = shm / form
    path.touch()
    real = fcntl.flock

    def taken(descriptor, operation):
        real(descriptor, operation)
        path.unlink()
        path.write_text("the new owner's")

    monkeypatch.setattr(leftovers.fcntl, "flock", taken)
    assert verdicts(sweep([shm])) == {form: Verdict.IN_USE}
    assert path.read_text() == "the new owner's"
    path.unlink()


def test_what_is_no_file_is_not_looked_at(shm):
    (shm / POOL).mkdir()
    (shm / "target").touch()
    (shm / PROOF).symlink_to(shm / "target")
    os.mkfifo(shm / PROOF.replace("0", "1"))
    assert sweep([shm]) == []
    assert (shm / "target").exists()
    (shm / POOL).rmdir()
    for path in list(shm.iterdir()):
        path.unlink()


def test_files_of_others_and_files_that_cannot_be_removed_are_told(shm, monkeypatch):
    (shm / POOL).touch()
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert verdicts(sweep([shm])) == {POOL: Verdict.FOREIGN}
    monkeypatch.undo()

    def refused(_path):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refused)
    assert [(each.verdict, each.why) for each in sweep([shm])] == [(Verdict.FAILED, "Operation not permitted")]
    monkeypatch.undo()
    (shm / POOL).unlink()
