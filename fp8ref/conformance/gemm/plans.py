"""Accumulation plans: which ones fit a GEMM's sums, and plans as JSON (spec G-12, G-18).

A plan says where chains of steps begin anew (promotion), and which parts of K form a chain
(split-K). To find them, every 32 of K holds one small number. One of the 32s also holds a large
number and its negative. All that came before in the same chain is lost next to the large number;
the small numbers that remain are counted.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8ref.conformance.gemm import epilogues
from fp8ref.conformance.gemm.stimulus import Bench
from fp8ref.conformance.kit.finding import Finding
from fp8ref.formats import FLOAT16
from fp8ref.sim.gemm import accumulate, gemm
from fp8ref.sim.gemm.accumulate import SPLIT_ORDERS, SPLIT_TILE, Accumulation
from fp8ref.sim.gemm.tensor_core import K_STEP, TensorCore
from fp8ref.sim.quantize import cast
from fp8ref.spec.epilogue import Epilogue

UNIT = tuple(
    f.name
    for f in dataclasses.fields(TensorCore)
    if f.name not in ("name", "evidence", "accumulator", "block_scales")
)
"""The keys of a plan in JSON that describe its unit, one step of a tensor core.

A probe looks for float32 accumulators without block scales alone (G-18).
"""

PLAN = tuple(f.name for f in dataclasses.fields(Accumulation) if f.name not in ("name", "unit"))
"""The keys of a plan in JSON that describe its accumulation."""

PROMOTIONS = (*range(K_STEP, 513, K_STEP), 1024, 2048, 4096)
"""The promotions that are tried together with split-K."""

TILES = (SPLIT_TILE, 64, 256, 32)  # lengths of split-K tiles that are tried, in order

SAME = "by the same"  # of findings with the evidence of ``promotion``

FIELDS = ("promotion", "accumulator", "split_k", "split_order", "split_tile")
"""The names of the findings about a plan."""

SIDES = (8, 32, 256)
"""Rows and columns of a random result that plans are compared in: few first, to discard most."""


def places(bench: Bench, unit: TensorCore) -> np.ndarray | str:
    """How many steps come before each 32 of K in its chain, [K / 32]; or why that is unknown."""
    steps = range(0, bench.k, K_STEP)
    # So small that all of them together are below the last bit kept next to the large number: then
    # the loss does not depend on their order. In float16 the sum of those left is still a number.
    bits = (len(steps) - 1).bit_length()
    top = min(bench.top, unit.fraction_bits + 15) if bench.out == FLOAT16 else bench.top
    small = top - unit.fraction_bits - bits - 1
    pair = bench.tiny(small)
    if pair is None:
        return (
            f"{bench.fmt_a} and {bench.fmt_b} have no product small enough for K = {bench.k}: "
            "probe a smaller K, or e5m2"
        )
    filled = dict.fromkeys(steps, pair)
    large, opposite = bench.power(top), bench.power(top, -1)
    sums = bench.run([{**filled, k: large, k + 1: opposite} for k in steps])
    kept = np.ldexp(sums.astype(np.float64), -small)
    lost = len(steps) - 1 - kept
    if np.isin(lost, np.arange(len(steps))).all():
        return lost.astype(np.int64)
    return "in other steps, large numbers did not leave a whole number of small ones"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Random codes [M, K] and [N, K], and the GEMM's result under scales of one, float32 [M, N]."""

    a: np.ndarray
    b: np.ndarray
    found: np.ndarray

    def fits(self, bench: Bench, accumulate: str | Accumulation) -> bool:
        """True if the result has the bits of an accumulation, in its first rows and columns."""
        return all(self._fits(bench, accumulate, side) for side in SIDES)

    def _fits(self, bench: Bench, accumulate: str | Accumulation, side: int) -> bool:
        operands = bench.operands(self.a[:side], self.b[:side])
        sums = bench.rounded(gemm.matmul(*operands, accumulate=accumulate))
        return np.array_equal(sums, self.found[:side, :side])


