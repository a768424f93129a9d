"""What torch.compile makes of models in FP8, sharded or not: how many graphs, of what, and their
bits.
"""

import functools
import itertools
import json
import re

import pytest
import torch
import torch._inductor.config as inductor_config
from helpers.models.compiling import parallelize_by
from helpers.processes.compiled import SCRIPT, matrix, said
from helpers.processes.ranks import run
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from fp8ref.torch import delayed
from fp8ref.torch.model import convert
from fp8ref.torch.model.parallel import Parallelism, parallelize
from fp8ref.train.config.sections import ParallelConfig
from fp8ref.train.torch import trainer as train
from fp8ref.train.torch.llama import model as llama_model

ASKED = list(itertools.product(matrix.RECIPES, matrix.HOW, matrix.GATHERS))
# Every two values of two choices meet in these.
PAIRS = [
    cell
    for cell in ASKED
    if (matrix.RECIPES.index(cell[0]) + matrix.HOW.index(cell[1]) + matrix.GATHERS.index(cell[2]))
    % 2
    == 0
]

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is deprecated:DeprecationWarning",  # torch, as it imports its backends
    # dynamo looks whether there is one
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)

# Of the model's three linears, of which the first needs no grad_input: 3 + 2 + 3 GEMMs. The two
# blocks are two pairs of graphs, for the first one's input needs no gradient, and the last linear
# is in none.
GRAPHS = {"block": (4, 2 + 3), "model": (2, 8), "traced": (2, 8)}
# of weights and biases, in a rank's shards
ELEMENTS = ((2 * 64 * 64 + 32 * 64) // 2, (2 * 64 + 32) // 2)


def expected(recipe, how, gather):
    graphs, gemms = GRAPHS[how]
    collectives = (
        {"all_gather": 6, "reduce_scatter": 6}
        if how == "traced"
        else {"all_gather": 0, "reduce_scatter": 0}
    )
    # one all-reduce of those of all weights
    amaxes = int((recipe, how, gather) == ("tensorwise", "traced", "fp8"))
    # FSDP2 gathers for the backward pass too; a weight is a byte an element in FP8.
    gathered = (ELEMENTS[0] * (1 if gather == "fp8" else 2) + ELEMENTS[1] * 2) * (
        1 if how == "traced" else 2
    )
    counted = {
        "graphs": graphs,
        "graph_breaks": 0,
        "scaled_mm": gemms,
        "all_reduce": amaxes,
        "gathered_bytes": gathered,
        "differs": [],
    }
    return {"recipe": recipe, "compiled": how, "gather": gather, **collectives, **counted}


@functools.cache
def aot_eager(cells):
    return run(2, matrix.cells, "aot_eager", cells, timeout=400)


@pytest.mark.parametrize(
    ("recipe", "how", "gather"),
    [*PAIRS, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ASKED if cell not in PAIRS)],
)
def test_aot_eager_is_eager_in_as_few_graphs(recipe, how, gather):  # P-12, P-18
    cell = (recipe, how, gather)
    cells = tuple(PAIRS) if cell in PAIRS else (cell,)
    for rows in aot_eager(cells):
        assert rows[cells.index(cell)] == {"backend": "aot_eager", **expected(*cell)}


@pytest.mark.slow
def test_inductor_is_eager_under_emulated_casts():  # P-18
    asked = [("tensorwise", "block", "fp8"), ("delayed", "traced", "fp8")]
    for rows in run(2, matrix.cells, "inductor", asked, timeout=600):
        assert rows == [{"backend": "inductor", **expected(*cell)} for cell in asked]


@pytest.mark.slow
def test_whole_blocks_under_inductor_lie_within_the_bounds():  # B-9
    for row in matrix.llama("tensorwise", [("block", True), ("block", False)]):
        assert_bounded(row)


def assert_bounded(row):
    assert row["graphs"] == 2  # with gradients and without
    assert max(row[what] for what in ("logits", "loss", "gradients")) <= 1, row


def test_the_kept_matrix_is_what_is_expected():
    kept = json.loads((SCRIPT.parents[1] / "results" / "compile_matrix.json").read_text())
    rows = [
        {"backend": backend, **expected(*cell)}
        for backend, cell in itertools.product(matrix.BACKENDS, ASKED)
    ]
    assert kept["rows"] == rows
    asked = itertools.product(matrix.BLOCK_RECIPES, ("block", "model"), (True, False))
    assert [(r["recipe"], r["compiled"], r["emulated"]) for r in kept["blocks"]] == list(asked)
    for row in kept["blocks"]:
        assert_bounded(row)
    assert (SCRIPT.parents[1] / "results" / "compile_matrix.md").read_text() == matrix.table(
        kept["rows"], kept["blocks"]
    )


# ---- one process ----


def steps(recipe, checkpointing, backend):
    """Losses and states of delayed scaling, of two steps."""
    torch._dynamo.reset()
    made = matrix.model().bfloat16()
    how = (
        {"compile": "none"}
        if backend == "eager"
        else {"compile": "block", "compile_backend": backend}
    )
    made = parallelize(
        made,
        recipe,
        blocks=list(made)[:2],
        parallelism=Parallelism(checkpointing=checkpointing, **how),
    )
    optimizer, found = torch.optim.SGD(made.parameters(), lr=0.1), []
    for step in range(2):
        optimizer.zero_grad()
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = made(x).float().square().mean()
        loss.backward()
        optimizer.step()
        found += [loss.detach(), *(b.clone() for b in made.buffers())]
        delayed.update(made)
    return [*found, *made.state_dict().values()]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_neither_checkpointing_nor_compiling_changes_a_bit(recipe, backend):  # H-4, P-18
    plain = steps(recipe, "none", "eager")
    for checkpointing in ("none", "selective", "full"):
        with inductor_config.patch(emulate_precision_casts=True):
            found = steps(recipe, checkpointing, backend)
        assert len(found) == len(plain)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)), checkpointing


