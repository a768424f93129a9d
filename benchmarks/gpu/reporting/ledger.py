"""Where a linear's time goes, at the least: its GEMMs as measured, and the kernels that compilers
launch for its casts (fp8ref/estimate/kernels.py).

A kernel takes its bytes over the measured bandwidth, and no less than the gap from one kernel to
the next. A compiler that fuses a cast with what comes before it can do better than this floor.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fp8ref.estimate import kernels as passes
from fp8ref.estimate.kernels import Fusion, Kernel
from fp8ref.recipe import RECIPES, ROLES, Gemm, GemmSpec, Recipe, Role

INPUT_OF = {
    "q_proj": "attention",
    "k_proj": "attention",
    "v_proj": "attention",
    "gate_proj": "mlp",
    "up_proj": "mlp",
}
BYTES = ("amax", "cast", "layout", "rescale")
Shape = tuple[int, int, int]  # of x [M, K] by w [N, K]: M, N, K


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """bandwidth: bytes a second, read and written. gap: seconds from the start of one kernel to
    that of the next, at least.
    """

    bandwidth: float
    gap: float

    def seconds(self, kernels: Sequence[Kernel]) -> float:
        return sum(max(kernel.bytes / self.bandwidth, self.gap) for kernel in kernels)


def dims(which: Gemm, m: int, n: int, k: int) -> Shape:
    """The M, N and K of one of a linear's GEMMs."""
    return {"output": (m, n, k), "grad_input": (m, k, n), "grad_weight": (n, k, m)}[which]


def gemm_name(which: Gemm, spec: GemmSpec) -> str:
    """How a GEMM is called in the table: recipes that run the same one share its measurement."""
    if spec.a is None or spec.b is None:
        return f"{which} bf16"
    scales = (
        "unit"
        if spec.epilogue == "unit_round_scale_round"
        else "rowwise"
        if spec.rowwise
        else "tensorwise"
    )
    return f"{which} {spec.a.fmt.name} x {spec.b.fmt.name} {scales} {spec.accumulate}"


def kernels(
    recipe: Recipe, shape: Shape, how: Fusion, *, roles: Collection[Role] = ROLES
) -> list[Kernel]:
    """A linear's, without its three GEMMs, whose bfloat16 results those on unit scales read and
    write once more.

    roles   those that it casts itself.
    """
    m, n, k = shape
    elements = {"input": m * k, "weight": n * k, "grad_output": m * n}
    made = passes.linear_kernels(recipe, elements, how, passes.Place(roles=roles))
    for which, spec in recipe.gemms.items():
        if spec.epilogue == "unit_round_scale_round":
            rows, columns, _ = dims(which, *shape)
            # XLA's, too: what was measured ends in bfloat16
            made += passes.rescale(recipe, which, rows * columns, "inductor")
    return made


def gemm_seconds(recipe: Recipe, gemms: Mapping[str, float]) -> float:
    """Of a linear's three GEMMs, from the measured ones by name. KeyError: one was not measured."""
    return sum(gemms[gemm_name(which, spec)] for which, spec in recipe.gemms.items())


def entry(
    recipe: Recipe,
    shape: Shape,
    how: Fusion,
    gemms: Mapping[str, float],
    ceilings: Ceilings,
    measured: float | None,
) -> dict:
    """One line of the ledger: seconds by kind, the floor that they add up to, and the share of it
    in what was measured.

    launches: what kernels take beyond their bytes, because none takes less than the gap.
    """
    made, multiplied = kernels(recipe, shape, how), gemm_seconds(recipe, gemms)
    of_bytes = {
        part: sum(kernel.bytes for kernel in made if kernel.part == part) / ceilings.bandwidth
        for part in BYTES
    }
    floor = multiplied + ceilings.seconds(made)
    return {
        "recipe": recipe.name,
        "gemm": multiplied,
        **of_bytes,
        "launches": ceilings.seconds(made) - sum(of_bytes.values()),
        "floor": floor,
        "measured": measured,
        "floor_over_measured": floor / measured if measured else None,
    }


def step_floor(
    recipe: Recipe,
    linears: Mapping[str, Shape],
    how: Fusion,
    gemms: Mapping[str, Mapping[str, float]],
    ceilings: Ceilings,
    *,
    layers: int,
    bf16_step: float,
) -> float:
    """Seconds of a step of blocks at the least: bfloat16's measured step, its linears exchanged for
    those of the recipe's floor.

    Shapes:   linears: of a block's, by name; gemms: measured seconds by the same names.
    Order:    linears that take the same tensor cast it once (INPUT_OF), but for delayed scaling,
              where each has a scale of its own.
    """
    seconds, cast_already = 0.0, set()
    for name, shape in linears.items():
        spec = recipe.output.a
        group = INPUT_OF.get(name) if spec is not None and spec.delayed is None else None
        roles = [role for role in ROLES if role != "input" or group not in cast_already]
        if group is not None:
            cast_already.add(group)
        seconds += gemm_seconds(recipe, gemms[name]) + ceilings.seconds(
            kernels(recipe, shape, how, roles=roles)
        )
        seconds -= gemm_seconds(RECIPES["bf16"], gemms[name])
    return bf16_step + layers * seconds
