"""Compare two runs: config, versions, and whether losses differ beyond noise (SEMANTICS E-6)."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from fp8ref.errors import ConfigError
from fp8ref.result import Result
from fp8ref.train import config as configs
from fp8ref.train.report import runs, seed_noise
from fp8ref.train.report.runs import Run

METRICS = ("loss", "grad_norm", "val_loss")
"""The metrics of which two identical runs have equal bits."""

LossVerdict = Literal["identical", "within noise", "outside noise"]
"""Whether losses are equal bit for bit, differ by no more than noise, or by more (E-6)."""

By = Literal["bits", "end", "seeds", "steps"]
"""The criterion of a verdict: equal bits, how runs end, the spread of seeds, or the noise of
steps."""


@dataclass(frozen=True, kw_only=True)
class Comparison(Result):
    """The result of ``compare``.

    settings, versions: {dotted key: (A's value, B's value)} where they differ.

    noise       the criterion: equal ``bits``; how the runs ``end``; the spread of ``seeds``; the
                noise of ``steps``.
    difference  B's loss minus A's, the mean over the last window; None if a run diverged.
    low, high   the interval without significance. Under ``seeds`` it is an interval about 0 that
                must hold the difference; under ``steps`` it is the difference's confidence
                interval, which must hold 0.
    """

    a: str
    b: str
    settings: dict[str, tuple]
    versions: dict[str, tuple]
    steps: int
    result: LossVerdict
    noise: By
    difference: float | None
    low: float | None
    high: float | None
    said: str

    @property
    def ok(self) -> bool:
        """Whether the losses differ by no more than noise."""
        return self.result != "outside noise"

    def to_dict(self) -> dict:
        """ok and the fields."""
        return {"ok": self.ok, **asdict(self)}

    def render(self, console: Console) -> None:
        """Print the differences in config and versions, and the verdict on the losses."""
        for title, found in (("config", self.settings), ("versions", self.versions)):
            if not found:
                console.print(f"{title}: no difference")
                continue
            table = Table(title, self.a, self.b)
            for key, values in found.items():
                table.add_row(key, *("-" if value is None else json.dumps(value) for value in values))
            console.print(table, markup=False)
        console.print(self.said, markup=False, highlight=False, soft_wrap=True)


def compare(a: Run, b: Run, seeds: Sequence[Run] = (), *, confidence: float = seed_noise.CONFIDENCE) -> Comparison:
    """Compare B with A.

    seeds     bf16 runs whose spread limits the difference. A or B may be among them, which makes
              the test milder.
    Raises:   ConfigError: the losses are not comparable: another text; fewer than 5 common steps;
              different seeds without ``seeds``; ``seeds`` of another model.
    """
    settings, versions = configs.differences(a.settings, b.settings), configs.differences(a.versions, b.versions)
    for key in ("data.sequence_length", "text"):
        if key in settings:
            raise ConfigError(
                f"losses are compared on one text; {key} is {settings[key][0]!r} in {a.name} and {settings[key][1]!r} in {b.name}."
            )
    chosen = _chosen(a, b, seeds)
    steps = runs.common_steps([a, b, *chosen])
    difference: float | None
    low: float | None
    high: float | None
    result: LossVerdict
    by: By
    if all(a.curve(key) == b.curve(key) for key in METRICS) and bool(a.diverged) == bool(b.diverged):
        result, by, difference, low, high = "identical", "bits", 0.0, 0.0, 0.0
        steps = runs.common_steps([a, b])
        said = f"identical: {', '.join(METRICS)} of all {len(steps)} steps, bit for bit"
        said += f"; both ended with {_end(a)}" if a.diverged else ""
    elif a.diverged or b.diverged:
        result, by, difference, low, high = "outside noise", "end", None, None, None
        said = f"{result}: " + "; ".join(f"{run.name} ended by {_end(run)}" for run in (a, b) if run.diverged)
    else:
        result, by, difference, low, high, said = _by_losses(a, b, chosen, steps, confidence)
    return Comparison(
        a=a.name,
        b=b.name,
        settings=settings,
        versions=versions,
        steps=len(steps),
        result=result,
        noise=by,
        difference=difference,
        low=low,
        high=high,
        said=said,
    )


def _by_losses(
    a: Run, b: Run, chosen: Sequence[Run], steps: np.ndarray, confidence: float
) -> tuple[LossVerdict, By, float, float, float, str]:
    """(result, noise, difference, low, high, sentence) of two runs that did not diverge."""
    width = seed_noise.window(len(steps))
    if len(steps) < width:
        who = "A, B and --seeds" if chosen else f"{a.name} and {b.name}"
        raise ConfigError(
            f"{who} have {len(steps)} steps in common, and {seed_noise.BATCHES} are needed. "
            "Leave the shortest out, or continue its training."
        )
    gap = seed_noise.gap(runs.at(b.losses, steps) - runs.at(a.losses, steps), width, confidence=confidence)
    difference = float(gap.mean[-1])
    result: LossVerdict
    by: By
    if chosen:
        last = np.stack([runs.at(run.losses, steps) for run in chosen])[:, -width:].mean(axis=1, keepdims=True)
        high = float(seed_noise.limit(last, confidence=confidence)[0])  # the report's one-sided limit, used on both sides
        by, low, result = "seeds", -high, "within noise" if abs(difference) <= high else "outside noise"
        said = f"two bf16 runs of different seeds rarely differ by more than {high:.4f} (from {len(chosen)} runs)"
    elif a.seeds == b.seeds:
        by, low, high = "steps", float(gap.low[-1]), float(gap.high[-1])
        result = "within noise" if low <= 0 <= high else "outside noise"
        said = f"from these steps alone, the difference is between {low:+.4f} and {high:+.4f}"
        said += "" if result == "within noise" else "; --seeds RUN... shows whether another seed makes as much difference"
    else:
        raise ConfigError(
            f"{a.name} has seeds {a.seeds} and {b.name} {b.seeds}: two runs do not show how a "
            "loss varies with its seeds. Give --seeds and two or more bf16 runs of different "
            "seeds."
        )
    said = f"{result}: the loss of {b.name} is {difference:+.4f} from that of {a.name}, over the last {width} of {len(steps)} steps; {said}"
    for run in (a, b):
        said += "" if run.finished else f"; {run.name} is not finished, but {run.manifest['status']}"
    return result, by, difference, low, high, said


def _end(run: Run) -> str:
    return run.diverged.rstrip(".")


def _chosen(a: Run, b: Run, seeds: Sequence[Run]) -> list[Run]:
    """The first of ``seeds`` for each (run.seed, data.seed).

    Repeated seeds are no new observations.
    """
    for run in seeds:
        unlike = min((configs.differences(other.reference, run.reference) for other in (a, b)), key=len)
        if unlike or not run.bf16:
            what = next(iter(unlike), "numerics.recipe")
            raise ConfigError(f"--seeds takes bf16 runs that differ from A or B in seeds and numerics alone; {run.name} differs in {what}.")
        if not run.finished:
            raise ConfigError(
                f"--seeds takes runs that are finished (E-1); {run.name} is {run.manifest['status']}. Train it to its end, or leave it out."
            )
    chosen = list({run.seeds: run for run in reversed(seeds)}.values())
    if len(chosen) == 1:
        raise ConfigError(f"--seeds takes 2 or more bf16 runs of different seeds; got {len(seeds)} of one. Train more.")
    return chosen
