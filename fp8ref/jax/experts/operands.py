"""The operands of grouped GEMMs: rows in groups, quantized, and the products (spec X).

``groups_of`` says which group each row is in, from sizes that may be traced. ``quantize_rows`` and
``quantize_weights`` cast; ``rows_by_weights`` and ``rows_by_rows`` multiply. Scales of a group are
kept in a table with a line for each group, or for each block of a group's rows, and a row finds its
line by ``segment``.

Products are computed by blocks of rows, each of one group, in a loop: E weights cost no more
multiplications than one, but for what fills the last block of each group. XLA turns
``lax.ragged_dot`` into one product of all rows with all weights, E times as many, on a CPU and on
an NVIDIA GPU (JAX 0.10.2), in which a NaN of one weight reaches all rows.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8ref.formats import Format
from fp8ref.jax.attention.operands import inputs as attention_inputs
from fp8ref.jax.gemm import gemm
from fp8ref.jax.quantize import cast, scales, scaling
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.jax.transforms.eager import as_one_program
from fp8ref.recipe import CastSpec, Gemm, GemmSpec
from fp8ref.selection.grouped import Amax
from fp8ref.spec.granularity import by_name

SMALLEST, LARGEST = 16, 512
"""Rows of a block multiplied at once: FP8 kernels take multiples of 16, and more rows gain nothing.
"""


class Groups(NamedTuple):
    """The group of each row: sizes, ends int32 [E]; group int32 [M], E if in none."""

    sizes: Array
    ends: Array
    group: Array

    def only(self, x: Array) -> Array:
        """x [M, ...] with zeros in rows of no group, whatever they hold (X-5)."""
        return jnp.where((self.group < len(self.sizes))[:, None], x, jnp.zeros((), x.dtype))


class Segmented(NamedTuple):
    """Rows of groups in FP8, with scales of their own: x ~ decode(codes) * scale_inv[segment].

    codes      native float8 [M, C].
    scale, scale_inv
               float32 [S, C] or [S, 1].
    segment    int32 [M]: a row's line of them; S or more for a row of no group.
    axis       the reduced one, -1 or -2.
    """

    codes: Array
    scale: Array
    scale_inv: Array
    segment: Array
    fmt: Format
    granularity: str
    axis: int

    def lines(self, table: Array) -> Array:
        """The line of each row: [M, C] or [M, 1]."""
        return jnp.take(table, self.segment, axis=0, mode="clip")


class Codes(NamedTuple):
    """Rows [M, C] in FP8, which a cast somewhere else has made (spec X-14): codes uint8 or native
    float8; scale and scale_inv float32, () or [E, 1] for each group."""

    codes: Array
    scale: Array
    scale_inv: Array

    def operand(self, spec: CastSpec, axis: int, groups: Groups) -> "Quantized | Segmented":
        """The rows as a GEMM takes them that reduces this axis, as of that cast."""
        codes = self.codes
        if codes.dtype == jnp.uint8:
            codes = cast.from_code_bits(codes, spec.fmt)
        if self.scale.ndim:
            scales = self.scale, self.scale_inv
            return Segmented(codes, *scales, groups.group, spec.fmt, spec.granularity, axis)
        return Quantized(
            codes=codes,
            scale=self.scale,
            scale_inv=self.scale_inv,
            fmt=spec.fmt,
            granularity=spec.granularity,
            axis=axis,
        )


class Slot(NamedTuple):
    """Zeros that a grouped linear gives out beside its result. Their cotangent is grad_output in
    FP8: ``Codes``, and its observation float32 [3], zeros where no scale is delayed."""

    codes: Array
    scale: Array
    scale_inv: Array
    seen: Array


def groups_of(group_sizes: Array, rows: int) -> Groups:
    """The groups of that many rows, one after another (X-1)."""
    sizes = group_sizes.astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    return Groups(sizes, ends, group_of_each(rows, ends))


def group_of_each(count: int, ends: Array) -> Array:
    """int32 [count]: the group of each row, or of each block of rows, that end at ends."""
    after = ends[None] <= jnp.arange(count, dtype=jnp.int32)[:, None]
    return after.sum(axis=1, dtype=jnp.int32)


def quantize_rows(
    x: Array,
    spec: CastSpec,
    axis: int,
    groups: Groups,
    amax: Amax,
    scale: Array | None = None,
    over: tuple[str, ...] = (),
) -> Quantized | Segmented:
    """Quantize x [M, C], zeros in rows of no group, along axis -1 or -2 (X-3, X-7).

    scale     of a delayed state; None: by x's amaxes.
    over      mesh axes along which devices have rows of the same groups: a scale of all of a
              group's rows is of all of them.
    Raises:   ValueError: as ``scaling.quantize``.
    """
    kind = by_name(spec.granularity)
    if scale is not None:
        return scaling.quantize_by_state(x, scale, spec, axis=axis)
    if amax == "all" or (axis == -1 and spec.granularity != "tensorwise"):
        return scaling.quantize(
            x, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis
        )
    segment, count = (
        (groups.group, len(groups.sizes)) if kind.reduced is None else _blocks(groups, kind.reduced)
    )
    # [M, 1], or every column for itself
    rows = scaling.amax(x, "rowwise") if spec.granularity == "tensorwise" else x
    largest = jax.ops.segment_max(cast.magnitude_bits(rows), segment, num_segments=count)
    largest = jnp.maximum(largest, 0)  # no row: 0
    if over and kind.reduced is None:  # as bits, of which no maximum drops a NaN (P-9)
        largest = lax.pmax(largest, over)
    largest = cast.from_magnitude_bits(largest, rows.dtype)
    table = scales.scales_from_amax(largest, spec.fmt, spec.policy)
    q = Segmented(x, table.scale, table.scale_inv, segment, spec.fmt, spec.granularity, axis)
    # a line for each row: one scale, or one for each column
    lines = scales.Scales(q.lines(table.scale), q.lines(table.scale_inv))
    codes = scaling.quantize_blocks(x, lines, spec.fmt, (1, None), policy=spec.policy)
    return q._replace(codes=codes)


def quantize_weights(
    w: Array, spec: CastSpec, axis: int, amax: Amax, scale: Array | None = None
) -> Quantized:
    """Quantize w [E, K, N] along axis -1 or -2: each expert's by itself, or all by one scale (X-3).
    Scales have the leading dim E, or are one."""
    if scale is not None:
        return scaling.quantize_by_state(w, scale, spec, axis=axis)
    quantize = functools.partial(
        scaling.quantize, fmt=spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis
    )
    return quantize(w) if amax == "all" else jax.vmap(quantize)(w)


def rows_by_weights(
    a: Quantized | Segmented, b: Quantized, spec: GemmSpec, groups: Groups, out_dtype, *, scope: str
) -> Array:
    """[M, C] x [E, C, D] or [E, D, C] (axis -1) -> [M, D] of out_dtype; +0 outside (X-2, X-5).

    scope     of the dot, "<layer>/<gemm>", for ``proof``: a loop's body has no scope from outside.
    """
    assert spec.accumulate is not None
    turned = b.axis == -1
    if gemm.dequantizes(b.granularity):
        assert isinstance(a, Quantized)
        row_values, weight_values = (
            v.astype(_exact(spec)) for v in (scaling.dequantize(a), jax.vmap(scaling.dequantize)(b))
        )
        out = _rows_by_weights(
            row_values, weight_values, groups, turned, lax.Precision.HIGHEST, scope
        ).astype(out_dtype)
    else:
        acc = _rows_by_weights(
            a.codes, b.codes, groups, turned, gemm.PRECISION[spec.accumulate], scope
        )
        scale_a = a.lines(a.scale_inv) if isinstance(a, Segmented) else a.scale_inv
        scale_b = b.scale_inv
        if scale_b.ndim:  # [E, 1, D] or [E] as lines of the rows, [M, D] or [M, 1]
            table = scale_b.reshape(len(scale_b), -1)
            scale_b = jnp.take(table, groups.group, axis=0, mode="clip")
        out = gemm.finish(acc, scale_a, scale_b, spec.epilogue, out_dtype)
    return groups.only(out)


def rows_by_rows(
    a: Quantized | Segmented,
    b: Quantized | Segmented,
    spec: GemmSpec,
    groups: Groups,
    out_dtype,
    *,
    scope: str,
) -> Array:
    """grad_output [M, N] x input [M, K], each group's rows reduced, -> [E, K, N] of out_dtype; +0
    of a group without rows (X-2, X-4). scope as in ``rows_by_weights``."""
    assert spec.accumulate is not None
    if (
        isinstance(a, Segmented)
        and isinstance(b, Segmented)
        and len(a.scale_inv) != len(groups.sizes)
    ):
        a_values, b_values = (
            (cast.decode(q.codes, q.fmt) * q.lines(q.scale_inv)).astype(_exact(spec))
            for q in (a, b)
        )
        out = _rows_by_rows(a_values, b_values, groups, lax.Precision.HIGHEST, scope).astype(
            out_dtype
        )
    else:
        acc = _rows_by_rows(a.codes, b.codes, groups, gemm.PRECISION[spec.accumulate], scope)
        # [E, 1, N] and [E, K, 1]; of all groups [1, N] and [K, 1], or one
        out = gemm.finish(
            acc,
            _line_scales(a.scale_inv),
            jnp.swapaxes(_line_scales(b.scale_inv), -1, -2),
            spec.epilogue,
            out_dtype,
        )
    return jnp.where((groups.sizes > 0)[:, None, None], out, jnp.zeros((), out_dtype))


def dequantized(q: Quantized | Segmented) -> Array:
    """RN32(decode(codes) * scale_inv), float32 of the codes' shape, of rows or weights."""
    if isinstance(q, Segmented):
        return cast.decode(q.codes, q.fmt) * q.lines(q.scale_inv)
    each = q.codes.ndim == 3 and q.scale_inv.ndim > 0 and q.scale_inv.shape[0] == len(q.codes)
    return (jax.vmap(scaling.dequantize) if each else scaling.dequantize)(q)


