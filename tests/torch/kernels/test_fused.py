"""Values computed and cast in one pass, interpreted on a CPU: as plain operations, then casts."""

import functools

import pytest
import torch
from torch._subclasses import FakeTensorMode

pytest.importorskip("triton")

from fp8ref.formats import E4M3FN, E5M2, Format
from fp8ref.torch.blocks import operations
from fp8ref.torch.blocks.operations import Norm
from fp8ref.torch.kernels import casts, fused

M, K = 144, 128


def tensors(count: int, *shape: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(shape or (M, K), generator=rng).bfloat16() for _ in range(count)]


NORM = Norm(1e-5)
X, RESIDUAL, GATE, UP, D = tensors(5)
WEIGHT = tensors(1, K)[0]
COS, SIN = (table.float() for table in tensors(2, M, K))
RSTD = fused.norm_statistics(X, WEIGHT, eps=NORM.eps, twice=False)[0]
HEADS = tensors(1, 1, M, 2, K)[0]

VALUES = {
    "norm": ((X, RSTD, WEIGHT), [NORM.value(X, RSTD[:, None], WEIGHT)], {"twice": False}),
    "swiglu": ((GATE, UP), [operations.swiglu(GATE, UP)], {"twice": False}),
    "swiglu_gradient": (
        (D, GATE, UP),
        [*operations.swiglu_gradient(D, GATE, UP)],
        {"twice": False},
    ),
    "rotary_gradient": (
        (HEADS, COS, SIN),
        [operations.rotate_gradient(HEADS, COS[:, None], SIN[:, None]).reshape(M, 2 * K)],
        {},
    ),
}
"""{value: what it is computed of, its plain forms, options}."""


def same(found: torch.Tensor, expected: torch.Tensor, *, most: float = 0.01) -> None:
    """Bits are those of plain operations, except where exp or rsqrt is another approximation
    (M-11): codes then are neighbors."""
    found, expected = (x.contiguous().view(torch.uint8).int() for x in (found, expected))
    assert found.shape == expected.shape
    distance = (found - expected).abs()
    assert distance.max() <= 1
    assert distance.count_nonzero() <= most * distance.numel()


@functools.cache
def near(value: str) -> list[torch.Tensor]:
    """Plain forms, of which kernels may differ by an approximation."""
    return [x.contiguous() for x in VALUES[value][1]]


def scales_of(value: str) -> list[torch.Tensor]:
    return [torch.tensor(2.0 ** (i + 1)) for i in range(len(near(value)))]


def called(value: str, name: str, *others: torch.Tensor, **options: bool):
    inputs, _, more = VALUES[value]
    results = getattr(fused, f"{value}_{name}")(*inputs, *others, **more | options)
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("value", VALUES)
def test_one_scale_casts_each_value_in_both_orders(value: str, fmt: Format):
    """Codes and transposed codes of each value, then its amaxes; gate's before up's."""
    scales, plain = scales_of(value), near(value)
    results = called(value, "cast", *scales, e5m2=fmt == E5M2)
    parts = results[2 * len(plain) :]
    assert len(results) == 3 * len(plain)
    for i, (x, scale) in enumerate(zip(plain, scales, strict=True)):
        codes, transposed = results[2 * i : 2 * i + 2]
        expected, expected_t, amaxes = casts.cast(x, scale, e5m2=fmt == E5M2)
        assert codes.dtype == expected.dtype
        assert torch.equal(transposed.view(torch.uint8), codes.view(torch.uint8).t())
        same(codes, expected)
        same(transposed, expected_t)
        torch.testing.assert_close(amax(parts[i]), amax(amaxes), rtol=2**-7, atol=0)


def amax(parts: torch.Tensor) -> torch.Tensor:
    return parts.amax().view(torch.float32)


