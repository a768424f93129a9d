"""Operands of a model's linears in one step: blocks of their rows, and amaxes of the whole tensors.

One .npz file, which NumPy reads without pickle:

    <layer>/<role>          the kept rows: uint16, bits of bfloat16, where that holds them; else float32
    <layer>/<role>/amax     float32 (): of the whole tensor
    <layer>/<role>/columns  float32 [C]: the amax of each column of the whole tensor
    about                   JSON: the framework, how many rows each tensor has
"""

import fnmatch
import json
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

BLOCK = 128
"""Rows that are kept together: a multiple of every block of scales (S-6), and at a multiple of itself."""


@dataclass(frozen=True, kw_only=True)
class Operand:
    """What is kept of a tensor [R, C]: input [M, K], weight [N, K] or grad_output [M, N].

    kept      float32 [S, C]: blocks of ``BLOCK`` rows; the last one may be shorter, if the tensor's is.
    amax      float32 (): the largest magnitude of the whole tensor.
    columns   float32 [C]: that of each column of the whole tensor.
    rows      R.
    """

    kept: np.ndarray
    amax: np.ndarray
    columns: np.ndarray
    rows: int


@dataclass(kw_only=True)
class Recording:
    """Operands by "<layer>/<role>", in the order of the first call.

    framework  torch or flax.
    chosen     the linears that were to be recorded.
    """

    framework: str
    chosen: tuple[str, ...] = ()
    operands: dict[str, Operand] = field(default_factory=dict)

    @property
    def layers(self) -> list[str]:
        """The layers, in the order in which they ran."""
        return list(dict.fromkeys(name.rpartition("/")[0] for name in self.operands))

    @property
    def uncalled(self) -> list[str]:
        """Linears of which nothing was recorded: not called, without tokens, or with batch dims."""
        return [name for name in self.chosen if f"{name}/input" not in self.operands]

    @property
    def nbytes(self) -> int:
        """Bytes of the kept rows."""
        return sum(operand.kept.nbytes for operand in self.operands.values())

    def write(self, path: Path | str) -> None:
        """Write one .npz; rows that bfloat16 holds are kept as its bits."""
        arrays: dict[str, np.ndarray] = {}
        for name, operand in self.operands.items():
            bits = np.ascontiguousarray(operand.kept, np.float32).view(np.uint32)
            narrow = not np.any(bits & 0xFFFF)
            arrays[name] = (bits >> 16).astype(np.uint16) if narrow else operand.kept
            arrays |= {f"{name}/amax": operand.amax, f"{name}/columns": operand.columns}
        about = {
            "framework": self.framework,
            "chosen": self.chosen,
            "rows": {name: operand.rows for name, operand in self.operands.items()},
        }
        with Path(path).open("wb") as file:
            np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)  # type: ignore[arg-type]


def read(path: Path | str) -> Recording:
    """Read a file of ``Recording.write``.

    Raises:   ValueError: a file of another kind. OSError: it cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays = dict(found)
        about = json.loads(str(arrays["about"]))
        operands = {
            name: Operand(kept=_wide(arrays[name]), amax=arrays[f"{name}/amax"], columns=arrays[f"{name}/columns"], rows=rows)
            for name, rows in about["rows"].items()
        }
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a recording of fp8ref.study: {error}. Make one with study.record.") from error
    return Recording(framework=about["framework"], chosen=tuple(about["chosen"]), operands=operands)


def spans(rows: int, most: int) -> list[tuple[int, int]]:
    """The rows that are kept of a tensor of ``rows``, as (begin, end): all of them, or most / BLOCK evenly spaced blocks."""
    if rows <= most:
        return [(0, rows)]
    blocks, kept = -(-rows // BLOCK), most // BLOCK
    first = [round(i * (blocks - 1) / max(1, kept - 1)) * BLOCK for i in range(kept)]
    return [(begin, min(rows, begin + BLOCK)) for begin in dict.fromkeys(first)]


def chosen(names: Iterable[str], layers: str, rows: int) -> list[str]:
    """The names of linears that ``layers`` matches.

    Raises:   ValueError: none; rows that are no positive multiple of ``BLOCK``.
    """
    if rows < BLOCK or rows % BLOCK:
        raise ValueError(f"rows is a multiple of {BLOCK}, which no block of scales crosses; got {rows}.")
    names = list(names)
    found = [name for name in names if fnmatch.fnmatchcase(name, layers)]
    if not found:
        raise ValueError(f"layers matches the name of a linear of the model; got {layers!r} for {_some(names)}.")
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "a model without linears"


def _wide(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32) if x.dtype == np.uint16 else x


def inputs(recording: Recording) -> dict[str, Operand]:
    """Each layer's input, by layer."""
    return {name.rpartition("/")[0]: operand for name, operand in recording.operands.items() if name.endswith("/input")}
