"""What ``parallel.parallelize`` refuses (P-12): values, modules, meshes, copies that differ."""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fp8ref import recipe as recipes
from fp8ref.recipe import Recipe
from fp8ref.selection.rules import Rule
from fp8ref.shared.errors import require
from fp8ref.torch.experts import parallel as expert_parallel
from fp8ref.torch.linear.model_checks import check_model, check_no_optimizer
from fp8ref.torch.model.parallelism import Parallelism, Ranks
from fp8ref.torch.tensors.local_part import digest, local_part


def check(
    model: nn.Module,
    recipe: Recipe,
    mesh: DeviceMesh | None,
    blocks: list[nn.Module],
    rules: Sequence[Rule],
    parallelism: Parallelism,
) -> Ranks:
    """The ranks of a mesh, if ``parallelize`` can cut the model over them.

    Raises:   ValueError: as ``Ranks.of`` and ``expert_parallel.check``; blocks that are not the
              model's, or named twice; a model that is compiled or sharded already; an optimizer
              that was built before; delayed scaling or a stochastic recipe of scope local; a cache
              of keys and values (transformers' use_cache) under checkpointing; full checkpointing
              and compile of blocks that tensor cuts; CUDA graphs of a mesh, or without inductor, or
              of weights on a CPU; under compile='model', modules that are, or by keep_dtype would
              be, sharded by themselves; modules that share a parameter and would be sharded
              apart, and what else fully_shard refuses; copies along data with different weights.
              ``parallelize`` adds what ``tensor_parallel.parallelize`` and ``fsdp.gather_in_fp8``
              refuse.
    """
    keep_dtype, compile = list(parallelism.keep_dtype), parallelism.compile
    _check_modules(model, blocks, keep_dtype)
    if not blocks and (parallelism.checkpointing != "none" or compile == "block"):
        raise ValueError(
            "checkpointing and compile='block' apply to blocks; got "
            f"{parallelism.checkpointing!r} and {compile!r} without blocks. Name blocks."
        )
    if parallelism.checkpointing != "none":
        _check_no_cache(model)
    ranks = Ranks.of(mesh)
    if parallelism.cuda_graphs:
        _check_cuda_graphs(model, mesh, parallelism)
    if compile == "model":
        _check_one_graph(model, keep_dtype if ranks.batch is not None else [])
    check_model(model, "Parallelize a model once, and before you {} it")
    if parallelism.cuts_linears:
        _check_tensor_dim(mesh)
    if ranks.tensor is not None and compile != "none" and parallelism.checkpointing == "full":
        # AOTAutograd of torch 2.13 keeps the DeviceMesh among saved tensors: an AssertionError
        raise ValueError(
            "torch cannot compile tensor-parallel blocks that are recomputed whole; got "
            f"checkpointing 'full' and compile {compile!r}. Use checkpointing 'selective' or "
            "'none'."
        )
    if mesh is not None:
        if rules:
            raise ValueError(
                f"rules need one device; got a mesh of {mesh.size()}. Leave rules or mesh out."
            )
        check_no_optimizer(model)
    _check_batch(recipe, ranks.batch, parallelism)
    if ranks.batch is not None:
        _check_units(model, [*keep_dtype, *(blocks if compile != "model" else ())])
        if ranks.batch.ndim == 2:
            check_copies(model, ranks.batch)
    if ranks.experts is not None:
        expert_parallel.check(model, ranks.experts)
    return ranks


def _check_modules(model: nn.Module, blocks: list[nn.Module], keep_dtype: list[nn.Module]) -> None:
    named = [*blocks, *keep_dtype]
    if not set(model.modules()).difference([model]).issuperset(named):
        raise ValueError(
            "blocks and keep_dtype are modules of the model. Get them from model.get_submodule."
        )
    names = {module: name for name, module in model.named_modules()}
    twice = [names[module] for i, module in enumerate(named) if module in named[:i]]
    if twice:
        raise ValueError(
            f"a module occurs once in blocks and keep_dtype; {twice[0]} occurs twice. Drop one."
        )


