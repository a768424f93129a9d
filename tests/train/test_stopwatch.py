import pytest

from fp8ref.train import stopwatch
from fp8ref.train.stopwatch import Stopwatch


def test_seconds_add_up_by_name(monkeypatch):
    times = iter([0.0, 1.0, 3.0, 4.0, 4.5, 9.0])
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(times))
    watch = Stopwatch()
    with watch("step"):
        pass
    with pytest.raises(ValueError, match="fails"), watch("step"):
        raise ValueError("fails")
    assert watch.seconds == {"step": 2.5}
    assert watch.total == 9.0
