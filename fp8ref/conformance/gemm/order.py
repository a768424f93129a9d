"""How a GEMM strings its steps together: where chains begin anew, and in which order K goes through them (SEMANTICS G-12).

A small number stands in every 32 of K, and a large one and its negative in one of them. What came before in the same chain is lost; the rest
is left, and can be counted.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fp8ref.conformance.finding import Finding
from fp8ref.conformance.gemm.adapter import operand
from fp8ref.conformance.gemm.stimulus import Bench
from fp8ref.formats import FLOAT16
from fp8ref.sim import accumulate, cast, gemm
from fp8ref.sim.accumulate import SPLIT_ORDERS, SPLIT_TILE, Accumulation
from fp8ref.sim.tensor_core import K_STEP, TensorCore

PROMOTIONS = (*range(K_STEP, 513, K_STEP), 1024, 2048, 4096)
TILES = (SPLIT_TILE, 64, 256, 32)
SAME = "by the same"
NAMES = ("promotion", "accumulator", "split_k", "split_order", "split_tile")
SIDES = (8, 32, 256)  # rows and columns of a random result that plans are held to: few at first, which leave few


def places(bench: Bench, unit: TensorCore) -> np.ndarray | str:
    """For every 32 of K, how many of the others come before it in its chain: [K / 32]; or why that cannot be told."""
    steps = range(0, bench.k, K_STEP)
    # so small that all of them together are lost beside the large number; in float16 their sum is still a number
    bits = (len(steps) - 1).bit_length()
    top = min(bench.top, unit.fraction_bits + 15) if bench.out == FLOAT16 else bench.top
    small = top - unit.fraction_bits - bits - 1
    pair = bench.tiny(small)
    if pair is None:
        return f"{bench.fmt_a} and {bench.fmt_b} have no product small enough for K = {bench.k}: probe a smaller K, or e5m2"
    filled = dict.fromkeys(steps, pair)
    large, opposite = bench.power(top), bench.power(top, -1)
    kept = np.ldexp(bench.ask([{**filled, k: large, k + 1: opposite} for k in steps]).astype(np.float64), -small)
    lost = len(steps) - 1 - kept
    whole = np.isin(lost, np.arange(len(steps)))
    return lost.astype(np.int64) if whole.all() else "what large numbers left of small ones in other steps was no whole number of them"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Random operands, codes [M, K] and [N, K], and what the subject made of them under scales of one: float32 [M, N]."""

    a: np.ndarray
    b: np.ndarray
    found: np.ndarray

    def fits(self, bench: Bench, accumulate: str | Accumulation) -> bool:
        """Whether it has the bits of an accumulation, in its first rows and columns."""
        return all(self._fits(bench, accumulate, side) for side in SIDES)

    def _fits(self, bench: Bench, accumulate: str | Accumulation, side: int) -> bool:
        a, b = (operand(codes[:side], fmt, bench.subject.granularity) for codes, fmt in ((self.a, bench.fmt_a), (self.b, bench.fmt_b)))
        return np.array_equal(bench.rounded(gemm.matmul(a, b, accumulate=accumulate)), self.found[:side, :side])


