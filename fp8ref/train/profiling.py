"""How much memory a run took at most: of a device, where its framework counts that, else of the process, as Linux counts it."""

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from fp8ref.train.processes import Processes

PROCESS = Path("/proc/self")


class Stopwatch:
    """seconds: of each name so far."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        before = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - before

    @property
    def total(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._start


class Counts(Protocol):
    """A trainer; ``peak_memory`` is None where its devices do not count."""

    def peak_memory(self) -> int | None: ...


def begin() -> None:
    """Forget what this process took before; it may have trained other runs."""
    with contextlib.suppress(OSError):  # no Linux
        (PROCESS / "clear_refs").write_text("5")


def memory(model: Counts, processes: Processes) -> dict[str, Any] | None:
    """{"peak_bytes": of the device or process that took the most, "of": "device" or "process"}; None where nobody counts."""
    device = model.peak_memory()
    found = _of_process() if device is None else device
    told = [peak for peak in processes.gather(found) if peak is not None]
    return {"peak_bytes": max(told), "of": "process" if device is None else "device"} if told else None


def _of_process() -> int | None:
    try:
        counted = re.search(r"^VmHWM:\s*(\d+) kB$", (PROCESS / "status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(counted[1]) * 1024 if counted else None
