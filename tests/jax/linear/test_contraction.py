import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.jax import delayed
from fp8ref.jax.gemm import hardware as jax_hardware
from fp8ref.jax.linear import contraction, linear
from fp8ref.recipe import RECIPES
from fp8ref.sim.gemm import hardware

HOPPER = hardware.by_name("hopper")
CASES = [
    # subscripts, x, w
    ("btd,dhk->bthk", (2, 16, 64), (64, 4, 16)),
    ("bthk,hkd->btd", (2, 16, 4, 16), (4, 16, 64)),
    ("btd,nd->btn", (2, 16, 64), (32, 64)),
    ("...d,df->...f", (2, 3, 16, 64), (64, 32)),
    ("ecd,edf->ecf", (3, 16, 64), (3, 64, 32)),  # a batch dim
    ("bceg,gef->fbec", (2, 16, 3, 64), (64, 3, 32)),
    ("...qhd,...khd->...hqk", (2, 16, 3, 64), (2, 32, 3, 64)),  # Flax's attention
    ("...hqk,...khd->...qhd", (2, 3, 16, 32), (2, 32, 3, 16)),
    # an ellipsis of fewer dims is their last ones
    ("...d,b...df->...bf", (2, 16, 64), (3, 16, 64, 32)),
]


def integers(rng, shape, e):
    return jnp.asarray(rng.integers(-7, 8, shape) * 2.0**e, jnp.bfloat16)


def outputs_and_gradients(f, x, w, g):
    """y, grad_input, grad_weight, by one program: to compile each operation by itself takes several
    times as long.
    """

    @jax.jit
    def run(x, w, g):
        out, vjp = jax.vjp(f, x, w)
        return out, *vjp(g)

    return run(x, w, g)


@pytest.mark.grid(2)
@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize(("subscripts", "x", "w"), CASES)
def test_einsum_equals_jnps_on_integers(subscripts, x, w, recipe, rng):  # L-2
    """Integers up to 7 times a power of two are numbers of e4m3 and e5m2 under scales of 448 / 7
    and 57344 / 7, powers of two: FP8 changes nothing.
    """
    x, w = integers(rng, x, 0), integers(rng, w, -6)
    y = jnp.einsum(subscripts, x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)
    g = integers(rng, y.shape, -3)

    def results(f):
        return outputs_and_gradients(f, x, w, g)

    mine = results(lambda x, w: contraction.einsum(subscripts, x, w, recipe=recipe)[0])
    wide = results(
        lambda x, w: jnp.einsum(subscripts, x, w, preferred_element_type=jnp.float32).astype(
            jnp.bfloat16
        )
    )
    for one, other in zip(mine, wide, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_dot_general_of_a_batch_is_each_ones_linear_but_for_the_tensors_scale(recipe, rng):
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((3, 16, 64), (3, 32, 64)))
    y, _ = contraction.dot_general(x, w, (((2,), (2,)), ((0,), (0,))), recipe=recipe)
    alone = jnp.stack([linear.apply(a, b, recipe=recipe)[0] for a, b in zip(x, w, strict=True)])
    assert bool((y == alone).all()) == (recipe == "rowwise")


def test_delayed_scaling_takes_and_gives_seen(rng):
    x, w = (
        jnp.asarray(rng.standard_normal((2, 16, 64)), jnp.bfloat16),
        jnp.asarray(rng.standard_normal((64, 32)), jnp.bfloat16),
    )
    state, seen = delayed.init("delayed"), delayed.unseen("delayed")
    y, seen = contraction.einsum("btd,df->btf", x, w, recipe="delayed", state=state, seen=seen)
    expected, seen_by_linear = linear.apply(
        x, w.T, recipe="delayed", state=state, seen=delayed.unseen("delayed")
    )
    np.testing.assert_array_equal(np.asarray(y), np.asarray(expected))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), seen, seen_by_linear))


