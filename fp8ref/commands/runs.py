"""fp8ref export, report, compare and replay: commands on finished runs."""

import argparse
from pathlib import Path

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json, conclude
from fp8ref.shared import console


def add(commands) -> None:
    """Add ``fp8ref export``, ``report``, ``compare`` and ``replay``."""
    weights = shared.plain(commands, "export RUN --out DIR", _export)
    weights.option("run_directory", "RUN", "a run directory")
    text = "output directory, for config.json and safetensors"
    weights.option("--out", "DIR", text, required=True)
    weights.option("--tokenizer", "PATH", "tokenizer.json, or its directory, to copy there")
    formats = ("float32", "bf16", "deepseek", "compressed-tensors", "mxfp8", "nvfp4")
    text = f"how weights are stored: {', '.join(formats)}"
    weights.option("--format", "NAME", text, "float32", choices=formats)
    text = "what is quantized: masters, or their bf16 rounding (default masters)"
    weights.option("--from", "NAME", text, choices=("masters", "bf16"))
    report = shared.plain(commands, "report RUN...", _report)
    text = "a run directory, or a directory of runs; bf16 and FP8 of equal seeds are judged"
    report.option("runs", "RUN", text, nargs="+")
    report.option("--out", "FILE", "the page", Path("report.html"))
    shared.add_judging(report)
    compare = shared.plain(commands, "compare A B", _compare)
    text = "a run directory, or a log: CSV, JSON Lines, console, TensorBoard"
    compare.option("a", "A", text)
    compare.option("b", "B", "another, whose loss minus A's is judged")
    text = "more runs of A and B with other seeds; for logs give A1 B1 A2 B2"
    compare.option("--seeds", "RUN", text, [], nargs="+")
    compare.option("--loss", "NAME", "column or tag of the losses in a log")
    shared.add_json(compare, "write the comparison to FILE")
    shared.add_judging(compare)
    replay = shared.plain(commands, "replay RUN --policy NAME", _replay)
    replay.option("run_directory", "RUN", "the directory of a run")
    text = "delayed, or a policy in FP8, such as torchao: fp8ref policies"
    replay.option("--policy", "NAME", text, required=True)
    replay.option("--history", "N", "length of delayed scaling (default: the policy's)")
    replay.option("--margin", "M", "in powers of two (default: the policy's)")
    shared.add_json(replay, "write the result of each layer and role to FILE")


def _export(arguments: argparse.Namespace) -> int:
    """Export a run's weights in the format of transformers.

    $ fp8ref export runs/tiny-torch-tensorwise --out weights
    $ fp8ref export runs/mine --out weights-fp8 --format deepseek --from bf16
    $ fp8ref train tiny --run.init_from weights
    """
    from fp8ref.train.models.export import export
    from fp8ref.train.models.precision import Precision

    precision = Precision(format=arguments.format, source=getattr(arguments, "from"))
    with console.waiting("export"):
        step = export(
            arguments.run_directory,
            arguments.out,
            tokenizer=arguments.tokenizer,
            precision=precision,
            say=console.say,
        )
    console.show(
        f"{arguments.out}: the weights after {step} steps, {precision.description}",
        f"next: fp8ref audit {arguments.out}"
        if precision.quantized
        else f"next: fp8ref ablate {arguments.out} --recipe tensorwise",
    )
    return 0


def _report(arguments: argparse.Namespace) -> int:
    """Write a page on runs: is this FP8 loss normal?

    One HTML page, and its figures as PNGs: the gap to bf16 with its interval and a verdict, losses,
    the linears that ran in FP8, speed and statistics.

    $ fp8ref report runs/tiny-torch-tensorwise
    $ fp8ref report runs/bf16 runs/tensorwise --out fp8.html
    $ fp8ref report sweep --margin 0.01
    """
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
    """Compare two runs' configs and losses.

    Exits with 0 if the losses are identical, or shown to be equivalent; else with 1.

    $ fp8ref compare runs/bf16 runs/tensorwise
    $ fp8ref compare bf16-0 fp8-0 --seeds bf16-1 fp8-1 bf16-2 fp8-2
    $ fp8ref compare theirs.csv mine.csv --loss train/loss
    """
    check_json(arguments.json)
    from fp8ref.train.report import compare

    with console.waiting("compare"):
        paths = arguments.a, arguments.b, *arguments.seeds
        a, b, *more = (compare.read(Path(path), loss=arguments.loss) for path in paths)
        confidence, margin = shared.confidence(arguments), shared.margin(arguments)
        comparison = compare.compare(a, b, more, confidence=confidence, margin=margin)
    return conclude(comparison, arguments.json)


def _replay(arguments: argparse.Namespace) -> int:
    """Replay a run's recorded amaxes under another scaling.

    How much of the amaxes (statistics.every) delayed scaling, or a dynamic policy, would have
    clipped or wasted.

    $ fp8ref replay runs/tiny-torch-tensorwise --policy delayed
    $ fp8ref replay runs/tiny-torch-tensorwise --policy delayed --history 16
    $ fp8ref replay runs/tiny-torch-tensorwise --policy te_block --json replay.json
    """
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
