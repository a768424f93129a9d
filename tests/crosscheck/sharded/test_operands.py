"""Each comparison of ranks' operands fails by what it should see: here of two ranks that were made
from the simulator's.
"""

import dataclasses

import numpy as np
import pytest

from fp8ref.conformance.kit.compare import Report
from fp8ref.crosscheck.fsdp_run import Operands, Run
from fp8ref.crosscheck.sharded.operands import check_first_layer, check_pass, check_ranks
from fp8ref.formats import BFLOAT16
from fp8ref.recipe import OPERANDS, RECIPES, REDUCED_AXES
from fp8ref.sim.quantize import cast, scaling
from fp8ref.spec import llama

LAYER = "model.layers.0.self_attn.q_proj"
RANKS, ROWS = 2, 32  # rows of each rank: half of a batch of 4 sequences of 16 tokens
SCALE = "model.layers.0.self_attn.q_proj/input/scale/torch one process"
CODES = "model.layers.0.self_attn.q_proj/input/codes/torch one process"


@pytest.fixture
def config(small):
    numerics, parallel = {"recipe": "tensorwise"}, {"fsdp": RANKS, "amax_scope": "global"}
    return small.replace(numerics=numerics, parallel=parallel)


@pytest.fixture
def recipes():
    return {LAYER: RECIPES["tensorwise"]}


@pytest.fixture
def tensors(config, rng):
    """Input, weight and gradient of the linear for the tokens of both ranks."""
    weight = llama.initial_weights(config.model, seed=config.run.seed)[f"{LAYER}.weight"]
    rows, (n, k) = RANKS * ROWS, weight.shape
    normal = {
        "input": rng.standard_normal((rows, k)),
        "grad_output": rng.standard_normal((rows, n)),
    }
    whole = {role: x.astype(np.float32) for role, x in normal.items()} | {"weight": weight}
    return {role: cast.round_to(x, BFLOAT16) for role, x in whole.items()}


def operands(tensors, rows: slice) -> Operands:
    """The operands of a device that has these rows, whose scales are those of all rows."""
    result = Operands()
    for which, spec in RECIPES["tensorwise"].gemms.items():
        pair = []
        for role, how, axis in zip(
            OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True
        ):
            q = scaling.quantize(tensors[role], how.fmt, policy=how.policy, axis=axis)
            part = slice(None) if role == "weight" else rows
            pair.append((tensors[role][part], q.codes[part].copy(), q.scale.copy()))
        result.add(LAYER, which, *pair, np.zeros(0))
    return result


def a_run(config, first: Operands) -> Run:
    weights = llama.initial_weights(config.model, seed=config.run.seed)
    return Run(
        metrics=np.zeros((0, 2)),
        weights=weights,
        states=[],
        amaxes=[],
        operands=[first],
        gathered=0,
    )


@pytest.fixture
def runs(config, tensors):
    return [a_run(config, operands(tensors, slice(r * ROWS, (r + 1) * ROWS))) for r in range(RANKS)]


@pytest.fixture
def one(config, tensors):
    return a_run(config, operands(tensors, slice(None)))


def failures(config, recipes, runs) -> set[str]:
    report = Report()
    check_ranks(report, "torch", config, recipes, runs, [])
    assert report.checks
    return {check.name.removeprefix(f"{LAYER}/") for check in report.failures}


def first_layer(runs, one) -> Report:
    report = Report()
    check_first_layer(report, "torch", runs, one, tensor=1)
    return report


def test_ranks_that_hold_to_the_simulator_pass(config, recipes, runs, one):  # P-4
    assert failures(config, recipes, runs) == set()
    report = first_layer(runs, one)
    assert report.ok
    assert (
        report.checks[CODES].equal
        == 2 * runs[0].operands[0].fp8[LAYER, "output", "input"][0].size * RANKS
    )
    report = Report()
    check_pass(report, "torch", config.replace(parallel={"fsdp": 1}), recipes, one.operands[0])
    assert report.ok


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize(
    ("which", "role"),
    [("output", "input"), ("grad_input", "weight"), ("grad_weight", "grad_output")],
)
def test_a_wrong_code_or_scale_of_any_rank_is_seen(which, role, rank, config, recipes, runs):  # P-4
    codes, scale = runs[rank].operands[0].fp8[LAYER, which, role]
    codes[-1, 0] ^= 1
    assert failures(config, recipes, runs) == {f"{role}/codes/torch"}
    codes[-1, 0] ^= 1
    runs[rank].operands[0].fp8[LAYER, which, role] = codes, np.nextafter(scale, np.float32(0))
    assert failures(config, recipes, runs) == {f"{role}/scale/torch"}


def test_operands_after_training_are_held_to_the_trained_weights(config, recipes, runs):
    for run in runs:
        run.weights[f"{LAYER}.weight"] = run.weights[f"{LAYER}.weight"] * np.float32(2)
    # codes of twice the weights are equal
    assert failures(config, recipes, runs) == {"weight/scale/torch"}


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_gemm_that_one_rank_did_not_run_is_seen(rank, config, recipes, runs):
    for role in OPERANDS["grad_input"]:
        del runs[rank].operands[0].fp8[LAYER, "grad_input", role]
    assert failures(config, recipes, runs) == {"grad_input/value/torch"}


def test_a_gemm_that_was_not_planned_is_seen(config, runs):
    recipe = RECIPES["tensorwise"]
    recipes = {LAYER: dataclasses.replace(recipe, grad_weight=RECIPES["bf16"].grad_weight)}
    assert failures(config, recipes, runs) == {"grad_weight/value/torch"}


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_first_input_unlike_one_processs_is_seen(rank, runs, one):  # P-4
    codes, scale = runs[rank].operands[0].fp8[LAYER, "output", "input"]
    codes[0, -1] ^= 1
    assert {check.name for check in first_layer(runs, one).failures} == {CODES}
    codes[0, -1] ^= 1
    runs[rank].operands[0].fp8[LAYER, "output", "input"] = codes, np.nextafter(scale, np.float32(0))
    assert {check.name for check in first_layer(runs, one).failures} == {SCALE}


def test_rows_of_another_rank_are_seen(runs, one):  # P-10
    assert {check.name for check in first_layer(runs[::-1], one).failures} == {CODES}
