"""Rules that change casts of single operands, layers x GEMMs x roles, or epilogues (spec R-8).

    rule = Rule(layers=("layers.0.mlp.down_proj",), roles=("grad_output",), format="e4m3fn",
    policy="unscaled") decisions = apply([rule], decisions)

``linears`` says which recipe a linear has, and rules change it, one after the other. Every
backend takes a linear's recipe from its Decision, so that rules are the same for all.
"""

import dataclasses
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fp8ref import recipe as recipes
from fp8ref.formats import QUANTIZED_FORMATS
from fp8ref.policy import FP4_POLICIES, POLICIES, UNSCALED
from fp8ref.recipe import OPERANDS, ROLES, CastSpec, Gemm, GemmSpec, Recipe, Role
from fp8ref.selection.linears import Decision, check_shape, matches
from fp8ref.shared import registry
from fp8ref.shared.errors import require
from fp8ref.spec import granularity as granularities
from fp8ref.spec.epilogue import EPILOGUES
from fp8ref.spec.gemm import Rounding
from fp8ref.spec.rotation import ROTATIONS

GEMMS: tuple[Gemm, ...] = tuple(OPERANDS)
"""The GEMMs that a rule may name."""

_POLICIES = {**POLICIES, **FP4_POLICIES, UNSCALED.name: UNSCALED}
_PARTS = ("format", "granularity", "policy", "rounding", "rotation")  # of a cast


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a rule changes, and to what: a recipe; parts of a cast; or an epilogue.

    Raises:   ValueError: an unknown word, naming the nearest; a rule that gives nothing, or several
              of these; GEMMs and roles that have no operand in common; roles beside an epilogue.
    """

    layers: tuple[str, ...]
    """Linears, by whole name components or shell patterns (R-3)."""
    gemms: tuple[str, ...] = GEMMS
    """output, grad_input, grad_weight. Default: all."""
    roles: tuple[str, ...] = ROLES
    """input, weight, grad_output. Default: all."""
    recipe: str | None = None
    """Cast these operands as this recipe does; bf16: leave them in high precision."""
    format: str | None = None
    """Format of the operands that are cast."""
    granularity: str | None = None
    """Granularity of their scales."""
    policy: str | None = None
    """Policy of their scales; unscaled: scale 1."""
    rounding: str | None = None
    """How they are rounded: nearest_even, stochastic, stochastic_8."""
    rotation: str | None = None
    """Their rotation: none, nvfp4. Both operands of a GEMM have the same."""
    epilogue: str | None = None
    """Epilogue of the GEMMs of two FP8 operands: scale_then_round, product_then_round, as
    cuBLASLt's, or unit_round_scale_round.
    """

    def __post_init__(self) -> None:
        text = "a rule of numerics.rules needs layers; got none. Name some, such as 'layers.0'."
        require(bool(self.layers), text)
        for key in ("layers", "gemms", "roles"):
            names = getattr(self, key)
            text = f"{key} of a rule is several names; got {names!r}. Use ({names!r},)."
            require(not isinstance(names, str), text)
        for key, values, choices in (
            ("gemms", self.gemms, GEMMS),
            ("roles", self.roles, ROLES),
            ("recipe", [self.recipe], recipes.RECIPES),
            ("format", [self.format], QUANTIZED_FORMATS),
            ("granularity", [self.granularity], granularities.GRANULARITIES),
            ("policy", [self.policy], _POLICIES),
            ("rounding", [self.rounding], typing.get_args(Rounding)),
            ("rotation", [self.rotation], ROTATIONS),
            (
                "epilogue",
                [self.epilogue],
                [name for name, of in EPILOGUES.items() if of.bias is None],
            ),
        ):
            for word in values:
                if word is not None and word not in choices:
                    raise ValueError(
                        f"{key} of a rule is one of {', '.join(choices)}; got "
                        f"{word!r}.{registry.nearest(word, choices)}"
                    )
        parts = [key for key in _PARTS if getattr(self, key) is not None]
        others = [key for key in ("recipe", "epilogue") if getattr(self, key) is not None]
        if bool(parts) + len(others) != 1:
            raise ValueError(
                "a rule has a recipe, or a format, granularity, policy, rounding or rotation, or "
                "an epilogue; got "
                f"{', '.join([*parts, *others]) or 'none'}. Split it, or name one."
            )
        if self.epilogue is not None and self.roles != ROLES:
            raise ValueError(
                f"an epilogue takes no roles; got {', '.join(self.roles)}. Leave them out."
            )
        operands = [roles for gemm, roles in OPERANDS.items() if gemm in self.gemms]
        if not any(set(roles) & set(self.roles) for roles in operands):
            raise ValueError(
                f"{', '.join(self.gemms)} of a rule has no operand {', '.join(self.roles)}. Use "
                "another GEMM or role."
            )

    def covers(self, gemm: Gemm, role: Role) -> bool:
        """Whether it changes this operand of a linear that it names."""
        return gemm in self.gemms and role in self.roles

    def cast(self, now: CastSpec | None, gemm: Gemm, role: Role) -> CastSpec | None:
        """The cast that an operand has under this rule, in place of the one it has ``now``."""
        if self.recipe is not None:
            return casts_of(recipes.RECIPES[self.recipe])[gemm, role]
        if now is None or self.epilogue is not None:
            return now
        policy = now.policy if self.policy is None else _POLICIES[self.policy]
        rescaled = policy != now.policy or self.granularity not in (None, now.granularity)
        return dataclasses.replace(
            now,
            fmt=now.fmt if self.format is None else QUANTIZED_FORMATS[self.format],
            granularity=self.granularity or now.granularity,
            policy=policy,
            delayed=None if rescaled else now.delayed,
            rounding=typing.cast(Rounding, self.rounding or now.rounding),
            rotation=now.rotation if self.rotation is None else ROTATIONS[self.rotation],
        )


def apply(rules: Sequence[Rule], decisions: Sequence[Decision]) -> list[Decision]:
    """The decisions after all rules, in their order; a later rule changes what an earlier one left.

    Raises:   ValueError: what is no Rule; a pattern that names no linear, with the nearest names; a
              rule that changes nothing; operands that no GEMM takes together; dims that a cast does
              not take; casts that the simulator alone has (R-9).
    """
    other = [type(rule).__name__ for rule in rules if not isinstance(rule, Rule)]
    text = "rules are fp8ref.selection.rules.Rule, as of numerics.rules; got "
    require(not other, f"{text}{', '.join(other)}. Use Rule(layers=(...), ...).")
    current, names = list(decisions), [d.path for d in decisions]
    for number, rule in enumerate(rules, 1):
        for pattern in rule.layers:
            if not any(matches(pattern, name) for name in names):
                split = [name.split(".") for name in names]
                parts = dict.fromkeys(
                    ".".join(part[i:j])
                    for part in split
                    for i in range(len(part))
                    for j in range(i + 1, len(part) + 1)
                )
                raise ValueError(
                    f"rule {number}'s pattern {pattern!r} names no "
                    f"linear.{registry.nearest(pattern, parts)}"
                )
        after = [
            _under(rule, number, d) if any(matches(p, d.path) for p in rule.layers) else d
            for d in current
        ]
        if after == current:
            raise ValueError(
                f"rule {number} of numerics.rules changes nothing: its linears already have these "
                "casts and epilogues, or no FP8. Leave it out, or name a recipe."
            )
        current = after
    for decision in current:
        recipes.check_trained(decision.recipe, f"by numerics.rules {decision.path} has recipe")
    return current


def casts_of(recipe: Recipe) -> dict[tuple[Gemm, Role], CastSpec | None]:
    """The cast of each of the six operands; None in high precision."""
    return {
        (gemm, role): cast
        for gemm, spec in recipe.gemms.items()
        for role, cast in zip(OPERANDS[gemm], (spec.a, spec.b), strict=True)
    }


def with_casts(
    base: Recipe,
    casts: dict[tuple[Gemm, Role], CastSpec | None],
    name: str,
    like: Iterable[Recipe] = (),
) -> Recipe:
    """A recipe of these casts. Where a GEMM has the casts of base, or of a recipe of ``like``, it
    is that GEMM, with its accumulation and epilogue; else it accumulates as base does, or fast for
    output and slow for gradients, and scales, then rounds."""
    gemms: dict[Gemm, GemmSpec] = {}
    for gemm, roles in OPERANDS.items():
        a, b = (casts[gemm, role] for role in roles)
        if a is None or b is None:  # both are rotated, or neither (S-23)
            a, b = (cast and dataclasses.replace(cast, rotation=None) for cast in (a, b))
        existing = next(
            (r.gemms[gemm] for r in (base, *like) if (r.gemms[gemm].a, r.gemms[gemm].b) == (a, b)),
            None,
        )
        sums = (
            (base.gemms[gemm].accumulate or ("fast" if gemm == "output" else "slow"))
            if a and b
            else None
        )
        gemms[gemm] = existing or GemmSpec(a=a, b=b, accumulate=sums)
    recipe = _recipe(name, gemms)
    recipes.delayed_casts(recipe)  # refuses two casts of one state
    return recipe


def to_manifest(decision: Decision) -> dict[str, str]:
    """Each operand of a linear in a few words, by "<gemm>/<role>", and each epilogue of FP8
    operands, by "<gemm>/epilogue".
    """

    def words(cast: CastSpec | None) -> str:
        return (
            "high precision"
            if cast is None
            else f"{cast.fmt.name} {cast.granularity} {cast.policy.name}"
            + " delayed" * bool(cast.delayed)
            + " rotated" * bool(cast.rotation)
            + f" {cast.rounding}" * cast.stochastic
        )

    operands = {
        f"{gemm}/{role}": words(cast) for (gemm, role), cast in casts_of(decision.recipe).items()
    }
    return operands | {
        f"{gemm}/epilogue": spec.epilogue
        for gemm, spec in decision.recipe.gemms.items()
        if spec.fp8
    }


def _recipe(name: str, gemms: dict[Gemm, GemmSpec]) -> Recipe:
    return Recipe(
        name=name,
        output=gemms["output"],
        grad_input=gemms["grad_input"],
        grad_weight=gemms["grad_weight"],
    )


def _under(rule: Rule, number: int, decision: Decision) -> Decision:
    before = casts_of(decision.recipe)
    after = {
        (gemm, role): rule.cast(cast, gemm, role) if rule.covers(gemm, role) else cast
        for (gemm, role), cast in before.items()
    }
    epilogues = {
        gemm: rule.epilogue
        for gemm, spec in decision.recipe.gemms.items()
        if rule.epilogue and spec.fp8 and gemm in rule.gemms
    }
    if after == before and all(
        decision.recipe.gemms[gemm].epilogue == epilogue for gemm, epilogue in epilogues.items()
    ):
        return decision
    base = decision.recipe.name.split(" with ")[0]
    like = [recipes.RECIPES[rule.recipe]] if rule.recipe else []
    recipe = with_casts(decision.recipe, after, f"{base} with rules", like)
    changed = {
        gemm: dataclasses.replace(recipe.gemms[gemm], epilogue=epilogue)
        for gemm, epilogue in epilogues.items()
    }
    recipe = _recipe(recipe.name, recipe.gemms | changed)
    if recipe.fp8:
        check_shape(decision.path, decision.shape, recipe)
    first = f"{decision.reason}, and " if "rule" in decision.reason else ""
    reason = f"{first}rule {number}"
    return dataclasses.replace(
        decision, recipe=recipe if recipe.fp8 else recipes.RECIPES["bf16"], reason=reason
    )
