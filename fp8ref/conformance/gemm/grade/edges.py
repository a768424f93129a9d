"""Shapes at which a GEMM may take another path: one row or column, a ragged K (B-14)."""

from typing import NamedTuple

from fp8ref.conformance.gemm.grade import stimuli, structure
from fp8ref.conformance.gemm.grade.scales import reading
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

    block    the length along K that shares a scale; K then ends in half a block, or in part of a
             tile of 128 x 4 scales, of several tiles (S-25); None: all of K.
    """
    lengths = (k + block // 2,) if block else (k + 16, k + 5)
    edges = {"M = 1": (1, n, k), "N = 1": (m, 1, k)}
    edges |= {f"K = {size}": (m, n, size) for size in lengths}
    if block:
        rows, columns = 2 * m + 16, 2 * n + 16
        for size in (k + block, k + 3 * block):
            edges[f"[{rows}, {columns}] K = {size}"] = rows, columns, size
    return edges


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
        causes = structure.integer_causes(stimulus, results, out, None)[0]
        if causes and stimulus.a.codes.shape[1] == shape[2]:
            causes = reading.causes(asked, stimulus, results, out, causes) or causes
        edges.causes.extend(c._replace(name=f"at {words}: {c.name}") for c in causes)
    return edges
