"""The blocks of a page of the documentation, as its readers meet them.

Owns: what a block is and what a mark before it says. Must not know: how a block is run.

- A block of ``sh`` or ``python`` is run. One without a language, and ``json``, is what the ``sh`` block before it printed.
- ``yaml`` is a part of a configuration, or a file: ``--8<-- "FILE"``. ``text`` is a drawing.
- A comment in HTML before a block, which readers do not see, is its mark: ``<!-- not run: REASON -->``, or
  ``<!-- keeps running -->`` for one whose last line goes on until the page ends, as in a terminal of its own; Ctrl-C ends it.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "kvbridge" / "ARCHITECTURE.md",
        ROOT / "kvbridge" / "THREAT_MODEL.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
    ]
)
KEEPS_RUNNING = "keeps running"
NOT_RUN = "not run: "
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n+)?^(?P<fence>```+)(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
_INCLUDED = re.compile(r'^--8<-- "([^":]+)"$')


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    mark: str
    """The text of the comment before it; empty when there is none."""

    @property
    def where(self) -> str:
        return f"{name(self.page)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in {"sh", "python"} and self.reason is None and self.included is None

    @property
    def reason(self) -> str | None:
        return self.mark.removeprefix(NOT_RUN) if self.mark.startswith(NOT_RUN) else None

    @property
    def included(self) -> Path | None:
        found = _INCLUDED.match(self.text.strip())
        return ROOT / found[1] if found else None


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page, text.count("\n", 0, found.start("fence")) + 1, found["language"], found["text"], found["mark"] or ""
        )
        for found in _BLOCK.finditer(text)
    ]


def spans(page: Path) -> list[str]:
    """Return the words in backticks, on one line each."""
    prose = _BLOCK.sub("", page.read_text())
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]


ADDRESSES = ("10.0.0.1", "10.0.0.2")
HOSTS = ("bootstrap", "prefill-0", "decode-0")
SEEN = ("configs", "deploy", "docker", "examples", "tests")
"""The files of the repository in a reader's folder: they stand in a checkout."""
MARK = "\x1e"
STEP_S = 120
"""For one thing to begin, or to end."""
CURL = "fail-with-body\nsilent\nshow-error\nmax-time = 45\n"
"""An answer that is an error fails the command."""
CLUSTER = """
kvbridge init cluster --one-host --complete
sed --in-place 's/room_keep_s: .*/room_keep_s: 3600/' cluster/*.yaml  # pages may take long
keep cluster kvbridge up cluster
kvbridge wait cluster --timeout 120
export BOOTSTRAP=http://127.0.0.1:7900 DAEMON=http://127.0.0.1:7902
export ROOM=$(curl -X POST $BOOTSTRAP/v1/requests -H 'content-type: application/json' -d '{"prompt_tokens": 1000}' \
  | python -c 'import json, sys; print(json.load(sys.stdin)["room"])')
python examples/decode_engine.py cluster/run/decode $ROOM &
engine=$!
python examples/prefill_engine.py cluster/run/prefill $ROOM 1000
wait $engine
"""

_WORLD = """
set -eE
trap 'echo "failed with exit code $?: $BASH_COMMAND" >&2' ERR
home=$PWD
ip link set lo up
for address in {addresses}; do ip address add $address/32 dev lo; done
mount -t tmpfs shm /dev/shm
mkdir etc && mount -t tmpfs etc etc && cp --archive /etc/. etc/ 2>unreadable || true
mount --bind etc /etc
echo "127.0.0.1 {hosts}" >> /etc/hosts
mkdir -p /etc/kvbridge

keep() {{  # NAME COMMAND: run it in a terminal of its own, where it goes on
  local name=$1; shift
  (setsid env --default-signal=INT bash -c "trap : INT; $* ; echo \\$? > $home/$name.rc" > $home/$name.log 2>&1 &
   echo $! > $home/$name.pid)
}}
spoken() {{  # NAME: who follows a page goes on in another terminal when this one has said something
  for _ in $(seq {tenths}); do [ -s $home/$1.log ] && break; sleep 0.1; done
}}
interrupt() {{  # NAME: Ctrl-C there; it has to end in peace
  kill -INT -- -$(cat $home/$1.pid)
  for _ in $(seq {tenths}); do [ -s $home/$1.rc ] && break; sleep 0.1; done
  if [ "$(cat $home/$1.rc)" != 0 ]; then echo "after Ctrl-C, exit code $(cat $home/$1.rc):"; tail -n 30 $home/$1.log; return 1; fi
}}
"""


def follow(pages: Sequence[Sequence[Block]], home: Path, *, cluster: bool, limit_s: float) -> dict[Block, str]:
    """Run blocks of pages, each page in a fresh folder, and return what each block printed. Fails the test when a command fails.

    cluster: have one running, in each page's folder as `cluster`, whose address is in $BOOTSTRAP, that of its decode node in
    $DAEMON, and a room that has crossed in $ROOM.
    """
    if not all(map(shutil.which, ("unshare", "ip", "curl"))):
        pytest.skip("needs unshare (util-linux), ip (iproute2) and curl")
    if subprocess.run([*_namespaces(), "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make namespaces")
    every = [block for page in pages for block in page]
    (home / "script").write_text(_script(pages, home, cluster=cluster))
    (home / ".curlrc").write_text(CURL)
    said = home / "said"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [*_namespaces(), "bash", "script"],
            cwd=home,
            env=_environment(home),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()
            process.wait()
    text = said.read_text(errors="replace")
    _, *parts = text.split(MARK)
    if code != 0:
        last = every[min(len(parts), len(every)) - 1].where if parts and every else "before the first block"
        what = f"exit code {code}" if code is not None else f"not done after {limit_s:.0f} s"
        pytest.fail(f"{last}: {what}\n{text[-4000:]}", pytrace=False)
    return {block: part.partition("\n")[2] for block, part in zip(every, parts, strict=True)}


def _namespaces() -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]


def _environment(home: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KVBRIDGE_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    sources = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, "PATH": path, "HOME": str(home), "PYTHONPATH": sources, "COLUMNS": "120"}


def _script(pages: Sequence[Sequence[Block]], home: Path, *, cluster: bool) -> str:
    lines = [_WORLD.format(addresses=" ".join(ADDRESSES), hosts=" ".join(HOSTS), tenths=10 * STEP_S)]
    lines += [f"ln -s {ROOT}/examples .", CLUSTER] if cluster else []
    number = 0
    for page in pages:
        folder = shlex.quote(str(home / name(page[0].page).replace("/", "-"))) if page else ""
        lines += [f"mkdir {folder} && cd {folder}", *(f"ln -s {ROOT}/{each} ." for each in SEEN)]
        lines += [f"ln -s {home}/cluster cluster"] if cluster else []
        kept = []
        for block in page:
            lines.append(f"printf '{MARK}%s\\n' {shlex.quote(block.where)}")
            if block.mark == KEEPS_RUNNING:
                *first, last = block.text.splitlines()
                kept.append(f"block-{number}")
                lines += [*first, f"keep {kept[-1]} {shlex.quote(last)}", f"spoken {kept[-1]}"]
            elif block.language == "python":
                lines.append(f"python - <<'END OF BLOCK'\n{block.text}END OF BLOCK")
            else:
                lines.append(block.text)
            number += 1
        lines += [f"interrupt {each}" for each in reversed(kept)]
    lines += ["interrupt cluster"] if cluster else []
    return "\n".join(lines) + "\n"
