"""What a quantiser does beyond the tensors that its policy was told by: each planted kernel is right there, and found out elsewhere."""

import planted_kernels as planted
import pytest
import torch

from fp8ref.check.conformance import identify_quantizer
from fp8ref.check.conformance.subject import ConformanceError
from fp8ref.formats import E4M3FN


def asked(function, expect="torchao"):
    return identify_quantizer(function, E4M3FN, name="mine", framework="torch", expect=expect)


def test_what_is_right_everywhere():  # S-16
    found = asked(planted.rows)
    assert found.ok
    said = {f.what: f.said for f in found.findings}
    assert (said["shapes"], said["strides"]) == ("all alike", "all alike")
    assert "transposed, every second column, behind a row: as contiguous" in [f.evidence for f in found.findings]
    by = {f.what: f.value for f in found.findings}
    assert (by["from bfloat16"], by["from float16"]) == ("torchao", "torchao")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (planted.another_in_float16, "(float16 0x"),
        (planted.mean_in_bfloat16, "(bfloat16 0x"),
        (planted.divides, "expected code 0x58 (16)"),
        (planted.compares_for_the_largest, "NaN last in each group as x[0, 127] = nan"),
        (planted.but_the_last_column, "the largest last in each group as x[0, 127] = 4 (float32 0x"),
        (planted.but_the_last_column, "(as without x[0, 127]), expected code 0x72 (160), scale 112 by torchao"),
        (planted.whole_blocks_alone, "(as without x[130, 127])"),
        (planted.up_to_1024_rows, "(as without x[1030, 1151])"),
        (planted.up_to_2048_columns, "of x [7, 8192]"),
        (planted.transposes_squares, "of x [128, 128]"),
        (planted.forgets_strides, "of x [128, 256], transposed in memory"),
        (planted.forgets_an_offset, "of x [128, 256], behind a row in memory"),
    ],
)
def test_what_is_wrong_elsewhere(function, said):  # S-2, S-5, S-6, S-16
    found = asked(function)
    assert not found.ok
    assert not found.identified
    assert "of other tensors it gives something else" in found.message
    assert said in found.message


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (planted.products_in_float16, "rounds to float16 first, but for what is unlike that"),
        (planted.adds_zero, "-0 becomes 0"),
        (planted.nan_of_all, "beside groups of every kind"),
        (planted.another_scale_in_bfloat16, "policy torchao, but for what is unlike that"),
        (planted.one_for_zero, "policy torchao, but an amax of 0 has scale 1"),
        (planted.rolls_scales, "nearest is torchao"),
        (planted.calls_the_inverse_scale, "'scale' of what it returns: got what is a scale_inv, expected a scale (S-1)"),
        (planted.calls_the_scale_inverse, "'scale_inv' of what it returns: got what is a scale, expected a scale_inv (S-1)"),
        (planted.doubles_the_amax, "'amax' of what it returns: got 2, expected 1, the largest magnitude of its group (S-2)"),
    ],
)
def test_what_no_name_has(function, said):  # S-1 to S-6
    for expect in ("torchao", None):
        found = asked(function, expect)
        assert not found.ok
        assert said in found.message + "".join(map(str, found.unlike))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (planted.with_a_workspace(), "mine overwrites what it gave for x torch float32"),
        (planted.one_call_late(), "mine gives for x of 0.5s .* after x of ones, the codes of those"),
    ],
)
def test_what_calls_have_in_common(function, said):
    with pytest.raises(ConformanceError, match=said):
        asked(function)


def test_a_delayed_quantizer_by_its_policy():  # S-11, H-1
    found = asked(planted.delayed(), "te_delayed")
    assert found.ok, found.message
    assert found.found["memory"] == 16
    assert not asked(planted.delayed(), "torchao").ok


def test_what_it_does_not_take_is_said():
    def function(x):
        if x.dtype != torch.float32 or not x.is_contiguous():
            raise TypeError("contiguous float32, please")
        return planted.rows(x)

    found = asked(function)
    assert found.ok
    assert "it takes no bfloat16, no float16" in found.message
    assert next(f for f in found.findings if f.what == "strides").evidence.endswith("it raises for transposed, every second column")


def test_shapes_that_it_does_not_take_are_said():
    def function(x):
        assert x.shape[0] % 16 == 0
        return planted.rows(x)

    found = asked(function)
    assert found.ok
    assert "it raises for [1, 128], [3, 256], [131, 128], [7, 8192], [1031, 1152]" in {f.what: f.evidence for f in found.findings}["shapes"]
