"""The text format of test vectors (see the package): headers, lines, and numbers in hexadecimal."""

import codecs
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

VERSION = 1  # the version of the text format, which a header states
BATCH = 1 << 14  # vectors of one number each that are judged at once

_TITLE = re.compile(r"#\s*fp8ref\s+vectors\b")
_HEADER = re.compile(r"#\s*fp8ref\s+vectors\s+(\d+):\s*(\w+)((?:\s+\w+=[\w.,+-]+)*)")
_HEX = re.compile(r"(?:0[xX])?([0-9a-fA-F]+)")
_SHAPE = re.compile(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8}){0,31}")  # 32 axes, NumPy's most


class MalformedError(ValueError):
    """A line is not a vector; the message begins with its number."""

    def __init__(self, line: int, why: str):
        super().__init__(f"line {line}: {why}")


class Vector(NamedTuple):
    """The number of a line, and its fields, counted from 0."""

    line: int
    fields: list[str]

    def number(self, field: int, bits: int, name: str) -> int:
        """A field as one number of so many bits; MalformedError if it is not one."""
        return self._number(self.fields[field], bits, name)

    def numbers(self, field: int, bits: int, shape: tuple[int, ...], name: str) -> np.ndarray:
        """A field as numbers of so many bits, unsigned integers of a shape, of 8 bits at least;
        MalformedError if it is not that.
        """
        parts = self.fields[field].split(",")
        if len(parts) != math.prod(shape):
            raise MalformedError(
                self.line,
                f"{name} need {math.prod(shape):,} numbers, separated by commas; got "
                f"{len(parts):,}. Write all, the last axis fastest.",
            )
        return np.array(
            [self._number(part, bits, f"each of {name}") for part in parts], f"uint{max(bits, 8)}"
        ).reshape(shape)

    def shape(self, field: int, axes: str = "") -> tuple[int, ...]:
        """A field as a shape; MalformedError if it is not one."""
        with self.named():
            return shape(self.fields[field], axes)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Turn a ValueError raised inside into a MalformedError that names the line."""
        try:
            yield
        except ValueError as error:
            raise MalformedError(self.line, str(error)) from error

    def _number(self, text: str, bits: int, name: str) -> int:
        match = _HEX.fullmatch(text)
        if match is None or (value := int(match[1], 16)) >> bits:
            digits = bits // 4
            raise MalformedError(
                self.line,
                f"{name} is {bits} bits in hexadecimal, at most {digits} "
                f"digit{'s' * (digits > 1)}; got {short(text)!r}. Write them as %0{digits}X "
                "does.",
            )
        return value


def header(operation: str, question) -> str:
    """The header line of a set of vectors, a dataclass of names and numbers.

    >>> from fp8ref.conformance.vectors.cast import Cast
    >>> header("cast", Cast(format="e4m3fn"))
    '# fp8ref vectors 1: cast format=e4m3fn source=float32 seed=0 count=10000'
    """
    settings = " ".join(
        f"{field.name}={getattr(question, field.name)}" for field in dataclasses.fields(question)
    )
    return f"# fp8ref vectors {VERSION}: {operation} {settings}"


def read(
    stream: Iterable[bytes], operation: str, inputs: Sequence[str], answers: Sequence[str]
) -> tuple[dict[str, str] | None, Iterator[Vector]]:
    """The settings in a stream's header, as text, or None without one; an iterator of its vectors.

    inputs    names of the fields that gen writes; answers: of those that are appended.
    Raises:   ValueError: no vector at all. MalformedError: a header of another operation or
              version; and, from the iterator, a line that is not ASCII text or not a vector.
    """
    texts = ((number, _text(number, raw)) for number, raw in enumerate(stream, start=1))
    stated = None
    for number, text in texts:
        if _TITLE.match(text):
            if stated is not None:
                raise MalformedError(
                    number,
                    "a set of vectors has one header; got a second one. Judge one set at a time.",
                )
            stated = _settings(number, text, operation)
        elif text and not text.startswith("#"):
            return stated, _vectors(chain([(number, text)], texts), inputs, answers)
    raise ValueError(
        f"verify needs vectors of {operation}, one per line; got none. Check whether the "
        "program before this one failed."
    )


def _vectors(
    texts: Iterable[tuple[int, str]], inputs: Sequence[str], answers: Sequence[str]
) -> Iterator[Vector]:
    for number, text in texts:
        if _TITLE.match(text):
            raise MalformedError(
                number,
                "a header stands before its vectors; got one after vectors. Judge one set at a "
                "time.",
            )
        if text and not text.startswith("#"):
            fields = text.split()
            if len(fields) != len(inputs) + len(answers):
                missing = "; the answer is missing" if len(fields) == len(inputs) else ""
                raise MalformedError(
                    number,
                    f"a vector is {', '.join(inputs)}, then {', '.join(answers)}, separated by "
                    f"blanks; got {len(fields)} fields{missing}: {short(text)!r}. Write gen's "
                    "line again, and append the answers.",
                )
            yield Vector(number, fields)


def _text(number: int, raw: bytes) -> str:
    """A line without its end, blanks around it, and the UTF-8 mark of a first line."""
    if (number == 1 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))) or b"\0" in raw:
        raise MalformedError(
            number,
            "a line is ASCII text; got UTF-16 (its mark, or bytes of zero), which PowerShell "
            "writes with >. Convert it with iconv -f UTF-16 -t ASCII, or write it with | "
            "Out-File -Encoding ascii.",
        )
    raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
    try:
        return raw.decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise MalformedError(
            number,
            f"a line is ASCII text; got byte 0x{raw[error.start]:02X}. Print numbers in "
            "hexadecimal.",
        ) from error


def _settings(number: int, text: str, operation: str) -> dict[str, str]:
    match = _HEADER.fullmatch(text)
    if match is None:
        raise MalformedError(
            number,
            f"a header is '# fp8ref vectors {VERSION}: OPERATION KEY=VALUE ...'; got "
            f"{short(text)!r}. Copy the header of gen.",
        )
    version, stated, settings = match.groups()
    if int(version) != VERSION:
        raise MalformedError(
            number,
            f"these are vectors of version {version}; this fp8ref judges version {VERSION}. Use "
            "the fp8ref that made them.",
        )
    if stated != operation:
        raise MalformedError(
            number,
            f"these are vectors of {stated!r}, not of {operation!r}. Use fp8ref vectors verify "
            f"{stated}.",
        )
    return dict(setting.split("=", 1) for setting in settings.split())


def batches(vectors: Iterator[Vector]) -> Iterator[list[Vector]]:
    """At most BATCH vectors at a time."""
    while batch := list(islice(vectors, BATCH)):
        yield batch


def shape(text: str, axes: str = "") -> tuple[int, ...]:
    """A shape as a field or an option gives it; ValueError if it is not one.

    axes      names of the axes, such as M,N,K, where a shape must have just these.
    >>> shape("4,128")
    (4, 128)
    """
    if not _SHAPE.fullmatch(text) or (axes and text.count(",") != axes.count(",")):
        example = ",".join(["4"] * axes.count(",") + ["256"]) if axes else "4,128"
        raise ValueError(
            f"a shape is {axes or '1 to 32 axes'}, each at least 1, in decimal, separated by "
            f"commas; got {short(text)!r}. Write it like {example}."
        )
    return tuple(int(n) for n in text.split(","))


def hexadecimal(values: np.ndarray, bits: int) -> list[str]:
    """Each value as %0nX, n digits of so many bits."""
    return [f"{value:0{bits // 4}X}" for value in np.ravel(values).tolist()]


def join(values: np.ndarray, bits: int) -> str:
    """A field of numbers.

    >>> join(np.array([1, 255]), 16)
    '0001,00FF'
    """
    return ",".join(hexadecimal(values, bits))


def short(text: str) -> str:
    """A text, cut to a length that a message can hold."""
    return text if len(text) <= 60 else text[:57] + "..."
