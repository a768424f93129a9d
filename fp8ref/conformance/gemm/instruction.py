"""Identify one tensor-core instruction, D = A B^T + C (spec G-10, G-11).

The step from C = 0 is identified as a GEMM of K = 32. Its unit then has to predict the results for
groups of chosen accumulators, and for random ones.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8ref.conformance.gemm import plans, step
from fp8ref.conformance.gemm.scaled_gemm import ScaledGemm
from fp8ref.conformance.gemm.stimulus import Bench, Pairs, coded, finite_codes
from fp8ref.conformance.gemm.wgmma import Multiply
from fp8ref.conformance.kit.finding import Finding, table
from fp8ref.formats import E5M2, Format
from fp8ref.shared.result import Result
from fp8ref.sim.gemm import gemm
from fp8ref.sim.gemm.accumulate import Accumulation
from fp8ref.sim.gemm.tensor_core import K_STEP, TensorCore
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scaling import Quantized

if TYPE_CHECKING:
    from rich.console import Console

SIDE = 128  # rows of a and of b that the instruction's function is called with

FULL, TOP_FLOAT = 0x7F7FFFFF, 128
ZERO_PRODUCTS = "accumulators and zero products"
"""The group whose results tell the rules for zero factors apart."""


@dataclass(frozen=True, kw_only=True)
class InstructionGroup:
    """A group of Q instructions.

    Shapes:   codes a and b [Q, 32]; accumulators c and results d [Q], float32.
    """

    group: str
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    d: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Instruction(Result):
    """What was identified of an instruction for one pair of formats.

    units     tensor cores that fit a step from 0, the likeliest first.
    groups    the instructions with chosen accumulators that were run.
    compared  results with accumulators; equal: those with the bits of the first unit.
    """

    name: str
    about: Mapping[str, str]
    fmt_a: Format
    fmt_b: Format
    units: Sequence[TensorCore]
    findings: Sequence[Finding]
    groups: Sequence[InstructionGroup]
    compared: int
    equal: int

    @property
    def ok(self) -> bool:
        """True if a unit of the simulator has all of its bits."""
        return bool(self.units) and self.equal == self.compared

    def to_dict(self) -> dict[str, Any]:
        """As --json writes it, with keys of ``Identified.to_dict``."""
        unit = Accumulation(name="probed", unit=self.units[0]) if self.units else None
        return {
            "ok": self.ok,
            "subject": self.name,
            "about": dict(self.about),
            "formats": [self.fmt_a.name, self.fmt_b.name],
            "plan": unit and plans.plan_to_dict(unit),
            "confirmed": {"compared": self.compared, "equal": self.equal},
            "evidence": {f.what: f.to_dict() | {"others": list(f.others)} for f in self.findings},
        }

    def render(self, console: "Console") -> None:
        """Print every finding and the verdict."""
        console.print(
            f"{self.name}, {self.fmt_a} x {self.fmt_b}, any accumulator",
            table(self.findings),
            sep="\n",
            markup=False,
        )
        bits = f"{self.equal:,} of {self.compared:,} results have the simulator's bits"
        if self.ok:
            verdict = f"identified: {bits}"
        elif self.units:
            verdict = f"NOT confirmed: {bits}"
        else:
            verdict = "no unit of the simulator gives these answers"
        console.print(verdict, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Pairings(Result):
    """One instruction in every pair of formats."""

    found: Sequence[Instruction]

    @property
    def ok(self) -> bool:
        """True if it is identified in every pair."""
        return all(instruction.ok for instruction in self.found)

    def to_dict(self) -> dict[str, Any]:
        """As --json writes it."""
        pairings = [instruction.to_dict() for instruction in self.found]
        return {"ok": self.ok, "pairings": pairings}

    def render(self, console: "Console") -> None:
        """Print every pair."""
        for instruction in self.found:
            instruction.render(console)


def as_scaled_gemm(multiply: Multiply, name: str) -> ScaledGemm:
    """The instruction with an accumulator of 0 as a GEMM of K = 32.

    It ignores scales, which are one.
    """

    def function(a: Quantized, b: Quantized) -> np.ndarray:
        c = np.zeros((len(a.codes), len(b.codes)), np.float32)
        return multiply(a.codes, b.codes, c, a.fmt, b.fmt)

    return ScaledGemm(name=name, function=function)


def identify(
    multiply: Multiply,
    fmt_a: Format,
    fmt_b: Format,
    *,
    name: str,
    count: int,
    about: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Instruction:
    """Identify an instruction.

    At least ``count`` results of random operands and accumulators are compared.
    """
    scaled = as_scaled_gemm(multiply, name)
    bench = Bench(gemm=scaled, m=SIDE, n=SIDE, k=K_STEP, fmt_a=fmt_a, fmt_b=fmt_b)
    width = step.width(bench)
    units, findings = list[TensorCore](), [width]
    if isinstance(width.value, int):
        units, step_findings = step.units(bench, width.value)
        findings += step_findings
    compared, equal = 0, 0
    groups = [
        InstructionGroup(group=group, a=a, b=b, c=c, d=_diagonal(multiply, a, b, c, fmt_a, fmt_b))
        for group, (a, b, c) in _groups(fmt_a, fmt_b)
    ]
    if units:
        zeros = next(group for group in groups if group.group == ZERO_PRODUCTS)
        units, zeros_finding = _zero_factor_units(units, zeros, fmt_a, fmt_b)
        findings = [zeros_finding if f.what == "zeros" else f for f in findings]
        for of in groups:
            expected = results(of.a, of.b, of.c, units[0], fmt_a, fmt_b)
            same = expected.view(np.uint32) == of.d.view(np.uint32)
            compared, equal = compared + same.size, equal + int(same.sum())
            findings.append(_group_finding(of.group, of.c, of.d, expected, same))
    for i in range(-(-count // SIDE**2) if units else 0):
        same = _random(multiply, fmt_a, fmt_b, units[0], seed + i)
        compared, equal = compared + same.size, equal + int(same.sum())
    return Instruction(
        name=name,
        about=about or {},
        fmt_a=fmt_a,
        fmt_b=fmt_b,
        units=units,
        findings=findings,
        groups=groups,
        compared=compared,
        equal=equal,
    )


def results(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, unit: TensorCore, fmt_a: Format, fmt_b: Format
) -> np.ndarray:
    """A unit's results, float32 [Q], of codes a and b [Q, 32] and accumulators c [Q]."""
    each = zip(a[:, None], b[:, None], c[:, None, None], strict=True)
    return np.array([gemm.mma(*x, fmt_a=fmt_a, fmt_b=fmt_b, unit=unit)[0, 0] for x in each])


