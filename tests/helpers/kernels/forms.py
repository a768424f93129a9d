"""The launches of every kernel, as a step of training has them: whole tiles, 16 bytes apart."""

import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import triton

from fp8ref import kernels
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
from fp8ref.kernels.jit import Launch
from fp8ref.spec.states import layouts


@dataclass(frozen=True)
class Form:
    """A launch, and what a program of it reads and writes.

    dtypes  of its pointers.
    tile    elements of a program's tile.
    read    bytes of tensors that it reads, by 16 at a time; of lines and scales none.
    codes   how many tiles of codes it writes; 1: codes that it moves.
    """

    launch: Launch
    dtypes: tuple[str, ...]
    tile: int
    read: int
    codes: int = 0


SHAPE = (4096, 8192)
HEADS = (2, 4096, 32, 128)  # [B, T, H, D]
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
CODES, PARTS, ONE = ("uint8", "uint8"), ("int32",), ("float32",)


def forms(dtype: str = "bfloat16", *, e5m2: bool = False, transposed: bool = False):
    """{name: form} of every kernel. transposed: x is a transposed view, where a kernel takes one."""
    return (
        _casts(dtype, e5m2, transposed)
        | _lists(dtype, e5m2)
        | _fused(dtype, e5m2)
        | _adamw(dtype, e5m2)
        | _in_blocks(dtype)
    )


def _casts(dtype: str, e5m2: bool, transposed: bool) -> dict[str, Form]:
    x, strides = (dtype,), (1, SHAPE[0]) if transposed else (SHAPE[1], 1)
    size, tile, block = BYTES[dtype], casts.ROWS * casts.COLUMNS, casts.BLOCK**2
    whole = {"tile": tile, "read": tile * size}
    blocks = {"tile": block, "read": block * size, "codes": 2}
    cast = casts.cast(SHAPE, strides, e5m2=e5m2)
    by_amax = casts.cast_by_amax(SHAPE, strides, e5m2=e5m2)
    lines = casts.cast_lines(SHAPE, strides, e5m2=e5m2)
    by_amaxes = casts.cast_lines_by_amaxes(SHAPE, strides, e5m2=e5m2, power=True)
    code = CODES[:1]
    of_lines_by_amaxes = (*x, *PARTS * 2, *code, *ONE * 2, *code, *ONE * 2)
    recast = casts.recast(SHAPE, strides, e5m2=e5m2)
    by_power = casts.cast_by_amax(SHAPE, strides, e5m2=e5m2, power=True)
    more = (*x, *PARTS, *ONE, *CODES, *ONE * 3)
    squares, of_lines = (
        casts.blocks(SHAPE, strides, e5m2=e5m2, square=square) for square in (True, False)
    )
    return {
        "amax": Form(casts.amax(SHAPE, strides), (*x, *PARTS), **whole),
        "amax_lines": Form(casts.amax_lines(SHAPE, strides), (*x, *PARTS, *PARTS), **whole),
        "cast_lines_by_amaxes": Form(by_amaxes, of_lines_by_amaxes, codes=2, **whole),
        "scaled": Form(casts.scaled(SHAPE, strides), (*x, *ONE, *ONE, *x), **whole),
        "cast": Form(cast, (*x, *ONE, *CODES, *PARTS), codes=2, **whole),
        "cast_by_amax": Form(by_amax, (*x, *PARTS, *CODES, *ONE, *ONE), codes=2, **whole),
        "cast_by_amax, power": Form(by_power, (*x, *PARTS, *CODES, *ONE * 2), codes=2, **whole),
        "recast": Form(recast, more, codes=2, **whole),
        "transpose": Form(casts.transpose(SHAPE, (SHAPE[1], 1)), CODES, tile, tile, codes=1),
        "merge": Form(casts.merge((4096,)), (*PARTS, *ONE, *ONE), tile=1, read=0),
        "cast_lines": Form(lines, (*x, *ONE, *ONE, *CODES), codes=2, **whole),
        "squares": Form(squares, (*x, *CODES, *ONE * 2), **blocks),
        "lines": Form(of_lines, (*x, *CODES, *ONE * 4), **blocks),
    }


def _lists(dtype: str, e5m2: bool) -> dict[str, Form]:
    """Of ragged tiles, whose sides are multiples of 16."""
    shapes, tile = [SHAPE, (1040, 80)], casts.ROWS * casts.COLUMNS
    size, x = tile * BYTES[dtype], (dtype, "int32")
    dtypes = (*x, *ONE, *PARTS, *CODES, *ONE * 2)
    forms = {"amaxes of a list": Form(cast_lists.amax(shapes, wide=True), (*x, *PARTS), tile, size)}
    for name, given, by_amax in (
        ("", True, False),
        (" by amaxes", False, True),
        (", again", True, True),
    ):
        cast = cast_lists.cast(
            shapes, wide=True, e5m2=e5m2, power=by_amax, given=given, by_amax=by_amax
        )
        forms[f"cast of a list{name}"] = Form(cast, dtypes, tile, size, codes=2)
    return forms


