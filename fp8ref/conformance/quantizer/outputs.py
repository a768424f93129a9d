"""The outputs of a quantizer, taken apart: codes or values of the tensor's shape, and scales."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8ref.conformance import subject as subjects
from fp8ref.conformance.cast.outputs import FLOATS
from fp8ref.conformance.inputs.cast_inputs import CAST_FORMATS
from fp8ref.conformance.subject import ConformanceError, Subject
from fp8ref.formats import E8M0FNU
from fp8ref.sim import cast

# The names that libraries give to the parts of a quantized tensor
_CODES = ("codes", "_data", "qdata", "qvalue", "data", "quantized")
_SCALES = ("scale", "_scale", "scale_inv", "_scale_inv", "scales", "scale_inverse", "scaling_factor")


@dataclass(frozen=True, kw_only=True)
class QuantizerOutput:
    """What one call returned.

    codes   uint8 of the tensor's shape, or None if values were returned.
    values  float32 of the tensor's shape, or None if codes were returned.
    dtype   of the array of the tensor's shape; place: its name, or its index.
    scales  by name or place; float32, e8m0 decoded.
    """

    codes: np.ndarray | None
    values: np.ndarray | None
    dtype: str
    place: str
    scales: Mapping[str, np.ndarray]

    @property
    def tensor(self) -> np.ndarray:
        """The codes, or else the values."""
        found = self.codes if self.codes is not None else self.values
        assert found is not None
        return found


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """A function that quantizes, and how to ask it.

    dtype   of its inputs.
    memory  how many earlier calls have a part in its scale, as in delayed scaling.
    """

    subject: Subject
    dtype: str
    memory: int = 0

    def ask(self, x: np.ndarray, *, view: str = "contiguous") -> QuantizerOutput:
        """The output for x, once x has filled its memory."""
        for _ in range(self.memory):
            self.subject.ask(x, self.dtype, view=view)
        return self.once(x, view=view)

    def once(self, x: np.ndarray, *, view: str = "contiguous") -> QuantizerOutput:
        """The output of a single call.

        Raises:   ConformanceError: as Subject.ask and read.
        """
        found = self.subject.ask(x, self.dtype, view=view)
        try:
            return read(found, x)
        except Exception as error:  # lazy arrays, such as those of a GPU, may raise only here
            raise ConformanceError(
                f"{self.subject.name} for {subjects.describe(x, self.dtype, self.subject.framework)}: {error}"
            ) from error


def arrays_of(found: Any) -> list[np.ndarray]:
    """All arrays among the parts of what was returned."""
    return [made[0] for part in _parts(found).values() if (made := _array(part)) is not None]


def read(found: Any, x: np.ndarray) -> QuantizerOutput:
    """What a quantizer returned for x, taken apart.

    Raises:   ConformanceError: no part is an array of x's shape that holds codes or values.
    """
    parts = _parts(found)
    arrays = {name: made for name, part in parts.items() if (made := _array(part)) is not None}
    fitting = {name: dtype for name, (a, dtype) in arrays.items() if a.shape == x.shape}
    codes_first = [n for n, dtype in fitting.items() if _is_codes(n, dtype, len(arrays))] + [n for n, d in fitting.items() if d in FLOATS]
    main = codes_first[0] if codes_first else None
    if main is None:
        given = ", ".join(f"{dtype} {list(a.shape)}" for a, dtype in arrays.values()) or type(found).__name__
        raise ConformanceError(
            f"it gives {given}; a quantizer gives codes (uint8 or float8) or values of the shape {list(x.shape)}, alone or with scales. "
            "Return (codes, scale)."
        )
    tensor, dtype = arrays.pop(main)
    codes = tensor if dtype not in FLOATS else None
    return QuantizerOutput(
        codes=codes,
        values=tensor.astype(np.float32) if codes is None else None,
        dtype=dtype,
        place=main,
        scales={name: _scales(a, kind) for name, (a, kind) in arrays.items() if kind in FLOATS or kind in ("uint8", "float8_e8m0fnu")},
    )


def _parts(found: Any) -> dict[str, Any]:
    """The parts by name: attributes, or items of a dict or sequence; else the whole."""
    if isinstance(found, np.ndarray):  # its attribute ``data`` is a buffer, and no codes
        return {"": found}
    if isinstance(found, Mapping):
        return {str(key): value for key, value in found.items()}
    if hasattr(found, "_asdict"):
        return dict(found._asdict())
    if isinstance(found, tuple | list):
        return {f"[{i}]": part for i, part in enumerate(found)}
    codes, scales = ([name for name in names if hasattr(found, name)] for names in (_CODES, _SCALES))
    if codes and scales:
        return {name: getattr(found, name) for name in (codes[0], *scales) if not callable(getattr(found, name))}
    return {"": found}


def _array(part: Any) -> tuple[np.ndarray, str] | None:
    """A part as a NumPy array and its dtype; None if it is neither array nor number."""
    return (np.asarray(part, np.float64), "float64") if isinstance(part, float) else subjects.read_array(part)


def _is_codes(name: str, dtype: str, count: int) -> bool:
    """Whether an array holds codes: float8, or uint8 where codes may be."""
    if dtype == "uint8":
        return count == 1 or name.startswith("[") or name in _CODES
    return dtype.removeprefix("float8_") in CAST_FORMATS


def _scales(a: np.ndarray, dtype: str) -> np.ndarray:
    """Scales as float32; uint8 and e8m0 ones are decoded."""
    if dtype in FLOATS:
        with np.errstate(over="ignore"):
            return a.astype(np.float32)
    return cast.decode(a, E8M0FNU)


def smallest_shape(quantizer: Quantizer, shapes: tuple[tuple[int, int], ...], fits: Callable[[tuple[int, int]], bool]) -> tuple[int, int]:
    """The first shape that fits and that the quantizer takes; the last is not tried, but taken."""
    for shape in shapes[:-1]:
        if fits(shape):
            try:
                quantizer.once(np.ones(shape, np.float32))
            except ConformanceError:
                continue
            return shape
    return shapes[-1]
