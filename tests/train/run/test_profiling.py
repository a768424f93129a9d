import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fp8ref.train.run import profiling
from fp8ref.train.run.processes import Alone


def counting(found):
    return SimpleNamespace(peak_memory=lambda: found)


def told(*others):
    """Processes, of which the others say this."""
    return SimpleNamespace(gather=lambda mine: [mine, *others])


def test_a_device_is_asked_first():
    assert profiling.memory(counting(5), Alone()) == {"peak_bytes": 5, "of": "device"}


def test_of_several_processes_the_one_that_took_the_most_counts():
    assert profiling.memory(counting(5), told(9, 3)) == {"peak_bytes": 9, "of": "device"}
    assert profiling.memory(counting(5), told(None)) == {"peak_bytes": 5, "of": "device"}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts what a process takes in /proc")
def test_without_one_the_process_is_and_forgets_what_was_before():
    def hold(megabytes: int) -> int:
        np.ones(megabytes << 17).sum()
        return profiling.memory(counting(None), Alone())["peak_bytes"]

    profiling.begin()
    small = hold(1)
    large = hold(200)
    assert large - small > 100 << 20
    profiling.begin()
    assert hold(1) < large - (100 << 20)


@pytest.mark.parametrize("status", [None, "Name: python\n"])
def test_where_nobody_counts_there_is_none(monkeypatch, tmp_path, status):
    monkeypatch.setattr(profiling, "PROCESS", tmp_path / "absent" if status is None else tmp_path)
    (tmp_path / "status").write_text(status or "")
    profiling.begin()
    assert profiling.memory(counting(None), Alone()) is None


def test_seconds_add_up_by_name(monkeypatch):
    times = iter([0.0, 1.0, 3.0, 4.0, 4.5, 9.0])
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: next(times))
    watch = profiling.Stopwatch()
    with watch("step"):
        pass
    with pytest.raises(ValueError, match="fails"), watch("step"):
        raise ValueError("fails")
    assert watch.seconds == {"step": 2.5}
    assert watch.total == 9.0
