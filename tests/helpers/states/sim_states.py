"""Steps of the simulator's AdamW, for its tests of states and of moments."""

import numpy as np
from helpers.states.state_layouts import ALL
from hypothesis import strategies as st

from fp8ref.sim.states import states
from fp8ref.spec.states import layouts as data
from fp8ref.spec.states import saved as layout_decisions

F32 = np.float32
LAYOUT = st.sampled_from(list(ALL.values()))
SEED = st.integers(0, 2**32 - 1)
HYPER = {"b1": 0.9, "b2": 0.95, "eps": 1e-8}


def run(g: np.ndarray, layout, *, seed: int = 0, cuts=(), **hyper):
    """(weights, state, state before) after a step for each row of g."""
    rng = np.random.default_rng(1)
    p = rng.standard_normal(g.shape[1]).astype(F32)
    state = before = states.init(p.shape, layout)
    for row in g:
        before = state
        p, state = states.step(
            p,
            row,
            state,
            states.AdamW(
                learning_rate=1e-3, weight_decay=0.1, layout=layout, seed=seed, **{**HYPER, **hyper}
            ),
            cuts=cuts,
        )
    return p, state, before


def under(state: states.State, layout: data.Layout) -> states.State:
    """The same moments, as a state of a layout that stores moments so."""
    return state._replace(decisions=layout_decisions.written(layout))


def assert_same(a: states.MomentState, b: states.MomentState) -> None:
    for one, two in zip(a, b, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            np.testing.assert_array_equal(
                np.asarray(one).view(f"u{one.dtype.itemsize}"),
                np.asarray(two).view(f"u{two.dtype.itemsize}"),
            )


def bits(x) -> list[str]:
    x = np.asarray(x)
    if x.dtype == np.uint8:
        return [f"{code:02X}" for code in x.reshape(-1)]
    return [f"{word:08X}" for word in x.reshape(-1).view(np.uint32)]


def scalars(t: int, **hyper) -> data.Scalars:
    return data.scalars(t, learning_rate=1e-3, weight_decay=0.1, **{**HYPER, **hyper})
