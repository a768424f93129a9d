"""fp8ref probe: identify the arithmetic of a scaled GEMM, or of attention."""

import argparse
import contextlib
import dataclasses
import os
import sys
from pathlib import Path

from fp8ref.commands import shared, supervision
from fp8ref.commands.shared import check_json, conclude
from fp8ref.shared import console
from fp8ref.shared.errors import require

SHAPE, FORMATS = (128, 128, 4096), ("e4m3fn", "e4m3fn")
GEMM = ("shape", "formats", "out_dtype", "granularity", "fast_accum")
"""The options of a GEMM."""

INSTRUCTIONS = 1 << 20
"""Results of random instructions to compare, for each pair of formats."""


def add(commands) -> None:
    """Add ``fp8ref probe``."""
    probe = shared.plain(commands, "probe SUBJECT", _probe)
    option, rare = probe.option, probe.rare_option
    text = "torch-scaled-mm, torch-rowwise, jax-dot, wgmma, or module:function of (Quantized a, "
    text += "Quantized b[, bias]) -> [M, N] or (q, k, v) -> o"
    option("subject", "SUBJECT", text, nargs="?")
    option("--shape", ("M", "N", "K"), "of a GEMM (default 128 128 4096)", nargs=3)
    option("--formats", ("A", "B"), "of operands (default e4m3fn e4m3fn)", nargs=2)
    option("--fast-accum", None, "fast accumulation, for a library's GEMM")
    option("--out-dtype", "DTYPE", "of a library's GEMM: float32, bfloat16 or float16")
    option("--granularity", "NAME", "of module:function: tensorwise (default) or rowwise")
    option("--seed", "N", "seed of the random operands", 0)
    supervision.add_timeout(probe)
    shared.add_json(probe)
    option("--record", "DIR", "save operands and results, to verify without the hardware")
    option("--replay", "FILE", "instead of SUBJECT: verify recordings", nargs="+")
    rare("--layout", "NAME", "of attention: BHTD (batch, heads, tokens, features) or BTHD")
    rare("--framework", "NAME", "attention's arrays: numpy, torch or jax")


def _probe(arguments: argparse.Namespace) -> int:
    """Identify the arithmetic of a scaled GEMM, or of attention.

    Exits with 1 if no plan of the simulator gives all its bits, or attention's masks, heads or
    range of P are at fault.

    $ fp8ref probe torch-scaled-mm
    $ fp8ref probe mine:gemm --shape 64 64 512 --granularity rowwise
    $ fp8ref probe torch-rowwise --record recordings
    """
    check_json(arguments.json)
    require(arguments.seed >= 0, f"--seed is at least 0; got {arguments.seed}.")
    if arguments.replay:
        return _replay(arguments)
    text = "needs a SUBJECT, or --replay FILE; got none. See fp8ref probe --help."
    require(arguments.subject is not None, text)
    if (code := _attention(arguments)) is not None:
        return code
    reason = f"--layout and --framework are for attention; {arguments.subject} is none"
    shared.refuse(arguments, reason, "layout", "framework")
    if arguments.record:
        _check_folder(arguments.record)
    try:
        return _wgmma(arguments) if arguments.subject == "wgmma" else _gemm(arguments)
    except MemoryError as error:
        raise ValueError(
            f"a probe of --shape {' '.join(map(str, arguments.shape or SHAPE))} does not fit into "
            "memory. Probe a smaller one."
        ) from error


def _attention(arguments: argparse.Namespace) -> int | None:
    """The exit code of a function of q, k and v; None of any other subject."""
    if ":" not in arguments.subject:
        return None
    from fp8ref.conformance.attention import probe, subjects
    from fp8ref.conformance.gemm import library_gemms

    # what somebody's function prints is no part of the answer
    with contextlib.redirect_stdout(sys.stderr):
        function = library_gemms.load(arguments.subject)
        if not subjects.is_attention(function):
            return None
        shared.refuse(arguments, "the probe chooses the inputs of attention", *GEMM, "record")
        with console.waiting("probe"):
            probed = probe(
                function,
                name=arguments.subject,
                framework=arguments.framework,
                layout=arguments.layout or subjects.LAYOUTS[0],
            )
    return conclude(probed, arguments.json)


