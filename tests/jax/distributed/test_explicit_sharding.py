"""Linears on a mesh with Explicit axes (spec P-20): one device's bits, lax.dot_general's shardings,
gathers in FP8.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8ref.jax import delayed, proof
from fp8ref.jax.distributed.explicit_sharding import joined
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.gemm import gemm
from fp8ref.jax.linear import contraction, linear
from fp8ref.jax.linear.carried import Layer

B, T, K, N = 8, 16, 128, 256
BATCH = ("data", "fsdp")
NUMBERS = (((2,), (0,)), ((), ()))
MESH = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))
CASES = {
    # name: the specs of x [B, T, K] and w [K, N], out_sharding, placement
    "fsdp cuts K": (P(BATCH), P("fsdp", "tensor"), None, None),
    "fsdp cuts N, by out_sharding": (
        P(BATCH),
        P(None, ("tensor", "fsdp")),
        P(BATCH, None, "tensor"),
        None,
    ),
    "fsdp cuts N, by placement": (
        P(BATCH),
        P(None, ("tensor", "fsdp")),
        None,
        Placement(m=BATCH, n=("tensor",), fsdp=("fsdp",)),
    ),
    "row-parallel, by out_sharding": (
        P(BATCH, None, "tensor"),
        P(("tensor", "fsdp"), None),
        P(BATCH),
        None,
    ),
    "row-parallel, by placement": (
        P(BATCH, None, "tensor"),
        P("tensor", "fsdp"),
        None,
        Placement(m=BATCH, k=("tensor",), fsdp=("fsdp",), sequence=True),
    ),
    "row-parallel, cut sequence": (
        P(BATCH, None, "tensor"),
        P("tensor", None),
        P(BATCH, "tensor"),
        None,
    ),
    "column-parallel, cut sequence": (
        P(BATCH, "tensor"),
        P("fsdp", "tensor"),
        P(BATCH, None, "tensor"),
        None,
    ),
    "one axis cuts K of x and N of w": (P(BATCH, None, "tensor"), P(None, "tensor"), None, None),
    "K of x alone": (P(BATCH, None, "tensor"), P(), None, None),
    "nothing": (P(), P(), None, None),
    "nothing, by out_sharding": (P(), P(), P("data", None, "tensor"), None),
}
QUICK = (
    "fsdp cuts K",
    "fsdp cuts N, by out_sharding",
    "row-parallel, by placement",
    "column-parallel, cut sequence",
)


def put(value, *spec, mesh=MESH):
    return jax.device_put(value, NamedSharding(mesh, P(*spec)))


def out_of(spec):
    return None if spec is None else NamedSharding(MESH, spec)


@pytest.fixture(scope="module")
def operands():
    """Integers over powers of two, so that every sum is exact in any order; columns have other
    largest ones.
    """
    rng = np.random.default_rng(0)
    shapes = zip(((B, T, K), (K, N), (B, T, N)), (0, -6, -10), strict=True)
    return [
        jnp.asarray(rng.integers(-7, 8, s) * 2.0 ** (e + rng.integers(0, 3, s[-1])), jnp.bfloat16)
        for s, e in shapes
    ]


def results(use, x, w, g):
    """y, grad_input, grad_weight."""
    y, vjp = jax.vjp(use, x, w)
    of_y = jax.typeof(y).sharding
    return y, *vjp(g if of_y.mesh.empty else jax.sharding.reshard(g, of_y))


def dot(recipe="rowwise", **how):
    if "out_sharding" in how:
        how["placement"] = joined(how.pop("placement", None), how.pop("out_sharding"))
    return lambda x, w: contraction.dot_general(x, w, NUMBERS, recipe=recipe, name="fc", **how)[0]


def same(mine, one):
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def case(name, recipe):
    return pytest.param(
        name,
        recipe,
        marks=() if name in QUICK and recipe == "rowwise" else pytest.mark.slow,
        id=f"{name}-{recipe}",
    )


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("name", "recipe"),
    [case(name, recipe) for name in CASES for recipe in ("rowwise", "tensorwise", "bf16")],
)
def test_bits_are_one_devices_and_what_is_gathered_is_fp8(name, recipe, operands):  # P-4, P-6, P-20
    (x, w, g), (of_x, of_w, out, placement) = operands, CASES[name]
    use = dot(recipe, placement=placement, out_sharding=out_of(out))
    x_cut, w_cut = put(x, *of_x), put(w, *of_w)
    step = jax.jit(lambda x, w, g: results(use, x, w, g))
    found = step(x_cut, w_cut, g)
    same(found, jax.jit(lambda x, w, g: results(dot(recipe), x, w, g))(x, w, g))
    assert [jax.typeof(v) for v in found[1:]] == [jax.typeof(v) for v in (x_cut, w_cut)]
    if recipe != "bf16":
        gathers = [
            c
            for c in proof.collectives(proof.read(step.lower(x_cut, w_cut, g)))
            if c.kind == "all_gather"
        ]
        # Of high precision: scales, and results that types make whole.
        wide = [
            c
            for c in gathers
            if not c.dtype.startswith("f8") and np.prod(c.shape) >= min(K, N) * 32
        ]
        # A gradient that its type makes whole, of pieces, is gathered as it is.
        assert not wide or name in ("K of x alone", "nothing, by out_sharding")
        assert any(c.dtype.startswith("f8") for c in gathers) or name.startswith(
            ("K of x", "nothing")
        )


@pytest.mark.grid(3)
@pytest.mark.parametrize(
    "name", [name for name, (*_, placement) in CASES.items() if placement is None]
)
def test_the_result_has_the_sharding_of_dot_general(name, operands):  # P-20
    (x, w, _), (of_x, of_w, out, _) = operands, CASES[name]
    x, w = put(x, *of_x), put(w, *of_w)
    theirs = jax.jit(lambda x, w: lax.dot_general(x, w, NUMBERS, out_sharding=out_of(out)))
    mine = jax.jit(dot(out_sharding=out_of(out)))
    assert jax.typeof(mine(x, w)) == jax.typeof(theirs(x, w))


@pytest.mark.parametrize(
    ("of_x", "of_w", "out"),
    [
        (P(BATCH), P(None, "fsdp"), None),  # one axis would cut two dims of the result
        (P(None, None, "tensor"), P("tensor"), None),  # whole or not, nobody says
        (P(None, None, "tensor"), P("data"), None),  # K cut in two ways
        (P(BATCH), P(), P("pipeline")),
    ],
)
def test_what_dot_general_refuses_is_refused_by_name(of_x, of_w, out, operands):  # P-20
    x, w, _ = operands
    x, w, errors = put(x, *of_x), put(w, *of_w), []
    for use in (
        lambda x, w, to: lax.dot_general(x, w, NUMBERS, out_sharding=to),
        lambda x, w, to: dot(out_sharding=to)(x, w),
    ):
        with jax.set_mesh(MESH), pytest.raises(Exception) as caught:  # noqa: PT011 - compared below
            jax.jit(lambda x, w, use=use: use(x, w, out))(x, w)
        errors.append(caught)
    theirs, mine = errors
    assert mine.type is theirs.type
    assert str(mine.value).startswith("fc: ")
    assert str(theirs.value).split("inputs")[0].split(" This error")[0] in str(mine.value)


def test_einsum_takes_out_sharding_in_the_order_of_its_output(operands):
    x, w = put(operands[0], "data", None, "tensor"), put(operands[1].reshape(K, 8, 32), "tensor")
    out = out_of(P("data", "tensor"))
    mine = jax.jit(
        lambda x, w: contraction.einsum(
            "btd,dhk->bhtk", x, w, recipe="rowwise", placement=Placement(out_sharding=out)
        )[0]
    )(x, w)
    theirs = jax.jit(lambda x, w: jnp.einsum("btd,dhk->bhtk", x, w, out_sharding=out))(x, w)
    assert jax.typeof(mine) == jax.typeof(theirs)
    same(
        mine,
        jnp.einsum(
            "btd,dhk->bhtk",
            operands[0],
            operands[1].reshape(K, 8, 32),
            preferred_element_type=jnp.float32,
        ).astype(jnp.bfloat16),
    )


@pytest.mark.slow
def test_codes_and_scales_of_any_numbers_are_one_devices(rng):  # P-2, P-4
    """Of all operands of the three GEMMs, under scales of tensors, rows and blocks."""
    x, w, g = (
        jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((B, T, K), (K, N), (B, T, N))
    )
    cut = put(x, BATCH, "tensor"), put(w, "fsdp", "tensor")

    def observed(recipe, x, w, **how):
        seen = {}
        with linear.observing(
            lambda name, which, a, b, out: seen.setdefault(which, (a[1:], b[1:]))
        ):
            jax.block_until_ready(
                jax.jit(lambda x, w, g: results(dot(recipe, **how), x, w, g))(x, w, g)
            )
        jax.effects_barrier()
        return seen

    for recipe in ("tensorwise", "rowwise", "mxfp8"):
        mine, one = (
            observed(recipe, *cut, out_sharding=out_of(P(BATCH, None, "tensor"))),
            observed(recipe, x, w),
        )
        assert set(mine) == set(one) == {"output", "grad_input", "grad_weight"}
        jax.tree.map(np.testing.assert_array_equal, mine, one)


@pytest.mark.grid(2)
@pytest.mark.parametrize("recipe", ["rowwise_with_gw_hp", "mxfp8", "blockwise"])
def test_other_recipes(recipe, operands):
    x, w, g = operands
    found = jax.jit(lambda x, w, g: results(dot(recipe), x, w, g))(
        put(x, BATCH), put(w, "fsdp", "tensor"), g
    )
    same(found, jax.jit(lambda x, w, g: results(dot(recipe), x, w, g))(x, w, g))


def test_states_observe_the_whole_tensors(operands):  # H-4, P-2
    x, w, g = operands
    state = delayed.init("delayed")

    def step(x, w, g, seen):
        (y, forward), vjp = jax.vjp(
            lambda x, w, seen: linear.apply(x, w, recipe="delayed", state=state, seen=seen),
            x,
            w,
            seen,
        )
        of_y = jax.typeof(y).sharding
        *grads, backward = vjp(
            (
                g if of_y.mesh.empty else jax.sharding.reshard(g, of_y),
                jax.tree.map(jnp.zeros_like, forward),
            )
        )
        return y, grads, delayed.update(state, delayed.merge(forward, backward), recipe="delayed")

    found = jax.jit(step)(put(x, BATCH), put(w.T, "tensor", "fsdp"), g, delayed.unseen("delayed"))
    same(found, jax.jit(step)(x, w.T, g, delayed.unseen("delayed")))


@pytest.mark.grid(1)
@pytest.mark.parametrize("auto", [("tensor",), ("data", "fsdp")])
@pytest.mark.parametrize(
    "placement",
    [None, Placement(m=BATCH, n=("tensor",), fsdp=("fsdp",))],
    ids=["types", "placement"],
)
def test_a_mesh_with_auto_axes_too(auto, placement, operands):
    x, w, g = operands
    kinds = [AxisType.Auto if axis in auto else AxisType.Explicit for axis in MESH.axis_names]
    mesh = jax.make_mesh((2, 2, 2), MESH.axis_names, axis_types=tuple(kinds))
    of_w = (None, ("tensor", "fsdp")) if placement else ("fsdp", "tensor")
    cut = put(x, BATCH, mesh=mesh), put(w, *of_w, mesh=mesh)
    found = jax.jit(lambda x, w, g: results(dot(placement=placement), x, w, g))(*cut, g)
    same(found, jax.jit(lambda x, w, g: results(dot(), x, w, g))(x, w, g))


@pytest.mark.slow
def test_transformations_and_a_context_mesh(operands):
    x, w, _ = operands
    square = w[:, :K]
    stack, xs = jnp.stack([square, square[::-1]]), jnp.stack([x, 2 * x])

    def scanned(x, stack):
        return lax.scan(jax.checkpoint(lambda x, w: (dot()(x, w), None)), x, stack)[0]

    def grads(x, stack):
        return jax.grad(
            lambda x, stack: (scanned(x, stack).astype(jnp.float32) ** 2).sum(), (0, 1)
        )(x, stack)

    same(jax.jit(grads)(put(x, BATCH), put(stack, None, "fsdp")), jax.jit(grads)(x, stack))
    mapped = jax.jit(jax.vmap(dot()))
    same(mapped(put(xs, "data", "fsdp"), put(stack, "data", "fsdp", "tensor")), mapped(xs, stack))
    with jax.set_mesh(MESH):
        found = jax.jit(dot(out_sharding=P(BATCH)))(put(x, BATCH), put(w, "fsdp"))
    same(found, jax.jit(dot())(x, w))
    one = linear.apply(x[0, 0], w.T, recipe="rowwise")[0]
    same(
        jax.jit(lambda x, w: linear.apply(x, w, recipe="rowwise")[0])(
            put(x[0, 0], "tensor"), put(w.T)
        ),
        one,
    )


@pytest.mark.slow
def test_batch_dims_and_attention(operands):
    x, w = (v.reshape(4, -1, K) for v in operands[:2])
    for subscripts, a, b, specs in (
        ("ecd,efd->ecf", x, w, (("data", "fsdp"), ("data", "tensor"))),
        (
            "btd,dhk->bthk",
            x,
            w.reshape(-1, K)[:K].reshape(K, 4, 32),
            (("data", None, None), ("fsdp", "tensor")),
        ),
        (
            "bthk,hkd->btd",
            x.reshape(4, -1, 4, 32),
            w.reshape(-1, K)[:K].reshape(4, 32, K),
            (("data",), (None, "fsdp", "tensor")),
        ),
        (
            "...qhd,...khd->...hqk",
            x.reshape(4, -1, 4, 32),
            w.reshape(4, -1, 4, 32),
            (("data", None, "tensor"),) * 2,
        ),
    ):
        use = jax.jit(
            lambda a, b, s=subscripts: contraction.einsum(s, a, b, recipe="tensorwise")[0]
        )
        theirs = jax.jit(lambda a, b, s=subscripts: jnp.einsum(s, a, b))
        cut = put(a, *specs[0]), put(b, *specs[1])
        found = use(*cut)
        same(found, use(a, b))
        assert jax.typeof(found) == jax.typeof(theirs(*cut))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_arrays_that_are_not_on_the_mesh_of_the_context(wrap):
    """They are whole, on one device, and so is the result: as jnp has it."""
    x, w = jnp.ones((2, 2, 128), jnp.bfloat16), jnp.ones((128, 256), jnp.bfloat16)
    alone = dot()(x, w)
    with jax.set_mesh(MESH):
        same(wrap(dot())(x, w), alone)


@pytest.mark.parametrize(
    ("of_w", "how", "message"),
    [
        (
            P(),
            {"placement": Placement(m=BATCH, n=("tensor",))},
            "placement shards w's N along tensor; its type along none",
        ),
        (
            P("fsdp"),
            {"placement": Placement(m=BATCH, fsdp=("fsdp",))},
            "placement shards w's N along fsdp; its type along none.* leave placement out",
        ),
        (
            P(),
            {"placement": Placement(m=("date",))},
            "placement axes are data, fsdp, tensor; got date",
        ),
        (
            P(),
            {"placement": Placement(m=BATCH, scope="local")},
            "scope 'local' needs visible devices",
        ),
        (P(), {"placement": P("data")}, "placement is a sharding.Placement or None; got P"),
    ],
)
def test_refusals(of_w, how, message, operands):
    x, w = put(operands[0], BATCH), put(operands[1], *of_w)
    with pytest.raises(ValueError, match=f"^fc: .*{message}"):
        jax.jit(dot(**how))(x, w)


def test_sums_over_devices_are_never_left_to_be_done(operands):  # P-7
    out = NamedSharding(MESH, P(unreduced={"tensor"}))
    with pytest.raises(ValueError, match=r"^fc: a linear rounds after the sum over devices"):
        jax.jit(dot(out_sharding=out))(
            put(operands[0], None, None, "tensor"), put(operands[1], "tensor")
        )


def test_out_sharding_is_for_explicit_axes():
    auto = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x, w = jnp.ones((8, 16, 128), jnp.bfloat16), jnp.ones((256, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"^fc: .*Auto or Manual"):
        jax.jit(
            lambda x, w: linear.apply(
                x,
                w,
                recipe="rowwise",
                placement=Placement(out_sharding=NamedSharding(auto, P("data"))),
                name="fc",
            )
        )(put(x, "data", mesh=auto), put(w, mesh=auto))


@pytest.mark.parametrize(
    ("subscripts", "of_x", "of_w", "out", "summed"),
    [
        ("btd,dhk->bthk", P(BATCH), P("fsdp", "tensor"), None, {"grad_input", "grad_weight"}),
        ("btd,dhk->bthk", P(), P(None, None, "tensor"), None, {"grad_input"}),
        ("bthk,hkd->btd", P(None, None, None, "tensor"), P(None, "tensor"), P(), {"output"}),
        (
            "bthk,hkd->btd",
            P("data", None, "tensor"),
            P("tensor"),
            P("data"),
            {"output", "grad_weight"},
        ),
        ("bthk,hkd->btd", P(), P("data"), None, {"output"}),
        ("bthk,hkd->btd", P("data"), P("data"), None, {"grad_weight"}),
    ],
)
# P-9, P-20
def test_gemms_whose_reduced_dim_is_cut_are_summed_over_devices(
    subscripts, of_x, of_w, out, summed, operands, monkeypatch
):
    """Of these, weights' gradients as accumulators: the others' GEMMs may write results, which are
    summed (Placement.reduce_outputs).
    """
    x, w = operands[:2]
    x, w = (
        (x.reshape(B, T, 4, 32), w.reshape(4, 32, N))
        if "bthk," in subscripts
        else (x, w.reshape(K, 8, 32))
    )
    found, matmul = [], gemm.matmul
    monkeypatch.setattr(
        gemm,
        "matmul",
        lambda *args, **how: found.append(how["execution"].in_steps) or matmul(*args, **how),
    )
    cut, by_compiler = set(), Layer.summed_by_compiler

    def asked(layer, which):
        cut.update({which} if layer.layout.summed(which) else ())
        return by_compiler(layer, which)

    monkeypatch.setattr(Layer, "summed_by_compiler", asked)

    def use(x, w):
        placement = joined(None, out_of(out))
        return contraction.einsum(subscripts, x, w, recipe="tensorwise", placement=placement)[0]

    jax.jit(lambda x, w: jax.grad(lambda x, w: use(x, w).sum(), (0, 1))(x, w)).lower(
        put(x, *of_x), put(w, *of_w)
    )
    assert cut == summed
    in_steps = {
        which
        for which, one in zip(("output", "grad_input", "grad_weight"), found[-3:], strict=True)
        if one
    }
    assert in_steps == summed & {"grad_weight"}
