"""A recipe states how each of a linear's three GEMMs is computed (spec L, R-1).

``selection.linears`` states which linears of a model it converts.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from fp8ref.formats import E2M1FN, E4M3FN, E5M2, Format
from fp8ref.policy import FP4_POLICIES, POLICIES
from fp8ref.shared import registry
from fp8ref.spec import epilogue, granularity, support
from fp8ref.spec.delayed import DELAYED, DelayedScaling
from fp8ref.spec.gemm import CastSpec as CastSpec
from fp8ref.spec.gemm import GemmSpec as GemmSpec
from fp8ref.spec.rotation import NVFP4_ROTATION

__all__ = ["RECIPES", "CastSpec", "GemmSpec", "Recipe"]

Gemm = Literal["output", "grad_input", "grad_weight"]
"""The three GEMMs of a linear (spec L-2).

output       input times weight
grad_input   grad_output times weight
grad_weight  grad_output times input
"""

Role = Literal["input", "weight", "grad_output"]
"""What a tensor is to a linear: input [M, K], weight [N, K] or grad_output [M, N] (L-2)."""

ROLES: tuple[Role, ...] = get_args(Role)
"""The values of ``Role``, in order."""

OPERANDS: dict[Gemm, tuple[Role, Role]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
"""The roles of the operands a and b of each GEMM (spec L-2)."""

REDUCED_AXES: dict[Gemm, tuple[int, int]] = {
    "output": (1, 1),
    "grad_input": (1, 0),
    "grad_weight": (0, 0),
}
"""For each GEMM, the axes along which it reduces the tensors of its operands a and b.

The tensors are input [M, K], weight [N, K] and grad_output [M, N].
"""

Style = Literal["colwise", "rowwise"]
"""How tensor-parallel ranks cut a linear: ``colwise`` cuts outputs, N; ``rowwise`` inputs, K."""

CUT_AXES: dict[Style, dict[Role, int]] = {
    "colwise": {"weight": 0, "grad_output": 1},
    "rowwise": {"input": 1, "weight": 1},
}
"""The axis along which each style cuts a linear's tensors; the third is whole on every rank."""


_HIGH_PRECISION = GemmSpec()