def probe_function(arguments: argparse.Namespace) -> int:
    """Probe the subject of fp8ref conform, with the default options."""
    defaults = dict.fromkeys(("out_dtype", "shape", "record"), None)
    formats = (arguments.format, arguments.format)
    own = {"formats": formats, "fast_accum": False, "seed": 0}
    return _gemm(argparse.Namespace(**(vars(arguments) | defaults | own)))


def _check_folder(folder: Path) -> None:
    """ValueError if recordings cannot be written; checked before the probe begins."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fault = "" if os.access(folder, os.W_OK) else "cannot be written"
    except OSError as error:
        fault = str(error.strerror)
    need = "--record names a directory that can be created and written"
    require(not fault, f"{need}; {folder}: {fault}. Name another.")


def _gemm(arguments: argparse.Namespace) -> int:
    from fp8ref import formats
    from fp8ref.conformance.gemm import grade_gemm, identify, library_gemms, recording
    from fp8ref.conformance.gemm.stimulus import VariesError

    names = arguments.formats or FORMATS
    unknown = [name for name in names if name not in formats.FP8_FORMATS]
    choices = ", ".join(formats.FP8_FORMATS)
    require(not unknown, f"--formats takes two of {choices}; got {', '.join(unknown)}.")
    subject = library_gemms.named(
        arguments.subject,
        fast=arguments.fast_accum,
        out_dtype=arguments.out_dtype,
        granularity=arguments.granularity,
    )
    fmt_a, fmt_b = (formats.FP8_FORMATS[name] for name in names)
    shape = tuple(arguments.shape or SHAPE)
    pair, seed = (fmt_a, fmt_b), arguments.seed
    try:
        with console.waiting("probe"):
            identified = identify.identify(subject, shape=shape, formats=pair, seed=seed)
    except VariesError as error:  # of a wrong tile the grade says more
        if arguments.record:
            raise
        print(console.printable(str(error)), file=sys.stderr)
        with console.waiting("grade"):
            grade = grade_gemm(subject, shapes=[shape], formats=pair, seed=seed)
        return conclude(grade, arguments.json)
    if not identified.ok:
        with console.waiting("grade"):
            grade = grade_gemm(subject, shapes=[shape], formats=pair, seed=seed)
        identified = dataclasses.replace(identified, grade=grade)
    code = conclude(identified, arguments.json)
    if arguments.record:
        console.show(f"recorded {recording.record_gemm(identified, arguments.record)}")
    return code


def _wgmma(arguments: argparse.Namespace) -> int:
    from fp8ref.conformance.gemm import instruction, recording, wgmma

    reason = "wgmma is one instruction, m64n8k32, probed in every pairing of formats"
    shared.refuse(arguments, reason, *GEMM)
    multiply, about = wgmma.instruction(), wgmma.device()
    instructions = []
    for fmt_a, fmt_b in wgmma.PAIRS:
        with console.waiting(f"probe {fmt_a.name} x {fmt_b.name}"):
            instructions.append(
                instruction.identify(
                    multiply,
                    fmt_a,
                    fmt_b,
                    name="wgmma",
                    about=about,
                    count=INSTRUCTIONS,
                    seed=arguments.seed,
                )
            )
        instructions[-1].print()
        if arguments.record:
            recorded = recording.record_instruction(instructions[-1], multiply, arguments.record)
            console.show(f"recorded {recorded}")
    pairings = instruction.Pairings(instructions)
    if arguments.json:
        pairings.write(arguments.json)
    return pairings.exit_code


def _replay(arguments: argparse.Namespace) -> int:
    from fp8ref.conformance.gemm import recording

    reason = "--replay takes all settings from the recordings"
    shared.refuse(arguments, reason, "subject", *GEMM, "seed", "record", "layout", "framework")
    with console.waiting("verify recordings"):
        recordings = recording.verify_all(arguments.replay)
    code = conclude(recordings, arguments.json)
    require(not recordings.damaged, "\n".join(recordings.damaged))
    return code
