"""An invariant as data, and the search for inputs that break it.

broken(my_scale, SCALES)                # {name: the simplest inputs found that break it}
require_invariants(my_scale, SCALES)    # in a test
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fp8ref.conformance.strategies import hypothesis, repeatable, st
from fp8ref.formats import E4M3FN, Format

_Check = TypeVar("_Check", bound=Callable[[Any, Format, Any], str])


@dataclass(frozen=True, kw_only=True)
class Invariant:
    """A property of any implementation of one kind.

    name, words  what holds; clause: that states it, with its domain.
    inputs       (fmt) -> a strategy of the inputs.
    check        (implementation, fmt, inputs) -> "" if it holds, else what was found.
    """

    name: str
    words: str
    clause: str
    inputs: Callable[[Format], Any]
    check: Callable[[Any, Format, Any], str]


class Clause(list[Invariant]):
    """The invariants that a clause states: a decorator of their checks adds them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def states(self, words: str, inputs: Any) -> Callable[[_Check], _Check]:
        """An invariant of a check's name, in words; inputs: a strategy, or one for each format."""
        by_format = inputs if callable(inputs) else lambda fmt: inputs

        def add(check: _Check) -> _Check:
            name = check.__name__.removeprefix("_")
            invariant = Invariant(
                name=name, words=words, clause=self.name, inputs=by_format, check=check
            )
            self.append(invariant)
            return check

        return add


def broken(
    implementation: Any,
    invariants: Iterable[Invariant],
    fmt: Format = E4M3FN,
    *,
    without: Collection[str] = (),
    examples: int = 60,
) -> dict[str, str]:
    """{name of each invariant that an implementation breaks: the simplest inputs found, and its
    clause}. What it raises breaks an invariant too.

    Raises:   ValueError: ``without`` has a name that no invariant has.
    """
    listed = list(invariants)
    if unknown := sorted(set(without) - {one.name for one in listed}):
        raise ValueError(
            f"without names invariants, of {', '.join(one.name for one in listed)}; got "
            f"{', '.join(unknown)}."
        )
    counterexamples = {
        one.name: _counterexample(implementation, one, fmt, examples)
        for one in listed
        if one.name not in without
    }
    return {name: text for name, text in counterexamples.items() if text}


def require_invariants(
    implementation: Any,
    invariants: Iterable[Invariant],
    fmt: Format = E4M3FN,
    *,
    without: Collection[str] = (),
    examples: int = 60,
) -> None:
    """Require that an implementation keeps every invariant, else raise an AssertionError that names
    those it breaks. Raises also as ``broken``."""
    counterexamples = broken(implementation, invariants, fmt, without=without, examples=examples)
    if counterexamples:
        name = getattr(implementation, "__name__", "the implementation")
        lines = [f"  {key}: {text}" for key, text in counterexamples.items()]
        raise AssertionError("\n".join([f"{name} breaks:", *lines]))


def _counterexample(implementation: Any, invariant: Invariant, fmt: Format, examples: int) -> str:
    """The simplest inputs found that break an invariant, in words; "" if none do."""
    last = ""

    @repeatable(examples, hypothesis.Phase.generate, hypothesis.Phase.shrink)
    @hypothesis.given(invariant.inputs(fmt))
    def holds(inputs: Any) -> None:
        nonlocal last
        try:
            with np.errstate(all="ignore"):
                failure = invariant.check(implementation, fmt, inputs)
        except Exception as error:  # anything that somebody's code raises is its answer
            failure = f"it raises {type(error).__name__}: {error}".splitlines()[0]
        if failure:
            last = f"{failure} ({invariant.clause})"
            raise _BrokenError

    try:
        holds()
    except _BrokenError:
        return last
    return ""


class _BrokenError(Exception):
    """Inputs that break an invariant, for hypothesis to make simpler."""


def significands(low: int, high: int) -> st.SearchStrategy[float]:
    """Positive float32 numbers in [2^low, 2^(high + 1)), which shrink to short ones near 2^0."""
    short = st.integers(0, 7).map(lambda n: 1 + n / 8)
    long = st.integers(0, (1 << 23) - 1).map(lambda n: 1 + n / (1 << 23))
    if low > 0:
        exponents = st.integers(low, high)
    else:
        exponents = st.integers(0, high - low).map(lambda n: n if n <= high else high - n)
    return st.tuples(st.one_of(short, long), exponents).map(
        lambda pair: float(np.ldexp(np.float64(pair[0]), pair[1]))
    )


def tensors(shape: tuple[int, int]) -> st.SearchStrategy[np.ndarray]:
    """float32 tensors: a largest magnitude from 2^-30 to 2^30 in every row, and others from 2^-12
    of it to it, of either sign, or 0."""
    rows, columns = shape
    element = st.one_of(st.just(0.0), st.integers(-(1 << 12), 1 << 12).map(lambda n: n / (1 << 12)))
    elements = st.lists(element, min_size=rows * columns, max_size=rows * columns)

    def tensor(drawn: tuple[list[float], float, list[int]]) -> np.ndarray:
        x = np.array(drawn[0], np.float32).reshape(shape) * np.float32(drawn[1])
        for row, place in enumerate(drawn[2]):
            x[row, place] = np.float32(drawn[1]) * np.float32(-1 if row % 2 else 1)
        return x

    return st.tuples(
        elements,
        significands(-30, 30),
        st.lists(st.integers(0, columns - 1), min_size=rows, max_size=rows),
    ).map(tensor)


def text(x: Any) -> str:
    """Numbers, exactly."""
    values = np.asarray(x)
    if values.ndim == 0:
        return f"{float(values):.9g}"
    return str([text(v) for v in values]).replace("'", "")
