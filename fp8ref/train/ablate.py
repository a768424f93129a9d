"""Which layer, GEMM and role costs loss in FP8: one operand at a time, from a checkpoint (spec E-8).

    found = ablate(Path("runs/tiny-jax-tensorwise"), steps=20)
    found.print()

An operand is a role of a GEMM in a group of linears, such as the grad_output of grad_weight in layer 0.
From bf16, one is cast to FP8 as the recipe casts it, and all else is in high precision; from FP8, one
is in high precision, and all else is as the recipe has it. Both are rules of the config (R-8), which
either backend runs. The cost is the loss with the cast minus the loss without, on the same batches.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from fp8ref import console as consoles
from fp8ref.errors import ConfigError
from fp8ref.linear_rules import GEMMS
from fp8ref.linear_selection import matches
from fp8ref.recipe import OPERANDS, ROLES, Gemm, Role
from fp8ref.result import Result
from fp8ref.train import config as configs
from fp8ref.train import variants
from fp8ref.train.config import Config
from fp8ref.train.data import loader
from fp8ref.train.report import gap as gaps

if TYPE_CHECKING:
    from rich.console import Console

By = Literal["layer", "linear", "kind", "model"]
"""How linears are grouped: by layer of the model; each alone; by their last name, over all layers; together."""

Base = Literal["bf16", "fp8"]
"""What all other operands are in."""


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A role of a GEMM in a group of linears."""

    group: str
    gemm: Gemm
    role: Role
    linears: tuple[str, ...]

    @property
    def name(self) -> str:
        """``group/gemm/role``."""
        return f"{self.group}/{self.gemm}/{self.role}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What an operand's cast costs, in nats, with its interval; and the worst of its linears' statistics (Q).

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
        rows = [
            {"rank": i, **asdict(row.operand), **{k: v for k, v in asdict(row).items() if k != "operand"}}
            for i, row in enumerate(self.rows, 1)
        ]
        return {"ok": True, **{key: value for key, value in vars(self).items() if key != "rows"}, "rows": rows}

    def render(self, console: "Console") -> None:
        """Print the table, and how to read it."""
        table = consoles.table(
            ">rank", "layers", "GEMM", "role", ">cost, nats", f">{self.confidence:.0%} interval", ">SQNR, dB", ">underflow", ">saturated"
        )
        for rank, row in enumerate(self.rows, 1):
            of = row.operand
            cost = ("not finite", "-") if row.cost is None else (f"{row.cost:+.5f}", f"{row.low:+.5f} to {row.high:+.5f}")
            shares = ("-" if share is None else f"{share:.2%}" for share in (row.underflow, row.saturation))
            style = "bold" if row.real else None
            table.add_row(
                str(rank), of.group, of.gemm, of.role, *cost, "-" if row.sqnr is None else f"{row.sqnr:.1f}", *shares, style=style
            )
        console.print(table)
        what = f"after {self.steps} steps, over {self.samples} orders of data" if self.steps else f"over {self.samples} validation batches"
        alone = "it alone is cast" if self.base == "bf16" else "it alone is not cast"
        said = f"{self.run}, step {self.step}, {self.backend}, {self.recipe}: an operand's cost is the loss with its cast minus that without, where "
        said += f"{alone}; {what}."
        real = sum(row.real for row in self.rows)
        said += f" The intervals of {real} of {len(self.rows)} leave out 0. Loss with none changed: {self.baseline:.4f}."
        console.print(said, markup=False, highlight=False, soft_wrap=True)


