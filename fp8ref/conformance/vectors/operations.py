"""Generate and judge test vectors by the name of their operation."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fp8ref.conformance.vectors import attention, cast, decode, gemm, quantize, scale
from fp8ref.conformance.vectors import format as text
from fp8ref.conformance.vectors.verdict import AskedVector, Verdict

__all__ = ["OPERATIONS", "Operation", "generate", "judge"]


class Operation(NamedTuple):
    """One operation of ``fp8ref vectors``.

    question  the class of a set of vectors, whose ``vectors()`` are (kind, line).
    rules     the class of how answers are judged.
    verify    judges a stream of vectors by a question and rules, and records each in a verdict.
    specified the simulator's answer to each vector of a question, by rules.
    fields    names of the inputs on a line; answers: names of what is appended.
    """

    question: type
    rules: type
    verify: Callable[[Any, Any, Iterator[text.Vector], Verdict], None]
    specified: Callable[[Any, Any], Iterator[str]]
    fields: tuple[str, ...]
    answers: tuple[str, ...]


_QUESTIONS: dict[type, Any] = {
    cast.Cast: cast,
    decode.Decode: decode,
    scale.Scale: scale,
    quantize.Quantize: quantize,
    gemm.Gemm: gemm,
    attention.Attention: attention,
}

OPERATIONS = {
    question.__name__.lower(): Operation(
        *(question, module.Rules, module.verify, module.specified), *(module.FIELDS, module.ANSWERS)
    )
    for question, module in _QUESTIONS.items()
}
"""The operations of ``fp8ref vectors``, by name."""


def generate(
    operation: str, settings: Mapping[str, Any], rules: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """The lines of a set of vectors, its header first.

    operation one of OPERATIONS.
    settings  the fields of its question, such as ``{"format": "e4m3fn"}``.
    rules     of ``judge``, whose answers are appended; by default none are.
    Raises:   ValueError: unknown or invalid settings or rules.
    """
    of = OPERATIONS[operation]
    question = of.question(**settings)
    yield from _comments(operation, question)
    lines = (line for _, line in question.vectors())
    if rules is None:
        yield from lines
    else:
        answers = of.specified(question, of.rules(**rules))
        yield from map(" ".join, zip(lines, answers, strict=True))


def judge(
    operation: str,
    stream: Iterable[bytes],
    *,
    settings: Mapping[str, Any],
    rules: Mapping[str, Any],
    some: bool = False,
) -> Verdict:
    """Compare a stream's answers with the simulator's, and its vectors with those of ``generate``.

    settings  must agree with the stream's header; without a header they are the question.
    some      vectors may be missing, unasked or repeated.
    Raises:   ValueError: settings that differ from the header's; invalid settings or rules; no
              vector. MalformedError: a line that is not a vector.
    """
    of = OPERATIONS[operation]
    parsed_rules = of.rules(**rules)
    stated, vectors = text.read(stream, operation, of.fields, of.answers)
    unsure = ""
    if stated is None:
        if (needed := needed_setting(operation)) not in settings:
            raise ValueError(
                f"vectors without a header need their settings as options, --{needed} at least. "
                "See fp8ref vectors verify --help."
            )
        question = of.question(**settings)
        unsure = (
            f"the vectors have no header, so verify assumes fp8ref vectors gen {operation} "
            f"{_options(settings)}: copy gen's lines that begin with #, or give verify the "
            "same options as gen"
        )
    else:
        question = of.question(**_typed(of.question, stated))
        for name, value in settings.items():
            if getattr(question, name) != value:
                option = _options({name: value})
                raise ValueError(
                    f"the vectors are of {operation} with {name}={getattr(question, name)}; "
                    f"got {option}. Make them with fp8ref vectors gen {operation} {option}."
                )
    start = len(_comments(operation, question)) + 1
    asked_vectors = (
        AskedVector(number, kind, line)
        for number, (kind, line) in enumerate(question.vectors(), start)
    )
    verdict = Verdict(asked_vectors, some=some, unsure=unsure)
    of.verify(question, parsed_rules, vectors, verdict)
    return verdict


def needed_setting(operation: str) -> str:
    """The setting without a default: a format, or a variant."""
    return dataclasses.fields(OPERATIONS[operation].question)[0].name


def _comments(operation: str, question) -> list[str]:
    of = OPERATIONS[operation]
    form = (
        f"# a line is {', '.join(of.fields)}, separated by blanks; to answer, write it again "
        f"and append {', '.join(of.answers)}"
    )
    return [text.header(operation, question), form]


def _options(settings: Mapping[str, Any]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())


def _typed(question: type, stated: Mapping[str, str]) -> dict[str, Any]:
    """A header's settings, in the types of the question's fields."""
    types = {field.name: field.type for field in dataclasses.fields(question)}
    settings: dict[str, Any] = {}
    for name, value in stated.items():
        if name not in types:
            raise ValueError(
                f"a header's keys are {', '.join(types)}; got {name!r}. Use the fp8ref that "
                "made these vectors."
            )
        try:
            settings[name] = int(value) if types[name] in (int, "int") else value
        except ValueError as error:
            raise ValueError(
                f"{name} of a header is an integer; got {value!r}. Copy the header of gen."
            ) from error
    needed = dataclasses.fields(question)[0].name
    if needed not in settings:
        raise ValueError(
            f"a header names a {needed}; this one does not. Use the one that fp8ref vectors gen "
            "writes."
        )
    return settings
