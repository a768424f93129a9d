"""Times of variants that take turns: medians over rounds, and ratios of neighbors in one round, so
that a clock that drifts hits all alike.

A round calls each variant some times in a row, the one that comes first changing from round to
round; a variant's time in it is that of the whole row by its calls. What times a row is a clock of
the backend (``Clock``).
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

ROUNDS = 11
FEWEST = (
    5  # rounds that are run however little time is left: fewer have no quartiles worth the name
)
# of the host's time for a row, by which the device starts late; at most so many seconds
AHEAD, LONGEST_AHEAD = (1.5, 0.2)
# bytes of inputs that are rotated, beyond any L2 there is; of how many sets
SAMPLES, SMALLEST, LARGEST = (300e6, 2, 8)

Call = Callable[[int], object]  # takes the number of the call, by which it chooses its inputs


class Clock(Protocol):
    kind: str  # in words, for the results

    def seconds(self, call: Call, calls: int, *, ahead: float = 0.0) -> tuple[float, float]:
        """(seconds that a row of calls took, seconds until the host had asked for them all).

        ahead     seconds that the device waits before it begins, so that it finds the work queued
                  and only its own time counts.
        """


class Wall:
    """The host's clock, for calls that are done when they return.

    It has nothing to wait for: ``ahead`` changes nothing.
    """

    kind = "time.perf_counter"

    def seconds(self, call: Call, calls: int, *, ahead: float = 0.0) -> tuple[float, float]:
        begun = time.perf_counter()
        for i in range(calls):
            call(i)
        taken = time.perf_counter() - begun
        return taken, taken


@dataclass
class Budget:
    """Seconds that a run may take, from now."""

    seconds: float
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begun)


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """seconds: of a call, by variant, one a round. errors: what a variant raised, which then has no
    seconds.
    """

    seconds: dict[str, list[float]]
    errors: dict[str, str]


def interleaved(
    variants: Mapping[str, Call],
    clock: Clock,
    *,
    row_seconds: float,
    most: int,
    queued: bool,
    rounds: int = ROUNDS,
    budget: Budget | None = None,
) -> Rounds:
    """Time variants in turns.

    row_seconds   how long a row of calls is to last; most: calls in a row at most.
    queued        whether the device's time alone counts; otherwise the host's launches count where
                  the device waits for them.
    budget        after FEWEST rounds no round begins that would end later.
    """
    rows: dict[str, tuple[int, float]] = {}
    errors: dict[str, str] = {}
    for name, call in variants.items():
        try:
            clock.seconds(call, 2)  # compiles, fills caches
            device, host = clock.seconds(call, 2)
        except Exception as error:  # the others are still to be measured
            errors[name] = message(error)
            continue
        calls = max(1, min(most, math.ceil(row_seconds / max(device / 2, 1e-9))))
        rows[name] = calls, min(LONGEST_AHEAD, AHEAD * calls * host / 2) if queued else 0.0
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    names, begun = list(rows), time.monotonic()
    for done in range(rounds):
        if (
            budget is not None
            and done >= FEWEST
            and budget.left < (time.monotonic() - begun) / done
        ):
            break
        first = done % max(1, len(names))
        for name in names[first:] + names[:first]:
            calls, ahead = rows[name]
            seconds[name].append(clock.seconds(variants[name], calls, ahead=ahead)[0] / calls)
    return Rounds(seconds=seconds, errors=errors)


def each(measured: Rounds, calls: int) -> Rounds:
    """Of one of so many that a call makes."""
    return Rounds(
        seconds={name: [s / calls for s in taken] for name, taken in measured.seconds.items()},
        errors=measured.errors,
    )


def ratio(reference: Sequence[float], other: Sequence[float]) -> float:
    """How many times as fast the other one is: the median of the rounds' ratios, above 1 where it
    takes less time.
    """
    return statistics.median(a / b for a, b in zip(reference, other, strict=True))


def quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third; of a single value, itself."""
    low, _, high = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else [values[0]] * 3
    )
    return [low, high]


def rows(measured: Rounds, reference: str) -> list[dict]:
    """A row for each variant: ``seconds`` (median), ``quartiles``, ``rounds``, and its ``speedup``
    over the reference, or its ``error``.
    """
    base = measured.seconds.get(reference)
    found = [
        {
            "name": name,
            "seconds": statistics.median(taken),
            "quartiles": quartiles(taken),
            "speedup": ratio(base, taken) if base else None,
            "speedup_quartiles": quartiles([a / b for a, b in zip(base, taken, strict=True)])
            if base
            else None,
            "rounds": taken,
        }
        for name, taken in measured.seconds.items()
    ]
    return found + [{"name": name, "error": error} for name, error in measured.errors.items()]


def sets(bytes_: int) -> int:
    """How many sets of inputs of that size to rotate among, so that a call does not find its own in
    the cache.
    """
    return max(SMALLEST, min(LARGEST, math.ceil(SAMPLES / bytes_)))


def message(error: Exception) -> str:
    """The first line of what was raised."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
