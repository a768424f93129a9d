"""What selective checkpointing keeps and what runs again, by operator (spec T-8)."""

import collections
import dataclasses
import functools

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from helpers.processes.live_bytes import LiveBytes
from helpers.processes.ranks import run
from torch import distributed, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fp8ref.recipe import RECIPES
from fp8ref.spec.attention.call import Call
from fp8ref.torch import delayed
from fp8ref.torch.attention import attention
from fp8ref.torch.experts import grouped
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.model import checkpointing, convert
from fp8ref.torch.model.parallel import Parallelism, parallelize

_ROWWISE = RECIPES["rowwise"]
SLOW = dataclasses.replace(  # fp8ref's own linear scales the result of this GEMM (G-5)
    _ROWWISE,
    name="slow",
    output=dataclasses.replace(
        _ROWWISE.output, accumulate="slow", epilogue="unit_round_scale_round"
    ),
)

ALL_REDUCE, REDUCE_SCATTER = (
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)


class Block(nn.Module):
    """Attention and a linear, with biases: [B, T, 128] -> the same."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 384, bias=bias), nn.Linear(128, 128, bias=bias)

    def forward(self, x):
        heads = (
            self.qkv(functional.layer_norm(x, x.shape[-1:]))
            .unflatten(-1, (3, 4, 32))
            .permute(2, 0, 3, 1, 4)
        )
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Counts(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.found = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[func] += 1
        return func(*args, **(kwargs or {}))


def made(recipe, how, mesh=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(bias=False)).bfloat16()
    parallelism = Parallelism(checkpointing=how, **options)
    return parallelize(model, recipe, mesh=mesh, blocks=list(model), parallelism=parallelism)


def step(model):
    """Loss, gradients and observations of one step."""
    loss = (
        model(
            torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(1))
            .bfloat16()
            .requires_grad_()
        )
        .float()
        .square()
        .mean()
    )
    loss.backward()
    seen = [state.seen.clone() for _, state in delayed.states(model)]
    return [loss.detach(), *(p.grad for p in model.parameters()), *seen]


def counted(recipe, how, **options):
    """How often operators of each name in OPERATORS, and those of amaxes, ran in a step; and its
    results.
    """
    model = made(recipe, how, **options)
    with Counts() as counts:
        results = step(model)
    operators = checkpointing.OPERATORS | {"amaxes": checkpointing.AMAXES}
    return {name: sum(counts.found[op] for op in ops) for name, ops in operators.items()}, results


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.grid(4)
@pytest.mark.parametrize(
    "recipe",
    ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", SLOW],
    ids=str,
)
@pytest.mark.parametrize("own", [False, True], ids=["converted", "own linear"])
def test_what_is_kept_runs_once_and_no_bit_changes(recipe, own, monkeypatch):  # T-8, H-11
    if own:
        monkeypatch.setattr("fp8ref.torch.linear.torchao_linear.expresses", lambda recipe: False)
    plain, results = counted(recipe, "none")
    selective, again = counted(recipe, "selective")
    assert selective == plain
    assert equal(again, results)
    full, again = counted(recipe, "full")
    assert equal(again, results)
    # what comes after the last tensor that a block saves, such as the product of its last linear,
    # torch does not run again
    assert full["linears"] >= plain["linears"] + 2
    assert full["attention"] == plain["attention"] + 2
    assert full["amaxes"] >= plain["amaxes"]


@pytest.mark.parametrize(
    ("keep", "linears", "attention"),
    [
        (("attention",), True, False),
        ("linears", False, True),
        ((), True, True),
        ([torch.ops.aten.mm.default], False, True),
    ],
    ids=str,
)
def test_each_operation_is_kept_by_its_name(keep, linears, attention):  # T-8
    """torch sees a product of torchao's tensors as mm."""
    plain, results = counted("tensorwise", "none")
    found, again = counted("tensorwise", "selective", keep=keep)
    assert (found["linears"] > plain["linears"], found["attention"] > plain["attention"]) == (
        linears,
        attention,
    )
    assert found["amaxes"] == plain["amaxes"]  # always kept
    assert equal(again, results)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_policy_that_keeps_every_result_changes_no_bit(recipe):  # T-8, H-11
    """Two uses of a linear, which observe one state."""
    model = convert.convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), recipe)
    x, found = torch.randn(16, 64), []
    every = functools.partial(
        create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.PREFER_SAVE
    )
    for twice in (
        lambda x: model(model(x)),
        lambda x: checkpoint(lambda x: model(model(x)), x, use_reentrant=False, context_fn=every),
    ):
        model.zero_grad()
        delayed.forget(model)
        twice(x.clone().requires_grad_()).square().sum().backward()
        found.append(
            [
                *(p.grad for p in model.parameters()),
                *(state.seen.clone() for _, state in delayed.states(model)),
            ]
        )
    assert equal(*found)


