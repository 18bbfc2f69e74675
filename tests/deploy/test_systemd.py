"""The units of deploy/systemd, as systemd itself reads them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvbridge.cli.config import EXIT_CONFIG, EXIT_UNAVAILABLE
from kvbridge.config.limits import BootstrapTimeouts, DaemonTimeouts
from kvbridge.config.schema import RouterTimeouts

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
NAMES = (
    "kvbridge-bootstrap.service",
    "kvbridge-router.service",
    "kvbridge-prefill@prefill-0.service",
    "kvbridge-decode@decode-0.service",
)
MOST_EXPOSURE = 2.5
"""Points out of 10, as `systemd-analyze security` counts. The rest: network, GPUs and network devices, their compilers,
other users' processes and files in shared memory."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree("/usr/lib/systemd/system", tmp_path / "usr/lib/systemd/system", symlinks=True)
    shutil.copytree(UNITS, tmp_path / "etc" / "systemd" / "system")
    program = tmp_path / "opt" / "kvbridge" / "bin" / "kvbridge"
    program.parent.mkdir(parents=True)
    shutil.copy("/bin/true", program)
    return tmp_path


def analyze(*arguments: str) -> str:
    done = subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout + done.stderr


def setting(name: str, unit: str) -> str:
    found = re.findall(rf"^{name}=(.*)$", (UNITS / unit).read_text(), re.MULTILINE)
    assert len(found) == 1, (name, unit, found)
    return found[0]


@pytest.mark.parametrize("name", NAMES)
def test_systemd_understands_every_line(root: Path, name: str):
    assert analyze("verify", f"--root={root}", "--man=no", name) == ""


@pytest.mark.parametrize("name", NAMES)
def test_the_units_are_hardened(root: Path, name: str):
    said = analyze("security", "--offline=yes", f"--root={root}", "--no-pager", name)
    exposure = float(re.search(r"Overall exposure level for .*: ([\d.]+)", said)[1])
    assert exposure <= MOST_EXPOSURE, said


def test_systemd_kills_nothing_that_would_still_have_ended():
    daemon, bootstrap = DaemonTimeouts(), BootstrapTimeouts()
    for role in ("prefill", "decode"):
        limit_s = float(setting("TimeoutStopSec", f"kvbridge-{role}@.service"))
        assert limit_s > daemon.shutdown_rooms_s + daemon.shutdown_close_s
    assert float(setting("TimeoutStopSec", "kvbridge-bootstrap.service")) > bootstrap.shutdown_s
    assert float(setting("TimeoutStopSec", "kvbridge-router.service")) > RouterTimeouts().shutdown_s


def test_systemd_gives_up_where_starting_again_cannot_help_and_nowhere_else():
    common = "kvbridge-.service.d/10-common.conf"
    assert setting("RestartPreventExitStatus", common) == str(EXIT_CONFIG)
    assert setting("StartLimitIntervalSec", common) == "0", "it does not count how often"
    assert EXIT_UNAVAILABLE != EXIT_CONFIG