class Pair(nn.Module):
    """Two linears of one input, each of which casts it by a scale of its own under delayed
    scaling.
    """

    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(64, 128, bias=False) for _ in range(2))

    def forward(self, x):
        return self.gate(x) * self.up(x)


@pytest.mark.slow
def test_inductor_casts_an_input_that_two_linears_share_by_two_scales():  # L-6, P-12
    """With vectors of 512 bits it stores wrong codes of the transposed input, and gradients of
    weights are NaN.
    """
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, x = convert.convert(Pair().bfloat16(), "delayed"), torch.randn(256, 64).bfloat16()
        with inductor_config.patch(emulate_precision_casts=True):
            (torch.compile(model) if compiled else model)(x).sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_trainers_whole_model_compiles(small, monkeypatch):
    tokens = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(0)).numpy()
    eager = train.Trainer(small).gradients(tokens)
    monkeypatch.setattr(llama_model, "parallelize", parallelize_by("aot_eager"))
    torch._dynamo.utils.counters.clear()
    whole = train.Trainer(small.replace(parallel={"compile": "model"})).gradients(tokens)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert all((whole[name] == eager[name]).all() for name in eager)


def test_the_trainer_compiles_whole_models_that_tensor_parallelism_does_not_cut():
    with pytest.raises(
        ValueError, match=r"without tensor parallelism\. Set parallel\.tensor to 1, or use 'block'"
    ):
        ParallelConfig(fsdp=2, tensor=2, compile="model")
    with pytest.raises(
        ValueError, match=r"recomputed whole, .*\. Set parallel\.checkpointing to selective or none"
    ):
        ParallelConfig(tensor=2, compile="block", checkpointing="full")


def compiled_and_eager(config, recipe):
    """Loss and gradients of a batch, by how it is compiled; each half of it, a rank's, has tokens
    of its own.
    """
    llama_model.parallelize = parallelize_by("aot_eager")
    half = torch.randint(0, 128, (2, 17), generator=torch.Generator().manual_seed(0))
    tokens, found = torch.cat([half, half + 128]).numpy(), {}
    for how in ("model", "block", "none"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        trainer = train.Trainer(
            config.replace(numerics={"recipe": recipe}, parallel={"fsdp": 2, "compile": how})
        )
        found[how] = (
            trainer.evaluate(tokens),
            trainer.gradients(tokens),
            torch._dynamo.utils.counters["stats"]["unique_graphs"],
        )
    return found


@pytest.mark.parametrize(
    "recipe",
    [
        "tensorwise",
        *(
            pytest.param(recipe, marks=pytest.mark.slow)
            for recipe in ("bf16", "rowwise", "rowwise_with_gw_hp", "delayed")
        ),
    ],
)
# P-12, P-19
def test_the_trainers_ranks_compile_whole_models_or_blocks_and_change_no_bit(small, recipe):
    for found in run(2, compiled_and_eager, small, recipe):
        expected_loss, eager, _ = found["none"]
        for how in ("block", "model"):
            loss, gradients, graphs = found[how]
            assert graphs > 0
            assert loss == expected_loss
            assert gradients.keys() == eager.keys()
            # the whole model is gathered in one piece, and its table in bfloat16
            same = [name for name in eager if how == "block" or name != "model.embed_tokens.weight"]
            assert all((gradients[name] == eager[name]).all() for name in same)
        table, whole = (
            torch.from_numpy(found[how][1]["model.embed_tokens.weight"])
            for how in ("none", "model")
        )
        # a row is of one rank's tokens alone: the mean of two is half of that rank's
        assert torch.equal(whole, (2 * table).bfloat16().float() / 2)


# ---- ranks ----


def refusals():
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    found = {}
    nested = matrix.model()
    fully_shard(nested[0], mesh=mesh)
    found["nested"] = said(
        parallelize, nested, "bf16", mesh=mesh, parallelism=Parallelism(compile="model")
    )
    made = matrix.model()
    found["kept"] = said(
        parallelize,
        made,
        "tensorwise",
        mesh=mesh,
        parallelism=Parallelism(keep_dtype=[made[2]], compile="model"),
    )
    made = matrix.model()
    parallelize(made, "tensorwise", mesh=mesh, blocks=list(made)[:2])
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    found["around"] = said(compiled, matrix.batch(0))
    return found


def units():
    """Names of the fully_shard units under compile='model'."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    made = matrix.model()
    parallelize(
        made,
        "tensorwise",
        mesh=mesh,
        blocks=list(made)[:2],
        parallelism=Parallelism(compile="model", compile_backend="aot_eager"),
    )
    return [name for name, module in made.named_modules() if isinstance(module, FSDPModule)]


@functools.cache
def refused():
    return run(2, refusals)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nested", r"0 is its own\. Use compile='block', or compiled_fsdp\.shard"),
        ("kept", r"2 is its own\. Use compile='block'"),
        ("around", r"called in a compiled graph\. Use Parallelism\(compile='block'\)"),
    ],
)
def test_what_cannot_be_one_graph_is_refused_by_name(case, message):
    for rank in refused():
        assert re.search(message, rank[case]), rank[case]


def test_a_compiled_model_is_one_unit():
    assert run(2, units) == [[""], [""]]
