import functools
import re

import pytest
import torch
from helpers.processes.ranks import run
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from fp8ref.formats import E4M3FN
from fp8ref.recipe import CastSpec, GemmSpec, Recipe
from fp8ref.torch.model import convert
from fp8ref.torch.model.parallel import Parallelism, parallelize
from fp8ref.train.config.config import Config
from fp8ref.train.torch.trainer import Trainer

_CAST = CastSpec(fmt=E4M3FN, rounding="stochastic")
DRAWN = Recipe(name="drawn", output=GemmSpec(a=_CAST, b=_CAST, accumulate="slow"))


def default_config(**parallel):
    return Config().replace(data={"batch_size": 8, "sequence_length": 32}, parallel=parallel)


def refusals():
    found = {}

    def refused(name, function):
        try:
            function()
        except ValueError as error:
            found[name] = str(error)

    def model():
        return nn.Sequential(nn.Sequential(nn.Linear(64, 32)), nn.Linear(32, 32))

    def mesh(*names, shape=(3,)):
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    made = model()
    optimizer = torch.optim.SGD(made.parameters())
    refused("optimizer", lambda: parallelize(made, "tensorwise", mesh=mesh("fsdp")))
    optimizer.param_groups.clear()
    refused("dims", lambda: parallelize(model(), "tensorwise", mesh=mesh("dp")))
    refused("data alone", lambda: parallelize(model(), "tensorwise", mesh=mesh("data")))
    refused(
        "blocks",
        lambda: parallelize(model(), "tensorwise", mesh=mesh("fsdp"), blocks=[nn.Linear(2, 2)]),
    )
    refused("local", lambda: parallelize(model(), "delayed", mesh=mesh("fsdp")))
    refused("draws", lambda: parallelize(model(), DRAWN, mesh=mesh("fsdp")))
    by_data = mesh("data", "fsdp", shape=(3, 1))
    refused(
        "order",
        lambda: parallelize(
            model(), "tensorwise", mesh=by_data, parallelism=Parallelism(ordered_reduction=True)
        ),
    )
    torch.manual_seed(distributed.get_rank())
    refused("copies", lambda: parallelize(model(), "tensorwise", mesh=by_data))
    made = model()
    refused(
        "twice",
        lambda: parallelize(made, "tensorwise", mesh=mesh("fsdp"), blocks=[made[0], made[0]]),
    )
    refused(
        "kept",
        lambda: parallelize(
            made,
            "tensorwise",
            mesh=mesh("fsdp"),
            blocks=[made[0]],
            parallelism=Parallelism(keep_dtype=[made[0]]),
        ),
    )
    refused(
        "plan without a dim",
        lambda: parallelize(
            made, "bf16", mesh=mesh("fsdp"), parallelism=Parallelism(tensor_plan={"1": "colwise"})
        ),
    )
    refused(
        "sequence without a mesh",
        lambda: parallelize(made, "bf16", parallelism=Parallelism(sequence=True)),
    )
    by_tensor = mesh("tensor")
    refused(
        "checkpointing",
        lambda: parallelize(
            made,
            "bf16",
            mesh=by_tensor,
            parallelism=Parallelism(
                tensor_plan={"1": "colwise"}, compile="block", checkpointing="full"
            ),
            blocks=[made[0]],
        ),
    )
    refused(
        "plan",
        lambda: parallelize(
            made,
            "tensorwise",
            mesh=by_tensor,
            parallelism=Parallelism(tensor_plan={"7": "colwise"}),
        ),
    )
    refused(
        "no plan",
        lambda: parallelize(
            made, "tensorwise", mesh=by_tensor, parallelism=Parallelism(tensor_plan={})
        ),
    )
    by_hand = convert.convert(model(), "tensorwise")
    refused(
        "plan of FP8 by hand",
        lambda: parallelize(
            by_hand, "bf16", mesh=by_tensor, parallelism=Parallelism(tensor_plan={"7": "colwise"})
        ),
    )
    found["kept FP8"] = str([type(m).__name__ for m in by_hand.modules()])
    found["unchanged"] = str([type(m).__name__ for m in made.modules()])
    tied = nn.Sequential(
        nn.Embedding(32, 64), nn.Sequential(nn.Linear(64, 64)), nn.Linear(64, 32, bias=False)
    )
    tied[2].weight = tied[0].weight
    shard = functools.partial(parallelize, tied, "tensorwise", mesh=mesh("fsdp"))
    # accelerate#4171, ezpz#237
    refused(
        "tied, one kept",
        lambda: shard(
            filter_fqns=("2",), blocks=[tied[1]], parallelism=Parallelism(keep_dtype=[tied[0]])
        ),
    )
    refused("tied, one a block", lambda: shard(filter_fqns=("2",), blocks=[tied[2]]))
    refused("tied, FP8", shard)
    refused("inner last", lambda: shard(filter_fqns=("2",), blocks=[tied[1], tied[1][0]]))
    refused(
        "experts",
        lambda: parallelize(
            tied,
            "tensorwise",
            mesh=mesh("fsdp", "expert", shape=(1, 3)),
            parallelism=Parallelism(amax_scope="global"),
        ),
    )
    tied.append(nn.ModuleList([nn.Linear(32, 32)]))
    refused("container", lambda: shard(filter_fqns=("2",), blocks=[tied[3]]))
    tied[3][0].scale = nn.Parameter(torch.ones(()))
    refused("scalar", lambda: shard(filter_fqns=("2",)))
    found["unchanged by shards"] = str([type(m).__name__ for m in tied.modules()])
    refused(
        "copies of blocks", lambda: parallelize(made, "tensorwise", mesh=by_data, blocks=[made[0]])
    )
    found["unchanged by copies"] = str([type(m).__name__ for m in made.modules()])
    made = model()
    parallelize(made, "bf16", mesh=mesh("fsdp"))
    refused("again", lambda: parallelize(made, "bf16", mesh=mesh("fsdp")))
    refused("processes", lambda: Trainer(default_config(fsdp=2)))
    refused("batch", lambda: Trainer(default_config(fsdp=3)))
    return found


