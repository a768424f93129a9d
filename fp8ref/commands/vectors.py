"""fp8ref vectors gen and verify: test vectors for programs in any language."""

import argparse
import contextlib
import sys

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json
from fp8ref.shared import console, files

FORM = """
A line is one vector: fields separated by blanks, each one number or several separated by commas, \
as bits in hexadecimal (a shape in decimal).
Write each line again, and append your answers:
  cast      VALUE                              CODE
  scale     AMAX                               SCALE
  quantize  SHAPE VALUES                       CODES SCALES
  gemm      M,N,K CODES_A SCALE_INV_A CODES_B SCALE_INV_B   VALUES
  attention B,H,Hkv,Tq,Tk,D Q K V              O LSE
The last axis is the fastest. Lines that begin with # are comments. The first is the header, which \
holds all settings: copy it, and verify reads
them. Without the header, verify needs the same options as gen. In both cases verify makes the \
vectors again. It expects each vector once, in any
order.
  fp8ref vectors gen cast --format e4m3fn | ./yours | fp8ref vectors verify cast --format e4m3fn
"""
"""The text format of vectors, for --help."""

# What is asked of each operation: (option, type, help)
_FORMAT = ("--format", str, "the format, such as e4m3fn; e2m1fn too, but not for a GEMM")
_SOURCE = (
    "--source",
    str,
    "the dtype of the inputs: float32 (the default), bfloat16, float16; for a cast also float64",
)
_POLICY = (
    "--policy",
    str,
    "the scale policy: torchao (the default), or another of spec S-9, S-14, S-20 and S-22",
)
_GRANULARITY = (
    "--granularity",
    str,
    "tensorwise (the default), rowwise, blockwise_1x128, blockwise_128x128, mx_1x32, mx_32x32; "
    "for a quantizer, of any format, also nvfp4_1x16",
)
_SHAPE = (
    "--shape",
    str,
    "the shape of the tensor, such as 4,128 (the default); for a GEMM M,N,K (default 4,4,256)",
)
_SEED = ("--seed", int, "the seed of the random inputs (default 0)")
_COUNT = ("--count", int, "the number of random inputs, tensors or GEMMs")
ASKED = {
    "cast": (_FORMAT, _SOURCE, _SEED, _COUNT),
    "scale": (_FORMAT, _POLICY, _SEED, _COUNT),
    "quantize": (
        _FORMAT,
        _SOURCE,
        _POLICY,
        _GRANULARITY,
        ("--axis", int, "the reduced axis (default -1)"),
        _SHAPE,
        _SEED,
        _COUNT,
    ),
    "gemm": (
        _FORMAT,
        ("--format-b", str, "the format of the second operand (default: --format)"),
        _GRANULARITY,
        ("--out-dtype", str, "float32 (the default), bfloat16 or float16"),
        _SHAPE,
        _SEED,
        _COUNT,
    ),
    "attention": (
        ("--variant", str, "the variant, such as fa3 (spec A-1)"),
        ("--mask", str, "full (the default), causal or causal_start"),
        ("--window", str, "left,right, -1 for an open side (default none)"),
        ("--softcap", str, "a number (default none; A-22)"),
        ("--sinks", str, "a number for each query head, with commas (default none; A-23)"),
        ("--shape", str, "B,H,Hkv,Tq,Tk,D (default 1,2,1,4,200,32)"),
        _SEED,
        _COUNT,
    ),
}
"""{operation: (option, type, help) of what is asked}."""

_MADE = (
    "--made",
    "the kind of the scales: scale (the default), which multiplies into FP8, scale_inv, or "
    "e8m0, the code of scale_inv",
)
RULES = {
    "cast": (("--rounding", "nearest_even (the default), nearest_away, toward_zero, to_odd"),),
    "scale": (_MADE,),
    "quantize": (_MADE,),
    "gemm": (
        ("--accumulate", "exact (the default), f32, hopper_fast, hopper_slow, ada, blackwell"),
        (
            "--epilogue",
            "scale_then_round (the default), product_then_round, unit_round_scale_round",
        ),
    ),
    "attention": (
        (
            "--exponentials",
            "exact (the default), or hardware: within A-5's bound, which changes few outputs",
        ),
    ),
}
"""{operation: (option, help) of how answers are judged}."""

WHAT = {
    "cast": "a cast",
    "scale": "a scale",
    "quantize": "a quantizer",
    "gemm": "a scaled GEMM",
    "attention": "attention",
}
"""{operation: what it tests, in words}."""


def add(commands) -> None:
    """Add ``fp8ref vectors gen`` and ``fp8ref vectors verify``."""
    help = "Test vectors for programs in any language."
    vectors = commands.add_parser("vectors", help=help, **_long(f"{help}\n{FORM}"))
    verbs = vectors.add_subparsers(required=True, metavar="gen | verify")
    gen = verbs.add_parser(
        "gen",
        help="write vectors to standard output",
        **_long(f"Write test vectors to standard output.\n{FORM}"),
    )
    verify = verbs.add_parser(
        "verify",
        help="judge answers from standard input",
        **_long(f"Judge answers from standard input.\n{FORM}"),
    )
    makers, judges = (
        of.add_subparsers(required=True, metavar="|".join(ASKED)) for of in (gen, verify)
    )
    for operation in ASKED:
        maker = shared.plain(makers, operation, _gen, f"vectors of {WHAT[operation]}")
        judge = shared.plain(
            judges,
            operation,
            _verify,
            f"judge {WHAT[operation]}",
            f"Judge {WHAT[operation]} by vectors with answers, from standard input. "
            "Exits with 1 if an answer differs, or a vector is missing, unasked or repeated.",
        )
        for command in (maker, judge):
            command.set_defaults(operation=operation)
            for option, kind, about in ASKED[operation]:
                needed = command is maker and option in ("--format", "--variant")
                command.add_argument(
                    option,
                    type=kind,
                    metavar=option.removeprefix("--").upper().replace("-", "_"),
                    help=about,
                    required=needed,
                )
        for option, about in RULES[operation]:
            judge.add_argument(option, metavar="NAME", help=about)
        if operation == "cast":
            judge.add_argument(
                "--no-saturate",
                action="store_true",
                help="overflow gives Inf, or NaN in a format without Inf (C-4)",
            )
        if operation == "gemm":
            judge.add_argument(
                "--bound",
                action="store_true",
                help="accept sums of float32 in any order: within B-1's bound of the exact sum",
            )
        judge.add_argument(
            "--some",
            action="store_true",
            help="judge the vectors received, even if some are missing, unasked or repeated",
        )
        shared.add_json(judge)


def _long(description: str) -> dict:
    return {
        "description": description,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }


def _gen(arguments: argparse.Namespace) -> int:
    from fp8ref.conformance.vectors.operations import generate

    with contextlib.nullcontext() if sys.stdout.isatty() else console.waiting("vectors gen"):
        sys.stdout.writelines(
            f"{line}\n" for line in generate(arguments.operation, _settings(arguments))
        )
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    check_json(arguments.json)
    rules = {
        option.removeprefix("--"): getattr(arguments, option.removeprefix("--"))
        for option, _ in RULES[arguments.operation]
    }
    rules = {name: value for name, value in rules.items() if value is not None}
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
    if arguments.json:
        verdict.write(arguments.json)
    console.show(*verdict.text().split("\n"))  # plain text: vectors need no console
    return verdict.exit_code


def _settings(arguments: argparse.Namespace) -> dict:
    """The settings that were given."""
    names = [
        option.removeprefix("--").replace("-", "_") for option, _, _ in ASKED[arguments.operation]
    ]
    return {
        name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None
    }