def alive(how, blocks, **options):
    """Bytes that a forward pass of so many blocks leaves, of 128 tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks))).bfloat16()
    parallelize(
        model, "rowwise", blocks=list(model), parallelism=Parallelism(checkpointing=how, **options)
    )
    x = torch.randn(2, 64, 128).bfloat16().requires_grad_()
    with LiveBytes() as live:
        loss = model(x).sum()
        assert loss.requires_grad
        return live.now


@pytest.mark.parametrize(
    ("keep", "features"),
    [
        ((), 128),
        (("attention",), 128 + 128),
        (("linears",), 128 + 384 + 128),
        (("linears", "attention"), 128 + 384 + 128 + 128),
    ],
    ids=str,
)
def test_the_memory_of_a_block_is_its_input_and_what_is_kept(keep, features):  # T-8
    """bfloat16.

    Besides: attention's log-sum, float32 for each of 4 heads, and the bfloat16 amaxes of 2 inputs
    by rows, and of 512 + 128 weights.
    """
    found = alive("selective", 3, keep=keep) - alive("selective", 2, keep=keep)
    log_sums, amaxes = 4 * 4 * ("attention" in keep), 2 * 2
    assert (
        128 * (2 * features + log_sums + amaxes)
        <= found
        <= 128 * (2 * features + log_sums + amaxes) + 2 * 640 + 512
    )


@pytest.mark.parametrize("recipe", [None, "rowwise", "rowwise_with_gw_hp"])
def test_experts_products_are_kept(recipe):  # T-8, X-2
    torch.manual_seed(0)
    x, weights = (
        torch.randn(*shape).bfloat16().requires_grad_() for shape in ((32, 64), (2, 64, 32))
    )
    ends = torch.tensor([16, 32], dtype=torch.int32)

    def experts(x):
        if recipe is not None:
            return functional.silu(grouped.apply(x, weights.mT, ends, recipe=recipe)).sum()
        return functional.silu(torch._grouped_mm(x, weights, offs=ends)).sum()

    def ran(how):
        with Counts() as counts:
            checkpointing.checkpointed(experts, how)(x).backward()
        return sum(n for op, n in counts.found.items() if op in checkpointing.OPERATORS["linears"])

    assert ran("full") == ran("selective") + 1


def over_ranks():
    """Collectives in a step, and its results, without checkpointing and with it."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    found = {}
    for how in ("none", "selective", "full"):
        model = made("tensorwise", how, mesh=mesh, amax_scope="global")
        with Counts() as counts:
            loss, *_ = step(model)
        found[how] = (
            sum(counts.found[op] for op in (ALL_REDUCE, REDUCE_SCATTER)),
            [loss, *(p.grad.to_local() for p in model.parameters())],
        )
    return found


@pytest.mark.parametrize("arithmetic", ["stated", "fast"])
def test_tiles_of_attention_run_again(arithmetic):  # T-8, A-18
    """Scores kept tile by tile would be scores kept whole."""
    heads = [
        torch.randn(1, 1, 32, 16, generator=torch.Generator().manual_seed(i))
        .bfloat16()
        .requires_grad_()
        for i in range(3)
    ]

    call = Call(variant="cudnn", arithmetic=arithmetic)

    def forward(q, k, v):
        return attention.apply(q, k, v, variant=call)

    def products(run) -> int:
        with Counts() as counts:
            run()
        return sum(
            n
            for op, n in counts.found.items()
            if str(op).startswith(("aten._scaled_mm", "aten.bmm"))
        )

    def trained(how) -> int:
        return products(
            lambda: checkpointing.checkpointed(forward, how)(*heads).float().sum().backward()
        )

    with torch.no_grad():
        of_forward = products(lambda: forward(*heads))
    assert of_forward > 0
    assert trained("selective") == trained("full") == trained("none") + of_forward


