"""What a report says of a model: layers in FP8, what is not and why, shares; and the line that
convert logs.
"""

import logging
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from fp8ref import jax as fj

D, F, TOKENS, EXPERTS = 32, 64, 8, 4
X = jax.ShapeDtypeStruct((1, TOKENS, D), jnp.float32)


class Experts(nnx.Module):
    """A router and ragged experts."""

    def __init__(self, rngs):
        self.router = nnx.Linear(D, 16, use_bias=False, rngs=rngs)
        self.up = nnx.Param(jnp.ones((EXPERTS, D, F)))

    def __call__(self, x):
        chosen = self.router(x)[..., :EXPERTS].argmax(-1)
        sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS)
        return lax.ragged_dot(x.reshape(-1, D), self.up.get_value(), sizes)[..., :D].reshape(
            x.shape
        )


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(48, D, rngs=rngs)
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.conv = nnx.Conv(D, D, (3,), rngs=rngs)
        self.attend, self.unused = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)
        self.mixture = Experts(rngs)
        self.head, self.odd = nnx.Linear(D, 48, rngs=rngs), nnx.Linear(D, 24, rngs=rngs)

    def __call__(self, x):
        x = self.attend(self.conv(self.norm(x)))
        x = x + jnp.einsum("bqd,bkd->bqk", x, x) @ x
        x = self.mixture(x)
        return self.head(x), self.odd(x)


def of(rows, path="", kind=None):
    (row,) = [row for row in rows if row.path == path and kind in (None, row.kind)]
    return row


def converted():
    return fj.flax.convert(Model(nnx.Rngs(0)), "rowwise", filter_fqns=["head"])


def test_rows_of_an_nnx_model():
    found = fj.flax.report(converted(), (X,))
    attend = of(found.rows, "attend")
    assert (attend.recipe, attend.kind, attend.shape, attend.in_fp8) == (
        "rowwise",
        "Linear",
        (D, D),
        D * D,
    )
    assert attend.parameters == D * D + D
    assert attend.multiplications == TOKENS * D * D
    for path, reason in {
        "unused": "never called",
        "head": "filtered",
        "odd": "multiples of 16",
        "embed": "a table",
        "conv": "convolutions",
        "mixture": "a parameter of 3 dims outside linears",
    }.items():
        assert reason in of(found.rows, path).reason
    assert of(found.rows, "head").multiplications == TOKENS * D * 48
    assert [row.path for row in found.rows if row.recipe] == ["attend", "mixture.router", "unused"]
    ragged = of(found.rows, kind="ragged_dot_general")
    assert ragged.multiplications == TOKENS * D * F
    assert of(found.rows, kind="conv_general_dilated").multiplications == TOKENS * D * D * 3
    assert of(found.rows, kind="vectors").parameters == 2 * D


def test_shares():
    model = converted()
    found, parameters = (
        fj.flax.report(model, (X,)),
        sum(v.size for v in jax.tree.leaves(nnx.state(model, nnx.Param))),
    )
    assert sum(row.parameters for row in found.rows) == parameters
    assert found.parameters == (2 * D * D + 16 * D) / parameters
    fp8 = TOKENS * D * D + TOKENS * D * 16
    # conv, experts, head, odd; attention's two
    others = TOKENS * D * (D * 3 + F + 48 + 24) + 2 * TOKENS * TOKENS * D
    assert found.multiplications == fp8 / (fp8 + others)
    assert fj.flax.report(model).multiplications is None
    assert fj.flax.report(Model(nnx.Rngs(0))).parameters == 0


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "mxfp8", "bf16"])
def test_multiplications_of_every_recipe(recipe):
    """Whether codes are multiplied or, of blocks, dequantized values."""
    model = fj.flax.convert(
        nnx.Sequential(nnx.Linear(D, D, rngs=nnx.Rngs(0)), nnx.Linear(D, 24, rngs=nnx.Rngs(0))),
        recipe,
    )
    found = fj.flax.report(model, (X,))
    assert found.multiplications == (0 if recipe == "bf16" else D / (D + 24))


