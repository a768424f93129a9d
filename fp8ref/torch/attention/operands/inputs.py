"""The inputs of attention, checked: shapes, masks, documents and given scales (spec A-3, A-12).

Whether numbers are finite and scales positive is not checked: it would make the host wait
for the device.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor

from fp8ref.spec.attention import variants as attention
from fp8ref.spec.attention.variants import ARITHMETIC, Arithmetic, Mask, Variant
from fp8ref.torch.attention.operands import hadamard
from fp8ref.torch.attention.operands import heads as head_scaling
from fp8ref.torch.quantize import cast

Report = Literal["nothing", "amaxes", "all"]
"""What a pass finds beside its result: nothing but the amaxes that scales are made of; all amaxes;
and how many elements casts clipped. Anything else is 0."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The constants of a pass.

    scale         of scores; None: 1 / sqrt(D).
    seed          of a rotated variant's signs.
    amax_group    name of the process group whose ranks have other sequences, heads or tokens of the
                  same tensors.
    first         the position of the first query among the keys, of a part of the queries; None: as
                  the mask is aligned.
    context       name of the process group whose ranks have the other parts of the queries, and
                  share the gradients of keys.
    softcap       of scores; None: they have none.
    """

    variant: Variant
    mask: Mask = attention.FULL
    scale: float | None = None
    seed: int = 0
    arithmetic: Arithmetic = "fast"
    amax_group: str | None = None
    first: int | None = None
    context: str | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mask, Mask):
            raise ValueError(
                f"mask is a Mask of fp8ref.spec.attention.variants; got {self.mask!r}."
            )
        if self.arithmetic not in ARITHMETIC:
            raise ValueError(
                f"arithmetic is one of {', '.join(ARITHMETIC)}; got {self.arithmetic!r}."
            )
        for name, value in (("softmax scale", self.scale), ("softcap", self.softcap)):
            # a tensor's gradient would be lost
            if value is not None and not isinstance(value, Real):
                raise ValueError(
                    f"the {name} is a number; got {type(value).__name__}. Pass a float; "
                    "multiply q by a scale that is learned."
                )
        if self.scale is not None and not (
            math.isfinite(self.scale) and np.float32(self.scale) > 0
        ):
            raise ValueError(f"the softmax scale is positive and finite; got {self.scale!r}.")
        if self.variant.rotated:
            hadamard.check(1, self.seed)
        elif self.seed:
            raise ValueError(
                f"a seed makes the signs of a rotation; variant {self.variant.name!r} has none, "
                f"got seed={self.seed!r}. Leave it out."
            )

    def offset(self, shape: "Shape") -> int:
        """The position of query 0 among the keys (A-3)."""
        if self.first is not None:
            return self.first
        return shape.keys - shape.queries if self.mask.alignment == "end" else 0

    @property
    def ranks(self) -> distributed.ProcessGroup:
        """The process group of ``context``."""
        assert self.context is not None
        return _resolve_process_group(self.context)  # type: ignore[arg-type]  # a name is a string

    def softmax_scale(self, features: int) -> float:
        """The scale of scores, a float32 number."""
        return float(np.float32(1 / math.sqrt(features) if self.scale is None else self.scale))

    @property
    def cap(self) -> float:
        """The softcap under the variant's base, a float32 number (A-22)."""
        assert self.softcap is not None
        return self.under_base(float(np.float32(self.softcap)))

    def under_base(self, scale: float) -> float:
        """A float32 number, times log2(e) under base 2 (A-4)."""
        return float(np.float32(scale * math.log2(math.e))) if self.variant.base == "2" else scale


