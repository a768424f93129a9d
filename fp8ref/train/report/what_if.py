"""``fp8ref replay``: apply another scale policy to the amaxes that a run recorded (spec Q-11).

It shows what a policy would have clipped, and how much range it would have left unused.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from fp8ref import recipe as recipes
from fp8ref.formats import QUANTIZED_FORMATS, Format
from fp8ref.policy import POLICIES, ScalePolicy
from fp8ref.shared import console as consoles
from fp8ref.shared.errors import ConfigError, require
from fp8ref.shared.result import Result
from fp8ref.sim import delayed
from fp8ref.sim.quantize.scales import scales_from_amax
from fp8ref.spec.attention import products as attention_products
from fp8ref.spec.attention import variants as attention
from fp8ref.spec.delayed import DELAYED, DelayedScaling
from fp8ref.train.report import run_files

__all__ = ["replay"]

KNOWN = (*DELAYED, *(name for name in POLICIES if name not in DELAYED))
"""The names that --policy takes: delayed scalings first, then scale policies."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result for one tensor: a role of a linear, in one format.

    steps     recorded steps with a finite amax above zero; skipped: the others.
    clipped   steps whose amax would have been clipped (C-4).
    excess    the most bits by which one was: log2(amax * scale / max).
    wasted    bits of unused range in the other steps, log2(max / (amax * scale)): mean and maximum.
    """

    steps: int
    skipped: int
    clipped: int
    excess: float | None
    wasted_mean: float | None
    wasted_max: float | None


@dataclass(frozen=True, kw_only=True)
class Replay(Result):
    """The result of ``fp8ref replay``. outcomes: by "<layer>/<role>/<format>"."""

    run: str
    policy: str
    history: int | None
    margin: int
    every: int
    recorded: list[int]
    outcomes: dict[str, Outcome]

    @property
    def ok(self) -> bool:
        """Always true: nothing is compared."""
        return True

    def to_dict(self) -> dict:
        """The fields."""
        return dataclasses.asdict(self)

    def render(self, console: Console) -> None:
        """Print a table with a row for each outcome."""
        history = f", history {self.history}" * (self.history is not None)
        numbers = (">clipped", ">max bits clipped", ">mean bits unused", ">max unused")
        title = (
            f"{self.run}: {self.policy}{history}, margin {self.margin}, {len(self.recorded)} "
            "recorded steps"
        )
        table = consoles.table("layer", "role", "format", *numbers, title=title)
        for name, o in self.outcomes.items():
            bits = (o.excess, o.wasted_mean, o.wasted_max)
            cells = ["-" if value is None else f"{value:.2f}" for value in bits]
            table.add_row(*name.rsplit("/", 2), f"{o.clipped} of {o.steps}", *cells)
        console.print(table)
        if self.every > 1:
            console.print(
                f"Amaxes were recorded every {self.every} steps: a history here holds steps "
                f"that are {self.every} apart, not consecutive ones."
            )


def replay(
    run: Path, policy: str, *, history: int | None = None, margin: int | None = None
) -> Replay:
    """Run every operand's recorded amaxes through a policy, step by step, from its initial state.

    policy    a name in DELAYED or POLICIES. Dynamic ones act on whole tensors, as recorded.
    history   length of delayed scaling's history; margin: powers of two. None: the policy's.
    Raises:   ConfigError: no run or statistics; an unknown policy; an invalid history or margin.
    """
    config, scaling = _scaling(policy, history, margin)
    manifest, lines = run_files.manifest(run), run_files.statistics(run)
    every = _steps_apart(run, manifest, lines)
    amaxes = _amaxes(run, lines, _formats(run, manifest))
    outcomes: dict[str, Outcome] = {}
    for fmt in QUANTIZED_FORMATS.values():
        names = [name for name in amaxes if name.rpartition("/")[2] == fmt.name]
        if names:
            readings = np.stack([amaxes[name] for name in names], axis=1)  # [steps, operands]
            scales = _delayed(readings, config, fmt) if config else _dynamic(readings, scaling, fmt)
            for name, own_amaxes, own_scales in zip(names, readings.T, scales.T, strict=True):
                outcomes[name] = _outcome(own_amaxes, own_scales, fmt)
    return Replay(
        run=str(run),
        policy=policy,
        history=config.history_length if config else None,
        margin=scaling.margin,
        every=every,
        recorded=[line["step"] for line in lines],
        outcomes={name: outcomes[name] for name in amaxes},
    )


def _steps_apart(run: Path, manifest: dict, lines: list[dict]) -> int:
    """The steps between records.

    Raises:   ConfigError: a run without statistics, or not at one distance, or not of one recipe.
    """
    if not any(line["statistics"] for line in lines):
        raise ConfigError(
            f"{run} has no statistics of FP8 operands. Train with --statistics.every 1, or any "
            "number of steps, in an FP8 recipe."
        )
    every = manifest["config"].get("statistics", {}).get("every", 1)
    if every is None:
        raise ConfigError(
            f"a replay takes amaxes of steps at one distance; {run} has statistics of its first "
            "and last step alone. Train with --statistics.every 1, or any number of steps."
        )
    text = f"a replay takes runs of one recipe; {run} has numerics.schedule. Train without it."
    require(not manifest.get("schedule"), text, ConfigError)
    return every


def _amaxes(
    run: Path, lines: list[dict], formats: dict[tuple[str, str, str], Format]
) -> dict[str, np.ndarray]:
    """Every operand's amaxes, float32 [steps], by "<layer>/<role>/<format>"; NaN: not finite."""
    amaxes: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(name for line in lines for name in line["statistics"]):
        layer, gemm, role = name.split("/")
        fmt = formats.get((layer, gemm, role))
        if fmt is None:
            raise ConfigError(
                f"{run / 'statistics.jsonl'} has {name}, which {run / 'manifest.json'} does not "
                "plan; they are of different runs."
            )
        readings = [line["statistics"].get(name, {}).get("amax") for line in lines]
        values = np.array([math.nan if a is None else a for a in readings], np.float32)
        # a tensor has the same amax in each GEMM that uses it
        amaxes.setdefault(f"{layer}/{role}/{fmt.name}", values)
    return amaxes


