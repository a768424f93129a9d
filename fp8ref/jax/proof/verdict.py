"""The verdict on a step: which GEMMs and gathers that should run in FP8 do (spec B-7).

``read`` takes a lowered step. If nothing is left for XLA to partition (one device, or shard_map),
its StableHLO shows all GEMMs and collectives. Under plain jit on a mesh the collectives exist only
after SPMD partitioning, so the program is compiled and the HLO after that pass is read.
``read_compiled`` reads the HLO after all passes, which names the kernels of a GPU.
"""

import collections
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from fp8ref import recipe as recipes
from fp8ref.jax.distributed import persistent_cache
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.gemm import gemm
from fp8ref.jax.proof import hlo
from fp8ref.jax.proof.hlo import COLLECTIVES, Operation
from fp8ref.jax.quantize import cast
from fp8ref.recipe import OPERANDS, Recipe


@dataclass(frozen=True)
class Program:
    """The dots and collectives of a step, in order.

    source    ``stablehlo``, ``hlo after spmd partitioning`` or ``optimized hlo``.
    """

    operations: tuple[Operation, ...]
    source: str


@dataclass(frozen=True)
class Gemm:
    """One dot, or one GEMM under simulated hardware.

    layer, which     the linear and its GEMM, or the layer of attention and its product; None
                     outside of both.
    a, b             dtypes of the operands, in the order of spec L-2: grad_output before input.
    accumulate       ``fast`` or ``slow`` (G-7).
    multiplications  M N K.
    kernel           in optimized HLO, what multiplies.
    plan             the simulated hardware that multiplies on the host (G-19); None for a dot.
    """

    layer: str | None
    which: str | None
    a: str
    b: str
    out: str
    shape: tuple[int, ...]
    accumulate: str
    multiplications: int
    kernel: str = ""
    plan: str | None = None

    @property
    def fp8(self) -> bool:
        """True if both operands are FP8, or FP4 (G-26)."""
        return self.a.startswith(("f8", "f4")) and self.b.startswith(("f8", "f4"))

    @property
    def said(self) -> str:
        """Its types, accumulation and plan, as ``promised`` says what is planned."""
        return promised(self.a, self.b, self.accumulate, self.plan)

    @property
    def entry(self) -> dict[str, Any]:
        """The GEMM in a run's manifest."""
        entry = {"gemm": f"{self.layer}/{self.which}", "a": self.a, "b": self.b}
        return {**entry, "accumulate": self.accumulate}


@dataclass(frozen=True)
class Collective:
    """One collective: the dtype that it moves, and the shape of its result."""

    layer: str | None
    which: str | None
    kind: str
    dtype: str
    shape: tuple[int, ...]


def read(lowered: jax.stages.Lowered) -> Program:
    """The operations of ``jax.jit(f).lower(...)``; compiles only what XLA has yet to partition.

    Raises:   RuntimeError: a jax that dumps no HLO behind that pass.
    """
    operations = tuple(hlo.from_stablehlo(_module(lowered)))
    if not _left_to_partition(lowered):
        return Program(operations, "stablehlo")
    # past the cache, so that XLA dumps
    with tempfile.TemporaryDirectory() as directory, persistent_cache.bypassed():
        lowered.compile(
            compiler_options={"xla_dump_to": directory, "xla_dump_hlo_pass_re": ".*spmd.*"}
        )
        texts = sorted(Path(directory).glob("*after_spmd-partitioning*.txt"))
        if not texts:
            raise RuntimeError(
                "fp8ref.jax.proof needs HLO after SPMD partitioning; XLA wrote none. Use shard_map."
            )
        return Program(tuple(hlo.from_text(texts[-1].read_text())), "hlo after spmd partitioning")


def read_compiled(compiled: jax.stages.Compiled | str) -> Program:
    """The operations of a step as XLA compiled it for a GPU, or of its text."""
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    return Program(tuple(hlo.from_text(text or "")), "optimized hlo")


def gemms(program: Program) -> list[Gemm]:
    """Every dot, and every GEMM under simulated hardware, in the program's order."""
    dots = []
    for op in program.operations:
        if op.kind not in ("dot_general", "simulated"):
            continue
        (a, b), plan = (dtype for dtype, _ in op.operands), None
        if op.kind == "simulated":
            plan, _, accumulate = op.precision.rpartition(":")
        else:
            accumulate = "slow" if "HIGH" in op.precision.upper() else "fast"
            a, b = (b, a) if op.turned else (a, b)
        (layer, which), (out, shape) = op.place, op.result
        work = op.multiplications
        dots.append(Gemm(layer, which, a, b, out, shape, accumulate, work, op.kernel, plan))
    return dots


