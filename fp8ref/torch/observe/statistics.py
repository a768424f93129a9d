"""FP8 statistics of a model's operands, measured on the device (spec Q-8 to Q-10)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from fp8ref.formats import Format
from fp8ref.recipe import OPERANDS
from fp8ref.selection.statistics import FIELDS, Operand
from fp8ref.spec.attention.products import AttentionOperand
from fp8ref.torch.experts import operands as grouped_operands
from fp8ref.torch.observe import gemms
from fp8ref.torch.observe.gemms import GemmOperand
from fp8ref.torch.quantize import cast, hadamard, scaling
from fp8ref.torch.quantize.scaling import Quantized

Parts = dict[str, list[Tensor]]
"""Operand's name -> float64 [FIELDS] of each microbatch."""


class Whole(NamedTuple):
    """The statistics of a tensor that do not depend on its cast.

    Casts along both axes share them.
    """

    non_finite: Tensor
    nonzero: Tensor
    signal: Tensor
    amax: Tensor


@torch.no_grad()
def measure_whole(x: Tensor) -> Whole:
    """The Whole of a tensor that is not empty; signal sums the squares of its finite elements."""
    value = cast.to_f32(x)
    finite = value.isfinite()
    return Whole(
        x.numel() - finite.count_nonzero(),
        x.count_nonzero(),
        _squares(torch.where(finite, value, 0.0)),
        scaling.amax(x),
    )


@torch.no_grad()
def measure(x: Tensor, q: Quantized, whole: Whole | None = None) -> Tensor:
    """float64 [FIELDS] of x and its quantized q; zeros if this rank holds no element of x.

    whole     measure_whole(x), if the caller has it already.
    Order:    errors e = RN32(decode(code) * scale_inv) - x in float32; squares and sums in float64
              (Q-9).
    """
    if not x.numel():
        return torch.zeros(len(FIELDS), dtype=torch.float64, device=x.device)
    whole = measure_whole(x) if whole is None else whole
    ends = torch.stack(q.scale.aminmax())  # NaN if any is
    # Finite tensors have a cheaper way. It is taken on a CPU only: on a GPU, to ask would be to
    # wait for the device.
    finite = x.device.type == "cpu" and not whole.non_finite and bool(ends.isfinite().all())
    *cast_counts, noise = (_measure_finite if finite else _measure_any)(x, q, whole)
    count = torch.full((), x.numel(), device=x.device)
    numbers = (count, whole.non_finite, *cast_counts, whole.signal, noise, whole.amax, *ends)
    return torch.stack([number.double() for number in numbers])


def _measure_any(x: Tensor, q: Quantized, whole: Whole) -> tuple[Tensor, ...]:
    """Underflows, saturated codes, overflows, and the sum of squared errors, of any x and q."""
    value, decoded = cast.to_f32(x), cast.decode(q.codes, q.fmt)
    finite = value.isfinite()
    error = torch.where(
        finite, decoded * _spread(q.factor, q) - torch.where(finite, value, 0.0), 0.0
    )
    return (
        ((value != 0) & (decoded == 0)).count_nonzero(),
        (decoded.abs() == q.fmt.max).count_nonzero(),
        _overflows((value * _spread(q.scale, q)).abs_(), q.fmt),
        _squares(error),
    )


def _measure_finite(x: Tensor, q: Quantized, whole: Whole) -> tuple[Tensor, ...]:
    """``_measure_any`` for finite x and scales: no code is NaN, and zero's is zero."""
    codes, value = q.code_bits, cast.to_f32(x)
    magnitudes = codes & ~q.fmt.sign_bit
    underflows = whole.nonzero - magnitudes.count_nonzero()
    saturated = magnitudes.eq_(q.fmt.max_code).count_nonzero()
    scaled = value * _spread(q.scale, q)
    least, greatest = scaled.aminmax()
    # Decode by a table: torch's own conversion of e4m3 on a CPU takes one element at a time.
    table = cast.decode(torch.arange(1 << q.fmt.bits, dtype=torch.uint8, device="cpu"), q.fmt)
    error = (
        table.index_select(0, codes.reshape(-1).int())
        .view(x.shape)
        .mul_(_spread(q.factor, q))
        .sub_(value)
    )
    beyond = max(-least, greatest) >= q.fmt.max
    return (
        underflows,
        saturated,
        _overflows(scaled.abs_(), q.fmt) if beyond else torch.zeros_like(saturated),
        _squares(error),
    )


@torch.no_grad()
def measure_groups(x: Tensor, q: Quantized, ends: Sequence[int]) -> Tensor:
    """float64 [FIELDS] of all rows in groups, x [M, C], or of all weights, x [E, N, K], and their
    quantized q."""
    if x.ndim == 3:
        measured = [measure(x[e], grouped_operands.group_part(q, e, 0, 0)) for e in range(len(x))]
    else:
        measured = []
        for _, begin, end, part in grouped_operands.parts_of(q, ends):
            missing = len(part.codes) - (end - begin)  # zeros of a last block, which count nothing
            whole = measure(functional.pad(x[begin:end], (0, 0, 0, missing)), part)
            whole[FIELDS.index("count")] -= missing * x.shape[1]
            measured.append(whole)
    if not measured:
        return torch.zeros(len(FIELDS), dtype=torch.float64, device=x.device)
    sums, amax, least, greatest = torch.stack(measured).split([len(FIELDS) - 3, 1, 1, 1], dim=1)
    return torch.cat([sums.sum(0), amax.amax(0), least.amin(0), greatest.amax(0)])


