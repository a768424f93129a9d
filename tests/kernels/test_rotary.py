"""The gradient of a rotary embedding, interpreted: the codes of the plain form, which stores it."""

import numpy as np
import pytest

pytest.importorskip("triton")

from helpers.kernels.planted_tensors import amax_of, both_orders, cases, planted, run, scales

from fp8ref.kernels import casts, rotary
from fp8ref.sim.quantize import scaling
from fp8ref.sim.quantize.cast import encode

SHAPES = [(2, 35, 3, 8), (1, 64, 2, 16), (1, 1, 1, 2), (3, 1, 2, 4)]
ORDERS = {"of tokens": (0, 1, 2, 3), "of heads": (0, 2, 1, 3), "of batches": (1, 0, 2, 3)}
"""{name: the order in memory of [B, T, H, D]}; attention's own gradient has it by heads."""


def gradient(shape, order, dtype, *, wide):
    """[B, T, H, D] whose memory has another order of B, T and H."""
    count = int(np.prod(shape))
    memory = planted(1, count, dtype, wide=wide).reshape([shape[axis] for axis in order])
    return memory.transpose(np.argsort(order))


def split(x, form):
    """What rotates with what: halves, or the even and the odd numbers."""
    return (x[..., ::2], x[..., 1::2]) if form == "pairs" else np.split(x, 2, -1)


def joined(first, second, form):
    if form == "pairs":
        return np.stack([first, second], -1).reshape(*first.shape[:-1], -1)
    return np.concatenate([first, second], -1)


def rotated(g, cos, sin, form="halves"):
    """d cos + rotate_half^T(d) sin, rounded to g's dtype (M-11)."""
    g1, g2 = split(g.astype(np.float32), form)
    (c1, c2), (s1, s2) = split(cos[:, None], form), split(sin[:, None], form)
    with np.errstate(all="ignore"):
        products = [g1 * c1, g2 * s2, g2 * c2, g1 * s1]
        if form == "rounded halves":
            products = [x.astype(g.dtype).astype(np.float32) for x in products]
        sums = products[0] + products[1], products[2] - products[3]
        if form == "rounded halves":
            sums = sums[0] + np.float32(0), sums[1] + np.float32(0)
        return joined(*sums, form).astype(g.dtype)


