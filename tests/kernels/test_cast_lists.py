"""A list of matrices that one launch casts, interpreted, against the simulator."""

import itertools
import math

import numpy as np
import pytest

pytest.importorskip("triton")

from helpers.kernels.planted_tensors import FORMATS, amax_of, planted, run, scales, strides

from fp8ref.kernels import cast_lists
from fp8ref.sim.quantize import scaling

SHAPES = {
    "whole tiles": ((128, 64), (256, 192)),
    "ragged": ((144, 80), (16, 208), (128, 64)),
    "odd": ((131, 67), (1, 70), (133, 1), (128, 64)),
}
"""Of matrices in lists of which all sides are multiples of 16, or not."""

LISTS = [(name, dtype) for name in SHAPES for dtype in ("bfloat16", "float32", "float16")]


def matrices(name: str, dtype: str, *, wide: bool = False) -> list[np.ndarray]:
    shapes = SHAPES[name]
    return [planted(*shape, dtype, seed=i, wide=wide) for i, shape in enumerate(shapes)]


class List:
    """Matrices that lie one after another in memory, and their table."""

    def __init__(self, matrices, *, counts=None, gap: int = 0) -> None:
        self.matrices, self.shapes = matrices, [x.shape for x in matrices]
        self.wide = not any(side % cast_lists.UNIT for shape in self.shapes for side in shape)
        sizes = [x.size + gap for x in matrices]
        ends = [*itertools.accumulate(sizes)]
        self.starts = [end - size for end, size in zip(ends, sizes, strict=True)]
        self.x = np.zeros(ends[-1], matrices[0].dtype)
        for start, x in zip(self.starts, matrices, strict=True):
            self.x[start : start + x.size] = x.ravel("K")
        counts = counts or [1] * len(matrices)
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        codes = [0, *itertools.accumulate(map(math.prod, self.shapes))]
        self.places = [*itertools.pairwise(codes)]
        self.rows = [
            [*x.shape, *strides(x), start, first, first, i, amax, count]
            for i, (x, start, (first, _), amax, count) in enumerate(
                zip(matrices, self.starts, self.places, firsts, counts, strict=True)
            )
        ]
        self.codes = ((codes[-1],), "uint8")
        self.scales = ((len(matrices), 4), "float32")

    @property
    def table(self) -> np.ndarray:
        return np.array(self.rows, np.int64).T.copy().view(np.int32)

    def amaxes(self) -> np.ndarray:
        launch = cast_lists.amax(self.shapes, wide=self.wide)
        return run(launch, [self.x, self.table], [(launch.grid[::-1], "int32")])[0]

    def cast(self, fmt: str, given, amaxes=None, *, power: bool = False, guessed: bool = False):
        """Partial amaxes; of each matrix codes, transposed codes, scale and scale_inv."""
        by_amax = amaxes is not None
        launch = cast_lists.cast(
            self.shapes,
            wide=self.wide,
            e5m2=fmt == "e5m2",
            power=power,
            given=guessed or not by_amax,
            by_amax=by_amax,
        )
        inputs = [self.x, self.table, np.array(given, np.float32), *([amaxes] if by_amax else [])]
        parts = [] if by_amax else [(launch.grid[::-1], "int32")]
        results = run(launch, inputs, [*parts, self.codes, self.codes, self.scales, self.scales])
        q, t, scale, inverse = results[-4:]
        for numbers in (scale, inverse):
            np.testing.assert_array_equal(numbers, np.repeat(numbers[:, :1], 4, 1))
        each = [
            (q[a:b].reshape(m, n), t[a:b].reshape(n, m), scale[i, 0], inverse[i, 0])
            for i, ((m, n), (a, b)) in enumerate(zip(self.shapes, self.places, strict=True))
        ]
        return results[0], each


def check(cast, expected) -> None:
    codes, transposed, scale, inverse = cast
    np.testing.assert_array_equal(codes, expected.codes)
    np.testing.assert_array_equal(transposed, expected.codes.T)
    np.testing.assert_array_equal(scale, expected.scale)
    np.testing.assert_array_equal(inverse, expected.scale_inv)


