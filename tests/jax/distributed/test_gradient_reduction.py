"""Gradients summed over devices in FP8 against the simulator, bit for bit (spec P-21, P-22,
P-24).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.training import gradient_cases as cases
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fp8ref.formats import BFLOAT16, E4M3FN
from fp8ref.jax.distributed import gradient_reduction
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.linear import linear
from fp8ref.jax.quantize import scaling
from fp8ref.sim.distributed import gradient_reduction as sim
from fp8ref.sim.quantize import cast as sim_cast
from fp8ref.sim.quantize import scaling as sim_scaling
from fp8ref.spec import gradient_reduction as data

MESHES = {2: (2,), 4: (2, 2), 8: (8,)}


def mesh_of(ranks):
    shape = MESHES[ranks]
    return jax.make_mesh(
        shape,
        ("data", "fsdp")[-len(shape) :],
        axis_types=(AxisType.Auto,) * len(shape),
        devices=jax.devices()[:ranks],
    )


def on_devices(ranks, f, outs, check_vma=True):
    """f(each device's gradients, mesh axes), compiled; its results are cut by ``outs``."""
    mesh = mesh_of(ranks)
    axes = mesh.axis_names
    mapped = jax.shard_map(
        lambda *g: f(*(x[0] for x in g), axes),
        mesh=mesh,
        in_specs=P(axes),
        out_specs=outs,
        check_vma=check_vma,
    )
    return jax.jit(mapped)


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_device_has_the_simulators_sums(ranks):  # P-21, P-22
    axes = mesh_of(ranks).axis_names

    def both(*grads):
        *grads, axes = grads
        found = []
        for g, (_, fmt, options) in zip(grads, cases.CASES, strict=True):
            piece, whole = (
                gradient_reduction.reduce_scatter(g, axes, fmt, **options),
                gradient_reduction.all_reduce(g, axes, fmt, **options),
            )
            found.append((piece.value, whole.value, piece.saturated, whole.saturated))
        return found

    f = on_devices(ranks, both, [(P(axes), P(), P(), P())] * len(cases.CASES))
    program = f.lower(
        *(np.stack(cases.of_ranks(ranks, rows)) for rows, _, _ in cases.CASES)
    ).compile()
    found = program(*(np.stack(cases.of_ranks(ranks, rows)) for rows, _, _ in cases.CASES))
    for case, (pieces, whole, *saturated) in zip(cases.CASES, found, strict=True):
        expected = cases.expected(ranks, case)
        assert cases.equal(pieces[: case[0]], expected.value)
        assert not np.asarray(pieces[case[0] :]).any()  # what fills the last pieces
        assert cases.equal(whole, expected.value)
        assert saturated == [expected.saturated] * 2
    exchanged = [line for line in program.as_text().splitlines() if "all-to-all(" in line]
    assert len(exchanged) >= len(cases.CASES)
    assert all("u8[" in line and "f32[" not in line for line in exchanged)


def test_specials_and_bfloat16_without_the_check_of_varying_axes():  # P-3, P-21
    names = [*cases.SPECIAL, "bfloat16"]
    f = on_devices(
        2,
        lambda *g: [gradient_reduction.all_reduce(x, g[-1]).value for x in g[:-1]],
        [P()] * len(names),
        check_vma=False,
    )
    grads = [cases.special(2, name) for name in cases.SPECIAL]
    half = cases.of_ranks(2, 13, "bfloat16")
    found = f(*map(np.stack, grads), jnp.stack(half).astype(jnp.bfloat16))
    for of_ranks, value in zip((*grads, half), found, strict=True):
        assert cases.equal(value, sim.reduce(of_ranks).value)
    assert [bool(np.isnan(v).all()) for v in found] == [True, True, False, True, False]


def test_mu_follows_the_rule_as_a_number_on_the_device():  # P-22
    auto = data.AutoScale(threshold=0.05, window=7)

    def reduced(g, mu):
        return tuple(gradient_reduction.all_reduce(g[0], "fsdp", mu=mu, result="codes"))

    f = jax.jit(jax.shard_map(reduced, mesh=mesh_of(2), in_specs=(P("fsdp"), P()), out_specs=P()))
    step = jax.jit(lambda mu, n: gradient_reduction.next_mu(mu, n, grads[0].size, auto))
    grads = cases.of_ranks(2, 13)
    mu, expected, moves = jnp.float32(1), np.float32(1), set()
    for _ in range(12):
        found, reduced = f(np.stack(grads), mu), sim.reduce(grads, mu=expected, result="codes")
        assert cases.equal(found[0], reduced.value)
        after = sim.next_mu(expected, reduced.saturated, grads[0].size, auto)
        moves.add(bool(after > expected))
        mu, expected = step(mu, found[1]), after
        assert mu == expected
    assert moves == {True, False}


def test_counts_of_casts_and_sums_do_not_overflow(monkeypatch):  # P-22
    """With the most that is counted lowered to what both ranks can exceed, in casts and in sums;
    int32 holds two of the real one.
    """
    assert np.iinfo(np.int32).max // 2 >= gradient_reduction.MOST_COUNTED
    monkeypatch.setattr(gradient_reduction, "MOST_COUNTED", 4)
    f = on_devices(
        2,
        lambda g, axes: gradient_reduction.all_reduce(g, axes, mu=2.0, result="codes").saturated,
        P(),
    )
    assert int(f(np.ones((2, 9), np.float32))) == 2 * 4


@pytest.mark.parametrize("recipe", ["tensorwise", "bf16"])
def test_the_gradient_of_a_linear_by_mu_counts_what_its_cast_saturates(recipe):  # P-22, P-25
    """On devices that cut its tokens, and the weight along N: saturated elements are of both
    pieces.
    """
    mesh = jax.make_mesh(
        (2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    placement = Placement(
        m=("fsdp",), n=("tensor",), fsdp=("fsdp",), scope="local", reduce_grads="float8_e4m3fn"
    )
    x, w, mu = (
        cases.of_ranks(1, 16)[0].repeat(8, axis=1)[:, :32],
        np.ones((64, 32), np.float32),
        np.float32(2),
    )

    def loss(x, w, mu):
        y, _ = linear.apply(
            x.astype(jnp.bfloat16),
            w.astype(jnp.bfloat16),
            recipe=recipe,
            placement=placement,
            seen=linear.Observations(mu=mu),
        )
        return jax.lax.psum(jnp.sum(y.astype(jnp.float32) * jnp.arange(1, 33)), ("fsdp", "tensor"))

    pieces = (P("fsdp"), P(("tensor", "fsdp")), P())
    found, count = jax.jit(
        jax.shard_map(
            jax.grad(loss, argnums=(1, 2)), mesh=mesh, in_specs=pieces, out_specs=pieces[1:]
        )
    )(x, w, mu)

    def alone(rows):
        y = lambda w: linear.apply(rows, w, recipe=recipe)[0].astype(jnp.float32)  # noqa: E731
        return jax.grad(lambda w: jnp.sum(y(w) * jnp.arange(1, 33)))(
            jnp.ones((32, 32), jnp.bfloat16)
        ).astype(np.float32)

    grads = [np.asarray(jax.jit(alone)(rows.astype(jnp.bfloat16))) for rows in np.split(x, 2)]
    reduced = sim.reduce(grads, mu=mu, mean=False)
    assert reduced.saturated > 0
    assert count == 2 * reduced.saturated  # both pieces along tensor are alike
    expected = sim_cast.round_to(reduced.value, BFLOAT16)
    assert all(cases.equal(piece, expected) for piece in np.split(np.asarray(found, np.float32), 2))


@pytest.mark.parametrize(
    ("placement", "mu", "message"),
    [
        (
            {"m": ("fsdp",)},
            np.float32(1),
            "layer: mu is of gradients reduced in FP8.*got reduce_grads 'float32' over m=.'fsdp',.",
        ),
        (
            {"m": ("fsdp",), "reduce_grads": "float8_e4m3fn"},
            np.ones(2, np.float32),
            r"layer: mu is float32 \(\); got float32 \(2,\)",
        ),
    ],
    ids=str,
)
def test_a_mu_of_other_gradients_is_refused(placement, mu, message):  # P-22
    def f(x, w, mu):
        return linear.apply(
            x,
            w,
            recipe="bf16",
            seen=linear.Observations(mu=mu),
            placement=Placement(**placement),
            name="layer",
        )[0]

    with pytest.raises(ValueError, match=message):
        jax.shard_map(f, mesh=mesh_of(2), in_specs=(P("fsdp"), P(), P()), out_specs=P("fsdp"))(
            jnp.ones((4, 16)), jnp.ones((16, 16)), mu
        )
    with pytest.raises(ValueError, match=r"layer: mu is of gradients .* over m=\(\)"):
        linear.apply(
            jnp.ones((4, 16)),
            jnp.ones((16, 16)),
            recipe="bf16",
            seen=linear.Observations(mu=jnp.float32(1)),
            name="layer",
        )


def test_microbatches_accumulate_in_fp8():  # P-24
    parts = cases.of_ranks(4, 16)

    def of_whole(total, g):
        return gradient_reduction.accumulate(total, g)

    def of_pieces(*parts):
        *parts, axes = parts
        total = None
        for g in parts:
            total = gradient_reduction.accumulate(total, g, over=axes)
        return scaling.dequantize(total)[None], total.scale

    cut = on_devices(2, of_pieces, (P("fsdp"), P()))
    values, scale = cut(*(g.reshape(2, 8, 5) for g in parts))
    total, expected = None, None
    for g in parts:
        total, expected = jax.jit(of_whole)(total, g), sim.accumulate(expected, g)
        assert np.array_equal(np.asarray(total.codes).view(np.uint8), expected.codes)
        assert (total.scale, total.scale_inv) == (expected.scale, expected.scale_inv)
    assert cases.equal(np.asarray(values).reshape(16, 5), sim_scaling.dequantize(expected))
    assert scale == expected.scale
    total = jax.jit(of_whole)(total, parts[0] * np.float32(np.nan))
    assert np.isnan(scaling.dequantize(jax.jit(of_whole)(total, parts[0]))).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "te_current"}, "fp8ref.jax scales by .*; got policy 'te_current'"),
        ({"policy": "deepgemm"}, "has a policy of .*; got 'deepgemm'"),
        ({"prescale": "half"}, "prescale is one of one, inverse_root, inverse; got 'half'"),
        ({"result": "fp8"}, "result is one of float32, codes; got 'fp8'"),
        ({"mu": 2.0**30}, r"mu is in \[2\^-24, 2\^24\]"),
    ],
)
def test_what_cannot_be_summed_is_refused(options, message):
    f = on_devices(
        2, lambda g, axes: gradient_reduction.all_reduce(g, axes, E4M3FN, **options).value, P()
    )
    with pytest.raises(ValueError, match=message):
        f(np.ones((2, 4), np.float32))


def test_shapes_that_do_not_fit_are_refused():
    f = on_devices(2, lambda g, axes: gradient_reduction.reduce_scatter(g[0], axes).value, P())
    with pytest.raises(ValueError, match="splits the first dim; got a gradient without dims"):
        f(np.ones((2, 4), np.float32))
    with pytest.raises(ValueError, match=r"gradients of one shape, \(4,\); got \(5,\)"):
        gradient_reduction.accumulate(gradient_reduction.accumulate(None, jnp.ones(4)), jnp.ones(5))
