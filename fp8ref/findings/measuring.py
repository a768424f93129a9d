"""Measure claims, seed after seed: a pilot first, whose spread says how many seeds follow.

Every trial is kept when it ends, so that a measurement that was stopped goes on where it was.
"""

import concurrent.futures
import dataclasses
import hashlib
import inspect
import json
import math
import multiprocessing
import numbers
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8ref.findings.claim import (
    FEWEST,
    PILOT,
    Claim,
    Sample,
    Trial,
    Verdict,
    interval,
    kept,
    replaced,
)
from fp8ref.findings.registry import CLAIMS, measure_of
from fp8ref.shared import console as consoles
from fp8ref.shared import extras
from fp8ref.shared.errors import ConfigError, require
from fp8ref.shared.result import Result
from fp8ref.train.experiments import sweep
from fp8ref.train.run import log

if TYPE_CHECKING:
    from rich.console import Console

RECORDED = Path(__file__).with_name("recorded.json")
"""What ``make findings`` measured, kept with the package."""

FIRST_OF_PILOT = 1_000
"""Seeds of pilots begin here; those of measurements at 0."""


@dataclass(frozen=True, kw_only=True)
class Finding(Result):
    """What was measured of a claim.

    pilot, samples   of the pilot's seeds, and of those that count.
    seconds          of all trials. about: the machine, versions of packages and the commit.
    """

    claim: Claim
    pilot: Sequence[Sample]
    samples: Sequence[Sample]
    seconds: float
    about: Mapping[str, str]

    @property
    def interval(self) -> tuple[float, float, float]:
        """(mean, low, high) of the figure over seeds."""
        return interval([sample.figure for sample in self.samples])

    @property
    def verdict(self) -> Verdict:
        """What the interval says of the claim."""
        return self.claim.verdict(*self.interval[1:])

    @property
    def ok(self) -> bool:
        """Always: a claim that is not reproduced is a result too."""
        return True

    def written(self, text: str) -> str:
        """A text of the claim with {mean}, {low}, {high} and {seeds}."""
        mean, low, high = map(self.claim.form.format, self.interval)
        return text.format(mean=mean, low=low, high=high, seeds=len(self.samples))

    def quote(self) -> str:
        """The sentence of the claim for its verdict, with the figures."""
        numbers = "{mean} [{low}, {high}], {seeds} seeds"
        claim, verdict = self.claim.claim, self.verdict.capitalize()
        plain = f"{claim} {verdict}: {self.claim.figure}: {numbers}."
        return self.written(self.claim.quotes.get(self.verdict, plain))

    def power(self) -> str:
        """How many seeds the pilot asked for, and what would decide where these did not."""
        figures = [sample.figure for sample in self.pilot]
        needed, count = self.claim.seeds_needed(figures), len(self.samples)
        seeds = "over 1,000 seeds" if needed is None else f"{needed} seeds"
        text = f"By the spread of {len(figures)} pilot seeds, {seeds} decide; {count}"
        bounds = {FEWEST: ", the least,", self.claim.most: ", the most that the page allows,"}
        text += f"{bounds.get(count, '') * (count != needed)} were measured."
        left = self.claim.seeds_needed([sample.figure for sample in self.samples])
        if self.verdict == "cannot tell":
            more = "over 1,000" if left is None else f"about {left}"
            text += f" By their own spread it takes {more} at this size."
        if self.verdict != "reproduced" and self.claim.decides:
            text += f" What would decide: {self.claim.decides}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Figures, verdict and samples."""
        mean, low, high = self.interval
        return {
            "verdict": self.verdict,
            "mean": mean,
            "low": low,
            "high": high,
            "seconds": round(self.seconds, 1),
            "about": dict(self.about),
            "pilot": [dataclasses.asdict(sample) for sample in self.pilot],
            "samples": [dataclasses.asdict(sample) for sample in self.samples],
        }

    def render(self, console: "Console") -> None:
        """The claim, the figure and the verdict."""
        claim = self.claim
        mean, low, high = map(claim.form.format, self.interval)
        need = claim.form.format(claim.above + claim.margin)
        before = recorded().get(claim.name)
        lines = {
            "claim": claim.claim,
            "source": claim.source,
            "paper": claim.paper,
            "measured": f"{claim.figure}: {mean} [{low}, {high}]; the claim needs above {need}",
            "verdict": self.verdict,
            "recorded": before and f"{claim.form.format(before.interval[0])}, {before.verdict}",
            "quote": self.quote(),
            "seeds": self.power(),
            "not shown": claim.limits,
        }
        for key, text in lines.items():
            if text:
                console.print(f"{key:10}{text}", highlight=False, markup=False)


