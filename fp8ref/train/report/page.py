"""The HTML report on runs: FP8 loss against bf16 seeds, what ran in FP8, speed (spec E).

One HTML file without external resources, for light and dark screens. Its script shows values on
hover and zooms; the page reads without it. Its figures are also written as PNGs.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import markupsafe
import numpy as np
from matplotlib.figure import Figure

from fp8ref.recipe import OPERANDS
from fp8ref.shared import console, files
from fp8ref.shared.errors import ConfigError
from fp8ref.train.config import config as configs
from fp8ref.train.report import figures, run_files, svg, worst_layers
from fp8ref.train.report import gap as gaps
from fp8ref.train.report import verdict as verdicts
from fp8ref.train.report.runs import Run
from fp8ref.train.report.verdict import Arm, Seeds, Verdict
from fp8ref.train.run import train_state

__all__ = ["fp8_coverage", "write"]

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


@dataclass(frozen=True)
class Differences:
    """others: runs compared with the baseline; rows: (dotted key, its value, theirs)."""

    baseline: Run
    others: tuple[Run, ...]
    rows: tuple[tuple[str, str, tuple[str, ...]], ...]


def write(
    runs: Sequence[Run],
    out: Path,
    *,
    confidence: float = gaps.CONFIDENCE,
    margin: float | None = None,
) -> str:
    """Write the page to ``out``, and each figure to <out>-<figure>.png.

    margin: of equivalence, in nats; None: ``gap.MARGIN`` of bf16's loss. Returns verdicts as text.

    Raises:   ConfigError: out is a directory, in none, no report, or cannot be written.
    """
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"--out names a file in a directory that exists; got {out}.")
    if out.exists() and not _is_report(out):
        raise ConfigError(
            f"{out} exists and is not a report of fp8ref; it is left alone. Name another file "
            "with --out."
        )
    grouped = verdicts.groups(runs)
    groups = [
        _group(index, group, grouped[0][0], confidence, margin)
        for index, group in enumerate(grouped)
    ]
    drawn = {name: figure for group in groups for name, figure, _ in group.figures}
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
    judged = [pair for group in groups for pair in group.verdicts]
    lines = [f"{arm.name}: {verdict.said}" for arm, verdict in judged]
    lines += [
        f"{run.name} is left out: {counted.name} has its config and seeds"
        for group in groups
        for run, counted in group.others
    ]
    written = f"wrote {out} and {len(drawn)} PNG{'s' * (len(drawn) != 1)} next to it"
    return "\n".join([*map(console.one_line, lines), written])


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that are compared with each other, as the page shows them.

    verdicts    (arm, its verdict); compared: those with a gap.
    others      (run, the one of its config and seeds that counts in its place).
    figures     (name, figure, title).
    statistics  (run, names of its maps, operands with elements that are not finite, worst layers).
    states      (name of the figure, row of the table) of optimizer states.
    """

    runs: Sequence[Run]
    seeds: Seeds
    verdicts: list[tuple[Arm, Verdict]]
    others: list[tuple[Run, Run]]
    compared: list[tuple[Arm, Verdict]]
    figures: list[tuple[str, Figure, str]]
    statistics: list[tuple[Run, list[str], list[tuple[str, int, int]], list[worst_layers.Worst]]]
    states: list[tuple[str, dict]]
    speed: list[dict]
    unlike: str


