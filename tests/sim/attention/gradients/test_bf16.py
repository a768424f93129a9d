"""The backward pass in bfloat16 of a forward pass in FP8, next to its formulas in float64 (spec
A-25).
"""

import numpy as np
import pytest

from fp8ref.formats import BFLOAT16
from fp8ref.sim.attention import attention
from fp8ref.sim.attention.gradients import gradients as attention_gradients
from fp8ref.sim.quantize import cast
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import VARIANTS, Mask, differentiated

MASK = Mask(causal=True)
FP8 = [name for name, variant in VARIANTS.items() if variant.fmt.bits == 8]
NAMES = ("dq", "dk", "dv")


def given(tokens: int = 150, features: int = 32):
    rng = np.random.default_rng(0)
    return [
        rng.normal(size=(1, heads, tokens, features)).astype(np.float32) for heads in (4, 2, 2, 4)
    ]


def formulas(do, q, k, v, o, lse):
    """A-25 in float64, of operands rounded to bfloat16: (dq, dk, dv), and a bound on what casts and
    float32 change of each sum.

    P and dS are rounded to bfloat16, whose unit is 2^-8, and made of an exponential of a float32
    exponent: 2^-16 more of each. dP and D are float32 sums of 32 products: gamma(32) < 2^-18 of the
    magnitudes that they add, which cancel in dS.
    """
    q, k, v, do, o = (cast.round_to(x, BFLOAT16).astype(np.float64) for x in (q, k, v, do, o))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scale, t = 1 / np.sqrt(q.shape[-1]), q.shape[2]
    p = np.exp(scale * q @ k.swapaxes(-1, -2) - lse[..., None]) * np.tril(np.ones((t, t)))
    ds = p * (do @ v.swapaxes(-1, -2) - (do * o).sum(-1, keepdims=True)) * scale
    of_ds = (
        p
        * (np.abs(do) @ np.abs(v).swapaxes(-1, -2) + np.abs(do * o).sum(-1, keepdims=True))
        * scale
    )
    found = [(ds, k), (ds.swapaxes(-1, -2), q), (p.swapaxes(-1, -2), do)]
    rounded = [2**-8 * np.abs(ds) + 2**-18 * of_ds, 2**-8 * np.abs(p)]
    values = [a @ b for a, b in found]
    sizes = [
        e @ np.abs(b)
        for e, (_, b) in zip(
            (rounded[0], rounded[0].swapaxes(-1, -2), rounded[1].swapaxes(-1, -2)),
            found,
            strict=True,
        )
    ]

    def summed(x):
        return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)

    return [values[0], *map(summed, values[1:])], [sizes[0], *map(summed, sizes[1:])]


@pytest.mark.parametrize("name", FP8)
def test_gradients_are_those_of_the_formulas(name):
    """A result is rounded to bfloat16, 2^-8 of it.

    A hundredth of the bound is for 2^-16 of P and of sums over tokens.
    """
    do, *inputs = given()[::-1][:1] + given()[:3]
    variant = differentiated(name, "bf16")
    result = attention.forward(*inputs, variant=variant, mask=MASK)
    found = attention_gradients.backward(do, *inputs, result, variant=variant, mask=MASK)
    for role, right, size in zip(NAMES, *formulas(do, *inputs, result.o, result.lse), strict=True):
        bound = 1.01 * size + 2**-8 * np.abs(right)
        assert (np.abs(getattr(found, role) - right) <= bound).all(), role
    assert found.amaxes.keys() == {"do", "ds", *NAMES}
    assert found.scale_ds.scale == 1


def test_of_the_variants_own_statistics_they_are_those_of_bf16():  # bit for bit
    do, *inputs = given()[::-1][:1] + given()[:3]
    of_bf16 = attention.forward(*inputs, variant="bf16", mask=MASK)
    right = attention_gradients.backward(do, *inputs, of_bf16, variant="bf16", mask=MASK)
    variant = differentiated("fa3", "bf16")
    result = attention.forward(*inputs, variant=variant, mask=MASK)._replace(
        o=of_bf16.o, lse=of_bf16.lse
    )
    found = attention_gradients.backward(do, *inputs, result, variant=variant, mask=MASK)
    for mine, other in zip(found[:3], right[:3], strict=True):
        np.testing.assert_array_equal(mine, other)


def test_what_it_does_not_take_is_refused():
    with pytest.raises(
        ValueError, match=r"backward 'bf16' needs a forward pass in FP8; got bfloat16. Use 'cast'"
    ):
        differentiated("bf16", "bf16")
    do, *inputs = given(16)[::-1][:1] + given(16)[:3]
    variant = differentiated("cudnn", "bf16")
    result = attention.forward(*inputs, variant=variant)
    with pytest.raises(ValueError, match=r"takes scales for s; got 'ds'"):
        attention_gradients.backward(
            do, *inputs, result, variant=variant, scales={"ds": np.float32(1)}
        )
    with pytest.raises(ValueError, match=r"keep_ds needs a variant with FP8 P and dS"):
        attention_gradients.backward(
            do, *inputs, result, variant=Call(variant=variant, keep_ds=True)
        )
