"""What works where: which backend has a feature, and what to do where one does not.

features.toml has the rows of the table in README.md. ``LIMITS`` are the choices that a backend
takes in part: which it takes, why not the others, and what to use in their place, in the words of
limits.toml. Whatever refuses a choice asks ``require``, so that errors, the docs and the backends
say the same.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from string import Template
from typing import Any, Literal

from fp8ref import policy as policies
from fp8ref.policy import FP4_POLICIES, POLICIES, ScalePolicy
from fp8ref.shared import package_data
from fp8ref.spec.attention.variants import VARIANTS, Variant

__all__ = ["LIMITS", "Limit", "refusal", "require", "table"]

Backend = Literal["jax", "torch"]
"""What a backend is called in the tables."""

BACKENDS: tuple[Backend, ...] = ("jax", "torch")
"""The values of ``Backend``."""

Takes = Callable[[Any], bool]
"""Whether a backend takes a choice."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A choice that a backend takes in part. Texts format ``choice``, ``backend`` and the caller's.

    takes     whether it takes a choice.
    needs     the requirement.
    received  what was received instead; None: the requirement names it.
    instead   what to do.
    """

    takes: Takes
    needs: str
    received: str | None = None
    instead: str


def takes(feature: str, backend: str, choice: Any) -> bool:
    """Whether a backend takes a choice of a feature."""
    limit = LIMITS[feature].get(backend)
    return limit is None or limit.takes(choice)


def refusal(feature: str, backend: str, choice: Any, **details: object) -> str | None:
    """Why a backend does not take a choice, and what to use instead; None if it takes it."""
    if takes(feature, backend, choice):
        return None
    limit = LIMITS[feature][backend]
    parts = [limit.needs] if limit.received is None else [limit.needs, limit.received]
    text = f"{'; got '.join(parts)}. {limit.instead}"
    return text.format(choice=choice, backend=backend, **details)


def require(feature: str, backend: str, choice: Any, **details: object) -> None:
    """ValueError unless a backend takes a choice of a feature: the table's reason and remedy."""
    if (message := refusal(feature, backend, choice, **details)) is not None:
        raise ValueError(message)


def scale_policy(policy: str | ScalePolicy, backend: Backend) -> ScalePolicy:
    """The policy of that name, if a backend scales by it; ValueError otherwise."""
    policy = policies.by_name(policy)
    require("scale policies", backend, policy)
    require("floors of scale policies", backend, policy)
    return policy


def table(recipes: Mapping[str, Any]) -> str:
    """ "What works where" as a Markdown table; recipes: fp8ref's, by name."""
    groups: dict[str, list[str]] = {"whole": [], "blocks": [], "emulated": []}
    for name, recipe in recipes.items():
        kinds = {"emulated": recipe.emulated, "blocks": recipe.in_blocks, "whole": True}
        groups[next(kind for kind, member in kinds.items() if member)].append(name)
    names = {key: _listed(f"`{name}`" for name in group) for key, group in groups.items()}
    *variants, last = (f"`{v.name}`" for v in VARIANTS.values() if v.backward is not None)
    names["own_gradients"] = f"{_listed(variants)} and {last}"
    rows = ["| | simulator | JAX | PyTorch |", "|---|---|---|---|"]
    for feature, cells in package_data.tables(__file__, "features").items():
        rows.append(f"| {' | '.join([feature, *cells])} |".format_map(names))
    return "\n".join(rows) + "\n"


def refusals() -> Iterator[tuple[str, Backend, str, str]]:
    """(feature, backend, what it needs, what to do instead) of every limit."""
    for feature, by_backend in LIMITS.items():
        for backend, limit in by_backend.items():
            yield feature, backend, limit.needs, limit.instead


def _both(takes: Takes) -> dict[Backend, Takes]:
    return {"jax": takes, "torch": takes}


def _listed(names) -> str:
    return ", ".join(names)


