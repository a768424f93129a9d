import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization

from fp8ref import jax as fj
from fp8ref.jax import delayed
from fp8ref.jax.linear import contraction, linear
from fp8ref.recipe import RECIPES
from fp8ref.sim.gemm import hardware
from fp8ref.spec.delayed import DELAYED

HOPPER = hardware.by_name("hopper")
SEEN, STATE = fj.flax.SEEN, fj.flax.STATE


def integers(shape, largest, e, seed=0):
    """Integers times 2^e, exact in e4m3 and in every sum of 32 products of the like, in any
    order.
    """
    return jnp.asarray(
        np.random.default_rng(seed).integers(-largest, largest + 1, shape) * 2.0**e, jnp.float32
    )


X = integers((8, 32), 3, 0)
hook = fj.flax.linen_dot_general


def kernels(variables, e=-2):
    """The same variables with small integers times 2^e for parameters."""
    params = jax.tree.map(lambda v: integers(v.shape, 2, e, seed=v.size), variables["params"])
    return {**variables, "params": params}


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def same_sum(a, b):
    """Of the squares of an output, added in the order that a compiler chose: each addition of them
    rounds by 2^-24 of a sum at most.
    """
    np.testing.assert_allclose(a, b, rtol=2 * X.size * 2.0**-24)


def squares(model, **options):
    def loss(variables, x):
        y, updated = model.apply(variables, x, mutable=[SEEN], **options)
        return (y.astype(jnp.float32) ** 2).sum(), updated

    return loss


@pytest.mark.grid(2)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "recipe", ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"]
)
def test_a_dense_is_the_linear_of_its_transposed_kernel(recipe, dtype, rng):
    """Output, gradients and observations: the weight is cast first, and the bias added last."""
    layer = nn.Dense(48, dot_general_cls=hook(recipe), dtype=dtype)
    x = jnp.asarray(rng.standard_normal((2, 8, 32)), jnp.float32)
    variables = layer.init(jax.random.key(0), x)
    variables["params"]["bias"] = jnp.asarray(rng.standard_normal(48), jnp.float32)
    assert set(variables) == ({"params", STATE} if recipe == "delayed" else {"params"})
    given = (
        {"state": delayed.init(recipe), "seen": delayed.unseen(recipe)}
        if recipe == "delayed"
        else {"seen": None}
    )

    def by_hand(params, seen, x):
        options = {**given, "seen": seen}
        y, after = linear.apply(
            x.astype(dtype), params["kernel"].astype(dtype).T, recipe=recipe, **options
        )
        return ((y + params["bias"].astype(dtype)).astype(jnp.float32) ** 2).sum(), (y, after)

    value, grads, seen = jax.jit(fj.flax.value_and_grad(squares(layer)))(variables, x)
    (expected, (_, forward)), (grad, backward) = jax.jit(
        jax.value_and_grad(by_hand, argnums=(0, 1), has_aux=True)
    )(variables["params"], given["seen"], x)
    same((value, grads), (expected, grad))
    if recipe == "delayed":
        same(list(seen.layers.values()), [delayed.merge(forward, backward)])
    assert jax.eval_shape(layer.apply, variables, x).dtype == dtype


