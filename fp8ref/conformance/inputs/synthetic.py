"""Tensors that training rarely shows and a quantiser must still get right: outliers, zeros, subnormals, Inf, NaN, ties."""

import numpy as np

from fp8ref.formats import BFLOAT16, Format
from fp8ref.sim import cast


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Name -> float32 [48, 128]; every value is a bfloat16 too."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((48, 128))
    cases = {
        "normal": normal,
        "outlier": np.where(rng.random(normal.shape) < 0.002, normal * 1e4, normal),
        "wide": normal * 2.0 ** rng.integers(-60, 60, normal.shape),
        "tiny": normal * 1e-13,
        "subnormal": normal * 1e-39,
        "zero": np.zeros_like(normal),
        "zero_rows": np.where(np.arange(48)[:, None] % 3 == 0, 0, normal),
        "negative_zero": np.where(normal > 0, -0.0, normal),
        "inf": np.where(np.arange(normal.size).reshape(normal.shape) == 1234, -np.inf, normal),
        "nan": np.where(np.arange(normal.size).reshape(normal.shape) == 77, np.nan, normal),
        "huge": normal * 1e38 / np.abs(normal).max(),
    }
    with np.errstate(under="ignore"):
        return {name: cast.round_to(value, BFLOAT16) for name, value in cases.items()}


def casts(fmt: Format) -> np.ndarray:
    """float32 values that decide a cast to fmt: every number, every midpoint and its neighbours, overflow, specials, both signs."""
    numbers = np.sort(cast.decode(np.arange(fmt.max_code + 1, dtype=np.uint8), fmt))
    top = np.float32(fmt.max + (fmt.max - numbers[-2]))  # the number that would follow max
    numbers = np.append(numbers, top)
    middle = ((numbers[1:].astype(np.float64) + numbers[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(middle, np.float32(side)) for side in (-np.inf, np.inf)]
    special = np.array([top * 2, 1e30, np.inf, np.nan, fmt.smallest_subnormal / 4], np.float32)
    values = np.concatenate([numbers, middle, *around, special])
    return np.concatenate([values, -values]).astype(np.float32)
