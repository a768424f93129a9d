"""Identify one step of the accumulation: its width, and the bits it keeps (spec G-10, G-18).

A step adds up to 32 products to the accumulator at once. Candidate units of the simulator are
narrowed by groups of stimuli: those stay whose predicted results are the GEMM's. Most stimuli
cancel a large number by its negative; what remains of a small number shows where it was cut off.
All terms are in the last step of K, so that no later step cuts them off again.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from fp8ref.conformance.gemm.stimulus import Bench, Terms, finite_codes
from fp8ref.conformance.kit.finding import Finding
from fp8ref.formats import FLOAT16, FLOAT32
from fp8ref.sim.gemm import tensor_core
from fp8ref.sim.gemm.tensor_core import K_STEP, ROUNDINGS, TensorCore
from fp8ref.sim.quantize import cast

FAR = 28  # binades below the largest number: more than any unit keeps

SEQUENTIAL, WIDE = "sequential", "wide"
SIDE = 64  # the most rows and columns of random steps


def width(bench: Bench) -> Finding:
    """Find ``fused_width``, the number of products that are aligned together.

    Or ``sequential``, if they are added one by one; ``wide``, if nothing is lost; None if unknown.
    """
    # 2^large is at 0 and -2^large at j; the other 30 products are small. From the group of 0 to the
    # group of j the sum holds the large number, and small ones are lost. Those in later groups are
    # kept. How many are kept, for every j, shows the groups' width. Large and small are as far
    # apart as the formats allow, while the sum of 30 small ones is still a result.
    large = bench.top
    small = max(bench.bottom, -19 if bench.out == FLOAT16 else bench.bottom)
    start = bench.k - K_STEP
    pairs = range(1, K_STEP)
    filled = dict.fromkeys(range(start, bench.k), bench.power(small))
    stimuli = [
        {**filled, start: bench.power(large), start + j: bench.power(large, -1)} for j in pairs
    ]
    kept = np.ldexp(bench.run(stimuli).astype(np.float64), -small)
    evidence = (
        f"2^{large}, -2^{large} j further on, and 2^{small} at the other 30 of 32 of K: with j "
        "= 1, 3, 7, 15, 31 there were "
        f"{', '.join(f'{kept[j - 1]:g}' for j in (1, 3, 7, 15, 31))} of the 30 left"
    )
    expected: dict[int | str, list[int]] = {
        w: [K_STEP - (j // w + 1) * w for j in pairs] for w in (32, 16, 8, 4)
    }
    # one by one, all between 0 and j are lost, and j itself is not one of the 30
    expected[SEQUENTIAL] = [K_STEP - (j + 1) for j in pairs]
    expected[WIDE] = [K_STEP - 2 for _ in pairs]
    widths = [w for w, counts in expected.items() if np.array_equal(kept, counts)]
    return Finding("fused_width", widths[0] if widths else None, evidence)


def units(bench: Bench, fused_width: int) -> tuple[list[TensorCore], list[Finding]]:
    """The tensor cores of this width that predict all results, the likeliest first.

    Returns:  the tensor cores, and findings about them.
    """
    plain = TensorCore(
        name="probed", fused_width=fused_width, fraction_bits=13, output_bits=23, evidence="probed"
    )
    fitting = [
        dataclasses.replace(plain, fraction_bits=bits, rounding=mode)
        for bits in range(25, 0, -1)
        for mode in ROUNDINGS
    ]
    fitting, terms = _narrowed(
        bench, fitting, _terms(bench), {"fraction_bits": "", "rounding": "1.5"}
    )
    if not fitting:
        return [], terms
    fitting, exponent_findings = _by_exponents(bench, fitting)
    fitting, results = _by_results(bench, fitting)
    agreeing = _random_step_units(bench, fitting)
    findings = [settled(finding, agreeing) for finding in (*terms, *exponent_findings, *results)]
    evidence = (
        f"{len(agreeing)} of the {len(fitting)} units that are left have the bits of steps "
        "over random codes of all kinds"
    )
    value = "as the simulator has them" if agreeing else None
    return agreeing, [*findings, Finding("random steps", value, evidence)]


def _by_exponents(
    bench: Bench, fitting: Sequence[TensorCore]
) -> tuple[list[TensorCore], list[Finding]]:
    """The units with each rule of exponents, zeros and subnormals that predict the results."""
    kinds = [
        ("coded", "excluded"),
        ("coded", "counted"),
        ("factors", "excluded"),
        ("products", "excluded"),
    ]
    tried = [
        dataclasses.replace(unit, exponents=of, zeros=zeros, subnormals=subnormals)  # type: ignore[arg-type]
        for unit, (of, zeros), subnormals in itertools.product(fitting, kinds, ("kept", "flushed"))
    ]
    fields = {"exponents": "same", "zeros": "zero", "subnormals": "smallest"}
    return _narrowed(bench, tried, _about_exponents(bench, fitting[0].fraction_bits), fields)


def _by_results(
    bench: Bench, fitting: Sequence[TensorCore]
) -> tuple[list[TensorCore], list[Finding]]:
    """The units with each rounding of a step's result that predict the results."""
    likeliest = [
        bits
        for unit in fitting[:1]
        for bits in dict.fromkeys((unit.fraction_bits, *range(23, 0, -1)))
        if bits <= 23
    ]
    tried = [
        dataclasses.replace(unit, output_bits=bits, output_rounding=mode)
        for unit, mode, bits in itertools.product(fitting, ROUNDINGS, likeliest)
    ]
    stimuli = _results(bench, tried[0]) if tried else {}
    return _narrowed(bench, tried, stimuli, {"output_bits": "", "output_rounding": " - "})


