"""The inputs of attention, checked: shapes, documents, given scales and sinks (spec A-3, A-12).

Whether numbers are finite and scales positive is not checked: the host would wait for the device.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8ref.spec import support
from fp8ref.spec.attention import variants as attention
from fp8ref.spec.attention.variant import ROWS, Variant
from fp8ref.torch.attention.operands.problem import Problem, RankCall, Shape, padded_documents
from fp8ref.torch.quantize import cast

Pair = Tensor | tuple[Tensor, Tensor] | None
"""Documents of queries and keys: one tensor for both, or two."""


def problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: RankCall,
    roles: tuple[str, ...],
    *,
    documents: Pair = None,
    scales: Mapping[str, Tensor] | None = None,
    sinks: Tensor | None = None,
) -> Problem:
    """The problem of these inputs, all of them checked.

    roles     those whose scales may be given.
    Raises:   ValueError: as ``check``; documents, scales or sinks that do not fit.
    """
    shape = check(q, k, v, call)
    role_scales = check_scales(scales, call.variant, roles, shape)
    _check_sinks(sinks, shape, q.device)
    pair = check_documents(documents, shape)
    return Problem(call, shape, padded_documents(*pair), role_scales, sinks)


def check(q: Tensor, k: Tensor, v: Tensor, call: RankCall) -> Shape:
    """The shape of a problem.

    Raises:   ValueError: DTensors; dtypes, devices or shapes that do not fit; more features than
              the variant takes; a promotion after several tiles; a softcap whose factors are no
              normal float32 numbers (A-22).
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    (b, h, tq, d), k_shape = q.shape, tuple(k.shape)
    attention.check_shapes(tuple(q.shape), k_shape, tuple(v.shape))
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v are on one device; got {q.device}, {k.device} and {v.device}. Move them."
        )
    call.check_features(d)
    support.require("promotion of attention's sums", "torch", call.variant)
    return Shape(b, h, k_shape[1], tq, k_shape[2], d)


def check_given(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    """ValueError for what is no tensor."""
    for name, x in {"q": q, "k": k, "v": v, "sinks": sinks}.items():
        if not isinstance(x, Tensor) and not (name == "sinks" and x is None):
            raise ValueError(f"{name} is a tensor; got {type(x).__name__}. Use torch.as_tensor.")


def check_tensor(name: str, x: Tensor) -> None:
    """ValueError for anything but a local tensor [B, heads, T, D] in high precision, not empty."""
    if isinstance(x, DTensor):
        raise ValueError(
            f"attention takes local tensors; got {name}, a DTensor. Use .to_local() and amax_group."
        )
    if x.dtype not in cast.HIGH_PRECISION or x.ndim != 4 or 0 in x.shape:
        raise ValueError(
            f"{name} is non-empty float32, float16 or bfloat16 [B, heads, T, D]; got {x.dtype} "
            f"{tuple(x.shape)}."
        )


def _check_sinks(sinks: Tensor | None, shape: Shape, device: torch.device) -> None:
    """ValueError for sinks of another shape, dtype or device."""
    if sinks is None:
        return
    if (
        sinks.dtype not in cast.HIGH_PRECISION
        or tuple(sinks.shape) != (shape.heads,)
        or sinks.device != device
    ):
        raise ValueError(
            f"sinks are float32, float16 or bfloat16 [{shape.heads}], one for each query head, on "
            f"{device}; got {sinks.dtype} {tuple(sinks.shape)} on {sinks.device}."
        )


def pair_of(documents: Pair) -> tuple[Tensor | None, Tensor | None]:
    """(documents of queries, of keys) as they are given.

    ValueError for what is neither a tensor nor two.
    """
    if documents is None:
        return None, None
    pair = documents if isinstance(documents, tuple) else (documents, documents)
    if len(pair) != 2 or not all(isinstance(x, Tensor) for x in pair):
        raise ValueError(
            "documents are a tensor [B, T] of integers, or a tuple of two; got "
            f"{' and '.join(type(x).__name__ for x in pair)}."
        )
    return pair


def check_documents(documents: Pair, shape: Shape) -> tuple[Tensor | None, Tensor | None]:
    """(documents of queries, of keys), integers [B, T]; None without any.

    ValueError for other shapes or dtypes.
    """
    q_documents, k_documents = pair_of(documents)
    if q_documents is None or k_documents is None:
        return None, None
    pair = q_documents, k_documents
    expected = [(shape.batch, shape.queries), (shape.batch, shape.keys)]
    if (
        any(x.is_floating_point() or x.dtype == torch.bool for x in pair)
        or [tuple(x.shape) for x in pair] != expected
    ):
        raise ValueError(
            f"documents are integers: {list(expected[0])} for queries, {list(expected[1])} for "
            f"keys; got {[(str(x.dtype), tuple(x.shape)) for x in pair]}."
        )
    return pair[0], pair[1]


def check_scales(
    scales: Mapping[str, Tensor] | None, variant: Variant, roles: tuple[str, ...], shape: Shape
) -> dict[str, Tensor]:
    """Given scales by role.

    ValueError for roles that the variant has no scale for; another shape or dtype.
    """
    role_scales = attention.check_scales(scales, variant, roles)
    for role, scale in role_scales.items():
        expected, kind = scale_shape(variant, role, shape), type(scale).__name__
        if isinstance(scale, Tensor):
            # sizes may be a compiler's symbols, equal under other names
            if scale.dtype == torch.float32 and tuple(scale.shape) == expected:
                continue
            kind = f"{scale.dtype} {list(scale.shape)}"
        raise ValueError(f"a passed scale of {role} is float32 {list(expected)}; got {kind}.")
    return role_scales


def check_seen(seen: dict[str, Tensor], variant: Variant, shape: Shape) -> None:
    """ValueError for observations of roles without one scale, or of another shape or dtype."""
    scaled = variant.scaled(variant.roles)
    role_names = [role for role in scaled if scale_shape(variant, role, shape) == ()]
    for role, x in seen.items():
        if role not in role_names:
            raise ValueError(
                f"variant {variant.name!r} observes {', '.join(role_names) or 'no role'}; got "
                f"{role!r}."
            )
        if x.dtype != torch.float32 or tuple(x.shape) != (3,):
            raise ValueError(
                f"an observation is a RoleState's seen, float32 [3]; got {x.dtype} {list(x.shape)} "
                f"of {role}."
            )


def scale_shape(variant: Variant, role: str, shape: Shape) -> tuple[int, ...]:
    """The shape of a role's scale."""
    if variant.granularity == "tensor" or role not in ("q", "k", "v", "do"):
        return ()
    if variant.granularity == "head":
        return (shape.batch, shape.key_heads, 1, 1)
    heads, tokens = (shape.heads, shape.queries) if role == "q" else (shape.key_heads, shape.keys)
    return (shape.batch, heads, -(-tokens // ROWS), 1)
