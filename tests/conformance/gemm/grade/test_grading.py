"""Planted GEMMs are graded, and the fault of each is named (spec B-14)."""

import dataclasses
import json

import numpy as np
import pytest
from helpers.gemm.graded_gemms import PLANTED, correct, narrow, to_bfloat16, values, without

from fp8ref.conformance.gemm import ScaledGemm, grade_gemm, named, require_gemm, wrap
from fp8ref.conformance.gemm.grade import grading, stimuli
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2
from fp8ref.sim.gemm import gemm


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_gemm(name):  # B-1, B-14
    planted = PLANTED[name]
    grade = grade_gemm(planted.function, **planted.options)
    assert grade.verdict == planted.verdict, grade.message
    assert [planted.cause in cause.name for cause in grade.causes] == [True] * bool(
        planted.cause
    ), grade.message
    assert grade.ok == (planted.verdict == "right")


@pytest.mark.grid(4)
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("library", ["torch-scaled-mm", "torch-rowwise", "jax-dot"])
def test_a_gemm_of_a_library_is_right(library, out_dtype):
    pytest.importorskip(library.partition("-")[0])
    if library == "torch-rowwise" and out_dtype != "bfloat16":
        pytest.skip("it returns bfloat16")
    # torch's on a CPU without instructions for FP8 takes a second for 15 million products
    shape = (64, 80, 1056) if library == "jax-dot" else (32, 48, 544)
    grade = grade_gemm(named(library, out_dtype=out_dtype), shapes=[shape])
    assert grade.verdict == "right", grade.message
    assert not [cause for cause in grade.causes if cause.severity != "right"]


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torch-scaled-mm", "torch-rowwise"])
def test_a_gemm_of_torch_is_right_for_a_longer_k(library):
    grade = grade_gemm(named(library, out_dtype="bfloat16"), shapes=[(64, 80, 1056)])
    assert grade.verdict == "right", grade.message
    assert not [cause for cause in grade.causes if cause.severity != "right"]


def test_torchs_matmul_in_bfloat16_rounds_after_each_scale():
    """Scales of torch's matrices in bfloat16: three roundings, the worst of which leaves B-1's
    bound.
    """
    pytest.importorskip("torch")

    def function(a, b, scale_a, scale_b):
        return (a.bfloat16() @ b.bfloat16().mT) * scale_a * scale_b

    grade = grade_gemm(function, framework="torch", shapes=[(64, 64, 256)])
    assert grade.verdict == "imprecise"
    assert [cause.name for cause in grade.causes] == [
        "double rounding: the sum and each product with a scale are rounded to the output dtype"
    ]


def test_a_plan_in_the_place_of_the_bound():
    """hopper_fast is outside of B-1's bound of the exact sum, and is required by name."""
    plain = ScaledGemm(
        name="fast", function=lambda a, b: gemm.matmul(a, b, accumulate="hopper_fast")
    )
    assert require_gemm(plain, accumulate="hopper_fast", shapes=[(32, 32, 512)]).equal == 32 * 32
    with pytest.raises(
        AssertionError,
        match=r"fast is not 'hopper_slow': \d+ of 1,024 random results have its bits",
    ):
        require_gemm(plain, accumulate="hopper_slow", shapes=[(32, 32, 512)])


@pytest.mark.slow
def test_an_error_says_the_cause_once_with_the_first_result():
    with pytest.raises(AssertionError) as raised:
        require_gemm(wrap(without(lambda k: slice(k - 32, k)), name="mine"))
    message = str(raised.value)
    assert message.startswith("mine is wrong: ")
    assert message.count("the last 32 of K dropped") == 1
    assert "got 0, expected 1 (G-2)" in message
    assert (
        "tested: [96, 96] K = 96, [64, 80] K = 1056, [128, 128] K = 4096, [272, 272] K = 96; "
        "e4m3fn x e4m3fn to float32" in message
    )
    assert "not tested: " in message


