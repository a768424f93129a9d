"""A claim about FP8 training: what is measured, and the verdict of an interval."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from fp8ref.shared import files
from fp8ref.shared.errors import ConfigError, require
from fp8ref.train.report import gap as gaps

_T = TypeVar("_T", dict, list)

Verdict = Literal["reproduced", "not reproduced", "cannot tell"]
"""What an interval says of a claim."""

PILOT = 3
"""Seeds of the pilot, whose spread says how many seeds the measurement takes."""

FEWEST = 5
"""Seeds of a measurement at least."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One measurement of a claim.

    seed     draws every tensor, initial weight and batch.
    folder   where losses of training runs are kept, so that claims share them.
    arms     of a claim about losses: {name: the run}.
    """

    seed: int
    folder: Path
    arms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def random(self, stream: int = 0) -> np.random.Generator:
        """Random numbers of this trial, others for each stream."""
        return np.random.default_rng([self.seed, stream])

    def normal(self, *shape: int, stream: int = 0) -> np.ndarray:
        """Standard normal numbers, float32."""
        return self.random(stream).standard_normal(shape, np.float32)


@dataclass(frozen=True)
class Sample:
    """What one trial measured: the figure that the claim is about, and lines of its picture, each
    with a number for every x of the claim.
    """

    figure: float
    lines: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What somebody says about FP8 training, and how it is measured.

    topic           the part of the page that it is in.
    claim, source   a sentence, and where it stands: authors, title, section or figure.
    paper           the absolute figures of the source, beside which ours are shown.
    figure, form    what is measured, with its unit; how a number of it is written.
    method          tensors, model, steps: what a trial does.
    above, margin   the claim says that the figure is above ``above``. An interval that is at most
                    ``margin`` above it is no effect.
    most            seeds that the time of ``make findings`` allows.
    limits          what the measurement does not show.
    decides         the size that would decide, where this one does not.
    quotes          {verdict: a sentence to quote, with {mean}, {low}, {high} of the figure}; for
                    others the claim, the verdict and the figure are one.
    thread, answers
                    an open question elsewhere, by its address; by verdict what to answer, as
                    quotes.
    x, axes         of the picture: values or names, and labels of x and y; log: scales of them.
    arms            of a claim about losses: {name: the run, as ``training.run_of`` reads it}. The
                    figure is the loss of the last, minus that of the one before.
    """

    name: str
    claim: str
    source: str
    figure: str
    method: str
    limits: str
    topic: str
    paper: str = ""
    form: str = "{:.3g}"
    above: float = 0.0
    margin: float = 0.0
    most: int = 8
    decides: str = ""
    quotes: Mapping[str, str] = field(default_factory=dict)
    thread: str = ""
    answers: Mapping[str, str] = field(default_factory=dict)
    x: Sequence[float | str] = ()
    axes: tuple[str, str] = ("", "")
    log: str = ""
    arms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def places(self) -> Sequence[float | str]:
        """What the picture's x are: ``x``, or the names of the arms."""
        return self.x or tuple(self.arms)

    def __post_init__(self) -> None:
        text = f"a claim's name is an identifier, which names its files; got {self.name!r}."
        require(self.name.isidentifier(), text)

    def verdict(self, low: float, high: float) -> Verdict:
        """Of an interval: wholly above the threshold and margin, wholly not, or neither."""
        if low > self.above + self.margin:
            return "reproduced"
        return "not reproduced" if high <= self.above + self.margin else "cannot tell"

    def seeds_needed(self, figures: Sequence[float]) -> int | None:
        """How many seeds make the interval leave out the threshold and margin, if mean and spread
        are those of some figures; None: over 1,000.
        """
        gap = gaps.matched(np.array(figures)[:, None] - self.above - self.margin).last
        return gaps.seeds_needed(gap, 0.0)

    def seeds(self, pilot: Sequence[float]) -> int:
        """How many seeds are measured after a pilot's figures."""
        return min(self.most, max(FEWEST, self.seeds_needed(pilot) or self.most))


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file of this process that becomes ``path`` at the end: other processes, and what is left
    after a stop, have all of it or none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{os.getpid()}-{path.name}")
    yield part
    os.replace(part, path)


def kept(path: Path, kind: type[_T], remedy: str = "Delete it.") -> _T:
    """What a file of trials holds, in JSON. ConfigError: it is damaged, or of another kind."""
    text = f"{path} holds what a finding measured; it is damaged"
    try:
        value = files.parse_json(files.read_bytes(path))
    except ValueError as error:
        raise ConfigError(f"{text} ({error}). {remedy}") from error
    require(isinstance(value, kind), f"{text}. {remedy}", ConfigError)
    return value


def interval(figures: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of Student's interval of 95 %."""
    gap = gaps.matched(np.array(figures)[:, None]).last
    return float(gap.mean), float(gap.low), float(gap.high)
