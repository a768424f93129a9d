"""What storing the moments of a step cost (spec O-12).

found = health.measure(g, before, after, layout="sqrt_e4m3")
print(found.v_lost, found.update_error)
"""

import numpy as np

from fp8ref.shared.errors import require
from fp8ref.sim.quantize import cast
from fp8ref.sim.states import moments
from fp8ref.sim.states import states as sim
from fp8ref.sim.states.moments import MomentState
from fp8ref.sim.states.states import State
from fp8ref.spec.states import health
from fp8ref.spec.states import layouts as states
from fp8ref.spec.states.health import Health
from fp8ref.spec.states.layouts import Layout, Moment

__all__ = ["measure"]


def measure(
    g,
    before: State,
    after: State,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    layout: str | Layout = "sqrt_e4m3",
) -> Health:
    """What the step from before to after cost, by the gradient that it took (spec O-12).

    Order:    float64 sums, in no stated order.
    Specials: figures of a state that holds NaN are NaN where they are not counts.
    Raises:   ValueError: states of another layout, or not one step apart.
    """
    measurement = numbers(g, before, after, b1=b1, b2=b2, eps=eps, layout=layout)
    return health.of(measurement, states.by_name(layout).bytes_per_parameter(after.m.codes.size))


def numbers(
    g, before: State, after: State, *, b1: float, b2: float, eps: float, layout: str | Layout
) -> np.ndarray:
    """The measurement float64 [health.FIELDS] behind ``measure``'s figures. Raises as it does."""
    size = after.m.codes.size
    named_layout, layout = layout, states.by_name(layout).of(size)
    text = f"health compares one step; got states after {before.step} and {after.step} steps."
    require(after.step == before.step + 1, text)
    at = states.scalars(after.step, learning_rate=0.0, b1=b1, b2=b2, eps=eps, weight_decay=0.0)
    both = (layout.m, layout.v)
    (old_m, old_v), stored = (
        tuple(x.reshape(-1) for x in sim.decode(state, named_layout)) for state in (before, after)
    )
    with np.errstate(all="ignore"):
        gradient = sim.in_range(cast.exact(g).astype(np.float32).reshape(-1))
        new = moments.averages(gradient, old_m, old_v, at, layout)
        idle = moments.averages(np.zeros(size, np.float32), stored[0], stored[1], at, layout)
        new_ratios, stored_ratios = (
            moments.ratio(pair[0], pair[1], at).astype(np.float64) for pair in (new, stored)
        )
        roots, stored_roots = (np.sqrt(pair[1].astype(np.float64)) for pair in (new, stored))
        counts = [
            size,
            ((stored[1] == 0) & (stored[0] != 0)).sum(),
            (np.abs(new_ratios) > at.bound).sum() if layout.bounded else 0,
        ]
        for mask, pair in ((_clipped, new), (_stalled, idle)):
            counts += [mask(*of).sum() for of in zip(pair, (after.m, after.v), both, strict=True)]
        sums = (
            roots.sum(),
            (stored_roots - roots).sum(),
            (new_ratios**2).sum(),
            ((stored_ratios - new_ratios) ** 2).sum(),
            np.abs(stored_ratios).max(),
        )
        return np.array([*counts, *sums], np.float64)


def _clipped(x: np.ndarray, stored: MomentState, moment: Moment) -> np.ndarray:
    """Whether values exceed the largest stored number."""
    if stored.scale_inv is None or moment.expansion:
        return np.zeros(x.shape, bool)
    limit = np.float32(health.clip_limit(moment)) * stored.scale_inv
    return np.abs(np.sqrt(x) if moment.root else x) > moments.spread(limit, 0, x.size, moment)


def _stalled(x: np.ndarray, stored: MomentState, moment: Moment) -> np.ndarray:
    """Whether a moment x, one step later and without a gradient, is stored unchanged."""
    codes = stored.codes.reshape(-1)
    not_zero = (codes & 0x7F != 0) if codes.dtype == np.uint8 else codes != 0
    if moment.rounding == "stochastic":
        return np.zeros(x.shape, bool)
    x = np.sqrt(x) if moment.root else x
    if stored.exponent is not None and stored.center is not None:
        x = moments.expanded(x, stored.center, stored.exponent, stored.scale_inv, 0, moment)
    elif stored.scale_inv is not None:
        x = x / moments.spread(stored.scale_inv, 0, x.size, moment)
    return not_zero & (moments.round_codes(x, moment, 0, None) == codes)