def test_a_table():
    text = str(fj.flax.report(converted(), (X,)))
    lines = text.splitlines()
    assert lines[0].split() == [
        "layer",
        "kind",
        "shape",
        "recipe",
        "parameters",
        "multiplications",
        "why",
    ]
    (attend,) = [line for line in lines if line.startswith("attend")]
    assert attend.split()[:6] == ["attend", "Linear", "32x32", "rowwise", "1,056", "8,192"]
    assert lines[-1].startswith("3 layers in FP8 (rowwise), ")


def test_convert_prints_a_line_at_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    linears = (nnx.Linear(D, D, rngs=nnx.Rngs(0)) for _ in range(2))
    fj.flax.convert(nnx.Sequential(*linears), "rowwise", filter_fqns=["1"])
    assert capsys.readouterr().out == (
        "fp8: 1 of 2 layers (rowwise); in high precision: layers.1. "
        "print(fp8ref.jax.flax.report(model)) says why.\n"
    )


def test_convert_logs_one_line_and_warns_of_experts(caplog):
    with caplog.at_level(logging.INFO, "fp8ref.jax.flax"):
        converted()
        fj.flax.convert(nnx.Sequential(nnx.Linear(D, D, rngs=nnx.Rngs(0))), "rowwise")
    warned, quiet = caplog.records
    assert warned.levelno == logging.WARNING
    for part in (
        "convert: Model: 3 layers in FP8 (rowwise)",
        "mixture (Experts: a parameter of 3 dims",
        "filter_fqns 'head'",
    ):
        assert part in warned.getMessage()
    assert quiet.levelno == logging.INFO
    assert (
        quiet.getMessage()
        == "convert: Sequential: 1 layer in FP8 (rowwise), 97.0% of the parameters."
    )