class OperandCast(NamedTuple):
    """How a GEMM casts an operand, and the axis of its tensor that the GEMM reduces."""

    gemm: Gemm
    role: Role
    cast: CastSpec
    axis: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Three GEMMs of two operands, as a and b; all in high precision unless given.

    output       input [M, K] and weight [N, K], reduces K.
    grad_input   grad_output [M, N] and weight, reduces N.
    grad_weight  grad_output and input, reduces M.
    """

    name: str
    output: GemmSpec = _HIGH_PRECISION
    grad_input: GemmSpec = _HIGH_PRECISION
    grad_weight: GemmSpec = _HIGH_PRECISION

    @property
    def gemms(self) -> dict[Gemm, GemmSpec]:
        """The three by name, in the order in which a step computes them."""
        return {
            "output": self.output,
            "grad_input": self.grad_input,
            "grad_weight": self.grad_weight,
        }

    @property
    def fp8(self) -> bool:
        """Whether any operand of its GEMMs is cast to FP8."""
        return bool(self.casts)

    @property
    def operand_casts(self) -> list[OperandCast]:
        """Every operand that is cast, GEMM after GEMM."""
        return [
            OperandCast(which, role, cast, axis)
            for which, spec in self.gemms.items()
            for role, cast, axis in zip(
                OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True
            )
            if cast is not None
        ]

    @property
    def casts(self) -> tuple[CastSpec, ...]:
        """Every operand's cast, GEMM after GEMM; none of a GEMM in high precision."""
        return tuple(operand.cast for operand in self.operand_casts)

    @property
    def simulated(self) -> bool:
        """Whether the simulator alone has it, for one of its casts (spec R-9)."""
        return any(cast.simulated for cast in self.casts)

    @property
    def emulated(self) -> bool:
        """Whether any operand is in FP4, which backends emulate, or refuse (spec R-9)."""
        return any(spec.emulated for spec in self.gemms.values())

    @property
    def stochastic(self) -> bool:
        """Whether any operand is rounded stochastically, so that a linear takes a seed."""
        return any(cast.stochastic for cast in self.casts)

    @property
    def delayed(self) -> bool:
        """Whether any operand is scaled by amaxes of earlier steps: linears then keep a state."""
        return any(cast.delayed is not None for cast in self.casts)

    @property
    def in_blocks(self) -> bool:
        """Whether any operand has scales of blocks along its reduced axis (G-16, G-17)."""
        return any(granularity.by_name(cast.granularity).reduced is not None for cast in self.casts)

    @property
    def shared(self) -> bool:
        """Whether torchao's scaling covers it: each operand by its own amax, over the tensor or a
        row. The cross-check replays such recipes on JAX's meshes."""
        return not self.delayed and not self.in_blocks and all(cast.plain for cast in self.casts)

    def serves_both(self, role: Role) -> bool:
        """Whether both GEMMs of a role take it alike: not cast, or by one scale of the tensor."""
        casts = [operand.cast for operand in self.operand_casts if operand.role == role]
        whole = all(cast.granularity == "tensorwise" and cast.plain for cast in casts)
        return whole and len(casts) != 1 and len(set(casts)) < 2

    @property
    def pairs_gradients(self) -> bool:
        """Whether JAX gathers codes of grad_output for both backward GEMMs together (spec P-6)."""
        first, second = self.grad_input.a, self.grad_weight.a
        return first is not None and first == second and first.pairs

    @property
    def rows(self) -> int:
        """The length of the blocks along M in which grad_weight scales its operands, of which the
        last may be shorter; 1 without blocks (spec L-5)."""
        casts = [cast for cast in (self.grad_weight.a, self.grad_weight.b) if cast is not None]
        return math.lcm(*(granularity.by_name(cast.granularity).reduced or 1 for cast in casts))

    def multiple(self, style: Style) -> int:
        """What a rank's part of N (colwise) or K (rowwise) is a multiple of: whole blocks (P-5)."""
        sizes = {1}
        for _, role, cast, axis in self.operand_casts:
            if role in CUT_AXES[style]:
                kind = granularity.by_name(cast.granularity)
                sizes.add((kind.reduced if CUT_AXES[style][role] == axis else kind.other) or 1)
        return math.lcm(*sizes)


def _uniform(name: str, forward: CastSpec, weight: CastSpec, backward: CastSpec) -> Recipe:
    """One cast for the input, one for the weight and one for grad_output, wherever they go; a
    GEMM's epilogue is scale_then_round, the default of GemmSpec."""
    return Recipe(
        name=name,
        output=GemmSpec(a=forward, b=weight, accumulate="fast"),
        grad_input=GemmSpec(a=backward, b=weight, accumulate="slow"),
        grad_weight=GemmSpec(a=backward, b=forward, accumulate="slow"),
    )


_ROW = CastSpec(fmt=E4M3FN, granularity="rowwise", policy=POLICIES["torchao_pow2"])


def _rowwise(name: str, *, weight_for_grad_input: str, grad_weight_fp8: bool) -> Recipe:
    row = _ROW
    weight = CastSpec(
        fmt=E4M3FN, granularity=weight_for_grad_input, policy=POLICIES["torchao_pow2"]
    )
    slow = GemmSpec(a=row, b=row, accumulate="slow", epilogue="unit_round_scale_round")
    return Recipe(
        name=name,
        output=GemmSpec(a=row, b=row, accumulate="fast"),
        grad_input=GemmSpec(a=row, b=weight, accumulate="slow", epilogue="unit_round_scale_round"),
        grad_weight=slow if grad_weight_fp8 else GemmSpec(),
    )


