"""Compile kernels once worth it; keep them on disk, named by sums of all that they depend on.

numba's own cache has two faults. It knows a kernel by its own file, and not by the files of what it
calls. And it numbers its files: two processes that compile two kernels of one function at the same
time may take one number, and the next process is then given one kernel for the other, without an
error (numba 0.68.1, core/caching.py, IndexDataCacheFile.save).
"""

import contextlib
import functools
import hashlib
import importlib.resources
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile


@functools.cache
def sources() -> str:
    """A sum of the kernels' sources and of philox.py, taken once a process."""
    package = importlib.resources.files("fp8ref.sim")
    kernels = sorted(
        (f for f in package.joinpath("kernels").iterdir() if f.name.endswith(".py")),
        key=lambda f: f.name,
    )
    return hashlib.sha256(
        b"".join(f.read_bytes() for f in (*kernels, package.joinpath("philox.py")))
    ).hexdigest()


def compiled(function: Callable) -> Callable:
    """Compile at the first call for argument types, and keep it on disk if possible."""
    # Without the wrapper for C a kernel of a few loops compiles in three quarters of the time.
    kernel = numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function)
    # numba found no such folder: every process compiles for itself
    with contextlib.suppress(RuntimeError):
        kernel._cache = _Cache(function)
    return kernel


ELEMENTS, PRODUCTS = 1 << 18, 1 << 22
"""The work that plain twins do before a kernel is compiled: elements that are cast, and products
that are summed. Either takes less than 0.1 s; compiling, or loading the first kernel, takes longer.
"""

# by kernel: the work that its plain twin did in this process
_done: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()


def worth(kernel: Any, work: int, budget: int) -> bool:
    """Whether to call a kernel for this work, and not its plain twin, which gives the same bits: it
    is compiled in this process, or the twin would have done more than the budget in its place.

    The environment variable FP8REF_COMPILE=always compiles at the first call.
    """
    if kernel.overloads or os.environ.get("FP8REF_COMPILE") == "always":
        return True
    done = _done.get(kernel, 0) + work
    if done > budget:
        return True
    _done[kernel] = done
    return False


class _Cache(FunctionCache):
    """numba's cache of a function, one file per kernel."""

    def __init__(self, function: Callable) -> None:
        super().__init__(function)
        own = self._impl.locator.get_source_stamp()
        self._cache_file = _Files(
            self._cache_path,
            self._impl.filename_base,
            hashlib.sha256(f"{own} {sources()}".encode()).hexdigest(),
        )


class _Files(IndexDataCacheFile):
    """Kernel files; names hash the sources, numba's version and key (types, CPU, bytecode)."""

    def save(self, key, data) -> None:
        """Keep a kernel, and remove those of other sources.

        One that cannot be written is not kept.
        """
        with contextlib.suppress(OSError):
            self._save_data(self._name(key), data)
            fresh = f"{self._base}.{self._source_stamp[:12]}."
            folder = Path(self._cache_path)
            for file in os.listdir(folder):
                if file.startswith(f"{self._base}.") and not file.startswith(fresh):
                    (folder / file).unlink(missing_ok=True)

    def load(self, key):
        """A kernel that was kept; None if none was."""
        with contextlib.suppress(FileNotFoundError):
            return self._load_data(self._name(key))
        return None

    def flush(self) -> None:
        """Remove the function's kernels."""
        for file in os.listdir(self._cache_path):
            if file.startswith(f"{self._base}."):
                (Path(self._cache_path) / file).unlink(missing_ok=True)

    @property
    def _base(self) -> str:
        return self._index_name.removesuffix(".nbi")

    def _name(self, key) -> str:
        key_hash = hashlib.sha256(repr((self._version, key)).encode()).hexdigest()
        return f"{self._base}.{self._source_stamp[:12]}.{key_hash[:32]}.nbc"