@pytest.mark.parametrize(("name", "dtype"), LISTS)
def test_amaxes_are_the_simulators(name, dtype):  # S-2
    xs = matrices(name, dtype, wide=True)
    for x, parts in zip(xs, List(xs).amaxes(), strict=True):
        np.testing.assert_array_equal(amax_of(parts), scaling.amax(x))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("name", "dtype"), LISTS)
def test_given_scales_have_the_codes_of_the_simulator(name, dtype, fmt):  # S-5, M-11
    """Of numbers with NaN, Inf, subnormals and random bits."""
    xs = matrices(name, dtype, wide=True)
    given = [np.float32(3.1415927) / (i + 1) for i in range(len(xs))]
    parts, casts = List(xs).cast(fmt, given)
    for x, scale, amaxes, cast in zip(xs, given, parts, casts, strict=True):
        check(cast, scaling.quantize_with(x, scales(scale), fmt))
        np.testing.assert_array_equal(amax_of(amaxes), scaling.amax(x))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("policy", ["torchao", "torchao_pow2"])
@pytest.mark.parametrize("name", SHAPES)
def test_scales_of_amaxes_are_the_simulators(name, policy, fmt):  # S-3, S-4
    """Of a list with a matrix of zeros, and one whose amax is NaN."""
    xs = matrices(name, "bfloat16")
    xs[0][...] = 0
    xs[-1][3, -1] = np.nan
    parts = List(xs).amaxes()
    listed = List(xs, counts=[parts.shape[1]] * len(xs))
    _, casts = listed.cast(fmt, 0.0, parts, power=policy == "torchao_pow2")
    for x, cast in zip(xs, casts, strict=True):
        check(cast, scaling.quantize(x, fmt, policy=policy))


def test_amaxes_may_be_of_other_launches():
    """Of another number for each matrix, as an optimizer's step leaves them."""
    xs = matrices("ragged", "bfloat16")
    parts = [np.zeros(count, np.int32) for count in (1, 7, 3000)]
    for x, each in zip(xs, parts, strict=True):
        each[-1] = scaling.amax(x).view(np.int32)
    _, casts = List(xs, counts=[*map(len, parts)]).cast("e4m3fn", 0.0, np.concatenate(parts))
    for x, cast in zip(xs, casts, strict=True):
        check(cast, scaling.quantize(x, "e4m3fn"))


def test_a_right_guess_is_not_cast_again_and_a_wrong_one_is():
    xs = matrices("ragged", "bfloat16")
    expected = [scaling.quantize(x, "e4m3fn", policy="torchao_pow2") for x in xs]
    amaxes = np.array([scaling.amax(x) for x in xs], np.float32).view(np.int32)
    guesses = [expected[0].scale, expected[1].scale / 2, np.nan]
    _, casts = List(xs).cast("e4m3fn", guesses, amaxes, power=True, guessed=True)
    assert casts[0][2:] == (expected[0].scale, expected[0].scale_inv)
    assert (casts[0][0] == 0x5A).all()
    assert (casts[0][1] == 0x5A).all()
    for cast, each in zip(casts[1:], expected[1:], strict=True):
        check(cast, each)


def test_matrices_have_any_strides_and_distances():
    """Transposed ones, from the pointer to the second on: the first is before it."""
    xs = [x.T for x in matrices("odd", "float32")]
    listed = List(xs, gap=1000)
    start = listed.starts[1]
    listed.x = listed.x[start:]
    for row in listed.rows:
        row[4] -= start
    assert [row[2:4] for row in listed.rows] == [[1, len(x.T[0])] for x in xs]
    _, casts = listed.cast("e4m3fn", np.ones(len(xs)))
    for x, cast in zip(xs, casts, strict=True):
        check(cast, scaling.quantize_with(x, scales(1), "e4m3fn"))
