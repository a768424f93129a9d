"""Linears that round stochastically, rotate and scale by two levels, against the simulator."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8ref.jax as fj
from fp8ref.formats import E4M3FN
from fp8ref.jax.distributed.placement import Placement
from fp8ref.jax.linear import linear, rounding
from fp8ref.jax.linear.carried import Layer, Observations
from fp8ref.recipe import OPERANDS, RECIPES, REDUCED_AXES, CastSpec, GemmSpec, Recipe
from fp8ref.sim import linear as sim
from fp8ref.sim.quantize import scaling as sim_scaling
from fp8ref.spec.rotation import Rotation

NAME = "layers.0.up"
SEED = sim.seed_in_run(3, 7, NAME)
ROW = CastSpec(fmt=E4M3FN, granularity="rowwise", rounding="stochastic_8")
TURNED = CastSpec(fmt=E4M3FN, rounding="stochastic", rotation=Rotation(signs=(1, -1, -1, -1)))
OTHERS = {
    "nvfp4": RECIPES["nvfp4"],
    "rows": Recipe(
        name="rows",
        output=GemmSpec(a=ROW, b=ROW, accumulate="fast"),
        grad_input=GemmSpec(a=ROW, b=ROW, accumulate="slow"),
        grad_weight=GemmSpec(a=TURNED, b=TURNED, accumulate="slow"),
    ),
}


def operands(rng, tokens=(2, 32), k=64, n=48):
    shapes = (*tokens, k), (n, k), (*tokens, n)
    return [rng.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes]


def passes(x, w, g, recipe, **options):
    y, vjp = jax.vjp(lambda x, w: linear.apply(x, w, recipe=recipe, name=NAME, **options)[0], x, w)
    return (y, *vjp(g))


def of_run(step):
    return rounding.pass_seed(3, step)


@pytest.mark.parametrize("recipe", OTHERS.values(), ids=OTHERS)
def test_codes_of_each_gemm_are_the_simulators(recipe, rng):  # S-22 to S-24
    x, w, g = operands(rng)
    seen = {}

    def observer(layer, which, a, b, out):
        seen[which] = a, b, out

    with linear.observing(observer):

        def run(x, w, g, step):
            with rounding.seeded(of_run(step)):
                return passes(x, w, g, recipe)

        jax.block_until_ready(jax.jit(run)(x, w, g, np.uint32(7)))
        jax.effects_barrier()
    tensors = {"input": x.reshape(-1, 64), "weight": w, "grad_output": g.reshape(-1, 48)}
    for which, roles in OPERANDS.items():
        expected = sim.quantize_operands(which, tensors, recipe, None, SEED)
        for (_, codes, scale), q, axis in zip(
            seen[which][:2], expected, REDUCED_AXES[which], strict=True
        ):
            turned = (lambda v: v) if axis == 1 else np.transpose
            np.testing.assert_array_equal(codes, turned(q.codes), err_msg=which)
            np.testing.assert_array_equal(scale, turned(q.scale), err_msg=which)
        assert set(roles) <= set(tensors)
        out = sim.multiply(which, *expected, recipe, accumulate="f32", out_dtype=sim.BFLOAT16)
        # sums of at most 64 products in another order, then a bfloat16: two roundings of 2^-8
        np.testing.assert_allclose(
            np.asarray(seen[which][2], np.float32), out, rtol=2**-7, atol=2**-6
        )


def test_codes_by_a_states_scales_are_the_simulators(rng):  # S-24, H-1
    x, w, _ = operands(rng)
    spec = RECIPES["delayed"].output
    a, b = (dataclasses.replace(cast, rounding="stochastic") for cast in (spec.a, spec.b))
    recipe = Recipe(name="mine", output=dataclasses.replace(spec, a=a, b=b))
    state, unseen, shown = fj.delayed.init(recipe), fj.delayed.unseen(recipe), []
    tensors = {"input": x.reshape(-1, 64), "weight": w}
    scales = {role: sim_scaling.Scales(*np.ones((2, 1), np.float32)[..., 0]) for role in tensors}
    with linear.observing(lambda layer, which, a, b, out: shown.append((a, b))):
        with rounding.seeded({NAME: SEED}):
            linear.apply(x, w, recipe=recipe, name=NAME, state=state, seen=unseen)
        jax.effects_barrier()
    expected = sim.quantize_operands("output", tensors, recipe, scales, SEED)
    for (hp, codes, _), q in zip(shown[0], expected, strict=True):
        np.testing.assert_array_equal(codes, q.codes)
        assert (codes != sim_scaling.quantize_with(hp, scales["input"], E4M3FN).codes).any()


def test_explicit_axes_take_a_traced_seed(rng):  # S-24
    x, w, g = operands(rng)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))

    def run(x, w, g, step):
        with rounding.seeded(of_run(step)):
            return passes(x, w, g, "nvfp4")

    expected = jax.jit(run)(x, w, g, np.uint32(7))
    with jax.set_mesh(mesh):
        places = P("data"), P(), P("data")
        cut = [
            jax.device_put(v, NamedSharding(mesh, p))
            for v, p in zip((x, w, g), places, strict=True)
        ]
        found = jax.jit(run)(*cut, np.uint32(7))
    for a, b in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_operands_of_2_32_elements_are_refused():  # S-24
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2**20, 4096), (64, 4096))]
    with rounding.seeded(1), pytest.raises(ValueError, match=r"up: input has 1048576 x 4096"):
        jax.eval_shape(
            lambda x, w: linear.apply(x, w, recipe=OTHERS["rows"], name="up")[0], *shapes
        )


def test_a_seed_is_the_contexts_or_the_linears_own(rng):  # S-24
    x, w, g = operands(rng)
    halves = np.array([SEED & 0xFFFFFFFF, SEED >> 32], np.uint32)
    run = jax.jit(lambda seed: passes(x, w, g, "nvfp4", seen=Observations(seed=seed)))
    own = run(jnp.asarray(halves))
    for context in (of_run(7), {NAME: SEED}):
        with rounding.seeded(context):
            found = jax.jit(lambda: passes(x, w, g, "nvfp4"))()
        for a, b in zip(own, found, strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    other = run(jnp.asarray(halves + 1))
    assert np.array_equal(own[0], other[0])  # output is rounded to nearest
    assert not np.array_equal(own[1], other[1])
    assert not np.array_equal(own[2], other[2])


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (None, r"layers.0.up: its recipe rounds stochastically and needs a seed; got none"),
        ({"other": 1}, r"needs a seed; got none"),
        (1 << 64, r"a seed is an integer in \[0, 2\^64\)"),
        (np.zeros(2, np.int32), r"low and high half, uint32 \[2\]; got ndarray of int32 \(2,\)"),
    ],
)
def test_a_missing_or_wrong_seed_is_refused(seed, message, rng):  # S-24
    x, w, _ = operands(rng)
    with rounding.seeded(seed), pytest.raises(ValueError, match=message):
        linear.apply(x, w, recipe="nvfp4", name=NAME)


MESH = ("data", "context", "tensor")
PLACEMENT = Placement(
    m=("data", "context"), n=("tensor",), fsdp=("data",), positions=("context",), sequence=True
)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
def test_each_piece_knows_its_place_in_the_whole_operand(role, axis):  # S-24
    mesh = jax.make_mesh((2, 2, 2), MESH, axis_types=(AxisType.Auto,) * 3)
    layer = Layer(recipe=RECIPES["nvfp4"], name=NAME, placement=PLACEMENT, mode="shard_map")
    shape, spec = {
        "input": ((4, 8, 6), P("data", ("context", "tensor"), None)),
        "weight": ((8, 6), P(("tensor", "data"), None)),
        "grad_output": ((4, 8, 6), P("data", "context", "tensor")),
    }[role]

    def place(x):
        return rounding._flat_index(x.shape, role, axis, layer)

    run = jax.shard_map(place, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    index = np.asarray(jax.jit(run)(jnp.zeros(shape))).reshape(-1, shape[-1])
    whole = np.arange(index.size, dtype=np.uint32)
    expected = whole.reshape(index.shape) if axis == -1 else whole.reshape(index.shape[::-1]).T
    np.testing.assert_array_equal(index, expected)


def test_a_mesh_rounds_as_one_device(rng):  # S-24, P-2
    x, w, g = operands(rng, tokens=(4, 32))
    one = jax.jit(functools.partial(passes, recipe="nvfp4", seen=Observations(seed=halves(SEED))))
    expected = one(x, w, g)
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    place = Placement(m=("data", "context"), positions=("context",))

    def run(x, w, g, seed):
        return passes(x, w, g, "nvfp4", seen=Observations(seed=seed), placement=place)

    tokens = P("data", "context")
    cut = jax.shard_map(
        run, mesh=mesh, in_specs=(tokens, P(), tokens, P()), out_specs=(tokens, tokens, P())
    )
    found = jax.jit(cut)(x, w, g, halves(SEED))
    for a, b in zip(found[:2], expected[:2], strict=True):  # no sum over devices
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    # four partial results, each rounded to bfloat16, 2^-9 of about the largest result, then the sum
    whole, parts = (np.asarray(v[2], np.float32) for v in (expected, found))
    np.testing.assert_allclose(parts, whole, rtol=2**-8, atol=4 * 2**-9 * np.abs(whole).max())


def halves(seed):
    return jnp.array([seed & 0xFFFFFFFF, seed >> 32], jnp.uint32)


def test_a_rotation_needs_whole_blocks(rng):  # S-23
    rotation = Rotation(signs=(1,) * 32)
    cast = dataclasses.replace(TURNED, rounding="nearest_even", rotation=rotation)
    recipe = Recipe(name="turned", output=GemmSpec(a=cast, b=cast, accumulate="fast"))
    x, w, _ = operands(rng)
    assert linear.apply(x, w, recipe=recipe)[0].shape == (2, 32, 48)
    with pytest.raises(ValueError, match=r"a rotation of 32 needs the reduced axis divisible"):
        linear.apply(x[..., :48], w[:, :48], recipe=recipe)
