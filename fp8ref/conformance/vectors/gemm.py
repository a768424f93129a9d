"""Test vectors of a scaled GEMM: codes and scales of two operands, and their product (spec G)."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from fp8ref.conformance.gemm import bound as bounds
from fp8ref.conformance.gemm.scaled_gemm import hardware_scales
from fp8ref.conformance.inputs import dtypes
from fp8ref.conformance.kit import explain
from fp8ref.conformance.kit.arrays import same_bits
from fp8ref.conformance.vectors import format as text
from fp8ref.conformance.vectors import quantize
from fp8ref.conformance.vectors.verdict import Verdict
from fp8ref.formats import FORMATS, FP8_FORMATS
from fp8ref.shared.errors import one_of
from fp8ref.sim.gemm import accumulate, gemm
from fp8ref.sim.gemm.gemm import OUT_DTYPES
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec import epilogue as epilogues
from fp8ref.spec import granularity as granularities

FIELDS = ("M,N,K", "codes of a", "scale_inv of a", "codes of b", "scale_inv of b")
"""The names of the inputs on a line."""

ANSWERS = ("values",)  # the names of what is appended to it

PATTERNS = ("ordinary", "any code", "one large", "canceling", "subnormal", "zero", "specials")
"""How an operand's codes are filled.

These are patterns of whole arrays, where inputs.kinds sorts single numbers.
"""

ACCUMULATE = ("exact", "f32", *accumulate.ACCUMULATIONS)
"""The accumulations that a wrong answer is compared with."""

EPILOGUES = tuple(e.name for e in epilogues.EPILOGUES.values() if e.bias is None)
"""The epilogues without a bias."""

OUTS = tuple(f.name for f in OUT_DTYPES)  # the output dtypes by name


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """A set of vectors: ``count`` products of a shape M,N,K; both operands have the granularity.

    Raises:   ValueError: an unknown format, granularity or out_dtype, a shape, seed or count unfit.
    """

    format: str
    format_b: str = ""
    granularity: str = "tensorwise"
    out_dtype: str = "float32"
    shape: str = "4,4,256"
    seed: int = 0
    count: int = 35

    def __post_init__(self) -> None:
        if not self.format_b:
            object.__setattr__(self, "format_b", self.format)
        for name in (self.format, self.format_b):
            one_of("an operand's format", name, FP8_FORMATS)
        one_of("out_dtype", self.out_dtype, OUTS)
        dtypes.check_random(self.seed, self.count)
        m, n, k = self.dims
        for shape in ((m, k), (n, k)):
            granularities.blocks(self.granularity, shape, -1)

    @property
    def dims(self) -> tuple[int, ...]:
        """M, N and K."""
        return quantize.dims(self.shape, FIELDS[0])

    def operands(self) -> Iterator[tuple[str, Quantized, Quantized]]:
        """(pattern, a [M, K], b [N, K]), patterns taking turns."""
        m, n, k = self.dims
        for i in range(self.count):
            pattern, seed = PATTERNS[i % len(PATTERNS)], (self.seed << 32) + 2 * i
            a = _operand(pattern, (m, k), self.format, self.granularity, seed)
            b = _operand(pattern, (n, k), self.format_b, self.granularity, seed + 1)
            yield pattern, a, b

    def vectors(self) -> Iterator[tuple[str, str]]:
        """(pattern, line) of each product."""
        return ((pattern, self.line(a, b)) for pattern, a, b in self.operands())

    def line(self, a: Quantized, b: Quantized) -> str:
        """The line of a product of these operands."""
        fields = [f"{len(a.codes)},{len(b.codes)},{a.codes.shape[1]}"]
        for q in (a, b):
            scale_bits = np.atleast_1d(q.scale_inv).view(np.uint32)
            fields += [text.join(q.codes, 8), text.join(scale_bits, 32)]
        return " ".join(fields)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a GEMM is judged: by which accumulation, and which epilogue without a bias.

    bound    within B-1's bound of the exact sum, in the place of all bits.
    Raises:  ValueError: an unknown name; a bound on another accumulation than ``exact``.
    """

    accumulate: str = "exact"
    epilogue: str = "scale_then_round"
    bound: bool = False

    def __post_init__(self) -> None:
        if self.bound and self.accumulate != "exact":
            raise ValueError(
                "B-1 bounds the distance from the exact sum; got accumulate "
                f"{self.accumulate!r}. Leave it or the bound out."
            )
        accumulate.by_name(self.accumulate)
        one_of("an epilogue without a bias", self.epilogue, EPILOGUES)


