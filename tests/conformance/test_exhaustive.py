import numpy as np
import pytest

from fp8ref.conformance import exhaustive
from fp8ref.conformance.certify import Certificate
from fp8ref.conformance.exhaustive import Task, examine
from fp8ref.conformance.libraries import profiles as libraries
from fp8ref.conformance.libraries.profiles import Function
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim.quantize import cast


def test_a_wrong_rounding_is_a_failure_that_names_an_input(monkeypatch):
    def to_odd(x):
        return cast.encode(x, E4M3FN, rounding="to_odd", saturate=False)

    monkeypatch.setattr(
        libraries, "casts", lambda fmt: {"wrong": Function(library="wrong", fmt=fmt, run=to_odd)}
    )
    tally = examine(Task(kind="cast", fmt="e4m3fn", special=True))
    certificate = Certificate(exhaustive=False, tallies={("e4m3fn", "cast"): tally})
    report = certificate.report()
    assert not report.ok
    (failure,) = report.failures
    assert 0 < failure.equal < failure.compared
    bits = np.uint32(int(failure.detail.rpartition("0x")[2].rstrip(")"), 16))
    assert to_odd(bits.view(np.float32)) != cast.encode(
        bits.view(np.float32), E4M3FN, saturate=False
    )


@pytest.mark.parametrize("amax", [1.0, 0.0, np.inf, np.nan])
def test_a_wrong_scale_is_a_failure(monkeypatch, amax):
    def one_ulp_off(values):
        from fp8ref.sim.quantize import scales

        made = scales.scale_from_amax(values, E5M2, "torchao")
        hit = (values == amax) | (np.isnan(values) & np.isnan(amax))
        return np.where(hit, np.float32(3), made).astype(np.float32)

    monkeypatch.setattr(
        libraries,
        "scales",
        lambda fmt, policy: {"wrong": Function(library="wrong", fmt=fmt, run=one_ulp_off)},
    )
    tally = examine(Task(kind="torchao", fmt="e5m2", special=True))
    report = Certificate(exhaustive=False, tallies={("e5m2", "torchao"): tally}).report()
    assert not report.ok
    assert "found" in report.failures[0].detail


def test_classes_of_differences_are_counted(monkeypatch):
    """Runs of neighbors, alternating and repeated: 6 inputs of which every other one is wrong in
    one of two ways.
    """
    bits = np.full(6, 1.0, np.float32).view(np.uint32)
    good = int(cast.encode(np.float32([1.0]), E4M3FN)[0])
    codes = np.uint8([good, 1, 2, 2, good, 1])
    monkeypatch.setattr(
        libraries,
        "casts",
        lambda fmt: {
            "wrong": Function(library="wrong", fmt=fmt, run=lambda x: codes, saturates=True)
        },
    )
    tally = exhaustive._examine_casts(bits, E4M3FN)
    assert tally.compared == {("wrong", "in range"): 6}
    assert tally.differ == {
        ("wrong", "in range", f"0x{good:02X}", "0x01"): 2,
        ("wrong", "in range", f"0x{good:02X}", "0x02"): 2,
    }


@pytest.mark.slow
def test_processes_share_the_work_and_change_nothing():
    tasks = [
        Task(kind="cast", fmt="e5m2", begin=i << 30, end=(i << 30) + 9999) for i in range(3)
    ] + [Task(kind="torchao", fmt="e4m3fn", begin=1 << 29, end=(1 << 29) + 5000)]
    alone, shared = (list(exhaustive.run(tasks, workers)) for workers in (1, 2))
    assert alone == shared


def test_pieces_are_all_of_the_bits(monkeypatch):
    monkeypatch.setattr(exhaustive, "PIECE", 8)
    assert [p.tolist() for p in exhaustive.pieces(3, 20)] == [
        list(range(3, 11)),
        list(range(11, 19)),
        [19],
    ]
    assert [p.tolist() for p in exhaustive.pieces(0, 30, stride=3)] == [
        [0, 3, 6, 9, 12, 15, 18, 21],
        [24, 27],
    ]
    (last,) = exhaustive.pieces((1 << 32) - 2, 1 << 32)
    assert last.tolist() == [0xFFFFFFFE, 0xFFFFFFFF]


def test_the_simplest_difference_of_all_pieces_is_described(monkeypatch):
    monkeypatch.setattr(exhaustive, "PIECE", 1 << 10)

    def differing(x):
        return x == x, lambda at: float(x[at])

    assert exhaustive.simplest_difference(differing, inputs=1 << 12) == (1 << 12, 0.0)
    assert exhaustive.simplest_difference(lambda x: (x != x, float), inputs=1 << 12) == (0, None)
    wrong = np.uint32([0x333, 0x800]).view(np.float32)  # of 0x800 one bit is set

    def two(x):
        return np.isin(x, wrong), lambda at: hex(int(x[at : at + 1].view(np.uint32)[0]))

    assert exhaustive.simplest_difference(two, inputs=1 << 12) == (2, "0x800")
