"""Ask a quantizer, and take its outputs apart: codes or values of the tensor's shape, and scales.

``Quantizer`` asks with one tensor. ``ask`` does with tensors whose groups have chosen amaxes, and
``per_group`` reads each group's scale. A group is the elements that share a scale; all arrays of
numbers by group follow the scales' C order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fp8ref.conformance.cast.outputs import FLOATS
from fp8ref.conformance.inputs import quantizer_inputs
from fp8ref.conformance.inputs.cast_inputs import CAST_FORMATS
from fp8ref.conformance.inputs.kinds import AMAX_RANGES
from fp8ref.conformance.inputs.quantizer_inputs import Amaxes
from fp8ref.conformance.kit import subject as subjects
from fp8ref.conformance.kit.subject import ConformanceError, RefusedError, Subject
from fp8ref.formats import E4M3FN, E8M0FNU
from fp8ref.shared import package_data
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.packing import unpack
from fp8ref.spec.granularity import scale_shape

# The names that libraries give to the parts of a quantized tensor
_NAMES: dict[str, tuple[str, ...]] = package_data.tables(__file__, "outputs")["names"]

PACKINGS = ("low first", "high first")
"""How two codes of 4 bits share a byte: the first in its low half (F-5), or in its high half."""


class WrongShapeError(ConformanceError):
    """No part of what was returned is an array of the shape of x."""


@dataclass(frozen=True, kw_only=True)
class QuantizerOutput:
    """What one call returned.

    codes   uint8 of the tensor's shape, or None if values were returned.
    values  float32 of the tensor's shape, or None if codes were returned.
    dtype   of the array of the tensor's shape; place: its name, or its index.
    scales  by name or place; float32, e8m0 decoded.

    4-bit codes may be pairs [M, K / 2], uint8 scales beside them e4m3fn (S-22): ``e4m3_scales``.
    """

    codes: np.ndarray | None
    values: np.ndarray | None
    dtype: str
    place: str
    scales: Mapping[str, np.ndarray]
    e4m3_scales: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def tensor(self) -> np.ndarray:
        """The codes, or else the values."""
        elements = self.codes if self.codes is not None else self.values
        assert elements is not None
        return elements

    def packings(self, shape: tuple[int, ...]) -> tuple[str, ...]:
        """How codes of 4 bits of a tensor may be packed (F-5)."""
        whole = self.codes is None or self.codes.shape[-1] == shape[-1]
        return ("one a byte",) if whole else PACKINGS

    def unpacked(self, packing: str) -> np.ndarray:
        """Codes of 4 bits, one a byte; uint8 [M, K]."""
        assert self.codes is not None
        if packing == "one a byte":
            return self.codes
        swapped = self.codes << np.uint8(4) | self.codes >> np.uint8(4)
        return unpack(self.codes if packing == "low first" else swapped)

    def readings(self, name: str) -> list[np.ndarray]:
        """The numbers that an array of scales may hold."""
        return [s[name] for s in (self.scales, self.e4m3_scales) if name in s]


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
        raw_output = self.subject.ask(x, self.dtype, view=view)
        try:
            return read(raw_output, x)
        except Exception as error:  # lazy arrays, such as those of a GPU, may raise only here
            kind = type(error) if isinstance(error, WrongShapeError) else ConformanceError
            asked = subjects.describe(x, self.dtype, self.subject.framework)
            raise kind(f"{self.subject.name} for {asked}: {error}") from error


def _named_arrays(raw_output: Any) -> dict[str, tuple[np.ndarray, str]]:
    """The arrays among the parts of what was returned, by name or place, and their dtypes."""
    parts = {name: array_of(part) for name, part in parts_of(raw_output).items()}
    return {name: part for name, part in parts.items() if part is not None}


def read(raw_output: Any, x: np.ndarray) -> QuantizerOutput:
    """What a quantizer returned for x, taken apart.

    Raises:   WrongShapeError: no part is an array of x's shape that holds codes or values.
    """
    arrays = _named_arrays(raw_output)
    fitting = {name: dtype for name, (a, dtype) in arrays.items() if a.shape == x.shape}
    codes_first = [n for n, dtype in fitting.items() if _is_codes(n, dtype, len(arrays))]
    codes_first += [n for n, d in fitting.items() if d in FLOATS]
    main = codes_first[0] if codes_first else None
    if main is None:
        raise WrongShapeError(
            f"it gives {_shapes_text(arrays) or type(raw_output).__name__}; a quantizer gives "
            f"codes (uint8 or float8) or values of the shape {list(x.shape)}, alone or with "
            "scales. Return (codes, scale)."
        )
    tensor, dtype = arrays.pop(main)
    codes = tensor if dtype not in FLOATS else None
    return QuantizerOutput(
        codes=codes,
        values=tensor.astype(np.float32) if codes is None else None,
        dtype=dtype,
        place=main,
        scales={
            name: _scales(a, kind)
            for name, (a, kind) in arrays.items()
            if kind in FLOATS or kind in ("uint8", "float8_e8m0fnu")
        },
    )


def ask_four_bits(subject: Subject, x: np.ndarray, source: str) -> QuantizerOutput:
    """The output for x of a quantizer to e2m1fn.

    Raises:   ConformanceError: as Subject.ask, and where no part of it is codes or values.
    """
    arrays = _named_arrays(subject.ask(x, source))
    halves = (*x.shape[:-1], x.shape[-1] // 2)
    shapes = {name: (a.shape, dtype) for name, (a, dtype) in arrays.items()}
    whole = [(x.shape, dtype) for dtype in ("uint8", "float4_e2m1fn", *FLOATS)]
    pairs = [(halves, dtype) for dtype in ("uint8", "float4_e2m1fn_x2")]
    fitting = [name for kinds in (whole, pairs) for name in shapes if shapes[name] in kinds]
    if not fitting:
        raise ConformanceError(
            f"{subject.name} gives {_shapes_text(arrays) or 'no array'}; a quantizer to e2m1fn "
            f"gives codes (uint8 {list(x.shape)}, or pairs {list(halves)}) or values of x's "
            "shape, alone or with scales. Return (codes, scale)."
        )
    tensor, dtype = arrays.pop(fitting[0])
    values = dtype in FLOATS
    if not values and tensor.shape == x.shape and tensor.max(initial=0) > 15:
        raise ConformanceError(
            f"{subject.name} gives a code {tensor.max()}; codes of e2m1fn are at most 15, one a "
            "byte."
        )
    scales, e4m3_scales = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, (a, kind) in arrays.items():
        if kind in ("uint8", "float8_e4m3fn"):
            e4m3_scales[name] = cast.decode(a, E4M3FN)
        is_scale = kind in FLOATS or kind in ("uint8", "float8_e8m0fnu")
        # empty where no scale has this dtype
        scales[name] = _scales(a, kind) if is_scale else np.zeros(0, np.float32)
    return QuantizerOutput(
        codes=None if values else tensor,
        values=tensor.astype(np.float32) if values else None,
        dtype=dtype,
        place=fitting[0],
        scales=scales,
        e4m3_scales=e4m3_scales,
    )


def _shapes_text(arrays: Mapping[str, tuple[np.ndarray, str]]) -> str:
    return ", ".join(f"{dtype} {list(a.shape)}" for a, dtype in arrays.values())


def parts_of(raw_output: Any) -> dict[str, Any]:
    """The parts by name: attributes, or items of a dict or sequence; else the whole."""
    if isinstance(raw_output, np.ndarray):  # its attribute ``data`` is a buffer, and no codes
        return {"": raw_output}
    if isinstance(raw_output, Mapping):
        return {str(key): value for key, value in raw_output.items()}
    if hasattr(raw_output, "_asdict"):
        return dict(raw_output._asdict())
    if isinstance(raw_output, tuple | list):
        return {f"[{i}]": part for i, part in enumerate(raw_output)}
    codes = [name for name in _NAMES["codes"] if hasattr(raw_output, name)]
    scales = [name for name in _NAMES["scales"] if hasattr(raw_output, name)]
    if codes and scales:
        parts = {name: getattr(raw_output, name) for name in (codes[0], *scales)}
        return {name: part for name, part in parts.items() if not callable(part)}
    return {"": raw_output}


def array_of(part: Any) -> tuple[np.ndarray, str] | None:
    """A part as a NumPy array and its dtype; None if it is neither array nor number."""
    if isinstance(part, float):
        return (np.asarray(part, np.float64), "float64")
    return subjects.read_array(part)


def _is_codes(name: str, dtype: str, count: int) -> bool:
    """Whether an array holds codes: float8, or uint8 where codes may be."""
    if dtype == "uint8":
        return count == 1 or name.startswith("[") or name in _NAMES["codes"]
    return dtype.removeprefix("float8_") in CAST_FORMATS


def _scales(a: np.ndarray, dtype: str) -> np.ndarray:
    """Scales as float32; uint8 and e8m0 ones are decoded."""
    if dtype in FLOATS:
        with np.errstate(over="ignore"):
            return a.astype(np.float32)
    return cast.decode(a, E8M0FNU)


def smallest_shape(quantizer: Quantizer, shapes: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """The first shape that the quantizer takes; the last is not tried, but taken."""
    for shape in shapes[:-1]:
        try:
            quantizer.once(np.ones(shape, np.float32))
        except ConformanceError:
            continue
        return shape
    return shapes[-1]


@dataclass(frozen=True, kw_only=True)
class ScaleLayout:
    """Which elements share a scale, and which of the returned arrays are scales.

    kinds  by the name or place of each array: ``scale``, ``scale_inv`` or ``amax``.
    """

    granularity: str
    axis: int
    kinds: Mapping[str, str] = field(default_factory=dict)

    def shape(self, of: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a tensor of this shape (S-6)."""
        return scale_shape(self.granularity, of, self.axis)

    def is_transposed(self, shape: tuple[int, ...], of: tuple[int, ...]) -> bool:
        """Whether this is the transposed shape of the scales of a tensor of shape ``of``."""
        own = self.shape(of)
        return len(own) == 2 and own[0] != own[1] and tuple(shape) == own[::-1]

    @property
    def scales(self) -> dict[str, str]:
        """The kinds without amaxes."""
        return {name: kind for name, kind in self.kinds.items() if kind != "amax"}

    @property
    def scale(self) -> str | None:
        """The name of the first array that is a scale or scale_inv; None without one."""
        return next(iter(self.scales), None)


