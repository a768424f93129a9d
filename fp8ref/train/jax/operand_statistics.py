"""Statistics of an FP8 GEMM's operands as it reports them to the host (spec Q-8), in NumPy."""

from collections.abc import Iterator, Mapping

import numpy as np

from fp8ref.recipe import OPERANDS, REDUCED_AXES, Gemm
from fp8ref.selection.statistics import FIELDS, Operand
from fp8ref.sim.quantize import scaling, stats
from fp8ref.spec import granularity


def measured(
    planned: Mapping[str, Operand], layer: str, gemm: Gemm, a, b
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, float64 in the order of ``FIELDS``) of each operand in FP8 of a GEMM.

    planned   operands by name.
    a, b      (hp, codes, scale) as ``linear.observing`` reports them, each in its tensor's own
              layout.
    """
    for role, axis, (hp, codes, scale) in zip(
        OPERANDS[gemm], REDUCED_AXES[gemm], (a, b), strict=True
    ):
        operand = planned.get(f"{layer}/{gemm}/{role}")
        if operand is None:
            continue
        hp, codes, scale = (np.asarray(x) for x in (hp, codes, scale))
        hp, codes, kind = (
            hp.astype(np.float32).reshape(codes.shape),
            codes.view(np.uint8),
            operand.cast.granularity,
        )
        # Flax keeps a weight as [K, N], so that the reduced axis may be the other one: its scales
        # show it.
        axes = [axis % 2, 1 - axis % 2] if codes.ndim == 2 else [axis % codes.ndim]
        fits = [
            candidate
            for candidate in (reversed(axes) if role == "weight" else axes)
            if granularity.scale_shape(kind, codes.shape, candidate, ragged=True) == scale.shape
        ]
        of = scaling.Quantized(
            codes, scale.astype(np.float32), _inverse(scale), operand.cast.fmt, kind, fits[0]
        )
        counts = stats.statistics(hp, of)
        numbers = {
            name: float(getattr(counts, name))
            for name in (
                "count",
                "non_finite",
                "underflows",
                "saturated",
                "overflows",
                "signal",
                "noise",
            )
        }
        numbers |= {
            "amax": float(np.max(np.abs(hp))),
            "scale_min": float(scale.min()),
            "scale_max": float(scale.max()),
        }
        yield operand.name, np.array([numbers[field] for field in FIELDS])


def _inverse(scale: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return (np.float32(1) / scale.astype(np.float32)).astype(np.float32)
