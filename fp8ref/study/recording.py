"""Operands of a model's linears and attention in one step: blocks of rows, and whole amaxes.

One .npz file, which NumPy reads without pickle:

    <layer>/<role>          the kept rows: uint16, bits of bfloat16, where that holds them; else
                            float32
    <layer>/<role>/amax     float32 (): of the whole tensor
    <layer>/<role>/columns  float32 [C]: the amax of each column of the whole tensor
    <layer>/attention/<x>   q, k, v and, after a backward pass, do, of some heads and the first
                            tokens
    about                   JSON: the framework, how many rows each tensor has, the masks and scales
                            of attention
"""

import fnmatch
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fp8ref.front.quantized import as_numpy
from fp8ref.shared import files
from fp8ref.shared.console import one_line
from fp8ref.shared.errors import require

__all__ = ["Attended", "Operand", "Recording", "floats", "read"]

ATTENTION = "attention"
"""What names a layer's attention in a file."""

FLOATS = ("float32", "bfloat16", "float16", "float64")
"""The dtypes of tensors that are studied."""

BLOCK = 128
"""Rows kept together, at a multiple of this: a multiple of every block of scales (S-6)."""


@dataclass(frozen=True, kw_only=True)
class Operand:
    """What is kept of a tensor [R, C]: input [M, K], weight [N, K] or grad_output [M, N].

    kept      float32 [S, C]: blocks of ``BLOCK`` rows; the last one may be shorter.
    amax      float32 (): the largest magnitude of the whole tensor.
    columns   float32 [C]: that of each column of the whole tensor.
    rows      R.
    """

    kept: np.ndarray
    amax: np.ndarray
    columns: np.ndarray
    rows: int

    @property
    def places(self) -> np.ndarray:
        """The number in the whole tensor of each kept row."""
        most = -(-len(self.kept) // BLOCK) * BLOCK
        return np.concatenate([np.arange(*span) for span in spans(self.rows, most)])


@dataclass(frozen=True, kw_only=True)
class Attended:
    """What is kept of a layer's attention: heads of the first sequence, and its first tokens.

    q, do     float32 [1, H, T, D]; do is the gradient of the output, None before a backward pass.
    k, v      float32 [1, Hkv, T, D].
    causal    whether a query sees no key after itself; else it sees all.
    scale     of the scores; None: 1 / sqrt(D).
    """

    layer: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    causal: bool
    scale: float | None = None
    do: np.ndarray | None = None


@dataclass(kw_only=True)
class Recording:
    """Operands by "<layer>/<role>", in the order of the first call.

    framework  torch, flax, or tensors: of no model.
    chosen     the linears that were to be recorded.
    attention  by layer, the first call of each.
    refused    why the attention of other layers, or a tensor, was not kept.
    titles     the names of tensors of no model, by "<layer>/<role>".
    """

    framework: str
    chosen: tuple[str, ...] = ()
    operands: dict[str, Operand] = field(default_factory=dict)
    attention: dict[str, Attended] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)

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
        """Bytes of the kept rows, and of what is kept of attention."""
        attended = [
            x.nbytes
            for one in self.attention.values()
            for x in (one.q, one.k, one.v, one.do)
            if x is not None
        ]
        return sum(operand.kept.nbytes for operand in self.operands.values()) + sum(attended)

    def write(self, path: Path | str) -> None:
        """Write one .npz; rows that bfloat16 holds are kept as its bits."""
        arrays: dict[str, np.ndarray] = {}
        for name, operand in self.operands.items():
            arrays[name] = _narrow(operand.kept)
            arrays |= {f"{name}/amax": operand.amax, f"{name}/columns": operand.columns}
        for layer, one in self.attention.items():
            for role in ("q", "k", "v", "do"):
                if (x := getattr(one, role)) is not None:
                    arrays[f"{layer}/{ATTENTION}/{role}"] = _narrow(x)
        about = {
            "framework": self.framework,
            "chosen": self.chosen,
            "rows": {name: operand.rows for name, operand in self.operands.items()},
            ATTENTION: {
                layer: {"causal": one.causal, "scale": one.scale}
                for layer, one in self.attention.items()
            },
            "refused": self.refused,
        }
        files.write_arrays(Path(path), {"about": np.array(json.dumps(about)), **arrays})


