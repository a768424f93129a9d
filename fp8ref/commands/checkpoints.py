"""fp8ref audit: what a checkpoint of quantized weights says of itself."""

import argparse

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json, conclude


def add(commands) -> None:
    """Add ``fp8ref audit``."""
    command = shared.plain(commands, "audit DIR", _audit)
    command.option("checkpoint", "DIR", "a directory of safetensors with config.json, or a file")
    command.option("--originals", "DIR", "the checkpoint in high precision that was quantized")
    command.option("--page", "FILE", "write a page, a .html file")
    shared.add_json(command, "write every weight and finding to FILE")


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
