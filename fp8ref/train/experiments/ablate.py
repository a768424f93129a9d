"""Which layer, GEMM and role costs loss in FP8: one operand at a time, from a checkpoint (E-8).

    found = ablate(Path("runs/tiny-jax-tensorwise"), measurement=Measurement(steps=20))
    found.print()

An operand is a role of a GEMM in a group of linears, such as the grad_output of grad_weight in
layer 0; one of attention, such as P; or a stored state of AdamW, such as v. From bf16, one is cast
to FP8 as the recipe, variant or layout casts it, and all else is in high precision; from FP8, one
is in high precision, and all else is cast. All are keys of the config (R-8, E-9, O-1), which either
backend runs. The cost is the loss with the cast minus the loss without, on the same batches.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from fp8ref.selection import attention_casts
from fp8ref.selection import statistics as stats
from fp8ref.shared import console as consoles
from fp8ref.shared.errors import ConfigError
from fp8ref.shared.result import Result
from fp8ref.spec.attention import products as attention_products
from fp8ref.train.config import architecture
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.experiments import ablation_operands, ablation_start, variants
from fp8ref.train.experiments.ablation_operands import Operand, Studied, chosen
from fp8ref.train.experiments.ablation_start import Start
from fp8ref.train.report import gap as gaps

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Ablation", "Measurement", "ablate"]

Base = Literal["bf16", "fp8"]  # what all other operands are in


@dataclass(frozen=True, kw_only=True)
class Row:
    """What an operand's cast costs, in nats, with its interval; and its linears' worst statistics.

    cost: None if the loss was not finite; low and high are then None too.
    """

    operand: Operand
    cost: float | None
    low: float | None
    high: float | None
    sqnr: float | None
    underflow: float | None
    saturation: float | None

    @property
    def real(self) -> bool:
        """Whether the interval leaves out 0, or the loss was not finite."""
        return self.low is None or self.high is None or self.low > 0 or self.high < 0


@dataclass(frozen=True, kw_only=True)
class Ablation(Result):
    """All operands, the costliest first. baseline: the mean loss that they are compared with."""

    run: str
    backend: str
    recipe: str
    base: Base
    step: int
    steps: int
    samples: int
    confidence: float
    baseline: float
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """An ablation always is: it asks for nothing."""
        return True

    def to_dict(self) -> dict:
        """The fields; a row has its rank, layer group, gemm, role and linears."""
        rows = []
        for rank, row in enumerate(self.rows, 1):
            fields = asdict(row)
            rows.append({"rank": rank} | fields.pop("operand") | fields)
        return {"ok": True} | vars(self) | {"rows": rows}

    def render(self, console: "Console") -> None:
        """Print the table, and how to read it."""
        columns = (">rank", "layers", "GEMM", "role", ">cost, nats")
        interval = f">{self.confidence:.0%} interval"
        table = consoles.table(*columns, interval, ">SQNR, dB", ">underflow", ">saturated")
        for rank, row in enumerate(self.rows, 1):
            of, cost, interval = row.operand, "not finite", "-"
            if row.cost is not None:
                cost = f"{row.cost:+.5f}"
                interval = f"{row.low:+.5f} to {row.high:+.5f}"
            sqnr = "-" if row.sqnr is None else f"{row.sqnr:.1f}"
            shares = (
                "-" if share is None else f"{share:.2%}"
                for share in (row.underflow, row.saturation)
            )
            cells = str(rank), of.group, of.gemm, of.role, cost, interval, sqnr, *shares
            table.add_row(*cells, style="bold" if row.real else None)
        console.print(table)
        scope = f"over {self.samples} validation batches"
        if self.steps:
            scope = f"after {self.steps} steps, over {self.samples} orders of data"
        alone = "it alone is cast" if self.base == "bf16" else "it alone is not cast"
        real = sum(row.real for row in self.rows)
        text = (
            f"{self.run}, step {self.step}, {self.backend}, {self.recipe}: an operand's cost "
            f"is the loss with its cast minus that without, where {alone}; {scope}. The intervals "
            f"of {real} of {len(self.rows)} leave out 0. Loss with none changed: "
            f"{self.baseline:.4f}."
        )
        console.print(consoles.one_line(text), markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How a variant's loss is measured.

    steps       0: one forward pass of each validation batch, which has the operands of GEMM output,
                and of attention's forward pass, alone. Else train so many steps from the
                checkpoint, in each of ``seeds`` orders of data, and then validate.
    batches     validation batches.
    learning_rate
                of those steps; None: the run's peak, as at the end of a run nothing is learned that
                a cast could harm.
    """

    steps: int = 0
    seeds: int = 3
    batches: int = 8
    learning_rate: float | None = None


