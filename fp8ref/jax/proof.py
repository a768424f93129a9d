"""What a compiled step really multiplies and moves: every dot's operand types, accumulation and layer, every collective's type (SEMANTICS B-7).

    program = proof.read(jax.jit(step).lower(*arguments))
    proof.gemms(program)            # of each dot: layer, GEMM, operand types, accumulation
    proof.collectives(program)      # of each gather and reduction: layer, type, shape
    proof.missing(program, {"mlp.up_proj": "tensorwise"}, {"mlp.up_proj": placement})    # what was planned and is not there

Where nothing is left for XLA to partition (one device, or shard_map), the StableHLO shows it all. Under plain jit on a mesh the
collectives exist only after SPMD partitioning, so that the program is compiled and the HLO behind that pass is read.
"""

import collections
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from fp8ref import recipe as recipes
from fp8ref.jax import cast, gemm
from fp8ref.jax.sharding import Placement
from fp8ref.recipe import OPERANDS, Recipe

_GEMM = re.compile(r"(?:^|[/(])(?P<layer>[^/()]+)/(?P<which>output|grad_input|grad_weight)[/)]")
_COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")
_DEFINITION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\w+\[[\d,]*\])\S* (?P<kind>[\w\-]+)\((?P<operands>[^)]*)\)")


@dataclass(frozen=True)
class Operation:
    """One operation: its kind in StableHLO's spelling, its operands' and its result's (dtype, shape), where it came from, its precision."""

    kind: str
    operands: tuple[tuple[str, tuple[int, ...]], ...]
    result: tuple[str, tuple[int, ...]]
    path: str
    precision: str

    @property
    def place(self) -> tuple[str, str] | tuple[None, None]:
        """The layer and the GEMM of it; None of an operation outside any."""
        found = _GEMM.search(self.path)
        return (found["layer"], found["which"]) if found else (None, None)


@dataclass(frozen=True)
class Program:
    """A lowered step, read. source: ``stablehlo``, or ``hlo after spmd partitioning``."""

    operations: tuple[Operation, ...]
    source: str


@dataclass(frozen=True)
class Gemm:
    """One dot. accumulate is ``fast`` or ``slow`` (G-7); layer and which are None of a dot that is no linear's."""

    layer: str | None
    which: str | None
    a: str
    b: str
    out: str
    shape: tuple[int, ...]
    accumulate: str

    @property
    def fp8(self) -> bool:
        return self.a.startswith("f8") and self.b.startswith("f8")


@dataclass(frozen=True)
class Collective:
    """One collective: what it moves, and to which shape."""

    layer: str | None
    which: str | None
    kind: str
    dtype: str
    shape: tuple[int, ...]


def read(lowered: jax.stages.Lowered) -> Program:
    """The operations of ``jax.jit(f).lower(...)``. Compiles only where XLA has yet to partition the program."""
    operations = tuple(_stablehlo(_module(lowered)))
    if not _left_to_partition(lowered):
        return Program(operations, "stablehlo")
    with tempfile.TemporaryDirectory() as directory:
        lowered.compile(compiler_options={"xla_dump_to": directory, "xla_dump_hlo_pass_re": ".*spmd.*"})
        texts = sorted(Path(directory).glob("*after_spmd-partitioning*.txt"))
        if not texts:
            raise RuntimeError("XLA wrote no HLO after SPMD partitioning; fp8ref.jax.proof reads what jax 0.10 dumps. Use shard_map.")
        return Program(tuple(_hlo(texts[-1].read_text())), "hlo after spmd partitioning")


def gemms(program: Program) -> list[Gemm]:
    """Every dot, in the program's order."""
    found = []
    for op in program.operations:
        if op.kind == "dot_general":
            (layer, which), (a, b) = op.place, (dtype for dtype, _ in op.operands)
            accumulate = "slow" if "HIGH" in op.precision.upper() else "fast"
            found.append(Gemm(layer, which, a, b, *op.result, accumulate))
    return found


def collectives(program: Program) -> list[Collective]:
    """Every collective, in the program's order."""
    found = [(op.place, op) for op in program.operations if op.kind in _COLLECTIVES]
    return [Collective(layer, which, op.kind, *op.result) for (layer, which), op in found]


