"""fp8ref conform: identify a custom cast, quantizer, optimizer or attention, and test it against
the specification.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Collection, Sequence

from fp8ref.commands import probe, shared, supervision
from fp8ref.commands.shared import check_json, conclude
from fp8ref.shared import console


def add(commands) -> None:
    """Add ``fp8ref conform``."""
    conform = shared.plain(
        commands,
        "conform",
        _conform,
        "Identify a cast, quantizer, optimizer or attention by its outputs.",
        "Identify a cast, quantizer, optimizer or attention from its outputs for chosen inputs, "
        "and compare it with the specification. Exits with 1 if it matches no known name or, with "
        "--expect, differs from the expected name.",
        usage="MODULE:FUNCTION",
        examples=(
            "conform mine:cast --format e5m2",
            "conform mine:quantize --expect torchao --granularity rowwise",
            "conform mine:attention --kind attention --expect fa3 --device cuda",
        ),
    )
    conform.option(
        "subject",
        "MODULE:FUNCTION",
        "a function of one NumPy, PyTorch or JAX array, an optimizer, or attention, a function of "
        "q, k and v (a GEMM is passed to fp8ref probe)",
    )
    conform.option("--format", "NAME", "the format it casts to, e2m1fn among them", "e4m3fn")
    conform.option(
        "--kind", "KIND", "cast, quantizer, gemm, optimizer or attention (default: detected)"
    )
    conform.option(
        "--expect",
        "NAME",
        "the expected cast, such as saturating, policy, such as torchao, layout of states, such as "
        "msamp, or variant of attention, such as fa3",
    )
    conform.option(
        "--granularity",
        "NAME",
        "expected, such as rowwise, with --expect POLICY; or of the scales of a GEMM",
    )
    conform.option(
        "--axis", "N", "the expected reduced axis, -1 or 0, with --expect POLICY", rare=True
    )
    conform.option(
        "--framework", "NAME", "arrays it takes: numpy, torch or jax (default: what works)"
    )
    conform.option("--device", "NAME", "device of PyTorch tensors, such as cuda", "cpu")
    conform.option("--exhaustive", None, "a cast: also all 2^32 float32 inputs (minutes)")
    conform.option(
        "--numbers",
        "KEY=VALUE",
        "an optimizer's learning_rate, b1, b2, eps or weight_decay, such as b2=0.999; passed to it "
        "if it takes them by name",
        [],
        nargs="+",
        rare=True,
    )
    conform.option("--steps", "N", "an optimizer's steps to compare (default 6)", rare=True)
    conform.option(
        "--layout",
        "NAME",
        "attention's order of batch, heads, tokens, features: BHTD (the default) or BTHD",
        rare=True,
    )
    conform.option(
        "--alignment",
        "NAME",
        "where attention's masks align queries: end (the default) or start",
        rare=True,
    )
    supervision.add_timeout(conform)
    shared.add_json(conform)


def _conform(arguments: argparse.Namespace) -> int:
    check_json(arguments.json)
    from fp8ref import formats
    from fp8ref.conformance.gemm import library_gemms
    from fp8ref.conformance.kit import subject as subjects

    if arguments.format not in formats.QUANTIZED_FORMATS:
        raise ValueError(
            f"--format is one of {', '.join(formats.QUANTIZED_FORMATS)}; got {arguments.format}."
        )
    kinds = (*subjects.KINDS, "optimizer", "attention")
    if arguments.kind not in (None, *kinds):
        raise ValueError(f"--kind is one of {', '.join(kinds)}; got {arguments.kind}.")
    if arguments.axis not in (None, -1, 0):
        raise ValueError(
            f"--axis is -1, the last axis of x [M, K], or 0, the first; got {arguments.axis}."
        )
    with contextlib.redirect_stdout(sys.stderr), console.waiting("conform"):
        outcome = _attention(arguments) or _optimizer(arguments)
    if outcome is not None:
        return conclude(outcome, arguments.json)
    for option in shared.used(arguments, "numbers", "steps"):
        raise ValueError(
            f"{option} is of an optimizer; {arguments.subject} is none. Leave it out, or name "
            "--kind optimizer."
        )
    for option in shared.used(arguments, "layout", "alignment"):
        raise ValueError(
            f"{option} is of attention; {arguments.subject} is none. Leave it out, or name "
            "--kind attention."
        )
    expects_cast = _expects_cast(arguments.expect)
    # what somebody's function prints is no part of the answer
    with contextlib.redirect_stdout(sys.stderr), console.waiting("conform"):
        function = library_gemms.load(arguments.subject)
        kind = arguments.kind or subjects.kind_of(
            arguments.subject, function, framework=arguments.framework, device=arguments.device
        )
        if kind != "gemm":
            expect = None if expects_cast != (kind == "cast") else arguments.expect
            fmt = formats.QUANTIZED_FORMATS[arguments.format]
            outcome = _identify(arguments, function, kind, fmt, expect)
    if kind == "gemm":
        return _probe(arguments)
    if arguments.expect and outcome.expected is None:
        outcome = _another_kind(outcome, arguments.expect)
    return conclude(outcome, arguments.json)


def _attention(arguments: argparse.Namespace):
    """The outcome of an attention function; None if the subject is none."""
    from fp8ref import formats
    from fp8ref.conformance.attention import identify_attention, subjects
    from fp8ref.conformance.gemm import library_gemms

    if arguments.kind not in (None, "attention"):
        return None
    function = library_gemms.load(arguments.subject)
    if arguments.kind is None and not subjects.is_attention(function):
        return None
    if unused := shared.used(arguments, "granularity", "axis", "exhaustive", "numbers", "steps"):
        raise ValueError(
            f"{', '.join(unused)}: {arguments.subject} is attention, of which the variant says all "
            "of it. Leave it out."
        )
    if arguments.format not in formats.FP8_FORMATS:
        raise ValueError(
            f"--format of attention is one of {', '.join(formats.FP8_FORMATS)}; got "
            f"{arguments.format}."
        )
    return identify_attention(
        function,
        name=arguments.subject,
        expect=arguments.expect,
        fmt=formats.FP8_FORMATS[arguments.format],
        framework=arguments.framework,
        device=arguments.device,
        layout=arguments.layout or subjects.LAYOUTS[0],
        alignment=arguments.alignment or "end",
    )


def _optimizer(arguments: argparse.Namespace):
    """The outcome of an optimizer; None if the subject is none."""
    from fp8ref.conformance import identify_optimizer
    from fp8ref.conformance.gemm import library_gemms
    from fp8ref.conformance.optimizer import forms, subjects

    if arguments.kind not in (None, "optimizer"):
        return None
    optimizer = library_gemms.load(arguments.subject)
    if arguments.kind is None and subjects.kind_of(optimizer) is None:
        return None
    if unused := shared.used(
        arguments, "granularity", "axis", "framework", "exhaustive", "format", "device"
    ):
        raise ValueError(
            f"{', '.join(unused)}: {arguments.subject} is an optimizer, of which the layout says "
            "all of it. Leave it out."
        )
    return identify_optimizer(
        optimizer,
        name=arguments.subject,
        expect=arguments.expect,
        numbers=forms.Numbers(**_numbers(arguments.numbers, subjects.NUMBERS)),
        steps=subjects.STEPS if arguments.steps is None else arguments.steps,
    )


def _numbers(texts: Sequence[str], keys: Collection[str]) -> dict[str, float]:
    numbers = {}
    for text in texts:
        key, _, value = text.partition("=")
        try:
            if key not in keys:
                raise ValueError
            numbers[key] = float(value)
        except ValueError:
            raise ValueError(
                f"--numbers are KEY=VALUE, with a key of {', '.join(keys)}; got {text!r}."
            ) from None
    return numbers


def _expects_cast(name: str | None) -> bool | None:
    """Whether --expect names a cast's behavior, or a quantizer's policy; None without."""
    from fp8ref import policy
    from fp8ref.conformance.cast.behavior import KNOWN_CASTS, NANS_OF_4_BITS

    casts = dict.fromkeys([*KNOWN_CASTS, *NANS_OF_4_BITS])
    policies = (*policy.POLICIES, *policy.FP4_POLICIES)
    if name is not None and name not in casts and name not in policies:
        raise ValueError(
            f"--expect is a cast's behavior, one of {', '.join(casts)}, or a quantizer's "
            f"policy, one of {', '.join(policies)}; got {name}."
        )
    return None if name is None else name in casts


def _identify(arguments: argparse.Namespace, function, kind: str, fmt, expect: str | None):
    from fp8ref import conformance

    of_scales = shared.used(arguments, "granularity", "axis")
    if kind == "cast":
        if of_scales:
            raise ValueError(
                f"{', '.join(of_scales)}: {arguments.subject} is a cast, which has no scales. "
                "Leave it out, or name --kind quantizer."
            )
        return conformance.identify_cast(
            function,
            fmt,
            name=arguments.subject,
            expect=expect,
            framework=arguments.framework,
            device=arguments.device,
            exhaustive=arguments.exhaustive,
        )
    if arguments.exhaustive:
        raise ValueError(
            f"--exhaustive tests all inputs of a cast; {arguments.subject} is a quantizer. Leave "
            "it out, or name --kind cast."
        )
    if expect is None and of_scales:
        raise ValueError(
            "--granularity and --axis need an expected policy. Name one, such as --expect torchao."
        )
    return conformance.identify_quantizer(
        function,
        fmt,
        name=arguments.subject,
        expect=expect,
        granularity=arguments.granularity,
        axis=arguments.axis,
        framework=arguments.framework,
        device=arguments.device,
    )


def _another_kind(outcome, expect: str):
    """The outcome if --expect named a policy for a cast, or a cast for a quantizer."""
    from fp8ref.conformance.kit.finding import Counterexample

    if outcome.kind == "cast":
        expected = "a policy: codes that depend on the amax of a tensor"
        behavior, clause = "codes that depend on each number alone, and no scale", "S-5"
    else:
        expected = "a cast: codes that depend on each number alone"
        behavior, clause = "codes that depend on other elements too", "C-1"
    witness = Counterexample("x [256, 384]", behavior, f"{expect!r}, {expected}", clause)
    return dataclasses.replace(outcome, expected=expect, differences=[witness])


def _probe(arguments: argparse.Namespace) -> int:
    if unused := shared.used(arguments, "expect", "axis", "framework", "exhaustive", "device"):
        raise ValueError(
            f"{', '.join(unused)}: {arguments.subject} is a GEMM, which 'fp8ref probe "
            f"{arguments.subject}' identifies. Leave it out, or name --kind cast or quantizer."
        )
    try:
        return probe.probe_function(
            arguments.subject,
            formats=(arguments.format, arguments.format),
            granularity=arguments.granularity,
            json=arguments.json,
        )
    except ValueError as error:
        if arguments.kind:
            raise
        raise ValueError(
            f"{error}\n{arguments.subject} has two arguments without defaults, so it was called as "
            "a GEMM, with operands a and b. A cast or quantizer takes one, x: give the others "
            "defaults."
        ) from error
