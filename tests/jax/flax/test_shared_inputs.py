"""Linears of one input: one state of it, and one cast in the compiled program (spec H-9)."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp8ref import jax as fj
from fp8ref.jax.flax.linen import linen_states

READERS = {"k": "q", "v": "q", "up": "gate"}
X = jax.random.normal(jax.random.key(1), (48, 32), jnp.bfloat16)
DTYPES = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
WIDTHS = {"q": 32, "k": 32, "v": 32, "o": 32, "gate": 64, "up": 64, "down": 32}


def block(linear, x):
    """Attention over heads and an MLP; linear(name) is a layer."""
    x = jnp.tanh(x)
    q, k, v = (linear(name)(x).reshape(-1, 4, 8) for name in "qkv")
    heads = nn.softmax(jnp.einsum("thd,shd->hts", q, k)) @ v.swapaxes(0, 1)
    x = jnp.tanh(x + linear("o")(heads.swapaxes(0, 1).reshape(x.shape)))
    return x + linear("down")(nn.silu(linear("gate")(x)) * linear("up")(x))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        for name, width in WIDTHS.items():
            inputs = 64 if name == "down" else 32
            setattr(self, name, nnx.Linear(inputs, width, use_bias=False, rngs=rngs, **DTYPES))

    def __call__(self, x):
        return block(lambda name: getattr(self, name), x)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        def linear(name):
            return nn.Dense(WIDTHS[name], use_bias=False, name=name, **DTYPES)

        return block(linear, x), None


class LinenStack(nn.Module):
    transform: str = ""

    @nn.compact
    def __call__(self, x):
        if not self.transform:
            return LinenBlock(name="block")(x)[0]
        axes = dict.fromkeys(("params", fj.flax.STATE, fj.flax.SEEN), 0)
        options = {"variable_axes": axes, "split_rngs": {"params": True}}
        if self.transform == "scan":
            return nn.scan(nn.remat(LinenBlock), length=2, **options)(name="block")(x)[0]
        return nn.vmap(LinenBlock, axis_size=2, in_axes=None, **options)(name="block")(x)[0]


class NnxStack(nnx.Module):
    def __init__(self, transform=""):
        self.transform, rngs = transform, nnx.Rngs(0)
        self.block = nnx.vmap(NnxBlock)(rngs.split(2)) if transform else NnxBlock(rngs)

    def __call__(self, x):
        if not self.transform:
            return self.block(x)
        axes = nnx.StateAxes({(nnx.Param, fj.flax.Fp8State): 0, ...: None})
        if self.transform == "scan":
            scanned = nnx.remat(lambda layer, x: layer(x))
            return nnx.scan(scanned, in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)(self.block, x)
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(axes, None))(self.block, x)


def squares(y):
    return (y.astype(jnp.float32) ** 2).mean()


class Nnx:
    """A model in training."""

    def __init__(self, recipe="delayed", readers=None, transform=""):
        self.model = fj.flax.convert(NnxStack(transform), recipe)
        if readers:
            assert fj.flax.share_inputs(self.model, readers) is self.model
        run = fj.flax.value_and_grad(lambda model, x: squares(model(x)), update=True)
        self._step = nnx.jit(run)

    def step(self, x):
        return self._step(self.model, x)

    def states(self):
        hooks = fj.flax.nnx.hooks(self.model)
        return {path.split(".")[-2]: hook.roles() for path, hook in hooks.items()}

    def program(self):
        graph, state = nnx.split(self.model)
        run = fj.flax.value_and_grad(lambda model, x: squares(model(x)))
        return jax.jit(lambda state, x: run(nnx.merge(graph, state), x)[:2]).lower(state, X)


class Linen:
    """A model in training."""

    def __init__(self, recipe="delayed", readers=None, transform=""):
        self.model = fj.flax.convert(LinenStack(transform), recipe, inputs=(X,))
        if readers:
            self.model = fj.flax.share_inputs(self.model, readers)
        self.variables = self.model.init(jax.random.key(0), X)
        self._step = jax.jit(fj.flax.value_and_grad(self.loss, update=True))

    def loss(self, variables, x):
        return squares(self.model.apply(variables, x))

    def step(self, x):
        loss, grads, self.variables = self._step(self.variables, x)
        return loss, grads

    def states(self):
        return {path[-2]: layer.roles for path, layer in linen_states(self.variables).items()}

    def program(self):
        return jax.jit(lambda *args: fj.flax.value_and_grad(self.loss)(*args)[:2]).lower(
            self.variables, X
        )


KINDS = pytest.mark.parametrize("kind", [Nnx, Linen])


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@KINDS
@pytest.mark.parametrize(
    ("recipe", "readers", "casts"),
    [
        ("tensorwise", None, 2),  # of q, k and v; of gate and up; o's has other dims
        ("delayed", None, 5),
        ("delayed", READERS, 2),
    ],
)
def test_casts_of_inputs_in_the_compiled_program(kind, recipe, readers, casts):  # H-9
    """XLA merges equal casts; by separate states they are not equal."""
    program = kind(recipe, readers).program().compile().as_text()
    assert len(re.findall(r"f8e4m3fn\[48,32\]\S* convert\(", program)) == casts


@pytest.mark.grid(2)
@KINDS
@pytest.mark.parametrize("transform", ["", "scan", "vmap"])
def test_a_shared_state_changes_no_bit(kind, transform):  # H-9
    """Loss, gradients and all states of two steps; of stacked blocks too."""
    shared, separate = kind(readers=READERS, transform=transform), kind(transform=transform)
    for size in (1, 4):
        same(shared.step(X * size), separate.step(X * size))
    same(shared.states(), separate.states())
    assert shared.states().keys() == WIDTHS.keys()


@KINDS
def test_a_group_has_one_history(kind):
    """Of 7 linears 4 histories of inputs are kept."""

    def histories(model):
        kept = (
            nnx.state(model.model, fj.flax.Fp8State)
            if kind is Nnx
            else model.variables[fj.flax.STATE]
        )
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(kept)]
        return sum("'input'" in path and "amax_history" in path for path in paths)

    assert (histories(kind()), histories(kind(readers=READERS))) == (7, 4)


@KINDS
def test_of_inputs_that_differ_the_larger_amax_counts(kind):
    model = kind(readers={"down": "o"})
    separate = kind()
    model.step(X), separate.step(X)
    each = [separate.states()[name]["input"].amax_history for name in ("o", "down")]
    assert not np.array_equal(*each)
    same(model.states()["o"]["input"].amax_history, np.maximum(*each))
    same(model.states()["down"]["input"], model.states()["o"]["input"])


def test_linen_takes_the_states_of_separate_inputs():
    """A reader's own scale of the shared input is not read: here three times the first reader's."""
    separate, shared = Linen(), Linen(readers=READERS)
    separate.step(X)

    def tripled(path, leaf):
        place = jax.tree_util.keystr(path)
        own = all(key in place for key in ("'up'", "'input'", "stored"))
        return leaf * 3 if own else leaf

    shared.variables = jax.tree_util.tree_map_with_path(tripled, separate.variables)
    same(shared.step(X), separate.step(X))
    same(shared.states(), separate.states())


def test_linen_variables_without_the_first_linear_are_refused():
    variables = Linen(readers=READERS).variables
    del variables[fj.flax.STATE]["block"]["gate"]
    with pytest.raises(ValueError, match=r"^block.up: it shares .* of gate's input, of which"):
        fj.flax.unseen(variables)


def test_nnx_shares_states_that_are_equal():
    """As those of a run are; others are refused."""
    trained, separate = Nnx(), Nnx()
    for model in (trained, separate):
        model.step(X)
    fj.flax.share_inputs(trained.model, READERS)
    same(trained.step(X), separate.step(X))
    up = separate.model.block.up.dot_general
    roles = up.roles()
    up.keep({**roles, "input": roles["input"]._replace(stored=jnp.float32(3))})
    with pytest.raises(ValueError, match=r"^block.up and block.gate share .*; the stored of"):
        fj.flax.share_inputs(separate.model, READERS)


def test_deconvert_takes_shared_states_out():
    model = fj.flax.deconvert(fj.flax.share_inputs(fj.flax.convert(NnxStack(), "delayed"), READERS))
    assert not nnx.to_flat_state(nnx.state(model, fj.flax.Fp8State))
    shared = Linen(readers=READERS).model
    assert type(fj.flax.deconvert(shared)) is LinenStack
    assert fj.flax.report(shared).rows == fj.flax.report(Linen().model).rows


def test_flax_to_own_layers_from_shared_states():
    """Flax keeps a state for each layer."""
    recipe = fj.flax.flax_recipe(16)
    shared, separate = Linen(recipe, READERS), Linen(recipe)
    for model in (shared, separate):
        model.step(X)
    same(fj.flax.to_flax(shared.variables), fj.flax.to_flax(separate.variables))


@KINDS
@pytest.mark.parametrize(
    ("readers", "message"),
    [
        ({"k": "query"}, "share_inputs: no parent has k and query in FP8; in FP8 are .*block.k"),
        ({"v": "k", "k": "q"}, "share_inputs takes the first reader of each input; got k as"),
    ],
)
def test_pairs_that_are_not_there_are_refused(kind, readers, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        fj.flax.share_inputs(kind().model, readers)


def test_models_without_conversion_are_refused():
    with pytest.raises(ValueError, match=r"got LinenStack. Convert it first"):
        fj.flax.share_inputs(LinenStack(), READERS)


def test_linen_layers_in_transformations_of_their_own_are_refused():
    class Apart(nn.Module):
        @nn.compact
        def __call__(self, x):
            return sum(nn.remat(nn.Dense)(32, name=name)(x) for name in "qk")

    model = fj.flax.share_inputs(fj.flax.convert(Apart(), "delayed", inputs=(X,)), {"k": "q"})
    with pytest.raises(ValueError, match=r"^k: it shares the state of q's input, but sees no q"):
        model.apply(model.init(jax.random.key(0), X), X)
