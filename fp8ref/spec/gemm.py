"""How one GEMM's operands are cast, and how it is computed: a part of a recipe (spec L-4, R-1)."""

from dataclasses import dataclass
from typing import Literal, get_args

from fp8ref.formats import FP4_FORMATS, FP8_FORMATS, NARROW_FORMATS, QUANTIZED_FORMATS, Format
from fp8ref.policy import POLICIES, ScalePolicy
from fp8ref.shared import errors
from fp8ref.shared.errors import require
from fp8ref.spec import epilogue, granularity
from fp8ref.spec.delayed import DelayedScaling
from fp8ref.spec.rotation import Rotation

__all__ = ["CastSpec", "GemmSpec"]

Rounding = Literal["nearest_even", "stochastic", "stochastic_8"]
"""How an operand is rounded (C-2)."""

STOCHASTIC = ("stochastic", "stochastic_8")
"""The roundings of operands that take a seed (C-2)."""

MX_BLOCKS = ("mx_1x32", "mx_32x32")
"""The granularities of e8m0 scales that are numbers of MX (S-6)."""


@dataclass(frozen=True, kw_only=True)
class CastSpec:
    """How one operand of one GEMM becomes FP8 or FP4: by its own amax (``delayed`` None), or by
    those of the steps before.

    rotation    of its blocks along the reduced axis, before it is scaled (spec S-23); None: none.
    rounding    ``nearest_even``; ``stochastic``, or with 8 random bits ``stochastic_8``, by a seed
                (C-2).

    Raises:     ValueError: an unsigned fmt, or one of more than 8 bits, an unknown granularity or
                rounding, delayed scaling that is not tensorwise or by another policy than its own,
                or with a rotation.
    """

    fmt: Format
    granularity: str = "tensorwise"
    policy: ScalePolicy = POLICIES["torchao"]
    delayed: DelayedScaling | None = None
    rotation: Rotation | None = None
    rounding: Rounding = "nearest_even"

    def __post_init__(self) -> None:
        text = f"an operand's fmt is one of {', '.join(NARROW_FORMATS)}; got {self.fmt.name!r}."
        errors.require(self.fmt.signed and self.fmt.bits <= 8, text)
        granularity.by_name(self.granularity)
        errors.one_of("an operand's rounding", self.rounding, get_args(Rounding))
        if self.delayed is not None and (
            self.granularity != "tensorwise" or self.policy != self.delayed.policy or self.rotation
        ):
            raise ValueError(
                "delayed scaling is tensorwise and uses its own policy "
                f"({self.delayed.policy.name!r}), without a rotation; got {self.granularity!r} and "
                f"policy {self.policy.name!r}, rotation {self.rotation}."
            )

    @property
    def simulated(self) -> bool:
        """Whether the simulator alone has it: a format that is neither FP8's nor e2m1fn in the
        blocks and by the scales that backends emulate (spec R-9)."""
        if self.fmt.name in FP8_FORMATS:
            return self.policy.two_level is not None
        rule = self.policy.two_level
        blocks = MX_BLOCKS if rule is None else rule.granularities
        scaled = self.policy.e8m0 is not None if rule is None else rule.tensorwise
        fits = self.fmt.name in FP4_FORMATS and self.granularity in blocks and scaled
        return not fits

    @property
    def stochastic(self) -> bool:
        """Whether it rounds by a seed."""
        return self.rounding in STOCHASTIC

    @property
    def plain(self) -> bool:
        """Whether its codes depend on the tensor alone, whichever GEMM takes them: it is neither
        rotated along the reduced axis nor rounded by the seed of a GEMM."""
        return self.rotation is None and not self.stochastic

    @property
    def pairs(self) -> bool:
        """Whether its codes by scales of rows and by scales of columns are made of each other (spec
        P-6): the scales are powers of two and saturate no number. One above fmt.max would be lost
        in the finer codes: a scale rounded up, or that of an infinite amax."""
        policy = self.policy
        specials = {policy.zero, policy.infinite, policy.nan}
        computed = (policy.ratio, policy.overflow, *specials) == ("max/amax", "inf", "compute")
        by_powers = policy.power_of_two is not None and self.plain
        return self.granularity == "rowwise" and computed and by_powers


@dataclass(frozen=True, kw_only=True)
class GemmSpec:
    """One GEMM: both operands FP8, or neither (high precision, the default); or one, for studies:
    it is cast and dequantized, and the GEMM is in high precision (spec L-4).

    accumulate  ``fast`` or ``slow`` tensor-core accumulation (spec G-7); required with two FP8
                operands, None without.
    epilogue    the name of one of ``epilogue.EPILOGUES`` that takes no bias.

    Raises:     ValueError: operands neither FP8 nor FP4, or whose rotations differ (spec S-23);
                accumulate or epilogue that do not go with them.
    """

    a: CastSpec | None = None
    b: CastSpec | None = None
    accumulate: Literal["fast", "slow"] | None = None
    epilogue: str = "scale_then_round"

    def __post_init__(self) -> None:
        for cast in filter(None, (self.a, self.b)):
            errors.one_of("an operand's fmt", cast.fmt.name, QUANTIZED_FORMATS)
        allowed = ("fast", "slow") if self.fp8 else (None,)
        if self.accumulate not in allowed:
            kind = "an FP8" if self.fp8 else "a high-precision"
            raise ValueError(
                f"accumulate of {kind} GEMM is one of {allowed}; got {self.accumulate!r}."
            )
        rotations = [None if cast is None else cast.rotation for cast in (self.a, self.b)]
        text = f"both operands of a GEMM have one rotation, or none; got {rotations} (S-23)."
        require(rotations[0] == rotations[1], text)
        text = f"linears have no bias; epilogue {self.epilogue!r} has. Use 'scale_then_round'."
        require(epilogue.by_name(self.epilogue).bias is None, text)
        if not self.fp8 and self.epilogue != "scale_then_round":
            raise ValueError(
                f"high precision has no scales, so no epilogue {self.epilogue!r}. Leave it out."
            )

    @property
    def operands(self) -> tuple[CastSpec | None, CastSpec | None]:
        """The casts of a and b."""
        return self.a, self.b

    @property
    def fp8(self) -> bool:
        """Whether its operands are FP8, so that tensor cores can multiply their codes."""
        return self.a is not None and self.b is not None

    @property
    def emulated(self) -> bool:
        """Whether an operand is in FP4, which no backend multiplies: it is dequantized (R-9)."""
        return any(cast is not None and cast.fmt.name in FP4_FORMATS for cast in (self.a, self.b))

    @property
    def one_sided(self) -> bool:
        """Whether one operand alone is cast to FP8 (spec L-4)."""
        return (self.a is None) != (self.b is None)

    @property
    def powers_of_two(self) -> bool:
        """Whether every scale of its operands is a power of two (spec S-4, S-14)."""
        return all(
            cast is not None and cast.policy.power_of_two is not None for cast in (self.a, self.b)
        )

    @property
    def rowwise(self) -> bool:
        """Whether an operand is rowwise: the output is then rounded to bfloat16 first (G-8)."""
        return any(cast is not None and cast.granularity == "rowwise" for cast in (self.a, self.b))