def test_a_preferred_type_is_the_outputs(rng):
    x, w = jnp.ones((16, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.float32)
    numbers = (((1,), (0,)), ((), ()))
    wide = contraction.Contraction(numbers, preferred_element_type=jnp.float32)
    y, _ = contraction.dot_general(x, w, wide, recipe="tensorwise")
    assert y.dtype == jnp.float32
    with pytest.raises(
        ValueError,
        match=r"wi: x and w have one dtype.*preferred_element_type.*; got bfloat16 and float32",
    ):
        contraction.dot_general(x, w, numbers, recipe="tensorwise", name="wi")


@pytest.mark.parametrize(
    ("subscripts", "message"),
    [
        ("btd,df", "both operands and the output"),
        ("btd->btd", "both operands"),
        ("bdd,df->bf", "once in a term"),
        ("bt,df->bf", "3 and 2 dims"),
        ("btd,...->btf", "write '...' there"),
        ("...td,df->tf", "write '...' there"),
        ("btd,df->bf", "'t' is summed"),
        ("btd,df->btg", "output letters in an operand"),
    ],
)
def test_subscripts_that_are_not_one_contraction(subscripts, message):
    with pytest.raises(ValueError, match=f"wi: subscripts .*{message}"):
        contraction.einsum(
            subscripts, jnp.ones((2, 16, 64)), jnp.ones((64, 32)), recipe="tensorwise", name="wi"
        )


def test_no_tokens_in_any_form():  # L-9
    for subscripts, x, w in (
        ("btd,dhk->bthk", (2, 0, 64), (64, 4, 16)),
        ("ecd,edf->ecf", (3, 0, 64), (3, 64, 32)),
    ):
        x, w = jnp.ones(x), jnp.ones(w)
        assert (
            contraction.einsum(subscripts, x, w, recipe="rowwise")[0].shape
            == jnp.einsum(subscripts, x, w).shape
        )
        grads = jax.grad(
            lambda x, w, s=subscripts: contraction.einsum(s, x, w, recipe="rowwise")[0].sum(),
            (0, 1),
        )(x, w)
        assert [g.shape for g in grads] == [x.shape, w.shape]
        assert not grads[1].any()


@pytest.mark.parametrize("dims", [(-1,), (2,), (0, 0)])
def test_dims_that_are_none_of_an_operand(dims):
    with pytest.raises(ValueError, match="wi: dimension_numbers have each dim once, from 0; got "):
        contraction.dot_general(
            jnp.ones((16, 16)),
            jnp.ones((16, 16)),
            ((dims, (1,)), ((), ())),
            recipe="rowwise",
            name="wi",
        )


def test_unequal_dims():
    with pytest.raises(
        ValueError,
        match=r"dot_general: contracted and batch dims have equal sizes; got \(16, 64\), \(32, 16\)",
    ):
        contraction.dot_general(
            jnp.ones((16, 64)),
            jnp.ones((32, 16)),
            (((1,), (1,)), ((), ())),
            recipe=RECIPES["tensorwise"],
        )


@pytest.mark.grid(2)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize(("subscripts", "turned"), [("btd,df->btf", False), ("btd,fd->btf", True)])
# G-19, B-12
def test_simulated_hardware_multiplies_as_in_the_linear(subscripts, turned, recipe, rng):
    x, w = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((2, 64, 256), (256, 128))
    )
    g = jnp.asarray(rng.standard_normal((2, 64, 128)), jnp.bfloat16)

    def results(f):
        return outputs_and_gradients(f, x, w, g)

    def einsum():
        return results(
            lambda x, w: contraction.einsum(subscripts, x, w.T if turned else w, recipe=recipe)[0]
        )

    with jax_hardware.simulating(HOPPER):
        mine = einsum()
        linears = results(lambda x, w: linear.apply(x, w.T, recipe=recipe)[0])
    for one, other in zip(mine, linears, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    assert any((a != b).any() for a, b in zip(mine, einsum(), strict=True))


def test_simulated_hardware_multiplies_no_batches(rng):  # G-19
    x, w = jnp.ones((3, 16, 64), jnp.bfloat16), jnp.ones((3, 64, 32), jnp.bfloat16)
    with (
        jax_hardware.simulating(HOPPER),
        pytest.raises(
            ValueError,
            match=r"^experts: simulated hardware needs .*got a batch, \(3, 16, 64\) and \(3, 64, 32\)",
        ),
    ):
        contraction.einsum("ecd,edf->ecf", x, w, recipe="tensorwise", name="experts")


@pytest.mark.parametrize(
    ("subscripts", "shape", "dequantized"), [("td,df->tf", (64, 32), 1), ("td,fd->tf", (32, 64), 0)]
)
# G-22
def test_on_a_gpu_the_output_gemm_of_a_weight_as_flax_keeps_it_is_written_as_dequantized(
    subscripts, shape, dequantized
):
    x, w = jax.ShapeDtypeStruct((16, 64), jnp.bfloat16), jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def loss(x, w):
        return contraction.einsum(subscripts, x, w, recipe="rowwise")[0].sum()

    text = (
        jax.jit(jax.value_and_grad(loss, (0, 1)))
        .trace(x, w)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    dots = [
        line.partition(" : (tensor<")[2].partition(">")[0]
        for line in text.splitlines()
        if "dot_general" in line
    ]
    assert sorted(dot.rpartition("x")[2] for dot in dots) == ["bf16"] * dequantized + [
        "f8E4M3FN"
    ] * (3 - dequantized)
