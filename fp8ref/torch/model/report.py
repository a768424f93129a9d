"""What of a PyTorch model runs in FP8 and what does not, and why: a table of its layers and
products.

Parameters are read from the model. With inputs a forward pass is run without gradients: it counts
multiplications, shows layers that are never called, and finds what has no layer: hand-written
products, attention, and the products of experts.
"""

import collections
import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torchao.float8 import float8_linear

from fp8ref.recipe import Recipe
from fp8ref.selection import report as fp8_report
from fp8ref.selection.report import Row
from fp8ref.selection.routers import ROUTER
from fp8ref.torch.experts import gemm as grouped_gemm
from fp8ref.torch.experts.layer import GroupedLinear
from fp8ref.torch.experts.models import Experts
from fp8ref.torch.gemm import blocks as block_gemm
from fp8ref.torch.gemm import gemm, hardware
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.linear.torchao_linear import Float8Linear

__all__ = ["Report", "check_shapes", "log", "report"]

TABLE = "a table: lookups multiply nothing"
"""Why an embedding has no FP8."""

CONV1D = "a Conv1D of transformers is no nn.Linear: replace it by one"
"""Why a Conv1D has no FP8."""

ADDED = (
    "a parameter whose first dim is 1, as positions that are added; a product with it stays in "
    "high precision"
)
"""Why such a parameter has no FP8. It is no expert's."""

OUTSIDE = "outside layers in FP8"
"""Why a product without a layer has no FP8."""

GROUPED = {"aten::_grouped_mm", "aten::_scaled_grouped_mm", "transformers::grouped_mm_fallback"}
"""Operators that multiply the rows of each expert by its matrix. torch's counter of FLOPs lacks
them."""

REASONS = "_fp8_reasons"
"""The attribute of a converted model that holds {path: why} of its linears."""

_logger = logging.getLogger("fp8ref.torch")


class Report(fp8_report.Report):
    """``selection.report.Report`` of a PyTorch model."""

    @property
    def left_out(self) -> list[Row]:
        """The rows that multiply matrices without FP8, or may do so: no lookups."""
        return [row for row in super().left_out if row.reason != TABLE]

    @property
    def surprising(self) -> bool:
        """True if something other than linears, lookups and convolutions has no FP8: experts, a
        Conv1D of transformers, another module of torch's, or parameters that none multiplies."""
        return bool(self.surprises)

    @property
    def surprises(self) -> list[Row]:
        """The rows that make it so."""
        return [
            row
            for row in self.rows
            if row.recipe is None
            and row.reason in (CONV1D, _torch_reason(row.kind), _outside(row.shape))
        ]

    @property
    def fused(self) -> list[Row]:
        """The rows of linears that are cast with the norm or SwiGLU before them: of a model that
        ``convert`` fused, where kernels cast (``blocks.fuse``)."""
        return [row for row in self.rows if "; fused: " in row.reason]

    @property
    def experts(self) -> list[Row]:
        """The rows of parameters of 3 and more dims outside linears: experts."""
        return [
            row
            for row in self.rows
            if len(row.shape) >= 3 and row.path and row.reason == _outside(row.shape)
        ]

    def summary(self) -> str:
        """One line: shares, what is left out, and the experts' shares if there are any."""
        line = super().summary()
        if not self.experts:
            return line
        held = [f"{self.share_of(self.experts):.1%} of the parameters"]
        if self.multiplications is not None:
            held.append(
                f"{self.share_of(self.experts, multiplications=True):.1%} of the multiplications"
            )
        return f"{line} Experts, which stay in high precision, have {' and '.join(held)}."


def report(model: nn.Module, inputs: tuple | None = None) -> Report:
    """What of a model runs in FP8, what does not and why; print it as a table.

    inputs    arguments of a call, on which one forward pass is run, without gradients and compiled
              code; no state of the model or of torch's generators changes. It shows
              multiplications, layers that are never called, and products without a layer. Give a
              model on the meta device inputs there, and nothing is computed. Every rank of a
              sharded model calls it, and counts its own products.
    Raises:   ValueError: model is not an nn.Module; a lazy module, which has no shape yet.
    """
    check_shapes(model)
    return Report(rows=_rows(model, None if inputs is None else _counted(model, inputs)))


