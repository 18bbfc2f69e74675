"""Processes of other users, in a mount namespace where they can enter the folders of the interpreter and of the sources."""

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from kvbridge.engine import DecodeEngine, PrefillEngine

ROOT = Path(__file__).resolve().parents[2]

_SCRIPT = """
set -eu
closed=$1; shift
hidden=$(mktemp -d)
mount -t tmpfs tmpfs "$hidden"
number=0
paths=()
while [ "$1" != -- ]; do
  paths+=("$1"); mkdir "$hidden/$number"; mount --bind "$1" "$hidden/$number"; number=$((number + 1)); shift
done
shift
IFS=:
for folder in $closed; do mount -t tmpfs -o mode=755 tmpfs "$folder"; done
for index in "${!paths[@]}"; do mkdir -p "${paths[$index]}"; mount --bind "$hidden/$index" "${paths[$index]}"; done
umount -l "$hidden"; rmdir "$hidden"
exec "$@"
"""


def as_user(user: int, groups: Iterable[int] = (), *, namespaces: Iterable[str] = ()) -> list[str]:
    """The prefix of a command that runs it as another user without any right. `groups`: the first is its primary one."""
    own, *others = (*groups,) or (user,)
    needed = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT}
    closed = sorted({folder for path in needed if (folder := _first_closed(path)) is not None})
    hidden = [str(path) for path in sorted(needed) if any(path.is_relative_to(folder) for folder in closed)]
    script = ["bash", "-c", _SCRIPT, "bash", ":".join(map(str, closed)), *hidden]
    mounted = ["unshare", "--mount", *namespaces, "--", *script, "--"]
    groups_flag = f"--groups={','.join(map(str, others))}" if others else "--clear-groups"
    rights = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    dropped = ["setpriv", f"--reuid={user}", f"--regid={own}", groups_flag, *rights]
    return [*(mounted if closed or namespaces else ()), *dropped, "--"]


def _first_closed(path: Path) -> Path | None:
    for folder in reversed([path, *path.parents]):
        if not folder.stat().st_mode & 0o001:
            return folder
    return None


def prefill(engine: PrefillEngine, room_id: int, tokens: int) -> None:
    room = engine.begin(room_id, prompt_tokens=tokens)
    for part in room.final_parts(upto=tokens):
        part.write(torch.full(part.shape, part.layer + 1, dtype=torch.uint8))
    room.publish(tokens)
    room.finish()


def decode(engine: DecodeEngine, room_id: int, *, hold: bool) -> None:
    with engine.claim(room_id, timeout_s=30) as room:
        seen = 0
        for part in room.parts():
            read = part.read()
            assert bool((read == part.layer + 1).all()), part
            seen += read.numel()
        assert seen
        if hold:
            print("held", flush=True)
            time.sleep(600)


def main(job: dict) -> None:
    kind = PrefillEngine if job["role"] == "prefill" else DecodeEngine
    with kind.attach(job["runtime_dir"], daemon_user=job["daemon_user"]) as engine:
        if job["role"] == "prefill":
            prefill(engine, job["room"], job["tokens"])
        else:
            decode(engine, job["room"], hold=job["hold"])
    print("done", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
