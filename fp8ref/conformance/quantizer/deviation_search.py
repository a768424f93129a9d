"""Search for the policy and the deviations from it that explain a quantizer.

Near an amax of 1 no eps, bound or special amax decides: there the policy agrees as it is, or with
one deviation that has a name. What differs at other amaxes is explained next, one deviation after
another. A number in a deviation, such as an eps, is solved by bisection of the model.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fp8ref.conformance.inputs.kinds import AMAX_RANGES
from fp8ref.conformance.quantizer import candidates, deviations, outputs
from fp8ref.conformance.quantizer.candidates import Agreement, Candidate
from fp8ref.conformance.quantizer.deviations import Deviation
from fp8ref.conformance.quantizer.outputs import Quantizer, Response, ScaleLayout
from fp8ref.formats import Format
from fp8ref.policy import ScalePolicy

WIDTH = 96
"""A group's elements that are compared: the largest, fractions, and most of those by ties."""

MOST = 4  # the most deviations that are tried one after another

_SPECIAL: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "zero": ("an amax of 0", lambda amax: amax == 0),
    "infinite": ("an infinite amax", np.isinf),
    "NaN": ("an amax of NaN", np.isnan),
}


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a quantizer gave, as rows, and what it is compared with.

    rows         a row for each group, of at most ``WIDTH`` elements; scale_layout: of these rows.
    considered   for each row, whether it counts.
    fmt          of its codes, and the one whose max it scales to.
    flushing     float32 subnormals may be zeros too, as under XLA (S-12).
    underflow    asks for the largest number whose code is zero, and the least whose code is not.
    """

    rows: Response
    scale_layout: ScaleLayout
    considered: np.ndarray
    fmt: Format
    flushing: bool
    underflow: Callable[[], tuple[np.float32, np.float32] | None]

    def run(self, policies: Iterable[ScalePolicy]) -> Agreement | None:
        """The agreement that explains most with the fewest deviations, the first of equals."""
        near = self.rows.ordinary & (self.rows.amax >= 1) & (self.rows.amax <= 1024)
        sample = outputs.some_rows(self.rows, near, WIDTH)
        every, best = int(self.considered.sum()), None
        for candidate in self._near_one(policies, sample):
            fewer = MOST
            if best is not None and best.score(self.considered) == (every, every):
                fewer = best.candidate.deviation.parts - 1
            explained = self._completed(candidate, fewer)
            if best is None or self._rank(explained) > self._rank(best):
                best = explained
                if self._rank(best) >= (every, every, -1):
                    break
        return best

    def _rank(self, a: Agreement) -> tuple[int, int, int]:
        return *a.score(self.considered), -a.candidate.deviation.parts

    def _near_one(self, policies: Iterable[ScalePolicy], sample: Response) -> Iterator[Candidate]:
        """The policies that agree near an amax of 1 as they are; then others with a deviation."""
        ways = (False, True) if self.flushing else (False,)
        tried = [
            Candidate(policy=p, scale_fmt=self.fmt, fmt=self.fmt, flushes=flushes)
            for p in policies
            for flushes in ways
        ]
        others = []
        for plain in tried:
            if candidates.agrees(plain, [sample], self.scale_layout):
                yield plain
            else:
                others.append(plain)
        for plain in others:
            solved = [*self._limits(plain, sample), *self._factors(plain, sample)]
            solved += self._floors(plain) if self._is_near(plain, sample) else []
            for deviation in (*deviations.named(plain.policy), *solved):
                deviating = dataclasses.replace(plain, deviation=deviation)
                if candidates.agrees(deviating, [sample], self.scale_layout):
                    yield deviating

    def _completed(self, candidate: Candidate, most: int) -> Agreement:
        """The agreement with the deviations that explain most further groups, ``most`` in all."""
        best = candidates.agreement(candidate, [self.rows], self.scale_layout)
        for _ in range(most - candidate.deviation.parts):
            wrong, before = ~best.both & self.considered, best.candidate.deviation
            further = self._at_ends(best.candidate, wrong) if wrong.any() else []
            further += self._other_codes(best, wrong & best.deciding & self.rows.ordinary)
            both = [before.then(deviation) for deviation in further]
            tried = [dataclasses.replace(candidate, deviation=one) for one in both]
            sample = [self.rows], self.scale_layout
            options = [candidates.agreement(one, *sample) for one in tried]
            better = max(options, key=lambda a: a.score(self.considered), default=best)
            if better.score(self.considered) <= best.score(self.considered):
                break
            best = better
        return best

    def _other_codes(self, best: Agreement, wrong: np.ndarray) -> list[Deviation]:
        """Other ways to make codes beside right scales: those that explain some ordinary groups."""
        candidate, few = best.candidate, np.flatnonzero(wrong)[:8]
        if not few.size or candidate.deviation.codes is not None:
            return []
        sample = outputs.some_rows(self.rows, few, WIDTH)

        def explains(d: Deviation) -> bool:
            deviating = dataclasses.replace(candidate, deviation=candidate.deviation.then(d))
            q = deviating.quantize(sample.x, self.scale_layout)
            return not candidates.mismatches(sample.output, q, deviating).any()

        own = candidate.deviation.applied_to(candidate.policy)
        return [d for d in deviations.other_codes(own) if explains(d)]

    def _at_ends(self, candidate: Candidate, wrong: np.ndarray) -> list[Deviation]:
        """Deviations that show at the amaxes of wrong groups: far from 1, zero, infinite or NaN."""
        amax, kinds = self.rows.amax, self.rows.kind
        low = wrong & (amax < 1)
        small = bool(low.any())
        large = bool((wrong & (amax > 1024) & np.isfinite(amax)).any())
        solved: list[Deviation] = []
        if small:
            last = candidate.scales_of_amax(amax[low].max(keepdims=True)).scale_inv[0]
            solved += [
                *self._floors(candidate),
                *deviations.code_0_deviations(candidate.policy, last),
                *[deviations.OVERFLOW] * (candidate.policy.overflow != "inf"),
            ]
        if small or large:
            bounds = [*self._bounds(small, large), *deviations.FLUSHES]
            # A bound says more than one of many floors that give the same powers of two.
            powers = candidate.policy.e8m0 is not None
            solved = [*bounds, *solved] if powers else [*solved, *bounds]
        for kind in _SPECIAL:
            at = wrong & (kinds == AMAX_RANGES.index(kind))
            if at.any():
                solved += self._constants(kind, int(np.argmax(at)))
        return solved

    def _returned(self, at: int) -> dict[str, np.float32]:
        """The scale and scale_inv of a row that are returned, by kind."""
        return {
            kind: np.float32(self.rows.output.scales[name].reshape(-1)[at])
            for name, kind in self.scale_layout.scales.items()
        }

    def _row(self, kind: str, *, last: bool = False) -> int | None:
        """The first row, or the last, of a kind of amax; they ascend within a kind."""
        at = np.flatnonzero(self.rows.kind == AMAX_RANGES.index(kind))
        return int(at[-1 if last else 0]) if at.size else None

    def _constants(self, kind: str, at: int) -> list[Deviation]:
        """Constant scales of the amaxes of a kind: those returned, or 1, 0, Inf or NaN."""
        words, condition = _SPECIAL[kind]
        shown = self._returned(at)
        numbers = [{"scale": np.float32(v)} for v in (1, 0, np.inf, np.nan)]
        options: list[dict[str, np.float32]] = [shown] if shown else numbers
        if len(shown) == 1:
            # The other one is the policy's, the reciprocal, 1 or 0: codes show which.
            ((kind, value),) = shown.items()
            with np.errstate(all="ignore"):
                others = (np.float32(1) / value, np.float32(1), np.float32(0))
            second = "scale" if kind == "scale_inv" else "scale_inv"
            options += [{kind: value, second: other} for other in others]
        return [deviations.constant(words, condition, s, shown or s) for s in options]

    def _bounds(self, small: bool, large: bool) -> list[Deviation]:
        """The scales of the least and of the greatest amax, as bounds of all."""
        ends = [(self._row("zero"), True)] * small + [(self._row("huge", last=True), False)] * large
        bounds = []
        for at, is_small in ends:
            for kind, value in (self._returned(at) if at is not None else {}).items():
                if np.isfinite(value):
                    least = (kind == "scale_inv") == is_small
                    bounds.append(deviations.bound(kind, value, least=least))
        return bounds

    def _floors(self, candidate: Candidate) -> list[Deviation]:
        """Another eps, as the least amax and as one that is added, by the least scale."""
        at = self._row("zero")
        if at is None:
            return []
        policy = candidate.policy
        shown = self._returned(at)

        def model(eps: float) -> Candidate:
            return dataclasses.replace(
                candidate, deviation=candidate.deviation.then(deviations.floor(eps, policy, ""))
            )

        if shown:
            kind, value = next(iter(shown.items()))

            def order(of: Candidate) -> int:
                """-1, 0 or 1: whether its eps is less, equal or greater, by an amax of 0."""
                scale = getattr(of.scales_of_amax(np.zeros(1, np.float32)), kind)[0]
                return (int(scale > value) - int(scale < value)) * (
                    1 if kind == "scale_inv" else -1
                )

            if np.isnan(value):
                return []
            if order(candidate) == 0:
                if policy.eps:
                    return [deviations.eps_added(policy.eps, policy, f"{policy.eps:.9g}")]
                return []
            low = smallest(lambda eps: order(model(eps)) >= 0)
            high = smallest(lambda eps: order(model(eps)) > 0)
        else:
            between = self.underflow()
            if between is None:
                return []

            def vanishes(eps: float, x: np.float32) -> bool:
                q = model(eps).quantize(np.full((1, 1), x, np.float32), self.scale_layout)
                return not q.codes[0, 0] & 0x7F

            zero, other = between
            low = smallest(lambda eps: vanishes(eps, zero))
            high = smallest(lambda eps: vanishes(eps, other))
        high = 1.0 if high is None else high
        if low is None or not low < high:
            return []
        eps, words = shortest(low, np.nextafter(high, 0))
        if high > 1.1 * low > 0:
            words += f" (or another from {low:.3g} to {high:.3g}: its scales are the same)"
        elif len(words) > 7 and shown:
            words += f" (its {kind} is at {'least' if kind == 'scale_inv' else 'most'} {value:.9g})"
        floors = [deviations.floor(eps, policy, words)] if eps != policy.eps else []
        return [*floors, *([deviations.eps_added(eps, policy, words)] if eps else [])]

    def _factors(self, plain: Candidate, sample: Response) -> list[Deviation]:
        """A factor between the scales, exact where the policy's own is a power of two."""
        factors = []
        own = plain.scales(sample.x, self.scale_layout)
        for name, kind in self.scale_layout.scales.items():
            policy_scales = candidates.by_group(own, kind)
            exact = np.frexp(policy_scales)[0] == 0.5
            ratios = np.unique(sample.output.scales[name].reshape(-1)[exact] / policy_scales[exact])
            ratio = ratios[0] if ratios.size == 1 else 1
            if np.isfinite(ratio) and ratio > 0 and ratio != 1:
                by = float(np.float32(ratio))
                words = shortest(by * (1 - 2.0**-25), by * (1 + 2.0**-25))[1]
                factors.append(deviations.factor(kind, by, words))
        return factors

    def _is_near(self, plain: Candidate, sample: Response) -> bool:
        """Whether scales from an amax of 200 on are within 2^-10, as with an eps that is added."""
        far, own = sample.amax >= 200, plain.scales(sample.x, self.scale_layout)
        pairs = candidates.both_scales(sample, own, self.scale_layout)
        return all(np.allclose(x[far], y[far], rtol=2.0**-10, atol=0) for x, y in pairs)

    def _limits(self, plain: Candidate, sample: Response) -> list[Deviation]:
        """Another max to scale to, if scales have about one ratio."""
        name = self.scale_layout.scale
        if name is None or plain.policy.of_exponents:
            return []
        kind = self.scale_layout.kinds[name]
        values = sample.output.scales[name].reshape(-1)
        with np.errstate(all="ignore"):
            own = plain.scales(sample.x, self.scale_layout)
            ratios = values / candidates.by_group(own, kind)
        spread = 2 if plain.policy.power_of_two is not None else 1 + 2.0**-20
        finite = np.all((ratios > 0) & (ratios < np.inf))
        if not finite or ratios.max() / ratios.min() > spread:
            return []
        sign = 1 if kind == "scale" else -1

        def scales(limit: float) -> np.ndarray:
            deviation = deviations.another_max(limit, self.fmt, "")
            deviating = dataclasses.replace(plain, deviation=deviation)
            others = deviating.scales(sample.x, self.scale_layout)
            return sign * candidates.by_group(others, kind)

        low = smallest(lambda limit: bool((scales(limit) >= sign * values).all()), 2.0**20)
        high = smallest(lambda limit: bool((scales(limit) > sign * values).any()), 2.0**20)
        if low is None or high is None or not low < high:
            return []
        limit, words = shortest(low, np.nextafter(high, 0))
        # of powers of two: several maxes have these scales, and one is a power of two
        if high > 1.001 * low:
            limit = 2.0 ** np.floor(np.log2(high))
            words = f"{limit:g}"
        if low <= limit < high:
            return [deviations.another_max(limit, self.fmt, words)]
        return []


