"""Projections of experts in Flax NNX: converted as linears, by grouped recipes (spec X-8, X-16)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp8ref import jax as fj
from fp8ref.selection import grouped as recipes
from fp8ref.selection.rules import Rule
from fp8ref.sim.gemm import hardware

SIZES = jnp.array([20, 0, 9])  # of 32 rows: expert 1 has none, and 3 rows are in no group
X = jnp.asarray(np.random.default_rng(0).standard_normal((32, 16)), jnp.bfloat16)


class Model(nnx.Module):
    """A router in name, and two projections of three experts."""

    def __init__(self, rngs):
        self.gate = nnx.Linear(16, 16, rngs=rngs, dtype=jnp.bfloat16)
        self.up = fj.flax.GroupedLinear(3, 16, 32, rngs=rngs, dtype=jnp.bfloat16)
        self.down = fj.flax.GroupedLinear(3, 32, 16, rngs=rngs, dtype=jnp.bfloat16)

    def __call__(self, x):
        return self.gate(self.down(nnx.relu(self.up(x, SIZES)), SIZES))


def model():
    return Model(nnx.Rngs(0))


def loss(model, x):
    return (model(x).astype(jnp.float32) ** 2).mean()


def test_a_converted_layer_multiplies_by_the_grouped_recipe():
    layer = fj.flax.convert(nnx.Dict(up=model().up), "rowwise").up
    assert layer.ragged_dot.of_groups == recipes.by_name("rowwise")  # torchao's for experts
    weights = jnp.asarray(np.random.default_rng(1).standard_normal((32, 32)), jnp.bfloat16)

    def by_hand(kernel, x):
        return (
            fj.grouped.apply(x, kernel.astype(jnp.bfloat16), SIZES, recipe="rowwise")[0] * weights
        ).sum()

    found, grads = nnx.jit(nnx.value_and_grad(lambda layer, x: (layer(x, SIZES) * weights).sum()))(
        layer, X
    )
    expected, of_kernel = jax.jit(jax.value_and_grad(by_hand))(layer.kernel.get_value(), X)
    assert found == expected
    np.testing.assert_array_equal(grads.kernel.get_value(), of_kernel)
    assert not of_kernel[1].any()
    assert of_kernel[2].any()


@pytest.mark.slow
def test_high_precision_and_back():
    """Without hooks the bits of a model that was never converted; with them again those of
    before.
    """
    changed = model()
    plain = loss(changed, X)
    fj.flax.convert(changed, "rowwise", filter_fqns=["gate"])
    of_fp8 = loss(changed, X)
    assert of_fp8 != plain
    fj.flax.deconvert(changed)
    assert changed.up.ragged_dot is jax.lax.ragged_dot
    assert loss(changed, X) == plain
    assert loss(fj.flax.convert(changed, "rowwise", filter_fqns=["gate"]), X) == of_fp8


@pytest.mark.slow
def test_delayed_scaling_observes_and_updates():
    converted = fj.flax.convert(nnx.Dict(up=model().up), "delayed")
    seen = nnx.jit(fj.flax.value_and_grad(lambda model, x: model.up(x, SIZES).sum()))(converted, X)[
        2
    ]
    fj.flax.update(converted, seen)
    state = converted.up.ragged_dot.state.get_value()
    assert {int(one.step) for one in state.values()} == {1}
    amax = np.abs(np.asarray(X, np.float32)[:29]).max()  # of rows that are in a group
    assert float(state["input"].amax_history[0]) == amax


def test_rules_filters_and_the_report():
    rules = (Rule(layers=("down",), gemms=("output",), roles=("input",), recipe="bf16"),)
    converted = fj.flax.convert(model(), "rowwise", filter_fqns=["up"], rules=rules)
    assert converted.up.ragged_dot is jax.lax.ragged_dot
    spec = converted.down.ragged_dot.of_groups.recipe.output
    assert spec.a is None
    assert spec.b is not None
    rows = {row.path: row for row in fj.flax.report(converted, (X,)).rows}
    assert (rows["down"].in_fp8, rows["down"].multiplications) == (3 * 32 * 16, 32 * 32 * 16)
    assert (rows["up"].recipe, rows["up"].multiplications) == (None, 32 * 16 * 32)
    assert "ragged_dot_general" not in {row.kind for row in rows.values()}


def test_what_experts_do_not_take_is_refused_by_name():
    with pytest.raises(
        ValueError, match="down: grouped GEMMs take no hook with simulated hardware"
    ):
        fj.flax.convert(
            model(), "rowwise", filter_fqns=["up", "gate"], multiply=hardware.by_name("hopper")
        )
    with pytest.raises(ValueError, match="down has a hook already, RaggedDot"):
        fj.flax.convert(fj.flax.convert(model(), "rowwise"), "rowwise")


@pytest.mark.parametrize(
    ("recipe", "how", "said"),
    [
        (
            "rowwise",
            {"multiply": hardware.by_name("hopper")},
            "up: grouped GEMMs take no hook with simulated hardware",
        ),
        (
            "delayed",
            {"rules": (Rule(layers=("up",), gemms=("output",), recipe="mxfp8"),)},
            "up: blocks begin with their group",
        ),
    ],
)
def test_what_is_refused_changes_nothing(recipe, how, said):
    how_made = {"rngs": nnx.Rngs(0), "kernel_init": nnx.initializers.zeros}
    changed = nnx.Dict(
        a=nnx.Linear(32, 32, **how_made), up=fj.flax.GroupedLinear(3, 32, 32, **how_made)
    )
    with pytest.raises(ValueError, match=said):
        fj.flax.convert(changed, recipe, **how)
    assert changed.a.dot_general is jax.lax.dot_general
    assert changed.up.ragged_dot is jax.lax.ragged_dot


@pytest.mark.parametrize(
    ("options", "in_fp8"),
    # the last has no experts in FP8
    [({}, False), ({"fp8_fqns": ["router"]}, True), ({"filter_fqns": ["up"]}, True)],
)
def test_a_router_stays_in_high_precision(options, in_fp8):
    how_made = {"rngs": nnx.Rngs(0), "kernel_init": nnx.initializers.zeros}
    layers = {"router": nnx.Linear(32, 16, **how_made), "plain": nnx.Linear(32, 16, **how_made)}
    changed = fj.flax.convert(
        nnx.Dict(**layers, up=fj.flax.GroupedLinear(16, 32, 32, **how_made)), "rowwise", **options
    )
    assert (changed.router.dot_general is not jax.lax.dot_general) == in_fp8
    assert changed.plain.dot_general is not jax.lax.dot_general
