"""Matrix multiplication of FP8 operands, [M, K] x [N, K] -> [M, N] (spec G).

Order: one XLA dot on float8 arrays with float32 output; the epilogue: scales, rounding; the sum
over devices, where K is cut (P-8), or before the epilogue if accumulators are summed (P-7). On an
NVIDIA GPU, unless accumulators are summed, the GEMM writes its output's dtype, and cuBLASLt applies
the scales of tensorwise operands (G-22). Operands in blocks are dequantized first, because no FP8
dot takes scales that vary along K (G-16), unless cuDNN multiplies them (G-26). Simulated hardware
replaces the dot and, unless accumulators are summed, the epilogue too (G-19, G-21).
"""

import contextlib
import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8ref.formats import E2M1FN
from fp8ref.jax.distributed.sharding import Reduction
from fp8ref.jax.gemm import blackwell, hardware
from fp8ref.jax.quantize import scaling
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.recipe import GemmSpec
from fp8ref.shared import errors
from fp8ref.spec import epilogue as epilogues
from fp8ref.spec import support
from fp8ref.spec.gemm import MX_BLOCKS
from fp8ref.spec.granularity import by_name
from fp8ref.spec.hardware import Multiply
from fp8ref.spec.products import Products

__all__ = ["PRECISION", "Execution", "finish", "matmul", "matmul_hp"]

PRECISION = {"fast": lax.Precision.DEFAULT, "slow": lax.Precision.HIGHEST}
"""{accumulation: precision of XLA's dot}.

It is explicit on every dot: with None, jax.default_matmul_precision would decide (spec G-7).
"""

EPILOGUES = support.EPILOGUES["jax"]
"""The epilogues that this backend implements."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a GEMM is executed: on what, in which layout, and what devices sum.

    collective the sum over devices, where K is cut.
    turned    the result is [..., N, M].
    in_steps  also on a GPU a float32 dot, then the epilogue: where XLA cuts K over devices, it sums
              raw accumulators (P-9).
    multiply  simulated hardware, for matrices: it does everything (G-19), or only accumulates, if
              devices sum accumulators (G-21).
    powers_of_two
              all scales are powers of two, so that a GPU's GEMM may round before them (G-22).
    dequantized
              on a GPU the operands of rows too are written as dequantized ones, by 1, where the
              GEMM rounds: the same bits. XLA then transposes b's codes where it writes them, and
              not the tensor that they are made of.
    products  what multiplies operands in blocks (G-26).
    """

    collective: Reduction | None = None
    turned: bool = False
    in_steps: bool = False
    multiply: Multiply | None = None
    powers_of_two: bool = False
    dequantized: bool = False
    products: Products = "auto"


ONE_DEVICE = Execution()
"""XLA's GEMM on one device."""


def matmul(
    a: Quantized,
    b: Quantized,
    *,
    accumulate: str,
    epilogue: str = "scale_then_round",
    out_dtype=jnp.float32,
    execution: Execution = ONE_DEVICE,
) -> Array:
    """Contract a and b along K: [..., M, K] x [..., N, K] -> [..., M, N]; turned [..., N, M].

    Shapes:   a.codes and b.codes of one rank, 2 or more, and equal leading dims; each is reduced
              along its ``axis``, one of its last two, so that [K, M] with axis 0 serves as [M, K].
              The result is of out_dtype. The scales of both cover all of K, or blocks of K of one
              length.
    Order:    dot in float32; the epilogue, G-4, G-5 or G-14; round to out_dtype; the sum over
              devices, rounded again (P-8). If the collective sums accumulators: dot, sum, epilogue,
              round (P-7). Operands in blocks are dequantized first (G-16). On an NVIDIA GPU, unless
              accumulators are summed or ``in_steps``: G-22.
    Specials: Inf and NaN as in IEEE 754; overflow to infinity.
    Raises:   ValueError: ranks or reduced lengths that differ, a reduced axis among the leading
              dims, unknown names; granularities that do not go together (``epilogue.check_pair``);
              blocks under unit_round_scale_round.
    Source:   spec G-1, G-4, G-5, G-7, G-13, G-14, G-16, G-22, P-7, P-8.
    """
    axes = _reduced_axes(a, b)
    errors.one_of("accumulate", accumulate, PRECISION)
    epilogues.check_pair(epilogue, "jax", a.granularity, b.granularity)
    # Raw accumulators are summed over devices before the epilogue; results, after it.
    early, late = None, execution.collective
    if late and late.parts == "accumulators":
        early, late = late, None
    a = _arranged(a, late)
    product = _Product(axes, accumulate, epilogue, out_dtype, execution)
    if execution.multiply is not None and early is None:
        out = product.simulated(a, b)
    elif early is None and not execution.in_steps and not dequantizes(a.granularity):
        out = product.multiplied(a, b)
    else:
        acc = _by_tensor_scales(_total(product.accumulated(a, b, early), early), a, b)
        blocks = dequantizes(a.granularity)
        out = acc.astype(out_dtype) if blocks else product.scaled(acc, a, b, early)
    return _total(out, late).astype(out_dtype)