@pytest.mark.parametrize("value", VALUES)
def test_amaxes_are_those_of_the_cast(value):
    """Of the whole, and as the largest of those of lines."""
    of_cast = called(value, "cast", *scales_of(value), e5m2=False)[2 * len(near(value)) :]
    name = "amaxes" if value == "swiglu_gradient" else "amax"
    whole = of_cast if value == "norm" else called(value, name)  # a norm's are of its rows
    lines = called(value, "amax_lines")
    for i, parts in enumerate(of_cast):
        rows, columns = lines[2 * i : 2 * i + 2]
        assert rows.shape[1:] == near(value)[i].shape[:1]
        assert columns.shape[1:] == near(value)[i].shape[1:]
        assert amax(whole[i]) == amax(parts) == amax(rows) == amax(columns)


@pytest.mark.parametrize("value", VALUES)
def test_lines_of_equal_scales_have_the_codes_of_one(value):
    scales, plain = scales_of(value), near(value)
    lines = [s.expand(n).contiguous() for x, s in zip(plain, scales, strict=True) for n in x.shape]
    by_lines = called(value, "cast_lines", *lines, e5m2=False)
    by_one = called(value, "cast", *scales, e5m2=False)[: 2 * len(plain)]
    for a, b in zip(by_lines, by_one, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("value", VALUES)
def test_columns_have_scales_of_their_own(value):
    plain = near(value)
    lines = [s for m, n in (x.shape for x in plain) for s in (torch.ones(m), torch.full((n,), 4.0))]
    results = called(value, "cast_lines", *lines, e5m2=False)
    for i, x in enumerate(plain):
        same(results[2 * i], casts.cast(x, torch.tensor(1.0), e5m2=False)[0])
        same(results[2 * i + 1], casts.cast(x, torch.tensor(4.0), e5m2=False)[1])


@pytest.mark.parametrize("value", VALUES)
def test_blocks_are_of_rows_and_of_columns(value):
    """Six results of each value, as ``casts.lines`` returns them."""
    results = called(value, "lines", e5m2=False)
    assert len(results) == 6 * len(near(value))
    for i, x in enumerate(near(value)):
        each, expected = results[6 * i : 6 * i + 6], casts.lines(x, e5m2=False)
        for codes, plain in zip(each[:2], expected[:2], strict=True):
            same(codes, plain)
        for scale, plain in zip(each[2:], expected[2:], strict=True):
            torch.testing.assert_close(scale, plain, rtol=2**-7, atol=0)


@pytest.mark.parametrize("twice", [False, True])
def test_a_norm_has_the_factors_of_its_rows(twice):
    factor, amaxes = fused.norm_statistics(X, WEIGHT, eps=NORM.eps, twice=twice)
    torch.testing.assert_close(factor, NORM.rstd(X)[:, 0], rtol=1e-6, atol=0)
    norm = Norm(NORM.eps, twice).value(X, factor[:, None], WEIGHT)
    assert torch.equal(amaxes.view(torch.float32), norm.abs().amax(1).float())


def test_a_sum_is_rounded_before_it_is_normed():
    total, *statistics = fused.sum_and_statistics(X, RESIDUAL, WEIGHT, eps=NORM.eps, twice=False)
    assert torch.equal(total, X + RESIDUAL)
    expected = fused.norm_statistics(X + RESIDUAL, WEIGHT, eps=NORM.eps, twice=False)
    assert all(torch.equal(a, b) for a, b in zip(statistics, expected, strict=True))


def test_heads_are_rotated():
    expected = operations.rotate(HEADS, COS[:, None], SIN[:, None])
    assert torch.equal(fused.rotate(HEADS, COS, SIN), expected)


@pytest.mark.parametrize("value", VALUES)
def test_fake_results_have_the_shapes_of_real_ones(value):
    scales = scales_of(value)
    for name, others, more in (
        ("amax_lines", [], {}),
        ("cast", scales, {"e5m2": True}),
        ("lines", [], {"e5m2": True}),
    ):
        real = called(value, name, *others, **more)
        with FakeTensorMode() as mode:
            inputs, _, options = VALUES[value]
            fakes = [mode.from_tensor(x) for x in (*inputs, *others)]
            results = getattr(fused, f"{value}_{name}")(*fakes, **options | more)
        for fake, x in zip(results, real, strict=True):
            assert (fake.shape, fake.dtype, fake.stride()) == (x.shape, x.dtype, x.stride())
