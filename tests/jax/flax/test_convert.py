import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp8ref import jax as fj
from fp8ref.sim.gemm import hardware

HOPPER = hardware.by_name("hopper")
SEEN, STATE = fj.flax.SEEN, fj.flax.STATE
X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 32)), jnp.float32)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


class MLP(nn.Module):
    dot_general_cls: object = None

    def setup(self):
        self.up, self.down = (nn.Dense(n, dot_general_cls=self.dot_general_cls) for n in (64, 32))

    def __call__(self, x):
        return x + self.down(nn.relu(self.up(x)))

    def encode(self, x):
        return self.up(x)


class Model(nn.Module):
    dot_general_cls: object = None
    size: int = 16

    @nn.compact
    def __call__(self, x):
        x = nn.remat(MLP)(self.dot_general_cls, name="mlp")(x)
        x = nn.DenseGeneral((2, 16), dot_general_cls=self.dot_general_cls, name="heads")(x)
        return nn.Dense(self.size, name="lm_head")(x)


def linen_convert(recipe="tensorwise", model=None, **options):
    return fj.flax.convert(model or Model(), recipe, inputs=(X,), **options)


@pytest.mark.grid(1)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_converted_linen_model_is_one_written_with_hooks(recipe):
    """All but lm_head, on the same parameters; output, gradients, and the whole state after an
    update.
    """
    written = Model(fj.flax.linen_dot_general(recipe))
    converted = linen_convert(recipe, filter_fqns=["lm_head"])
    original = Model().init(jax.random.key(0), X)
    made = converted.init(jax.random.key(0), X)
    same(made["params"], original["params"])
    assert jax.tree.structure(made) == jax.tree.structure(written.init(jax.random.key(0), X))

    def step(model, variables, x):
        def loss(variables, x):
            y, updated = model.apply(variables, x, mutable=[SEEN])
            return (y**2).sum(), updated

        value, grads, seen = fj.flax.value_and_grad(loss)(variables, x)
        return value, grads, fj.flax.update(variables, seen)

    variables = {**original, **({STATE: made[STATE]} if recipe == "delayed" else {})}
    same(*(jax.jit(step, static_argnums=0)(model, variables, X) for model in (converted, written)))
    assert not np.array_equal(jax.jit(converted.apply)(variables, X), Model().apply(original, X))
    assert type(converted).__name__ == "Model"


def test_every_method_of_a_converted_linen_model_has_hooks():
    model, hooked = linen_convert(model=MLP()), MLP(fj.flax.linen_dot_general("tensorwise"))
    variables = MLP().init(jax.random.key(0), X)
    expected = hooked.apply(variables, X, method="encode")
    same(model.apply(variables, X, method="encode"), expected)
    same(model.apply(variables, X, method=lambda m, x: m.up(x)), expected)
    assert not np.array_equal(MLP().apply(variables, X, method="encode"), expected)
    shapes = fj.flax.convert(
        Model(size=24), "tensorwise", inputs=(jax.ShapeDtypeStruct((2, 32), jnp.bfloat16),)
    )
    assert (shapes.size, shapes.apply(Model(size=24).init(jax.random.key(0), X), X).shape) == (
        24,
        (4, 2, 24),
    )


class Net(nnx.Module):
    def __init__(self, *, rngs, **hooks):
        self.up = nnx.Linear(32, 64, rngs=rngs, **{k: v() for k, v in hooks.items()})
        self.blocks = nnx.List(
            [
                nnx.LinearGeneral(
                    (4, 16), (2, 16), axis=(-2, -1), rngs=rngs, **{k: v() for k, v in hooks.items()}
                )
            ]
        )
        self.out = nnx.Einsum("bhk,hkd->bd", (2, 16, 32), (32,), rngs=rngs)
        self.lm_head = nnx.Linear(32, 24, rngs=rngs)

    def __call__(self, x):
        h = self.blocks[0](nnx.relu(self.up(x)).reshape(-1, 4, 16))
        return self.lm_head(self.out(h))


def net(**hooks):
    return Net(rngs=nnx.Rngs(0), **hooks)


@pytest.mark.grid(1)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_converted_nnx_model_is_one_written_with_hooks(recipe):
    """lm_head's 24 columns are not a multiple of 16; out is filtered."""
    written = net(dot_general=lambda: fj.flax.nnx_dot_general(recipe))
    model = net()
    assert fj.flax.convert(model, recipe, filter_fqns=["out"]) is model
    results = []
    for one in (model, written):
        value, grads, seen = nnx.jit(fj.flax.value_and_grad(lambda m, x: (m(x) ** 2).sum()))(one, X)
        fj.flax.update(one, seen)
        results.append(
            (
                value,
                nnx.to_pure_dict(grads),
                seen,
                nnx.to_pure_dict(nnx.state(one, fj.flax.Fp8State)),
            )
        )
    same(*results)
    assert not np.array_equal(model(X), net()(X))


