"""The backward pass of attention in FP8 (spec A-15); tests/parity holds it to the simulator."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention import attention_cases as cases
from helpers.attention.attention_cases import backward_options, call_options

from fp8ref.formats import BFLOAT16, E5M2
from fp8ref.jax.attention import attention
from fp8ref.jax.attention.gradients import gradients as gradients
from fp8ref.sim.attention import attention as sim
from fp8ref.sim.attention.gradients import gradients as sim_gradients
from fp8ref.spec.attention.variants import VARIANTS, Mask

# Many small numbers and few large ones: dS then uses what e5m2 has more of than e4m3.
WIDE = dataclasses.replace(VARIANTS["cudnn"], gradient_fmt=E5M2, out=BFLOAT16)


def test_gradients_in_e5m2():  # A-15, step 1 and 7: a product has one operand of each format
    q, k, v, do = cases.integers(b=1, h=2, heads=1)
    how = {"variant": WIDE, "mask": Mask(causal=True), "scale": cases.SCALE}
    result = sim.forward(q, k, v, **call_options(**how))
    wanted = sim_gradients.backward(do, q, k, v, result, **backward_options(**how))
    run = jax.jit(
        lambda do, *given: attention.backward(
            do,
            *given,
            attention.forward(*given, **call_options(arithmetic="stated", **how)),
            **backward_options(arithmetic="stated", **how),
        )
    )
    found = run(do, q, k, v)
    np.testing.assert_array_equal(
        np.asarray(found.tensors["do"].codes).view(np.uint8), wanted.tensors["do"].codes
    )
    assert found.tensors["do"].codes.dtype == jnp.float8_e5m2
    assert found.scale_ds.scale == wanted.scale_ds.scale
    # as in tests/parity: one in a thousand may be a neighbor
    for mine, other in zip(found[:3], wanted[:3], strict=True):
        assert (np.asarray(mine) != other).mean() < 2e-3


@pytest.mark.slow
def test_a_late_scale_clips():  # A-15, step 7
    q, k, v, do = (jnp.asarray(x) for x in cases.integers(b=1, h=2, heads=1))
    result = attention.forward(q, k, v, variant="cudnn")
    current = attention.backward(do, q, k, v, result, variant="cudnn")
    late = attention.backward(
        do, q, k, v, result, variant="cudnn", scales={"ds": current.scale_ds.scale * 8}
    )
    assert current.saturated == 0
    assert late.saturated > 0
    assert late.amaxes["ds"] == current.amaxes["ds"]


def test_formats_of_outputs():
    assert VARIANTS["cudnn"].output_scaling == ("tensor", "te_current")
    assert VARIANTS["mxfp8"].output_scaling == (None, "te_current")
    assert VARIANTS["bf16"].output_scaling == (None, "te_current")
