"""Casts in both orders, amaxes and block scales by Triton kernels, each one operator of PyTorch.

On a CPU the kernels are interpreted. Inputs and outputs are those of the functions of
``fp8ref.kernels.casts``: x [M, N] of any strides, float32, float16 or bfloat16; codes, native
float8, [M, N] and transposed [N, M], both contiguous; scales float32; partial amaxes int32, the
bits of |x|. Their plain forms, which give the same bits, are ``quantize.scaling`` and
``delayed.merge_``.
"""

import torch
from torch import Tensor

from fp8ref.torch.kernels import launch
from fp8ref.torch.kernels.launch import operator

amax = operator("casts", "amax")
"""x -> partial amaxes."""
amax_lines = operator("casts", "amax_lines")
"""x -> partial amaxes of rows and of columns."""
cast = operator("casts", "cast")
"""x and a scale -> codes in both orders, partial amaxes."""
cast_by_amax = operator("casts", "cast_by_amax")
"""x and partial amaxes -> codes in both orders, scale, scale_inv."""
cast_lines = operator("casts", "cast_lines")
"""x, scales of rows and of columns -> codes in both orders."""
cast_lines_by_amaxes = operator("casts", "cast_lines_by_amaxes")
"""x and partial amaxes of rows and of columns -> codes, scale, scale_inv; the same transposed."""
lines = operator("casts", "blocks", called="lines", square=False)
"""x -> codes in both orders, scales of 1 x 128 and of 128 x 1."""
squares = operator("casts", "blocks", called="squares", square=True)
"""x -> codes in both orders, scales of 128 x 128."""
scaled = operator("casts", "scaled")
"""x, factors of rows and of columns -> their product."""
transpose = operator("casts", "transpose")
"""Codes -> the same codes, transposed."""

AMAXES = frozenset({torch.ops.fp8ref.amax.default, torch.ops.fp8ref.amax_lines.default})
"""The operators of ``amax`` and ``amax_lines``."""

SCALED = torch.ops.fp8ref.scaled.default
"""The operator of ``scaled``."""


@torch.library.custom_op("fp8ref::cast_by_guess_", mutates_args=("guess",))
def cast_by_guess_(x: Tensor, guess: Tensor, e5m2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of x, transposed codes, scale () and scale_inv (), of policy torchao_pow2, whatever the
    guess; a right one spares a pass over x.

    guess    (), int32: the bits of a float32 scale. It becomes the scale of x.
    """
    used, bits = guess.clone().view(torch.float32), guess.view(torch.float32)
    codes, transposed, parts = cast(x, used, e5m2=e5m2)
    scale, inverse = torch.empty_like(used), torch.empty_like(used)
    again = launch.prepared("casts", "recast", x, launch.text(e5m2=e5m2))
    launch.run(again, x, parts, used, codes, transposed, bits, scale, inverse)
    return codes, transposed, scale, inverse


@cast_by_guess_.register_fake
def _(x: Tensor, guess: Tensor, e5m2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale = guess.view(torch.float32)
    codes, transposed, _ = cast(x, scale, e5m2=e5m2)
    return codes, transposed, torch.empty_like(scale), torch.empty_like(scale)


@torch.library.custom_op("fp8ref::merge_", mutates_args=("seen",))
def merge_(seen: Tensor, parts: Tensor) -> None:
    """Merge partial amaxes into an observation, float32 [3], in place (H-4)."""
    launch.run(launch.prepared("casts", "merge", parts, launch.text()), parts, seen, seen)


@merge_.register_fake
def _(seen: Tensor, parts: Tensor) -> None:
    return None