@dataclass(frozen=True)
class Findings(Result):
    """Findings by claim. Printed, a line for every claim there is."""

    findings: Mapping[str, Finding]
    ok: bool = True

    def to_dict(self) -> dict[str, Any]:
        """{claim: figures, verdict and samples}."""
        return {name: finding.to_dict() for name, finding in self.findings.items()}

    def render(self, console: "Console") -> None:
        """A table: claim, figure with its interval, verdict and seconds."""
        table = consoles.table("claim", "topic", "figure", "verdict", ">seconds")
        for name, claim in CLAIMS.items():
            row = ["", "not measured yet", ""]
            if finding := self.findings.get(name):
                mean, low, high = map(claim.form.format, finding.interval)
                seconds = f"{finding.seconds:.0f}"
                row = [f"{mean} [{low}, {high}]", finding.verdict, seconds]
            table.add_row(name, claim.topic, *row)
        console.print(table)


def from_dict(claim: Claim, written: Mapping[str, Any]) -> Finding:
    """What ``Finding.to_dict`` wrote."""
    pilot, samples = (
        [Sample(figure=one["figure"], lines=one["lines"]) for one in written[key]]
        for key in ("pilot", "samples")
    )
    seconds, about = written["seconds"], written["about"]
    return Finding(claim=claim, pilot=pilot, samples=samples, seconds=seconds, about=about)


def recorded() -> dict[str, Finding]:
    """{claim: what ``make findings`` measured of it}."""
    all_of = kept(RECORDED, dict, "Install fp8ref again.") if RECORDED.exists() else {}
    return {name: from_dict(CLAIMS[name], all_of[name]) for name in CLAIMS if name in all_of}


def measure(
    claim: Claim,
    folder: str | Path,
    advance: Callable[..., None] | None = None,
    *,
    function: Callable[[Trial], Sample] | None = None,
) -> Finding:
    """Measure a claim, or what is left of it.

    folder    keeps every trial, and losses of training runs, apart for each state of the code.
    advance   is told of every trial that ended.
    function  measures a claim of your own: of a file or a notebook, which has its source. None:
              the one of a claim of ``CLAIMS``, or of a claim with arms.
    Raises:   what a trial raises; those before it are kept. ConfigError: a file that is damaged.
              ValueError: a function without source, or of what is no finite figure with lines.
    """
    trial_of, code = function or measure_of(claim), _code(claim, function)
    place = Path(folder, code)
    path, about = place / f"{claim.name}.json", _about() | {"code": code}
    trials = _trials(path)
    for seed in _seeds(claim, trials):
        if str(seed) not in trials:
            begin = time.perf_counter()
            sample = trial_of(Trial(seed=seed, folder=place, arms=claim.arms))
            measured = {"seconds": time.perf_counter() - begin, "about": about}
            trials[str(seed)] = _checked(claim, seed, sample) | measured
            with replaced(path) as part:
                part.write_text(json.dumps({"trials": trials}))
        if advance is not None:
            advance(f"seed {seed}: {claim.form.format(trials[str(seed)]['figure'])}")
    samples = {int(seed): Sample(one["figure"], one["lines"]) for seed, one in trials.items()}
    return Finding(
        claim=claim,
        pilot=[samples[seed] for seed in sorted(samples) if seed >= FIRST_OF_PILOT],
        samples=[samples[seed] for seed in sorted(samples) if seed < FIRST_OF_PILOT],
        seconds=sum(one["seconds"] for one in trials.values()),
        about=next(reversed(trials.values()))["about"],
    )


def _trials(path: Path) -> dict[str, Any]:
    """{seed: what was kept of its trial}, of a file that may not be there yet."""
    trials = kept(path, dict).get("trials") if path.exists() else {}
    rows = trials.values() if isinstance(trials, dict) else [trials]
    keys = {"figure", "lines", "seconds", "about"}
    fits = all(isinstance(row, dict) and keys <= row.keys() for row in rows)
    damaged = f"{path} holds trials of a finding; it is damaged. Delete it."
    require(fits, damaged, ConfigError)
    return dict(trials or {})


