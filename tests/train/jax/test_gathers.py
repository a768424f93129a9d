import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from fp8ref.jax.kernels import plain
from fp8ref.spec.llama import EMBEDDING, LlamaConfig
from fp8ref.train.config.config import Config
from fp8ref.train.jax import gathers
from fp8ref.train.jax.mesh import Layout

CONFIG = Config(
    model=LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
).replace(data={"sequence_length": 32, "batch_size": 8})


# P-10, M-2
def test_the_embedding_table_is_gathered_in_bfloat16_and_its_gradient_summed_in_float32():
    """The rows, and every bit of the gradient, are those of rows gathered in float32 and rounded
    then.
    """
    layout = Layout(CONFIG.replace(parallel={"data": 2, "fsdp": 4}))
    table = np.random.default_rng(1).standard_normal((64, 16)).astype(np.float32)

    def rows(whole):
        def loss(table, tokens):
            found = plain.rounded(whole(table)[tokens], jnp.bfloat16).astype(jnp.float32)
            return layout.mean((found**3).mean())

        return jax.jit(
            jax.value_and_grad(
                layout.map(loss, (layout.parameter(EMBEDDING, table.shape), layout.tokens), P())
            )
        )

    def as_it_is(table):
        return jax.lax.all_gather(
            jax.lax.pcast(table, "data", to="varying"), "fsdp", axis=0, tiled=True
        )

    given = table, np.random.default_rng(0).integers(0, 64, (8, 8))
    step = rows(functools.partial(layout.whole, dtype=jnp.bfloat16))
    for mine, other in zip(step(*given), rows(as_it_is)(*given), strict=True):
        np.testing.assert_array_equal(mine, other)
    collectives = re.findall(
        r'"stablehlo\.(all_gather|reduce_scatter)".*?-> tensor<\d+x16x(\w+)>',
        step.lower(*given).as_text(),
        re.DOTALL,
    )
    assert collectives == [("all_gather", "bf16"), ("reduce_scatter", "f32")]


def test_a_gradient_of_weights_is_summed_in_the_reduce_dtype(rng):  # P-9
    """Of integers, whose sums are exact in bfloat16: scattered over fsdp, summed over data."""
    layout = Layout(CONFIG.replace(parallel={"data": 2, "fsdp": 4}))
    w = jnp.asarray(rng.integers(-2, 3, (8, 4)), jnp.bfloat16)
    g = jnp.asarray(rng.integers(-2, 3, (8, 8, 4)), jnp.bfloat16)  # of each device

    def step(dtype):
        def gradient(w, g):
            whole, vjp = jax.vjp(lambda w: gathers.weights(w, ("fsdp",), ("data",), dtype), w)
            return whole[None], vjp(g[0])[0]

        cut = P("fsdp"), P(("data", "fsdp"))
        return jax.jit(layout.map(gradient, cut, (P(("data", "fsdp")), P("fsdp"))))

    for dtype, name in (("float32", "f32"), ("bfloat16", "bf16")):
        whole, total = step(dtype)(w, g)
        np.testing.assert_array_equal(whole, np.broadcast_to(w, (8, 8, 4)))
        np.testing.assert_array_equal(total, np.asarray(g, np.float32).sum(0))
        text = step(dtype).lower(w, g).as_text()
        assert re.findall(
            r'"stablehlo\.(?:all_reduce|reduce_scatter)".*?-> tensor<[\dx]+x(\w+)>', text, re.DOTALL
        ) == [name, name]
