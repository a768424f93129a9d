"""Scale policies as data: every decision between an amax and a scale (spec S-3, S-4, S-9 to
S-15, S-17, S-20 to S-22), and the policies of libraries by name.

One dataclass holds the decisions, and the policy of each library is one value of it. ``sim.scales``
implements all of them; a backend implements some and refuses the others. Code asks for decisions,
never for a policy's name, so a policy that other values of the same decisions express is one table
of policies.toml.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from fp8ref.formats import BFLOAT16, E4M3FN, FLOAT32, FORMATS, Format
from fp8ref.shared import errors, package_data, registry

__all__ = ["POLICIES"]

Ratio = Literal[
    "max/amax",
    "max*(1/amax)",
    "amax/max",
    "amax*(1/max)",
    "exponents",
    "exponents_up",
    "exponents_even",
    "one",
]
"""What a policy computes first: a scale, a scale_inv (the others), or nothing (``one``; S-21)."""

Inverse = Literal["reciprocal", "amax*(1/max)"]
"""What a policy that computes a scale returns as its scale_inv."""

Special = Literal["compute", "one", "keep", "keep_inverse"]
"""The scale of a zero, infinite or NaN amax.

compute       the result of the arithmetic
one           scale 1
keep          the previous scale
keep_inverse  RN32(1 / previous scale)
"""

Overflow = Literal["inf", "float32_max", "bfloat16_max"]
"""The scale that replaces one above float32's range: infinity, or a dtype's largest number."""

PowerOfTwo = Literal["mask", "exp2_log2", "cut", "up"]
"""How a scale is rounded to a power of two: by its bits, by a float32 log2 (S-4), cut or up (S-20).
"""

Stored = Literal["scale", "scale_inv"]
"""Which of the two a cast applies: it multiplies by ``scale``, or divides by ``scale_inv``."""


@dataclass(frozen=True, kw_only=True)
class E8M0Rule:
    """The scales that are not the reciprocal of an e8m0 scale_inv (S-14): where scale_inv is
    2^-127, code 0, and where the amax is NaN.

    scale_of_code_0  where scale_inv is 2^-127; arithmetic would give 2^127.
    scale_of_nan     ``zero``, ``nan``: scale_inv is NaN, and scale 0 or NaN; ``as_infinite``,
                     ``as_zero``: both are those of an infinite or a zero amax.
    infinite         an infinite amax: ``computed``, with k at most 127; ``as_nan``.
    """

    scale_of_code_0: float
    scale_of_nan: Literal["zero", "nan", "as_infinite", "as_zero"]
    infinite: Literal["computed", "as_nan"] = "computed"


@dataclass(frozen=True, kw_only=True)
class TwoLevel:
    """Block scales that are numbers of an 8-bit format, under float32 ones of the tensor (S-22).

    tensor     the scale of the tensor: ``encode``, multiplies into the range of the blocks' scales
               and is made first; ``decode``, multiplies out of it and is made first; ``none``:
               there is none, and the blocks' scales are the only ones.
    smallest   the least scale of a block: a smaller one becomes it; 0 has no effect.
    block_fmt  the format of the blocks' scales.
    error      four over six: the sum, ``mae`` or ``mse``, by which a block is scaled to 4 instead
               of 6 where that makes it smaller; "": all are scaled to 6.
    largest    the scale of a block that the largest amax has, if it is scaled to 6.
    error_unit
               ``input``: errors of dequantized numbers; ``block``: of ``decode(code) *
               scale_inv`` as x times the tensor's scale.
    tensor_granularity
               the elements that share a scale of the tensor: all, or those of a row.

    Raises:    ValueError: an unknown word, a smallest outside [0, 1), a block_fmt other than
               e4m3fn, an error, a largest or rows without ``encode``, a unit without an error.
    """

    tensor: Literal["encode", "decode", "none"]
    smallest: float = 0.0
    block_fmt: Format = E4M3FN
    error: Literal["", "mae", "mse"] = ""
    largest: Literal[448, 256] = 448
    error_unit: Literal["input", "block"] = "input"
    tensor_granularity: Literal["tensorwise", "rowwise"] = "tensorwise"

    def __post_init__(self) -> None:
        errors.one_of("the tensor's scale", self.tensor, ("encode", "decode", "none"))
        encodes = self.tensor == "encode"
        errors.one_of("error", self.error, ("", "mae", "mse") if encodes else ("",))
        errors.one_of("largest", self.largest, (448, 256) if encodes else (448,))
        errors.one_of("error_unit", self.error_unit, ("input", "block")[: 1 + bool(self.error)])
        shared = ("tensorwise", "rowwise")[: 1 + encodes]
        errors.one_of("tensor_granularity", self.tensor_granularity, shared)
        if not 0 <= self.smallest < 1 or self.block_fmt != E4M3FN:
            raise ValueError(
                f"smallest is in [0, 1), block_fmt e4m3fn; got {self.smallest}, {self.block_fmt}."
            )

    @property
    def tensorwise(self) -> bool:
        """Whether all blocks share a tensor's scale, or there is none: not one of each row."""
        return self.tensor_granularity == "tensorwise"

    @property
    def granularities(self) -> tuple[str, ...]:
        """Those of its blocks: a square has no scale of a row."""
        return ("nvfp4_1x16", "nvfp4_16x16")[: 1 + self.tensorwise]


