"""Vectors by the name of their operation: made from settings, and judged from a stream."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fp8ref.check.vectors import cast, gemm, quantize, scale
from fp8ref.check.vectors import format as text
from fp8ref.check.vectors.verdict import Verdict


class Operation(NamedTuple):
    question: type
    rules: type
    verify: Callable[[Any, Any, Iterator[text.Vector], Verdict], None]
    fields: tuple[str, ...]
    answers: tuple[str, ...]


OPERATIONS = {
    "cast": Operation(cast.Cast, cast.Rules, cast.verify, cast.FIELDS, cast.ANSWERS),
    "scale": Operation(scale.Scale, scale.Rules, scale.verify, scale.FIELDS, scale.ANSWERS),
    "quantize": Operation(quantize.Quantize, quantize.Rules, quantize.verify, quantize.FIELDS, quantize.ANSWERS),
    "gemm": Operation(gemm.Gemm, gemm.Rules, gemm.verify, gemm.FIELDS, gemm.ANSWERS),
}


def generate(operation: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a set of vectors, its header first.

    Raises:   ValueError: settings that make no question.
    """
    of = OPERATIONS[operation]
    question = of.question(**settings)
    yield text.header(operation, question)
    yield f"# a line is {', '.join(of.fields)}, separated by blanks; answer by writing it with {', '.join(of.answers)} behind"
    yield from question.lines()


def judge(operation: str, stream: Iterable[bytes], *, settings: Mapping[str, Any], rules: Mapping[str, Any]) -> Verdict:
    """Compare the answers of a stream with the simulator's.

    settings are what the vectors should ask: those that are named agree with the stream's header, and without one make the question.
    Raises:   ValueError: a header of another question; settings or rules that are none; no vector. MalformedError: a line that is none.
    """
    of = OPERATIONS[operation]
    of_rules = of.rules(**rules)
    lines = text.Lines(stream)
    stated = lines.begin(operation)
    if stated is None:
        if "format" not in settings:
            raise ValueError("these vectors have no header; say what they ask, with --format at least. See fp8ref vectors verify --help.")
        question = of.question(**settings)
        verdict = Verdict(None)
    else:
        question = of.question(**_typed(of.question, stated))
        for name, value in settings.items():
            if getattr(question, name) != value:
                option = name.replace("_", "-")
                raise ValueError(
                    f"the vectors ask {operation} with {name}={getattr(question, name)}; got --{option} {value}. "
                    f"Make them with fp8ref vectors gen {operation} --{option} {value}."
                )
        verdict = Verdict(question.asked())
    of.verify(question, of_rules, iter(lines), verdict)
    return verdict


def _typed(question: type, stated: Mapping[str, str]) -> dict[str, Any]:
    """A header's settings, in the types of the question's fields."""
    types = {field.name: field.type for field in dataclasses.fields(question)}
    found: dict[str, Any] = {}
    for name, value in stated.items():
        if name not in types:
            raise ValueError(f"a header's keys are {', '.join(types)}; got {name!r}. Use the fp8ref that made these vectors.")
        try:
            found[name] = int(value) if types[name] in (int, "int") else value
        except ValueError as error:
            raise ValueError(f"{name} of a header is an integer; got {value!r}.") from error
    if "format" not in found:
        raise ValueError("a header names a format; this one does not. Use the one that fp8ref vectors gen writes.")
    return found
