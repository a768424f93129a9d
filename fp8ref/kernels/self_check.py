"""What kernels compute on a device, compared with their interpretation on the host (M-11).

NumPy's operations interpret them, each rounded. Results are compared bit by bit, except where a
device approximates an exponential or sums in another order: there a result may be a neighbor.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from fp8ref.kernels import (
    adamw,
    adamw_blocks,
    cast_lists,
    casts,
    norm_gradients,
    norms,
    rotary,
    swiglu,
)
from fp8ref.kernels.jit import Launch, Output, interpret

__all__ = ["failure"]

_SHAPE, _ROWS = (128, 128), 8
_SHAPES = _SHAPE, (136, 72)
"""Of whole tiles, and of ragged ones."""
_HEADS = (1, 128, 2, 64)
_BF16 = np.dtype(ml_dtypes.bfloat16)


def failure(run: Callable[[Launch, Sequence[np.ndarray], Sequence[Output]], Sequence[Any]]) -> str:
    """The first kernel whose results on a device differ, in a few words; "" if none does.

    run   runs a launch on inputs there, and returns outputs of these shapes and dtypes.
    """
    for name, approximate, launch, inputs, outputs in _launches():
        expected = [np.zeros(shape, np.dtype(dtype)) for shape, dtype in outputs]
        arrays = [*inputs, *expected]
        interpret(launch, arrays, [x.dtype.name for x in arrays])
        for result, plain in zip(run(launch, inputs, outputs), expected, strict=True):
            if not _same(np.asarray(result), plain, approximate):
                return f"results of {name} differ from those of plain operations"
    return ""


def _launches() -> Iterator[tuple[str, bool, Launch, list[np.ndarray], list[Output]]]:
    """(name, whether it approximates, launch, inputs, outputs) of each kernel."""
    for name, approximate, launch, inputs in _launches_into_new_memory():
        yield name, approximate, launch, inputs, launch.memory(inputs[0].dtype.name)
    yield from _adamw_launches()
    for shape in _SHAPES:
        for e5m2 in (False, True):
            yield from _list_launches(shape, e5m2)


def _launches_into_new_memory() -> Iterator[tuple[str, bool, Launch, list[np.ndarray]]]:
    for shape in _SHAPES:
        for e5m2 in (False, True):
            for name, launch, inputs in _cast_launches(shape, e5m2):
                yield name, False, launch, inputs
    x, y, z = (_planted(_SHAPE, seed) for seed in range(3))
    few, one = (_ROWS, _SHAPE[1]), np.full((), 3.1415927, np.float32)
    factors = np.abs(_planted(_SHAPE[:1], 3)).astype(np.float32)
    for twice, e5m2 in ((False, False), (True, True)):
        norm = norms.statistics(few, eps=1e-5, twice=twice)
        yield "a norm", True, norm, [x, z[0]]
        norm = norms.statistics(few, eps=1e-5, residual=True, twice=twice)
        yield "a norm of a sum", True, norm, [x, y, z[0]]
        norm = norms.statistics_and_cast(_SHAPE, eps=1e-5, e5m2=e5m2, residual=twice, twice=twice)
        whole = [_whole(_SHAPE, seed, 8) for seed in range(1 + twice)]  # exact squares
        yield "a norm and its cast", False, norm, [*whole, z[0], one]
        cast = norms.cast(_SHAPE, e5m2=e5m2, twice=twice)
        norm_gradient = norm_gradients.gradient(few, 2 + twice)
        # of integers, whose sums are exact in any order
        gradients = [_whole(few, seed, 256) for seed in range(2 + twice)]
        powers = np.exp2(_whole(few[:1], 3, 1)).astype(np.float32)
        inputs = [*gradients, z, _whole(few, 4, 8), powers, _whole(few[1:], 5, 2)]
        yield "a norm's gradient", False, norm_gradient, inputs
        yield "a norm's cast", False, cast, [x, factors, z[0], one]
        amax, cast = swiglu.amax(_SHAPE, twice=twice), swiglu.cast(_SHAPE, e5m2=e5m2, twice=twice)
        yield "SwiGLU's amax", True, amax, [x, y]
        yield "SwiGLU", True, cast, [x, y, one]
        amax = swiglu.gradient_amaxes(_SHAPE, twice=twice)
        yield "SwiGLU's gradients' amaxes", True, amax, [z, x, y]
        cast = swiglu.cast_gradients(_SHAPE, e5m2=e5m2, twice=twice)
        yield "SwiGLU's gradients", True, cast, [z, x, y, one, one]
        # of gates whose exponential 1 + exp(-gate) loses, so that scales are exact
        gate = (32 + np.abs(x.astype(np.float32))).astype(_BF16)
        for name, launch, inputs in _by_lines([gate, x, y, z], factors, e5m2, twice):
            yield f"{name} by lines", False, launch, inputs
        yield from _rotary_launches(e5m2, one)


def _cast_launches(shape: tuple[int, int], e5m2: bool):
    """Of a tensor with NaN and Inf in a row and a column, and of finite ones in other rows."""
    finite, strides = _planted(shape, 13, exponents=(-14, 9)), (shape[1], 1)
    one, x = np.full((), 3.1415927, np.float32), finite.copy()
    x[3, :9], x[:9, 5] = np.nan, -np.inf
    codes = x.view(np.uint8)[:, : shape[1]].copy()
    parts = np.zeros(math.prod(casts.tiles(*shape)), np.int32)
    parts[-1] = _bits(finite).max()
    yield "a cast", casts.cast(shape, strides, e5m2=e5m2), [x, one]
    turned = casts.cast(shape[::-1], strides[::-1], e5m2=e5m2)
    yield "a cast of a transposed tensor", turned, [x, one]
    yield "an amax", casts.amax(shape, strides), [x]
    lines = casts.amax_lines(shape, strides)
    yield "amaxes of lines", lines, [x]
    of_rows, of_columns = (np.zeros(output, np.int32) for output, _ in lines.outputs)
    of_rows[-1], of_columns[0] = _bits(x).max(1), _bits(x).max(0)
    for power in (False, True):
        cast = casts.cast_by_amax(shape, strides, e5m2=e5m2, power=power)
        yield "a cast by its amax", cast, [finite, parts]
        cast = casts.cast_lines_by_amaxes(shape, strides, e5m2=e5m2, power=power)
        yield "a cast of lines by their amaxes", cast, [x, of_rows, of_columns]
    yield "a cast by a guess", casts.recast(shape, strides, e5m2=e5m2), [finite, parts, one]
    scales = [np.abs(_planted(shape[i : i + 1], 14)).astype(np.float32) for i in (0, 1)]
    yield "a cast of lines", casts.cast_lines(shape, strides, e5m2=e5m2), [x, *scales]
    yield "a scaled product", casts.scaled(shape, strides), [finite, *scales]
    for square in (False, True):
        cast = casts.blocks(shape, strides, e5m2=e5m2, square=square)
        yield "a cast in blocks", cast, [x if e5m2 else finite]
    yield "transposed codes", casts.transpose(shape, strides), [codes]
    yield "merged amaxes", casts.merge(parts.shape), [parts, np.zeros(3, np.float32)]


def _list_launches(shape: tuple[int, int], e5m2: bool):
    """Of a matrix, and of its last rows."""
    (m, n), x = shape, _planted(shape, 15)
    half, shapes, wide = m // 2 * n, [shape, (m // 2, n)], shape == _SHAPE
    rows = [m, n, n, 1, 0, 0, 0, 0, 0, 2], [m // 2, n, n, 1, half, m * n, m * n, 1, 2, 1]
    inputs = [x, np.array(rows).T.copy().view(np.int32), np.array([3.1415927, 0.7], np.float32)]
    codes: Output = ((m * n + half,), "uint8")
    outputs: list[Output] = [codes, codes, *[((2, 4), "float32")] * 2]
    amax, cast = cast_lists.amax(shapes, wide=wide), cast_lists.cast(shapes, wide=wide, e5m2=e5m2)
    parts: Output = amax.grid[::-1], "int32"
    yield "amaxes of a list", False, amax, inputs[:2], [parts]
    yield "a cast of a list", False, cast, inputs, [parts, *outputs]
    inputs.append(_bits(np.array([1.5, 5.5, 7.5])))
    for power in (False, True):
        numbers = cast.numbers | {"BY_AMAX": True, "GIVEN": power, "POWER": power}
        by_amax = dataclasses.replace(cast, numbers=numbers)
        yield "a cast of a list by its amaxes", False, by_amax, inputs, outputs


def _bits(x: np.ndarray) -> np.ndarray:
    """Bits of magnitudes of float32."""
    return np.abs(x.astype(np.float32)).view(np.int32)


def _by_lines(tensors: Sequence[np.ndarray], factors: np.ndarray, e5m2: bool, twice: bool):
    gate, x, y, z = tensors
    norm, product, gradients = [x, factors, z[0]], [gate, y], [z, gate, y]
    scales, shape = [factors, factors[::-1].copy()], _SHAPE
    yield "a norm's amaxes", norms.amax_lines(shape, twice=twice), norm
    cast = norms.cast_lines(shape, e5m2=e5m2, twice=twice)
    yield "a norm's cast", cast, [*norm, *scales]
    yield "a norm", norms.lines(shape, e5m2=e5m2, twice=twice), norm
    yield "SwiGLU's amaxes", swiglu.amax_lines(shape, twice=twice), product
    cast = swiglu.cast_lines(shape, e5m2=e5m2, twice=twice)
    yield "SwiGLU's cast", cast, [*product, *scales]
    yield "SwiGLU", swiglu.lines(shape, e5m2=e5m2, twice=twice), product
    yield "gradients' amaxes", swiglu.gradient_amax_lines(shape, twice=twice), gradients
    cast = swiglu.cast_gradient_lines(shape, e5m2=e5m2, twice=twice)
    yield "gradients' cast", cast, [*gradients, *scales * 2]
    yield "gradients", swiglu.gradient_lines(shape, e5m2=e5m2, twice=twice), gradients
    heads, tables = (1, shape[0], 1, shape[1]), [t.astype(np.float32) for t in (x, y)]
    rotated, strides = [z.reshape(heads), *tables], (z.size, shape[1], shape[1])
    for form in rotary.FORMS:
        amaxes = rotary.amax_lines(heads, strides, form=form)
        cast = rotary.cast_lines(heads, strides, e5m2=e5m2, form=form)
        lines = rotary.lines(heads, strides, e5m2=e5m2, form=form)
        yield f"a rotary gradient's amaxes, of {form}", amaxes, rotated
        yield f"a rotary gradient's cast, of {form}", cast, [*rotated, *scales]
        yield f"a rotary gradient of {form}", lines, rotated


def _rotary_launches(e5m2: bool, one: np.ndarray):
    g = _planted(_HEADS, 4)
    cos, sin = (_planted((_HEADS[1], _HEADS[3]), seed).astype(np.float32) for seed in (5, 6))
    strides = (g.size, _HEADS[2] * _HEADS[3], _HEADS[3])
    for form in rotary.FORMS:
        amax = rotary.amax(_HEADS, strides, form=form)
        cast = rotary.cast(_HEADS, strides, e5m2=e5m2, form=form)
        rotate = rotary.rotate(_HEADS, form=form)
        yield f"a rotary embedding of {form}", False, rotate, [g, cos, sin]
        yield f"a rotary gradient's amax, of {form}", False, amax, [g, cos, sin]
        yield f"a rotary gradient of {form}", False, cast, [g, cos, sin, one]


def _adamw_launches():
    """Of launches that write into the memory of a state."""
    g, one = _planted(_SHAPE, 2), np.full((), 3.1415927, np.float32)
    p, m, v = (_planted(_SHAPE, seed).astype(np.float32) for seed in (7, 8, 9))
    numbers = np.array([0.9, 0.1, 0.95, 0.05, 1.5, 2.0, 1.0, 1e-3, 1e-8, 0.1, 0.7], np.float32)
    state = [p, g, m, np.abs(v), numbers]
    new: list[Output] = [*[(_SHAPE, "float32")] * 3, (_SHAPE, "bfloat16")]
    step, codes = adamw.step(_SHAPE), [(_SHAPE, "uint8"), (_SHAPE[::-1], "uint8")]
    yield "AdamW", False, step, state, [*new, _parts(step)]
    for e5m2 in (False, True):
        cast = adamw.step_and_cast(_SHAPE, e5m2=e5m2)
        yield "AdamW's cast", False, cast, [*state, one], [*new, *codes, _parts(cast)]
    for expansion in (False, True):
        yield _in_blocks(expansion, [p.astype(np.float16), g], [*numbers, 1, 0.25, 4])


def _in_blocks(expansion: bool, state: list[np.ndarray], numbers: list[float]):
    """A step with moments of one block a row, and a float16 master."""
    v = SimpleNamespace(
        block=_SHAPE[1],
        floor=1e-30,
        scaling="divide" if expansion else "multiply",
        root=not expansion,
        keep=not expansion,
        expansion=expansion,
    )
    layout = SimpleNamespace(v=v, average="products", bounded=True)
    codes = _planted(_SHAPE, 10).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    scales = [np.abs(_planted(_SHAPE[:1], seed)).astype(np.float32) for seed in (11, 12)]
    exponents = np.resize(np.array([0.5, 1, 2, 4], np.float32), _SHAPE[:1])
    moment = [codes, scales[0], exponents, scales[1]]
    more: Output = (_SHAPE[:1] if expansion else (0,), "float32")
    kept: list[Output] = [(_SHAPE, "uint8"), (_SHAPE[:1], "float32"), more, more]
    inputs = [*state, np.array(numbers, np.float32), *moment * 2]
    outputs: list[Output] = [(_SHAPE, "float16"), *kept * 2, (_SHAPE[:1], "int32")]
    step = adamw_blocks.step(_SHAPE[0], layout)
    return "AdamW in blocks", False, step, inputs, outputs


def _planted(shape: tuple[int, ...], seed: int, exponents: tuple[int, int] = (-6, 3)) -> np.ndarray:
    """Finite numbers, bfloat16, with zeros of both signs and a subnormal in the first places."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(*exponents, shape))).astype(_BF16)
    x.reshape(-1)[:3] = 0.0, -0.0, 1e-40
    return x


