"""The text that vectors are written in (see the package): headers, lines, and numbers in hexadecimal."""

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

VERSION = 1
_TITLE = "# fp8ref vectors "
_HEADER = re.compile(r"# fp8ref vectors (\d+): (\w+)((?: \w+=[\w,-]+)*)\s*")
_HEX = re.compile(r"(?:0[xX])?([0-9a-fA-F]+)")


class MalformedError(ValueError):
    """A line that is no vector, with its number."""

    def __init__(self, line: int, why: str):
        super().__init__(f"line {line}: {why}")


class Vector(NamedTuple):
    line: int
    fields: list[str]


def header(operation: str, question) -> str:
    """The line that states a question, a dataclass of names and numbers.

    >>> from fp8ref.check.vectors.cast import Cast
    >>> header("cast", Cast(format="e4m3fn"))
    '# fp8ref vectors 1: cast format=e4m3fn source=float32 seed=0 count=10000'
    """
    settings = " ".join(f"{field.name}={getattr(question, field.name)}" for field in dataclasses.fields(question))
    return f"{_TITLE}{VERSION}: {operation} {settings}"


class Lines:
    """The vectors of a stream, with their lines' numbers; what its header says, once ``begin`` has read that far."""

    def __init__(self, stream: Iterable[bytes]):
        self._lines = enumerate(stream, start=1)
        self._first: Vector | None = None

    def begin(self, operation: str) -> dict[str, str] | None:
        """What the header asks, as text; None where the first vector comes without one.

        Raises:   ValueError: a header of another operation or version; no vector at all. MalformedError.
        """
        stated = None
        for number, raw in self._lines:
            text = _text(number, raw)
            if text.startswith(_TITLE):
                if stated is not None:
                    raise MalformedError(number, "a second header. Judge one set of vectors at a time.")
                stated = _settings(number, text, operation)
            elif text and not text.startswith("#"):
                self._first = Vector(number, text.split())
                return stated
        raise ValueError(f"vectors of {operation} were expected, one a line; none came. Did the program before this one fail?")

    def __iter__(self) -> Iterator[Vector]:
        if self._first is not None:
            yield self._first
        for number, raw in self._lines:
            text = _text(number, raw)
            if text.startswith(_TITLE):
                raise MalformedError(number, "a header behind vectors. Judge one set of vectors at a time.")
            if text and not text.startswith("#"):
                yield Vector(number, text.split())


def _text(number: int, raw: bytes) -> str:
    try:
        return raw.decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise MalformedError(number, f"a line is ASCII text; got byte 0x{raw[error.start]:02X}.") from error


def _settings(number: int, text: str, operation: str) -> dict[str, str]:
    match = _HEADER.fullmatch(text)
    if match is None:
        raise MalformedError(number, f"a header is '{_TITLE}{VERSION}: OPERATION KEY=VALUE ...'; got {text[:80]!r}.")
    version, asked, settings = match.groups()
    if int(version) != VERSION:
        raise MalformedError(
            number, f"these are vectors of version {version}; this fp8ref judges version {VERSION}. Use the one that made them."
        )
    if asked != operation:
        raise MalformedError(number, f"these are vectors of {asked!r}, not of {operation!r}. Use fp8ref vectors verify {asked}.")
    return dict(setting.split("=", 1) for setting in settings.split())


def expect(vector: Vector, inputs: Sequence[str], answers: Sequence[str]) -> None:
    """MalformedError unless a vector has all of its fields."""
    if len(vector.fields) != len(inputs) + len(answers):
        missing = "; the answer is missing" if len(vector.fields) == len(inputs) else ""
        raise MalformedError(
            vector.line,
            f"a vector is {', '.join(inputs)}, then {', '.join(answers)}, separated by blanks; got {len(vector.fields)} fields{missing}: "
            f"{_short(' '.join(vector.fields))}.",
        )


def number(line: int, text: str, bits: int, name: str) -> int:
    """One number of so many bits."""
    match = _HEX.fullmatch(text)
    if match is None:
        raise MalformedError(line, f"{name} is {bits} bits in hexadecimal; got {_short(text)}.")
    value = int(match[1], 16)
    if value >> bits:
        raise MalformedError(line, f"{name} is {bits} bits in hexadecimal, {bits // 4} digits; got {_short(text)}.")
    return value


def numbers(line: int, text: str, bits: int, count: int, name: str) -> np.ndarray:
    """So many numbers of so many bits, separated by commas: uint64 [count]."""
    parts = text.split(",")
    if len(parts) != count:
        raise MalformedError(line, f"{name}: {count} numbers, separated by commas; got {len(parts)}.")
    return np.array([number(line, part, bits, name) for part in parts], np.uint64)


def shape(line: int, text: str, ndim: int | None = None) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text) or (ndim is not None and text.count(",") != ndim - 1):
        raise MalformedError(line, f"a shape is {'numbers' if ndim is None else ndim} in decimal, separated by commas; got {_short(text)}.")
    return tuple(int(n) for n in text.split(","))


def join(values: np.ndarray, bits: int) -> str:
    """A field of numbers.

    >>> join(np.array([1, 255]), 16)
    '0001,00FF'
    """
    return ",".join(f"{int(v):0{bits // 4}X}" for v in np.ravel(values))


def digest(*arrays: np.ndarray) -> bytes:
    """What tells the inputs of one vector from another's, in 16 bytes."""
    return hashlib.blake2b(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays), digest_size=16).digest()


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