def _zero_factor_units(
    units: list[TensorCore], of: InstructionGroup, fmt_a: Format, fmt_b: Format
) -> tuple[list[TensorCore], Finding]:
    """The units with the rule for zero factors that the group shows, and the finding (G-11).

    A chain from 0 cannot show it: only a tiny accumulator next to zero products does.
    """
    if units[0].exponents == "coded" and units[0].zeros == "excluded":
        rules = ["excluded", "least"]
    else:
        rules = [units[0].zeros]
    right = {}
    for rule in rules:
        unit = dataclasses.replace(units[0], zeros=rule)  # type: ignore[arg-type]
        d = results(of.a, of.b, of.c, unit, fmt_a, fmt_b)
        right[rule] = int(np.sum(d.view(np.uint32) == of.d.view(np.uint32)))
    counts = ", ".join(f"{n} of {of.d.size} as {rule!r}" for rule, n in right.items())
    evidence = f"tiny accumulators next to zero products: {counts}"
    fits = [rule for rule, n in right.items() if n == of.d.size]
    zeros = fits[0] if fits else None
    if zeros == "least":  # only where exponents are coded (G-18)
        kind = ("coded", "excluded")
        coded = [unit for unit in units if (unit.exponents, unit.zeros) == kind]
        units = [dataclasses.replace(unit, zeros="least") for unit in coded]
    return units, Finding("zeros", zeros, evidence, others=tuple(fits[1:]))


