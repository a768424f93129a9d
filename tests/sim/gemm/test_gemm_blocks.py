"""GEMMs of operands with block scales, against rationals and integers step by step (spec G-13)."""

from fractions import Fraction

import numpy as np
import pytest
from helpers.gemm import exact, mma_integers

from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT32
from fp8ref.sim.gemm import gemm
from fp8ref.sim.gemm.accumulate import ACCUMULATIONS, Accumulation
from fp8ref.sim.gemm.tensor_core import UNITS
from fp8ref.sim.quantize import cast, scaling

INTEGERS = {
    "hopper": mma_integers.HOPPER,
    "ada": mma_integers.ADA,
    "blackwell": mma_integers.BLACKWELL,
}
RULES = ["exact", "f32", "hopper_fast", "hopper_slow", "blackwell"]


def accumulator(a, b, fmts, rule):
    """One block's sum: rows of codes."""
    x, y = (cast.decode(v, fmt) for v, fmt in zip((a, b), fmts, strict=True))
    if rule == "exact":
        return exact.rn32(
            sum(u * v for u, v in zip(exact.fractions(x), exact.fractions(y), strict=True))
        )
    if rule == "f32":
        acc = np.float32(0)
        for u, v in zip(x, y, strict=True):
            acc = np.float32(acc + u * v)
        return acc
    plan = ACCUMULATIONS[rule]
    bits = mma_integers.dot(
        a.tolist(),
        b.tolist(),
        tuple(f.name for f in fmts),
        INTEGERS[plan.unit.name],
        promotion=plan.promotion,
    )
    return np.uint32(bits).view(np.float32)