@dataclass(frozen=True, kw_only=True)
class Response:
    """One tensor x [M, K], and what a quantizer returned for it.

    group    for each element, the index of its group, int [M, K].
    kind     for each group, the index of its kind of amax in AMAX_RANGES.
    largest  for each group, its element of largest magnitude, with the sign.
    """

    x: np.ndarray
    group: np.ndarray
    kind: np.ndarray
    largest: np.ndarray
    output: QuantizerOutput

    @property
    def amax(self) -> np.ndarray:
        """For each group, the magnitude of ``largest``."""
        return np.abs(self.largest)

    @property
    def ordinary(self) -> np.ndarray:
        """For each group, whether its amax is ordinary: no policy has special rules for it."""
        return self.kind == AMAX_RANGES.index("ordinary")


def ask(
    quantizer: Quantizer, amaxes: Amaxes, shape: tuple[int, int], granularity: str, axis: int
) -> list[Response]:
    """The responses to all amaxes, one for each group of a tensor; groups left over are zeros."""
    group = quantizer_inputs.groups(shape, granularity, axis)
    count = int(group.max()) + 1
    responses = []
    for begin in range(0, amaxes.largest.size, count):
        some = amaxes.largest[begin : begin + count]
        kinds = amaxes.kind[begin : begin + count]
        missing = count - some.size
        largest = np.concatenate([some, np.zeros(missing, np.float32)])
        beside = np.pad(amaxes.beside[begin : begin + count], ((0, missing), (0, 0)))
        kind = np.concatenate([kinds, np.full(missing, AMAX_RANGES.index("zero"))])
        x = quantizer_inputs.tensor(largest, beside, group, quantizer.dtype)
        try:
            output = quantizer.ask(x)
        except RefusedError as error:
            raise RefusedError(
                f"{error} Its amax is {_refused(quantizer, x, np.abs(largest), group):.9g}, "
                "which S-9 allows."
            ) from error
        responses.append(Response(x=x, group=group, kind=kind, largest=largest, output=output))
    return responses


