"""Matrix multiplication of FP8 or FP4 operands, [M, K] x [N, K] -> [M, N] (spec G).

Order: accumulate over K what the codes stand for, by ``accumulate.py``; then the epilogue: scales,
rounding to out_dtype, bias (G-4). Block scales: each block of K is accumulated by itself, scaled,
and added in float32 (G-13); scales of tensors come last (S-22). ``mma`` is a single tensor-core
instruction (G-10), ``matmul_hp`` a GEMM in high precision (G-9). ``finish_plain`` defines the
epilogue; its compiled twin, for bfloat16, is in ``kernels.gemm``.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from fp8ref.formats import BFLOAT16, E8M0FNU, FLOAT16, FLOAT32, QUANTIZED_FORMATS, Format
from fp8ref.shared import errors
from fp8ref.shared.errors import require
from fp8ref.sim import threads
from fp8ref.sim.gemm import accumulate as sums
from fp8ref.sim.gemm import tensor_core
from fp8ref.sim.gemm.accumulate import Accumulation
from fp8ref.sim.gemm.tensor_core import K_STEP, TensorCore
from fp8ref.sim.kernels import gemm as kernels
from fp8ref.sim.kernels.compiled import ELEMENTS, worth
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec import epilogue as epilogues
from fp8ref.spec.epilogue import Epilogue
from fp8ref.spec.granularity import block_of

OUT_DTYPES = (FLOAT32, BFLOAT16, FLOAT16)
"""The formats that a GEMM's output may be rounded to."""


def mma(
    a_codes,
    b_codes,
    c,
    *,
    fmt_a: Format,
    fmt_b: Format,
    unit: str | TensorCore = "hopper",
    scale_inv_a=None,
    scale_inv_b=None,
) -> np.ndarray:
    """One tensor-core instruction: c + the sum of 32 products (spec G-10, G-11, G-23, G-24).

    Shapes:   a_codes [M, 32] and b_codes [N, 32] uint8; c [M, N] float32, the accumulator, values
              of the unit's; scale_inv_a [M, 1] and scale_inv_b [N, 1] float32, numbers of e8m0fnu,
              for a unit with block scales; float32 [M, N].
    Order:    steps of unit.fused_width products, each from the result of the one before. A step: E
              = the largest exponent of the products (exponents of the factors added, subnormals at
              emin) and the accumulator; each of these cut off below 2^(E - fraction_bits), summed
              exactly; the sum cut off after output_bits fraction bits.
    Specials: a product with a zero factor takes no part in E; a zero result is +0; results below
              2^-126 are cut off as subnormals; from 2^128 on, infinity; NaN and infinities as IEEE
              754 sums, NaN the canonical 0x7FFFFFFF. Recordings of an H100 have these bits, with
              accumulators of any kind; MMA-Sim differs where a step has no product but zeros and
              |c| is tiny (G-11).
              ``unit.evidence`` says what the numbers of a unit rest on.
    Raises:   ValueError: shapes or dtypes that do not fit; formats other than e4m3fn and e5m2; an
              unknown unit; scales of a unit that takes none, or none of one that does; a c that is
              no number of a float16 accumulator.
    Source:   spec G-10.
    """
    unit = tensor_core.by_name(unit)
    tensor_core.check_pair(fmt_a, fmt_b)
    a, b, c = cast.decode(a_codes, fmt_a), cast.decode(b_codes, fmt_b), np.asarray(c)
    _check_instruction(a, b, c, unit)
    scales, nan = _exponents_of_scales(scale_inv_a, scale_inv_b, unit, c.shape)
    result = tensor_core.chain_plain(
        sums.finite_part(a), sums.finite_part(b), sums.finite_part(c), fmt_a, fmt_b, unit, scales
    )
    return canonical(np.where(nan, np.float32(np.nan), sums.with_specials(result, a, b, c)))


def _check_instruction(a: np.ndarray, b: np.ndarray, c: np.ndarray, unit: TensorCore) -> None:
    if not a.shape[1:] == b.shape[1:] == (K_STEP,) or c.shape != (len(a), len(b)):
        raise ValueError(
            f"mma takes [M, {K_STEP}], [N, {K_STEP}], [M, N]; got {a.shape}, {b.shape}, {c.shape}."
        )
    text = f"the accumulator c is float32; got {c.dtype}. Convert it with .astype(np.float32)."
    require(c.dtype == np.float32, text)
    if unit.accumulator == FLOAT16 and not np.array_equal(
        cast.round_to(c, FLOAT16), c, equal_nan=True
    ):
        raise ValueError(f"unit {unit.name!r} needs a float16 c. Use cast.round_to(c, FLOAT16).")


