"""Every decision between an amax and a scale, as data (SEMANTICS S-3, S-4). ``scale_from_amax`` in each room obeys it."""

import dataclasses
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ScalePolicy:
    """scale = RN32(fmt.max / max(amax, eps)), then rounded down to a power of two if asked.

    eps           the smallest amax that counts, an exact real number: zero and subnormal amax give fmt.max / eps.
    power_of_two  None; ``mask``: clear the mantissa bits; ``exp2_log2``: exp2(floor(RN32(log2 scale))), as torchao.
    """

    name: str
    eps: float
    power_of_two: Literal["mask", "exp2_log2"] | None = None

    def __post_init__(self) -> None:
        if self.power_of_two not in (None, "mask", "exp2_log2"):
            raise ValueError(f"power_of_two is None, 'mask' or 'exp2_log2'; got {self.power_of_two!r}.")
        # Then float32 subnormals, which some backends flush, underflow in every format: 2^-126 * 57344 / 1e-27 < 2^-18.
        if not 1e-27 <= self.eps < 1:
            raise ValueError(f"eps lies in [1e-27, 1), so that no subnormal input leaves a trace (S-3); got {self.eps}.")


_TORCHAO = ScalePolicy(name="torchao", eps=1e-12)  # torchao 0.18, float8/float8_utils.py: amax_to_scale
POLICIES = {
    p.name: p
    for p in (
        _TORCHAO,
        dataclasses.replace(_TORCHAO, name="torchao_pow2", power_of_two="exp2_log2"),
        dataclasses.replace(_TORCHAO, name="torchao_mask", power_of_two="mask"),
    )
}


def by_name(policy: "str | ScalePolicy") -> ScalePolicy:
    """The policy of that name; a ScalePolicy is itself."""
    if isinstance(policy, ScalePolicy):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"policy is a ScalePolicy or one of {', '.join(POLICIES)}; got {policy!r}.")
    return POLICIES[policy]