def _fused(dtype: str, e5m2: bool) -> dict[str, Form]:
    x, size, tile = (dtype,), BYTES[dtype], casts.ROWS * casts.COLUMNS
    small, row = swiglu.ROWS * swiglu.COLUMNS, SHAPE[1]
    norm, of_sum = (norms.statistics(SHAPE, eps=1e-5, residual=more) for more in (False, True))
    gradients = swiglu.cast_gradients(SHAPE, e5m2=e5m2)
    of_lines, block = (*CODES, *ONE * 4), casts.BLOCK**2
    lines, gradient_lines = (
        make(SHAPE, e5m2=e5m2) for make in (swiglu.lines, swiglu.gradient_lines)
    )
    return {
        "norm": Form(norm, (*x, *x, *ONE, *PARTS), row, row * size),
        "norm of a sum": Form(of_sum, (*x * 3, *x, *ONE, *PARTS), row, 2 * row * size),
        "norm, cast": Form(
            norms.cast(SHAPE, e5m2=e5m2),
            (*x, *ONE, *x, *ONE, *CODES, *PARTS),
            tile,
            tile * size,
            codes=2,
        ),
        **_norms_at_once(dtype, e5m2),
        **{
            f"norm's gradient, {count} readers": Form(
                norm_gradients.gradient(SHAPE, count),
                (*x * (count + 2), *ONE, *x, *x, *ONE, *PARTS),
                row,
                (count + 2) * row * size,
            )
            for count in (2, 3)
        },
        "swiglu, amax": Form(swiglu.amax(SHAPE), (*x * 2, *PARTS), tile, 2 * tile * size),
        "swiglu": Form(
            swiglu.cast(SHAPE, e5m2=e5m2),
            (*x * 2, *ONE, *CODES, *PARTS),
            tile,
            2 * tile * size,
            codes=2,
        ),
        "swiglu's gradients, amaxes": Form(
            swiglu.gradient_amaxes(SHAPE), (*x * 3, *PARTS * 2), small, 3 * small * size
        ),
        "swiglu's gradients": Form(
            gradients, (*x * 3, *ONE * 2, *CODES * 2, *PARTS * 2), small, 3 * small * size, codes=4
        ),
        "swiglu, twice": Form(
            swiglu.cast(SHAPE, e5m2=e5m2, twice=True),
            (*x * 2, *ONE, *CODES, *PARTS),
            tile,
            2 * tile * size,
            codes=2,
        ),
        "norm, cast twice": Form(
            norms.cast(SHAPE, e5m2=e5m2, twice=True),
            (*x, *ONE, *x, *ONE, *CODES, *PARTS),
            tile,
            tile * size,
            codes=2,
        ),
        **_fused_lines(dtype, e5m2),
        "swiglu, lines": Form(lines, (*x * 2, *of_lines), block, 2 * block * size, codes=2),
        "swiglu's gradients, lines": Form(
            gradient_lines, (*x * 3, *of_lines * 2), block, 3 * block * size, codes=4
        ),
        **_rotations(dtype, e5m2),
    }


def _rotations(dtype: str, e5m2: bool) -> dict[str, Form]:
    """A rotary embedding and its gradient, in each form."""
    head, heads = rotary.ROWS * HEADS[3], (dtype, *ONE * 2)
    read = head * BYTES[dtype]
    strides = (HEADS[1] * HEADS[2] * HEADS[3], HEADS[2] * HEADS[3], HEADS[3])
    forms = {}
    for form in rotary.FORMS:
        name = "rotary" if form == rotary.FORMS[0] else f"rotary in {form}"
        forward, amax = rotary.rotate(HEADS, form=form), rotary.amax(HEADS, strides, form=form)
        cast = rotary.cast(HEADS, strides, e5m2=e5m2, form=form)
        cast_lines = rotary.cast_lines(HEADS, strides, e5m2=e5m2, form=form)
        lines = rotary.lines(HEADS, strides, e5m2=e5m2, form=form)
        of_lines = rotary.amax_lines(HEADS, strides, form=form)
        forms |= {
            f"{name}, forward": Form(forward, (*heads, dtype), head, read),
            f"{name}, amax": Form(amax, (*heads, *PARTS), head, read),
            name: Form(cast, (*heads, *ONE, *CODES, *PARTS), head, read, codes=2),
            f"{name}, amax lines": Form(of_lines, (*heads, *PARTS * 2), head, read),
            f"{name}, cast lines": Form(cast_lines, (*heads, *ONE * 2, *CODES), head, read, 2),
            f"{name}, lines": Form(
                lines, (*heads, *CODES, *ONE * 4), casts.BLOCK**2, casts.BLOCK**2 * BYTES[dtype], 2
            ),
        }
    return forms


