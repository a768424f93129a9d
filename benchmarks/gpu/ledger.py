"""Where a linear's time goes, at the least: its GEMMs as measured, what its casts move over the measured bandwidth, and gaps between kernels.

Bytes are those of casts that are kernels of their own over bfloat16 tensors. One that has to see the whole tensor first (an amax of it, of
this step) reads it twice; one whose scales are of rows, or known beforehand, once. Codes are a byte an element; those that serve two GEMMs are
written once more, transposed, since Hopper's FP8 GEMM wants what it reduces to be contiguous. A slow rowwise GEMM runs on unit scales, and
its bfloat16 result is read and written once more. A compiler that fuses a cast with what comes before it can do better than this floor.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fp8ref.recipe import OPERANDS, RECIPES, CastSpec, Gemm, GemmSpec, Recipe, Role

HP, CODE = 2, 1  # bytes of an element
INPUT_OF = {"q_proj": "attention", "k_proj": "attention", "v_proj": "attention", "gate_proj": "mlp", "up_proj": "mlp"}


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """bandwidth: bytes a second, read and written. gap: seconds from the start of one kernel to that of the next, at least."""

    bandwidth: float
    gap: float


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes that a linear's casts and epilogues move, and kernels that it launches."""

    amax: int = 0
    cast: int = 0
    transpose: int = 0
    epilogue: int = 0
    launches: int = 0

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(**{key: value + getattr(other, key) for key, value in vars(self).items()})

    def seconds(self, ceilings: Ceilings) -> float:
        return (self.amax + self.cast + self.transpose + self.epilogue) / ceilings.bandwidth + self.launches * ceilings.gap


def dims(which: Gemm, m: int, n: int, k: int) -> tuple[int, int, int]:
    """Of a linear [M, K] by [N, K]: the M, N and K of one of its GEMMs."""
    return {"output": (m, n, k), "grad_input": (m, k, n), "grad_weight": (n, k, m)}[which]


def gemm_name(which: Gemm, spec: GemmSpec) -> str:
    """How a GEMM is called in the table: recipes that run the same one share its measurement."""
    if spec.a is None or spec.b is None:
        return f"{which} bf16"
    scales = "unit" if spec.epilogue == "unit_round_scale_round" else "rowwise" if spec.rowwise else "tensorwise"
    return f"{which} {spec.a.fmt.name} x {spec.b.fmt.name} {scales} {spec.accumulate}"


def cast(spec: CastSpec, elements: int, layouts: int) -> Moved:
    """One cast of a tensor, into so many layouts."""
    whole = spec.granularity == "tensorwise" and spec.delayed is None
    return Moved(
        amax=HP * elements * whole,
        cast=(HP + CODE) * elements,
        transpose=CODE * elements * (layouts - 1),
        launches=1 + whole,
    )


def moved(recipe: Recipe, m: int, n: int, k: int, *, roles: Iterable[Role] = ("input", "weight", "grad_output")) -> Moved:
    """What one linear moves for these roles, each linear casting its own; the three GEMMs' launches and epilogues are not in it."""
    elements: dict[Role, int] = {"input": m * k, "weight": n * k, "grad_output": m * n}
    total = Moved()
    for role in roles:
        served: dict[tuple, int] = {}
        for which, spec in recipe.gemms.items():
            for operand, found in zip(OPERANDS[which], (spec.a, spec.b), strict=True):
                if operand == role and found is not None:
                    key = (found, None if found.granularity == "tensorwise" else which)
                    served[key] = served.get(key, 0) + 1
        for (found, _), layouts in served.items():
            total += cast(found, elements[role], layouts)
    return total


def products(recipe: Recipe, m: int, n: int, k: int) -> Moved:
    """The launches and the epilogues of the three GEMMs."""
    total = Moved()
    for which, spec in recipe.gemms.items():
        rows, columns, _ = dims(which, m, n, k)
        unit = spec.epilogue == "unit_round_scale_round"
        total += Moved(epilogue=2 * HP * rows * columns * unit, launches=1 + unit)
    return total


def gemm_seconds(recipe: Recipe, gemms: Mapping[str, float]) -> float:
    """Of a linear's three GEMMs, from the measured ones by name. KeyError: one was not measured."""
    return sum(gemms[gemm_name(which, spec)] for which, spec in recipe.gemms.items())


def entry(recipe: Recipe, shape: tuple[int, int, int], gemms: Mapping[str, float], ceilings: Ceilings, measured: float | None) -> dict:
    """One line of the ledger: seconds by kind, the floor that they add up to, and the share of it in what was measured."""
    m, n, k = shape
    found = moved(recipe, m, n, k) + products(recipe, m, n, k)
    multiplied = gemm_seconds(recipe, gemms)
    floor = multiplied + found.seconds(ceilings)
    of_bytes = {key: getattr(found, key) / ceilings.bandwidth for key in ("amax", "cast", "transpose", "epilogue")}
    return {
        "recipe": recipe.name,
        "gemm": multiplied,
        **of_bytes,
        "launches": found.launches * ceilings.gap,
        "floor": floor,
        "measured": measured,
        "floor_over_measured": floor / measured if measured else None,
    }


def step_floor(
    recipe: Recipe,
    linears: Mapping[str, tuple[int, int, int]],
    gemms: Mapping[str, Mapping[str, float]],
    ceilings: Ceilings,
    *,
    layers: int,
    bf16_step: float,
) -> float:
    """Seconds of a step of blocks at the least: bfloat16's measured step, its linears exchanged for those of the recipe's floor.

    Shapes:   linears: (M, N, K) of a block's, by name; gemms: measured seconds by the same names.
    Order:    linears that take the same tensor cast it once (INPUT_OF), but for delayed scaling, where each has a scale of its own.
    """
    bf16 = RECIPES["bf16"]
    seconds, cast_already = 0.0, set()
    for name, (m, n, k) in linears.items():
        spec = recipe.output.a
        group = INPUT_OF.get(name) if spec is not None and spec.delayed is None else None
        roles: tuple[Role, ...] = ("weight", "grad_output") if group in cast_already else ("input", "weight", "grad_output")
        if group is not None:
            cast_already.add(group)
        found = moved(recipe, m, n, k, roles=roles) + products(recipe, m, n, k)
        seconds += gemm_seconds(recipe, gemms[name]) + found.seconds(ceilings)
        seconds -= gemm_seconds(bf16, gemms[name]) + products(bf16, m, n, k).seconds(ceilings)
    return bf16_step + layers * seconds