def _group(
    index: int, group: list[Run], first: Run, confidence: float, margin: float | None
) -> Group:
    """A group of runs; first: the first run of the page's first group."""
    seeds, prefix = verdicts.seeds_of(group), f"g{index}-"
    judged = [
        (arm, verdicts.verdict(arm, group, confidence=confidence, margin=margin))
        for arm in verdicts.judged(group)
    ]
    recorded = [run for run in group if any(line["statistics"] for line in run.statistics)]
    maps = _maps(recorded)
    states = [
        (f"states{number}", run)
        for number, run in enumerate(group)
        if any(line.get("states") for line in run.statistics)
    ]
    drawings = [*_curves(group, seeds, [verdict for _, verdict in judged])]
    drawings += [drawing for run_maps in maps for drawing in run_maps]
    drawings += [
        (name, figures.states(run.statistics), f"{run.name}: health of optimizer states")
        for name, run in states
    ]
    return Group(
        runs=group,
        seeds=seeds,
        verdicts=judged,
        others=[pair for arm in verdicts.arms(group) for pair in arm.others],
        compared=[(arm, verdict) for arm, verdict in judged if verdict.compared],
        figures=[(prefix + name, figure, title) for name, figure, title in drawings if figure],
        statistics=[
            (
                run,
                [prefix + name for name, figure, _ in run_maps if figure],
                _non_finite(run),
                worst_layers.worst(run.statistics),
            )
            for run, run_maps in zip(recorded, maps, strict=True)
        ],
        states=[(prefix + name, _states(run)) for name, run in states],
        speed=[_speed(run, group) for run in group],
        unlike=", ".join(configs.differences(first.reference, group[0].reference)),
    )


Drawing = tuple[str, Figure | None, str]
"""The name of a figure within its group, the figure if there is one, and its title."""


def _curves(group: Sequence[Run], seeds: Seeds, judged: Sequence[Verdict]) -> Iterator[Drawing]:
    """Losses, gaps and metrics by step."""
    title = "Training loss, the mean of the last steps"
    yield "loss", figures.losses(group, seeds), title
    if compared := [verdict.compared for verdict in judged if verdict.compared]:
        widest = max(verdict.margin or 0.0 for verdict in judged if verdict.compared)
        gap = figures.gaps(compared, group, seeds, margin=widest)
        yield "gap", gap, "Gap to bf16, with its confidence interval"
    keys = dict.fromkeys(key for run in group for line in run.lines for key in line)
    metrics = METRICS | {
        key: f"validation loss on {key.removeprefix(run_files.SET)}, nats"
        for key in keys
        if key.startswith(run_files.SET)
    }
    for key, label in metrics.items():
        yield key, figures.metric(group, seeds, key, label), label.capitalize()


def _maps(recorded: Sequence[Run]) -> list[list[Drawing]]:
    """The maps of each run's statistics, whose colors have one scale in a group."""
    measures = [
        (measure, title, figures.scale([run.statistics for run in recorded], measure))
        for measure, (title, *_) in figures.MEASURES.items()
    ]
    return [
        [
            (
                f"stats{number}-{measure}",
                figures.heat_map(run.statistics, measure, ends),
                f"{run.name}: {title}, by layer and step",
            )
            for measure, title, ends in measures
        ]
        for number, run in enumerate(recorded)
    ]


def _page(groups: list[Group], runs: Sequence[Run], confidence: float) -> str:
    template = svg.template("fp8ref.train.report")
    shown = [entry for group in groups for entry in group.figures]
    drawn = {
        name: (svg.inline(figure, f"f{i}", title), title)
        for i, (name, figure, title) in enumerate(shown)
    }
    return template.render(
        generator=markupsafe.Markup(GENERATOR),
        groups=groups,
        runs=runs,
        drawn=drawn,
        confidence=confidence,
        gemms=fp8_coverage,
        shares=figures.STATES.values(),
        differences=differences(runs),
        decibels=_decibels,
        not_finite=-math.inf,
        flat=flat,
    )


def differences(runs: Sequence[Run]) -> Differences:
    """Keys of the config, versions, backend, device and text in which any run is not like the
    baseline: the first bf16 run, or the first."""
    baseline = next((run for run in runs if run.bf16), runs[0])
    others = tuple(run for run in runs if run is not baseline)
    mine, *theirs = ({**run.settings, "versions": run.versions} for run in (baseline, *others))
    keys = dict.fromkeys(key for other in theirs for key in configs.differences(mine, other))
    rows = ((key, _at(mine, key), tuple(_at(other, key) for other in theirs)) for key in keys)
    return Differences(baseline, others, tuple(rows))


