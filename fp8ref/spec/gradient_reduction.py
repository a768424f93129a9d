"""FP8 gradients as data: the factors of a shared scale, and the rule that tunes one (P-21, P-22).

``sim.gradient_reduction``, ``jax.gradient_reduction`` and ``torch.gradient_reduction`` sum
gradients over ranks by them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from fp8ref import policy as policies
from fp8ref.formats import FP8_FORMATS, Format
from fp8ref.policy import ScalePolicy
from fp8ref.shared import errors
from fp8ref.shared.errors import require

PreScale = Literal["one", "inverse_root", "inverse"]
"""The factor of a shared scale, for W ranks: 1, 1 / sqrt(W) as in MS-AMP, or 1 / W (P-21)."""

Result = Literal["float32", "codes"]
"""What a sum is read from: the float32 sum of codes, or that sum rounded to a code again (P-21)."""

SMALLEST, LARGEST = 2.0**-90, 2.0**90
"""A smaller amax is replaced by SMALLEST, and a larger one counts as NaN (P-21)."""

MU_MIN, MU_MAX = 2.0**-24, 2.0**24
"""The range of mu (P-22)."""


def factor(prescale: PreScale, ranks: int) -> np.float32:
    """The pre-scale of so many ranks, rounded once to float64 and once to float32.

    Raises:   ValueError: an unknown pre-scale.
    """
    errors.one_of("prescale", prescale, get_args(PreScale))
    return np.float32(
        {"one": 1.0, "inverse_root": 1 / math.sqrt(ranks), "inverse": 1 / ranks}[prescale]
    )


def constant_mu(mu: float) -> np.float32:
    """A mu that is a number, as float32; ValueError outside MU_MIN and MU_MAX."""
    if not MU_MIN <= mu <= MU_MAX:
        raise ValueError(f"mu is in [2^-24, 2^24] (P-22); got {mu}.")
    return np.float32(mu)


def share_of(divisor: float) -> np.float32:
    """RN32(1 / divisor), which makes a sum a mean, if it is the number of ranks."""
    return np.float32(1 / divisor)


def saturates_above(fmt: Format) -> float:
    """The magnitude above which a cast saturates: max, and half of the spacing there."""
    return fmt.max + math.ldexp(1.0, math.frexp(fmt.max)[1] - 2 - fmt.mantissa_bits)


def check_policy(policy: str | ScalePolicy) -> ScalePolicy:
    """A shared scale's policy; ValueError for one that divides or makes scale_inv."""
    policy = policies.by_name(policy)
    if policy.stored != "scale" or policy.makes_scale_inv:
        names = ", ".join(
            name
            for name, p in policies.POLICIES.items()
            if p.stored == "scale" and not p.makes_scale_inv
        )
        raise ValueError(f"a shared gradient scale has a policy of {names}; got {policy.name!r}.")
    return policy


def check_format(fmt: Format) -> None:
    """ValueError for a format that is not FP8."""
    text = f"gradients are quantized to FP8: {', '.join(FP8_FORMATS)}; got {fmt.name}."
    require(fmt.name in FP8_FORMATS, text)


def check_result(result: str) -> None:
    """ValueError for an unknown ``Result``."""
    errors.one_of("result", result, get_args(Result))


@dataclass(frozen=True, kw_only=True)
class AutoScale:
    """When mu falls, and how fast it rises (P-22).

    threshold  the share of saturated elements above which mu is halved.
    window     the number of steps in which mu doubles while it is not halved.

    Raises:    ValueError: a threshold outside [0, 1), a window that is no positive integer.
    """

    threshold: float = 1e-5
    window: int = 1000

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 1:
            raise ValueError(f"threshold is in [0, 1); got {self.threshold}.")
        errors.integer("window", self.window, 1)

    @property
    def growth(self) -> np.float32:
        """RN32(2^(1 / window))."""
        return np.float32(2.0 ** (1 / self.window))

    def allowed(self, elements: int) -> int:
        """The number of saturated elements, of so many, that leaves mu rising."""
        return math.floor(self.threshold * elements)


def columns(factors: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """What metrics.jsonl has of the factors of all weights (Q-14)."""
    if not factors:
        return {}
    mu, saturated = ([entry[key] for entry in factors.values()] for key in ("mu", "saturated"))
    return {
        "gradient_mu_min": min(mu),
        "gradient_mu_max": max(mu),
        "gradient_saturated": sum(saturated),
    }


AUTO = AutoScale()
"""The rule with its default numbers."""
