import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fp8ref import jax as fj
from fp8ref.jax import delayed
from fp8ref.jax.linear import contraction, linear
from fp8ref.sim.gemm import hardware


def integers(shape, largest, e, seed=0):
    """Integers times 2^e, exact in e4m3 and in every sum of 32 products of the like, in any
    order.
    """
    return jnp.asarray(
        np.random.default_rng(seed).integers(-largest, largest + 1, shape) * 2.0**e, jnp.float32
    )


HOPPER = hardware.by_name("hopper")
X, KERNEL = integers((8, 32), 3, 0), integers((3, 32, 32), 2, -2)


def layer(kernel, recipe="delayed"):
    made = nnx.Linear(
        32, 32, use_bias=False, dot_general=fj.flax.nnx_dot_general(recipe), rngs=nnx.Rngs(0)
    )
    made.kernel.set_value(kernel)
    return made


class Unrolled(nnx.Module):
    def __init__(self, remat=False):
        self.layers = nnx.List([layer(k) for k in KERNEL])
        self.remat = remat

    def __call__(self, x):
        for one in self.layers:
            x = nnx.remat(lambda one, x: one(x))(one, x) if self.remat else one(x)
        return x


class Stacked(nnx.Module):
    def __init__(self):
        self.layers = nnx.vmap(lambda kernel: layer(kernel))(KERNEL)

    def __call__(self, x):
        return nnx.scan(lambda x, one: one(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )


def chosen(model, x):
    return nnx.cond(x[0, 0] < 100, squares, lambda model, x: 0.0, model, x)


def squares(model, x):
    return (model(x).astype(jnp.float32) ** 2).sum()


def step(model, x=X, loss=squares):
    return nnx.jit(lambda model, x: fj.flax.value_and_grad(loss)(model, x))(model, x)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def same_sum(a, b):
    """Of the squares of an output, added in the order that a compiler chose: each addition of them
    rounds by 2^-24 of a sum at most.
    """
    np.testing.assert_allclose(a, b, rtol=2 * X.size * 2.0**-24)


@pytest.mark.grid(2)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "recipe", ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"]
)
def test_a_linear_is_the_linear_of_its_transposed_kernel(recipe, dtype, rng):
    """Output, gradients and observations: the weight is cast first, and the bias added last."""
    model = nnx.Linear(
        32, 48, dtype=dtype, dot_general=fj.flax.nnx_dot_general(recipe), rngs=nnx.Rngs(0)
    )
    x = jnp.asarray(rng.standard_normal((2, 8, 32)), jnp.float32)
    model.bias.set_value(jnp.asarray(rng.standard_normal(48), jnp.float32))
    kernel, bias = model.kernel.get_value(), model.bias.get_value()
    given = (
        {"state": delayed.init(recipe), "seen": delayed.unseen(recipe)}
        if recipe == "delayed"
        else {"seen": None}
    )

    def by_hand(kernel, bias, seen):
        y, after = linear.apply(
            x.astype(dtype), kernel.astype(dtype).T, recipe=recipe, **{**given, "seen": seen}
        )
        return ((y + bias.astype(dtype)).astype(jnp.float32) ** 2).sum(), after

    value, grads, seen = step(model, x)
    (expected, forward), (*grad, backward) = jax.jit(
        jax.value_and_grad(by_hand, argnums=(0, 1, 2), has_aux=True)
    )(kernel, bias, given["seen"])
    same((value, grads.kernel.get_value(), grads.bias.get_value()), (expected, *grad))
    if recipe == "delayed":
        same(list(seen.layers.values()), [delayed.merge(forward, backward)])
    assert not jax.tree.leaves(nnx.state(model, fj.flax.Fp8State)) or recipe == "delayed"
    assert nnx.eval_shape(lambda model: model(x), model).dtype == dtype


def test_linear_general_and_einsum_contract_what_they_say():
    x, kernel = integers((2, 8, 4, 16), 3, 0), integers((4, 16, 3, 16), 2, -2)
    hook = fj.flax.nnx_dot_general("tensorwise")
    general = nnx.LinearGeneral(
        (4, 16), (3, 16), axis=(-2, -1), use_bias=False, dot_general=hook, rngs=nnx.Rngs(0)
    )
    einsum = nnx.Einsum(
        "bthk,hkij->btij",
        kernel.shape,
        einsum_op=fj.flax.nnx_einsum("tensorwise"),
        dtype=jnp.bfloat16,
        preferred_element_type=jnp.float32,
        rngs=nnx.Rngs(0),
    )
    expected, _ = contraction.einsum("bthk,hkij->btij", x, kernel, recipe="tensorwise")
    for model in (general, einsum):
        model.kernel.set_value(kernel)
        same(model(x), expected)  # integers, exact in bfloat16; the preferred type is the output's


