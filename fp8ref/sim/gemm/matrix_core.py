"""A step of AMD's matrix cores in FP8, CDNA3's v_mfma_f32_*_fp8_*, as MMA-Sim models it (G-25).

Order of a step over 16 products: the even and the odd ones are each aligned with the largest
exponent of their eight, cut off toward zero, and summed exactly; both sums are aligned with the
larger exponent, cut off toward negative infinity, and added; that sum and the accumulator are
aligned with the larger of their exponents, cut off toward negative infinity, and added; the result
is rounded once to float32, to nearest even. Unconfirmed by any recording at hand.
"""

from dataclasses import dataclass

import numpy as np

from fp8ref import formats
from fp8ref.formats import E4M3FNUZ, E5M2FNUZ, Format
from fp8ref.shared import registry
from fp8ref.shared.errors import require
from fp8ref.sim import threads
from fp8ref.sim.gemm import accumulate
from fp8ref.sim.gemm.tensor_core import exponents
from fp8ref.sim.kernels import modeled
from fp8ref.sim.kernels.compiled import PRODUCTS, worth
from fp8ref.sim.quantize import cast

_LEAST = -126  # the exponent of a zero


@dataclass(frozen=True, kw_only=True)
class MatrixCore:
    """The numbers of one step.

    group           products of a step, half of them even, half odd.
    fraction_bits   kept of each product below the largest exponent of its half, and of each half.
    sum_bits        kept of the products' sum next to the accumulator; accumulator_bits: of the
                    accumulator.
    reach           an accumulator further than this below the sum's exponent is left out.
    evidence        the source of the numbers.
    """

    name: str
    evidence: str
    group: int = 16
    fraction_bits: int = 24
    sum_bits: int = 31
    accumulator_bits: int = 24
    reach: int = 25


MATRIX_CORES = {
    u.name: u
    for u in (
        MatrixCore(
            name="cdna3",
            evidence="as MMA-Sim models v_mfma of CDNA3; unconfirmed by any recording at hand",
        ),
    )
}
"""AMD's matrix cores by name (G-25)."""


def by_name(unit: str | MatrixCore) -> MatrixCore:
    """The unit of that name; a MatrixCore is itself; ValueError for anything else."""
    return registry.lookup("unit is a MatrixCore or", MATRIX_CORES, unit, MatrixCore)


def mfma(
    a_codes, b_codes, c, *, fmt_a: Format, fmt_b: Format, unit: str | MatrixCore = "cdna3"
) -> np.ndarray:
    """c + the sum of K products, 16 at a time, k ascending (spec G-25).

    Shapes:   a_codes [M, K] and b_codes [N, K] uint8, K a multiple of 16 (an instruction has 16 or
              32); c [M, N] float32; float32 [M, N].
    Specials: a zero has exponent -126; a zero result is +0; from 2^128 on, infinity; NaN and
    infinities as in G-6.
    Raises:   ValueError: shapes or dtypes that do not fit; formats other than e4m3fnuz and
              e5m2fnuz; an unknown unit.
    Source:   MMA-Sim (commit c785138), mmasim/simulator/arithmetic.py: amd_fused_dot_rd_add.
    """
    unit = by_name(unit)
    for fmt in (fmt_a, fmt_b):
        formats.check(fmt)
        text = f"CDNA3 matrix cores multiply e4m3fnuz and e5m2fnuz; got {fmt_a} and {fmt_b}."
        require(fmt in (E4M3FNUZ, E5M2FNUZ), text)
    a, b, c = cast.decode(a_codes, fmt_a), cast.decode(b_codes, fmt_b), np.asarray(c)
    if (
        a.ndim != 2
        or b.ndim != 2
        or a.shape[1] != b.shape[1]
        or a.shape[1] % unit.group
        or c.shape != (len(a), len(b))
    ):
        raise ValueError(
            f"mfma takes a [M, K], b [N, K] and c [M, N], K a multiple of {unit.group}; got "
            f"{a.shape}, {b.shape} and {c.shape}."
        )
    text = f"the accumulator c is float32; got {c.dtype}. Convert it with .astype(np.float32)."
    require(c.dtype == np.float32, text)
    left, right, accumulator = (accumulate.finite_part(v).astype(np.float64) for v in (a, b, c))
    acc = chain(left, right, accumulator, fmt_a, fmt_b, unit)
    return accumulate.with_specials(acc.astype(np.float32), a, b, c)


