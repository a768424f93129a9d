"""The health of optimizer states that a run records (spec O-12, Q-12).

A backend measures the part of a tensor that a device or rank holds, as float64 numbers in the order
of FIELDS. ``total`` adds parts, ``of`` makes figures of their sum, and ``recorded`` the records of
a run. ``sim.health``, ``jax.health`` and ``torch.health`` measure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from fp8ref.spec.states.layouts import Layout, Moment

COUNTS = ("count", "v_lost", "bounded", "clipped_m", "clipped_v", "stalled_m", "stalled_v")
"""The fields of a measurement that count elements."""

FIELDS = (*COUNTS, "roots", "excess", "signal", "noise", "largest_ratio")
"""The numbers that a backend measures of a part of a tensor, in order.

roots          sum of sqrt(v), v before it is stored
excess         sum of sqrt(stored v) - sqrt(v)
signal         sum of the squares of ratios; noise: of what storing changes in them
largest_ratio  largest magnitude of a ratio of stored moments
"""

RATES = ("v_lost", "bounded", "clipped_m", "clipped_v", "stalled_m", "stalled_v")
"""The counts that metrics.jsonl has as fractions of all elements."""

PREFIX = "state_"
"""What the keys of metrics.jsonl begin with."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """What storing the moments of one step cost (O-12). Counts are of elements.

    count         all of them
    v_lost        v is stored as 0 beside an m that is not
    bounded       ratios of moments that the bound clipped; 0 unless the layout is bounded
    clipped_m, clipped_v
                  values above the range of their scale
    stalled_m, stalled_v
                  stored codes that are not 0 and stay the same under a gradient of 0, by the
                  scale_inv that is kept
    root_bias     sum of sqrt(stored v) / sum of sqrt(v) - 1
    update_error  rms of the change of the next ratio that storing makes / rms of the ratio
    largest_ratio largest magnitude of the ratio of stored moments
    bytes_per_parameter
                  of both moments, scales included
    """

    count: int
    v_lost: int
    bounded: int
    clipped_m: int
    clipped_v: int
    stalled_m: int
    stalled_v: int
    root_bias: float
    update_error: float
    largest_ratio: float
    bytes_per_parameter: float


def clip_limit(moment: Moment) -> float:
    """The magnitude in units of scale_inv above which a value is clipped (O-12)."""
    return moment.fmt.max + 2.0 ** (math.frexp(moment.fmt.max)[1] - 2 - moment.fmt.mantissa_bits)


def total(parts: np.ndarray) -> np.ndarray:
    """The measurement of parts together: sums, and the largest ratio, NaN if one is.

    Shapes:   parts float64 [parts, FIELDS] -> [FIELDS].
    """
    return np.append(parts[:, :-1].sum(axis=0), parts[:, -1].max())


def of(numbers: np.ndarray, bytes_per_parameter: float) -> Health:
    """The figures of a measurement float64 [FIELDS]. Without signal, or without v, the figure that
    would be divided by it is 0."""
    figures = dict(zip(FIELDS, numbers.tolist(), strict=True))
    error = 0.0
    if figures["signal"]:
        with np.errstate(all="ignore"):
            error = float(np.sqrt(np.float64(figures["noise"]) / figures["signal"]))
    return Health(
        **{name: int(figures[name]) for name in COUNTS},
        root_bias=figures["excess"] / figures["roots"] if figures["roots"] else 0.0,
        update_error=error,
        largest_ratio=figures["largest_ratio"],
        bytes_per_parameter=bytes_per_parameter,
    )


def recorded(names: Sequence[str], numbers: np.ndarray, layout: Layout) -> dict[str, dict]:
    """The record of each parameter by its name, and of all together by "" (Q-12).

    Shapes:   numbers float64 [parameters, FIELDS].
    Specials: a figure that is infinite or NaN is None, as JSON has neither.
    """
    sizes = [int(count) for count in numbers[:, 0]]
    records = {
        name: _json(of(row, layout.bytes_per_parameter(size)))
        for name, row, size in zip(names, numbers, sizes, strict=True)
    }
    stored = sum(size * layout.bytes_per_parameter(size) for size in sizes)
    return {"": _json(of(total(numbers), stored / sum(sizes))), **records}


def columns(states: Mapping[str, dict]) -> dict[str, float]:
    """The columns of metrics.jsonl: counts as fractions, and finite figures (Q-12)."""
    if not states:
        return {}
    whole = states[""]
    rates = {key: whole[key] / whole["count"] for key in RATES}
    rest = {f.name: whole[f.name] for f in fields(Health) if f.name not in COUNTS}
    return {PREFIX + key: value for key, value in {**rates, **rest}.items() if value is not None}


def _json(health: Health) -> dict:
    return {key: value if math.isfinite(value) else None for key, value in asdict(health).items()}
