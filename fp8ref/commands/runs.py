"""fp8ref export, report, compare and replay: commands on finished runs."""

import argparse
from pathlib import Path

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json, conclude
from fp8ref.shared import console


def add(commands) -> None:
    """Add ``fp8ref export``, ``report``, ``compare`` and ``replay``."""
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
    compare.add_argument("--json", type=Path, metavar="FILE", help="write the comparison to FILE")
    for one in (report, compare):
        shared.add_judging(one)
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
    replay.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result of each layer and role to FILE"
    )


def _export(known: argparse.Namespace) -> int:
    from fp8ref.train.models.export import export

    with console.waiting("export"):
        step = export(known.run_directory, known.out, tokenizer=known.tokenizer, say=console.say)
    console.show(f"{known.out}: the weights after {step} steps")
    return 0


def _report(known: argparse.Namespace) -> int:
    from fp8ref.train.report import page, runs

    with console.waiting("report"):
        said = page.write(
            runs.read_all(known.runs),
            known.out,
            confidence=shared.confidence(known),
            margin=shared.margin(known),
        )
    console.show(*said.split("\n"))
    return 0


def _compare(known: argparse.Namespace) -> int:
    check_json(known.json)
    from fp8ref.train.report import compare

    with console.waiting("compare"):
        a, b, *more = (
            compare.read(path, loss=known.loss) for path in (known.a, known.b, *known.seeds)
        )
        found = compare.compare(
            a, b, more, confidence=shared.confidence(known), margin=shared.margin(known)
        )
    return conclude(found, known.json)


def _replay(known: argparse.Namespace) -> int:
    check_json(known.json)
    from fp8ref.train.report.what_if import replay

    with console.waiting("replay"):
        found = replay(
            known.run_directory, known.policy, history=known.history, margin=known.margin
        )
    return conclude(found, known.json)
