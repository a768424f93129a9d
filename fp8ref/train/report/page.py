"""The HTML report on runs: FP8 loss against bf16 seeds, what ran in FP8, speed (spec E).

One HTML file without external resources, for light and dark screens. Its script shows values on
hover and zooms; the page reads without it. Its figures are also written as PNGs.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import markupsafe
import numpy as np
from matplotlib.figure import Figure

import fp8ref
from fp8ref.recipe import OPERANDS
from fp8ref.shared import console, files
from fp8ref.shared.errors import ConfigError
from fp8ref.train.config import config as configs
from fp8ref.train.report import figures, run_files, settings, svg, worst_layers
from fp8ref.train.report import gap as gaps
from fp8ref.train.report import verdict as verdicts
from fp8ref.train.report.runs import Run

GENERATOR = '<meta name="generator" content="fp8ref report">'
"""The tag by which a file is recognized as a report, which may be overwritten."""

METRICS = {
    "val_loss": "validation loss, nats",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
}
"""{metric that a report plots: label of its axis}."""


@dataclass(frozen=True, kw_only=True)
class LinearCoverage:
    """What ran of one linear: its plan, and each of its three GEMMs in a few words."""

    path: str
    shape: str
    plan: str
    gemms: tuple[str, ...]


def write(
    runs: Sequence[Run],
    out: Path,
    *,
    confidence: float = gaps.CONFIDENCE,
    margin: float | None = None,
) -> str:
    """Write the page to ``out``, and each figure to <out>-<figure>.png.

    margin: of equivalence, in nats; None: ``gap.MARGIN`` of bf16's loss. Returns the verdicts as
    text.

    Raises:   ConfigError: out is a directory, or in none; it exists and is not a report; it cannot
              be written.
    """
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"--out names a file in a directory that exists; got {out}.")
    if out.exists() and not _is_report(out):
        raise ConfigError(
            f"{out} exists and is not a report of fp8ref; it is left alone. Name another file "
            "with --out."
        )
    grouped = verdicts.groups(runs)
    groups = [_group(index, group, confidence, margin) for index, group in enumerate(grouped)]
    for group in groups:
        group["unlike"] = ", ".join(
            configs.differences(grouped[0][0].reference, group["runs"][0].reference)
        )
    drawn: dict[str, Figure] = {
        name: figure for group in groups for name, figure, _ in group["figures"]
    }
    page = _page(groups, runs, confidence)
    try:
        for name, figure in drawn.items():
            _put(out.with_name(f"{out.stem}-{name}.png"), svg.png(figure))
        _put(out, page.encode(errors="replace"))
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be written ({error.strerror}). Name a file in a directory that "
            "can be written."
        ) from error
    lines = [
        f"{arm.name}: {verdict.said}" for group in groups for arm, verdict in group["verdicts"]
    ]
    lines += [
        f"{run.name} is left out: {counted.name} has its config and seeds"
        for group in groups
        for run, counted in group["others"]
    ]
    return "\n".join(
        [
            *map(console.one_line, lines),
            f"wrote {out} and {len(drawn)} PNG{'s' * (len(drawn) != 1)} next to it",
        ]
    )


def _group(index: int, group: list[Run], confidence: float, margin: float | None) -> dict:
    seeds = verdicts.seeds_of(group)
    judged = [
        (arm, verdicts.verdict(arm, group, confidence=confidence, margin=margin))
        for arm in verdicts.judged(group)
    ]
    compared = [(arm, verdict) for arm, verdict in judged if verdict.compared]
    drawings: list[tuple[str, Figure | None, str]] = [
        ("loss", figures.losses(group, seeds), "Training loss, the mean of the last steps")
    ]
    if compared:
        comparisons = [verdict.compared for _, verdict in compared if verdict.compared]
        widest = max(verdict.margin or 0.0 for _, verdict in compared)
        drawings.append(
            (
                "gap",
                figures.gaps(comparisons, group, seeds, margin=widest),
                "Gap to bf16, with its confidence interval",
            )
        )
    sets = dict.fromkeys(
        key for run in group for line in run.lines for key in line if key.startswith(run_files.SET)
    )
    metrics = METRICS | {
        key: f"validation loss on {key.removeprefix(run_files.SET)}, nats" for key in sets
    }
    drawings += [
        (key, figures.metric(group, seeds, key, label), label.capitalize())
        for key, label in metrics.items()
    ]
    statistics = []
    recorded = [run for run in group if any(line["statistics"] for line in run.statistics)]
    ends = {
        measure: figures.scale([run.statistics for run in recorded], measure)
        for measure in figures.MEASURES
    }
    for number, run in enumerate(recorded):
        maps = [
            (
                f"stats{number}-{m}",
                figures.heat_map(run.statistics, m, ends[m]),
                figures.MEASURES[m][0],
            )
            for m in figures.MEASURES
        ]
        names = [f"g{index}-{name}" for name, figure, _ in maps if figure is not None]
        statistics.append((run, names, _non_finite(run), worst_layers.worst(run.statistics)))
        drawings += [
            (name, figure, f"{run.name}: {title}, by layer and step")
            for name, figure, title in maps
        ]
    states = [
        (number, run)
        for number, run in enumerate(group)
        if any(line.get("states") for line in run.statistics)
    ]
    drawings += [
        (
            f"states{number}",
            figures.states(run.statistics),
            f"{run.name}: health of optimizer states",
        )
        for number, run in states
    ]
    return {
        "runs": group,
        "seeds": seeds,
        "verdicts": judged,
        "others": [pair for arm in verdicts.arms(group) for pair in arm.others],
        "compared": compared,
        "figures": [
            (f"g{index}-{name}", figure, title)
            for name, figure, title in drawings
            if figure is not None
        ],
        "statistics": statistics,
        "states": [(f"g{index}-states{number}", _states(run)) for number, run in states],
        "speed": [_speed(run, group) for run in group],
    }


def _page(groups: list[dict], runs: Sequence[Run], confidence: float) -> str:
    template = svg.template("fp8ref.train.report")
    shown = [entry for group in groups for entry in group["figures"]]
    drawn = {
        name: (svg.inline(figure, f"f{i}", title), title)
        for i, (name, figure, title) in enumerate(shown)
    }
    return template.render(
        generator=markupsafe.Markup(GENERATOR),
        policy=svg.policy(),
        style=svg.style(),
        script=svg.script(),
        version=fp8ref.__version__,
        groups=groups,
        runs=runs,
        drawn=drawn,
        confidence=confidence,
        gemms=fp8_coverage,
        shares=figures.STATES.values(),
        differences=settings.differences(runs),
        decibels=_decibels,
        not_finite=-math.inf,
        flat=settings.flat,
    )


def _decibels(sqnr: float) -> str:
    """An SQNR of the table of worst layers."""
    return f"{sqnr:.1f}" if math.isfinite(sqnr) else "nothing lost" if sqnr > 0 else "not finite"


def _speed(run: Run, group: Sequence[Run]) -> dict:
    """A row of the speed table.

    ratio: to the group's first bf16 run of the same backend and device.
    """
    like = [
        r
        for r in group
        if r.bf16 and all(r.manifest[k] == run.manifest[k] for k in ("backend", "device"))
    ]
    mine, theirs = _median(run), _median(like[0]) if like else None
    memory = run.manifest.get("memory") or {}
    return {
        "run": run,
        "steps": len(run.losses),
        "last": [next(reversed(run.curve(key).values()), None) for key in ("loss", "val_loss")],
        "median": mine,
        "ratio": mine / theirs if mine and theirs else None,
        "peak": f"{memory['peak_bytes'] / 2**30:,.2f} GiB of the {memory['of']}"
        if memory
        else None,
    }


def _states(run: Run) -> dict:
    """A row of the table of states: the last record, its parameters with the largest shares of lost
    v, and where they were recorded."""
    line = next(line for line in reversed(run.statistics) if line.get("states"))
    whole, parameters = (
        line["states"][""],
        {name: state for name, state in line["states"].items() if name},
    )
    lost = {
        name: state["v_lost"] / state["count"]
        for name, state in parameters.items()
        if state["v_lost"]
    }
    return {
        "run": run,
        "step": line["step"],
        "layout": run.manifest["config"]["optimizer"].get("layout") or "sqrt_e4m3",
        "bytes": whole["bytes_per_parameter"],
        "shares": [whole[key] / whole["count"] for key in figures.STATES],
        "figures": [whole.get(key) for key in ("root_bias", "update_error", "largest_ratio")],
        "lost": sorted(lost.items(), key=lambda item: -item[1])[:3],
    }


def _median(run: Run) -> float | None:
    """Median tokens per second, without the first tenth of the steps, which includes
    compilation.
    """
    values = list(run.curve("tokens_per_second").values())
    return float(np.median(values[len(values) // 10 :])) if values else None


def _non_finite(run: Run) -> list[tuple[str, int, int]]:
    """(operand, first step, number of elements) of every operand that ever had non-finite
    elements.
    """
    operands: dict[str, tuple[str, int, int]] = {}
    for line in run.statistics:
        for key, values in line["statistics"].items():
            if values.get("non_finite"):
                operands.setdefault(key, (key, line["step"], values["non_finite"]))
    return list(operands.values())


def _is_report(path: Path) -> bool:
    try:
        with files.open_regular(path) as file:
            return GENERATOR.encode() in file.read(1000)
    except ValueError:  # a pipe
        return False


def _put(path: Path, content: bytes) -> None:
    """Replace a file atomically."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # a link would be followed
    temporary.write_bytes(content)
    os.replace(temporary, path)