def random_operands(
    fmt_a: Format, fmt_b: Format, seed: int, side: int = SIDE
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random finite codes and accumulators.

    Rows are near one, of all codes, or mostly zeros. Accumulators range from far below the products
    to far above them; some have random finite bits, some are zero.
    """
    rng = np.random.default_rng(seed)
    codes = []
    for fmt in (fmt_a, fmt_b):
        normal = rng.standard_normal((side, K_STEP))
        near_one = cast.encode(normal * 2.0 ** rng.integers(-4, 5, (side, 1)), fmt)
        any_code = finite_codes(rng, (side, K_STEP), fmt)
        few = np.where(rng.random((side, K_STEP)) < 0.1, any_code, np.uint8(0))
        kinds = rng.integers(0, 3, (side, 1))
        codes.append(np.choose(kinds, [near_one, any_code, few]))
    normal = rng.standard_normal((side, side))
    c = (normal * 2.0 ** rng.integers(-30, 36, (side, side))).astype(np.float32)
    bits = rng.integers(0, 1 << 32, c.shape, dtype=np.uint32)
    finite = np.where(bits >> 23 & 0xFF == 0xFF, bits & np.uint32(0xBFFFFFFF), bits)
    choices = [*[c] * 5, *[finite.view(np.float32)] * 2, np.zeros_like(c)]
    return codes[0], codes[1], np.choose(rng.integers(0, 8, c.shape), choices)


def _random(
    multiply: Multiply, fmt_a: Format, fmt_b: Format, unit: TensorCore, seed: int
) -> np.ndarray:
    a, b, c = random_operands(fmt_a, fmt_b, seed)
    expected = gemm.mma(a, b, c, fmt_a=fmt_a, fmt_b=fmt_b, unit=unit)
    return multiply(a, b, c, fmt_a, fmt_b).view(np.uint32) == expected.view(np.uint32)


def _diagonal(
    multiply: Multiply, a: np.ndarray, b: np.ndarray, c: np.ndarray, fmt_a: Format, fmt_b: Format
) -> np.ndarray:
    """Results, float32 [Q], of row i of a, row i of b and c[i] for each i."""
    diagonals = []
    for i in range(0, len(a), SIDE):
        part = slice(i, i + SIDE)
        d = multiply(a[part], b[part], np.diag(c[part]).astype(np.float32), fmt_a, fmt_b)
        diagonals.append(np.diagonal(d))
    return np.concatenate(diagonals)


def _group_finding(
    group: str, c: np.ndarray, d: np.ndarray, expected: np.ndarray, same: np.ndarray
) -> Finding:
    if same.all():
        return Finding(group, "as the simulator has it", f"{same.size} instructions")
    i = int(np.flatnonzero(~same)[0])
    bits = (int(x.view(np.uint32)) for x in (c[i], d[i], expected[i]))
    evidence = (
        "{1} of {0} instructions differ; instruction {2}, with c = {3:08x}, gave {4:08x}; the "
        "simulator gives {5:08x}".format(same.size, int((~same).sum()), i, *bits)
    )
    return Finding(group, "not as the simulator has it", evidence)


def _groups(
    fmt_a: Format, fmt_b: Format
) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Groups of chosen accumulators: name, and a, b, c."""
    one_a, one_b = (fmt.bias << fmt.mantissa_bits for fmt in (fmt_a, fmt_b))
    last = 2.0**-23
    odd = [1 + 2.0**-13, 1 + 2.0**-14, 1 + 3 * 2.0**-14, 1 + last, 2 - last, 1.0]
    scaled = [
        sign * m * 2.0**e
        for e in (-149, -140, -130, -127, -126, -120, -100, -40, -20, 0, 20, 100, 127)
        for m in odd
        for sign in (1, -1)
    ]
    finite = [x for x in scaled if abs(x) < 2.0**TOP_FLOAT]
    yield "accumulators alone", _operands([({}, c) for c in finite])
    zeros = [
        {0: (0, fmt_b.max_code)},
        {31: (fmt_a.max_code, 0)},
        dict.fromkeys(range(K_STEP), (128, one_b)),
    ]
    yield ZERO_PRODUCTS, _operands([(terms, c) for terms in zeros for c in finite])
    near = [sign * m * 2.0**e for e in range(-20, 22) for m in odd for sign in (1, -1)]
    yield "accumulators and 1 x 1", _operands([({0: (one_a, one_b)}, c) for c in near])
    large = {0: (fmt_a.max_code, fmt_b.max_code)}
    opposite = {0: (fmt_a.max_code | 0x80, fmt_b.max_code)}
    top = float(np.uint32(FULL).view(np.float32))
    most = [s * c for c in (top, top / 2, 2.0**127) for s in (1, -1)]
    near_overflow = [(t, c) for t in (large, opposite, {}) for c in most]
    yield "accumulators near overflow", _operands(near_overflow)
    signs = [0.0, -0.0, 1.0, -1.0]
    zero_terms = [
        {},
        dict.fromkeys(range(K_STEP), (128, one_b)),
        {0: (one_a, one_b)},
        {0: (one_a | 0x80, one_b)},
        {0: (one_a, one_b), 1: (one_a | 0x80, one_b)},
    ]
    yield "signs of zero", _operands([(t, c) for t in zero_terms for c in signs])
    special_terms = _specials(fmt_a, fmt_b, one_a, one_b)
    special = [(t, c) for t in special_terms for c in (0.0, 1.0, np.inf, -np.inf, np.nan)]
    yield "NaN and infinities", _operands(special)
    payloads = np.array(
        [0x7F800001, 0xFF800001, 0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32
    ).view(np.float32)
    a, b, _ = _operands([(t, 0.0) for t in ({}, {0: (one_a, one_b)}) for _ in payloads])
    # as bits: a Python float would not keep them
    yield ("NaN accumulators", (a, b, np.tile(payloads, 2)))


def _specials(fmt_a: Format, fmt_b: Format, one_a: int, one_b: int) -> list[Pairs]:
    terms: list[Pairs] = [
        {0: (fmt_a.nan_code, one_b)},
        {31: (one_a, fmt_b.nan_code)},
        {0: (fmt_a.nan_code, 0)},
        {},
    ]
    for fmt, one, left in ((fmt_a, one_b, True), (fmt_b, one_a, False)):
        if fmt.inf_code is not None:
            pairs = [
                (fmt.inf_code | sign, other)
                for sign, other in itertools.product((0, 0x80), (one, one | 0x80, 0))
            ]
            terms += [{0: pair if left else pair[::-1]} for pair in pairs]
            both = {0: (fmt.inf_code, one), 1: (fmt.inf_code | 0x80, one)}
            terms.append({k: pair if left else pair[::-1] for k, pair in both.items()})
    if fmt_a == fmt_b == E5M2:
        terms.append({0: (0x7C, 0x7C)})
    return terms


def _operands(stimuli: Sequence[tuple[Pairs, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    codes = coded([pairs for pairs, _ in stimuli], K_STEP)
    return *codes, np.array([c for _, c in stimuli], np.float32)
