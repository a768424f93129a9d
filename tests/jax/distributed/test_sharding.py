"""One linear on eight devices against one device (spec P): codes, scales, and on integers every bit
of the results.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8ref.crosscheck.operands import as_factor
from fp8ref.formats import BFLOAT16, E4M3FN
from fp8ref.jax import delayed, proof
from fp8ref.jax.distributed import sharding
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.linear import linear
from fp8ref.jax.quantize import scales, scaling
from fp8ref.policy import POLICIES
from fp8ref.recipe import OPERANDS, RECIPES, REDUCED_AXES, CastSpec, GemmSpec, Recipe
from fp8ref.sim.distributed import gradient_reduction, sharded_gemm
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize import scaling as sim_scaling

MESHES = [(d, f, 8 // d // f) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) if 8 % (d * f) == 0]
B, T, K, N = 8, 16, 128, 256  # 8 x 16 tokens
STYLES = {
    "column": {"n": ("tensor",)},
    "row": {"k": ("tensor",)},
    "column, sequence": {"n": ("tensor",), "sequence": True},
    "row, sequence": {"k": ("tensor",), "sequence": True},
}
QUICK = ((2, 2, 2), (1, 8, 1))  # the others are slow together


def case(shape, *more):
    """A parameter of a test, slow unless its mesh is one of QUICK."""
    marks = () if shape in QUICK else pytest.mark.slow
    return pytest.param(shape, *more, marks=marks, id="-".join(map(str, (shape, *more))))


meshes = pytest.mark.parametrize("shape", [case(shape) for shape in MESHES])
ACCUMULATORS = {"reduce_grads": "accumulators", "reduce_outputs": "accumulators"}


def mesh_of(shape):
    return jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def placement_of(style: str, **more) -> Placement:
    return Placement(m=("data", "fsdp"), fsdp=("fsdp",), **STYLES[style], **more)


def specs_of(p: Placement) -> tuple[P, P, P]:
    """Of x [B, T, K], w [N, K] and y [B, T, N]: the batch over data and fsdp, the tokens over
    tensor where sequence says so.
    """
    return (
        P(p.m, p.gathered("input"), p.k),
        P(*p.at_rest("weight")),
        P(p.m, p.gathered("grad_output"), p.n),
    )


@pytest.fixture(scope="module")
def operands():
    """Integers over powers of two, so that every sum is exact in any order; each group of each
    granularity has another largest one.
    """
    rng = np.random.default_rng(0)
    shapes = ((B, T, K), (N, K), (B, T, N))
    return [
        jnp.asarray(
            rng.integers(-7, 8, shape) * 2.0 ** (e + rng.integers(0, 3, shape[-1])), jnp.bfloat16
        )
        for shape, e in zip(shapes, (0, -6, -10), strict=True)
    ]


def results(apply, x, w, g):
    """y, grad_input, grad_weight."""
    y, vjp = jax.vjp(apply, x, w)
    return y, *vjp(g)


def on_devices(shape, placement, recipe, *, through: str, x, w, g):
    mesh, (of_x, of_w, of_y) = mesh_of(shape), specs_of(placement)

    def apply(x, w):
        return linear.apply(x, w, recipe=recipe, placement=placement, name="fc")[0]

    x, w, g = (
        jax.device_put(v, NamedSharding(mesh, spec))
        for v, spec in zip((x, w, g), (of_x, of_w, of_y), strict=True)
    )
    if through == "jit":
        return jax.jit(lambda x, w, g: results(apply, x, w, g))(x, w, g)
    if through == "shard_map, gradient outside":
        mapped = jax.shard_map(apply, mesh=mesh, in_specs=(of_x, of_w), out_specs=of_y)
        return jax.jit(lambda x, w, g: results(mapped, x, w, g))(x, w, g)
    inside = jax.shard_map(
        lambda x, w, g: results(apply, x, w, g),
        mesh=mesh,
        in_specs=(of_x, of_w, of_y),
        out_specs=(of_y, of_x, of_w),
    )
    return jax.jit(inside)(x, w, g)


CASES = [
    *itertools.product(MESHES, ["column"], ["shard_map", "jit"]),
    *itertools.product([(2, 2, 2), (1, 1, 8)], list(STYLES)[1:], ["shard_map", "jit"]),
    *itertools.product([(2, 2, 2)], STYLES, ["shard_map, gradient outside"]),
]


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("shape", "style", "through", "recipe"),
    [
        *(case(*one, recipe) for one in CASES for recipe in ("tensorwise", "rowwise")),
        *(
            case(*one, recipe)
            for one in CASES
            if one[0] == (2, 2, 2)
            for recipe in ("bf16", "rowwise_with_gw_hp")
        ),
    ],
)
# P-4, P-6, P-7, P-9
def test_results_equal_one_devices_on_integers(shape, style, recipe, through, operands):
    x, w, g = operands
    found = on_devices(
        shape, placement_of(style, **ACCUMULATORS), recipe, through=through, x=x, w=w, g=g
    )
    expected = jax.jit(
        lambda x, w, g: results(lambda x, w: linear.apply(x, w, recipe=recipe)[0], x, w, g)
    )(x, w, g)
    for name, mine, one in zip(("y", "grad_input", "grad_weight"), found, expected, strict=True):
        np.testing.assert_array_equal(
            np.asarray(mine, np.float32), np.asarray(one, np.float32), err_msg=name
        )


@pytest.mark.parametrize("over", [(), ("fsdp",)])
def test_scales_of_a_devices_own_piece_are_refused(over, operands):  # P-9
    x, w, _ = operands
    placement = placement_of("column", **ACCUMULATORS)
    specs, mesh = specs_of(placement), mesh_of((2, 2, 2))

    def run(x, w):
        prepared = scales.scales_from_amax(scaling.amax(w, over=over), E4M3FN)
        return linear.apply(
            x, w, recipe="tensorwise", placement=placement, name="fc", prepared=prepared
        )[0]

    left = "tensor" if over else "fsdp, tensor"
    with pytest.raises(
        ValueError,
        match=f"fc: scales are the whole weight's; got scales that vary along {left}. .*over=",
    ):
        jax.eval_shape(jax.shard_map(run, mesh=mesh, in_specs=specs[:2], out_specs=specs[2]), x, w)


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("shape", "through"),
    [
        ((1, 8, 1), "shard_map"),
        ((2, 2, 2), "shard_map"),
        ((2, 2, 2), "jit"),
        ((2, 4, 1), "explicit"),
    ],
)
def test_a_copy_of_a_weight_is_gathered_as_it_is(shape, through, operands):  # O-16, P-6
    """Of a weight whose numbers are NaN: nothing reads them."""
    x, w, g = operands
    placement = placement_of("column", **ACCUMULATORS)
    specs = specs_of(placement)
    expected = jax.jit(
        lambda x, w, g: results(lambda x, w: linear.apply(x, w, recipe="tensorwise")[0], x, w, g)
    )(x, w, g)
    copy = scaling.quantize(w, E4M3FN)
    of_copy = dataclasses.replace(copy, codes=specs[1], scale=P(), scale_inv=P())
    kind = AxisType.Explicit if through == "explicit" else AxisType.Auto
    mesh = jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(kind,) * 3)

    def run(x, w, g, copy):
        return results(
            lambda x, w: linear.apply(
                x, w, recipe="tensorwise", placement=placement, name="fc", prepared=copy
            )[0],
            x,
            w,
            g,
        )

    if through == "shard_map":
        run = jax.shard_map(
            run, mesh=mesh, in_specs=(*specs, of_copy), out_specs=(specs[2], *specs[:2])
        )
    where = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        (*specs, of_copy),
        is_leaf=lambda v: isinstance(v, P),
    )
    given = jax.device_put((x, jnp.full_like(w, jnp.nan), g, copy), where)
    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(*given).compile()
        found = compiled(*given)
    for name, mine, one in zip(("y", "grad_input", "grad_weight"), found, expected, strict=True):
        np.testing.assert_array_equal(
            np.asarray(mine, np.float32), np.asarray(one, np.float32), err_msg=name
        )
    gathers = [line for line in compiled.as_text().splitlines() if " all-gather(" in line]
    assert gathers
    # XLA on a CPU gathers codes as float16
    assert not any("= bf16[" in line or "= f32[" in line for line in gathers), gathers


@pytest.mark.grid(2)
@pytest.mark.parametrize("through", ["shard_map", "jit"])
@meshes
def test_codes_and_scales_equal_one_devices(shape, through):  # P-3, P-4, P-5
    """Of every role, in both granularities and along both axes; one shard holds a NaN, or an
    infinity, or nothing but zeros.
    """
    rng, mesh = np.random.default_rng(1), mesh_of(shape)
    x = rng.standard_normal((256, 256)).astype(np.float32)
    cases = {
        "normal": x,
        "nan": np.where(np.arange(x.size).reshape(x.shape) == 20_777, np.nan, x),
        "inf": np.where(np.arange(x.size).reshape(x.shape) == 20_777, -np.inf, x),
        "zeros": np.where(np.arange(256)[:, None] < 32, 0, x),
    }
    for (style, role), (granularity, axis) in itertools.product(
        [
            ("column", "input"),
            ("row", "input"),
            ("column", "weight"),
            ("row, sequence", "grad_output"),
        ],
        [("tensorwise", -1), ("rowwise", -1), ("rowwise", -2)],
    ):
        placement = placement_of(style)
        rows, columns = placement.at_rest(role)
        over = placement.amax_axes(role, granularity, axis) if through == "shard_map" else ()

        def quantize(x, granularity=granularity, axis=axis, over=over):
            q = scaling.quantize(x, E4M3FN, granularity=granularity, axis=axis, over=over)
            return q.codes.view(jnp.uint8), q.scale

        of_scale = (
            P()
            if granularity == "tensorwise"
            else P(rows, None)
            if axis == -1
            else P(None, columns)
        )
        mapped = jax.shard_map(
            quantize, mesh=mesh, in_specs=P(rows, columns), out_specs=(P(rows, columns), of_scale)
        )
        run = jax.jit(mapped if through == "shard_map" else quantize)
        for name, value in cases.items():
            value = jnp.asarray(value, jnp.bfloat16)
            found = run(jax.device_put(value, NamedSharding(mesh, P(rows, columns))))
            for what, mine, one in zip(
                ("codes", "scale"), found, _alone(granularity, axis)(value), strict=True
            ):
                np.testing.assert_array_equal(
                    np.asarray(mine),
                    np.asarray(one),
                    err_msg=f"{style} {role} {granularity} {axis} {name} {what}",
                )


@functools.cache
def _alone(granularity, axis):
    def quantize(x):
        q = scaling.quantize(x, E4M3FN, granularity=granularity, axis=axis)
        return q.codes.view(jnp.uint8), q.scale

    return jax.jit(quantize)


@pytest.mark.grid(2)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_results_on_any_numbers_lie_within_the_bound_of_summation(recipe, style):  # P-9
    """Codes are equal, so that only the order of the sums differs: each of two orders errs by (n -
    1) 2^-24 sum|ab| at most, scaled and rounded to bfloat16 (2^-8 of the value, rowwise twice)."""
    rng = np.random.default_rng(2)
    x, w, g = (
        jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((B, T, K), (N, K), (B, T, N))
    )
    found = on_devices(
        (2, 2, 2), placement_of(style, **ACCUMULATORS), recipe, through="shard_map", x=x, w=w, g=g
    )
    expected = jax.jit(
        lambda x, w, g: results(lambda x, w: linear.apply(x, w, recipe=recipe)[0], x, w, g)
    )(x, w, g)
    xs, ws, gs = (np.abs(np.asarray(v, np.float64)).reshape(-1, v.shape[-1]) for v in (x, w, g))
    magnitudes = xs @ ws.T, gs @ ws, gs.T @ xs
    for mine, one, magnitude, n in zip(found, expected, magnitudes, (K, N, B * T), strict=True):
        mine, one = (np.asarray(v, np.float64).reshape(magnitude.shape) for v in (mine, one))
        # quantizing moves an operand by 2^-4 of it at most, e5m2 by 2^-3: sum|ab| of codes is below
        # 1.2 of the operands'
        bound = 2 * (n - 1) * 2.0**-24 * 1.2 * magnitude + 2 * 2.0**-8 * np.abs(one)
        assert (np.abs(mine - one) <= bound).all()
        assert (mine == one).mean() > 0.9


@pytest.mark.grid(2)
@pytest.mark.parametrize("parts", ["float32", "result"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_devices_round_their_parts_and_sum_them(recipe, style, parts, operands):  # P-8, P-9
    """A part is the simulator's GEMM of a slice of the summed dim. Integers make parts exact, and
    few additions of them: a CPU's collectives add bfloat16 in float32, so that both dtypes give the
    same bits."""
    x, w, g = operands
    placement, shape = placement_of(style, reduce_grads=parts, reduce_outputs=parts), (2, 2, 2)
    found = on_devices(shape, placement, recipe, through="shard_map", x=x, w=w, g=g)
    tensors = {"input": x, "weight": w, "grad_output": g}
    tensors = {
        role: np.asarray(v, np.float32).reshape(-1, v.shape[-1]) for role, v in tensors.items()
    }
    for (which, spec), mine in zip(RECIPES[recipe].gemms.items(), found, strict=True):
        a, b = (
            sim_scaling.quantize(
                tensors[role], how.fmt, granularity=how.granularity, policy=how.policy, axis=axis
            )
            for role, how, axis in zip(
                OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True
            )
        )
        a, b = map(as_factor, (a, b))
        n = math.prod(
            dict(zip(("data", "fsdp", "tensor"), shape, strict=True))[axis]
            for axis in placement.reduction(which, 1).axes
        )
        ranks = [
            [q._replace(codes=codes) for codes in np.split(q.codes, n, axis=1)] for q in (a, b)
        ]
        # the sum over fsdp is rounded before that over data
        groups = 2 if (which, parts) == ("grad_weight", "result") else 1
        sums = [
            sharded_gemm.matmul(
                *(side[i : i + n // groups] for side in ranks), reduce="rounded", out_dtype=BFLOAT16
            )
            for i in range(0, n, n // groups)
        ]
        expected = cast.round_to(np.sum(sums, axis=0, dtype=np.float32), BFLOAT16)
        np.testing.assert_array_equal(
            np.asarray(mine, np.float32).reshape(expected.shape), expected, err_msg=which
        )


def test_gradients_of_a_weight_are_exchanged_in_fp8(operands):  # P-21, P-25
    """The sum over data and fsdp is the simulator's, of parts that integers make exact; each piece
    along tensor has its own scale.
    """
    x, w, g = operands
    placement, mesh = placement_of("column", reduce_grads="float8_e4m3fn"), mesh_of((2, 2, 2))
    of_x, of_w, of_y = specs_of(placement)

    def run(x, w, g):
        return jax.vjp(
            lambda w: linear.apply(x, w, recipe="bf16", placement=placement, name="fc")[0], w
        )[1](g)[0]

    f = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(of_x, of_w, of_y), out_specs=of_w))
    program = f.lower(x, w, g).compile()
    exchanged = [
        line
        for line in program.as_text().splitlines()
        if "all-to-all(" in line or "reduce-scatter(" in line
    ]
    assert len(exchanged) == 1
    assert "u8[" in exchanged[0]
    assert "f32[" not in exchanged[0]
    found = np.asarray(program(x, w, g), np.float32)
    xs, gs = (np.asarray(v, np.float32).reshape(4, -1, v.shape[-1]) for v in (x, g))
    parts = [cast.round_to(of_g.T @ of_x, BFLOAT16) for of_x, of_g in zip(xs, gs, strict=True)]
    pieces = [
        gradient_reduction.reduce([part[i : i + N // 2] for part in parts], mean=False).value
        for i in (0, N // 2)
    ]
    np.testing.assert_array_equal(found, cast.round_to(np.concatenate(pieces), BFLOAT16))


def test_plain_jit_refuses_gradients_in_fp8(operands):  # P-25
    x, w, _ = operands
    placement = placement_of("column", reduce_grads="float8_e4m3fn")
    with (
        pytest.raises(ValueError, match=r"fc: plain jit sums gradients.*Use shard_map"),
        jax.set_mesh(mesh_of((2, 2, 2))),
    ):
        jax.jit(lambda x, w: linear.apply(x, w, recipe="bf16", placement=placement, name="fc")[0])(
            *(
                jax.device_put(v, NamedSharding(mesh_of((2, 2, 2)), spec))
                for v, spec in zip((x, w), specs_of(placement)[:2], strict=True)
            )
        )
    with pytest.raises(
        ValueError,
        match="reduce_outputs is one of accumulators, float32, result; got 'float8_e4m3fn'",
    ):
        Placement(reduce_outputs="float8_e4m3fn")


@pytest.mark.parametrize(
    ("parts", "dtype"), [("float32", "f32"), ("result", "bf16"), ("accumulators", "f32")]
)
def test_sums_over_devices_move_the_dtype_that_is_asked_for(parts, dtype, operands):  # P-9
    x, w, g = operands
    placement = placement_of("row, sequence", reduce_grads=parts, reduce_outputs=parts)
    mesh, (of_x, of_w, of_y) = mesh_of((2, 2, 2)), specs_of(placement)

    def run(x, w, g):
        return results(
            lambda x, w: linear.apply(x, w, recipe="tensorwise", placement=placement, name="fc")[0],
            x,
            w,
            g,
        )

    mapped = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=(of_x, of_w, of_y), out_specs=(of_y, of_x, of_w))
    )
    moved = [
        c
        for c in proof.collectives(proof.read(mapped.lower(x, w, g)))
        if c.kind == "reduce_scatter"
    ]
    assert [c.dtype for c in moved] == [dtype] * 2  # of y over tensor, of grad_weight over fsdp
    # of grad_weight: a half along fsdp, and within it the half of K that tensor cuts
    rows, columns = (N // 2, K // 2)
    summed = [
        c
        for c in proof.collectives(proof.read(mapped.lower(x, w, g)))
        if c.kind == "all_reduce" and len(c.shape) == 2
    ]
    # over data, after the scatter
    assert [(c.dtype, c.shape) for c in summed] == [(dtype, (rows, columns))]


def test_under_jit_codes_are_gathered_and_other_axes_cut_them_still():  # P-6
    """XLA is told of a tensor before its gather and after it; a dim of length 1 is whole."""
    placement = Placement(m=("data", "fsdp"), n=("tensor",), fsdp=("fsdp",))
    dims = {"input": 2, "weight": 2, "grad_output": 2}
    layout = sharding.layout(placement, dims, turned=False)
    rest, used = layout.weight.specs((8, 16))
    assert (rest, used) == (P(("tensor", "fsdp"), ()), P(("tensor",), ()))
    assert layout.weight.specs((8, 1))[1] == P(("tensor",), None)


@pytest.mark.parametrize(
    ("recipe", "bytes_"), [("rowwise", 1 + 1 / 8), ("rowwise_with_gw_hp", 1 + 2)]
)
def test_one_gather_of_a_gradient_serves_both_gemms(recipe, bytes_, operands):  # P-6
    """An element is a code and a bit, from which both sets of codes are made; or a code for one
    GEMM and bfloat16 for the other. The proof misses no gather of grad_weight, unless the bits are
    gone."""
    placement = placement_of("row, sequence")
    of_x, of_w, of_y = specs_of(placement)

    def run(x, w, g):
        return results(
            lambda x, w: linear.apply(x, w, recipe=recipe, placement=placement, name="fc")[0],
            x,
            w,
            g,
        )

    mapped = jax.jit(
        jax.shard_map(
            run, mesh=mesh_of((2, 2, 2)), in_specs=(of_x, of_w, of_y), out_specs=(of_y, of_x, of_w)
        )
    )
    program = proof.read(mapped.lower(*operands))
    gathers = [c for c in proof.collectives(program) if c.kind == "all_gather"]
    of_gradient = [c for c in gathers if c.shape[-1] in (N, N // 8)]
    rows = B * T // 4  # of a device's part of the batch, from both devices along tensor
    assert (
        sum((2 if c.dtype == "bf16" else 1) * math.prod(c.shape) for c in of_gradient)
        == bytes_ * rows * N
    )
    assert proof.missing(program, {"fc": recipe}, {"fc": placement}) == []
    without = dataclasses.replace(
        program, operations=[op for op in program.operations if op.result[0] != "ui8"]
    )
    lines = proof.missing(without, {"fc": recipe}, {"fc": placement})
    assert lines == (
        ["fc/grad_weight: planned 1 gathers in FP8, of grad_output; found 0"]
        if recipe == "rowwise"
        else []
    )
    if recipe == "rowwise":  # bytes are codes of no recipe but this
        lines = proof.missing(program, {"fc": "tensorwise"}, {"fc": placement})
        assert [line for line in lines if "ui8" in line] == [
            f"fc/grad_input: gathers ui8[{B // 4}, {T}, {N // 8}]"
        ]


@pytest.mark.grid(1)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_local_scope_is_what_each_piece_of_the_batch_gives_alone(recipe, operands):  # P-2, P-8
    x, w, g = operands
    # pieces with scales of their own
    x = x * jnp.exp2(jnp.arange(B, dtype=jnp.float32) % 5).astype(x.dtype)[:, None, None]
    found = on_devices(
        (4, 2, 1), placement_of("column", scope="local"), recipe, through="shard_map", x=x, w=w, g=g
    )
    alone = jax.jit(
        lambda x, w, g: results(lambda x, w: linear.apply(x, w, recipe=recipe)[0], x, w, g)
    )
    pieces = [alone(x[i : i + 1], w, g[i : i + 1]) for i in range(B)]
    expected = [np.concatenate([np.asarray(p[i], np.float32) for p in pieces]) for i in (0, 1)]
    total = np.sum([np.asarray(p[2], np.float32) for p in pieces], axis=0)
    for mine, one in zip(
        found, [*expected, np.asarray(jnp.asarray(total, jnp.bfloat16), np.float32)], strict=True
    ):
        np.testing.assert_array_equal(np.asarray(mine, np.float32), one)
    # which FP8 rounds by the scale
    x = x * jnp.asarray(np.random.default_rng(4).standard_normal(x.shape), x.dtype)
    local, everyone = (
        on_devices(
            (4, 2, 1),
            placement_of("column", scope=scope),
            recipe,
            through="shard_map",
            x=x,
            w=w,
            g=g,
        )[0]
        for scope in ("local", "global")
    )
    if recipe == "tensorwise":  # rows have scales of their own anyway
        assert (np.asarray(local) != np.asarray(everyone)).any()


@pytest.mark.grid(2)
@pytest.mark.parametrize("through", ["shard_map", "jit"])
@pytest.mark.parametrize("style", STYLES)
def test_observations_are_those_of_one_device(style, through, operands):  # H-4, H-9
    mesh, placement = mesh_of((2, 2, 2)), placement_of(style, **ACCUMULATORS)
    of_x, of_w, of_y = specs_of(placement)
    state = delayed.init("delayed")

    def step(x, w, g, seen, placement=placement):
        def apply(x, w, seen):
            return linear.apply(x, w, recipe="delayed", state=state, seen=seen, placement=placement)

        (y, forward), vjp = jax.vjp(apply, x, w, seen)
        *_, backward = vjp((g, jax.tree.map(jnp.zeros_like, forward)))
        return y, delayed.update(state, delayed.merge(forward, backward), recipe="delayed")

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(of_x, of_w, of_y, P()), out_specs=(of_y, P()))
    sharded = [
        jax.device_put(v, NamedSharding(mesh, spec))
        for v, spec in zip(operands, (of_x, of_w, of_y), strict=True)
    ]
    y, after = jax.jit(mapped if through == "shard_map" else step)(
        *sharded, delayed.unseen("delayed")
    )
    y_one, after_one = jax.jit(lambda x, w, g, seen: step(x, w, g, seen, placement=None))(
        *operands, delayed.unseen("delayed")
    )
    np.testing.assert_array_equal(np.asarray(y), np.asarray(y_one))
    for mine, one in zip(jax.tree.leaves(after), jax.tree.leaves(after_one), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(one))


@pytest.mark.grid(2)
@pytest.mark.parametrize("through", ["shard_map", "jit"])
@pytest.mark.parametrize(
    ("shape", "style"),
    [
        ((2, 4, 1), "column"),
        ((2, 2, 2), "column"),
        ((2, 1, 4), "row"),
        ((1, 2, 2), "row, sequence"),
    ],
)
def test_blocks_are_gathered_with_their_scales(shape, style, through):  # P-4, P-5, G-16
    rng = np.random.default_rng(0)
    sizes = {"row, sequence": (4, 64, 128)}.get(style, (16, 16, 128))
    x, w, g = (
        jnp.asarray(
            rng.integers(-7, 8, size) * 2.0 ** rng.integers(-3, 4, (*size[:-1], 1)), jnp.bfloat16
        )
        for size in (sizes, (256, 128), (*sizes[:2], 256))
    )
    one = jax.jit(
        lambda x, w, g: results(lambda x, w: linear.apply(x, w, recipe="mxfp8")[0], x, w, g)
    )(x, w, g)
    found = on_devices(
        shape, placement_of(style, **ACCUMULATORS), "mxfp8", through=through, x=x, w=w, g=g
    )
    for name, mine, expected in zip(("y", "grad_input", "grad_weight"), found, one, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(expected), err_msg=name)


@pytest.mark.parametrize(
    ("shape", "style", "recipe", "message"),
    [
        ((1, 1, 8), "row", "mxfp8", "fc: input of recipe 'mxfp8': .*divisible by 32"),
        (
            (1, 4, 1),
            "column",
            "blockwise",
            "fc: weight of recipe 'blockwise': pieces along tensor, fsdp need multiples of 128 rows; they hold 64",
        ),
        (
            (1, 1, 8),
            "column",
            "blockwise",
            "fc: weight .*along tensor, fsdp need multiples of 128 rows; they hold 32",
        ),
    ],
)
def test_a_layout_that_cuts_a_block_is_refused(operands, shape, style, recipe, message):  # P-5
    x, w, g = operands
    with pytest.raises(ValueError, match=message):
        on_devices(shape, placement_of(style), recipe, through="shard_map", x=x, w=w, g=g)


def test_a_sequence_that_is_not_cut_evenly_is_refused_by_name():  # P-1
    x, w = jnp.ones((8, 3, 32), jnp.bfloat16), jnp.ones((32, 32), jnp.bfloat16)
    mesh = mesh_of((4, 1, 2))

    def apply(x, w):
        return linear.apply(
            x,
            w,
            recipe="tensorwise",
            name="fc",
            placement=Placement(m=("data",), k=("tensor",), sequence=True),
        )[0]

    mapped = jax.shard_map(
        apply,
        mesh=mesh,
        in_specs=(P("data", None, "tensor"), P(None, "tensor")),
        out_specs=P("data", "tensor"),
    )
    with pytest.raises(ValueError, match=r"fc: .*divisible by 2 pieces along tensor; got 3"):
        jax.jit(mapped)(x, w)


def in_shard_map(f, *, check_vma=True):
    mapped = jax.shard_map(
        f,
        mesh=mesh_of((8, 1, 1)),
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    return jax.jit(mapped)(jnp.ones((64, 128)), jnp.ones((128, 128)))


def test_a_linear_without_placement_is_refused_inside_shard_map():
    with pytest.raises(ValueError, match="fc: inside shard_map a linear needs its placement"):
        in_shard_map(lambda x, w: linear.apply(x, w, recipe="tensorwise", name="fc")[0])


def test_gradients_without_check_vma_are_refused_and_evaluation_is_not():
    def apply(x, w):
        return linear.apply(x, w, recipe="tensorwise", name="fc", placement=Placement(m=("data",)))[
            0
        ]

    assert in_shard_map(apply, check_vma=False).shape == (64, 128)
    with pytest.raises(ValueError, match=r"fc: gradients .*check_vma=True"):
        in_shard_map(jax.grad(lambda x, w: apply(x, w).sum()), check_vma=False)
    with pytest.raises(ValueError, match=r"fc: gradients .*check_vma=True"):
        jax.grad(lambda x: in_shard_map(lambda a, w: apply(a * x, w), check_vma=False).sum())(1.0)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Placement(m=("dat",)), "fc: placement axes are data, fsdp, tensor; got dat"),
        (
            Placement(m=("data",), n=("tensor",)),
            "fc: placement shards w along tensor; it varies along none",
        ),
        (Placement(n=("data",)), "fc: placement shards x along none; it varies along data"),
    ],
)
def test_a_placement_that_is_not_the_tensors_is_refused(placement, message):
    with pytest.raises(ValueError, match=message):
        in_shard_map(
            lambda x, w: linear.apply(x, w, recipe="tensorwise", placement=placement, name="fc")[0]
        )


def test_what_only_shard_map_can_do_is_refused_elsewhere():
    x, w = jnp.ones((64, 128)), jnp.ones((128, 128))
    with pytest.raises(ValueError, match=r"fc: placement axes are none"):
        linear.apply(x, w, recipe="tensorwise", placement=Placement(m=("data",)), name="fc")
    sharded = jax.device_put(x, NamedSharding(mesh_of((8, 1, 1)), P("data")))
    with pytest.raises(ValueError, match=r"fc: scope 'local' needs visible devices"):
        jax.jit(
            lambda x: linear.apply(
                x,
                w,
                recipe="tensorwise",
                placement=Placement(m=("data",), scope="local"),
                name="fc",
            )
        )(sharded)
    with pytest.raises(ValueError, match=r"fc: delayed .*global"):
        in_shard_map(
            lambda x, w: linear.apply(
                x,
                w,
                recipe="delayed",
                state=delayed.init("delayed"),
                seen=delayed.unseen("delayed"),
                placement=Placement(m=("data",), scope="local"),
                name="fc",
            )[0]
        )


def test_uneven_shards_are_refused_by_name():  # P-1
    placement, mesh = placement_of("column, sequence"), {"data": 2, "fsdp": 2, "tensor": 2}
    sharding.check_shapes("fc", 64, (256, 128), placement, mesh)
    for tokens, shape, message in (
        (60, (256, 128), "8 pieces .*M=60"),
        (64, (250, 128), "4 pieces along tensor, fsdp.*N=250"),
    ):
        with pytest.raises(ValueError, match=f"fc: .*{message}"):
            sharding.check_shapes("fc", tokens, shape, placement, mesh)


def test_squares_of_an_input_move_with_its_rows(rng):  # P-8, S-14
    """Devices exchange rows of two sequences by their place, and each square's scale with them."""
    square = CastSpec(fmt=E4M3FN, granularity="mx_32x32", policy=POLICIES["mx_rceil"])
    line = dataclasses.replace(square, granularity="mx_1x32")
    recipe = Recipe(name="squares", output=GemmSpec(a=square, b=line, accumulate="slow"))
    rows = np.exp2(np.repeat(np.arange(4), 32)).reshape(2, 64, 1)  # another scale for each square
    x = jnp.asarray(rows * rng.integers(-7, 8, (2, 64, 64)), jnp.bfloat16)
    w = jnp.asarray(rng.integers(-7, 8, (32, 64)), jnp.bfloat16)
    place = Placement(k=("tensor",), sequence=True)

    def cut(x):
        mapped = jax.shard_map(
            lambda x, w: linear.apply(x, w, recipe=recipe, name="fc", placement=place)[0],
            mesh=mesh_of((1, 1, 2)),
            in_specs=(P(None, None, "tensor"), P(None, "tensor")),
            out_specs=P(None, "tensor"),
        )
        return np.asarray(jax.jit(mapped)(x, w), np.float32)

    expected = np.asarray(linear.apply(x, w, recipe=recipe)[0], np.float32)
    # both halves' results are rounded to bfloat16 before their sum
    np.testing.assert_allclose(cut(x), expected, rtol=2**-7, atol=2**-7 * abs(expected).max())
    with pytest.raises(ValueError, match="keeps whole rows or squares of them; got 2 for 4"):
        cut(x[:, :32])