def flat(settings: dict) -> list[tuple[str, str]]:
    """(dotted key, value) of a nested config, in its order."""
    return [(dotted, _said(value)) for dotted, value in train_state.flat(settings).items()]


def _at(settings: Any, dotted: str) -> str:
    for part in dotted.split("."):
        settings = settings.get(part) if isinstance(settings, dict) else None
    return _said(settings)


def _said(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _decibels(sqnr: float) -> str:
    """An SQNR of the table of worst layers."""
    if math.isfinite(sqnr):
        return f"{sqnr:.1f}"
    return "nothing lost" if sqnr > 0 else "not finite"


def _speed(run: Run, group: Sequence[Run]) -> dict:
    """A row of the speed table; ratio: to the first bf16 run of the same backend and device."""
    same = [run.manifest[key] for key in ("backend", "device")]
    bf16 = (other for other in group if other.bf16)
    like = [r for r in bf16 if [r.manifest["backend"], r.manifest["device"]] == same]
    mine, theirs = _median(run), _median(like[0]) if like else None
    memory = run.manifest.get("memory")
    peak = memory and f"{memory['peak_bytes'] / 2**30:,.2f} GiB of the {memory['of']}"
    return {
        "run": run,
        "steps": len(run.losses),
        "last": [next(reversed(run.curve(key).values()), None) for key in ("loss", "val_loss")],
        "median": mine,
        "ratio": mine / theirs if mine and theirs else None,
        "peak": peak,
    }


def _states(run: Run) -> dict:
    """A row of the table of states: the last record, its parameters with the largest shares of lost
    v, and where they were recorded."""
    line = next(line for line in reversed(run.statistics) if line.get("states"))
    whole = line["states"][""]
    lost = {
        name: state["v_lost"] / state["count"]
        for name, state in line["states"].items()
        if name and state["v_lost"]
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
    """Median tokens per second, without the first tenth of the steps, which compile."""
    values = list(run.curve("tokens_per_second").values())
    return float(np.median(values[len(values) // 10 :])) if values else None


def _non_finite(run: Run) -> list[tuple[str, int, int]]:
    """(operand, first step, number of elements) of operands with non-finite elements."""
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
    """What ran in FP8 under one of ``Run.recipes``: each linear's plan and proven GEMMs."""
    proof = planned.get("proof")
    rows = []
    for linear in planned["linears"]:
        path, plan = linear["path"], f"high precision: {linear['reason']}"
        gemms = ["high precision"] * len(OPERANDS)
        if linear["fp8"]:
            plan = linear["recipe"]
            gemms = [_gemm(f"{path}/{which}", proof) for which in OPERANDS]
        shape = " x ".join(map(str, linear["shape"]))
        rows.append(LinearCoverage(path=path, shape=shape, plan=plan, gemms=tuple(gemms)))
    return rows


def _gemm(name: str, proof: dict | None) -> str:
    if proof is None:
        return "planned, no proof recorded"
    missing = proof.get("missing", [])
    if any(message.startswith((f"{name}:", f"{name} ")) for message in missing):
        return "MISSING"
    if name in proof.get("emulated", []):
        return "emulated: FP4 values, high-precision GEMM"
    if name in proof.get("on_dequantised_operands", []):
        return "dequantized: FP8 values, high-precision GEMM"
    if name in proof.get("pruned", []):
        return "not needed"
    for gemm in proof.get("simulated", []):
        if gemm["gemm"] == name:
            return (
                f"simulated: {gemm['a']} x {gemm['b']}, {gemm['accumulate']}, under {gemm['plan']}"
            )
    gemms = [gemm for gemm in proof["gemms"] if gemm["gemm"] == name]
    fp8 = next((gemm for gemm in gemms if gemm["fp8"]), None)
    if fp8:
        return f"FP8: {fp8['a']} x {fp8['b']}, {fp8['accumulate']}"
    return f"high precision: {gemms[0]['a']} x {gemms[0]['b']}" if gemms else "not seen"
