"""The decoder under test: a function of codes, and of scales if it dequantizes, called safely."""

import dataclasses
import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fp8ref.conformance.cast.outputs import FLOATS
from fp8ref.conformance.inputs import dtypes
from fp8ref.conformance.kit import arrays
from fp8ref.conformance.kit.subject import (
    VIEWS,
    ConformanceError,
    RefusedError,
    Subject,
    native_array,
    needed,
    read_array,
)
from fp8ref.formats import E4M3FN, E8M0FNU, Format
from fp8ref.sim.quantize import cast, scale_layouts, scaling
from fp8ref.sim.quantize.packing import pack
from fp8ref.sim.quantize.scale_layouts import ScaleLayout
from fp8ref.spec import granularity as granularities

CODES_AS = ("uint8", "native")
"""How codes are passed: uint8, or the framework's own dtype of the format."""

SCALES_AS = {"mx": E8M0FNU, "nvfp4": E4M3FN}
"""The formats whose codes a granularity's scales may be passed as, in uint8 or the framework's own
dtype; float32 scales are tried too, and alone for other granularities."""


def scale_format(granularity: str) -> Format | None:
    """The format that hardware keeps the scales of a granularity in; None for float32."""
    return SCALES_AS.get(granularity.partition("_")[0])


def scale_array(
    tested: Subject, scales: np.ndarray, fmt: Format | None, scales_as: str, layout: ScaleLayout
) -> Any:
    """Scales as a function takes them, in its layout; a row of them in their own shape.

    fmt        of scales that are codes; None: float32 ones alone.
    scales_as  one of CODES_AS, or float32.
    """
    fmt = None if scales_as == "float32" else fmt
    held = scales if fmt is None else cast.encode(scales, fmt)
    if layout.name != "row_major" and held.ndim == 2:
        held = scale_layouts.store(held, layout)
    held = np.ascontiguousarray(held).reshape(held.shape)
    if fmt is not None and scales_as == "native":
        return native_array(tested, held, fmt)
    return tested.make_array(held, held.dtype.name)