def collectives(program: Program) -> list[Collective]:
    """Every collective, in the program's order."""
    ops = [(op.place, op) for op in program.operations if op.kind in COLLECTIVES]
    return [Collective(layer, which, op.kind, *op.result) for (layer, which), op in ops]


def missing(
    program: Program,
    planned: Mapping[str, str | Recipe],
    placements: Mapping[str, Placement] | None = None,
    plan: str | None = None,
) -> list[str]:
    """FP8 GEMMs and gathers that the recipes ask for and the program lacks, a line for each.

    planned    layer -> its recipe. Each FP8 GEMM must be there, in its operand types and
               accumulation.
    placements layer -> its placement. A weight, or a tensor-parallel input or grad_output, must be
               gathered in FP8; a wider gather is a line of its own.
    plan       simulated hardware that must run all of the GEMMs (B-12); None: XLA's own dots.

    A GEMM on dequantized operands (G-16) runs no FP8 dot, so only a plan asks for it.
    """
    lines, dots, moved = [], gemms(program), collectives(program)
    for layer, recipe in planned.items():
        for which, spec in recipes.by_name(recipe).gemms.items():
            if spec.a is None or spec.b is None:
                continue
            if plan is None and gemm.dequantizes(spec.a.granularity):
                continue
            a, b = (hlo_name(cast.DTYPES[each.fmt.name]) for each in (spec.a, spec.b))
            expected = promised(a, b, spec.accumulate, plan)
            here = [dot for dot in dots if (dot.layer, dot.which) == (layer, which)]
            others = [dot.said for dot in here if dot.said != expected]
            promise = f"{layer}/{which}: planned {expected}"
            lines += [f"{promise}; {have}" for have in (others if here else ["found no such dot"])]
            place, placement = f"{layer}/{which}", (placements or {}).get(layer)
            lines += [f"{place}: {line}" for line in _gathers(moved, place, recipe, placement)]
    return lines


def _gathers(
    moved: list[Collective], place: str, recipe: str | Recipe, placement: Placement | None
) -> Iterator[str]:
    """What a GEMM's gathers lack: one in FP8 for each role that the placement gathers, none wider.
    place: ``layer/which``."""
    layer, _, which = place.rpartition("/")
    roles = OPERANDS[which]  # type: ignore[index]
    gathered = [role for role in roles if placement and placement.gathered(role)]
    here = [m for m in moved if (m.layer, m.which, m.kind) == (layer, which, "all_gather")]
    in_fp8 = [m for m in here if m.dtype.startswith("f8")]
    if len(in_fp8) + _merged(moved, layer, which, recipe, placement) < len(gathered):
        yield (
            f"planned {len(gathered)} gathers in FP8, of {', '.join(gathered)}; found {len(in_fp8)}"
        )
    paired = "grad_output" in gathered and recipes.by_name(recipe).pairs_gradients
    for m in here:
        # Scales of rows are [..., M, 1], or [M] where XLA leaves the 1 out.
        numbers = len(m.shape) > 1 and 1 not in m.shape[-2:]
        if not m.dtype.startswith("f8") and numbers and not (paired and _is_bits(m.dtype)):
            yield f"gathers {m.dtype}{list(m.shape)}"


def lost(compiled: Program, program: Program) -> list[str]:
    """FP8 dots that XLA compiled to a wider type, or whose scales it rounded, a line for each.

    XLA may merge dots that share an operand into one, under one dot's name. So a dot without a
    kernel of its name is lost only if the FP8 kernels of its kind (output, grad_input or
    grad_weight; fast or slow) multiply less than the program's dots of that kind.
    """

    def kind(dot: Gemm) -> tuple[str | None, str]:
        return dot.which, dot.accumulate

    # How much of each kind's work FP8 kernels leave undone: positive where some dot was lost.
    dots, here = [dot for dot in gemms(program) if dot.fp8], gemms(compiled)
    left: collections.Counter = collections.Counter()
    for sign, those in ((1, dots), (-1, [dot for dot in here if dot.fp8])):
        for dot in those:
            left[kind(dot)] += sign * dot.multiplications
    lines = []
    for dot in dots:
        own = [k for k in here if (k.layer, k.which) == (dot.layer, dot.which)]
        if (own or left[kind(dot)] > 0) and not any(k.fp8 and kind(k) == kind(dot) for k in own):
            kernels = [f"{k.a} x {k.b}, {k.accumulate}, by {k.kernel}" for k in own] or [
                "no kernel of its name"
            ]
            lines.append(
                f"{dot.layer}/{dot.which}: {dot.a} x {dot.b}, {dot.accumulate}, is compiled to "
                f"{'; '.join(kernels)}"
            )
    lines += [
        f"{op.place[0]}/{op.place[1]}: XLA rounded its scales to bfloat16. Compile with "
        "xla_allow_excess_precision, XLA's default."
        for op in compiled.operations
        if op.rounds_scale
    ]
    return lines


