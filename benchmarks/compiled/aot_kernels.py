"""Kernels by Pallas that make codes of a matrix by rows and by columns, a linear that uses them
under ``rowwise``, and an MLP whose kernels hold its GELU.

Part of benchmarks/compiled/aot.py,
which compiles both for an H200 beside XLA's own kernels. No GPU has run them; tests run the kernels
by XLA, and compare every code and scale with ``scaling.quantize``.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from fp8ref.jax.gemm import gemm
from fp8ref.jax.quantize import cast, division, scales, scaling
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.recipe import RECIPES

RECIPE = RECIPES["rowwise"]
CAST = RECIPE.output.a
FMT, POLICY = CAST.fmt, CAST.policy
ROWS = 32  # of a program of the first kernel
HELD = (
    2**15
    # elements that a program holds in registers, two bytes each; ptxas then spills of the first
    # kernel alone, which holds maxima too
)


def rows_and_maxima(x: jax.Array, *, interpret: bool = False) -> tuple[Quantized, Quantized]:
    """Codes by rows and the columns' maxima by a kernel that reads x [M, N] once; codes by columns
    are left to XLA, which reads it again.
    """
    (m, n), held = x.shape, _held(x.shape, ROWS)
    row = pl.BlockSpec((ROWS,), lambda i: (i,))
    codes, scale, scale_inv, largest = pl.pallas_call(
        functools.partial(_first, held=held),
        grid=(m // ROWS,),
        in_specs=[_TABLE, pl.BlockSpec((ROWS, n), lambda i: (i, 0))],
        out_specs=[
            pl.BlockSpec((ROWS, n), lambda i: (i, 0)),
            row,
            row,
            pl.BlockSpec((1, n), lambda i: (i, 0)),
        ],
        out_shape=[*_of_rows(m, n), jax.ShapeDtypeStruct((m // ROWS, n), jnp.int16)],
        compiler_params=triton.CompilerParams(num_warps=16, num_stages=1),
        interpret=interpret,
        name="fp8ref_rows_and_maxima",
    )(jnp.asarray(scales._steps(FMT, POLICY)), x)
    of_columns = scales.scale_from_amax(
        cast.from_magnitude_bits(largest.max(0, keepdims=True), x.dtype), FMT, POLICY
    )
    return _quantized(codes, scale, scale_inv), scaling.quantize_with(
        x, of_columns, FMT, granularity="rowwise", axis=0
    )


def both(x: jax.Array, *, interpret: bool = False) -> tuple[Quantized, Quantized]:
    """Both sets of codes by a kernel that reads x [M, N] once, after XLA has taken the columns'
    maxima, at best in the kernel that makes x.
    """
    (m, n), rows = x.shape, _held(x.shape, x.shape[0])
    of_columns = scales.scales_from_amax(
        scaling.amax(x, "rowwise", axis=0, with_producer=True), FMT, POLICY
    )
    row = pl.BlockSpec((rows,), lambda i: (i,))
    codes, scale, scale_inv, turned = pl.pallas_call(
        _second,
        grid=(m // rows,),
        in_specs=[
            _TABLE,
            pl.BlockSpec((n,), lambda i: (0,)),
            pl.BlockSpec((rows, n), lambda i: (i, 0)),
        ],
        out_specs=[
            pl.BlockSpec((rows, n), lambda i: (i, 0)),
            row,
            row,
            pl.BlockSpec((n, rows), lambda i: (0, i)),
        ],
        out_shape=[*_of_rows(m, n), jax.ShapeDtypeStruct((n, m), cast.DTYPES[FMT.name])],
        compiler_params=triton.CompilerParams(num_warps=16, num_stages=1),
        interpret=interpret,
        name="fp8ref_both",
    )(jnp.asarray(scales._steps(FMT, POLICY)), of_columns.scale.reshape(-1), x)
    columns = Quantized(
        codes=turned.T,
        scale=of_columns.scale,
        scale_inv=of_columns.scale_inv,
        fmt=FMT,
        granularity="rowwise",
        axis=0,
    )
    return _quantized(codes, scale, scale_inv), columns


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["raw", "rows", "columns"],
    meta_fields=["together"],
)
@dataclass(frozen=True)
class Product:
    """A GEMM's result before its epilogue: bfloat16 [M, N], with scale_inv of its rows [M] and
    columns [N]; together: their product first (G-14).
    """

    raw: jax.Array
    rows: jax.Array
    columns: jax.Array
    together: bool

    def value(self) -> jax.Array:
        """[M, N] in bfloat16, as ``gemm.finish`` has it."""
        a, b, acc = self.rows[:, None], self.columns[None, :], self.raw.astype(jnp.float32)
        return rounded(acc * (a * b) if self.together else (acc * a) * b)


def lines(
    of: Callable, *given: jax.Array | Product, axis: int, interpret: bool = False
) -> Quantized:
    """The codes of of(*given), a bfloat16 matrix that is never in memory, by a kernel that reads
    each given [M, N] once.

    A program holds whole lines along ``axis``, 0 or -1, in registers: it knows their maxima before
    it writes their codes. Those of columns are written as [N, M]. Of a Product, ``of`` takes the
    value.
    """
    together = [one.together if isinstance(one, Product) else None for one in given]
    arrays = jax.tree.leaves(given)
    m, n = arrays[0].shape
    (count, length) = (m, n) if axis == -1 else (n, m)
    held = _held((count, length * len(given)), count)
    matrix = (
        pl.BlockSpec((held, n), lambda i: (i, 0))
        if axis == -1
        else pl.BlockSpec((m, held), lambda i: (0, i))
    )
    line, whole = pl.BlockSpec((held,), lambda i: (i,)), pl.BlockSpec((length,), lambda i: (0,))
    scaled = [matrix, line, whole] if axis == -1 else [matrix, whole, line]
    codes, scale, scale_inv = pl.pallas_call(
        functools.partial(_lines, of=of, axis=axis, together=together),
        grid=(count // held,),
        in_specs=[
            _TABLE,
            *(spec for one in together for spec in ([matrix] if one is None else scaled)),
        ],
        out_specs=[pl.BlockSpec((held, length), lambda i: (i, 0)), line, line],
        out_shape=_of_rows(count, length),
        compiler_params=triton.CompilerParams(num_warps=16, num_stages=1),
        interpret=interpret,
        name="fp8ref_lines",
    )(jnp.asarray(scales._steps(FMT, POLICY)), *arrays)
    found = _quantized(codes, scale, scale_inv)
    return found if axis == -1 else _transposed(found)


def rounded(x: jax.Array) -> jax.Array:
    """x in bfloat16: of a float32 master, as Flax's layers round it before their product."""
    return x.astype(jnp.bfloat16)


