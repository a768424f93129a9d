"""Epilogues as data: the scales, roundings and bias between a GEMM's accumulator and its output
(spec G-4, G-5, G-14, G-15, G-18).

EPILOGUES holds those of recipes, by name. ``sim.gemm.finish`` implements every ``Epilogue``.
"""

from dataclasses import dataclass
from typing import Literal

from fp8ref.shared import errors, package_data, registry
from fp8ref.spec import support
from fp8ref.spec.granularity import block_of

Scale = Literal["each", "b_first", "product"]
"""How both scale_inv are applied: that of a first, that of b first, or their product at once."""

Rounding = Literal["nearest_even", "toward_zero"]
"""How results are rounded to the output dtype."""

Bias = Literal["before_round", "fused", "after_round"]
"""When a bias is added: before the rounding, fused with the last product, or after the rounding."""

SCALES: tuple[Scale, ...] = ("each", "b_first", "product")
"""The values of ``Scale``."""

BIASES: tuple[Bias, ...] = ("before_round", "fused", "after_round")
"""The values of ``Bias``."""

ROUNDINGS: tuple[Rounding, ...] = ("nearest_even", "toward_zero")
"""The values of ``Rounding``."""


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """The order of scales, roundings and bias.

    scale        ``each``: RN32(RN32(acc * scale_inv_a) * scale_inv_b); ``b_first``: that of b
                 first, then that of a; ``product``: RN32(acc * RN32(scale_inv_a * scale_inv_b)).
    round_first  whether the accumulator is rounded to the output dtype before it is scaled; the
                 output is then rounded twice.
    bias         None: no bias; ``before_round``: added in float32, then the sum is rounded;
                 ``fused``: the same, in one rounding with the last product; ``after_round``: added
                 in the output dtype.
    rounding     used for every rounding to the output dtype: ``nearest_even`` or ``toward_zero``.

    Raises:      ValueError: an unknown word.
    """

    name: str
    scale: Scale = "each"
    round_first: bool = False
    bias: Bias | None = None
    rounding: Rounding = "nearest_even"

    def __post_init__(self) -> None:
        errors.one_of("scale", self.scale, SCALES)
        errors.one_of("bias", self.bias, (None, *BIASES))
        if not isinstance(self.round_first, bool):
            raise ValueError(f"round_first is True or False; got {self.round_first!r}.")
        errors.one_of("rounding", self.rounding, ROUNDINGS)


EPILOGUES = {
    name: Epilogue(name=name, **fields)
    for name, fields in package_data.tables(__file__, "epilogues").items()
}
"""The epilogues that recipes choose among, by name (G-4, G-5, G-14, G-15)."""


def by_name(epilogue: "str | Epilogue") -> Epilogue:
    """The epilogue of that name; an Epilogue is itself; ValueError for anything else."""
    return registry.lookup("epilogue is an Epilogue or", EPILOGUES, epilogue, Epilogue)


def check_pair(epilogue: str, backend: support.Backend, a: str, b: str) -> int | None:
    """``granularity.block_of`` of granularities a and b, if a backend runs them under an epilogue.

    Raises:   ValueError: an epilogue that the backend lacks, or that block scales cannot have;
              granularities that do not go together.
    """
    support.require("epilogues", backend, epilogue)
    block = block_of(a, b)
    if block is not None and epilogue == "unit_round_scale_round":
        raise ValueError(
            f"epilogue {epilogue!r} scales a rounded sum over all of K; block scales have none. "
            "Use 'scale_then_round'."
        )
    return block
