"""Identify a cast that rounds stochastically: its probabilities (C-2), then its other decisions.

Probabilities are measured: the same numbers between neighbors, REPEATS times each. The other
decisions show without chance: of a few answers to an input, that nearest to zero is the one that
rounding toward zero gives, so that the functions of ``decisions`` apply to it.
"""

import dataclasses
import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fp8ref.conformance.cast import behavior, decisions, describe, outputs
from fp8ref.conformance.cast.behavior import KNOWN_CASTS, Behavior
from fp8ref.conformance.cast.outputs import Output, Responses
from fp8ref.conformance.inputs import cast_inputs
from fp8ref.conformance.inputs.dtypes import rounded
from fp8ref.conformance.kit.explain import simplest
from fp8ref.conformance.kit.finding import Counterexample, Finding, Outcome, bits_of, show
from fp8ref.conformance.kit.subject import ConformanceError, Subject
from fp8ref.formats import Format

REPEATS = 1 << 12  # how often each number between two neighbors is cast

FRACTIONS = (1 / 16, 1 / 4, 1 / 2, 3 / 4, 15 / 16)
"""Where those numbers lie between their neighbors, as fractions of the way."""

FINE_FRACTIONS, FINE_REPEATS = (1 / 512, 511 / 512), 1 << 16
"""A fraction that 8 random bits do not tell from 0 or 1 / 256, and how often it is cast.

At a rate of 1 / 512 FINE_REPEATS casts have a deviation of 11 of 128, so that neither passes.
"""

RARELY = 2.0**-8
"""The rate from which a neighbor counts as occurring: a sixteenth of the smallest fraction."""

_ENDS = tuple(2.0**-k for k in range(5, 10))
GRID = (*(k / 16 for k in range(1, 16)), *_ENDS, *(1 - f for f in _ENDS))
"""Fractions that tell a noise that is biased, or of another width than a spacing."""

REPEATS_OF_SPECIALS = 1 << 6
"""How often each input that leaves nothing to chance is cast.

A quarter of the smallest number rounds to it every time in 4^-64 of the casts that follow C-2.
"""

FEW_NUMBERS = 16
"""A format with at most so many magnitudes is asked between all of them."""

NOT_ASKED = ("behavior_but_for_nan_codes", "double_rounding", "double_roundings")
"""The keys of a result that are left out for a cast that rounds stochastically."""

