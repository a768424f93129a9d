"""Delayed scaling of attention as data: which tensors have a state, its format (A-12, A-19)."""

from collections.abc import Mapping

from fp8ref.formats import Format
from fp8ref.spec.attention.variants import Variant
from fp8ref.spec.delayed import DELAYED, DelayedScaling

Casts = Mapping[str, tuple[Format, DelayedScaling]]
"""Role -> its format, and how its scale comes from past amaxes."""


def roles(variant: Variant) -> dict[str, Format]:
    """Roles of a variant whose scale is one number, with their states' formats; {} without any.

    >>> from fp8ref.spec.attention.variants import VARIANTS
    >>> list(roles(VARIANTS["cudnn"]))
    ['q', 'k', 'v', 's', 'o', 'do', 'ds', 'dq', 'dk', 'dv']
    >>> roles(VARIANTS["mxfp8"])
    {}
    """
    if variant.fmt.bits != 8 or variant.granularity != "tensor":
        return {}
    return {role: variant.format_of(role) for role in variant.scaled(variant.roles)}


def casts(
    variant: Variant, config: DelayedScaling = DELAYED["delayed"]
) -> dict[str, tuple[Format, DelayedScaling]]:
    """Every role of ``roles`` under one delayed scaling.

    Raises:   ValueError: a variant without such roles.
    """
    formats = roles(variant)
    if not formats:
        raise ValueError(
            f"delayed scaling keeps one scale of a tensor; variant {variant.name!r} has scales of "
            f"{variant.granularity or 'no tensor'}. Use 'cudnn', or dynamic scaling."
        )
    return {role: (fmt, config) for role, fmt in formats.items()}