def check_module(model: object) -> None:
    """ValueError for what is no nn.Module."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"a model is an nn.Module; got a {type(model).__name__}. Give the module itself."
        )


def check_shapes(model: nn.Module) -> None:
    """ValueError for what is no nn.Module, and for a parameter of a lazy module, whose shape the
    first forward pass decides."""
    check_module(model)
    lazy = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        raise ValueError(
            f"{lazy} is of a lazy module, without a shape yet. Run a forward pass first."
        )


def log(model: nn.Module, name: str, recipe: Recipe) -> None:
    """Log one line of a conversion: a warning where it left out what is no linear."""
    conversion = report(model)
    fp8_report.announce(
        conversion,
        _logger,
        name,
        warns=recipe.fp8 and conversion.surprising,
        see="fp8ref.torch.report(model)",
        rank=_rank,
    )


def _rank() -> int:
    """This process's rank; before its group exists, the one that torchrun gave it."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", 0))


class _Products(TorchDispatchMode):
    """Counts multiplications by layer, else by operator, result and why. owners: the module of each
    parameter storage, which its products belong to, unless an FP8 linear that is not running.
    names: {module: path}."""

    def __init__(self, owners: Mapping[int, nn.Module], names: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.owners, self.names = owners, names
        self.running: nn.Module | None = None
        self.layers: collections.Counter[nn.Module] = collections.Counter()
        self.others: collections.Counter[tuple[str, tuple[int, ...], str]] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor dispatches again, on this rank's part
        out = func(*args, **(kwargs or {}))
        if count := _multiplications(func, args, kwargs or {}, out):
            plain = [x for x in args if type(x) in (Tensor, nn.Parameter)]
            owners = (self.owners.get(_storage(x)) for x in plain)
            layer = self.running or next((owner for owner in owners if owner is not None), None)
            name, why = func._schema.name.removeprefix("aten::"), OUTSIDE
            if self.running is None and isinstance(layer, Float8Linear | Linear):
                called = f"reads {self.names[layer]}.weight and does not call the linear"
                layer, why = None, f"{called}: in high precision"
            if layer is not None:
                self.layers[layer] += count
            else:
                result = out if isinstance(out, Tensor) else out[0]
                self.others[name, tuple(result.shape), why] += count
        return out

    def begin(self, module: nn.Module, args: tuple) -> None:
        """Hook before the forward pass of a linear."""
        self.running = module

    def end(self, module: nn.Module, args: tuple, out: object) -> None:
        """Hook after it."""
        self.running = None


def _multiplications(func, args: tuple, kwargs: Mapping, out) -> int:
    """M N K of a product; 0 for any other operator."""
    # of a forward pass: (which, a [M, K], ...), or a kernel's, (a [M, K], ...)
    if func in grouped_gemm.OPERATORS:
        a = args[1] if isinstance(args[0], str) else args[0]
        return out.numel() * a.shape[1]
    if func is block_gemm.OPERATOR or func is hardware.OPERATOR:
        return out.numel() * args[0].shape[1]
    # torch's registry lacks it
    if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
        q, k, v = args[:3]  # [B, H, T, D], [B, H', S, D], [B, H', S, Dv]
        return math.prod(q.shape[:3]) * k.shape[2] * (q.shape[3] + v.shape[3])
    if func._schema.name in GROUPED:  # [T, K] x [E, K, N]
        return out.numel() * args[0].shape[-1]
    count = flop_registry.get(func._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out)) // 2


