"""Run a command that calls somebody's function in a child: no end of it passes for a verdict.

A function may end its process, hang, or raise what is no Exception. The parent starts the same
command again and waits for the exit code that the child reports after its verdict; without one it
never ends with 0. The child ends with the parent.
"""

import contextlib
import math
import os
import signal
import subprocess
import sys

from fp8ref.shared import parents as parent_process
from fp8ref.shared.arguments import Parser

__all__ = ["in_child", "is_child", "report"]

VARIABLE = "FP8REF_VERDICT"
"""Environment names of a child's pipes: it reports to one; its parent never writes to the other."""

# not for processes that the function starts
_pipe, _parent = map(int, os.environ.pop(VARIABLE, "-1 -1").split())
if _parent >= 0:
    parent_process.follow(_parent, -os.getpgrp())


def add_timeout(command: Parser) -> None:
    """Add ``--timeout``; a command that has it runs in a child."""
    command.option("--timeout", "SECONDS", "stop a function that does not return", 3600.0)


def is_child() -> bool:
    """Whether this process is a child that reports its exit code."""
    return _pipe >= 0


def report(code: int) -> None:
    """Report the exit code of a finished command to the parent, if there is one, and leave.

    A thread that the function left behind would keep the process.
    """
    if _pipe >= 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(_pipe, bytes([code]))
        os._exit(code)


def in_child(timeout: float) -> int:
    """Run this process's command line in a child, and return the exit code that it reports.

    Raises:   ValueError: a timeout that is not positive and finite; a child that does not end in
              time, or ends without a verdict.
    """
    if not 0 < timeout < math.inf:
        raise ValueError(f"--timeout is a number of seconds above 0; got {timeout:g}.")
    reader, writer = os.pipe()
    parent, held = os.pipe()  # the kernel closes the second end with this process
    os.set_blocking(reader, False)  # processes that the function started may keep the pipe open
    child = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        env=os.environ | {VARIABLE: f"{writer} {parent}"},
        pass_fds=(writer, parent),
        process_group=0,
    )
    ended = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        os.close(writer)
        child.wait(timeout)
        with contextlib.suppress(BlockingIOError):
            if verdict := os.read(reader, 1):
                return verdict[0]
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"no verdict within --timeout {timeout:g} seconds: the function may hang. Mend it, "
            "or allow more time."
        ) from None
    finally:
        signal.signal(signal.SIGTERM, ended)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # with the processes that the function started
        child.wait()
        for end in (reader, parent, held):
            os.close(end)
    code = child.returncode
    cause = f"signal {-code}" if code < 0 else f"exit code {code}"
    raise ValueError(
        f"the function ended the process ({cause}), and there is no verdict. Let it return."
    )
