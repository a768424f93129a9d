"""Identify the epilogue: output dtype and rounding, scales, bias (spec G-4, G-5, G-14, G-15).

The stimuli are sums of small integers, which every order of accumulation adds exactly. Random
scales then make the results round, so that only the epilogue decides their bits.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from fp8ref.conformance.gemm.scaled_gemm import rows_of, unscaled
from fp8ref.conformance.gemm.stimulus import Bench
from fp8ref.conformance.kit.finding import Finding
from fp8ref.formats import BFLOAT16, FLOAT16, FLOAT32
from fp8ref.sim.gemm import gemm
from fp8ref.sim.gemm.accumulate import Accumulation
from fp8ref.sim.gemm.tensor_core import K_STEP
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec.epilogue import (
    BIASES,
    EPILOGUES,
    ROUNDINGS,
    SCALES,
    Bias,
    Epilogue,
    Rounding,
    Scale,
)

ROUNDS, MOST_ROUNDS = 8, 64  # GEMMs that are run, each under other scales
ENOUGH = 4096  # the number of results that is enough to distinguish epilogues


def rounding(bench: Bench, seed: int) -> tuple[Bench, list[Finding]]:
    """Find ``out_dtype`` and ``out_rounding``; return the bench with them, and the findings.

    The results are sums of integers under random scales, which have more bits than a float32.
    """
    rng = np.random.default_rng(seed)
    codes = _integers(bench, rng)
    rows, columns = bench.sampled
    results, operands, dtype = [], [], FLOAT32
    # the last two leave the range of float16, not of bfloat16
    for exponent in (0, 0, 0, 0, 20, -40):
        a, b = _operands(bench, codes, rng, 2.0 ** (-exponent // 2))
        outputs, dtype = bench.gemm.multiply(a, b)
        results.append(outputs[np.ix_(rows, columns)])
        operands.append((rows_of(a, rows), rows_of(b, columns)))
    values = np.stack(results)
    out = FLOAT32
    for fmt in (FLOAT16, BFLOAT16):
        if np.array_equal(cast.round_to(values, fmt), values, equal_nan=True):
            out = fmt
    evidence = (
        f"{values.size} sums of integers under random scales, given as {dtype}, are all "
        f"numbers of {out}, such as {values.flat[0]:.9g}"
    )
    findings = [Finding("out_dtype", out.name, evidence)]
    if out == FLOAT32:
        return dataclasses.replace(bench, out=out), findings
    wrong = dict.fromkeys(ROUNDINGS, 0)
    for (a, b), result in zip(operands, results, strict=True):
        sums = gemm.matmul(*unscaled(a, b))
        for mode in ROUNDINGS:
            expected = cast.round_to(sums * a.scale_inv * b.scale_inv.T, out, rounding=mode)
            wrong[mode] += int((expected != result).sum())
    best = min(ROUNDINGS, key=lambda mode: wrong[mode])
    evidence = (
        f"{wrong[best]} of the same results are rounded differently; the order of scales is "
        "not known yet"
    )
    findings.append(Finding("out_rounding", best, evidence))
    return dataclasses.replace(bench, out=out, rounding=best), findings


def epilogue(
    bench: Bench, accumulate: str | Accumulation | None, seed: int
) -> tuple[list[Epilogue], list[Finding]]:
    """The epilogues that fit, the likeliest first.

    Returns:  the epilogues, and the findings ``epilogue`` and ``epilogue with bias``.
    """
    rng = np.random.default_rng(seed)
    plain = [e for e in candidates() if e.bias is None and e.rounding == bench.rounding]
    plain = [e for e in plain if not (e.round_first and bench.out == FLOAT32)]
    fits, finding = _fitting(bench, accumulate, plain, rng)
    if not bench.gemm.bias or not fits:
        return fits, [finding]
    alike = set(map(_without_bias, fits))
    biased = [e for e in candidates() if e.bias and _without_bias(e) in alike]
    with_bias, more = _fitting(bench, accumulate, biased, rng)
    # an epilogue that does not fit with a bias is not the one without it either
    alike = set(map(_without_bias, with_bias))
    both = [e for e in fits if _without_bias(e) in alike]
    return both or fits, [finding, dataclasses.replace(more, what="epilogue with bias")]


def rounds(bench: Bench, *, least: int) -> int:
    """How many GEMMs give ``ENOUGH`` results: ``least`` or more, and at most ``MOST_ROUNDS``."""
    rows, columns = bench.sampled
    return max(least, min(MOST_ROUNDS, ENOUGH // (len(rows) * len(columns))))


def _without_bias(e: Epilogue) -> tuple:
    return e.scale, e.round_first, e.rounding


def candidates() -> Iterator[Epilogue]:
    """Every epilogue that is tried: first those with a name, then the other combinations."""
    yield from EPILOGUES.values()
    for rounding, round_first, scale, bias in itertools.product(
        ROUNDINGS, (False, True), SCALES, (None, *BIASES)
    ):
        e = combined(scale, round_first, bias, rounding)
        if e.name not in EPILOGUES:
            yield e


def combined(scale: Scale, round_first: bool, bias: Bias | None, rounding: Rounding) -> Epilogue:
    """The epilogue of these fields: one with a name, or one that is named after them."""
    for e in EPILOGUES.values():
        if (*_without_bias(e), e.bias) == (scale, round_first, rounding, bias):
            return e
    words = [scale, "round_first" * round_first, f"bias {bias}" * bool(bias)]
    words += [rounding] * (rounding != "nearest_even")
    return Epilogue(
        name=", ".join(word for word in words if word),
        scale=scale,
        round_first=round_first,
        bias=bias,
        rounding=rounding,
    )


def under_scales(
    bench: Bench, drawn: Sequence[np.ndarray], rng: np.random.Generator, factor: float = 1.0
) -> tuple[Quantized, Quantized, np.ndarray]:
    """Run operands from codes under random scales.

    Returns:  the sampled rows of a and of b, and their results, float32.
    """
    a, b = _operands(bench, drawn, rng, factor)
    rows, columns = bench.sampled
    results = np.ascontiguousarray(bench.gemm.multiply(a, b)[0][np.ix_(rows, columns)])
    return rows_of(a, rows), rows_of(b, columns), results


def _integers(bench: Bench, rng: np.random.Generator) -> list[np.ndarray]:
    """Codes of a and b: small integers in the first 32 of K, zeros elsewhere."""
    operand_codes = []
    for rows, fmt in ((bench.m, bench.fmt_a), (bench.n, bench.fmt_b)):
        codes = np.zeros((rows, bench.k), np.uint8)
        codes[:, :K_STEP] = cast.encode(rng.integers(1, 16, (rows, K_STEP)).astype(np.float32), fmt)
        operand_codes.append(codes)
    return operand_codes


def _fitting(
    bench: Bench,
    accumulate: str | Accumulation | None,
    tried: Sequence[Epilogue],
    rng: np.random.Generator,
) -> tuple[list[Epilogue], Finding]:
    """The epilogues whose bits all results have."""
    wrong, compared = dict.fromkeys(tried, 0), 0
    rows, columns = bench.sampled
    for _ in range(rounds(bench, least=ROUNDS)):
        a, b = _operands(bench, _integers(bench, rng), rng)
        sampled = rows_of(a, rows), rows_of(b, columns)
        acc = gemm.matmul(*unscaled(*sampled), accumulate=accumulate or "exact")
        bias = None
        if tried[0].bias:
            bias = cast.round_to(rng.standard_normal(bench.n) * acc.std(), bench.out)
        results = bench.gemm.multiply(a, b, bias)[0][np.ix_(rows, columns)]
        added = None if bias is None else bias[columns]
        scales = sampled[0].scale_inv, sampled[1].scale_inv.T
        for e in tried:
            expected = gemm.finish(acc, *scales, epilogue=e, out_dtype=bench.out, bias=added)
            wrong[e] += int((expected != results).sum())
        compared += results.size
    fits = [e for e in tried if not wrong[e]]
    nearest = min((e for e in tried if wrong[e]), key=lambda e: wrong[e], default=None)
    evidence = f"{compared} results under random scales"
    if nearest:
        evidence += f"; {nearest.name} differs in {wrong[nearest]} of them"
        evidence += "" if fits else ", the least of all"
    names = [e.name for e in fits]
    return fits, Finding("epilogue", names[0] if fits else None, evidence, others=tuple(names[1:]))


def _operands(
    bench: Bench, codes: Sequence[np.ndarray], rng: np.random.Generator, factor: float = 1.0
) -> tuple[Quantized, Quantized]:
    """Operands from codes, under random scales between 1/2 and 2, times a factor."""
    rowwise = bench.gemm.granularity == "rowwise"
    shapes = [(len(c), 1) if rowwise else () for c in codes]
    scales = [factor * 2.0 ** rng.uniform(-1, 1, shape) for shape in shapes]
    return bench.gemm.operands(codes, (bench.fmt_a, bench.fmt_b), scales)
