"""The trace of an eager step, under checkpointing and sharding too (spec B-8)."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.gemm.grouped_kernel import ScaledGroupedMm
from helpers.models.linears import run
from helpers.models.proofs import DISTINCT, WEIGHT_ONLY, expected, fp8, name_of, square, step
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torchao.float8.float8_linear import Float8Linear

from fp8ref.recipe import RECIPES
from fp8ref.torch import proof
from fp8ref.torch.experts import gemm as grouped_gemm
from fp8ref.torch.experts.layer import GroupedLinear
from fp8ref.torch.linear import linear
from fp8ref.torch.model import convert
from fp8ref.train.torch.trainer import Trainer


def hooks(model):
    return [
        h
        for m in model.modules()
        for h in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        if h
    ]


@pytest.mark.parametrize(
    "recipe",
    ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", DISTINCT, WEIGHT_ONLY],
    ids=name_of,
)
def test_every_planned_gemm_is_seen_and_no_bit_changes(recipe):
    x, g = torch.randn(128, 128).bfloat16(), torch.randn(128, 128).bfloat16()
    plain, watched = run(square(recipe), x, g), square(recipe)
    with proof.trace_eager(watched) as trace:
        results = run(watched, x, g)
    assert all(torch.equal(a, b) for a, b in zip(plain, results, strict=True))
    assert fp8(trace) == expected(recipe)
    assert len(trace.gemms) == 6
    assert proof.missing(trace, {"0": recipe, "2": recipe}) == []
    assert trace.pruned == set()
    assert not hooks(watched)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_products_that_a_kernel_scales_are_seen(recipe):  # G-5
    pytest.importorskip("triton")
    model = convert.convert(nn.Sequential(nn.Linear(32, 32)).bfloat16(), recipe, kernels="triton")
    with proof.trace_eager(model) as trace:
        step(model, torch.randn(32, 32).bfloat16().requires_grad_())
    assert proof.missing(trace, {"0": recipe}) == []


@pytest.mark.parametrize("recipe", ["bf16", "blockwise", "mxfp8"])
def test_gemms_in_high_precision_are_seen_as_such_and_not_asked_for(recipe):
    model = square(recipe)
    with proof.trace_eager(model) as trace:
        step(model, torch.randn(128, 128).bfloat16().requires_grad_())
    kind = "bf16" if recipe == "bf16" else "f32"
    assert {(g.a, g.b, g.accumulate, g.granularity) for g in trace.gemms} == {
        (kind, kind, None, None)
    }
    assert sorted(g.name for g in trace.gemms) == sorted(
        f"{i}/{which}" for i in "02" for which in RECIPES[recipe].gemms
    )
    assert proof.missing(trace, {"0": recipe, "2": recipe}) == []
    dequantized = proof.manifest(trace, {"0": recipe}, [])["on_dequantised_operands"]
    assert dequantized == (
        [] if recipe == "bf16" else ["0/output", "0/grad_input", "0/grad_weight"]
    )


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "mxfp8"])
def test_grouped_gemms_by_a_gpus_kernel_are_seen(recipe, monkeypatch):
    """Of ``tensorwise`` the output is the kernel's, and gradients in e5m2 are multiplied group by
    group.
    """
    kernel = ScaledGroupedMm()
    monkeypatch.setattr(torch, "_scaled_grouped_mm", kernel)
    monkeypatch.setattr(grouped_gemm, "_has_kernel", lambda device: True)
    experts = GroupedLinear(2, 32, 64, dtype=torch.bfloat16)
    torch.nn.init.normal_(experts.weight)
    model = convert.convert(nn.ModuleDict({"experts": experts}), recipe)
    x = torch.randn(40, 32, dtype=torch.bfloat16, requires_grad=True)
    with proof.trace_eager(model) as trace:
        model["experts"](
            x, torch.tensor([16, 40], dtype=torch.int32)
        ).float().square().sum().backward()
    assert kernel.calls == {"rowwise": 3, "tensorwise": 1, "mxfp8": 0}[recipe]
    assert [g.name for g in trace.gemms] == [
        "experts/output",
        "experts/grad_input",
        "experts/grad_weight",
    ]
    planned = {"experts": experts.recipe.recipe}
    assert proof.missing(trace, planned) == []
    assert fp8(trace) == (
        set() if recipe == "mxfp8" else expected(experts.recipe.recipe, ("experts",))
    )


def test_a_gradient_that_nobody_needs_is_pruned_and_not_missing():
    model = square("delayed")
    with proof.trace_eager(model) as trace:
        step(model)
    assert fp8(trace) == expected("delayed", without={"0/grad_input"})
    assert proof.manifest(trace, {"0": "delayed", "2": "delayed"}, [])["pruned"] == ["0/grad_input"]
    assert proof.missing(trace, {"0": "delayed", "2": "delayed"}) == []
    model[2].weight.requires_grad_(False)
    with proof.trace_eager(model) as trace:
        step(model)
    assert fp8(trace) == expected("delayed", without={"0/grad_input", "2/grad_weight"})
    assert trace.pruned == {"0/grad_input", "2/grad_weight"}
    # torchao multiplies, and autograd drops the result; in high precision too
    for recipe in (
        "tensorwise",
        dataclasses.replace(WEIGHT_ONLY, grad_weight=dataclasses.replace(DISTINCT.grad_input)),
    ):
        model = square(recipe)
        assert isinstance(model[0], Float8Linear)
        with proof.trace_eager(model) as trace:
            step(model)
        assert fp8(trace) == expected(recipe)
        assert len(trace.gemms) == 6
        assert trace.pruned == set()


def test_a_linear_that_trains_its_bias_alone_needs_no_gradient():
    model = nn.Sequential(linear.Linear(128, 128, "delayed"))
    model[0].weight.requires_grad_(False)
    with proof.trace_eager(model) as trace:
        step(model, torch.randn(128, 128))
    assert fp8(trace) == expected("delayed", layers="0", without={"0/grad_input", "0/grad_weight"})
    assert proof.missing(trace, {"0": "delayed"}) == []


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_trainers_step(recipe, small):
    """Whose weights are rounded copies of its parameters, put into the model for the forward
    pass.
    """
    trainer = Trainer(small.replace(numerics={"recipe": recipe}))
    with proof.trace_eager(trainer.model) as trace:
        trainer.gradients(np.random.default_rng(0).integers(0, 256, (4, 17)))
    planned = {decision.path: decision.recipe for decision in trainer.decisions if decision.fp8}
    assert fp8(trace) == expected(recipe, planned)
    assert proof.missing(trace, planned) == []


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_recomputed_forward_pass_is_no_backward_pass(recipe, reentrant):
    model, x = square(recipe), torch.randn(128, 128).bfloat16().requires_grad_()
    with proof.trace_eager(model) as trace:
        step(lambda x: checkpoint(model, x.sin(), use_reentrant=reentrant), x)
    assert fp8(trace) == expected(recipe)
    assert [g.which for g in trace.gemms].count("output") == 4
    assert len(trace.gemms) == 8
    assert proof.missing(trace, {"0": recipe, "2": recipe}) == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_product_of_no_linear_that_runs_again_is_none_of_a_linears_gradients(reentrant):
    """As a router's: the backward pass of the last linear is where the block runs again."""
    model, router = square("rowwise"), torch.randn(128, 128, requires_grad=True)
    x = torch.randn(128, 128).bfloat16().requires_grad_()

    def block(x):
        return model(x * torch.mm(x.float(), router).softmax(-1).bfloat16())

    with proof.trace_eager(model) as trace:
        step(lambda x: checkpoint(block, x, use_reentrant=reentrant), x)
    assert all(g.fp8 for g in trace.gemms)
    assert proof.missing(trace, {"0": "rowwise", "2": "rowwise"}) == []


