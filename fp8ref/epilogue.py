"""What happens between a GEMM's accumulator and its output, as data (SEMANTICS G-4, G-5, G-14, G-15)."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """The order of scales, roundings and bias.

    scale        ``each``: RN32(RN32(acc * scale_inv_a) * scale_inv_b); ``product``: RN32(acc * RN32(scale_inv_a * scale_inv_b)).
    round_first  whether the accumulator is rounded to the output dtype before it is scaled, and so the output twice.
    bias         None: none is taken; ``before_round``: added in float32 to what is then rounded; ``after_round``: added in the output dtype.
    """

    name: str
    scale: Literal["each", "product"] = "each"
    round_first: bool = False
    bias: Literal["before_round", "after_round"] | None = None

    def __post_init__(self) -> None:
        if self.scale not in ("each", "product"):
            raise ValueError(f"scale is 'each' or 'product'; got {self.scale!r}.")
        if self.bias not in (None, "before_round", "after_round"):
            raise ValueError(f"bias is None, 'before_round' or 'after_round'; got {self.bias!r}.")


EPILOGUES = {
    e.name: e
    for e in (
        Epilogue(name="scale_then_round"),
        Epilogue(name="product_then_round", scale="product"),
        Epilogue(name="unit_round_scale_round", scale="product", round_first=True),
        Epilogue(name="round_then_bias", bias="after_round"),
        Epilogue(name="bias_then_round", bias="before_round"),
    )
}


def by_name(epilogue: "str | Epilogue") -> Epilogue:
    """The epilogue of that name; an Epilogue is itself."""
    if isinstance(epilogue, Epilogue):
        return epilogue
    if not isinstance(epilogue, str) or epilogue not in EPILOGUES:
        raise ValueError(f"epilogue is an Epilogue or one of {', '.join(EPILOGUES)}; got {epilogue!r}.")
    return EPILOGUES[epilogue]
