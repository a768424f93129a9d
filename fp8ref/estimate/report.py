"""``fp8ref estimate``: the predicted FP8 speed-up of each linear and of a whole step."""

import dataclasses
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8ref.estimate import filtering, kernels, roofline
from fp8ref.estimate.gpu_rates import Ceilings
from fp8ref.estimate.ledger import Ledger, Step
from fp8ref.shared import console as consoles
from fp8ref.shared.errors import ConfigError
from fp8ref.shared.result import Result
from fp8ref.train.config import device_shapes
from fp8ref.train.config.config import Config
from fp8ref.train.run.trainer import check_products

COLUMNS = {
    "gemm": ("gemm",),
    "amax": ("amax", "scale"),
    "cast": ("cast",),
    "layout": ("layout",),
    "rescale": ("rescale",),
}
"""{column of the table: the parts of a linear's time that it sums}."""


@dataclass(frozen=True)
class Row:
    """A shape of linear under a recipe, how many there are, and their predicted time."""

    linear: str
    shape: tuple[int, int]  # [N, K], whole
    count: int
    # of the last of them: XLA computes an input of the first two layers from other arrays
    ledger: Ledger
    experts: int | None = None  # of each such linear, on all devices
    loses: bool = False  # whether a step is predicted to be faster without it in FP8


@dataclass(frozen=True)
class Forecast(Result):
    """The predicted gain of FP8, by linear and over a step. Times are in seconds of one device."""

    backend: str
    recipe: str
    ceilings: Ceilings
    rows: list[Row]
    step: Step
    by_triton: bool  # whether Triton kernels cast
    fused: bool  # or cannot be
    named: bool  # whether fp8_fqns names a linear that FP8 makes slower
    to_filter: list[str]  # patterns of the linears that FP8 makes slower, for filter_fqns
    parameters: int = 0
    active: int = 0  # parameters that take a token: of experts its own

    def render(self, console: Console) -> None:
        """Print the tables of linears and of a step, with advice."""
        columns = ("linear", ">N x K", ">count", ">bf16", *(f">{name}" for name in COLUMNS))
        table = consoles.table(*columns, ">floor", ">bf16/fp8", "filter")
        for row in self.rows:
            ledger = row.ledger
            cells = [
                _us(sum(ledger.parts[part] for part in parts)) if ledger.parts else "-"
                for parts in COLUMNS.values()
            ]
            cells += (
                ["-", "-"] if ledger.ratio is None else [_us(ledger.floor), f"{ledger.ratio:.2f}"]
            )
            experts = f"{row.experts} x " * bool(row.experts)
            shape = f"{experts}{row.shape[0]} x {row.shape[1]}"
            advice, bf16 = "FILTER" if row.loses else "", _us(ledger.bf16)
            table.add_row(row.linear, shape, str(row.count), bf16, *cells, advice)
        title = (
            f"Linears under recipe {self.recipe!r} with {self.backend}, cast by "
            f"{'Triton kernels' if self.by_triton else 'plain operations'}, microseconds per "
            "device and microbatch, PREDICTED"
        )
        console.print(Text(title, style="bold"), table, Text(self._advice()), "", sep="\n")
        console.print(
            Text("A step, milliseconds per device, PREDICTED", style="bold"),
            self._steps(),
            Text(self._caption()),
            sep="\n",
        )

    @property
    def ok(self) -> bool:
        """Always true: nothing is compared."""
        return True

    def to_dict(self) -> dict:
        """The content of the --json file."""
        rows = [dataclasses.asdict(row) | {"ratio": row.ledger.ratio} for row in self.rows]
        for row in rows:
            row["filter"] = row.pop("loses")
        ratios = {name: getattr(self.step, name) for name in ("ratio", "filtered_ratio", "limit")}
        return {
            "backend": self.backend,
            "recipe": self.recipe,
            "casts": "triton" if self.by_triton else "plain",
            "ceilings": dataclasses.asdict(self.ceilings) | {"measured": self.ceilings.measured},
            "parameters": {"all": self.parameters, "active": self.active},
            "linears": rows,
            "filter_fqns": self.to_filter,
            "step": dataclasses.asdict(self.step) | ratios,
        }

    def _advice(self) -> str:
        if not any(row.ledger.parts for row in self.rows):
            return "No linear is in FP8."
        lost = self.to_filter
        tail = " amax includes its scales; floor is kernel launches alone."
        if lost and not self.fused:
            return (
                f"SLOWER in FP8: {', '.join(lost)}. Casts are not fused: set parallel.compile "
                f"to block and estimate again.{tail}"
            )
        if not lost:
            slower = any((row.ledger.ratio or 1) < 1 for row in self.rows)
            text = "With fewer linears in FP8 the step is no faster."
            text = text if slower else "No linear is slower in FP8."
            if not self.fused:
                text += " Casts are not fused: set parallel.compile to block."
            return text + tail
        if not any(row.ledger.parts and not row.loses for row in self.rows):
            return f"SLOWER in FP8: every linear. Use recipe bf16.{tail}"
        text = f"SLOWER in FP8: add {', '.join(lost)} to numerics.filter_fqns"
        if self.named:
            text += ", and remove the patterns that name them from numerics.fp8_fqns"
        return f"{text}.{tail}"

    def _steps(self) -> Table:
        table = consoles.table("what", ">bf16", ">as configured", ">after filtering")
        step = self.step
        linear, others = (
            (step.bf16, step.configured, step.filtered),
            (step.in_bf16, step.rest, step.after),
        )
        table.add_row("linears", *map(_ms, linear))
        for name in dict.fromkeys((*step.rest, *step.after)):
            table.add_row(name, *(_ms(times.get(name, 0.0)) for times in others))
        totals = (t + sum(times.values()) for t, times in zip(linear, others, strict=True))
        table.add_row("all", *map(_ms, totals))
        ratios = (f"{ratio:.2f}" for ratio in (step.ratio, step.filtered_ratio))
        table.add_row("speed-up over bf16", "1.00", *ratios)
        return table

    def _caption(self) -> str:
        active = f"{self.parameters:,} parameters, of which {self.active:,} take a token. "
        active *= self.active < self.parameters
        return (
            f"{active}If linears took no time, the step's speed-up would be "
            f"{self.step.limit:.2f}. Collectives and the host are left out: they mostly bring "
            f"speed-ups nearer to 1. {self.ceilings.caption}."
        )


