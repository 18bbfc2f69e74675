import gc
import os
import stat
from pathlib import Path

import pytest

from kvbridge.core.errors import ConflictError, RegistrationError
from kvbridge.pool.memory import shared_mapping
from kvbridge.pool.memory.shared_mapping import (
    MemoryLimit,
    SharedMapping,
    close_all,
    control_group_limits,
    tightest_limit,
)

MIB = 1 << 20


def descriptors() -> int:
    gc.collect()  # what earlier tests have left is not closed meanwhile
    return len(list(Path("/proc/self/fd").iterdir()))


def test_memory_is_not_unmapped_under_a_view(shm):
    mapping, other = (SharedMapping.create(shm, name, 4096) for name in ("host", "other"))
    view = mapping.buffer[10:20]
    with pytest.raises(ConflictError, match="while views of it are in use"):
        close_all([mapping, other])
    assert other.closed
    view[0] = 5
    assert mapping.buffer[10] == 5
    assert not mapping.path.exists()
    view.release()
    close_all([mapping, other])
    assert mapping.closed


def test_a_creation_that_is_stopped_or_whose_name_is_taken_meanwhile_leaves_nothing(shm, monkeypatch):
    with pytest.raises(RegistrationError, match="exists"):
        SharedMapping.create(shm, "host", 4096, on_progress=lambda *_: (shm / "host").touch())
    (shm / "host").unlink()
    before = descriptors()

    def stop(done, total):
        assert list(shm.iterdir()) == []
        raise KeyboardInterrupt

    monkeypatch.setattr(shared_mapping, "CHUNK_BYTES", 4096)
    with pytest.raises(KeyboardInterrupt):
        SharedMapping.create(shm, "host", MIB, on_progress=stop)
    assert list(shm.iterdir()) == []
    assert descriptors() == before


def test_too_little_memory_is_said_before_with_cause_and_cure(shm, monkeypatch):
    monkeypatch.setattr(
        shared_mapping, "tightest_limit", lambda directory: MemoryLimit("file system of X", 5_000, "enlarge X")
    )
    with pytest.raises(RegistrationError) as caught:
        SharedMapping.create(shm, "host", 8192)
    assert "host needs 8192 bytes, but file system of X has 5000 left; enlarge X, or configure fewer pages" in str(
        caught.value
    )


def test_memory_that_runs_out_meanwhile_is_an_error_not_a_signal(shm, monkeypatch):
    monkeypatch.setattr(shared_mapping, "_MADV_POPULATE_WRITE", 9999)  # the file system serves older kernels
    monkeypatch.setattr(shared_mapping, "CHUNK_BYTES", 256 * 1024)
    with SharedMapping.create(shm, "host", MIB) as mapping:
        assert mapping.path.stat().st_blocks * 512 == MIB

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RegistrationError, match=r"no memory for .*No space left on device"):
        SharedMapping.create(shm, "host", 8192)


def test_opening_says_what_is_wrong(shm):
    with pytest.raises(RegistrationError, match="No such file"):
        SharedMapping.open(shm / "host")
    with SharedMapping.create(shm, "host", 8192) as mapping:
        (shm / "empty").touch()
        with pytest.raises(RegistrationError, match="is empty: it is no pool"):
            SharedMapping.open(shm / "empty")
        (shm / "empty").unlink()
        (shm / "link").symlink_to(mapping.path)
        with pytest.raises(RegistrationError, match="cannot open"):
            SharedMapping.open(shm / "link")
        (shm / "link").unlink()


def test_a_file_of_another_user_is_not_mapped(shm, monkeypatch):
    with SharedMapping.create(shm, "host", MIB) as ours:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(RegistrationError, match=rf"belongs to user {os.getuid()}, not to user {os.getuid() + 1}"):
            SharedMapping.open(ours.path)


def test_every_page_is_in_memory_and_the_file_is_private(shm):
    with SharedMapping.create(shm, "host", MIB) as mapping:
        status = mapping.path.stat()
        assert status.st_blocks * 512 == MIB
        assert stat.S_IMODE(status.st_mode) == 0o600


def group(path: Path, **files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)


def processes(tmp_path: Path, text: str) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(text)
    return tmp_path / "proc"


def test_version_2_limits_of_all_parents_with_reclaimable_cache_as_available(tmp_path):
    root = tmp_path / "cgroup"
    group(root / "pod/box", memory__max="1000\n", memory__current="400\n", memory__stat="anon 1\ninactive_file 50\n")
    group(root / "pod", memory__max="500", memory__current="450")
    group(root)
    limits = control_group_limits(processes(tmp_path, "0::/pod/box\n"), root)
    assert [limit.available_bytes for limit in limits] == [650, 50]
    assert str(root / "pod") in limits[1].name


def test_version_1_and_a_group_that_the_container_does_not_see(tmp_path):
    root = tmp_path / "cgroup"
    group(root / "memory", memory__limit_in_bytes="2000", memory__usage_in_bytes="500")
    proc = processes(tmp_path, "5:cpu,memory:/docker/3f2a\n0::/\n")
    assert [limit.available_bytes for limit in control_group_limits(proc, root)] == [1500]
    group(root / "memory", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="500")
    assert control_group_limits(proc, root) == []


def test_without_control_groups_the_file_system_and_the_machine_count(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_mapping, "PROC", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    3 kB\n")
    assert control_group_limits(tmp_path, tmp_path) == []
    assert tightest_limit(tmp_path).available_bytes == 3 * 1024
    (tmp_path / "meminfo").unlink()
    assert tightest_limit(tmp_path).name == f"file system of {tmp_path}"
