"""What an optimizer does with gradients that are not finite: clause O makes NaN of their weights (O-2).

Each kind of gradient is alone in a tensor. Beside it are tensors with a finite number in its place: an optimizer
that makes the same weights of them replaces the gradient by that number.
"""

from typing import Any

import numpy as np

from fp8ref.conformance.finding import Finding
from fp8ref.conformance.optimizer import subjects
from fp8ref.conformance.optimizer.forms import Numbers
from fp8ref.conformance.optimizer.subjects import Inputs, Snapshot
from fp8ref.sim import states as sim
from fp8ref.states import Layout

DAMAGED: dict[str, float] = {"NaN": np.nan, "+Inf": np.inf, "-Inf": -np.inf}
"""The gradients that are asked, each the only bad one of its tensor."""

REPLACED: dict[str, float] = {
    "0": 0.0,
    "the largest float32": float(np.finfo(np.float32).max),
    "the least float32": float(np.finfo(np.float32).min),
}
"""The finite numbers that may take their place."""

AT = (3, 70)
"""The index of the gradient."""

SHAPE = (16, 256)
"""Whole blocks, and enough elements, of every named layout."""


def inputs() -> Inputs:
    """Two steps of equal tensors but for one gradient of the first step; the second shows whose moments are NaN."""
    rng = np.random.default_rng(0)
    w, first, second = (rng.standard_normal(SHAPE).astype(np.float32) for _ in range(3))
    every = DAMAGED | REPLACED

    def with_one(value: float) -> np.ndarray:
        g = first.copy()
        g[AT] = value
        return g

    gradients = [{name: with_one(value) for name, value in every.items()}, dict.fromkeys(every, second)]
    return Inputs(weights=dict.fromkeys(every, w), gradients=gradients)


def hidden(name: str, optimizer: Any, kind: str, given: Numbers, layout: Layout) -> dict[str, str]:
    """{gradient: what becomes of it} of each that does not make NaN of its weight, or, of NaN, of the weights that share
    its scales. Libraries store an infinite moment in other ways than clause O (O-13): of infinities the first step is asked.

    Raises:   RefusedError, ConformanceError: as ``subjects.run``.
    """
    asked = inputs()
    made = subjects.run(name, optimizer, kind, asked, given)
    return {
        gradient: _name_of(made, gradient, asked)
        for gradient in DAMAGED
        if any(
            not np.array_equal(np.isnan(after[gradient].weight), wanted)
            for after, wanted in zip(made[: 2 if gradient == "NaN" else 1], _lost(asked, layout, gradient), strict=False)
        )
    }


def findings(damage: dict[str, str], layout: Layout | None) -> list[Finding]:
    """What is said of gradients that are not finite, of a layout that was found."""
    if layout is None:
        return []
    words = "; ".join(f"{gradient}: {text}" for gradient, text in damage.items()) or "make NaN of their weights"
    evidence = f"{', '.join(DAMAGED)}, each alone in a tensor {SHAPE}"
    return [Finding(what="gradients that are not finite", value=not damage, words=words, evidence=evidence)]


def _lost(asked: Inputs, layout: Layout, gradient: str) -> list[np.ndarray]:
    """Which weights are NaN after each step, by clause O."""
    p: Any = asked.weights[gradient]
    p = sim.master(p, layout) if layout.keeps_master else p
    state, lost = sim.init(SHAPE, layout), []
    for g in asked.gradients:
        p, state = sim.step(p, g[gradient], state, learning_rate=1e-3, layout=layout)
        lost.append(np.isnan(sim.weight(p, layout) if layout.keeps_master else p))
    return lost


def _name_of(made: list[dict[str, Snapshot]], gradient: str, asked: Inputs) -> str:
    """What an optimizer makes of a gradient in place of NaN, as far as weights show it."""
    after = [one[gradient].weight for one in made]
    numbers = [n for n in REPLACED if all(np.array_equal(one[n].weight, w) for one, w in zip(made, after, strict=True))]
    if numbers:
        return f"replaced by {' or '.join(numbers)}"
    if np.array_equal(after[0], asked.weights[gradient]):
        return "the step is skipped"
    lost = [int(np.isnan(w).sum()) for w in after]
    return f"{lost[0]} and {lost[1]} of {after[0].size} weights are NaN after the first and the second step"