def smallest(reached: Callable[[float], bool], below: float = 1.0) -> float | None:
    """The least float64 below ``below`` that ``reached`` holds from, 0 for all; None for none."""
    low, high = 0, int(np.float64(below).view(np.int64)) - 1

    def number(bits: int) -> float:
        return float(np.int64(bits).view(np.float64))

    # Zero is asked only of an eps: a max of 0 scales nothing.
    if not reached(number(high)):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(number(middle)) else (middle + 1, high)
    return number(low)


def shortest(low: float, high: float) -> tuple[float, str]:
    """The number from low to high of the fewest decimal digits, or its float32, and its digits.

    Of one digit, 1 comes first: what code says is rather 1e-4 than 8e-5.

    >>> shortest(0.99e-8, 1.01e-8), shortest(0.0, 1e-45), shortest(6e-5, 1.1e-4)
    ((1e-08, '1e-08'), (0.0, '0'), (0.0001, '0.0001'))
    """
    if low == 0:
        return 0.0, "0"
    power_of_ten = f"1e{np.floor(np.log10(high)):.0f}"
    middles = [f"{(low + high) / 2:.{digits}e}" for digits in range(17)]
    for words in (power_of_ten, *middles):
        for number in (float(words), float(np.float32(words))):
            if low <= number <= high:
                return number, f"{float(words):.9g}"
    return low, f"{low:.9g}"


def asked_for_underflow(
    quantizer: Quantizer, shape: tuple[int, int]
) -> Callable[[], tuple[np.float32, np.float32] | None]:
    """A function that finds the largest x alone in a tensor whose output is zero, and the next x.

    It returns None if the least number of the dtype has an output above zero, as without an eps.
    """

    @functools.cache
    def underflow() -> tuple[np.float32, np.float32] | None:
        drop = 16 if quantizer.dtype == "bfloat16" else 0

        def vanishes(bits: int) -> bool:
            x = np.zeros(shape, np.float32)
            x[0, 0] = _number(bits << drop)
            output = quantizer.ask(x)
            first = output.tensor[0, 0]
            return not (first if output.codes is None else first & 0x7F)

        low, high = 1, int(np.float32(1).view(np.int32)) >> drop
        if not vanishes(low):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if vanishes(middle) else (low, middle)
        return _number(low << drop), _number(high << drop)

    return underflow


def _number(bits: int) -> np.float32:
    return np.array([bits], np.int32).view(np.float32)[0]
