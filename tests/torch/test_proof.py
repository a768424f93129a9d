"""What the proof sees of a step, and that it misses nothing when a fallback is planted (SEMANTICS B-8)."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from linears import run
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.recipe import RECIPES, CastSpec, GemmSpec, Recipe
from fp8ref.torch import layer, linear, proof
from fp8ref.torch.train import Trainer

NAMES = {"e4m3fn": "f8e4m3fn", "e5m2": "f8e5m2"}
E4, E5 = CastSpec(fmt=E4M3FN), CastSpec(fmt=E5M2)
# No two GEMMs alike, so that none is mistaken for another; the last under unit scales that are no rows'.
DISTINCT = Recipe(
    name="distinct",
    output=GemmSpec(a=E4, b=E5, accumulate="slow"),
    grad_input=GemmSpec(a=E5, b=E4, accumulate="fast"),
    grad_weight=GemmSpec(a=E5, b=E4, accumulate="slow", epilogue="unit_round_scale_round"),
)
WEIGHT_ONLY = dataclasses.replace(DISTINCT, name="weight_only", grad_input=GemmSpec())


def square(recipe):
    """Two linears of 128 x 128; with 128 tokens M = N = K."""
    torch.manual_seed(0)
    return linear.convert(nn.Sequential(nn.Linear(128, 128, bias=False), nn.ReLU(), nn.Linear(128, 128)).bfloat16(), recipe)


def expected(recipe, layers=("0", "2"), without=()):
    """The FP8 GEMMs of a recipe, as the proof describes them."""
    recipe = RECIPES[recipe] if isinstance(recipe, str) else recipe
    return {
        (f"{name}/{which}", NAMES[spec.a.fmt.name], NAMES[spec.b.fmt.name], spec.accumulate, "rowwise" if spec.rowwise else "tensorwise")
        for name in layers
        for which, spec in recipe.gemms.items()
        if spec.fp8 and f"{name}/{which}" not in without
    }


def name_of(recipe):
    return getattr(recipe, "name", recipe)


def fp8(seen):
    return {(g.name, g.a, g.b, g.accumulate, g.granularity) for g in seen.gemms if g.fp8}


def step(module, x=None):
    module(torch.randn(128, 128).bfloat16() if x is None else x).float().square().sum().backward()


def hooks(model):
    return [h for m in model.modules() for h in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks) if h]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", DISTINCT, WEIGHT_ONLY], ids=name_of)
def test_every_planned_gemm_is_seen_and_no_bit_changes(recipe):
    x, g = torch.randn(128, 128).bfloat16(), torch.randn(128, 128).bfloat16()
    plain, watched = run(square(recipe), x, g), square(recipe)
    with proof.watching(watched) as seen:
        results = run(watched, x, g)
    assert all(torch.equal(a, b) for a, b in zip(plain, results, strict=True))
    assert fp8(seen) == expected(recipe)
    assert len(seen.gemms) == 6
    assert proof.missing(seen, {"0": recipe, "2": recipe}) == []
    assert seen.pruned == set()
    assert not hooks(watched)


@pytest.mark.parametrize("recipe", ["bf16", "blockwise", "mxfp8"])
def test_gemms_in_high_precision_are_seen_as_such_and_not_asked_for(recipe):
    model = square(recipe)
    with proof.watching(model) as seen:
        step(model, torch.randn(128, 128).bfloat16().requires_grad_())
    kind = "bf16" if recipe == "bf16" else "f32"
    assert {(g.a, g.b, g.accumulate, g.granularity) for g in seen.gemms} == {(kind, kind, None, None)}
    assert sorted(g.name for g in seen.gemms) == sorted(f"{i}/{which}" for i in "02" for which in RECIPES[recipe].gemms)
    assert proof.missing(seen, {"0": recipe, "2": recipe}) == []
    dequantised = proof.manifest(seen, {"0": recipe}, [])["on_dequantised_operands"]
    assert dequantised == ([] if recipe == "bf16" else ["0/output", "0/grad_input", "0/grad_weight"])


def test_a_gradient_that_nobody_needs_is_pruned_and_not_missing():
    model = square("delayed")
    with proof.watching(model) as seen:
        step(model)
    assert fp8(seen) == expected("delayed", without={"0/grad_input"})
    assert proof.manifest(seen, {"0": "delayed", "2": "delayed"}, [])["pruned"] == ["0/grad_input"]
    assert proof.missing(seen, {"0": "delayed", "2": "delayed"}) == []
    model[2].weight.requires_grad_(False)
    with proof.watching(model) as seen:
        step(model)
    assert fp8(seen) == expected("delayed", without={"0/grad_input", "2/grad_weight"})
    assert seen.pruned == {"0/grad_input", "2/grad_weight"}
    # torchao multiplies, and autograd drops the result; in high precision too
    for recipe in ("tensorwise", dataclasses.replace(WEIGHT_ONLY, grad_weight=dataclasses.replace(DISTINCT.grad_input))):
        model = square(recipe)
        assert isinstance(model[0], Float8Linear)
        with proof.watching(model) as seen:
            step(model)
        assert fp8(seen) == expected(recipe)
        assert len(seen.gemms) == 6
        assert seen.pruned == set()


def test_a_linear_that_trains_its_bias_alone_needs_no_gradient():
    model = nn.Sequential(layer.Linear(128, 128, "delayed"))
    model[0].weight.requires_grad_(False)
    with proof.watching(model) as seen:
        step(model, torch.randn(128, 128))
    assert fp8(seen) == expected("delayed", layers="0", without={"0/grad_input", "0/grad_weight"})
    assert proof.missing(seen, {"0": "delayed"}) == []


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_trainers_step(recipe, small):
    """Whose weights are rounded copies of its parameters, put into the model for the forward pass."""
    trainer = Trainer(small.replace(numerics={"recipe": recipe}))
    with proof.watching(trainer.model) as seen:
        trainer.gradients(np.random.default_rng(0).integers(0, 256, (4, 17)))
    planned = {decision.path: decision.recipe for decision in trainer.decisions if decision.fp8}
    assert fp8(seen) == expected(recipe, planned)
    assert proof.missing(seen, planned) == []


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_recomputed_forward_pass_is_no_backward_pass(recipe, reentrant):
    model, x = square(recipe), torch.randn(128, 128).bfloat16().requires_grad_()
    with proof.watching(model) as seen:
        step(lambda x: checkpoint(model, x.sin(), use_reentrant=reentrant), x)
    assert fp8(seen) == expected(recipe)
    assert [g.which for g in seen.gemms].count("output") == 4
    assert len(seen.gemms) == 8
    assert proof.missing(seen, {"0": recipe, "2": recipe}) == []


def test_a_layer_used_twice_and_a_graph_run_twice():
    model, recipe = nn.Sequential(layer.Linear(128, 128, DISTINCT)), DISTINCT
    with proof.watching(model) as seen:
        loss = model(model(torch.randn(128, 128).requires_grad_())).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert fp8(seen) == expected(recipe, layers="0")
    assert [g.which for g in seen.gemms] == ["output"] * 2 + ["grad_input", "grad_weight"] * 4


@pytest.mark.parametrize("which", ["emulated", "plain", "accumulation", "gone"])
def test_a_planted_fallback_is_missing(which):
    model, plan = square("tensorwise"), {"0": "tensorwise", "2": "tensorwise"}
    bare = nn.Linear(128, 128, bias=False).bfloat16()
    gemms = [("output", "f8e4m3fn x f8e4m3fn, fast"), ("grad_input", "f8e5m2 x f8e4m3fn, slow"), ("grad_weight", "f8e5m2 x f8e4m3fn, slow")]
    if which == "emulated":
        model[2], have = Float8Linear.from_float(bare, Float8LinearConfig(emulate=True)), "f32 x f32"
    elif which == "plain":
        model[2], have = bare, "bf16 x bf16"
    elif which == "gone":
        model[2], have = nn.Identity(), "no GEMM of it was seen"
    else:
        slow = dataclasses.replace(RECIPES["tensorwise"].output, accumulate="slow")
        model[2] = square(dataclasses.replace(RECIPES["tensorwise"], output=slow))[2]
        gemms, have = gemms[:1], "f8e4m3fn x f8e4m3fn, slow, tensorwise"
    with proof.watching(model) as seen:
        step(model)
    assert proof.missing(seen, plan) == [f"2/{gemm}: planned {wanted}, tensorwise; {have}" for gemm, wanted in gemms]


def test_another_granularity_and_a_backward_pass_that_never_ran_are_missing():
    model = square("rowwise")
    with proof.watching(model) as seen:
        model(torch.randn(128, 128).bfloat16())
    assert proof.missing(seen, {"2": "rowwise"}) == [
        f"2/{which}: planned f8e4m3fn x f8e4m3fn, slow, rowwise; no GEMM of it was seen" for which in ("grad_input", "grad_weight")
    ]
    assert proof.missing(seen, {"2": "tensorwise"})[0] == (
        "2/output: planned f8e4m3fn x f8e4m3fn, fast, tensorwise; f8e4m3fn x f8e4m3fn, fast, rowwise"
    )


def test_one_fallback_among_many_steps_is_missing():
    model = square("tensorwise")
    with proof.watching(model) as seen:
        step(model)
        model[2].linear_mm_config = model[2].linear_mm_config._replace(
            output=model[2].linear_mm_config.output._replace(use_fast_accum=False)
        )
        step(model)
    assert proof.missing(seen, {"0": "tensorwise", "2": "tensorwise"}) == [
        "2/output: planned f8e4m3fn x f8e4m3fn, fast, tensorwise; f8e4m3fn x f8e4m3fn, slow, tensorwise"
    ]


def test_the_manifest_has_each_gemm_once():
    model = square("rowwise_with_gw_hp")
    with proof.watching(model) as seen:
        step(model)
        step(model)
    found = proof.manifest(seen, {"2": "rowwise_with_gw_hp"}, ["a line"])
    assert list(found) == ["read_from", "gemms", "on_dequantised_operands", "pruned", "gathers", "missing"]
    assert (found["read_from"], found["missing"]) == ("eager dispatch", ["a line"])
    assert found["gemms"] == [
        {"gemm": "2/output", "a": "f8e4m3fn", "b": "f8e4m3fn", "accumulate": "fast", "granularity": "rowwise", "fp8": True},
        {"gemm": "2/grad_input", "a": "f8e4m3fn", "b": "f8e4m3fn", "accumulate": "slow", "granularity": "rowwise", "fp8": True},
        {"gemm": "2/grad_weight", "a": "bf16", "b": "bf16", "accumulate": None, "granularity": None, "fp8": False},
    ]


def test_an_error_in_a_step_leaves_no_hook_behind():
    model = square("tensorwise")

    def fail():
        with proof.watching(model):
            model(torch.ones(128, 64).bfloat16())

    with pytest.raises(RuntimeError):
        fail()
    assert not hooks(model)
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def test_a_compiled_model_is_refused():
    model = square("tensorwise")
    model[2].compile(backend="eager")
    with pytest.raises(ValueError, match=r"^2 is compiled.*proof\.compiled"), proof.watching(model):
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
    with proof.watching(model) as seen:
        step(model)
    pruned = {"0.0/grad_input"} if recipe == "delayed" else set()
    assert fp8(seen) == expected(recipe, layers, without=pruned)
    assert seen.pruned == pruned
    assert proof.missing(seen, dict.fromkeys(layers, recipe)) == []


compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")


class Block(nn.Module):
    def __init__(self, recipe):
        super().__init__()
        self.mlp = square(recipe)

    def forward(self, x):
        return self.mlp(x)


class Blocks(nn.Module):
    """Two blocks of two linears; recomputed in the backward pass, or not."""

    LAYERS = ("blocks.0.mlp.0", "blocks.0.mlp.2", "blocks.1.mlp.0", "blocks.1.mlp.2")

    def __init__(self, recipe, recompute=False):
        super().__init__()
        self.blocks, self.recompute = nn.ModuleList([Block(recipe), Block(recipe)]), recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", DISTINCT], ids=name_of)
def test_compiled_gemms_are_seen_though_the_cache_has_them(recipe, fresh):
    model = square(recipe)
    x = torch.randn(128, 128).bfloat16()
    step(torch.compile(model), x)
    torch._dynamo.reset()
    with proof.compiled(model) as seen:
        step(torch.compile(model), x)
    assert seen.read_from == "inductor post-grad graphs"
    assert fp8(seen) == expected(recipe, without={"0/grad_input"})
    assert seen.pruned == {"0/grad_input"}
    assert proof.missing(seen, {"0": recipe, "2": recipe}) == []


@compiles
@pytest.mark.slow
def test_compiled_and_recomputed_a_forward_pass_is_no_backward_pass(fresh):
    model = Blocks("delayed", recompute=True)
    with proof.compiled(model) as seen:
        step(torch.compile(lambda x: model(x)))
    assert fp8(seen) == expected("delayed", Blocks.LAYERS, without={"blocks.0.mlp.0/grad_input"})
    assert [g.which for g in seen.gemms].count("output") > 4
    assert proof.missing(seen, dict.fromkeys(Blocks.LAYERS, "delayed")) == []


@compiles
@pytest.mark.slow
def test_blocks_compiled_on_their_own_share_a_graph(fresh):
    model = Blocks("tensorwise")
    for block in model.blocks:
        block.compile()
    with proof.compiled(model) as seen:
        step(model, torch.randn(128, 128).bfloat16().requires_grad_())
    assert fp8(seen) == expected("tensorwise", Blocks.LAYERS)
    assert len(seen.gemms) == 12
    assert proof.missing(seen, dict.fromkeys(Blocks.LAYERS, "tensorwise")) == []


@compiles
@pytest.mark.slow
def test_planted_fallbacks_are_missing_from_a_compiled_model_too(fresh):
    model = square("tensorwise")
    model[0] = Float8Linear.from_float(nn.Linear(128, 128, bias=False).bfloat16(), Float8LinearConfig(emulate=True))
    model[2] = nn.Linear(128, 128, bias=False).bfloat16()
    with proof.compiled(model) as seen:
        step(torch.compile(model))
    lines = proof.missing(seen, dict.fromkeys(("0", "2", "3"), "tensorwise"))
    assert [line.partition(":")[0] for line in lines] == [
        *("0/output", "0/grad_weight"),
        *(f"{i}/{which}" for i in (2, 3) for which in ("output", "grad_input", "grad_weight")),
    ]
    assert [line.partition("; ")[2] for line in lines] == ["f32 x f32"] * 2 + ["bf16 x bf16"] * 3 + ["no GEMM of it was seen"] * 3