def matmul_hp(
    a: Array, b: Array, *, axes: tuple[int, int], out_dtype, execution: Execution = ONE_DEVICE
) -> Array:
    """A GEMM in high precision: float32 sums in XLA's order, rounded once to out_dtype (spec G-9).

    Shapes:   a and b as codes in matmul, reduced along axes, -1 or -2 each. On an NVIDIA GPU the
              GEMM itself writes out_dtype, unless accumulators are summed or ``in_steps``.
    """
    collective, turned = execution.collective, execution.turned

    def dot(a: Array, b: Array, dtype) -> Array:
        return _dot(a, b, axes, lax.Precision.DEFAULT, turned, collective, dtype)

    if execution.in_steps or (collective and collective.parts == "accumulators"):
        return _total(dot(a, b, jnp.float32), collective).astype(out_dtype)
    out = lax.platform_dependent(
        a,
        b,
        cuda=functools.partial(dot, dtype=out_dtype),
        default=lambda a, b: dot(a, b, jnp.float32).astype(out_dtype),
    )
    return _total(out, collective).astype(out_dtype)


def output_dtype(spec: GemmSpec, dtype):
    """The dtype to which a GEMM rounds before its result is cast to dtype (spec G-8)."""
    return jnp.bfloat16 if spec.rowwise else dtype


def dequantizes(granularity: str) -> bool:
    """Whether operands are dequantized: no FP8 dot takes scales that vary along K (G-16)."""
    return by_name(granularity).reduced is not None


