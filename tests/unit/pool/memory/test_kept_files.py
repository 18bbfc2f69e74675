"""Files that outlive their owner: the right to them, their expiry, and how the next owner takes them over."""

import mmap
import os
from itertools import product
from pathlib import Path

import pytest

from kvbridge.core.errors import RegistrationError
from kvbridge.pool.memory import leftovers
from kvbridge.pool.memory.leftovers import ForeignFilesError, KeptFiles, Verdict, discard_files, sweep
from kvbridge.pool.memory.shared_mapping import SharedMapping

PREFIX = "kvbridge-0123456789ab-keep"
ONE, TWO = "1" * 16, "2" * 16


@pytest.fixture
def files(shm):
    with KeptFiles(shm, PREFIX, keep_s=60.0, wait_s=0.0) as found:
        yield found


def left(shm, content: bytes = b"kept", *, keep_s: float = 60.0) -> KeptFiles:
    """Make the files of a process: a pool and a journal."""
    files = KeptFiles(shm, PREFIX, keep_s=keep_s, wait_s=0.0)
    path = files.new_path(ONE)
    with SharedMapping.create(path.parent, f"{path.name}.twins.0", 8192) as mapping:
        mapping.buffer[: len(content)] = content
        mapping.leave()
    files.journal.write_bytes(b"a journal")
    return files


def verdicts(shm) -> dict[str, Verdict]:
    return {each.path.name.removeprefix(PREFIX): each.verdict for each in sweep([shm])}


def test_two_processes_never_have_them(shm, files):
    with pytest.raises(RegistrationError, match=r"another daemon of the same instance .*pools\.keep_s"):
        KeptFiles(shm, PREFIX, keep_s=1.0, wait_s=0.05)
    files.close()
    KeptFiles(shm, PREFIX, keep_s=1.0, wait_s=0.0).close()
    assert not list(shm.iterdir())


@pytest.fixture
def another_user(monkeypatch):
    """Return a function that makes this process another user, to whom its earlier files do not belong."""
    mine = os.geteuid()

    def become() -> None:
        monkeypatch.setattr(leftovers.os, "geteuid", lambda: mine + 1)

    return become


def take(path: Path, kind: str) -> None:
    {
        "file": path.touch,
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(path.with_name("elsewhere")),
    }[kind]()


def give(path: Path) -> None:
    (path.rmdir if path.is_dir() else path.unlink)()


@pytest.mark.parametrize("name", [".lock", ".journal", ".journal.new", "-squatter"])
@pytest.mark.parametrize(("kind", "foreign"), [("file", True), *product(["folder", "pipe", "link"], [True, False])])
def test_a_name_that_is_taken_is_told_with_its_owner_or_its_kind(shm, another_user, name, kind, *, foreign):
    """Shared memory is everybody's: any user who knows the names of instance and node can make such a file first."""
    path = shm / f"{PREFIX}{name}"
    take(path, kind)
    if foreign:
        another_user()
    why = rf"belongs to user {os.getuid()}, .* have it removed" if foreign else "is no regular file"
    with pytest.raises(ForeignFilesError, match=f"{path} {why}"):
        KeptFiles(shm, PREFIX, keep_s=1.0, wait_s=0.0)
    discard_files(shm, PREFIX)
    assert list(shm.iterdir()) == [path]
    give(path)


@pytest.mark.parametrize("kind", ["file", "folder", "pipe", "link"])
def test_names_that_another_user_takes_later_are_left_alone(shm, files, another_user, kind):
    """They are nobody's pools, and to fail at removing them would keep this user's from being removed."""
    paths = [shm / f"{PREFIX}{name}" for name in (".journal", "-squatter.twins.0")]
    for path in paths:
        take(path, kind)
    another_user()
    assert not files.pools()
    with pytest.raises(OSError, match=r"not this user's|symbolic links"):
        files.read_journal()
    files.remove_pools()
    assert {*shm.iterdir()} == {*paths, shm / f"{PREFIX}.lock"}
    for path in paths:
        give(path)