@pytest.mark.slow
def test_dense_general_and_einsum_contract_what_they_say():
    x, general = (
        integers((2, 8, 4, 16), 3, 0),
        nn.DenseGeneral((3, 16), axis=(-2, -1), dot_general_cls=hook("tensorwise")),
    )
    einsum = fj.flax.Einsum((4, 16, 3, 16), "bthk,hkij->btij", recipe="tensorwise")
    variables = kernels(general.init(jax.random.key(0), x))
    assert jax.tree.map(jnp.shape, einsum.init(jax.random.key(0), x)) == jax.tree.map(
        jnp.shape, variables
    )
    kernel, bias = variables["params"]["kernel"], variables["params"]["bias"]
    expected, _ = contraction.einsum("bthk,hkij->btij", x, kernel, recipe="tensorwise")
    same(general.apply(variables, x), expected + bias)
    same(einsum.apply(variables, x), expected + bias)
    assert (
        fj.flax.Einsum(
            (4, 16, 16), recipe="rowwise", preferred_element_type=jnp.float32, dtype=jnp.bfloat16
        )
        .init_with_output(jax.random.key(0), x, "bthk,hkd->btd")[0]
        .dtype
        == jnp.float32
    )


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "mxfp4"])
def test_recipes_of_blocks_run_through_hooks(recipe, rng):
    x, layer = (
        jnp.asarray(rng.standard_normal((128, 128)), jnp.float32),
        nn.Dense(128, use_bias=False, dot_general_cls=hook(recipe)),
    )
    variables = layer.init(jax.random.key(0), x)
    same(
        layer.apply(variables, x),
        linear.apply(x, variables["params"]["kernel"].T, recipe=recipe)[0],
    )


class Each(nn.Module):
    """One of a stack of layers, all with the same input."""

    recipe: str

    @nn.compact
    def __call__(self, x, _=None):
        return x, nn.Dense(32, use_bias=False, dot_general_cls=hook(self.recipe), name="up")(x)


@pytest.mark.grid(1)
@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_scan_remat_and_vmap_of_stateless_recipes_are_each_layers_own(recipe):
    """Every amax is 7 times a power of two, and so every sum exact in any order."""
    x, kernels = (
        integers((8, 32), 7, 0).at[:, 0].set(7),
        integers((3, 32, 32), 7, -6).at[:, 0].set(7 * 2.0**-6).at[:, :, 0].set(7 * 2.0**-6),
    )
    axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    scanned = nn.scan(nn.remat(Each), length=3, **axes)(recipe)
    mapped = nn.vmap(Each, in_axes=None, axis_size=3, **axes)(recipe)
    variables = {"params": {"up": {"kernel": kernels}}}
    expected = jnp.stack([linear.apply(x, kernel.T, recipe=recipe)[0] for kernel in kernels])
    for model in (scanned, mapped):
        assert jax.tree.map(jnp.shape, model.init(jax.random.key(0), x)) == jax.tree.map(
            jnp.shape, variables
        )
        same(
            jax.jit(lambda variables, model=model: model.apply(variables, x)[1])(variables),
            expected,
        )


class Block(nn.Module):
    @nn.compact
    def __call__(self, h, _=None):
        return nn.Dense(32, use_bias=False, dot_general_cls=hook("delayed"), name="up")(h), None


class Unrolled(nn.Module):
    block: type = Block

    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x, _ = self.block(name=f"block_{i}")(x)
        return x