def _changed(decisions: "ScalePolicy | E8M0Rule", besides: tuple[str, ...]) -> list[str]:
    """The decisions, besides some, that are not the default."""
    # of the class, where a compiler that traces it finds formats
    defaults = type(decisions)
    return [
        f.name
        for f in dataclasses.fields(decisions)
        if f.name not in besides and getattr(decisions, f.name) != getattr(defaults, f.name)
    ]


@dataclass(frozen=True, kw_only=True)
class ScalePolicy:
    """The decisions from amax to scale, in this order (S-9): floor by eps; ratio; overflow; power
    of two; special amaxes. Of a ratio that makes scale_inv: floor; ratio; one_below; factor;
    scale_dtype; power of two (S-17, S-20).

    eps           smaller amaxes are replaced by it, an exact real number, or by RN32(eps) where the
                  ratio makes scale_inv; 0 has no effect.
    margin        powers of two of room: fmt.max * 2^-margin takes the place of fmt.max.
    ratio         ``max/amax``: RN32(fmt.max / amax); ``max*(1/amax)``: RN32(fmt.max * RN32(1 /
                  amax)). The others make scale_inv: ``amax/max``: RN32(amax / fmt.max);
                  ``amax*(1/max)``: RN32(amax * RN32(1 / fmt.max)); ``exponents``: 2^(floor(log2
                  amax) - floor(log2 fmt.max)); ``exponents_up``: the same by ceil(log2 amax);
                  ``exponents_even``: the same of amax rounded to the mantissa bits of fmt, ties up.
                  ``one``: scale 1 for every amax (S-21).
    power_of_two  None; ``mask``: the largest power of two not above the scale; ``exp2_log2``: the
                  same by way of RN32(log2). Where the ratio makes scale_inv, scale_inv is rounded
                  up instead, which rounds the scale down; ``cut`` clears its mantissa, a NaN's
                  too; ``up`` rounds it up by its bits, without an E8M0Rule.
    inverse       of a scale: ``reciprocal``: scale_inv is RN32(1 / scale); ``amax*(1/max)``: it is
                  made from the amax by that ratio, and the tensor multiplied by scale (S-20).
    overflow      the scale that replaces one above float32's range.
    zero, infinite, nan
                  the scale of such an amax: ``compute``: the result of the arithmetic; ``one``:
                  scale 1; ``keep``: the previous scale; ``keep_inverse``: RN32(1 / previous scale).
    stored        ``scale``: tensors are multiplied by scale. ``scale_inv``: they are divided by
                  scale_inv, and a delayed state holds scale_inv.
    compute       the dtype of that division: tensor, scale_inv and quotient are rounded to it
                  (S-13).
    e8m0          for the ratios that make scale_inv: its values are those of e8m0fnu. None: they
                  are float32 numbers, and scale is RN32(1 / scale_inv) (S-17).
    one_below     of a scale_inv: a smaller one becomes ``replaced``; 0 has no effect (S-20).
    factor        of a scale_inv: it is multiplied by RN32(factor), in float32 (S-20).
    scale_dtype   of a scale_inv: it is rounded to this dtype (S-20).
    two_level     scales of blocks under a scale of the tensor (S-22): no other decision goes with
                  it.

    Raises:       ValueError: eps outside [0, 1), margin not an integer from 0 to 64, an unknown
                  word, or decisions that contradict each other.
    """

    name: str
    eps: float = 0.0
    margin: int = 0
    ratio: Ratio = "max/amax"
    inverse: Inverse = "reciprocal"
    power_of_two: PowerOfTwo | None = None
    overflow: Overflow = "inf"
    zero: Special = "compute"
    infinite: Special = "compute"
    nan: Special = "compute"
    stored: Stored = "scale"
    compute: Format = FLOAT32
    e8m0: E8M0Rule | None = None
    one_below: float = 0.0
    replaced: float = 1.0
    factor: float = 1.0
    scale_dtype: Format = FLOAT32
    two_level: TwoLevel | None = None

    # of each policy, but no fields: equal policies have equal ones
    _floored: ClassVar[bool]
    _backed: ClassVar[bool]

    def __post_init__(self) -> None:
        self._one_of("ratio", Ratio)
        self._one_of("inverse", Inverse)
        self._one_of("overflow", Overflow)
        self._one_of("stored", Stored)
        for key in ("zero", "infinite", "nan"):
            self._one_of(key, Special)
        if self.power_of_two not in (None, *get_args(PowerOfTwo)):
            raise ValueError(
                "power_of_two is None, 'mask', 'exp2_log2', 'cut' or 'up'; got "
                f"{self.power_of_two!r}."
            )
        if not 0 <= self.eps < 1:
            raise ValueError(f"eps must be in [0, 1); got {self.eps}.")
        errors.integer("margin", self.margin, 0, 64)
        if self.compute not in (FLOAT32, BFLOAT16) or (
            self.compute != FLOAT32 and self.stored == "scale"
        ):
            raise ValueError(
                f"compute is float32, or bfloat16 with stored='scale_inv'; got {self.compute}, "
                f"stored={self.stored!r}."
            )
        if self.e8m0 is not None and not self.makes_scale_inv:
            raise ValueError(
                f"e8m0 needs ratio 'amax/max', 'amax*(1/max)' or exponents; got {self.ratio!r}."
            )
        if self.makes_scale_inv:
            self._check_scale_inv()
        elif self.power_of_two in ("cut", "up") or any(
            getattr(self, key) != getattr(ScalePolicy, key) for key in _OF_SCALE_INV
        ):
            raise ValueError(
                "power_of_two 'cut', one_below, factor and scale_dtype need a ratio that makes "
                f"scale_inv, and so do replaced and 'up'; got ratio={self.ratio!r}, "
                f"power_of_two={self.power_of_two!r}, one_below={self.one_below}, "
                f"replaced={self.replaced}, factor={self.factor}, scale_dtype={self.scale_dtype}."
            )
        if self.unscaled or self.two_level is not None:
            own = "ratio" if self.two_level is None else "two_level"
            if others := _changed(self, besides=("name", own)):
                raise ValueError(
                    f"a policy with {own} {getattr(self, own)!r} takes no other decision; got "
                    f"{', '.join(others)}. Leave them out."
                )
        # Each cast asks. A compiler that traces one cannot enter the lock of cached_property.
        object.__setattr__(self, "_floored", self._is_floored_quotient())
        object.__setattr__(self, "_backed", self._is_in_backends())

    def _one_of(self, key: str, allowed) -> None:
        errors.one_of(key, getattr(self, key), get_args(allowed))

    def _check_scale_inv(self) -> None:
        """Refuse decisions that a ratio which makes scale_inv would ignore."""
        if (
            self.scale_dtype not in (FLOAT32, BFLOAT16)
            or not 0 < self.factor < 2
            or not 0 <= self.one_below < 1
        ):
            raise ValueError(
                "scale_dtype is float32 or bfloat16, factor in (0, 2), one_below in [0, 1); got "
                f"{self.scale_dtype}, {self.factor}, {self.one_below}."
            )
        if self.e8m0 is None:
            if self.of_exponents or self.power_of_two == "mask":
                raise ValueError(
                    "a ratio of exponents and power_of_two 'mask' need an E8M0Rule; got ratio="
                    f"{self.ratio!r}, power_of_two={self.power_of_two!r}, e8m0=None."
                )
        elif self.power_of_two not in (
            allowed := ("mask", "exp2_log2")
            if self.ratio == "exponents" or not self.of_exponents
            else ("mask",)
        ):
            need = " or ".join(map(repr, allowed))
            raise ValueError(
                f"e8m0 with ratio {self.ratio!r} needs power_of_two {need}; got "
                f"{self.power_of_two!r}."
            )
        left_out = ["margin", "overflow", "zero", "infinite", "nan", "inverse"]
        left_out += ["eps"] if self.of_exponents else []
        if self.e8m0 is not None:
            left_out += ["stored", *_OF_SCALE_INV]
        for key in left_out:
            if getattr(self, key) != getattr(_PLAIN, key):
                raise ValueError(
                    f"ratio {self.ratio!r} makes scale_inv, so {key} is {getattr(_PLAIN, key)!r}; "
                    f"got {getattr(self, key)!r}."
                )

    @property
    def divides_in(self) -> Format | None:
        """The dtype in which a cast divides by scale_inv (S-13); None: it multiplies by scale."""
        return self.compute if self.stored == "scale_inv" else None

    @property
    def of_exponents(self) -> bool:
        """Whether scale_inv is made of the amax's exponent alone."""
        return self.ratio in ("exponents", "exponents_up", "exponents_even")

    @property
    def makes_scale_inv(self) -> bool:
        """Whether the ratio makes scale_inv, of which scale is then the reciprocal (S-14, S-17)."""
        return self.ratio in ("amax/max", "amax*(1/max)") or self.of_exponents

    @property
    def unscaled(self) -> bool:
        """Whether every scale is 1 (S-21)."""
        return self.ratio == "one"

    @property
    def keeps(self) -> bool:
        """True if the policy needs the previous scale, because it keeps it for some amax (S-11)."""
        return any(
            special in ("keep", "keep_inverse") for special in (self.zero, self.infinite, self.nan)
        )

    @property
    def clause(self) -> str:
        """The clause that decides its scales: a narrow one, or S-9, the general one."""
        if self.unscaled:
            return "S-21"
        if self.two_level is not None:
            return "S-22"
        if not self.in_backends and (
            self.makes_scale_inv or self.overflow == "bfloat16_max" or self.inverse != "reciprocal"
        ):
            return "S-20"
        if self.e8m0 is not None:
            return "S-14"
        if self.makes_scale_inv:
            return "S-17"
        if self.stored == "scale_inv":
            return "S-13"
        if self.ratio == "max*(1/amax)":
            return "S-15"
        if self.floored_quotient:
            return "S-3" if self.power_of_two is None else "S-4"
        return "S-9"

    @property
    def floored_quotient(self) -> bool:
        """True if only eps and power_of_two may differ from policy ``torchao``."""
        return self._floored

    def _is_floored_quotient(self) -> bool:
        return not _changed(self, besides=("name", "eps", "power_of_two"))

    @property
    def in_backends(self) -> bool:
        """Whether the backends have its decisions: ``floored_quotient``, and S-14's and S-17's.
        They refuse the others, and some eps (``spec.support``)."""
        return self._backed

    def _is_in_backends(self) -> bool:
        if not self.makes_scale_inv:
            return self.floored_quotient
        # Every other decision, one that is added later too, is the default in the backends.
        if _changed(self, besides=("name", "eps", "ratio", "power_of_two", "e8m0")):
            return False
        if self.e8m0 is None:
            return self.power_of_two is None
        plain = self.ratio in ("amax/max", "amax*(1/max)") or (
            self.ratio == "exponents" and self.power_of_two == "mask"
        )
        plain = plain and self.e8m0.scale_of_nan != "as_zero"
        return plain and not _changed(self.e8m0, besides=("scale_of_code_0", "scale_of_nan"))

    @property
    def finite_quotient(self) -> bool:
        """True if it decides as ``te_current``: RN32(max / amax), at most float32's largest number,
        and scale 1 for zero, infinite and NaN amaxes. The backends' attention has it too."""
        return dataclasses.replace(self, name="") == _FINITE


