"""What the proof reads off a step, and that it misses nothing when a fallback is planted."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from helpers.training import persistent_caches
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8ref.jax import flax, proof
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.gemm import gemm
from fp8ref.jax.linear import linear, operands
from fp8ref.jax.quantize import scaling
from fp8ref.recipe import RECIPES

FP8 = {"tensorwise": 3, "rowwise": 3, "rowwise_with_gw_hp": 2, "delayed": 3}
PLACEMENT = Placement(m=("data", "fsdp"), n=("tensor",), fsdp=("fsdp",), sequence=True)
SPECS = (P(PLACEMENT.m, PLACEMENT.n), P(*PLACEMENT.at_rest("weight")))


def lowered(recipe, through, *, placement=PLACEMENT):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

    def grads(x, w):
        def loss(x, w):
            y, _ = linear.apply(
                x,
                w,
                recipe=recipe,
                placement=None if through == "one" else placement,
                name="layers.0.fc",
            )
            return (y.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss, (0, 1))(x, w)

    x, w = jnp.ones((8, 16, 128), jnp.bfloat16), jnp.ones((256, 128), jnp.bfloat16)
    if through == "one":
        return jax.jit(grads).lower(x, w)
    x, w = (
        jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in zip((x, w), SPECS, strict=True)
    )
    if through == "jit":
        return jax.jit(grads).lower(x, w)
    return jax.jit(jax.shard_map(grads, mesh=mesh, in_specs=SPECS, out_specs=SPECS)).lower(x, w)


@pytest.mark.grid(3)
@pytest.mark.parametrize("through", ["one", "shard_map", "jit"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_every_planned_gemm_and_gather_is_there(recipe, through):
    program = proof.read(lowered(recipe, through))
    assert program.source == ("hlo after spmd partitioning" if through == "jit" else "stablehlo")
    dots = proof.gemms(program)
    assert [(d.layer, d.which) for d in dots] == [
        ("layers.0.fc", which) for which in ("output", "grad_input", "grad_weight")
    ]
    assert sum(d.fp8 for d in dots) == FP8[recipe]
    assert [d.accumulate for d in dots if d.fp8] == [
        s.accumulate for s in RECIPES[recipe].gemms.values() if s.fp8
    ]
    assert {d.out for d in dots} == {"f32"}
    placements = None if through == "one" else {"layers.0.fc": PLACEMENT}
    assert proof.missing(program, {"layers.0.fc": recipe}, placements) == []
    if through != "one":
        gathers = [
            c
            for c in proof.collectives(program)
            if c.kind == "all_gather" and c.dtype.startswith("f8")
        ]
        # the weight for two GEMMs; the input for output, and for grad_weight where that is FP8
        assert len(gathers) == (3 if recipe == "rowwise_with_gw_hp" else 4)


@pytest.mark.parametrize("outside", [False, True])
def test_a_dot_in_a_function_is_xlas_to_partition_only_if_called_outside_shard_map(outside):
    """A function, as attention's rules are, stands beside the main one. After partitioning XLA has
    merged equal gathers, here of one input by two linears, so that one of them would be missing."""
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
    placement = Placement(n=("tensor",), sequence=True)
    square = jax.jit(lambda y: y @ y.mT)

    def mapped(x, v, w):
        results = (
            linear.apply(x, weight, recipe="tensorwise", placement=placement, name=name)[0]
            for name, weight in (("q", v), ("k", w))
        )
        return tuple(square(y) for y in results)

    cut, rows = P(None, "tensor"), P("tensor", None)
    specs = (cut, rows, rows)
    out = P(None, None, "tensor")  # each device's own features

    def step(x, v, w):
        results = jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=(out, out))(x, v, w)
        return tuple(square(y) for y in results) if outside else results

    shapes = (
        jnp.ones((2, 32, 64), jnp.bfloat16),
        *(jnp.ones((64, 64), jnp.bfloat16) * n for n in (1, 2)),
    )
    arrays = (
        jax.device_put(value, NamedSharding(mesh, spec))
        for value, spec in zip(shapes, specs, strict=True)
    )
    program = proof.read(jax.jit(step).lower(*arrays))
    assert program.source == ("hlo after spmd partitioning" if outside else "stablehlo")
    missing = [
        line
        for line in proof.missing(
            program, dict.fromkeys("qk", "tensorwise"), dict.fromkeys("qk", placement)
        )
        if "/output" in line
    ]
    assert [line.partition(":")[0] for line in missing] == (["k/output"] if outside else [])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_weight_in_flaxs_layout_has_its_operands_in_the_same_order(recipe):
    """A kernel is [K, N], so that its gradient is multiplied the other way round."""
    model, x = (
        nn.Dense(256, name="fc", dot_general_cls=flax.linen_dot_general(recipe)),
        jnp.ones((32, 128), jnp.bfloat16),
    )
    variables = model.init(jax.random.key(0), x)
    step = jax.jit(
        jax.grad(lambda v, x: (model.apply(v, x).astype(jnp.float32) ** 2).sum(), (0, 1))
    )
    program = proof.read(step.lower(variables, x))
    found = [(dot.which, dot.a, dot.b) for dot in proof.gemms(program) if dot.layer]
    casts = [(which, spec.a.fmt, spec.b.fmt) for which, spec in RECIPES[recipe].gemms.items()]
    assert found == [(which, f"f8{a}", f"f8{b}") for which, a, b in casts]
    assert proof.missing(program, {proof.gemms(program)[0].layer: recipe}) == []


def test_a_program_that_jax_has_cached_on_disk_is_read_all_the_same(tmp_path):
    with persistent_caches.in_directory(tmp_path):
        first, second = (proof.read(lowered("tensorwise", "jit")) for _ in range(2))
        kept = lowered("tensorwise", "jit").compile()
        assert any(tmp_path.iterdir()), "the cache keeps no program, so nothing is shown"
        third = proof.read(lowered("tensorwise", "jit"))
    assert kept is not None
    assert first == second == third


def test_another_recipe_a_missing_layer_and_a_missing_gather_are_lines():
    program = proof.read(lowered("tensorwise", "shard_map"))
    fc = "layers.0.fc"
    assert proof.missing(program, {fc: "rowwise"}) == [
        f"{fc}/grad_input: planned f8e4m3fn x f8e4m3fn, slow; f8e5m2 x f8e4m3fn, slow",
        f"{fc}/grad_weight: planned f8e4m3fn x f8e4m3fn, slow; f8e5m2 x f8e4m3fn, slow",
    ]
    slow = dataclasses.replace(RECIPES["tensorwise"].output, accumulate="slow")
    assert proof.missing(
        program, {fc: dataclasses.replace(RECIPES["tensorwise"], output=slow)}
    ) == [f"{fc}/output: planned f8e4m3fn x f8e4m3fn, slow; f8e4m3fn x f8e4m3fn, fast"]
    assert (
        proof.missing(program, {"head": "tensorwise"})[0]
        == "head/output: planned f8e4m3fn x f8e4m3fn, fast; found no such dot"
    )
    without = proof.read(
        lowered("tensorwise", "shard_map", placement=dataclasses.replace(PLACEMENT, scope="local"))
    )
    assert proof.missing(without, {fc: "tensorwise"}, {fc: PLACEMENT}) == []
    one = proof.read(lowered("tensorwise", "one"))
    assert (
        proof.missing(one, {fc: "tensorwise"}, {fc: PLACEMENT})[0]
        == f"{fc}/output: planned 2 gathers in FP8, of input, weight; found 0"
    )


def test_a_scale_moved_to_the_operand_is_caught(monkeypatch):
    """The rowwise fallback that XLA makes a bf16 GEMM of on a GPU: the dot then multiplies no
    FP8.
    """

    def dequantized(a, b, *, out_dtype, execution, **how):
        return gemm.matmul_hp(
            scaling.dequantize(a),
            scaling.dequantize(b),
            axes=(a.axis, b.axis),
            out_dtype=out_dtype,
            execution=gemm.Execution(collective=execution.collective),
        )

    monkeypatch.setattr(gemm, "matmul", dequantized)
    found = proof.missing(proof.read(lowered("rowwise", "one")), {"layers.0.fc": "rowwise"})
    assert found[0] == "layers.0.fc/output: planned f8e4m3fn x f8e4m3fn, fast; f32 x f32, fast"
    assert len(found) == 3


def test_a_single_constraint_that_gathers_something_wider_is_caught(monkeypatch):
    """With the codes pinned to whole rows only, XLA may quantize after the gather: guarded by the
    second constraint.
    """
    with_both = proof.read(lowered("tensorwise", "jit"))

    def one_constraint(x, cut):
        return lax.with_sharding_constraint(
            x, NamedSharding(jax.typeof(x).sharding.mesh, cut.specs(x.shape)[1])
        )

    monkeypatch.setattr(operands, "gather_by_compiler", one_constraint)
    plan = {"layers.0.fc": "tensorwise"}, {"layers.0.fc": PLACEMENT}
    assert proof.missing(with_both, *plan) == []
    assert proof.missing(proof.read(lowered("tensorwise", "jit")), *plan) != []


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_gemms_of_dequantized_operands_are_read_as_fp8(recipe):  # G-22
    """On an NVIDIA GPU XLA finds an FP8 GEMM in a dot of codes times scales."""

    def grads(x, w):
        return jax.grad(
            lambda x, w: (
                linear.apply(x, w, recipe=recipe, name="fc")[0].astype(jnp.float32) ** 2
            ).sum(),
            (0, 1),
        )(x, w)

    x, w = jnp.ones((8, 16, 128), jnp.bfloat16), jnp.ones((256, 128), jnp.bfloat16)
    program = proof.read(jax.jit(grads).trace(x, w).lower(lowering_platforms=("cuda",)))
    assert proof.missing(program, {"fc": recipe}) == []
    assert {dot.out for dot in proof.gemms(program)} == {"bf16"}
    assert sum(dot.fp8 for dot in proof.gemms(program)) == FP8[recipe]


HLO = """
%fused (p: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %c = bf16[] convert(%p)
  ROOT %r = f32[] convert(%c)
}

ENTRY %main (a: f8e4m3fn[16,32], b: f8e4m3fn[16,32], s: f32[], t: f32[]) -> bf16[16,16] {
  %a = f8e4m3fn[16,32]{1,0} parameter(0)
  %b = f8e4m3fn[16,32]{1,0} parameter(1)
  %s = f32[] parameter(2)
  %t = f32[] parameter(3)
  %u = f32[] fusion(%t), kind=kLoop, calls=%fused
  ROOT %g = (bf16[16,16]{1,0}, s8[1]{0}) custom-call(%a, %b, %s, SCALE), custom_call_target="__cublas$lt$matmul$f8", METADATA
}
"""


@pytest.mark.parametrize(("scale", "rounded"), [("%t", False), ("%u", True)])
def test_a_scale_that_xla_rounds_is_named(scale, rounded):  # G-22
    compiled = proof.read_compiled(
        HLO.replace("SCALE", scale).replace("METADATA", 'metadata={op_name="jit(f)/fc/output/dot"}')
    )
    expected = [
        "fc/output: XLA rounded its scales to bfloat16. Compile with "
        "xla_allow_excess_precision, XLA's default."
    ]
    assert proof.lost(compiled, compiled) == (expected if rounded else [])
