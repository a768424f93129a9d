"""What a trainer's statistics are held to: the simulator's, of operands that an observer saw."""

import math

import numpy as np

from fp8ref.recipe import OPERANDS, REDUCED_AXES, CastSpec
from fp8ref.selection.statistics import planned
from fp8ref.sim.quantize import scaling, stats
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec import granularity

U = 2.0**-24


class Seen:
    """An observer's operands, by the names that statistics have."""

    def __init__(self, decisions) -> None:
        self.planned = {operand.name: operand for operand in planned(decisions)}
        self.operands: dict[str, tuple] = {}

    def add(self, layer, gemm, a, b, out) -> None:
        for role, operand in zip(OPERANDS[gemm], (a, b), strict=True):
            self.operands[f"{layer}/{gemm}/{role}"] = tuple(np.array(part) for part in operand)

    def check(self, found: dict[str, dict]) -> None:
        """Every planned operand is in found, with the simulator's statistics of what was
        observed.
        """
        assert list(found) == list(self.planned)
        for name, one in found.items():
            operand = self.planned[name]
            axis = REDUCED_AXES[operand.gemm][OPERANDS[operand.gemm].index(operand.role)] - 2
            check(one, *self.operands[name], operand.cast, axis, name)


def check(one: dict, hp, codes, scale, cast: CastSpec, axis: int, name: str = "") -> None:
    hp = np.asarray(hp, np.float32).reshape(codes.shape)
    shape = granularity.scale_shape(cast.granularity, codes.shape, axis)
    scale = np.asarray(scale, np.float32).reshape(shape)
    with np.errstate(divide="ignore"):
        q = Quantized(
            codes, scale, np.asarray(np.float32(1) / scale), cast.fmt, cast.granularity, axis
        )
    expected = stats.statistics(hp, q)
    exact = {
        "amax": float(scaling.amax(hp)),
        "scale_min": float(scale.min()),
        "scale_max": float(scale.max()),
        "underflow_rate": expected.underflow_rate,
        "saturation_rate": expected.saturation_rate,
        "overflow_rate": expected.overflow_rate,
        "non_finite": int(expected.non_finite),
    }
    for key, value in exact.items():
        assert one[key] == (value if math.isfinite(value) else None), (name, key, one[key], value)
    if not math.isfinite(expected.sqnr):
        assert one["sqnr"] is None, name
        return
    # of float32 sums of rows, then of those, (rows + columns + 3) u each; of errors to which a
    # product adds u |x| unrounded, 2 u sqrt(signal / noise) + u^2 signal / noise. In dB, 10 / ln 10
    # times both.
    ratio = expected.signal / expected.noise
    relative = 2 * (sum(codes.shape) + 3) * U + 2 * U * math.sqrt(ratio) + U * U * ratio
    assert abs(one["sqnr"] - expected.sqnr) <= 10 / math.log(10) * 1.1 * relative, (
        name,
        one["sqnr"],
        expected.sqnr,
    )
