"""Whether a row of a result has the same bits whatever other rows a call has (spec B-14).

A library may split K by the number of rows. Each result is then within its bound, but a token's
output depends on the batch that it is in: inference and training disagree in their bits.
"""

from typing import NamedTuple

import numpy as np

from fp8ref.conformance.gemm.grade.stimuli import Asked, Stimulus
from fp8ref.conformance.gemm.scaled_gemm import ProbeError, rows_of

ROWS = (1, 16)  # the numbers of first rows that are multiplied by themselves


class RowBits(NamedTuple):
    """What calls of fewer rows showed.

    asked   the numbers of rows that the GEMM took.
    said    how a row's bits depend on their number, in words; "" if they do not.
    """

    asked: tuple[int, ...]
    said: str = ""

    @property
    def alike(self) -> bool | None:
        """Whether all rows had the same bits; None if none were asked."""
        return not self.said if self.asked else None


NOT_ASKED = RowBits(())  # of a GEMM that takes no other number of rows, or is wrong


def compare(asked: Asked, stimulus: Stimulus, output: np.ndarray) -> RowBits:
    """Multiply the first rows by themselves, and compare their bits with those among all rows.

    stimulus, output   random operands and the GEMM's results of them, [M, N].
    """
    counts: list[int] = []
    if stimulus.a.scale.ndim and len(stimulus.a.scale) < len(output):
        return NOT_ASKED  # rows share scales of blocks
    for count in (n for n in ROWS if n < len(output)):
        part = stimulus._replace(a=rows_of(stimulus.a, np.arange(count)))
        try:
            alone = asked.run(part)[0]
        except ProbeError:
            continue
        counts.append(count)
        differ = alone.view(np.uint32) != output[:count].view(np.uint32)
        if differ.any():
            i, j = np.argwhere(differ)[0]
            words = (
                f"a row's bits depend on the number of rows (K = {stimulus.shape[2]}): "
                f"{int(differ.sum())} of {differ.size} results at M = {count} are others at "
                f"M = {len(output)}, first out[{i}, {j}], {alone[i, j]:.9g} and {output[i, j]:.9g}"
            )
            return RowBits(tuple(counts), words)
    return RowBits(tuple(counts))
