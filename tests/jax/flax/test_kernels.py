"""Flax's hooks where Triton's kernels, interpreted, make the casts: the same bits as XLA's."""

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("triton")

from fp8ref import jax as fj
from fp8ref.jax.kernels import TritonKernels, casting
from fp8ref.jax.linear.observer import observing

X = jax.random.normal(jax.random.key(1), (2, 20, 32), jnp.bfloat16)
DTYPES = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}


class NnxMLP(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.gate, self.up = (nnx.Linear(32, 48, rngs=rngs, **DTYPES) for _ in range(2))
        self.down = nnx.Einsum("btf,fd->btd", (48, 32), rngs=rngs, **DTYPES)

    def __call__(self, x):
        return self.down(self.gate(x) * self.up(x))


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate, up = (nn.Dense(48, name=name, **DTYPES)(x) for name in ("gate", "up"))
        return nn.DenseGeneral(32, name="down", **DTYPES)(gate * up)


def squares(y):
    return (y.astype(jnp.float32) ** 2).mean()


def nnx_step(recipe, kernels, observer):
    model = fj.flax.convert(NnxMLP(), recipe)
    if recipe == "delayed":
        fj.flax.share_inputs(model, {"up": "gate"})
        with kernels():
            fj.flax.calibrate(model, [X])
    run = nnx.jit(lambda m, x: fj.flax.value_and_grad(lambda m, x: squares(m(x)))(m, x))
    with kernels(), observer:
        loss, grads, seen = run(model, X)
    return loss, nnx.to_pure_dict(grads), seen


def linen_step(recipe, kernels, observer):
    model = fj.flax.convert(LinenMLP(), recipe, inputs=(X,))
    variables = model.init(jax.random.key(0), X)
    if recipe == "delayed":
        model = fj.flax.share_inputs(model, {"up": "gate"})
        with kernels():
            variables = fj.flax.calibrate(variables, [X], apply=model.apply)

    def loss(variables, x):
        return squares(model.apply(variables, x))

    with kernels(), observer:
        return jax.jit(fj.flax.value_and_grad(loss))(variables, X)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.grid(2)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("step", [nnx_step, linen_step])
def test_kernels_change_no_bit_of_a_step(step, recipe):  # M-11
    """Loss, gradients and observations, after a calibration; of weights [K, N]."""
    launched = step(recipe, lambda: casting(TritonKernels()), contextlib.nullcontext())
    same(launched, step(recipe, contextlib.nullcontext, contextlib.nullcontext()))


@pytest.mark.parametrize("step", [nnx_step, linen_step])
def test_an_observer_sees_what_kernels_cast(step):
    """Operands in high precision, codes, scales and results of all GEMMs."""
    seen = []
    for kernels in (contextlib.nullcontext, lambda: casting(TritonKernels())):
        calls = {}

        def record(name, gemm, *operands, calls=calls):
            calls[name, gemm] = operands

        jax.block_until_ready(step("tensorwise", kernels, observing(record)))
        jax.effects_barrier()
        seen.append(calls)
    assert len(seen[0]) == 9
    same(*(dict(sorted(calls.items())) for calls in seen))


def test_hooks_launch_kernels():
    """For the input and the weight of each of three linears."""
    model = fj.flax.convert(NnxMLP(), "tensorwise")
    with casting(TritonKernels()):
        program = str(jax.make_jaxpr(lambda x: nnx.merge(*nnx.split(model))(x))(X))
    assert program.count("fp8ref_kernel") == 6
