"""How a library quantizes a weight, as data.

A rule is a format, what shares a scale, a policy, and two decisions that policies do not have: the
dtype that is quantized, and the scale that codes are made by.

``by_name`` takes the name of a policy with a granularity behind it: ``vllm_block``,
``sglang_group``, ``torchao_rowwise``.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fp8ref import formats
from fp8ref.formats import BFLOAT16, E2M1FN, E4M3FN, FLOAT16, FLOAT32, Format
from fp8ref.policy import FP4_POLICIES, POLICIES, ScalePolicy
from fp8ref.shared import errors, package_data, registry
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Quantized

__all__ = ["GRANULARITIES", "WeightRule", "by_name"]

GRANULARITIES: dict[str, str] = package_data.tables(__file__, "granularities")
"""{ending of a rule's name: its granularity}."""

SOURCES = {f.name: f for f in (FLOAT32, BFLOAT16, FLOAT16)}
"""The dtypes that are quantized, by name."""


@dataclass(frozen=True, kw_only=True)
class WeightRule:
    """How a weight [N, K] is quantized.

    source    the dtype that is quantized: weights are rounded to it first.
    codes_by  the scale that codes are made by: the ``stored`` one, or of a policy that rounds its
              scale to a power of two the ``unrounded`` one, which is a fault of libraries.
    axis      the reduced one: -1, or 0, the blocks of the transpose.

    Raises:   ValueError: ``unrounded`` with a policy that rounds no scale; another axis or source.
    """

    fmt: Format = E4M3FN
    granularity: str
    policy: ScalePolicy
    source: Format = FLOAT32
    codes_by: Literal["stored", "unrounded"] = "stored"
    axis: int = -1

    def __post_init__(self) -> None:
        errors.one_of("codes_by", self.codes_by, ("stored", "unrounded"))
        errors.one_of("the reduced axis", self.axis, (-1, 0))
        errors.one_of("the dtype that is quantized", self.source, SOURCES.values())
        if self.codes_by == "unrounded":
            unrounded(self.policy)

    @property
    def name(self) -> str:
        """As ``by_name`` takes it, with the dtype that is quantized."""
        ending = next(end for end, g in GRANULARITIES.items() if g == self.granularity)
        return f"{self.policy.name}_{ending}:{self.source.name}"

    def quantize(self, weight) -> Quantized:
        """Codes and scales of a weight [N, K] by the simulator, as ``sim.quantize.scaling``'s.

        Order:    rounded to ``source``, to nearest even; then as ``scaling.quantize``.
        Raises:   ValueError: as there.
        """
        x = np.asarray(weight).astype(np.float32)
        x = x if self.source == FLOAT32 else cast.round_to(x, self.source)
        quantized = self._by(x, self.policy)
        if self.codes_by == "stored":
            return quantized
        return quantized._replace(codes=self._by(x, unrounded(self.policy)).codes)

    def _by(self, x: np.ndarray, policy: ScalePolicy) -> Quantized:
        return scaling.quantize(
            x, self.fmt, granularity=self.granularity, policy=policy, axis=self.axis, ragged=True
        )


def unrounded(policy: ScalePolicy) -> ScalePolicy:
    """The policy that does not round its scale to a power of two.

    Raises:   ValueError: it rounds none, or has only the exponent of the amax.
    """
    errors.require(
        policy.power_of_two is not None and not policy.of_exponents,
        f"codes by an unrounded scale need a policy that rounds one to a power of two; got "
        f"{policy.name!r}.",
    )
    return dataclasses.replace(policy, power_of_two=None, e8m0=None)


def by_name(name: str, fmt: Format | str | None = None) -> WeightRule:
    """The rule of a name: a policy, ``_``, an ending of ``GRANULARITIES``, and ``:`` with the dtype
    that is quantized, float32 unless it is there.

    fmt       None: e2m1fn of a policy of two levels, else e4m3fn.
    Raises:   ValueError: another name, with the nearest.

    >>> by_name("vllm_block:bfloat16").granularity
    'blockwise_128x128'
    """
    head, _, dtype = name.partition(":")
    policy, _, ending = head.rpartition("_")
    granularity = registry.lookup("a rule's name ends with", GRANULARITIES, ending)
    scale_policy = registry.lookup("a rule's name begins with", POLICIES | FP4_POLICIES, policy)
    default = E2M1FN if scale_policy.two_level else E4M3FN
    return WeightRule(
        fmt=default if fmt is None else formats.by_name(fmt),
        granularity=granularity,
        policy=scale_policy,
        source=registry.lookup("a dtype is", SOURCES, dtype or "float32"),
    )
