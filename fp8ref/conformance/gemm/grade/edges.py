"""Shapes at which a GEMM may take another path: one row or column, a ragged K (B-14)."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fp8ref.conformance.gemm.grade import stimuli, structure
from fp8ref.conformance.gemm.grade.stimuli import Stimulus
from fp8ref.conformance.gemm.grade.structure import Cause
from fp8ref.conformance.gemm.scaled_gemm import ProbeError, RefusedError, ScaledGemm
from fp8ref.formats import Format


class Edges(NamedTuple):
    """Causes, the edges that were asked, and those that the GEMM raised for, in words."""

    causes: list[Cause]
    asked: list[str]
    refused: list[str]


def shapes(m: int, n: int, k: int, *, block: int | None) -> dict[str, tuple[int, int, int]]:
    """{edge in words: a shape at it}, near a shape M, N, K whose K is a multiple of 32.

    block    the length along K that shares a scale, which then ends in half a block; None: all of
             K.
    """
    lengths = (k + block // 2,) if block else (k + 16, k + 5)
    return {"M = 1": (1, n, k), "N = 1": (m, 1, k)} | {
        f"K = {size}": (m, n, size) for size in lengths
    }


def examine(
    scaled: ScaledGemm,
    run: Callable[[Stimulus], tuple[np.ndarray, Format]],
    formats: tuple[Format, Format],
    shapes: dict[str, tuple[int, int, int]],
) -> Edges:
    """Sums of integers at each edge, which every accumulator of 8 bits has exactly."""
    edges = Edges([], [], [])
    for words, shape in shapes.items():
        stimulus = stimuli.integers(scaled, shape, formats)
        try:
            results, out = run(stimuli.cut(stimulus, shape[2]))
        except RefusedError:
            edges.refused.append(words)
            continue
        except ProbeError as error:
            edges.causes.append(Cause(f"at {words}: no valid result", str(error), "wrong"))
            continue
        edges.asked.append(words)
        edges.causes.extend(
            cause._replace(name=f"at {words}: {cause.name}")
            for cause in structure.integer_causes(stimulus, results, out, None)[0]
        )
    return edges
