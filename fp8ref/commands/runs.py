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
        commands, "export", _export, "Export a run's weights in the format of transformers."
    )
    weights.add_argument("run_directory", metavar="RUN", type=Path, help="a run directory")
    weights.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="output directory, for config.json and safetensors",
    )
    weights.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="tokenizer.json, or a directory of tokenizer files, to copy there",
    )


def _add_report(commands) -> None:
    report = shared.plain(
        commands,
        "report",
        _report,
        "Write a page on runs: is this FP8 loss normal?",
        "Write one HTML page, and its figures as PNGs. It shows the gap to bf16 with its "
        "interval and a verdict, losses, the linears that ran in FP8, speed and statistics.",
    )
    report.add_argument(
        "runs",
        metavar="RUN",
        type=Path,
        nargs="+",
        help="a run directory, or a directory of runs; runs of equal seeds, in bf16 and FP8, "
        "give the verdict",
    )
    report.add_argument(
        "--out", type=Path, default=Path("report.html"), help="the page (default report.html)"
    )
    shared.add_judging(report)


def _add_compare(commands) -> None:
    compare = shared.plain(
        commands,
        "compare",
        _compare,
        "Compare two runs' configs and losses.",
        "Compare two runs' configs and losses. Exits with 0 if the losses are identical, or "
        "shown to be equivalent; else with 1.",
    )
    compare.add_argument(
        "a",
        metavar="A",
        type=Path,
        help="a run directory, or another trainer's log: CSV, JSON Lines, console, TensorBoard",
    )
    compare.add_argument(
        "b", metavar="B", type=Path, help="another, whose loss minus A's is judged"
    )
    compare.add_argument(
        "--seeds",
        metavar="RUN",
        type=Path,
        nargs="+",
        default=[],
        help="runs of A's and of B's config with other seeds, matched by their seeds; of logs, "
        "pairs in the order A B",
    )
    compare.add_argument(
        "--loss",
        metavar="NAME",
        help="the column or tag of the losses in a log (default: loss, train/loss, ...)",
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
    )
    replay.add_argument("run_directory", metavar="RUN", type=Path, help="the directory of a run")
    replay.add_argument(
        "--policy",
        required=True,
        help="delayed, te_delayed or flax; or a dynamic policy, such as torchao",
    )
    replay.add_argument(
        "--history",
        type=int,
        metavar="N",
        help="history length of delayed scaling (default: the policy's)",
    )
    replay.add_argument(
        "--margin", type=int, metavar="M", help="margin, in powers of two (default: the policy's)"
    )
    shared.add_json(replay, "write the result of each layer and role to FILE")


def _export(arguments: argparse.Namespace) -> int:
    from fp8ref.train.models.export import export

    with console.waiting("export"):
        step = export(
            arguments.run_directory, arguments.out, tokenizer=arguments.tokenizer, say=console.say
        )
    console.show(f"{arguments.out}: the weights after {step} steps")
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
        a, b, *more = (compare.read(path, loss=arguments.loss) for path in paths)
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
