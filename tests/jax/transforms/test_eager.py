"""Calls that nothing traces: they compile once."""

import jax
import jax.numpy as jnp
import pytest

from fp8ref.jax.attention import DeviceCall, attention
from fp8ref.jax.experts import grouped

ROWS, WEIGHTS = jnp.ones((32, 32)), jnp.ones((1, 32, 32))
HEADS = jnp.ones((1, 1, 16, 32), jnp.bfloat16)


def of_groups(x, layer):
    return jnp.sum(grouped.apply(x, WEIGHTS, jnp.array([32]), recipe="tensorwise", name=layer)[0])


def of_attention(x, layer):
    return jnp.sum(
        attention.apply(x, HEADS, HEADS, variant=DeviceCall(variant="bf16", layer=layer))
    )


@pytest.mark.parametrize(("function", "x"), [(of_groups, ROWS), (of_attention, HEADS)])
def test_the_second_eager_call_compiles_nothing_also_in_another_layer(function, x):
    compiled, counts = [], []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    for layer in ("layers.0", "layers.1"):
        function(x, layer)
        jax.grad(function)(x, layer)
        counts.append(len(compiled))
    assert 0 < counts[0] == counts[1]