def settled(finding: Finding, fitting: Sequence[TensorCore]) -> Finding:
    """The finding with the values of these units."""
    if finding.what not in TensorCore.__dataclass_fields__:
        return finding
    values = list(dict.fromkeys(getattr(unit, finding.what) for unit in fitting)) or [
        finding.value,
        *finding.others,
    ]
    return dataclasses.replace(finding, value=values[0], others=tuple(values[1:]))


def _narrowed(
    bench: Bench,
    candidates: Sequence[TensorCore],
    stimuli: Mapping[str, Terms],
    fields: Mapping[str, str],
) -> tuple[list[TensorCore], list[Finding]]:
    """The candidates that predict all results, and a finding for each field.

    fields   by field, a word: stimuli with it in their names are the finding's evidence.
    """
    if not candidates:
        return [], [Finding(field, None, "") for field in fields]
    start = bench.k - candidates[0].fused_width
    a, b = bench.codes(
        [{start + k: pair for k, pair in terms.items()} for terms in stimuli.values()]
    )
    results = bench.run_codes(a, b)
    fitting = [
        unit for unit in candidates if np.array_equal(_predicted(bench, a, b, unit), results)
    ]
    findings = []
    exact = [math.fsum(x * y for x, y in terms.values()) for terms in stimuli.values()]
    answers = dict(zip(stimuli, zip(results, exact, strict=True), strict=True))
    for field, word in fields.items():
        evidence = _evidence({name: pair for name, pair in answers.items() if word in name})
        findings.append(settled(Finding(field, None, evidence), fitting))
    return fitting, findings


def _predicted(bench: Bench, a: np.ndarray, b: np.ndarray, unit: TensorCore) -> np.ndarray:
    """A unit's results [Q] of stimuli in codes [Q, K] whose terms are in the last 32 of K."""
    # [Q, 1, 32]
    left, right = (
        cast.decode(codes[:, None, -K_STEP:], fmt)
        for codes, fmt in ((a, bench.fmt_a), (b, bench.fmt_b))
    )
    zero = np.zeros((len(a), 1, 1), np.float32)
    sums = tensor_core.chain_plain(left, right, zero, bench.fmt_a, bench.fmt_b, unit)
    return bench.rounded(sums[:, 0, 0])


def _random_step_units(bench: Bench, candidates: Sequence[TensorCore]) -> list[TensorCore]:
    """The candidates that predict the bits of steps over random codes of all kinds."""
    rng = np.random.default_rng(0)
    rows, columns = min(bench.m, SIDE), min(bench.n, SIDE)
    codes = []
    for count, fmt in ((bench.m, bench.fmt_a), (bench.n, bench.fmt_b)):
        drawn = np.zeros((count, bench.k), np.uint8)
        near_one = cast.encode(rng.standard_normal((count, K_STEP)), fmt)
        any_code = finite_codes(rng, (count, K_STEP), fmt)
        drawn[:, -K_STEP:] = np.where(np.arange(count)[:, None] % 2, near_one, any_code)
        codes.append(drawn)
    results = bench.gemm.multiply(*bench.operands(*codes))[0][:rows, :columns]
    a = cast.decode(codes[0][:rows, -K_STEP:], bench.fmt_a)
    b = cast.decode(codes[1][:columns, -K_STEP:], bench.fmt_b)
    zero = np.zeros(results.shape, np.float32)
    formats = bench.fmt_a, bench.fmt_b
    sums = ((u, tensor_core.chain_plain(a, b, zero, *formats, u)) for u in candidates)
    return [unit for unit, x in sums if np.array_equal(bench.rounded(x), results)]


