"""How ``parallel.parallelize`` runs, cuts and shards a model: its options, and groups of ranks."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fp8ref.recipe import Style
from fp8ref.shared import errors
from fp8ref.spec.kernels import Choice
from fp8ref.torch.model import checkpointing as checkpoints
from fp8ref.torch.model.checkpointing import Checkpointing, Operation

__all__ = ["Compile", "Parallelism", "Ranks", "Scope", "Source"]

Compile = Literal["none", "block", "model"]
"""What torch.compile takes: nothing, each block's forward, or the whole model's."""

Scope = Literal["local", "global"]
"""Whose amaxes scale input and grad_output: each rank's own, or those of all ranks (P-2)."""

Source = Literal["compute", "master"]
"""What a gathered weight is cast from: its shard rounded to param_dtype, or its float32 master."""

_REDUCE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The options of ``parallelize`` beside the mesh.

    amax_scope  whose amaxes scale input and grad_output: each rank's own, as in torchao (local), or
                all ranks' (global, P-2; the trainer's default). Under global every converted linear
                is fp8ref's own ``linear.Linear``. Delayed scaling keeps one state for all ranks,
                and needs global.
    sequence, tensor_plan
                as sequence and plan of ``tensor_parallel.parallelize``.
    checkpointing, keep
                ``full`` keeps a block's inputs and recomputes the rest in the backward pass;
                ``selective`` also keeps the results of ``keep``: names of
                ``checkpointing.OPERATORS``, or operators of torch.
    compile, compile_backend
                torch.compile of each ``block``'s forward, or of the whole ``model``'s, without
                graph breaks. The whole model is gathered in one piece: FSDP2 gathers in hooks,
                which no graph contains (``compiled_fsdp`` gathers in the graph).
    cuda_graphs each compiled graph is recorded as a CUDA graph, and replayed by one launch
                (mode="reduce-overhead"): of one GPU, with inductor, for models whose kernels are
                shorter than their launches. A pass writes over the results of the pass before.
    gather_fp8, precompute_scales, fp8_from
                gather weights in FP8, as ``fsdp.gather_in_fp8``: from shards rounded to param_dtype
                (compute), or from the masters (master).
    ordered_reduction
                sum gradients in rank order, on any backend (P-13).
    reduce_dtype
                gradients are summed over ranks in it: float32 or bfloat16. float8_e4m3fn: weights
                of linears are exchanged in FP8 and summed in float32 (P-25), all else in float32.
    param_dtype parameters are rounded to it as they are gathered; gradients are made in it.
    keep_dtype  modules, such as an embedding table, whose parameters are not rounded.
    kernels     what casts, as of ``convert.convert``.
    Raises:     ValueError: an unknown value; as ``checkpointing.check``.
    """

    amax_scope: Scope = "local"
    sequence: bool = False
    tensor_plan: Mapping[str, Style] | None = None
    checkpointing: Checkpointing = "none"
    keep: Iterable[Operation | Callable] = checkpoints.EVERY
    compile: Compile = "none"
    compile_backend: str | Callable = "inductor"
    cuda_graphs: bool = False
    gather_fp8: bool = True
    precompute_scales: bool = True
    fp8_from: Source = "compute"
    ordered_reduction: bool = False
    reduce_dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype = torch.bfloat16
    keep_dtype: Iterable[nn.Module] = ()
    kernels: Choice = "auto"

    def __post_init__(self) -> None:
        errors.one_of("reduce_dtype", self.reduce_dtype, _REDUCE_DTYPES)
        literals = {
            "amax_scope": Scope,
            "checkpointing": Checkpointing,
            "compile": Compile,
            "fp8_from": Source,
        }
        for name, literal in literals.items():
            errors.one_of(name, getattr(self, name), get_args(literal))
        kept = checkpoints.check(self.checkpointing, self.keep)
        object.__setattr__(self, "keep", kept)
        object.__setattr__(self, "keep_dtype", tuple(self.keep_dtype))

    @property
    def cuts_linears(self) -> bool:
        """Whether it says how tensor parallelism cuts linears."""
        return self.sequence or self.tensor_plan is not None

    @property
    def reduces_fp8(self) -> bool:
        """Whether gradients of linears' weights are exchanged in FP8."""
        return self.reduce_dtype == torch.float8_e4m3fn

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which FSDP2 sums gradients."""
        return torch.float32 if self.reduces_fp8 else self.reduce_dtype


AXES = ("data", "fsdp", "expert", "tensor")
"""The dims that a mesh may have, in order."""

_CONTEXT = ("context", "cp", "context_parallel")
"""Names of a dim whose ranks share sequences: ``parallelize`` takes these ranks as fsdp."""


class Ranks(NamedTuple):
    """The ranks of a mesh that share work of one kind; None where a rank does it alone.

    whole    the mesh.
    batch    split the batch: FSDP2 shards and copies weights over them.
    tensor   split each linear.
    experts  have different experts.
    """

    whole: DeviceMesh | None = None
    batch: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    experts: DeviceMesh | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> "Ranks":
        """The ranks of a mesh as of ``parallelize``; ValueError for one with other dims.

        A single copy has no dim data: FSDP2 would all-reduce each block's gradients within one
        rank, by a mean that it says NCCL may get wrong there.
        """
        if mesh is None:
            return cls()
        names = mesh.mesh_dim_names or ()
        if context := [name for name in names if name in _CONTEXT]:
            raise ValueError(
                f"context-parallel ranks are part of fsdp; got a dim named {context[0]}. Flatten "
                "it and the batch dims with mesh._flatten('fsdp'), and run steps in torch's "
                "context_parallel (P-26)."
            )
        ordered = tuple(axis for axis in AXES if axis in names)
        needs_fsdp = {"data", "expert"} & set(names) and "fsdp" not in names
        if not names or names != ordered or needs_fsdp:
            raise ValueError(
                f"mesh dims are named {', '.join(AXES)}, in this order; data and expert need fsdp; "
                f"got {names}. Name them in init_device_mesh."
            )
        shared = _sharded_dims(mesh)
        batch = mesh[shared] if shared else None
        if "expert" in names:  # weights other than experts' are sharded over both
            shards = mesh[("fsdp", "expert")]._flatten("shards")
            batch = shards
            if "data" in shared:
                batch = DeviceMesh._concatenate([mesh["data"], shards])
        by_dim = [mesh[axis] if axis in names else None for axis in ("tensor", "expert")]
        parts = (batch, *by_dim)
        return cls(mesh, *(p if p is not None and p.size() > 1 else None for p in parts))


def _sharded_dims(mesh: DeviceMesh) -> tuple[str, ...]:
    """The mesh dims over which FSDP2 shards (fsdp) and copies (data)."""
    names = mesh.mesh_dim_names or ()
    copies = ("data",) if "data" in names and mesh["data"].size() > 1 else ()
    return (*copies, "fsdp") if "fsdp" in names else copies


def same_experts(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that have this rank's experts, of data and fsdp."""
    return mesh[_sharded_dims(mesh)]