@dataclass(frozen=True)
class Shape:
    """B, H, Hkv, Tq, Tk, D of a problem."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    features: int

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return self.heads // self.key_heads


def check(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Shape:
    """The shape of a problem.

    Raises:   ValueError: DTensors; dtypes, devices or shapes that do not fit; more features than
              the variant takes; a softcap whose factors are no normal float32 numbers (A-22).
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    (b, h, tq, d), k_shape = q.shape, tuple(k.shape)
    attention.check_shapes(tuple(q.shape), k_shape, tuple(v.shape))
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v are on one device; got {q.device}, {k.device} and {v.device}. Move them."
        )
    spec.variant.tile(d, spec.mask)
    _check_softcap(spec, d)
    if spec.variant.rotated:
        hadamard.check(d, spec.seed)
    return Shape(b, h, k_shape[1], tq, k_shape[2], d)


def _check_softcap(spec: Spec, features: int) -> None:
    if spec.softcap is None:
        return
    scale = spec.softmax_scale(features)
    with np.errstate(all="ignore"):
        cap = np.float32(spec.softcap)
        factors = np.float32(scale) / cap, np.float32(float(cap) * math.log2(math.e))
    if not all(np.isfinite(x) and x >= np.finfo(np.float32).tiny for x in factors):
        raise ValueError(
            "a softcap is positive, with normal float32 numbers scale / cap and cap log2(e) "
            f"(A-22); got {spec.softcap!r} with the softmax scale {scale!r}. Use None for no "
            "cap."
        )


def check_given(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    """ValueError for what is no tensor."""
    for name, x in {"q": q, "k": k, "v": v, "sinks": sinks}.items():
        if not isinstance(x, Tensor) and not (name == "sinks" and x is None):
            raise ValueError(f"{name} is a tensor; got {type(x).__name__}. Use torch.as_tensor.")


def check_tensor(name: str, x: Tensor) -> None:
    """ValueError for anything but a local tensor [B, heads, T, D] in high precision, not empty."""
    if isinstance(x, DTensor):
        raise ValueError(
            f"attention takes local tensors; got {name}, a DTensor. Pass {name}.to_local(), and "
            "amax_group for shared amaxes."
        )
    if x.dtype not in cast.HIGH_PRECISION or x.ndim != 4 or 0 in x.shape:
        raise ValueError(
            f"{name} is [batch, heads, tokens, features] of float32, float16 or bfloat16, none "
            f"of them empty; got {x.dtype} {tuple(x.shape)}."
        )


def check_sinks(sinks: Tensor | None, shape: Shape, device: torch.device) -> None:
    """ValueError for sinks of another shape, dtype or device."""
    if sinks is None:
        return
    if (
        sinks.dtype not in cast.HIGH_PRECISION
        or tuple(sinks.shape) != (shape.heads,)
        or sinks.device != device
    ):
        raise ValueError(
            f"sinks are of float32, float16 or bfloat16, one for each of {shape.heads} query "
            f"heads, on q's device {device}; got {sinks.dtype} {tuple(sinks.shape)} on "
            f"{sinks.device}."
        )


def pair_of(
    documents: Tensor | tuple[Tensor, Tensor] | None,
) -> tuple[Tensor | None, Tensor | None]:
    """(documents of queries, of keys) as they are given.

    ValueError for what is neither a tensor nor two.
    """
    if documents is None:
        return None, None
    pair = documents if isinstance(documents, tuple) else (documents, documents)
    if len(pair) != 2 or not all(isinstance(x, Tensor) for x in pair):
        raise ValueError(
            "documents are integers [B, T], a tensor or a tuple of two, for queries and for "
            f"keys; got {' and '.join(type(x).__name__ for x in pair)}. Give both."
        )
    return pair


def check_documents(
    documents: Tensor | tuple[Tensor, Tensor] | None, shape: Shape
) -> tuple[Tensor | None, Tensor | None]:
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
            f"documents are integers, {list(expected[0])} for queries and {list(expected[1])} "
            f"for keys; got {[(str(x.dtype), tuple(x.shape)) for x in pair]}."
        )
    return pair[0], pair[1]


