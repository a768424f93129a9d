import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from fp8ref.jax import flax as fp8


def linen_model():
    model, x = nn.Dense(16, dot_general_cls=fp8.linen_dot_general("delayed")), jnp.ones((16, 16))
    return model, model.init(jax.random.key(0), x), x


def test_unseen_is_what_merges_into_anything_and_updates_nothing():  # H-4, H-5
    model, variables, x = linen_model()

    def loss_fn(variables, x):
        y, updated = model.apply(variables, x, mutable=[fp8.SEEN])
        return (y**2).mean(), updated

    _, _, seen = fp8.value_and_grad(loss_fn)(variables, x)
    both = fp8.merge(fp8.unseen(variables), seen)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), both, seen))
    after = fp8.update(variables, fp8.unseen(variables))
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), after[fp8.STATE], variables[fp8.STATE])
    )


def test_an_update_rolls_the_state_once():  # H-3
    model = nnx.Linear(16, 16, dot_general=fp8.nnx_dot_general("delayed"), rngs=nnx.Rngs(0))
    _, _, seen = fp8.value_and_grad(lambda model, x: (model(x) ** 2).mean())(
        model, jnp.full((16, 16), 3.0)
    )
    fp8.update(model, seen)
    state = model.dot_general.state.get_value()["input"]
    assert (int(state.step), float(state.amax_history[0]), float(state.stored)) == (
        1,
        3.0,
        float(jnp.float32(448) / 3),
    )


def loss_fn(model, x):
    return (model(x) ** 2).mean()


@pytest.mark.parametrize("recipe", [None, "bf16", "rowwise"])
def test_what_keeps_no_state_observes_nothing(recipe):
    """The same step for a model as it is, in bfloat16, or scaled dynamically: the gradients are
    nnx.value_and_grad's.
    """
    x = jnp.ones((16, 16))
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    model = model if recipe is None else fp8.convert(model, recipe)
    value, grads, seen = fp8.value_and_grad(loss_fn)(model, x)
    fp8.update(model, seen)
    same = jax.tree.map(
        lambda a, b: bool((a == b).all()), (value, grads), nnx.value_and_grad(loss_fn)(model, x)
    )
    assert jax.tree.all(same)
    assert not seen.layers


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise"])
def test_a_linen_loss_without_a_state_is_jax_value_and_grads(recipe):
    model, x = fp8.convert(nn.Dense(16), recipe, inputs=(jnp.ones((16, 16)),)), jnp.ones((16, 16))
    variables = model.init(jax.random.key(0), x)

    def loss(variables, x):
        return (model.apply(variables, x) ** 2).mean()

    value, grads, seen = fp8.value_and_grad(loss)(variables, x)
    expected = jax.value_and_grad(loss)(variables, x)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), (value, {"params": grads}), expected)
    )
    assert fp8.update(variables, seen).keys() == variables.keys()


def test_update_inside_value_and_grad_is_update_after_it():
    def run(**options):
        model = nnx.Linear(16, 16, dot_general=fp8.nnx_dot_general("delayed"), rngs=nnx.Rngs(0))
        out = nnx.jit(lambda model, x: fp8.value_and_grad(loss_fn, **options)(model, x))(
            model, jnp.full((16, 16), 3.0)
        )
        if not options:
            fp8.update(model, out[2])
        return out[:2], nnx.to_pure_dict(nnx.state(model))

    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), run(update=True), run()))
    assert len(run(update=True)[0]) == 2


def test_update_returns_the_variables_of_linen():
    model, variables, x = linen_model()

    def loss(variables, x):
        return (model.apply(variables, x) ** 2).mean()

    value, grads, after = jax.jit(fp8.value_and_grad(loss, update=True))(variables, x)
    expected, of_params, seen = jax.jit(fp8.value_and_grad(loss))(variables, x)
    updated = fp8.update(variables, seen)
    assert jax.tree.structure(after) == jax.tree.structure(updated)
    assert jax.tree.all(
        jax.tree.map(
            lambda a, b: bool((a == b).all()), (value, grads, after), (expected, of_params, updated)
        )
    )
    assert not jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), after[fp8.STATE], variables[fp8.STATE])
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fp8.value_and_grad(lambda v, x: 0.0, wrt=nnx.BatchStat)(linen_model()[1], 1),
            "wrt filters",
        ),
        (
            lambda: fp8.value_and_grad(lambda v, x: 0.0)({"parameters": 1}, 1),
            "got collections parameters",
        ),
        (lambda: fp8.update(linen_model()[1], {"fc": 1}), "observations of fj.flax.value_and_grad"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_arguments_by_name():
    x, model = jnp.ones((16, 16)), fp8.convert(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), "rowwise")
    assert fp8.value_and_grad(loss_fn)(model, x=x)[0] == fp8.value_and_grad(loss_fn)(model, x)[0]
    model, variables, x = linen_model()

    def linen_loss(variables, *, x):
        y, updated = model.apply(variables, x, mutable=[fp8.SEEN])
        return (y**2).mean(), updated

    assert fp8.value_and_grad(linen_loss)(variables, x=x)[0] > 0