@pytest.mark.slow
def test_a_stack_of_layers_and_an_einsum_are_converted_too():
    class Stack(nnx.Module):
        def __init__(self):
            self.layers = nnx.vmap(lambda key: nnx.Linear(32, 32, rngs=nnx.Rngs(key)))(
                jax.random.split(jax.random.key(0), 3)
            )

        def __call__(self, x):
            return nnx.scan(lambda x, one: one(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.layers
            )

    stack = fj.flax.convert(Stack(), "delayed")
    _, _, seen = fj.flax.value_and_grad(lambda m, x: (m(x) ** 2).sum())(stack, X)
    assert seen.layers["layers.dot_general"]["grad_output"][:, 2].tolist() == [1, 1, 1]
    model = fj.flax.convert(net(), "delayed", fp8_fqns=["out"], filter_fqns=["*"])
    _, _, seen = fj.flax.value_and_grad(lambda m, x: (m(x) ** 2).sum())(model, X)
    assert list(seen.layers) == ["out.einsum_op"]


@pytest.mark.slow
def test_attention_is_converted_projection_by_projection():
    x = X[None]
    linen = nn.MultiHeadDotProductAttention(2, qkv_features=32)
    converted = fj.flax.convert(linen, "delayed", inputs=(x,), filter_fqns=["out"])
    attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=nnx.Rngs(0))
    fj.flax.convert(attention, "delayed", filter_fqns=["out"])
    of_linen = fj.flax.unseen(converted.init(jax.random.key(0), x)).layers
    of_nnx = fj.flax.value_and_grad(lambda m, x: (m(x) ** 2).sum())(attention, x)[2].layers
    for layers in (of_linen, of_nnx):
        assert {path.split(".")[0] for path in layers} == {"query", "key", "value"}


def test_small_layers_stay_as_they_are():
    model = nnx.Dict(
        small=nnx.Linear(16, 1024, rngs=nnx.Rngs(0)), large=nnx.Linear(16, 1040, rngs=nnx.Rngs(0))
    )
    fj.flax.convert(model, "tensorwise", filter_fqns=["auto_filter_small_kn"])
    assert model.small.dot_general is jax.lax.dot_general
    assert model.large.dot_general is not jax.lax.dot_general