def _checked(claim: Claim, seed: int, sample: Any) -> dict[str, Any]:
    """A sample as it is kept; ValueError where it cannot be judged or drawn."""
    real = isinstance(sample, Sample) and isinstance(sample.figure, numbers.Real)
    text = f"{claim.name} is measured as Sample(figure, lines), of a number and a dict; got"
    require(real and isinstance(sample.lines, dict), f"{text} {sample!r}. Return one.")
    sizes = {len(line) for line in sample.lines.values()} - {len(claim.places)}
    text = f"each line of {claim.name} has a number for every x, {len(claim.places)}"
    require(not sizes, f"{text}; got {sizes}. Name as many x in the claim.")
    finite = math.isfinite(sample.figure)
    require(finite, f"the figure of {claim.name} is finite; seed {seed}: {sample.figure}.")
    lines = {label: [*map(float, line)] for label, line in sample.lines.items()}
    return {"figure": float(sample.figure), "lines": lines}


def _seeds(claim: Claim, trials: Mapping[str, Mapping[str, Any]]) -> Iterator[int]:
    """The pilot's seeds, and then as many as their trials ask for."""
    pilot = range(FIRST_OF_PILOT, FIRST_OF_PILOT + PILOT)
    yield from pilot
    yield from range(claim.seeds([trials[str(seed)]["figure"] for seed in pilot]))


def _code(claim: Claim, function: Callable[[Trial], Sample] | None) -> str:
    """A name of the code that measures: of all of the package; and of a function outside it, or of
    a claim's arms and x. Trials of other code are kept apart, so that what it measured does not
    count.
    """
    package = Path(__file__).parents[1]
    paths = sorted((*package.rglob("*.py"), *package.rglob("*.toml")))  # tables are code too
    texts = [path.read_bytes() for path in paths]
    try:
        own = inspect.getsource(function).encode() if function else b""
    except (OSError, TypeError) as error:
        raise ConfigError(
            "the source of a function names what it measured, so it is a def of a file or of a "
            f"notebook; got {function!r}. Write it there."
        ) from error
    if CLAIMS.get(claim.name) != claim:
        own += repr((claim.arms, claim.x)).encode()
    return hashlib.sha256(b"".join([*texts, own])).hexdigest()[:12]


def _about() -> dict[str, str]:
    """Where and by which code something is measured."""
    root = Path(__file__).parents[2]
    words = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    commit = {}
    if (root / ".git").exists():
        answer = subprocess.run(words, capture_output=True, text=True, check=False)
        commit = {"commit": answer.stdout.strip()} if answer.returncode == 0 else {}
    python = {"machine": platform.platform(), "python": platform.python_version()}
    return python | extras.versions("fp8ref", *log.PACKAGES[:3], "torch", "torchao") | commit


def measure_all(names: Sequence[str], folder: Path, jobs: int = 1) -> dict[str, Finding]:
    """Measure several claims, ``jobs`` at a time, each in a process with its share of the cores.

    Raises:   as ``measure``, of the first that failed, after the others have ended.
    """
    if len(names) == 1:
        claim = CLAIMS[names[0]]
        with consoles.bar(claim.name, None) as advance:
            return {claim.name: measure(claim, folder, advance)}
    cores = str(max(1, (os.cpu_count() or 1) // jobs))
    context = multiprocessing.get_context("spawn")  # no fork: torch and XLA have threads
    with (
        concurrent.futures.ProcessPoolExecutor(
            jobs, mp_context=context, initializer=_start, initargs=(cores,)
        ) as pool,
        consoles.bar("findings", len(names)) as advance,
    ):
        waiting = {pool.submit(_one, name, str(folder)): name for name in names}
        for done in concurrent.futures.as_completed(waiting):
            advance(f"{waiting[done]}: {done.result()}")
            consoles.say(f"{waiting[done]}: {done.result()}")
    return {name: measure(CLAIMS[name], folder) for name in names}


def _start(cores: str) -> None:
    """Begin a process of the pool, which ends with its parent."""
    os.environ["OMP_NUM_THREADS"] = cores
    sweep.follow_parent()


def _one(name: str, folder: str) -> str:
    finding = measure(CLAIMS[name], Path(folder))
    mean, low, high = map(finding.claim.form.format, finding.interval)
    return f"{mean} [{low}, {high}], {finding.verdict}, {finding.seconds:.0f} s"
