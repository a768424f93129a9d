"""Compare what every rank gets with the whole tensor's value; simplify what differs (P-27)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8ref.conformance.kit.arrays import as_numpy, written
from fp8ref.conformance.kit.finding import bits_of, show
from fp8ref.conformance.kit.subject import FRAMEWORKS
from fp8ref.conformance.sharded.inputs import DIFFICULTIES, Case, arrays, named, valid_for, whole
from fp8ref.formats import Format
from fp8ref.policy import ScalePolicy
from fp8ref.sim.quantize import scaling
from fp8ref.sim.quantize.scales import scales_from_amax


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Somebody's collective, and what it makes.

    function      (shards) -> a value for each rank. With ``microbatches`` a rank's entry is a list
                  of arrays, else one array.
    made          ``amax``, ``scale`` or ``scale_inv``.
    axis          that is cut.
    """

    function: Callable[[list], Any]
    policy: ScalePolicy
    fmt: Format
    made: str = "amax"
    axis: int = 0
    microbatches: bool = False
    framework: str = "numpy"

    def expected(self, case: Case) -> float:
        """The value of the whole tensor."""
        return self.scaled_amax(float(scaling.amax(whole(case))))

    def scaled_amax(self, amax: float) -> float:
        """The value of an amax."""
        if self.made == "amax":
            return amax
        scales = scales_from_amax(np.asarray(amax, np.float32), self.fmt, self.policy)
        return float(scales.scale if self.made == "scale" else scales.scale_inv)

    def values(self, case: Case) -> list[float] | str:
        """Every rank's value, or what was raised."""
        convert = FRAMEWORKS[self.framework]
        ranks = [[convert(x) for x in rank] for rank in arrays(case, self.axis)]
        before = [written(x) for rank in ranks for x in rank]
        # held here: somebody's code may empty the lists
        shards = [x for rank in ranks for x in rank]
        try:
            output = self.function(ranks if self.microbatches else [rank[0] for rank in ranks])
            if isinstance(output, dict | str):
                return (
                    f"it gives a {type(output).__name__}, not one number for each rank in their "
                    "order"
                )
            values = [as_numpy(value).reshape(-1) for value in output]
            if len(values) != len(case) or any(value.size != 1 for value in values):
                return (
                    f"it gives shapes {[value.shape for value in values]} for {len(case)} "
                    "ranks, not one number for each"
                )
            numbers = [float(value[0]) for value in values]
        except (
            Exception,
            SystemExit,
        ) as error:  # anything that somebody's code raises is its answer
            return f"it raises {type(error).__name__}: {error}".splitlines()[0]
        if [written(x) for x in shards] == before:
            return numbers
        return "it changes its shards"


@dataclass(frozen=True, kw_only=True)
class Departure:
    """The simplest shards found for which a rank's value is not that of the whole tensor.

    difficulty  a key of DIFFICULTIES; clause: that decides it.
    """

    difficulty: str
    case: Case
    got: str
    expected: str
    clause: str

    def __str__(self) -> str:
        words = DIFFICULTIES[self.difficulty].words
        return (
            f"{words}: {named(self.case)}: got {self.got}, expected {self.expected} on every "
            f"rank ({self.clause})"
        )


def wrong(collective: Collective, case: Case) -> bool:
    """Whether some rank's value differs; all NaNs are equal."""
    values, expected = collective.values(case), collective.expected(case)
    return isinstance(values, str) or not np.array_equal(
        values, [expected] * len(values), equal_nan=True
    )