def test_no_rank_waits_for_an_amax_twice():  # T-8, P-2
    for found in run(2, over_ranks):
        assert found["selective"][0] == found["none"][0] < found["full"][0]
        assert equal(found["selective"][1], found["none"][1])
        assert equal(found["full"][1], found["none"][1])


def cut():
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tensor",))
    found = {}
    for how in ("none", "selective", "full"):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Sequential(
                nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False), nn.SiLU()
            )
        ).bfloat16()
        plan = {"0.0": "colwise", "0.2": "rowwise"}
        parallelize(
            model,
            "tensorwise",
            mesh=mesh,
            blocks=[model[0]],
            parallelism=Parallelism(checkpointing=how, tensor_plan=plan),
        )
        with Counts() as counts:
            loss = model(torch.ones(1, 32, 64).bfloat16().requires_grad_()).float().square().sum()
            loss.backward()
        found[how] = (
            sum(counts.found[op] for op in (ALL_REDUCE, REDUCE_SCATTER)),
            [loss.detach(), *(p.grad.to_local() for p in model.parameters())],
        )
    return found


def test_sums_of_tensor_parallelism_are_kept():  # T-8, P-14
    for found in run(2, cut):
        assert found["selective"][0] == found["none"][0] < found["full"][0]
        assert equal(found["selective"][1], found["none"][1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"checkpointing": "selective", "keep": ["linear"]},
            "linears, attention or a torch operator; got 'linear'",
        ),
        (
            {"checkpointing": "full", "keep": ["linears"]},
            r"got 'full' and \('linears',\)\. Use 'selective', or drop keep",
        ),
    ],
    ids=str,
)
def test_what_nothing_reads_is_refused(options, message):
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 16)))
    with pytest.raises(ValueError, match=message):
        parallelize(model, "tensorwise", blocks=[model[0]], parallelism=Parallelism(**options))
    assert type(model[0][0]) is nn.Linear


def test_a_policy_serves_torchs_own_functions():
    """As torchtitan applies it, around a module that was converted by hand."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    plain, results = counted("blockwise", "none")
    torch.manual_seed(0)
    model = convert.convert(nn.Sequential(Block(), Block(bias=False)).bfloat16(), "blockwise")
    for i, block in enumerate(model):
        model[i] = checkpoint_wrapper(
            block, context_fn=lambda: create_selective_checkpoint_contexts(checkpointing.policy())
        )
    with Counts() as counts:
        again = step(model)
    assert equal(again, results)
    assert sum(counts.found[op] for op in checkpointing.OPERATORS["linears"]) == plain["linears"]


def operators_of_compiled(kernels: str, mode: str) -> dict[str, list[int]]:
    """How often the forward and the backward graph of a checkpointed rowwise linear call operators,
    by name."""
    graphs: list[collections.Counter] = []

    def compiler(graph, _):
        graphs.append(
            collections.Counter(
                node.target.name().split("::")[1].removesuffix(".default")
                for node in graph.graph.nodes
                if isinstance(node.target, torch._ops.OpOverload)
            )
        )
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition
    )
    linear = Linear.of(nn.Linear(64, 64, dtype=torch.bfloat16), "rowwise", kernels=kernels)
    block = checkpointing.checkpointed(lambda x: linear(functional.silu(x)), mode)
    torch._dynamo.reset()
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    torch.compile(block, backend=backend, fullgraph=True)(x).sum().backward()
    names = ("_scaled_mm", "amax_lines", "cast_lines_by_amaxes")
    return {name: [counted[name] for counted in graphs] for name in names}


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_compiled_checkpoints_know_the_operators_of_kernels(mode):
    """Selective checkpointing keeps the GEMM and the amaxes; casts run again."""
    pytest.importorskip("triton")
    found = operators_of_compiled("triton", mode)
    assert found["_scaled_mm"] == [1, 2]
    assert found["amax_lines"] == [2, 1]
    assert found["cast_lines_by_amaxes"] == ([2, 1] if mode == "none" else [2, 3])