def multiply_hp(which: Gemm, a: Array, b: Array, groups: Groups, out_dtype, *, scope: str) -> Array:
    """One grouped GEMM in high precision (G-9)."""
    precision = lax.Precision.DEFAULT
    if which == "grad_weight":
        return _rows_by_rows(a, b, groups, precision, scope).astype(out_dtype)
    out = _rows_by_weights(a, b, groups, which == "grad_input", precision, scope)
    return groups.only(out.astype(out_dtype))


def _exact(spec: GemmSpec):
    """The dtype of dequantized blocks: bfloat16 if scales are powers of two (S-14)."""
    assert spec.a is not None
    return jnp.bfloat16 if spec.a.granularity == "mx_1x32" else jnp.float32


def _blocks(groups: Groups, size: int) -> tuple[Array, int]:
    """Each row's block number, blocks starting with their group, and the maximum count (X-7)."""
    rows, experts = len(groups.group), len(groups.sizes)
    per_group = -(-groups.sizes // size)
    first, begin = jnp.cumsum(per_group) - per_group, groups.ends - groups.sizes
    count = rows // size + experts
    e = jnp.minimum(groups.group, experts - 1)
    segment = first[e] + (jnp.arange(rows, dtype=jnp.int32) - begin[e]) // size
    return jnp.where(groups.group < experts, segment, count), count


def _line_scales(table: Array) -> Array:
    """Scales [E, C], [E, 1] or [1, C] with a dim of size 1 in the middle; one scale as [1, 1]."""
    return table.reshape(1, 1) if table.ndim == 0 else table[:, None, :]


_UNNAMED = {"scope": lambda scope: ""}


@as_one_program("turned", "precision", "scope", unnamed=_UNNAMED)
def _rows_by_weights(
    x: Array, w: Array, groups: Groups, turned: bool, precision: lax.Precision, scope: str
) -> Array:
    """float32 [M, D] of x [M, C] and w [E, C, D] ([E, D, C] if turned); zeros without a group."""
    blocks = _row_blocks(groups)

    def step(_, of: tuple[Array, Array]):
        rows, e = of
        dims = ((1,), (1 if turned else 0,)), ((), ())
        with jax.named_scope(scope):
            # [R, C] x [C, D]
            return None, lax.dot_general(
                rows, w[e], dims, precision=precision, preferred_element_type=jnp.float32
            )

    out = lax.scan(step, None, (blocks.of(x), blocks.group))[1]
    return jnp.take(out.reshape(-1, out.shape[-1]), blocks.to, axis=0, mode="fill", fill_value=0)


@as_one_program("precision", "scope", unnamed=_UNNAMED)
def _rows_by_rows(
    g: Array, x: Array, groups: Groups, precision: lax.Precision, scope: str
) -> Array:
    """float32 [E, K, N] of g [M, N] and x [M, K]: sums over each group's rows, by blocks."""
    blocks = _row_blocks(groups)

    def step(total: Array, of: tuple[Array, Array, Array]):
        rows_g, rows_x, e = of
        dims = ((0,), (0,)), ((), ())
        # the dot has its operands in the other order than L-2
        with jax.named_scope(f"{scope}/turned"):
            # [K, R] x [R, N]
            part = lax.dot_general(
                rows_x, rows_g, dims, precision=precision, preferred_element_type=jnp.float32
            )
        return total.at[e].add(part), None

    begin = jnp.zeros((len(groups.sizes), x.shape[1], g.shape[1]), jnp.float32)
    begin = attention_inputs.like(begin, g)
    return lax.scan(step, begin, (blocks.of(g), blocks.of(x), blocks.group))[0]


class RowBlocks(NamedTuple):
    """Rows laid out so that each block of them is of one group: to int32 [M], where each row goes,
    past the end for a row of none; group int32 [B], that of each block."""

    to: Array
    group: Array
    size: int

    def of(self, x: Array) -> Array:
        """x [M, C] as blocks [B, R, C], with zeros where no row goes."""
        padded = jnp.zeros((len(self.group) * self.size, x.shape[1]), x.dtype)
        padded = padded.at[self.to].set(x, mode="drop")
        return padded.reshape(len(self.group), self.size, x.shape[1])


def _row_blocks(groups: Groups) -> RowBlocks:
    """The block size, a power of two at most the mean group; padding at most doubles the rows, or
    adds SMALLEST per group."""
    rows, experts = len(groups.group), len(groups.sizes)
    size = _block_size(rows, experts)
    segment, count = _blocks(groups, size)
    ends = jnp.cumsum(-(-groups.sizes // size))  # of groups, in blocks
    begin = (groups.ends - groups.sizes)[jnp.minimum(groups.group, experts - 1)]
    within = (jnp.arange(rows, dtype=jnp.int32) - begin) % size
    to = jnp.where(segment < count, segment * size + within, count * size)
    return RowBlocks(to, jnp.minimum(group_of_each(count, ends), experts - 1), size)


def rows_multiplied(rows: int, experts: int) -> int:
    """How many rows, with what fills blocks, each of the three GEMMs multiplies by a weight."""
    size = _block_size(rows, experts)
    return (rows // size + experts) * size


def _block_size(rows: int, experts: int) -> int:
    return min(max(1 << (rows // experts).bit_length() >> 1, SMALLEST), LARGEST)