def _scaling(
    name: str, history: int | None, margin: int | None
) -> tuple[DelayedScaling | None, ScalePolicy]:
    if name not in KNOWN:
        raise ConfigError(f"--policy is one of {', '.join(KNOWN)}; got {name!r}.")
    config = DELAYED.get(name)
    policy = config.policy if config else POLICIES[name]
    if history is not None and config is None:
        raise ConfigError(
            f"--history applies to delayed scaling, {', '.join(DELAYED)}; policy {name!r} uses "
            "one amax. Leave it out."
        )
    if history is not None and history < 1:
        raise ConfigError(f"--history is at least 1; got {history}.")
    try:
        policy = policy if margin is None else dataclasses.replace(policy, margin=margin)
        if config:
            length = history or config.history_length
            config = dataclasses.replace(config, policy=policy, history_length=length)
    except ValueError as error:
        raise ConfigError(f"--margin {margin} with --policy {name}: {error}") from error
    return config, policy


def _formats(run: Path, manifest: dict) -> dict[tuple[str, str, str], Format]:
    """{(layer, gemm, role): format} of every FP8 operand that the run planned."""
    formats: dict[tuple[str, str, str], Format] = {}
    numerics = manifest["config"].get("numerics", {})
    try:
        for linear in manifest["linears"]:
            for gemm, role, cast, _ in recipes.by_name(linear["recipe"]).operand_casts:
                formats[linear["path"], gemm, role] = cast.fmt
        if numerics.get("attention") is not None:
            count = manifest["config"]["model"]["num_hidden_layers"]
            layers = [f"model.layers.{i}.self_attn" for i in range(count)]
            variant = attention.by_name(numerics["attention"])
            for operand in attention_products.planned(layers, variant):
                formats[operand.layer, operand.product, operand.role] = operand.fmt
    except ValueError as error:
        raise ConfigError(
            f"{run / 'manifest.json'}: {error} A replay takes runs of named recipes."
        ) from error
    return formats


def _delayed(amaxes: np.ndarray, config: DelayedScaling, fmt: Format) -> np.ndarray:
    """Scales float32 [steps, operands] of delayed scaling, from scale 1 on (H-1, H-2)."""
    # A history longer than the run would keep empty entries, which change nothing.
    config = dataclasses.replace(config, history_length=min(config.history_length, len(amaxes) + 2))
    state, scales = delayed.init(config, amaxes.shape[1:]), []
    for now in amaxes:
        scales.append(delayed.scales(state, config, fmt).scale)
        observed = delayed.observe(now, non_finite=np.isnan(now))
        state = delayed.update(state, observed, config=config, fmt=fmt)
    return np.stack(scales)


def _dynamic(amaxes: np.ndarray, policy: ScalePolicy, fmt: Format) -> np.ndarray:
    """Scales float32 [steps, operands] of a dynamic policy: each from its own step's amax.

    A policy that keeps a scale (te_delayed, of a zero amax) keeps the previous step's, first 1.
    """
    if not policy.keeps:
        return scales_from_amax(amaxes, fmt, policy).scale
    scales = [np.ones(amaxes.shape[1:], np.float32)]
    for now in amaxes:
        scales.append(np.asarray(scales_from_amax(now, fmt, policy, previous=scales[-1]).scale))
    return np.stack(scales[1:])


def _outcome(amaxes: np.ndarray, scales: np.ndarray, fmt: Format) -> Outcome:
    counted = np.isfinite(amaxes) & (amaxes > 0) & np.isfinite(scales) & (scales > 0)
    amax, scale = amaxes[counted].astype(np.float64), scales[counted].astype(np.float64)
    clipped = delayed.clipped(amax, scale, fmt)
    bits = np.log2(fmt.max) - np.log2(amax) - np.log2(scale)
    unused = np.maximum(bits[~clipped], 0)
    return Outcome(
        steps=int(counted.sum()),
        skipped=int((~counted).sum()),
        clipped=int(clipped.sum()),
        excess=float(-bits[clipped].min()) if clipped.any() else None,
        wasted_mean=float(unused.mean()) if unused.size else None,
        wasted_max=float(unused.max()) if unused.size else None,
    )
