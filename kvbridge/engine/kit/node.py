"""The node beside an engine: a child process with an interpreter of its own, or a daemon that an operator runs.

A thread starts the child, and starts another one after a growing pause whenever it ends. The kernel ends the child with this thread
(`processes.end_with_parent`), which lives until `close`. The child logs to this process's standard error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from pathlib import Path

import structlog

from kvbridge.api.endpoint_file import DaemonEndpoint, read_endpoint
from kvbridge.core.errors import ConfigError, ConflictError, NotReadyError, PeerError
from kvbridge.engine.kit.node_files import NodePlace, NodePlan, remove_directory, remove_orphans, write_node
from kvbridge.processes import FIRST_PAUSE_S, RestartPause, child_environment, how_it_ended, module_command

log = structlog.get_logger(__name__)

START_S = 60.0
"""Longest wait for a node to listen."""
LOOK_S = 0.02
DRAIN_S, KILL_S = 2.0, 5.0
"""Limits of `close`: first rooms may end; after a second signal, endpoints close; then the node is killed."""
LAST_ENDS = 16
"""Remembered ends of former nodes."""
_STANDARD_ERROR = 2


def open_node(plan: NodePlan, *, timeout_s: float = START_S) -> Node:
    """Start the node of a plan, or find the node that an operator runs, and wait until it listens.

    Raises ConfigError and UnsupportedError for its settings, ConflictError when another engine of this id has a node, PeerError
    when the node ends instead, NotReadyError, with the reason, when it does not listen in time.
    """
    deadline_s = time.monotonic() + timeout_s
    operated = plan.place.operated
    node = OperatedNode(plan.place, operated) if operated is not None else _new_process(plan, deadline_s)
    try:
        while True:
            try:
                node.endpoint()
            except NotReadyError:
                if time.monotonic() >= deadline_s:
                    raise
            else:
                return node
            time.sleep(LOOK_S)
    except BaseException:
        node.close()
        raise


def _new_process(plan: NodePlan, deadline_s: float) -> NodeProcess:
    """Start the node as soon as the node of an engine of the same id that has just ended is gone."""
    place = plan.place
    while True:
        try:
            return NodeProcess(plan)
        except ConflictError as error:
            if time.monotonic() >= deadline_s:
                raise ConflictError(
                    f"a {place.role} node of engine id '{place.engine_id}' runs on this host already ({error}); give each "
                    f"{place.product.name} an engine_id of its own ({place.product.id_option}), or stop the other one"
                ) from error
        time.sleep(FIRST_PAUSE_S)


class OperatedNode:
    """A node that an operator runs."""

    def __init__(self, place: NodePlace, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        self._place = place

    def endpoint(self) -> DaemonEndpoint:
        """As `NodeProcess.endpoint`. Raises ConfigError when another role's daemon is there."""
        role, engine = self._place.role, self._place.product.name
        found = read_endpoint(self.runtime_dir)
        if found is None:
            raise NotReadyError(
                f"no {role} node listens in {self.runtime_dir} (runtime_dir): start one there, or take runtime_dir out and "
                f"{engine} starts its own"
            )
        if found.role != role:
            raise ConfigError(
                f"the node in {self.runtime_dir} (runtime_dir) is of role {found.role}; this {engine} needs one of role {role}"
            )
        return found

    def close(self) -> None:
        """Leave the node to its operator."""


class NodeProcess:
    """A node as a child of this process."""

    def __init__(self, plan: NodePlan) -> None:
        """Raises as `write_node` does."""
        config, self._config_file, self._owned = write_node(plan)
        self.runtime_dir = config.runtime_dir
        remove_orphans(config.runtime_dir.parent, plan.place.product)
        self._role = plan.place.role
        self._engine = plan.place.product.name
        self._changing = threading.Lock()
        """Held while a child is started or signalled, so that none is started after `close`."""
        self._closing = threading.Event()
        self._has_listened = False
        self._process: subprocess.Popen[bytes] | None = None
        self.ends: deque[str] = deque(maxlen=LAST_ENDS)
        """Unrequested ends of children, in words."""
        self._thread = threading.Thread(target=self._keep, name=f"kvbridge-{self._role}-node", daemon=True)
        self._thread.start()

    def endpoint(self) -> DaemonEndpoint:
        """Return its name, and for prefill the control address and key that decode is told. Does not wait.

        Raises NotReadyError, with the reason, while it cannot be reached, and PeerError when the first child has ended instead of
        listening.
        """
        found, process = read_endpoint(self.runtime_dir), self._process
        if found is not None and process is not None and found.pid == process.pid and process.returncode is None:
            self._has_listened = True
            return found
        if self.ends and not self._has_listened:
            raise PeerError(
                f"the {self._role} node of this {self._engine} could not start: {self.ends[0]}; its log, above, says why. Try it "
                f"by itself: kvbridge {self._role} --config {self._config_file}"
            )
        reason = f"has ended ({self.ends[-1]}) and is being started again" if self.ends else "is being started"
        raise NotReadyError(
            f"the {self._role} node of this {self._engine} {reason}; its log is among the lines of this process"
        )

    def _keep(self) -> None:
        """Keep a child running until `close`: the thread."""
        pause = RestartPause()
        while not self._closing.is_set():
            begun_s = time.monotonic()
            try:
                how = self._run()
            except Exception as error:  # without this thread no node would be started any more
                log.exception("node_not_followed", node_role=self._role.value)
                how = f"it could not be followed: {type(error).__name__}: {error}"
            if self._closing.is_set():
                return
            self.ends.append(how)
            pause_s = pause.after(time.monotonic() - begun_s)
            log.error("node_gone", node_role=self._role.value, reason=how, again_in_s=pause_s)
            self._closing.wait(pause_s)

    def _run(self) -> str:
        """Start a child and wait for its end. Returns why it ended, or why it could not start."""
        command = module_command("kvbridge", self._role.value, "--config", str(self._config_file))
        with self._changing:
            if self._closing.is_set():
                return ""
            try:
                process = self._process = subprocess.Popen(
                    [*command, "--parent", str(os.getpid())],
                    stdin=subprocess.PIPE,  # its end is the child's, too
                    stdout=_STANDARD_ERROR,
                    env=child_environment(os.environ),
                    start_new_session=True,  # Ctrl-C is the engine's, which ends us
                )
            except OSError as error:  # descriptors, processes or memory are short, perhaps for a moment only
                return f"it could not be started: {error}"
        try:
            return how_it_ended(process.wait())
        finally:
            assert process.stdin is not None
            process.stdin.close()

    def close(self) -> None:
        """End the child. Rooms under way may end within DRAIN_S; its directory is removed. Harmless when it has ended."""
        with self._changing:
            self._closing.set()
        self._signal(signal.SIGCONT)  # a stopped one would not hear the rest
        for number, limit_s in ((signal.SIGTERM, DRAIN_S), (signal.SIGTERM, KILL_S), (signal.SIGKILL, KILL_S)):
            self._signal(number)
            self._thread.join(limit_s)
            if not self._thread.is_alive():
                break
        if self._has_listened and not self._owned.closed:  # else somebody may want to try its configuration by hand
            with contextlib.suppress(OSError):
                remove_directory(self.runtime_dir)
        self._owned.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)


Node = NodeProcess | OperatedNode
