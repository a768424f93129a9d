"""Attention as a layer of JAX: autodiff, memory, meshes, what it refuses (spec A). tests/parity has
its bits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention import attention_cases as cases
from helpers.attention.attention_cases import backward_options, call_options
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8ref.jax import delayed
from fp8ref.jax.attention import DeviceCall, attention
from fp8ref.jax.attention.operands import operands as attention_operands
from fp8ref.jax.gemm import hardware
from fp8ref.sim.gemm import hardware as sim_hardware
from fp8ref.spec.attention import delayed as attention_delayed
from fp8ref.spec.attention.variants import GRADIENT_ROLES, VARIANTS, Mask

CAUSAL = Mask(causal=True)


def small(*, b=1, h=2, heads=1, tq=40, tk=40, d=64, dtype=jnp.float32):
    return tuple(jnp.asarray(x, dtype) for x in cases.normal(b, h, heads, tq, tk, d))


def gradients(q, k, v, do, **how):
    o, vjp = jax.vjp(lambda *given: attention.apply(*given, **call_options(**how)), q, k, v)
    return o, *vjp(do)


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", ["cudnn", "mxfp8", "bf16", "exact"])
def test_apply_is_forward_and_backward(name):
    """In bfloat16 too, to which outputs and gradients are rounded."""
    q, k, v, do = small(dtype=jnp.bfloat16)
    how = {
        "variant": name,
        "mask": CAUSAL,
        "documents": jnp.zeros((1, 40), jnp.int32).at[:, 30:].set(1),
    }
    o, *found = jax.jit(functools.partial(gradients, **how))(q, k, v, do)

    @jax.jit
    def parts(q, k, v, do):
        result = attention.forward(q, k, v, **call_options(**how))
        return result.o, attention.backward(do, q, k, v, result, **backward_options(**how))[:3]

    of_forward, of_backward = parts(q, k, v, do)
    assert {x.dtype for x in (o, *found)} == {jnp.dtype(jnp.bfloat16)}
    for mine, other in zip((o, *found), (of_forward, *of_backward), strict=True):
        np.testing.assert_array_equal(mine, other.astype(jnp.bfloat16))


@pytest.mark.slow
def test_rows_without_keys_are_zero():
    q, k, v, do = small(tq=40, tk=33)
    o, dq, dk, _ = jax.jit(functools.partial(gradients, variant="cudnn", mask=CAUSAL))(q, k, v, do)
    assert not o[:, :, :7].any()
    assert not dq[:, :, :7].any()
    assert o[:, :, 7:].any()
    assert jnp.isfinite(dk).all()
    assert (
        attention.forward(q, k, v, variant="cudnn", mask=CAUSAL).lse[:, :, :7] == -jnp.inf
    ).all()


@pytest.mark.parametrize("place", ["q", "k", "v"])
def test_nan_reaches_the_output(place):
    """An output that has the row of q, or any key of a full mask, is NaN; nothing becomes a number
    again.
    """
    given = dict(zip("qkv", small()[:3], strict=True))
    given[place] = given[place].at[0, 0, 3, 5].set(jnp.nan)
    o = jax.jit(functools.partial(attention.apply, variant="fa4"))(*given.values())
    assert jnp.isnan(o[0, 0, 3] if place == "q" else o[..., 5] if place == "v" else o).all()


def test_blocks_of_queries_and_tiles_of_keys_change_no_bit(monkeypatch):
    """Of a causal mask 15 of 25 pairs of blocks and tiles are computed."""
    q, k, v, _ = small(tq=600, tk=600)
    how = {"variant": "cudnn", "mask": CAUSAL, "arithmetic": "stated", "scale": cases.SCALE}
    whole = jax.jit(functools.partial(attention.forward, **call_options(**how)))(q, k, v)
    monkeypatch.setattr(attention_operands, "QUERIES", 128)
    parts = jax.jit(functools.partial(attention.forward, **call_options(**how)))(q, k, v)
    np.testing.assert_array_equal(parts.lse, whole.lse)
    np.testing.assert_array_equal(parts.o, whole.o)
    grid = attention_operands.grid(DeviceCall(variant="cudnn", mask=CAUSAL), 600, 600, 64)
    assert (grid.blocks, grid.tiles, len(grid.pairs[0])) == (5, 5, 15)


def largest_array(name: str, tokens: int) -> int:
    """Elements of the largest array of a step's jaxpr, those within loops too."""
    q, k, v, do = (jax.ShapeDtypeStruct((1, 2, tokens, 64), jnp.bfloat16) for _ in range(4))
    sizes = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            sizes.extend(x.aval.size for x in eqn.outvars)
            for inner in jax.tree.leaves(
                list(eqn.params.values()),
                is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
            ):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    visit(getattr(inner, "jaxpr", inner))

    visit(
        jax.make_jaxpr(functools.partial(gradients, variant=name, mask=CAUSAL))(q, k, v, do).jaxpr
    )
    return max(sizes)


