"""Where a run's time goes, by name: the steps themselves, and everything around them."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """seconds: of each name so far."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._start = time.perf_counter()

    @contextmanager
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
