"""FP8 GEMMs of a PyTorch model on the host: the simulator's bits in either linear, eager and
compiled; torchao's function is put back.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torchao.float8 import float8_ops
from torchao.float8.float8_linear import Float8Linear

from fp8ref.recipe import RECIPES
from fp8ref.shared.errors import ConfigError
from fp8ref.sim import linear as sim_linear
from fp8ref.sim.gemm import hardware
from fp8ref.torch import proof
from fp8ref.torch.gemm import hardware as simulated
from fp8ref.torch.linear import linear as layer
from fp8ref.torch.model import convert
from fp8ref.train import loop

HOPPER = hardware.by_name("hopper")
FP8 = ("tensorwise", "rowwise", "blockwise", "mxfp8")  # whose GEMMs are all FP8
OF_TORCHAO = ("tensorwise", "rowwise")


def model_of(recipe, kind, n=128, k=256, dtype=torch.bfloat16, bias=False):
    torch.manual_seed(0)
    plain = nn.Linear(k, n, bias=bias).to(dtype)
    return (
        layer.Linear.of(plain, recipe)
        if kind == "ours"
        else convert.convert(nn.Sequential(plain), recipe)
    )


def passed(model, rng, m=256, k=256, n=128, dtype=torch.bfloat16):
    """(input, grad_output, output, grad_input, grad_weight) of one forward and backward pass."""
    x, g = (
        torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(dtype)
        for shape in ((m, k), (m, n))
    )
    x.requires_grad_()
    y = model(x)
    y.backward(g)
    return x, g, y, x.grad, next(model.parameters()).grad


def wide(x):
    return x.detach().float().numpy()


# G-19, B-12
@pytest.mark.parametrize("plan", ["hopper", "hopper_fast"])
@pytest.mark.parametrize(
    ("recipe", "kind"),
    [*((recipe, "ours") for recipe in FP8), *((recipe, "torchao") for recipe in OF_TORCHAO)],
    ids=lambda v: v,
)
def test_outputs_and_gradients_are_the_simulators_bit_for_bit(rng, recipe, kind, plan):
    model = model_of(recipe, kind)
    assert any(isinstance(m, Float8Linear) for m in model.modules()) == (kind == "torchao")
    with simulated.simulating(hardware.by_name(plan)):
        x, g, *found = passed(model, rng)
    given = wide(x), wide(next(model.parameters()))
    expected = [
        sim_linear.forward(*given, recipe, accumulate=plan),
        *sim_linear.backward(wide(g), *given, recipe, accumulate=plan),
    ]
    for mine, sim in zip(found, expected, strict=True):
        np.testing.assert_array_equal(wide(mine), sim)


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4"])
def test_tensor_cores_take_no_four_bits(rng, recipe):
    model = model_of(recipe, "ours", 32, 32).eval()
    with (
        simulated.simulating(hardware.by_name("exact")),
        pytest.raises(ValueError, match=r"multiplies FP8 codes; got e2m1fn x e2m1fn\. Leave"),
    ):
        passed(model, rng, 32, 32, 32)


@pytest.mark.parametrize("recipe", OF_TORCHAO)
def test_a_bias_is_added_to_the_rounded_output(rng, recipe):
    model = model_of(recipe, "torchao", bias=True)
    with simulated.simulating(HOPPER):
        x, _, y, *_ = passed(model, rng)
    without = sim_linear.forward(wide(x), wide(model[0].weight), recipe, accumulate="hopper")
    np.testing.assert_array_equal(
        wide(y), wide(torch.from_numpy(without).bfloat16() + model[0].bias)
    )


@pytest.mark.parametrize("recipe", OF_TORCHAO)
def test_float32_outputs_of_torchao_are_rounded_as_the_recipe_says(rng, recipe):
    """Rowwise through bfloat16 (G-8), tensorwise not."""
    model = model_of(recipe, "torchao", dtype=torch.float32)
    with simulated.simulating(HOPPER):
        x, _, y, *_ = passed(model, rng, dtype=torch.float32)
    out_dtype = {"tensorwise": simulated.FLOAT32, "rowwise": simulated.BFLOAT16}[recipe]
    np.testing.assert_array_equal(
        wide(y),
        sim_linear.forward(
            wide(x), wide(model[0].weight), recipe, accumulate="hopper", out_dtype=out_dtype
        ),
    )


def test_torchaos_function_is_put_back_whatever_happens(rng):
    original = getattr(float8_ops, simulated.REPLACED)
    with simulated.simulating(HOPPER):
        assert getattr(float8_ops, simulated.REPLACED) is not original
        with simulated.simulating(hardware.by_name("ada")):
            assert simulated.active().name == "ada"
        assert simulated.active() is HOPPER
        assert getattr(float8_ops, simulated.REPLACED) is not original
    with pytest.raises(KeyError), simulated.simulating(HOPPER):
        raise KeyError
    assert getattr(float8_ops, simulated.REPLACED) is original
    assert simulated.active() is None
    with simulated.simulating(None):
        assert getattr(float8_ops, simulated.REPLACED) is original


def test_a_torchao_without_the_function_is_refused_loudly(monkeypatch):
    monkeypatch.setattr(float8_ops, simulated.REPLACED, lambda a, b: None)
    with (
        pytest.raises(
            ImportError, match=r"addmm_float8_unwrapped.*it takes a, b\. Install torchao 0\.18"
        ),
        simulated.simulating(HOPPER),
    ):
        pass
    monkeypatch.delattr(float8_ops, simulated.REPLACED)
    with pytest.raises(ImportError, match="it is not there"), simulated.simulating(HOPPER):
        pass
    assert simulated.active() is None


def test_an_fp8_output_is_refused():
    with simulated.simulating(HOPPER), pytest.raises(ValueError, match="no outputs in FP8"):
        getattr(float8_ops, simulated.REPLACED)(*[None] * 5, output_scale=torch.ones(()))


# B-12
@pytest.mark.parametrize(
    ("recipe", "kind"),
    [*((recipe, "ours") for recipe in FP8), *((recipe, "torchao") for recipe in OF_TORCHAO)],
    ids=lambda v: v,
)
def test_the_proof_names_simulated_gemms_and_misses_none(rng, recipe, kind):
    model = nn.Sequential(model_of(recipe, kind)) if kind == "ours" else model_of(recipe, kind)
    with simulated.simulating(HOPPER), proof.trace_eager(model) as trace:
        passed(model, rng)
    planned = {"0": recipe}
    assert proof.missing(trace, planned, "hopper") == []
    told = proof.manifest(trace, planned, [], plan="hopper")
    assert told["gemms"] == []
    assert told["on_dequantised_operands"] == []
    assert {(g["gemm"], g["accumulate"], g["plan"]) for g in told["simulated"]} == {
        (f"0/{which}", spec.accumulate, "hopper") for which, spec in RECIPES[recipe].gemms.items()
    }
    assert len(proof.missing(trace, planned, "ada")) == 3
    with proof.trace_eager(model) as native:
        passed(model, rng)
    assert len(proof.missing(native, planned, "hopper")) == 3
    assert "simulated" not in proof.manifest(native, planned, [])


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])  # torchao's linear, and ours
def test_compiled_bits_are_the_eager_ones_and_the_proof_reads_the_graph(recipe):
    def run(compiled):
        torch._dynamo.reset()
        torch.manual_seed(1)
        plain = nn.Sequential(
            nn.Linear(256, 128, bias=False), nn.ReLU(), nn.Linear(128, 128, bias=False)
        ).bfloat16()
        model = convert.convert(plain, recipe)
        with simulated.simulating(HOPPER):
            if not compiled:
                return passed(model, np.random.default_rng(0)), None
            with proof.trace_compiled(model) as trace:
                return passed(torch.compile(model, fullgraph=True), np.random.default_rng(0)), trace

    (eager, _), (graph, trace) = run(False), run(True)
    for mine, other in zip(eager, graph, strict=True):
        np.testing.assert_array_equal(wide(mine), wide(other))
    planned = dict.fromkeys(["0", "2"], recipe)
    assert proof.missing(trace, planned, "hopper") == []
    assert {g.plan for g in trace.gemms if g.fp8} == {"hopper"}


def test_a_gpu_is_refused(small, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "H100")
    with pytest.raises(ConfigError, match=r"torch has H100\. Hide it with CUDA_VISIBLE_DEVICES="):
        loop.trainer("torch", small.replace(numerics={"accumulate": "hopper"}))


@pytest.mark.parametrize("kind", ["ours", "torchao"])
def test_outside_the_scope_the_framework_multiplies(rng, kind):
    model = model_of("tensorwise", kind)
    before = passed(model, np.random.default_rng(0))[2]
    with simulated.simulating(HOPPER):
        within = passed(model, np.random.default_rng(0))[2]
    after = passed(model, np.random.default_rng(0))[2]
    assert torch.equal(before, after)
    assert not torch.equal(before, within)
