"""fp8ref audit, agree: what checkpoints of quantized weights say of themselves and each other."""

import argparse
import contextlib
import sys
from pathlib import Path

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json, conclude


def add(commands) -> None:
    """Add ``fp8ref audit`` and ``fp8ref agree``."""
    command = shared.plain(commands, "audit DIR", _audit)
    command.option("checkpoint", "DIR", "a directory of safetensors with config.json, or a file")
    command.option("--originals", "DIR", "the checkpoint in high precision that was quantized")
    command.option("--page", "FILE", "write a page, a .html file")
    shared.add_json(command, "write every weight and finding to FILE")
    command = shared.plain(commands, "agree A B", _agree)
    text = "a rule, such as vllm_block, a MODULE:FUNCTION that quantizes, or a checkpoint"
    command.option("a", "A", text)
    command.option("b", "B", "the other side")
    command.option("--weights", "DIR", "the checkpoint in high precision that both sides quantize")
    shared.add_json(command, "write the causes to FILE")


def _audit(arguments: argparse.Namespace) -> int:
    """Check a quantized checkpoint against its own bytes and its config.

    Say for every weight which rule, blocks and scale format its bytes are consistent with, and find
    what contradicts that or config.json: stale, inverse and reordered scales, codes without
    scales, layers left out. Nothing in the checkpoint is executed. Exits with 1 if something is
    wrong.

    $ fp8ref audit ./DeepSeek-V3
    $ fp8ref audit ./model-FP8 --originals ./model
    $ fp8ref audit ./model-NVFP4 --page audit.html --json audit.json
    """
    path = arguments.checkpoint
    check_json(arguments.json, path, arguments.page)
    shared.check_page("--page", arguments.page, "fp8ref audit")
    from fp8ref.checkpoints import audit

    result = audit.audit(path, originals=arguments.originals, progress=True)
    if arguments.page:
        from fp8ref.train.report import svg

        template = svg.template("fp8ref.checkpoints")
        arguments.page.write_text(template.render(audit=result, most=100), encoding="utf-8")
    return conclude(result, arguments.json)


def _agree(arguments: argparse.Namespace) -> int:
    """Compare how a trainer and an engine quantize the same weights.

    Say how many codes and scales are equal, or why they differ: each cause by name, the share of
    codes that it changes alone, and the smallest tensor that shows it. A rule is a policy and a
    granularity, with the dtype that is quantized if it is not float32. Exits with 1 if the sides
    differ.

    $ fp8ref agree vllm_block sglang_block:bfloat16
    $ fp8ref agree ./exported ./from-engine --weights ./masters
    $ fp8ref agree mine:quantize torchao_rowwise
    """
    sides = (Path(side) for side in (arguments.a, arguments.b) if side)
    check_json(arguments.json, *sides, arguments.weights)
    from fp8ref.conformance import agree
    from fp8ref.shared import console

    with contextlib.redirect_stdout(sys.stderr), console.waiting("agree"):
        result = agree(arguments.a, arguments.b, arguments.weights)
    return conclude(result, arguments.json)
