"""fp8ref conform: identify a cast, quantizer, decoder, optimizer or attention by its outputs."""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Collection, Sequence

from fp8ref.commands import probe, shared, supervision
from fp8ref.commands.shared import check_json, conclude
from fp8ref.shared import console, package_data
from fp8ref.shared.errors import require

_TABLES = package_data.tables(__file__, "conform")
KINDS = {kind: table["words"] for kind, table in _TABLES.items()}
"""{what a subject may be: the same in words}."""

OPTIONS = {kind: table["options"] for kind, table in _TABLES.items()}
"""{kind: the options that are for it}."""


def add(commands) -> None:
    """Add ``fp8ref conform``."""
    conform = shared.plain(commands, "conform MODULE:FUNCTION", _conform)
    option, rare = conform.option, conform.rare_option
    text = "a function of an array, an optimizer, or attention, a function of q, k, v"
    option("subject", "MODULE:FUNCTION", text)
    option("--format", "NAME", "what it casts to, e2m1fn among others", "e4m3fn")
    option("--kind", "KIND", f"one of {', '.join(KINDS)} (default: detected)")
    text = "a cast, such as saturating, a policy, such as torchao, a layout, such as te,"
    option("--expect", "NAME", f"{text} or attention, such as fa3")
    option("--granularity", "NAME", "of --expect POLICY, such as rowwise, a GEMM or a decoder")
    option("--framework", "NAME", "numpy, torch or jax (default: the first that works)")
    option("--device", "NAME", "of PyTorch tensors, such as cuda", "cpu")
    option("--exhaustive", None, "a cast: also all 2^32 float32 inputs (minutes)")
    supervision.add_timeout(conform)
    shared.add_json(conform)
    rare("--axis", "N", "reduced axis of --expect POLICY: -1 or 0")
    text = "an optimizer's learning_rate, b1, b2, eps or weight_decay, such as b2=0.999"
    rare("--numbers", "KEY=VALUE", text, [], nargs="+")
    rare("--steps", "N", "steps of an optimizer to compare (default 6)")
    text = "of attention: BHTD (batch, heads, tokens, features) or BTHD; of a decoder's scales"
    rare("--layout", "NAME", f"{text}, such as swizzled_128x4")
    rare("--alignment", "NAME", "of attention's masks: end (the default) or start")


def _conform(arguments: argparse.Namespace) -> int:
    """Identify a cast, quantizer, decoder, optimizer or attention.

    Exits with 1 if it matches no known name or, with --expect, differs from the expected name.

    $ fp8ref conform mine:quantize --expect torchao --granularity rowwise
    $ fp8ref conform mine:dequantize --kind decoder --granularity mx_1x32
    $ fp8ref conform torch.optim:AdamW --expect float32
    """
    check_json(arguments.json)
    from fp8ref import formats
    from fp8ref.conformance.gemm import library_gemms

    if arguments.kind == "dequantizer":  # a decoder with a granularity
        arguments.kind = "decoder"
    decodes = arguments.kind == "decoder"
    named = formats.FORMATS if decodes else [*formats.NARROW_FORMATS, "e8m0fnu"]
    text = f"--format is one of {', '.join(named)}; got {arguments.format}."
    require(arguments.format in named, text)
    text = f"--kind is one of {', '.join(KINDS)}; got {arguments.kind}."
    require(arguments.kind in (None, *KINDS), text)
    text = f"--axis is -1, the last axis of x [M, K], or 0, the first; got {arguments.axis}."
    require(arguments.axis in (None, -1, 0), text)
    # what somebody's function prints is no part of the answer
    with contextlib.redirect_stdout(sys.stderr), console.waiting("conform"):
        subject = library_gemms.load(arguments.subject)
        kind = arguments.kind or _kind(arguments, subject)
        for option in shared.used(arguments, *itertools.chain(*OPTIONS.values())):
            name = option.removeprefix("--")
            kinds = [kind for kind in KINDS if name in OPTIONS[kind]]
            require(
                kind in kinds,
                f"{option} is for {' or '.join(KINDS[name] for name in kinds)}; "
                f"{arguments.subject} is {KINDS[kind]}. Leave it out, or name another --kind.",
            )
        if kind == "attention":
            outcome = _attention(arguments, subject)
        elif kind == "optimizer":
            outcome = _optimizer(arguments, subject)
        elif kind == "decoder":
            outcome = _decoder(arguments, subject)
        elif kind != "gemm":
            outcome = _cast_or_quantizer(arguments, subject, kind)
    return _probe(arguments) if kind == "gemm" else conclude(outcome, arguments.json)


