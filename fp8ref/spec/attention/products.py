"""Attention's products as data: operands, and which tensors have codes of their own (Q-13).

scores               q k^T     A-4
values               P v       A-9
grad_v               P^T do    A-15, A-16
grad_probabilities   do v^T
grad_q               dS k
grad_k               dS^T q
"""

from typing import Literal, NamedTuple, get_args

from fp8ref.formats import Format
from fp8ref.spec.attention.variants import Variant

Product = Literal["scores", "values", "grad_v", "grad_probabilities", "grad_q", "grad_k"]
"""A product of attention, forward or backward."""

Phase = Literal["forward", "backward"]
"""A pass of attention."""

SHOWN: dict[Phase, tuple[str, ...]] = {
    "forward": ("q", "k", "v", "s", "p", "o"),
    "backward": ("do", "p", "dv", "ds", "dk", "dq"),
}
"""What a pass makes, in order (A-4 to A-10, A-15): s are the scores, p the cast probabilities."""

PARTS = ("value", "scale", "codes")
"""Arrays of one of these, in order: the tensor, what it is quantized to; p has codes alone."""

Role = Literal["q", "k", "v", "p", "do", "ds"]
"""An operand of a product. p is the cast probabilities, ds the cast gradient of scores."""

PRODUCTS: tuple[Product, ...] = get_args(Product)
"""All products, in the order in which a step first needs them."""

OPERANDS: dict[Product, tuple[Role, Role]] = {
    "scores": ("q", "k"),
    "values": ("p", "v"),
    "grad_v": ("p", "do"),
    "grad_probabilities": ("do", "v"),
    "grad_q": ("ds", "k"),
    "grad_k": ("ds", "q"),
}
"""The operands of each product."""

MEASURED: tuple[Role, ...] = ("q", "k", "v", "do")
"""Roles whose tensors exist whole, which statistics measure: P and dS exist a tile at a time."""

ROWS: tuple[tuple[Product, Role], ...] = tuple(
    (p, role) for p, roles in OPERANDS.items() for role in roles if role in MEASURED
)
"""The operands that are measured, as (product, role)."""

COUNTED: tuple[tuple[Product, Role], ...] = (("values", "p"), ("grad_q", "ds"))
"""The operands that exist a tile at a time, of which a run records the amax and counts alone."""

RECORDED = (*ROWS, *COUNTED)
"""All operands of attention that a run records, as (product, role)."""


class AttentionOperand(NamedTuple):
    """One recorded FP8 operand of one product of one layer's attention."""

    layer: str
    product: Product
    role: Role
    fmt: Format

    @property
    def name(self) -> str:
        """``layer/product/role``, its key in what is recorded."""
        return f"{self.layer}/{self.product}/{self.role}"

    @property
    def counted(self) -> bool:
        """Whether it exists one tile at a time, so that only amax and counts are recorded."""
        return (self.product, self.role) in COUNTED


def formats(product: Product, variant: Variant) -> tuple[Format, Format]:
    """The formats of both operands of a product."""
    first, second = OPERANDS[product]
    return variant.format_of(first), variant.format_of(second)


def along_tokens(product: Product, role: Role) -> bool:
    """Whether MX blocks of q, k, v or do lie along the tokens in this product (A-2, A-16): along
    the axis that it sums over, except those of v, which has the forward pass's codes alone."""
    return role == "v" or product in ("grad_v", "grad_q", "grad_k")


def first_use(product: Product, role: Role, variant: Variant) -> tuple[Product, Role]:
    """The product that first uses a role's codes and scales; other blocks, other codes."""
    blocks = variant.granularity == "mx_1x32"
    if (product, role) in COUNTED:
        return product, role
    return next(
        row
        for row in ROWS
        if row[1] == role and (not blocks or along_tokens(*row) == along_tokens(product, role))
    )


def first_uses(variant: Variant) -> list[tuple[Product, Role]]:
    """The rows of ROWS whose codes and scales no earlier product uses."""
    return [row for row in ROWS if first_use(*row, variant) == row]


def products(variant: Variant) -> tuple[Product, ...]:
    """The products of a step in FP8: two without a backward pass, or with one in bf16."""
    return PRODUCTS if variant.backward in ("exact", "cast") else PRODUCTS[:2]


def planned(layers: list[str], variant: Variant | None) -> list[AttentionOperand]:
    """Every operand that a run records of these layers, in order; [] without FP8."""
    if variant is None or variant.fmt.bits != 8:
        return []
    rows = [row for row in RECORDED if row[0] in products(variant)]
    return [
        AttentionOperand(layer, product, role, variant.format_of(role))
        for layer in layers
        for product, role in rows
    ]


def is_attention(name: str) -> bool:
    """Whether a name of a record, ``layer/product/role``, is of attention and not of a linear."""
    return tuple(name.rsplit("/", 2)[1:]) in RECORDED
