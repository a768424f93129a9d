"""Recipe mxfp4 in both backends: what they show of codes of 4 bits is the simulator's (spec R-9)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from fp8ref.crosscheck import operands
from fp8ref.crosscheck.operands import OperandCast
from fp8ref.estimate import roofline
from fp8ref.formats import E2M1FN
from fp8ref.jax import proof as jax_proof
from fp8ref.jax.linear import linear, observer
from fp8ref.jax.quantize import scaling as jax_scaling
from fp8ref.jax.quantize import stats as jax_stats
from fp8ref.recipe import OPERANDS, RECIPES, REDUCED_AXES
from fp8ref.sim import linear as sim
from fp8ref.sim.quantize import scaling, stats
from fp8ref.torch import proof as torch_proof
from fp8ref.torch.model import convert
from fp8ref.torch.observe import gemms
from fp8ref.torch.observe import statistics as torch_stats
from fp8ref.torch.quantize import scaling as torch_scaling

CAST = RECIPES["mxfp4"].output.a
MX = {"granularity": CAST.granularity, "policy": CAST.policy}
GEMMS = list(OPERANDS)


def tensors(rng):
    """x [M, K], w [N, K] and g [M, N] of bfloat16 numbers."""
    shapes = (33, 64), (32, 64), (33, 32)
    rounded = (torch.from_numpy(rng.standard_normal(s)).bfloat16().float() for s in shapes)
    return tuple(v.numpy() for v in rounded)


def by_torch(x, w, g):
    """{GEMM: (operands as (codes, scale), result)} that an observer sees, and the proof."""
    model = nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16()
    model[0].weight.data.copy_(torch.from_numpy(w))
    model, seen = convert.convert(model, "mxfp4"), {}

    def observe(name, which, a, b, out):
        seen[which] = [(q.codes.numpy(), q.scale.numpy()) for q in (a, b)], out.float().numpy()

    with torch_proof.trace_eager(model) as trace, gemms.observe_gemms(model, observe):
        value = torch.from_numpy(x).bfloat16().requires_grad_()
        model(value).backward(torch.from_numpy(g).bfloat16())
    return seen, torch_proof.manifest(trace, {"0": "mxfp4"}, [])


def by_jax(x, w, g):
    """As ``by_torch``."""
    seen = {}

    def observe(name, which, a, b, out):
        pairs = [(np.asarray(q[1]), np.asarray(q[2])) for q in (a, b)]
        seen[which] = pairs, np.asarray(out, np.float32)

    def step(x, w, g):
        y, vjp = jax.vjp(lambda x, w: linear.apply(x, w, recipe="mxfp4", name="0")[0], x, w)
        return y, vjp(g)

    args = [jnp.asarray(v, jnp.bfloat16) for v in (x, w, g)]
    program = jax_proof.read(jax.jit(step).lower(*args))
    with observer.observing(observe):
        jax.jit(lambda *args: step(*args))(*args)  # traced anew, within the context
        jax.effects_barrier()
    return seen, jax_proof.manifest(program, {"0": "mxfp4"}, [])


@pytest.mark.parametrize("backend", [by_torch, by_jax], ids=["torch", "jax"])
def test_observers_show_the_simulators_codes_and_the_proof_says_emulated(backend, rng):  # R-9, B-8
    x, w, g = tensors(rng)
    hp = {"input": x, "weight": w, "grad_output": g}
    seen, manifest = backend(x, w, g)
    results = sim.forward(x, w, "mxfp4"), *sim.backward(g, x, w, "mxfp4")
    assert set(seen) == set(GEMMS)
    for which, expected in zip(GEMMS, results, strict=True):
        pairs, out = seen[which]
        for role, axis, (codes, scale) in zip(
            OPERANDS[which], REDUCED_AXES[which], pairs, strict=True
        ):
            q = scaling.quantize(hp[role], E2M1FN, axis=axis, ragged=True, **MX)
            np.testing.assert_array_equal(codes, q.codes)
            np.testing.assert_array_equal(scale, q.scale)
        # float32 sums of 64 products in another order, rounded to bfloat16: half an ulp of 2^-8
        np.testing.assert_allclose(out.reshape(expected.shape), expected, rtol=2**-7, atol=2**-10)
    assert manifest["emulated"] == manifest["on_dequantised_operands"]
    assert manifest["emulated"] == [f"0/{which}" for which in GEMMS]


@pytest.mark.parametrize("axis", [0, 1])
def test_statistics_are_the_simulators(axis, rng):
    x = (rng.standard_normal((64, 96)) * 2.0 ** rng.integers(-9, 9, (64, 96))).astype(np.float32)
    expected = stats.statistics(x, scaling.quantize(x, E2M1FN, axis=axis, **MX))
    mine = jax_scaling.quantize(jnp.asarray(x), E2M1FN, axis=axis, **MX)
    theirs = torch_scaling.quantize(torch.from_numpy(x), E2M1FN, axis=axis, **MX)
    counts = [expected.underflows, expected.saturated, expected.overflows]
    for measured in (
        jax_stats.parts(np.asarray(jax_stats.measure(jnp.asarray(x), mine))),
        torch_stats.measure(torch.from_numpy(x), theirs).numpy(),
    ):
        assert [int(n) for n in measured[:5]] == [x.size, 0, *counts]
        np.testing.assert_allclose(float(measured[6]), float(expected.noise), rtol=2**-20)
    assert counts[0] > 0
    assert counts[1] > 0


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_cross_checks_quantizers_give_codes_of_four_bits(backend, rng):  # B-5
    x = tensors(rng)[1]
    (quantizer,) = operands.quantizers((backend,)).values()
    for axis in (0, 1):
        codes, scale = quantizer.quantize(x, OperandCast("input", CAST, axis))
        q = scaling.quantize(x, E2M1FN, axis=axis, **MX)
        np.testing.assert_array_equal(codes, q.codes)
        np.testing.assert_array_equal(scale, q.scale)
    np.testing.assert_array_equal(quantizer.encode(x, E2M1FN), scaling.cast.encode(x, E2M1FN))


def test_the_estimate_counts_it_as_dequantized():
    for backend in ("torch", "jax"):
        texts = [roofline.runs_in(spec, backend) for spec in RECIPES["mxfp4"].gemms.values()]
        assert set(texts) == {"e2m1fn mx_1x32 x e2m1fn mx_1x32, emulated: dequantized (R-9)"}