def without_padding(x: Tensor, documents: Tensor | None) -> Tensor:
    """x [B, heads, T, D] with zeros for tokens of negative documents, whatever their memory holds
    (A-3); padding behind T is left out.
    """
    return (
        x
        if documents is None
        else x.masked_fill((documents[:, : x.shape[2]] < 0)[:, None, :, None], 0.0)
    )


def check_scales(
    scales: dict[str, Tensor] | None, variant: Variant, roles: tuple[str, ...], shape: Shape
) -> dict[str, Tensor]:
    """Given scales by role.

    ValueError for roles that the variant has no scale for; another shape or dtype.
    """
    role_scales, role_names = dict(scales or {}), _with_scales(variant, roles)
    for role, scale in role_scales.items():
        if role not in role_names:
            raise ValueError(
                f"variant {variant.name!r} takes scales for {', '.join(role_names) or 'no role'}; "
                f"got {role!r}. Leave it out."
            )
        expected = scale_shape(variant, role, shape)
        if (
            not isinstance(scale, Tensor)
            or scale.dtype != torch.float32
            or tuple(scale.shape) != expected
        ):
            kind = (
                f"{scale.dtype} {list(scale.shape)}"
                if isinstance(scale, Tensor)
                else type(scale).__name__
            )
            raise ValueError(
                f"a given scale of {role} is float32 {list(expected)}, as its groups; got {kind}."
            )
    return role_scales


def check_seen(
    seen: dict[str, Tensor], variant: Variant, roles: tuple[str, ...], shape: Shape
) -> None:
    """ValueError for observations of roles that have no scale, or several; another shape or
    dtype.
    """
    role_names = [
        role for role in _with_scales(variant, roles) if scale_shape(variant, role, shape) == ()
    ]
    for role, x in seen.items():
        if role not in role_names:
            raise ValueError(
                f"variant {variant.name!r} observes {', '.join(role_names) or 'no role'}; got "
                f"{role!r}. Leave it out."
            )
        if x.dtype != torch.float32 or tuple(x.shape) != (3,):
            raise ValueError(
                f"an observation is float32 [3], a RoleState's seen; got {x.dtype} "
                f"{list(x.shape)} of {role}."
            )


def kept_of(variant: Variant) -> list[str]:
    """The matrices that a backward pass of a variant can keep."""
    if variant.real:
        return []
    if variant.fmt.bits != 8 or variant.backward == "bf16":
        return ["ds"]
    return ["p_codes", "ds"] if variant.granularity == "mx_1x32" else ["p_codes", "ds", "ds_codes"]


def check_kept(keep: Collection[str], variant: Variant) -> None:
    """ValueError for matrices that a backward pass of the variant does not have."""
    matrices = kept_of(variant)
    for name in keep:
        if name not in matrices:
            raise ValueError(
                f"a backward pass of variant {variant.name!r} keeps "
                f"{', '.join(matrices) or 'nothing'}; got {name!r}. Leave it out."
            )


def scale_shape(variant: Variant, role: str, shape: Shape) -> tuple[int, ...]:
    """The shape of a role's scale."""
    if variant.granularity == "tensor" or role not in ("q", "k", "v", "do"):
        return ()
    if variant.granularity == "head":
        return (shape.batch, shape.key_heads, 1, 1)
    heads, tokens = (shape.heads, shape.queries) if role == "q" else (shape.key_heads, shape.keys)
    return (shape.batch, heads, -(-tokens // head_scaling.ROWS), 1)


def _with_scales(variant: Variant, roles: tuple[str, ...]) -> list[str]:
    return (
        []
        if variant.granularity in (None, "mx_1x32")
        else [role for role in roles if _has_scale(variant, role)]
    )


def _has_scale(variant: Variant, role: str) -> bool:
    if role in ("o", "dq", "dk", "dv"):
        return variant.out.bits == 8
    return variant.p_scale == "state" if role in ("s", "ds") else True
