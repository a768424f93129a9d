"""Whether a query's outputs have the same bits whatever else a call has (spec A-17).

A kernel may split keys by the number of queries or of sequences. Each output is then right, but a
token's bits depend on the batch that it is in. The first query and the first sequence are the
largest, so that a scale of a head or of a tensor is the same in every call.
"""

from collections.abc import Iterator

import numpy as np

from fp8ref.conformance.attention.comparison import random_operands
from fp8ref.conformance.attention.subjects import Attention, Question
from fp8ref.conformance.kit.finding import Counterexample, Finding, show
from fp8ref.conformance.kit.subject import RefusedError

QUERIES, KEYS = 64, 300  # of a sequence: several tiles of keys, the last ragged

COUNTS = (1, 2, 17, 33, 128, 257)  # the numbers of queries that are asked

REPEATED, BATCH = "repeated calls", "batch invariance"  # the names of the findings

PADDING = 60  # keys behind the others, of document -1


def findings(attention: Attention) -> list[Finding]:
    """Whether equal calls have equal bits, and whether a query's bits are those in other calls."""
    operands = random_operands(np.random.default_rng(5), (2, 2, 1), QUERIES, KEYS, 64)
    for x in operands:
        x[0] *= 2
    operands[0][:, :, 0] *= 8
    question = Question(*operands)
    try:
        base = attention.ask(question).o
    except RefusedError:
        return []
    differing, calls, witness = list[str](), list[str](), None
    for words, other, places in _calls(attention, question):
        try:
            o = attention.ask(other).o
        except RefusedError:
            continue
        calls.append(words)
        differ = o.view(np.uint32) != base[places].view(np.uint32)
        if differ.any():
            differing.append(words)
            at = tuple(int(i) for i in np.argwhere(differ)[0])
            shown = f"o{list(at)} with {words}"
            right = show(float(base[places][at]))
            got = show(float(o[at]))
            witness = witness or Counterexample(shown, got, right, "A-17")
    evidence = f"a query's outputs with {', '.join(calls)}"
    invariance = [Finding(BATCH, "the same bits", evidence)] if calls else []
    if witness is not None:
        words = f"a query's bits differ with {', '.join(differing)}"
        invariance = [witness.finding(BATCH, words)]
    again = attention.ask(question).o
    differ = again.view(np.uint32) != base.view(np.uint32)
    if not differ.any():
        return [Finding(REPEATED, "equal bits", f"two calls of {question}"), *invariance]
    at = tuple(int(i) for i in np.argwhere(differ)[0])
    got, right = (show(float(x[at])) for x in (again, base))
    varies = Counterexample(f"o{list(at)} of an equal call of {question}", got, right, "A-17")
    return [varies.finding(REPEATED, "does not repeat itself")]


def _calls(attention: Attention, question: Question) -> Iterator[tuple[str, Question, tuple]]:
    """(call in words, its question, where its outputs are among those of the first question)."""
    q, k, v = question[:3]
    for count in COUNTS:
        rows = np.arange(count) % QUERIES
        words = f"{count} quer{'y' if count == 1 else 'ies'}"
        yield words, question._replace(q=q[:, :, rows]), np.s_[:, :, rows]
    for words, sequences in (
        ("sequences in reverse order", [1, 0]),
        ("one sequence", [0]),
        ("five sequences", [0, 1, 0, 1, 0]),
    ):
        parts = [x[sequences] for x in (q, k, v)]
        yield words, question._replace(q=parts[0], k=parts[1], v=parts[2]), (sequences,)
    if attention.takes_documents:
        ids = [np.zeros((2, x.shape[2]), np.int64) for x in (q, k)]
        yield "a document", question._replace(documents=tuple(ids)), ()
        behind = ((0, 0), (0, 0), (0, PADDING), (0, 0))
        padded = [np.pad(x, behind, constant_values=1) for x in (k, v)]
        ids[1] = np.pad(ids[1], behind[1:3], constant_values=-1)
        other = question._replace(k=padded[0], v=padded[1], documents=tuple(ids))
        yield f"{PADDING} keys of padding behind", other, ()
