"""A published claim, and how it is measured."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim and how it is measured.

    figure   what is measured, and its unit; form: how it is written.
    measure  gives the figure of a seed, from 0 on.
    above    the claim says that the figure is above it. margin: an interval within so much of it,
             and not above it, is no effect.
    """

    name: str
    claim: str
    source: str
    figure: str
    how: str
    measure: Callable[[int], float]
    form: str = "{:.3g}"
    above: float = 0.0
    margin: float = 0.0
    seeds: int = 8