def stacked(block, **options):
    options = {
        "variable_axes": {"params": 0, STATE: 0, SEEN: 0},
        "split_rngs": {"params": True},
        "length": 3,
        **options,
    }

    class Stacked(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.scan(block, **options)(name="block")(x)[0]

    return Stacked()


@functools.cache
def unrolled():
    model = Unrolled()
    variables = kernels(model.init(jax.random.key(0), X))
    kernel = integers((3, 32, 32), 2, -2)
    variables["params"] = {f"block_{i}": {"up": {"kernel": kernel[i]}} for i in range(3)}
    return kernel, *jax.jit(fj.flax.value_and_grad(squares(model)))(variables, X)


@pytest.mark.grid(1)
@pytest.mark.parametrize("block", [Block, nn.remat(Block)], ids=["plain", "remat"])
def test_scan_over_layers_and_remat_observe_as_the_unrolled_model(block):
    kernel, expected, _, of_each = unrolled()
    model = stacked(block)
    variables = model.init(jax.random.key(0), X)
    variables["params"] = {"block": {"up": {"kernel": kernel}}}
    value, grads, seen = jax.jit(fj.flax.value_and_grad(squares(model)))(variables, X)
    same_sum(value, expected)
    assert grads["block"]["up"]["kernel"].shape == (3, 32, 32)
    (of_stack,) = seen.layers.values()
    same(
        of_stack,
        {role: jnp.stack([layer[role] for layer in of_each.layers.values()]) for role in of_stack},
    )
    after = fj.flax.update(variables, seen)
    assert jax.tree.structure(after) == jax.tree.structure(variables)
    (layer,) = jax.tree.leaves(after[STATE], is_leaf=lambda v: hasattr(v, "roles"))
    assert layer.roles["input"].stored.shape == (3,)
    np.testing.assert_array_equal(layer.roles["input"].stored, 448 / of_stack["input"][:, 0])


def test_a_layer_used_again_is_one_observation():  # H-4
    """Called three times, and by a scan that carries its observations."""
    kernel = integers((32, 32), 2, -2)

    class Again(nn.Module):
        @nn.compact
        def __call__(self, x):
            block = Block(name="block")
            return block(block(block(x)[0])[0])[0]

    carrying = stacked(
        Block,
        variable_axes={},
        variable_broadcast=("params", STATE),
        variable_carry=SEEN,
        split_rngs={"params": False},
    )
    of_each = []
    for model in (Again(), carrying):
        variables = {
            **model.init(jax.random.key(0), X),
            "params": {"block": {"up": {"kernel": kernel}}},
        }
        of_each.append(jax.jit(fj.flax.value_and_grad(squares(model)))(variables, X))
    same_sum(of_each[0][0], of_each[1][0])
    same(of_each[0][1:], of_each[1][1:])
    (seen,) = of_each[0][2].layers.values()
    assert seen["weight"].tolist() == [np.abs(kernel).max(), 0, 1]
    h = [X]
    for _ in range(2):
        h.append(
            linear.apply(
                h[-1],
                kernel.T,
                recipe="delayed",
                state=delayed.init("delayed"),
                seen=delayed.unseen("delayed"),
            )[0]
        )
    assert seen["input"].tolist() == [max(np.abs(v).max() for v in h), 0, 1]


def test_vmap_over_examples_merges_and_over_layers_does_not():
    layer = nn.Dense(32, use_bias=False, dot_general_cls=hook("delayed"))
    variables = kernels(layer.init(jax.random.key(0), X))
    shared = nn.vmap(
        nn.Dense,
        variable_axes={"params": None, STATE: None, SEEN: None},
        split_rngs={"params": False},
        in_axes=0,
    )(32, use_bias=False, dot_general_cls=hook("delayed"))
    plain, mapped = (
        jax.jit(fj.flax.value_and_grad(squares(m)))(variables, X) for m in (layer, shared)
    )
    same(list(plain[2].layers.values()), list(mapped[2].layers.values()))
    same(plain[:2], mapped[:2])
    stack = nn.vmap(
        nn.Dense,
        variable_axes={"params": 0, STATE: 0, SEEN: 0},
        split_rngs={"params": True},
        in_axes=0,
    )(32, use_bias=False, dot_general_cls=hook("delayed"))
    x = X.reshape(2, 4, 32) * jnp.asarray([[[1.0]], [[4.0]]])
    _, _, seen = jax.jit(fj.flax.value_and_grad(squares(stack)))(
        stack.init(jax.random.key(0), x), x
    )
    (of_stack,) = seen.layers.values()
    np.testing.assert_array_equal(of_stack["input"][:, 0], jnp.abs(x).max((1, 2)))


def test_microbatches_merge_and_an_optimizer_never_meets_the_state():
    model = Unrolled()
    variables = kernels(model.init(jax.random.key(0), X))
    of = jax.jit(fj.flax.value_and_grad(squares(model)))
    _, _, whole = of(variables, X)
    parts = [of(variables, X[i : i + 2])[2] for i in range(0, 8, 2)]
    same(fj.flax.merge(*parts), whole)

    def accumulate(seen, x):
        return fj.flax.merge(seen, fj.flax.value_and_grad(squares(model))(variables, x)[2]), None

    same(
        jax.jit(
            lambda: jax.lax.scan(accumulate, fj.flax.unseen(variables), X.reshape(4, 2, 32))[0]
        )(),
        whole,
    )
    _, grads, _ = of(variables, X)
    assert jax.tree.structure(grads) == jax.tree.structure(variables["params"])
    optimizer = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), 2)
    optimizer.update(grads, optimizer.init(variables["params"]), variables["params"])


