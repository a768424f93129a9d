"""Shapes at which a GEMM may take another path: one row or column, a ragged K (B-14)."""

from typing import NamedTuple

from fp8ref.conformance.gemm.grade import stimuli, structure
from fp8ref.conformance.gemm.grade.stimuli import Asked, Shape
from fp8ref.conformance.gemm.grade.structure import Cause
from fp8ref.conformance.gemm.scaled_gemm import ProbeError, RefusedError


class Edges(NamedTuple):
    """Causes, the edges that were asked, and those that the GEMM raised for, in words."""

    causes: list[Cause]
    asked: list[str]
    refused: list[str]


def shapes(m: int, n: int, k: int, *, block: int | None) -> dict[str, Shape]:
    """{edge in words: a shape at it}, near a shape M, N, K whose K is a multiple of 32.

    block    the length along K that shares a scale; K then ends in half a block; None: all of K.
    """
    lengths = (k + block // 2,) if block else (k + 16, k + 5)
    return {"M = 1": (1, n, k), "N = 1": (m, 1, k)} | {
        f"K = {size}": (m, n, size) for size in lengths
    }


def examine(asked: Asked, shapes: dict[str, Shape]) -> Edges:
    """Sums of integers at each edge, which every accumulator of 8 bits has exactly."""
    edges = Edges([], [], [])
    for words, shape in shapes.items():
        stimulus = stimuli.integers(asked, shape)
        try:
            results, out = asked.run(stimuli.cut(stimulus, shape[2]))
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
