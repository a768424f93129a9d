"""What multiplies operands in blocks: float32 on dequantized ones, or hardware on codes (G-26)."""

from typing import Any, Literal, NamedTuple

from fp8ref.formats import E2M1FN, E4M3FN, E8M0FNU, Format
from fp8ref.shared.errors import one_of, require

Products = Literal["auto", "emulated", "scaled_mm", "scaled_matmul"]
"""``auto``: PyTorch's kernels for blocks of 128 where there are any (G-17), else dequantized ones;
``emulated``: dequantized ones; or hardware by an operator of PyTorch, or of JAX."""

OPERATORS = {"torch": "scaled_mm", "jax": "scaled_matmul"}
"""The operator of each backend."""


class Kind(NamedTuple):
    """Codes of both operands, granularities of rows and of squares, the format of blocks' scales,
    and the operators that multiply it; XLA dequantizes others of ``jax.nn.scaled_matmul``."""

    name: str
    fmt: Format
    line: str
    square: str
    scales: Format
    operators: tuple[str, ...] = tuple(OPERATORS.values())


_ALL = (
    Kind("mxfp8", E4M3FN, "mx_1x32", "mx_32x32", E8M0FNU),
    Kind("mxfp4", E2M1FN, "mx_1x32", "mx_32x32", E8M0FNU, ("scaled_mm",)),
    Kind("nvfp4", E2M1FN, "nvfp4_1x16", "nvfp4_16x16", E4M3FN),
)
KINDS = {kind.name: kind for kind in _ALL}
"""The kinds by name."""


def kind(a: Any, b: Any, by: str) -> Kind:
    """The kind of two operands, ``CastSpec`` or ``Quantized``; ValueError where by has none."""
    granularities = dict.fromkeys((a.granularity, b.granularity))
    kinds = [each for each in _ALL if by in each.operators]
    for each in kinds:
        if {a.fmt, b.fmt} == {each.fmt} and granularities.keys() <= {each.line, each.square}:
            return each
    names, pair = ", ".join(each.name for each in kinds), " x ".join(granularities)
    raise ValueError(
        f"products {by!r} multiply both operands in {names}; got {a.fmt.name} x {b.fmt.name} in "
        f"{pair}. Use products 'emulated'."
    )


def runs(by: str, capability: int) -> bool:
    """Whether an NVIDIA GPU of this major compute capability has these products; 0: no such GPU."""
    return by not in OPERATORS.values() or capability >= 10


def check_backend(by: str, backend: str) -> None:
    """ValueError for products that a backend lacks."""
    one_of("products", by, ("auto", "emulated", OPERATORS[backend]))


def check(by: str, backend: str, capability: tuple[int, int] | None, device: str) -> None:
    """ValueError for products that a backend or a device lacks. capability: of an NVIDIA GPU."""
    check_backend(by, backend)
    require(
        runs(by, capability[0] if capability else 0),
        f"products {by!r} need an NVIDIA GPU of compute capability 10.0 or later; got {device}. "
        "Use products 'emulated'.",
    )
