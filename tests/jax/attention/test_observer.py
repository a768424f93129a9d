"""What JAX's attention shows of its passes (spec B-10): all that it made, from a compiled
program.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.jax.attention import DeviceCall, attention
from fp8ref.jax.attention import observer as attention_observer
from fp8ref.spec.attention.products import PARTS, SHOWN
from fp8ref.spec.attention.variants import Mask

CAUSAL = Mask(causal=True)


@pytest.mark.slow  # JAX compiles for seconds
def test_both_passes_are_shown_with_what_they_made():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, h, 40, 32)), jnp.bfloat16) for h in (2, 1, 1))

    def loss(q, k, v):
        return jnp.sum(
            attention.apply(
                q, k, v, variant=DeviceCall(variant="cudnn", mask=CAUSAL, layer="layer")
            ).astype(jnp.float32)
            ** 2
        )

    shown = []
    with attention_observer.watching(lambda *one: shown.append(one)):
        gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    jax.block_until_ready(gradients)
    jax.effects_barrier()
    assert sorted((layer, phase) for layer, phase, _ in shown) == [
        ("layer", "backward"),
        ("layer", "forward"),
    ]
    forward, backward = (
        {key: np.asarray(x) for key, x in arrays.items()}
        for _, phase, arrays in sorted(shown, key=lambda one: one[1] == "backward")
    )
    for arrays, phase in ((forward, "forward"), (backward, "backward")):
        assert {key.partition("/")[0] for key in arrays} == set(SHOWN[phase])
        assert {key.partition("/")[2] for key in arrays} == {*PARTS, "amax", "counts"}
    assert forward["p/counts"][0] == backward["ds/counts"][0] == 2 * 40 * 41 // 2
    result = attention.forward(
        q, k, v, variant=DeviceCall(variant="cudnn", mask=CAUSAL, keep_p=True, keep_s=True)
    )
    np.testing.assert_array_equal(forward["p/codes"], result.p_codes)
    assert forward["p/counts"][1:].tolist() == [result.saturated, result.lost]
    np.testing.assert_array_equal(forward["s/value"], result.scores)
    np.testing.assert_array_equal(
        forward["o/value"], result.o.astype(jnp.bfloat16).astype(jnp.float32)
    )
    np.testing.assert_array_equal(
        backward["dq/value"].astype(jnp.bfloat16), np.asarray(gradients[0])
    )
    assert attention_observer.watcher() is None