def departure(collective: Collective, difficulty: str, cases: Sequence[Case]) -> Departure | None:
    """The first of these cases that differs, made as simple as it gets; None if none does."""
    case = next((case for case in cases if wrong(collective, case)), None)
    if case is None:
        return None
    while (
        simpler := next(
            (
                one
                for one in _simpler(case)
                if valid_for(one, difficulty) and wrong(collective, one)
            ),
            None,
        )
    ) is not None:
        case = simpler
    values, expected = collective.values(case), collective.expected(case)
    got = values if isinstance(values, str) else " and ".join(map(show, values))
    if not wrong(collective, case) or values == [expected] * len(case):
        got += ": not the same in every call"
    elif words := remembers(collective) or reduction(collective):
        got += f"; {words}"
    bits = "" if np.isnan(expected) else f" ({bits_of(expected, 'float32')})"
    return Departure(
        difficulty=difficulty,
        case=case,
        got=got,
        expected=f"{show(expected)}{bits}",
        clause=DIFFICULTIES[difficulty].clause,
    )


def remembers(collective: Collective) -> str:
    """In words, that a call depends on an earlier one; else ""."""
    small: Case = ((((1e-30,),),),)
    large: Case = ((((3e38,),),),)
    alone = collective.values(small)
    collective.values(large)
    after = collective.values(small)
    if alone == after:
        return ""
    return (
        f"what it gives depends on earlier calls: {named(small)} gives other values after "
        f"{named(large)}"
    )


def reduction(collective: Collective) -> str:
    """In words, what ranks get in place of the largest amax, if it has a name; else ""."""
    amaxes = (2.0, 8.0, 1.0, 4.0)
    values = collective.values(tuple((((amax,),),) for amax in amaxes))
    for words, each in {
        "each rank has the amax of its own shard": amaxes,
        "every rank has the smallest amax": (1.0,) * 4,
        "every rank has the mean of the amaxes": (3.75,) * 4,
        "every rank has the sum of the amaxes": (15.0,) * 4,
        "every rank has the first rank's amax": (2.0,) * 4,
        "every rank has the last rank's amax": (4.0,) * 4,
        "only the first rank has the largest amax": (8.0, *amaxes[1:]),
        "a rank has the largest amax of those before it": (2.0, 8.0, 8.0, 8.0),
        "pairs of ranks have the amax of the pair, not of all": (8.0, 8.0, 4.0, 4.0),
        "every other rank has the same amax, not all": (2.0, 8.0, 2.0, 8.0),
        "a rank has its neighbor's amax": (4.0, 2.0, 8.0, 1.0),
        "a rank has its other neighbor's amax": (8.0, 1.0, 4.0, 2.0),
    }.items():
        if values == [collective.scaled_amax(amax) for amax in each]:
            return words
    return ""


def _simpler(case: Case) -> Iterator[Case]:
    """Cases with a rank, a microbatch, a row or a column less; then with simpler numbers."""
    for i, rank in enumerate(case):
        yield case[:i] + case[i + 1 :]
        for j, batch in enumerate(rank):
            yield (*case[:i], rank[:j] + rank[j + 1 :], *case[i + 1 :])
            for k in range(len(batch)):
                yield _with(case, i, j, batch[:k] + batch[k + 1 :])
    for k in range(min(len(batch) for rank in case for batch in rank)):
        shorter = [[b[:k] + b[k + 1 :] for b in rank] for rank in case]
        yield tuple(map(tuple, shorter))
    lengths = [len(row) for rank in case for batch in rank for row in batch]
    columns = max(lengths, default=0)
    if columns > 1:
        for c in range(columns):
            yield tuple(
                tuple(tuple(row[:c] + row[c + 1 :] for row in batch) for batch in rank)
                for rank in case
            )
    plain = (1.0, 2.0, 4.0)
    for i, rank in enumerate(case):
        for j, batch in enumerate(rank):
            for k, row in enumerate(batch):
                for c, value in enumerate(row):
                    for number in plain[: plain.index(value)] if value in plain else plain:
                        simpler = (*row[:c], number, *row[c + 1 :])
                        batches = (*batch[:k], simpler, *batch[k + 1 :])
                        yield _with(case, i, j, batches)


def _with(case: Case, i: int, j: int, batch: tuple) -> Case:
    """The case with another microbatch j on rank i."""
    return (*case[:i], (*case[i][:j], batch, *case[i][j + 1 :]), *case[i + 1 :])
