"""fp8ref vectors gen, verify and dataset: test vectors for programs in any language."""

import argparse
import contextlib
import sys
from collections.abc import Iterable

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json
from fp8ref.shared import console, files
from fp8ref.shared.arguments import Parser

FORM = """
A line is one vector: fields separated by blanks, each one number or several separated by commas, \
as bits in hexadecimal (a shape in decimal). Write each line again, and append your answers:
  cast      VALUE                              CODE
  decode    CODE SCALE_INV                     VALUE
  scale     AMAX                               SCALE
  quantize  SHAPE VALUES                       CODES SCALES
  gemm      M,N,K CODES_A SCALE_INV_A CODES_B SCALE_INV_B   VALUES
  attention B,H,Hkv,Tq,Tk,D Q K V              O LSE
The last axis is the fastest. Lines that begin with # are comments. The first is the header, which \
holds all settings: copy it, and verify reads them. Without the header, verify needs the same \
options as gen. In both cases verify makes the vectors again. It expects each vector once, in any \
order.
  fp8ref vectors gen cast --format e4m3fn | ./yours | fp8ref vectors verify cast"""
"""The text format of vectors, for --help."""

SETTINGS = {
    "format": ("NAME", "such as e4m3fn; e2m1fn too, but not for a GEMM"),
    "format-b": ("NAME", "the format of the second operand (default: --format)"),
    "variant": ("NAME", "the variant, such as fa3 (spec A-1)"),
    "source": ("NAME", "of the inputs: float32 (default), bfloat16, float16; a cast: float64"),
    "policy": ("NAME", "the scale policy, which fp8ref policies lists (default torchao)"),
    "granularity": (
        "NAME",
        "tensorwise (the default), rowwise, blockwise_1x128, blockwise_128x128, mx_1x32, mx_32x32; "
        "for a quantizer, of any format, also nvfp4_1x16",
    ),
    "scales": ("NAME", "scales of a decoder: float32 (the default), e8m0fnu or e4m3fn codes"),
    "axis": ("N", "the reduced axis (default -1)"),
    "out-dtype": ("NAME", "float32 (the default), bfloat16 or float16"),
    "mask": ("NAME", "full (the default), causal or causal_start"),
    "window": ("A,B", "left,right, -1 for an open side (default none)"),
    "softcap": ("NUMBER", "a number (default none; A-22)"),
    "sinks": ("NUMBERS", "one for each query head, with commas (default none; A-23)"),
    "shape": (
        "SIZES",
        "such as 4,128 (the default); for a GEMM M,N,K (default 4,4,256); for attention "
        "B,H,Hkv,Tq,Tk,D (default 1,2,1,4,200,32)",
    ),
    "seed": ("N", "the seed of the random inputs (default 0)"),
    "count": ("N", "the number of random inputs, tensors or GEMMs"),
}
"""{option: (metavar, help) of what is asked}."""

ASKED = {
    "cast": "format source seed count",
    "decode": "format scales out-dtype seed count",
    "scale": "format policy seed count",
    "quantize": "format source policy granularity axis shape seed count",
    "gemm": "format format-b granularity out-dtype shape seed count",
    "attention": "variant mask window softcap sinks shape seed count",
}
"""{operation: the options of what is asked}."""

_SCALES = {
    "made": "kind of the scales: scale (the default), which multiplies into FP8, scale_inv, or "
    "e8m0, the code of scale_inv"
}
RULES = {
    "cast": {"rounding": "nearest_even (the default), nearest_away, toward_zero, to_odd"},
    "decode": {},
    "scale": _SCALES,
    "quantize": _SCALES,
    "gemm": {
        "accumulate": "exact (the default), f32, hopper_fast, hopper_slow, ada, blackwell",
        "epilogue": "scale_then_round (default), product_then_round, unit_round_scale_round",
    },
    "attention": {
        "exponentials": "exact (the default), or hardware: within A-5's bound, which changes few "
        "outputs"
    },
}
"""{operation: {option: help} of how answers are judged}."""

WHAT = {
    "cast": "a cast",
    "decode": "a decoder",
    "scale": "a scale",
    "quantize": "a quantizer",
    "gemm": "a scaled GEMM",
    "attention": "attention",
}
"""{operation: what it tests, in words}."""

_EXAMPLE = {"--format": "e4m3fn", "--variant": "fa3"}


