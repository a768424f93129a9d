"""The reason of a difference by the simulator: a fault, or an order that a clause leaves to the library or the plan."""

import numpy as np
import pytest

from fp8ref.crosscheck import bounds
from fp8ref.crosscheck.divergence import compare_to_sim
from fp8ref.crosscheck.divergence.compare_to_sim import Context
from fp8ref.crosscheck.divergence.step_values import Value
from fp8ref.crosscheck.operands import Observation
from fp8ref.formats import BFLOAT16
from fp8ref.hardware import Factor
from fp8ref.recipe import OPERANDS, RECIPES, REDUCED_AXES
from fp8ref.sim import gemm, scaling
from fp8ref.sim.hardware import HARDWARE
from fp8ref.train.config import Config

Q = "model.layers.0.self_attn.q_proj"
CONFIG = Config().model


def context(**more) -> Context:
    recipe = {Q: RECIPES["tensorwise"]}
    return Context(names=("a", "b"), recipes=(recipe, recipe), states={}, model=CONFIG, **{"outputs": {}} | more)


@pytest.mark.parametrize("fault", [1.0, 1.5])
def test_attention_is_held_to_its_bound(fault):  # B-11
    rng = np.random.default_rng(0)
    outputs = {
        f"model.layers.0.self_attn.{p}_proj": rng.standard_normal((2, 8, n)).astype(np.float32) / 4
        for p, n in (("q", 128), ("k", 64), ("v", 64))
    }
    simulated = bounds.attention(*outputs.values(), CONFIG)
    a, b = (
        Value(phase="forward", layer=Q.replace("q_", "o_"), role="input", gemm="output", value=out.astype(np.float32))
        for out in (simulated.before, fault * simulated.after)
    )
    found = compare_to_sim.of_attention(a, b, "model.layers.0.self_attn", context(outputs=outputs))
    same = int((simulated.before == simulated.after).sum())
    if fault == 1:
        assert found.clauses == ("M-3", "B-11")
        assert (
            f"Normalized before it, the simulator has 2,048 of 2,048 elements of a and {same:,} of b; after it, {same:,} and 2,048."
            in found.text
        )
    else:
        assert found.clauses == ()
        assert "B-11's bound is exceeded" in found.text


def sums(which: str, plans: tuple[str | None, str | None]) -> tuple[list[Value], Context]:
    """The results of one GEMM, of equal operands, under each plan; None: exactly summed, as a library may."""
    rng, spec, multiply = np.random.default_rng(0), RECIPES["tensorwise"].gemms[which], tuple(HARDWARE.get(plan) for plan in plans)
    shapes = {"input": (64, 256), "weight": (32, 256), "grad_output": (64, 32)}
    operands, factors = [], []
    for role, cast, axis in zip(OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True):
        hp = rng.standard_normal(shapes[role]).astype(np.float32)
        q = scaling.quantize(hp, cast.fmt, axis=axis)
        operands.append((hp, q.codes, q.scale))
        factors.append(q if axis == 1 else q._replace(codes=q.codes.T, axis=1))
    results = [
        gemm.matmul(*factors, out_dtype=BFLOAT16)
        if m is None
        else m(
            *(Factor(q.codes, q.scale_inv, q.fmt, q.granularity) for q in factors),
            accumulate=spec.accumulate,
            epilogue=spec.epilogue,
            out_dtype=BFLOAT16,
        )
        for m in multiply
    ]
    values = [
        Value(phase="forward", layer=Q, role=which, gemm=which, value=out.copy(), observation=Observation(name, Q, which, *operands, out))
        for name, out in zip("ab", results, strict=True)
    ]
    return values, context(multiply=multiply)


@pytest.mark.parametrize("which", OPERANDS)
@pytest.mark.parametrize(
    ("plans", "named"),
    [
        (("hopper_fast", "exact"), "a sums under hopper_fast and b sums under exact"),
        ((None, "hopper_fast"), "a sums in its framework's order and b sums under hopper_fast"),
    ],
)
def test_sums_under_two_plans_are_two_sums(which, plans, named):  # G-20
    (a, b), given = sums(which, plans)
    assert (a.value != b.value).any()
    found = compare_to_sim.of_sum(a, b, given)
    assert found.clauses == ("G-20",)
    assert named in found.text


@pytest.mark.parametrize("which", OPERANDS)
@pytest.mark.parametrize("plans", [("hopper", "hopper"), ("exact", "hopper_fast")])
def test_a_sum_that_is_not_its_plans_is_a_fault_whatever_the_other_is(which, plans):  # B-12
    (a, b), given = sums(which, plans)
    b.value.view(np.uint32)[3, 5] += 1 << 16  # one bfloat16 further: within B-1
    found = compare_to_sim.of_sum(a, b, given)
    assert found.clauses == ()
    assert f"1 of {b.value.size} results of b are not its plan's bit for bit (B-12): a fault of the sum" in found.text
    assert "results of a" not in found.text


def test_one_plan_under_two_names_is_one():  # B-12, G-20
    (a, b), given = sums("output", ("hopper", "hopper_fast"))
    np.testing.assert_array_equal(a.value, b.value)
    a.value[0, 0] *= -1
    found = compare_to_sim.of_sum(a, b, given)
    assert found.clauses == ()
    assert f"1 of {a.value.size} results of a are" in found.text


@pytest.mark.parametrize("plans", [(None, None), (None, "exact")])
def test_a_library_is_held_to_the_bound_beside_a_plan_too(plans):  # B-1
    (a, b), given = sums("output", plans)
    a.value[0, 0] *= 2
    found = compare_to_sim.of_sum(a, b, given)
    assert found.clauses == ()
    assert "B-1's bound is exceeded" in found.text