def chain(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, fmt_a: Format, fmt_b: Format, unit: MatrixCore
) -> np.ndarray:
    """``chain_plain``, by a compiled kernel."""
    if not worth(modeled.matrix_core_chain, len(a) * len(b) * a.shape[1], PRODUCTS):
        return chain_plain(a, b, c, fmt_a, fmt_b, unit)
    left = np.ascontiguousarray(a), exponents(a, fmt_a.emin, _LEAST).astype(np.int16, order="C")
    right = (
        np.ascontiguousarray(b.T),
        exponents(b, fmt_b.emin, _LEAST).T.astype(np.int16, order="C"),
    )
    acc, steps = np.array(c, order="C"), a.shape[1] // unit.group
    numbers = unit.group, unit.fraction_bits, unit.sum_bits, unit.accumulator_bits, unit.reach
    threads.run(
        lambda begin, end: modeled.matrix_core_chain(
            *left, *right, acc, begin, end, steps, *numbers
        ),
        len(a),
    )
    return acc


def chain_plain(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, fmt_a: Format, fmt_b: Format, unit: MatrixCore
) -> np.ndarray:
    """Successive steps over K: finite a [M, K], b [N, K], c [M, N], float64."""
    for k in range(0, a.shape[1], unit.group):
        part = slice(k, k + unit.group)
        c = step_plain(a[:, part], b[:, part], c, fmt_a, fmt_b, unit)
    return c


def step_plain(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, fmt_a: Format, fmt_b: Format, unit: MatrixCore
) -> np.ndarray:
    """One step: finite a [M, 16], b [N, 16], c [M, N]; float64 [M, N], of float32 or infinite.

    Exact in float64 but for the last rounding: a half has at most 29 bits, the sum with c at most
    36.
    """
    products = a[:, None, :] * b[None, :, :]  # [M, 1, 16] x [1, N, 16] -> [M, N, 16]
    a_exponents = exponents(a, fmt_a.emin, _LEAST)
    b_exponents = exponents(b, fmt_b.emin, _LEAST)
    product_exponents = a_exponents[:, None, :] + b_exponents[None, :, :]
    sums, tops = [], []
    for half in (slice(0, None, 2), slice(1, None, 2)):
        top = product_exponents[..., half].max(axis=-1)
        scale = unit.fraction_bits - top
        sums.append(
            np.ldexp(np.trunc(np.ldexp(products[..., half], scale[..., None])).sum(axis=-1), -scale)
        )
        tops.append(top)
    both = np.maximum(*tops)
    total = _floored(sums[0], both, unit.fraction_bits) + _floored(
        sums[1], both, unit.fraction_bits
    )
    c_exponents = exponents(c, -126, _LEAST)
    top = np.maximum(both, c_exponents)
    added = np.where(c_exponents >= top - unit.reach, _floored(c, top, unit.accumulator_bits), 0)
    with np.errstate(over="ignore"):
        result = (_floored(total, top, unit.sum_bits) + added).astype(np.float32)
    return result.astype(np.float64) + 0.0  # -0 becomes +0


def _floored(value: np.ndarray, exponent: np.ndarray, bits: int) -> np.ndarray:
    """value rounded down to a multiple of 2^(exponent - bits)."""
    return np.ldexp(np.floor(np.ldexp(value, bits - exponent)), exponent - bits)
