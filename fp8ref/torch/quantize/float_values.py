"""The numbers of FP8 codes as float32 tensors, for products on a CPU, which has no FP8 GEMM.

torch converts float8 to float32 a code at a time there (2.13: 5 ns each). Here integer operations
make a float16 of each code, and rounding to a format is two float32 additions; both are vectorized.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fp8ref.formats import Format

_E4M3_OVER_HALF = 256.0  # the exponent biases of float16 and e4m3fn are 15 and 7
_EXPONENT = 0x7F800000  # of a float32
_PIECE = 2**17  # elements a thread: the float32 numbers of a piece stay in a core's cache
SMALL = 2**15
"""Elements of a piece where a function makes tens of tensors of its size: an operation of torch on
so few runs in one thread."""


def eager_on_cpu(x: Tensor) -> bool:
    """Whether operations on x run one by one, on a CPU, and torch.jit records none."""
    return x.is_cpu and not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None


def in_pieces(
    function: Callable[..., Tensor],
    x: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None = None,
    *,
    rows: int = 1,
    size: int | None = None,
) -> Tensor:
    """function(x, scale), of the elements of each row, in dtype; on a CPU for some rows of x at a
    time, of about so many elements (size).

    A large tensor for each step of a cast is new memory, which costs several times as much as the
    arithmetic: the system maps and clears its pages.

    scale     broadcasts to x, but that each of its rows serves so many ``rows`` of x.
    """
    pieces = slices(x, size, rows)
    if len(pieces) == 1 or (scale is not None and scale.ndim not in (0, x.ndim)):
        return function(x, scale)
    scaled = scale is not None and scale.ndim == x.ndim and len(scale) > 1
    out = torch.empty_like(x, dtype=dtype)
    for i in pieces:
        part = scale[i.start // rows : i.stop // rows] if scaled and scale is not None else scale
        out[i] = function(x[i], part)
    return out


def slices(x: Tensor, size: int | None, rows: int = 1) -> list[slice]:
    """Pieces of about so many elements, by default those of caches, along x's first axis, each of a
    multiple of so many rows; one of all where operations do not run one by one on a CPU."""
    if (
        type(x) is not Tensor  # before any size, which a compiler would guard
        or not eager_on_cpu(x)
        or (x.requires_grad and torch.is_grad_enabled())
        or torch._C._len_torch_dispatch_stack() > 0  # a trace would keep this number of pieces
        or torch._C._are_functorch_transforms_active()
    ):
        return [slice(None)]
    size = size or _PIECE * torch.get_num_threads()
    if x.numel() <= size:
        return [slice(None)]
    step = -(-size * len(x) // (x.numel() * rows)) * rows
    return [slice(i, i + step) for i in range(0, len(x), step)]


def decode(codes: Tensor) -> Tensor:
    """float32 numbers of codes, exactly; on a GPU, in compiled graphs and of other formats by
    torch's conversion.

    Specials: NaN codes are NaN; infinities and signs of zeros are kept.
    """
    return in_pieces(lambda part, _: _decoded(part), codes, torch.float32)


def _decoded(codes: Tensor) -> Tensor:
    if not eager_on_cpu(codes):
        return codes.float()
    if codes.dtype == torch.float8_e5m2:  # the upper half of a float16
        return (codes.view(torch.uint8).to(torch.int16) << 8).view(torch.float16).float()
    if codes.dtype != torch.float8_e4m3fn:
        return codes.float()
    wide = codes.view(torch.int8).to(torch.int16)
    # In place: new memory costs more than the operations. Code 7F is NaN. Its float16 would be
    # finite: it gets the highest bit of an exponent, which no other code has.
    nan = (wide & 0x7F).add_(1).bitwise_and_(0x80).bitwise_left_shift_(7)
    # The sign fills the upper half of wide. Bit 14 of a float16 is the highest of its exponent: 0
    # in all of e4m3fn.
    wide.bitwise_left_shift_(7).bitwise_and_(~0x4000).bitwise_or_(nan)
    return wide.view(torch.float16).float().mul_(_E4M3_OVER_HALF)


def round_(
    x: Tensor, fmt: Format, scratch: Tensor | None = None, *, inside: bool = False
) -> Tensor:
    """x, in place, saturated and rounded to the numbers of an FP8 format: those of a cast's codes.

    scratch   float32 of x's shape, which is written; None: a new tensor.
    inside    no number is above the format's range: none is saturated.
    Order:    to nearest, ties to even: 1.5 x 2^(23 - m + e) is added and subtracted, with e the
              exponent of x, or the format's least, and m its mantissa bits. Of such sums one unit
              is one of x's in the format.
    Specials: NaN stays. A zero, and what is rounded to it, is +0.
    """
    if not inside:
        x.clamp_(-fmt.max, fmt.max)
    bits = x.view(torch.int32)
    out = None if scratch is None else scratch.view(torch.int32)
    exponent = torch.bitwise_and(bits, _EXPONENT, out=out)
    power = exponent.view(torch.float32).clamp_(min=2.0**fmt.emin)
    factor = 1.5 * 2.0 ** (23 - fmt.mantissa_bits)
    return x.add_(power, alpha=factor).sub_(power, alpha=factor)  # the products are exact