def one_of_four_differs():
    """In the last rows of a weight, which two ranks compare for all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    if distributed.get_rank() == 3:
        with torch.no_grad():
            model[0].weight[-1, -1] = 7
    try:
        parallelize(
            model,
            "tensorwise",
            mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "fsdp")),
        )
    except ValueError as error:
        return str(error)
    return "parallelized"


def test_every_rank_refuses_copies_that_differ_on_one():  # P-12
    assert all("0.weight differs along data" in said for said in run(4, one_of_four_differs))


@pytest.fixture(scope="module")
def refused():
    return run(3, refusals)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "optimizer",
            r"built after a model is cut.*a SGD already holds 0\.0\.weight. Build it afterwards",
        ),
        ("dims", r"dims are named data, fsdp, expert, tensor.*got \('dp',\)"),
        ("data alone", r"data and expert need fsdp; got \('data',\)"),
        ("blocks", "modules of the model"),
        ("local", "'delayed' needs global amaxes.*Use 'global'"),
        ("draws", "'drawn' needs global amaxes.*Use 'global'"),
        ("order", "1 or 2 ranks along data; got 3"),
        ("copies", r"start from the same weights; 0\.0\.weight differs along data. Use one seed"),
        ("twice", "0 occurs twice"),
        ("kept", "0 occurs twice"),
        ("plan without a dim", "need a mesh dim tensor; there is none"),
        ("sequence without a mesh", "need a mesh dim tensor; there is none"),
        (
            "checkpointing",
            "cannot compile tensor-parallel blocks.*got checkpointing 'full' and "
            "compile 'block'. Use checkpointing 'selective'",
        ),
        ("plan", "'7' matches none of: 0.0, 1"),
        ("no plan", "a plan cuts at least one linear; got none"),
        ("plan of FP8 by hand", "'7' matches none of"),
        ("kept FP8", r"^\['Sequential', 'Sequential', 'Float8Linear', 'Float8Linear'\]$"),
        ("unchanged", r"^\['Sequential', 'Sequential', 'Linear', 'Linear'\]$"),
        (
            "tied, one kept",
            r"0\.weight and 2\.weight are apart: 0\.weight in 0 and 2\.weight "
            r"in the model itself.*or untie",
        ),
        (
            "tied, one a block",
            r"0\.weight in the model itself and 2\.weight in 2\. Name one unit around both",
        ),
        (
            "tied, FP8",
            r"2\.weight and 0\.weight are one parameter, and both would become FP8. Untie them, or name 2 in filter_fqns",
        ),
        ("inner last", r"1\.0 is within 1, named earlier. Name inner modules first"),
        ("experts", "expert parallelism needs grouped linears; the model has none"),
        ("container", "3 is a ModuleList, which is never called.*Name its modules"),
        ("scalar", r"3\.0\.scale has no dim to shard; give it the shape \(1,\)"),
        (
            "unchanged by shards",
            r"^\['Sequential', 'Embedding', 'Sequential', 'Linear', 'Linear', 'ModuleList', "
            r"'Linear'\]$",
        ),
        ("copies of blocks", r"start from the same weights; 0\.0\.weight differs along data"),
        ("unchanged by copies", r"^\['Sequential', 'Sequential', 'Linear', 'Linear'\]$"),
        (
            "again",
            "the model is sharded by fully_shard. Parallelize a model once, and before you "
            "shard it",
        ),
        ("processes", "1 x 2 x 1 = 2 processes; there are 3.*torchrun --nproc-per-node 2"),
        ("batch", "batch_size is divisible by data x fsdp = 3 processes; got 8"),
    ],
)
# P-12
def test_what_is_done_in_another_order_or_does_not_fit_is_refused_by_name(refused, case, message):
    for rank in refused:
        assert re.search(message, rank[case])


@pytest.mark.parametrize(
    "options",
    [
        {"amax_scope": "world"},
        {"checkpointing": True},
        {"compile": "blocks"},
        {"fp8_from": torch.float32},
    ],
    ids=lambda o: next(iter(o)),
)
def test_options_have_the_values_that_they_have(options):
    (name,) = options
    with pytest.raises(
        ValueError, match=rf"^{name} is one of .*; got {re.escape(repr(options[name]))}"
    ):
        parallelize(
            nn.Sequential(nn.Linear(16, 16)), "tensorwise", parallelism=Parallelism(**options)
        )


@pytest.mark.parametrize("options", [{"checkpointing": "full"}, {"compile": "block"}], ids=str)
def test_blocks_are_named_where_something_is_done_to_them(options):
    with pytest.raises(ValueError, match=r"apply to blocks; got .* without blocks\. Name blocks"):
        parallelize(
            nn.Sequential(nn.Linear(16, 16)), "tensorwise", parallelism=Parallelism(**options)
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "compile 'none'"),
        ({"compile": "model", "compile_backend": "eager"}, "compile_backend 'eager'"),
        ({"compile": "model"}, "need a model on a GPU; got weights on cpu"),
    ],
    ids=["eager", "another backend", "on a CPU"],
)
def test_cuda_graphs_are_of_compiled_graphs_on_a_gpu(options, message):  # P-12
    model = nn.Sequential(nn.Linear(16, 16))
    options = {"cuda_graphs": True, **options}
    with pytest.raises(ValueError, match=message):
        parallelize(model, "tensorwise", parallelism=Parallelism(**options))
    assert type(model[0]) is nn.Linear


def test_cuda_graphs_are_asked_of_inductor_and_each_pass_may_write_over_the_last(
    monkeypatch,
):  # P-12
    modes, begun = [], []
    monkeypatch.setattr(torch, "compile", lambda f, **keys: modes.append(keys["mode"]) or f)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 16))
    parallelism = Parallelism(compile="model", cuda_graphs=True)
    parallelize(model, "bf16", parallelism=parallelism)
    model.to_empty(device="cpu")(torch.zeros(2, 16))
    assert modes == ["reduce-overhead"]
    assert begun == [1]
