import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp8ref import study
from fp8ref.jax import flax as fj


class Net(nnx.Module):
    """One of each layer, an einsum whose result has heads before tokens, and one with batch
    dims.
    """

    def __init__(self, rngs):
        kinds = {"rngs": rngs, "dtype": jnp.bfloat16}
        self.up = nnx.Linear(64, 128, **kinds)
        self.heads = nnx.LinearGeneral((128,), (4, 16), **kinds)
        self.turned = nnx.Einsum("...td,dhk->...htk", (64, 4, 16), **kinds)
        self.back = nnx.Einsum("bthk,hkd->btd", (4, 16, 64), **kinds)
        self.experts = nnx.Einsum("bhtk,hkj->bhtj", (4, 16, 16), **kinds)

    def __call__(self, x):
        y = self.turned(x) + self.heads(nnx.relu(self.up(x))).transpose(0, 2, 1, 3)
        return self.back(self.experts(y).transpose(0, 2, 1, 3))


@pytest.fixture(scope="module")
def net():
    return Net(nnx.Rngs(0))


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(1), (2, 96, 64)).astype(jnp.bfloat16)


def equal(a, b):
    return all(
        np.array_equal(p, q) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("jit", [False, True])
def test_operands_are_rows_and_no_bit_changes(net, x, jit):
    def loss(net):
        return (net(x).astype(jnp.float32) ** 2).mean()

    step = nnx.value_and_grad(loss)
    step = nnx.jit(step) if jit else step
    before = step(net)
    with study.record(net, rows=128) as found:
        during = step(net)
    assert equal(before, during)
    assert equal(before, step(net))
    assert found.uncalled == ["experts"]
    assert {
        name: (operand.kept.shape, operand.rows) for name, operand in found.operands.items()
    } == {
        "up/input": ((128, 64), 192),
        "up/weight": ((128, 64), 128),
        "up/grad_output": ((128, 128), 192),
        "heads/input": ((128, 128), 192),
        "heads/weight": ((64, 128), 64),
        "heads/grad_output": ((128, 64), 192),
        "turned/input": ((128, 64), 192),
        "turned/weight": ((64, 64), 64),
        "turned/grad_output": ((128, 64), 192),
        "back/input": ((128, 64), 192),
        "back/weight": ((64, 64), 64),
        "back/grad_output": ((128, 64), 192),
    }
    rows = np.asarray(x, np.float32).reshape(-1, 64)
    np.testing.assert_array_equal(found.operands["turned/input"].kept, rows[:128])
    np.testing.assert_array_equal(found.operands["turned/input"].columns, np.abs(rows).max(axis=0))
    kernel = np.asarray(net.up.kernel.get_value().astype(jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(found.operands["up/weight"].kept, kernel.T)


@pytest.mark.parametrize("jit", [False, True])
def test_of_a_layer_that_is_called_twice_all_is_of_the_first_call(jit):
    layer = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (4, 8))
    step = nnx.value_and_grad(lambda layer: (layer(layer(x)) ** 2).sum())
    with study.record(layer) as found:
        (nnx.jit(step) if jit else step)(layer)
    w = np.asarray(layer.kernel.get_value(), np.float64)
    first = np.asarray(x, np.float64)
    np.testing.assert_array_equal(found.operands["Linear/input"].kept, np.asarray(x))
    # the gradient of the first call's result: 2 y w^T; float32 sums of 8 products, twice, and a
    # result
    expected = 2 * (first @ w @ w) @ w.T
    np.testing.assert_allclose(
        found.operands["Linear/grad_output"].kept,
        expected,
        rtol=2**-18,
        atol=2**-18 * np.abs(expected).max(),
    )


def test_an_einsum_that_sums_a_letter_of_one_operand_is_no_linear():
    layer = nnx.Einsum("ab,bc->c", (8, 4), rngs=nnx.Rngs(0))
    with study.record(layer) as found:
        layer(jnp.ones((3, 8)))
    assert found.uncalled == ["Einsum"]


def test_the_gradient_of_a_result_in_another_order_has_the_rows_of_the_input(net, x):
    """dW = dY^T X, in float64, of all rows, against autodiff's."""
    with study.record(net, rows=256) as found:
        _, gradients = nnx.value_and_grad(lambda net: (net(x).astype(jnp.float32) ** 2).mean())(net)
    by_hand = (
        found.operands["turned/grad_output"].kept.astype(np.float64).T
        @ found.operands["turned/input"].kept
    )
    given = np.asarray(gradients["turned"]["kernel"].get_value(), np.float64).reshape(64, 64).T
    # autodiff's is rounded to bfloat16 once (2^-9) after sums of 192 products in float32
    np.testing.assert_allclose(by_hand, given, rtol=2**-7, atol=2**-8 * np.abs(given).max())


@pytest.mark.slow
def test_depth_is_the_error_of_the_converted_model(net, x):
    found = study.depth(net, lambda net: net(x), ["tensorwise"])
    plain, fp8 = (
        np.asarray(model(x), np.float64)
        for model in (net, fj.convert(nnx.clone(net), "tensorwise"))
    )
    one = found.outcomes["tensorwise"]
    assert one.output == pytest.approx(
        float(np.linalg.norm(fp8 - plain) / np.linalg.norm(plain)), rel=1e-12
    )
    assert (one.inputs["up"], one.inputs["turned"]) == (0.0, 0.0)
    assert 0 < one.inputs["heads"] < 0.1
    assert net.up.dot_general is jax.lax.dot_general


def test_delayed_scaling_is_refused_by_name(net, x):
    with pytest.raises(ValueError, match="delayed scaling takes amaxes of steps before"):
        study.depth(net, lambda net: net(x), ["delayed"])
    with pytest.raises(ValueError, match="run gives an array of floats"):
        study.depth(net, lambda net: "logits", ["tensorwise"])
