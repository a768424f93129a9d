"""AdamW whose moments are stored in FP8 and other narrow formats (SEMANTICS O). Pure functions of
one tensor.

    state = states.init(p.shape, "sqrt_e4m3")
    p, state = states.step(p, g, state, learning_rate=1e-3, layout="sqrt_e4m3")
    m, v = states.decode(state, "sqrt_e4m3")

Order of a step: gradients out of range (O-2); the moments read back (O-4); their averages (O-5);
the weight (O-6); the scales of the new moments (O-7, O-9, O-10); their codes (O-8). Every operation
is one float32 operation, rounded to nearest even. A layout is a ``fp8ref.states.Layout``. A step
knows nothing of elements but their flat index and the amaxes of their group, so that any cut of a
tensor gives the same (O-11): ``cuts`` makes the step as several ranks make it.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fp8ref import states
from fp8ref.sim import cast, moments, philox
from fp8ref.sim.moments import MomentState
from fp8ref.states import Layout, Scalars


class State(NamedTuple):
    """The state of one tensor: the steps that were made, and both moments, in the tensor's
    shape."""

    step: int
    m: MomentState
    v: MomentState


def init(shape: tuple[int, ...], layout: str | Layout = "sqrt_e4m3") -> State:
    """The state before the first step: zero codes, scales 1 (SEMANTICS O-4).

    Shapes:   codes of that shape; scales () or [blocks of the flattened tensor].
    Raises:   ValueError: an unknown layout; a tensor without elements.
    """
    layout = _layout_of(layout, shape)
    return State(0, *(moments.zeros(shape, moment) for moment in (layout.m, layout.v)))


def decode(state: State, layout: str | Layout = "sqrt_e4m3") -> tuple[np.ndarray, np.ndarray]:
    """m and v as the next step reads them, float32 (SEMANTICS O-4).

    Order:    RN32(decode(code) * scale_inv); the inverse of an expansion; RN32(x * x) of a root; a
              magnitude below ``layout.smallest_moment`` is +0.
    Raises:   ValueError: an unknown layout, or a state of another.
    """
    layout = _layout_of(layout, state.m.codes.shape)
    _check_state(state, layout, state.m.codes.shape)
    shape = state.m.codes.shape
    both = ((state.m, layout.m), (state.v, layout.v))
    m, v = (moments.read(stored, moment, stored.codes.reshape(-1), 0, layout).reshape(shape) for stored, moment in both)
    return m, v


def step(
    p,
    g,
    state: State,
    *,
    learning_rate: float,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    layout: str | Layout = "sqrt_e4m3",
    seed: int = 0,
    tensor: int = 0,
    cuts: Sequence[int] = (),
) -> tuple[np.ndarray, State]:
    """One step of AdamW: the weight and the state after it (SEMANTICS O).

    seed, tensor  key the random numbers of a stochastic layout: tensor is the number of the tensor
                  among those of the optimizer (O-8).
    cuts          ascending flat indices at which ranks cut the tensor; the result is the same for
                  any (O-11).
    Shapes:       p float32 of any shape; g of that shape, float32, float16 or bfloat16.
    Order:        O-2 to O-10, see the module.
    Specials:     a gradient below 2^-56 counts as zero, one above 2^56 or not finite as NaN. A NaN
                  makes its weight NaN, and both moments of all that share its scale.
    Raises:       ValueError: as ``states.scalars`` and ``decode``; p or g of another dtype or
                  shape; cuts not ascending; a seed or tensor out of range.
    """
    p, g = cast.array(p), cast.array(g)
    if p.dtype != np.float32:
        raise ValueError(f"weights are float32; got {p.dtype}. Keep float32 masters.")
    if g.shape != p.shape or g.dtype.name not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"a gradient is float32, float16 or bfloat16 of its weight's shape, {p.shape}; got {g.dtype} {g.shape}.")
    layout = _layout_of(layout, p.shape)
    states.check(b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, layout=layout)
    _check_state(state, layout, p.shape)
    _check_key(seed, tensor)
    edges = [0, *cuts, p.size]
    if sorted(set(edges)) != edges:
        raise ValueError(f"cuts ascend strictly between 0 and {p.size}, the elements of the tensor; got {list(cuts)}.")
    at = states.scalars(state.step + 1, learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    flat_p, flat_g = np.ascontiguousarray(p).reshape(-1), cast.exact(np.ascontiguousarray(g)).astype(np.float32).reshape(-1)
    weights, before, seen = [], [], []
    with np.errstate(all="ignore"):
        for start, stop in itertools.pairwise(edges):
            gradient = in_range(flat_g[start:stop])
            m, v = moments.averages(gradient, *_read_both(state, layout, start, stop), at, layout)
            weights.append(_weight(flat_p[start:stop], m, v, at, layout))
            before.append((gradient, m, v))
            seen.append(start)
        after = []
        for which, moment in enumerate((layout.m, layout.v)):
            key = _key(seed, state.step + 1, 2 * tensor + which) if moment.rounding == "stochastic" else None
            pieces = [(start, gradient, (m, v)[which]) for start, (gradient, m, v) in zip(seen, before, strict=True)]
            after.append(moments.store(pieces, (state.m, state.v)[which], moment, which, p.shape, at, key, layout))
    return np.concatenate(weights).reshape(p.shape), State(state.step + 1, *after)


def in_range(g: np.ndarray) -> np.ndarray:
    """Gradients below 2^-56 as +0, above 2^56 and not finite as NaN (SEMANTICS O-2); float32."""
    magnitude = np.abs(g)
    kept = np.where(magnitude < np.float32(states.GRADIENT_MIN), np.float32(0), g)
    return np.where(magnitude <= np.float32(states.GRADIENT_MAX), kept, np.float32(np.nan))


def _weight(p: np.ndarray, m: np.ndarray, v: np.ndarray, at: Scalars, layout: Layout) -> np.ndarray:
    """The new weight (O-6)."""
    ratio = moments.ratio(m, v, at)
    if layout.bounded:
        ratio = np.clip(ratio, -np.float32(at.bound), np.float32(at.bound))
    change = np.float32(at.learning_rate) * (ratio + np.float32(at.weight_decay) * p)
    change = np.where(np.abs(change) < np.float32(states.STEP_MIN), np.float32(0), change)
    return p - change


def _read_both(state: State, layout: Layout, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """m and v of the elements from start to stop, flat."""
    both = ((state.m, layout.m), (state.v, layout.v))
    m, v = (moments.read(stored, moment, stored.codes.reshape(-1)[start:stop], start, layout) for stored, moment in both)
    return m, v


def _key(seed: int, step: int, stream: int) -> int:
    """The seed of one moment of one tensor at one step (O-8)."""
    low, high = (int(word) for word in philox.words(np.array([step], np.uint64), stream, seed)[0, :2])
    return low | high << 32


def _check_key(seed: int, tensor: int) -> None:
    for name, value, bits in (("seed", seed, 64), ("tensor", tensor, 31)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < 1 << bits:
            raise ValueError(f"{name} is an integer in [0, 2^{bits}); got {value!r}.")


def _layout_of(layout: str | Layout, shape: tuple[int, ...]) -> Layout:
    """The layout of a tensor of that shape."""
    size = int(np.prod(shape, dtype=np.int64))
    if size == 0:
        raise ValueError(f"states are of tensors with at least one element; got shape {shape}. Leave the tensor out.")
    return states.by_name(layout).of(size)


def _check_state(state: State, layout: Layout, shape: tuple[int, ...]) -> None:
    """ValueError unless a state is one of this layout and shape."""
    if not isinstance(state, State):
        raise ValueError(f"a state is a states.State; got {type(state).__name__}. Use states.init.")
    for name, stored, moment in (("m", state.m, layout.m), ("v", state.v, layout.v)):
        wanted = moments.zeros(shape, moment)
        for field, has, needs in zip(MomentState._fields, stored, wanted, strict=True):
            described = [None if a is None else (np.asarray(a).dtype.name, np.shape(a)) for a in (has, needs)]
            if described[0] != described[1]:
                raise ValueError(
                    f"a state of layout {layout.name!r} and shape {shape} has {field} of {name} = {described[1]}; got "
                    f"{described[0]}. States of another layout, or of another tensor, are not converted: use states.init."
                )