def _counted(model: nn.Module, inputs: tuple) -> _Products:
    """The products of a forward pass on copies of the model's buffers."""
    owners = {
        _storage(p): m
        for m in model.modules()
        for p in m.parameters(recurse=False)
        if type(p) is nn.Parameter
    }
    counted = _Products(owners, {m: name for name, m in model.named_modules()})
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with contextlib.ExitStack() as entered:
        for module in model.modules():
            if isinstance(module, nn.Linear | Experts | GroupedLinear):
                entered.callback(module.register_forward_pre_hook(counted.begin).remove)
                entered.callback(module.register_forward_hook(counted.end).remove)
        eager = torch.compiler.set_stance("force_eager")
        for context in (torch.random.fork_rng(), torch.no_grad(), eager, counted):
            entered.enter_context(context)
        torch.func.functional_call(model, buffers, inputs)
    return counted


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _rows(model: nn.Module, counted: _Products | None) -> list[Row]:
    # of every linear that a conversion looked at
    reasons = {
        f"{name}.{path}".strip("."): reason
        for name, module in model.named_modules()
        for path, reason in vars(module).get(REASONS, {}).items()
    }
    seen: set[int] = set()
    rows: dict[str, Row] = {}
    vectors = []
    modules = list(model.named_modules())
    # linears first: a parameter that a table shares with a linear counts at the linear
    for name, module in sorted(modules, key=lambda item: not isinstance(item[1], nn.Linear)):
        linear, parameters = isinstance(module, nn.Linear), dict(_parameters(module))
        own = {key: p for key, p in parameters.items() if id(p) not in seen}
        seen |= set(map(id, own.values()))
        shapes = {key: tuple(p.shape) for key, p in parameters.items()}
        if not linear and not own:
            continue
        sizes = {key: math.prod(shapes[key]) for key in own}
        if not linear and max(len(_without_ones(shape)) for shape in shapes.values()) < 2:
            vectors.append(sum(sizes.values()))
            continue
        # a switch may have undone it
        convertible = isinstance(module, nn.Linear | Experts | GroupedLinear)
        reason = reasons.get(name) if convertible else None
        rows[name] = _row(name, module, shapes, sizes, reason, counted)
    listed = [rows[name] for name, _ in modules if name in rows]
    if vectors:
        why = f"of {len(vectors)} modules"
        vector_row = Row(path="", kind="vectors", shape=(), recipe=None, reason=why)
        listed.append(dataclasses.replace(vector_row, parameters=sum(vectors)))
    for (operator, shape, why), count in counted.others.items() if counted else ():
        row = Row(path="", kind=operator, shape=shape, recipe=None, reason=why)
        listed.append(dataclasses.replace(row, multiplications=count))
    return listed


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A module's own parameters, and those that a linear's weight is computed from."""
    yield from module.named_parameters(recurse=False)
    if isinstance(module, nn.Linear) and parametrize.is_parametrized(module):
        assert isinstance(module.parametrizations, nn.Module)
        yield from module.parametrizations.named_parameters(prefix="parametrizations")


def _row(
    name: str,
    module: nn.Module,
    shapes: Mapping,
    sizes: Mapping,
    reason: str | None,
    counted: _Products | None,
) -> Row:
    """The row of one layer, from its parameters' shapes and the sizes of those that count here."""
    recipe, kernel = _in_fp8(module)
    largest = max(shapes.values(), key=math.prod)
    if isinstance(module, nn.Linear):  # also of a pruned or parametrized one
        largest = shapes.get("weight", (module.out_features, module.in_features))
    count = None if counted is None else counted.layers.get(module, 0)
    why = reason or ("converted" if recipe else _why_not(module, largest))
    experts = isinstance(module, Experts | GroupedLinear)
    in_fp8: int = module.in_fp8 if experts else sizes.get("weight", 0)  # type: ignore[assignment]
    return Row(
        path=name or type(module).__name__,
        kind=type(module).__name__,
        shape=largest,
        recipe=recipe,
        kernel=kernel,
        reason="never called" if isinstance(module, nn.Linear) and count == 0 else why,
        parameters=sum(sizes.values()),
        in_fp8=in_fp8 if recipe else 0,
        multiplications=count,
    )


def _in_fp8(module: nn.Module) -> tuple[str | None, str | None]:
    """(recipe, kernel) of an FP8 linear or experts, else None."""
    if isinstance(module, Experts | GroupedLinear):
        name = module.recipes_in_fp8 if isinstance(module, Experts) else module.recipe.name
        return (name, module.kernels()) if module.in_fp8 else (None, None)
    if isinstance(module, Float8Linear | Linear):
        shape = (module.out_features, module.in_features)
        return module.recipe.name, gemm.kernel(module.recipe, module.weight.device, shape)
    if isinstance(module, float8_linear.Float8Linear):
        return "torchao's config", gemm.SCALED_MM
    return None, None


def _why_not(module: nn.Module, shape: tuple[int, ...]) -> str:
    """Why convert did not choose a module."""
    kind = type(module).__name__
    if isinstance(module, nn.Linear):
        return "not converted"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or kind == "Embedding":
        return TABLE
    if kind == "Conv1D":
        return CONV1D
    if kind.endswith("Router"):
        return ROUTER
    if isinstance(module, _ConvNd):
        return "convolutions stay in high precision"
    if isinstance(module, nn.RNNBase | nn.Bilinear | nn.MultiheadAttention):
        return _torch_reason(kind)
    return _outside(shape) if shape[0] != 1 else ADDED


def _torch_reason(kind: str) -> str:
    return f"torch's {kind} multiplies by itself, in high precision"


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape from its first dim that is not 1."""
    return shape[next((i for i, n in enumerate(shape) if n != 1), len(shape)) :]


def _outside(shape: tuple[int, ...]) -> str:
    return (
        f"a parameter of {len(shape)} dims outside linears: experts (torch._grouped_mm) or a "
        "hand-written product stay in high precision"
    )