@pytest.mark.parametrize("name", ["cudnn", "mxfp8", "bf16", "exact"])
def test_memory_is_linear_in_the_length(name):
    """No array of a step grows faster than the tokens do; one of all pairs of 8192 tokens would
    have 2^27 elements.
    """
    sizes = [largest_array(name, tokens) for tokens in (2048, 4096, 8192)]
    assert sizes[1] <= 2 * sizes[0]
    assert sizes[2] <= 2 * sizes[1]
    assert sizes[2] < 2**24


def test_what_is_saved_is_codes():
    """For the backward pass: a byte an element of q, k, v and o under cudnn, beside the log-sum-exp
    and scalars.
    """
    q, k, v, _ = small(tq=128, tk=128, dtype=jnp.bfloat16)
    saved = jax.tree.leaves(
        jax.eval_shape(
            lambda *given: jax.vjp(lambda *x: attention.apply(*x, variant="cudnn"), *given)[1],
            q,
            k,
            v,
        )
    )
    sizes = {x.dtype.name: 0 for x in saved}
    for x in saved:
        sizes[x.dtype.name] += x.size
    assert sizes["float8_e4m3fn"] == 2 * (q.size + k.size)
    assert sum(n for name, n in sizes.items() if name != "float8_e4m3fn") < 2 * 128 + 40


def test_vmap():
    q, k, v, _ = (x[None] for x in small(b=2))
    found = jax.jit(jax.vmap(lambda q, k, v: attention.apply(q, k, v, variant="cudnn")))(q, k, v)
    np.testing.assert_array_equal(
        found[0],
        jax.jit(lambda q, k, v: attention.apply(q, k, v, variant="cudnn"))(q[0], k[0], v[0]),
    )


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize(
    "name", ["cudnn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bf16", "mxfp8"))]
)
def test_eight_devices_have_the_bits_of_one(name, mesh):  # P-2, A-12
    """Batch and heads are cut; a device has its own query heads and heads of keys.

    Amaxes of tensors are those of all devices.
    """
    q, k, v, do = (jnp.asarray(x) for x in cases.normal(4, 8, 4, 40, 40))
    how = {"variant": name, "mask": CAUSAL}
    wanted = jax.jit(functools.partial(gradients, **how))(q, k, v, do)
    cut = P("data", "heads")
    mapped = jax.shard_map(
        functools.partial(gradients, **how, over=("data", "heads")),
        mesh=mesh,
        in_specs=cut,
        out_specs=cut,
    )
    for mine, other in zip(jax.jit(mapped)(q, k, v, do), wanted, strict=True):
        np.testing.assert_array_equal(mine, other)
    placed = (jax.device_put(x, NamedSharding(mesh, cut)) for x in (q, k, v, do))
    for mine, other in zip(
        jax.jit(functools.partial(gradients, **how))(*placed), wanted, strict=True
    ):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.slow