def gelu(h: jax.Array) -> jax.Array:
    """GELU by tanh of a bfloat16 h, in float32, rounded once."""
    return rounded(jax.nn.gelu(h.astype(jnp.float32)))


def gelu_gradient(h: jax.Array, g: jax.Array) -> jax.Array:
    """The gradient of h, of GELU's g, both in bfloat16: in float32, rounded once."""
    return rounded(jax.vjp(jax.nn.gelu, h.astype(jnp.float32))[1](g.astype(jnp.float32))[0])


class GeluMLP(nn.Module):
    """Two dense layers without bias and the GELU between, of float32 masters. A model of its own: a
    layer's ``dot_general`` sees no GELU, and no master either, as Flax rounds it first."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        up, down = (
            self.param(name, nn.initializers.lecun_normal(), shape)
            for name, shape in (
                ("up", (x.shape[-1], self.hidden)),
                ("down", (self.hidden, x.shape[-1])),
            )
        )
        return _mlp(x.reshape(-1, x.shape[-1]), up, down).reshape(x.shape)


@jax.custom_vjp
def _mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return _mlp_forward(x, up, down)[0]


def _mlp_forward(x, up, down):
    """x [M, K] bfloat16, up [K, N], down [N, K].

    GELU's output is in memory as codes alone; kept are GELU's input and codes.
    """
    x_rows, x_columns = (lines(rounded, x, axis=axis) for axis in (-1, 0))
    h = _product("output", x_rows, lines(rounded, up, axis=0))
    rows, columns = (lines(gelu, h, axis=axis) for axis in (-1, 0))
    of_n, of_k = both(rounded(down))
    return _matmul("output", rows, of_k, x.dtype), (x_columns, h, columns, of_n, up)


def _mlp_backward(residuals, g):
    x_columns, h, columns, of_n, up = residuals
    of_rows, of_columns = both(g)
    grad_down = _matmul("grad_weight", of_columns, columns, g.dtype)
    of_gelu = _product("grad_input", of_rows, of_n)
    # What nobody asks for is not compiled: the kernel of rows, and one of up's rows, without x's
    # gradient.
    grad_x = _matmul(
        "grad_input",
        lines(gelu_gradient, h, of_gelu, axis=-1),
        lines(rounded, up, axis=-1),
        g.dtype,
    )
    grad_up = _matmul("grad_weight", lines(gelu_gradient, h, of_gelu, axis=0), x_columns, g.dtype)
    return grad_x, grad_up.astype(jnp.float32), grad_down.astype(jnp.float32)


_mlp.defvjp(_mlp_forward, _mlp_backward)


def dot_general(turned: bool):
    """What ``dot_general_cls`` of a Flax layer takes: the linear under ``rowwise``, by these
    kernels. turned: an input of more features than tokens is quantized as [K, M], the order in
    which XLA then writes it."""
    return lambda: functools.partial(_dot_general, turned=turned)


def _dot_general(x, w, dimension_numbers, precision=None, *, turned: bool, **_):
    assert dimension_numbers == (((x.ndim - 1,), (0,)), ((), ()))
    return _linear(x.reshape(-1, x.shape[-1]), w, turned).reshape(*x.shape[:-1], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _linear(x: jax.Array, w: jax.Array, turned: bool) -> jax.Array:
    return _forward(x, w, turned)[0]


def _forward(x, w, turned):
    """x [M, K] x w [K, N], as ``linear`` has it; a weight that no grad_input reads later, of fewer
    inputs than outputs here, by XLA alone.
    """
    if turned and x.shape[1] > x.shape[0]:
        columns, rows = (_transposed(q) for q in rows_and_maxima(x.T))
    else:
        rows, columns = rows_and_maxima(x)
    if w.shape[0] < w.shape[1]:
        of_n, of_k = (
            scaling.quantize(w, FMT, granularity="rowwise", policy=POLICY, axis=axis)
            for axis in (-1, 0)
        )
    else:
        of_n, of_k = both(w)
    return _matmul("output", rows, of_k, x.dtype), (columns, of_n)


def _backward(turned, residuals, g):
    columns, of_n = residuals
    if g.shape[1] > g.shape[0]:
        how = {"granularity": "rowwise", "policy": POLICY, "with_producer": True}
        of_rows, of_columns = (scaling.quantize(g, FMT, axis=axis, **how) for axis in (-1, 0))
    else:
        of_rows, of_columns = both(g)
    return _matmul("grad_input", of_rows, of_n, g.dtype), _matmul(
        "grad_weight", of_columns, columns, g.dtype
    )


_linear.defvjp(_forward, _backward)


def _matmul(which, a: Quantized, b: Quantized, dtype) -> jax.Array:
    spec = RECIPE.gemms[which]
    execution = gemm.Execution(
        turned=which == "grad_weight",
        powers_of_two=spec.powers_of_two,
        dequantized=which == "output",
    )
    with jax.named_scope(f"line/{which}"):
        return gemm.matmul(
            a,
            b,
            accumulate=spec.accumulate,
            epilogue=spec.epilogue,
            out_dtype=jnp.bfloat16,
            execution=execution,
        ).astype(dtype)


def _product(which, a: Quantized, b: Quantized) -> Product:
    """Of operands whose scales stay out of the GEMM, which on a GPU writes bfloat16 (G-22)."""
    spec = RECIPE.gemms[which]
    with jax.named_scope(f"line/{which}"):
        raw = gemm.matmul(
            *map(gemm._unscaled, (a, b)), accumulate=spec.accumulate, out_dtype=jnp.bfloat16
        )
    return Product(
        raw,
        a.scale_inv.reshape(-1),
        b.scale_inv.reshape(-1),
        spec.epilogue == "unit_round_scale_round",
    )


def _transposed(q: Quantized) -> Quantized:
    how = {"fmt": FMT, "granularity": "rowwise", "axis": 0 if q.axis in (-1, 1) else -1}
    return Quantized(codes=q.codes.T, scale=q.scale.T, scale_inv=q.scale_inv.T, **how)


def _quantized(codes, scale, scale_inv) -> Quantized:
    lines = {"scale": scale[:, None], "scale_inv": scale_inv[:, None]}
    return Quantized(codes=codes, **lines, fmt=FMT, granularity="rowwise", axis=-1)


def _of_rows(m: int, n: int) -> list[jax.ShapeDtypeStruct]:
    row = jax.ShapeDtypeStruct((m,), jnp.float32)
    return [jax.ShapeDtypeStruct((m, n), cast.DTYPES[FMT.name]), row, row]


_TABLE = pl.BlockSpec((256,), lambda i: (0,))


def _held(shape: tuple[int, int], most: int) -> int:
    """Rows that a program holds at a time: a power of two that divides their number."""
    rows = max(1, min(16, HELD // shape[1], most))
    return 1 << (rows.bit_length() - 1)


def _chunks(n: int) -> list[slice]:
    """Of a row, as long as a power of two that divides it, 2048 at most: what Triton takes."""
    length = min(n & -n, 2048)
    return [slice(i, i + length) for i in range(0, n, length)]


def _scale_of(largest: jax.Array, table) -> tuple[jax.Array, jax.Array]:
    """scale and scale_inv of magnitude bits of bfloat16 numbers, int32 [rows]: what ``scales``
    makes of an amax for a power of two.
    """
    bits = largest << 16
    amax = lax.bitcast_convert_type(bits, jnp.float32)
    inverse = lax.bitcast_convert_type(
        ((bits + table[lax.shift_right_logical(bits, jnp.int32(23))]) >> 23) << 23, jnp.float32
    )
    scale = division.divide(1, jnp.where(jnp.isnan(amax), amax, inverse))
    inverse = lax.bitcast_convert_type(
        (254 << 23) - lax.bitcast_convert_type(scale, jnp.int32), jnp.float32
    )
    return scale, jnp.where(scale > 0, inverse, jnp.inf - scale)


def _magnitudes(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int16).astype(jnp.int32) & 0x7FFF


def _codes(x: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.clip(x.astype(jnp.float32) * scale, -FMT.max, FMT.max).astype(cast.DTYPES[FMT.name])


def _first(table, x, codes, scale_of, scale_inv_of, largest, *, held: int):
    chunks = _chunks(x.shape[1])

    def some_rows(i, found):
        rows = pl.ds(i * held, held)
        parts = [x[rows, chunk] for chunk in chunks]
        magnitudes = list(map(_magnitudes, parts))
        scale, scale_inv = _scale_of(
            functools.reduce(jnp.maximum, [part.max(axis=1) for part in magnitudes]), table
        )
        for chunk, part in zip(chunks, parts, strict=True):
            codes[rows, chunk] = _codes(part, scale[:, None])
        scale_of[rows], scale_inv_of[rows] = scale, scale_inv
        return tuple(
            jnp.maximum(one, part.max(axis=0)) for one, part in zip(found, magnitudes, strict=True)
        )

    with division.in_kernel():
        nothing = tuple(jnp.zeros((chunk.stop - chunk.start,), jnp.int32) for chunk in chunks)
        for chunk, part in zip(
            chunks, lax.fori_loop(0, ROWS // held, some_rows, nothing), strict=True
        ):
            largest[0, chunk] = part.astype(jnp.int16)


def _second(table, scale_of_columns, x, codes, scale_of, scale_inv_of, turned):
    chunks = _chunks(x.shape[1])
    with division.in_kernel():
        parts = [x[:, chunk] for chunk in chunks]
        scale, scale_inv = _scale_of(
            functools.reduce(jnp.maximum, [_magnitudes(part).max(axis=1) for part in parts]), table
        )
        for chunk, part in zip(chunks, parts, strict=True):
            codes[:, chunk] = _codes(part, scale[:, None])
            turned[chunk, :] = _codes(part, scale_of_columns[chunk][None, :]).T
        scale_of[:], scale_inv_of[:] = scale, scale_inv


def _lines(table, *refs, of: Callable, axis: int, together: list[bool | None]):
    *inputs, codes, scale_of, scale_inv_of = refs
    inputs = iter(inputs)
    given = [[next(inputs) for _ in range(1 if one is None else 3)] for one in together]
    chunks = _chunks(codes.shape[1])

    def value(refs, of_product, chunk):
        rows, columns = (slice(None), chunk) if axis == -1 else (chunk, slice(None))
        raw = refs[0][rows, columns]
        return (
            raw
            if of_product is None
            else Product(raw, refs[1][rows], refs[2][columns], of_product).value()
        )

    with division.in_kernel():
        parts = [
            of(*(value(*one, chunk) for one in zip(given, together, strict=True)))
            for chunk in chunks
        ]
        scale, scale_inv = _scale_of(
            functools.reduce(jnp.maximum, [_magnitudes(part).max(axis=axis) for part in parts]),
            table,
        )
        for chunk, part in zip(chunks, parts, strict=True):
            codes[:, chunk] = (
                _codes(part, scale[:, None]) if axis == -1 else _codes(part, scale[None, :]).T
            )
        scale_of[:], scale_inv_of[:] = scale, scale_inv