def test_what_was_refused_is_not_asked_in_silence():
    def function(a, b):
        if a.codes.shape[1] % 128:
            raise ValueError("K is a multiple of 128")
        return correct(a, b)

    grade = grade_gemm(function)
    assert list(grade.measured) == [(128, 128, 4096)]
    assert set(grade.refused) == {(96, 96, 96), (64, 80, 1056), (272, 272, 96)}
    assert any("K = 96, for which it raised" in one for one in grade.unasked)


def test_a_gemm_that_drops_the_end_of_a_ragged_k():
    """Whole tiles of 64 are right: only the ragged length shows it."""

    def function(a, b):
        whole = a.codes.shape[1] // 64 * 64
        return values(a)[:, :whole] @ values(b)[:, :whole].T * a.scale_inv * b.scale_inv.T

    assert grade_gemm(function, shapes=[(64, 64, 4096)]).ok
    grade = grade_gemm(function)
    assert [cause.name for cause in grade.causes] == ["the last 32 of K dropped"]


@pytest.mark.grid(2)
@pytest.mark.parametrize("formats", [(E5M2, E4M3FN), (E4M3FN, E5M2), (E5M2, E5M2)])
def test_other_formats(formats):
    assert grade_gemm(correct, formats=formats, shapes=[(64, 64, 256)]).ok
    grade = grade_gemm(narrow(BFLOAT16, 32), formats=formats, shapes=[(64, 64, 512)])
    assert "a bfloat16 accumulator, rounded every 32 of K" in grade.causes[0].name


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("a", "b"),
    [("blockwise_1x128", "blockwise_128x128"), ("mx_1x32", "mx_1x32"), ("rowwise", "tensorwise")],
)
def test_other_granularities(a, b):
    grade = grade_gemm(
        wrap(lambda a, b: gemm.matmul(a, b), name="sim", granularity=a, granularity_b=b),
        shapes=[(64, 160, 384)],
    )
    assert grade.verdict == "right", grade.message
    assert grade.worst.bounds == 0
    assert grade.granularities == (a, b)


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("blockwise_1x128", "blockwise_128x128"),
        ("blockwise_128x128", "blockwise_128x128"),
        ("mx_32x32", "mx_1x32"),
        ("mx_32x32", "mx_32x32"),
    ],
)
def test_rows_that_share_scales_may_end_in_part_of_a_block(a, b):
    """272 rows are two blocks of 128 and one of 16, under one block along K."""
    grade = grade_gemm(
        wrap(lambda a, b: gemm.matmul(a, b, accumulate="exact"), granularity=a, granularity_b=b),
        shapes=[(272, 272, 128)],
    )
    assert (grade.verdict, grade.plan) == ("right", "exact"), grade.message


def test_scales_of_square_blocks_are_told_from_their_transpose():
    """As DeepSeek's GEMM has them of its weights."""

    def turned(a, b):
        scale_inv = b.scale_inv.ravel("F").reshape(b.scale_inv.shape)
        return gemm.matmul(a, b._replace(scale_inv=scale_inv))

    grade = grade_gemm(
        wrap(turned, granularity="blockwise_1x128", granularity_b="blockwise_128x128"),
        shapes=grading.SHAPES_OF_BLOCKS[-1:],
    )
    assert grade.causes[0].name == "scale_inv of b, transposed"


@pytest.mark.slow
def test_a_long_k():
    """16,384 is asked index by index in four GEMMs of 64 x 64."""
    assert grade_gemm(correct, shapes=[(64, 64, 16384)]).ok
    grade = grade_gemm(without(lambda k: slice(9000, 9001)), shapes=[(64, 64, 16384)])
    assert grade.causes[0].name == "1 of K, 9000, dropped"


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_gemm_of_a_very_long_k(name):
    """B-1's bound is wide there: few products among zeros show what it hides."""
    planted = PLANTED[name]
    grade = grade_gemm(planted.function, **planted.options, shapes=[(128, 128, 131072)])
    assert grade.verdict == planted.verdict, grade.message
    assert [planted.cause in cause.name for cause in grade.causes] == [True] * bool(
        planted.cause
    ), grade.message


