"""What torch.compile makes of models in FP8, sharded or not: how many graphs, of what, and their bits."""

import functools
import importlib.util
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from ranks import run
from torch import distributed, nn
from torch._dynamo.exc import TorchDynamoException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from fp8ref.run.config import ParallelConfig
from fp8ref.torch import delayed, linear, parallel, traced, train
from fp8ref.torch.parallel import parallelize

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compile_matrix.py"
_spec = importlib.util.spec_from_file_location("compile_matrix", SCRIPT)
matrix = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(matrix)
ASKED = list(itertools.product(matrix.RECIPES, matrix.HOW, matrix.GATHERS))

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is deprecated:DeprecationWarning",  # torch, as it imports its backends
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # dynamo looks whether there is one
)

# Of the model's three linears, of which the first needs no grad_input: 3 + 2 + 3 GEMMs. The two blocks are two pairs of graphs, for the
# first one's input needs no gradient, and the last linear is in none.
GRAPHS = {"block": (4, 2 + 3), "model": (2, 8), "traced": (2, 8)}
ELEMENTS = (2 * 64 * 64 + 32 * 64) // 2, (2 * 64 + 32) // 2  # of weights and biases, in a rank's shards


def expected(recipe, how, gather):
    graphs, gemms = GRAPHS[how]
    collectives = {"all_gather": 6, "reduce_scatter": 6} if how == "traced" else {"all_gather": 0, "reduce_scatter": 0}
    amaxes = int((recipe, how, gather) == ("tensorwise", "traced", "fp8"))  # one all-reduce of those of all weights
    # FSDP2 gathers for the backward pass too; a weight is a byte an element in FP8.
    gathered = (ELEMENTS[0] * (1 if gather == "fp8" else 2) + ELEMENTS[1] * 2) * (1 if how == "traced" else 2)
    counted = {"graphs": graphs, "graph_breaks": 0, "scaled_mm": gemms, "all_reduce": amaxes, "gathered_bytes": gathered, "differs": []}
    return {"recipe": recipe, "compiled": how, "gather": gather, **collectives, **counted}


@functools.cache
def aot_eager():
    return run(2, matrix.cells, "aot_eager", ASKED, timeout=400)


@pytest.mark.parametrize(("recipe", "how", "gather"), ASKED)
def test_aot_eager_is_eager_in_as_few_graphs(recipe, how, gather):  # P-12, P-18
    for rows in aot_eager():
        assert rows[ASKED.index((recipe, how, gather))] == {"backend": "aot_eager", **expected(recipe, how, gather)}


@pytest.mark.slow
def test_inductor_is_eager_under_emulated_casts():  # P-18
    asked = [("tensorwise", "block", "fp8"), ("delayed", "traced", "fp8")]
    for rows in run(2, matrix.cells, "inductor", asked, timeout=600):
        assert rows == [{"backend": "inductor", **expected(*cell)} for cell in asked]


def test_the_kept_matrix_is_what_is_expected():
    kept = json.loads((SCRIPT.parent / "results" / "compile_matrix.json").read_text())
    rows = [{"backend": backend, **expected(*cell)} for backend, cell in itertools.product(matrix.BACKENDS, ASKED)]
    assert kept["rows"] == rows
    assert (SCRIPT.parent / "results" / "compile_matrix.md").read_text() == matrix.table(kept["rows"], kept["blocks"])


# ---- one process ----


def steps(recipe, checkpointing, compiled):
    """Losses and states of delayed scaling, of two steps."""
    torch._dynamo.reset()
    made = matrix.model().bfloat16()
    options = {"compile": "block" if compiled else "none", "compile_backend": "aot_eager"}
    made = parallelize(made, recipe, blocks=list(made)[:2], checkpointing=checkpointing, **options)
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
def test_neither_checkpointing_nor_compiling_changes_a_bit(recipe):  # H-4
    plain = steps(recipe, "none", False)
    for checkpointing, compiled in itertools.product(("none", "selective", "full"), (False, True)):
        found = steps(recipe, checkpointing, compiled)
        assert len(found) == len(plain)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)), (checkpointing, compiled)