def test_they_are_kept_for_their_time_and_swept_up_afterwards(shm):
    files = left(shm)
    names = {f"-{ONE}.twins.0", ".journal", ".lock"}
    assert verdicts(shm) == dict.fromkeys(names, Verdict.IN_USE)
    files.close(keep=True)
    found = sweep([shm])
    assert {each.verdict for each in found} == {Verdict.KEPT}
    assert all(f"{each.kind}" == "kept" and "pools.keep_s" in each.why for each in found)
    KeptFiles(shm, PREFIX, keep_s=0.0, wait_s=0.0).close(keep=True)  # with another configuration
    assert verdicts(shm) == dict.fromkeys(names, Verdict.REMOVED)
    assert not list(shm.iterdir())


def test_what_an_owner_that_was_killed_had_is_kept_from_its_last_word_on(shm):
    files = left(shm)
    os.close(files._descriptor)  # as the kernel does
    assert set(verdicts(shm).values()) == {Verdict.KEPT}
    KeptFiles(shm, PREFIX, keep_s=0.0, wait_s=0.0).close()


def test_pools_without_their_lock_file_are_nobodys(shm):
    left(shm).close(keep=True)
    (shm / f"{PREFIX}.lock").unlink()
    assert set(verdicts(shm).values()) == {Verdict.REMOVED}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of another user")
def test_a_lock_file_of_another_user_keeps_no_pool_from_being_swept_up(shm):
    """Otherwise whoever takes that name lets memory of this user stay for as long as they like."""
    left(shm).close(keep=True)
    lock = shm / f"{PREFIX}.lock"
    os.chown(lock, 1, -1)
    removed = dict.fromkeys([f"-{ONE}.twins.0", ".journal"], Verdict.REMOVED)
    assert verdicts(shm) == {**removed, ".lock": Verdict.FOREIGN}
    lock.unlink()


def test_a_daemon_that_keeps_none_removes_them_unless_another_has_them(shm):
    files = left(shm)
    discard_files(shm, PREFIX)
    assert len(list(shm.iterdir())) == 3
    files.close(keep=True)
    discard_files(shm, PREFIX)
    discard_files(shm, PREFIX)
    assert not list(shm.iterdir())


@pytest.fixture
def old(shm) -> Path:
    """A pool that its owner has left."""
    path = shm / f"{PREFIX}-{ONE}.twins.0"
    with SharedMapping.create(shm, path.name, 8192) as mapping:
        mapping.buffer[:4] = b"kept"
        mapping.leave()
    return path


def test_a_pool_is_taken_over_with_what_is_in_it_and_under_another_name(files, old):
    assert files.pools() == {"twins.0": [old]}
    new = files.new_path(TWO).with_name(f"{PREFIX}-{TWO}.twins.0")
    with SharedMapping.take_over(old, new, wait_s=0.0) as mapping:
        assert bytes(mapping.buffer[:4]) == b"kept"
        assert files.pools() == {"twins.0": [new]}
    assert not files.pools(), "its owner has not left it"


def test_a_pool_that_somebody_may_still_write_is_not_taken_over(files, old):
    """The kernel counts mappings of processes that are ending, too."""
    new = old.with_name(f"{PREFIX}-{TWO}.twins.0")
    descriptor = os.open(old, os.O_RDWR)
    writer = mmap.mmap(descriptor, 8192)
    os.close(descriptor)
    with pytest.raises(RegistrationError, match="still has it open for writing"):
        SharedMapping.take_over(old, new, wait_s=0.05)
    writer.close()
    with SharedMapping.take_over(new, old, wait_s=0.0) as mapping:
        assert mapping.length_bytes == 8192


def test_a_pool_of_this_process_stays_when_what_was_there_before_is_removed(shm, files):
    for name in (ONE, TWO):
        (shm / f"{PREFIX}-{name}.host.0").touch()
    files.journal.touch()
    files.remove_pools(besides=TWO)
    assert [path.name for path in files.pools()["host.0"]] == [f"{PREFIX}-{TWO}.host.0"]
    assert not files.journal.exists()
