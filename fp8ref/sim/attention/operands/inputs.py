"""The inputs of attention, checked: shapes, masks, documents, given scales, softcap and sinks (spec
A-3, A-12, A-22, A-23).
"""

import math
from typing import NamedTuple

import numpy as np

from fp8ref.sim.attention.operands import hadamard
from fp8ref.sim.quantize import cast
from fp8ref.spec.attention import variants as attention
from fp8ref.spec.attention.variants import Mask, Variant


class Problem(NamedTuple):
    """Checked inputs of either pass: q [B, H, Tq, D], k and v [B, Hkv, Tk, D], float32; the softmax
    scale, float32; the keys that each query sees, int64 low and high [Tq] and documents [B, Tq],
    [B, Tk]; the softcap, float32, and sinks, float32 [H], or None."""

    variant: Variant
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: np.float32
    mask: Mask
    low: np.ndarray
    high: np.ndarray
    q_documents: np.ndarray
    k_documents: np.ndarray
    softcap: np.float32 | None = None
    sinks: np.ndarray | None = None

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return self.q.shape[1] // self.k.shape[1]


def prepare(
    q,
    k,
    v,
    variant: str | Variant,
    mask: Mask,
    scale: float | None,
    documents,
    softcap: float | None = None,
    sinks=None,
) -> Problem:
    """Check the inputs of either pass. Raises ValueError as ``forward``."""
    variant = attention.by_name(variant)
    if not isinstance(mask, Mask):
        raise ValueError(f"mask is a Mask of fp8ref.spec.attention.variants; got {mask!r}.")
    tensors = {name: _shaped(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    (b, h, tq, d), k_shape, v_shape = (x.shape for x in tensors.values())
    attention.check_shapes((b, h, tq, d), k_shape, v_shape)
    variant.tile(d, mask)
    if variant.rotated:
        hadamard.signs(d, 0)
    tk = k_shape[2]
    low, high = visible(tq, tk, mask)
    factor = np.float32(1 / math.sqrt(d) if scale is None else scale)
    if not (np.isfinite(factor) and factor > 0):
        raise ValueError(f"the softmax scale is positive and finite; got {scale!r}.")
    document_pair = _documents(documents, b, tq, tk)
    for name, x in tensors.items():
        tensors[name] = _finite(name, _without_padding(x, document_pair[name != "q"]))
    more: dict = {"softcap": _softcap(softcap, factor), "sinks": _sinks(sinks, h)}
    return Problem(
        variant,
        tensors["q"],
        tensors["k"],
        tensors["v"],
        factor,
        mask,
        low,
        high,
        *document_pair,
        **more,
    )


def _softcap(softcap: float | None, scale: np.float32) -> np.float32 | None:
    """The softcap, rounded to float32.

    ValueError where a factor made of it is no normal float32 number.
    """
    if softcap is None:
        return None
    with np.errstate(all="ignore"):
        cap = np.float32(softcap)
        factors = scale / cap, np.float32(float(cap) * math.log2(math.e))
    if not all(np.isfinite(x) and x >= np.finfo(np.float32).tiny for x in factors):
        raise ValueError(
            "a softcap is positive, with normal float32 numbers scale / cap and cap log2(e) "
            f"(A-22); got {softcap!r} with the softmax scale {float(scale)!r}. Use None for no "
            "cap."
        )
    return cap


def _sinks(sinks, heads: int) -> np.ndarray | None:
    if sinks is None:
        return None
    sinks = cast.array(sinks)
    cast.check_dtype(sinks)
    if (
        sinks.dtype == np.float64
        or sinks.shape != (heads,)
        or not np.isfinite(sinks.astype(np.float32)).all()
    ):
        raise ValueError(
            f"sinks are finite numbers of float32, float16 or bfloat16, one for each of {heads} "
            f"query heads; got {sinks.dtype} {sinks.shape}."
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


def check_scales(scales, variant: Variant, roles: tuple[str, ...]) -> dict:
    """Given scales by role. ValueError for roles that the variant has no scale for."""
    role_scales = dict(scales or {})
    role_names = (
        []
        if variant.granularity in (None, "mx_1x32")
        else [role for role in roles if _has_scale(variant, role)]
    )
    for role in role_scales:
        if role not in role_names:
            raise ValueError(
                f"variant {variant.name!r} takes scales for {', '.join(role_names) or 'no role'}; "
                f"got {role!r}. Leave it out."
            )
    return role_scales


def _has_scale(variant: Variant, role: str) -> bool:
    if role in ("o", "dq", "dk", "dv"):
        return variant.out.bits == 8
    return variant.p_scale == "state" if role in ("s", "ds") else True


def allowed(problem: Problem, i: int) -> np.ndarray:
    """Which keys the queries of a sequence see, bool [Tq, Tk]."""
    keys = np.arange(problem.k.shape[2])
    inside = (keys >= problem.low[:, None]) & (keys < problem.high[:, None])
    return inside & (problem.q_documents[i][:, None] == problem.k_documents[i])


def gradient(do, problem: Problem) -> np.ndarray:
    """The gradient of o as float32, zeros for padding (A-3).

    ValueError for another shape, and as ``prepare``.
    """
    do = _shaped("do", do)
    if do.shape != problem.q.shape:
        raise ValueError(f"do has the shape of o, {problem.q.shape}; got {do.shape}.")
    return _finite("do", _without_padding(do, problem.q_documents))


def _without_padding(x: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """x [B, heads, T, D] with zeros for tokens of negative documents (A-3)."""
    return (
        np.where((documents < 0)[:, None, :, None], np.float32(0), x)
        if (documents < 0).any()
        else x
    )


def _shaped(name: str, x) -> np.ndarray:
    """x as float32 [B, heads, T, D]. ValueError for anything else."""
    x = cast.array(x)
    cast.check_dtype(x)
    if x.dtype == np.float64 or x.ndim != 4 or 0 in x.shape:
        raise ValueError(
            f"{name} is [batch, heads, tokens, features] of float32, float16 or bfloat16, none "
            f"of them empty; got {x.dtype} {x.shape}."
        )
    return x.astype(np.float32)


def _finite(name: str, x: np.ndarray) -> np.ndarray:
    if not np.isfinite(x).all():
        raise ValueError(
            f"attention takes finite tensors; got NaN or an infinity in {name}. Find its source "
            "first."
        )
    return x


def _documents(documents, b: int, tq: int, tk: int) -> tuple[np.ndarray, np.ndarray]:
    """(documents of queries, of keys), int64 [B, T]; of padding -2 and -1, which are not equal."""
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
            f"documents are integers, [{b}, {tq}] for queries and [{b}, {tk}] for keys; got "
            f"{[(x.dtype.name, x.shape) for x in arrays]}."
        )
    q_documents, k_documents = (ids.astype(np.int64) for ids in arrays)
    return np.where(q_documents < 0, -2, q_documents), np.where(k_documents < 0, -1, k_documents)