def add(commands) -> None:
    """Add ``fp8ref vectors gen``, ``verify`` and ``dataset``."""
    text, operations = "Test vectors for programs in any language.", "|".join(ASKED)
    verbs = shared.group(commands, "vectors gen|verify|dataset", f"{text}\n\n{FORM}")
    data_set = shared.plain(verbs, "dataset DIR", _data_set)
    data_set.option("folder", "DIR", "a folder, new or empty")
    data_set.option("--seed", *SETTINGS["seed"])
    data_set.option("--check", None, "compare DIR with its manifest, and write nothing")
    shared.add_json(data_set)
    text = f"Write test vectors to standard output.\n\n{FORM}"
    makers = shared.group(verbs, f"gen {operations}", text)
    text = f"Judge answers from standard input.\n\n{FORM}"
    judges = shared.group(verbs, f"verify {operations}", text)
    for operation, what in WHAT.items():
        needs = "--variant" if operation == "attention" else "--format"
        gen = f"$ fp8ref vectors gen {operation} {needs} {_EXAMPLE[needs]}"
        judge = f"$ fp8ref vectors verify {operation}"
        examples = f"{gen} | ./yours > answers.txt\n{judge} < answers.txt\n"
        text = f"Write test vectors of {what} to standard output.\n\n{examples}{gen} --count 8"
        maker = shared.plain(makers, f"{operation} {needs} NAME", _gen, text)
        _add_settings(maker, operation, needs)
        text = f"Judge {what} by vectors with answers, from standard input.\n\nExits with 1 if an "
        text += f"answer differs, or a vector is missing, unasked or repeated.\n\n{examples}"
        _add_verify(judges, operation, f"{text}{judge} --some --json - < answers.txt")


def _add_verify(commands, operation: str, text: str) -> None:
    judge = shared.plain(commands, operation, _verify, text)
    _add_settings(judge, operation)
    for option, about in RULES[operation].items():
        judge.option(f"--{option}", "NAME", about)
    if operation == "cast":
        about = "overflow gives Inf, or NaN in a format without Inf (C-4)"
        judge.option("--no-saturate", None, about)
    if operation == "gemm":
        about = "accept sums of float32 in any order: within B-1's bound of the exact sum"
        judge.option("--bound", None, about)
    judge.option("--some", None, "judge what came, even if vectors are missing or unasked")
    shared.add_json(judge)


def _add_settings(command: Parser, operation: str, needed: str = "") -> None:
    command.set_defaults(operation=operation)
    for option in ASKED[operation].split():
        metavar, about = SETTINGS[option]
        command.option(f"--{option}", metavar, about, required=f"--{option}" == needed)


def _gen(arguments: argparse.Namespace) -> int:
    from fp8ref.conformance.vectors.operations import generate

    waiting = console.waiting("vectors gen")
    with contextlib.nullcontext() if sys.stdout.isatty() else waiting:
        sys.stdout.writelines(
            f"{line}\n" for line in generate(arguments.operation, _settings(arguments))
        )
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    check_json(arguments.json)
    rules = _named(arguments, RULES[arguments.operation])
    if arguments.operation == "cast":
        rules["saturate"] = not arguments.no_saturate
    if arguments.operation == "gemm":
        rules["bound"] = arguments.bound
    from fp8ref.conformance.vectors.operations import judge

    with console.waiting("vectors verify"):
        verdict = judge(
            arguments.operation,
            files.short_lines(sys.stdin.buffer),
            settings=_settings(arguments),
            rules=rules,
            some=arguments.some,
        )
    console.show(*verdict.text().split("\n"))  # plain text: vectors need no console
    if arguments.json:
        verdict.write(arguments.json)
    return verdict.exit_code


def _data_set(arguments: argparse.Namespace) -> int:
    """Write vectors of every operation and format with their answers, and a manifest of checksums.

    At most 32 MiB in some 230 files, the same bytes for the same fp8ref and seed.

    $ fp8ref vectors dataset fp8-vectors
    $ fp8ref vectors dataset fp8-vectors --check
    $ fp8ref vectors dataset other-vectors --seed 7
    """
    check_json(arguments.json)
    from fp8ref.conformance.vectors import dataset

    if arguments.check:
        shared.refuse(arguments, "--check writes nothing", "seed")
        return shared.conclude(dataset.check(arguments.folder), arguments.json)
    return shared.conclude(dataset.write(arguments.folder, arguments.seed or 0), arguments.json)


def _settings(arguments: argparse.Namespace) -> dict:
    return _named(arguments, ASKED[arguments.operation].split())


def _named(arguments: argparse.Namespace, options: Iterable[str]) -> dict:
    """{name: value} of those options that the command line names."""
    names = (option.replace("-", "_") for option in options)
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
