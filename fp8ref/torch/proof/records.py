"""Records of the GEMMs of a step: layer, operand types, granularity and accumulation of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8ref.recipe import Gemm
from fp8ref.spec import products
from fp8ref.spec.attention.products import Product
from fp8ref.torch.experts import gemm as grouped_gemm
from fp8ref.torch.experts.layer import GroupedLinear
from fp8ref.torch.gemm import batched as batched_gemm
from fp8ref.torch.gemm import blocks as block_gemm
from fp8ref.torch.gemm import hardware
from fp8ref.torch.gemm.kind import GemmKind

_aten = torch.ops.aten
SCALED_MM = _aten._scaled_mm.default
"""The operator of torch._scaled_mm."""

BLOCK_GEMM = block_gemm.OPERATOR
"""The operator of kernels for block scales."""

BLOCKS = {
    "torchao_triton": "blocks",
    "deep_gemm": "blocks, DeepGEMM",
    "scaled_mm": "blocks, cuBLASLt",
} | {name: f"{name}, cuBLASLt" for name in products.KINDS}
"""How a proof names the accumulation of a kernel for scales of blocks."""

SQUARES = "blockwise_1x128 x blockwise_128x128"
"""How a proof names the scales of the operands that DeepGEMM's grouped kernel takes."""

SIMULATED = hardware.OPERATOR
"""The operator of simulated hardware (G-19)."""

GROUPED_GEMM, GROUPED_GEMM_HP, SCALED_GROUPED_MM, GROUPED_DEEP_GEMM = grouped_gemm.OPERATORS
"""The operators of one GEMM for each group (X-10), in FP8 and in high precision, and of torch's and
DeepGEMM's grouped kernels."""

SCALED_MMS = batched_gemm.OPERATOR
"""The operator of a batch of products of attention, in compiled graphs."""

OPERANDS_AT: dict[Any, tuple[int, int]] = {
    SCALED_MM: (0, 1),
    BLOCK_GEMM: (0, 1),
    SIMULATED: (0, 1),
    GROUPED_GEMM: (1, 3),
    GROUPED_GEMM_HP: (1, 2),
    SCALED_GROUPED_MM: (0, 2),
    GROUPED_DEEP_GEMM: (0, 2),
    _aten._grouped_mm.default: (0, 1),
    _aten.mm.default: (0, 1),
    _aten.addmm.default: (1, 2),
}
"""{operator of a GEMM: positions of both operands among its arguments}."""

PRODUCTS_AT: dict[Any, tuple[int, int]] = {
    SCALED_MM: (0, 1),
    SIMULATED: (0, 1),
    SCALED_MMS: (0, 1),
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.bmm.out: (0, 1),
    _aten.bmm.dtype: (0, 1),
    _aten.baddbmm.default: (1, 2),
    _aten.baddbmm_.default: (1, 2),
}
"""{operator of a product of attention: positions of both operands among its arguments}."""

KERNELS = ("flash_attn_3::fwd",)
"""The operators of kernels that compute attention (Dao-AILab/flash-attention,
hopper/flash_api.cpp)."""

# Parts of module names that torch.compile and checkpoint_wrapper insert.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


class _Record:
    """Records of GEMMs and products: a and b, and how they ran."""

    a: str
    b: str
    accumulate: str | None
    plan: str | None

    @property
    def fp8(self) -> bool:
        """Whether both operands are FP8."""
        return self.a.startswith("f8") and self.b.startswith("f8")

    @property
    def name(self) -> str:
        """``layer/gemm``, or ``layer/product``."""
        raise NotImplementedError

    def entry(self, *keys: str) -> dict[str, Any]:
        """The record in a run's manifest: its name, operands, and what is named of it."""
        return {"gemm": self.name} | {key: getattr(self, key) for key in ("a", "b", *keys)}

    def _words(self, *numerics: str | None) -> str:
        under = self.plan and f"under {self.plan}"
        return ", ".join(filter(None, (f"{self.a} x {self.b}", *numerics, under)))


@dataclass(frozen=True)
class GemmRecord(_Record):
    """One GEMM of a linear, as it ran.

    accumulate     ``fast`` or ``slow`` (G-7), ``blocks`` by torchao's kernels, or ``blocks,``
                   and DeepGEMM or cuBLASLt (G-17), or the kind of G-26 and cuBLASLt; None of a
                   GEMM in high precision.
    granularity    ``tensorwise`` or ``rowwise``, from the shapes of the scales. Under unit scales
                   (G-5) it is that of the factor that multiplies the result, or ``unit`` without
                   one. Of operands with block scales it names both. None of a GEMM in high
                   precision.
    plan           the simulated hardware that it ran under (G-19); None if the framework
                   multiplied.
    """

    layer: str
    which: Gemm
    a: str
    b: str
    accumulate: str | None
    granularity: str | None
    plan: str | None = None

    @property
    def name(self) -> str:
        """``layer/gemm``."""
        return f"{self.layer}/{self.which}"

    def __str__(self) -> str:
        return self._words(self.accumulate, self.granularity)


