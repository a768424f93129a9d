"""The FP8 all-gather of one weight: FSDP2's hooks on its shard (spec P-6, P-11).

FSDP2 calls ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` of a shard that has them. FP8Gather
sets them: every rank casts its shard by the scale of the whole weight, and codes are gathered.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

from fp8ref.recipe import CastSpec
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.quantize import cast, scales, scaling
from fp8ref.torch.tensors.local_part import cut_groups

__all__ = ["FP8Gather", "compute_scales"]

# What a rank does for a weight [N, K], of R ranks that FSDP2 shards it over:
#
#   holds   its shard of the float32 master    [N/R, K]    a DTensor, Shard(0) over fsdp
#   scales  amax of the shard --all-reduce, max--> scale (), of the whole weight; or the state's
#   casts   shard --round to dtype--> times scale, clip, round --> codes [N/R, K]    ``cast``
#   sends   codes [N/R, K] --all-gather--> codes [N, K]    one byte an element    ``before``
#   keeps   the codes [N, K] and the scale until FSDP2 reshards the unit    ``after``
#           linear: output = x [M, K] @ w.T and grad_input = g @ w take these codes, uncast
#
# With tensor parallelism T ranks cut the linear first, and FSDP2 shards the part of each:
#
#                               colwise             rowwise
#   part of a rank along tensor  [N/T, K]            [N, K/T]
#   shard, along fsdp too        [N/(T R), K]        [N/R, K/T]    a DTensor over (fsdp, tensor)
#   scale ()                     of the whole weight: amaxes are reduced over fsdp and over tensor
#   codes that a rank sends      [N/(T R), K]        [N/R, K/T]
#   codes after the all-gather   [N/T, K]            [N, K/T]      over fsdp alone
#
# Along tensor no codes of weights move; activations do (``linear.cut``).


class FP8Gather:
    """Gathers one linear's weight as codes: each rank casts its shard by the whole weight's scale.

    scale       float32 (), of the whole weight at ``version``. Gathers of one pass, forward and
                backward, share it; outside of a pass each gather computes it.
    version     torch's count of the operations that changed the sharded weight, when ``scale`` was
                computed. Ranks count alike: writes to a local shard, or through .data, do not
                count.
    in_pass     whether the forward pass that ``scale`` was computed for still runs.
    moved       the dtype in which FSDP2 last gathered the weight; None before.
    shard       this rank's rows [n, K] of the master, also while the whole weight is gathered; n
                may be 0.
    keeps_codes whether codes are made with the scale, by ``copies`` after each step, and kept.
    made        these codes of the shard, by ``scale``; None: each gather casts the shard.
    master      the sharded weight, also while the whole weight is gathered.
    """

    def __init__(
        self,
        name: str,
        linear: Float8Linear | Linear,
        spec: CastSpec,
        dtype: torch.dtype,
        *,
        precomputed: bool,
    ) -> None:
        self.name, self.linear, self.spec = name, linear, spec
        self.dtype, self.precomputed = dtype, precomputed
        self.state = linear.state("weight") if isinstance(linear, Linear) else None
        self.scale: Tensor | None = None
        self.version, self.in_pass, self.keeps_codes = -1, False, False
        self.moved: torch.dtype | None = None
        self.master = self.shard = torch.empty(0, dtype=torch.float32, device="cpu")
        self.made: Tensor | None = None

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the process groups whose ranks hold shards of the weight."""
        return tuple(group.group_name for group in cut_groups(self.master))

    def attach(self) -> None:
        """Set FSDP2's hooks on the shard.

        Loading with assign=True replaces the shard, so every forward pass calls this.
        """
        weight = self.linear.weight
        assert isinstance(weight, DTensor)
        if weight is not self.master:
            self.version = -1
        self.master, self.shard = weight, weight._local_tensor
        self.shard.fsdp_pre_all_gather = self.before  # type: ignore[attr-defined]
        self.shard.fsdp_post_all_gather = self.after  # type: ignore[attr-defined]

    def before(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor], tuple[Tensor, int]]:
        """FSDP2's fsdp_pre_all_gather: the tensors to gather, and the metadata for ``after``.

        Codes [ceil(N / ranks), K] are gathered, as uint8: gloo has no float8, and FSDP2 moves mixed
        dtypes as bytes anyway. Rows are padded as FSDP2 pads, so shards of unequal length gather
        too.
        Raises:   ValueError: mixed precision of another dtype than ``dtype``; a weight cut along
                  another dim than its first.
        """
        master, compute = self.shard.dtype, mp_policy.param_dtype or self.shard.dtype
        if self.dtype not in (master, compute):
            raise ValueError(
                f"{self.name}: shards are cast from {compute}, the compute dtype, or {master}, the "
                f"masters'; got {self.dtype}. Use the mixed precision's param_dtype in "
                "gather_in_fp8."
            )
        if self.shard.shape[1:] != outer_size[1:]:
            raise ValueError(
                f"{self.name}.weight is not sharded along dim 0, as the FP8 gather needs."
            )
        in_pass = self.in_pass or torch._C._current_graph_task_id() != -1
        if not (self.fresh and (self.keeps_codes or (self.precomputed and in_pass))):
            compute_scales([self])
        codes = self.cast() if self.made is None else self.made
        assert self.scale is not None
        rows = -(-outer_size[0] // mesh.size())
        if len(codes) < rows:
            codes = functional.pad(codes, (0, 0, 0, rows - len(codes)))
        return (codes,), (self.scale, outer_size[0])

    @property
    def counted(self) -> int:
        """The sharded weight's own count of the operations that changed it."""
        # inference tensors count nothing
        return 0 if self.master.is_inference() else self.master._version

    @property
    def fresh(self) -> bool:
        """Whether no operation has changed the sharded weight since ``scale`` was computed."""
        return self.version == self.counted

    def cast(self) -> Tensor:
        """The codes of the shard by ``scale``, uint8 [n, K]."""
        assert self.scale is not None
        shard = self.shard.to(self.dtype)
        if shard.numel():
            return scaling.quantize_with(shard, self.scale, self.spec.fmt).codes.view(torch.uint8)
        return shard.to(torch.uint8)

    def after(
        self,
        gathered: tuple[Tensor],
        metadata: tuple[Tensor, int],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Float8TrainingTensor, tuple] | None:
        """FSDP2's fsdp_post_all_gather: the whole weight [N, K] as torchao's FP8 tensor.

        out       the tensor of an earlier gather. FSDP2 has filled its codes again; only its scale
                  is set.
        """
        (codes,), (scale, rows) = gathered, metadata
        self.moved = codes.dtype
        if out is not None:
            whole = out._local_tensor if isinstance(out, DTensor) else out
            whole._scale = scale  # type: ignore[attr-defined]
            return None
        # torchao's multiplication asks the tensor for it
        config = getattr(self.linear, "linear_mm_config", None)
        return Float8TrainingTensor(
            codes.view(cast.DTYPES[self.spec.fmt.name])[:rows],
            scale,
            param_dtype,
            config,
            GemmInputRole.WEIGHT,
        ), ()


def check_unshared(model: nn.Module, linears: Iterable[str]) -> None:
    """ValueError for one of these linears whose weight another module shares."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for name in linears:
        own = f"{name}.weight".lstrip(".")
        if others := [other for other in names[model.get_parameter(own)] if other != own]:
            raise ValueError(
                f"{own} and {others[0]} are one parameter, and both would become FP8. Untie them, "
                f"or name {name} in filter_fqns."
            )


@torch.no_grad()
def compute_scales(gathers: Sequence[FP8Gather]) -> None:
    """Set the scale of each whole weight as it is now, and the codes of one that keeps them (P-3).

    A delayed scale is its state's. Others need all ranks' amaxes: one all-reduce for all alike.
    """
    alike: dict[tuple, list[FP8Gather]] = {}
    for g in gathers:
        g.version = g.counted
        if g.state is not None:
            g.scale = g.state.scale.clone()
        else:
            alike.setdefault((g.groups, g.dtype, g.spec, g.shard.device), []).append(g)
    for (groups, dtype, spec, device), members in alike.items():
        held = [g.shard for g in members if g.shard.numel()]
        norms = iter(torch._foreach_norm(held, math.inf) if held else ())
        nothing = None
        if len(held) < len(members):
            nothing = torch.zeros((), dtype=members[0].shard.dtype, device=device)
        # not by assignment to a list of indices, which would be copied to the device
        amax = torch.stack([next(norms) if g.shard.numel() else nothing for g in members]).float()  # type: ignore[misc]
        for group in groups:
            amax = scaling.merge_amax(amax, group)
        # Rounding is monotonic: the amax of a shard rounded to dtype is its amax, rounded.
        scale = scales.scale_from_amax(amax.to(dtype).float(), spec.fmt, spec.policy)
        for g, weight_scale in zip(members, scale.unbind(), strict=True):
            g.scale = weight_scale
    for g in gathers:
        g.made = g.cast() if g.keeps_codes else None
