"""What the kernels compute on a device, compared with plain operations before they are used (M-11).

Each kernel runs on planted tensors, of ragged and of whole tiles, with NaN, Inf, -0 and subnormals.
Codes of both orders, scales and amaxes are compared bit by bit. On a GPU ``kernels.self_check``
compares those kernels, too, that cast what they compute.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fp8ref.formats import E4M3FN, E5M2, Format
from fp8ref.spec import kernels
from fp8ref.torch.delayed import delayed
from fp8ref.torch.kernels import casts, launch
from fp8ref.torch.quantize import scaling
from fp8ref.torch.quantize.scaling import Quantized

__all__ = ["failure"]

SHAPES = ((200, 136), (256, 256))
"""Of ragged tiles and blocks, and of whole ones."""

Results = Iterator[tuple[str, Tensor, Tensor]]
"""(what, a kernel's result, that of plain operations)."""


def failure(device: torch.device) -> str:
    """The first result of a kernel on a device that differs from that of plain operations, in a few
    words; "" if none does. A kernel that does not compile or run is a failure too."""
    try:
        for shape in SHAPES:
            x = planted(shape, device)
            for what, result, plain in (*_observed(x), *_cast(x, E4M3FN), *_cast(x, E5M2)):
                if not _same(result, plain):
                    return f"{what} differ from those of plain operations"
        return "" if device.type == "cpu" else fused(device)
    except Exception as error:  # whatever a compiler or a driver raises
        return kernels.broken(error)


def fused(device: torch.device) -> str:
    """As ``fp8ref.kernels.self_check.failure``, of launches on a device."""
    from fp8ref.kernels import self_check

    def run(each, inputs, outputs) -> list[np.ndarray]:
        bits = [torch.from_numpy(x.view(f"i{x.itemsize}")) for x in inputs]
        dtypes = [getattr(torch, x.dtype.name) for x in inputs]
        tensors = [x.view(dtype).to(device) for x, dtype in zip(bits, dtypes, strict=True)]
        results = [
            torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            for shape, dtype in outputs
        ]
        launch.run(each, *tensors, *results)
        # NumPy has no bfloat16
        return [(x.view(torch.int16) if x.itemsize == 2 else x).cpu().numpy() for x in results]

    return self_check.failure(run)


def planted(shape: tuple[int, int], device: torch.device) -> Tensor:
    """A bfloat16 tensor of numbers that are cast to zeros, subnormals, ties and the largest code,
    with NaN and Inf in its last rows and columns."""
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal(shape) * np.exp2(rng.integers(-14, 9, shape))
    numbers[0, :6] = 0.0, -0.0, 1e-40, -1e-40, 464.0, -6e4
    x = torch.from_numpy(numbers.astype(np.float32))
    x[-1, -1], x[-1, 0], x[0, -1] = torch.nan, torch.inf, -torch.inf
    return x.to(device=device, dtype=torch.bfloat16)


def _observed(x: Tensor) -> Results:
    """Amaxes, and the observations that they are merged into."""
    finite = x.nan_to_num(0.0, 1.0, -1.0)
    for y in (finite, x):
        amax, seen = casts.amax(y), torch.zeros(3, dtype=torch.float32, device=x.device)
        yield "amaxes", amax.amax().view(torch.float32), scaling.amax(y)
        plain = torch.zeros_like(seen)
        casts.merge_(seen, amax)
        delayed.merge_(plain, y)
        yield "merged amaxes", seen, plain
        for parts, axis in zip(casts.amax_lines(y), (-1, -2), strict=True):
            plain = scaling.amax(y, "rowwise", axis=axis).flatten()
            yield "amaxes of lines", parts.amax(0).view(torch.float32), plain


def _cast(x: Tensor, fmt: Format) -> Results:
    """Codes and scales of every kernel that casts."""
    e5m2, finite = fmt == E5M2, x.nan_to_num(0.0, 1.0, -1.0)
    scale = torch.tensor(3.1415927, dtype=torch.float32, device=x.device)
    for y in (x, finite.t()):
        codes, transposed, parts = casts.cast(y, scale, e5m2=e5m2)
        plain = scaling.quantize_with(y, scale, fmt)
        yield from _codes("one scale", codes, transposed, plain, plain)
        yield "amaxes beside codes", parts.amax().view(torch.float32), scaling.amax(y)
        yield "transposed codes", casts.transpose(codes).float(), transposed.float()
    codes, transposed, own, inverse = casts.cast_by_amax(finite, casts.amax(finite), e5m2=e5m2)
    plain = scaling.quantize(finite, fmt)
    yield from _codes("an amax", codes, transposed, plain, plain)
    yield from _scales("an amax", own, inverse, plain)
    guess, plain = (
        scale.view(torch.int32).clone(),
        scaling.quantize(finite, fmt, policy="torchao_pow2"),
    )
    for _ in ("wrong", "right"):
        codes, transposed, own, inverse = casts.cast_by_guess_(finite, guess, e5m2)
        yield from _codes("a guess", codes, transposed, plain, plain)
        yield from _scales("a guess", own, inverse, plain)
    yield from _in_blocks(x, fmt)
    rows, columns = _both(x, fmt, "rowwise")
    codes, transposed = casts.cast_lines(x, rows.scale, columns.scale, e5m2=e5m2)
    yield from _codes("lines", codes, transposed, rows, columns)


def _in_blocks(x: Tensor, fmt: Format) -> Results:
    codes, transposed, scale, inverse, scale_t, inverse_t = casts.lines(x, e5m2=fmt == E5M2)
    rows, columns = _both(x, fmt, "blockwise_1x128")
    yield from _codes("blocks", codes, transposed, rows, columns)
    yield from _scales("blocks", scale, inverse, rows)
    yield from _scales("transposed blocks", scale_t, inverse_t, columns)
    if x.shape[0] % 128 == x.shape[1] % 128 == 0:
        codes, transposed, scale, inverse = casts.squares(x, e5m2=fmt == E5M2)
        square = scaling.quantize(x, fmt, granularity="blockwise_128x128")
        yield from _codes("squares", codes, transposed, square, square)
        yield from _scales("squares", scale, inverse, square)


def _both(x: Tensor, fmt: Format, granularity: str) -> tuple[Quantized, Quantized]:
    """x along its last axis and along its first, by plain operations."""
    along, down = (
        scaling.quantize(x, fmt, granularity=granularity, axis=axis, ragged=True)
        for axis in (-1, -2)
    )
    return along, down


def _codes(
    by: str, codes: Tensor, transposed: Tensor, rows: Quantized, columns: Quantized
) -> Results:
    # as float32, which tells all codes apart but those of NaN, of which each is as good (C-5)
    name = f"codes of {rows.fmt.name} by {by}"
    yield name, codes.float(), rows.codes.float()
    yield f"transposed {name}", transposed.float(), columns.codes.t().float()


def _scales(by: str, scale: Tensor, inverse: Tensor, plain: Quantized) -> Results:
    yield f"scales of {by}", scale, plain.scale
    yield f"inverse scales of {by}", inverse, plain.scale_inv


def _same(result: Tensor, plain: Tensor) -> bool:
    """Whether shapes and bits are the same; a NaN is as good as another."""
    if result.shape != plain.shape or result.dtype != plain.dtype:
        return False
    if not result.dtype.is_floating_point:
        return torch.equal(result, plain)
    nan = result.isnan() & plain.isnan()
    return bool((nan | (result.view(torch.int32) == plain.view(torch.int32))).all())