FORWARD_PASSES = Measurement()  # one forward pass of each of 8 validation batches


def ablate(
    run: Path | Start,
    studied: Studied = ablation_operands.EVERYTHING,
    measurement: Measurement = FORWARD_PASSES,
    *,
    out: Path | None = None,
    recipe: str | None = None,
    base: Base = "bf16",
    confidence: float = gaps.CONFIDENCE,
) -> Ablation:
    """Measure each operand's cost from a run's last checkpoint.

    run         a run's directory; or a Start, as ``ablation_start.weights_start`` makes.
    out         for losses, which are not measured again, result and heat map. None: RUN/ablation;
                for weights of Hugging Face's format <name>-ablation, apart from them.
    recipe      of the casts, under the run's rules; None: the run's own, or tensorwise for bf16.
    Raises:     ConfigError: no run or checkpoint, several devices, no operand; another's ``out``.
    """
    start = run if isinstance(run, Start) else ablation_start.run_start(run, recipe)
    if out is None:
        name = Path(start.name)
        apart = Path(f"{name.resolve().name}-ablation")
        out = name / "ablation" if start.weights is None else apart
    if measurement.steps == 0:
        studied = studied.in_forward_passes()
    config = _config(start, studied, measurement, base)
    operands = chosen(config, studied)
    _check(start, studied, measurement, operands, config.data.batch_size)
    baseline, costs, measured = _losses(start, config, operands, measurement, base, out)
    rows = [
        _row(operand, costs[operand.name], baseline, base, measured, confidence)
        for operand in operands
    ]
    rows.sort(key=lambda row: math.inf if row.cost is None else row.cost, reverse=True)
    ablation = Ablation(
        run=start.name,
        backend=start.backend,
        recipe=config.numerics.recipe,
        base=base,
        step=start.step,
        steps=measurement.steps,
        samples=len(baseline),
        confidence=confidence,
        baseline=float(np.mean(np.array(baseline, np.float64))),
        rows=tuple(rows),
    )
    ablation.write(out / "ablation.json")
    draw(ablation, out / "ablation.png")
    return ablation


def _check(
    start: Start,
    studied: Studied,
    measurement: Measurement,
    operands: Sequence[Operand],
    batch_size: int,
) -> None:
    """ConfigError: an option without operands; too few seeds or batches, or too many."""
    for option, value, kind in studied.options:
        if value is not None and all(operand.gemm != kind for operand in operands):
            raise ConfigError(
                f"{option} {value} studies operands of {kind}, of which --gemms, --roles and "
                "--layers leave none. Leave it out, or name some."
            )
    seeds, batches = measurement.seeds, measurement.batches
    if (measurement.steps and seeds < 2) or batches < 2:
        raise ConfigError(
            f"an interval takes 2 or more seeds, and 2 or more batches; got {seeds} and "
            f"{batches}. Raise them."
        )
    most = len(start.batches.validation) // batch_size
    if batches > most:  # the loader begins anew, and an interval would count batches twice
        raise ConfigError(
            f"--batches is at most the batches of validation data there are, {most}; got "
            f"{batches}. Lower it, or give more text."
        )


Losses = list[float | None]
"""Validation losses of a variant (``variants.losses``); None if one was not finite."""


def _losses(
    start: Start,
    config: Config,
    operands: Sequence[Operand],
    measurement: Measurement,
    base: Base,
    out: Path,
) -> tuple[Losses, dict[str, Losses], dict[str, dict]]:
    """The baseline's losses, those with each operand changed by name, and statistics."""
    steps, seeds = measurement.steps, measurement.seeds
    about = {
        "backend": start.backend,
        "config": configs.to_dict(config),
        "step": start.step,
        "weights": start.identity,
        "base": base,
        "steps": steps,
        "seeds": seeds * bool(steps),
        "sha256": start.batches.description["sha256"],
    }
    kept = variants.keeping(out, about)

    def losses(altered: Config) -> Losses:
        return variants.losses(altered, start, steps=steps, seeds=seeds)

    every = variants.cast_operands(config)
    none = variants.without(config, every) if base == "bf16" else config
    rate = config.optimizer.learning_rate if steps else None
    costs: dict[str, Losses] = {}
    with consoles.bar(f"ablate {Path(start.name).name}", len(operands) + 2) as advance:
        baseline = kept("baseline", lambda: _finite(losses(none), start.name, rate))
        advance("baseline")
        measured = kept("statistics", lambda: variants.statistics(config, start))
        advance("statistics")
        for operand in operands:
            others = [one for one in every if one not in operand.casts]
            changed = variants.without(config, operand.casts if base == "fp8" else others)
            costs[operand.name] = kept(operand.key, lambda one=changed: losses(one))
            advance(operand.name)
    return baseline, costs, measured


