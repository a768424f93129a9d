"""A linear that tensor-parallel ranks share: what moves (spec P-14).

    colwise   input [M, K] is whole on every rank; output [M, N/t]. grad_input is a sum over ranks.
    rowwise   input [M, K/t]; output [M, N] is a sum over ranks. grad_output is whole on every rank.

``linear.Linear`` computes on this rank's part alone: its codes are those of the whole linear, as
ranks share the amaxes of scales that span them (``scaling.Groups``). DTensor moves what moves.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from fp8ref.recipe import Style
from fp8ref.torch.quantize.scaling import Groups as Groups
from fp8ref.torch.tensors import linear_input


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How the ranks of a mesh of one dim share a linear.

    style     None: every rank has all of it, and computes the same.
    between   placement of the tokens between linears: whole, or cut under sequence parallelism.
    """

    style: Style | None
    mesh: DeviceMesh
    between: Placement

    @property
    def group(self) -> str:
        """The name of the ranks' process group."""
        return self.mesh.get_group().group_name

    def enter(self, x: Tensor) -> Tensor:
        """This rank's input, of a plain tensor, which is it already, or of a DTensor.

        Gradient: of colwise linears, summed over ranks; one sum for one DTensor input.
        """
        if self.style != "colwise":
            placement = Replicate() if self.style is None else Shard(-1)
            if isinstance(x, DTensor):
                return x.redistribute(placements=[placement]).to_local()
            return x
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def leave(self, y: Tensor) -> Tensor:
        """This rank's output: of rowwise linears its tokens of the sum over ranks (P-16)."""
        if self.style != "rowwise":
            return y
        return writable(
            DTensor.from_local(y, self.mesh, [Partial()], run_check=False)
            .redistribute(placements=[self.between])
            .to_local()
        )

    def bias(self, bias: Tensor) -> Tensor:
        """This rank's part of a bias, which is added after the sum (G-15).

        Gradient: of a rowwise linear whose tokens are cut, a part of a sum over ranks.
        """
        if not isinstance(bias, DTensor):
            return bias
        partial = self.style == "rowwise" and self.between.is_shard()
        return bias.to_local(grad_placements=[Partial()] if partial else None)

    def replace_parameters(self, linear: nn.Linear) -> None:
        """Make DTensors of a linear's parameters, from those of the first rank."""
        assert self.style is not None
        placements: dict[str, Placement] = {"weight": Shard(1), "bias": Replicate()}
        if self.style == "colwise":
            placements = {"weight": Shard(0), "bias": Shard(0)}
        for key, p in list(linear.named_parameters(recurse=False)):
            cut = nn.Parameter(
                distribute_tensor(p.detach(), self.mesh, [placements[key]]),
                requires_grad=p.requires_grad,
            )
            nn.Module.register_parameter(linear, key, cut)  # an FP8 linear refuses parts of others
        if linear.bias is not None and linear.bias.requires_grad:
            linear.bias.register_hook(lambda g: g.redistribute(placements=[placements["bias"]]))


def writable(y: Tensor) -> Tensor:
    """y, free to change in place: ``to_local`` returns a view, of which autograd refuses it."""
    return torch.ops.aten._unsafe_view(y, y.shape)


def check_part(linear: nn.Linear, name: str, param: nn.Parameter) -> None:
    """ValueError if an FP8 linear's whole parameter is to become this rank's part of a DTensor, as
    by parallelize_module: ranks would not share amaxes (P-4)."""
    held = linear._parameters.get(name)
    cuts = isinstance(param, DTensor) and any(
        not placement.is_replicate() for placement in param.placements
    )
    if cuts and held is not None and not isinstance(held, DTensor):
        raise ValueError(
            f"ranks that share {linear_input.named(getattr(linear, 'fqn', ''))} need shared "
            f"amaxes; got its {name} as a DTensor. Use parallel.parallelize with a mesh dim "
            "'tensor', or filter_fqns."
        )