@dataclass(frozen=True)
class _Product:
    """One GEMM of FP8 operands along these axes, and its epilogue."""

    axes: tuple[int, int]
    accumulate: str
    epilogue: str
    out_dtype: Any
    execution: Execution

    def multiplied(self, a: Quantized, b: Quantized) -> Array:
        """The GEMM and its epilogue, where no accumulators are summed over devices.

        On an NVIDIA GPU the GEMM writes out_dtype, and no kernel rescales a float32 result (G-22):
        tensorwise operands are written as dequantized ones, a pattern in which XLA finds cuBLASLt's
        FP8 GEMM with both scales. Other scales follow a GEMM that rounds to out_dtype itself, where
        that is what the epilogue says, or the same.
        """
        rounds_first = self.epilogue == "unit_round_scale_round"
        by_tensor = {a.granularity, b.granularity} == {"tensorwise"}
        if by_tensor and not rounds_first and self.out_dtype != jnp.float16:
            on_gpu = self._scaled_by_cublaslt
        elif rounds_first or (self.execution.powers_of_two and self.out_dtype == jnp.bfloat16):
            on_gpu = self._scaled_after_rounding
        else:
            return self._in_steps(a, b)
        return lax.platform_dependent(a, b, cuda=on_gpu, default=self._in_steps)

    def accumulated(self, a: Quantized, b: Quantized, collective: Reduction | None) -> Array:
        """float32 [M, N] that devices sum: accumulators; scaled sums if scales vary along K."""
        blocks, execution = dequantizes(a.granularity), self.execution
        if execution.multiply is None:
            if blocks and execution.products == "scaled_matmul":
                summed = collective is not None or execution.in_steps
                wide = summed or a.tensor_scale_inv is not None or b.tensor_scale_inv is not None
                dtype = jnp.float32 if wide else self.out_dtype
                a, axes = _arranged(a, collective), self.axes
                if execution.turned:
                    a, b, axes = b, a, axes[::-1]
                return blackwell.multiply(a, b, axes, dtype)
            if blocks:
                return self._dot(_values(a), _values(b), lax.Precision.HIGHEST, collective)
            return self._dot(a.codes, b.codes, PRECISION[self.accumulate], collective)
        a = _arranged(a, collective)
        by = dataclasses.replace(self, out_dtype=jnp.float32)
        if blocks:
            return by.simulated(a, b)
        by = dataclasses.replace(by, epilogue="product_then_round")
        return by.simulated(_unscaled(a), _unscaled(b))

    def simulated(self, a: Quantized, b: Quantized) -> Array:
        """The GEMM by simulated hardware, [M, N], or [N, M] if turned."""
        assert a.codes.ndim == 2, "simulated hardware multiplies matrices"
        assert self.execution.multiply is not None
        out = hardware.matmul(
            a,
            b,
            by=self.execution.multiply,
            accumulate=self.accumulate,
            epilogue=self.epilogue,
            out_dtype=self.out_dtype,
        )
        return out.T if self.execution.turned else out

    def scaled(
        self, acc: Array, a: Quantized, b: Quantized, collective: Reduction | None = None
    ) -> Array:
        """The epilogue: accumulators [M, N] times scales of a's and b's rows, in out_dtype."""
        # [.., M, 1], [.., 1, N]
        scale_a = _rows(a.scale_inv, self.axes[0])
        scale_b = jnp.swapaxes(_rows(b.scale_inv, self.axes[1]), -1, -2)
        scale_a = collective.own_rows(scale_a) if collective else scale_a
        if self.execution.turned:
            scale_a = jnp.swapaxes(scale_a, -1, -2)
            scale_b = jnp.swapaxes(scale_b, -1, -2)
        return finish(acc, scale_a, scale_b, self.epilogue, self.out_dtype)

    def _dot(
        self,
        a: Array,
        b: Array,
        precision: lax.Precision,
        collective: Reduction | None = None,
        out_dtype=jnp.float32,
    ) -> Array:
        turned = self.execution.turned
        return _dot(a, b, self.axes, precision, turned, collective, out_dtype)

    def _in_steps(self, a: Quantized, b: Quantized) -> Array:
        return self.scaled(self._dot(a.codes, b.codes, PRECISION[self.accumulate]), a, b)

    def _by_cublaslt(self, a: Quantized, b: Quantized, scales: tuple[Array, Array]) -> Array:
        # XLA passes each scale on in float32: it drops the two conversions, as its option
        # xla_allow_excess_precision, on by default, lets it. ``proof`` looks for scales that it
        # rounded.
        a_hp, b_hp = (
            q.codes.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
            for q, scale in zip((a, b), scales, strict=True)
        )
        precision, info = PRECISION[self.accumulate], jnp.finfo(self.out_dtype)
        with jax.named_scope("dequantized"):  # ``proof`` takes this dot for an FP8 GEMM
            out = self._dot(a_hp, b_hp, precision, out_dtype=self.out_dtype)
        # Changes nothing, but is no part of what XLA makes a GEMM's epilogue of: it would add a
        # residual or a bias before the GEMM rounds, and cannot compile a GELU that is in a
        # checkpoint.
        return lax.reduce_precision(out, info.nexp, info.nmant)

    def _scaled_by_cublaslt(self, a: Quantized, b: Quantized) -> Array:
        # Past a barrier of its own, no two dots share an operand: XLA would join their weights,
        # dequantized, and multiply in bfloat16.
        return self._by_cublaslt(a, b, lax.optimization_barrier((a.scale_inv, b.scale_inv)))

    def _scaled_after_rounding(self, a: Quantized, b: Quantized) -> Array:
        if self.execution.dequantized and self.out_dtype != jnp.float16:
            # by its scales, one of its own
            one = lax.optimization_barrier((jnp.float32(1), a.scale_inv, b.scale_inv))[0]
            rounded = self._by_cublaslt(a, b, (one, one))
        else:
            precision = PRECISION[self.accumulate]
            rounded = self._dot(a.codes, b.codes, precision, out_dtype=self.out_dtype)
        return self.scaled(rounded.astype(jnp.float32), a, b)


def finish(acc: Array, scale_a: Array, scale_b: Array, epilogue: str, out_dtype) -> Array:
    """An accumulator times both scale_inv, broadcast, rounded to out_dtype (G-4, G-5, G-14)."""
    if epilogue == "scale_then_round":
        return ((acc * scale_a) * scale_b).astype(out_dtype)
    if epilogue == "unit_round_scale_round":
        # A cast to out_dtype and back could be removed by XLA; reduce_precision is not.
        info = jnp.finfo(out_dtype)
        acc = lax.reduce_precision(acc, info.nexp, info.nmant)
    return (acc * (scale_a * scale_b)).astype(out_dtype)


