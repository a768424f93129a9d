"""Heads and tiles of quantized operands (spec A-2, A-4)."""

import dataclasses

import numpy as np
import pytest

from fp8ref.formats import E4M3FN
from fp8ref.sim.attention import attention
from fp8ref.sim.attention.operands.inputs import prepare
from fp8ref.sim.attention.operands.operands import Parts, quantize
from fp8ref.sim.gemm import accumulate
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import VARIANTS

F = np.float32


def inputs(b=1, h=4, heads=2, tq=70, tk=150, d=64):
    rng = np.random.default_rng(0)
    return tuple(
        rng.normal(size=(b, n, t, d)).astype(F) for n, t in ((h, tq), (heads, tk), (heads, tk))
    )


def test_grouped_queries_are_repeated_keys():  # of one tensor, so that scales are the same
    q, k, v = inputs(h=4, heads=2)
    grouped = attention.forward(q, k, v, variant="cudnn")
    repeated = attention.forward(q, k.repeat(2, axis=1), v.repeat(2, axis=1), variant="cudnn")
    np.testing.assert_array_equal(grouped.o, repeated.o)


@pytest.mark.parametrize("name", ["fa3", "cudnn", "mxfp8", "fa3_paper"])
def test_scores_of_tiles_are_products_of_dequantized_rows(name):
    """Exact products, but for a tensor core's 13 bits: 2 steps of 33 terms below 2^-13 of the
    largest product.
    """
    q, k, v = inputs(tq=9, tk=300)
    problem = prepare(q, k, v, Call(variant=name), None, None)
    tensors = quantize(problem, {})
    parts = Parts(problem, tensors)
    assert sorted(key for tile in parts.tiles for key in range(*tile)) == list(range(300))
    for begin, end in parts.tiles:
        s = parts.scores(0, 3, slice(0, 9), begin, end)[:, : end - begin]
        factors, factor = parts.factors(0, 3, 0, begin)
        s = s * factor if problem.variant.scores == "raw" else s * np.prod(factors)
        scale = 1 / 8 * (np.log2(np.e) if problem.variant.base == "2" else 1)
        rows = {
            role: deq(tensors[role], head, x, name)
            for role, head, x in (("q", 3, problem.q), ("k", 1, problem.k))
        }
        expected = rows["q"] @ rows["k"][begin:end].T * scale
        np.testing.assert_allclose(
            s,
            expected,
            atol=66 * 2.0**-13 * np.abs(rows["q"]).max() * np.abs(rows["k"]).max() * scale,
        )
        values, _ = parts.values(0, 3, begin, end)
        np.testing.assert_array_equal(values[: end - begin], tensors["v"].values[0, 1, begin:end])
        assert not values[end - begin :].any() or end < 300


@pytest.mark.parametrize("plan", ["hopper_fast", "hopper_slow", "blackwell"])
def test_scores_are_the_plans_sums(plan):  # A-4, G-12: hopper_slow promotes within 256 features
    q, k, v = inputs(tq=9, tk=200, d=256)
    problem = prepare(
        q, k, v, Call(variant=dataclasses.replace(VARIANTS["fa3"], plan=plan)), None, None
    )
    tensors = quantize(problem, {})
    parts = Parts(problem, tensors)
    for begin, end in parts.tiles:
        for rows in (slice(0, 4), slice(4, 9)):
            a, b = tensors["q"].values[0, 3, rows], tensors["k"].values[0, 1, begin:end]
            expected = accumulate.chains_plain(a, b, E4M3FN, E4M3FN, accumulate.ACCUMULATIONS[plan])
            s = parts.scores(0, 3, rows, begin, end)
            np.testing.assert_array_equal(s[:, : end - begin], expected)
            assert not s[:, end - begin :].any() or end < 200


def deq(t, head: int, x: np.ndarray, name: str) -> np.ndarray:
    """The rows of a head, in float64."""
    granularity = {"fa3": "head", "cudnn": "tensor", "mxfp8": "mx_1x32", "fa3_paper": "rows_128"}[
        name
    ]
    inverse = np.broadcast_to(attention.heads.spread(t.scale_inv, x.shape, granularity), x.shape)
    return (t.values * inverse)[0, head].astype(np.float64)
