"""Faults of a GEMM as data: each is a formula, whose results are compared with the GEMM's bits.

They are simulated on operands whose sums every accumulator of 8 bits has exactly, so that float32
products of matrices give all bits.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from fp8ref.conformance.gemm.grade.stimuli import Stimulus
from fp8ref.formats import FP8_FORMATS, Format
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Quantized

Scales = Callable[[np.ndarray], np.ndarray]
"""scale_inv of an operand -> the scales that a fault multiplies by."""

Gives = Callable[[Stimulus], np.ndarray | None]
"""Operands -> the results [M, N] of a fault; None where shapes do not allow it."""


class Fault(NamedTuple):
    """A fault by name, with what it gives."""

    name: str
    gives: Gives


def _rolled(step: int, *, axis: int) -> Scales:
    return lambda s: np.roll(s, step, axis=axis) if s.ndim else s


SCALES: dict[str, Scales] = {
    "": lambda s: s,
    "scale of {} in the place of scale_inv": lambda s: 1 / s,
    "scale_inv of {} twice": lambda s: s * s,
    "no scale of {}": np.ones_like,
    "the first scale_inv of {} for all": lambda s: np.broadcast_to(s.reshape(-1)[0], s.shape),
    "the first scale_inv along K of {} for all of K": lambda s: (
        np.broadcast_to(s[:, :1], s.shape) if s.ndim else s
    ),
    "the largest scale_inv of {} for all": lambda s: np.broadcast_to(s.max(), s.shape),
    "scale_inv of {} of the next row": _rolled(-1, axis=0),
    "scale_inv of {} of the previous row": _rolled(1, axis=0),
    "scale_inv of {} of the next block of K": _rolled(-1, axis=1),
    "scale_inv of {} of the previous block of K": _rolled(1, axis=1),
    "scale_inv of {}, transposed": lambda s: s.T.reshape(s.shape) if s.ndim else s,
    "no scale of the last block along K of {}": lambda s: (
        np.concatenate([s[:, :-1], np.ones_like(s[:, -1:])], axis=1) if s.ndim else s
    ),
}
"""{fault, in words: the scales it has}; {} stands for the operand."""

PLACES = tuple(w for w in SCALES if {"first", "next", "previous", "transposed"} & {*w.split()})
"""Those that have a scale_inv of another place."""

TILES = (16, 32, 64, 128, 256)  # of columns, which a kernel may store whole

DROPPED = (16, 32, 64, 128, 256)  # products at an end of K that a tile may lack

IN_PAIRS = tuple(SCALES)[1:4]  # faults of scales that both operands may have at once


def values(stimulus: Stimulus) -> tuple[np.ndarray, np.ndarray]:
    """The numbers that the codes of a [M, K] and b [N, K] stand for, without scales, float32."""
    return tuple(cast.decode(q.codes, q.fmt) for q in (stimulus.a, stimulus.b))  # type: ignore[return-value]


def product(
    stimulus: Stimulus,
    a: np.ndarray,
    b: np.ndarray,
    scales: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """a [M, K] times b [N, K] under the stimulus's scales, or others: float32 [M, N]."""
    with np.errstate(all="ignore"):
        inverses = (stimulus.a.scale_inv, stimulus.b.scale_inv) if scales is None else scales
        pairs = list(zip((stimulus.a, stimulus.b), inverses, strict=True))
        if all(s.ndim == 0 or s.shape == (len(q.codes), 1) for q, s in pairs):  # no blocks
            result = a @ b.T * inverses[0] * inverses[1].T
        else:
            left, right = (spread(*pair) for pair in pairs)
            result = (a * left) @ (b * right).T
        if stimulus.bias is not None:
            result = result + stimulus.bias
        return result + np.float32(0)


def expected(stimulus: Stimulus) -> np.ndarray:
    """What a GEMM without faults gives."""
    return product(stimulus, *values(stimulus))


def all_faults() -> Iterator[Fault]:
    """Every fault that is tried, the likeliest first."""
    yield from _scale_faults()
    yield from _operand_faults()
    yield from _bias_faults()
    yield from (_dropped(n, last) for n in DROPPED for last in (True, False))
    yield Fault("zeros", lambda s: np.zeros(s.shape[:2], np.float32))
    yield Fault("the result with the other sign", lambda s: -expected(s))
    yield Fault("the magnitude of the result", lambda s: np.abs(expected(s)))
    yield Fault("negative results become 0", lambda s: np.maximum(expected(s), 0))
    yield Fault("a result that is twice as large", lambda s: 2 * expected(s))
    yield from (_stored_whole(tile, filled) for tile in TILES for filled in (True, False))


def _scale_faults() -> Iterator[Fault]:
    yield Fault("scales swapped: that of b for rows, that of a for columns", _swapped)
    for name in list(SCALES)[1:]:
        yield _scaled(name, "")
        yield _scaled("", name)
    alike = list(zip(SCALES, SCALES, strict=True))[1:]
    for left, right in dict.fromkeys([*itertools.product(IN_PAIRS, IN_PAIRS), *alike]):
        yield _scaled(left, right)


def _scaled(left: str, right: str) -> Fault:
    def gives(s: Stimulus) -> np.ndarray | None:
        scales = SCALES[left](s.a.scale_inv), SCALES[right](s.b.scale_inv)
        same = all(map(np.array_equal, scales, (s.a.scale_inv, s.b.scale_inv)))
        return None if same else product(s, *values(s), scales)

    names = [name.format(who) for name, who in ((left, "a"), (right, "b")) if name]
    return Fault(", and ".join(names), gives)


