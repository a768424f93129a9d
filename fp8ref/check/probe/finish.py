"""What lies between the sum and the result: the dtype it is rounded to, how scales multiply it, where the bias comes (SEMANTICS G-4, G-5, G-14, G-15)."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from fp8ref.check.probe.finding import Finding
from fp8ref.check.probe.order import Sample
from fp8ref.check.probe.question import Bench
from fp8ref.check.probe.subject import Subject, operand, rows_of
from fp8ref.epilogue import BIASES, EPILOGUES, ROUNDINGS, SCALES, Epilogue
from fp8ref.formats import BFLOAT16, FLOAT16, FLOAT32, Format
from fp8ref.sim import cast, gemm
from fp8ref.sim.accumulate import Accumulation
from fp8ref.sim.scaling import Quantized
from fp8ref.sim.tensor_core import K_STEP

ROUNDS = 8  # of results of each kind of sum, each under other scales


def rounding(bench: Bench, seed: int) -> tuple[Bench, list[Finding]]:
    """``out_dtype`` and ``out_rounding``, and the bench with them: by 1 x 1 under scales of many bits, which no sum has touched."""
    rng = np.random.default_rng(seed)
    one = [np.zeros((rows, bench.k), np.uint8) for rows in (bench.m, bench.n)]
    for codes, fmt in zip(one, (bench.fmt_a, bench.fmt_b), strict=True):
        codes[:, 0] = cast.encode(1.0, fmt)
    results, exact = [], []
    for _ in range(8):
        a, b = _operands(bench.subject, one, (bench.fmt_a, bench.fmt_b), rng)
        found, given = bench.subject.multiply(a, b)
        rows, columns = bench.seen
        results.append(found[np.ix_(rows, columns)])
        exact.append(np.broadcast_to(rows_of(a, rows).scale_inv * rows_of(b, columns).scale_inv.T, results[-1].shape))
    values, products = np.stack(results), np.stack(exact)
    out = next((fmt for fmt in (BFLOAT16, FLOAT16) if np.array_equal(cast.round_to(values, fmt), values)), FLOAT32)
    evidence = (
        f"{values.size} results of 1 x 1 under random scales, given as {given}, are all numbers of {out}, such as {values.flat[0]:.9g}"
    )
    findings = [Finding(what="out_dtype", value=out.name, evidence=evidence)]
    fits = [how for how in ROUNDINGS if np.array_equal(cast.round_to(products, out, rounding=how), values)]
    if out != FLOAT32:
        evidence = "the same results beside the scales' products"
        findings.append(Finding(what="out_rounding", value=fits[0] if fits else None, evidence=evidence, others=tuple(fits[1:])))
    return dataclasses.replace(bench, out=out, rounding=fits[0] if fits else "nearest_even"), findings


def epilogue(bench: Bench, accumulate: str | Accumulation | None, drawn: Sample, seed: int) -> tuple[list[Epilogue], list[Finding]]:
    """Those that fit, the likeliest first; ``epilogue``, and of a subject that takes a bias ``epilogue with bias``: by sums under random scales.

    Of small integers, which no accumulation rounds, and of random operands if the accumulation is known.
    """
    rng = np.random.default_rng(seed)
    plain = [e for e in everyone() if e.bias is None and e.rounding == bench.rounding and not (e.round_first and bench.out == FLOAT32)]
    sums = _sums(bench, accumulate, drawn, rng)
    fits, found = _fitting(bench, sums, plain, rng)
    if not bench.subject.bias or not fits:
        return fits, [found]
    alike = {(e.scale, e.round_first, e.rounding) for e in fits}
    biased = [e for e in everyone() if e.bias and (e.scale, e.round_first, e.rounding) in alike]
    with_bias, more = _fitting(bench, sums, biased, rng)
    # what the bias tells of the scales holds without it
    both = [e for e in fits if any((e.scale, e.round_first, e.rounding) == (f.scale, f.round_first, f.rounding) for f in with_bias)]
    return both or fits, [found, dataclasses.replace(more, what="epilogue with bias")]


def everyone() -> Iterator[Epilogue]:
    """Every epilogue, the named ones under their names, and first."""
    yield from EPILOGUES.values()
    named = {(e.scale, e.round_first, e.bias, e.rounding) for e in EPILOGUES.values()}
    for rounding, round_first, scale, bias in itertools.product(ROUNDINGS, (False, True), SCALES, (None, *BIASES)):
        if (scale, round_first, bias, rounding) not in named:
            words = [scale, *["round_first"] * round_first, *[f"bias {bias}"] * bool(bias), *[rounding] * (rounding != "nearest_even")]
            yield Epilogue(name=", ".join(words), scale=scale, round_first=round_first, bias=bias, rounding=rounding)


def _sums(
    bench: Bench, accumulate: str | Accumulation | None, drawn: Sample, rng: np.random.Generator
) -> list[tuple[list[np.ndarray], np.ndarray]]:
    """(codes of a and b, the sums that are computed again): of integers, and of the random operands if the accumulation is known."""
    integers = []
    for rows, fmt in ((bench.m, bench.fmt_a), (bench.n, bench.fmt_b)):
        codes = np.zeros((rows, bench.k), np.uint8)
        codes[:, :K_STEP] = cast.encode(rng.integers(1, 16, (rows, K_STEP)).astype(np.float32), fmt)
        integers.append(codes)
    pairs = [integers, [drawn.a, drawn.b]] if accumulate else [integers]
    fmts = (bench.fmt_a, bench.fmt_b)
    plain = ([operand(codes[some], fmt, "tensorwise") for codes, some, fmt in zip(pair, bench.seen, fmts, strict=True)] for pair in pairs)
    return [(pair, gemm.matmul(*operands, accumulate=accumulate or "exact")) for pair, operands in zip(pairs, plain, strict=True)]


def _fitting(
    bench: Bench, sums: Sequence[tuple[list[np.ndarray], np.ndarray]], candidates: Sequence[Epilogue], rng: np.random.Generator
) -> tuple[list[Epilogue], Finding]:
    """Those whose bits the subject has in all results."""
    wrong, compared = dict.fromkeys(candidates, 0), 0
    rows, columns = bench.seen
    for codes, acc in (*sums,) * ROUNDS:
        a, b = _operands(bench.subject, codes, (bench.fmt_a, bench.fmt_b), rng)
        bias = None
        if candidates[0].bias:
            bias = cast.round_to(rng.standard_normal(bench.n) * acc.std(), bench.out)
        found = bench.subject.multiply(a, b, bias)[0][np.ix_(rows, columns)]
        scales = rows_of(a, rows).scale_inv, rows_of(b, columns).scale_inv.T
        for e in candidates:
            expected = gemm.finish(acc, *scales, epilogue=e, out_dtype=bench.out, bias=None if bias is None else bias[columns])
            wrong[e] += int((expected != found).sum())
        compared += found.size
    fits = [e for e in candidates if not wrong[e]]
    nearest = min((e for e in candidates if wrong[e]), key=lambda e: wrong[e], default=None)
    evidence = f"{compared} results under random scales"
    if nearest:
        evidence += f"; {nearest.name} differs in {wrong[nearest]} of them" + ("" if fits else ", the least of all")
    names = [e.name for e in fits]
    return fits, Finding(what="epilogue", value=names[0] if fits else None, evidence=evidence, others=tuple(names[1:]))


def _operands(subject: Subject, codes: Sequence[np.ndarray], fmts: Sequence[Format], rng: np.random.Generator) -> list[Quantized]:
    """The codes as operands under random scales between 1/2 and 2, of all bits."""
    scales = (2.0 ** rng.uniform(-1, 1, (len(c), 1) if subject.granularity == "rowwise" else ()) for c in codes)
    return [operand(c, fmt, subject.granularity, scale) for c, fmt, scale in zip(codes, fmts, scales, strict=True)]