class Decoded(NamedTuple):
    """What one call gave: float32 numbers, and the name of their dtype."""

    numbers: np.ndarray
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A function under test, and how it is called.

    granularity  of its scales; None: it takes codes alone.
    layout       of its scales in memory.
    levels       how many scales it takes: 2 with one of the tensor.
    codes_as     one of CODES_AS; scales_as: those, or float32.
    packing      of codes of 4 bits: one a byte, or pairs.
    divides      whether it divides by its scale, as a function of ``scale`` does.
    """

    tested: Subject
    fmt: Format
    granularity: str | None
    layout: ScaleLayout
    levels: int = 0
    codes_as: str = "uint8"
    scales_as: str = "float32"
    packing: str = "one a byte"
    divides: bool = False

    @property
    def scale_fmt(self) -> Format | None:
        """The format of scales that are codes; None for float32 ones."""
        return scale_format(self.granularity or "")

    def ones(self, shape: tuple[int, ...]) -> np.ndarray:
        """Codes of 1."""
        return np.full(shape, cast.encode(np.float32(1), self.fmt))

    @property
    def may_flush(self) -> bool:
        """Whether subnormal results may be 0: on a GPU, and by XLA."""
        return self.tested.framework == "jax" or self.tested.device != "cpu"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the scales of codes of this shape; the last blocks may be shorter."""
        return granularities.scale_shape(self.granularity or "", shape, -1, ragged=True)

    def spread(self, scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Scales repeated over the elements that share them."""
        blocks = granularities.lengths(self.granularity or "", len(shape), -1)
        return np.broadcast_to(scaling.spread(scales, shape, blocks), shape)

    def decode(
        self,
        codes: np.ndarray,
        scale_inv: np.ndarray | np.floating | float = 1.0,
        tensor_scale_inv: float = 1.0,
        *,
        view: str = "contiguous",
    ) -> Decoded:
        """What it gives for codes, uint8 [M, K] one a byte, and scales, one a code or one for all.

        Raises:   RefusedError: it raises. ConformanceError: arguments changed; no number a code.
        """
        passed = [self._codes(codes, view)]
        if self.granularity is not None:
            shape = self.scale_shape(codes.shape)
            scales = np.broadcast_to(np.asarray(scale_inv, np.float32), shape)
            passed.append(self._scales(scales))
        if self.levels == 2:
            tensor_scale = np.asarray(tensor_scale_inv, np.float32)
            passed.append(self.tested.make_array(tensor_scale, "float32"))
        before = [arrays.written(x) for x in passed]
        what = f"codes {list(codes.shape)}"
        try:
            with np.errstate(all="ignore"):
                output = self.tested.function(*passed)
        except (Exception, SystemExit) as error:  # a function under test may raise anything
            raise RefusedError(
                f"{self.tested.name} raised {type(error).__name__} for {what}: {error}. Call it on "
                "these alone to find the cause."
            ) from error
        if [arrays.written(x) for x in passed] != before:
            raise ConformanceError(f"{self.tested.name} changed its {what}. Let it work on copies.")
        return self._read(output, codes.shape, what)

    def _read(self, output: Any, shape: tuple[int, ...], what: str) -> Decoded:
        array = read_array(output)
        if array is None or array[1] not in FLOATS or array[0].shape != shape:
            got = type(output).__name__ if array is None else f"{array[1]} {list(array[0].shape)}"
            raise ConformanceError(
                f"{self.tested.name} gives {got} for {what}; a decoder gives numbers, an array of "
                "a float dtype and of the codes' shape. Return them alone."
            )
        with np.errstate(over="ignore"):
            return Decoded(array[0].astype(np.float32), array[1])

    def _codes(self, codes: np.ndarray, view: str) -> Any:
        if self.fmt.bits == 4 and self.packing != "one a byte":
            swapped = codes.reshape(*codes.shape[:-1], -1, 2)[..., ::-1].reshape(codes.shape)
            codes = codes if self.packing == "pairs" else swapped
            if self.codes_as == "uint8":
                codes = pack(codes)

        def as_array(part: np.ndarray) -> Any:
            if self.codes_as == "native":
                return native_array(self.tested, np.array(part, order="C"), self.fmt)
            return self.tested.make_array(part, "uint8")

        if view == "every second column":  # that of VIEWS halves numbers
            return as_array(np.repeat(codes, 2, axis=1))[:, ::2]
        if view == "behind a row":
            return as_array(np.concatenate([codes[:1], codes]))[1:]
        return as_array(codes) if view == "contiguous" else VIEWS[view](as_array, codes)

    def _scales(self, scales: np.ndarray) -> Any:
        return scale_array(self.tested, scales, self.scale_fmt, self.scales_as, self.layout)

    def expected(
        self,
        codes: np.ndarray,
        scale_inv: np.ndarray | np.floating | float,
        dtype: str,
        tensor_scale_inv: float = 1.0,
    ) -> np.ndarray:
        """What S-8 gives, rounded to the output's dtype; float32."""
        numbers = cast.decode(codes, self.fmt)
        with np.errstate(all="ignore"):
            if self.granularity is not None:
                scales = np.broadcast_to(np.float32(scale_inv), self.scale_shape(codes.shape))
                scales = np.float32(tensor_scale_inv) * scales
                spread = self.spread(scales, codes.shape)
                numbers = numbers / spread if self.divides else numbers * spread
            return dtypes.rounded(numbers, "float32" if dtype == "float64" else dtype)


def wrap(
    subjects: Sequence[Subject], fmt: Format, granularity: str | None, layout: ScaleLayout
) -> Decoder:
    """The function as a Decoder: how it takes codes and scales is tried, the simplest first.

    A code of 1 shows whether codes are read at all; a scale of 2 whether scales are.

    subjects  the function in each framework that is tried.

    Raises:   ValueError: a count of arguments that does not fit. RefusedError: it takes none.
    """
    levels = _scales_needed(subjects[0])
    if (granularity is not None) != (levels > 0):
        granularity = "tensorwise" if levels else None
    simplest = Decoder(
        tested=subjects[0], fmt=fmt, granularity=granularity, layout=layout, levels=levels
    )
    packings = ("one a byte",) if fmt.bits != 4 else ("one a byte", "pairs")
    coded = levels and simplest.scale_fmt is not None
    scales = ("native", "uint8", "float32") if coded else ("float32",)
    refused, accepted, ones = list[str](), list[Decoder](), simplest.ones((128, 256))
    for tested, packing, codes, held in itertools.product(subjects, packings, CODES_AS, scales):
        tried = dataclasses.replace(
            simplest, tested=tested, packing=packing, codes_as=codes, scales_as=held
        )
        try:
            one = tried.decode(ones, 1.0).numbers
            two = tried.decode(ones, 2.0).numbers if levels else one * 2
        except ConformanceError as error:
            refused.insert(len(refused) if isinstance(error, RefusedError) else 0, str(error))
            continue
        accepted.append(tried)
        if (one == 1).any() and np.isin(two[one == 1], (2.0, 0.5)).any():
            return tried
    if accepted:
        return accepted[0]
    if levels and granularity == "tensorwise":
        refused.append("It was given one float32 scale: name the granularity of other scales.")
    raise RefusedError("\n".join(dict.fromkeys(refused)))


def _scales_needed(tested: Subject) -> int:
    """How many scales the function takes, besides codes; 0 of a builtin without a signature."""
    try:
        inspect.signature(tested.function)
    except (TypeError, ValueError):
        return 0
    count = len(needed(tested.function)) - 1
    if not 0 <= count <= 2:
        raise ValueError(
            "a decoder takes codes, or codes and scale_inv, or also the tensor's scale_inv; "
            f"{tested.name} needs {count + 1} arguments. Give the others defaults."
        )
    return count
