"""A Flax model's evaluation by scales that no update has set is warned of where JAX shows them,
once a model.
"""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp8ref.jax import delayed
from fp8ref.jax import flax as fp8
from fp8ref.jax.flax import unset_scales

X = jax.random.normal(jax.random.key(1), (24, 32))


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, name="down")(nn.gelu(nn.Dense(64, name="up")(x)))


def of_nnx(recipe="delayed"):
    """A model, its evaluation, and a step of training."""
    model = fp8.convert(Model(), recipe)
    step = fp8.value_and_grad(lambda model, x: (model(x) ** 2).mean(), update=True)

    def train(model, jit=nnx.jit):
        jit(step)(model, X)
        return model

    return model, lambda model, x: model(x), train


def of_linen(recipe="delayed"):
    net = fp8.convert(Net(), recipe, inputs=(X,))
    step = fp8.value_and_grad(
        lambda variables, x: (net.apply(variables, x) ** 2).mean(), update=True
    )
    return (
        net.init(jax.random.key(0), X),
        net.apply,
        lambda variables, jit=jax.jit: jit(step)(variables, X)[2],
    )


KINDS = pytest.mark.parametrize("made", [of_nnx, of_linen])


def said(evaluate, *args):
    """The layers that an evaluation warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        evaluate(*args)
    assert all(
        "Call fp8ref.jax.flax.calibrate(model, batches) once" in str(w.message) for w in caught
    )
    return [str(w.message).partition(" scales by earlier steps")[0] for w in caught]


@KINDS
def test_an_evaluation_before_any_update_is_warned_of(made):  # H-9; TransformerEngine#982
    """Once each model, by the name of its first layer; never after an update or a calibration."""
    for _ in range(2):
        model, evaluate, train = made()
        assert [said(evaluate, model, X), said(evaluate, model, X)] == [["up"], []]
        assert (
            fp8.unset_layers(model) == ["up", "down"]
            if made is of_linen
            else sorted(fp8.unset_layers(model)) == ["down", "up"]
        )
        model = train(model)
        assert said(evaluate, model, X) == fp8.unset_layers(model) == []
    model, evaluate, _ = made()
    calibrated = fp8.calibrate(model, [X], **({} if made is of_nnx else {"apply": evaluate}))
    model = model if made is of_nnx else calibrated
    assert said(evaluate, model, X) == fp8.unset_layers(model) == []


@KINDS
def test_a_function_under_jit_that_closes_over_a_model_is_warned_of(made):  # H-9
    """While it is traced: it holds the numbers."""
    model, evaluate, train = made()
    assert said(jax.jit(lambda x: evaluate(model, x)), X) == ["up"]
    trained = train(made()[0])
    assert said(jax.jit(lambda x: evaluate(trained, x)), X) == []


@KINDS
def test_programs_that_take_a_model_are_silent_and_as_before(made):
    """Its states are traced: nothing is known, and nothing of the program changes with it."""
    model, evaluate, train = made()
    assert said(nnx.jit(evaluate), model, X) == []
    programs = [nnx.jit(evaluate).lower(one, X).as_text() for one in (model, train(made()[0]))]
    assert programs[0] == programs[1]
    assert "callback" not in programs[0]


def as_it_is(step):
    return step


def test_a_gradient_warns_of_what_it_lacks_alone():
    """One that observes nothing: it begins with scales of 1 too, and no calibration is its
    remedy.
    """
    variables, evaluate, _ = of_linen()
    with pytest.warns(UserWarning, match="observes none") as caught:
        jax.grad(lambda params: evaluate({**variables, "params": params}, X).sum())(
            variables["params"]
        )
    assert ["this gradient observes none" in str(w.message) for w in caught] == [True, True]


def test_variables_that_a_file_gave_back_are_looked_at():
    """As NumPy's arrays and scalars."""
    variables, evaluate, _ = of_linen()
    restored = jax.tree.map(
        lambda v: np.asarray(v)[()] if v.ndim == 0 else np.asarray(v), variables
    )
    assert [said(evaluate, restored, X), said(evaluate, restored, X)] == [["up"], []]


@pytest.mark.parametrize("made", [pytest.param(of_nnx, marks=pytest.mark.slow), of_linen])
def test_training_is_silent(made):
    """Its first scales are 1 by H-2, which Python reads where nothing is under jit."""
    model, _, train = made()
    assert said(lambda: train(model, as_it_is)) == []


@KINDS
def test_what_makes_a_model_is_silent(made):
    """Conversion, initialization and reports."""
    assert said(made) == []
    model = made()[0]
    if made is of_nnx:
        assert said(fp8.report, model, (X,)) == []
        assert said(lambda: nnx.eval_shape(lambda: of_nnx()[0](X))) == []


@KINDS
def test_a_recipe_without_states_is_silent(made):
    model, evaluate, _ = made("rowwise")
    assert said(evaluate, model, X) == fp8.unset_layers(model) == []


def test_an_error_filter_raises_in_each_evaluation():
    model, evaluate, _ = of_nnx()
    for _ in range(2):
        with pytest.raises(UserWarning, match="up scales by earlier steps"):
            evaluate(model, X)


def test_hooks_that_no_conversion_made_are_warned_of_once():
    unset_scales._warned.clear()
    layers = [
        nnx.Linear(32, 64, dot_general=fp8.nnx_dot_general("delayed", name=name), rngs=nnx.Rngs(0))
        for name in ("a", "b")
    ]
    assert [said(layer, X) for layer in layers] == [["a"], []]
    unset_scales._warned.clear()


def test_states_of_flaxs_own_rule_and_of_stacks_are_looked_at():
    states = delayed.init(fp8.flax_recipe(), (2,))
    assert delayed.unset(states)
    one = {role: state._replace(step=jnp.array([1, 0])) for role, state in states.items()}
    assert delayed.unset(one)
    both = {
        role: state._replace(step=np.array([1, 3]) if role != "grad_output" else state.step)
        for role, state in states.items()
    }
    assert not delayed.unset(both)  # a forward pass reads no scale of grad_output
    assert not jax.jit(lambda s: jnp.array(delayed.unset(s)))(states)  # traced: nobody knows