def missing(program: Program, planned: Mapping[str, str | Recipe], placements: Mapping[str, Placement] | None = None) -> list[str]:
    """What a plan promises and the program lacks, a line each: FP8 GEMMs by layer, operand types and accumulation, and gathers of a byte an element.

    A GEMM on dequantised operands (G-16) is none of FP8, and not asked for. A gather is: along the axes by which a weight, or a
    tensor-parallel input or grad_output, is cut; anything wider gathered there is a line of its own.
    """
    lines, dots, moved = [], gemms(program), collectives(program)
    for layer, recipe in planned.items():
        for which, spec in recipes.by_name(recipe).gemms.items():
            if spec.a is None or spec.b is None or gemm.dequantises(spec.a.granularity):
                continue
            wanted = (_name(cast.DTYPES[spec.a.fmt.name]), _name(cast.DTYPES[spec.b.fmt.name]), spec.accumulate)
            here = [dot for dot in dots if (dot.layer, dot.which) == (layer, which)]
            others = [f"{dot.a} x {dot.b}, {dot.accumulate}" for dot in here if (dot.a, dot.b, dot.accumulate) != wanted]
            promise = f"{layer}/{which}: planned {wanted[0]} x {wanted[1]}, {wanted[2]}"
            lines += [f"{promise}; {have}" for have in (others if here else ["no dot of it is there"])]
            placement = (placements or {}).get(layer)
            gathered = [role for role in OPERANDS[which] if placement and placement.gathered(role)]
            bytes_ = [m for m in moved if (m.layer, m.which, m.kind) == (layer, which, "all_gather") and m.dtype.startswith("f8")]
            wide = [
                m for m in moved if (m.layer, m.which, m.kind) == (layer, which, "all_gather") and not m.dtype.startswith("f8") and m.shape
            ]
            if len(bytes_) < len(gathered):
                lines.append(f"{layer}/{which}: planned {len(gathered)} gathers in FP8, of {', '.join(gathered)}; {len(bytes_)} are there")
            lines += [
                f"{layer}/{which}: gathers {m.dtype}{list(m.shape)}" for m in wide if 1 not in m.shape[-2:]
            ]  # scales of rows are [M, 1]
    return lines


def manifest(program: Program, planned: Mapping[str, str | Recipe], missing: list[str]) -> dict:
    """The proof as a run's manifest keeps it: every dot of a planned linear, gathers by type, GEMMs on dequantised operands, what is missing."""
    dots = [dot for dot in gemms(program) if dot.layer in planned]
    gathers = collections.Counter(m.dtype for m in collectives(program) if m.kind == "all_gather")
    dequantised = [
        f"{layer}/{which}"
        for layer, recipe in planned.items()
        for which, spec in recipes.by_name(recipe).gemms.items()
        if spec.a and gemm.dequantises(spec.a.granularity)
    ]
    return {
        "read_from": program.source,
        "gemms": [
            {"gemm": f"{dot.layer}/{dot.which}", "a": dot.a, "b": dot.b, "accumulate": dot.accumulate, "fp8": dot.fp8} for dot in dots
        ],
        "on_dequantised_operands": dequantised,
        "gathers": dict(gathers),
        "missing": missing,
    }


def _name(dtype) -> str:
    """HLO's name of an FP8 dtype: f8e4m3fn."""
    return jax.numpy.dtype(dtype).name.replace("float8_", "f8")


def _left_to_partition(lowered: jax.stages.Lowered) -> bool:
    """Whether XLA has dots to split over devices: more than one partition, and a dot outside all of shard_map's bodies."""
    module = _module(lowered)
    partitions = module.attributes["mhlo.num_partitions"].value if "mhlo.num_partitions" in module.attributes else 1
    return partitions > 1 and any(True for op in _walk(module, skip="sdy.manual_computation") if op.name == "stablehlo.dot_general")


def _module(lowered: jax.stages.Lowered):
    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    return module.operation


def _walk(op, skip: str | None = None) -> Iterator:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                if inner.operation.name != skip:
                    yield inner.operation
                    yield from _walk(inner.operation, skip)


def _stablehlo(module) -> Iterator[Operation]:
    for op in _walk(module):
        kind = op.name.removeprefix("stablehlo.")
        if kind == "dot_general" or kind in _COLLECTIVES:
            path = re.match(r'loc\("([^"]*)"', str(op.location))
            precision = str(op.attributes["precision_config"]) if "precision_config" in op.attributes else ""
            yield Operation(
                kind, tuple(_typed(v.type) for v in op.operands), _typed(op.results[0].type), path[1] if path else "", precision
            )


def _typed(kind) -> tuple[str, tuple[int, ...]]:
    """tensor<2x3xf8E4M3FN> -> ("f8e4m3fn", (2, 3))."""
    return str(kind.element_type).lower(), tuple(kind.shape)


def _hlo(text: str) -> Iterator[Operation]:
    types: dict[str, tuple[str, tuple[int, ...]]] = {}
    for line in text.splitlines():
        found = _DEFINITION.match(line)
        if not found:
            continue
        dtype, dims = found["type"].rstrip("]").split("[")
        types[found["name"]] = dtype, tuple(map(int, filter(None, dims.split(","))))
        kind = {"dot": "dot_general"}.get(found["kind"], found["kind"].replace("-", "_").removesuffix("_start"))
        if kind == "dot_general" or kind in _COLLECTIVES:
            operands = tuple(types[name.split()[-1].lstrip("%")] for name in found["operands"].split(", "))
            path, precision = re.search(r'op_name="([^"]*)"', line), re.search(r"operand_precision=\{([^}]*)\}", line)
            yield Operation(kind, operands, types[found["name"]], path[1] if path else "", precision[1] if precision else "")