def value(model=None, x=X, variables=None, loss=None):
    model = model or Unrolled()
    variables = variables or model.init(jax.random.key(0), X)
    return jax.eval_shape(fj.flax.value_and_grad(loss or squares(model)), variables, x)


def plainly(model):
    """A loss without collections, as of a model in high precision."""

    def loss(variables, x):
        return (jax.tree.leaves(model.apply(variables, x))[0].astype(jnp.float32) ** 2).sum()

    return loss


PER_LAYER = {"variable_axes": {"params": 0, STATE: 0, SEEN: 0}, "split_rngs": {"params": True}}
MODELS = {
    "layers": lambda: Unrolled(),
    "scan": lambda: stacked(Block, **PER_LAYER),
    "scan of remat": lambda: stacked(nn.remat(Block), **PER_LAYER),
    "vmap over layers": lambda: nn.vmap(nn.Dense, in_axes=None, axis_size=3, **PER_LAYER)(
        32, dot_general_cls=hook("delayed")
    ),
    "vmap over examples": lambda: nn.vmap(
        nn.Dense,
        variable_axes={"params": None, STATE: None, SEEN: None},
        split_rngs={"params": False},
        in_axes=0,
    )(32, dot_general_cls=hook("delayed")),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_loss_without_collections_observes_the_same(make):  # H-9
    """All observations come out with the gradient."""
    model = make()
    variables = model.init(jax.random.key(0), X)
    plain, threaded = (
        jax.jit(fj.flax.value_and_grad(loss(model)))(variables, X) for loss in (plainly, threading)
    )
    same(plain, threaded)
    assert all(
        np.asarray(flag == 1).all()
        for of in plain[2].layers.values()
        for flag in (v[..., 2] for v in of.values())
    )


def threading(model):
    """The same loss, which hands observations on."""

    def loss(variables, x):
        y, updated = model.apply(variables, x, mutable=[SEEN])
        return (jax.tree.leaves(y)[0].astype(jnp.float32) ** 2).sum(), updated

    return loss


def test_what_a_loss_without_collections_returns_beside_it():
    """Under has_aux any aux, a pair too; other collections that apply returns come with it."""
    model = Unrolled()
    variables = model.init(jax.random.key(0), X)
    _, _, expected = fj.flax.value_and_grad(plainly(model))(variables, X)
    for aux in (jnp.ones(2), (1, {"a": 2}), {SEEN: 3}, None):
        (_, got), _, seen = fj.flax.value_and_grad(
            lambda v, x, aux=aux: (plainly(model)(v, x), aux), has_aux=True
        )(variables, X)
        same(got, aux)
        same(seen, expected)

    def with_statistics(v, x):
        y, updated = model.apply(v, x, mutable=["batch_stats"])
        return (y**2).sum(), (updated, "aux")

    (_, got), _, seen = fj.flax.value_and_grad(with_statistics, has_aux=True)(
        {**variables, "batch_stats": {}}, X
    )
    assert got == ({"batch_stats": {}}, "aux")
    same(seen, expected)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_aux_is_the_same_of_every_recipe(recipe):
    """A pair with the collections that apply returned, and one with another mapping."""
    model = nn.Dense(32, dot_general_cls=hook(recipe))
    variables = {**model.init(jax.random.key(0), X), "batch_stats": {}}

    def loss(v, x, mutable, metrics):
        y, updated = model.apply(v, x, mutable=mutable)
        return (y**2).sum(), (updated if metrics is None else metrics, "aux")

    of = fj.flax.value_and_grad(loss, has_aux=True)
    assert of(variables, X, [SEEN, "batch_stats"], None)[0][1] == "aux"
    assert of(variables, X, ["batch_stats"], {"accuracy": 1})[0][1] == ({"accuracy": 1}, "aux")


def test_sums_of_observations_are_found():
    """A layer that runs twice, out of sight behind one compiled function: the update refuses its
    observations, and under jit the scale is NaN.
    """

    class Behind(nn.Module):
        @nn.compact
        def __call__(self, x):
            block = nn.jit(Block)(name="block")
            return block(block(x)[0])[0]

    variables = Behind().init(jax.random.key(0), X)
    _, _, seen = fj.flax.value_and_grad(plainly(Behind()))(variables, X)
    with pytest.raises(ValueError, match="update cannot use summed observations"):
        fj.flax.update(variables, seen)
    after = jax.jit(fj.flax.update)(variables, seen)
    assert np.isnan(
        jax.tree.leaves(after[STATE], is_leaf=lambda v: hasattr(v, "roles"))[0]
        .roles["input"]
        .stored
    )


class Twice(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(32, dot_general_cls=hook("delayed"), name="up")
        return layer(layer(x))


class Stopped(nn.Module):
    """Layers whose observations no gradient brings."""

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, 32, dot_general_cls=hook("delayed"))
        dense(name="unused")(x)
        return dense(name="head")(jax.lax.stop_gradient(nn.remat(Block)(name="frozen")(x)[0]))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_without_a_gradient_is_observed_or_refused(compiled):  # H-9
    variables = Stopped().init(jax.random.key(0), X)
    run = jax.jit if compiled else lambda f: f
    with pytest.raises(
        ValueError,
        match=r"^frozen.up.Fp8DotGeneral_0, unused.Fp8DotGeneral_0: .*mutable=\['fp8_seen'\]\), "
        r"and return",
    ):
        run(fj.flax.value_and_grad(plainly(Stopped())))(variables, X)
    _, _, seen = run(fj.flax.value_and_grad(threading(Stopped())))(variables, X)
    assert [[v[2] for v in of.values()] for of in seen.layers.values()].count([0, 1, 1]) == 2


def test_no_tokens_leave_every_state():  # L-9
    variables = Unrolled().init(jax.random.key(0), X)
    _, _, after = fj.flax.value_and_grad(plainly(Unrolled()), update=True)(variables, X[:0])
    same(after, variables)


def forgets(variables, x):
    y, updated = Unrolled().apply(variables, x, mutable=[SEEN])
    return (y**2).sum(), {SEEN: {"block_0": updated[SEEN]["block_0"]}}


def plain_grad():
    model, loss = Unrolled(), squares(Unrolled())
    variables = model.init(jax.random.key(0), X)
    _, updated = jax.eval_shape(loss, variables, X)
    fj.flax.update(variables, updated)


def of_another_model():
    small = Block()
    seen = fj.flax.unseen(small.init(jax.random.key(0), X))
    fj.flax.update(Unrolled().init(jax.random.key(0), X), seen)


SHARED = {"variable_axes": {}, "split_rngs": {"params": False}}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: value(Twice(), loss=plainly(Twice())),
            r"^up: a layer that runs twice .*mutable=\['fp8_seen'\]\), and return \(loss, "
            r"updated\)",
        ),
        (
            lambda: value(nn.Dense(32), loss=lambda v, x: (x.sum(), {"batch_stats": {}})),
            r"collections batch_stats would be lost.*has_aux=True: \(loss, updated\)",
        ),
        (
            lambda: value(loss=forgets),
            "block_1.up.Fp8DotGeneral_0, block_2.up.Fp8DotGeneral_0 has no observations",
        ),
        (
            lambda: value(loss=lambda v, x: (jnp.sum(x), None)),
            r"block_0.up.*returns \(loss, updated\)",
        ),
        (plain_grad, "value_and_grad; got dict"),
        (of_another_model, "update: block_0.up"),
        (
            lambda: value(stacked(Block, variable_broadcast=("params", STATE, SEEN), **SHARED)),
            "shares weights.*variable_carry",
        ),
        (
            lambda: (lambda m: value(m, loss=plainly(m)))(
                stacked(Block, variable_broadcast=("params", STATE), variable_carry=SEEN, **SHARED)
            ),
            r"an nn.scan that carries 'fp8_seen'.*mutable=\['fp8_seen'\]\), and return \(loss, "
            r"updated\)",
        ),
        (
            lambda: value(stacked(Block, variable_broadcast=("params", STATE), **SHARED)),
            "^block.up: .*would be lost.*variable_carry",
        ),
        (
            lambda: value(stacked(Block, variable_broadcast=("params",), **SHARED)),
            "^block.up: .*'fp8_state'; got none",
        ),
        (
            lambda: Unrolled().apply(
                {"params": Unrolled().init(jax.random.key(0), X)["params"]}, X
            ),
            "^block_0.up: .*'fp8_state'; got none",
        ),
        (
            lambda: value(nn.Dense(32, precision="highest", dot_general_cls=hook("tensorwise"))),
            "^Dense: .*precision='highest'",
        ),
        (
            lambda: fj.flax.Einsum((32, 32), "ab,bc->ac", recipe="fp9").init(jax.random.key(0), X),
            "recipe is a Recipe or one of",
        ),
        (
            lambda: fj.flax.Einsum((32, 32), "ab,bc->c", recipe="rowwise").init(
                jax.random.key(0), X
            ),
            "^Einsum: .*'a' is summed",
        ),
        (
            lambda: fj.flax.value_and_grad(squares(Block()))({STATE: {}}, X),
            "with 'params', or a tuple.*; got collections fp8_state",
        ),
        (lambda: fj.flax.merge(), "at least one"),
    ],
)
def test_errors_name_requirement_layer_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_state_of_another_recipe_is_refused():
    variables = nn.Dense(32, dot_general_cls=hook("delayed")).init(jax.random.key(0), X)
    short = fj.flax.linen_dot_general(short_recipe())
    with pytest.raises(
        ValueError,
        match=r"^Dense: this state is for recipe 'delayed'; got recipe "
        r"'short'",
    ):
        nn.Dense(32, dot_general_cls=short).apply(variables, X)


