"""Which keys each query sees, and which head of keys each query head uses (spec A-3).

All scores are 0, so all probabilities are equal. A column of v is not 0 in one key alone: an output
is not 0 where its query sees that key.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from fp8ref.conformance.attention.scores import FAR, FEATURES
from fp8ref.conformance.attention.subjects import Attention, Question
from fp8ref.conformance.kit.finding import Counterexample, Finding
from fp8ref.conformance.kit.subject import RefusedError
from fp8ref.sim.attention.operands import inputs as attention_inputs
from fp8ref.spec.attention.variants import FULL, Mask

CASES: tuple[tuple[Mask, int, int], ...] = (
    (FULL, 3, 1000),
    (Mask(causal=True), 150, 150),
    (Mask(causal=True), 40, 200),
    (Mask(causal=True), 60, 20),
    (Mask(window=(17, 5)), 40, 200),
    (Mask(window=(30, None)), 150, 150),
    (Mask(causal=True, window=(64, 0)), 150, 150),
)
"""(mask, queries, keys): square, more keys, and more queries than keys, of which some see none."""

HEADS = ((6, 3), (6, 2), (24, 2))
"""(query heads, heads of keys): groups of two, of three, and of no power of two above a tile."""

REFUSED = "not taken"  # of a finding whose inputs the function refuses


def findings(attention: Attention) -> list[Finding]:
    """A finding for each kind of mask that the function takes, for documents, and for heads."""
    findings = []
    for what, cases in itertools.groupby(CASES, key=lambda case: _kind(case[0])):
        accepted = [case for case in cases if attention.takes(case[0])]
        if accepted:
            findings.append(_mask_finding(attention, what, accepted))
    if attention.takes_documents:
        findings.append(_documents_finding(attention))
    return [*findings, _heads_finding(attention)]


def seen(attention: Attention, mask: Mask, queries: int, keys: int, documents=None) -> np.ndarray:
    """Which keys each query sees, bool [Tq, Tk]; NaN counts as seen.

    One call, a sequence for each 64 keys.
    """
    parts = -(-keys // FEATURES)
    v = np.zeros((parts, 1, keys, FEATURES), np.float32)
    v[np.arange(keys) // FEATURES, 0, np.arange(keys), np.arange(keys) % FEATURES] = 256
    q = np.zeros((parts, 1, queries, FEATURES), np.float32)
    k = np.zeros((parts, 1, keys, FEATURES), np.float32)
    if documents is not None:
        documents = tuple(np.repeat(ids[None], parts, axis=0) for ids in documents)
    outputs = attention.ask(Question(q, k, v, mask, documents)).o[:, 0]
    return (outputs != 0).transpose(1, 0, 2).reshape(queries, -1)[:, :keys]


def expected(mask: Mask, queries: int, keys: int) -> np.ndarray:
    """The same by A-3."""
    low, high = attention_inputs.visible(queries, keys, mask)
    every = np.arange(keys)
    return (every >= low[:, None]) & (every < high[:, None])


def _mask_finding(attention: Attention, what: str, cases: list[tuple[Mask, int, int]]) -> Finding:
    """Whether all cases are A-3's, under either alignment; else the first that is not."""
    seen_keys, cases, refused = _answered(attention, cases)
    if not seen_keys:
        return Finding(what, None, refused, words=REFUSED)
    rows = sum(case[1] for case in cases)
    for alignment in ("end", "start") if cases[0][0] != FULL else ("end",):
        shown = []
        for mask, tq, tk in cases:
            aligned = dataclasses.replace(mask, alignment=alignment)
            shown.append(expected(aligned, tq, tk))
        if all(map(np.array_equal, seen_keys, shown)):
            words = "all keys" if cases[0][0] == FULL else f"aligned to the {alignment}"
            shapes = f"{len(cases)} shape{'s' * (len(cases) > 1)}"
            return Finding(what, words, f"the keys that {rows} queries see, {shapes}")
    for visible, (mask, tq, tk) in zip(seen_keys, cases, strict=True):
        wanted = expected(mask, tq, tk)
        if mask == FULL or not np.array_equal(
            visible, expected(dataclasses.replace(mask, alignment="start"), tq, tk)
        ):
            if np.array_equal(visible, wanted):
                continue
            neighbors = _neighbors(mask, tq, tk)
            names = (name for name, other in neighbors if np.array_equal(visible, other))
            words = next(names, _missing(visible, wanted))
            question = f"{_named(mask)}, {tq} queries, {tk} keys, all scores 0"
            return _witness(question, visible, wanted).finding(what, words)
    words = "aligned to the start and to the end"
    return Finding(what, None, f"{len(cases)} shapes", words=words)