def _check_units(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """ValueError for units that fully_shard would refuse later, or that separate a shared
    parameter. units: in this order, the modules that are sharded by themselves."""
    names = {module: name for name, module in model.named_modules()}
    for i, unit in enumerate(units):
        if isinstance(unit, nn.ModuleList | nn.ModuleDict):
            raise ValueError(
                f"{names[unit]} is a {type(unit).__name__}, which is never called, so fully_shard "
                "cannot gather it. Name its modules."
            )
        if inner := next((later for later in units[i + 1 :] if later in set(unit.modules())), None):
            raise ValueError(
                f"{names[inner]} is within {names[unit]}, named earlier. Name inner modules first."
            )
    homes: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        parts = path.split(".") if path else []
        above = [model.get_submodule(".".join(parts[:n])) for n in range(len(parts), 0, -1)]
        unit = next((m for m in above if m in units), model)
        for key, p in module._parameters.items():
            if p is None:
                continue
            name = f"{path}.{key}" if path else key
            if p.ndim == 0 or not p.is_contiguous():
                defect = "is not contiguous; make it so"
                if p.ndim == 0:
                    defect = "has no dim to shard; give it the shape (1,)"
                raise ValueError(
                    f"fully_shard cuts parameters along their first dim, in place: {name} {defect}."
                )
            other, home = homes.setdefault(p, (name, unit))
            if home is not unit:  # accelerate#4171, ezpz#237
                apart = " and ".join(
                    f"{n} in {names[u] or 'the model itself'}"
                    for n, u in ((other, home), (name, unit))
                )
                raise ValueError(
                    f"modules that share a parameter need one FSDP unit; {other} and {name} are "
                    f"apart: {apart}. Name one unit around both, or neither in blocks and "
                    "keep_dtype, or untie them."
                )


def _check_cuda_graphs(model: nn.Module, mesh: DeviceMesh | None, parallelism: Parallelism) -> None:
    """ValueError for CUDA graphs that would not be made, or that a pass could not replay."""
    compile, backend = parallelism.compile, parallelism.compile_backend
    require(
        compile != "none" and backend == "inductor",
        f"cuda_graphs are of graphs that inductor compiles; got compile {compile!r} and "
        f"compile_backend {backend!r}. Use compile='block'.",
    )
    size = 1 if mesh is None else mesh.size()
    require(
        size == 1,
        "cuda_graphs need weights at fixed addresses, and no collectives; got a mesh of "
        f"{size}, which gathers them anew in each pass. Leave one of them out.",
    )
    kinds = {p.device.type for p in model.parameters()} - {"cuda", "meta"}
    require(
        not kinds,
        f"cuda_graphs need a model on a GPU; got weights on {', '.join(kinds)}. Move it there "
        "first, or leave cuda_graphs out.",
    )


def _check_no_cache(model: nn.Module) -> None:
    """ValueError for a transformers model with a cache: a rerun block would append to it again."""
    caching = [
        name
        for name, module in model.named_modules()
        if getattr(getattr(module, "config", None), "use_cache", None) is True
    ]
    if caching:
        path = f"{caching[0]}.config.use_cache" if caching[0] else "config.use_cache"
        raise ValueError(
            f"a checkpointed block runs twice, and would append to its cache twice; got {path} = "
            "True. Set it to False for training."
        )


def _check_tensor_dim(mesh: DeviceMesh | None) -> None:
    """ValueError for options of tensor parallelism without a mesh that has it."""
    if mesh is None or "tensor" not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            "sequence and tensor_plan need a mesh dim tensor; there is none. Add it or drop them."
        )


def _check_batch(recipe: Recipe, batch: DeviceMesh | None, parallelism: Parallelism) -> None:
    """ValueError for a recipe or reduction that a batch's ranks cannot have, such as FP8 gradients
    that no reduce-scatter over all ranks sums (P-25)."""
    copies = batch.size(0) if batch is not None and batch.ndim == 2 else 1
    if parallelism.ordered_reduction and copies > 2:
        raise ValueError(f"ordered_reduction needs 1 or 2 ranks along data; got {copies}.")
    local = batch is not None and parallelism.amax_scope == "local"
    if local and (recipe.stochastic or recipes.delayed_casts(recipe)):
        raise ValueError(
            f"recipe {recipe.name!r} needs global amaxes; got amax_scope='local'. Use 'global'."
        )
    if parallelism.reduces_fp8 and (batch is None or copies > 1):
        got = "no ranks that share a batch"
        if copies > 1:
            got = f"{copies} ranks along data"
        raise ValueError(
            "reduce_dtype torch.float8_e4m3fn needs gradients summed over fsdp alone: FSDP2's sum "
            f"over data has no hook; got {got}."
        )


def _check_one_graph(model: nn.Module, keep_dtype: Sequence[nn.Module]) -> None:
    """ValueError if a graph of the whole forward would have FSDP units, without their hooks."""
    kept = set(keep_dtype)
    nested = [
        name or "the model"
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule) or module in kept
    ]
    if nested:
        raise ValueError(
            f"compile='model' takes a model that is one fully_shard unit; {nested[0]} is its own. "
            "Use compile='block', or compiled_fsdp.shard."
        )


def refuse_tracing(unit: nn.Module, args: tuple) -> None:
    """Forward pre-hook: ValueError if dynamo traces a unit's call, without FSDP2's hooks."""
    if torch.compiler.is_dynamo_compiling():
        raise ValueError(
            "a fully_shard unit cannot be called in a compiled graph. Use "
            "Parallelism(compile='block') or 'model', or compiled_fsdp.shard."
        )


def check_copies(model: nn.Module, mesh: DeviceMesh) -> None:
    """ValueError unless ranks along data start from the same weights; those on the meta device are
    not compared.

    Averaging gradients would keep them different.
    """
    parts, own = mesh.size(1), mesh.get_local_rank(1)
    shards = {
        name: local_part(p) if isinstance(p, DTensor) else _chunk(p, parts, own)
        for name, p in model.named_parameters()
    }
    mine = {name: digest(shard) for name, shard in shards.items() if not shard.is_meta}
    digests: list = [None] * mesh.size(0)
    distributed.all_gather_object(digests, mine, group=mesh.get_group("data"))
    apart = [name for name in mine if any(theirs[name] != mine[name] for theirs in digests)]
    # all ranks raise, or none: one that raised alone would leave others waiting
    for dim in range(1, mesh.ndim):
        every: list = [None] * mesh.size(dim)
        distributed.all_gather_object(every, apart, group=mesh.get_group(dim))
        apart = [name for names in every for name in names]
    if apart:
        raise ValueError(
            f"copies of a model start from the same weights; {apart[0]} differs along data. Use "
            "one seed or checkpoint."
        )


def _chunk(p: Tensor, parts: int, which: int) -> Tensor:
    """The rows of a whole parameter that this rank compares; its copies' ranks share the work."""
    chunks = p.detach().reshape(-1).chunk(parts)
    return chunks[which] if which < len(chunks) else p.detach().reshape(-1)[:0]