def ablate(
    run: Path,
    *,
    out: Path | None = None,
    recipe: str | None = None,
    base: Base = "bf16",
    by: By = "layer",
    layers: Sequence[str] = (),
    gemms: Sequence[Gemm] = GEMMS,
    roles: Sequence[Role] = ROLES,
    steps: int = 0,
    seeds: int = 3,
    batches: int = 8,
    learning_rate: float | None = None,
    confidence: float = gaps.CONFIDENCE,
) -> Ablation:
    """Measure each operand's cost from a run's last checkpoint.

    out         where losses, the result and the heat map are written; losses there are not measured
                again. None: RUN/ablation.
    recipe      of the casts; None: the run's own, or tensorwise for a run in bf16. The run's rules
                change them.
    by, layers, gemms, roles
                which operands; layers: patterns (R-3) of linears, none: all.
    steps       0: one forward pass of each validation batch, which has the operands of GEMM output alone.
                Else train so many steps from the checkpoint, in each of ``seeds`` orders of data, and then validate.
    batches     validation batches.
    learning_rate
                of those steps; None: the run's at the checkpoint.
    Raises:     ConfigError: no run, no checkpoint, several devices; a recipe with delayed scaling, whose states a checkpoint holds; no operand left; ``out``
                holds another ablation.
    """
    out = run / "ablation" if out is None else out
    last, config = variants.begin(run, recipe)
    if steps == 0:
        gemms = [gemm for gemm in gemms if gemm == "output"]
    rate = config.optimizer.learning_rate_at(max(last.step - 1, 0), config.run.steps) if learning_rate is None else learning_rate
    config = config.replace(
        optimizer={"learning_rate": rate, "min_learning_rate": rate, "warmup_steps": 0},
        run={"steps": last.step + max(steps, 1), "eval_batches": batches},
    )
    operands = chosen(config, by, layers, gemms, roles)
    if (steps and seeds < 2) or batches < 2:
        raise ConfigError(f"an interval takes 2 or more seeds, and 2 or more batches; got {seeds} and {batches}. Raise them.")
    backend = last.manifest["backend"]
    about = {
        "backend": backend,
        "config": configs.to_dict(config),
        "step": last.step,
        "base": base,
        "steps": steps,
        "seeds": seeds * bool(steps),
    }
    text = loader.open_batches(config)
    kept = variants.keeping(out, about | {"sha256": text.description["sha256"]})

    def losses(one: Config) -> list[float | None]:
        return variants.losses(one, backend, last, text, steps=steps, seeds=seeds)

    none = variants.without(config, variants.cast_operands(config)) if base == "bf16" else config
    with consoles.bar(f"ablate {run.name}", len(operands) + 2) as advance:
        baseline = kept("baseline", lambda: losses(none))
        if None in baseline:
            raise ConfigError(f"{run} is not finite without any change, at a learning rate of {rate:.3g}. Lower --learning-rate.")
        advance("baseline")
        measured = kept("statistics", lambda: variants.statistics(config, backend, last, text))
        advance("statistics")
        costs: dict[str, list[float | None]] = {}
        for operand in operands:
            inside = {(path, operand.gemm, operand.role) for path in operand.linears}
            off = inside if base == "fp8" else {one for one in variants.cast_operands(config) if one not in inside}
            changed = variants.without(config, sorted(off))
            costs[operand.name] = kept(operand.name, lambda one=changed: losses(one))
            advance(operand.name)
    rows = [_row(operand, costs[operand.name], baseline, base, measured, confidence) for operand in operands]
    rows.sort(key=lambda row: math.inf if row.cost is None else row.cost, reverse=True)
    found = Ablation(
        run=str(run),
        backend=backend,
        recipe=config.numerics.recipe,
        base=base,
        step=last.step,
        steps=steps,
        samples=len(baseline),
        confidence=confidence,
        baseline=float(np.mean(baseline)),
        rows=tuple(rows),
    )
    found.write(out / "ablation.json")
    draw(found, out / "ablation.png")
    return found


def chosen(config: Config, by: By, layers: Sequence[str], gemms: Sequence[Gemm], roles: Sequence[Role]) -> list[Operand]:
    """The operands that a config casts, grouped, in the order of the model.

    Raises:   ConfigError: a pattern that names no linear; none is left.
    """
    paths = dict.fromkeys(path for path, _, _ in variants.cast_operands(config))
    for pattern in layers:
        if not any(matches(pattern, path) for path in paths):
            raise ConfigError(f"--layers {pattern!r} names no linear in FP8; there are {', '.join(paths)}.")
    groups: dict[str, list[str]] = {}
    for path in paths:
        if not layers or any(matches(pattern, path) for pattern in layers):
            groups.setdefault(_group(path, by), []).append(path)
    cast = set(variants.cast_operands(config))
    found = [
        Operand(group=group, gemm=gemm, role=role, linears=tuple(path for path in inside if (path, gemm, role) in cast))
        for group, inside in groups.items()
        for gemm in GEMMS
        for role in OPERANDS[gemm]
        if gemm in gemms and role in roles and any((path, gemm, role) in cast for path in inside)
    ]
    if not found:
        raise ConfigError(
            "no operand in FP8 is left. Without --steps there are those of GEMM output alone; name other --layers, --gemms or --roles."
        )
    return found


def draw(found: Ablation, path: Path) -> None:
    """The heat map of costs: a row for each group, a column for each GEMM and role."""
    from fp8ref import plots

    groups = list(dict.fromkeys(sorted(row.operand.group for row in found.rows)))
    columns = [(g, r) for g in GEMMS for r in OPERANDS[g] if any((row.operand.gemm, row.operand.role) == (g, r) for row in found.rows)]
    costs = np.full((len(groups), len(columns)), np.nan)
    for row in found.rows:
        costs[groups.index(row.operand.group), columns.index((row.operand.gemm, row.operand.role))] = (
            math.nan if row.cost is None else row.cost
        )
    figure, (ax,) = plots.figure(1, width=2 + 1.3 * len(columns), height=1.6 + 0.35 * len(groups))
    plots.cost_map(ax, costs, groups, [f"{gemm}\n{role}" for gemm, role in columns])
    figure.savefig(path)


def _row(operand: Operand, losses: list, baseline: list, base: Base, measured: dict[str, dict], confidence: float) -> Row:
    sign = 1 if base == "bf16" else -1
    differences = sign * (np.array(losses, np.float64) - np.array(baseline, np.float64))  # NaN of None
    gap = gaps.matched(differences, confidence=confidence) if np.isfinite(differences).all() else None
    numbers = (
        {"cost": None, "low": None, "high": None}
        if gap is None
        else {"cost": float(gap.mean), "low": float(gap.low), "high": float(gap.high)}
    )
    of = [measured.get(f"{path}/{operand.gemm}/{operand.role}", {}) for path in operand.linears]

    def worst(key: str, by: Callable) -> float | None:
        return by((one[key] for one in of if one.get(key) is not None), default=None)

    shares = {"underflow": worst("underflow_rate", max), "saturation": worst("saturation_rate", max)}
    return Row(operand=operand, **numbers, sqnr=worst("sqnr", min), **shares)


def _group(path: str, by: By) -> str:
    parts = path.split(".")
    if by == "layer":
        number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
        return ".".join(parts[max(0, number - 1) : number + 1])
    return {"linear": path, "kind": parts[-1], "model": "model"}[by]