def test_a_layer_used_twice_and_a_graph_run_twice():
    model, recipe = nn.Sequential(linear.Linear(128, 128, DISTINCT)), DISTINCT
    with proof.trace_eager(model) as trace:
        loss = model(model(torch.randn(128, 128).requires_grad_())).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert fp8(trace) == expected(recipe, layers="0")
    assert [g.which for g in trace.gemms] == ["output"] * 2 + ["grad_input", "grad_weight"] * 4


def test_an_error_in_a_step_leaves_no_hook_behind():
    model = square("tensorwise")

    def fail():
        with proof.trace_eager(model):
            model(torch.ones(128, 64).bfloat16())

    with pytest.raises(ValueError, match=r"^linear 0 takes x \["):
        fail()
    assert not hooks(model)
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def test_a_compiled_model_is_refused():
    model = square("tensorwise")
    model[2].compile(backend="eager")
    with (
        pytest.raises(ValueError, match=r"^2 is compiled.*proof\.trace_compiled"),
        proof.trace_eager(model),
    ):
        pass


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_sharded_and_checkpointed_layers_have_their_own_names(recipe, one_process):
    model = nn.Sequential(square(recipe), square(recipe)).float()
    layers = ("0.0", "0.2", "1.0", "1.2")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i in range(2):
        model[i] = checkpoint_wrapper(model[i])
        fully_shard(model[i], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    with proof.trace_eager(model) as trace:
        step(model)
    pruned = {"0.0/grad_input"} if recipe == "delayed" else set()
    assert fp8(trace) == expected(recipe, layers, without=pruned)
    assert trace.pruned == pruned
    assert proof.missing(trace, dict.fromkeys(layers, recipe)) == []