def _exponents_of_scales(
    scale_inv_a, scale_inv_b, unit: TensorCore, shape: tuple[int, ...]
) -> tuple[np.ndarray | None, np.ndarray]:
    """(sum of both scales' exponents, int [M, N, 1], or None; [M, N] where a scale is NaN)."""
    if not unit.block_scales:
        if scale_inv_a is not None or scale_inv_b is not None:
            raise ValueError(
                f"unit {unit.name!r} takes no scales. Use one with block_scales, as 'blackwell_mx'."
            )
        return None, np.zeros(shape, bool)
    scales = [np.asarray(scale) for scale in (scale_inv_a, scale_inv_b)]
    for scale, n in zip(scales, shape, strict=True):
        if (
            scale.dtype != np.float32
            or scale.shape != (n, 1)
            or not np.array_equal(cast.round_to(scale, E8M0FNU), scale, equal_nan=True)
        ):
            raise ValueError(
                f"unit {unit.name!r} takes power-of-two or NaN scale_inv, float32 [M, 1] and [N, "
                f"1]; got {scale.dtype} {scale.shape}."
            )
    nan = np.isnan(scales[0]) | np.isnan(scales[1]).T
    a_exponents, b_exponents = map(tensor_core.scale_exponents, scales)
    return (a_exponents + b_exponents.T)[..., None], nan


def matmul(
    a: Quantized,
    b: Quantized,
    *,
    accumulate: str | Accumulation = "exact",
    epilogue: str | Epilogue = "scale_then_round",
    out_dtype: Format = FLOAT32,
    bias=None,
) -> np.ndarray:
    """[M, K] x [N, K] -> [M, N], both reduced along their last axis.

    Shapes:   a.codes [M, K], b.codes [N, K]; scales tensorwise () or rowwise [M, 1] and [N, 1], or
              both in blocks of the same length along K; bias [N], values of out_dtype; float32 [M,
              N] holding values of out_dtype.
    Units:    out ~ dequantize(a) @ dequantize(b).T + bias
    Order:    accumulate over K: ``exact`` (G-2), ``f32`` (G-3), or a tensor core's plan (G-12) of
              ``accumulate.ACCUMULATIONS`` or a custom one; then the epilogue. Block scales: each
              block of K is accumulated by itself, the last one filled with zeros, scaled, and added
              in float32 (G-13); the sum is multiplied by the RN32 product of the tensors' scales,
              if any (S-22).
    Specials: Inf and NaN as in IEEE 754; an exact zero sum is +0; overflow to infinity.
    Raises:   ValueError: operands that are not a Quantized, empty (S-7), or of shapes that do not
              fit; not reduced along their last axis, or of granularities that do not go together;
              scales that are not float32, negative, or NaN over codes that are not; for a tensor
              core, a K that is not a multiple of 32 or formats it does not take; a bias that the
              epilogue does not take; unknown names.
    Source:   spec G-1 to G-6, G-12 to G-15.
    """
    epilogue, accumulate = epilogues.by_name(epilogue), sums.by_name(accumulate)
    block = _check(a, b, epilogue, out_dtype)
    bias = _check_bias(bias, epilogue, out_dtype, len(b.codes))
    # Inf * 0 and overflow are results here
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        if block is None:
            acc = _accumulate(a.codes, b.codes, a.fmt, b.fmt, accumulate)
            out = finish(
                acc, a.scale_inv, b.scale_inv.T, epilogue=epilogue, out_dtype=out_dtype, bias=bias
            )
            return np.ascontiguousarray(out)  # ``chains`` may give a transposed view
        return _add_bias(_by_blocks(a, b, block, accumulate, epilogue), epilogue, out_dtype, bias)