def _witness(shown: str, visible: np.ndarray, wanted: np.ndarray) -> Counterexample:
    """The first query and key of which one is seen wrongly, or not."""
    i, j = (int(x) for x in np.argwhere(visible != wanted)[0])
    got, right = ("seen", "not seen") if visible[i, j] else ("not seen", "seen")
    return Counterexample(f"{shown}: query {i}, key {j}", got, right, "A-3")


def _answered(
    attention: Attention, cases: list[tuple[Mask, int, int]]
) -> tuple[list[np.ndarray], list[tuple[Mask, int, int]], str]:
    """What is seen in each case, the cases that it does not refuse, and why it refuses others."""
    seen_keys, answered, why = [], [], ""
    for case in cases:
        try:
            seen_keys.append(seen(attention, *case))
            answered.append(case)
        except RefusedError as error:
            why = str(error)
    return seen_keys, answered, why


def _missing(visible: np.ndarray, expected: np.ndarray) -> str:
    if (rows := (visible & ~expected).any(axis=1) & ~expected.any(axis=1)).any() and np.array_equal(
        visible[~rows], expected[~rows]
    ):
        return "a query without keys has an output that is not 0"
    lost, more = (expected & ~visible).any(axis=0), (visible & ~expected).any(axis=0)
    if lost.any() and not more.any():
        keys = np.flatnonzero(lost)
        return f"keys {keys[0]} to {keys[-1]} are missing, {len(keys)} of {len(lost)}"
    return "no mask of A-3"


def _neighbors(mask: Mask, tq: int, tk: int) -> Iterator[tuple[str, np.ndarray]]:
    """Masks whose edges are off by one, and what they are called."""
    position = np.arange(tq)[:, None]
    key = np.arange(tk)
    for alignment in ("end", "start"):
        p = position + (tk - tq if alignment == "end" else 0)
        for left, right in itertools.product((0, -1, 1), repeat=2):
            low, high = mask.window or (None, None)
            high = 0 if mask.causal else high  # a window's is at least 0
            visible = np.ones((tq, tk), bool)
            visible &= True if high is None else key <= p + high + right
            visible &= True if low is None else key >= p - low - left
            sides = (("left", left), ("right", right))
            edges = ", ".join(f"{side} edge {by:+d}" for side, by in sides if by)
            yield f"off by one: {edges or 'no edge'}, aligned to the {alignment}", visible
    yield from _mistaken_masks(mask, tq, tk)


def _mistaken_masks(mask: Mask, tq: int, tk: int) -> Iterator[tuple[str, np.ndarray]]:
    """Masks that are forgotten, or whose edges are those of tiles, and what they are called."""
    left, right = mask.window or (None, None)
    if mask.causal and mask.window:
        for sides in ((left, left), (left, None)):
            words = f"the causal mask is forgotten: a window of {sides}"
            yield words, expected(Mask(window=sides), tq, tk)
        yield "the window is forgotten", expected(Mask(causal=True), tq, tk)
    p, key = np.arange(tq)[:, None] + tk - tq, np.arange(tk)
    low = np.full(p.shape, 0) if left is None else p - left
    high = np.full(p.shape, tk) if right is None else p + right
    high = np.minimum(high, p) if mask.causal else high
    for tile in (8, 16, 32, 64, 128):
        words = f"unmasked in tiles of {tile} keys: the {{}} edge is that of a tile"
        first, last = low // tile * tile, high // tile * tile + tile - 1
        yield words.format("left"), (key >= first) & (key <= high)
        yield words.format("right"), (key >= low) & (key <= last)
        yield words.format("left and the right"), (key >= first) & (key <= last)
        for queries in (np.arange(tq)[:, None], p):
            end = queries // tile * tile + tile - 1 + p - queries
            words = f"keys behind those of a tile of {tile} queries are missing"
            yield words, (key >= low) & (key <= np.minimum(high, end))