def _terms(bench: Bench) -> dict[str, Terms]:
    """Stimuli 2^E - 2^E + x.

    The part of x that remains gives ``fraction_bits`` and ``rounding``.
    """
    large = bench.top
    pair = {0: bench.power(large), 1: bench.power(large, -1)}
    return {
        f"2^{large} - 2^{large} {name}": {**pair, 2: small}
        for name, small in _small(bench, range(large - 1, large - FAR, -1))
    }


def _about_exponents(bench: Bench, fraction_bits: int) -> dict[str, Terms]:
    """Stimuli whose sums depend on the exponent that a product is aligned by."""
    fmt_a, fmt_b = bench.fmt_a, bench.fmt_b
    base = min(bench.bottom + fraction_bits + 2, bench.top)
    x, y = bench.power(base)
    stimuli: dict[str, Terms] = {}
    # 1.5 x 1.5 = 2.25 has the exponent 1 when normalized, and 0 by its factors' exponents: the last
    # place kept next to it differs by one bit.
    for value in (base - fraction_bits, base - fraction_bits - 1):
        terms = {0: (1.5 * x, 1.5 * y), 1: (-1.5 * x, 1.5 * y), 2: bench.power(value)}
        stimuli[f"2.25 x 2^{base} - the same + 2^{value}"] = terms
    least_a, least_b = fmt_a.smallest_subnormal, fmt_b.smallest_subnormal
    stimuli["a's smallest subnormal x 1"] = {0: (least_a, 1.0)}
    stimuli["1 x b's smallest subnormal"] = {0: (1.0, least_b)}
    large_a, large_b = bench.largest
    for who, factors, exponent in (
        ("a", (least_a, large_b), fmt_a.emin + np.log2(large_b)),
        ("b", (large_a, least_b), np.log2(large_a) + fmt_b.emin),
    ):
        half = int(exponent) - fraction_bits - 1  # of the last place kept
        small = bench.tiny(half)
        if small is not None:
            name = f"a subnormal of {who} x {max(factors):g} - the same + 2^{half}"
            stimuli[name] = {0: factors, 1: (-factors[0], factors[1]), 2: small}
            zero = (0.0, large_b) if who == "a" else (large_a, 0.0)
            stimuli[f"a zero of {who} x {max(zero):g} + 2^{half}"] = {0: zero, 1: small}
    return stimuli


def _results(bench: Bench, unit: TensorCore) -> dict[str, Terms]:
    """Stimuli whose sums have more bits than their terms.

    For narrow output dtypes also sums next to a tie.
    """
    least = max(bench.bottom, -24) + 1
    base = least + unit.fraction_bits  # the exponent of the terms, whose last place is then 2^least
    if base > bench.top:
        base, least = bench.top, bench.top - unit.fraction_bits
    x, y = bench.power(base)
    stimuli: dict[str, Terms] = {}
    for sign, (count, factor) in itertools.product(
        (1, -1), ((unit.fused_width - 2, 1.75), (1, 1.0))
    ):
        terms = dict.fromkeys(range(count), (sign * factor * x, factor * y))
        total = count * factor**2
        written = f"{sign * total:g} x 2^{base}"
        tie = base + int(np.log2(total)) - bench.out.mantissa_bits - 1
        for name, small in _small(bench, range(least, base)):
            stimuli[f"{written} {name}"] = {**terms, count: small}
            if bench.out != FLOAT32 and tie > least:
                after = {count: bench.power(tie), count + 1: small}
                stimuli[f"{written} + 2^{tie} {name}"] = {**terms, **after}
    return stimuli


def _small(bench: Bench, exponents: Iterable[int]) -> Iterator[tuple[str, tuple[float, float]]]:
    """The names and factors of +-1 and +-1.5 times powers of two."""
    for exponent, sign, significand in itertools.product(exponents, (1, -1), (1.0, 1.5)):
        x, y = bench.power(exponent, sign)
        yield (
            f"{'+' if sign > 0 else '-'} {'1.5 x ' * (significand > 1)}2^{exponent}",
            (significand * x, y),
        )


def _evidence(shown: Mapping[str, tuple[float, float]]) -> str:
    """Up to four results; of more, the last exact one and the first that follow."""
    if not shown:
        return "no product of these formats is small enough to tell"
    lines = [f"{name} = {result:.9g}" for name, (result, _) in shown.items()]
    if len(lines) <= 4:
        return "; ".join(lines)
    first = next(
        (i for i, (result, exact) in enumerate(shown.values()) if result != exact), len(lines)
    )
    return (
        "; ".join(lines[max(first - 1, 0) : first + 3])
        + f"; {len(lines)} such sums, the first {first} of them exact"
    )
