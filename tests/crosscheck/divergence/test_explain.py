"""The reason of a difference: a clause that allows it, or a fault, by the table and by the
simulator.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from fp8ref.crosscheck import bounds
from fp8ref.crosscheck.divergence.difference import Difference
from fp8ref.crosscheck.divergence.explain import (
    REASONS,
    Context,
    attention_reason,
    explain,
    sum_reason,
)
from fp8ref.crosscheck.divergence.step_values import Value
from fp8ref.crosscheck.operands import Observation
from fp8ref.formats import BFLOAT16
from fp8ref.recipe import OPERANDS, RECIPES, REDUCED_AXES
from fp8ref.sim.gemm import gemm
from fp8ref.sim.gemm.hardware import HARDWARE
from fp8ref.sim.quantize import scaling
from fp8ref.spec.hardware import Factor
from fp8ref.train.config.config import Config

ROOT = Path(__file__).parents[3]
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
APART = Difference(element=(0,), a="", b="", differ=1, of=2, worst=1, unit="bfloat16")


def context(recipe="tensorwise", other=None, unobserved=()) -> Context:
    over_linears = (
        {d.path: RECIPES[r] if d.fp8 else d.recipe for d in Config().decisions()}
        for r in (recipe, other or recipe)
    )
    model = Config().model
    return Context(
        names=("a", "b"),
        recipes=tuple(over_linears),
        states={},
        model=model,
        outputs={},
        unobserved=unobserved,
    )


def value(phase, layer, role, **of_gemm) -> Value:
    return Value(phase=phase, layer=layer, role=role, value=np.zeros(2, np.float32), **of_gemm)


@pytest.mark.parametrize(
    ("v", "clauses"),
    [
        (value("state before", "lm_head", "master weight"), ("M-6", "K-7")),
        (value("state before", "lm_head", "exp_avg"), ("K-2",)),
        (value("state before", Q, "input amax history"), ("K-2",)),
        (value("batch", "batch", "tokens"), ("D-2", "D-3")),
        (value("forward", Q, "weight", gemm="output"), ("M-2",)),
        (value("forward", Q.replace("q_", "o_"), "input", gemm="output"), ("M-3", "G-9")),
        (value("forward", Q, "input", gemm="output"), ("M-3",)),
        (value("forward", DOWN, "input", gemm="output"), ("M-3",)),
        (value("forward", "lm_head", "logits"), ("G-9", "M-3")),
        (value("loss", "loss", "mean"), ("M-5",)),
        (value("backward", DOWN, "grad_output", gemm="grad_input"), ()),
        (value("backward", DOWN, "weight's gradient"), ()),
        (value("backward", "lm_head", "weight's gradient"), ("G-9",)),
        (value("backward", "model.norm", "weight's gradient"), ()),
        (value("backward", "model.embed_tokens", "weight's gradient"), ("M-2",)),
        (value("backward", "gradient", "norm"), ("T-2",)),
        (value("optimizer", "optimizer", "learning rate"), ("T-3",)),
        (value("optimizer", Q, "exp_avg_sq"), ("T-1", "T-2", "T-6")),
        (value("optimizer", Q, "master weight"), ("T-1",)),
        (value("optimizer", Q, "input stored scale"), ("H-3", "H-4")),
    ],
    ids=lambda x: "-".join(x.key) if isinstance(x, Value) else "",
)
def test_a_kind_of_difference_has_its_clause(v, clauses):  # B-10
    assert explain(v, v, APART, context()).clauses == clauses


def test_a_gradient_of_a_gemm_in_high_precision_is_a_sum_in_any_order():  # G-9
    v = value("backward", Q, "weight's gradient")
    assert explain(v, v, APART, context("rowwise_with_gw_hp")).clauses == ("G-9",)


@pytest.mark.parametrize("layer", [Q, DOWN])
def test_roundings_of_one_result_are_neighbors_or_no_clause_explains_them(layer):  # M-3
    v = value("forward", layer, "input", gemm="output")
    for worst, unit in ((2, "bfloat16"), (1, "float32")):
        far = Difference(element=(0,), a="", b="", differ=1, of=2, worst=worst, unit=unit)
        found = explain(v, v, far, context())
        assert found.clauses == ()
        assert f"these are {worst} numbers of {unit} apart" in found.text
        # what is between may be anything
        hidden = explain(v, v, far, context(unobserved=["a", "b", "c", "d"]))
        assert hidden.clauses == ("M-3", "G-9")
        assert "not observed (a, b, c and 1 more)" in hidden.text


def test_casts_of_two_recipes_are_no_fault():
    a, b = (
        value("forward", Q, "input", gemm="output", part="scale", cast=RECIPES[r].output.a)
        for r in ("tensorwise", "rowwise")
    )
    assert explain(a, b, APART, context("tensorwise", "rowwise")).clauses == ("R-1",)


def test_every_clause_of_the_table_is_there():
    known = {
        clause
        for page in (ROOT / "docs/spec").glob("?.md")
        for clause in re.findall(r"^### ([A-Z]-\d+) ", page.read_text(), re.MULTILINE)
    }
    for reason in REASONS.values():
        assert set(reason.clauses) <= known
        assert set(re.findall(r"\b[A-Z]-\d+\b", reason.text)) <= known
        assert reason.text.startswith("no clause explains it") == (not reason.clauses)


def of_one_linear(**more) -> Context:
    recipe = {Q: RECIPES["tensorwise"]}
    return Context(
        names=("a", "b"),
        recipes=(recipe, recipe),
        states={},
        model=Config().model,
        **{"outputs": {}} | more,
    )


@pytest.mark.parametrize("fault", [1.0, 1.5])
def test_attention_is_held_to_its_bound(fault):  # B-11
    rng = np.random.default_rng(0)
    outputs = {
        f"model.layers.0.self_attn.{p}_proj": rng.standard_normal((2, 8, n)).astype(np.float32) / 4
        for p, n in (("q", 128), ("k", 64), ("v", 64))
    }
    simulated = bounds.attention(*outputs.values(), Config().model)
    a, b = (
        Value(
            phase="forward",
            layer=Q.replace("q_", "o_"),
            role="input",
            gemm="output",
            value=out.astype(np.float32),
        )
        for out in (simulated.before, fault * simulated.after)
    )
    found = attention_reason(a, b, "model.layers.0.self_attn", of_one_linear(outputs=outputs))
    same = int((simulated.before == simulated.after).sum())
    if fault == 1:
        assert found.clauses == ("M-3", "B-11")
        assert (
            f"Normalized before it, the simulator has 2,048 of 2,048 elements of a and {same:,} "
            f"of b; after it, {same:,} and 2,048." in found.text
        )
    else:
        assert found.clauses == ()
        assert "B-11's bound is exceeded" in found.text


def sums(which: str, plans: tuple[str | None, str | None]) -> tuple[list[Value], Context]:
    """The results of one GEMM, of equal operands, under each plan; None: exactly summed, as a
    library may.
    """
    rng, spec, multiply = (
        np.random.default_rng(0),
        RECIPES["tensorwise"].gemms[which],
        tuple(HARDWARE.get(plan) for plan in plans),
    )
    shapes = {"input": (64, 256), "weight": (32, 256), "grad_output": (64, 32)}
    operands, factors = [], []
    for role, cast, axis in zip(
        OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True
    ):
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
        Value(
            phase="forward",
            layer=Q,
            role=which,
            gemm=which,
            value=out.copy(),
            observation=Observation(name, Q, which, *operands, out),
        )
        for name, out in zip("ab", results, strict=True)
    ]
    return values, of_one_linear(multiply=multiply)


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
    found = sum_reason(a, b, given)
    assert found.clauses == ("G-20",)
    assert named in found.text


@pytest.mark.parametrize("which", OPERANDS)
@pytest.mark.parametrize("plans", [("hopper", "hopper"), ("exact", "hopper_fast")])
def test_a_sum_that_is_not_its_plans_is_a_fault_whatever_the_other_is(which, plans):  # B-12
    (a, b), given = sums(which, plans)
    b.value.view(np.uint32)[3, 5] += 1 << 16  # one bfloat16 further: within B-1
    found = sum_reason(a, b, given)
    assert found.clauses == ()
    assert (
        f"1 of {b.value.size} results of b are not its plan's bit for bit (B-12): a fault of "
        "the sum" in found.text
    )
    assert "results of a" not in found.text


def test_one_plan_under_two_names_is_one():  # B-12, G-20
    (a, b), given = sums("output", ("hopper", "hopper_fast"))
    np.testing.assert_array_equal(a.value, b.value)
    a.value[0, 0] *= -1
    found = sum_reason(a, b, given)
    assert found.clauses == ()
    assert f"1 of {a.value.size} results of a are" in found.text


@pytest.mark.parametrize("plans", [(None, None), (None, "exact")])
def test_a_library_is_held_to_the_bound_beside_a_plan_too(plans):  # B-1
    (a, b), given = sums("output", plans)
    a.value[0, 0] *= 2
    found = sum_reason(a, b, given)
    assert found.clauses == ()
    assert "B-1's bound is exceeded" in found.text