class LinenExperts(nn.Module):
    @nn.compact
    def __call__(self, x):
        chosen = nn.Dense(16, name="router")(x)[..., :EXPERTS].argmax(-1)
        up = self.param("up", nn.initializers.ones, (EXPERTS, D, F))
        return lax.ragged_dot(
            x.reshape(-1, D), up, jnp.bincount(chosen.reshape(-1), length=EXPERTS)
        )


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = nn.scan(
            lambda layer, h, _: (layer(h), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        x = block(
            nn.Dense(D, name="stack"),
            nn.LayerNorm()(nn.Embed(48, D)(jnp.zeros(x.shape[:2], int))) + x,
            None,
        )[0]
        return nn.Dense(24, name="head")(nn.Conv(D, (3,))(x)), LinenExperts(name="mixture")(x)


def test_an_only_argument_needs_no_tuple():
    linen = [fj.flax.convert(LinenModel(), "rowwise", inputs=inputs) for inputs in (X, (X,), [X])]
    assert len({str(fj.flax.report(model)) for model in linen}) == 1
    with pytest.raises(ValueError, match=r"of its conversion; got others\. Call report\(model\)"):
        fj.flax.report(linen[0], X)
    layer = fj.flax.convert(nnx.Linear(D, D, rngs=nnx.Rngs(0)), "rowwise")
    x = jnp.ones((TOKENS, D))
    assert str(fj.flax.report(layer, x)) == str(fj.flax.report(layer, (x,)))


def test_a_linen_model(caplog):
    with caplog.at_level(logging.INFO, "fp8ref.jax.flax"):
        model = fj.flax.convert(LinenModel(), "rowwise", inputs=(X,))
    found = fj.flax.report(model)
    assert caplog.records[0].levelno == logging.WARNING
    assert [row.path for row in found.rows if row.recipe] == ["mixture.router", "stack"]
    stack = of(found.rows, "stack")
    assert (stack.shape, stack.parameters, stack.multiplications) == (
        (D, D),
        2 * D * (D + 1),
        2 * TOKENS * D * D,
    )
    for path, reason in {
        "head": "needs multiples of",
        "Embed_0": "a table",
        "Conv_0": "convolutions",
        "mixture": "a parameter of 3 dims outside linears",
    }.items():
        assert reason in of(found.rows, path).reason
    assert of(found.rows, kind="ragged_dot_general").multiplications == TOKENS * D * F
    assert of(found.rows, "head").multiplications == TOKENS * D * 24


@pytest.mark.parametrize("model", [LinenModel(), 3])
def test_only_converted_linen_models_show_their_layers(model):
    with pytest.raises(ValueError, match=r"report takes an NNX model, .*Convert it first"):
        fj.flax.report(model)


class OwnDense(nnx.Module):
    """A linear of somebody's own, which bridges a linen hook as MaxText's does."""

    def __init__(self, recipe, rngs):
        self.kernel = nnx.Param(jnp.ones((D, 4, 16)))
        self.hook = (
            nnx.bridge.ToNNX(fj.flax.linen_dot_general(recipe)(), rngs=rngs) if recipe else None
        )

    def __call__(self, x):
        dot_general = self.hook or lax.dot_general
        return dot_general(x, self.kernel.get_value().astype(x.dtype), (((2,), (0,)), ((), ())))


class DenseGeneral(OwnDense):
    """Its name is that of Flax's."""


def test_a_bridged_hook_of_somebodys_own_layer():
    model = nnx.Dict(fp8=OwnDense("rowwise", nnx.Rngs(0)), plain=DenseGeneral(None, nnx.Rngs(0)))
    fp8, plain = fj.flax.report(model).rows
    assert (fp8.path, fp8.recipe, fp8.reason, fp8.in_fp8) == (
        "fp8",
        "rowwise",
        "has a hook",
        D * 64,
    )
    assert plain.recipe is None
    assert "3 dims outside linears" in plain.reason
    assert "multiples of 16" not in plain.reason


def test_multiplications_of_a_bridged_hook():
    (row,) = fj.flax.report(OwnDense("tensorwise", nnx.Rngs(0)), (X,)).rows
    assert (row.recipe, row.multiplications) == ("tensorwise", TOKENS * D * 64)


class OwnLinear(nnx.Linear):
    def __call__(self, x):
        return x @ self.kernel.get_value()


def test_a_linear_with_a_call_of_its_own_was_called():
    (row, *_) = fj.flax.report(OwnLinear(D, F, rngs=nnx.Rngs(0)), (X,)).rows
    assert (row.recipe, row.reason) == (
        None,
        "its own __call__ multiplies without the layer's hook",
    )


class Pair(nnx.Module):
    """A layer of somebody's own with two hooks, which it looks at."""

    def __init__(self, recipes, rngs):
        self.up, self.down = nnx.Param(jnp.ones((D, F))), nnx.Param(jnp.ones((F, D)))
        self.first, self.second = (
            nnx.bridge.ToNNX(fj.flax.linen_dot_general(recipe)(), rngs=rngs) for recipe in recipes
        )

    def __call__(self, x):
        assert isinstance(self.first, nnx.Module)
        for hook, kernel in ((self.first, self.up), (self.second, self.down)):
            x = hook(x, kernel.get_value(), (((2,), (0,)), ((), ())))
        return x


def test_two_bridged_hooks():
    (row,) = fj.flax.report(Pair(("rowwise", "tensorwise"), nnx.Rngs(0)), (X,)).rows
    assert (row.recipe, row.in_fp8, row.multiplications) == (
        "rowwise, tensorwise",
        2 * D * F,
        2 * TOKENS * D * F,
    )


def test_a_layer_of_which_one_hook_has_fp8_is_not_in_fp8():
    (row,) = fj.flax.report(Pair(("bf16", "rowwise"), nnx.Rngs(0)), (X,)).rows
    assert (row.recipe, row.in_fp8, row.reason) == (
        None,
        0,
        "only some of its hooks have FP8: rowwise",
    )


def test_a_stack_of_bridged_hooks():
    class Stack(nnx.Module):
        def __init__(self):
            self.layers = nnx.vmap(lambda key: OwnSquare(nnx.Rngs(key)))(
                jax.random.split(jax.random.key(0), 3)
            )

        def __call__(self, x):
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.layers
            )

    (row,) = fj.flax.report(Stack(), (X,)).rows
    assert (row.recipe, row.multiplications) == ("rowwise", 3 * TOKENS * D * D)


class OwnSquare(nnx.Module):
    """A layer whose hook has random numbers of its own, as ToNNX gives it."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jnp.ones((D, D)))
        self.hook = nnx.bridge.ToNNX(fj.flax.linen_dot_general("rowwise")(), rngs=rngs)

    def __call__(self, x):
        return self.hook(x, self.kernel.get_value(), (((2,), (0,)), ((), ())))


def test_a_bridged_layer_with_a_hook_is_not_silent():
    """Of a linen layer in ToNNX the product is shown, without its recipe."""
    dense = nnx.bridge.ToNNX(
        nn.Dense(F, dot_general_cls=fj.flax.linen_dot_general("rowwise")), rngs=nnx.Rngs(0)
    )
    nnx.bridge.lazy_init(dense, jnp.ones((1, TOKENS, D)))
    (layer, product) = (row for row in fj.flax.report(dense, (X,)).rows if row.kind != "vectors")
    assert (layer.parameters, layer.recipe) == (D * F + F, None)
    assert (product.recipe, product.multiplications) == (None, TOKENS * D * F)
    assert "no layer with parameters holds" in product.reason


class Scale(nnx.Module):
    """A norm of somebody's own."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.ones(D))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.own = nnx.LayerNorm(D, rngs=rngs), Scale(rngs)
        self.up, self.mixture = nnx.Linear(D, D, rngs=rngs), Experts(rngs)


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.vmap(Block, in_axes=0)(rngs.split(3))


def test_norms_of_a_stack_are_vectors():
    """Their parameters are [layers, D], which is no matrix; and a stack of experts [layers, E, D,
    F] is experts.
    """
    rows = fj.flax.report(Stacked(nnx.Rngs(0))).rows
    assert of(rows, kind="vectors").parameters == 3 * 3 * D
    assert {row.path for row in rows} == {
        "layers.up",
        "layers.mixture.router",
        "layers.mixture",
        "",
    }
    assert "3 dims outside linears" in of(rows, "layers.mixture").reason


class BoxedBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", None))
        return nn.Dense(D, kernel_init=init, name="up")(nn.LayerNorm(name="norm")(x)), None


class BoxedModel(nn.Module):
    """Parameters in boxes that name their axes, layers in a scan, and layers whose scopes have more
    than their names.
    """

    @nn.compact
    def __call__(self, x):
        block = nn.scan(
            BoxedBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: None},
        )
        x = nn.Einsum((D, D), "btd,dk->btk", name="einsum")(block(name="layers")(x, None)[0])
        return nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})(
            D, name="each"
        )(x)


def test_boxed_parameters_and_scopes_of_linen():
    with jax.set_mesh(jax.make_mesh((1,), ("embed",), axis_types=(jax.sharding.AxisType.Auto,))):
        rows = fj.flax.report(fj.flax.convert(BoxedModel(), "bf16", inputs=(X,))).rows
    assert {row.path: row.multiplications for row in rows if row.kind != "vectors"} == {
        "layers.up": 3 * TOKENS * D * D,
        "einsum": TOKENS * D * D,
        "each": TOKENS * D * D,
    }
    assert of(rows, kind="vectors").parameters == 3 * 2 * D
