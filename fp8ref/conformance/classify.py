"""Classify a function as a cast, a quantizer or a GEMM, from its arguments and outputs."""

import inspect
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from fp8ref.conformance import subject as subjects
from fp8ref.conformance.quantizer.granularity import SHAPE
from fp8ref.conformance.subject import ConformanceError, RefusedError

Kind = Literal["cast", "quantizer", "gemm"]
"""What a function under test is."""

KINDS: tuple[Kind, ...] = ("cast", "quantizer", "gemm")
"""The values of ``Kind``."""


def kind_of(name: str, function: Callable[..., Any], *, framework: str | None = None, device: str = "cpu") -> Kind:
    """A GEMM takes two operands. In a cast no element changes another's code. Else a quantizer.

    Raises:   ValueError: as subjects.wrap.
    """
    if _operands(function) == 2:
        return "gemm"
    try:
        subject = subjects.wrap(name, function, framework=framework, device=device, shape=SHAPE)
    except RefusedError as error:
        try:
            subjects.wrap(name, function, framework=framework, device=device, shape=(16,))  # one that takes vectors alone, or nothing
        except RefusedError as other:
            raise RefusedError(f"{error}\n{other}") from other
        return "cast"
    x = np.resize(np.array([1, 1.5, -2, 0.5], np.float32), SHAPE)  # numbers of every format
    changed = x.copy()
    changed[0, 0] = 2.0**40  # an amax that changes every other code under a shared scale
    source = subjects.first_dtype(subject, SHAPE)
    try:
        before, after = (subjects.read_array(subject.ask(asked, source)) for asked in (x, changed))
    except ConformanceError:  # such as an object whose parts alone are arrays
        return "quantizer"
    if before is None or after is None or before[0].shape != SHAPE or after[0].shape != SHAPE:
        return "quantizer"  # identify_quantizer reports it if it is not valid
    again = subjects.read_array(subject.ask(x, source))  # a remembered amax shows a call later
    assert again is not None
    others = np.arange(x.size).reshape(SHAPE) > 0
    alone = all(np.array_equal(before[0][others], other[0][others]) for other in (after, again))
    return "cast" if alone else "quantizer"


def _operands(function: Callable[..., Any]) -> int:
    """How many arguments have no default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return 1
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