def draw(bench: Bench, rng: np.random.Generator) -> list[np.ndarray]:
    """Codes of a and b, of normal distributions whose width varies by rows and by every 32 of K, so that sums of chains round; every fourth row
    of one sign."""
    drawn = []
    for rows, fmt in ((bench.m, bench.fmt_a), (bench.n, bench.fmt_b)):
        widths = 2.0 ** (rng.integers(-2, 3, (rows, 1)) + rng.integers(-5, 6, (rows, bench.k // K_STEP))).repeat(K_STEP, axis=1)
        values = rng.standard_normal((rows, bench.k)) * widths
        values[::4] = np.abs(values[::4])
        drawn.append(cast.encode(values, fmt))
    return drawn


def sample(bench: Bench, seed: int) -> Sample:
    """What the subject makes of a draw."""
    a, b = draw(bench, np.random.default_rng(seed))
    left, right = (operand(codes, fmt, bench.subject.granularity) for codes, fmt in ((a, bench.fmt_a), (b, bench.fmt_b)))
    return Sample(a=a, b=b, found=bench.subject.multiply(left, right)[0])


def order(bench: Bench, units: Sequence[TensorCore], drawn: Sample) -> tuple[list[Accumulation], list[Finding]]:
    """The plans that fit: by the places in chains, and of those that agree there by the bits of random sums. And what the simplest is:
    ``accumulator``, ``promotion``, ``split_k``, ``split_order`` and ``split_tile``.

    units   that give the same answers to all that was asked of one step: the first for which a plan fits is taken.
    """
    found = places(bench, units[0])
    if isinstance(found, str):
        return [], [Finding(what="promotion", value=None, evidence=found)]
    evidence = f"steps before it in its chain, for every 32 of K: {_short(found)}"
    fitting = [plan for plan in candidates(units[0], bench.k) if np.array_equal(of_plan(plan, bench.k), found)]
    plans: list[Accumulation] = []
    for unit in units:
        plans = [plan for plan in (dataclasses.replace(plan, unit=unit) for plan in fitting) if drawn.fits(bench, plan)]
        if plans:
            break
    evidence += f"; of {len(fitting)} plans with such chains {len(plans)} had the bits of random sums"
    if not plans:
        return [], [Finding(what="promotion", value=None, evidence=evidence)]
    return plans, findings_of(plans, evidence)


def findings_of(plans: Sequence[Accumulation], evidence: str) -> list[Finding]:
    """What the simplest of plans with the same bits is, and the others."""
    simplest = plans[0]
    others = tuple(_named(plan) for plan in plans[1:])
    if simplest.promotion is None:
        others = ("promotion of all of a chain's K or more", *others)
    aligned = simplest.promotion != K_STEP or simplest.unit.fused_width < K_STEP
    accumulator = "aligned with the products, and cut off like one" if aligned else "0 in every step, whose results are added in float32"
    found = [
        Finding(what="promotion", value=simplest.promotion or "none", evidence=evidence, others=others),
        Finding(what="accumulator", value=accumulator, evidence=SAME),
    ]
    names = NAMES[2:] if simplest.split_k > 1 or any(plan.split_k > 1 for plan in plans) else NAMES[2:3]
    for name in names:
        values = list(dict.fromkeys(getattr(plan, name) for plan in plans))
        found.append(Finding(what=name, value=values[0], evidence=SAME, others=tuple(values[1:])))
    return found


def candidates(unit: TensorCore, k: int) -> Iterator[Accumulation]:
    """Plans that are told apart, the simplest first."""
    whole = [Accumulation(name="probed", unit=unit, promotion=promotion) for promotion in (None, *range(K_STEP, k, K_STEP))]
    yield from whole
    whole = [plan for plan in whole if plan.promotion in (None, *PROMOTIONS)]
    for count, split_order, tile, plan in itertools.product(range(2, 17), SPLIT_ORDERS, TILES, whole):
        longest = -(-k // (tile * count)) * tile  # part, which promotion of more leaves one chain
        if tile < k and (plan.promotion or 0) < longest:
            yield dataclasses.replace(plan, split_k=count, split_order=split_order, split_tile=tile)


def of_plan(plan: Accumulation, k: int) -> np.ndarray:
    """What ``places`` finds of a plan."""
    found = np.zeros(k // K_STEP, np.int64)
    for part in accumulate.parts(k, plan):
        steps = part[::K_STEP] // K_STEP
        found[steps] = np.arange(len(steps)) % (plan.promotion // K_STEP if plan.promotion else max(len(steps), 1))
    return found


def _named(plan: Accumulation) -> str:
    promotion = f"promotion {plan.promotion}" if plan.promotion else "no promotion"
    return promotion + (f" in {plan.split_k} {plan.split_order} parts of tiles of {plan.split_tile}" if plan.split_k > 1 else "")


def _short(places: np.ndarray) -> str:
    listed = places.tolist()
    return (
        ", ".join(map(str, listed)) if len(listed) <= 24 else f"{', '.join(map(str, listed[:20]))}, ... {', '.join(map(str, listed[-3:]))}"
    )
