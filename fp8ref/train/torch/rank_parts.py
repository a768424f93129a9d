"""What of the whole this rank has: rows, tokens, shards of weights; and numbers of all ranks."""

import numpy as np
import torch
from torch import distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fp8ref.spec import llama
from fp8ref.torch.tensors.local_part import local_part
from fp8ref.train.config.config import Config


def own(
    tokens: np.ndarray, config: Config, mesh: DeviceMesh | None, context: ProcessGroup | None
) -> np.ndarray:
    """This rank's rows of a batch [B, T + 1] (spec P-10); under parallel.context of them its part
    of the tokens, with the one after it (A-24)."""
    if mesh is None:
        return tokens
    keys = config.parallel
    rows = len(tokens) // keys.batch_parts
    fsdp = mesh.get_local_rank("fsdp") // keys.context
    index = mesh.get_local_rank("data") * keys.fsdp + fsdp
    if keys.expert > 1:
        index = index * keys.expert + mesh.get_local_rank("expert")
    rows_of = tokens[index * rows :][:rows]
    if context is None:
        return rows_of
    return rows_of[:, own_tokens(tokens.shape[1] - 1, context, behind=1)]


def own_tokens(length: int, context: ProcessGroup | None, behind: int = 0) -> slice:
    """The tokens of a sequence of this length that this rank has, and so many behind them."""
    if context is None:
        return slice(length + behind)
    part = length // context.size()
    return slice(context.rank() * part, (context.rank() + 1) * part + behind)


def gather_context(parts: torch.Tensor, context: ProcessGroup | None) -> torch.Tensor:
    """Parts [B, T / n, ...] of the ranks that share sequences, as [B, T, ...]; as is without."""
    if context is None:
        return parts
    gathered = [torch.empty_like(parts) for _ in range(context.size())]
    distributed.all_gather(gathered, parts.contiguous(), group=context)
    return torch.cat(gathered, dim=1)


def gather_ranks(value: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """All-gather a scalar: [ranks]."""
    if mesh is None:
        return value[None]
    gathered = [torch.empty_like(value) for _ in range(distributed.get_world_size())]
    distributed.all_gather(gathered, value)
    return torch.stack(gathered)


@torch.no_grad()
def fill(parameter: torch.Tensor, weight: llama.Weight) -> None:
    """Copy a weight's values into a parameter, of a DTensor this rank's shard alone."""
    local_part(parameter).copy_(shard(parameter, weight))


def shard(parameter: torch.Tensor, weight: llama.Weight) -> torch.Tensor:
    """A weight's values, float32 on the host, of a DTensor those of this rank's shard alone."""
    if not isinstance(parameter, DTensor):
        return torch.from_numpy(weight[...])
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if 0 in shape:
        return torch.empty(shape, dtype=torch.float32)
    place = tuple(slice(i, i + size) for i, size in zip(offset, shape, strict=True))
    return torch.from_numpy(weight[place])
