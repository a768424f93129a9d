"""A recipe says how each of a linear's three GEMMs is computed, and which linears it converts (SEMANTICS L, R)."""

import fnmatch
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fp8ref import epilogue, granularity, registry
from fp8ref.delayed import DELAYED, DelayedScaling
from fp8ref.formats import E4M3FN, E5M2, FP8_FORMATS, Format
from fp8ref.policy import POLICIES, ScalePolicy

Gemm = Literal["output", "grad_input", "grad_weight"]
Role = Literal["input", "weight", "grad_output"]
ROLES: tuple[Role, ...] = get_args(Role)

# The operands a and b of each GEMM (SEMANTICS L-2), and the axis along which it reduces their tensors:
# input [M, K], weight [N, K], grad_output [M, N].
OPERANDS: dict[Gemm, tuple[Role, Role]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
REDUCED_AXES: dict[Gemm, tuple[int, int]] = {"output": (1, 1), "grad_input": (1, 0), "grad_weight": (0, 0)}


@dataclass(frozen=True, kw_only=True)
class CastSpec:
    """How one operand of one GEMM becomes FP8: by its own amax (``delayed`` None), or by those of the steps before.

    Raises:     ValueError: a fmt that is not FP8, an unknown granularity, delayed scaling that is not tensorwise or by another policy than its own.
    """

    fmt: Format
    granularity: str = "tensorwise"
    policy: ScalePolicy = POLICIES["torchao"]
    delayed: DelayedScaling | None = None

    def __post_init__(self) -> None:
        if self.fmt.name not in FP8_FORMATS:
            raise ValueError(f"an operand's fmt is one of {', '.join(FP8_FORMATS)}; got {self.fmt}.")
        granularity.by_name(self.granularity)
        if self.delayed is not None and (self.granularity != "tensorwise" or self.policy != self.delayed.policy):
            raise ValueError(
                f"delayed scaling is tensorwise, by the policy of its own ({self.delayed.policy.name!r}); "
                f"got {self.granularity!r} and policy {self.policy.name!r}."
            )


@dataclass(frozen=True, kw_only=True)
class GemmSpec:
    """One GEMM: both operands FP8, or neither (high precision, the default).

    accumulate  ``fast`` or ``slow`` tensor-core accumulation (SEMANTICS G-7); required with FP8 operands, None without.
    epilogue    the name of one of ``epilogue.EPILOGUES`` that takes no bias.

    Raises:     ValueError: one FP8 operand beside a high-precision one (L-4), accumulate or epilogue that do not go with the operands.
    """

    a: CastSpec | None = None
    b: CastSpec | None = None
    accumulate: Literal["fast", "slow"] | None = None
    epilogue: str = "scale_then_round"

    def __post_init__(self) -> None:
        if (self.a is None) != (self.b is None):
            raise ValueError(f"a GEMM is FP8 on both operands or on neither (L-4); got a={self.a}, b={self.b}.")
        allowed = (None,) if self.a is None else ("fast", "slow")
        if self.accumulate not in allowed:
            kind = "a high-precision" if self.a is None else "an FP8"
            raise ValueError(f"accumulate of {kind} GEMM is one of {allowed}; got {self.accumulate!r}.")
        if epilogue.by_name(self.epilogue).bias is not None:
            raise ValueError(f"a linear's GEMMs have no bias, and epilogue {self.epilogue!r} takes one. Use 'scale_then_round'.")
        if self.a is None and self.epilogue != "scale_then_round":
            raise ValueError(f"a high-precision GEMM has no scales, so no epilogue {self.epilogue!r}. Leave it out.")

    @property
    def fp8(self) -> bool:
        """Whether its operands are FP8."""
        return self.a is not None

    @property
    def rowwise(self) -> bool:
        """Whether an operand is rowwise: the output is then rounded to bfloat16 first (SEMANTICS G-8)."""
        return any(cast is not None and cast.granularity == "rowwise" for cast in (self.a, self.b))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Three GEMMs of two operands, as a and b; all in high precision unless given.

    output       input [M, K] and weight [N, K], reduces K.
    grad_input   grad_output [M, N] and weight, reduces N.
    grad_weight  grad_output and input, reduces M.
    """

    name: str
    output: GemmSpec = GemmSpec()
    grad_input: GemmSpec = GemmSpec()
    grad_weight: GemmSpec = GemmSpec()

    @property
    def gemms(self) -> dict[Gemm, GemmSpec]:
        """The three by name, in the order in which a step computes them."""
        return {"output": self.output, "grad_input": self.grad_input, "grad_weight": self.grad_weight}

    @property
    def fp8(self) -> bool:
        """Whether any of its GEMMs is FP8."""
        return any(spec.fp8 for spec in self.gemms.values())

    @property
    def casts(self) -> tuple[CastSpec, ...]:
        """Every operand's cast, GEMM after GEMM; none of a GEMM in high precision."""
        return tuple(cast for gemm in self.gemms.values() for cast in (gemm.a, gemm.b) if cast is not None)

    @property
    def delayed(self) -> bool:
        """Whether any operand is scaled by the amaxes of earlier steps: its linears then keep a state."""
        return any(cast.delayed is not None for cast in self.casts)

    @property
    def in_blocks(self) -> bool:
        """Whether any operand has scales of blocks along the axis that its GEMM reduces, which few kernels take (G-16, G-17)."""
        return any(granularity.by_name(cast.granularity).reduced is not None for cast in self.casts)

    @property
    def shared(self) -> bool:
        """Whether torchao's scaling covers it: each operand by its own amax, over the tensor or a row. Such recipes are cut by tensor parallelism
        in PyTorch, and replayed by the cross-check on JAX's meshes."""
        return not self.delayed and not self.in_blocks

    def serves_both(self, role: Role) -> bool:
        """Whether both of a role's GEMMs take the same of it: no cast, or one scale of the whole tensor, in one format by one policy."""
        first, second = (
            c for which, gemm in self.gemms.items() for r, c in zip(OPERANDS[which], (gemm.a, gemm.b), strict=True) if r == role
        )
        return first == second and (first is None or first.granularity == "tensorwise")


def _uniform(name: str, forward: CastSpec, weight: CastSpec, backward: CastSpec) -> Recipe:
    """One cast for the input, one for the weight and one for grad_output, wherever they go."""
    return Recipe(
        name=name,
        output=GemmSpec(a=forward, b=weight, accumulate="fast"),
        grad_input=GemmSpec(a=backward, b=weight, accumulate="slow"),
        grad_weight=GemmSpec(a=backward, b=forward, accumulate="slow"),
    )


def _rowwise(name: str, *, weight_for_grad_input: str, grad_weight_fp8: bool) -> Recipe:
    row = CastSpec(fmt=E4M3FN, granularity="rowwise", policy=POLICIES["torchao_pow2"])
    weight = CastSpec(fmt=E4M3FN, granularity=weight_for_grad_input, policy=POLICIES["torchao_pow2"])
    slow = GemmSpec(a=row, b=row, accumulate="slow", epilogue="unit_round_scale_round")
    return Recipe(
        name=name,
        output=GemmSpec(a=row, b=row, accumulate="fast"),
        grad_input=GemmSpec(a=row, b=weight, accumulate="slow", epilogue="unit_round_scale_round"),
        grad_weight=slow if grad_weight_fp8 else GemmSpec(),
    )


def _delayed(fmt: Format) -> CastSpec:
    config = DELAYED["delayed"]
    return CastSpec(fmt=fmt, policy=config.policy, delayed=config)


def _blocks(granularity: str, policy: str = "torchao") -> CastSpec:
    return CastSpec(fmt=E4M3FN, granularity=granularity, policy=POLICIES[policy])


_MX = _blocks("mx_1x32", "mx_rceil")
RECIPES = {
    r.name: r
    for r in (
        Recipe(name="bf16"),
        _uniform("tensorwise", CastSpec(fmt=E4M3FN), CastSpec(fmt=E4M3FN), CastSpec(fmt=E5M2)),
        _rowwise("rowwise", weight_for_grad_input="rowwise", grad_weight_fp8=True),
        _rowwise("rowwise_with_gw_hp", weight_for_grad_input="tensorwise", grad_weight_fp8=False),
        _uniform("delayed", _delayed(E4M3FN), _delayed(E4M3FN), _delayed(E5M2)),
        _uniform("blockwise", _blocks("blockwise_1x128"), _blocks("blockwise_128x128"), _blocks("blockwise_1x128")),
        _uniform("mxfp8", _MX, _MX, _MX),
    )
}
# The word of filter_fqns that keeps small linears in high precision, and the weights [N, K] that are small: N and K no more than those of a
# pair. torchao 0.18's, float8/float8_linear_utils.py, _auto_filter_for_recipe: where FP8 gained too little on an H100. It states none for other
# recipes. Delayed scaling takes tensorwise's: it runs the same GEMMs.
AUTO_FILTER = "auto_filter_small_kn"
SMALL: dict[str, tuple[tuple[float, float], ...]] = {
    "tensorwise": ((1024, 4096),),
    "rowwise": ((2048, math.inf), (math.inf, 1024), (4096, 2048)),
    "delayed": ((1024, 4096),),
}
SHARED_RECIPES = tuple(name for name, recipe in RECIPES.items() if recipe.shared)


def by_name(recipe: str | Recipe) -> Recipe:
    """The recipe of that name; a Recipe is itself; ValueError for anything else."""
    return registry.lookup("recipe is a Recipe or", RECIPES, recipe, Recipe)


def delayed_casts(recipe: str | Recipe) -> dict[Role, tuple[Format, DelayedScaling]]:
    """How each role that recipe scales by its past is cast; one state serves both of its GEMMs (SEMANTICS L-6): ValueError where they cast it in two ways."""
    found: dict[Role, tuple[Format, DelayedScaling]] = {}
    recipe = by_name(recipe)
    for which, gemm in recipe.gemms.items():
        for role, spec in zip(OPERANDS[which], (gemm.a, gemm.b), strict=True):
            if (
                spec is not None
                and spec.delayed is not None
                and found.setdefault(role, (spec.fmt, spec.delayed)) != (spec.fmt, spec.delayed)
            ):
                raise ValueError(f"recipe {recipe.name!r} scales {role} by one state, so casts it in one way; got two.")
    return found


def matches(pattern: str, name: str) -> bool:
    """Whether pattern names this module (SEMANTICS R-3): a run of whole dotted components, or a shell pattern for all of it.

    >>> matches("layers.1", "model.layers.1.mlp.up_proj"), matches("layers.1", "model.layers.10.mlp.up_proj")
    (True, False)
    >>> matches("*.mlp.*", "model.layers.10.mlp.up_proj"), matches("mlp", "model.layers.10.mlp.up_proj")
    (True, True)
    """
    if any(c in pattern for c in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return bool(pattern) and f".{pattern}." in f".{name}."


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What becomes of one linear, and why: reason is for a person, and names the pattern or the rule."""

    path: str
    shape: tuple[int, int]  # [N, K]
    recipe: Recipe  # RECIPES["bf16"] when not converted
    reason: str

    @property
    def fp8(self) -> bool:
        """Whether the linear is converted."""
        return self.recipe.fp8


def plan(
    linears: Mapping[str, tuple[int, int]],
    recipe: str | Recipe,
    *,
    filter_fqns: Sequence[str] = (),
    fp8_fqns: Sequence[str] = (),
) -> list[Decision]:
    """Which linears a recipe converts (SEMANTICS R-2 to R-4), by one rule for both backends.

    Shapes:   linears maps a module's name to its weight's shape [N, K], whole however it is sharded.
    Returns:  one Decision a linear, in the order given.
    Raises:   ValueError: a pattern that names nothing; a linear named in fp8_fqns whose dims are not multiples of 16 or of the recipe's blocks;
              'auto_filter_small_kn' for a recipe without thresholds; an FP8 recipe that converts nothing.
    """
    recipe = by_name(recipe)
    for key, patterns in (("filter_fqns", filter_fqns), ("fp8_fqns", fp8_fqns)):
        if isinstance(patterns, str):
            raise ValueError(f"{key} is a list of patterns; got the string {patterns!r}. Write [{patterns!r}].")
        if not isinstance(patterns, Collection) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(f"{key} is a list of patterns, each a string; got {patterns!r}. Leave it out, or name linears.")
        for pattern in patterns:
            if key == "filter_fqns" and pattern == AUTO_FILTER:
                continue
            if not any(matches(pattern, name) for name in linears):
                raise ValueError(
                    f"every pattern of {key} names at least one linear (R-3); {pattern!r} names none of: {', '.join(linears) or 'no linears'}."
                )
    small = _small(recipe) if AUTO_FILTER in filter_fqns else ()
    decisions = [_decide(name, shape, recipe, filter_fqns, fp8_fqns, small) for name, shape in linears.items()]
    if recipe.fp8 and not any(d.fp8 for d in decisions):
        shown = [f"{d.path}: {d.reason}" for d in decisions[:8]] + [f"and {len(decisions) - 8} more"] * (len(decisions) > 8)
        reasons = "; ".join(shown) or "the model has no linears"
        raise ValueError(f"recipe {recipe.name!r} converts no linear ({reasons}). Change filter_fqns or use recipe 'bf16'.")
    return decisions


def _small(recipe: Recipe) -> Sequence[tuple[float, float]]:
    """The thresholds of AUTO_FILTER; ValueError for an FP8 recipe that has none."""
    if not recipe.fp8:
        return ()
    if recipe.name not in SMALL or recipe != RECIPES[recipe.name]:
        raise ValueError(
            f"{AUTO_FILTER!r} in filter_fqns needs one of fp8ref's recipes with thresholds (R-4): {', '.join(SMALL)}; got {recipe.name!r}, "
            f"for which there is no data. Name the small linears in filter_fqns instead."
        )
    return SMALL[recipe.name]


def _decide(
    name: str,
    shape: tuple[int, int],
    recipe: Recipe,
    filter_fqns: Sequence[str],
    fp8_fqns: Sequence[str],
    small: Sequence[tuple[float, float]],
) -> Decision:
    def kept(reason: str) -> Decision:
        return Decision(path=name, shape=shape, recipe=RECIPES["bf16"], reason=reason)

    if not recipe.fp8:
        return kept(f"recipe {recipe.name!r} has no FP8 GEMM")
    named = [p for p in fp8_fqns if matches(p, name)]
    filtered = [p for p in filter_fqns if matches(p, name)]
    if filtered and not named:
        return kept(f"named by filter_fqns {filtered[0]!r}")
    multiples = [_multiple(recipe, which) for which in ("grad_input", "output")]  # which reduce N and K
    if any(length % multiple for length, multiple in zip(shape, multiples, strict=True)):
        reason = f"recipe {recipe.name!r} needs multiples of {multiples} for [N, K] (L-5, S-6); {name} is {list(shape)}"
        if named:
            raise ValueError(f"{reason}, and fp8_fqns {named[0]!r} names it. Pad the layer or drop the pattern.")
        return kept(reason)
    for most in () if named else small:
        if all(length <= limit for length, limit in zip(shape, most, strict=True)):
            limits = " and ".join(f"{axis} <= {limit}" for axis, limit in zip("NK", most, strict=True) if limit < math.inf)
            return kept(f"{AUTO_FILTER!r} keeps {limits} from recipe {recipe.name!r} (R-4); {name} is {list(shape)}")
    return Decision(
        path=name, shape=shape, recipe=recipe, reason=f"named by fp8_fqns {named[0]!r}" if named else "every linear not filtered"
    )


def _multiple(recipe: Recipe, which: Gemm) -> int:
    """What the length that a GEMM reduces is a multiple of: of 16 (L-5), and of the blocks of its operands (S-6)."""
    casts = [cast for cast in (recipe.gemms[which].a, recipe.gemms[which].b) if cast is not None]
    return math.lcm(16, *(granularity.by_name(cast.granularity).reduced or 1 for cast in casts))


def check_gemms(recipe: Recipe, taken: tuple[str, ...], implemented: Callable[[ScalePolicy], object]) -> None:
    """Hold each FP8 GEMM of a recipe to what a backend has: epilogues of those names, and policies that ``implemented`` does not refuse.

    Raises:   ValueError: naming the GEMM; as ``epilogue.check_pair`` and ``implemented``.
    """
    for which, spec in recipe.gemms.items():
        if spec.a is None or spec.b is None:
            continue
        try:
            epilogue.check_pair(spec.epilogue, taken, spec.a.granularity, spec.b.granularity)
            for cast in (spec.a, spec.b):
                if cast.delayed is None:
                    implemented(cast.policy)
        except ValueError as error:
            raise ValueError(f"{which} of recipe {recipe.name!r}: {error}") from None
