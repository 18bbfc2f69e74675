from __future__ import annotations

from pathlib import Path

from kvbridge.pool.memory import shared_mapping
from kvbridge.pool.memory.shared_mapping import control_group_limits, tightest_limit


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
    group(
        root / "pod" / "box", memory__max="1000\n", memory__current="400\n", memory__stat="anon 1\ninactive_file 50\n"
    )
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
