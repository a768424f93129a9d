import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.models import own_configurations

from fp8ref.shared.errors import ConfigError
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import DataConfig
from fp8ref.train.jax.custom import build as custom_build
from fp8ref.train.jax.mesh import Layout
from fp8ref.train.jax.model import Read
from fp8ref.train.jax.step import EVERY_ROUNDING, State, Step

TOKENS = np.random.default_rng(0).integers(0, 256, (4, 17), np.int32)


def of(name: str = "Plain", **sections) -> Config:
    return Config(
        architecture=own_configurations.nnx(name), data=DataConfig(sequence_length=16, batch_size=4)
    ).replace(**sections)


def made(config: Config) -> Step:
    return Step(config, Layout(config), None)


def begun(step: Step, weights=None) -> State:
    return step.begin(weights)[0]


@pytest.mark.slow
def test_gradients_are_jax_s_through_the_rounded_weights():  # T-10
    config = of(numerics={"recipe": "bf16"})
    step, model = made(config), custom_build.build(of().architecture, 256, seed=0)
    graph, params = nnx.split(model)

    def loss(params, tokens):
        rounded = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        logits = nnx.merge(graph, rounded)(tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    expected, grads = jax.jit(jax.value_and_grad(loss), compiler_options=EVERY_ROUNDING)(
        params, TOKENS
    )
    state = begun(step)
    found, mine, *_ = jax.jit(step.gradients, compiler_options=EVERY_ROUNDING)(
        state.params, Read(state.fp8), TOKENS, {}
    )
    # Losses are float32 means of 64 logsumexps of 256 terms, in another order: 2^-24 a sum or
    # function, at most 16 in a row.
    np.testing.assert_allclose(found, expected, rtol=2**-20)
    # Gradients of logits are rounded to bfloat16: an ulp of 2^-8 where sums that differ as above
    # round differently, and it goes through three linears. Both are compared with the largest
    # gradient of a parameter.
    for name, value in custom_build.parameters(grads).items():
        np.testing.assert_allclose(mine[name], value, atol=3 * 2**-8 * float(jnp.abs(value).max()))


@pytest.mark.slow
def test_microbatches_sum_in_float32():  # T-7
    config = of(numerics={"recipe": "bf16"})
    step = made(config)
    state = begun(step)
    run = jax.jit(step.gradients, compiler_options=EVERY_ROUNDING)
    both = run(state.params, Read(state.fp8), TOKENS.reshape(2, 2, 17), {}).grads
    each = [run(state.params, Read(state.fp8), part, {}).grads for part in TOKENS.reshape(2, 2, 17)]
    for name, value in both.items():
        np.testing.assert_array_equal(value, (each[0][name] + each[1][name]) * np.float32(0.5))


def test_a_step_keeps_no_initial_parameters():
    """Those of a further recipe would be 4 bytes a parameter that nothing reads."""
    step = made(of(numerics={"recipe": "delayed"}))
    shapes = {shape for shape in of().shapes.parameters.values() if len(shape) == 2}
    assert not [
        leaf.shape
        for leaf in jax.tree.leaves((vars(step), vars(step.model)))
        if isinstance(leaf, jax.Array) and leaf.shape in shapes
    ]
    assert step.model.states().keys() == {"up", "down"}


def test_microbatches_are_one_pass_in_the_program():  # T-7
    step = made(of(numerics={"recipe": "delayed"}))
    shapes = jax.eval_shape(
        lambda: begun(
            step, {name: np.zeros(shape) for name, shape in of().shapes.parameters.items()}
        )
    )
    arguments = shapes.params, Read(shapes.fp8)
    programs = [
        str(jax.make_jaxpr(step.gradients)(*arguments, np.zeros((parts, 1, 17), np.int32), {}))
        for parts in (2, 4)
    ]
    assert len({program.count("dot_general[") for program in programs}) == 1
    assert programs[0].count("dot_general[") > 0


def test_weights_replace_the_model_s_own():
    step = made(of())
    given = {
        name: np.full(shape, 0.25, np.float32) for name, shape in of().shapes.parameters.items()
    }
    assert float(begun(step, given).params["up.kernel"][0, 0]) == 0.25
    with pytest.raises(ConfigError, match=r"up\.bias does not"):
        begun(step, given | {"up.bias": np.zeros(3, np.float32)})
    with pytest.raises(ConfigError, match=r"more does not"):
        begun(step, given | {"more": np.zeros(3, np.float32)})


def test_states_of_delayed_scaling_are_restored_by_the_names_of_linears():
    step = made(of(numerics={"recipe": "delayed"}))
    state = begun(step)
    after = jax.jit(step.train)(state, TOKENS, np.float32(1e-3))[0]
    tensors = step.tensors(after)
    assert tensors["fp8"].keys() == {"up", "down"}
    again = step.restored(state, tensors)
    for mine, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert any(
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(again.fp8), jax.tree.leaves(state.fp8), strict=True)
    )
