"""Parse a program's dots and collectives, from StableHLO or from HLO's text after any pass."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")
"""The collectives that are parsed, in StableHLO's spelling."""

BLOCKS = "__cudnn$blockScaledDot"  # cuDNN's GEMM of operands in blocks (G-26)
MATMULS = ("__cublas$lt$matmul$f8", "__cublas$lt$matmul", "__cublas$gemm", BLOCKS)
"""The targets of custom calls by which cuBLAS multiplies matrices, and cuDNN those in blocks."""

MOVES = ("reshape", "transpose", "bitcast", "copy")
"""Operations that change no value, between codes and the dot that multiplies them."""

Typed = tuple[str, tuple[int, ...]]
"""The dtype and shape of an array."""

# a scope of ``hardware.matmul``
_SIMULATED = re.compile(r'"(?P<path>[^"]*/simulated:(?P<how>[^/()"]+:(?:fast|slow))/[^"]*)"')
_GEMM = re.compile(r"(?:^|[/(])(?P<layer>[^/()]+)/(?P<which>output|grad_input|grad_weight)[/)]")
_PRODUCT = re.compile(r"(?:^|[/(])(?P<layer>[^/()]+)/attention:(?P<which>\w+)[/)]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) "
    r"(?P<kind>[a-z][\w\-]*)\((?P<operands>[^()]*)\)"
)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Operation:
    """One operation: kind in StableHLO's spelling, types of operands and result, scopes, precision.

    A GEMM under simulated hardware (G-19), a call to the host, is of kind ``simulated``; its
    precision is ``<plan>:<fast or slow>``.

    path      the named scopes that the operation came from.
    kernel    in optimized HLO of a GPU, what runs it: a library's call, or the kind of its fusion.
    rounds_scale
              in optimized HLO, whether a scale of a library's FP8 GEMM was rounded to bfloat16.
    """

    kind: str
    operands: tuple[Typed, ...]
    result: Typed
    path: str
    precision: str
    kernel: str = ""
    rounds_scale: bool = False

    @property
    def place(self) -> tuple[str, str] | tuple[None, None]:
        """(layer, GEMM) of an operation, or (layer, product); (None, None) outside."""
        return place(self.path)

    @property
    def turned(self) -> bool:
        """True if the dot has its operands in the other order, for a weight [K, N] (Flax)."""
        return "turned" in within(self.path)

    @property
    def multiplications(self) -> int:
        """M N K of a dot, the root of M K, N K and M N multiplied."""
        return math.isqrt(math.prod(math.prod(shape) for _, shape in (*self.operands, self.result)))


@dataclass(frozen=True)
class Instruction:
    """One line of HLO's text. types: those of the result's arrays, in a tuple's order."""

    computation: str
    name: str
    kind: str
    types: tuple[Typed, ...]
    operands: tuple[str, ...]
    line: str

    @property
    def path(self) -> str:
        """The named scopes that it came from; empty if the line has none."""
        return _first(r'op_name="([^"]*)"', self.line)


def within(path: str) -> list[str]:
    """The named scopes inside a GEMM's own; what is before it may be any module's name."""
    match = _GEMM.search(path)
    return re.split(r"[/()]", path[match.end() :]) if match else []


def place(path: str) -> tuple[str, str] | tuple[None, None]:
    """(layer, GEMM or product) in a path of named scopes; (None, None) without one."""
    match = _GEMM.search(path) or _PRODUCT.search(path)
    return (match["layer"], match["which"]) if match else (None, None)


def from_stablehlo(module) -> Iterator[Operation]:
    """The dots, collectives and simulated GEMMs of a StableHLO module, in its order.

    A dot of dequantized codes that XLA compiles to an FP8 GEMM (G-22) has the codes' types.
    """
    for op in walk(module):
        kind = op.name.removeprefix("stablehlo.")
        if kind == "dot_general" or kind in COLLECTIVES:
            precision = ""
            if "precision_config" in op.attributes:
                precision = str(op.attributes["precision_config"])
            operands = tuple(_typed(v.type) for v in op.operands)
            if kind == "dot_general" and "dequantized" in within(_path(op)):
                operands = tuple(
                    (_multiplied(v, _made), shape)
                    for v, (_, shape) in zip(op.operands, operands, strict=True)
                )
            yield Operation(kind, operands, _typed(op.results[0].type), _path(op), precision)
        elif kind == "func.call" and "_scaled_matmul" in within(_path(op)):  # jax.nn's (G-26)
            operands = tuple(_typed(v.type) for v in op.operands[:2])
            yield Operation("dot_general", operands, _typed(op.results[0].type), _path(op), "")
        elif kind == "custom_call" and (match := _SIMULATED.search(str(op.location))):
            yield Operation(
                "simulated",
                tuple(_typed(v.type) for v in op.operands[:2]),
                _typed(op.results[0].type),
                match["path"],
                match["how"],
                "host",
            )


