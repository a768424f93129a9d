"""Attention as data: how a kernel quantizes, accumulates, exponentiates and rescales (spec A).

A ``Variant`` is every decision between q, k, v and the output. VARIANTS has those of
FlashAttention-3 and FlashAttention-4, of cuDNN's reference, of the FlashAttention-3 paper,
bfloat16, and real arithmetic. ``Mask`` says which keys a query sees. ``sim.attention`` implements
all of them; a backend implements them or refuses.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from fp8ref.formats import FORMATS
from fp8ref.shared import errors, package_data, registry
from fp8ref.spec.attention.variant import ARITHMETIC as ARITHMETIC
from fp8ref.spec.attention.variant import FULL as FULL
from fp8ref.spec.attention.variant import GRADIENT_ROLES as GRADIENT_ROLES
from fp8ref.spec.attention.variant import OPERAND_FORMATS as OPERAND_FORMATS
from fp8ref.spec.attention.variant import OUT_FORMATS as OUT_FORMATS
from fp8ref.spec.attention.variant import ROLES as ROLES
from fp8ref.spec.attention.variant import Arithmetic as Arithmetic
from fp8ref.spec.attention.variant import Backward as Backward
from fp8ref.spec.attention.variant import Factor as Factor
from fp8ref.spec.attention.variant import Granularity as Granularity
from fp8ref.spec.attention.variant import LogSum as LogSum
from fp8ref.spec.attention.variant import Mask as Mask
from fp8ref.spec.attention.variant import Scores as Scores
from fp8ref.spec.attention.variant import SumOrder as SumOrder
from fp8ref.spec.attention.variant import Tiles as Tiles
from fp8ref.spec.attention.variant import Variant as Variant

__all__ = ["FULL", "VARIANTS", "Mask", "differentiated"]


def _decision(key: str, value: Any) -> Any:
    """A decision as variants.toml has it: "none" is None, formats are names, tiles numbers."""
    if key == "tiles":
        return tuple(Tiles(features=d, full=n, causal=c, local=w) for d, n, c, w in value)
    if key in ("fmt", "out"):
        return FORMATS[value]
    return None if value == "none" else value


VARIANTS = {
    name: Variant(name=name, **{key: _decision(key, value) for key, value in table.items()})
    for name, table in package_data.tables(__file__, "variants").items()
}
"""The variants by name (A-1)."""


Layout = Literal["bhtd", "bthd"]
"""Axes of q, k, v, o and gradients: batch, heads, tokens and features, or tokens before heads."""


def by_name(variant: "str | Variant") -> Variant:
    """The variant of that name; a Variant is itself; ValueError for anything else."""
    return registry.lookup("variant is a Variant or", VARIANTS, variant, Variant)


def differentiated(variant: "str | Variant", backward: Backward) -> Variant:
    """The variant with the gradients of a backward pass: its own, or ``bf16``'s (A-25)."""
    resolved = by_name(variant)
    if backward == "own":
        return resolved
    return dataclasses.replace(resolved, backward=backward)


def heads_first(layout: Layout, q: Any, k: Any, v: Any, *others: Any) -> tuple:
    """The tensors as [B, heads, T, D], with axes 1 and 2 swapped if they are of the layout bthd.

    Raises:   ValueError: an unknown layout; shapes of q, k and v that only the other layout has.
    """
    errors.one_of("layout", layout, get_args(Layout))
    shapes = [tuple(getattr(x, "shape", ())) for x in (q, k, v)]
    heads = 1 if layout == "bhtd" else 2
    if not _fits(shapes, heads) and _fits(shapes, 3 - heads):
        other = "bthd" if layout == "bhtd" else "bhtd"
        raise ValueError(
            f"layout {layout!r} has heads on axis {heads}, tokens on axis {3 - heads}, and the "
            f"heads of k divide those of q; got q {shapes[0]}, k {shapes[1]}, which are of layout "
            f"{other!r}. Pass layout={other!r}."
        )
    return tuple(in_layout(layout, x) for x in (q, k, v, *others))


def in_layout(layout: Layout, x: Any) -> Any:
    """x [B, heads, T, D] in the layout, or back."""
    if layout == "bthd" and len(getattr(x, "shape", ())) == 4:
        return x.swapaxes(1, 2)
    return x


def _fits(shapes: Sequence[tuple[int, ...]], heads: int) -> bool:
    """Whether q, k and v can have heads on this axis."""
    q_shape, k_shape, v_shape = shapes
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4 or 0 in k_shape:
        return False
    return (
        k_shape == v_shape
        and k_shape[0] == q_shape[0]
        and k_shape[3] == q_shape[3]
        and q_shape[heads] % k_shape[heads] == 0
    )


def check_shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    """ValueError, with the remedy, for shapes [B, heads, T, D] that do not belong together."""
    if k[:3] == v[:3] and k[3] == q[3] > v[3]:  # as in multi-head latent attention
        raise ValueError(
            f"v has as many features as q and k; got {q[3]} of q and k, {v[3]} of v. Pad v with "
            f"zeros to {q[3]} features, and cut the output: o[..., :{v[3]}]."
        )
    if not _fits((q, k, v), 1):
        raise ValueError(
            "attention takes q [B, H, Tq, D] and k, v [B, Hkv, Tk, D] with Hkv dividing H; got "
            f"{q}, {k} and {v}."
        )


def check_scales(
    scales: Mapping[str, Any] | None, variant: Variant, roles: tuple[str, ...]
) -> dict[str, Any]:
    """Given scales by role. ValueError for roles that the variant has no scale for (A-12)."""
    by_role, scaled = dict(scales or {}), variant.scaled(roles)
    for role in by_role:
        if role not in scaled:
            raise ValueError(
                f"variant {variant.name!r} takes scales for {', '.join(scaled) or 'no role'}; got "
                f"{role!r}. Leave it out."
            )
    return by_role


def check_result(variant: Variant, tensors: Mapping[str, Any]) -> None:
    """ValueError for the quantized tensors, by role, of a forward pass of another variant, where
    the variant's backward pass reads them.
    """
    if variant.backward != "cast":
        return
    expected = {"q", "k", "v"} | ({"o"} if variant.out.bits == 8 else set())
    # None, or in their own dtype, in high precision
    codes = tensors["q"].codes if "q" in tensors else None
    in_fp8 = codes is not None and codes.dtype.itemsize == 1
    if set(tensors) != expected or in_fp8 != (variant.fmt.bits == 8):
        roles = ", ".join(sorted(tensors, key="qkvo".find)) or "no role"
        raise ValueError(
            f"result is of forward by variant {variant.name!r}; got another's, with tensors of "
            f"{roles}."
        )