def specified(question: Gemm, rules: Rules) -> Iterator[str]:
    """The simulator's answer to each vector."""
    out = dtypes.by_name(question.out_dtype)
    multiply = functools.partial(gemm.matmul, out_dtype=FORMATS[question.out_dtype])
    for _, a, b in question.operands():
        values = multiply(a, b, accumulate=rules.accumulate, epilogue=rules.epilogue)
        yield text.join(dtypes.bits(values, out), out.bits)


def verify(question: Gemm, rules: Rules, vectors: Iterator[text.Vector], verdict: Verdict) -> None:
    """Judge every vector, and record it in the verdict. All NaNs count as equal."""
    out, worst = dtypes.by_name(question.out_dtype), 0.0
    for vector in vectors:
        m, n, k = vector.shape(0, FIELDS[0])
        a = _read(vector, 1, (m, k), question.format, question.granularity, "a")
        b = _read(vector, 3, (n, k), question.format_b, question.granularity, "b")
        name = f"the values, {out.name}, of M x N = {m} x {n}"
        value_bits = vector.numbers(5, out.bits, (m, n), name)
        values = dtypes.values(value_bits, out).astype(np.float32)
        multiply = functools.partial(gemm.matmul, a, b, out_dtype=FORMATS[question.out_dtype])
        with vector.named():
            expected = multiply(accumulate=rules.accumulate, epilogue=rules.epilogue)
        differ = ~same_bits(values, expected)
        if rules.bound:
            distance = _distance(a, b, values, expected, rules, out)
            worst = max(worst, float(distance.max()))
            differ &= ~(distance <= 1)
        inputs = question.line(a, b)
        kind = verdict.kind(inputs)
        if verdict.add(vector.line, inputs, kind, differs=differ.any()):
            i = int(np.argmax(differ.ravel()))
            why = {
                "vector": f"{kind} operands, element{quantize.at(i, (m, n))}",
                "expected": _shown(expected.ravel()[i], out),
                "got": _shown(values.ravel()[i], out),
                "rule": f"{_rule(rules, question)}. {int(differ.sum())} of {differ.size} values "
                f"differ. {_guess(multiply, values)}".strip(),
            }
            if rules.bound:
                why["rule"] = f"{distance.ravel()[i]:.3g} of the bound (B-1). {why['rule']}"
            verdict.show(vector.line, kind, why)
    if rules.bound:
        verdict.notes.append(
            f"the largest distance from the exact sum is {worst:.3g} of B-1's bound"
        )


def _distance(
    a: Quantized,
    b: Quantized,
    values: np.ndarray,
    expected: np.ndarray,
    rules: Rules,
    out: dtypes.Source,
) -> np.ndarray:
    """The distance in units of B-1's bound; infinite where one side alone is not finite."""
    with np.errstate(all="ignore"):
        within = bounds.bound(
            a, b, values, expected, out_dtype=FORMATS[out.name], epilogue=rules.epilogue
        )
        distance = np.abs(values.astype(np.float64) - expected) / within
    distance = np.where(same_bits(values, expected), 0, distance)
    return np.where(np.isfinite(values) & np.isfinite(expected) | (distance == 0), distance, np.inf)


def _rule(rules: Rules, question: Gemm) -> str:
    sum_texts = {
        "exact": "the exact sum, rounded once to float32 (G-2)",
        "f32": "float32 sums in the order of K (G-3)",
    }
    clause = {
        "scale_then_round": "G-4",
        "product_then_round": "G-14",
        "unit_round_scale_round": "G-5",
    }[rules.epilogue]
    sums = sum_texts.get(rules.accumulate, f"{rules.accumulate} (G-10, G-12)")
    if granularities.by_name(question.granularity).reduced:
        sums += ", block by block (G-13)"
    return f"{sums}, then {rules.epilogue} ({clause})"