def _norms_at_once(dtype: str, e5m2: bool) -> dict[str, Form]:
    """Statistics and cast in one launch, which reads its tile again."""
    x, tile = (dtype,), norms.ROWS * norms.COLUMNS
    size, made = tile * BYTES[dtype], (*ONE, *CODES, *PARTS)
    norm, twice = (
        norms.statistics_and_cast(SHAPE, eps=1e-5, e5m2=e5m2, twice=more) for more in (False, True)
    )
    of_sum = norms.statistics_and_cast(SHAPE, eps=1e-5, e5m2=e5m2, residual=True)
    dtypes, of_two = (*x * 2, *ONE, *made), (*x * 3, *ONE, *x, *made)
    return {
        "norm and cast": Form(norm, dtypes, tile, 2 * size, codes=2),
        "norm and cast twice": Form(twice, dtypes, tile, 2 * size, codes=2),
        "norm and cast of a sum": Form(of_sum, of_two, tile, 3 * size, codes=2),
    }


def _fused_lines(dtype: str, e5m2: bool) -> dict[str, Form]:
    """Amaxes and casts by rows and columns, and a norm by blocks."""
    x, size = (dtype,), BYTES[dtype]
    tile, small = casts.ROWS * casts.COLUMNS, swiglu.ROWS * swiglu.COLUMNS
    block = casts.BLOCK**2
    norm, two, of_lines = (*x, *ONE, *x), ONE * 2, (*CODES, *ONE * 4)
    cast_norm, of_norm = (f(SHAPE, e5m2=e5m2) for f in (norms.cast_lines, norms.lines))
    cast, gradients = (f(SHAPE, e5m2=e5m2) for f in (swiglu.cast_lines, swiglu.cast_gradient_lines))
    of_three = swiglu.gradient_amax_lines(SHAPE)
    return {
        "norm, amax lines": Form(norms.amax_lines(SHAPE), (*norm, *PARTS * 2), tile, tile * size),
        "norm, cast lines": Form(cast_norm, (*norm, *two, *CODES), tile, tile * size, codes=2),
        "norm, lines": Form(of_norm, (*norm, *of_lines), block, block * size, codes=2),
        "swiglu, amax lines": Form(
            swiglu.amax_lines(SHAPE), (*x * 2, *PARTS * 2), tile, 2 * tile * size
        ),
        "swiglu, cast lines": Form(cast, (*x * 2, *two, *CODES), tile, 2 * tile * size, codes=2),
        "swiglu's gradients, amax lines": Form(
            of_three, (*x * 3, *PARTS * 4), small, 3 * small * size
        ),
        "swiglu's gradients, cast lines": Form(
            gradients, (*x * 3, *two * 2, *CODES * 2), small, 3 * small * size, codes=4
        ),
    }


def _adamw(dtype: str, e5m2: bool) -> dict[str, Form]:
    tile = adamw.TILE[0] * adamw.TILE[1]
    read = tile * (3 * 4 + BYTES[dtype])
    state, new = ("float32", dtype, *ONE * 2, *ONE), (*ONE * 3, "bfloat16")
    step, cast = adamw.step(SHAPE), adamw.step_and_cast(SHAPE, e5m2=e5m2)
    return {
        "adamw": Form(step, (*state, *new, *PARTS), tile, read),
        "adamw, cast": Form(cast, (*state, *ONE, *new, *CODES, *PARTS), tile, read, codes=2),
    }


SIXTEEN_BITS_ON_HOPPER = {("bfloat16", 90), ("float16", 90)}
"""Where the registers of a kernel of 128 x 128 hold what it computes of three tensors. Elsewhere 40
to 180 bytes of a thread are in memory; GEMMs in blocks of 128 are Hopper's."""


def _in_blocks(dtype: str) -> dict[str, Form]:
    """AdamW with moments in blocks."""
    forms = {}
    for name in ("sqrt_e4m3", "torchao", "coat", "sqrt_e4m3_f16"):
        layout = (layouts.LAYOUTS | layouts.WITH_MASTERS)[name]
        p = "float16" if layout.keeps_master else "float32"
        assert layout.m.block is not None
        tile = adamw_blocks.ROWS * layout.m.block
        launch = adamw_blocks.step(SHAPE[0] * SHAPE[1] // layout.m.block, layout)
        moment = ("uint8", *ONE * 3)
        read = tile * (BYTES[p] + BYTES[dtype] + 2)
        dtypes = (p, dtype, *ONE, *moment * 2, p, *moment * 2, *PARTS)
        forms[f"adamw, {name}"] = Form(launch, dtypes, tile, read, codes=2)
    return forms


FORMS = tuple(forms())
"""The names of ``forms``."""

EVERY = tuple(
    launch
    for launch in itertools.product(FORMS, BYTES, (False, True), (False, True), (90, 100))
    if launch[0] != "swiglu's gradients, lines" or (launch[1], launch[4]) in SIXTEEN_BITS_ON_HOPPER
)
"""(name, dtype, e5m2, transposed, capability) of every launch that is checked."""


def launched_kernels() -> set[Callable]:
    """The kernels that a public function launches."""
    modules = [
        importlib.import_module(f"fp8ref.kernels.{module.name}")
        for module in pkgutil.iter_modules(kernels.__path__)
    ]
    return {
        value.fn
        for module in modules
        for function in map(vars(module).get, module.__all__)
        if inspect.isfunction(function)
        for value in map(vars(module).get, function.__code__.co_names)
        if isinstance(value, triton.JITFunction)
    }
