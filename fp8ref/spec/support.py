"""What works where: which backend has a feature, and what to do where one does not.

features.toml has the rows of the table in README.md. ``LIMITS`` are the choices that a backend
takes in part: which it takes, why not the others, and what to use in their place. Whatever refuses
a choice asks ``require``, so that errors, the docs and the backends say the same.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fp8ref import policy as policies
from fp8ref.policy import FP4_POLICIES, POLICIES, ScalePolicy
from fp8ref.shared import package_data
from fp8ref.spec.attention.variants import VARIANTS
from fp8ref.spec.delayed import DelayedScaling

__all__ = ["LIMITS", "Limit", "refusal", "require", "table"]

Backend = Literal["jax", "torch"]
"""What a backend is called in the tables."""

BACKENDS: tuple[Backend, ...] = ("jax", "torch")
"""The values of ``Backend``."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A choice that a backend takes in part. Texts format ``choice``, ``backend`` and the caller's.

    takes     whether it takes a choice.
    needs     the requirement.
    received  what was received instead; None: the requirement names it.
    instead   what to do.
    """

    takes: Callable[[Any], bool]
    needs: str
    received: str | None
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


def _both(limit: Limit) -> dict[Backend, Limit]:
    return {"jax": limit, "torch": limit}


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

_POLICIES = _listed(name for name, p in POLICIES.items() if p.in_backends)
_E8M0_POLICIES = _listed(name for name, p in POLICIES.items() if p.in_backends and p.e8m0)
_TORCHAO_EPS = POLICIES["torchao"].eps


def _two_level(policy: ScalePolicy) -> bool:
    """Whether it has two levels of scales, of blocks and of the tensor or none."""
    return policy.two_level is not None and policy.two_level.tensorwise


_TWO_LEVEL_POLICIES = _listed(name for name, p in FP4_POLICIES.items() if _two_level(p))


def _epilogues(backend: Backend) -> Limit:
    return Limit(
        takes=lambda name: name in EPILOGUES[backend],
        needs=f"epilogue is one of {_listed(EPILOGUES[backend])}",
        received="{choice!r}",
        instead="Use one of these, or fp8ref.sim for {choice!r}.",
    )


def _gradients(further: str) -> Limit:
    names = _listed(name for name, v in VARIANTS.items() if v.backward is not None)
    return Limit(
        takes=lambda variant: variant.backward is not None,
        needs="variant {choice.name!r} has no backward pass (A-1)",
        received=None,
        instead=f"Use one of {names}, {further}.",
    )


def _cut_tokens(further: str) -> Limit:
    return Limit(
        takes=lambda variant: not variant.real and variant.granularity in ("tensor", None),
        needs="context parallelism takes one scale for a tensor, or none; variant "
        "{choice.name!r} has scales of {scales}",
        received=None,
        instead=f"Use 'cudnn' or 'bf16', or cut sequences and heads {further}.",
    )


def _delayed_scaling(takes: Callable[[DelayedScaling], bool], instead: str) -> Limit:
    return Limit(
        takes=takes,
        needs="fp8ref.{backend} keeps histories as 'delayed' does, with any history_length, "
        "amax_compute, interval or margin",
        received="{choice.name!r}",
        instead=f"Use fp8ref.sim.delayed for it{instead}.",
    )


LIMITS: dict[str, dict[Any, Limit]] = {
    "recipes": _both(
        Limit(
            takes=lambda recipe: not recipe.simulated,
            needs="{what} {choice.name!r} is for the simulator alone, under simulation (R-9): "
            "backends take e2m1fn in blocks of MX or NVFP4, without a scale of each row",
            received=None,
            instead="Use fp8ref.sim.linear to study it, or one that trains: {trained}.",
        )
    ),
    "scale policies": _both(
        Limit(
            takes=lambda policy: policy.unscaled or policy.in_backends or _two_level(policy),
            needs=f"fp8ref.{{backend}} scales by {_POLICIES}",
            received="policy {choice.name!r}",
            instead="Use one of these, or fp8ref.sim for {choice.name!r}.",
        )
    ),
    "scale policies of MX": _both(
        Limit(
            takes=lambda policy: policy.e8m0 is not None,
            needs=f"blocks of MX have e8m0 scales, of policy {_E8M0_POLICIES}",
            received="policy {choice.name!r}",
            instead="Use one of these.",
        )
    ),
    "scale policies of e2m1fn": _both(
        Limit(
            takes=lambda policy: policy.e8m0 is not None or _two_level(policy),
            needs=f"fp8ref.{{backend}} scales e2m1fn by {_E8M0_POLICIES}, {_TWO_LEVEL_POLICIES}",
            received="policy {choice.name!r}",
            instead="Use one of these, or fp8ref.sim for {choice.name!r}.",
        )
    ),
    "floors of scale policies": {
        "jax": Limit(
            takes=lambda policy: (
                policy.unscaled
                or policy.e8m0 is not None
                or policy.two_level is not None
                or policy.eps >= SMALLEST_EPS
            ),
            needs=f"fp8ref.jax needs eps >= {SMALLEST_EPS}, as XLA flushes subnormals (S-3)",
            received="policy {choice.name!r} with eps={choice.eps}",
            instead="Use a larger eps, or fp8ref.sim.",
        ),
        "torch": Limit(
            takes=lambda policy: not policy.floored_quotient or policy.eps == _TORCHAO_EPS,
            needs=f"torchao's eps is {_TORCHAO_EPS}",
            received="policy {choice.name!r} with eps={choice.eps}",
            instead="Use policy 'torchao'.",
        ),
    },
    "delayed scaling": {
        # flax's where Flax itself sums and zeroes (H-10)
        "jax": _delayed_scaling(
            lambda config: config.keeps_histories_as_flax or config.keeps_histories_as_fp8ref,
            ", or flax's with reuse 'max' and unused 'keep' (H-10)",
        ),
        "torch": _delayed_scaling(lambda config: config.keeps_histories_as_fp8ref, ""),
    },
    "epilogues": {"jax": _epilogues("jax"), "torch": _epilogues("torch")},
    "blocks of experts' rows": _both(
        Limit(
            takes=lambda granularity: granularity.other in (None, 1),
            needs="no block of a grouped {role} has several rows",
            received="{choice.name!r} in {gemm} of recipe {recipe!r}",
            instead="Use 'blockwise_1x128'.",
        )
    ),
    "gradients of attention": {
        "jax": _gradients("or fp8ref.spec.attention.variants.differentiated(variant, 'bf16')"),
        "torch": _gradients(
            "fp8ref.spec.attention.variants.differentiated(variant, 'bf16'), or call under "
            "torch.no_grad()"
        ),
    },
    "attention over cut tokens": {
        "jax": _cut_tokens("alone"),
        "torch": _cut_tokens("instead (amax_group)"),
    },
    "promotion of attention's sums": _both(
        Limit(
            takes=lambda variant: variant.promotion in (None, 1),
            needs="variant {choice.name!r}: here each tile's product with v is a GEMM, whose sum "
            "is added in float32, so promotion is 1, or None, which is run as 1",
            received="{choice.promotion}",
            instead="Use promotion=1, or fp8ref.sim for {choice.promotion}.",
        )
    ),
    "devices of simulated hardware": _both(
        Limit(
            takes=lambda device: device == "cpu",
            needs="simulated hardware multiplies on the host's CPU; {backend} runs on {choice}",
            received=None,
            instead="Use accumulate 'native' there.",
        )
    ),
    "optimizers of the trainer": {
        "jax": Limit(
            takes=lambda kind: kind in ("adamw", "adamw_states"),
            needs="optimizer.kind of --backend jax is 'adamw' or 'adamw_states'",
            received="{choice!r}",
            instead="Use one of them, or --backend torch.",
        )
    },
    "tensor parallelism under a schedule": {
        "torch": Limit(
            takes=lambda ranks: ranks == 1,
            needs="in PyTorch numerics.schedule takes parallel.tensor 1, whose hooks are of one "
            "recipe",
            received="{choice}",
            instead="Set it to 1.",
        )
    },
}
"""{feature: {backend: what it takes}}; a backend that is missing takes every choice."""