def _whole(shape: tuple[int, ...], seed: int, largest: int) -> np.ndarray:
    """Integers up to one of at most 256, bfloat16."""
    rng = np.random.default_rng(seed)
    return rng.integers(-largest, largest, shape, endpoint=True).astype(_BF16)


def _parts(launch: Launch) -> Output:
    return (launch.programs,), "int32"


def _same(result: np.ndarray, plain: np.ndarray, approximate: bool) -> bool:
    """Whether bits are the same; of approximate results, whether codes, and amaxes of bfloat16, are
    neighbors at most, rounded twice or once, and float32 numbers as near."""
    if plain.dtype == np.float32 and approximate:
        return bool(np.allclose(result, plain, rtol=2e-5, atol=0))
    result, plain = _of_one_nan(result), _of_one_nan(plain)
    bits = np.dtype(f"i{plain.dtype.itemsize}")
    distance = np.abs(result.view(bits).astype(np.int64) - plain.view(bits).astype(np.int64))
    steps = {1: 1, 4: 2 << 16}.get(plain.dtype.itemsize, 0) if approximate else 0
    return result.shape == plain.shape and bool((distance <= steps).all())


def _of_one_nan(x: np.ndarray) -> np.ndarray:
    """Float32 numbers, or bits of magnitudes, with one NaN in place of any."""
    if x.dtype == np.int32:
        return np.minimum(x, 0x7F800001)
    return np.where(np.isnan(x), np.float32(np.nan), x) if x.dtype == np.float32 else x