def of(config: Config, backend: str, ceilings: Ceilings) -> Forecast:
    """The forecast for a config.

    Raises:   ConfigError: the backend would refuse the config on any devices, or its products on
              this GPU; a schedule.
    """
    config.require_one_recipe("an estimate")
    if config.parallel.context > 1:
        raise ConfigError(
            "fp8ref estimate compares with bf16's own attention, which has no parts of the "
            f"tokens; got parallel.context {config.parallel.context}. fp8ref train --dry-run "
            "has its memory, traffic and GEMMs."
        )
    device_shapes.check(config, backend)
    device_shapes.check_on_gpu(config, backend)
    check_products(config, backend, (ceilings.sheet.capability, 0), ceilings.gpu)
    ledgers = roofline.linears(config, backend, ceilings)
    lost = roofline.losing(config, backend, ceilings)
    rows: dict[tuple, Row] = {}
    for decision, ledger in ledgers:
        key = (kind := filtering.kind(decision), decision.shape, decision.experts)
        count = rows[key].count + 1 if key in rows else 1
        rows[key] = Row(
            roofline.short_name(decision.path),
            decision.shape,
            count,
            ledger,
            decision.experts,
            kind in lost,
        )
    by_triton = kernels.casts_by_triton(config, backend)
    # experts run eagerly alone
    fused = (
        by_triton or kernels.fusion(config, backend) != "eager" or bool(config.model.num_experts)
    )
    named = any(
        d.reason.startswith("named by fp8_fqns") and filtering.kind(d) in lost
        for d in config.decisions()
    )
    return Forecast(
        backend,
        config.numerics.recipe,
        ceilings,
        list(rows.values()),
        roofline.predict_step(config, backend, ceilings, lost),
        by_triton,
        fused,
        named,
        filtering.patterns(lost, ledgers),
        device_shapes.kinds(config)["all"],
        device_shapes.active(config),
    )


def _us(seconds: float) -> str:
    digits = 0 if seconds >= 1e-4 or not seconds else 1
    return f"{seconds * 1e6:,.{digits}f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"
