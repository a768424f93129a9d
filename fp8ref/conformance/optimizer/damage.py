"""What an optimizer does with gradients that are not finite: clause O makes weights NaN (O-2).

Each kind of gradient is alone in a tensor. Beside it are tensors with a finite number in its place:
an optimizer that makes the same weights of them replaces the gradient by that number. NaN is asked
in other places and of weights too, and whether a large gradient changes others, as a clip does.
"""

from typing import Any

import numpy as np

from fp8ref.conformance.kit.finding import Finding
from fp8ref.conformance.optimizer import subjects
from fp8ref.conformance.optimizer.forms import Numbers
from fp8ref.conformance.optimizer.subjects import Inputs, Snapshot
from fp8ref.sim.states import states as sim
from fp8ref.spec.states.layouts import Layout

DAMAGED: dict[str, float] = {"NaN": np.nan, "+Inf": np.inf, "-Inf": -np.inf}
"""The gradients that are asked, each the only bad one of its tensor."""

REPLACED: dict[str, float] = {
    "0": 0.0,
    "the largest float32": float(np.finfo(np.float32).max),
    "the least float32": float(np.finfo(np.float32).min),
}
"""The finite numbers that may take their place."""

AT = (3, 70)  # the index of the gradient
SHAPE = (16, 256)  # whole blocks, and enough elements, of every named layout

PLACES: dict[str, tuple[int, Any]] = {
    "NaN first": (0, (0, 0)),
    "NaN last": (0, (-1, -1)),
    "NaN in the second step": (1, AT),
    "nothing but NaN": (0, ...),
}
"""{further gradients that are asked: their step, from 0, and their index}."""

SHAPES: dict[str, tuple[int, ...]] = {
    "NaN in a vector": (4096,),
    "NaN in 131,072 elements": (512, 256),
}
"""{further gradients of NaN that are asked: their tensors' shapes}; the NaN is at index 70.
"""

WEIGHT, LARGE, SMALL = "a weight of NaN", "2^40", "0"
"""Further tensors, with finite gradients, and the one of REPLACED with which ``LARGE`` is compared.
"""


def inputs() -> Inputs:
    """Two steps of tensors that differ in a gradient; the second shows whose moments are NaN."""
    rng = np.random.default_rng(0)
    w, first, second = (rng.standard_normal(SHAPE).astype(np.float32) for _ in range(3))
    every = DAMAGED | REPLACED | {LARGE: 2.0**40}

    def with_one(g: np.ndarray, value: float, at: Any = AT) -> np.ndarray:
        g = g.copy()
        g[at] = value
        return g

    names = [*every, *PLACES, WEIGHT]
    gradients = [{name: with_one(first, value) for name, value in every.items()}, {}]
    for step, g in enumerate((first, second)):
        gradients[step] |= {
            name: with_one(g, np.nan, at) if at_step == step else g
            for name, (at_step, at) in PLACES.items()
        }
        gradients[step] |= {name: g for name in names if name not in gradients[step]}
    weights = dict.fromkeys(names, w) | {WEIGHT: with_one(w, np.nan)}
    for name, shape in SHAPES.items():
        weights[name], gradients[0][name], gradients[1][name] = (
            rng.standard_normal(shape).astype(np.float32) for _ in range(3)
        )
        gradients[0][name].flat[70] = np.nan
    return Inputs(weights=weights, gradients=gradients)


def hidden(
    name: str, optimizer: Any, kind: str, settings: Numbers, layout: Layout
) -> dict[str, str]:
    """{gradient: what becomes of it} of each that does not make NaN of its weight, or, of NaN, of
    the weights that share its scales. Libraries store an infinite moment in other ways than clause
    O (O-13): of infinities the first step is asked.

    Raises:   RefusedError, ConformanceError: as ``subjects.run``.
    """
    asked = inputs()
    snapshots = subjects.run(name, optimizer, kind, asked, settings)

    def is_hidden(gradient: str, steps: int) -> bool:
        pairs = zip(snapshots[:steps], _lost(asked, layout, gradient), strict=False)
        return any(
            not np.array_equal(np.isnan(after[gradient].weight), wanted) for after, wanted in pairs
        )

    outcomes = {
        one: _name_of(snapshots, one, asked)
        for one in DAMAGED
        if is_hidden(one, 2 if one == "NaN" else 1)
    }
    if outcomes:
        return outcomes
    outcomes = {
        one: _name_of(snapshots, one, asked) for one in (*PLACES, *SHAPES) if is_hidden(one, 2)
    }
    if any(not np.isnan(after[WEIGHT].weight[AT]) for after in snapshots):
        outcomes[WEIGHT] = "replaced by a number"
    # Without stored moments the first change of a weight is that of its own gradient alone.
    large, small = (
        np.delete(snapshots[0][one].weight.reshape(-1), np.ravel_multi_index(AT, SHAPE))
        for one in (LARGE, SMALL)
    )
    if not np.array_equal(large, small):
        outcomes[LARGE] = (
            f"one changes {int((large != small).sum())} other weights, as clipping a norm does"
        )
    return outcomes


def findings(damage: dict[str, str], layout: Layout | None) -> list[Finding]:
    """What is said of gradients that are not finite, of a layout that was found."""
    if layout is None:
        return []
    words = (
        "; ".join(f"{gradient}: {text}" for gradient, text in damage.items())
        or "make NaN of their weights"
    )
    evidence = (
        f"{', '.join(DAMAGED)}, each alone in a tensor {SHAPE}; "
        f"{', '.join([*PLACES, *SHAPES, WEIGHT])}"
    )
    return [Finding("gradients that are not finite", not damage, evidence, words=words)]


def _lost(asked: Inputs, layout: Layout, gradient: str) -> list[np.ndarray]:
    """Which weights are NaN after each step, by clause O."""
    p: Any = asked.weights[gradient]
    p = sim.master(p, layout) if layout.keeps_master else p
    state, lost = sim.init(np.shape(asked.weights[gradient]), layout), []
    for g in asked.gradients:
        p, state = sim.step(p, g[gradient], state, sim.AdamW(learning_rate=1e-3, layout=layout))
        lost.append(np.isnan(sim.weight(p, layout) if layout.keeps_master else p))
    return lost


def _name_of(snapshots: list[dict[str, Snapshot]], gradient: str, asked: Inputs) -> str:
    """What an optimizer makes of a gradient in place of NaN, as far as weights show it."""
    after = [snapshot[gradient].weight for snapshot in snapshots]
    numbers = [
        n
        for n in REPLACED
        if all(
            np.array_equal(snapshot[n].weight, w)
            for snapshot, w in zip(snapshots, after, strict=True)
        )
    ]
    if numbers:
        return f"replaced by {' or '.join(numbers)}"
    if np.array_equal(after[0], asked.weights[gradient]):
        return "the step is skipped"
    lost = [int(np.isnan(w).sum()) for w in after]
    return (
        f"{lost[0]} and {lost[1]} of {after[0].size} weights are NaN after the first and the "
        "second step"
    )