def by_hand(a, b, block, rule, scale):
    """The clause, an output at a time.

    A row's scale is found by dividing its index, not by spreading the scales.
    """
    out = np.empty((len(a.codes), len(b.codes)), np.float32)
    rows = [128 if q.granularity == "blockwise_128x128" else 1 for q in (a, b)]
    for m, n in np.ndindex(out.shape):
        total = np.float32(0)
        for i in range(a.codes.shape[1] // block):
            part = slice(i * block, (i + 1) * block)
            acc = accumulator(a.codes[m, part], b.codes[n, part], (a.fmt, b.fmt), rule)
            sa, sb = a.scale_inv[m // rows[0], i], b.scale_inv[n // rows[1], i]
            if scale == "each":
                total = np.float32(total + np.float32(np.float32(acc * sa) * sb))
            else:
                both = np.float32(sa * sb)
                total = exact.rn32(
                    Fraction(float(acc)) * Fraction(float(both)) + Fraction(float(total))
                )
        out[m, n] = total
    return out


def operands(rng, granularities, shapes, fmts=(E4M3FN, E4M3FN), policy="torchao"):
    """Normal numbers whose rows and columns differ in size, so that the blocks' scales differ."""
    result = []
    for granularity, shape, fmt in zip(granularities, shapes, fmts, strict=True):
        x = (
            rng.standard_normal(shape)
            * np.exp(rng.standard_normal((1, shape[1])))
            * np.exp(rng.standard_normal((shape[0], 1)))
        )
        result.append(
            scaling.quantize(x.astype(np.float32), fmt, granularity=granularity, policy=policy)
        )
    return result


@pytest.mark.parametrize("scale", ["each", "product"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("granularities", "fmts"),
    [
        (("blockwise_1x128", "blockwise_128x128"), (E4M3FN, E4M3FN)),
        (("blockwise_1x128", "blockwise_1x128"), (E5M2, E4M3FN)),
        (("blockwise_128x128", "blockwise_1x128"), (E4M3FN, E5M2)),
    ],
)
def test_blocks_of_128(granularities, fmts, rule, scale, rng):  # G-13
    a, b = operands(rng, granularities, ((3, 384), (4, 384)), fmts)
    epilogue = {"each": "scale_then_round", "product": "product_then_round"}[scale]
    expected = by_hand(a, b, 128, rule, scale)
    np.testing.assert_array_equal(gemm.matmul(a, b, accumulate=rule, epilogue=epilogue), expected)
    rounded = gemm.matmul(a, b, accumulate=rule, epilogue=epilogue, out_dtype=BFLOAT16)
    np.testing.assert_array_equal(rounded, cast.round_to(expected, BFLOAT16))


@pytest.mark.grid(2)
@pytest.mark.parametrize("scale", ["each", "product"])
@pytest.mark.parametrize(("m", "n"), [(1, 130), (129, 2), (2, 128), (2, 127)])
def test_ragged_blocks(m, n, scale, rng):  # G-13, S-6
    """128 x 128 blocks whose last one is shorter, on either side."""
    a, b = operands(rng, ("blockwise_128x128", "blockwise_128x128"), ((m, 256), (n, 256)))
    assert (a.scale.shape, b.scale.shape) == ((-(-m // 128), 2), (-(-n // 128), 2))
    epilogue = {"each": "scale_then_round", "product": "product_then_round"}[scale]
    np.testing.assert_array_equal(
        gemm.matmul(a, b, epilogue=epilogue), by_hand(a, b, 128, "exact", scale)
    )


@pytest.mark.parametrize("rule", ["exact", "f32", "hopper_fast", "ada"])
def test_microscaled(rule, rng):  # G-13
    """Scales of e8m0 are powers of two: scaling rounds nothing, so that both orders of the scales
    give the same.
    """
    a, b = operands(
        rng, ("mx_1x32", "mx_1x32"), ((5, 160), (6, 160)), (E4M3FN, E5M2), policy="mx_rceil"
    )
    expected = by_hand(a, b, 32, rule, "each")
    np.testing.assert_array_equal(gemm.matmul(a, b, accumulate=rule), expected)
    np.testing.assert_array_equal(
        gemm.matmul(a, b, accumulate=rule, epilogue="product_then_round"), expected
    )


def test_both_orders_of_the_scales_and_one_rounding_or_two_differ(rng):
    a, b = operands(rng, ("blockwise_1x128", "blockwise_1x128"), ((20, 512), (20, 512)))
    each, product = (
        gemm.matmul(a, b, epilogue=e) for e in ("scale_then_round", "product_then_round")
    )
    unfused = np.zeros((20, 20), np.float32)
    for i in range(4):
        one = [
            q._replace(
                codes=q.codes[:, 128 * i : 128 * (i + 1)], scale_inv=q.scale_inv[:, i : i + 1]
            )
            for q in (a, b)
        ]
        unfused = unfused + gemm.matmul(*one, epilogue="product_then_round")
    for other in (each, unfused):
        assert 0.05 < (product != other).mean() < 0.9


def test_a_plan_does_not_reach_across_blocks(rng):
    """Fast accumulation over blocks of 128 promotes every 128 all the same; a plan of one's own may
    promote earlier.
    """
    a, b = operands(rng, ("blockwise_1x128", "blockwise_1x128"), ((8, 512), (8, 512)))
    fast, slow = (gemm.matmul(a, b, accumulate=how) for how in ("hopper_fast", "hopper_slow"))
    np.testing.assert_array_equal(fast, slow)
    earlier = gemm.matmul(
        a, b, accumulate=Accumulation(name="64", unit=UNITS["hopper"], promotion=64)
    )
    assert (fast != earlier).any()


@pytest.mark.parametrize("epilogue", ["round_then_bias", "bias_then_round"])
def test_a_bias_is_added_once_after_all_blocks(epilogue, rng):  # G-13, G-15
    a, b = operands(rng, ("blockwise_1x128", "blockwise_128x128"), ((3, 256), (5, 256)))
    bias = cast.round_to(rng.standard_normal(5).astype(np.float32) * 10, BFLOAT16)
    total = by_hand(a, b, 128, "exact", "each")
    first = cast.round_to(total, BFLOAT16) if epilogue == "round_then_bias" else total
    expected = cast.round_to(first + bias, BFLOAT16)
    np.testing.assert_array_equal(
        gemm.matmul(a, b, epilogue=epilogue, bias=bias, out_dtype=BFLOAT16), expected
    )


def test_a_block_with_a_nan_spoils_its_rows_alone(rng):
    """NaN codes and a NaN scale, an infinite amax whose scale_inv is infinite (S-3), and blocks of
    zeros next to them.
    """
    x, w = (
        rng.standard_normal((4, 256)).astype(np.float32),
        rng.standard_normal((3, 256)).astype(np.float32),
    )
    clean = gemm.matmul(
        *(scaling.quantize(v, E4M3FN, granularity="blockwise_1x128") for v in (x, w)),
        out_dtype=FLOAT32,
    )
    x[1, 130], x[2, 3], x[3, :128] = np.nan, np.inf, 0
    a, b = (scaling.quantize(v, E4M3FN, granularity="blockwise_1x128") for v in (x, w))
    for epilogue in ("scale_then_round", "product_then_round"):
        out = gemm.matmul(a, b, epilogue=epilogue)
        assert np.isnan(out[1:3]).all()
        assert np.isfinite(out[[0, 3]]).all()
        if epilogue == "scale_then_round":
            np.testing.assert_array_equal(out[0], clean[0])