class Parent(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.inner(x)


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = nn.scan(
            lambda layer, h, _: (layer(h), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        return block(nn.Dense(32, name="up"), x, None)[0]


class OwnLinear(nnx.Linear):
    """Reads its own kernel."""

    def __call__(self, x):
        return x @ self.kernel.get_value()


class OtherLinear(nnx.Linear):
    """Runs its hook, with an argument of its own."""

    def __call__(self, x, scale):
        return super().__call__(x) * scale


class OwnDense(nn.Dense):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("kernel", nn.initializers.ones, (x.shape[-1], self.features))


class OwnPair(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, name="hooked")(OwnDense(32, name="own")(x))


def one_linear(**options):
    return nnx.Sequential(
        nnx.Linear(32, 32, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0), **options)
    )


def test_a_subclass_that_does_not_run_its_hook_is_not_counted(caplog):
    linear, own, other, lora = (
        kind(32, 32, rngs=nnx.Rngs(0), **options)
        for kind, options in (
            (nnx.Linear, {}),
            (OwnLinear, {}),
            (OtherLinear, {}),
            (nnx.LoRALinear, {"lora_rank": 4}),
        )
    )
    model = fj.flax.convert(nnx.Sequential(linear, own, other, lora), "rowwise")
    assert [layer.dot_general is jax.lax.dot_general for layer in model.layers] == [
        False,
        True,
        False,
        False,
    ]
    (record,) = caplog.records
    assert "3 layers in FP8" in record.getMessage()
    assert (
        "layers.1 (OwnLinear: its own __call__ multiplies without the layer's hook)"
        in record.getMessage()
    )
    report = fj.flax.report(fj.flax.convert(OwnPair(), "rowwise", inputs=(X,)))
    assert [(row.path, row.recipe) for row in report.rows if row.kind != "vectors"] == [
        ("hooked", "rowwise"),
        ("own", None),
    ]
    assert report.multiplications == 0.5
    assert report.surprising


def test_an_adapter_of_low_rank_is_none_of_experts(caplog):
    """nnx.LoRA's matrices multiply outside of FP8, which surprises nobody: no warning."""
    base = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    fj.flax.convert(
        nnx.Sequential(nnx.LoRA(32, 4, 32, base_module=base, rngs=nnx.Rngs(0))), "rowwise"
    )
    assert not caplog.records
    model = fj.flax.convert(
        nnx.Sequential(nnx.LoRALinear(32, 32, lora_rank=4, rngs=nnx.Rngs(0))), "rowwise"
    )
    assert {row.path: row.reason for row in fj.flax.report(model).rows}["layers.0.lora"].startswith(
        "an adapter of low rank"
    )


def test_a_recurrent_linen_model_shares_its_cells_state():
    """As the error says: the state is broadcast as the weights are, and observations are carried
    from step to step.
    """
    model, x = (
        nn.RNN(nn.GRUCell(32), variable_broadcast=("params", STATE), variable_carry=SEEN),
        jnp.ones((4, 3, 32)),
    )
    converted = fj.flax.convert(model, "delayed", inputs=(x,))
    variables = jax.jit(converted.init)(jax.random.key(0), x)

    def loss(variables, x):
        y, updated = converted.apply(variables, x, mutable=[SEEN])
        return (y**2).mean(), updated

    _, _, after = jax.jit(fj.flax.value_and_grad(loss, update=True))(variables, x)
    states = jax.tree.leaves(after[STATE], is_leaf=lambda value: hasattr(value, "roles"))
    # six linears, three roles each
    assert [int(role.step) for layer in states for role in layer.roles.values()] == [1] * 18


def shared():
    hook = fj.flax.nnx_dot_general("rowwise")
    return nnx.Sequential(
        *(nnx.Linear(32, 32, dot_general=hook, rngs=nnx.Rngs(0)) for _ in range(2))
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: linen_convert(filter_fqns=["mlp.upp"]),
            "filter_fqns pattern 'mlp.upp' matches none of: mlp.up, mlp.down, heads",
        ),
        (
            lambda: fj.flax.convert(net(), "rowwise", filter_fqns=["block"]),
            "'block' matches none of",
        ),
        (lambda: linen_convert(filter_fqns=["*"]), "converts no linear"),
        (lambda: fj.flax.convert(net(), "rowwise", filter_fqns=["*"]), "converts no linear"),
        (lambda: fj.flax.convert(nnx.Dropout(0.1), "rowwise"), "the model has no linears"),
        (
            lambda: fj.flax.convert(net(), "rowwise", fp8_fqns=["lm_head"]),
            r"lm_head is \[24, 32\], and fp8_fqns",
        ),
        (lambda: linen_convert(model=linen_convert()), "Model is converted already"),
        (
            lambda: fj.flax.convert(fj.flax.convert(net(), "rowwise"), "rowwise"),
            "blocks.0 has a hook already, DotGeneral.*Remove it, or use",
        ),
        (
            lambda: linen_convert(model=Model(fj.flax.linen_dot_general("rowwise"))),
            "mlp.up has a hook already",
        ),
        (lambda: fj.flax.convert(shared(), "rowwise"), "a layer has its own hook"),
        (
            lambda: linen_convert(model=nn.Dense(32, precision="highest")),
            "^Dense: .*precision='highest'",
        ),
        (
            lambda: linen_convert(model=nn.Einsum((32, 16), "ab,bc->ac")),
            "^Einsum: linen's nn.Einsum has no hook.*fj.flax.Einsum",
        ),
        (
            lambda: linen_convert("delayed", model=Scanned()),
            "^up: .*'fp8_state'; got none.*nn.scan",
        ),
        (
            lambda: Parent(linen_convert()).init(jax.random.key(0), X),
            "a whole model; got it inside Parent",
        ),
        (lambda: linen_convert().bind({}), "runs with its own init and apply"),
        (
            lambda: linen_convert().tabulate(jax.random.key(0), X),
            "runs with its own init and apply",
        ),
        (
            lambda: nn.init(lambda m: m(X), linen_convert())(jax.random.key(0)),
            "runs with its own init and apply",
        ),
        (lambda: fj.flax.convert(Model(), "rowwise"), r"inputs=\(x,\)"),
        (lambda: fj.flax.convert(net(), "rowwise", inputs=(X,)), "Leave them out"),
        (
            lambda: fj.flax.convert(
                nnx.Sequential(nnx.Einsum("bd,...df->b...f", (2, 32, 64), rngs=nnx.Rngs(0))),
                "rowwise",
            ),
            "^layers.0: an einsum has a letter for each kernel dim",
        ),
        (lambda: fj.flax.convert(len, "rowwise"), "a linen or an NNX module; got builtin"),
        (
            lambda: fj.flax.convert(one_linear(param_dtype=jnp.float8_e4m3fn), "rowwise"),
            "^layers.0: .*got param_dtype=float8_e4m3fn",
        ),
        (
            lambda: fj.flax.convert(one_linear(dtype=jnp.float8_e5m2), "rowwise"),
            "^layers.0: .*got dtype=float8_e5m2",
        ),
        (
            lambda: fj.flax.convert(OwnLinear(32, 32, rngs=nnx.Rngs(0)), "rowwise"),
            r"nothing to convert: OwnLinear multiplies.*super\(\)",
        ),
        (
            lambda: fj.flax.convert(OwnDense(32), "rowwise", inputs=(X,)),
            "nothing to convert: OwnDense multiplies",
        ),
        (
            lambda: fj.flax.convert(nn.RNN(nn.GRUCell(32)), "delayed", inputs=(X[None],)),
            r"^cell.*nn.RNN\(cell, variable_broadcast=\('params'",
        ),
    ],
)
def test_errors_name_requirement_layer_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_refused_conversion_changes_nothing():
    model = net()
    model.out.precision = "highest"
    structure = nnx.graphdef(model)
    with pytest.raises(ValueError, match=r"^out: .*precision='highest'"):
        fj.flax.convert(model, "rowwise")
    assert nnx.graphdef(model) == structure