def _kind(arguments: argparse.Namespace, subject) -> str:
    from fp8ref.conformance.attention import subjects as attention
    from fp8ref.conformance.kit import subject as subjects
    from fp8ref.conformance.optimizer import subjects as optimizers

    if attention.is_attention(subject):
        return "attention"
    if optimizers.kind_of(subject) is not None:
        return "optimizer"
    return subjects.kind_of(
        arguments.subject, subject, framework=arguments.framework, device=arguments.device
    )


def _attention(arguments: argparse.Namespace, function):
    from fp8ref import formats
    from fp8ref.conformance.attention import identify_attention, subjects

    names = ", ".join(formats.FP8_FORMATS)
    text = f"--format of attention is one of {names}; got {arguments.format}."
    require(arguments.format in formats.FP8_FORMATS, text)
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


def _decoder(arguments: argparse.Namespace, function):
    from fp8ref.conformance import identify_decoder

    return identify_decoder(
        function,
        arguments.format,
        name=arguments.subject,
        granularity=arguments.granularity,
        layout=arguments.layout or "row_major",
        framework=arguments.framework,
        device=arguments.device,
    )


def _optimizer(arguments: argparse.Namespace, optimizer):
    from fp8ref.conformance import identify_optimizer
    from fp8ref.conformance.optimizer import forms, subjects

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


def _cast_or_quantizer(arguments: argparse.Namespace, function, kind: str):
    from fp8ref import conformance, formats

    expect = arguments.expect
    same = expect if _expected_kind(expect) == kind else None
    is_cast = kind == "cast"
    identify = functools.partial(
        conformance.identify_cast if is_cast else conformance.identify_quantizer,
        function,
        formats.FORMATS[arguments.format],
        name=arguments.subject,
        expect=same,
        framework=arguments.framework,
        device=arguments.device,
    )
    if not is_cast and same is None and shared.used(arguments, "granularity", "axis"):
        raise ValueError(
            "--granularity and --axis need an expected policy. Name one, such as --expect torchao."
        )
    outcome = (
        identify(exhaustive=arguments.exhaustive)
        if is_cast
        else identify(granularity=arguments.granularity, axis=arguments.axis)
    )
    return outcome if same == expect else _another_kind(outcome, expect)


def _expected_kind(name: str | None) -> str | None:
    """Whether --expect names a cast's behavior, or a quantizer's policy; None without."""
    from fp8ref import policy
    from fp8ref.conformance.cast import behavior

    casts = behavior.NAMES
    policies = (*policy.POLICIES, *policy.FP4_POLICIES)
    require(
        name is None or name in casts or name in policies,
        f"--expect is a cast's behavior, one of {', '.join(casts)}, or a quantizer's policy, one "
        f"of {', '.join(policies)}; got {name}.",
    )
    return None if name is None else "cast" if name in casts else "quantizer"


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
    try:
        return probe.probe_function(arguments)
    except ValueError as error:
        if arguments.kind:
            raise
        raise ValueError(
            f"{error}\n{arguments.subject} has two arguments without defaults, so it was called as "
            "a GEMM, with operands a and b. A cast or quantizer takes one, x: give the others "
            "defaults. Name --kind decoder if it takes codes and scales."
        ) from error
