"""One training at a time in a run directory. The lock ends with its process, however that ends."""

import errno
import fcntl
import os
import platform
from pathlib import Path

from fp8ref.errors import ConfigError

NAME = ".lock"
UNKNOWN = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of file systems that have no locks


class Lock:
    """An advisory lock on a run directory, from ``take`` until ``close``."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def take(self, out: Path) -> bool:
        """Lock a directory that is there. Whether this changed anything: not where the same object has it already.

        Raises:   ConfigError: another process trains there, or nobody can write.
        """
        if self._descriptor is not None:
            return False
        try:
            descriptor = os.open(out / NAME, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ConfigError(
                f"{out} cannot be written ({error.strerror}). Make it writable, or name another directory with --run.out."
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise ConfigError(
                f"{out} is being trained in by {owner or 'another process'}. Wait until that ends, or name another directory with --run.out."
            ) from error
        except OSError as error:
            if error.errno not in UNKNOWN:
                os.close(descriptor)
                raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
        self._descriptor = descriptor
        return True

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
