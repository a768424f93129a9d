"""The outputs of a cast, read as codes of a format, whether they are codes or values."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fp8ref.conformance.cast import behavior
from fp8ref.conformance.cast.behavior import AnyBehavior
from fp8ref.conformance.inputs import cast_inputs
from fp8ref.conformance.inputs.cast_inputs import CAST_FORMATS
from fp8ref.conformance.inputs.dtypes import rounded
from fp8ref.conformance.kit import subject as subjects
from fp8ref.conformance.kit.finding import Counterexample, bits_of, show
from fp8ref.conformance.kit.subject import ConformanceError, RefusedError, Subject
from fp8ref.formats import Format
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.packing import unpack

NO_CODE = -1  # what stands for a value that the format does not have

FLOATS = ("float32", "bfloat16", "float16", "float64")
"""The dtypes of outputs that are values."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """The array that a cast returned: codes as uint8, or values; dtype is the original one."""

    array: np.ndarray
    dtype: str

    @property
    def values_only(self) -> bool:
        """True if the array holds values, from which the code of a NaN cannot be read."""
        return self.array.dtype != np.uint8

    def candidate_formats(self, fmt: Format) -> list[Format]:
        """The formats that its codes or values may be in, fmt first: one if the dtype names it."""
        formats = {fmt.name: fmt} | CAST_FORMATS
        named = self.dtype.partition("_")[2].removesuffix("_x2")
        return [formats[named]] if named else list(formats.values())

    def codes(self, fmt: Format) -> np.ndarray:
        """The codes in fmt, int64; NO_CODE where fmt does not have a value."""
        if not self.values_only:
            return self.array.astype(np.int64)
        return codes_of_values(self.array, fmt)


@dataclass(frozen=True, kw_only=True, eq=False)
class Responses:
    """Inputs of a cast and its outputs: x [n], numbers of dtype ``source``; codes [n] in fmt."""

    x: np.ndarray
    source: str
    output: Output
    fmt: Format

    @cached_property
    def codes(self) -> np.ndarray:
        """The codes in fmt, int64; NO_CODE where fmt does not have a value."""
        return self.output.codes(self.fmt)

    def mismatches(
        self, b: AnyBehavior, among: np.ndarray | None = None, *, canonical: bool = False
    ) -> np.ndarray:
        """Where the codes are not those of a behavior, optionally only among some inputs.

        canonical  all NaN codes count as equal (C-5), and all codes of a NaN in a format that has
                   none (C-9). For infinite inputs they always do.
        """
        expected = behavior.encode(self.x, self.fmt, b, source=self.source).astype(np.int64)
        codes = self.codes
        if canonical or self.output.values_only:
            codes, expected = self.canonical(codes), self.canonical(expected)
        different = codes != expected
        if canonical and not self.fmt.has_nan:
            different &= ~np.isnan(self.x)
        # Where an infinity becomes NaN, any NaN code will do.
        if not canonical:
            alike = self.canonical(codes) == self.canonical(expected)
            different &= ~(np.isinf(self.x) & alike)
        return different if among is None else different & among

    def canonical(self, codes: np.ndarray) -> np.ndarray:
        """codes with every NaN code replaced by the one of C-5; NO_CODE stays."""
        nan = np.isnan(cast.decode(np.arange(1 << self.fmt.bits, dtype=np.uint8), self.fmt))
        return np.where((codes >= 0) & nan[codes], self.fmt.nan_code, codes)

    def among(self, values: np.ndarray) -> np.ndarray:
        """Where x is one of these values, rounded to the dtype of x."""
        kept = rounded(values, self.source)
        return np.isin(self.x, kept[np.isfinite(kept)])

    def counterexample(self, index: int, expected: AnyBehavior, clause: str) -> Counterexample:
        """One input with the code it got, and the code that a behavior gives."""
        value, bits = number_text(self.x, index, self.source)
        code = behavior.encode(self.x[index : index + 1], self.fmt, expected, source=self.source)
        wanted = code_text(code[0], self.fmt)
        if self.output.values_only:
            wanted = f"{cast.decode(code, self.fmt)[0]:.9g}"
        got = output_text(self.output, index, self.fmt)
        return Counterexample(value, got, wanted, clause, bits=(bits,), dtype=self.source)


def ask(subject: Subject, x: np.ndarray, source: str) -> Output:
    """The output of a cast for x.

    Raises:   ConformanceError: as Subject.ask, naming a smallest part of x that raises; or as read.
    """
    try:
        raw_output = subject.ask(x, source)
    except RefusedError:
        part = subjects.smallest_refused(subject, x, source)
        subject.ask(part, source)  # its message names that part
        raise
    return read(subject, raw_output, x, source)


def read(subject: Subject, raw_output: Any, x: np.ndarray, source: str) -> Output:
    """What a cast returned for x, as an Output.

    Raises:   ConformanceError: not one array of x's shape that holds codes or values.
    """
    of = f"for {subjects.describe(x, source, subject.framework)}"
    named_array = subjects.read_array(raw_output)
    if named_array is None:
        raise ConformanceError(
            f"{subject.name} gives a {type(raw_output).__name__} {of}; a cast gives one array of "
            "codes or values. Of a quantizer use require_quantizer, or --kind quantizer."
        )
    array, dtype = named_array
    if array.shape != x.shape:
        raise ConformanceError(
            f"{subject.name} gives shape {list(array.shape)} {of}; a cast keeps the shape. "
            "Return one code for each number."
        )
    typed = [f"float8_{f}" for f in CAST_FORMATS]
    text = f"float8 ({', '.join(CAST_FORMATS)})"
    if isinstance(subject, NarrowSubject):
        typed = [text := f"float{subject.fmt.bits}_{subject.fmt}"]
    if dtype not in ("uint8", *FLOATS, *typed):
        raise ConformanceError(
            f"{subject.name} gives {dtype} {of}; codes are uint8 or {text}, values "
            f"{', '.join(FLOATS)}. View other codes as uint8."
        )
    return Output(array=array, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class NarrowSubject(Subject):
    """A cast to a format that is not of CAST_FORMATS, whose codes are read as uint8, one a byte.

    packing  how it holds codes, in words: of 4 bits as pairs too (F-5).
    """

    fmt: Format
    packing: str = "one a byte"

    def ask(self, x: np.ndarray, dtype: str = "float32", *, view: str = "contiguous") -> Any:
        """As Subject.ask. Pairs are asked with a last axis of even length.

        Raises:   ConformanceError: too, a code that the format does not have.
        """
        odd = self.packing in _PAIRS and x.shape[-1:] and x.shape[-1] % 2
        given = np.concatenate([x, x[..., :1]], axis=-1) if odd else x
        output = super().ask(given, dtype, view=view)
        named_array = subjects.read_array(output)
        if named_array is None or not np.issubdtype(named_array[0].dtype, np.integer):
            return output
        array, name = named_array
        if self.packing in _PAIRS:
            return _unpacked(array.astype(np.uint8), self.packing)[..., : x.shape[-1]]
        for code in (array.min(initial=0), array.max(initial=0)):
            if code >> self.fmt.bits:
                raise ConformanceError(
                    f"{self.name} gives a code {code}; codes of {self.fmt} are from 0 to "
                    f"{(1 << self.fmt.bits) - 1}."
                )
        return output if name.startswith("float") else array.astype(np.uint8)


_PAIRS = ("low first", "high first")


def _unpacked(pairs: np.ndarray, packing: str) -> np.ndarray:
    swapped = pairs << np.uint8(4) | pairs >> np.uint8(4)
    return unpack(pairs if packing == "low first" else swapped)


def narrow(subject: Subject, fmt: Format, source: str) -> Subject:
    """The subject whose codes of fmt are one a byte: itself for CAST_FORMATS. Of pairs the first is
    in the low half, or in the high half, whichever agrees more with the specification's cast.
    """
    if fmt.name in CAST_FORMATS:
        return subject
    x = rounded(cast_inputs.coarse(fmt), source)
    named_array = subjects.read_array(subject.ask(x, source))
    packing = "values" if named_array and named_array[1] in FLOATS else "one a byte"
    if fmt.bits == 4 and named_array and named_array[0].shape == (x.size // 2,):
        pairs, expected = named_array[0].astype(np.uint8), cast.encode_plain(x, fmt)
        packing = max(_PAIRS, key=lambda p: int((_unpacked(pairs, p) == expected).sum()))
    return NarrowSubject(
        name=subject.name,
        function=subject.function,
        framework=subject.framework,
        device=subject.device,
        fmt=fmt,
        packing=packing,
    )


def ask_twice(subject: Subject, x: np.ndarray, source: str) -> tuple[Output, int | None]:
    """The output for x, and the first index where a second call with x gives another."""
    first, again = ask(subject, x, source), ask(subject, x, source)
    if first.dtype != again.dtype:
        return first, None
    bits = [output.array.view(np.uint8).reshape(x.size, -1) for output in (first, again)]
    different = (bits[0] != bits[1]).any(axis=1)
    return first, int(np.argmax(different)) if different.any() else None


def identify_format(output: Output, x: np.ndarray, fmt: Format) -> tuple[Format | None, str]:
    """The format whose own numbers the cast leaves unchanged, and how many it does, in words.

    x is cast_inputs.all_numbers(fmt), and output that for it. Of equally good formats it is fmt.
    None if no format has more than half of its numbers unchanged.
    """
    scores = {}
    for found_fmt in (candidates := output.candidate_formats(fmt)):
        is_number = np.isin(np.abs(x), cast_inputs.with_next(found_fmt)[:-1])
        codes = output.codes(found_fmt)
        right = codes == cast.encode_plain(x, found_fmt).astype(np.int64)
        if output.values_only:  # then numbers that this format lacks must change
            right = np.where(is_number, right, output.array != x)
            is_number = np.ones_like(is_number)
        # Compare fractions, as formats have different counts of numbers.
        scores[found_fmt.name] = (int(right[is_number].sum()), int(is_number.sum()))
    best = max(scores, key=lambda name: scores[name][0] / scores[name][1])
    right, of = scores[best]
    evidence = f"{right} of {of} numbers come back as {best}'s"
    chosen = next(f for f in candidates if f.name == best)
    return chosen if right > of / 2 else None, evidence


def codes_of_values(values: np.ndarray, fmt: Format) -> np.ndarray:
    """The codes of values, int64: NaN by C-5; NO_CODE where fmt does not have the value."""
    count = fmt.max_code + 1 + (fmt.inf_code is not None)
    table = cast.decode(np.arange(count, dtype=np.uint8), fmt)
    magnitude = np.abs(values) if fmt.signed else values
    # Codes count the magnitudes upwards, so that the place in the table is the code.
    at = np.minimum(np.searchsorted(table, magnitude), len(table) - 1)
    signed = at | np.where(np.signbit(values), fmt.sign_bit, 0)
    codes = np.where(table[at] == magnitude, signed, NO_CODE)
    if fmt.signed and not fmt.negative_zero:
        codes = np.where(values == 0, 0, codes)
    return np.where(np.isnan(values), fmt.nan_code, codes).astype(np.int64)


def output_text(output: Output, index: int, fmt: Format) -> str:
    """One element of an output as text: code and value, or the value alone."""
    if output.values_only:
        return show(output.array.flat[index])
    return code_text(output.array.flat[index], fmt)


def code_text(code: int, fmt: Format) -> str:
    """A code and its value as text: 0x38 = 1."""
    return f"0x{int(code):02X} = {show(cast.decode(np.array([code], np.uint8), fmt)[0])}"


def number_text(x: np.ndarray, index: int, source: str) -> tuple[str, str]:
    """One input as text: its value, and its bits in hexadecimal."""
    return show(x[index]), bits_of(x[index], source)