def _swapped(s: Stimulus) -> np.ndarray | None:
    if s.a.scale_inv.shape != s.b.scale_inv.shape or s.a.scale_inv.ndim == 0:
        return None
    return product(s, *values(s), (s.b.scale_inv, s.a.scale_inv))


def _operand_faults() -> Iterator[Fault]:
    yield Fault("b transposed: its memory is read as [K, N]", _with(1, _as_transposed))
    yield Fault("a transposed: its memory is read as [K, M]", _with(0, _as_transposed))
    yield Fault(
        "the result transposed", lambda s: expected(s).T if s.shape[0] == s.shape[1] else None
    )
    yield Fault(
        "the result transposed in memory, [N, M] read as [M, N]",
        lambda s: np.ascontiguousarray(expected(s).T).reshape(s.shape[:2]),
    )
    yield Fault(
        "a in the place of b",
        lambda s: product(s, values(s)[0], values(s)[0]) if s.shape[0] == s.shape[1] else None,
    )
    yield Fault(
        "a and b swapped, under their own scales",
        lambda s: product(s, *values(s)[::-1]) if s.shape[0] == s.shape[1] else None,
    )
    for which, who in enumerate("ab"):
        for fmt in FP8_FORMATS.values():
            yield Fault(f"codes of {who} read as {fmt}", _read_as(which, fmt))
    for which, who in enumerate("ab"):
        for step in (-1, 1):
            rolled = functools.partial(np.roll, shift=step, axis=0)
            yield Fault(f"rows of {who} shifted by {-step}", _with(which, rolled))


def _with(which: int, change: Callable[[np.ndarray], np.ndarray]) -> Gives:
    """Products of the operands, of which one is changed."""

    def gives(s: Stimulus) -> np.ndarray:
        operands = list(values(s))
        operands[which] = change(operands[which])
        return product(s, operands[0], operands[1])

    return gives


def _as_transposed(x: np.ndarray) -> np.ndarray:
    """Memory of [rows, K] read as [K, rows]."""
    return x.reshape(x.shape[::-1]).T


def _read_as(which: int, fmt: Format) -> Gives:
    def gives(s: Stimulus) -> np.ndarray | None:
        q = (s.a, s.b)[which]
        return None if fmt == q.fmt else _with(which, lambda _: cast.decode(q.codes, fmt))(s)

    return gives


def _dropped(n: int, last: bool) -> Fault:
    def gives(s: Stimulus) -> np.ndarray | None:
        a, b = values(s)
        part = np.s_[:, :-n] if last else np.s_[:, n:]
        if n >= a.shape[1] or s.a.scale_inv.size > len(a):
            return None
        return product(s, a[part], b[part])

    return Fault(f"the {'last' if last else 'first'} {n} of K dropped", gives)


def _stored_whole(tile: int, filled: bool) -> Fault:
    """Whole tiles of columns are stored: what lies beyond N is in the rows behind, which are
    written before; it is the last column (filled) or 0.
    """

    def gives(s: Stimulus) -> np.ndarray | None:
        m, n, _ = s.shape
        beyond = -n % tile
        if not beyond:
            return None
        right = expected(s)
        place = np.arange(m * n)
        row = np.maximum(0, -((n + beyond - 1 - place) // n))  # the last that writes there
        column = place - row * n
        values = right[row, np.minimum(column, n - 1)]
        return np.where((column < n) | filled, values, 0).astype(np.float32).reshape(m, n)

    filling = "the last column" if filled else "zeros"
    words = f"columns beyond N, {filling} up to a multiple of {tile}, are written into the next row"
    return Fault(words, gives)


def _bias_faults() -> Iterator[Fault]:
    def of(added: Callable[[Stimulus, np.ndarray], np.ndarray]) -> Gives:
        """Sums without a bias, with what a fault adds of (the operands, their bias)."""
        return lambda s: (
            None
            if s.bias is None
            else product(s._replace(bias=None), *values(s)) + added(s, s.bias)
        )

    yield Fault("no bias", of(lambda s, bias: 0 * bias))
    yield Fault("the bias twice", of(lambda s, bias: 2 * bias))
    yield Fault("the bias with the other sign", of(lambda s, bias: -bias))
    yield Fault(
        "a bias of rows in the place of columns",
        of(lambda s, bias: bias[:, None] if s.shape[0] == s.shape[1] else bias),
    )
    yield Fault(
        "the bias added before both scales",
        of(lambda s, bias: bias * s.a.scale_inv * s.b.scale_inv.T),
    )
    early = "the bias added before the scale of {}"
    yield Fault(early.format("a"), of(lambda s, bias: bias * s.a.scale_inv))
    yield Fault(early.format("b"), of(lambda s, bias: bias * s.b.scale_inv.T))
    yield Fault("the bias of the first column for all", of(lambda s, bias: bias[:1]))


def spread(q: Quantized, scales: np.ndarray) -> np.ndarray:
    """Scales of any shape that q may have, an element each."""
    each = scaling.spread(np.ascontiguousarray(scales), q.codes.shape, q.blocks)
    return np.broadcast_to(each, q.codes.shape)
