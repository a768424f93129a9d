"""The inputs of attention, checked: shapes, documents, scales, sinks (spec A-3, A-12, A-23)."""

from typing import NamedTuple

import numpy as np

from fp8ref.sim.quantize import cast
from fp8ref.spec.attention import variants as attention
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import Mask, Variant


class Problem(NamedTuple):
    """Checked inputs of either pass: q [B, H, Tq, D], k and v [B, Hkv, Tk, D], float32; the keys
    that each query sees, int64 low and high [Tq] and documents [B, Tq], [B, Tk]; sinks, float32
    [H], or None."""

    call: Call
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    low: np.ndarray
    high: np.ndarray
    q_documents: np.ndarray
    k_documents: np.ndarray
    sinks: np.ndarray | None

    @property
    def variant(self) -> Variant:
        """The decisions of the kernel."""
        return self.call.variant

    @property
    def scale(self) -> np.float32:
        """The softmax scale."""
        return self.call.softmax_scale(self.q.shape[3])

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return self.q.shape[1] // self.k.shape[1]


def prepare(q, k, v, call: Call, documents, sinks) -> Problem:
    """Check the inputs of either pass, in the call's layout. Raises ValueError as ``forward``."""
    q, k, v = attention.heads_first(call.layout, *map(cast.array, (q, k, v)))
    tensors = {name: _shaped(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    (b, h, tq, d), k_shape, v_shape = (x.shape for x in tensors.values())
    attention.check_shapes((b, h, tq, d), k_shape, v_shape)
    call.check_features(d)
    tk = k_shape[2]
    low, high = visible(tq, tk, call.mask)
    document_pair = _documents(documents, b, tq, tk)
    q, k, v = (
        _finite(name, _without_padding(x, document_pair[name != "q"]))
        for name, x in tensors.items()
    )
    return Problem(call, q, k, v, low, high, *document_pair, _sinks(sinks, h))


def _sinks(sinks, heads: int) -> np.ndarray | None:
    if sinks is None:
        return None
    sinks = cast.array(sinks)
    cast.check_dtype(sinks)
    right = sinks.dtype != np.float64 and sinks.shape == (heads,)
    if not right or not np.isfinite(sinks.astype(np.float32)).all():
        raise ValueError(
            f"sinks are finite float32, float16 or bfloat16 [{heads}], one for each query head; "
            f"got {sinks.dtype} {sinks.shape}."
        )
    return sinks.astype(np.float32)


def visible(tq: int, tk: int, mask: Mask) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) int64 [Tq]: query i sees the keys from low[i] to below high[i] (A-3)."""
    position = np.arange(tq) + (tk - tq if mask.alignment == "end" else 0)
    low, high = np.zeros(tq, np.int64), np.full(tq, tk)
    if mask.causal:
        high = np.minimum(high, position + 1)
    if mask.window is not None:
        left, right = mask.window
        low = low if left is None else np.maximum(low, position - left)
        high = high if right is None else np.minimum(high, position + right + 1)
    return low, high


def allowed(problem: Problem, i: int) -> np.ndarray:
    """Which keys the queries of a sequence see, bool [Tq, Tk]."""
    keys = np.arange(problem.k.shape[2])
    inside = (keys >= problem.low[:, None]) & (keys < problem.high[:, None])
    return inside & (problem.q_documents[i][:, None] == problem.k_documents[i])


def gradient(do, problem: Problem) -> np.ndarray:
    """do as float32, zeros for padding (A-3); ValueError for another shape."""
    do = _shaped("do", do)
    if do.shape != problem.q.shape:
        raise ValueError(f"do has the shape of o, {problem.q.shape}; got {do.shape}.")
    return _finite("do", _without_padding(do, problem.q_documents))


def _without_padding(x: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """x [B, heads, T, D] with zeros for tokens of negative documents (A-3)."""
    padding = documents < 0
    return np.where(padding[:, None, :, None], np.float32(0), x) if padding.any() else x


def _shaped(name: str, x) -> np.ndarray:
    """x as float32 [B, heads, T, D]. ValueError for anything else."""
    x = cast.array(x)
    cast.check_dtype(x)
    if x.dtype == np.float64 or x.ndim != 4 or 0 in x.shape:
        raise ValueError(
            f"{name} is non-empty float32, float16 or bfloat16 [B, heads, T, D]; got {x.dtype} "
            f"{x.shape}."
        )
    return x.astype(np.float32)


def _finite(name: str, x: np.ndarray) -> np.ndarray:
    if not np.isfinite(x).all():
        raise ValueError(f"attention needs finite tensors; got NaN or infinity in {name}.")
    return x


def _documents(documents, b: int, tq: int, tk: int) -> tuple[np.ndarray, np.ndarray]:
    """(documents of queries, of keys), int64 [B, T]; padding gets -2 and -1, which differ."""
    if documents is None:
        return np.zeros((b, tq), np.int64), np.zeros((b, tk), np.int64)
    pair = documents if isinstance(documents, tuple) else (documents, documents)
    arrays = tuple(np.asarray(ids) for ids in pair)
    if (
        len(arrays) != 2
        or any(ids.dtype.kind not in "iu" for ids in arrays)
        or [x.shape for x in arrays] != [(b, tq), (b, tk)]
    ):
        raise ValueError(
            f"documents are integers: [{b}, {tq}] for queries, [{b}, {tk}] for keys; got "
            f"{[(x.dtype.name, x.shape) for x in arrays]}."
        )
    q_documents, k_documents = (ids.astype(np.int64) for ids in arrays)
    return np.where(q_documents < 0, -2, q_documents), np.where(k_documents < 0, -1, k_documents)
