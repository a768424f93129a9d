"""CUDA events as a clock (``timing.Clock``)."""

import time

import torch

from measuring.timing import Call

CYCLES = 10_000_000


class Events:
    kind = "CUDA events"

    def __init__(self) -> None:
        self._cycles_per_second = CYCLES
        self._cycles_per_second = CYCLES / min(
            self.seconds(lambda i: torch.cuda._sleep(CYCLES), 1)[0] for _ in range(3)
        )

    def seconds(self, call: Call, calls: int, *, ahead: float = 0.0) -> tuple[float, float]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        if ahead:
            torch.cuda._sleep(int(ahead * self._cycles_per_second))
        asked = time.perf_counter()
        begin.record()
        for i in range(calls):
            call(i)
        end.record()
        host = time.perf_counter() - asked
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e-3, host
