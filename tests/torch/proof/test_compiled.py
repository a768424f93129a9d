"""The trace of a compiled step's graphs (spec B-8)."""

import pytest
import torch
import torch._inductor.config as inductor_config
from helpers.models.proofs import DISTINCT, expected, fp8, name_of, square, step
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

from fp8ref.torch import proof
from fp8ref.torch.gemm.kind import GemmKind
from fp8ref.torch.proof import compiled, records

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch", "ignore::UserWarning:torch"
)


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


PASSES = ("joint_custom_pre_pass", "post_grad_custom_post_pass")


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_passes_that_were_there_run_first_and_remain():
    ran, model = [], square("tensorwise")
    earlier = {
        name: lambda graph, name=name: ran.append((name, len(graph.nodes))) for name in PASSES
    }
    with inductor_config.patch(earlier):
        with proof.trace_compiled(model) as trace:
            passes = [getattr(inductor_config, name) for name in PASSES]
            for run in passes:
                run(torch.fx.Graph())
            # inductor then leaves its caches alone
            assert [run.uuid() for run in passes] == [None, None]
        assert ran == [(name, 0) for name in PASSES]
        assert trace.gemms == []
        assert {name: getattr(inductor_config, name) for name in PASSES} == earlier


@pytest.mark.parametrize(
    "operator",
    [records.GROUPED_GEMM, records.SCALED_GROUPED_MM, records.GROUPED_DEEP_GEMM],
    ids=str,
)
def test_grouped_gemms_of_a_graph_say_how_they_run(operator):
    """Of a graph with each operator, as ``make_fx`` makes it of fake tensors: codes [M, K] x [E, N,
    K] -> [M, N].
    """
    a, b = (
        torch.zeros(16, 128).to(torch.float8_e4m3fn),
        torch.zeros(2, 256, 128).to(torch.float8_e4m3fn),
    )
    scales, ends = (
        (torch.ones(16, 1), torch.ones(2, 256, 1)),
        torch.tensor([8, 16], dtype=torch.int32),
    )

    kind = GemmKind("rowwise", "rowwise", "slow", "scale_then_round").text

    def product(a, b, scale_a, scale_b, ends):
        if operator is records.GROUPED_DEEP_GEMM:
            return operator(a, scale_a, b, scale_b, ends, ends, 256)
        if operator is records.SCALED_GROUPED_MM:
            return operator(a, scale_a, b, scale_b, ends, kind)
        return operator("output", a, scale_a, b, scale_b, ends, kind, torch.bfloat16)

    graph = make_fx(product, tracing_mode="fake")(a, b, *scales, ends).graph
    (node,) = (node for node in graph.nodes if node.target is operator)
    assert tuple(node.meta["val"].shape) == (16, 256)
    assert [records.type_name(x.meta["val"].dtype) for x in compiled._operands(node)] == [
        "f8e4m3fn",
        "f8e4m3fn",
    ]
    blocks = ("blocks, DeepGEMM", "blockwise_1x128 x blockwise_128x128", None)
    assert compiled._numerics(node) == (
        blocks if operator is records.GROUPED_DEEP_GEMM else ("slow", "rowwise", None)
    )


def test_a_graph_counts_for_called_blocks_of_equal_recipes(fresh):
    """Of blocks by tensorwise, tensorwise, bfloat16 and tensorwise, the last of which is not
    called.
    """
    model = Blocks("tensorwise")
    model.blocks.extend([Block("tensorwise"), Block("tensorwise")])
    for i in (0, 2):
        model.blocks[2].mlp[i] = nn.Linear(128, 128, bias=False).bfloat16()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="eager")
    forwards = [block.forward for block in model.blocks]

    def product(layer, dtype):
        graph = torch.fx.Graph()
        operands = [graph.placeholder(name) for name in "ab"]
        for operand in operands:
            operand.meta["val"] = torch.zeros(16, 16, dtype=dtype)
        graph.call_function(torch.ops.aten.mm.default, tuple(operands)).meta[compiled._LABEL] = (
            layer,
            "output",
        )
        return graph

    with proof.trace_compiled(model) as trace:
        for block in model.blocks[:3]:
            block(torch.randn(16, 128).bfloat16())
        for graph in (
            product("blocks.0.mlp.0", torch.float8_e4m3fn),
            product("blocks.2.mlp.0", torch.bfloat16),
        ):
            inductor_config.post_grad_custom_post_pass(graph)
    assert [(gemm.layer, gemm.a) for gemm in trace.gemms] == [
        *(("blocks.0.mlp.0", "f8e4m3fn"), ("blocks.1.mlp.0", "f8e4m3fn")),
        ("blocks.2.mlp.0", "bf16"),
    ]
    assert [block.forward for block in model.blocks] == forwards


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", DISTINCT], ids=name_of)
def test_compiled_gemms_are_seen_though_the_cache_has_them(recipe, fresh):
    model = square(recipe)
    x = torch.randn(128, 128).bfloat16()
    step(torch.compile(model), x)
    torch._dynamo.reset()
    with proof.trace_compiled(model) as trace:
        step(torch.compile(model), x)
    assert trace.read_from == "inductor post-grad graphs"
    assert fp8(trace) == expected(recipe, without={"0/grad_input"})
    assert trace.pruned == {"0/grad_input"}
    assert proof.missing(trace, {"0": recipe, "2": recipe}) == []


@pytest.mark.slow
def test_compiled_and_recomputed_a_forward_pass_is_no_backward_pass(fresh):
    model = Blocks("delayed", recompute=True)
    with proof.trace_compiled(model) as trace:
        step(torch.compile(lambda x: model(x)))
    assert fp8(trace) == expected("delayed", Blocks.LAYERS, without={"blocks.0.mlp.0/grad_input"})
    assert [g.which for g in trace.gemms].count("output") > 4
    assert proof.missing(trace, dict.fromkeys(Blocks.LAYERS, "delayed")) == []


@pytest.mark.slow
def test_blocks_compiled_on_their_own_share_a_graph(fresh):
    model = Blocks("tensorwise")
    model.spare = Block("tensorwise")
    for block in (*model.blocks, model.spare):
        block.compile()
    with proof.trace_compiled(model) as trace:
        step(model, torch.randn(128, 128).bfloat16().requires_grad_())
    assert fp8(trace) == expected("tensorwise", Blocks.LAYERS)
    assert len(trace.gemms) == 12
    assert proof.missing(trace, dict.fromkeys(Blocks.LAYERS, "tensorwise")) == []


@pytest.mark.slow
def test_planted_fallbacks_are_missing_from_a_compiled_model_too(fresh):
    model = square("tensorwise")
    model[0] = Float8Linear.from_float(
        nn.Linear(128, 128, bias=False).bfloat16(), Float8LinearConfig(emulate=True)
    )
    model[2] = nn.Linear(128, 128, bias=False).bfloat16()
    with proof.trace_compiled(model) as trace:
        step(torch.compile(model))
    lines = proof.missing(trace, dict.fromkeys(("0", "2", "3"), "tensorwise"))
    assert [line.partition(":")[0] for line in lines] == [
        *("0/output", "0/grad_weight"),
        *(f"{i}/{which}" for i in (2, 3) for which in ("output", "grad_input", "grad_weight")),
    ]
    assert [line.partition("; ")[2] for line in lines] == ["f32 x f32"] * 2 + [
        "bf16 x bf16"
    ] * 3 + ["no GEMM of it was seen"] * 3
