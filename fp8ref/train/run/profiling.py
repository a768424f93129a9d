"""Peak memory and wall-clock time of a run, for its manifest.

Peak memory is the device's, if its framework counts it, and otherwise the process's, from Linux.
"""

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8ref.train.run.processes import Processes
from fp8ref.train.run.trainer import Trainer

PROCESS = Path("/proc/self")  # Linux's directory of information about this process


class Stopwatch:
    """Seconds by name: ``with watch("step"): ...`` adds to ``watch.seconds["step"]``."""

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
        """Seconds since the stopwatch was made."""
        return time.perf_counter() - self._start


def begin() -> None:
    """Reset Linux's peak counter of this process, which may have trained other runs before."""
    with contextlib.suppress(OSError):  # not Linux
        (PROCESS / "clear_refs").write_text("5")


def memory(model: Trainer, processes: Processes) -> dict[str, Any] | None:
    """{"peak_bytes": the largest of all processes, "of": "device" or "process"}; None: unknown."""
    device = model.peak_memory()
    own_peak = _process_memory() if device is None else device
    peaks = [peak for peak in processes.gather(own_peak) if peak is not None]
    of = "process" if device is None else "device"
    return {"peak_bytes": max(peaks), "of": of} if peaks else None


def _process_memory() -> int | None:
    try:
        counted = re.search(r"^VmHWM:\s*(\d+) kB$", (PROCESS / "status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(counted[1]) * 1024 if counted else None
