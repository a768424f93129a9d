"""B-1's bound on a GEMM's output, for every output dtype, and a GEMM's exact result (spec B-1).

``exact`` is the result in real numbers, before any rounding; ``bound`` the largest distance from
the simulator's result that any order of float32 sums can reach.
"""

from typing import NamedTuple

import numpy as np

from fp8ref.conformance.kit.arrays import equal
from fp8ref.formats import Format
from fp8ref.sim.gemm import accumulate
from fp8ref.sim.gemm.tensor_core import TensorCore
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec.epilogue import Epilogue, by_name
from fp8ref.spec.granularity import block_of

ROUNDINGS = 9
"""Float32 roundings of B-1 besides K: K - 1 additions, at most five products with scales, three
roundings of the simulator's, and two of the magnitudes here."""


class Distance(NamedTuple):
    """How far results are from others, elementwise [M, N], float64.

    ulps    |found - exact| in ulps of the output dtype; bounds: |found - simulated| in B-1's bound.
    """

    ulps: np.ndarray
    bounds: np.ndarray


def gamma(n: int) -> float:
    """Relative error of n float32 roundings: n u / (1 - n u), u = 2^-24 (Higham, section 3.1)."""
    return n * 2.0**-24 / (1 - n * 2.0**-24)


def ulp(largest: np.ndarray, fmt: Format) -> np.ndarray:
    """The spacing of a format's numbers at magnitudes ``largest``, float64."""
    with np.errstate(invalid="ignore"):
        return np.ldexp(
            1.0,
            np.maximum(np.frexp(np.asarray(largest, np.float64))[1] - 1, fmt.emin)
            - fmt.mantissa_bits,
        )


def bound(
    a: Quantized,
    b: Quantized,
    results: np.ndarray,
    simulated: np.ndarray,
    *,
    out_dtype: Format,
    epilogue: str | Epilogue,
) -> np.ndarray:
    """Bound on |results - simulated| of a GEMM's outputs, elementwise, in float64 (B-1).

    Shapes:   a [M, K]; b [N, K]; results, simulated and the bound [M, N].
    Specials: NaN or Inf where an operand is.
    """
    # n float32 roundings in any order err by gamma(n) of the sum of magnitudes. Then both results
    # round to the output dtype: values d apart end at most d + 1 ulp apart, or d + 3 where the sum
    # is rounded before it is scaled (G-5).
    # [M, K] x [N, K]
    magnitudes = (
        np.abs(scaling.dequantize(a)).astype(np.float64)
        @ np.abs(scaling.dequantize(b)).astype(np.float64).T
    )
    roundings = 3 if by_name(epilogue).round_first else 1
    largest = np.maximum(np.abs(results), np.abs(simulated)).astype(np.float64)
    return gamma(a.codes.shape[1] + ROUNDINGS) * magnitudes + roundings * ulp(largest, out_dtype)


def tensor_core_bound(a: Quantized, b: Quantized, unit: TensorCore) -> np.ndarray:
    """Bound on a tensor core's loss of a GEMM's scaled sum, elementwise [M, N] float64 (B-1).

    For every chain of steps over neighboring K, promoted or not.
    """
    # A step cuts fused_width products and the accumulator below 2^-fraction_bits of the largest of
    # them, its result below 2^-output_bits of itself. A product's coded exponent is that of its
    # factors, of which a subnormal one counts as the smallest normal number. The accumulator is a
    # sum over neighboring K: a difference of two prefixes.
    x, y = (_coded(q) for q in (a, b))
    p, q = (np.asarray(scaling.dequantize(of), np.float64) for of in (a, b))
    prefix = np.zeros((len(p), len(q)))
    largest, products, steps = prefix.copy(), prefix.copy(), 0
    for k in range(0, p.shape[1], unit.fused_width):
        part = slice(k, k + unit.fused_width)
        prefix += p[:, part] @ q[:, part].T
        np.maximum(largest, np.abs(prefix), out=largest)
        products += x[:, part] @ y[:, part].T  # no less than the largest of them
        steps += 1
    lost = (unit.fused_width + 1) * 2.0**-unit.fraction_bits
    return lost * products + steps * (lost + 2.0**-unit.output_bits) * 2 * largest


def _coded(q: Quantized) -> np.ndarray:
    """Magnitudes [rows, K], float64; a subnormal one as the smallest normal number."""
    codes = cast.decode(q.codes, q.fmt).astype(np.float64)
    magnitudes = np.where(codes == 0, 0, np.maximum(np.abs(codes), 2.0**q.fmt.emin))
    return magnitudes * scaling.spread(q.scale_inv, q.codes.shape, q.blocks)


def exact(a: Quantized, b: Quantized) -> np.ndarray:
    """The scaled sum of products of finite codes in real numbers: float64 [M, N].

    Its relative error is below 2^-51: the sum, and each product with scales, is rounded once to
    float64. Under block scales that is relative to the sum of magnitudes.
    """
    values = [cast.decode(q.codes, q.fmt) for q in (a, b)]
    block = block_of(a.granularity, b.granularity)
    if block is None:
        total, tail = accumulate.exact_pair(*values)
        return (total + tail) * (np.float64(a.scale_inv) * np.float64(b.scale_inv).T)
    spread = [
        scaling.spread(q.scale_inv, q.codes.shape, q.blocks)[:, ::block].astype(np.float64)
        for q in (a, b)
    ]
    result = np.zeros((len(a.codes), len(b.codes)))
    for i in range(spread[0].shape[1]):
        part = slice(i * block, (i + 1) * block)
        total, tail = accumulate.exact_pair(values[0][:, part], values[1][:, part])
        result += (total + tail) * (spread[0][:, i, None] * spread[1][None, :, i])
    return result


def distance(
    a: Quantized,
    b: Quantized,
    results: np.ndarray,
    simulated: np.ndarray,
    *,
    out_dtype: Format,
    epilogue: str | Epilogue = "scale_then_round",
) -> Distance:
    """The distance of results from the exact ones and from the simulator's.

    simulated  the GEMM under ``exact`` and the epilogue.
    Specials:  equal infinities, and NaN on both sides, are at distance 0; one side alone at inf.
    """
    alike = equal(results, simulated)
    with np.errstate(invalid="ignore", over="ignore"):
        within = bound(a, b, results, simulated, out_dtype=out_dtype, epilogue=epilogue)
        bounds = np.abs(results.astype(np.float64) - simulated) / within
        true = exact(a, b)
        ulps = np.abs(results - true) / ulp(np.maximum(np.abs(results), np.abs(true)), out_dtype)
    lost = ~np.isfinite(results) & ~alike
    return Distance(
        np.where(alike & ~np.isfinite(results), 0, np.where(lost, np.inf, ulps)),
        np.where(alike, 0, np.where(lost, np.inf, bounds)),
    )