def finish(
    acc: np.ndarray,
    scale_inv_a: np.ndarray,
    scale_inv_b: np.ndarray,
    *,
    epilogue: Epilogue,
    out_dtype: Format,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """The epilogue: accumulator -> float32 [M, N] in out_dtype (G-4, G-5, G-14, G-15, G-18).

    Shapes:   acc float32 [M, N]; scale_inv_a () or [M, 1], scale_inv_b () or [1, N], float32; bias
              float32 [N], if the epilogue takes one.
    Order:    as the fields of Epilogue say, each product and sum rounded to float32; operands are
              not checked.
    Specials: Inf and NaN as in IEEE 754; overflow to infinity.
    """
    rows, scales, order = acc, (scale_inv_a, scale_inv_b), epilogue
    turned = not acc.flags.c_contiguous
    if turned:  # ``chains`` may give a transposed view, which is read as it lies: [N, M]
        rows, scales = acc.T, (np.transpose(scale_inv_b), np.transpose(scale_inv_a))
        order = dataclasses.replace(epilogue, scale=_TURNED[epilogue.scale])
    out = None
    if bias is None and out_dtype == BFLOAT16 and epilogue.rounding == "nearest_even":
        kernel = kernels.finisher(_ORDERS[order.scale], order.round_first)
        if worth(kernel, acc.size, ELEMENTS):
            out = _finish_bfloat16(kernel, rows, *scales)
    elif (
        bias is None
        and out_dtype == FLOAT32
        and not epilogue.round_first
        # Of two NaNs NumPy keeps one or the other, as its loop is cut: then one thread takes all.
        and np.isfinite(scale_inv_a).all()
        and np.isfinite(scale_inv_b).all()
    ):
        out = _finish_float32(rows, *scales, order)
    if out is not None:
        return out.T if turned else out  # [N, M] -> [M, N]
    return finish_plain(
        acc, scale_inv_a, scale_inv_b, epilogue=epilogue, out_dtype=out_dtype, bias=bias
    )


def finish_plain(
    acc: np.ndarray,
    scale_inv_a: np.ndarray,
    scale_inv_b: np.ndarray,
    *,
    epilogue: Epilogue,
    out_dtype: Format,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """The definition of ``finish``; bfloat16 has a kernel, float32 threads."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        if epilogue.round_first:
            acc = cast.round_to(acc, out_dtype, rounding=epilogue.rounding)
        x, y = _factors(acc, scale_inv_a, scale_inv_b, epilogue)
        if epilogue.bias == "fused":
            assert bias is not None
            return cast.round_to(
                sums.multiply_add(*np.broadcast_arrays(x, y, bias)),
                out_dtype,
                rounding=epilogue.rounding,
            )
        return _add_bias(x * y, epilogue, out_dtype, bias)


_ORDERS = {"product": "product", "each": "rows", "b_first": "columns"}
"""Which scales ``kernels.finisher`` takes first."""

_TURNED: dict[str, epilogues.Scale] = {"product": "product", "each": "b_first", "b_first": "each"}
"""The order of the scales of a result's transpose."""


def _finish_float32(
    acc: np.ndarray, row_scales: np.ndarray, column_scales: np.ndarray, epilogue: Epilogue
) -> np.ndarray:
    """``finish_plain`` in pieces of rows; float32 needs no rounding."""
    out = np.empty(acc.shape, np.float32)

    def rows(begin: int, end: int) -> None:
        part = slice(begin, end)
        own = row_scales[begin:end] if row_scales.ndim else row_scales
        # each thread has its own error state
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            np.multiply(*_factors(acc[part], own, column_scales, epilogue), out=out[part])

    threads.run(rows, len(acc), grain=max(1, (1 << 17) // max(1, acc.shape[1])))
    return out


def _finish_bfloat16(
    kernel: Callable, acc: np.ndarray, row_scales: np.ndarray, column_scales: np.ndarray
) -> np.ndarray:
    """``finish`` with a compiled kernel."""
    m, n = acc.shape
    scales = (
        np.ascontiguousarray(np.broadcast_to(s, shape).ravel())
        for s, shape in ((row_scales, (m, 1)), (column_scales, (1, n)))
    )
    operands, out = (np.ascontiguousarray(acc), *scales), np.empty((m, n), np.float32)
    threads.run(lambda begin, end: kernel(*operands, out, begin, end), m, grain=1 << 8)
    return out


def matmul_hp(a, b, *, out_dtype: Format = FLOAT32) -> np.ndarray:
    """A GEMM in high precision (spec G-9): [M, K] x [N, K] -> [M, N].

    Shapes:   a [M, K] and b [N, K], float64, float32, float16 or bfloat16, any of M, N, K zero;
              float32 [M, N] holding values of out_dtype.
    Order:    summed in float64 in NumPy's order, rounded to float32, then to out_dtype.
    Specials: Inf and NaN as in IEEE 754; overflow to infinity.
    Raises:   ValueError: shapes or dtypes that do not fit; out_dtype not float32, bfloat16 or
              float16.
    """
    a, b = cast.exact(a), cast.exact(b)
    _check_shapes(a, b, out_dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        return cast.round_to((a @ b.T).astype(np.float32), out_dtype)


def canonical(values: np.ndarray) -> np.ndarray:
    """values with every NaN replaced by 0x7FFFFFFF, the NaN that tensor cores give."""
    return np.where(np.isnan(values), np.uint32(0x7FFFFFFF).view(np.float32), values)


def _accumulate(
    a: np.ndarray, b: np.ndarray, fmt_a: Format, fmt_b: Format, plan: str | Accumulation
) -> np.ndarray:
    if not isinstance(plan, Accumulation):
        values = cast.decode(a, fmt_a), cast.decode(b, fmt_b)
        if plan == "f32":
            return sums.f32(*values)
        return sums.with_specials(sums.exact_sum(*map(sums.finite_part, values)), *values)
    tensor_core.check_pair(fmt_a, fmt_b)
    if a.shape[1] % K_STEP:
        raise ValueError(
            f"a tensor core needs K divisible by {K_STEP}; got {a.shape[1]}. Pad both operands "
            "with zeros: without split-K the bits stay (G-12)."
        )
    finite = _finite_codes(a, fmt_a), _finite_codes(b, fmt_b)
    whole = sums.chains_of_codes(*finite, fmt_a, fmt_b, plan)
    if finite[0] is a and finite[1] is b:
        # A compiled unit's sums of finite terms are finite; others may overflow, and Infs meet.
        return whole if plan.unit.compiled else canonical(whole)
    return canonical(sums.with_specials(whole, cast.decode(a, fmt_a), cast.decode(b, fmt_b)))


def _finite_codes(codes: np.ndarray, fmt: Format) -> np.ndarray:
    """Codes with 0 for infinities and NaNs; itself if it has none (signed 8-bit formats)."""
    magnitudes = codes & np.uint8(0x7F)
    if codes.size == 0 or magnitudes.max() <= fmt.max_code:
        return codes
    return np.where(magnitudes > np.uint8(fmt.max_code), np.uint8(0), codes)


def _factors(
    acc: np.ndarray, scale_inv_a: np.ndarray, scale_inv_b: np.ndarray, epilogue: Epilogue
) -> tuple[np.ndarray, np.ndarray]:
    """The two factors of the last product of the scaling; a bias may be fused with it."""
    if epilogue.scale == "product":
        return acc, scale_inv_a * scale_inv_b
    first, last = (
        (scale_inv_a, scale_inv_b) if epilogue.scale == "each" else (scale_inv_b, scale_inv_a)
    )
    return acc * first, last


def _add_bias(
    scaled: np.ndarray, epilogue: Epilogue, out_dtype: Format, bias: np.ndarray | None
) -> np.ndarray:
    if epilogue.bias == "before_round":
        scaled = scaled + bias
    # A float32 sum is rounded already: another copy of it costs as much as a fiftieth of the GEMM.
    rounded = out_dtype == FLOAT32 and scaled.dtype == np.float32
    out = scaled if rounded else cast.round_to(scaled, out_dtype, rounding=epilogue.rounding)
    if epilogue.bias == "after_round":
        return cast.round_to(out + bias, out_dtype, rounding=epilogue.rounding)
    return out


def _by_blocks(a: Quantized, b: Quantized, block: int, plan, epilogue: Epilogue) -> np.ndarray:
    """Each block of K accumulated alone, scaled, and added in float32, ascending from +0 (G-13).

    Under ``each`` and ``b_first`` the scaled block is rounded, then added; under ``product`` both
    in one rounding, as a fused multiply-add.
    """
    # [M, K / block]
    left, right = (scaling.spread(q.scale_inv, q.codes.shape, q.blocks)[:, ::block] for q in (a, b))
    if missing := -a.codes.shape[1] % block:  # zeros fill a last block: they change no bit
        a, b = (q._replace(codes=np.pad(q.codes, ((0, 0), (0, missing)))) for q in (a, b))
    total = np.zeros((len(a.codes), len(b.codes)), np.float32)
    for i in range(left.shape[1]):
        part = slice(i * block, (i + 1) * block)
        acc = _accumulate(a.codes[:, part], b.codes[:, part], a.fmt, b.fmt, plan)
        # [M, N], [M, 1] and [1, N]
        x, y = _factors(acc, left[:, i, None], right[None, :, i], epilogue)
        total = sums.multiply_add(x, y, total) if epilogue.scale == "product" else total + x * y
    return _by_tensor_scales(total, a.tensor_scale_inv, b.tensor_scale_inv)


def _by_tensor_scales(
    total: np.ndarray, left: np.ndarray | None, right: np.ndarray | None
) -> np.ndarray:
    """The sum times the scales of the tensors or their rows, [M, 1] and [N, 1] (S-22): by their
    product, unless both are of rows; then by a's, and by b's."""
    if left is None or right is None:
        scale = left if right is None else right.T
        return total if scale is None else total * scale
    if np.ndim(left) and np.ndim(right):  # [M, N], [M, 1] and [1, N]
        return total * left * right.T
    return total * (left * right.T)


def _check(a: Quantized, b: Quantized, epilogue: Epilogue, out_dtype: Format) -> int | None:
    """Check the operands; return the block length along K, None if a scale covers all of K."""
    for name, q in (("a", a), ("b", b)):
        scaling.check_scales(q, name)
        if q.granularity != "tensorwise" and q.axis not in (-1, 1):
            raise ValueError(
                f"{name} needs K, the reduced axis, last; got axis={q.axis}. Quantize the "
                "transpose."
            )
        if q.fmt.name not in QUANTIZED_FORMATS:
            raise ValueError(
                f"an operand has fmt {', '.join(QUANTIZED_FORMATS)}; got {name} in {q.fmt}."
            )
    _check_shapes(a.codes, b.codes, out_dtype)
    block = block_of(a.granularity, b.granularity)
    if block is None and (a.tensor_scale_inv is not None or b.tensor_scale_inv is not None):
        raise ValueError(
            f"two-level scales need blocks along K; got {a.granularity} and {b.granularity}. "
            "Dequantize and use matmul_hp (S-22)."
        )
    if block is not None and (epilogue.round_first or epilogue.bias == "fused"):
        raise ValueError(
            f"epilogue {epilogue.name!r} needs one sum over K, not blocks. Use 'scale_then_round'."
        )
    return block


def _check_shapes(a: np.ndarray, b: np.ndarray, out_dtype: Format) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(
            f"a GEMM takes a [M, K] and b [N, K] with one K; got {a.shape} and {b.shape}."
        )
    check_out_dtype(out_dtype)


def check_out_dtype(out_dtype: Format) -> None:
    """ValueError unless out_dtype is one of OUT_DTYPES."""
    errors.one_of("out_dtype", out_dtype, OUT_DTYPES)


def _check_bias(bias, epilogue: Epilogue, out_dtype: Format, n: int) -> np.ndarray | None:
    """bias as float32 values of out_dtype, or None."""
    if (bias is None) != (epilogue.bias is None):
        have = "no bias was given" if bias is None else "a bias was given"
        taking = ", ".join(
            e.name for e in epilogues.EPILOGUES.values() if (e.bias is None) == (bias is None)
        )
        raise ValueError(
            f"epilogue {epilogue.name!r} takes {'no' if epilogue.bias is None else 'a'} bias; "
            f"{have}. Use {taking}."
        )
    if bias is None:
        return None
    bias = np.asarray(bias)
    with np.errstate(over="ignore"):  # what float32 does not hold is refused below
        value = cast.exact(bias).astype(np.float32)
    if value.shape != (n,) or not np.array_equal(
        cast.round_to(value, out_dtype), cast.exact(bias), equal_nan=True
    ):
        raise ValueError(
            f"bias is [N] = [{n}] of {out_dtype}; got {bias.dtype} {value.shape}. Use round_to."
        )
    return value
