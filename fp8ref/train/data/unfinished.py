"""The hidden directory that ``fp8ref data prepare`` writes in, and what is left of one that was killed (SEMANTICS D-7)."""

import contextlib
import fcntl
import glob
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

LOCK = "lock"  # held by the process that writes, and by nobody once it is gone


@contextlib.contextmanager
def folder(out: Path) -> Iterator[Path]:
    """A new directory beside out, hidden, so that no source finds it; removed whatever happens, short of a kill.

    What killed ones left for the same out is removed first; that of one which still writes is left alone.
    """
    for old in out.parent.glob(f".{glob.escape(out.name)}.{'?' * 8}"):
        with contextlib.suppress(OSError), (old / LOCK).open("rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as made, Path(made, LOCK).open("xb") as lock:
        with contextlib.suppress(OSError):  # on a file system without locks none is ever taken for a killed one's
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(made)
