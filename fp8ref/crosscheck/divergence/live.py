"""Find the first divergence of two trainings, live (spec B-10).

Both are trained side by side from one state. After every step their loss, gradient norm, weights,
moments and states of scaling are compared, which costs no more than reading them. After the first
step that leaves a difference, both return to where they began and train up to that step again. Then
they show it value by value (``step_values``) and take it.

A fault that leaves no trace in a step's result is not found: a scale of half the size, for example,
if all sums are exact. ``from_runs`` compares runs on disk.
"""

import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fp8ref.conformance.kit.compare import Report
from fp8ref.crosscheck import one_device
from fp8ref.crosscheck.divergence import step_values
from fp8ref.crosscheck.divergence.difference import Difference, difference
from fp8ref.crosscheck.divergence.explain import REASONS, Context, explain
from fp8ref.crosscheck.divergence.report import Divergence, DivergenceReport, Reason, located
from fp8ref.crosscheck.divergence.step_values import Value
from fp8ref.crosscheck.operands import recipes_of
from fp8ref.shared import console
from fp8ref.shared.errors import ConfigError
from fp8ref.sim import delayed
from fp8ref.train import loop
from fp8ref.train.config import architecture, hardware
from fp8ref.train.config.config import Config
from fp8ref.train.data import loader
from fp8ref.train.data.loader import Batches

__all__ = ["check_alone", "compare_backends"]

Metrics = Mapping[str, float]  # the metrics of a step, by name


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two trainings: A or B."""

    name: str
    config: Config
    trainer: loop.Trainer
    batches: Batches


def compare_backends(
    config: Config, a: str, b: str, *, steps: int = one_device.STEPS
) -> DivergenceReport:
    """Train a config in two backends, or twice in one, from its initial weights.

    Raises:   ConfigError: data too short, an unknown backend, several devices; ImportError: a
              backend that is not installed.
    """
    check_alone(config, "the config")
    if not 1 <= steps <= config.run.steps:
        raise ConfigError(
            "--steps of --first-divergence must be between 1 and run.steps = "
            f"{config.run.steps}; got {steps}."
        )
    batches = loader.open_batches(config)
    names = (a, b) if a != b else (f"{a} (first)", f"{b} (second)")
    sides = [
        Side(name=name, config=config, trainer=loop.trainer(backend, config), batches=batches)
        for name, backend in zip(names, (a, b), strict=True)
    ]
    report = Report()
    with console.bar(f"first divergence {config.numerics.recipe}", steps) as advance:
        first = find_divergence(sides[0], sides[1], report, start=0, stop=steps, advance=advance)
    return DivergenceReport(
        names=names,
        settings={},
        versions={},
        start=0,
        steps=steps if first is None else first.step + 1,
        first=first,
        report=report,
        notes=parts_of(config),
    )


def check_alone(config: Config, whose: str) -> None:
    """Check that training was on one device, which cannot repeat several's sums, and in one recipe.

    Raises:   ConfigError: several devices; a schedule; a user's model; experts, routed by side.
    """
    architecture.require_llama(config, f"--first-divergence of {whose}")
    what = f"--first-divergence, of {whose},"
    config.require_one_recipe(what)
    config.require_no_experts(what)
    config.require_tiles(what)
    if config.parallel.devices > 1:
        raise ConfigError(
            f"--first-divergence trains on one device; {whose} has parallel.* for "
            f"{config.parallel.devices} devices, and one device does not repeat their sums "
            "(K-2). Compare losses with fp8ref compare, or meshes with fp8ref crosscheck "
            "--sharded."
        )


def parts_of(*configs: Config) -> list[str]:
    """The report's note if batches are split into microbatches, whose operands are not observed."""
    if all(config.data.microbatches == 1 for config in configs):
        return []
    return [
        "operands of GEMMs, attention and logits are not observed with data.microbatches above "
        "1: only the batch, loss, gradients and states were compared"
    ]


