"""Casts in both orders, amaxes and block scales by Triton kernels, each one operator of PyTorch.

On a CPU the kernels are interpreted. Operators are opaque to compilers: equal casts of a graph
merge, a policy of checkpointing names them, and a kernel is compiled as it was checked. Their plain
forms, which give the same bits, are ``quantize.scaling`` and ``delayed.merge_``.

Shapes:   x [M, N] of any strides, float32, float16 or bfloat16; codes, native float8, [M, N] and
          transposed [N, M], both contiguous; scales float32. Partial amaxes are int32: bits of |x|.
"""

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8ref.torch.kernels import launch

if TYPE_CHECKING:
    from fp8ref.kernels.jit import Launch

__all__ = [
    "amax",
    "amax_lines",
    "cast",
    "cast_by_amax",
    "cast_by_guess_",
    "cast_lines",
    "lines",
    "merge_",
    "squares",
    "transpose",
]


@functools.lru_cache(maxsize=1024)
def _launch(name: str, *arguments, **options: bool) -> "Launch":
    from fp8ref.kernels import casts, observations

    room = observations if name in observations.__all__ else casts
    make = getattr(room, name)
    return make(*arguments, **options)


def _run(name: str, x: Tensor, tensors: tuple[Tensor, ...], **options: bool) -> None:
    """Run the launch of this name in ``fp8ref.kernels.casts`` on x and further tensors."""
    made = _launch(name, tuple(x.shape), x.stride(), **options)
    launch.run(made, x, *tensors)