def _tensorwise(fmt: Format, policy: str = "torchao") -> CastSpec:
    """One scale for the whole tensor, of its own amax, by one of torchao's policies."""
    return CastSpec(fmt=fmt, granularity="tensorwise", policy=POLICIES[policy])


def _tensorwise_pow2() -> Recipe:
    """As tensorwise, with scales in powers of two: an amax of nearly the last step's has its scale,
    so that a cast may guess it."""
    forward = _tensorwise(E4M3FN, "torchao_pow2")
    return _uniform("tensorwise_pow2", forward, forward, _tensorwise(E5M2, "torchao_pow2"))


def _delayed(fmt: Format) -> CastSpec:
    config = DELAYED["delayed"]
    return CastSpec(fmt=fmt, policy=config.policy, delayed=config)


def _blocks(granularity: str, policy: str = "torchao") -> CastSpec:
    return CastSpec(fmt=E4M3FN, granularity=granularity, policy=POLICIES[policy])


def _blockwise(name: str, policy: str) -> Recipe:
    """DeepSeek-V3's: lines of 128 of activations and gradients, squares of 128 of weights."""
    line = _blocks("blockwise_1x128", policy)
    return _uniform(name, line, _blocks("blockwise_128x128", policy), line)


def _nvfp4() -> Recipe:
    """Transformer Engine's NVFP4BlockScaling (common/recipe/__init__.py, commit d0067d0d): squares
    of 16 of weights, stochastic gradients, and rotated operands of grad_weight."""
    line = CastSpec(fmt=E2M1FN, granularity="nvfp4_1x16", policy=FP4_POLICIES["te_nvfp4"])
    square = dataclasses.replace(line, granularity="nvfp4_16x16")
    rotated = dataclasses.replace(line, rotation=NVFP4_ROTATION)
    return Recipe(
        name="nvfp4",
        output=GemmSpec(a=line, b=square, accumulate="fast"),
        grad_input=GemmSpec(
            a=dataclasses.replace(line, rounding="stochastic"), b=square, accumulate="fast"
        ),
        grad_weight=GemmSpec(
            a=dataclasses.replace(rotated, rounding="stochastic"), b=rotated, accumulate="fast"
        ),
    )


_MX = _blocks("mx_1x32", "mx_rceil")
_MX_SQUARE = dataclasses.replace(_MX, granularity="mx_32x32")
_MXFP4 = dataclasses.replace(_MX, fmt=E2M1FN)
RECIPES = {
    r.name: r
    for r in (
        Recipe(name="bf16"),
        _uniform("tensorwise", _tensorwise(E4M3FN), _tensorwise(E4M3FN), _tensorwise(E5M2)),
        _rowwise("rowwise", weight_for_grad_input="rowwise", grad_weight_fp8=True),
        _rowwise("rowwise_with_gw_hp", weight_for_grad_input="tensorwise", grad_weight_fp8=False),
        _uniform("delayed", _delayed(E4M3FN), _delayed(E4M3FN), _delayed(E5M2)),
        _blockwise("blockwise", "torchao"),
        _uniform("mxfp8", _MX, _MX, _MX),
        _blockwise("blockwise_deepgemm", "deepgemm"),
        _blockwise("blockwise_ue8m0", "deepgemm_ue8m0"),
        _tensorwise_pow2(),
        _uniform("rowwise_native", _ROW, _ROW, _ROW),
        _nvfp4(),
        _uniform("mxfp4", _MXFP4, _MXFP4, _MXFP4),
        _uniform("mxfp8_32x32", _MX, _MX_SQUARE, _MX),
    )
}
"""fp8ref's recipes by name (R-1)."""

SHARED_RECIPES = tuple(name for name, recipe in RECIPES.items() if recipe.shared)
"""Names of the recipes that are ``shared``: torchao's scaling covers them."""


def by_name(recipe: str | Recipe) -> Recipe:
    """The recipe of that name; a Recipe is itself; ValueError for anything else."""
    return registry.lookup("recipe is a Recipe or", RECIPES, recipe, Recipe)


