"""A counterexample: the simplest input found, what it gave, and what was expected."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fp8ref.formats import BFLOAT16, FLOAT16, FLOAT32
from fp8ref.sim import cast

_WIDE = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}


@dataclass(frozen=True, kw_only=True)
class Counterexample:
    """One input, and two outputs that differ.

    input     in words; bits: of its numbers, in hexadecimal, as ``dtype``.
    got       what the function gives; expected: what it was compared with gives.
    clause    of docs/spec, by which the expected output is right.
    """

    input: str
    bits: tuple[str, ...]
    dtype: str
    got: str
    expected: str
    clause: str

    def __str__(self) -> str:
        bits = f" ({self.dtype} {', '.join(self.bits)})" if self.bits else ""
        return f"{self.input}{bits}: got {self.got}, expected {self.expected} ({self.clause})"

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def bits_of(value: float, dtype: str) -> str:
    """The bits of a number of a dtype, such as 0x3F800000."""
    if dtype == "bfloat16":
        return f"0x{int(np.float32(value).view(np.uint32)) >> 16:04X}"
    unsigned = {"float16": (np.float16, np.uint16), "float32": (np.float32, np.uint32), "float64": (np.float64, np.uint64)}[dtype]
    number = np.asarray(value).astype(unsigned[0])
    return f"0x{int(number.view(unsigned[1])):0{2 * number.itemsize}X}"


def show(value: float) -> str:
    """A number as text, exact: nine digits, or seventeen where nine would be another number."""
    return f"{float(value):.17g}" if float(f"{float(value):.9g}") != float(value) else f"{float(value):.9g}"


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """x rounded to the numbers of a dtype; held as float64 for float64, else as float32."""
    if dtype == "float64":
        return x.astype(np.float64)
    return x.astype(np.float32) if x.dtype == np.float32 and dtype == "float32" else cast.round_to(x, _WIDE[dtype])