def short_recipe():
    recipe = RECIPES["delayed"]
    config = dataclasses.replace(DELAYED["delayed"], name="short", history_length=2)

    def shortened(spec):
        return dataclasses.replace(
            spec,
            a=dataclasses.replace(spec.a, delayed=config),
            b=dataclasses.replace(spec.b, delayed=config),
        )

    return dataclasses.replace(
        recipe, name="short", **{which: shortened(spec) for which, spec in recipe.gemms.items()}
    )


def test_the_whole_state_survives_serialization():
    variables = Unrolled().init(jax.random.key(0), X)
    _, _, seen = fj.flax.value_and_grad(squares(Unrolled()))(variables, X)
    after = fj.flax.update(variables, seen)
    same(serialization.from_bytes(variables, serialization.to_bytes(after)), after)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_layers_take_simulated_hardware(recipe, rng):  # G-19
    """Each by itself: nn.Dense and the like by their hook, Einsum by its field; the bits of the
    linear's.
    """
    x, kernel = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((16, 256), (256, 128))
    )
    given = (
        {"state": delayed.init(recipe), "seen": delayed.unseen(recipe)}
        if recipe == "delayed"
        else {}
    )
    products = []
    for multiply in (None, HOPPER):
        with fj.hardware.simulating(multiply):
            y, _ = linear.apply(x, kernel.T, recipe=recipe, **given)
        products.append(np.asarray(y, np.float32))
    native, expected = products
    assert (native != expected).any()
    for layer in (
        nn.Dense(
            128, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=hook(recipe, multiply=HOPPER)
        ),
        fj.flax.Einsum(
            (256, 128),
            "ab,bc->ac",
            recipe=recipe,
            use_bias=False,
            dtype=jnp.bfloat16,
            multiply=HOPPER,
        ),
    ):
        variables = layer.init(jax.random.key(0), x)
        variables["params"]["kernel"] = kernel.astype(jnp.float32)
        run = jax.jit(functools.partial(layer.apply, mutable=[SEEN]))
        np.testing.assert_array_equal(np.asarray(run(variables, x)[0], np.float32), expected)