def draw_codes(bench: Bench, rng: np.random.Generator) -> list[np.ndarray]:
    """Random codes of a and b that show the order of a sum.

    Normal numbers, whose width varies by row and by every 32 of K: terms of different sizes make
    sums round, and differently in every order. Every fourth row has one sign, so that sums grow.
    """
    drawn = []
    for rows, fmt in ((bench.m, bench.fmt_a), (bench.n, bench.fmt_b)):
        widths = 2.0 ** (
            rng.integers(-2, 3, (rows, 1)) + rng.integers(-5, 6, (rows, bench.k // K_STEP))
        ).repeat(K_STEP, axis=1)
        values = rng.standard_normal((rows, bench.k)) * widths
        values[::4] = np.abs(values[::4])
        drawn.append(cast.encode(values, fmt))
    return drawn


def draw_sample(bench: Bench, seed: int) -> Sample:
    """Draw random operands and run the GEMM on them."""
    a, b = draw_codes(bench, np.random.default_rng(seed))
    return Sample(a=a, b=b, found=bench.gemm.multiply(*bench.operands(a, b))[0])


def fitting_plans(
    bench: Bench, units: Sequence[TensorCore], drawn: Sample
) -> tuple[list[Accumulation], list[Finding]]:
    """The plans with the measured places in chains and the bits of random sums.

    units     that fit one step equally: the first for which a plan fits is taken.
    Returns:  the plans, the simplest first, and its ``accumulator``, ``promotion``, ``split_k``,
              ``split_order`` and ``split_tile`` as findings.
    """
    measured = places(bench, units[0])
    if isinstance(measured, str):
        return [], [Finding("promotion", None, measured)]
    evidence = f"steps before it in its chain, for every 32 of K: {_short(measured)}"
    alike = [
        plan
        for plan in candidates(units[0], bench.k)
        if np.array_equal(expected_places(plan, bench.k), measured)
    ]
    plans: list[Accumulation] = []
    for unit in units:
        own = (dataclasses.replace(plan, unit=unit) for plan in alike)
        plans = [plan for plan in own if drawn.fits(bench, plan)]
        if plans:
            break
    evidence += f"; of {len(alike)} plans with such chains {len(plans)} had the bits of random sums"
    if not plans:
        return [], [Finding("promotion", None, evidence)]
    return plans, findings_of(plans, evidence)


def findings_of(plans: Sequence[Accumulation], evidence: str) -> list[Finding]:
    """Findings about the simplest of plans that give the same bits, with the others named."""
    simplest = plans[0]
    others = tuple(_named(plan) for plan in plans[1:])
    if simplest.promotion is None:
        others = ("promotion of all of a chain's K or more", *others)
    aligned = simplest.promotion != K_STEP or simplest.unit.fused_width < K_STEP
    accumulator = "0 in every step, whose results are added in float32"
    if aligned:
        accumulator = "aligned with the products, and truncated like a product"
    findings = [
        Finding("promotion", simplest.promotion or "none", evidence, others=others),
        Finding("accumulator", accumulator, SAME),
    ]
    for name in FIELDS[2 : None if any(plan.split_k > 1 for plan in plans) else 3]:
        values = list(dict.fromkeys(getattr(plan, name) for plan in plans))
        findings.append(Finding(name, values[0], SAME, others=tuple(values[1:])))
    return findings


def candidates(unit: TensorCore, k: int) -> Iterator[Accumulation]:
    """The plans that are tried, the simplest first."""
    whole = [
        Accumulation(name="probed", unit=unit, promotion=promotion)
        for promotion in (None, *range(K_STEP, k, K_STEP))
    ]
    yield from whole
    whole = [plan for plan in whole if plan.promotion in (None, *PROMOTIONS)]
    for count, split_order, tile, plan in itertools.product(
        range(2, 17), SPLIT_ORDERS, TILES, whole
    ):
        longest = -(-k // (tile * count)) * tile  # part; a promotion beyond it leaves one chain
        if tile < k and (plan.promotion or 0) < longest:
            yield dataclasses.replace(plan, split_k=count, split_order=split_order, split_tile=tile)


def expected_places(plan: Accumulation, k: int) -> np.ndarray:
    """What ``places`` measures of a GEMM with this plan."""
    counts = np.zeros(k // K_STEP, np.int64)
    for part in accumulate.parts(k, plan):
        steps = part[::K_STEP] // K_STEP
        counts[steps] = np.arange(len(steps)) % (
            plan.promotion // K_STEP if plan.promotion else max(len(steps), 1)
        )
    return counts


def _named(plan: Accumulation) -> str:
    promotion = f"promotion {plan.promotion}" if plan.promotion else "no promotion"
    if plan.split_k == 1:
        return promotion
    parts = f"{plan.split_k} {plan.split_order} parts"
    return f"{promotion} in {parts} of tiles of {plan.split_tile}"


def _short(places: np.ndarray) -> str:
    listed = places.tolist()
    if len(listed) <= 24:
        return ", ".join(map(str, listed))
    return f"{', '.join(map(str, listed[:20]))}, ... {', '.join(map(str, listed[-3:]))}"


def plan_to_dict(accumulate: str | Accumulation) -> dict[str, Any]:
    """An accumulation as JSON.

    ``accumulate`` names one without a tensor core, else the unit's and the plan's keys are set.
    """
    if isinstance(accumulate, str):
        return {"accumulate": accumulate} | dict.fromkeys(UNIT + PLAN)
    return (
        {"accumulate": None}
        | {key: getattr(accumulate.unit, key) for key in UNIT}
        | {key: getattr(accumulate, key) for key in PLAN}
    )


def accumulation(plan: Mapping[str, Any], *, evidence: str) -> str | Accumulation:
    """Read the accumulation of a plan that a probe wrote.

    Raises:   ValueError: missing keys; null, where the probe could not tell; invalid values.
    """
    if plan.get("accumulate") is not None:
        return str(plan["accumulate"])
    missing = [
        key
        for key in (*UNIT, *PLAN)
        if key not in plan or (plan[key] is None and key != "promotion")
    ]
    if missing:
        raise ValueError(
            f"a plan needs all of its keys; {', '.join(missing)} could not be identified or "
            f"{'is' if len(missing) == 1 else 'are'} missing. Probe again."
        )
    unit = TensorCore(name="probed", evidence=evidence, **{key: plan[key] for key in UNIT})
    return Accumulation(name="probed", unit=unit, **{key: plan[key] for key in PLAN})


def epilogue(plan: Mapping[str, Any]) -> Epilogue:
    """Read the epilogue of a plan that a probe wrote.

    Raises:   ValueError: an epilogue that no probe names.
    """
    named = {e.name: e for e in epilogues.candidates()}
    if str(plan.get("epilogue")) not in named:
        raise ValueError(
            "a plan's epilogue is one that a probe names, such as "
            f"{', '.join(list(named)[:3])}; got {plan.get('epilogue')!r}. Probe again."
        )
    return named[plan["epilogue"]]
