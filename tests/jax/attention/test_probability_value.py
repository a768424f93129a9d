"""The product of probabilities and values, and the output of its sums (spec A-9, A-10)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.jax.attention import probability_value
from fp8ref.jax.attention.operands import inputs as inputs
from fp8ref.jax.attention.operands import operands as operands
from fp8ref.jax.attention.operands.operands import Parts
from fp8ref.spec.attention.variants import VARIANTS

F = np.float32


def parts(name: str, v) -> Parts:
    q = jnp.ones((1, 1, 32, 64))
    call = inputs.DeviceCall(variant=name, arithmetic="stated")
    given = inputs.prepare(q, v, v, call, None, None)
    return Parts(given, call, operands.quantize(given, call, {}))


@pytest.mark.parametrize("name", ["fa3", "cudnn"])
def test_quotients_are_rounded_as_stated(name):
    """XLA alone makes products with reciprocals of quotients, and quotients of such products."""
    v = np.ones((1, 1, 64, 64), F) * F(1.7)
    rng, variant = np.random.default_rng(0), VARIANTS[name]
    o, total = (
        rng.standard_normal((1, 1, 1, 32, 64)).astype(F),
        (1 + 20 * rng.random((1, 1, 1, 32))).astype(F),
    )
    total[..., 0], o[..., 0, :] = 0, 0
    found = jax.jit(lambda o, total, v: probability_value.finish(o, total, parts(name, v)))(
        o, total, v
    )
    if variant.finish == "divide":
        wanted = o / np.maximum(total, F(1))[..., None]
    else:
        scale_inv = F(1) / F(448 / F(1.7))
        with np.errstate(divide="ignore"):
            wanted = o * (np.where(total == 0, F(0), F(1) / total) * scale_inv)[..., None]
    np.testing.assert_array_equal(found, wanted)


def test_what_came_before_is_multiplied_and_rounded_first():
    """No fused multiply-add: RN32(o c) and then the sum."""
    rng = np.random.default_rng(1)
    v = rng.integers(-7, 8, (1, 1, 128, 64)).astype(F)
    v[0, 0, 0, 0] = 7
    o, c = rng.standard_normal((1, 1, 1, 32, 64)).astype(F), rng.random((1, 1, 1, 32)).astype(F)
    p = rng.integers(0, 9, (1, 1, 1, 32, 128)).astype(F)

    def run(o, c, p, v):
        here = parts("fa3_promoted", v)
        cast = jnp.pad(p, [(0, 0)] * 4 + [(0, here.grid.length - 128)]).astype(jnp.float8_e4m3fn)
        return probability_value.add(o, c, cast, here, jnp.int32(0), jnp.float32(1))

    wanted = o * c[..., None] + p[0, 0, 0] @ (v * 64)[0, 0]
    np.testing.assert_array_equal(jax.jit(run)(o, c, p, v), wanted)