def _guess(multiply: Callable[..., np.ndarray], values: np.ndarray) -> str:
    """A sentence: which other accumulation and epilogue give these values; '' if none do."""
    for accumulation, epilogue in itertools.product(ACCUMULATE, EPILOGUES):
        try:
            other = multiply(accumulate=accumulation, epilogue=epilogue)
        except ValueError:  # an accumulation that does not take such operands
            continue
        if same_bits(values, other).all():
            return f"The answer is what --accumulate {accumulation} --epilogue {epilogue} gives."
    return ""


def _shown(value: np.float32, out: dtypes.Source) -> str:
    bits = int(dtypes.bits(np.full(1, value), out)[0])
    return f"{bits:0{out.bits // 4}X} ({explain.decimal(value)})"


def _read(
    vector: text.Vector, field: int, shape: tuple[int, int], fmt: str, granularity: str, name: str
) -> Quantized:
    with vector.named():
        scales_shape = granularities.scale_shape(granularity, shape, -1)
    codes = vector.numbers(field, 8, shape, f"the codes of {name} {list(shape)}")
    description = f"the numbers in scale_inv of {name}, {granularity}, shape {list(scales_shape)},"
    scale_inv = vector.numbers(field + 1, 32, scales_shape, description).view(np.float32)
    return Quantized(codes, scale_inv, scale_inv, FP8_FORMATS[fmt], granularity, -1)


def _operand(
    pattern: str, shape: tuple[int, int], name: str, granularity: str, seed: int
) -> Quantized:
    fmt = FP8_FORMATS[name]
    raw = dtypes.random(seed, 2 * math.prod(shape)).reshape(2, *shape)
    sign = (raw[0] >> np.uint64(63)).astype(np.uint8) * np.uint8(fmt.sign_bit)
    magnitude = (raw[0] & np.uint64(0x7F)).astype(np.uint8)
    # codes whose exponents are near that of 1, so that no product dwarfs the others
    ordinary = (fmt.bias - 3 << fmt.mantissa_bits) + magnitude % np.uint8(6 << fmt.mantissa_bits)
    # 2^8 at one k of both operands, elsewhere 2^-5 to 2^-1: next to the product 2^16, a sum of 14
    # bits drops the others and one of 24 keeps them
    large = fmt.bias + 8 << fmt.mantissa_bits
    small = (fmt.bias - 5 << fmt.mantissa_bits) + magnitude % np.uint8(4 << fmt.mantissa_bits)
    lowest = magnitude % np.uint8(1 << fmt.mantissa_bits)
    codes = {
        "ordinary": ordinary,
        "any code": np.minimum(magnitude, fmt.max_code),
        "one large": np.where(np.arange(shape[1]) == seed // 2 % shape[1], large, small),
        "canceling": ordinary,
        "subnormal": lowest,
        "zero": np.zeros(shape),
        "specials": magnitude,
    }[pattern].astype(np.uint8)
    if not fmt.negative_zero:
        sign[codes == 0] = 0
    codes = codes | sign
    if pattern == "canceling":
        # K's second half repeats the first, in one operand negated: all products but one cancel
        half = shape[1] // 2
        codes[:, half : 2 * half - 1] = codes[:, : half - 1] ^ np.uint8(
            fmt.sign_bit if seed % 2 else 0
        )
        if not fmt.negative_zero:
            codes[codes == fmt.nan_code] = 0
    if pattern == "specials":  # at most one NaN or Inf a line, so that some results are finite
        finite = np.isfinite(cast.decode(codes, fmt))
        codes = np.where(finite | (np.arange(shape[1]) == seed // 2 % shape[1]), codes, np.uint8(1))
    groups = granularities.scale_shape(granularity, shape, -1)
    group_bits = dtypes.random(seed ^ 1 << 63, math.prod(groups)).reshape(groups)
    # scale_inv between 2^-8 and 1, of random mantissas where the granularity's scales have any
    field = np.uint64(119) + (group_bits >> np.uint64(61))
    drawn = (field << np.uint64(23) | group_bits & np.uint64(0x7FFFFF)).astype(np.uint32)
    inverses = hardware_scales(granularity, drawn.view(np.float32))
    return Quantized(codes, inverses, inverses, fmt, granularity, -1)