def _tiles(x: Tensor, tile: tuple[int, int] = (128, 64)) -> tuple[int, int]:
    return -(-x.shape[0] // tile[0]), -(-x.shape[1] // tile[1])


def _codes(x: Tensor, e5m2: bool) -> tuple[Tensor, Tensor]:
    """Memory for codes in both orders."""
    dtype = torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((x.shape[1], x.shape[0]), dtype=dtype)


def _floats(x: Tensor, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(shape, dtype=torch.float32) for shape in shapes)


@torch.library.custom_op("fp8ref::amax", mutates_args=())
def amax(x: Tensor) -> Tensor:
    """Partial amaxes of x, int32 [programs]; their maximum is S-2's."""
    out = _empty_amax(x)
    _run("amax", x, (out,))
    return out


@amax.register_fake
def _empty_amax(x: Tensor) -> Tensor:
    rows, columns = _tiles(x)
    return x.new_empty((min(512, rows * columns),), dtype=torch.int32)


@torch.library.custom_op("fp8ref::cast", mutates_args=())
def cast(x: Tensor, scale: Tensor, e5m2: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of x by a scale (), transposed codes, and partial amaxes of x."""
    out = _empty_cast(x, scale, e5m2)
    _run("cast", x, (scale, *out), e5m2=e5m2)
    return out


@cast.register_fake
def _empty_cast(x: Tensor, scale: Tensor, e5m2: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = _tiles(x)
    return *_codes(x, e5m2), x.new_empty((rows * columns,), dtype=torch.int32)


@torch.library.custom_op("fp8ref::cast_by_amax", mutates_args=())
def cast_by_amax(
    x: Tensor, parts: Tensor, e5m2: bool, power: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of x by the partial amaxes of ``amax``, transposed codes, scale () and scale_inv (), of
    policy torchao; power: of torchao_pow2."""
    out = _empty_cast_by_amax(x, parts, e5m2)
    _run("cast_by_amax", x, (parts, *out), e5m2=e5m2, power=power)
    return out


@cast_by_amax.register_fake
def _empty_cast_by_amax(
    x: Tensor, parts: Tensor, e5m2: bool, power: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale, inverse = _floats(x, (), ())
    return *_codes(x, e5m2), scale, inverse


@torch.library.custom_op("fp8ref::cast_by_guess_", mutates_args=("guess",))
def cast_by_guess_(x: Tensor, guess: Tensor, e5m2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of x, transposed codes, scale () and scale_inv (), of policy torchao_pow2, whatever the
    guess; a right one spares a pass over x.

    guess    (), int32: the bits of a float32 scale. It becomes the scale of x.
    """
    used, bits = guess.clone().view(torch.float32), guess.view(torch.float32)
    codes, transposed, parts = _empty_cast(x, used, e5m2)
    scales = _floats(x, (), ())
    _run("cast", x, (used, codes, transposed, parts), e5m2=e5m2)
    _run("recast", x, (parts, used, codes, transposed, bits, *scales), e5m2=e5m2)
    return codes, transposed, *scales


cast_by_guess_.register_fake(_empty_cast_by_amax)


@torch.library.custom_op("fp8ref::transpose", mutates_args=())
def transpose(codes: Tensor) -> Tensor:
    """Codes [M, N] as [N, M], contiguous."""
    out = _empty_transpose(codes)
    _run("transpose", codes.view(torch.uint8), (out,))
    return out


@transpose.register_fake
def _empty_transpose(codes: Tensor) -> Tensor:
    return codes.new_empty((codes.shape[1], codes.shape[0]))


@torch.library.custom_op("fp8ref::amax_lines", mutates_args=())
def amax_lines(x: Tensor) -> tuple[Tensor, Tensor]:
    """Partial amaxes of rows [tiles along N, M] and of columns [tiles along M, N]."""
    out = _empty_amax_lines(x)
    _run("amax_lines", x, out)
    return out


@amax_lines.register_fake
def _empty_amax_lines(x: Tensor) -> tuple[Tensor, Tensor]:
    (m, n), (rows, columns) = x.shape, _tiles(x)
    return x.new_empty((columns, m), dtype=torch.int32), x.new_empty((rows, n), dtype=torch.int32)


@torch.library.custom_op("fp8ref::cast_lines", mutates_args=())
def cast_lines(x: Tensor, rows: Tensor, columns: Tensor, e5m2: bool) -> tuple[Tensor, Tensor]:
    """Codes of x by a scale for each row [M, 1], and transposed codes by one for each column
    [1, N]."""
    out = _codes(x, e5m2)
    _run("cast_lines", x, (rows.contiguous(), columns.contiguous(), *out), e5m2=e5m2)
    return out


@cast_lines.register_fake
def _(x: Tensor, rows: Tensor, columns: Tensor, e5m2: bool) -> tuple[Tensor, Tensor]:
    return _codes(x, e5m2)


@torch.library.custom_op("fp8ref::squares", mutates_args=())
def squares(x: Tensor, e5m2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of x, transposed codes, scale and scale_inv of blocks of 128 x 128, of policy
    torchao."""
    out = _empty_squares(x, e5m2)
    _run("blocks", x, out, e5m2=e5m2, square=True)
    return out


@squares.register_fake
def _empty_squares(x: Tensor, e5m2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = _tiles(x, (128, 128))
    scale, inverse = _floats(x, shape, shape)
    return *_codes(x, e5m2), scale, inverse


@torch.library.custom_op("fp8ref::lines", mutates_args=())
def lines(x: Tensor, e5m2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Codes of x by blocks of 1 x 128, transposed codes by blocks of 128 x 1; scale and scale_inv
    of the first [M, ceil(N / 128)], and of the second [ceil(M / 128), N], of policy torchao."""
    out = _empty_lines(x, e5m2)
    _run("blocks", x, out, e5m2=e5m2, square=False)
    return out


@lines.register_fake
def _empty_lines(x: Tensor, e5m2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (m, n), (rows, columns) = x.shape, _tiles(x, (128, 128))
    shapes = ((m, columns),) * 2 + ((rows, n),) * 2
    scale, inverse, scale_t, inverse_t = _floats(x, *shapes)
    return *_codes(x, e5m2), scale, inverse, scale_t, inverse_t


@torch.library.custom_op("fp8ref::merge_", mutates_args=("seen",))
def merge_(seen: Tensor, parts: Tensor) -> None:
    """Merge partial amaxes into an observation, float32 [3], in place (H-4)."""
    launch.run(_launch("merge", len(parts)), parts, seen)


@merge_.register_fake
def _(seen: Tensor, parts: Tensor) -> None:
    return None


AMAXES = frozenset({torch.ops.fp8ref.amax.default, torch.ops.fp8ref.amax_lines.default})
"""The operators of ``amax`` and ``amax_lines``."""
