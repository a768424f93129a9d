"""Which tensors of a checkpoint hold the codes and the scales of a weight, in which form.

Libraries store the same numbers under several names: codes beside a factor that multiplies out of
them, for a tensor, a row or a block, as float32, bfloat16, e8m0 or e4m3. ``FORMS`` has the names,
``find`` the weights, and ``StoredWeight.quantized`` gives rows as the simulator's ``Quantized``.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fp8ref.checkpoints.tensors import FLOATS, StoredTensor
from fp8ref.formats import E2M1FN, E4M3FN, E8M0FNU, Format
from fp8ref.shared import package_data
from fp8ref.shared.errors import require
from fp8ref.sim.quantize import cast, packing, scale_layouts, scaling
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec import granularity as granularities

__all__ = ["FORMS", "StoredWeight", "WeightForm", "block_counts", "expert", "find"]


class WeightForm(NamedTuple):
    """The names of the tensors of a weight, behind the name of its module.

    codes, scale  8 bits each, or two of 4 bits in a byte; the factor of a block out of its codes.
    tensor_scale  the factor of the tensor; "": none.
    divides       whether numbers are divided by the tensor's factor.
    weight        the name that it has in high precision.
    """

    name: str
    codes: str
    scale: str
    tensor_scale: str = ""
    divides: bool = False
    weight: str = ".weight"


FORMS = {
    name: WeightForm(name, **names)
    for name, names in package_data.tables(__file__, "forms").items()
}
"""Forms by name; of two that fit a weight the first is meant.

deepseek     DeepSeek-V3 and transformers' fine-grained FP8: ``weight_scale_inv``.
modelopt_nvfp4, compressed_tensors_nvfp4, torchao_nvfp4
             two levels of scales; compressed-tensors stores the reciprocal of the tensor's.
compressed_tensors
             compressed-tensors and ModelOpt, FP8 and MXFP8: ``weight_scale`` multiplies out.
torchao      ``qdata`` and ``scale`` of Float8Tensor and MXTensor, flattened.
transformers_experts
             the experts of a layer in one tensor [E, N, K].