def test_a_gradient_that_observes_nothing_warns():  # H-9
    """A loop around it would train with the first scales for ever."""
    message = (
        r"recipe 'delayed' scales by past amaxes, and this gradient observes none: .*Use "
        r"fj.flax.value_and_grad"
    )
    x, model = jnp.ones((16, 16)), fp8.convert(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), "delayed")
    nnx.jit(loss_fn)(model, x)  # without a gradient there is nothing to lose
    with pytest.warns(UserWarning, match=f"^Linear: {message}"):
        nnx.grad(loss_fn)(model, x)
    model, variables, x = linen_model()
    jax.jit(model.apply)(variables, x)
    with pytest.warns(UserWarning, match=f"^Dense: {message}"):
        jax.grad(lambda params: (model.apply({**variables, "params": params}, x) ** 2).mean())(
            variables["params"]
        )


def scanned(model, x, axes):
    return nnx.scan(
        lambda layer, x: layer(x), in_axes=(nnx.StateAxes(axes), nnx.Carry), out_axes=nnx.Carry
    )(model, x)


def test_a_scan_takes_the_state_of_a_stack_by_its_filter():
    """Observations go where the state goes; a filter that leaves both out is refused by the layer's
    name.
    """
    x = jnp.ones((16, 16))
    model = fp8.convert(
        nnx.vmap(lambda rngs: nnx.Linear(16, 16, rngs=rngs), in_axes=0)(nnx.Rngs(0).split(2)),
        "delayed",
    )
    by_filter = {(nnx.Param, fp8.Fp8State): 0, ...: None}
    seen = fp8.value_and_grad(lambda model: scanned(model, x, by_filter).sum())(model)[2]
    assert {v.shape for v in jax.tree.leaves(seen)} == {(2, 3)}
    with pytest.raises(
        ValueError,
        match=r"^Linear: a layer has one state; got a stack of \[2\] layers.* Name "
        r"fj.flax.Fp8State",
    ):
        scanned(model, x, {nnx.Param: 0, ...: None})


@pytest.mark.parametrize("setting", [nnx.set_graph_mode, nnx.set_graph_updates])
def test_modules_as_trees(setting):
    """Flax may be set to treat modules as trees, not as graphs.

    The gradient observes the same, and updates go on.
    """
    x = jnp.ones((16, 16))
    models = [fp8.convert(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), "delayed") for _ in range(2)]
    as_graph = nnx.jit(fp8.value_and_grad(loss_fn, update=True))(models[0], x)
    with setting(False):
        as_tree = nnx.jit(fp8.value_and_grad(loss_fn, update=True))(models[1], x)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), as_graph, as_tree))
    states = [nnx.state(model, fp8.Fp8State) for model in models]
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), *states))
    assert int(models[1].dot_general.state.get_value()["grad_output"].step) == 1


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), a, b))


class Pair(nnx.Module):
    """Two models in one, by which a tuple of them is judged."""

    def __init__(self):
        self.first, self.second = (nnx.Linear(16, 16, rngs=nnx.Rngs(seed)) for seed in (0, 1))


def gan(first, second, x):
    return (second(first(x)) ** 2).mean() + (second(x * 3) ** 2).mean()


@pytest.mark.parametrize("kind", [tuple, list])
def test_several_nnx_models_in_one_loss_are_those_of_one_model(kind):
    """A GAN, an actor and its critic, a student and its teacher: each observes, under its own place
    in the tuple.
    """
    x, whole, parts = (
        jnp.ones((16, 16)),
        fp8.convert(Pair(), "delayed"),
        fp8.convert(Pair(), "delayed"),
    )
    models = kind([parts.first, parts.second])
    value, grads, seen = nnx.jit(fp8.value_and_grad(lambda models, x: gan(*models, x)))(models, x)
    expected, of_whole, seen_of_whole = nnx.jit(
        fp8.value_and_grad(lambda whole, x: gan(whole.first, whole.second, x))
    )(whole, x)
    assert value == expected
    assert type(grads) is kind
    assert same(list(grads), [of_whole["first"], of_whole["second"]])
    fp8.update(models, fp8.merge(fp8.unseen(models), seen))
    fp8.update(whole, seen_of_whole)
    assert same(nnx.to_pure_dict(nnx.state(parts)), nnx.to_pure_dict(nnx.state(whole)))
    assert float(whole.second.dot_general.state.get_value()["input"].amax_history[0]) >= 3