def test_amaxes_on_eight_devices_are_those_of_one(mesh):
    q, k, v, _ = (jnp.asarray(x) for x in cases.normal(4, 8, 4, 40, 40))
    wanted = attention.forward(q, k, v, variant="cudnn")
    cut, over = P("data", "heads"), ("data", "heads")

    def run(q, k, v):
        found = attention.forward(q, k, v, variant=DeviceCall(variant="cudnn", over=over))
        return found.amaxes, found.saturated, found.tensors["o"].scale

    amaxes, saturated, scale = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=cut, out_specs=P()))(
        q, k, v
    )
    assert {role: float(x) for role, x in amaxes.items()} == {
        role: float(x) for role, x in wanted.amaxes.items()
    }
    assert saturated == wanted.saturated
    assert scale == wanted.tensors["o"].scale


# the gradient of a head of keys is that of the query heads of all devices
def test_shared_keys_on_devices(mesh):
    q, k, v, do = (jnp.asarray(x) for x in cases.normal(2, 4, 1, 40, 40))
    how = {"variant": "bf16", "mask": CAUSAL}
    wanted = jax.jit(functools.partial(gradients, **how))(q, k, v, do)
    of_q, of_k = P("data", "heads"), P("data")
    mapped = jax.shard_map(
        functools.partial(gradients, **how),
        mesh=mesh,
        in_specs=(of_q, of_k, of_k, of_q),
        out_specs=(of_q, of_q, of_k, of_k),
    )
    for mine, other in zip(jax.jit(mapped)(q, k, v, do), wanted, strict=True):
        # Each device rounds its heads' gradients to bfloat16, and float32 adds four of them: 4 x
        # 2^-8 of their magnitudes.
        np.testing.assert_allclose(
            mine, other, rtol=2.0**-6, atol=2.0**-6 * float(jnp.abs(other).max())
        )


def test_what_is_refused_on_a_mesh(mesh):
    q, k, v, _ = (jnp.asarray(x) for x in cases.normal(2, 4, 4, 40, 40))
    cut = P("data", "heads")

    def mapped(run, **more):
        return jax.shard_map(run, mesh=mesh, in_specs=cut, out_specs=cut, **more)(q, k, v)

    with pytest.raises(
        ValueError,
        match=r"'cudnn': a scale of a whole tensor has the amax of all devices; .*over=\('data', "
        r"'heads'\)",
    ):
        mapped(functools.partial(attention.apply, variant="cudnn"))
    with pytest.raises(
        ValueError, match="over has axes of the shard_map around it, data, heads; got rows"
    ):
        mapped(
            functools.partial(attention.apply, variant=DeviceCall(variant="cudnn", over=("rows",)))
        )
    with pytest.raises(ValueError, match="around it, none; got data"):
        attention.apply(q, k, v, variant=DeviceCall(variant="cudnn", over=("data",)))
    with pytest.raises(ValueError, match="need check_vma=True"):
        mapped(
            jax.grad(lambda q, k, v: attention.apply(q, k, v, variant="bf16").sum()),
            check_vma=False,
        )
    with pytest.raises(ValueError, match="q, k and v are sharded along the same mesh axes"):
        jax.shard_map(
            functools.partial(attention.apply, variant="bf16"),
            mesh=mesh,
            in_specs=(cut, P("data"), P("data")),
            out_specs=cut,
        )(jnp.tile(q, (1, 4, 1, 1)), k, v)
    explicit = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match=r"a mesh of Explicit axes, data. Use jax.shard_map"):
        attention.apply(
            *(
                jax.device_put(jnp.tile(x, (4, 1, 1, 1)), NamedSharding(explicit, P("data")))
                for x in (q, k, v)
            ),
            variant="bf16",
        )


HOPPER = sim_hardware.by_name("hopper")
UNSIMULATED = (
    r"'mxfp8': simulated hardware does not multiply MX blocks, .* got some. Leave "
    "hardware.simulating for this layer, or use variant 'cudnn'"
)


def test_mx_blocks_are_refused_inside_simulated_hardware():  # G-19
    q, k, v, do = small()
    result = attention.forward(q, k, v, variant="mxfp8")
    for run in (
        lambda: attention.apply(q, k, v, variant="mxfp8"),
        lambda: attention.forward(q, k, v, variant="mxfp8"),
        lambda: attention.backward(do, q, k, v, result, variant="mxfp8"),
    ):
        with pytest.raises(ValueError, match=UNSIMULATED), hardware.simulating(HOPPER):
            run()