_OF_SCALE_INV = ("one_below", "replaced", "factor", "scale_dtype")
_PLAIN = ScalePolicy(name="")


def _decision(key: str, value: Any) -> Any:
    """A decision as policies.toml has it: formats by name, and "2^n" for a power of two."""
    if isinstance(value, dict):
        kind = E8M0Rule if key == "e8m0" else TwoLevel
        return kind(**{name: _decision(name, each) for name, each in value.items()})
    if isinstance(value, str) and value.startswith("2^"):
        return 2.0 ** int(value[2:])
    return FORMATS[value] if key in ("compute", "scale_dtype") else value


_TABLES = package_data.tables(__file__, "policies")
SUMMARIES: dict[str, str] = {name: table.pop("summary") for name, table in _TABLES.items()}
"""{policy: its description in a line}."""

_EVERY = {
    name: ScalePolicy(name=name, **{key: _decision(key, value) for key, value in table.items()})
    for name, table in _TABLES.items()
}
_FINITE = dataclasses.replace(_EVERY["te_current"], name="")

POLICIES = {name: policy for name, policy in _EVERY.items() if policy.two_level is None}
"""The scale policies by name (S-3, S-4, S-9 to S-15, S-17, S-20)."""


UNSCALED = ScalePolicy(name="unscaled", ratio="one")
"""A cast without a scale (S-21): what a rule of a config names to show why scales are needed. Not
among ``POLICIES``, which are those of libraries."""

FP4_POLICIES = {name: policy for name, policy in _EVERY.items() if policy.two_level is not None}
"""The scale policies of 4-bit formats whose block scales are not a function of the block's amax
alone, by name (S-22). The backends have those without scales of rows. Not among ``POLICIES``, whose
scales are made from one amax; those of MX serve 4-bit formats too."""


def by_name(policy: "str | ScalePolicy") -> ScalePolicy:
    """The policy of that name; a ScalePolicy is itself; ValueError for anything else."""
    return registry.lookup(
        "policy is a ScalePolicy or", POLICIES | FP4_POLICIES, policy, ScalePolicy
    )