@dataclass(frozen=True)
class ProductRecord(_Record):
    """One product of attention, as it ran (B-15).

    accumulate   None of one in high precision.
    plan         the simulated hardware that it ran under (G-19); None if the framework multiplied.
    """

    layer: str
    product: Product
    a: str
    b: str
    accumulate: str | None
    plan: str | None = None

    @property
    def name(self) -> str:
        """``layer/product``."""
        return f"{self.layer}/{self.product}"

    def __str__(self) -> str:
        return self._words(self.accumulate)


@dataclass
class GemmTrace:
    """The GEMMs of a model's linears, in the order in which they ran, repeated ones included.

    products    those of its attention, where ``fp8ref.torch.attention`` computes it.
    kernels     calls of libraries' kernels that compute attention, as ``layer: operator`` (A-20).
    wanted      GEMMs of a backward pass, as ``layer/gemm``, whose gradient is needed.
    unwanted    those whose gradient is not needed.
    """

    read_from: str
    gemms: list[GemmRecord] = field(default_factory=list)
    products: list[ProductRecord] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    wanted: set[str] = field(default_factory=set)
    unwanted: set[str] = field(default_factory=set)

    @property
    def pruned(self) -> set[str]:
        """GEMMs that did not run because their gradient is not needed."""
        return self.unwanted - self.wanted - {gemm.name for gemm in self.gemms}


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear | GroupedLinear]]:
    """Every linear and grouped linear, by its name before modules were compiled or wrapped for
    checkpointing."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | GroupedLinear):
            yield unwrapped(name), module


def unwrapped(name: str) -> str:
    """A module's name without the parts that torch.compile and checkpointing inserted."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def type_name(dtype: torch.dtype) -> str:
    """The short name of a type, as HLO has it: f8e4m3fn, bf16, f32."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float8_", "f8"), ("float", "f")):
        name = name.replace(long, short)
    return name.replace("uint", "u")


def arguments(op: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """An operator's arguments by name, defaults left out."""
    names = (argument.name for argument in op._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs


def granularity(*scales: Tensor) -> str:
    """Granularity from the shapes of scales: rowwise ones are [M, 1], [1, N] or their product."""
    return "rowwise" if any(scale.ndim > 1 for scale in scales) else "tensorwise"


def product_record(
    layer: str, product: Product, func: Any, types: tuple[str, str], args: tuple, kwargs: dict
) -> ProductRecord:
    """The record of a product of attention by an operator of PRODUCTS_AT."""
    accumulate = plan = None
    if func is SCALED_MM:
        accumulate = "fast" if arguments(func, args, kwargs).get("use_fast_accum") else "slow"
    elif func is SCALED_MMS:
        accumulate = "fast" if args[3] else "slow"
    elif func is SIMULATED:
        accumulate, _, plan = numerics(func, args)
    return ProductRecord(layer, product, *types, accumulate, plan)


KIND_AT = {SIMULATED: 4, GROUPED_GEMM: 6, SCALED_GROUPED_MM: 5}
"""{operator of a GEMM: position of the text of its ``GemmKind`` among its arguments}."""


def numerics(func: Any, args: Sequence[Any]) -> tuple[str | None, str | None, str | None]:
    """Accumulation, granularity and simulated hardware of a GEMM by an operator of fp8ref; None of
    one in high precision or by another operator. Tensors of args may be fake."""
    if func is BLOCK_GEMM and args[5] in products.KINDS:  # also each row of a square (G-26)
        line = products.KINDS[args[5]].line
        return BLOCKS[args[5]], f"{line} x {line}", None
    if func is BLOCK_GEMM:  # scales of blocks (G-17)
        squares = block_gemm.granularity_of_b(args[1], args[3])
        return BLOCKS[args[5]], f"blockwise_1x128 x {squares}", None
    if func is GROUPED_DEEP_GEMM:
        return BLOCKS["deep_gemm"], SQUARES, None
    if func not in KIND_AT:
        return None, None, None
    kind = GemmKind.parse(args[KIND_AT[func]])
    return kind.accumulate, kind.scales, args[6] if func is SIMULATED else None