EPILOGUES: dict[Backend, tuple[str, ...]] = {
    "jax": ("scale_then_round", "product_then_round", "unit_round_scale_round"),
    "torch": ("scale_then_round", "unit_round_scale_round"),
}
"""The epilogues that each backend runs (G-8)."""

SMALLEST_EPS = 1e-27
"""The least floor of a policy under XLA. Below it a float32 subnormal, which XLA on a CPU flushes
to zero, could leave a trace in the codes: 2^-126 * 57344 / 1e-27 < 2^-18, and with it no format
shows one (S-3)."""

_TORCHAO_EPS = POLICIES["torchao"].eps


def _two_level(policy: ScalePolicy) -> bool:
    """Whether it has two levels of scales, of blocks and of the tensor or none."""
    return policy.two_level is not None and policy.two_level.tensorwise


def _has_gradients(variant: Variant) -> bool:
    return variant.backward is not None


TAKES: dict[str, dict[Backend, Takes]] = {
    "recipes": _both(lambda recipe: not recipe.simulated),
    "scale policies": _both(
        lambda policy: policy.unscaled or policy.in_backends or _two_level(policy)
    ),
    "scale policies of MX": _both(lambda policy: policy.e8m0 is not None),
    "scale policies of e2m1fn": _both(lambda policy: policy.e8m0 is not None or _two_level(policy)),
    "floors of scale policies": {
        "jax": lambda policy: (
            policy.unscaled
            or policy.e8m0 is not None
            or policy.two_level is not None
            or policy.eps >= SMALLEST_EPS
        ),
        "torch": lambda policy: not policy.floored_quotient or policy.eps == _TORCHAO_EPS,
    },
    "delayed scaling": {
        # flax's where Flax itself sums and zeroes (H-10)
        "jax": lambda by: by.keeps_histories_as_flax or by.keeps_histories_as_fp8ref,
        "torch": lambda by: by.keeps_histories_as_fp8ref,
    },
    "epilogues": {
        "jax": lambda name: name in EPILOGUES["jax"],
        "torch": lambda name: name in EPILOGUES["torch"],
    },
    "blocks of experts' rows": _both(lambda granularity: granularity.other in (None, 1)),
    "gradients of attention": _both(_has_gradients),
    "attention over cut tokens": _both(
        lambda variant: not variant.real and variant.granularity in ("tensor", None)
    ),
    "promotion of attention's sums": _both(lambda variant: variant.promotion in (None, 1)),
    "devices of simulated hardware": _both(lambda device: device == "cpu"),
    "optimizers of the trainer": {"jax": lambda kind: kind in ("adamw", "adamw_states")},
    "tensor parallelism under a schedule": {"torch": lambda ranks: ranks == 1},
}
"""{feature: {backend: whether it takes a choice}}; a backend that is missing takes every choice."""

_TEXTS = package_data.tables(__file__, "limits")
_NAMES = {
    "policies": _listed(name for name, p in POLICIES.items() if p.in_backends),
    "e8m0_policies": _listed(n for n, p in POLICIES.items() if p.in_backends and p.e8m0),
    "two_level_policies": _listed(name for name, p in FP4_POLICIES.items() if _two_level(p)),
    "differentiated": _listed(name for name, v in VARIANTS.items() if _has_gradients(v)),
    "smallest_eps": SMALLEST_EPS,
    "torchao_eps": _TORCHAO_EPS,
}


def _limit(feature: str, backend: Backend, takes: Takes) -> Limit:
    """The limit in words: those of the feature and backend, else of the feature."""
    texts = _TEXTS.get(f"{feature}, {backend}") or _TEXTS[feature]
    names = _NAMES | {"epilogues": _listed(EPILOGUES[backend])}
    return Limit(
        takes=takes, **{key: Template(text).substitute(names) for key, text in texts.items()}
    )


LIMITS: dict[str, dict[Any, Limit]] = {
    feature: {backend: _limit(feature, backend, takes) for backend, takes in by_backend.items()}
    for feature, by_backend in TAKES.items()
}
"""{feature: {backend: what it takes}}; a backend that is missing takes every choice."""