@pytest.mark.slow
def test_attention_runs_in_fp8_with_hooks_for_its_einsums():
    """Both einsums of nn.MultiHeadDotProductAttention, whose ellipses are batch dims."""
    x = integers((2, 16, 32), 3, 0)

    def run(**hooks):
        model = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=32, **hooks)
        variables = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=32).init(
            jax.random.key(0), x
        )
        step = jax.jit(jax.value_and_grad(lambda v, x: (model.apply(v, x) ** 2).sum()))
        fp8 = [gemm for gemm in fj.proof.gemms(fj.proof.read(step.lower(variables, x))) if gemm.fp8]
        return step(variables, x), len(fp8)

    einsums = {
        f"{name}_einsum_cls": fj.flax.linen_einsum("rowwise")
        for name in ("qk_attn_weights", "attn_weights_value")
    }
    (value, grads), fp8 = run(**einsums)
    (expected, _), none = run()
    assert (fp8, none) == (6, 0)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads))
    # elements of e4m3 err by 2^-4 of themselves at most
    np.testing.assert_allclose(value, expected, rtol=2.0**-3)
    assert value != expected


class BridgedDense(nnx.Module):
    """As MaxText's DenseGeneral: an NNX layer whose linen dot_general has only the collection aqt
    mutable.
    """

    def __init__(self, in_features, features, recipe, rngs):
        self.kernel = nnx.Param(
            nnx.initializers.normal(0.05)(rngs.params(), (in_features, *features))
        )
        self.dot_general = nnx.bridge.ToNNX(fj.flax.linen_dot_general(recipe)(), rngs=rngs)
        self._multiply(jnp.zeros((1, in_features)), self.dot_general.lazy_init)

    def __call__(self, x):
        return self._multiply(x, functools.partial(self.dot_general, mutable=["aqt"]))

    def _multiply(self, x, f):
        return f(
            x.astype(jnp.bfloat16),
            self.kernel[...].astype(jnp.bfloat16),
            (((x.ndim - 1,), (0,)), ((), ())),
            precision=None,
        )