NOT_TESTED = ("probabilities in steps below 2^-8", "other dtypes, shapes and strides")
"""What is not asked of a cast that rounds stochastically."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundingRates:
    """How often numbers between two neighbors of the format are rounded away from zero.

    x [n] are numbers at ``fractions`` [n] of the way from one neighbor to the next away from zero.
    """

    x: np.ndarray
    fractions: np.ndarray
    responses: Responses  # [n * repeats]
    repeats: int = REPEATS

    @cached_property
    def away(self) -> np.ndarray:
        """How often [n] the code is the neighbor away from zero, as a fraction of 1."""
        codes = self.responses.codes.reshape(-1, self.repeats)
        return (codes == self.neighbors[:, None]).mean(axis=1)

    @property
    def neighbors(self) -> np.ndarray:
        """The codes [n] next to x away from zero."""
        fmt = self.responses.fmt
        saturating = KNOWN_CASTS["saturating"].behavior(fmt)
        away = dataclasses.replace(saturating, rounding="away_from_zero")
        return behavior.encode(self.x, fmt, away)

    @property
    def random(self) -> np.ndarray:
        """Where both neighbors occur, each more than rarely."""
        return np.minimum(self.away, 1 - self.away) >= RARELY

    @property
    def depart(self) -> np.ndarray:
        """Where the rate is not the fraction f, which is the probability of C-2.

        Of n independent choices the standard deviation is sqrt(f (1 - f) / n). By the binomial
        distribution, a right cast is five of them off at one of 40 fractions once in 36,000.
        """
        f = self.fractions
        return np.abs(self.away - f) > 5 * np.sqrt(f * (1 - f) / self.repeats)

    @property
    def digits(self) -> int:
        """The decimals of a rate as text."""
        return 3 if self.repeats == REPEATS else 5

    def counterexample(self, at: int, expected: str) -> Counterexample:
        """One number, how often it got the neighbor away from zero, and how often it should."""
        a = self.responses
        return Counterexample(
            f"{show(self.x[at])}, {self.repeats} times",
            f"{code_or_value(self.neighbors[at], a)} {self.away[at]:.{self.digits}f} of the time",
            expected,
            "C-2",
            bits=(bits_of(self.x[at], a.source),),
            dtype=a.source,
        )


def measure_rates(subject: Subject, source: str, fmt: Format) -> RoundingRates:
    """Rates between zero, the smallest number, 1 or 12, or the largest below these, and the next
    number, of both signs; of a small format between all; without fractions below the dtype's.
    """
    lower = (0, fmt.smallest_subnormal, 1, 12)
    if fmt.max_code < FEW_NUMBERS:
        lower = tuple(cast_inputs.non_negative(fmt))
    return _rates(subject, source, fmt, lower, FRACTIONS, REPEATS)


def _rates(
    subject: Subject,
    source: str,
    fmt: Format,
    lower: tuple[float, ...],
    fractions: tuple[float, ...],
    repeats: int,
) -> RoundingRates:
    n = cast_inputs.with_next(fmt)
    at = np.unique(np.minimum(np.searchsorted(n, lower), n.size - 3))
    # [numbers, fractions]: each fraction of the way from each of these numbers to the next
    x = (n[at, None] + (n[at + 1] - n[at])[:, None] * np.array(fractions)).ravel()
    x, every = np.concatenate([x, -x]), np.tile(fractions, 2 * at.size)
    exact = rounded(x, source) == x
    x = rounded(x[exact], source)
    responses = ask_repeatedly(subject, x, repeats, source, fmt)
    return RoundingRates(x=x, fractions=every[exact], responses=responses, repeats=repeats)


def ask_repeatedly(
    subject: Subject, x: np.ndarray, times: int, source: str, fmt: Format
) -> Responses:
    """The responses [n * times] to one array that holds each of x [n] so many times in a row."""
    repeated = np.repeat(x, times)
    output = outputs.ask(subject, repeated, source)
    return Responses(x=repeated, source=source, output=output, fmt=fmt)


def code_or_value(code: int, a: Responses) -> str:
    """A code and its value as text, or the value alone where the cast returns values."""
    shown = outputs.code_text(code, a.fmt)
    return shown.partition(" = ")[2] if a.output.values_only else shown


def varies(subject: Subject, source: str, fmt: Format) -> bool:
    """Whether equal numbers in one array get different codes."""
    codes = measure_rates(subject, source, fmt).responses.codes.reshape(-1, REPEATS)
    return bool((codes != codes[:, :1]).any())


def identify(
    subject: Subject,
    a: Responses,
    position: int | None,
    fmt: Format,
    findings: list[Finding],
    expect: str | None,
) -> Outcome:
    """Measure the probabilities, find the other decisions, check whether a second call is equal.

    position   the first index where two outputs for a.x differ, if they do.

    Raises:    ConformanceError: not stochastic: no number gets both its neighbors, or one neither.
    """
    rates = measure_rates(subject, a.source, a.fmt)
    # above zero and 1, of both signs: few random bits cannot tell these
    fine = _rates(subject, a.source, a.fmt, (0, 1), FINE_FRACTIONS, FINE_REPEATS)
    shown = rates if rates.random.any() else fine
    if not shown.random.any():
        raise _no_chance(subject, a, position, rates)
    again = measure_rates(subject, a.source, a.fmt)
    differs_again = bool((again.responses.codes != rates.responses.codes).any())
    specials = _inputs_without_chance(a.fmt, a.source)
    without_chance = ask_repeatedly(subject, specials, REPEATS_OF_SPECIALS, a.source, a.fmt)
    truncated = _truncated(without_chance)
    decided, cast_behavior = _decide(truncated)
    # These inputs must be explained: those without chance, those of the rates, and a.x.
    responses = (without_chance, rates.responses, fine.responses, a)
    unexplained = _neither_neighbor(subject, responses, cast_behavior)
    wide = _rates(subject, a.source, a.fmt, (1,), GRID, REPEATS)
    rounding = _rounding(rates, fine, wide, differs_again)
    findings = [*findings, rounding, *decided]
    names, names_but_for_nan, nearest = _behaviors(truncated)
    unexplained = unexplained or nearest
    names, names_but_for_nan = ([], []) if unexplained else (names, names_but_for_nan)
    chance_entries = {
        "behavior_but_for_rounding": names,
        "behavior_but_for_rounding_and_nan_codes": names_but_for_nan,
        "repeats_itself": not differs_again,
    }
    result = describe.result_dict(cast_behavior, findings, truncated)
    return Outcome(
        name=subject.name,
        kind="cast",
        fmt=fmt,
        framework=subject.framework,
        findings=findings,
        identified=rounding.witness is None and not unexplained,
        found={k: v for k, v in result.items() if k not in NOT_ASKED} | chance_entries,
        summary=_summary(rates, fine, fmt, findings, names, names_but_for_nan),
        unlike=[*([rounding.witness] if rounding.witness else []), *unexplained],
        expected=expect,
        differences=_differences(shown, truncated, expect, fmt, findings) if expect else [],
        limits=[*NOT_TESTED, *subject.other_devices],
    )


def _inputs_without_chance(fmt: Format, source: str) -> np.ndarray:
    """Inputs that leave nothing to chance: numbers of the format, overflow, infinities and NaNs.

    With them magnitudes so small that each becomes zero at least once in REPEATS_OF_SPECIALS times.
    """
    n = cast_inputs.with_next(fmt)
    numbers = np.concatenate([n, -n, cast_inputs.special(fmt)])
    with np.errstate(over="ignore"):
        return np.concatenate([rounded(numbers, source), cast_inputs.nans(source, fmt)])


def _truncated(a: Responses) -> Responses:
    """The answer nearest to zero for each input: what rounding toward zero would give."""
    # Without the sign bit, codes count the magnitudes upwards.
    nearest = np.argmin((a.codes & ~a.fmt.sign_bit).reshape(-1, REPEATS_OF_SPECIALS), axis=1)
    at = np.arange(nearest.size) * REPEATS_OF_SPECIALS + nearest
    output = Output(array=a.output.array[at], dtype=a.output.dtype)
    return dataclasses.replace(a, x=a.x[at], output=output)


def _decide(a: Responses) -> tuple[list[Finding], Behavior]:
    """All decisions except the rounding, each found under those before it."""
    b = dataclasses.replace(KNOWN_CASTS["saturating"].behavior(a.fmt), rounding="toward_zero")
    zero = decisions.negative_zero(a, b)
    b = dataclasses.replace(b, negative_zero=zero.value or b.negative_zero)
    small = decisions.subnormals(a, b)
    b = dataclasses.replace(b, subnormals=small.value or "kept")
    over, infinite = decisions.overflow(a, b), decisions.infinities(a, b)
    nan, pair = decisions.nans(a, b)
    b = dataclasses.replace(b, overflow=over.value or "max", nan=pair or b.nan)
    b = dataclasses.replace(b, infinite=infinite.value or "max")
    return [over, infinite, nan, small, zero], b


def _behaviors(truncated: Responses) -> tuple[list[str], list[str], list[Counterexample]]:
    """The known casts that are equal except for rounding; those equal except for NaN codes too.

    If there are none, the simplest input on which the nearest known cast differs.
    """
    behaviors = {
        k: dataclasses.replace(b, rounding="toward_zero")
        for k, b in behavior.known_casts(truncated.fmt).items()
    }
    names = [k for k, b in behaviors.items() if not truncated.mismatches(b).any()]
    differs = {k: truncated.mismatches(b, canonical=True) for k, b in behaviors.items()}
    nearest = min(behaviors, key=lambda k: int(differs[k].sum()))
    if differs[nearest].any():
        at = simplest(truncated.x, differs[nearest])
        shown = truncated.counterexample(at, behaviors[nearest], f"by {nearest}")
        return [], [], [shown]
    return names, [k for k in behaviors if not differs[k].any()], []


def _neither_neighbor(
    subject: Subject, responses: tuple[Responses, ...], cast_behavior: Behavior
) -> list[Counterexample]:
    """The simplest input whose code is neither of its neighbors.

    It is above max, or a zero of the wrong sign. Any other such input is no rounding at all.

    Raises:   ConformanceError: another input got neither of its neighbors.
    """
    shown = []
    for a in responses:
        away = dataclasses.replace(cast_behavior, rounding="away_from_zero")
        wrong = a.mismatches(cast_behavior) & a.mismatches(away)
        magnitude = np.abs(a.x)
        # A zero of the wrong sign is a fault, but still a rounding.
        sign = ((a.codes & ~a.fmt.sign_bit) == 0) & (magnitude < a.fmt.smallest_subnormal)
        outside = wrong & (magnitude <= a.fmt.max) & ~sign
        if outside.any():
            at = simplest(a.x, outside)
            given = outputs.output_text(a.output, at, a.fmt)
            why = _other_number(a, outside, cast_behavior)
            raise _error(subject, a, at, f"gave {given}, which is not a neighbor{why}")
        if wrong.any():
            at = simplest(a.x, wrong)
            shown.append(a.counterexample(at, cast_behavior, "by the behavior found"))
    return shown[:1]


def _other_number(a: Responses, outside: np.ndarray, b: Behavior) -> str:
    """In words, what explains all codes that are not neighbors of a number; "" if nothing does."""
    x, codes, sign = a.x[outside], a.codes[outside], a.fmt.sign_bit
    toward = behavior.encode(x, a.fmt, b).astype(np.int64)
    binade = toward >> a.fmt.mantissa_bits << a.fmt.mantissa_bits
    causes = {
        "the carry of a mantissa that rounds up to 2 is lost": [binade],
        "the sign is lost": [toward & ~sign, (toward & ~sign) + 1],
        "its noise is wider than a spacing": [toward - 1, toward + 2],
    }
    of = (cause for cause, some in causes.items() if (codes == some).any(axis=0).all())
    return "".join(f": {cause}" for cause in of)


def _noise(*measured: RoundingRates) -> str:
    """In words, the noise that gives all of these rates; "" if none does.

    A noise that is added to magnitudes has a rate linear in the fraction f, from 0 to 1.
    """
    f = np.concatenate([rates.fractions for rates in measured])
    away = np.concatenate([rates.away for rates in measured])
    n = np.concatenate([0 * rates.x + rates.repeats for rates in measured])
    noises = dict[str, np.ndarray]()
    for bits, half in itertools.product(range(1, 10), (0, 0.5)):
        words = f": its noise has {bits} random bits{', centered' * bool(half)}"
        noises[words] = np.floor(f * 2**bits + half) / 2**bits
    inside = (away > RARELY) & (away < 1 - RARELY)
    if np.unique(f[inside]).size > 1:
        slope, at_0 = np.polyfit(f[inside], away[inside], 1, w=np.sqrt(n[inside]))
        words = f": at f of the way it rounds up at the rate {slope:.3g} f {at_0:+.3g}, not f"
        noises[words] = np.clip(slope * f + at_0, 0, 1)

    def far(words: str, fit: float = 2.0**-9) -> float:
        p = noises[words]
        return float((np.abs(away - p) / (5 * np.sqrt(p * (1 - p) / n) + fit)).max())

    nearest = min(noises, key=far)  # its fit is of measured rates, too
    return nearest if far(nearest, 2.0**-6) <= 1 else ""


def _rounding(
    rates: RoundingRates, fine: RoundingRates, wide: RoundingRates, differs_again: bool
) -> Finding:
    """The finding on the rounding: ``stochastic`` if every rate is the distance, else None."""
    noise = _noise(rates, fine, wide)
    a = rates.responses
    evidence = (
        f"{REPEATS} times each, {rates.x.size} {a.source} numbers at "
        f"{', '.join(f'{f:g}' for f in FRACTIONS)} between neighbors, of both signs, two binades "
        f"and subnormals, and {FINE_REPEATS} times each, {fine.x.size} at 1/512 and 511/512; "
    )
    rates = rates if rates.depart.any() else fine
    depart = np.flatnonzero(rates.depart)
    shown = [
        f"{show(rates.x[i])} {rates.away[i]:.{rates.digits}f}, not {rates.fractions[i]:g}"
        for i in depart[:4]
    ]
    more = f" and {depart.size - 4} more" if depart.size > 4 else ""
    if depart.size:
        evidence += f"the rates away from zero were {', '.join(shown)}{more}"
    else:
        evidence += "each was rounded away from zero at that rate"
    same = "the same codes: by position, from a fixed seed"
    evidence += f"; a second call gives {'different codes' if differs_again else same}"
    if not depart.size:
        return Finding("rounding", "stochastic", evidence)
    at = simplest(rates.x, rates.depart)
    witness = rates.counterexample(at, f"{rates.fractions[at]:g} of the time")
    return Finding("rounding", None, evidence, words=f"at random{noise}", witness=witness)


def _summary(
    rates: RoundingRates,
    fine: RoundingRates,
    fmt: Format,
    findings: list[Finding],
    names: list[str],
    names_but_for_nan: list[str],
) -> str:
    of, wrong = rates.responses.fmt, int(rates.depart.sum()) + int(fine.depart.sum())
    _, rounding, *decided = findings
    found_fmt = f"{of}"
    if of is not fmt:
        found_fmt += f" (max {of.max:g}), not {fmt} (max {fmt.max:g}),"
    probability = "with the probability of C-2 at the"
    if wrong:
        probability = f"but not by the distance (C-2) at {wrong} of the"
    rest = "no known cast"
    if names_but_for_nan:
        rest = " and ".join(names or names_but_for_nan) + ("" if names else " except for NaN codes")
    decision_text = ", ".join(
        f"{f.what.replace('_', ' ')} {f.text or f.value or 'unknown'}" for f in decided
    )
    return (
        f"a cast to {found_fmt} that rounds {rounding.words or 'at random'}, {probability} "
        f"{rates.x.size + fine.x.size} fractions tested, and is otherwise {rest}: {decision_text}"
    )


def _differences(
    rates: RoundingRates, truncated: Responses, expect: str, fmt: Format, findings: list[Finding]
) -> list[Counterexample]:
    """The simplest number that is rounded at random, and the other differences."""
    at = simplest(rates.x, rates.random)
    wanted = KNOWN_CASTS[expect].behavior(truncated.fmt)
    code = behavior.encode(rates.x[at : at + 1], truncated.fmt, wanted)[0]
    rounds = rates.counterexample(at, f"{code_or_value(code, truncated)} every time")
    responses = {truncated.source: truncated}
    expected = KNOWN_CASTS[expect].behavior(fmt)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        others = describe.differences_from(responses, expected, fmt, findings[0])
        return [rounds, *others]


def _no_chance(
    subject: Subject, a: Responses, position: int | None, rates: RoundingRates
) -> ConformanceError:
    """The error for outputs that vary, though no number between neighbors is rounded both ways."""
    if position is not None:
        return _error(subject, a, position, "gave different codes on the second call")
    codes = rates.responses.codes.reshape(-1, REPEATS)
    at = int(np.argmax(codes != codes[:, :1]))
    where = (
        f"got several codes in one array of {codes.size} elements, another one at index {at} "
        f"than at {at - at % REPEATS}"
    )
    output = outputs.ask(subject, rates.responses.x, a.source)
    if np.array_equal(output.codes(a.fmt).reshape(codes.shape), codes):
        fault = "depends on the place or the number of elements"
        return _error(subject, rates.responses, at, f"{where}, in every call", fault)
    return _error(subject, rates.responses, at, where)


def _error(
    subject: Subject, a: Responses, at: int, evidence: str, fault: str = "does not repeat itself"
) -> ConformanceError:
    return ConformanceError(
        f"{subject.name} {fault}, and does not round stochastically: {a.source} "
        f"{show(a.x[at])} ({bits_of(a.x[at], a.source)}) {evidence}. Make its result depend on its "
        "input alone."
    )
