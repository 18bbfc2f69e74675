"""A newcomer's cluster: a directory that `kvbridge init` wrote, `kvbridge up` on it, and what that printed."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.helpers.cluster import eventually
from tests.helpers.local_servers import held_ports

SAID_S = 90.0
END_S = 60.0
THIS_CHECKOUT = (sys.executable, "-m", "kvbridge")


class TriedCluster:
    def __init__(
        self, folder: Path, kvbridge: Sequence[str] = THIS_CHECKOUT, environment: Mapping[str, str] | None = None
    ):
        self.folder = folder
        self.kvbridge = kvbridge
        self._where = {
            "cwd": folder.parent,
            "env": dict(os.environ if environment is None else environment),
            "text": True,
        }
        held = ExitStack()
        self.ports = dict(zip(("bootstrap", "prefill", "decode"), held.enter_context(held_ports(3)), strict=True))
        weakref.finalize(self, held.close)

    def init(self, *arguments: str) -> str:
        told = self.run("init", str(self.folder), "--one-host", *arguments)
        assert told.returncode == 0, told.stderr
        moved = dict(zip(("7900", "7901", "7902"), map(str, self.ports.values()), strict=True))
        for file in self.folder.glob("*.yaml"):
            file.write_text(re.sub("790[012]", lambda found: moved[found[0]], file.read_text()))
        return told.stdout

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._run([*self.kvbridge, *arguments], SAID_S + END_S)

    def _run(self, command: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, **self._where, capture_output=True, timeout=limit_s, check=False)

    def start(self, *arguments: str, said: Path) -> subprocess.Popen[str]:
        """Start a command that Ctrl-C reaches, though tests may run in the background, where it is ignored."""
        with said.open("w") as output:
            command = ["env", "--default-signal=INT", *self.kvbridge, *arguments]
            return subprocess.Popen(command, **self._where, stdout=output, stderr=subprocess.STDOUT)

    @contextmanager
    def up(self) -> Iterator[subprocess.Popen[str]]:
        with self.start("up", str(self.folder), said=self.folder / "said") as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                process.wait(END_S)

    def url(self, role: str) -> str:
        return f"http://127.0.0.1:{self.ports[role]}"

    def said(self, text: str) -> str:
        found = self.folder / "said"
        try:
            eventually(text, lambda: text in found.read_text(), timeout_s=SAID_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; said:\n{found.read_text()}") from None
        return found.read_text()

    def move_a_request(self) -> None:
        """Do in a shell what `up` says to try, and check what decode's engine has read."""
        steps = re.search(r"^  room=.*wait$", self.said("Ctrl-C drains"), re.MULTILINE | re.DOTALL)
        assert steps
        done = self._run(["bash", "-ec", steps[0]], SAID_S)
        assert done.stdout.startswith("swa_kv layer 5 (128, 104) {5}"), (done.stdout, done.stderr)


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder with a path as short as those of sockets have to be."""
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as path:
        yield Path(path)