def _documents_finding(attention: Attention) -> Finding:
    """Documents of unequal lengths, some behind tile ends."""
    ids = np.repeat([0, 1, 2, 3], [50, 3, 130, 17])
    visible = seen(attention, FULL, len(ids), len(ids), documents=(ids, ids))
    expected = ids[:, None] == ids
    if np.array_equal(visible, expected):
        return Finding("documents", "their own", f"the keys that {len(ids)} queries see")
    i, j = np.argwhere(visible != expected)[0]
    witness = _witness(f"documents {ids[i]} and {ids[j]}", visible, expected)
    return witness.finding("documents", "not separated")


def _heads_finding(attention: Attention) -> Finding:
    """The heads of k and v that query heads use, in groups of other sizes; the first wrong one."""
    shapes, why = [], ""
    for heads, kv in HEADS:
        try:
            finding = _heads_of(attention, heads, kv)
        except RefusedError as error:
            why = why or str(error)
            continue
        if finding is not None:
            return finding
        shapes.append(f"{heads} query heads use of {kv}")
    if not shapes:
        return Finding("heads", None, why, words=REFUSED)
    return Finding("heads", "consecutive", f"the heads of k and v that {', '.join(shapes)}")


def _heads_of(attention: Attention, heads: int, kv: int) -> Finding | None:
    """The finding if query heads use other heads than A-3 says: a key's score is 0 in the head of
    its number, and far below in others; v of a head is in a column of its own."""
    q = np.zeros((1, heads, 1, FEATURES), np.float32)
    k, v = np.zeros((2, 1, kv, kv + 1, FEATURES), np.float32)
    q[..., 0] = FAR
    for g in range(kv):
        k[0, g, :, 0] = -FAR
        k[0, g, g, 0] = 0
        v[0, g, np.arange(kv), np.arange(kv)] = 256
        v[0, g, :kv, kv + g] = 256
    outputs = attention.ask(Question(q, k, v)).o[0, :, 0]
    k_heads, v_heads = outputs[:, :kv] != 0, outputs[:, kv : 2 * kv] != 0
    expected = np.arange(kv) == (np.arange(heads) * kv // heads)[:, None]
    if (k_heads == expected).all() and (v_heads == expected).all():
        return None
    words = "another head"
    mistakes = dict[str, list[str]]()
    for name, tile, used in _mistaken_heads(heads, kv):
        mistaken = np.arange(kv) == used[:, None]
        if (k_heads == mistaken).all() and (v_heads == mistaken).all():
            mistakes.setdefault(name, []).append(str(tile))
    if mistakes:
        name, tiles = next(iter(mistakes.items()))
        words = name.format(" or ".join(dict.fromkeys(tiles)))
    which, used = ("v", v_heads) if (k_heads == expected).all() else ("k", k_heads)
    j = int(np.flatnonzero((used != expected).any(axis=1))[0])
    got = ", ".join(map(str, np.flatnonzero(used[j]))) or "none"
    shown = f"{heads} query heads, {kv} heads of keys: query head {j}"
    right = f"head {j * kv // heads}"
    return Counterexample(shown, f"head {got} of {which}", right, "A").finding("heads", words)


def _mistaken_heads(heads: int, kv: int) -> Iterator[tuple[str, int, np.ndarray]]:
    """(mistake in words with {} for a tile, the tile, the head of keys of each query head)."""
    every = np.arange(heads)
    yield "query head j uses head j mod Hkv", 0, every % kv
    yield "query head j uses head j // Hkv", 0, np.minimum(every // kv, kv - 1)
    yield "every query head uses the first head", 0, 0 * every
    for tile in (2, 4, 8, 16, 32):
        words = "tiles of {} query heads use one head"
        yield words, tile, every // tile * tile * kv // heads
        whole = -(-heads // kv // tile) * tile  # a group, up to a whole tile
        yield words, tile, np.minimum(every // whole, kv - 1)


def _kind(mask: Mask) -> str:
    return {"full": "keys", "causal": "causal mask", "local": "window"}[mask.kind]


def _named(mask: Mask) -> str:
    words = ["causal"] * mask.causal
    words += [] if mask.window is None else [f"window {mask.window}"]
    return " and ".join(words) or "no mask"
