"""Shards of a tensor, one kind of difficulty each, as microbatches for each rank (spec P-27).

A case is ``((rank 0's microbatches), (rank 1's microbatches), ...)``; a microbatch is a tuple of
rows, a row a tuple of numbers. Rows have one length; the tensor is all rows, in this order.
"""

import functools

import numpy as np

from fp8ref.conformance import strategies
from fp8ref.conformance.kit.difficulty import difficulty_table
from fp8ref.conformance.strategies import st

Row = tuple[float, ...]  # a row of a tensor
Microbatch = tuple[Row, ...]  # rows of a rank in one microbatch; none of an empty shard
Case = tuple[tuple[Microbatch, ...], ...]  # the microbatches of every rank

ORDINARY = (1.0, -2.0, 0.5, 3.0, -7.3, 0.0, 448.0, 1e-3, -3e38)
"""Numbers whose amaxes have normal scales."""

DIFFICULTIES = difficulty_table(__file__)
"""Kinds of shards by name, ``ordinary`` first."""


def arrays(case: Case, axis: int) -> list[list[np.ndarray]]:
    """The microbatches of each rank, float32: [rows, columns], or transposed for axis 1."""
    columns = next(len(row) for rank in case for batch in rank for row in batch)
    shape = (-1, columns)
    ranks = [[np.array(x, np.float32).reshape(shape) for x in rank] for rank in case]
    if axis == 0:
        return ranks
    return [[np.ascontiguousarray(x.T) for x in rank] for rank in ranks]


def whole(case: Case) -> np.ndarray:
    """The tensor that a case is cut from, float32 [rows, columns]."""
    rows = [row for rank in case for batch in rank for row in batch]
    return np.array(rows, np.float32)


def usable(case: Case) -> bool:
    """Whether it has a rank, every rank a microbatch, and some an element (S-7)."""
    rows = (row for rank in case for batch in rank for row in batch)
    return bool(case) and all(case) and any(rows)


def valid_for(case: Case, difficulty: str) -> bool:
    """Whether a case is usable, and has no difficulty of shapes but this one."""
    if not usable(case):
        return False
    rows = {len(batch) for rank in case for batch in rank}
    alike = difficulty == "uneven" or len(rows) == 1
    return difficulty == "empty" or (0 not in rows and alike)


def fixed(difficulty: str) -> list[Case]:
    """The cases of a kind that are always compared, the simplest first."""
    one: Microbatch = ((1.0,),)
    two: Microbatch = ((2.0,),)
    if difficulty == "ordinary":
        negative: Microbatch = ((-4.0,),)
        pairs = [((one,), (two,)), ((two,), (one,))]
        return [((one,),), *pairs, ((one,), (negative,), (two,))]
    if difficulty == "uneven":
        three: Microbatch = ((1.0,), (2.0,), (3.0,))
        return [((three[:2],), (one,)), ((one,), (three,), (two,))]
    if difficulty == "empty":
        return [((one,), ((),)), (((),), (two,)), ((one,), ((),), (two,))]
    if difficulty == "microbatches":
        return [
            ((one, two),),
            ((two, one),),
            ((two, one), (one, one)),
            ((one, one), (one, two)),
            ((one, two, one), (one, one, one)),
        ]
    special: list[Case] = []
    for number in DIFFICULTIES[difficulty].special:
        special.append(((((number,),),),))
        for ranks in (2, 3):
            special += [
                tuple((((number,),),) if r == at else ((((r + 1.0),),),) for r in range(ranks))
                for at in range(ranks)
            ]
    return special


@functools.lru_cache(maxsize=64)
def drawn(difficulty: str, examples: int) -> list[Case]:
    """Random cases of a kind, drawn by hypothesis, the same in every call."""
    numbers = st.sampled_from(ORDINARY)
    if special := DIFFICULTIES[difficulty].special:
        numbers = st.one_of(numbers, numbers, st.sampled_from(special))

    @st.composite
    def cases(draw) -> Case:
        ranks, columns = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        batches = draw(st.integers(2, 3)) if difficulty == "microbatches" else 1
        row = st.tuples(*[numbers] * columns)
        rows = draw(st.integers(1, 3))

        def batch() -> Microbatch:
            n = rows
            if difficulty in ("uneven", "empty"):
                n = draw(st.integers(1 if difficulty == "uneven" else 0, 4))
            return tuple(draw(row) for _ in range(n))

        return tuple(tuple(batch() for _ in range(batches)) for _ in range(ranks))

    return [case for case in strategies.examples(cases(), examples) if usable(case)]


def named(case: Case) -> str:
    """A case as text.

    >>> named(((((1.0, 2.0),),), (((float("nan"), 0.0),), ())))
    'rank 0 has [1 2]; rank 1 has [nan 0], then nothing'
    """
    parts = [
        ", then ".join(
            " ".join(f"[{' '.join(f'{v:.9g}' for v in row)}]" for row in batch) or "nothing"
            for batch in rank
        )
        for rank in case
    ]
    return "; ".join(f"rank {i} has {part}" for i, part in enumerate(parts))
