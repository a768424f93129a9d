"""Require that somebody's delayed scaling follows a rule; the error has the simplest sequence of
steps that shows it does not.

require_delayed(MyScaling, "delayed")       # a class with observe(amax), update() and scale
"""

from collections.abc import Collection
from typing import Any

from fp8ref.conformance.delayed import sequences
from fp8ref.conformance.delayed.comparison import Asked, Departure, departure
from fp8ref.conformance.delayed.identify import field_of, identify_subject
from fp8ref.conformance.delayed.subject import Subject, subject_of
from fp8ref.conformance.kit import difficulty as kit
from fp8ref.formats import E4M3FN, Format
from fp8ref.spec.delayed import DelayedScaling, by_name


def require_delayed(
    implementation: Any,
    rule: str | DelayedScaling | Asked = "delayed",
    *,
    made: str = "scale",
    shows: str = "next",
    takes: str = "amax",
    framework: str = "numpy",
    without: Collection[str] = (),
    examples: int = 25,
) -> None:
    """Require the rule's scales of a delayed scaling state, else raise an AssertionError (H-13).

    implementation  a class, a function that makes an object, or ``Functions``; see ``subject``.
    rule      a name in ``fp8ref.spec.delayed.DELAYED``, or a DelayedScaling, to e4m3fn; or
              ``Asked``, which has a rule, another fmt, made and shows.
    made      what it shows: ``scale`` or ``scale_inv``.
    shows     ``next``: the scale of the coming step; ``stored``: what the state stores.
    takes     what observe takes: ``amax``, a float32 number, or ``tensor``, float32 [2, 3].
    without   keys of ``sequences.DIFFICULTIES`` that are left out. ``load`` and ``reset`` are left
              out where functions for them are missing.
    examples  random sequences of each difficulty, beside fixed ones.

    Shapes:   a scale is one number.
    Specials: all NaNs count as equal. A rule's history of 1,024 takes sequences of more steps.
    Raises:   ValueError: an unknown rule or word; a class without the methods.
    Source:   spec H-1 to H-8, H-13.
    """
    subject = subject_of(implementation, takes=takes, framework=framework)
    if isinstance(rule, Asked) and (made, shows) != ("scale", "next"):
        raise ValueError(
            f"Asked has its own made and shows; got made={made!r} and shows={shows!r} beside it. "
            "Set them in it."
        )
    asked = rule if isinstance(rule, Asked) else asked_of(rule, E4M3FN, made, shows)
    deviations = departures(subject, asked, without=without, examples=examples)
    if not deviations:
        return
    lines = [
        f"{subject.name} is not delayed scaling {asked.rule.name!r}:",
        *(f"  {deviation}" for deviation in deviations),
    ]
    identified = identify_subject(subject, asked)
    differ = [
        f"{key} {value}, not {field_of(asked.rule, key)}"
        for key, value in identified.fields.items()
        if field_of(asked.rule, key) not in (value, *identified.others.get(key, ()))
    ]
    if differ:
        lines.append(f"  It follows a rule with {'; '.join(differ)}.")
    lines += [f"  {sentence}." for sentence in identified.evidence]
    raise AssertionError("\n".join(lines))


def asked_of(rule: str | DelayedScaling, fmt: Format, value: str, shows: str) -> Asked:
    """The question; ValueError for an unknown rule or word."""
    return Asked(rule=by_name(rule), fmt=fmt, made=value, shows=shows)


def departures(
    subject: Subject, asked: Asked, *, without: Collection[str] = (), examples: int = 25
) -> list[Departure]:
    """The simplest departure from the rule of each difficulty. Where ordinary steps depart, that
    one alone: it would show in all others.

    Raises:   ValueError: an unknown difficulty; ``ordinary`` cannot be left out.
    """
    kit.check_without(without, sequences.DIFFICULTIES)
    history = sequences.rule_history(asked.rule)
    short = min(history, sequences.LONGEST)
    # Ordinary sequences first and alone: they may be much longer than all others.
    if one := departure(subject, asked, "ordinary", sequences.fixed("ordinary", history)):
        return [one]
    cases = {
        difficulty: [
            *(sequences.fixed(difficulty, short) if difficulty != "ordinary" else []),
            *sequences.drawn(difficulty, short, examples),
        ]
        for difficulty in sequences.DIFFICULTIES
        if difficulty not in (*without, *subject.lacks)
    }
    specified = iter(asked.scales([sequence for of in cases.values() for sequence in of]))
    scales = {difficulty: [next(specified) for _ in of] for difficulty, of in cases.items()}
    return kit.departures(cases, lambda d: departure(subject, asked, d, cases[d], scales[d]))
