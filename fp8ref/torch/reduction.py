"""Sums of gradients in rank order (SEMANTICS P-13): the same bits from any backend, however it reduces by itself."""

from collections.abc import Sequence

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.fsdp import FSDPModule


class OrderedReduceScatter:
    """What FSDP2's ``set_custom_reduce_scatter`` takes: all-to-all, then ``acc = RN32(acc + g_r)`` in ascending rank order.

    Where an average is asked for, the sum is divided by the number of ranks.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for FSDP2, of no particular values."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: ProcessGroup, op: ReduceOp, async_op: bool = False
    ) -> None:
        parts = torch.empty_like(input_tensor)
        distributed.all_to_all_single(parts, input_tensor, group=group)
        first, *others = parts.view(group.size(), -1).unbind()
        output_tensor.copy_(first)
        for part in others:
            output_tensor += part
        if op == ReduceOp.AVG:
            output_tensor /= group.size()


def order(model: nn.Module) -> None:
    """Have every fully_shard unit of a model sum its gradients in rank order."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(OrderedReduceScatter())  # type: ignore[arg-type]