class _Measured:
    """Statistics of operands, measured once if two GEMMs take the same one."""

    def __init__(self, model: nn.Module) -> None:
        self._gathers = {
            name: module.fp8_gather
            for name, module in model.named_modules()
            if hasattr(module, "fp8_gather")
        }
        self._once: dict[tuple, Tensor] = {}
        self._wholes: dict[tuple, Whole] = {}

    def begin(self, layer: str) -> None:
        """A new microbatch of a linear begins."""
        for kept in (self._once, self._wholes):
            for key in [key for key in kept if key[0] == layer]:
                del kept[key]

    def __call__(self, operand: Operand, captured: GemmOperand) -> Tensor:
        """``measure`` of a GEMM's operand; for a weight gathered in FP8, of this rank's shard."""
        gather = self._gathers.get(operand.layer) if operand.role == "weight" else None
        spec, axis = operand.cast, captured.axis
        whole: tuple = (operand.layer, operand.role)
        key = (*whole, spec, None if spec.granularity == "tensorwise" else axis)
        if key not in self._once:
            codes, x = cast.from_code_bits(captured.codes, spec.fmt), captured.hp
            # the GEMM had the gathered weight; this rank cast its own rows, by the same scale
            if gather is not None:
                x = gather.shard.to(gather.dtype)
                if x.numel():
                    codes = scaling.quantize_with(x, captured.scale, spec.fmt).codes
            if spec.rotation is not None:  # the error is of what was cast
                x, whole = hadamard.rotate_blocks(x, spec.rotation, axis), (*whole, axis)
            if whole not in self._wholes and x.numel():
                self._wholes[whole] = measure_whole(x)
            scales = captured.scale, captured.scale_inv
            q = Quantized(codes, *scales, spec.fmt, spec.granularity, axis)
            self._once[key] = measure(x, q, self._wholes.get(whole))
        return self._once[key]


@contextmanager
def measuring(model: nn.Module, planned: list[Operand], parts: Parts) -> Iterator[None]:
    """Measure planned operands into parts, in a context of one eager forward and backward pass.

    A rank's part is its rows of input and grad_output. Of a weight gathered in FP8 it is the rank's
    shard, else the whole weight. Under tensor parallelism it is what the rank has of each.
    """
    by_gemm = {
        (o.layer, o.gemm): [p for p in planned if (p.layer, p.gemm) == (o.layer, o.gemm)]
        for o in planned
    }
    measured = _Measured(model)

    def observer(name: str, gemm, a: GemmOperand, b: GemmOperand, out: Tensor) -> None:
        if gemm == "output":
            measured.begin(name)
        with _disable_current_modes():
            for role, captured in zip(OPERANDS[gemm], (a, b), strict=True):
                for operand in by_gemm.get((name, gemm), ()):
                    if operand.role == role:
                        parts.setdefault(operand.name, []).append(measured(operand, captured))

    def groups_observer(name: str, gemm, tensors, operands, groups, out: Tensor) -> None:
        ends = groups.ends.tolist()
        for role, x, q in zip(OPERANDS[gemm], tensors, operands, strict=True):
            for operand in by_gemm.get((name, gemm), ()):
                if operand.role == role:
                    parts.setdefault(operand.name, []).append(measure_groups(x, q, ends))

    with gemms.observe_gemms(model, observer, groups_observer):
        yield


def gather_ranks(parts: Tensor) -> Tensor:
    """[operands, ranks, ...] of every rank's [operands, ...], by one all-gather."""
    if not distributed.is_initialized():
        return parts[:, None]
    gathered = [torch.empty_like(parts) for _ in range(distributed.get_world_size())]
    distributed.all_gather(gathered, parts)
    return torch.stack(gathered, dim=1)


def stacked(planned: Sequence[Operand | AttentionOperand], parts: Parts) -> Tensor:
    """float64 [operands, microbatches, FIELDS] in the order of the plan."""
    return torch.stack([torch.stack(parts[operand.name]) for operand in planned])


def _squares(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def _spread(scale: Tensor, q: Quantized) -> Tensor:
    return scaling.spread(scale, tuple(q.codes.shape), q.blocks)


def _overflows(scaled: Tensor, fmt: Format) -> Tensor:
    """How many magnitudes round beyond max (C-4)."""
    # Those above the tie of max and the number that would follow. The tie itself rounds to even:
    # away from an odd max.
    below = torch.tensor(fmt.max_code - 1, dtype=torch.uint8, device="cpu")
    step = fmt.max - cast.decode(below, fmt).item()
    bound = fmt.max + step / 2
    return (scaled >= bound if fmt.max_code % 2 else scaled > bound).count_nonzero()
