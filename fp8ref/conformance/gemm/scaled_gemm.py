"""The scaled GEMM that is probed: a function of two quantized operands, called safely."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fp8ref.formats import BFLOAT16, E4M3FN, E8M0FNU, FLOAT16, FLOAT32, Format
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec.granularity import by_name, scale_shape

OUT_DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}
"""The dtypes that a GEMM may return, by name."""


class ProbeError(ValueError):
    """An invalid GEMM.

    It raises, gives another shape or type, changes its operands, or is not deterministic.
    """


class RefusedError(ProbeError):
    """The GEMM raises for these operands."""


@dataclass(frozen=True, kw_only=True)
class ScaledGemm:
    """A scaled GEMM: a function of two quantized operands.

    function     (Quantized a [M, K], Quantized b [N, K]) -> [M, N], an array of NumPy, PyTorch or
                 JAX in float32, bfloat16 or float16; with ``bias`` set, also bias [N] of float32.
    granularity  of the scales it takes; granularity_b: of those of b, if they are others. A probe
                 takes ``tensorwise`` and ``rowwise`` ones alone.
    about        what it runs on: device, versions, flags.
    scale_layout where scales of blocks lie in memory, as ``sim.quantize.scale_layouts`` has it;
                 scale_bytes: the bytes of one.
    """

    name: str
    function: Callable[..., Any]
    granularity: str = "tensorwise"
    granularity_b: str = ""
    bias: bool = False
    about: Mapping[str, str] = field(default_factory=dict)
    scale_layout: str = "row_major"
    scale_bytes: int = 4

    @property
    def granularities(self) -> tuple[str, str]:
        """Of the scales of a and of b."""
        return self.granularity, self.granularity_b or self.granularity

    def operands(
        self,
        codes: Iterable[np.ndarray],
        formats: Iterable[Format],
        scales: Iterable[np.ndarray | float] = (1.0, 1.0),
    ) -> tuple[Quantized, Quantized]:
        """a and b from codes [M, K] and [N, K], under scales of one or others (``operand``)."""
        a, b = zip(codes, formats, self.granularities, scales, strict=True)
        return operand(*a), operand(*b)

    def multiply(
        self, a: Quantized, b: Quantized, bias: np.ndarray | None = None, *, repeat: bool = True
    ) -> tuple[np.ndarray, Format]:
        """Run the function twice, or with repeat=False once; return its result as float32 [M, N],
        and the result's dtype.

        Raises:   ProbeError: the GEMM is invalid.
        """
        # A probe reads single bits: a result that changes between runs would pass for arithmetic.
        with_bias = {} if bias is None else {"bias": bias}
        first, dtype = self._once(a, b, with_bias)
        if not repeat:
            return first, dtype
        again, _ = self._once(a, b, with_bias)
        different = first.view(np.uint32) != again.view(np.uint32)
        if different.any():
            at = tuple(int(i) for i in np.argwhere(different)[0])
            raise ProbeError(
                f"{self.name} does not repeat itself: {_of(a, b)} gave {first[at]:.9g} at "
                f"{list(at)}, then {again[at]:.9g}. A probe needs a deterministic function; "
                "turn atomics or autotuning off."
            )
        return first, dtype

    def _once(
        self, a: Quantized, b: Quantized, with_bias: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, Format]:
        operands = (a.codes, a.scale, a.scale_inv, b.codes, b.scale, b.scale_inv)
        copies = [np.copy(part) for part in operands]
        call = functools.partial(self.function, a, b, **with_bias)
        values, dtype = called(self.name, call, f" for {_of(a, b)}")
        equal = functools.partial(np.array_equal, equal_nan=True)
        if not all(map(equal, copies, operands)):
            words = f"changed its operands, {_of(a, b)}. Let it use copies."
            raise ProbeError(f"{self.name} {words}")
        if values.shape != (len(a.codes), len(b.codes)):
            raise ProbeError(
                f"{self.name} gives [M, N] = {[len(a.codes), len(b.codes)]} for {_of(a, b)}; "
                f"got shape {list(values.shape)}."
            )
        return values, dtype


def operand(
    codes: np.ndarray, fmt: Format, granularity: str, scale: np.ndarray | float = 1.0
) -> Quantized:
    """An operand from codes [M, K], reduced along K.

    scale    one number, or an array of the granularity's shape, moved to ``hardware_scales``.
    """
    scale = np.broadcast_to(
        np.asarray(scale, np.float32), scale_shape(granularity, codes.shape, -1)
    ).copy()
    scale_inv = np.asarray(scaling.scale_inv_from_scale(scale))
    held = hardware_scales(granularity, scale_inv)
    if held is not scale_inv:
        scale, scale_inv = np.asarray(scaling.scale_inv_from_scale(held)), held
    return Quantized(codes, scale, scale_inv, fmt, granularity, -1)


def unscaled(*operands: Quantized) -> list[Quantized]:
    """The operands' codes under a scale of one."""
    return [operand(q.codes, q.fmt, "tensorwise") for q in operands]