def kernels(compiled: Program) -> dict[str, int]:
    """The number of kernels by name and operand types: {"__cublas$lt$matmul$f8: f8e4m3fn x
    f8e4m3fn": 2}."""
    return dict(collections.Counter(f"{dot.kernel}: {dot.a} x {dot.b}" for dot in gemms(compiled)))


def gathers(program: Program) -> dict[str, int]:
    """The number of gathered tensors, by type."""
    return dict(
        collections.Counter(m.dtype for m in collectives(program) if m.kind == "all_gather")
    )


def manifest(
    program: Program,
    planned: Mapping[str, str | Recipe],
    missing: list[str],
    compiled: Program | None = None,
    plan: str | None = None,
) -> dict:
    """The proof as a run's manifest keeps it.

    It holds the dots of planned linears, gathers by type, GEMMs on dequantized operands and what is
    missing; GEMMs of FP4 operands, which are emulated (R-9); under simulated hardware its GEMMs; of
    a compiled program its kernels and gathers.
    """
    here = [dot for dot in gemms(program) if dot.layer in planned]
    by_hardware = {f"{dot.layer}/{dot.which}" for dot in here if dot.fp8 and dot.plan is None}
    dequantized = [
        f"{layer}/{which}"
        for layer, recipe in planned.items()
        for which, spec in recipes.by_name(recipe).gemms.items()
        if spec.a and plan is None and gemm.dequantizes(spec.a.granularity)
        if f"{layer}/{which}" not in by_hardware
    ]
    proof = {
        "read_from": program.source,
        "gemms": [dot.entry | {"fp8": dot.fp8} for dot in here if dot.plan is None],
        "on_dequantised_operands": dequantized,
        "gathers": gathers(program),
        "missing": missing,
    }
    if emulated := [g for g in recipes.emulated_gemms(planned) if g not in by_hardware]:
        proof["emulated"] = emulated
    if plan:
        proof["simulated"] = [dot.entry | {"plan": dot.plan} for dot in here if dot.plan]
    if compiled:
        proof["compiled"] = {"kernels": kernels(compiled), "gathers": gathers(compiled)}
    return proof


def promised(a: str, b: str, accumulate: str | None, plan: str | None) -> str:
    """A dot of operands of these types, in a line of what is planned."""
    return f"{a} x {b}, {accumulate}" + (f", under {plan}" if plan else "")


def _merged(
    moved: list[Collective],
    layer: str,
    which: str,
    recipe: str | Recipe,
    placement: Placement | None,
) -> int:
    """1 if the other backward GEMM gathers grad_output for both: JAX merges equal gathers; of two
    sets of codes one moves, with bits (P-6)."""
    other = {"grad_input": "grad_weight", "grad_weight": "grad_input"}.get(which)
    if other is None or placement is None or not placement.gathered("grad_output"):
        return 0
    dtypes = [m.dtype for m in moved if (m.layer, m.which, m.kind) == (layer, other, "all_gather")]
    paired = recipes.by_name(recipe).pairs_gradients and any(map(_is_bits, dtypes))
    if not paired and not recipes.by_name(recipe).serves_both("grad_output"):
        return 0
    needed = sum(bool(placement.gathered(role)) for role in OPERANDS[other])  # type: ignore[index]
    return int(sum(dtype.startswith("f8") for dtype in dtypes) >= needed)


def _is_bits(dtype: str) -> bool:
    """Whether a gather of this dtype moves the bits of ``paired_codes``."""
    return dtype in ("u8", "ui8")


def hlo_name(dtype) -> str:
    """HLO's name of an FP8 dtype: f8e4m3fn."""
    return jax.numpy.dtype(dtype).name.replace("float8_", "f8")


def _left_to_partition(lowered: jax.stages.Lowered) -> bool:
    """Whether XLA must split a dot over several devices, outside of shard_map."""
    module = _module(lowered)
    partitions = 1
    if "mhlo.num_partitions" in module.attributes:
        partitions = module.attributes["mhlo.num_partitions"].value
    if partitions == 1:
        return False
    functions = {str(op.attributes["sym_name"].value): op for op in hlo.children(module)}
    names, visited = ["main"], set()
    while names:
        if (name := names.pop()) in visited:
            continue
        visited.add(name)
        for op in hlo.walk(functions[name], skip="sdy.manual_computation"):
            if op.name == "stablehlo.dot_general":
                return True
            if op.name == "func.call":
                names.append(str(op.attributes["callee"].value))
    return False


def _module(lowered: jax.stages.Lowered):
    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    return module.operation
