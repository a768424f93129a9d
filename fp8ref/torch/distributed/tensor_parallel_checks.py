"""What ``tensor_parallel`` refuses: meshes, models, linears, lengths (P-5, P-14 to P-17)."""

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DeviceMesh, DTensor
from torchao.float8.float8_linear import Float8Linear

from fp8ref.recipe import Style
from fp8ref.torch.linear import torchao_linear
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.linear.model_checks import is_compiled


def mesh_size(mesh: DeviceMesh) -> int:
    """The number of ranks of a mesh of one dim; ValueError for any other mesh."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        got = f"a {type(mesh).__name__}"
        if isinstance(mesh, DeviceMesh):
            got = f"dims {mesh.mesh_dim_names or tuple(mesh.shape)}"
        raise ValueError(
            f"parallelize takes a DeviceMesh of one dim; got {got}. Use mesh['tensor']."
        )
    return mesh.size()


def check_model(model: nn.Module, amax_group: ProcessGroup | None) -> None:
    """ValueError for a module that would lose something, or that DTensor cannot run."""
    for name, module in model.named_modules():
        label = name or "the model"
        if is_compiled(module):
            raise ValueError(f"{label} is compiled. Parallelize a model first, then compile it.")
        if isinstance(module, FSDPModule) or any(
            isinstance(p, DTensor) for p in module.parameters(recurse=False)
        ):
            raise ValueError(
                f"{label} is sharded already. Parallelize a model once, and before fully_shard."
            )
        if isinstance(module, Linear) and module.group is not None and amax_group is None:
            raise ValueError(
                f"{label} shares amaxes with its batch's ranks; tensor-parallel ranks must too. "
                "Give amax_group, the process group of both together."
            )
        # the children of fp8ref's own linear are states of delayed scaling, without parameters
        if (
            not isinstance(module, Linear)
            and any(True for _ in module.children())
            and any(True for _ in module.parameters(recurse=False))
        ):
            raise ValueError(
                f"{label} has parameters next to modules, mixing plain and distributed tensors. "
                "Move them to a module."
            )


def check_asynchronous(model: nn.Module, mesh: DeviceMesh) -> None:
    """ValueError if torch's asynchronous tensor parallelism is on, and would do nothing."""
    own = next((name for name, module in model.named_modules() if isinstance(module, Linear)), None)
    if torch._inductor.config._micro_pipeline_tp and (
        own is not None or mesh.device_type != "cuda"
    ):
        culprit = (
            f"a mesh of {mesh.device_type}"
            if own is None
            else f"{own or 'the model'}, fp8ref's own Linear, which casts between them"
        )
        raise ValueError(
            "asynchronous tensor parallelism (_micro_pipeline_tp) needs torchao's Float8Linear on "
            f"GPUs; got {culprit}. Set torch._inductor.config._micro_pipeline_tp to False."
        )


def check_linear(name: str, model: nn.Module, style: Style, ranks: int) -> None:
    """ValueError unless a linear can be cut by its style."""
    module = model.get_submodule(name)
    assert isinstance(module, nn.Linear)
    if type(module) not in (nn.Linear, Float8Linear, torchao_linear.Float8Linear, Linear):
        raise ValueError(
            f"{name} is a {type(module).__name__}, a subclass of nn.Linear, which is not cut. Drop "
            "it from the plan."
        )
    if type(module.weight.data) is not Tensor:
        raise ValueError(
            f"{name} has a weight that is a {type(module.weight.data).__name__}, not plain. "
            "Parallelize first, then wrap it."
        )
    for key, p in module.named_parameters():
        places = [
            f"{n}.{k}"
            for n, m in model.named_modules(remove_duplicate=False)
            for k, q in m.named_parameters(recurse=False)
            if q is p
        ]
        if len(places) > 1:
            raise ValueError(
                f"{name} shares its {key}, and is cut: {', '.join(places)}. Untie them, or leave "
                "it out of the plan."
            )
    n, k = module.weight.shape
    which, dim = ("out_features", n) if style == "colwise" else ("in_features", k)
    if dim % ranks:
        raise ValueError(
            f"{name} is {style}, its {which} divisible by {ranks} ranks; got {dim}. Use fewer "
            "ranks, or drop it from the plan."
        )
    if isinstance(module, Linear) and dim // ranks % (multiple := module.recipe.multiple(style)):
        raise ValueError(
            f"{name} is {style} under recipe {module.recipe.name!r}: its {which} is a multiple of "
            f"{multiple} on each of {ranks} ranks; got {dim}, {dim // ranks} on each. Use fewer "
            "ranks, or filter_fqns (P-5)."
        )
    if isinstance(module, Float8Linear | Linear) and dim // ranks % 16:
        raise ValueError(
            f"{name} is FP8 and {style}, its {which} a multiple of 16 on each of {ranks} ranks; "
            f"got {dim}, {dim // ranks} on each. Use fewer ranks, or filter_fqns."
        )
    head_dim = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    if isinstance(head_dim, int) and dim // ranks % head_dim:
        raise ValueError(
            f"{name} has {dim // head_dim} heads of {head_dim}, which {ranks} ranks do not cut "
            "evenly. Use a divisor of the heads."
        )


def check_length(tokens: Tensor, ranks: int) -> None:
    """ValueError unless the ranks divide T of tokens [B, T]."""
    if tokens.shape[1] % ranks:
        raise ValueError(
            f"sequence parallelism needs tokens [B, T] with T divisible by {ranks} ranks; got T = "
            f"{tokens.shape[1]}. Pad them."
        )
