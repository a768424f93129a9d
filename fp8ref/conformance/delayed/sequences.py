"""Sequences of steps for a delayed scaling state, one kind of difficulty at a time (spec H-13).

A sequence is a tuple of operations. A step is a tuple of amaxes, one for each use of the tensor in
it: ``(2.0,)``, ``(4.0, 1.0)``, and ``()`` for a step without use. The other operations are the
words ``save``, ``load`` (of the last save, into a new object) and ``reset``.
"""

import functools

from fp8ref.conformance import strategies
from fp8ref.conformance.kit.difficulty import difficulty_table
from fp8ref.conformance.strategies import st
from fp8ref.spec.delayed import DelayedScaling

Operation = tuple[float, ...] | str
"""A step, as its amaxes, or a word: save, load, reset."""

Sequence = tuple[Operation, ...]  # operations in their order

ORDINARY = (2.0, 8.0, 1.0, 0.5, 3.0, 7.3, 448.0, 1024.0, 1e-3, 3e38)
"""Amaxes whose scales are normal numbers, the simplest first."""

LONGEST = 32  # the length of the history that sequences other than ordinary ones exceed

DIFFICULTIES = difficulty_table(__file__)
"""Kinds of sequences by name, ``ordinary`` first. Every other one has ordinary steps as well."""


def valid(sequence: Sequence) -> bool:
    """Whether every load has a save before it."""
    loads = [i for i, operation in enumerate(sequence) if operation == "load"]
    return not loads or "save" in sequence[: loads[0]]


def fixed(difficulty: str, history: int) -> list[Sequence]:
    """The sequences of a kind that are always compared, the shortest first. Some are longer than a
    history of that length."""
    forget = ((1.0,),) * (history + 1)
    if difficulty == "ordinary":
        rising = tuple((2.0**i,) for i in range(9))
        sequences: list[Sequence] = [
            ((2.0,),),
            ((2.0,), (8.0,)),
            ((8.0,), (2.0,)),
            ((3.0,), (8.0,), (2.0,)),
            rising,
            rising[::-1],
        ]
        sequences += [(((1.0,),) * n + ((64.0,), *forget)) for n in (0, 1, 2)]
        return sequences
    if difficulty == "load":
        return [
            ((2.0,), "save", "load", (8.0,)),
            ((2.0,), "save", (64.0,), "load", (1.0,), (1.0,)),
            ((64.0,), (2.0,), "save", "load", *forget),
            ((2.0,), "save", (64.0,), (1.0,), "load", *forget),
        ]
    special: list[Sequence] = [(operation,) for operation in DIFFICULTIES[difficulty].special]
    sequences = [*special, *(((2.0,), *one) for one in special)]
    sequences += [((2.0,), (8.0,), *one, (4.0,)) for one in special]
    sequences += [((2.0,), *one, *one, (4.0,), *forget) for one in special[:1]]
    # as many as push a large amax out of the history, if each counts as a step
    for one in special[:1]:
        sequences.append(((64.0,), *(one * (history - 1)), (1.0,), (1.0,)))
        sequences.append(((64.0,), *one, *((1.0,),) * (history - 1), (1.0,)))
        sequences.append(((2.0,), *(one * (history + 1)), (4.0,), (4.0,)))
    return sequences


@functools.lru_cache(maxsize=64)
def drawn(difficulty: str, history: int, examples: int) -> list[Sequence]:
    """Random sequences of a kind, drawn by hypothesis, the same in every call."""
    ordinary = st.sampled_from(ORDINARY).map(lambda amax: (amax,))
    repeated = st.tuples(ordinary, st.integers(1, min(history + 1, 20))).map(
        lambda pair: (pair[0],) * pair[1]
    )
    single = ordinary.map(lambda step: (step,))
    parts: list[st.SearchStrategy[Sequence]] = [single, repeated]
    if operations := DIFFICULTIES[difficulty].special:
        parts += 2 * [st.sampled_from(operations).map(lambda operation: (operation,))]
    whole = st.lists(st.one_of(parts), min_size=1, max_size=8).map(
        lambda pieces: tuple(operation for part in pieces for operation in part)
    )
    # a load before any save would have nothing to load
    return [
        sequence if valid(sequence) else ("save", *sequence)
        for sequence in strategies.examples(whole, examples)
    ]


def rule_history(rule: DelayedScaling) -> int:
    """The length that sequences must exceed: what a rule can remember, in steps."""
    if rule.amax_compute == "max":
        return rule.history_length * rule.interval
    return rule.interval


def named(sequence: Sequence) -> str:
    """A sequence as text; repeated operations once, with their number.

    >>> named(((2.0,), (1.0,), (1.0,), "save", (), (4.0, 0.0)))
    'amax 2; amax 1, 2 times; save; no use; amaxes 4 and 0'
    """
    parts: list[tuple[str, int]] = []
    for operation in sequence:
        text = _text(operation)
        if parts and parts[-1][0] == text:
            parts[-1] = text, parts[-1][1] + 1
        else:
            parts.append((text, 1))
    return "; ".join(text if n == 1 else f"{text}, {n} times" for text, n in parts)


def _text(operation: Operation) -> str:
    if isinstance(operation, str):
        return operation
    if not operation:
        return "no use"
    return f"amax{'es' * (len(operation) > 1)} {' and '.join(f'{amax:.9g}' for amax in operation)}"
