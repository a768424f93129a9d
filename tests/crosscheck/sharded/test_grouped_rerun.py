import dataclasses

import numpy as np
import pytest

from fp8ref.conformance.kit.compare import Report
from fp8ref.crosscheck.operands import Observation
from fp8ref.crosscheck.sharded import experts as sharded_experts
from fp8ref.crosscheck.sharded import grouped_rerun
from fp8ref.crosscheck.sharded.grouped_rerun import Experts, Rerun
from fp8ref.selection.grouped import GROUPED_RECIPES
from fp8ref.train.jax.mesh import Layout

LAYER = "model.layers.0.mlp.experts.up_proj"
EXPERTS, N, K = 4, 16, 32
SIZES = (9, 0, 1, 30)
EXPERTS_AND_FSDP = {"fsdp": 2, "expert": 2}


@pytest.fixture
def tensors(rng):
    """Rows of different sizes, so that scales differ by device."""
    x, g = (
        [rng.standard_normal((n, c)) * np.exp(rng.standard_normal((n, 1))) for n in SIZES]
        for c in (K, N)
    )
    w = rng.standard_normal((EXPERTS, N, K))
    # as bfloat16 has them: a float32's upper half
    return Experts(
        *(
            [(v.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32) for v in of_role]
            for of_role in (x, g, w)
        )
    )


def checked(small, tensors, recipe, parallel):
    model = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "hidden_size": K,
        "intermediate_size": N,
    }
    layout = Layout(small.replace(model=model, numerics={"recipe": recipe}, parallel=parallel))
    recipe, report = GROUPED_RECIPES[recipe].recipe, Report()
    found, total = Rerun(layout, recipe)(tensors, 48)
    devices = [{(LAYER, *key): one for key, one in mine.items()} for mine in found]
    sharded_experts.check(
        report,
        "jax",
        {LAYER: recipe},
        devices,
        {LAYER: np.stack(tensors.weight)},
        parallel=dataclasses.replace(layout.config, reduce_dtype="float32"),
        states={},
        sums={LAYER: total},
    )
    return report, found


@pytest.mark.parametrize(
    ("recipe", "parallel"),
    [
        ("tensorwise", EXPERTS_AND_FSDP),
        pytest.param("rowwise", EXPERTS_AND_FSDP, marks=pytest.mark.slow),
        pytest.param("rowwise", {"data": 2, "expert": 2}, marks=pytest.mark.slow),
        pytest.param(
            "tensorwise", {"data": 2, "fsdp": 2, "reduce_dtype": "bfloat16"}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
#
def test_experts_on_a_mesh_have_one_devices_operands(recipe, parallel, small, tensors, monkeypatch):
    """Some devices have no rows of an expert, and one expert has none at all; what fills buffers is
    NaN.
    """
    report, found = checked(small, tensors, recipe, parallel)
    assert report.ok, [check.detail for check in report.failures]
    for name in (
        "input/codes",
        "weight/codes",
        "grad_output/codes",
        "output/value",
        "grad_input/value",
        "grad_weight/value",
    ):
        assert report.checks[f"{LAYER}/{name}/jax"].compared > 0
    counts = [{(which, e): len(one[0][0]) for (which, e), one in mine.items()} for mine in found]
    total = sum(n for mine in counts for (which, _), n in mine.items() if which == "output")
    assert total == sum(SIZES)
    if parallel is EXPERTS_AND_FSDP and recipe == "tensorwise":
        # a fault: each device scales its own rows
        monkeypatch.setattr(Layout, "sharing_groups", ())
        report, _ = checked(small, tensors, recipe, parallel)
        assert {f"{LAYER}/input/scale/jax", f"{LAYER}/grad_output/scale/jax"} <= {
            check.name for check in report.failures
        }


def test_an_expert_is_known_by_its_weight(tensors):
    weight = np.stack(tensors.weight)
    made = [
        Observation("jax", LAYER, gemm, (rows[e], None, None), (weight[e], None, None), None)
        for gemm, rows in (("output", tensors.input), ("grad_input", tensors.grad_output))
        for e in (3, 0, 2)
    ]
    made.append(
        Observation(
            "jax",
            LAYER,
            "grad_weight",
            (tensors.grad_output[0], None, None),
            (tensors.input[0], None, None),
            None,
        )
    )
    found = grouped_rerun.expert_tensors(made, weight)
    for e, size in enumerate(SIZES):
        assert len(found.input[e]) == len(found.grad_output[e]) == size
        np.testing.assert_array_equal(found.input[e], tensors.input[e])


def test_all_rows_are_dealt_unevenly():
    sizes = grouped_rerun.dealt(SIZES, 4)
    assert tuple(sizes.sum(0)) == SIZES
    assert (sizes[:, 3] != sizes[0, 3]).any()