def find_divergence(
    a: Side,
    b: Side,
    report: Report,
    *,
    start: int,
    stop: int,
    advance: Callable[..., None] = lambda *_: None,
    after: Callable[[int, Metrics, Metrics], None] = lambda *_: None,
) -> Divergence | None:
    """Train both from their state after ``start`` steps; the first difference before step ``stop``.

    after   is called with the metrics of every step that both took.
    """
    before = [
        step_values.state_values(side.trainer, side.config, "state before") for side in (a, b)
    ]
    if first := first_of(before[0], before[1], a.name, b.name, report):
        drawn = first[0].role == "master weight" and not start
        return located(start, *first, REASONS["initial weights" if drawn else "state"])
    with tempfile.TemporaryDirectory(prefix="fp8ref-") as folder:
        places = [Path(folder) / name for name in "ab"]
        for place, side in zip(places, (a, b), strict=True):
            side.trainer.save(place)()
        for step in range(start, stop):
            tokens = [side.batches.step(step) for side in (a, b)]
            batch = [[step_values.batch_value(t)] for t in tokens]
            if first := first_of(batch[0], batch[1], a.name, b.name, report):
                return located(step, *first, REASONS["tokens"])
            metrics = [side.trainer.step(t) for side, t in zip((a, b), tokens, strict=True)]
            after(step, metrics[0], metrics[1])
            # Cheap every step: what it leaves. Only the step that differs is looked at value by
            # value, by taking it again, since its operands are gone once the weights have changed.
            mine, theirs = (
                step_values.results(side.trainer, side.config, its)
                for side, its in zip((a, b), metrics, strict=True)
            )
            if first := first_of(mine, theirs, a.name, b.name, report):
                for place, side in zip(places, (a, b), strict=True):
                    side.trainer.load(place, start)
                    for again in range(start, step):
                        side.trainer.step(side.batches.step(again))
                v, d = first
                text = (
                    f"{v.layer}'s {v.role} differed after the step, but not when both repeated "
                    "the step from the same state: one of them is not deterministic"
                )
                unstable = located(step, v, d, Reason((), text))
                return _first_in_step(a, b, tokens[0], step, report) or unstable
            advance(f"step {step}")
    return None


def _first_in_step(
    a: Side, b: Side, tokens: np.ndarray, step: int, report: Report
) -> Divergence | None:
    """Take one step in both, compare all its values in order, and explain the first difference."""
    operands = not parts_of(a.config, b.config)
    recipes = [recipes_of(side.config) for side in (a, b)]
    kept = a.trainer.fp8_states()
    states = {name: delayed.DelayedState(*parts) for name, parts in kept.items()}
    sequences: list[list[Value]] = []
    for side, linear_recipes in zip((a, b), recipes, strict=True):
        shown = step_values.look(side.trainer, tokens, side.config, operands=operands)
        metrics = side.trainer.step(tokens)  # last: it changes the weights
        rate = side.config.optimizer.learning_rate_at(step, side.config.run.steps)
        values = step_values.ordered_values(
            shown, metrics, tokens, side.config, linear_recipes, rate
        )
        left = step_values.state_values(side.trainer, side.config, "optimizer")
        sequences.append([*values, *left])
    first = first_of(sequences[0], sequences[1], a.name, b.name, report)
    if first is None:
        return None
    v, d = first
    unobserved: set[str] = set()
    if v.phase == "forward":
        unobserved.update(*(step_values.unobserved(v.layer, side.config) for side in (a, b)))
    forward = [w for w in sequences[0] if w.phase == "forward"]
    context = Context(
        names=(a.name, b.name),
        recipes=(recipes[0], recipes[1]),
        states=states,
        model=a.config.model,
        outputs={w.layer: w.value for w in forward if w.role == "output"},
        unobserved=sorted(unobserved),
        multiply=(hardware.of(a.config), hardware.of(b.config)),
        numerics=(a.config.numerics, b.config.numerics),
    )
    other = {w.key: w for w in sequences[1]}.get(v.key)
    if other is None or v.key not in {w.key for w in sequences[0]}:
        if v.passes:
            return located(step, v, d, REASONS["attention"])
        # only one backend has this GEMM: report the GEMM, not the operand that is its first value
        whole = dataclasses.replace(v, role=v.gemm or v.role, observation=None)
        return located(step, whole, d, REASONS["absent"])
    return located(step, v, d, explain(v, other, d, context))


def first_of(
    mine: Iterable[Value], theirs: Iterable[Value], a: str, b: str, report: Report
) -> tuple[Value, Difference] | None:
    """The first of A's values that differs from B's, or is of a GEMM that only one of them has.

    States of delayed scaling that only one of them has are skipped: the GEMM that takes its scale
    from them is compared. The report counts all values up to the first that differs.
    """
    ours, others = list(mine), list(theirs)
    keys = [{v.key for v in values} for values in (ours, others)]
    ours, others = (
        [v for v in values if v.gemm or v.passes or v.key in other_keys]
        for values, other_keys in ((ours, keys[1]), (others, keys[0]))
    )
    suffix = f"{b}-{a}"
    for v, w in itertools.zip_longest(ours, others):
        if v is None or w is None or v.key != w.key:
            alone_in_a = w is None or (v is not None and v.key not in keys[1])
            lone = v if alone_in_a else w
            has = lone.cast.fmt.name if lone.cast else "there"
            in_a, in_b = (has, "not there") if alone_in_a else ("not there", has)
            report.check(f"{lone.name}/{suffix}").fail(f"{a} {in_a}, {b} {in_b}")
            size = lone.value.size
            return lone, Difference(element=None, a=in_a, b=in_b, differ=size, of=size)
        if first_difference := difference(v, w, report.check(f"{v.name}/{suffix}")):
            return v, first_difference
    return None
