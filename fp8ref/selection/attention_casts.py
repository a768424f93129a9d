"""Which operands of attention are cast, each by itself, as an ablation has them (spec E-9).

casts = of("cudnn", ["layers.0/q", "p"], "model.layers.0.self_attn")     # q and p of that layer
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from fp8ref.selection.linears import matches
from fp8ref.spec.attention import variants as attention
from fp8ref.spec.attention.products import Role
from fp8ref.spec.attention.variants import Variant

ROLES: tuple[Role, ...] = get_args(Role)
"""The operands of attention that an ablation casts: those of its six products."""


@dataclass(frozen=True)
class Casts:
    """The operands of a layer's attention that are cast, and the variant that says how.

    Raises:   ValueError: an unknown role; a variant without one FP8 scale a tensor, or gradients.
    """

    variant: Variant
    roles: frozenset[Role]

    def __post_init__(self) -> None:
        variant = self.variant
        if unknown := sorted(self.roles - set(ROLES)):
            raise ValueError(f"an operand of attention is {', '.join(ROLES)}; got {unknown[0]!r}.")
        if not one_by_one(variant):
            raise ValueError(
                "attention operands need a variant with one FP8 scale per tensor, and gradients; "
                f"got {variant.name!r}. Use 'cudnn'."
            )


def one_by_one(variant: Variant) -> bool:
    """Whether operands are cast one by one under a variant: it has one FP8 scale for a tensor, of P
    a state's, and casts in its backward pass.
    """
    return (
        variant.fmt.bits == 8
        and variant.granularity == "tensor"
        and variant.backward == "cast"
        and variant.p_scale == "state"
    )


def of(variant: str, operands: Iterable[str], layer: str) -> Casts:
    """The casts of one layer, of operands such as "p", of every layer, or "layers.0/q", of those
    that a pattern names (R-3).
    """
    roles = set()
    for operand in operands:
        pattern, slash, role = operand.rpartition("/")
        if not slash or matches(pattern, layer):
            roles.add(role)
    return Casts(attention.by_name(variant), frozenset(roles))  # type: ignore[arg-type]  # checked there