def test_scan_over_layers_and_remat_observe_as_the_unrolled_model():
    value, _, of_each = step(Unrolled())
    assert list(of_each.layers) == [
        "layers.0.dot_general",
        "layers.1.dot_general",
        "layers.2.dot_general",
    ]
    same(step(Unrolled(remat=True))[2], of_each)
    same(step(Unrolled(), loss=chosen)[2], of_each)
    model = Stacked()
    of_model, grads, seen = step(model)
    same_sum(of_model, value)
    assert grads["layers"]["kernel"].shape == (3, 32, 32)
    (of_stack,) = seen.layers.values()
    same(
        of_stack,
        {role: jnp.stack([one[role] for one in of_each.layers.values()]) for role in of_stack},
    )
    nnx.jit(fj.flax.update)(model, seen)
    np.testing.assert_array_equal(
        model.layers.dot_general.state.get_value()["input"].stored, 448 / of_stack["input"][:, 0]
    )


def test_a_layer_used_again_is_one_observation():  # H-4
    class Again(nnx.Module):
        def __init__(self):
            self.one = layer(KERNEL[0])
            self.also = self.one

        def __call__(self, x):
            return self.also(self.one(self.one(x)))

    class Scanned(Again):
        def __call__(self, x):
            def body(carry, _):
                one, x = carry
                return (one, one(x)), None

            return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(
                (self.one, x), jnp.arange(3)
            )[0][1]

    results = [step(model()) for model in (Again, Scanned)]
    same(results[0][2], results[1][2])
    (seen,) = results[0][2].layers.values()
    h = [X]
    for _ in range(2):
        h.append(
            linear.apply(
                h[-1],
                KERNEL[0].T,
                recipe="delayed",
                state=delayed.init("delayed"),
                seen=delayed.unseen("delayed"),
            )[0]
        )
    assert seen["input"].tolist() == [max(np.abs(v).max() for v in h), 0, 1]


def test_vmap_over_examples_merges_and_over_layers_does_not():
    def mapped(model, x):
        return (nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))(model, x) ** 2).sum()

    same(step(layer(KERNEL[0]), loss=mapped)[2], step(layer(KERNEL[0]))[2])

    def over_layers(model, x):
        return (nnx.vmap(lambda one, x: one(x), in_axes=(0, 0))(model.layers, x) ** 2).sum()

    x = jnp.stack([X, 2 * X, 4 * X])
    (seen,) = step(Stacked(), x, loss=over_layers)[2].layers.values()
    np.testing.assert_array_equal(seen["input"][:, 0], jnp.abs(x).max((1, 2)))


def test_microbatches_merge_and_an_optimizer_never_meets_the_state():
    model = Unrolled()
    _, grads, whole = step(model)
    same(fj.flax.merge(*(step(model, X[i : i + 2])[2] for i in range(0, 8, 2))), whole)
    same(fj.flax.merge(fj.flax.unseen(model), whole), whole)
    optimizer = nnx.Optimizer(
        model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), wrt=nnx.Param
    )
    before = nnx.to_pure_dict(nnx.state(model, fj.flax.Fp8State))
    optimizer.update(model, grads)
    same(nnx.to_pure_dict(nnx.state(model, fj.flax.Fp8State)), before)
    # counts, and two moments for each of three kernels
    assert len(jax.tree.leaves(nnx.state(optimizer, nnx.OptState))) == 2 + 2 * 3


def test_an_empty_batch_leaves_states_as_they_are():  # L-9
    model = Unrolled()
    before = nnx.to_pure_dict(nnx.state(model, fj.flax.Fp8State))
    value, _, seen = step(model, X[:0])
    fj.flax.update(model, seen)
    assert value == 0
    same(nnx.to_pure_dict(nnx.state(model, fj.flax.Fp8State)), before)


def test_only_value_and_grad_observes_and_it_leaves_nothing_behind():
    """Inference, an nnx.jit or an nnx.grad of one's own change no module; traced once before, they
    still observe inside value_and_grad.
    """
    model = Unrolled()
    forward = nnx.jit(lambda model, x: model(x))
    structure, leaves = nnx.graphdef(model), jax.tree.leaves(nnx.state(model))
    forward(model, X)
    with pytest.warns(UserWarning, match="this gradient observes none"):
        nnx.grad(squares)(model, X)
    _, _, seen = fj.flax.value_and_grad(lambda model, x: (forward(model, x) ** 2).sum())(model, X)
    assert nnx.graphdef(model) == structure
    same(jax.tree.leaves(nnx.state(model)), leaves)
    same(seen, step(model)[2])
    with pytest.raises(RuntimeError, match="the loss fails"):
        fj.flax.value_and_grad(fails)(model, X)
    assert nnx.graphdef(model) == structure