def test_a_layer_that_the_inputs_did_not_show_is_refused():
    class Switch(nn.Module):
        @nn.compact
        def __call__(self, x, *, extra=False):
            x = nn.Dense(32, name="always")(x)
            return nn.Dense(32, name="sometimes")(x) if extra else x

    model = linen_convert(model=Switch())
    with pytest.raises(
        ValueError, match="sometimes is not among the layers that inputs called: always"
    ):
        model.init(jax.random.key(0), X, extra=True)


def test_a_converted_model_runs_under_simulated_hardware():  # G-19
    """Linen and NNX: every layer that is converted, as one written with such hooks."""
    written = Model(fj.flax.linen_dot_general("tensorwise", multiply=HOPPER))
    variables = written.init(jax.random.key(0), X)
    found = linen_convert(filter_fqns=["lm_head"], multiply=HOPPER).apply(variables, X)
    same(found, written.apply(variables, X))
    assert (found != linen_convert(filter_fqns=["lm_head"]).apply(variables, X)).any()
    model = fj.flax.convert(
        nnx.Sequential(nnx.Linear(32, 32, rngs=nnx.Rngs(0))), "tensorwise", multiply=HOPPER
    )
    by_hand = nnx.Linear(
        32, 32, dot_general=fj.flax.nnx_dot_general("tensorwise", multiply=HOPPER), rngs=nnx.Rngs(0)
    )
    same(model(X), by_hand(X))
    assert (
        model(X)
        != nnx.Linear(32, 32, dot_general=fj.flax.nnx_dot_general("tensorwise"), rngs=nnx.Rngs(0))(
            X
        )
    ).any()


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "bf16"])
def test_deconvert_gives_the_original_nnx_model_back(recipe):
    """Its structure, its parameters, and every bit of a step."""
    stacked = nnx.vmap(lambda key: nnx.Linear(32, 32, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 2)
    )
    model = net()
    model.stacked = stacked
    structure, state = nnx.graphdef(model), nnx.to_pure_dict(nnx.state(model))
    converted = fj.flax.convert(model, recipe, filter_fqns=["lm_head"])
    assert fj.flax.deconvert(converted) is model
    assert nnx.graphdef(model) == structure
    same(nnx.to_pure_dict(nnx.state(model)), state)
    fj.flax.convert(model, "rowwise")  # again
    assert nnx.graphdef(model) != structure


def test_deconvert_gives_the_original_linen_module_back():
    converted = linen_convert("delayed")
    original = fj.flax.deconvert(converted)
    assert (original, type(original)) == (Model(), Model)
    variables = converted.init(jax.random.key(0), X)
    same(
        original.apply({"params": variables["params"]}, X),
        Model().apply({"params": variables["params"]}, X),
    )
    assert fj.flax.deconvert(converted.clone(size=8)).size == 8


def by_hand():
    model = fj.flax.convert(net(), "rowwise", filter_fqns=["blocks.0"])
    model.blocks[0].dot_general = nnx.data(fj.flax.nnx_dot_general("rowwise"))
    return model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fj.flax.deconvert(by_hand()), "^blocks.0.dot_general: this hook is not convert's"),
        (lambda: fj.flax.deconvert(Model()), r"^deconvert takes what convert returned; got Model"),
        (lambda: fj.flax.deconvert(3), r"^deconvert takes what convert returned; got int"),
    ],
)
def test_what_convert_did_not_do_is_not_undone(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_refused_deconversion_changes_nothing():
    model = by_hand()
    structure = nnx.graphdef(model)
    with pytest.raises(ValueError, match="by hand"):
        fj.flax.deconvert(model)
    assert nnx.graphdef(model) == structure