def _refused(quantizer: Quantizer, x: np.ndarray, amax: np.ndarray, group: np.ndarray) -> float:
    """The first amax that makes it raise with zeros in all other groups; else the first amax."""
    for i, value in enumerate(amax):
        try:
            quantizer.ask(np.where(group == i, x, np.float32(0)))
        except RefusedError:
            return float(value)
    return float(amax[0])


def identify_returned(responses: Sequence[Response], granularity: str, axis: int) -> ScaleLayout:
    """Which returned arrays are scales, by how their numbers change with the amax.

    A scale falls as the amax grows, a scale_inv rises. An array that does neither is left out.

    Raises:   ConformanceError: an array does not have one number for each group.
    """
    amax = np.concatenate([a.amax for a in responses])
    kinds = {}
    scale_layout = ScaleLayout(granularity=granularity, axis=axis)
    for name in responses[0].output.scales:
        values = np.concatenate([per_group(a, name, scale_layout) for a in responses])
        # Both amaxes are among those asked, and exact in every dtype.
        low, high = (float(values[np.argmax(amax == np.float32(v))]) for v in (1, 1024))
        named = name.strip("_").lower() == "amax"
        if named or np.array_equal(values, amax, equal_nan=True):
            kinds[name] = "amax"
        elif low > high:
            kinds[name] = "scale"
        elif low < high:
            kinds[name] = "scale_inv"
    return replace(scale_layout, kinds=kinds)


