"""Real arithmetic in tiles against one NumPy expression (spec A-1, A-14); tests/parity has the
simulator's.
"""

import functools

import jax
import numpy as np
from helpers.attention import attention_cases as cases

from fp8ref.jax.attention import real as real
from fp8ref.jax.attention.operands import inputs as inputs
from fp8ref.spec.attention.variants import Mask


def test_three_tiles_are_one_softmax():
    """float64 sums of 300 terms err by less than 2^-40; the results are rounded to float32."""
    q, k, v, do = cases.normal(1, 1, 1, 300, 300, 32)
    call = inputs.DeviceCall(variant="exact", mask=Mask(causal=True), scale=0.5)
    given = inputs.prepare(q, k, v, call, None, None)
    o, lse = jax.jit(functools.partial(real.forward, call=call))(given)
    found = jax.jit(functools.partial(real.backward, call=call))(do, given)
    q, k, v, do = (x[0, 0].astype(np.float64) for x in (q, k, v, do))
    s = np.where(np.tri(300, dtype=bool), q @ k.T / 2, -np.inf)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    total = p.sum(axis=1, keepdims=True)
    near = functools.partial(np.testing.assert_allclose, rtol=2.0**-23, atol=2.0**-40)
    near(lse[0, 0], (np.log(total) + s.max(axis=1, keepdims=True))[:, 0])
    p = p / total
    near(o[0, 0], p @ v)
    dp = do @ v.T
    ds = p * (dp - (p * dp).sum(axis=1, keepdims=True)) / 2
    for mine, wanted in ((found.dq, ds @ k), (found.dk, ds.T @ q), (found.dv, p.T @ do)):
        near(mine[0, 0], wanted)
    assert found.amaxes["ds"] == np.float32(np.abs(ds).max())
    assert {x.dtype for x in (o, lse, *found[:3])} == {np.dtype(np.float32)}
