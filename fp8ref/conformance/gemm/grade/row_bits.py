"""Whether a row of a result has the same bits whatever other rows a call has (spec B-14).

A library may split K by the number of rows. Each result is then within its bound, but a token's
output depends on the batch that it is in: inference and training disagree in their bits.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fp8ref.conformance.gemm.grade.stimuli import Asked, Stimulus
from fp8ref.conformance.gemm.scaled_gemm import ProbeError, rows_of
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scaling import Quantized

ROWS = (1, 2, 17, 33, 128, 257, 1024)
"""The numbers of rows that are multiplied: around the tiles of kernels, and of decoding."""

COLUMNS = 32  # of b, so that 1024 rows take no longer than the rest of the grade

BEHIND = 15  # rows of padding

NUMBER, PLACE = "the number of rows", "its place among the rows"
PADDING = "the padding behind it"  # the third that a row's bits may depend on

VARIES = "does not repeat itself"  # a cause: the bits of equal calls differ

_ZEROS, _FILLED = -2, -1  # rows of padding: of zeros, and of NaN or the largest number


class RowBits(NamedTuple):
    """What calls of other rows showed.

    asked   the calls that the GEMM took, in words.
    said    what a row's bits depend on, in words; "" if on nothing else.
    """

    asked: tuple[str, ...]
    said: str = ""

    @property
    def alike(self) -> bool | None:
        """Whether all rows had the same bits; None if none were asked."""
        return not self.said if self.asked else None


NOT_ASKED = RowBits(())  # of a GEMM that takes no other number of rows, or is wrong


def compare(asked: Asked, stimulus: Stimulus) -> RowBits:
    """Multiply rows in other numbers, at other places and before padding, and compare their bits
    with those of one call.

    stimulus   random operands, whose first ``COLUMNS`` columns of the result are asked.
    """
    m, n, k = stimulus.shape
    if stimulus.a.scale.ndim and len(stimulus.a.scale) < m:
        return NOT_ASKED  # rows share scales of blocks
    try:
        few = stimulus._replace(b=rows_of(stimulus.b, np.arange(min(n, COLUMNS))))
        output = asked.run(few)[0]
    except ProbeError:
        few, output = stimulus, asked.run(stimulus)[0]
    calls, differing, said = list[str](), list[str](), ""
    for words, kind, places in _calls(m):
        try:
            results = asked.run(few._replace(a=_rows(few.a, places)))[0]
        except ProbeError:
            continue
        calls.append(words)
        own = places >= 0
        differ = np.zeros(results.shape, bool)
        differ[own] = results[own].view(np.uint32) != output[places[own]].view(np.uint32)
        if not differ.any():
            continue
        differing.append(words)
        if not said:
            stays = differ[places == np.arange(len(places))].any()
            i, j = np.argwhere(differ)[0]
            said = (
                f"a row's bits depend on {kind if stays else PLACE} (K = {k}): "
                f"{int(differ.sum())} of {differ[own].size} results at {words} are others at "
                f"M = {m}, first out[{i}, {j}], {results[i, j]:.9g} and "
                f"{output[places[i], j]:.9g}"
            )
    if not said and not any(words.startswith("M = ") for words in calls):
        return NOT_ASKED
    also = f"; others too at {', '.join(differing[1:])}" if differing[1:] else ""
    return RowBits(tuple(calls), said + also)


def _calls(m: int) -> Iterator[tuple[str, str, np.ndarray]]:
    """(call in words, what differs from a call of m rows, the row that is at each place)."""
    every = np.arange(m)
    for count in ROWS:
        if count != m:
            yield f"M = {count}", NUMBER, np.arange(count) % m
    if m > 1:
        yield "rows in reverse order", PLACE, every[::-1]
    for words, row in (("zeros", _ZEROS), ("NaN", _FILLED)):
        rows = np.append(every, [row] * BEHIND)
        yield f"{BEHIND} rows of {words} behind", PADDING, rows


def _rows(q: Quantized, places: np.ndarray) -> Quantized:
    """The rows of an operand at these places, and padding under the scale of its first row."""
    taken = rows_of(q, np.maximum(places, 0))
    taken.codes[places == _ZEROS] = 0
    taken.codes[places == _FILLED] = cast.encode(np.full(1, np.nan, np.float32), q.fmt)
    return taken