def fails(model, x):
    model(x)
    raise RuntimeError("the loss fails")


def test_a_loss_with_aux_and_other_variables():
    (value, aux), grads, _ = fj.flax.value_and_grad(
        lambda m, x: (squares(m, x), x.sum()), has_aux=True, wrt=nnx.PathContains(0)
    )(Unrolled(), X)
    same_sum(value, step(Unrolled())[0])
    same(aux, X.sum())
    assert len(jax.tree.leaves(grads)) == 1


def sharing():
    hook = fj.flax.nnx_dot_general("tensorwise")
    return nnx.Sequential(
        *(nnx.Linear(32, 32, dot_general=hook, rngs=nnx.Rngs(0)) for _ in range(2))
    )


def teaching(model, x):
    return squares(model, x) + squares(TEACHER, x)


def broadcast(model, x):
    return nnx.scan(lambda one, x: one(x), in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=2)(
        model, x
    ).sum()


def closed_over(model, x):
    return jax.checkpoint(lambda x: model(x))(x).sum()


TEACHER = Unrolled()
LINEAR = {"rngs": nnx.Rngs(0), "dot_general": fj.flax.nnx_dot_general("rowwise", name="wi")}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: step(sharing()),
            "a layer has its own hook; layers.0.dot_general and layers.1.dot_general share one",
        ),
        (
            lambda: fj.flax.update(sharing(), fj.flax.Observed(layers={})),
            "a layer has its own hook",
        ),
        (
            # a gradient of nnx.grad's has this type
            lambda: fj.flax.update(Unrolled(), nnx.state(Unrolled(), nnx.Param)),
            "observations of fj.flax.value_and_grad.*got State.*plain grad",
        ),
        (
            lambda: fj.flax.update(Unrolled(), fj.flax.unseen(layer(KERNEL[0]))),
            "update: layers.0.dot_general",
        ),
        (
            lambda: fj.flax.update(layer(KERNEL[0]), fj.flax.unseen(Unrolled())),
            "update: dot_general has no observations",
        ),
        (
            lambda: fj.flax.update(layer(KERNEL[0], "bf16"), fj.flax.unseen(layer(KERNEL[0]))),
            "of dot_general, which the model lacks",
        ),
        (
            lambda: step(Unrolled(), loss=teaching),
            r"would be lost. Give value_and_grad all models.*\(\(model, other\), ...\)",
        ),
        (
            lambda: step(layer(KERNEL[0]), loss=broadcast),
            "^Linear: .*lost in a transformation.*nnx.scan.*nnx.Carry",
        ),
        (
            lambda: step(layer(KERNEL[0]), loss=closed_over),
            "^Linear: .*cannot leave a transformation that closes over the layer. Use nnx.scan",
        ),
        (
            lambda: nnx.Linear(32, 32, precision="highest", **LINEAR)(X),
            "^wi: .*precision='highest'",
        ),
        (lambda: nnx.Linear(32, 32, **LINEAR)(X, out_sharding=jax.P()), "^wi: .*mesh context"),
        (lambda: fj.flax.nnx_dot_general("fp9"), "recipe is a Recipe or one of"),
        (lambda: fj.flax.value_and_grad(squares)(X, X), "an NNX model, linen variables"),
    ],
)
def test_errors_name_requirement_layer_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_both_names_mean_their_modules():
    assert fj.flax.__name__ == "fp8ref.jax.flax"
    assert flax.__name__ == "flax"


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_layers_take_simulated_hardware(recipe, rng):  # G-19
    """In a jitted step with gradients, as in the linear: outputs' squares and the kernel's
    gradient.
    """
    x, kernel = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((16, 256), (256, 128))
    )

    def of_linear(kernel, multiply):
        given = (
            {"state": delayed.init(recipe), "seen": delayed.unseen(recipe)}
            if recipe == "delayed"
            else {}
        )
        with fj.hardware.simulating(multiply):
            return (linear.apply(x, kernel.T, recipe=recipe, **given)[0] ** 2).sum()

    native, expected = (
        np.asarray(jax.jit(jax.grad(lambda k, m=m: of_linear(k, m)))(kernel))
        for m in (None, HOPPER)
    )
    assert (native != expected).any()
    for layer in (
        nnx.Linear(
            256,
            128,
            use_bias=False,
            dot_general=fj.flax.nnx_dot_general(recipe, multiply=HOPPER),
            rngs=nnx.Rngs(0),
        ),
        nnx.Einsum(
            "ab,bc->ac",
            (256, 128),
            einsum_op=fj.flax.nnx_einsum(recipe, multiply=HOPPER),
            rngs=nnx.Rngs(0),
        ),
    ):
        layer.kernel.set_value(kernel)
        np.testing.assert_array_equal(np.asarray(step(layer, x)[1]["kernel"].get_value()), expected)
