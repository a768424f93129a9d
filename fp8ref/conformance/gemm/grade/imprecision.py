"""Why sums or outputs are imprecise: the scales and roundings, the accumulator, the plan."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fp8ref.conformance.gemm.grade import accumulators, faults, roundings, stimuli
from fp8ref.conformance.gemm.grade.accumulators import SAMPLE, SHORT
from fp8ref.conformance.gemm.grade.roundings import Path
from fp8ref.conformance.gemm.grade.stimuli import Asked, Shape, Stimulus
from fp8ref.conformance.gemm.grade.structure import Cause, first_of
from fp8ref.conformance.gemm.scaled_gemm import rows_of
from fp8ref.conformance.kit.arrays import equal
from fp8ref.formats import Format
from fp8ref.sim.gemm import gemm
from fp8ref.sim.gemm.accumulate import ACCUMULATIONS, Accumulation
from fp8ref.sim.gemm.tensor_core import UNITS
from fp8ref.sim.quantize import cast
from fp8ref.spec.epilogue import Epilogue

ROWS = 32  # rows and columns of random results that plans are compared in

FEW = 0.01
"""The part of outputs with a bias that may differ: another order of scales moves few by one."""

_UNNAMED_ORDER = (
    "the order of scales and roundings: none that has a name gives sums of one and two products"
)


class Found(NamedTuple):
    """Causes; the plan and the epilogue that give all bits, by name; what was not asked."""

    causes: list[Cause]
    plan: str | None
    epilogue: str | None
    unasked: list[str]


def examine(
    asked: Asked,
    samples: Sequence[tuple[Stimulus, np.ndarray]],
    out: Format,
    *,
    short: Shape,
    severe: bool,
) -> Found:
    """Examine a GEMM whose sums of 8 bits are right.

    samples  random operands with the GEMM's results.
    short    the shape for scales and roundings; severe: results are outside B-1's bound.
    """
    largest = max(samples, key=lambda one: one[0].shape[2])[0].shape
    severity = "imprecise" if severe else "right"
    tried, causes = _paths(asked, short, out, severity)
    unasked = [] if tried else [_UNNAMED_ORDER]
    causes += _bias(asked, short, out, tried)
    names = [path.epilogue for path in tried if path.epilogue is not None] or [asked.epilogue]
    plan, epilogue = _plan(samples, names, out, severe=severe)
    if any(path.odd for path in tried[:1]) and severe:
        unasked.append("the accumulator, behind outputs that are rounded otherwise")
    elif plan is None and severe:
        causes += _accumulator(asked, largest, out)
    elif plan is not None and severe and plan not in ("exact", "f32"):
        evidence = "random results have the bits of it"
        causes.append(Cause(f"the accumulation of {plan}", evidence, severity))
    return Found(causes, plan, None if epilogue is None else epilogue.name, unasked)


def _paths(
    asked: Asked, shape: Shape, out: Format, severity: str
) -> tuple[list[Path], list[Cause]]:
    """The paths from sums to outputs that fit, and what is odd about them."""
    alone = [(s, asked.run(s)[0]) for s in stimuli.pairs(asked, shape, out, terms=1)]
    tried = roundings.fitting(list(roundings.paths(out)), alone, out)
    two = [(s, asked.run(s)[0]) for s in stimuli.pairs(asked, shape, out)]
    narrowed = roundings.fitting([path for path in tried if path.dequantized is None], two, out)
    paths = narrowed or tried
    if not paths or not paths[0].odd or any(not path.odd for path in paths):
        return paths, []
    plain = next(roundings.paths(out))
    for stimulus, results in (*alone, *two):
        expected = plain.gives(stimulus, out)
        if (differ := ~equal(results, expected)).any():
            lost = bool((~np.isfinite(results) & np.isfinite(expected)).any())
            first = first_of(stimulus, results, expected, differ, "G-4")
            evidence = (
                f"sums of one and two products have the bits of it; {int(differ.sum())} of "
                f"{differ.size} are other outputs than one rounding gives"
            )
            return paths, [Cause(paths[0].odd, evidence, "wrong" if lost else severity, first)]
    return paths, []


def _bias(asked: Asked, shape: Shape, out: Format, tried: Sequence[Path]) -> list[Cause]:
    """The cause if a bias is added after the rounding, or in no known way."""
    if not asked.scaled.bias:
        return []
    # of a path without an epilogue, such as dequantized operands, the nearest one
    candidates = [path for path in tried if path.epilogue is not None]
    candidates = candidates or [Path(), Path(scale="product")]
    results = []
    for i, stimulus in enumerate(stimuli.pairs(asked, shape, out)):
        size = float(np.abs(candidates[0].gives(stimulus, out)).mean())
        bias = np.random.default_rng(i).standard_normal(shape[1]) * size
        biased = stimulus._replace(bias=cast.round_to(bias, out))
        results.append((biased, asked.run(biased)[0]))
    path, kind, wrong = roundings.with_bias(candidates, results, out)
    compared = sum(outputs.size for _, outputs in results)
    severe = wrong > FEW * compared
    if kind != "after_round" and not severe:
        return []
    stimulus, outputs = results[0]
    right = roundings.biased(path, "before_round", stimulus, out)
    differ = outputs != right
    first = first_of(stimulus, outputs, right, differ, "G-15") if differ.any() else None
    if severe:
        evidence = (
            f"{wrong} of {compared} sums of two products are not those of {kind}, the nearest order"
        )
        name = "the bias is added in no order that has a name (G-15)"
        return [Cause(name, evidence, "imprecise", first)]
    evidence = f"{compared - wrong} of {compared} sums of two products have the bits of it"
    name = "the bias is added after the rounding to the output dtype (round_then_bias)"
    return [Cause(name, evidence, "right", first)]


def _plan(
    samples: Sequence[tuple[Stimulus, np.ndarray]],
    tried: Sequence[Epilogue],
    out: Format,
    *,
    severe: bool,
) -> tuple[str | None, Epilogue | None]:
    """The plan and the epilogue that have the bits of random results of every shape."""
    for accumulate, epilogue in itertools.product(_plans(severe), tried):
        if all(_has_bits(*sample, accumulate, epilogue, out) for sample in samples):
            name = accumulate if isinstance(accumulate, str) else accumulate.name
            return name, epilogue
    return None, None


def _plans(severe: bool) -> Iterator[str | Accumulation]:
    yield from ("exact", "f32")
    if not severe:
        return
    yield from ACCUMULATIONS.values()
    for name, promotion, count in itertools.product(
        ("hopper", "ada"), (None, 32, 64, 128, 256, 512), (1, 2, 4, 8)
    ):
        plan_name = f"{name} without promotion"
        if promotion:
            plan_name = f"{name} with promotion {promotion}"
        plan_name += f" and {count} parts of K" if count > 1 else ""
        yield Accumulation(name=plan_name, unit=UNITS[name], promotion=promotion, split_k=count)


def _has_bits(
    stimulus: Stimulus,
    results: np.ndarray,
    accumulate: str | Accumulation,
    epilogue: Epilogue,
    out: Format,
) -> bool:
    for side in (4, ROWS):
        operands = (stimulus.a, stimulus.b)
        a, b = (rows_of(q, np.arange(min(side, len(q.codes)))) for q in operands)
        try:
            simulated = gemm.matmul(a, b, accumulate=accumulate, epilogue=epilogue, out_dtype=out)
        except ValueError:  # a plan that does not take this K or these formats
            return False
        if not np.array_equal(simulated, results[:side, :side], equal_nan=True):
            return False
    return True


def _accumulator(asked: Asked, shape: Shape, out: Format) -> list[Cause]:
    """The narrow accumulator that gives sums of integers, or a cause without a name."""
    k = shape[2]
    ran = []
    for length in dict.fromkeys((min(SHORT, k), k)):
        stimulus = stimuli.wide(asked, shape, length=length)
        ran.append((length, stimulus, asked.run(stimulus)[0]))
    _, stimulus, outputs = ran[-1]
    expected = cast.round_to(faults.expected(stimulus), out)
    differ = ~equal(outputs, expected)
    if not differ.any():
        return []
    # Rows and columns with a difference: every wide enough accumulator has the bits of others.
    rows = np.flatnonzero(differ.any(axis=1))[:SAMPLE]
    columns = np.flatnonzero(differ[rows].any(axis=0))[:SAMPLE]
    stages = []
    for length, one, results in ran:
        values_a, values_b = faults.values(one)
        a, b = values_a[rows, :length], values_b[columns, :length]
        stages.append((accumulators.products_of(a, b), results[np.ix_(rows, columns)]))
    first = first_of(stimulus, outputs, expected, differ)
    count = (
        f"{int(differ.sum())} of {differ.size} sums of integers below 2^24 differ, which "
        "float32 adds exactly in any order"
    )
    scale = float(stimulus.a.scale_inv.reshape(-1)[0] * stimulus.b.scale_inv.reshape(-1)[0])
    for tried in accumulators.candidates(k):
        for products, results in stages:
            tried = accumulators.fitting(products, results, k, scale, out, tried)
        if tried:
            name = f"{tried[0]}" + (f", or the same by {tried[1]}" if len(tried) > 1 else "")
            evidence = f"{results.size} sums have the bits of it; {count}"
            return [Cause(name, evidence, "imprecise", first)]
    name = f"an accumulator narrower than float32, of about {_bits(outputs, expected)} bits"
    return [Cause(name, count, "imprecise", first)]


def _bits(results: np.ndarray, expected: np.ndarray) -> int:
    """The bits of a rounding whose error is as large."""
    finite = np.isfinite(results) & (expected != 0)
    relative = np.abs(results[finite] / expected[finite] - 1)
    typical = float(np.median(relative[relative > 0])) if (relative > 0).any() else 1.0
    return max(int(np.round(-np.log2(typical))) - 1, 1)