@pytest.mark.parametrize("form", rotary.FORMS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("shape", "dtype", "fmt"), cases(*SHAPES))
def test_the_gradient_is_rounded_and_then_cast(shape, order, dtype, fmt, form):  # M-11
    for wide in (False, True):
        g = gradient(shape, ORDERS[order], dtype, wide=wide)
        (batch, tokens, heads, width), scale = shape, np.float32(3.3)
        cos, sin = (planted(tokens, width, "float32", seed=seed) for seed in (5, 6))
        strides = tuple(n // g.itemsize for n in g.strides[:3])
        matrix, tables = (batch * tokens, heads * width), [cos, sin]
        launch = rotary.cast(shape, strides, e5m2=fmt == "e5m2", form=form)
        parts = ((launch.programs,), "int32")
        codes, transposed, amaxes = run(launch, [g, *tables, scale], [*both_orders(matrix), parts])
        plain = rotated(g, cos, sin, form).reshape(matrix)
        expected = scaling.quantize_with(plain, scales(scale), fmt).codes
        np.testing.assert_array_equal(codes, expected)
        np.testing.assert_array_equal(transposed, expected.T)
        np.testing.assert_array_equal(amax_of(amaxes), scaling.amax(plain))
        alone = rotary.amax(shape, strides, form=form)
        np.testing.assert_array_equal(run(alone, [g, *tables], [parts])[0], amaxes)


@pytest.mark.parametrize("form", rotary.FORMS)
def test_lines_have_scales_of_their_own(form):  # M-11
    shape, order = (2, 35, 3, 8), ORDERS["of heads"]
    g = gradient(shape, order, "bfloat16", wide=False)
    cos, sin = (planted(35, 8, "float32", seed=seed) for seed in (5, 6))
    strides, matrix = tuple(n // g.itemsize for n in g.strides[:3]), (70, 24)
    plain = rotated(g, cos, sin, form).reshape(matrix)
    launch = rotary.amax_lines(shape, strides, form=form)
    of_rows, of_columns = run(launch, [g, cos, sin], launch.outputs)
    bits = np.abs(plain.astype(np.float32)).view(np.int32)
    np.testing.assert_array_equal(of_rows.max(0), bits.max(1))
    np.testing.assert_array_equal(of_columns.max(0), bits.max(0))
    rows, columns = (np.linspace(1, 3, n, dtype=np.float32) for n in matrix)
    launch = rotary.cast_lines(shape, strides, e5m2=False, form=form)
    codes, transposed = run(launch, [g, cos, sin, rows, columns], both_orders(matrix))
    for found, scale in ((codes, rows[:, None]), (transposed.T, columns[None])):
        wide = plain.astype(np.float32) * scale
        np.testing.assert_array_equal(found, encode(wide, "e4m3fn"))


@pytest.mark.parametrize("form", rotary.FORMS)
def test_blocks_of_lines_have_scales_of_their_own(form):  # M-11
    shape, matrix = (1, 40, 2, 128), (40, 256)
    g = gradient(shape, ORDERS["of heads"], "bfloat16", wide=False)
    cos, sin = (planted(40, 128, "float32", seed=seed) for seed in (5, 6))
    strides = tuple(n // g.itemsize for n in g.strides[:3])
    launch = rotary.lines(shape, strides, e5m2=False, form=form)
    memory = [(shape, {"e4m3fn": "uint8"}.get(dtype, dtype)) for shape, dtype in launch.outputs]
    outputs = run(launch, [g, cos, sin], memory)
    plain = rotated(g, cos, sin, form).reshape(matrix)
    launch = casts.blocks(matrix, (256, 1), e5m2=False, square=False)
    for found, expected in zip(outputs, run(launch, [plain], memory), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("form", rotary.FORMS)
@pytest.mark.parametrize(("shape", "dtype", "fmt"), cases(*SHAPES))
def test_an_embedding_is_rotated_and_rounded(shape, dtype, fmt, form):  # M-3
    x = gradient(shape, (0, 1, 2, 3), dtype, wide=True)
    cos, sin = (planted(shape[1], shape[3], "float32", seed=seed) for seed in (5, 6))
    (out,) = run(rotary.rotate(shape, form=form), [x, cos, sin], [(shape, dtype)])
    # the gradient of the inverse rotation, of which the halves of sin change places
    first, second = split(sin, form)
    expected = rotated(x, cos, joined(-second, -first, form), form).astype(np.float32)
    np.testing.assert_array_equal(out.astype(np.float32), expected)


@pytest.mark.parametrize("form", rotary.FORMS)
def test_zeros_have_the_signs_that_autograd_gives_them(form):  # M-11
    shape, strides = (1, 4, 1, 8), (32, 8, 8)
    g = np.resize(np.array([0.0, -0.0, -0.0], np.float32), shape)
    cos, sin = (planted(4, 8, "float32", seed=seed) for seed in (5, 6))
    launch = rotary.cast(shape, strides, e5m2=False, form=form)
    memory = [*both_orders((4, 8)), ((launch.programs,), "int32")]
    codes, *_ = run(launch, [g, cos, sin, np.float32(1)], memory)
    np.testing.assert_array_equal(codes >> 7, np.signbit(rotated(g, cos, sin, form))[0, :, 0])
    assert (0x80 in codes) == (form != "rounded halves")


def test_operations_are_in_the_stated_order():  # M-11
    """In float32 partial amaxes show a result to its last bit: each tile here has one number."""
    shape = (1, 64 * 16, 1, 2)
    g, (cos, sin) = (
        np.random.default_rng(1).standard_normal((1, 64 * 16, 1, 2)).astype(np.float32),
        (planted(shape[1], 2, "float32", seed=seed) for seed in (5, 6)),
    )
    g[:, np.arange(shape[1]) % 64 != 9] = 0
    launch = rotary.amax(shape, (0, 2, 2))
    (amaxes,) = run(launch, [g, cos, sin], [((16,), "int32")])
    largest = np.abs(rotated(g, cos, sin))[0, 9::64, 0].max(-1)
    np.testing.assert_array_equal(amaxes.view(np.float32), largest)
