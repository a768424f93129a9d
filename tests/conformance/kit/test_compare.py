import json

import numpy as np
import pytest

from fp8ref.conformance.kit.compare import (
    Check,
    Report,
    compare_codes,
    compare_scales,
    compare_values,
)
from fp8ref.formats import E4M3FN, E5M2

X = np.array([[1.0, -2.0], [3.0, 4.0]], np.float32)


def test_equal_codes_pass_and_nans_of_any_payload_are_equal():  # C-5
    check = Check(name="l/input/codes/jax")
    sim = np.array([[0x7F, 1], [2, 3]], np.uint8)
    compare_codes(
        check, {"sim": sim, "jax": np.array([[0xFE, 1], [2, 3]], np.uint8)}, "jax", E5M2, X
    )
    assert check.ok
    assert (check.compared, check.equal, check.detail) == (4, 4, "")


def test_a_differing_code_names_everyone_and_the_bits_of_the_input():
    check = Check(name="l/input/codes/jax")
    sim, jax = np.array([[1, 2], [3, 4]], np.uint8), np.array([[1, 2], [3, 0x84]], np.uint8)
    compare_codes(check, {"sim": sim, "jax": jax, "torch": sim}, "jax", E4M3FN, X)
    assert not check.ok
    assert (check.equal, check.worst) == (3, 8)  # from +4 to -4 codes
    for part in (
        "l/input/codes/jax",
        "1 of 4 differ",
        "[1, 1]",
        "sim 0x04",
        "jax 0x84",
        "torch 0x04",
        "0x40800000",
    ):
        assert part in check.detail


def test_scales_are_compared_by_bits():
    check = Check(name="l/input/scale/torch")
    scale = np.array([1.5, np.nan, 0.0], np.float32)
    compare_scales(check, {"sim": scale, "torch": scale.copy()}, "torch")
    assert check.ok
    compare_scales(check, {"sim": np.float32(0.0), "torch": np.float32(-0.0)}, "torch")
    assert not check.ok
    other = Check(name="l/input/scale/torch")
    compare_scales(
        other,
        {"sim": np.float32(448), "torch": np.nextafter(np.float32(448), np.float32(0))},
        "torch",
    )
    assert (other.ok, other.worst) == (False, 1)


def test_shapes_that_differ_fail_by_name():
    check = Check(name="l/input/scale/jax")
    compare_scales(
        check, {"sim": np.ones((4, 1), np.float32), "jax": np.ones((1, 6), np.float32)}, "jax"
    )
    assert not check.ok
    assert check.detail == "l/input/scale/jax: scales of shape (4, 1) in sim, (1, 6) in jax"
    codes = Check(name="l/input/codes/jax")
    compare_codes(
        codes,
        {"sim": np.zeros((2, 2), np.uint8), "jax": np.zeros((4, 1), np.uint8)},
        "jax",
        E4M3FN,
        X,
    )
    assert "codes of shape (2, 2) in sim, (4, 1) in jax" in codes.detail


@pytest.mark.parametrize(
    ("value", "ok"), [(1.0, True), (1.125, True), (1.126, False), (np.nan, False), (np.inf, False)]
)
def test_values_are_held_to_their_bound(value, ok):
    check = Check(name="l/output/value/jax", bound=1.0)
    compare_values(check, np.array([value]), np.array([1.0]), 0.125, names=("jax", "sim"))
    assert check.ok is ok
    assert (check.detail == "") is ok


def test_equal_specials_are_equal():
    check = Check(name="l/output/value/jax", bound=1.0)
    special = np.array([np.nan, np.inf, 0.0])
    compare_values(check, special, special, np.array([np.nan, np.nan, 0.0]), names=("jax", "sim"))
    assert check.ok


def test_a_check_that_compared_nothing_fails():
    assert not Check(name="l/input/codes/jax").ok
    assert not Report().ok


def test_report_adds_up_and_writes_json(tmp_path):
    report = Report()
    for i, equal in enumerate((True, False)):
        check = report.check(f"model.layers.{i}.mlp.up_proj/input/codes/jax")
        check.add(np.array([True, equal]), np.array([0, 3 * (not equal)]), lambda index: "here")
    assert report.check("model.layers.0.mlp.up_proj/input/codes/jax").compared == 2
    [row] = report.table()
    assert (row.name, row.compared, row.equal, row.worst, row.ok) == (
        "layers/input/codes/jax",
        4,
        3,
        3,
        False,
    )
    report.write(tmp_path / "r.json")
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["ok"] is False
    assert [
        set(c) >= {"name", "compared", "equal", "worst", "bound", "ok"} for c in written["checks"]
    ] == [True, True]
    assert [c["ok"] for c in written["checks"]] == [True, False]


def test_print_shows_the_first_difference(capsys):
    report = Report()
    report.check("lm_head/input/codes/jax").add(
        np.array([False]), np.array([1]), lambda index: "codes 0x01, 0x02"
    )
    report.print()
    out = capsys.readouterr().out
    assert "layers/input/codes" in out
    assert "codes 0x01, 0x02" in out
    assert "1 checks, 1 failed" in out
