"""Delayed scaling as data: every decision between the amaxes of past steps and a scale (spec
H).

Each way in which libraries differ is a field. DELAYED holds fp8ref's own choice and those of
TransformerEngine and Flax. ``sim.delayed`` implements all of them; a backend implements some and
refuses the others.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from fp8ref.policy import POLICIES, ScalePolicy
from fp8ref.shared import errors, package_data, registry

__all__ = ["DELAYED"]


@dataclass(frozen=True, kw_only=True)
class DelayedScaling:
    """Every decision between the amaxes of past steps and a scale.

    history_length  the number of observed amaxes that count, the newest included.
    amax_compute    ``max`` of the history, or the ``most_recent`` amax.
    interval        the scale is computed at the first observed update and at every interval-th
                    after it; the history grows at each.
    policy          makes the scale of that amax; its margin applies.
    timing          ``update``: the scale is computed when an amax arrives, for the next step.
                    ``use``: it is computed at the next step, and stored after that step; what is
                    stored is one step behind.
    reuse           several uses of a module in one step: ``max``: one observation, the largest;
                    ``sum``: every use makes a state, and autodiff adds them up.
    unused          a module that a step does not use: ``keep`` its state, or ``zero`` all of it.
    zero            an amax of zero: ``record`` it, or ``skip`` the update.
    non_finite      an infinite or NaN amax, or a flag that says so: ``skip`` the update, or
                    ``record`` the amax as it is.
    nan_in_history  under ``max``: ``propagate`` a NaN, or ``drop`` it, as C's fmaxf does.

    Raises:         ValueError: a length or interval below 1, an unknown word, a policy that makes
                    e8m0 scales, timing ``use`` with an interval.
    """

    name: str
    history_length: int = 16
    amax_compute: Literal["max", "most_recent"] = "max"
    interval: int = 1
    policy: ScalePolicy = POLICIES["te_delayed"]
    timing: Literal["update", "use"] = "update"
    reuse: Literal["max", "sum"] = "max"
    unused: Literal["keep", "zero"] = "keep"
    zero: Literal["record", "skip"] = "record"
    non_finite: Literal["skip", "record"] = "skip"
    nan_in_history: Literal["propagate", "drop"] = "propagate"

    def __post_init__(self) -> None:
        for key in ("history_length", "interval"):
            errors.integer(key, getattr(self, key), 1)
        if not isinstance(self.policy, ScalePolicy):  # only here a repr: dynamo cannot trace it
            raise ValueError(
                f"policy is a ScalePolicy, such as POLICIES['te_delayed']; got {self.policy!r}."
            )
        for key, allowed in _CHOICES.items():
            errors.one_of(key, getattr(self, key), allowed)
        if self.policy.e8m0 is not None:
            raise ValueError(
                f"delayed scaling keeps one float32 scale; policy {self.policy.name!r} has e8m0 "
                "scales."
            )
        if self.timing == "use" and self.interval != 1:
            raise ValueError(
                f"timing 'use' has interval=1; got interval={self.interval}. Use timing 'update'."
            )

    @property
    def keeps_histories_as_fp8ref(self) -> bool:
        """Whether history_length, amax_compute, interval and margin alone differ (H-1 to H-6)."""
        return self == DelayedScaling(
            name=self.name,
            history_length=self.history_length,
            amax_compute=self.amax_compute,
            interval=self.interval,
            policy=dataclasses.replace(
                POLICIES["te_delayed"], name=self.policy.name, margin=self.policy.margin
            ),
        )

    @property
    def keeps_histories_as_flax(self) -> bool:
        """True if only history_length may differ from flax's rules, where Flax itself sums and
        zeroes: reuse ``max``, unused ``keep`` (H-10)."""
        flax = dataclasses.replace(DELAYED["flax"], reuse="max", unused="keep")
        return self == dataclasses.replace(flax, name=self.name, history_length=self.history_length)


_CHOICES = {
    "amax_compute": ("max", "most_recent"),
    "timing": ("update", "use"),
    "reuse": ("max", "sum"),
    "unused": ("keep", "zero"),
    "zero": ("record", "skip"),
    "non_finite": ("skip", "record"),
    "nan_in_history": ("propagate", "drop"),
}

DELAYED = {
    name: DelayedScaling(
        name=name, **fields | {"policy": POLICIES[fields.get("policy", "te_delayed")]}
    )
    for name, fields in package_data.tables(__file__, "delayed").items()
}
"""Delayed scaling by name: fp8ref's own, TransformerEngine's and Flax's (H-1, H-7, H-8)."""


def unset_scales(name: str, calibrate: str) -> str:
    """The warning of a layer with unset scales; calibrate: a call that sets them."""
    return (
        f"{name} scales by earlier steps under delayed scaling, and no update has set its "
        f"scales: they are 1, and its casts may clip or underflow. Call {calibrate} once before "
        "an evaluation, or load a checkpoint with the states."
    )


def by_name(config: "str | DelayedScaling") -> DelayedScaling:
    """The config of that name; a DelayedScaling is itself; ValueError for anything else."""
    return registry.lookup(
        "delayed scaling is a DelayedScaling or", DELAYED, config, DelayedScaling
    )
