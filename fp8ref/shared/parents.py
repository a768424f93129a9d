"""End processes with the one that started them, however it ends: SIGKILL leaves it no time to end
them itself.
"""

import fcntl
import multiprocessing
import os
import select
import signal


def follow(pipe: int, owner: int) -> None:
    """Let the kernel kill a process when the other end of a pipe is closed, as by the end of the
    process that holds it.

    The process is killed also where it runs code that never returns to Python.
    pipe      a read end to which nothing is written any more.
    owner     a process, or a negative process group.
    """
    if not hasattr(fcntl, "F_SETSIG"):  # Linux alone has it
        return
    fcntl.fcntl(pipe, fcntl.F_SETOWN, owner)
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # closed before
        os.killpg(-owner, signal.SIGKILL) if owner < 0 else os.kill(owner, signal.SIGKILL)


def follow_parent() -> None:
    """End this process of multiprocessing with its parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    follow(parent.sentinel, os.getpid())