def fp8_coverage(planned: dict) -> list[LinearCoverage]:
    """What ran in FP8 under one of ``Run.recipes``: for every linear, its plan and the GEMMs that
    the proof found.
    """
    proof = planned.get("proof")
    return [
        LinearCoverage(
            path=linear["path"],
            shape=" x ".join(map(str, linear["shape"])),
            plan=linear["recipe"] if linear["fp8"] else f"high precision: {linear['reason']}",
            gemms=tuple(
                _gemm(f"{linear['path']}/{which}", proof) if linear["fp8"] else "high precision"
                for which in OPERANDS
            ),
        )
        for linear in planned["linears"]
    ]


def _gemm(name: str, proof: dict | None) -> str:
    if proof is None:
        return "planned, no proof recorded"
    if any(message.startswith((f"{name}:", f"{name} ")) for message in proof.get("missing", [])):
        return "MISSING"
    if name in proof.get("on_dequantised_operands", []):
        return "dequantized: FP8 values, high-precision GEMM"
    if name in proof.get("pruned", []):
        return "not needed"
    if simulated := next(
        (gemm for gemm in proof.get("simulated", []) if gemm["gemm"] == name), None
    ):
        return (
            f"simulated: {simulated['a']} x {simulated['b']}, {simulated['accumulate']}, under "
            f"{simulated['plan']}"
        )
    gemms = [gemm for gemm in proof["gemms"] if gemm["gemm"] == name]
    fp8 = next((gemm for gemm in gemms if gemm["fp8"]), None)
    if fp8:
        return f"FP8: {fp8['a']} x {fp8['b']}, {fp8['accumulate']}"
    return f"high precision: {gemms[0]['a']} x {gemms[0]['b']}" if gemms else "not seen"