def linen_pair(kind):
    model, x = nn.Dense(16, dot_general_cls=fp8.linen_dot_general("delayed")), jnp.ones((16, 16))
    return model, kind(model.init(jax.random.key(seed), x) for seed in (0, 1)), x


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("threaded", [False, True])
def test_several_linen_models_in_one_loss_are_those_of_one_model(kind, threaded):
    """Both have hooks of one path."""
    model, variables, x = linen_pair(kind)
    options = {"mutable": [fp8.SEEN]} if threaded else {}

    def loss(models, x):
        first = model.apply(models[0], x, **options)
        second = model.apply(models[1], (first[0] if threaded else first) * 2, **options)
        y = second[0] if threaded else second
        return ((y**2).mean(), kind([first[1], second[1]])) if threaded else (y**2).mean()

    value, grads, after = jax.jit(fp8.value_and_grad(loss, update=True))(variables, x)
    assert type(grads) is type(after) is kind

    class Pair(nn.Module):
        @nn.compact
        def __call__(self, x):
            one = {"features": 16, "dot_general_cls": fp8.linen_dot_general("delayed")}
            return nn.Dense(name="second", **one)(nn.Dense(name="first", **one)(x) * 2)

    first, second = variables
    whole = {key: {"first": first[key], "second": second[key]} for key in ("params", fp8.STATE)}
    expected, of_whole, updated = jax.jit(
        fp8.value_and_grad(lambda v, x: (Pair().apply(v, x) ** 2).mean(), update=True)
    )(whole, x)
    assert value == expected
    assert same(list(grads), [of_whole["first"], of_whole["second"]])
    assert same(
        [jax.tree.leaves(one[fp8.STATE]) for one in after],
        [jax.tree.leaves(updated[fp8.STATE][k]) for k in ("first", "second")],
    )


def test_lost_observations_name_their_model():
    """One of two models of equal paths has no gradient: the other's observations do not stand for
    its.
    """
    model, variables, x = linen_pair(tuple)

    def loss(models, x):
        return (model.apply(models[0], x) ** 2).mean() + jax.lax.stop_gradient(
            model.apply(models[1], x)
        ).mean()

    with pytest.raises(
        ValueError, match=r"^1\.Fp8DotGeneral_0: observations come out with the gradient"
    ):
        fp8.value_and_grad(loss)(variables, x)
    with pytest.raises(
        ValueError,
        match=r"^0.Fp8DotGeneral_0, 1.Fp8DotGeneral_0: .*a tuple of them.*got \('dict', "
        r"'NoneType'\)",
    ):
        fp8.value_and_grad(lambda models, x: (x.sum(), ({}, None)))(variables, x)
    with pytest.raises(ValueError, match=r"would be lost.*variables of all as its first argument"):
        fp8.value_and_grad(
            lambda one, other, x: (model.apply(one, x) + model.apply(other, x)).sum()
        )(*variables, x)


def test_wrt_of_the_first_argument():
    """As in nnx.grad, for the model; others are refused by a name that says what to do."""
    model, x = fp8.convert(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), "delayed"), jnp.ones((16, 16))
    bias = nnx.All(nnx.Param, nnx.PathContains("bias"))
    plain, of_state = (
        fp8.value_and_grad(loss_fn, wrt=wrt)(model, x)[1] for wrt in (bias, nnx.DiffState(0, bias))
    )
    assert same(plain, of_state)
    assert [path for path, _ in nnx.to_flat_state(of_state)] == [("bias",)]
    with pytest.raises(
        ValueError, match=r"first argument, 0; got wrt=DiffState\(argnum=1.* a tuple of them"
    ):
        fp8.value_and_grad(loss_fn, wrt=nnx.DiffState(1, nnx.Param))
    for wrong in (0, (0, 1)):
        with pytest.raises(ValueError, match=r"wrt is a filter such as nnx\.Param"):
            fp8.value_and_grad(loss_fn, wrt=wrong)
    with pytest.raises(ValueError, match="all of NNX, or all of linen; got NNX models and linen"):
        fp8.value_and_grad(loss_fn)((model, linen_model()[1]), x)