def hardware_scales(granularity: str, scale_inv: np.ndarray) -> np.ndarray:
    """The nearest scales that a GEMM of this granularity reads, float32 of the same shape.

    MX blocks have a power of two (e8m0fnu), NVFP4 blocks a number of e4m3fn; others any float32,
    and are returned as they are. Ties of e8m0 go up.
    """
    fmt = {"mx": E8M0FNU, "nvfp4": E4M3FN}.get(granularity.partition("_")[0])
    if fmt is None:
        return scale_inv
    return np.asarray(cast.round_to(scale_inv, fmt, saturate=True))


def rows_of(q: Quantized, rows: np.ndarray) -> Quantized:
    """The given rows of an operand, with their scales.

    Raises:   ValueError: rows that share scales of blocks and are not the first, which keep them.
    """
    size = by_name(q.granularity).other or 1
    if size > 1 and not np.array_equal(rows, np.arange(len(rows))):
        raise ValueError(
            f"of blocks of {size} rows the first rows are taken; got {rows}. Take np.arange of "
            "a number."
        )
    lines = rows[::size] // size
    scale, scale_inv = (x[lines] if x.ndim else x for x in (q.scale, q.scale_inv))
    return q._replace(codes=q.codes[rows], scale=scale, scale_inv=scale_inv)


def called(name: str, call: Callable[[], Any], operands: str = "") -> tuple[np.ndarray, Format]:
    """What a call of a GEMM returns, as a float32 copy, safe from later calls, and its dtype.

    Raises:   RefusedError: it raises; ProbeError: it gives no such array.
    """
    try:
        with np.errstate(all="ignore"):  # stimuli hold NaN and overflow
            return _read_array(call())
    except ProbeError as error:
        raise ProbeError(f"{name} {error}") from error
    except (Exception, SystemExit) as error:  # a custom function may raise anything
        text = f": {error}" if str(error) else ""
        raise RefusedError(
            f"{name} raised {type(error).__name__}{operands}{text}. Call it on such operands "
            "alone to find the cause."
        ) from error


def _read_array(array: Any) -> tuple[np.ndarray, Format]:
    if hasattr(array, "detach"):  # PyTorch's tensors
        dtype = str(array.dtype).removeprefix("torch.")
        array = array.detach().float().cpu().resolve_conj().resolve_neg().numpy()
    elif hasattr(array, "dtype"):
        dtype, array = np.dtype(array.dtype).name, np.asarray(array)
    else:
        raise ProbeError(
            f"gives one array [M, N] of NumPy, PyTorch or JAX; got {type(array).__name__}. "
            "Return the array alone."
        )
    if dtype not in OUT_DTYPES:
        raise ProbeError(f"gives {', '.join(OUT_DTYPES)}; got {dtype}. Convert what it returns.")
    return np.array(array, np.float32, order="C"), OUT_DTYPES[dtype]


def _of(a: Quantized, b: Quantized) -> str:
    return f"a {a.fmt} {list(a.codes.shape)} and b {b.fmt} {list(b.codes.shape)}, {a.granularity}"