def per_group(a: Response, name: str, scale_layout: ScaleLayout) -> np.ndarray:
    """The scale of each group, from an array of one for each group, or for each element."""
    values, count = a.output.scales[name], int(a.group.max()) + 1
    # The first element of a group stands for it, where scales are expanded to the tensor's shape.
    if values.size == count:
        transposed = scale_layout.is_transposed(values.shape, a.x.shape)
        return (values.T if transposed else values).reshape(-1)
    if values.shape == a.x.shape:
        return values.reshape(-1)[np.unique(a.group.reshape(-1), return_index=True)[1]]
    raise ConformanceError(
        f"its {name or 'scales'} have shape {list(values.shape)} for x {list(a.x.shape)}, but "
        f"elements share scales as in {scale_layout.granularity}, axis {scale_layout.axis}, "
        f"whose scales have shape {list(scale_layout.shape(a.x.shape))}. Return one scale for "
        "each group."
    )


def as_rows(
    responses: Sequence[Response], scale_layout: ScaleLayout
) -> tuple[Sequence[Response], ScaleLayout]:
    """Responses as a single one, each row of which is a group.

    A policy gives a row what it gives a group of these elements (S-6), and one comparison of many
    rows takes less time than many of few. Responses of several shapes or dtypes, or whose groups
    have several sizes, are returned as they are.
    """
    first = responses[0].output if responses else None
    parts = [
        (a.x.shape, a.output.codes is None, a.output.dtype, a.output.scales.keys())
        for a in responses
    ]
    if first is None or any(part != parts[0] for part in parts):
        return responses, scale_layout
    group = responses[0].group.reshape(-1)
    sizes = np.bincount(group)
    if np.any(sizes != sizes[0]):
        return responses, scale_layout
    order = np.argsort(group, kind="stable")

    def rows(tensors: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([t.reshape(-1)[order].reshape(sizes.size, -1) for t in tensors])

    codes = None if first.codes is None else rows([a.output.tensor for a in responses])
    values = None if first.codes is not None else rows([a.output.tensor for a in responses])
    scales = {}
    for name in first.scales:
        by_group = [per_group(a, name, scale_layout) for a in responses]
        scales[name] = np.concatenate(by_group)[:, None]
    x = rows([a.x for a in responses])
    whole = Response(
        x=x,
        group=np.broadcast_to(np.arange(len(x))[:, None], x.shape),
        kind=np.concatenate([a.kind for a in responses]),
        largest=np.concatenate([a.largest for a in responses]),
        output=replace(first, codes=codes, values=values, scales=scales),
    )
    return [whole], replace(scale_layout, granularity="rowwise", axis=-1)


def some_rows(rows: Response, keep: np.ndarray, width: int) -> Response:
    """Rows of a response of ``as_rows``, by mask or index: of ``width`` elements, largest first."""
    output = rows.output
    codes, values = (None if t is None else t[keep, :width] for t in (output.codes, output.values))
    x = rows.x[keep, :width]
    scales = {name: s[keep] for name, s in output.scales.items()}
    return Response(
        x=x,
        group=np.broadcast_to(np.arange(len(x))[:, None], x.shape),
        kind=rows.kind[keep],
        largest=rows.largest[keep],
        output=replace(output, codes=codes, values=values, scales=scales),
    )
