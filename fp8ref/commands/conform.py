"""fp8ref conform: identify a custom cast, quantizer, optimizer or attention, and test it against
the specification.
"""

import argparse
import contextlib
import dataclasses
import sys
from pathlib import Path

from fp8ref.commands import probe, shared, supervision
from fp8ref.commands.shared import check_json, conclude
from fp8ref.shared import console


def add(commands) -> None:
    """Add ``fp8ref conform``."""
    conform = shared.plain(
        commands,
        "conform",
        _conform,
        "Identify a cast, quantizer, optimizer or attention, and compare it with the "
        "specification.",
        "Identify a cast or a quantizer from its outputs for chosen inputs. For a cast: how "
        "it rounds, saturates, and treats zeros, subnormals, infinities and NaNs. For a "
        "quantizer: which elements share a scale, and which policy computes the scale. For an "
        "optimizer: how it stores its moments, and in which order it computes AdamW. For an "
        "attention function: its masks, tiles, casts and sums, and which variant it is. Exits "
        "with 1 if it matches no known name or, with --expect, differs from the expected "
        "name.",
    )
    conform.add_argument(
        "subject",
        metavar="MODULE:FUNCTION",
        help="a function of one NumPy, PyTorch or JAX array; a GEMM is passed to fp8ref probe; "
        "an optimizer; or attention, a function of q, k and v",
    )
    conform.add_argument(
        "--format",
        default="e4m3fn",
        metavar="NAME",
        help="the format it casts to, e2m1fn among them (default e4m3fn)",
    )
    conform.add_argument(
        "--kind",
        metavar="KIND",
        help="cast, quantizer, gemm, optimizer or attention (default: detected)",
    )
    conform.add_argument(
        "--expect",
        metavar="NAME",
        help="the expected cast behavior, such as saturating, policy, such as torchao, layout "
        "of states, such as msamp, or variant of attention, such as fa3; exit with 1 if it "
        "differs",
    )
    conform.add_argument(
        "--granularity",
        metavar="NAME",
        help="the expected granularity, such as rowwise, with --expect POLICY; for a GEMM, the "
        "granularity of its scales",
    )
    conform.add_argument(
        "--axis",
        type=int,
        metavar="N",
        help="the expected reduced axis, -1 or 0, with --expect POLICY",
    )
    conform.add_argument(
        "--framework",
        metavar="NAME",
        help="the arrays it takes: numpy, torch or jax (default: the first that works)",
    )
    conform.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help="the device of PyTorch tensors, such as cuda (default cpu)",
    )
    conform.add_argument(
        "--exhaustive",
        action="store_true",
        help="also test a cast with all 2^32 float32 inputs (minutes)",
    )
    conform.add_argument(
        "--numbers",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="of an optimizer: learning_rate, b1, b2, eps or weight_decay, such as b2=0.999; "
        "passed to it if it takes them by name",
    )
    conform.add_argument(
        "--layout",
        metavar="NAME",
        help="of attention: BHTD (the default) or BTHD, the order of batch, heads, tokens, "
        "features",
    )
    conform.add_argument(
        "--alignment",
        metavar="NAME",
        help="of attention: end (the default) or start, to which its masks align queries",
    )
    conform.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="of an optimizer: the steps that are compared (default 6)",
    )
    supervision.add_timeout(conform)
    conform.add_argument("--json", type=Path, metavar="FILE", help="write the findings to FILE")