@pytest.mark.grid(1)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_a_bridged_hook_is_the_hook_of_nnx(recipe, rng):  # L-1
    bridged = BridgedDense(64, (4, 32), recipe, nnx.Rngs(0))
    plain = nnx.LinearGeneral(
        64,
        (4, 32),
        use_bias=False,
        dtype=jnp.bfloat16,
        dot_general=fj.flax.nnx_dot_general(recipe),
        rngs=nnx.Rngs(0),
    )
    plain.kernel[...] = bridged.kernel[...]
    x = jnp.asarray(rng.standard_normal((4, 16, 64)), jnp.bfloat16)
    (a, of_a), (b, of_b) = (
        nnx.jit(nnx.value_and_grad(lambda m: (m(x).astype(jnp.float32) ** 2).mean()))(m)
        for m in (bridged, plain)
    )
    assert a == b
    np.testing.assert_array_equal(of_a["kernel"][...], of_b["kernel"][...])


def test_a_bridged_hook_that_would_lose_observations_is_refused():  # H-2
    bridged = BridgedDense(64, (32,), "delayed", nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"those of this layer would be lost.*mutable=\['fp8_seen'\]"
    ):
        fj.flax.value_and_grad(lambda m, x: m(x).sum())(bridged, jnp.ones((16, 64)))