def from_text(text: str) -> Iterator[Operation]:
    """The dots and collectives of HLO's text after any pass.

    A collective that XLA combined of several is counted as several, which name no layer. A dot of
    dequantized codes as of ``from_stablehlo``.
    """
    types: dict[str, Typed] = {}
    defs: dict[str, Instruction] = {}
    around, roots = kernels(text), {}

    def made_in_text(name: str) -> tuple[str, str, str]:
        source = next((operand for operand in defs[name].operands if operand in defs), "")
        return types[name][0], defs[name].kind, source

    for op in instructions(text):
        roots[op.computation] = op  # the last one of each
        if op.types:
            types[op.name], defs[op.name] = op.types[0], op
        kind = op.kind.replace("-", "_").removesuffix("_start")
        # A GPU's library call multiplies under its target's name.
        target = _first(r'custom_call_target="([^"]*)"', op.line)
        if op.kind == "dot" or target in MATMULS:
            precision = _first(r'operand_precision(?:=\{|":\[)([^}\]]*)', op.line)
            a, b = (types[name] for name in op.operands[:2])
            if "dequantized" in within(op.path) and op.kind == "dot":
                a, b = (
                    (_multiplied(name, made_in_text), types[name][1]) for name in op.operands[:2]
                )
            rounds = target.endswith("$f8") and any(
                _rounded(name, defs, roots) for name in op.operands[2:4]
            )
            kernel = target or around.get(op.computation, "dot")
            yield Operation("dot_general", (a, b), op.types[0], op.path, precision, kernel, rounds)
        elif kind in COLLECTIVES:
            moved, path = (len(op.operands), op.path if len(op.operands) == 1 else "")
            for name, result in zip(op.operands, op.types[-moved:], strict=True):
                yield Operation(kind, (types[name],), result, path, "")


def instructions(text: str) -> Iterator[Instruction]:
    """Every instruction of HLO's text, with the computation it is in."""
    computation = ""
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            operands = tuple(
                name.split()[-1].split("%")[-1] for name in match["operands"].split(", ") if name
            )
            types = tuple(
                (dtype, tuple(map(int, filter(None, dims.split(",")))))
                for dtype, dims in _ARRAY.findall(match["type"])
            )
            yield Instruction(computation, match["name"], match["kind"], types, operands, line)
        elif match := _COMPUTATION.match(line):
            computation = match["name"]


def kernels(text: str) -> dict[str, str]:
    """Computation -> kind of the custom fusion that calls it, such as __triton_gemm."""
    return dict(re.findall(r' fusion\(.*calls=%?([\w.\-]+).*"kind":"(\w+)"', text))


def walk(op, skip: str | None = None) -> Iterator:
    """The operations inside a StableHLO operation, except those inside operations named skip."""
    for inner in children(op):
        if inner.name != skip:
            yield inner
            yield from walk(inner, skip)


def children(op) -> Iterator:
    """The operations of a StableHLO operation's own blocks, in order; of a module its functions."""
    for region in op.regions:
        for block in region.blocks:
            yield from (inner.operation for inner in block.operations)


def _multiplied(node, producer: Callable) -> str:
    """The dtype of codes that a dot's operand dequantizes (codes times a scale), else its own.
    producer(node): (dtype, kind, first operand) of a node; XLA may move reshapes between."""
    dtype, kinds = producer(node)[0], ["multiply", "convert"]
    while kinds:
        _, kind, source = producer(node)
        if kind == kinds[0] and source:
            del kinds[0]
        elif kind not in MOVES or not source:
            return dtype
        node = source
    codes = producer(node)[0]
    return codes if codes.startswith("f8") else dtype


def _made(value) -> tuple[str, str, Any]:
    """How a StableHLO value was made, for ``_multiplied``."""
    op = value.owner
    kind = getattr(op, "name", "").removeprefix("stablehlo.")
    return _typed(value.type)[0], kind, op.operands[0] if kind and len(op.operands) else None


def _rounded(name: str, defs: dict[str, Instruction], roots: dict[str, Instruction]) -> bool:
    """Whether a float32 scale is widened from bfloat16, alone or at the end of a fusion."""
    scale = defs.get(name)
    if scale and scale.kind == "fusion":
        scale = roots.get(_first(r"calls=%?([\w.\-]+)", scale.line))
    source = defs.get(scale.operands[0]) if scale and scale.kind == "convert" else None
    return source is not None and source.types[0][0] == "bf16"


def _path(op) -> str:
    return _first(r'^loc\("([^"]*)"', str(op.location))


def _typed(kind) -> Typed:
    """tensor<2x3xf8E4M3FN> -> ("f8e4m3fn", (2, 3))."""
    return str(kind.element_type).lower(), tuple(kind.shape)


def _first(pattern: str, line: str) -> str:
    match = re.search(pattern, line)
    return match[1] if match else ""
