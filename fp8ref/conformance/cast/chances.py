"""How often a cast rounds away from zero: the same numbers between neighbours, many times."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fp8ref.conformance.cast import behaviour, outputs
from fp8ref.conformance.cast.behaviour import KNOWN
from fp8ref.conformance.cast.decisions import Answers
from fp8ref.conformance.counterexample import Witness, bits_of, rounded, show
from fp8ref.conformance.inputs import cast_inputs
from fp8ref.conformance.subject import Subject
from fp8ref.formats import Format

REPEATED = 1 << 12
FRACTIONS = (1 / 16, 1 / 4, 1 / 2, 3 / 4, 15 / 16)
RARELY = 2.0**-8  # a sixteenth of the least of them


@dataclass(frozen=True, kw_only=True, eq=False)
class Chances:
    """Numbers x [n] at fractions [n] of the way from a number of the format to the next away from zero, and the answers to each, REPEATED times."""

    x: np.ndarray
    fractions: np.ndarray
    answers: Answers  # [n * REPEATED]

    @cached_property
    def away(self) -> np.ndarray:
        """The share [n] of the answers that are the neighbour away from zero."""
        return (self.answers.codes.reshape(-1, REPEATED) == self.neighbours[:, None]).mean(axis=1)

    @property
    def neighbours(self) -> np.ndarray:
        fmt = self.answers.fmt
        return behaviour.encode(self.x, fmt, dataclasses.replace(KNOWN["saturating"].of(fmt), rounding="away_from_zero"))

    @property
    def random(self) -> np.ndarray:
        """Where both neighbours are given, and neither hardly ever."""
        return np.minimum(self.away, 1 - self.away) >= RARELY

    @property
    def depart(self) -> np.ndarray:
        """Where the share is not the fraction (C-2).

        Of REPEATED independent choices its standard deviation is sqrt(f (1 - f) / REPEATED). Beyond five of them at one of 40 fractions is, by
        the binomial distribution, one such cast in 36,000.
        """
        return np.abs(self.away - self.fractions) > 5 * np.sqrt(self.fractions * (1 - self.fractions) / REPEATED)

    def witness(self, at: int, expected: str) -> Witness:
        a = self.answers
        return Witness(
            input=f"{show(self.x[at])}, {REPEATED} times", bits=(bits_of(self.x[at], a.source),), dtype=a.source,
            got=f"{said(self.neighbours[at], a)} {self.away[at]:.3f} of the time", expected=expected, clause="C-2",
        )  # fmt: skip


def of(subject: Subject, source: str, fmt: Format) -> Chances:
    """Both signs, between neighbours of which the lower is zero, the smallest number, 1, or 12, which every format has."""
    n = cast_inputs.with_next(fmt)
    at = np.searchsorted(n, (0, fmt.smallest_subnormal, 1, 12))
    x = (n[at, None] + (n[at + 1] - n[at])[:, None] * np.array(FRACTIONS)).ravel()
    x, fractions = np.concatenate([x, -x]), np.tile(FRACTIONS, 2 * at.size)
    exact = rounded(x, source) == x
    x = rounded(x[exact], source)
    return Chances(x=x, fractions=fractions[exact], answers=ask(subject, x, REPEATED, source, fmt))


def ask(subject: Subject, x: np.ndarray, times: int, source: str, fmt: Format) -> Answers:
    """Each of x [n] so many times in a row; answers [n * times]."""
    asked = np.repeat(x, times)
    reply = outputs.ask(subject, asked, source)
    return Answers(x=asked, source=source, reply=reply, fmt=fmt, codes=reply.codes(fmt))


def said(code: int, a: Answers) -> str:
    """A code and its value, or the value alone of what gives values."""
    shown = outputs.code_said(code, a.fmt)
    return shown.partition(" = ")[2] if a.reply.values_only else shown
