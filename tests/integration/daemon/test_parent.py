"""A daemon that another program has started ends with it, by each of two ways alone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from kvbridge.daemon.parent import EXIT_ORPHANED

LIMIT_S = 60.0
CHILD = (
    "import sys, time; from kvbridge.daemon.parent import end_with_parent\n"
    "end_with_parent(int(sys.argv[1])); print('bound', flush=True); time.sleep(600)"
)
PARENT = (
    "import os, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())])\n"
    "print(child.pid, flush=True); time.sleep(600)"
)


def test_the_end_of_its_input_ends_it() -> None:
    command = [sys.executable, "-c", CHILD, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("whatever is said")
            child.stdin.flush()
            assert child.stdout.readline() == "bound\n"
            child.stdin.close()
            assert child.wait(LIMIT_S) == -signal.SIGTERM
        finally:
            child.kill()


def test_the_end_of_its_parent_ends_it_while_somebody_still_holds_the_pipe() -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdin=reading, stdout=subprocess.PIPE, text=True) as parent:
        os.close(reading)
        try:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            process = os.pidfd_open(child)
            assert parent.stdout.readline() == "bound\n"  # the child writes to the same pipe
            parent.kill()
            ended, _, _ = select.select([process], [], [], LIMIT_S)
            os.close(process)
            assert ended
        finally:
            parent.kill()
            os.close(writing)  # ends the child whatever happened


def test_one_whose_parent_is_gone_already_does_not_begin() -> None:
    command = [sys.executable, "-c", CHILD, str(os.getppid())]
    child = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False)
    assert child.returncode == EXIT_ORPHANED
