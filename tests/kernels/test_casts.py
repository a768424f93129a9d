"""The kernels that cast, interpreted, against the simulator: no code, scale or amax differs."""

import numpy as np
import pytest

pytest.importorskip("triton")

from helpers.kernels.planted_tensors import (
    DTYPES,
    FORMATS,
    LAYOUTS,
    amax_of,
    both_orders,
    cases,
    planted,
    run,
    scales,
    strides,
)

from fp8ref.kernels import casts, jit
from fp8ref.sim.quantize import scaling
from fp8ref.sim.quantize.scales import scale_from_amax


def tensor(layout: str, dtype: str, *, wide: bool = True) -> np.ndarray:
    return LAYOUTS[layout](lambda m, n: planted(m, n, dtype, wide=wide))


def run_both(launch, x, inputs, *rest):
    return run(launch, [x, *inputs], [*both_orders(x.shape), *rest])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cast_by_one_scale_has_the_codes_of_the_simulator(layout, dtype, fmt):  # M-11
    x = tensor(layout, dtype)
    launch = casts.cast(x.shape, strides(x), e5m2=fmt == "e5m2")
    scale = np.float32(3.1415927)
    codes, transposed, amaxes = run_both(launch, x, [scale], ((launch.programs,), "int32"))
    expected = scaling.quantize_with(x, scales(scale), fmt)
    np.testing.assert_array_equal(codes, expected.codes)
    np.testing.assert_array_equal(transposed, expected.codes.T)
    np.testing.assert_array_equal(amax_of(amaxes), scaling.amax(x))


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_bfloat16_has_the_code_of_the_simulator(fmt):  # S-5
    x = np.arange(1 << 16, dtype=np.uint16).view(DTYPES["bfloat16"]).reshape(256, 256)
    launch = casts.cast(x.shape, strides(x), e5m2=fmt == "e5m2")
    codes, transposed, _ = run_both(launch, x, [np.float32(1)], ((launch.programs,), "int32"))
    expected = scaling.quantize_with(x, scales(1), fmt).codes
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(transposed, expected.T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_partial_amaxes_are_the_simulators_amax(layout, dtype):  # S-2
    for wide in (False, True):
        x = tensor(layout, dtype, wide=wide)
        (amaxes,) = run(casts.amax(x.shape, strides(x)), [x], [((casts.PARTS,), "int32")])
        np.testing.assert_array_equal(amax_of(amaxes), scaling.amax(x))


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_nan_is_above_inf_and_inf_above_numbers(special):  # S-2
    x = tensor("ragged", "bfloat16", wide=False)
    x[130, 66] = special
    x[0, 0] = np.inf
    (amaxes,) = run(casts.amax(x.shape, strides(x)), [x], [((casts.PARTS,), "int32")])
    np.testing.assert_array_equal(amax_of(amaxes), scaling.amax(x))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("largest", [None, np.nan, np.inf, 0.0, 1e-13, 1e-40])
@pytest.mark.parametrize("policy", ["torchao", "torchao_pow2"])
# S-3, S-4
def test_a_cast_by_its_own_amax_has_the_scale_of_the_simulator(policy, largest, fmt):
    x = tensor("ragged", "float32", wide=False)
    if largest is not None:
        x = x * np.float32(largest if largest < 1 else 1)
        x[77, 7] = largest
    amaxes = casts.amax(x.shape, strides(x))
    (parts,) = run(amaxes, [x], [((casts.PARTS,), "int32")])
    power = policy == "torchao_pow2"
    launch = casts.cast_by_amax(x.shape, strides(x), e5m2=fmt == "e5m2", power=power)
    codes, transposed, scale, inverse = run_both(
        launch, x, [parts], ((), "float32"), ((), "float32")
    )
    expected = scaling.quantize(x, fmt, policy=policy)
    np.testing.assert_array_equal(codes, expected.codes)
    np.testing.assert_array_equal(transposed, expected.codes.T)
    np.testing.assert_array_equal(scale, expected.scale)
    np.testing.assert_array_equal(inverse, expected.scale_inv)


LINES = {
    **LAYOUTS,
    "several bands": lambda make: make(2100, 67),
    "wide tiles": lambda make: make(131, 1100),
}
"""Of more than one partial amax of a column, and of tiles wider than their least width."""


def amax_lines(x):
    """Partial amaxes of rows and of columns."""
    launch = casts.amax_lines(x.shape, strides(x))
    return run(launch, [x], launch.outputs)


@pytest.mark.parametrize("layout", LINES)
def test_amaxes_of_lines_are_the_simulators(layout):  # S-2
    x = LINES[layout](lambda m, n: planted(m, n, wide=True))
    for parts, axis in zip(amax_lines(x), (1, 0), strict=True):
        assert len(parts) <= casts.LINE_PARTS
        found, expected = parts.max(0).view(np.float32), scaling.amax(x, "rowwise", axis=axis)
        np.testing.assert_array_equal(found, expected.ravel())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_and_columns_have_scales_of_their_own(layout, fmt):  # S-6
    x = tensor(layout, "bfloat16", wide=False)
    by_row, by_column = (
        scaling.quantize(x, fmt, granularity="rowwise", axis=axis) for axis in (1, 0)
    )
    launch = casts.cast_lines(x.shape, strides(x), e5m2=fmt == "e5m2")
    codes, transposed = run_both(launch, x, [by_row.scale, by_column.scale])
    np.testing.assert_array_equal(codes, by_row.codes)
    np.testing.assert_array_equal(transposed, by_column.codes.T)


@pytest.mark.parametrize("policy", ["torchao", "torchao_pow2"])
@pytest.mark.parametrize(("layout", "dtype", "fmt"), cases("ragged", *LINES))
# S-2 to S-6
def test_lines_cast_by_their_own_amaxes_are_the_simulators(layout, dtype, fmt, policy):
    x = LINES[layout](lambda m, n: planted(m, n, dtype))
    x[0] = 0
    x[-1, : x.shape[1] // 2] = np.nan
    x[: x.shape[0] // 2, -1] = -np.inf
    launch = casts.cast_lines_by_amaxes(
        x.shape, strides(x), e5m2=fmt == "e5m2", power=policy == "torchao_pow2"
    )
    outputs = [(shape, "uint8" if dtype == fmt else dtype) for shape, dtype in launch.outputs]
    codes, scale, inverse, transposed, scale_t, inverse_t = run(
        launch, [x, *amax_lines(x)], outputs
    )
    by_row, by_column = (
        scaling.quantize(x, fmt, granularity="rowwise", axis=axis, policy=policy) for axis in (1, 0)
    )
    np.testing.assert_array_equal(codes, by_row.codes)
    np.testing.assert_array_equal(transposed, by_column.codes.T)
    np.testing.assert_array_equal(scale, by_row.scale)
    np.testing.assert_array_equal(inverse, by_row.scale_inv)
    np.testing.assert_array_equal(scale_t, by_column.scale)
    np.testing.assert_array_equal(inverse_t, by_column.scale_inv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_is_scaled_by_rows_and_columns_in_one_rounding_of_each(layout, dtype):  # G-5
    x, rng = tensor(layout, dtype), np.random.default_rng(0)
    rows, columns = (np.exp2(rng.normal(0, 9, (n, 1))).astype(np.float32) for n in x.shape)
    (found,) = run(casts.scaled(x.shape, strides(x)), [x, rows, columns], [(x.shape, dtype)])
    with np.errstate(all="ignore"):
        expected = (x.astype(np.float32) * (rows * columns.T)).astype(DTYPES[dtype])
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(128, 256), (131, 259), (1, 130), (130, 1)])
def test_blocks_along_both_axes_are_the_simulators(shape, dtype, fmt):  # S-6
    x = planted(*shape, dtype)
    x[shape[0] // 2, shape[1] // 2] = np.nan
    x[0, 0] = -np.inf
    (m, n), (rows, columns) = shape, casts.tiles(*shape, (casts.BLOCK, casts.BLOCK))
    launch = casts.blocks(shape, strides(x), e5m2=fmt == "e5m2", square=False)
    along, down = [((m, columns), "float32")] * 2, [((rows, n), "float32")] * 2
    codes, transposed, scale, inverse, scale_t, inverse_t = run_both(launch, x, [], *along, *down)
    of_rows, of_columns = (
        scaling.quantize(x, fmt, granularity="blockwise_1x128", axis=axis, ragged=True)
        for axis in (1, 0)
    )
    np.testing.assert_array_equal(codes, of_rows.codes)
    np.testing.assert_array_equal(scale, of_rows.scale)
    np.testing.assert_array_equal(inverse, of_rows.scale_inv)
    np.testing.assert_array_equal(transposed, of_columns.codes.T)
    np.testing.assert_array_equal(scale_t, of_columns.scale)
    np.testing.assert_array_equal(inverse_t, of_columns.scale_inv)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(128, 256), (131, 259), (1, 130)])
def test_square_blocks_are_the_simulators(shape, fmt):  # S-6
    x = planted(*shape)
    x[0, -1] = np.inf
    rows, columns = casts.tiles(*shape, (casts.BLOCK, casts.BLOCK))
    launch = casts.blocks(shape, strides(x), e5m2=fmt == "e5m2", square=True)
    codes, transposed, scale, inverse = run_both(launch, x, [], *[((rows, columns), "float32")] * 2)
    expected = scaling.quantize(x, fmt, granularity="blockwise_128x128", ragged=True)
    np.testing.assert_array_equal(codes, expected.codes)
    np.testing.assert_array_equal(transposed, expected.codes.T)
    np.testing.assert_array_equal(scale, expected.scale)
    np.testing.assert_array_equal(inverse, expected.scale_inv)


def recast(x, fmt, used, codes, parts):
    """Codes in both orders and guess, scale and scale_inv, after a cast by the guess ``used``."""
    launch = casts.recast(x.shape, strides(x), e5m2=fmt == "e5m2")
    memory = [codes.copy(), codes.T.copy(), *np.zeros((3, 1), np.float32)]
    names = [str(x.dtype), "int32", "float32", "uint8", "uint8", *["float32"] * 3]
    jit.interpret(launch, [x, parts, np.array(used, np.float32), *memory], names)
    return memory


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("layout", ["ragged", "transposed", "strided"])
@pytest.mark.parametrize("largest", [None, 0.0, np.nan, np.inf])
def test_codes_do_not_depend_on_a_guess_of_the_scale(largest, layout, fmt):  # R-1, M-11
    x = tensor(layout, "bfloat16", wide=False)
    if largest is not None:
        x[...] *= largest if largest == 0 else 1
        x[-1, -1] = largest
    expected = scaling.quantize(x, fmt, policy="torchao_pow2")
    launch = casts.cast(x.shape, strides(x), e5m2=fmt == "e5m2")
    amaxes = ((launch.programs,), "int32")
    for guess in (expected.scale, expected.scale * 2, np.float32(np.nan), np.float32(0)):
        codes, transposed, parts = run_both(launch, x, [guess], amaxes)
        np.testing.assert_array_equal(transposed, codes.T)
        codes, transposed, *scales = recast(x, fmt, guess, codes, parts)
        np.testing.assert_array_equal(codes, expected.codes)
        np.testing.assert_array_equal(transposed, expected.codes.T)
        for found, scale in zip(
            scales, (expected.scale, expected.scale, expected.scale_inv), strict=True
        ):
            np.testing.assert_array_equal(found[0], scale)


def test_a_right_guess_is_not_cast_again_and_a_wrong_one_is():
    x = tensor("ragged", "bfloat16", wide=False)
    expected = scaling.quantize(x, "e4m3fn", policy="torchao_pow2")
    parts = np.array([scaling.amax(x)], np.float32).view(np.int32)
    parts = np.pad(parts, (0, casts.tiles(*x.shape)[0] * casts.tiles(*x.shape)[1] - 1))
    untouched = np.full(x.shape, 0x5A, np.uint8)
    for used, codes in (
        (expected.scale, untouched),
        (expected.scale / 2, expected.codes),
        (np.nextafter(expected.scale, np.float32(0)), expected.codes),
    ):
        found, transposed, *_ = recast(x, "e4m3fn", used, untouched, parts)
        np.testing.assert_array_equal(found, codes)
        np.testing.assert_array_equal(transposed, codes.T)


@pytest.mark.parametrize("fmt", FORMATS)
def test_powers_of_two_are_those_of_a_rounded_logarithm(fmt, rng):  # S-4
    """Scales around each bound of S-4's table, and others."""
    powers = np.ldexp(np.float32(1), np.arange(-110, 49)).view(np.int32)
    offsets = np.array([0, 1, 2, 3, 6, 12, 23, 45], np.int32)
    below = (powers[:, None] - offsets).view(np.float32)
    limit = np.float32({"e4m3fn": 448, "e5m2": 57344}[fmt])
    amaxes = np.r_[limit / below.ravel(), np.abs(rng.standard_normal(50)).astype(np.float32)]
    amaxes = rng.permutation(amaxes[np.isfinite(amaxes)])[:150].astype(np.float32)
    expected = scale_from_amax(amaxes, fmt, "torchao_pow2")
    x, codes = np.ones((1, 1), np.float32), np.zeros((1, 1), np.uint8)
    found = [
        recast(x, fmt, scale, codes, np.array([amax]).view(np.int32))[3][0]
        for amax, scale in zip(amaxes, expected, strict=True)
    ]
    np.testing.assert_array_equal(found, expected)
    assert (expected != scale_from_amax(amaxes, fmt, "torchao_mask")).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_are_transposed(layout):
    codes = LAYOUTS[layout](
        lambda m, n: np.random.default_rng(m).integers(0, 256, (m, n), np.uint8)
    )
    launch = casts.transpose(codes.shape, strides(codes))
    (transposed,) = run(launch, [codes], [(codes.shape[::-1], "uint8")])
    np.testing.assert_array_equal(transposed, codes.T)