def read(path: Path | str) -> Recording:
    """Read a file of ``Recording.write``.

    Raises:   ValueError: a file of another kind. OSError: it cannot be read.
    """
    try:
        arrays = files.read_arrays(Path(path))
        about = files.parse_json(str(arrays["about"]))
        attended, refused = about.get(ATTENTION, {}), about.get("refused", {})
        for name in (*about["rows"], *attended, *about["chosen"], *refused):
            if one_line(name) != name:
                raise ValueError(
                    f"the name {one_line(name)!r} has several lines, or control characters"
                )
        operands = {name: _operand(name, arrays, rows) for name, rows in about["rows"].items()}
        attention = {layer: _attended(layer, arrays, mask) for layer, mask in attended.items()}
        return Recording(
            framework=_typed(about["framework"], str),
            chosen=tuple(_typed(name, str) for name in about["chosen"]),
            operands=operands,
            attention=attention,
            refused={name: one_line(_typed(why, str)) for name, why in refused.items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a recording of fp8ref.study: {error}. Make one with study.record."
        ) from error


def _typed(value: Any, *kinds: type) -> Any:
    """The value. TypeError unless it is of one of the kinds."""
    if type(value) not in kinds:
        raise TypeError(f"{value!r} is no {kinds[0].__name__}")
    return value


def _operand(name: str, arrays: dict[str, np.ndarray], rows: int) -> Operand:
    kept, amax = wide(arrays[name], 2), arrays[f"{name}/amax"]
    columns = arrays[f"{name}/columns"]
    fits = (
        amax.shape == () and columns.shape == kept.shape[1:] and 0 < len(kept) <= _typed(rows, int)
    )
    if not fits or amax.dtype != np.float32 or columns.dtype != np.float32:
        raise ValueError(
            f"{name} has {kept.shape} of {rows} rows, its amax {amax.shape} and columns "
            f"{columns.shape}"
        )
    return Operand(kept=kept, amax=amax, columns=columns, rows=rows)


def spans(rows: int, most: int) -> list[tuple[int, int]]:
    """The (begin, end) of kept rows: all of them, or most / BLOCK evenly spaced blocks."""
    if rows <= most:
        return [(0, rows)]
    blocks, kept = -(-rows // BLOCK), most // BLOCK
    first = [round(i * (blocks - 1) / max(1, kept - 1)) * BLOCK for i in range(kept)]
    return [(begin, min(rows, begin + BLOCK)) for begin in dict.fromkeys(first)]


def kept(x: np.ndarray, most: int) -> Operand:
    """What is kept of a tensor [rows, columns] in float32: at most so many rows."""
    with np.errstate(invalid="ignore"):
        columns = np.abs(x).max(axis=0)
    rows = np.concatenate([x[begin:end] for begin, end in spans(len(x), most)])
    return Operand(kept=rows, amax=columns.max(), columns=columns, rows=len(x))


def chosen(names: Iterable[str], layers: str, rows: int) -> list[str]:
    """The names of linears that ``layers`` matches.

    Raises:   ValueError: none; rows that are no positive multiple of ``BLOCK``.
    """
    check_rows(rows)
    names = list(names)
    matches = [name for name in names if fnmatch.fnmatchcase(name, layers)]
    if not names:
        raise ValueError(
            "a study records linears of PyTorch or Flax NNX; got a model without linears. "
            "Layers of linen, as in nnx.bridge.ToNNX, are not seen."
        )
    text = f"layers matches the name of a linear of the model; got {layers!r} for {some(names)}."
    require(bool(matches), text)
    return matches


def check_rows(rows: int) -> None:
    """ValueError unless rows is a positive multiple of ``BLOCK``."""
    if rows < BLOCK or rows % BLOCK:
        raise ValueError(
            f"rows is a multiple of {BLOCK}, which no block of scales crosses; got {rows}."
        )


def floats(x: Any) -> np.ndarray:
    """An array of NumPy, PyTorch or JAX as float32: float64 is rounded, others are exact.

    Raises:   ValueError: other dtypes than float16, bfloat16, float32 and float64.
    """
    x = x if hasattr(x, "dtype") else np.asarray(x)
    dtype = str(x.dtype).removeprefix("torch.")
    require(dtype in FLOATS, f"got {dtype}; a study takes {', '.join(FLOATS)}")
    with np.errstate(over="ignore"):
        return as_numpy(x).astype(np.float32)


def some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def check_attention(heads: int, tokens: int, *, least: int = 0) -> None:
    """ValueError unless heads is at least ``least``, and tokens at least 1."""
    for key, value, smallest in (("heads", heads, least), ("tokens", tokens, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise ValueError(
                f"{key} of attention that are kept are an integer of at least {smallest}; got "
                f"{value!r}. Leave it out for its default."
            )


def heads_of(query_heads: int, key_heads: int, most: int) -> tuple[int, int]:
    """How many query heads, and heads of keys, are kept of attention: at least one group."""
    group = query_heads // key_heads
    keys = max(1, most // group)
    return min(query_heads, keys * group), min(key_heads, keys)


def _attended(layer: str, arrays: dict[str, np.ndarray], mask: dict) -> Attended:
    tensors = {
        role: wide(arrays[name], 4)
        for role in ("q", "k", "v", "do")
        if (name := f"{layer}/{ATTENTION}/{role}") in arrays
    }
    q, k, v, do = tensors["q"], tensors["k"], tensors["v"], tensors.get("do")
    fits = (
        q.shape[0] == k.shape[0]
        and q.shape[1] % max(1, k.shape[1]) == 0
        and q.shape[3] == k.shape[3]
        and k.shape[:3] == v.shape[:3]
    )
    fits &= 0 not in (*q.shape, *k.shape, *v.shape)
    if not fits or (do is not None and do.shape != (*q.shape[:3], v.shape[3])):
        raise ValueError(f"attention of {layer} has shapes {[x.shape for x in tensors.values()]}")
    return Attended(
        layer=layer,
        causal=_typed(mask["causal"], bool),
        scale=_typed(mask["scale"], float, int, type(None)),
        q=q,
        k=k,
        v=v,
        do=do,
    )


def _narrow(x: np.ndarray) -> np.ndarray:
    """The bits of bfloat16, where that holds all of it; else float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    if np.any(bits & 0xFFFF):
        return np.asarray(x, np.float32)
    return (bits >> 16).astype(np.uint16)


def wide(x: np.ndarray, axes: int) -> np.ndarray:
    """What ``_narrow`` made. ValueError: another dtype or number of axes."""
    text = f"a tensor is {x.dtype} of {x.ndim} axes, not uint16 or float32 of {axes}"
    require(x.ndim == axes and x.dtype in (np.uint16, np.float32), text)
    if x.dtype == np.float32:
        return x
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def inputs(recording: Recording) -> dict[str, Operand]:
    """Each layer's input, by layer."""
    return {
        name.rpartition("/")[0]: operand
        for name, operand in recording.operands.items()
        if name.endswith("/input")
    }


def listed(names: Any, label: str) -> None:
    """ValueError for one name in the place of several: its letters are none."""
    text = f"{label} are a list of names; got {names!r}. Write [{names!r}]."
    require(not isinstance(names, str), text)


def check(recording: Any) -> None:
    """ValueError unless it is a Recording."""
    if not isinstance(recording, Recording):
        raise ValueError(
            "a study judges what study.record yields, or study.read; got "
            f"{type(recording).__name__}."
        )