@pytest.mark.parametrize("name", ["bf16", "exact"])
def test_products_in_high_precision_stay_xlas_inside_simulated_hardware(name):  # G-19
    q, k, v, do = small()
    o, pullback = jax.vjp(functools.partial(attention.apply, variant=name), q, k, v)
    with hardware.simulating(HOPPER):
        inside, inside_pullback = jax.vjp(functools.partial(attention.apply, variant=name), q, k, v)
        gradients = inside_pullback(do)
    for mine, other in zip((inside, *gradients), (o, *pullback(do)), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_simulated_hardware_on_a_mesh_is_refused(mesh, monkeypatch):  # G-21
    monkeypatch.delenv("NPROC", raising=False)
    tensors = [jnp.asarray(x) for x in cases.normal(2, 4, 4, 40, 40)[:3]]
    cut, axes = P("data", "heads"), ("data", "heads")
    tiles = functools.partial(attention.apply, variant=DeviceCall(variant="cudnn", over=axes))
    mapped = jax.shard_map(tiles, mesh=mesh, in_specs=cut, out_specs=cut)
    with (
        hardware.simulating(HOPPER),
        pytest.raises(ValueError, match=r"'cudnn': 8 CPU devices .* Set NPROC=32"),
    ):
        mapped(*tensors)
    placed = [jax.device_put(x, NamedSharding(mesh, cut)) for x in tensors]
    plain = functools.partial(attention.apply, variant="cudnn")
    for run, given in (
        (plain, placed),
        (jax.jit(plain), placed),
        (jax.jit(plain, in_shardings=placed[0].sharding), tensors),
    ):
        with (
            hardware.simulating(HOPPER),
            pytest.raises(
                ValueError, match="on a mesh, simulated hardware multiplies inside shard_map"
            ),
        ):
            run(*given)


def test_simulated_hardware_is_that_of_the_context():  # G-19
    """Where gradients are taken after it, too; and a call brings none of its own."""
    q, k, v, do = small()
    run = functools.partial(attention.apply, variant="cudnn")
    with hardware.simulating(HOPPER):
        o, pullback = jax.vjp(run, q, k, v)
        wanted = jax.vjp(run, q, k, v)[1](do)
        text = jax.jit(run).lower(q, k, v).as_text()
    assert "callback" in text
    assert "callback" not in jax.jit(run).lower(q, k, v).as_text()
    for mine, other in zip(pullback(do), wanted, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert (o != run(q, k, v)).any()
    call = DeviceCall(variant="cudnn", simulated=HOPPER)
    with pytest.raises(ValueError, match=r"got 'hopper' in the Call\. Use hardware.simulating"):
        attention.apply(q, k, v, variant=call)


REFUSED = {
    "unknown": ({"variant": "fa5"}, "variant is a Variant or"),
    "promotion": (
        {"variant": dataclasses.replace(VARIANTS["fa3"], promotion=4)},
        "got 4. Use promotion=1, or fp8ref.sim for 4",
    ),
    "policy": (
        {"variant": dataclasses.replace(VARIANTS["fa3"], policy="msamp")},
        "got policy 'msamp'",
    ),
    "mask": ({"mask": "causal"}, "mask is a Mask"),
    "arithmetic": ({"arithmetic": "exact"}, "arithmetic is one of fast, stated; got 'exact'"),
    "seed": ({"seed": 1}, "variant 'cudnn' has no rotation; got seed=1"),
    "scale": ({"scale": 0.0}, "positive and finite"),
    "array": (
        {"scale": jnp.float32(1)},
        "softmax scale is a number; got ArrayImpl. Pass a float; multiply q",
    ),
    "over": ({"over": "data"}, r"Use \('data',\)"),
    "documents": ({"documents": jnp.zeros((1, 3), jnp.int32)}, r"\[1, 40\] for queries"),
    "role": (
        {"scales": {"p": jnp.float32(1)}},
        "takes scales for q, k, v, s, o, do, ds, dq, dk, dv; got 'p'",
    ),
    "no role": (
        {"scales": {"q": jnp.float32(1)}, "variant": "mxfp8"},
        "takes scales for no role; got 'q'",
    ),
    "shape": ({"scales": {"q": jnp.ones(2)}}, "a passed scale is float32 of shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    how, message = REFUSED[case]
    q, k, v, _ = small()
    with pytest.raises(ValueError, match=message):
        attention.apply(q, k, v, **call_options(**{"variant": "cudnn"} | how))


def test_inputs_that_are_refused():
    q, k, v, do = small()
    run = functools.partial(attention.forward, variant="cudnn")
    with pytest.raises(ValueError, match="Hkv dividing H"):
        run(q, k[:, :, :, :32], v)
    with pytest.raises(ValueError, match="of one dtype; got float32, bfloat16"):
        run(q, k.astype(jnp.bfloat16), v)
    with pytest.raises(ValueError, match=r"q is .* got float64"):
        run(np.asarray(q, np.float64), k, v)
    with pytest.raises(
        ValueError, match=r"k is non-empty .* .B, heads, T, D.; got float32 .*, 0, "
    ):
        run(q, k[:, :, :0], v[:, :, :0])
    with pytest.raises(ValueError, match="at most 256 features; got 512"):
        run(*(jnp.tile(x, 8) for x in (q, k, v)))
    with pytest.raises(ValueError, match="keep_p keeps codes of FP8"):
        run(q, k, v, **call_options(variant="bf16", keep_p=True))
    with pytest.raises(ValueError, match="features divisible by 32; got 16"):
        run(*(x[..., :16] for x in (q, k, v)), variant="mxfp8")
    result = run(q, k, v)
    with pytest.raises(ValueError, match="do has the shape of o"):
        attention.backward(do[:, :, :3], q, k, v, result, variant="cudnn")
    with pytest.raises(ValueError, match="result is what forward returned"):
        attention.backward(do, q, k, v, None, variant="cudnn")
    with pytest.raises(
        ValueError, match="by variant 'bf16'; got another's, with tensors of q, k, v, o"
    ):
        attention.backward(do, q, k, v, result, variant="bf16")


def test_derivatives_that_are_refused():
    q, k, v, _ = small()

    def loss(q, name="cudnn"):
        return (attention.apply(q, k, v, variant=name) ** 2).sum()

    with pytest.raises(
        ValueError,
        match=r"variant 'fa3' has no backward pass \(A-1\). Use one of exact, bf16, cudnn, mxfp8",
    ):
        jax.grad(loss)(q, "fa3")
    with pytest.raises(
        ValueError,
        match=r"^attention by variant 'cudnn': attention has derivatives in reverse mode only",
    ):
        jax.jvp(loss, (q,), (q,))
    with pytest.raises(
        ValueError,
        match=r"^attention by variant 'cudnn': the gradients of attention are not differentiated "
        r"again",
    ):
        jax.hessian(loss)(q)


@pytest.mark.slow  # JAX compiles for seconds
def test_examples_of_a_vmap_merge():  # H-4, A-19
    """Observations of both passes are the largest, not the sum, of a mapped axis that seen
    lacks.
    """
    rng = np.random.default_rng(0)
    tensors = [jnp.asarray(rng.normal(size=(3, 1, 2, 16, 16)), jnp.bfloat16) for _ in range(3)]
    casts = attention_delayed.casts(VARIANTS["cudnn"])
    scales = {role: jnp.float32(1) for role in casts}

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(seen):
        carried = attention.Carried(scales, seen)
        o, merged = jax.vmap(
            lambda *given: attention.apply_with_stats(*given, variant="cudnn", carried=carried)
        )(*tensors)
        merged = merged.seen
        return o.astype(jnp.float32).sum(), merged

    (_, forward), backward = jax.jit(loss)(delayed.unseen(casts))
    for i, role in enumerate("qkv"):
        np.testing.assert_array_equal(forward[role][:, 0], jnp.abs(tensors[i]).max(), err_msg=role)
    for role in GRADIENT_ROLES:
        np.testing.assert_array_equal(backward[role][1:], [0, 1], err_msg=role)
    assert backward["do"][0] == 1
