"""Layouts of optimizer states for tests of several rooms: the named ones, and decisions that none
of them has.
"""

import dataclasses

import numpy as np

from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT16
from fp8ref.spec.states.layouts import LAYOUTS, WITH_MASTERS, Layout, Moment

TENSOR = Moment(fmt=E4M3FN, scaling="multiply")
BLOCKS = dataclasses.replace(TENSOR, block=128)
ROOT = dataclasses.replace(BLOCKS, root=True)


def changed(moment, **changes):
    return dataclasses.replace(moment, **changes)


EXTRA = {
    layout.name: layout
    for layout in (
        Layout(
            name="previous",
            m=changed(TENSOR, amax="previous"),
            v=changed(ROOT, amax="previous", fmt=E5M2),
        ),
        Layout(
            name="predicted",
            m=changed(BLOCKS, amax="predicted"),
            v=changed(TENSOR, amax="predicted", root=True, keep=True),
        ),
        Layout(
            name="predicted_v",
            m=changed(TENSOR, amax="predicted"),
            v=changed(BLOCKS, block=256, amax="predicted"),
        ),
        Layout(name="float16", m=Moment(fmt=FLOAT16), v=Moment(fmt=FLOAT16, root=True, keep=True)),
        Layout(
            name="divide_tensorwise",
            m=changed(TENSOR, scaling="divide"),
            v=changed(TENSOR, fmt=E5M2, scaling="reciprocal"),
        ),
    )
}
STOCHASTIC = {
    layout.name: layout
    for layout in (
        Layout(
            name="stochastic",
            m=changed(TENSOR, rounding="stochastic"),
            v=changed(ROOT, fmt=E5M2, rounding="stochastic"),
            bounded=True,
        ),
        Layout(
            name="stochastic_wide",
            m=Moment(fmt=BFLOAT16, rounding="stochastic"),
            v=Moment(
                fmt=FLOAT16, scaling="power_of_two", block=128, rounding="stochastic", keep=True
            ),
        ),
        Layout(
            name="coat_keep",
            m=changed(LAYOUTS["coat"].m, rounding="stochastic"),
            v=changed(LAYOUTS["coat"].v, keep=True),
        ),
    )
}
HALF = Moment(fmt=FLOAT16, scaling="power_of_two")
MASTERED = WITH_MASTERS | {
    layout.name: layout
    for layout in (
        Layout(
            name="bfloat16_master",
            m=Moment(fmt=BFLOAT16),
            v=Moment(fmt=BFLOAT16),
            master=Moment(fmt=BFLOAT16),
        ),
        changed(
            WITH_MASTERS["msamp_o2"],
            name="stochastic_half",
            master=changed(HALF, rounding="stochastic"),
        ),
        changed(
            LAYOUTS["sqrt_e4m3"],
            name="stochastic_bfloat16",
            m=changed(BLOCKS, rounding="stochastic"),
            master=Moment(fmt=BFLOAT16, rounding="stochastic"),
        ),
        changed(
            LAYOUTS["torchao"],
            name="predicted_half",
            bounded=True,
            master=changed(HALF, amax="predicted", rounding="stochastic"),
        ),
    )
}
"""Layouts whose masters are not float32 (O-14): every format, amax and rounding, with moments of
every kind.
"""

NEAREST = {**LAYOUTS, **EXTRA}
ALL = {**NEAREST, **STOCHASTIC}


def gradients(seed: int, size: int, steps: int, *, widest: int = 20) -> np.ndarray:
    """float32 [steps, size]: magnitudes over many binades, zeros, and some below 2^-56."""
    rng = np.random.default_rng(seed)
    spread = 2.0 ** rng.uniform(-widest, widest / 4, size) * 2.0 ** rng.integers(-30, 5)
    g = rng.standard_t(2, (steps, size)) * spread
    g *= rng.random((steps, size)) > 0.2
    return (
        np.where(rng.random((steps, size)) < 0.02, 2.0**-57, g)
        .clip(-(2.0**50), 2.0**50)
        .astype(np.float32)
    )


SHAPES = {"blocks": (16, 256), "ragged": (33, 17), "vector": (5,), "number": ()}
"""Tensors of which blocks divide the last axis, and of which they do not."""


def start() -> dict[str, np.ndarray]:
    """Weights by name; those of ``blocks`` are 0, so that they show every bit of their changes."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(shape) * (name != "blocks")).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def gradients_of(step: int) -> dict[str, np.ndarray]:
    """Gradients by name of a step; idle in some steps."""
    found = {
        name: gradients(100 * step + i, int(np.prod(s)), 1)[0].reshape(s)
        for i, (name, s) in enumerate(SHAPES.items())
    }
    return {name: g * np.float32(step % 7 != 5) for name, g in found.items()}


def idle_and_stalling() -> dict[str, tuple[Layout, np.ndarray, dict[str, int]]]:
    """{case: (layout, gradients [steps, elements], counts of the last step)}: those of the health
    of states that other readings of O-12 have otherwise. Ratios above the bound of a layout that is
    not bounded; a code 5, of which 0.9 is beside a tie by the scale."""
    idle = np.zeros((2, 64), np.float32)
    idle[0], idle[0, 0] = 1, 1000  # beside 1000 the others' v is stored as 0, and their m is not
    bounded = dataclasses.replace(LAYOUTS["te"], name="te_bounded", bounded=True)
    return {
        "not bounded": (LAYOUTS["te"], idle, {"bounded": 0}),
        "bounded": (bounded, idle, {"bounded": 63}),
        "stalled": (
            LAYOUTS["sqrt_e4m3"],
            gradients(27, 128, 2, widest=9),
            {"stalled_m": 1, "stalled_v": 120},
        ),
    }


def differing(found, wanted) -> int:
    """How many elements of two arrays differ in a bit; float8 arrays are compared with uint8
    codes.
    """
    found, wanted = np.asarray(found), np.asarray(wanted)
    if found.dtype.name in ("float16", "bfloat16"):
        found = found.astype(np.float32)
    assert found.shape == wanted.shape
    assert found.dtype.itemsize == wanted.dtype.itemsize
    word = f"u{wanted.dtype.itemsize}"
    return int(
        (
            np.ascontiguousarray(found).reshape(-1).view(word)
            != np.ascontiguousarray(wanted).reshape(-1).view(word)
        ).sum()
    )
