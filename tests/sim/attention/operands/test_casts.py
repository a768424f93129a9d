"""Attention with single casts: without any it is real attention, and each cast changes what it
should (spec E-9).
"""

import numpy as np
import pytest
from helpers.attention.attention_cases import backward_options, call_options

from fp8ref.selection import attention_casts
from fp8ref.sim.attention import attention
from fp8ref.sim.attention.gradients import gradients as attention_gradients
from fp8ref.sim.attention.operands import casts as casts_of_attention
from fp8ref.spec.attention.variants import Mask

LAYER = "model.layers.0.self_attn"


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((2, 4, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16), (2, 4, 24, 16))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def test_without_a_cast_it_is_real_attention():
    q, k, v, do = tensors()
    none = attention_casts.of("cudnn", (), LAYER)
    how = {"variant": "exact", "mask": Mask(causal=True)}
    forward = attention.forward(q, k, v, **call_options(**how))
    # Both are in float64 and rounded once to float32 at the end, the exact one; 24 eps of float64
    # are far below half an ulp.
    np.testing.assert_allclose(
        casts_of_attention.forward(q, k, v, none).o, forward.o, rtol=2**-23, atol=2**-30
    )
    exact = attention_gradients.backward(do, q, k, v, forward, **backward_options(**how))
    # dS is rounded to float32 before its products: 2^-24 of each of 24 terms of at most 2^4 times
    # 2^2.
    for mine, real in zip(
        casts_of_attention.backward(do, q, k, v, none), (exact.dq, exact.dk, exact.dv), strict=True
    ):
        np.testing.assert_allclose(mine, real, rtol=2**-23, atol=24 * 2**-24 * 2**6)


@pytest.mark.parametrize(
    ("role", "changes"),
    [
        ("q", "o dq dk dv"),
        ("k", "o dq dk dv"),
        ("v", "o dq dk"),
        ("p", "o dq dk dv"),
        ("do", "dq dk dv"),
        ("ds", "dq dk"),
    ],
)
def test_a_cast_changes_what_is_made_of_its_operand_alone(role, changes):
    q, k, v, do = tensors()
    none, one = (attention_casts.of("cudnn", roles, LAYER) for roles in ((), (role,)))
    found = []
    for casts in (none, one):
        grads = dict(
            zip(("dq", "dk", "dv"), casts_of_attention.backward(do, q, k, v, casts), strict=True)
        )
        found.append({"o": casts_of_attention.forward(q, k, v, casts).o} | grads)
    assert (
        " ".join(name for name in found[0] if not np.array_equal(found[0][name], found[1][name]))
        == changes
    )