def _arranged(a: Quantized, collective: Reduction | None) -> Quantized:
    """The operand with rows in the order of a reduce-scatter."""
    if collective is None:
        return a
    lines = a.granularity != "tensorwise" and len(a.scale_inv) > 1
    scale_inv = collective.arranged(a.scale_inv) if lines else a.scale_inv
    return dataclasses.replace(a, codes=collective.arranged(a.codes), scale_inv=scale_inv)


def _unscaled(q: Quantized) -> Quantized:
    """The codes under scale 1; the scales apply after the sum over devices."""
    one = jnp.ones((), jnp.float32)
    return dataclasses.replace(q, scale=one, scale_inv=one, granularity="tensorwise")


def _total(partial: Array, collective: Reduction | None) -> Array:
    """The sum over devices, if any."""
    return partial if collective is None else collective.total(partial)


def _rows(scale: Array, axis: int) -> Array:
    """Scales as a column [..., M, 1], or one as [1, 1]."""
    if scale.ndim == 0:
        return scale.reshape(1, 1)
    return scale if axis == -1 else jnp.swapaxes(scale, -1, -2)


def _values(q: Quantized) -> Array:
    """Dequantized values, without a tensor's scale: bfloat16, if it holds them, else float32. It
    holds 4 bits by scales that are powers of two (S-14), and 2 by those of 4 (S-22)."""
    is_exact = q.granularity in MX_BLOCKS or q.fmt == E2M1FN
    values = scaling.dequantize(dataclasses.replace(q, tensor_scale_inv=None))
    return values.astype(jnp.bfloat16 if is_exact else jnp.float32)


def _by_tensor_scales(acc: Array, a: Quantized, b: Quantized) -> Array:
    """A sum times the product of its operands' scales of tensors, if there are some (S-22)."""
    each = [q.tensor_scale_inv for q in (a, b) if q.tensor_scale_inv is not None]
    return acc * math.prod(each[1:], start=each[0]) if each else acc


def _reduced_axes(a: Quantized, b: Quantized) -> tuple[int, int]:
    """The reduced axes, -1 or -2, of both operands; ValueError for shapes that do not fit."""
    shape_a, shape_b = a.codes.shape, b.codes.shape
    axes = (_from_the_end(a), _from_the_end(b))
    if (
        len(shape_a) != len(shape_b)
        or len(shape_a) < 2
        or shape_a[:-2] != shape_b[:-2]
        or not set(axes) <= {-1, -2}
        or shape_a[axes[0]] != shape_b[axes[1]]
    ):
        raise ValueError(
            "a GEMM reduces one of the last two axes of a and b, of one length, with equal leading "
            f"dims; got {shape_a} along {a.axis} and {shape_b} along {b.axis}."
        )
    return axes


def _from_the_end(q: Quantized) -> int:
    """The reduced axis counted from the end; ValueError for several."""
    if not isinstance(q.axis, int):
        raise ValueError(
            f"a GEMM reduces one axis of an operand; got axis {q.axis}. Flatten it first."
        )
    return q.axis - q.codes.ndim if q.axis >= 0 else q.axis


def _dot(
    a: Array,
    b: Array,
    axes: tuple[int, int],
    precision: lax.Precision,
    turned: bool,
    collective: Reduction | None,
    out_dtype=jnp.float32,
) -> Array:
    """a x b [..., M, N], or [..., N, M] if turned; rows in the order of ``collective``."""
    a = collective.arranged(a) if collective else a
    if turned:
        # [N, M] = b x a: the same products, and the result needs no transpose.
        a, b, axes = b, a, (axes[1], axes[0])
    leading = tuple(range(a.ndim - 2))
    # Without a preferred type, e4m3 x e5m2 would demote the e4m3 operand to e5m2. ``proof`` reads
    # the order of the operands from the scope.
    with jax.named_scope("turned") if turned else contextlib.nullcontext():
        return lax.dot_general(
            a,
            b,
            (((a.ndim + axes[0],), (b.ndim + axes[1],)), (leading, leading)),
            precision=precision,
            preferred_element_type=out_dtype,
        )
