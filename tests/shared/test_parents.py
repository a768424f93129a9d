"""Processes end with the one that started them, also when SIGKILL ends it."""

import os
import select
import signal
import subprocess
import sys

import pytest

SUPERVISED = """
import sys
from fp8ref.commands import supervision
sys.orig_argv = ["python", "-c", '''
import ctypes, os, subprocess, sys
from fp8ref.commands import supervision
assert supervision.is_child()
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
os.write({writer}, f"{{os.getpid()}} {{inner.pid}}\\\\n".encode())
ctypes.PyDLL(None).sleep(600)  # with the GIL held
''']
import subprocess
popen = subprocess.Popen
subprocess.Popen = lambda *a, pass_fds, **keys: popen(*a, pass_fds=(*pass_fds, {writer}), **keys)
supervision.in_child(600)
"""

RANKS = """
import os, sys
sys.path.insert(0, {folder!r})
import parent_jobs
from fp8ref.crosscheck import process_group
if __name__ == "__main__":
    process_group.run(1, parent_jobs.report_and_sleep, {fifo!r})
"""

POOL = """
import sys
sys.path.insert(0, {folder!r})
import parent_jobs
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from fp8ref.conformance import exhaustive
if __name__ == "__main__":
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=exhaustive._one_thread) as pool:
        pool.submit(parent_jobs.report_and_sleep, {fifo!r}).result()
"""

JOBS = """
import ctypes, os

def report_and_sleep(fifo):
    with open(fifo, "w") as file:
        file.write(f"{os.getpid()}\\n")
    ctypes.PyDLL(None).sleep(600)  # with the GIL held
"""


@pytest.mark.parametrize("kind", ["supervised", "ranks", "pool"])
def test_a_child_ends_with_its_killed_parent(tmp_path, kind):
    (tmp_path / "parent_jobs.py").write_text(JOBS)
    fifo, script = tmp_path / "fifo", tmp_path / "script.py"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR)  # so that no open waits
    text = {"supervised": SUPERVISED, "ranks": RANKS, "pool": POOL}[kind]
    script.write_text(text.format(writer=reader, folder=str(tmp_path), fifo=str(fifo)))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    parent = subprocess.Popen([sys.executable, script], pass_fds=(reader,), env=environment)
    try:
        with os.fdopen(reader) as file:
            pids = [int(pid) for pid in file.readline().split()]
        children = [os.pidfd_open(pid) for pid in pids]
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    try:
        for child in children:
            assert ended(child), "a child goes on without its parent"
    finally:
        for child in children:
            if not ended(child, 0):
                signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)


def ended(child: int, seconds: float = 60) -> bool:
    """Whether a process ended, by its descriptor, which is then readable."""
    return bool(select.select([child], [], [], seconds)[0])
