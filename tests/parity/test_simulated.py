"""Under one plan two frameworks have one arithmetic: GEMMs bit for bit, and a cross-check that asks
for it.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fp8ref.crosscheck import one_device
from fp8ref.jax.gemm import gemm as jax_gemm
from fp8ref.jax.quantize import scaling as jax_scaling
from fp8ref.recipe import RECIPES
from fp8ref.sim.gemm import hardware
from fp8ref.torch.gemm import gemm as torch_gemm
from fp8ref.torch.gemm import hardware as simulated
from fp8ref.torch.quantize import scaling as torch_scaling
from fp8ref.train import loop

RECIPE_PLANS = [
    ("tensorwise", "hopper"),
    ("rowwise", "hopper_fast"),
    ("blockwise", "hopper"),
    ("mxfp8", "ada"),
    ("tensorwise", "f32"),
]


# B-12
@pytest.mark.grid(4)
@pytest.mark.parametrize("which", ["output", "grad_input", "grad_weight"])
@pytest.mark.parametrize(("recipe", "plan"), RECIPE_PLANS)
def test_equal_operands_give_equal_outputs(rng, recipe, plan, which):
    spec, multiply = RECIPES[recipe].gemms[which], hardware.by_name(plan)
    values = [rng.standard_normal((rows, 256)).astype(np.float32) for rows in (64, 128)]
    how = {"accumulate": spec.accumulate, "epilogue": spec.epilogue}
    ours = [
        jax_scaling.quantize(
            jnp.asarray(v, jnp.bfloat16), c.fmt, granularity=c.granularity, policy=c.policy, axis=-1
        )
        for v, c in zip(values, (spec.a, spec.b), strict=True)
    ]
    theirs = [
        torch_scaling.quantize(
            torch.from_numpy(v).bfloat16(),
            c.fmt,
            granularity=c.granularity,
            policy=c.policy,
            axis=-1,
        )
        for v, c in zip(values, (spec.a, spec.b), strict=True)
    ]
    execution = jax_gemm.Execution(multiply=multiply)
    one = jax_gemm.matmul(*ours, **how, out_dtype=jnp.bfloat16, execution=execution)
    with simulated.simulating(multiply):
        other = torch_gemm.matmul(*theirs, **how, out_dtype=torch.bfloat16)
    np.testing.assert_array_equal(np.asarray(one, np.float32), other.float().numpy())


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "plan"), [("tensorwise", "hopper"), ("rowwise", "hopper_fast")])
def test_the_crosscheck_asks_for_the_simulators_bits(small, recipe, plan):
    report = one_device.crosscheck(
        small.replace(numerics={"recipe": recipe, "accumulate": plan}), steps=0
    )
    assert report.ok, [check.detail for check in report.failures]
    outputs = [
        c
        for name, c in report.checks.items()
        if name.split("/")[1] in ("output", "grad_input", "grad_weight")
    ]
    assert len(outputs) == 7 * 3 * len(loop.BACKENDS)
    assert all(c.bound == 0 and c.equal == c.compared > 0 for c in outputs)


def test_the_crosscheck_finds_a_backend_that_ran_under_another_plan(small, monkeypatch):
    made = loop.trainer
    monkeypatch.setattr(
        loop,
        "trainer",
        lambda backend, config, *given: made(
            backend, config.replace(numerics={"accumulate": "f32"}), *given
        ),
    )
    report = one_device.crosscheck(
        small.replace(numerics={"accumulate": "hopper_fast"}), backends=("torch",), steps=0
    )
    failed = {check.name for check in report.failures}
    assert {name.split("/")[1] for name in failed if "layers" in name} == {
        "output",
        "grad_input",
        "grad_weight",
    }
