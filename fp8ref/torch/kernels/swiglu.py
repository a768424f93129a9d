"""SwiGLU and its gradients, cast in both orders, as operators of PyTorch.

Shapes:   gate, up and the gradient d of their product [M, N], contiguous, of one dtype; codes
          [M, N] and [N, M]. Partial amaxes are int32.
twice     whether silu(gate) is rounded to the dtype before the product.
"""

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8ref.torch.kernels import launch
from fp8ref.torch.kernels.memory import codes, parts

if TYPE_CHECKING:
    from fp8ref.kernels.jit import Launch

__all__ = ["amax", "cast", "gradient_amaxes", "gradient_cast"]

ROWS, GRADIENT_ROWS, COLUMNS = 128, 64, 64
"""Tiles of the forward and the backward kernel."""


@functools.lru_cache(maxsize=256)
def _launch(name: str, shape: tuple[int, int], **options: bool) -> "Launch":
    from fp8ref.kernels import swiglu

    return getattr(swiglu, name)(shape, **options)


def _parts(x: Tensor, rows: int) -> Tensor:
    return parts(x, -(-x.shape[0] // rows) * -(-x.shape[1] // COLUMNS))


@torch.library.custom_op("fp8ref::swiglu_amax", mutates_args=())
def amax(gate: Tensor, up: Tensor, twice: bool) -> Tensor:
    """Partial amaxes of silu(gate) * up."""
    out = _empty_amax(gate, up, twice)
    made = _launch("amax", tuple(gate.shape), twice=twice)
    launch.run(made, gate, up, out)
    return out


@amax.register_fake
def _empty_amax(gate: Tensor, up: Tensor, twice: bool) -> Tensor:
    return _parts(gate, ROWS)


@torch.library.custom_op("fp8ref::swiglu_cast", mutates_args=())
def cast(
    gate: Tensor, up: Tensor, scale: Tensor, e5m2: bool, twice: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of silu(gate) * up by a scale (), transposed codes, and partial amaxes."""
    out = _empty_cast(gate, up, scale, e5m2, twice)
    launch.run(_launch("cast", tuple(gate.shape), e5m2=e5m2, twice=twice), gate, up, scale, *out)
    return out


@cast.register_fake
def _empty_cast(
    gate: Tensor, up: Tensor, scale: Tensor, e5m2: bool, twice: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return *codes(gate, gate.shape, e5m2), _parts(gate, ROWS)


@torch.library.custom_op("fp8ref::swiglu_gradient_amaxes", mutates_args=())
def gradient_amaxes(d: Tensor, gate: Tensor, up: Tensor, twice: bool) -> tuple[Tensor, Tensor]:
    """Partial amaxes of gate's gradient, and of up's."""
    out = _empty_gradient_amaxes(d, gate, up, twice)
    made = _launch("gradient_amaxes", tuple(d.shape), twice=twice)
    launch.run(made, d, gate, up, *out)
    return out


@gradient_amaxes.register_fake
def _empty_gradient_amaxes(
    d: Tensor, gate: Tensor, up: Tensor, twice: bool
) -> tuple[Tensor, Tensor]:
    return _parts(d, GRADIENT_ROWS), _parts(d, GRADIENT_ROWS)


@torch.library.custom_op("fp8ref::swiglu_gradient_cast", mutates_args=())
def gradient_cast(
    d: Tensor, gate: Tensor, up: Tensor, scales: list[Tensor], e5m2: bool, twice: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Codes and transposed codes of gate's gradient and of up's, by the scales () of both, and
    partial amaxes of both."""
    out = _empty_gradient_cast(d, gate, up, scales, e5m2, twice)
    made = _launch("cast_gradients", tuple(d.shape), e5m2=e5m2, twice=twice)
    launch.run(made, d, gate, up, *scales, *out)
    return out


@gradient_cast.register_fake
def _empty_gradient_cast(
    d: Tensor, gate: Tensor, up: Tensor, scales: list[Tensor], e5m2: bool, twice: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    amaxes = _empty_gradient_amaxes(d, gate, up, twice)
    return *codes(d, d.shape, e5m2), *codes(d, d.shape, e5m2), *amaxes