def _conform(known: argparse.Namespace) -> int:
    check_json(known.json)
    from fp8ref import formats
    from fp8ref.conformance.gemm import library_gemms
    from fp8ref.conformance.kit import subject as subjects

    if known.format not in formats.QUANTIZED_FORMATS:
        raise ValueError(
            f"--format is one of {', '.join(formats.QUANTIZED_FORMATS)}; got {known.format}."
        )
    kinds = (*subjects.KINDS, "optimizer", "attention")
    if known.kind not in (None, *kinds):
        raise ValueError(f"--kind is one of {', '.join(kinds)}; got {known.kind}.")
    if known.axis not in (None, -1, 0):
        raise ValueError(
            f"--axis is -1, the last axis of x [M, K], or 0, the first; got {known.axis}."
        )
    with contextlib.redirect_stdout(sys.stderr), console.waiting("conform"):
        outcome = _attention(known) or _optimizer(known)
    if outcome is not None:
        return conclude(outcome, known.json)
    for option, value in (("--numbers", known.numbers or None), ("--steps", known.steps)):
        if value is not None:
            raise ValueError(
                f"{option} is of an optimizer; {known.subject} is none. Leave it out, or name "
                "--kind optimizer."
            )
    for option, value in (("--layout", known.layout), ("--alignment", known.alignment)):
        if value is not None:
            raise ValueError(
                f"{option} is of attention; {known.subject} is none. Leave it out, or name "
                "--kind attention."
            )
    expects_cast = _expects_cast(known.expect)
    # what somebody's function prints is no part of the answer
    with (
        contextlib.redirect_stdout(sys.stderr),
        console.waiting("conform"),
    ):
        function = library_gemms.load(known.subject)
        kind = known.kind or subjects.kind_of(
            known.subject, function, framework=known.framework, device=known.device
        )
        if kind != "gemm":
            expect = None if expects_cast != (kind == "cast") else known.expect
            outcome = _identify(
                known, function, kind, formats.QUANTIZED_FORMATS[known.format], expect
            )
    if kind == "gemm":
        return _probe(known)
    if known.expect and outcome.expected is None:
        outcome = _another_kind(outcome, known.expect)
    return conclude(outcome, known.json)


def _attention(known: argparse.Namespace):
    """The outcome of an attention function; None if the subject is none."""
    from fp8ref import formats
    from fp8ref.conformance.attention import identify_attention, subjects
    from fp8ref.conformance.attention.arguments import Alignment
    from fp8ref.conformance.gemm import library_gemms

    if known.kind not in (None, "attention"):
        return None
    found = library_gemms.load(known.subject)
    if known.kind is None and not subjects.is_attention(found):
        return None
    given = {
        "--granularity": known.granularity,
        "--axis": known.axis,
        "--exhaustive": known.exhaustive or None,
    }
    given |= {"--numbers": known.numbers or None, "--steps": known.steps}
    if unused := [name for name, value in given.items() if value is not None]:
        raise ValueError(
            f"{', '.join(unused)}: {known.subject} is attention, of which the variant says all "
            "of it. Leave it out."
        )
    if known.format not in formats.FP8_FORMATS:
        raise ValueError(
            f"--format of attention is one of {', '.join(formats.FP8_FORMATS)}; got {known.format}."
        )
    where = {
        "name": known.subject,
        "framework": known.framework,
        "device": known.device,
        "layout": known.layout or subjects.LAYOUTS[0],
    }
    fmt = formats.FP8_FORMATS[known.format]
    alignment: Alignment = known.alignment or "end"
    return identify_attention(found, expect=known.expect, fmt=fmt, alignment=alignment, **where)


def _optimizer(known: argparse.Namespace):
    """The outcome of an optimizer; None if the subject is none."""
    from fp8ref.conformance import identify_optimizer
    from fp8ref.conformance.gemm import library_gemms
    from fp8ref.conformance.optimizer import forms, subjects

    if known.kind not in (None, "optimizer"):
        return None
    found = library_gemms.load(known.subject)
    if known.kind is None and subjects.kind_of(found) is None:
        return None
    given = {
        "--granularity": known.granularity,
        "--axis": known.axis,
        "--framework": known.framework,
        "--exhaustive": known.exhaustive or None,
    }
    given |= {
        "--format": None if known.format == "e4m3fn" else known.format,
        "--device": None if known.device == "cpu" else known.device,
    }
    if unused := [name for name, value in given.items() if value is not None]:
        raise ValueError(
            f"{', '.join(unused)}: {known.subject} is an optimizer, of which the layout says "
            "all of it. Leave it out."
        )
    numbers = {}
    for text in known.numbers:
        key, _, value = text.partition("=")
        try:
            if key not in subjects.NUMBERS:
                raise ValueError
            numbers[key] = float(value)
        except ValueError:
            raise ValueError(
                f"--numbers are KEY=VALUE, with a key of {', '.join(subjects.NUMBERS)}; got "
                f"{text!r}."
            ) from None
    steps = subjects.STEPS if known.steps is None else known.steps
    return identify_optimizer(
        found,
        name=known.subject,
        expect=known.expect,
        numbers=forms.Numbers(**numbers),
        steps=steps,
    )