def delayed_casts(recipe: str | Recipe) -> dict[Role, tuple[Format, DelayedScaling]]:
    """How each role that recipe scales by its past is cast; one state serves both of its GEMMs
    (spec L-6): ValueError where they cast it in two ways.
    """
    casts: dict[Role, tuple[Format, DelayedScaling]] = {}
    recipe = by_name(recipe)
    for _, role, spec, _ in recipe.operand_casts:
        if spec.delayed is None:
            continue
        if casts.setdefault(role, (spec.fmt, spec.delayed)) != (spec.fmt, spec.delayed):
            raise ValueError(
                f"recipe {recipe.name!r} has one {role} state, so it needs one cast; got two."
            )
    return casts


def casts_weight_once(recipe: Recipe) -> bool:
    """Whether a weight is cast once for both its GEMMs, by one scale of its own amax, so that an
    optimizer may keep the FP8 copy (spec O-16)."""
    spec = recipe.output.b
    if spec is None or not recipe.serves_both("weight"):
        return False
    return (
        spec.delayed is None and not spec.policy.makes_scale_inv and spec.policy.stored == "scale"
    )


def weight_copy(recipe: str | Recipe) -> CastSpec:
    """The cast of weights that are kept in FP8, which linears take as they are (spec O-16).

    Raises:   ValueError: an unknown recipe; one that does not cast a weight once for both its
              GEMMs, by one scale of its own amax.
    """
    recipe = by_name(recipe)
    spec = recipe.output.b
    if spec is None or not casts_weight_once(recipe):
        raise ValueError(
            "prepared weights need a recipe that casts each once for both its GEMMs, by its own "
            f"amax; recipe {recipe.name!r} does not. Use 'tensorwise' (O-16)."
        )
    return spec


def fp8_recipes() -> dict[str, Recipe]:
    """The recipes that cast to FP8, without those in FP4."""
    return {name: recipe for name, recipe in RECIPES.items() if recipe.fp8 and not recipe.emulated}


def check_trained(recipe: str | Recipe, what: str = "recipe") -> Recipe:
    """The recipe of that name, for a backend or the trainer; what: where it was named.

    Raises:   ValueError: an unknown name, or a recipe under simulation alone, naming what to use
              instead.
    """
    resolved = RECIPES.get(recipe) if isinstance(recipe, str) else recipe
    if resolved is not None and all(
        support.takes("recipes", backend, resolved) for backend in support.BACKENDS
    ):
        return resolved  # before the names are listed: a model asks for each of its linears
    names = ", ".join(RECIPES)
    if resolved is None:
        near = registry.nearest(str(recipe), RECIPES)
        raise ValueError(f"{what} is one of {names}; got {recipe!r}.{near}")
    for backend in support.BACKENDS:
        support.require("recipes", backend, resolved, what=what, trained=names)
    return resolved


def emulated_gemms(planned: Mapping[str, str | Recipe]) -> list[str]:
    """The GEMMs of FP4 operands, as ``<layer>/<GEMM>``; planned: the recipe of each layer."""
    return [
        f"{layer}/{which}"
        for layer, recipe in planned.items()
        for which, spec in by_name(recipe).gemms.items()
        if spec.emulated
    ]


def check_gemms(recipe: Recipe, backend: support.Backend) -> None:
    """Hold each FP8 GEMM of a recipe to the epilogues and policies that a backend has.

    Raises:   ValueError: naming the GEMM; as ``check_trained``, ``epilogue.check_pair`` and
              ``support.scale_policy``.
    """
    check_trained(recipe)
    for which, spec in recipe.gemms.items():
        if spec.a is None or spec.b is None:
            continue
        try:
            epilogue.check_pair(spec.epilogue, backend, spec.a.granularity, spec.b.granularity)
            for cast in (spec.a, spec.b):
                if cast.delayed is None:
                    support.scale_policy(cast.policy, backend)
        except ValueError as error:
            raise ValueError(f"{which} of recipe {recipe.name!r}: {error}") from None
