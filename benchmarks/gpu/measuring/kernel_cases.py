"""Launches of ``fp8ref.kernels`` alone: what they take and return, what the simulator says that it
is, and the same computed by a framework's own operations.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from fp8ref.kernels import adamw, casts, norms, swiglu
from fp8ref.kernels.jit import Launch
from fp8ref.sim.quantize import scaling
from fp8ref.sim.quantize.scaling import Scales
from measuring import timing
from measuring.timing import Call

FORMATS = ("e4m3fn", "e5m2")
PLAIN = ", plain"  # ends the name of a case that a framework computes by its own operations
NEEDED = 15  # seconds of a case, compiling included
SCALE, BLOCK = np.float32(3.1415927), casts.BLOCK
Shape = tuple[int, ...]
Typed = tuple[Shape, str]


@dataclass(frozen=True, kw_only=True)
class Operations:
    """A framework's own, each rounded to its result's dtype.

    codes    of (float32, format): clipped, to nearest even; amax of (x, axes), which stay.
    """

    float32: Callable[[Any], Any]
    bfloat16: Callable[[Any], Any]
    codes: Callable[[Any, str], Any]
    amax: Callable[[Any, tuple[int, ...]], Any]
    transposed: Callable[[Any], Any]
    silu: Callable[[Any], Any]
    reshaped: Callable[[Any, Shape], Any]


@dataclass(frozen=True)
class Case:
    """A launch, its inputs and outputs, and ``plain``: operations and inputs -> outputs."""

    name: str
    launch: Launch
    inputs: tuple[Typed, ...]
    outputs: tuple[Typed, ...]
    plain: Callable[..., Any]

    @property
    def bytes(self) -> int:
        """What must be read and written."""
        return sum(
            math.prod(shape) * np.dtype(_STORED.get(dtype, dtype)).itemsize
            for shape, dtype in (*self.inputs, *self.outputs)
        )


_STORED = {"bfloat16": ml_dtypes.bfloat16}


def cases(shape: tuple[int, int], fmt: str = FORMATS[0]) -> list[Case]:
    """Launches on bfloat16 tensors [M, N]."""
    m, n = shape
    strides, e5m2 = (n, 1), fmt == "e5m2"
    x, both = (shape, "bfloat16"), ((shape, "uint8"), ((n, m), "uint8"))
    one, parts = ((), "float32"), lambda launch: ((launch.programs,), "int32")
    rows, columns = casts.tiles(m, n, (BLOCK, BLOCK))
    amax, cast = casts.amax(shape, strides), casts.cast(shape, strides, e5m2=e5m2)
    lines = casts.cast_lines(shape, strides, e5m2=e5m2)
    blocks = casts.blocks(shape, strides, e5m2=e5m2, square=False)
    squares = casts.blocks(shape, strides, e5m2=e5m2, square=True)
    gated, normed = swiglu.cast(shape, e5m2=e5m2), norms.cast(shape, e5m2=e5m2)

    def in_both(ops: Operations, x: Any, scale: Any) -> tuple[Any, Any]:
        codes = ops.codes(ops.float32(x) * scale, fmt)
        return codes, ops.transposed(codes)

    def by_tensor(ops: Operations, x: Any, scale: Any):
        return *in_both(ops, x, scale), ops.amax(x, (0, 1))

    def by_line(ops: Operations, x: Any, along: Any, down: Any):
        wide = ops.float32(x)
        codes = ops.codes(wide * ops.reshaped(along, (m, 1)), fmt)
        return codes, ops.transposed(ops.codes(wide * ops.reshaped(down, (1, n)), fmt))

    def by_block(ops: Operations, x: Any, tile: tuple[int, int]):
        cut = ops.float32(ops.reshaped(x, (m // tile[0], tile[0], n // tile[1], tile[1])))
        scale = LARGEST[fmt] / ops.amax(cut, (1, 3))
        return ops.reshaped(ops.codes(cut * scale, fmt), shape), scale

    def by_blocks(ops: Operations, x: Any):
        (codes, scale), (turned, scale_t) = (
            by_block(ops, x, (1, BLOCK)),
            by_block(ops, x, (BLOCK, 1)),
        )
        return codes, ops.transposed(turned), scale, 1 / scale, scale_t, 1 / scale_t

    def by_square(ops: Operations, x: Any):
        codes, scale = by_block(ops, x, (BLOCK, BLOCK))
        return codes, ops.transposed(codes), scale, 1 / scale

    def of_swiglu(ops: Operations, gate: Any, up: Any, scale: Any):
        return by_tensor(ops, ops.bfloat16(ops.silu(ops.float32(gate)) * ops.float32(up)), scale)

    def of_norm(ops: Operations, h: Any, factor: Any, weight: Any, scale: Any):
        normal = ops.float32(h) * ops.reshaped(factor, (m, 1)) * ops.float32(weight)
        return by_tensor(ops, ops.bfloat16(normal), scale)

    def of_adamw(ops: Operations, p: Any, g: Any, m: Any, v: Any, numbers: Any, scale: Any):
        b1, a1, b2, a2, by_1, by_2, rate, eps, decay, _ = (numbers[i] for i in range(10))
        g = ops.float32(g)
        m, v = b1 * m + a1 * g, b2 * v + a2 * g * g
        p = p - rate * (m * by_1 / ((v * by_2) ** 0.5 + eps) + decay * p)
        return p, m, v, ops.bfloat16(p), *by_tensor(ops, ops.bfloat16(p), scale)

    stepped, wide = adamw.step_and_cast(shape, e5m2=e5m2), (shape, "float32")
    scales = tuple((size, "float32") for size in ((m, columns), (m, columns), (rows, n), (rows, n)))
    return [
        Case(f"cast {fmt}", cast, (x, one), (*both, parts(cast)), by_tensor),
        Case("amax", amax, (x,), (parts(amax),), lambda ops, x: ops.amax(x, (0, 1))),
        Case(f"blocks 1x128 {fmt}", blocks, (x,), (*both, *scales), by_blocks),
        Case(
            f"blocks 128x128 {fmt}",
            squares,
            (x,),
            (*both, *[((rows, columns), "float32")] * 2),
            by_square,
        ),
        Case(f"lines {fmt}", lines, (x, ((m,), "float32"), ((n,), "float32")), both, by_line),
        Case(f"SwiGLU, cast {fmt}", gated, (x, x, one), (*both, parts(gated)), of_swiglu),
        Case(
            f"norm, cast {fmt}",
            normed,
            (x, ((m,), "float32"), ((n,), "bfloat16"), one),
            (*both, parts(normed)),
            of_norm,
        ),
        Case(
            f"AdamW, cast {fmt}",
            stepped,
            (wide, x, wide, wide, ((len(adamw.NUMBERS),), "float32"), one),
            (wide, wide, wide, x, *both, parts(stepped)),
            of_adamw,
        ),
    ]


LARGEST = {"e4m3fn": 448.0, "e5m2": 57344.0}


def every_bfloat16(shape: tuple[int, int]) -> np.ndarray:
    """All bit patterns, as many as a shape takes."""
    bits = np.arange(math.prod(shape), dtype=np.uint32).astype(np.uint16)
    return bits.view(ml_dtypes.bfloat16).reshape(shape)


def exact(shape: tuple[int, int], fmt: str) -> list[tuple[Case, list[np.ndarray]]]:
    """Launches whose bits the simulator has, and these bits, of ``every_bfloat16``; scales and
    weights among the inputs are SCALE.
    """
    x, found = every_bfloat16(shape), {case.name: case for case in cases(shape, fmt)}
    with np.errstate(all="ignore"):
        by_one = scaling.quantize_with(x, Scales(SCALE, np.float32(1) / SCALE), fmt).codes
        along, down = (
            scaling.quantize(x, fmt, granularity="blockwise_1x128", axis=axis, ragged=True)
            for axis in (1, 0)
        )
        square = scaling.quantize(x, fmt, granularity="blockwise_128x128", ragged=True)
    return [
        (found[f"cast {fmt}"], [by_one, by_one.T]),
        (found[f"lines {fmt}"], [by_one, by_one.T]),
        (
            found[f"blocks 1x128 {fmt}"],
            [along.codes, down.codes.T, along.scale, along.scale_inv, down.scale, down.scale_inv],
        ),
        (
            found[f"blocks 128x128 {fmt}"],
            [square.codes, square.codes.T, square.scale, square.scale_inv],
        ),
    ]


Run = Callable[[Launch, list[np.ndarray], Sequence[Typed]], list[np.ndarray]]


def bits(run: Run, shapes: Sequence[tuple[int, int]]) -> list[dict]:
    """Rows: how many codes and scales differ, in either order; an error where some do. run: of a
    launch on NumPy arrays, on the device.
    """
    rows = []
    for shape in shapes:
        x = every_bfloat16(shape)
        for fmt in FORMATS:
            for case, expected in exact(shape, fmt):
                more = [np.full(size, SCALE, dtype) for size, dtype in case.inputs[1:]]
                written = run(case.launch, [x, *more], case.outputs)
                pairs = zip(written, expected, strict=False)
                differ = sum(int((_bits(a) != _bits(b)).sum()) for a, b in pairs)
                name = f"{case.name}, {shape[0]} x {shape[1]}"
                wrong = (
                    {"error": f"{differ} codes or scales differ from the simulator's"}
                    if differ
                    else {}
                )
                rows.append({"name": name, "differ": differ} | wrong)
    return rows


def _bits(x: np.ndarray) -> np.ndarray:
    """Codes, or bits of float32 with one NaN."""
    if x.dtype != np.float32:
        return np.ascontiguousarray(x).view(np.uint8)
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32)


Calls = tuple[Call, Call, int]
"""A call of the kernel, one of plain operations, and how many of either a call makes."""


def timed(bench: Any, shapes: Sequence[tuple[int, int]], calls: Callable[[Case], Calls]) -> dict:
    """Rows of kernels and of plain operations: seconds, and bytes that must move a second. Without
    time for a case, its error.
    """
    rows = []
    for shape in shapes:
        for case in cases(shape):
            name = f"{case.name}, {shape[0]} x {shape[1]}"
            if bench.budget.left < NEEDED and not bench.dry:
                rows.append({"name": name, "error": "no time was left"})
                continue
            kernel, plain, each = calls(case)
            measured = timing.each(bench.timed({name: kernel, name + PLAIN: plain}), each)
            rows += rates(case, timing.rows(measured, name + PLAIN))
            bench.free()
    return {"rows": [], "kernels": rows}


def rates(case: Case, rows: Sequence[dict]) -> list[dict]:
    """Rows of ``timing.rows`` with ``bytes_per_second``."""
    return [
        row | {"bytes_per_second": case.bytes / row["seconds"]} if "seconds" in row else row
        for row in rows
    ]
