"""What tensor parallelism cannot cut, refused by name."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DeviceMesh, DTensor
from torchao.float8.float8_linear import Float8Linear

from fp8ref.torch import torchao_linear
from fp8ref.torch.linear import Linear
from fp8ref.torch.proof.records import is_compiled


def mesh_size(mesh: DeviceMesh) -> int:
    """How many ranks a mesh of one dim has; ValueError for any other mesh."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        got = f"dims {mesh.mesh_dim_names or tuple(mesh.shape)}" if isinstance(mesh, DeviceMesh) else f"a {type(mesh).__name__}"
        raise ValueError(f"parallelize takes a DeviceMesh of one dim; got {got}. Give that of one dim, mesh['tensor'].")
    return mesh.size()


def model(model: nn.Module) -> None:
    """ValueError for what would be lost, or would not run on DTensors."""
    for name, module in model.named_modules():
        what = name or "the model"
        if is_compiled(module):
            raise ValueError(f"{what} is compiled. Parallelise a model first, then compile it.")
        if isinstance(module, FSDPModule) or any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            raise ValueError(f"{what} is sharded already. Parallelise a model once, and before fully_shard.")
        if isinstance(module, Linear):
            how = f"of recipe {module.recipe.name!r}" + ", of amax_scope 'global'" * (module.group is not None)
            raise ValueError(
                f"{what} is fp8ref's own Linear {how}, which runs on whole tensors only. "
                "Use tensorwise, rowwise or rowwise_with_gw_hp, each rank's amaxes its own (amax_scope local), or fully_shard alone."
            )
        if any(True for _ in module.children()) and any(True for _ in module.parameters(recurse=False)):
            raise ValueError(
                f"{what} holds parameters beside modules, which would meet both plain and distributed ones. Move them to a module."
            )


def linear(name: str, model: nn.Module, style: str, ranks: int) -> None:
    """ValueError unless a linear can be cut by its style."""
    module = model.get_submodule(name)
    assert isinstance(module, nn.Linear)
    if type(module) not in (nn.Linear, Float8Linear, torchao_linear.Float8Linear):
        raise ValueError(f"{name} is a {type(module).__name__}; nn.Linear and what convert makes of it are cut. Leave it out of the plan.")
    if type(module.weight.data) is not torch.Tensor:
        raise ValueError(
            f"{name} has a weight that is a {type(module.weight.data).__name__}; plain ones are cut. Parallelise first, then wrap it."
        )
    for key, p in module.named_parameters():
        places = [
            f"{n}.{k}" for n, m in model.named_modules(remove_duplicate=False) for k, q in m.named_parameters(recurse=False) if q is p
        ]
        if len(places) > 1:
            raise ValueError(f"{name} shares its {key}, and is cut: {', '.join(places)}. Untie them, or leave it out of the plan.")
    n, k = module.weight.shape
    which, dim = ("out_features", n) if style == "colwise" else ("in_features", k)
    if dim % ranks:
        raise ValueError(
            f"{name} is {style}, its {which} divisible by {ranks} ranks; got {dim}. Use fewer ranks, or leave it out of the plan."
        )
    if isinstance(module, Float8Linear) and dim // ranks % 16:
        raise ValueError(
            f"{name} is FP8 and {style}, its {which} a multiple of 16 on each of {ranks} ranks; got {dim}, {dim // ranks} on each. "
            "Use fewer ranks, or name it in filter_fqns."
        )
    head_dim = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    if isinstance(head_dim, int) and dim // ranks % head_dim:
        raise ValueError(
            f"{name} has {dim // head_dim} heads of {head_dim}, which {ranks} ranks do not cut evenly. Use a divisor of the heads."
        )


def length(tokens: torch.Tensor, ranks: int) -> None:
    """ValueError unless the ranks cut a sequence evenly, of tokens [B, T]."""
    if tokens.shape[1] % ranks:
        raise ValueError(
            f"under sequence parallelism tokens [B, T] have T divisible by {ranks} ranks; got T = {tokens.shape[1]}. Pad them."
        )
