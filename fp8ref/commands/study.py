"""fp8ref study: what FP8 does to the tensors of a file."""

import argparse
from typing import get_args

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json, conclude
from fp8ref.recipe import Role
from fp8ref.shared import console
from fp8ref.shared.errors import require


def add(commands) -> None:
    """Add ``fp8ref study``."""
    command = shared.plain(commands, "study FILE", _study)
    command.option(
        "file", "FILE", ".npz, .safetensors, a recording of fp8ref.study.record, or tiny"
    )
    command.option("--recipes", "A,B", "recipes to compare (default: all in FP8 that train)")
    command.option("--tensors", "PATTERN", "names of tensors, such as '*.mlp.*'", "*")
    command.option(
        "--role",
        "ROLE",
        "cast every tensor as input, weight or grad_output (default: by the last part of its "
        "name, such as layer.weight; else input)",
        choices=get_args(Role),
    )
    command.option("--out", "PATH", "write a page: a .html file, or a directory")
    shared.add_json(command, "write every tensor under every recipe to FILE")


def _study(arguments: argparse.Namespace) -> int:
    """Show what FP8 does to the tensors of a file.

    Cast every tensor of a file as each recipe does, and show what becomes zero, is clipped, and
    loses its digits. Nothing is unpickled.

    $ fp8ref study model.safetensors --tensors "*.mlp.*" --recipes rowwise
    $ fp8ref study activations.npz --out study.html
    $ fp8ref study tiny
    """
    out = arguments.out
    if out is not None and out.suffix != ".html":
        text = f"--out names a .html file, or a directory that exists; got {out}."
        require(out.is_dir(), text)
        out /= "study.html"
    shared.check_page("--out", out, "fp8ref study")
    check_json(arguments.json, arguments.file, out)
    from fp8ref import study

    names = shared.names(arguments.recipes) if arguments.recipes else None
    need = "--recipes takes names of recipes, with commas"
    require(names != [], f"{need}; got {arguments.recipes!r}. Leave it out for all.")
    with console.waiting("study"):
        try:
            recording = study.read_file(arguments.file, arguments.tensors, roles=arguments.role)
        except OSError as error:
            raise ValueError(
                f"{arguments.file}: cannot be read ({error.strerror or error}). Name a file of "
                "tensors: .npz, .npy or .safetensors."
            ) from error
        judged = study.judge(recording, names)
        if out is not None:
            attention = study.judge_attention(recording) if recording.attention else None
            try:
                study.write_page(out, judged, attention=attention)
            except OSError as error:
                raise ValueError(
                    f"--out {out} cannot be written ({error.strerror or error}). Name another."
                ) from error
    following = f"next: fp8ref study {arguments.file} --out study.html"
    return conclude(judged, arguments.json, f"wrote {out}" if out else following)