def _config(start: Start, studied: Studied, measurement: Measurement, base: Base) -> Config:
    """The config with the casts of attention and states that are studied. What is not is as the run
    has it, or under base bf16 in high precision.

    Raises:   ConfigError: attention of a user's model, a layout without steps of training, or
              either without its operands.
    """
    config, gemms, steps = start.config, studied.gemms, measurement.steps
    if studied.attention is not None:
        architecture.require_llama(config, "--attention")
    if studied.states is not None and not steps:
        raise ConfigError(
            f"states are written by steps of training; got --states {studied.states!r} without "
            "--steps. Add --steps 20."
        )
    for option, value, kind in studied.options:
        if value is not None and kind not in gemms:
            raise ConfigError(
                f"{option} {value} studies operands of {kind}; got --gemms {','.join(gemms)}. "
                f"Add {kind}, or leave it out."
            )
    variant, layout = config.attention_variant, config.optimizer.moment_layout
    own = variant is not None and attention_casts.one_by_one(variant)
    kept = config.numerics.attention_operands if studied.attention is None else None
    attention, states = studied.attention, studied.states
    if attention is None and own and "attention" in gemms:
        attention = config.numerics.attention
    if states is None and layout is not None and steps and "states" in gemms:
        states = layout.name
    config = variants.studying(config, attention=attention, states=states)
    if attention is not None and kept is not None:  # the run casts these alone
        config = config.replace(numerics={"attention_operands": kept})
    if base != "fp8":
        config = variants.in_high_precision(
            config, attention=attention is None, states=states is None
        )
    rate = measurement.learning_rate
    rate = config.optimizer.learning_rate if rate is None else rate
    return config.replace(
        optimizer={"learning_rate": rate, "min_learning_rate": rate, "warmup_steps": 0},
        run={"steps": start.step + max(steps, 1), "eval_batches": measurement.batches},
    )


def _finite(baseline: list[float | None], name: str, rate: float | None) -> list[float | None]:
    """The baseline's losses; ConfigError if one is not finite. rate: of --steps; None without."""
    if None in baseline:
        trained = "" if rate is None else f" trained at a learning rate of {rate:.3g}"
        remedy = "Take an earlier checkpoint." if rate is None else "Lower --learning-rate."
        raise ConfigError(
            f"costs are differences from a finite loss; that of {name} with no operand "
            f"changed{trained} is not. {remedy}"
        )
    return baseline


def draw(ablation: Ablation, path: Path) -> None:
    """The heat map of costs: a row for each group, a column for each GEMM and role."""
    from fp8ref import plots

    groups = list(dict.fromkeys(sorted(row.operand.group for row in ablation.rows)))
    columns = [
        (g, r)
        for g in ablation_operands.KINDS
        for r in ablation_operands.ROLES_OF[g]
        if any((row.operand.gemm, row.operand.role) == (g, r) for row in ablation.rows)
    ]
    costs = np.full((len(groups), len(columns)), np.nan)
    for row in ablation.rows:
        column = columns.index((row.operand.gemm, row.operand.role))
        cost = math.nan if row.cost is None else row.cost
        costs[groups.index(row.operand.group), column] = cost
    figure, (ax,) = plots.figure(1, width=2 + 1.3 * len(columns), height=1.6 + 0.35 * len(groups))
    plots.cost_map(ax, costs, groups, [f"{gemm}\n{role}" for gemm, role in columns])
    figure.savefig(path)


def _row(
    operand: Operand,
    losses: Losses,
    baseline: Losses,
    base: Base,
    measured: Mapping[str, dict],
    confidence: float,
) -> Row:
    sign = 1 if base == "bf16" else -1
    # NaN of None
    differences = sign * (np.array(losses, np.float64) - np.array(baseline, np.float64))
    cost = low = high = None
    if np.isfinite(differences).all():
        gap = gaps.matched(differences, confidence=confidence)
        cost, low, high = map(float, (gap.mean, gap.low, gap.high))
    products: Sequence[str] = [operand.gemm]
    if operand.gemm == "attention":
        products = [p for p, role in attention_products.RECORDED if role == operand.role]
    records = [
        measured.get(f"{path}/{product}/{operand.role}", {})
        for path in operand.linears
        for product in products
    ]

    def worst(field: Callable, by: Callable) -> float | None:
        values = (field(record) for record in records)
        return by((value for value in values if value is not None), default=None)

    return Row(
        operand=operand,
        cost=cost,
        low=low,
        high=high,
        sqnr=worst(lambda record: record.get("sqnr"), min),
        underflow=worst(lambda record: record.get("underflow_rate"), max),
        saturation=worst(stats.clipped, max),
    )
