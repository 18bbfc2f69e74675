"""Containers of manifests as processes: the container's own command, arguments, variables, user, mounts, and no image.

Each container has a mount namespace with the host's folders and the volumes of its pod. All pods are in one network namespace of
their own, each with an address of the loopback network, and names of services are in its hosts file.
"""

import ctypes
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvbridge.processes import ChildProcess, stop_all
from tests.operate.test_chart import ROOT, environment, expanded

ENTRYPOINTS = {"kvbridge": ["kvbridge"]}
"""The entry points of images, by the name of the repository."""
_CLONE_NEWNET = 0x4000_0000
_ROOM = """
set -eu
root=$1 hosts=$2; shift 2
mount -t tmpfs -o mode=755 root "$root"
for each in /*; do
  if [ -L "$each" ]; then cp --archive "$each" "$root/"; continue; fi
  [ -d "$each" ] || continue
  mkdir -p "$root$each"
  case $each in
    /etc) cp --archive /etc/. "$root/etc/" 2>/dev/null || true ;;
    /root) ;;
    *) mount --rbind "$each" "$root$each" ;;
  esac
done
cat "$hosts" >>"$root/etc/hosts"
while [ "$1" != -- ]; do mkdir -p "$root$2"; mount --rbind "$1" "$root$2"; shift 2; done
shift
exec chroot "$root" "$@"
"""


@contextmanager
def own_network() -> Iterator[None]:
    """A network namespace with loopback alone, for this thread and the processes that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open() as before:
        if libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "a network namespace cannot be made")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=10)
            yield
        finally:
            assert libc.setns(before.fileno(), _CLONE_NEWNET) == 0


class Pods:
    """The containers that were started, by pod and name. `programs`: a folder of programs that images have in their PATH."""

    def __init__(self, secret: Path, config_maps: Iterable[Mapping[str, Any]], programs: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvb-pods-", dir="/dev/shm"))
        self.running: dict[tuple[str, str], ChildProcess] = {}
        self.addresses: dict[str, str] = {}
        self._hosts = self.folder / "hosts"
        self._programs, self._secret = programs, secret
        self._maps = {each["metadata"]["name"]: each["data"] for each in config_maps}
        self._hosts.touch()

    def name(self, address: str, *names: str) -> None:
        with self._hosts.open("a") as file:
            file.write(f"{address} {' '.join(names)}\n")

    def start(self, workload: Mapping[str, Any], number: int, address: str) -> None:
        """Start the containers of pod `number` of a workload."""
        pod, spec = f"{workload['metadata']['name']}-{number}", workload["spec"]["template"]["spec"]
        self.addresses[pod] = address
        volumes = {
            each["name"]: self._volume(pod, each, spec["securityContext"]["fsGroup"]) for each in spec["volumes"]
        }
        for container in spec["containers"]:
            self._run(pod, spec["securityContext"] | container["securityContext"], container, volumes)

    def _volume(self, pod: str, volume: Mapping[str, Any], group: int) -> Path:
        path = self.folder / pod / volume["name"]
        path.mkdir(parents=True, exist_ok=True)
        if "secret" in volume:
            items = {item["key"] for item in volume["secret"].get("items", ())}
            for file in self._secret.iterdir():
                if not items or file.name in items:
                    shutil.copy(file, path)
                    (path / file.name).chmod(volume["secret"]["defaultMode"])
        for name, text in self._maps.get(volume.get("configMap", {}).get("name"), {}).items():
            (path / name).write_text(text)
        for each in (path, *path.iterdir()):
            os.chown(each, 0, group)
        if "emptyDir" in volume:
            path.chmod(0o2777)
        return path

    def _run(
        self, pod: str, context: Mapping[str, Any], container: Mapping[str, Any], volumes: Mapping[str, Path]
    ) -> None:
        values = environment(container, pod, pod_ip=self.addresses[pod])
        for entry in container["env"]:
            asked = entry.get("valueFrom", {}).get("secretKeyRef", {})
            if asked.get("name") == "kvbridge-keys":
                values[entry["name"]] = (self._secret / asked["key"]).read_text().strip()
        path = ["/image", str(Path(sys.executable).parent), "/usr/bin", "/bin"]
        values |= {"PATH": ":".join(path), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        image = re.split("[:@]", container["image"].rpartition("/")[2])[0]
        command = [*(container.get("command") or ENTRYPOINTS[image]), *container.get("args", ())]
        places = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        mounts = [part for place, volume in places.items() for part in (str(volume), place)]
        mounts += [str(self._programs), "/image"]
        for needed in {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT}:
            if any(needed.is_relative_to(hidden) for hidden in ("/root", *places)):  # a checkout may be below /tmp
                mounts += [str(needed), str(needed)]
        root = self.folder / pod / f"root-of-{container['name']}"
        root.mkdir()
        user, group = str(context["runAsUser"]), str(context["runAsGroup"])
        groups = str(context["fsGroup"])
        words = ["unshare", "--mount", "bash", "-c", _ROOM, "bash", str(root), str(self._hosts), *mounts, "--"]
        who = [f"--reuid={user}", f"--regid={group}", f"--groups={groups}"]
        words += ["setpriv", *who, "--no-new-privs", "--bounding-set=-all"]
        words += ["env", "-i", *(f"{key}={value}" for key, value in values.items())]
        words += [expanded(word, values) for word in command]
        process = ChildProcess(f"{container['name']} of {pod}", self.folder / f"{pod}.{container['name']}.log")
        self.running[pod, container["name"]] = process
        process.launch(words)

    def kill(self, pod: str) -> None:
        for (of, _), process in self.running.items():
            if of == pod:
                process.kill()

    def logs(self) -> str:
        return "\n".join(f"--- {' '.join(key)}\n{process.log(15)}" for key, process in self.running.items())

    def close(self) -> None:
        stop_all([*self.running.values()], timeout_s=40)
        shutil.rmtree(self.folder, ignore_errors=True)


def program(folder: Path, name: str, *command: str) -> None:
    """Put a program of this name into a folder that stands for an image's PATH."""
    file = folder / name
    file.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    file.chmod(0o755)


def answers(address: str, port: int) -> bool:
    with socket.socket() as asked:
        asked.settimeout(1)
        return asked.connect_ex((address, port)) == 0
