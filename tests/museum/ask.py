"""How the kit is asked, as its users ask it: each function here makes a question of an exhibit.

Questions of the same words are one object, so that a twin of several exhibits is asked once.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from museum.exhibit import Ask, Verdict

from fp8ref import conformance
from fp8ref.conformance import invariants as properties
from fp8ref.conformance import parameters, require
from fp8ref.conformance.attention import identify_attention, probe, require_attention
from fp8ref.conformance.delayed import require_delayed
from fp8ref.conformance.gemm import grade_gemm
from fp8ref.conformance.gemm.adapters import wrap
from fp8ref.conformance.gemm.grade.groups import grade_grouped
from fp8ref.conformance.gemm.grade.offsets import grade_offsets
from fp8ref.conformance.gemm.scaled_gemm import ProbeError
from fp8ref.conformance.kit.finding import Described
from fp8ref.conformance.kit.subject import ConformanceError
from fp8ref.conformance.optimizer.forms import Form
from fp8ref.conformance.optimizer.identify import identify_optimizer
from fp8ref.conformance.sharded import require_sharded
from fp8ref.formats import by_name as fmt_of


def report(outcome: Described) -> str:
    """What a user reads: the message, then the rows of the table."""
    findings = getattr(outcome, "findings", None) or outcome.table_rows or ()
    rows = [f"  {finding.what}: {finding.text}; {finding.evidence}" for finding in findings]
    return "\n".join([outcome.message, *rows])


def judged(described: Callable[..., Described], *arguments: Any, **options: Any) -> Ask:
    """Identify or grade a function; an error of the kit is its answer too."""

    def ask(function: Callable[..., Any]) -> Verdict:
        try:
            with np.errstate(all="ignore"):
                outcome = described(function, *arguments, **options)
        except (ConformanceError, ProbeError) as error:
            return Verdict(False, str(error))
        return Verdict(outcome.ok, report(outcome))

    return ask


def required(require_: Callable[..., Any], *arguments: Any, **options: Any) -> Ask:
    """Require a property of a function in a test: the AssertionError is the report."""

    def ask(function: Callable[..., Any]) -> Verdict:
        try:
            with np.errstate(all="ignore"):
                require_(function, *arguments, **options)
        except AssertionError as error:
            return Verdict(False, str(error))
        return Verdict(True, "")

    return ask


@functools.cache
def cast(
    fmt: str, expect: str | None = "saturating", *, once: bool = False, **decisions: str
) -> Ask:
    """A cast to a format, by its name, or by decisions such as ``infinities`` where no name has
    them. once: no dtype is rounded to another one first."""

    def ask(function: Callable[..., Any]) -> Verdict:
        try:
            with np.errstate(all="ignore"):
                outcome = conformance.identify_cast(function, fmt, expect=expect)
        except ConformanceError as error:
            return Verdict(False, str(error))
        ok = outcome.identified if decisions else outcome.ok
        ok &= all(outcome.found[key] == value for key, value in decisions.items())
        if once:
            ok &= not any(outcome.found["double_roundings"].values())
        return Verdict(ok, report(outcome))

    return ask


@functools.cache
def decoder(fmt: str, **options: Any) -> Ask:
    """A decoder, or with a granularity a dequantizer."""

    def identified(function: Callable[..., Any]) -> Described:
        return conformance.identify_decoder(function, fmt, framework="numpy", **options)

    return judged(identified)


@functools.cache
def quantizer(
    policy: str, granularity: str = "rowwise", *, fmt: str = "e4m3fn", axis: int | None = -1
) -> Ask:
    """A quantizer of x [M, K] that should follow a policy."""
    return judged(
        conformance.identify_quantizer, fmt, expect=policy, granularity=granularity, axis=axis
    )


@functools.cache
def scales(policy: str, *, fmt: str = "e4m3fn", made: str = "scale") -> Ask:
    """A function of amaxes [n] that should give a policy's scales."""

    def compare(function: Callable[..., Any]) -> None:
        amaxes = [case.values[0] for case in parameters.scales(fmt_of(fmt), policy, made=made)]
        amax = np.concatenate(amaxes)
        require.require_scales(amax, function(amax), fmt_of(fmt), policy=policy, made=made)

    return required(compare)


def invariants(kept: Iterable[Any], fmt: str = "e4m3fn", **options: Any) -> Ask:
    """Properties that every rule has."""
    return required(properties.require_invariants, list(kept), fmt_of(fmt), **options)


def gemm(granularity: str = "tensorwise", granularity_b: str = "", **options: Any) -> Ask:
    """A GEMM of codes and scale_inv of a [M, K] and b [N, K]."""

    def graded(function: Callable[..., Any]) -> Described:
        scaled = wrap(
            function, framework="numpy", granularity=granularity, granularity_b=granularity_b
        )
        return grade_gemm(scaled, **options)

    return judged(graded)


def row_bits(granularity: str = "tensorwise", **options: Any) -> Ask:
    """The same, and a row's bits do not depend on the other rows."""

    def ask(function: Callable[..., Any]) -> Verdict:
        grade = grade_gemm(function, framework="numpy", granularity=granularity, **options)
        return Verdict(grade.ok and bool(grade.rows.alike), grade.message)

    return ask


def grouped(granularity: str = "rowwise", **options: Any) -> Ask:
    """Several products in one call, of lists of operands."""
    return judged(grade_grouped, granularity=granularity, **options)


@functools.cache
def offsets(**options: Any) -> Ask:
    """A grouped GEMM of all rows and the ends of the groups."""
    return judged(grade_offsets, **options)


@functools.cache
def attention(expect: str, **options: Any) -> Ask:
    """Attention that should be a variant, bit for bit, with all its arguments."""
    return judged(identify_attention, expect=expect, **options)


def required_attention(variant: str, **options: Any) -> Ask:
    """Attention that should have every bit of a variant, required in a test."""
    return required(require_attention, variant, **options)


@functools.cache
def probed(**options: Any) -> Ask:
    """Attention of any arithmetic: its masks, heads, descales and range of P."""
    return judged(probe, **options)


@functools.cache
def optimizer(layout: str = "float32", *, specified: bool = False, **options: Any) -> Ask:
    """An AdamW that should store its moments in a layout; specified: also in the specification's
    order of operations."""

    def ask(function: Callable[..., Any]) -> Verdict:
        try:
            outcome = identify_optimizer(function, expect=layout, **options)
        except ConformanceError as error:
            return Verdict(False, str(error))
        ok = outcome.ok and (outcome.form == Form() or not specified)
        return Verdict(ok, report(outcome))

    return ask


@functools.cache
def delayed(rule: Any = "delayed", **options: Any) -> Ask:
    """A delayed scaling state that should follow a rule."""
    return required(require_delayed, rule, **options)


@functools.cache
def sharded(**options: Any) -> Ask:
    """A collective that should give every rank the amax of the whole tensor."""
    return required(require_sharded, **options)
