"""Memory for what kernels write."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["codes", "parts"]


def codes(like: Tensor, shape: Sequence[int], e5m2: bool) -> tuple[Tensor, Tensor]:
    """Codes of a matrix [M, N] and [N, M], native float8."""
    dtype = torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn
    rows, columns = shape
    return like.new_empty((rows, columns), dtype=dtype), like.new_empty(
        (columns, rows), dtype=dtype
    )


def parts(like: Tensor, programs: int) -> Tensor:
    """Partial amaxes, int32 [programs]."""
    return like.new_empty(programs, dtype=torch.int32)
