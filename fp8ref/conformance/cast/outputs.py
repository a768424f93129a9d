"""What a cast gives, as codes of a format: codes as they are, values by the numbers that they are."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8ref.conformance import subject
from fp8ref.conformance.cast import behaviour, inputs
from fp8ref.conformance.cast.behaviour import CAST_FORMATS, Behaviour
from fp8ref.conformance.counterexample import Counterexample, bits_of, rounded, show
from fp8ref.conformance.subject import ConformanceError, RefusedError, Subject
from fp8ref.formats import Format
from fp8ref.sim import cast

NO_CODE = -1  # of a value that no code of the format has
FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True)
class Output:
    """The array that came back: codes uint8, or values; dtype is what it was of."""

    array: np.ndarray
    dtype: str

    @property
    def values_only(self) -> bool:
        """Values tell no NaN from another."""
        return self.array.dtype != np.uint8

    @property
    def candidate_formats(self) -> list[Format]:
        """The formats that it can be in."""
        named = self.dtype.removeprefix("float8_")
        return [CAST_FORMATS[named]] if named != self.dtype else list(CAST_FORMATS.values())

    def codes(self, fmt: Format) -> np.ndarray:
        """int64 codes of fmt, NO_CODE where a value has none."""
        return self.array.astype(np.int64) if not self.values_only else codes_of_values(self.array, fmt)


@dataclass(frozen=True, kw_only=True, eq=False)
class Responses:
    """x [n] of dtype ``source``, and the reply, codes of fmt."""

    x: np.ndarray
    source: str
    output: Output
    fmt: Format
    codes: np.ndarray

    def mismatches(self, b: Behaviour, among: np.ndarray | None = None, *, canonical: bool = False) -> np.ndarray:
        """Where the answers are not those of a behaviour; canonical: NaNs are one (C-5), as those of infinities are always."""
        expected = behaviour.encode(self.x, self.fmt, b, source=self.source).astype(np.int64)
        codes = self.codes
        if canonical or self.output.values_only:
            codes, expected = self.canonical(codes), self.canonical(expected)
        different = codes != expected
        if not canonical:
            different &= ~np.isinf(self.x) | (self.canonical(codes) != self.canonical(expected))
        return different if among is None else different & among

    def canonical(self, codes: np.ndarray) -> np.ndarray:
        nan = np.isnan(cast.decode(np.arange(256, dtype=np.uint8), self.fmt))
        return np.where((codes >= 0) & nan[codes], self.fmt.nan_code, codes)

    def among(self, values: np.ndarray) -> np.ndarray:
        """Which of x are among values."""
        kept = rounded(values, self.source)
        return np.isin(self.x, kept[np.isfinite(kept)])

    def counterexample(self, index: int, expected: Behaviour, clause: str) -> Counterexample:
        value, bits = number_text(self.x, index, self.source)
        code = behaviour.encode(self.x[index : index + 1], self.fmt, expected, source=self.source)
        shown = cast.decode(code, self.fmt)[0] if self.output.values_only else None
        return Counterexample(
            input=value,
            bits=(bits,),
            dtype=self.source,
            got=output_text(self.output, index, self.fmt),
            expected=f"{shown:.9g}" if shown is not None else output_text(Output(array=code, dtype="uint8"), 0, self.fmt),
            clause=clause,
        )


def ask(subject: Subject, x: np.ndarray, source: str) -> Output:
    """A cast's reply to x.

    Raises:   ConformanceError: as Subject.ask, with a smallest input that it raises for; not one array of x's shape, of codes or values.
    """
    try:
        found = subject.ask(x, source)
    except RefusedError:
        part = _smallest_refused(subject, x, source)
        subject.ask(part, source)  # its message names that part
        raise
    return read(subject, found, x, source)


def read(asked: Subject, found: Any, x: np.ndarray, source: str) -> Output:
    of = f"for {subject.describe(x, source, asked.framework)}"
    made = subject.read_array(found)
    if made is None:
        raise ConformanceError(
            f"{asked.name} gives a {type(found).__name__} {of}; a cast gives one array of codes or values. Name --kind quantizer if it is one."
        )
    array, dtype = made
    if array.shape != x.shape:
        raise ConformanceError(
            f"{asked.name} gives shape {list(array.shape)} {of}; a cast keeps the shape. Return one code for each number."
        )
    if dtype != "uint8" and dtype not in FLOATS and dtype.removeprefix("float8_") not in CAST_FORMATS:
        raise ConformanceError(
            f"{asked.name} gives {dtype} {of}; codes are uint8 or float8 ({', '.join(CAST_FORMATS)}), values {', '.join(FLOATS)}. "
            "View other codes as uint8."
        )
    return Output(array=array, dtype=dtype)


def ask_twice(asked: Subject, x: np.ndarray, source: str) -> tuple[Output, int | None]:
    """The reply, and where the same question once more is answered otherwise."""
    first, again = ask(asked, x, source), ask(asked, x, source)
    different = first.array.view(np.uint8).reshape(x.size, -1) != again.array.view(np.uint8).reshape(x.size, -1)
    if first.dtype != again.dtype or not different.any():
        return first, None
    return first, int(np.argmax(different.any(axis=1)))


def identify_format(output: Output, x: np.ndarray, fmt: Format) -> tuple[Format | None, str]:
    """The format whose numbers come back as themselves, fmt if it is as good as another; and how many did.

    x is questions.all_numbers(), and reply the one to it. None where half of a format's numbers do not.
    """
    scores = {}
    for found_fmt in sorted(output.candidate_formats, key=lambda f: f is not fmt):
        known = np.isin(np.abs(x), inputs.numbers(found_fmt)[:-1])
        codes = output.codes(found_fmt)
        expected = cast.encode_plain(x, found_fmt).astype(np.int64)
        right = codes == expected
        if output.values_only:  # numbers of other formats, which this one has not, do not come back as themselves
            right = np.where(known, right, output.array != x)
            known = np.ones_like(known)
        scores[found_fmt.name] = (int(right[known].sum()), int(known.sum()))
    best = max(scores, key=lambda name: scores[name][0] / scores[name][1])
    right, of = scores[best]
    return (CAST_FORMATS[best] if right > of / 2 else None), f"{right} of {of} numbers come back as {best}'s"


def codes_of_values(values: np.ndarray, fmt: Format) -> np.ndarray:
    """The codes of values, NaN's the one of C-5; int64, NO_CODE where there is none."""
    table = cast.decode(np.arange(fmt.max_code + 1 + (fmt.inf_code is not None), dtype=np.uint8), fmt)
    magnitude = np.abs(values)
    at = np.minimum(np.searchsorted(table, magnitude), len(table) - 1)
    codes = np.where(table[at] == magnitude, at | np.where(np.signbit(values), fmt.sign_bit, 0), NO_CODE)
    if fmt.specials == "fnuz":
        codes = np.where(values == 0, 0, codes)
    return np.where(np.isnan(values), fmt.nan_code, codes).astype(np.int64)


def output_text(output: Output, index: int, fmt: Format) -> str:
    """One answer in words."""
    if output.values_only:
        return show(output.array.flat[index])
    return code_text(output.array.flat[index], fmt)


def code_text(code: int, fmt: Format) -> str:
    """A code and its value: 0x38 = 1."""
    return f"0x{int(code):02X} = {show(cast.decode(np.array([code], np.uint8), fmt)[0])}"


def _smallest_refused(asked: Subject, x: np.ndarray, source: str) -> np.ndarray:
    def fails(part: np.ndarray) -> bool:
        try:
            asked.ask(part, source)
        except RefusedError:
            return True
        return False

    return subject.smaller_part(x, fails) if x.ndim == 1 else x


def number_text(x: np.ndarray, index: int, source: str) -> tuple[str, str]:
    """A number in words, and its bits."""
    return show(x[index]), bits_of(x[index], source)