def test_the_trainers_whole_model_compiles(small, monkeypatch):
    tokens = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(0)).numpy()
    eager = train.Trainer(small).gradients(tokens)
    monkeypatch.setattr(train, "parallelize", functools.partial(parallel.parallelize, compile_backend="aot_eager"))
    torch._dynamo.utils.counters.clear()
    whole = train.Trainer(small.replace(parallel={"compile": "model"})).gradients(tokens)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert all((whole[name] == eager[name]).all() for name in eager)


def test_the_trainer_compiles_whole_models_on_one_device_only():
    with pytest.raises(ValueError, match=r"one device.*Use 'block'"):
        ParallelConfig(fsdp=2, compile="model")


# ---- ranks ----


def said(function, *args, **options):
    """The message of the ValueError, or of dynamo's about it."""
    try:
        function(*args, **options)
    except (ValueError, TorchDynamoException) as error:
        return str(error)
    return ""


def refusals():
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    group, found = mesh.get_group(), {}
    nested = matrix.model()
    fully_shard(nested[0], mesh=mesh)
    found["nested"] = said(parallelize, nested, "bf16", mesh=mesh, compile="model")
    made = matrix.model()
    found["kept"] = said(parallelize, made, "tensorwise", mesh=mesh, keep_dtype=[made[2]], compile="model")
    made = matrix.model()
    parallelize(made, "tensorwise", mesh=mesh, blocks=list(made)[:2])
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    found["around"] = said(compiled, matrix.batch(0))
    found["shared"] = said(traced.shard, made, group)
    found["uneven"] = said(traced.shard, nn.Sequential(nn.Linear(16, 33)), group, gather_fp8=False)
    found["bfloat16"] = said(traced.shard, linear.convert(matrix.model().bfloat16(), "tensorwise"), group)
    found["rows"] = said(traced.shard, linear.convert(matrix.model(), "rowwise"), group)
    found["states"] = said(traced.shard, linear.convert(matrix.model(), "delayed"), group)
    tied = matrix.model()
    tied[1][0].weight = tied[0][0].weight
    found["tied"] = said(traced.shard, linear.convert(tied, "tensorwise"), group)
    return found


def units_and_evaluations():
    """Names of the fully_shard units under compile='model'; whether a forward pass without gradients observes, beside one with."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    made = matrix.model()
    parallelize(made, "tensorwise", mesh=mesh, blocks=list(made)[:2], compile="model", compile_backend="aot_eager")
    units = [name for name, module in made.named_modules() if isinstance(module, FSDPModule)]
    sharded = traced.shard(linear.convert(matrix.model(), "delayed", amax_group=mesh.get_group()), mesh.get_group())
    observed = []
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            sharded(matrix.batch(0))
        observed.append([bool(state.seen.any()) for name, state in delayed.states(sharded) if not name.endswith("grad_output")])
    held = {name: p.shape for name, p in sharded.named_parameters()}
    same = all(torch.equal(whole, plain) for whole, plain in zip(sharded.weights().values(), matrix.model().parameters(), strict=True))
    return units, observed, held, same


@functools.cache
def refused():
    return run(2, refusals)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nested", r"0 is, or .*sharded by itself\. Use compile='block', or traced\.shard"),
        ("kept", r"2 is, or with keep_dtype would be, sharded by itself\. Use compile='block'"),
        ("around", r"called within a graph\. Use parallelize\(compile='block'\)"),
        ("shared", r"compiled or sharded already"),
        ("uneven", r"evenly.*over 2 ranks; 0\.weight is torch\.float32 of shape \(33, 16\)\. Pad it"),
        ("bfloat16", r"masters are float32.*0\.0\.weight is torch\.bfloat16"),
        ("rows", r"the model has none\. Use gather_fp8=False"),
        ("states", r"ranks share the states of 0\.0.*amax_group"),
        ("tied", r"0\.0\.weight is 1\.0\.weight too"),
    ],
)
def test_what_cannot_be_one_graph_is_refused_by_name(case, message):
    for rank in refused():
        assert re.search(message, rank[case]), rank[case]


def test_a_compiled_model_is_one_unit_and_evaluation_observes_nothing():  # H-4
    for units, observed, held, same in run(2, units_and_evaluations):
        assert units == [""]
        assert observed == [[False] * 6, [True] * 6]
        assert held["model.0.0.weight"] == (32, 64)
        assert same
