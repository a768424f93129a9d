"""Scores, P and dS that JAX's attention keeps if asked (spec A-4, A-8, A-15), next to the
simulator's.
"""

import numpy as np
import pytest
from helpers.attention.attention_cases import SCALE, backward_options, call_options, integers

from fp8ref.jax.attention import DeviceCall, attention
from fp8ref.sim.attention import attention as simulator
from fp8ref.sim.attention.gradients import gradients as attention_gradients
from fp8ref.spec.attention.variants import VARIANTS, Mask

MASK = Mask(causal=True, window=(40, None))


@pytest.mark.slow  # JAX compiles for seconds
def test_of_integers_all_matrices_are_the_simulators():
    q, k, v, do = integers(b=1, h=2, heads=1, tq=70, tk=150, d=32)
    how = {"variant": "cudnn", "mask": MASK, "scale": SCALE}
    right = simulator.forward(q, k, v, **call_options(keep_p=True, keep_s=True, **how))
    found = attention.forward(
        q, k, v, **call_options(keep_p=True, keep_s=True, arithmetic="stated", **how)
    )
    np.testing.assert_array_equal(found.scores, right.scores)
    np.testing.assert_array_equal(found.p_codes, right.p_codes)
    assert (np.isneginf(right.scores)).any()
    of_sim = attention_gradients.backward(
        do, q, k, v, right, **backward_options(keep_ds=True, **how)
    ).matrices
    mine = attention.backward(
        do, q, k, v, found, **backward_options(keep_ds=True, arithmetic="stated", **how)
    ).matrices
    assert set(mine) == set(of_sim) == {"p_codes", "ds", "ds_codes"}
    np.testing.assert_array_equal(mine["p_codes"], of_sim["p_codes"])
    # dP is a sum of products of up to 9 bits over 32 features: its float32 sum is exact, and so is
    # dS but for two roundings a side.
    np.testing.assert_allclose(
        mine["ds"], of_sim["ds"], rtol=2**-20, atol=2**-20 * np.abs(of_sim["ds"]).max()
    )


def test_what_a_variant_has_is_kept():
    assert VARIANTS["mxfp8"].gradient_matrices == ("p_codes", "ds")
    assert VARIANTS["bf16"].gradient_matrices == ("ds",)
    with pytest.raises(
        ValueError, match="keep_s keeps float32 scores; variant 'exact' has real numbers"
    ):
        attention.forward(
            *integers(b=1, h=1, heads=1, tq=4, tk=4, d=16)[:3],
            variant=DeviceCall(variant="exact", keep_s=True),
        )