def _expects_cast(name: str | None) -> bool | None:
    """Whether --expect names a cast's behavior (True) or a quantizer's policy (False).

    None without it.
    """
    from fp8ref import policy
    from fp8ref.conformance.cast.behavior import KNOWN_CASTS
    from fp8ref.conformance.cast.fp4 import NAN_CODES

    casts, policies = (
        dict.fromkeys([*KNOWN_CASTS, *NAN_CODES]),
        (*policy.POLICIES, *policy.FP4_POLICIES),
    )
    if name is not None and name not in casts and name not in policies:
        raise ValueError(
            f"--expect is a cast's behavior, one of {', '.join(casts)}, or a quantizer's "
            f"policy, one of {', '.join(policies)}; got {name}."
        )
    return None if name is None else name in casts


def _identify(known: argparse.Namespace, function, kind: str, fmt, expect: str | None):
    from fp8ref import conformance

    where = {
        "name": known.subject,
        "expect": expect,
        "framework": known.framework,
        "device": known.device,
    }
    if kind == "cast":
        given = [
            f"--{name}" for name in ("granularity", "axis") if getattr(known, name) is not None
        ]
        if given:
            raise ValueError(
                f"{', '.join(given)}: {known.subject} is a cast, which has no scales. Leave it "
                "out, or name --kind quantizer."
            )
        return conformance.identify_cast(function, fmt, exhaustive=known.exhaustive, **where)
    if known.exhaustive:
        raise ValueError(
            f"--exhaustive tests all inputs of a cast; {known.subject} is a quantizer. Leave it "
            "out, or name --kind cast."
        )
    if expect is None and (known.granularity is not None or known.axis is not None):
        raise ValueError(
            "--granularity and --axis need an expected policy. Name one, such as --expect torchao."
        )
    return conformance.identify_quantizer(
        function, fmt, granularity=known.granularity, axis=known.axis, **where
    )


def _another_kind(outcome, expect: str):
    """The outcome if --expect named a policy for a cast, or a cast for a quantizer."""
    from fp8ref.conformance.kit.finding import Counterexample

    wanted = (
        "a policy: codes that depend on the amax of a tensor"
        if outcome.kind == "cast"
        else "a cast: codes that depend on each number alone"
    )
    given = (
        "codes that depend on each number alone, and no scale"
        if outcome.kind == "cast"
        else "codes that depend on other elements too"
    )
    clause = "S-5" if outcome.kind == "cast" else "C-1"
    witness = Counterexample(
        input="x [256, 384]",
        bits=(),
        dtype="float32",
        got=given,
        expected=f"{expect!r}, {wanted}",
        clause=clause,
    )
    return dataclasses.replace(outcome, expected=expect, differences=[witness])


def _probe(known: argparse.Namespace) -> int:
    given = {
        "--expect": known.expect,
        "--axis": known.axis,
        "--framework": known.framework,
        "--exhaustive": known.exhaustive or None,
    }
    given["--device"] = None if known.device == "cpu" else known.device
    unused = [name for name, value in given.items() if value is not None]
    if unused:
        raise ValueError(
            f"{', '.join(unused)}: {known.subject} is a GEMM, which 'fp8ref probe "
            f"{known.subject}' identifies. Leave it out, or name --kind cast or quantizer."
        )
    try:
        return probe.of_function(
            known.subject,
            formats=(known.format, known.format),
            granularity=known.granularity,
            json=known.json,
        )
    except ValueError as error:
        if known.kind:
            raise
        raise ValueError(
            f"{error}\n{known.subject} has two arguments without defaults, so it was called as "
            "a GEMM, with operands a and b. A cast or quantizer takes one, x: give the others "
            "defaults."
        ) from error
