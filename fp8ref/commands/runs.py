"""fp8ref export, report, compare and replay: commands on finished runs."""

import argparse
from pathlib import Path

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json, conclude
from fp8ref.shared import console


def add(commands) -> None:
    """Add ``fp8ref export``, ``report``, ``compare`` and ``replay``."""
    _add_export(commands)
    _add_report(commands)
    _add_compare(commands)
    _add_replay(commands)


def _add_export(commands) -> None:
    weights = shared.plain(
        commands,
        "export",
        _export,
        "Export a run's weights in the format of transformers.",
        usage="RUN --out DIR",
        examples=(
            "export runs/tiny-torch-tensorwise --out weights",
            "export runs/mine --out weights --tokenizer tokenizer.json",
            "train tiny --run.init_from weights",
        ),
    )
    weights.option("run_directory", "RUN", "a run directory")
    weights.option(
        "--out", "DIR", "output directory, for config.json and safetensors", required=True
    )
    weights.option(
        "--tokenizer", "PATH", "tokenizer.json, or a directory of tokenizer files, to copy there"
    )


def _add_report(commands) -> None:
    report = shared.plain(
        commands,
        "report",
        _report,
        "Write a page on runs: is this FP8 loss normal?",
        "Write one HTML page, and its figures as PNGs. It shows the gap to bf16 with its "
        "interval and a verdict, losses, the linears that ran in FP8, speed and statistics.",
        usage="RUN...",
        examples=(
            "report runs/tiny-torch-tensorwise",
            "report runs/bf16 runs/tensorwise --out fp8.html",
            "report sweep --margin 0.01",
        ),
    )
    report.option(
        "runs",
        "RUN",
        "a run directory, or a directory of runs; runs of equal seeds, in bf16 and FP8, give the "
        "verdict",
        nargs="+",
    )
    report.option("--out", "FILE", "the page", Path("report.html"))
    shared.add_judging(report)


def _add_compare(commands) -> None:
    compare = shared.plain(
        commands,
        "compare",
        _compare,
        "Compare two runs' configs and losses.",
        "Compare two runs' configs and losses. Exits with 0 if the losses are identical, or "
        "shown to be equivalent; else with 1.",
        usage="A B",
        examples=(
            "compare runs/bf16 runs/tensorwise",
            "compare bf16-0 fp8-0 --seeds bf16-1 fp8-1 bf16-2 fp8-2",
            "compare theirs.csv mine.csv --loss train/loss",
        ),
    )
    compare.option(
        "a", "A", "a run directory, or another trainer's log: CSV, JSON Lines, console, TensorBoard"
    )
    compare.option("b", "B", "another, whose loss minus A's is judged")
    compare.option(
        "--seeds",
        "RUN",
        "more runs of A and B with other seeds; for logs give A1 B1 A2 B2",
        [],
        nargs="+",
    )
    compare.option(
        "--loss", "NAME", "column or tag of the losses in a log (default: loss, train/loss, ...)"
    )
    shared.add_json(compare, "write the comparison to FILE")
    shared.add_judging(compare)


def _add_replay(commands) -> None:
    replay = shared.plain(
        commands,
        "replay",
        _replay,
        "Replay a run's recorded amaxes under another scaling.",
        "Show how much of a run's recorded amaxes (statistics.every) delayed scaling, or a "
        "dynamic policy, would have clipped or wasted.",
        usage="RUN --policy NAME",
        examples=(
            "replay runs/tiny-torch-tensorwise --policy delayed",
            "replay runs/tiny-torch-tensorwise --policy delayed --history 16",
            "replay runs/tiny-torch-tensorwise --policy te_block --json replay.json",
        ),
    )
    replay.option("run_directory", "RUN", "the directory of a run")
    replay.option(
        "--policy",
        "NAME",
        "delayed, te_delayed or flax; or a dynamic policy, which fp8ref policies lists",
        required=True,
    )
    replay.option("--history", "N", "history length of delayed scaling (default: the policy's)")
    replay.option("--margin", "M", "margin, in powers of two (default: the policy's)")
    shared.add_json(replay, "write the result of each layer and role to FILE")


def _export(arguments: argparse.Namespace) -> int:
    from fp8ref.train.models.export import export

    with console.waiting("export"):
        step = export(
            arguments.run_directory, arguments.out, tokenizer=arguments.tokenizer, say=console.say
        )
    console.show(
        f"{arguments.out}: the weights after {step} steps",
        f"next: fp8ref ablate {arguments.out} --recipe tensorwise",
    )
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from fp8ref.train.report import page, runs

    with console.waiting("report"):
        summary = page.write(
            runs.read_all(arguments.runs),
            arguments.out,
            confidence=shared.confidence(arguments),
            margin=shared.margin(arguments),
        )
    console.show(*summary.split("\n"))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    check_json(arguments.json)
    from fp8ref.train.report import compare

    with console.waiting("compare"):
        paths = arguments.a, arguments.b, *arguments.seeds
        a, b, *more = (compare.read(Path(path), loss=arguments.loss) for path in paths)
        comparison = compare.compare(
            a, b, more, confidence=shared.confidence(arguments), margin=shared.margin(arguments)
        )
    return conclude(comparison, arguments.json)


def _replay(arguments: argparse.Namespace) -> int:
    check_json(arguments.json)
    from fp8ref.train.report.what_if import replay

    with console.waiting("replay"):
        replayed = replay(
            arguments.run_directory,
            arguments.policy,
            history=arguments.history,
            margin=arguments.margin,
        )
    return conclude(replayed, arguments.json)
