"""fp8ref study: what FP8 does to the tensors of a file."""

import argparse
from pathlib import Path
from typing import get_args

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json, conclude
from fp8ref.recipe import Role
from fp8ref.shared import console

EXAMPLES = """examples:
  fp8ref study model.safetensors --tensors "*.mlp.*" --recipes tensorwise,rowwise
  fp8ref study activations.npz --out study.html      tables, maps and the worst rows as a page
  fp8ref study tiny                                  tensors of a small Llama, which are shipped
"""
"""What --help ends with."""


def add(commands) -> None:
    """Add ``fp8ref study``."""
    command = shared.plain(
        commands,
        "study",
        _study,
        "Show what FP8 does to the tensors of a file.",
        "Cast every tensor of a file as each recipe does, and show what becomes zero, is clipped, "
        "and loses its digits. Nothing is unpickled.",
    )
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = EXAMPLES
    command.add_argument(
        "file",
        metavar="FILE",
        type=Path,
        help=".npz or .safetensors, or a recording of fp8ref.study.record",
    )
    command.add_argument(
        "--recipes", metavar="A,B", help="recipes to compare (default: all in FP8 that train)"
    )
    command.add_argument(
        "--tensors", metavar="PATTERN", default="*", help="names of tensors, such as '*.mlp.*'"
    )
    command.add_argument(
        "--role",
        choices=get_args(Role),
        help="cast every tensor as this operand (default: by the last part of its name, such as "
        "layer.weight; else input)",
    )
    command.add_argument(
        "--out", type=Path, metavar="PATH", help="write a page: a .html file, or a directory"
    )
    shared.add_json(command, "write every tensor under every recipe to FILE")


def _study(arguments: argparse.Namespace) -> int:
    out = arguments.out
    if out is not None and out.suffix != ".html":
        if not out.is_dir():
            raise ValueError(f"--out names a .html file, or a directory that exists; got {out}.")
        out /= "study.html"
    check_json(arguments.json, arguments.file, out)
    from fp8ref import study

    names = arguments.recipes.split(",") if arguments.recipes is not None else None
    with console.waiting("study"):
        recording = study.read_file(arguments.file, arguments.tensors, roles=arguments.role)
        judged = study.judge(recording, names)
        if out is not None:
            attention = study.judge_attention(recording) if recording.attention else None
            study.write_page(out, judged, attention=attention)
    code = conclude(judged, arguments.json)
    console.show(
        f"wrote {out}" if out else f"A page of it: fp8ref study {arguments.file} --out study.html"
    )
    return code