gpt_oss      MXFP4: blocks [E, N, K / 32, 16].
"""


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """A quantized weight of a checkpoint, [N, K] or experts [E, N, K].

    name          that it has in high precision, such as ``model.layers.0.mlp.up_proj.weight``.
    fmt           the format of its codes.
    granularity   what shares a scale, as the shapes of codes and scales say; "": they do not fit.
    scale_layout  where scales lie (S-25): ``row_major``, unless another one alone has their number.
    transposed    whether the scales are those of the transpose.
    """

    name: str
    form: WeightForm
    fmt: Format
    codes: StoredTensor
    scale: StoredTensor | None
    tensor_scale: StoredTensor | None = None
    granularity: str = ""
    scale_layout: str = "row_major"
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight: [N, K] or [E, N, K]."""
        *others, last = self.codes.shape
        if self.fmt.bits != 4:
            return (*others, last)
        if len(others) == 3:  # gpt-oss: the blocks are an axis
            last *= others.pop()
        return (*others, 2 * last)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The tensors that hold it."""
        every = (self.codes, self.scale, self.tensor_scale)
        return tuple(part for part in every if part is not None)

    @property
    def scale_fmt(self) -> Format | None:
        """The format of scales that are codes: e8m0fnu or e4m3fn; None of numbers."""
        if self.scale is None or self.scale.dtype in FLOATS:
            return None
        return self.scale.fmt or E8M0FNU

    @property
    def two_level(self) -> bool:
        """Whether the scales of blocks of 4-bit codes are numbers of e4m3."""
        return self.scale_fmt == E4M3FN and self.fmt.bits == 4

    @functools.cached_property
    def scales(self) -> np.ndarray:
        """The factors out of codes, without the tensor's: float32 of
        ``granularity.block_counts``, as blocks of the matrices lie.

        Raises:   ValueError: no scale, or one whose shape does not fit.
        """
        text = f"{self.name} has codes {self.shape} and scales {self.scale and self.scale.shape}, "
        require(self.scale is not None and bool(self.granularity), text + "which do not fit.")
        assert self.scale is not None
        array, (rows, columns) = self.scale[...], self.counts
        if self.scale_layout != "row_major":
            matrices = array.reshape(-1, self.stored_size)
            array = np.stack(
                [scale_layouts.load(m, self.scale_layout, self.counts) for m in matrices]
            )
        numbers = array.astype(np.float32)
        if self.scale_fmt is not None:
            codes = array.view(np.uint8) if array.dtype == np.int8 else array.astype(np.uint8)
            numbers = cast.decode(codes, self.scale_fmt)
        experts = self.shape[:-2]
        if self.transposed:
            numbers = np.swapaxes(numbers.reshape(*experts, columns, rows), -1, -2)
        return np.ascontiguousarray(numbers).reshape(*experts, rows, columns)

    @functools.cached_property
    def tensor_factor(self) -> np.ndarray | None:
        """The tensor's factor out of codes, float32 () or of experts [E]; None: one level."""
        if self.tensor_scale is None:
            return None
        numbers = self.tensor_scale[...].astype(np.float32).ravel()
        experts = self.shape[:-2]
        numbers = np.broadcast_to(numbers, math.prod(experts)).reshape(experts)
        with np.errstate(divide="ignore"):
            return np.float32(1) / numbers if self.form.divides else numbers

    @property
    def counts(self) -> tuple[int, int]:
        """The blocks along both axes of a matrix."""
        return block_counts(self.granularity, self.shape)

    @property
    def is_integer(self) -> bool:
        """Whether bytes with a scale are integers of 8 bits, as W8A8 stores them, and no FP4."""
        coarse = self.granularity in ("tensorwise", "rowwise", "")
        return self.fmt.bits == 4 and self.codes.dtype == "I8" and coarse

    @property
    def height(self) -> int:
        """The rows of a block; 1 where a block has all of them."""
        return (granularities.lengths(self.granularity, 2, -1)[0] or 1) if self.granularity else 1

    @property
    def stored_size(self) -> int:
        """Elements of a matrix's scales as ``scale_layout`` stores them."""
        layout = scale_layouts.SCALE_LAYOUTS[self.scale_layout]
        count = layout.size(self.counts, 1)
        return count // 4 if layout.packed else count

    def spans(self, most: int) -> Iterator[tuple[tuple[int, ...], slice]]:
        """(matrix, rows) of each piece in order: () or the index of an expert, and whole blocks of
        rows, as many as have ``most`` elements, or one row of blocks."""
        n, k = self.shape[-2:]
        step = max(most // (k * self.height), 1) * self.height
        for matrix in np.ndindex(self.shape[:-2]):
            for first in range(0, n, step):
                yield matrix, slice(first, min(first + step, n))

    def quantized(self, matrix: tuple[int, ...] = (), rows: slice = slice(None)) -> Quantized:
        """The codes and scales of rows that whole blocks divide, of one matrix.

        Raises:   ValueError: scales that do not fit.
        """
        codes = self.codes[(*matrix, rows)]
        if self.fmt.bits == 4:
            codes = packing.unpack(codes.view(np.uint8).reshape(len(codes), -1))
        inv = self.scales[matrix]
        height = granularities.lengths(self.granularity, 2, -1)[0]
        if height is not None:
            first, last, _ = rows.indices(self.shape[-2])
            inv = inv[first // height : -(-last // height)]
        inv = inv.reshape(()) if self.granularity == "tensorwise" else inv
        factor = self.tensor_factor
        factor = None if factor is None else np.asarray(factor[matrix])
        return Quantized(
            codes, scaling.scale_inv_from_scale(inv), inv, self.fmt, self.granularity, -1, factor
        )

    def __getitem__(self, index) -> np.ndarray:
        """The dequantized numbers at an index of a weight [N, K], float32; ... is the whole.

        Order:    the codes of whole blocks of rows are read, and dequantized (S-8, S-22).
        Raises:   ValueError: scales that do not fit.
        """
        weight = dataclasses.replace(self)  # scales are let go, and not kept for each weight
        rows, *more = index if isinstance(index, tuple) else (index,)
        if not isinstance(rows, slice):
            return scaling.dequantize(weight.quantized())[index]
        n, height = self.shape[0], granularities.lengths(self.granularity, 2, -1)[0] or 1
        first, last, step = rows.indices(n)
        begin, end = min(first, n - 1) // height * height, max(first + 1, last)
        q = weight.quantized((), slice(begin, min(-(-end // height) * height, n)))
        return scaling.dequantize(q)[(slice(first - begin, last - begin, step), *more)]


def find(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredWeight]:
    """The quantized weights among tensors by name, scaled or not; of ``FORMS`` the first that fits.

    A weight is quantized if its codes are FP8, or bytes that have a scale.
    """
    weights: dict[str, StoredWeight] = {}
    for name, codes in tensors.items():
        for form in FORMS.values():
            module = name.removesuffix(form.codes)
            if not name.endswith(form.codes) or module + form.scale not in tensors:
                continue
            factor = tensors.get(module + form.tensor_scale) if form.tensor_scale else None
            if (form.tensor_scale and factor is None) or _format(codes) is None:
                continue
            name = module + form.weight
            if len(codes.shape) < 2 or not codes.nbytes:
                break
            weights[name] = _fitted(name, form, codes, tensors[module + form.scale], factor)
            break
        else:
            is_scale = any(name.endswith(form.scale) for form in FORMS.values())
            fmt = None if is_scale or len(codes.shape) < 2 or not codes.nbytes else codes.fmt
            if fmt is not None and _format(codes):
                weights[name] = StoredWeight(
                    name=name, form=FORMS["deepseek"], fmt=fmt, codes=codes, scale=None
                )
    return weights


def _format(codes: StoredTensor) -> Format | None:
    """The format of codes: of 8 bits as their dtype says, of bytes two of 4 bits; None: none."""
    if codes.dtype in ("U8", "I8"):
        return E2M1FN
    return codes.fmt if codes.fmt != E8M0FNU else None


def _fitted(
    name: str,
    form: WeightForm,
    codes: StoredTensor,
    scale: StoredTensor,
    factor: StoredTensor | None,
) -> StoredWeight:
    """A weight, with the granularity and the layout of scales that the shapes say."""
    fmt = _format(codes)
    assert fmt is not None
    weight = StoredWeight(
        name=name, form=form, fmt=fmt, codes=codes, scale=scale, tensor_scale=factor
    )
    experts = weight.shape[:-2]
    size, count = math.prod(scale.shape), math.prod(experts)
    if factor is not None and math.prod(factor.shape) not in (1, count):
        return weight
    fits = [dataclasses.replace(weight, granularity=g) for g in granularities.GRANULARITIES]
    # blocks of both axes before those of one; as many blocks as rows are no rows
    fits.sort(key=lambda fit: (scale.shape != (*experts, *fit.counts), math.prod(fit.counts)))
    for fit in fits:
        is_flat = fit.granularity in ("tensorwise", "rowwise")
        flat = is_flat and size == math.prod(fit.counts) * count
        if flat or scale.shape == (*experts, *fit.counts):
            return fit
        if scale.shape == (*experts, *reversed(fit.counts)):
            return dataclasses.replace(fit, transposed=True)
    if weight.scale_fmt is None:
        return weight
    for layout in ("packed_ue8m0", "swizzled_128x4"):
        for granularity in ("blockwise_128x128", "blockwise_1x128", "mx_1x32", "nvfp4_1x16"):
            fitted = dataclasses.replace(weight, granularity=granularity, scale_layout=layout)
            packed = scale_layouts.SCALE_LAYOUTS[layout].packed
            if packed == (scale.dtype == "I32") and fitted.stored_size * count == size:
                return fitted
    return weight


def block_counts(granularity: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """The blocks along both axes of a matrix: of a granularity, or of a size such as 64x64."""
    if granularity in granularities.GRANULARITIES:
        sizes = granularities.lengths(granularity, 2, -1)
    else:
        sizes = tuple(map(int, granularity.split("x")))
    n, k = granularities.block_counts(shape[-2:], sizes) or (1, 1)
    return n, k


def expert(matrix: tuple[int, ...]) -> str:
    """The place of a matrix of experts, before that of a block."""
    return "".join(f"expert {i}, " for i in matrix)
