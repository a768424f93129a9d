"""fp8ref study and finding: what FP8 does to the tensors of a file, and which claims hold."""

import argparse
from pathlib import Path
from typing import get_args

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json, conclude
from fp8ref.recipe import Role
from fp8ref.shared import console, registry
from fp8ref.shared.errors import require


def add(commands) -> None:
    """Add ``fp8ref study`` and ``fp8ref finding``."""
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
    finding = shared.plain(commands, "finding [NAME]", _finding)
    finding.option("name", "NAME", "a claim; all: every one (default: list them)", nargs="?")
    finding.option("--out", "DIR", "keeps trials and pictures", Path("findings"))
    finding.option("--jobs", "N", "claims measured at the same time", 1)
    shared.add_json(finding, "write figures, verdicts and samples to FILE")


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


def _finding(arguments: argparse.Namespace) -> int:
    """Measure a claim about FP8 training.

    Papers and threads claim things. Each is measured here with an interval, in minutes: a pilot of
    three seeds says how many follow. What was measured is kept, and the same command goes on.

    $ fp8ref finding
    $ fp8ref finding mx_clipping
    $ fp8ref finding gradients_in_e5m2_in_training --out findings
    """
    check_json(arguments.json)
    from fp8ref import findings

    require(arguments.jobs >= 1, f"--jobs is at least 1; got {arguments.jobs}.")
    if arguments.name is None:
        following = "next: fp8ref finding NAME"
        return conclude(findings.Findings(findings.recorded()), arguments.json, following)
    every = arguments.name == "all"
    names = list(findings.CLAIMS) if every else [arguments.name]
    text = f"NAME is all or a claim; got {arguments.name!r}."
    near = registry.nearest(names[0], findings.CLAIMS) or " `fp8ref finding` lists them."
    require(names[0] in findings.CLAIMS, text + near)
    out: Path = arguments.out
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out names a directory, there or to be made; got {out} ({error.strerror}). Name "
            "another."
        ) from error
    measured = findings.measure_all(names, out, arguments.jobs)
    from fp8ref.findings import picture

    for name, finding in measured.items():
        picture.draw(finding).savefig(out / f"{name}.png")
    result = findings.Findings(measured) if every else measured[names[0]]
    return conclude(result, arguments.json, f"wrote {out}")