@pytest.mark.parametrize(
    ("granularity", "k"),
    [("tensorwise", 5000), ("rowwise", 8192), ("mx_1x32", 4128), ("blockwise_128x128", 131072)],
)
def test_few_products_among_zeros_have_the_same_sums(granularity, k):
    scaled = ScaledGemm(name="sim", function=gemm.matmul, granularity=granularity)
    asked = stimuli.Asked(scaled=scaled, formats=(E4M3FN, E5M2))
    few = stimuli.random(asked, (8, 8, stimuli.LONG), BFLOAT16)
    long = stimuli.thinned(few, k)
    assert long.shape == (8, 8, k)
    assert long.a.codes[:, 0].any()
    assert long.a.codes[:, -1].any()
    assert (long.a.codes != 0).sum() == (few.a.codes != 0).sum()
    np.testing.assert_array_equal(
        gemm.matmul(long.a, long.b).view(np.uint32), gemm.matmul(few.a, few.b).view(np.uint32)
    )


def test_a_gemm_that_refuses_zeros_in_a_long_k_alone():
    def function(a, b):
        if 0.2 < (a.codes != 0).mean() < 0.3:
            raise ValueError("a block of zeros")
        return correct(a, b)

    whole = grade_gemm(correct, shapes=[(16, 16, 16384)])
    assert whole.ok
    assert whole.worst.count == 2 * 16 * 16
    grade = grade_gemm(function, shapes=[(16, 16, 16384)])
    assert grade.ok
    assert grade.worst.count == 16 * 16
    assert any(
        "random operands in 4096 of K" in one and "a block of zeros" in one for one in grade.unasked
    )


def test_an_accumulator_is_looked_for_where_results_differ():
    """A tile lacks one index, which no sum of 8 bits shows: the rest of the result has the bits of
    any accumulator that is wide enough.
    """

    def function(a, b):
        x, y = values(a).copy(), values(b)
        out = correct(a, b)
        x[:, 5000] = 0
        out[16:20, 8:12] = (x @ y.T * a.scale_inv * b.scale_inv.T)[16:20, 8:12]
        return out

    grade = grade_gemm(function, shapes=[(32, 32, 16384)])
    assert not any("rounded to bfloat16" in cause.name for cause in grade.causes), grade.message


def test_one_shape_leaves_two_names_of_a_part_of_k():
    grade = grade_gemm(without(lambda k: slice(k // 4 * 3, k)), shapes=[(32, 32, 512)])
    assert [cause.name for cause in grade.causes] == [
        "the last 128 of K dropped, or part 3 of 0 to 3 equal parts of K dropped"
    ]


def test_the_result_as_json(tmp_path):
    grade = grade_gemm(wrap(narrow(BFLOAT16, 64), name="mine"), shapes=[(32, 32, 512)])
    grade.write(tmp_path / "grade.json")
    read = json.loads((tmp_path / "grade.json").read_text())
    assert read["verdict"] == "imprecise"
    assert not read["ok"]
    assert grade.exit_code == 1
    assert "a bfloat16 accumulator" in read["causes"][0]["name"]
    assert read["measured"][0]["shape"] == [32, 32, 512]


def test_the_table(capsys):
    grade_gemm(wrap(to_bfloat16, name="mine"), shapes=[(32, 32, 512)]).print()
    printed = capsys.readouterr().out
    assert "[32, 32], K = 512" in printed
    assert "mine is right: " in printed


def test_a_result_that_is_lost_is_wrong():
    def function(a, b):
        return np.where(np.abs(out := correct(a, b)) > 1000, np.float32(np.nan), out)

    grade = grade_gemm(function, shapes=[(32, 32, 512)])
    assert grade.verdict == "wrong"


@pytest.mark.parametrize("shapes", [[], [(0, 4, 32)], [(4, 4, 1)]])
def test_shapes_that_no_grade_takes(shapes):
    with pytest.raises(ValueError, match="a grade takes shapes M, N, K of at least 1, 1, 2; got"):
        grade_gemm(correct, shapes=shapes)


def test_equal_grades_of_equal_gemms():
    first, second = (grade_gemm(correct, shapes=[(32, 32, 256)]) for _ in range(2))
    assert dataclasses.replace(first) == second
