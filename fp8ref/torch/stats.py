"""What quantising did to the operands of a model's FP8 GEMMs, as a few numbers on the device (SEMANTICS Q-8 to Q-10)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed, nn
from torch.utils._python_dispatch import _disable_current_modes

from fp8ref.formats import Format
from fp8ref.recipe import OPERANDS
from fp8ref.statistics import FIELDS, Operand
from fp8ref.torch import cast, observing, scaling
from fp8ref.torch.observing import Observed
from fp8ref.torch.scaling import Quantized

Parts = dict[str, list[torch.Tensor]]  # float64 [FIELDS] of each microbatch, by an operand's name


@torch.no_grad()
def measure(x: torch.Tensor, q: Quantized) -> torch.Tensor:
    """float64 [FIELDS] of x and what it was quantised to; zeros where a rank holds none of it.

    Order:    errors e = RN32(decode(code) * scale_inv) - x in float32; squares and sums in float64 (Q-9).
    """
    if not x.numel():
        return torch.zeros(len(FIELDS), dtype=torch.float64, device=x.device)
    value, decoded = cast.to_f32(x), cast.decode(q.codes, q.fmt)
    finite = value.isfinite()
    kept = torch.where(finite, value, 0.0)
    error = torch.where(finite, decoded * scaling.spread(q.scale_inv, tuple(x.shape), q.granularity, q.axis) - kept, 0.0)
    scaled = (value * scaling.spread(q.scale, tuple(x.shape), q.granularity, q.axis)).abs_()
    bound, above = _overflow_bound(q.fmt)
    found = [
        torch.full((), x.numel(), dtype=torch.float64, device=x.device),
        x.numel() - finite.count_nonzero(),
        ((value != 0) & (decoded == 0)).count_nonzero(),
        (decoded.abs() == q.fmt.max).count_nonzero(),
        (scaled > bound if above else scaled >= bound).count_nonzero(),
        _squares(kept),
        _squares(error),
        scaling.amax(x),
        q.scale.min(),
        q.scale.max(),
    ]
    return torch.stack([number.double() for number in found])


@contextmanager
def measuring(model: nn.Module, planned: list[Operand], found: Parts) -> Iterator[None]:
    """In this context, which is of one forward and backward pass of a model that runs eagerly, found gets the parts of planned operands that this rank
    holds: rows of input and grad_output; of a weight that is gathered in FP8 the rank's shard, of any other all."""
    by_gemm = {(o.layer, o.gemm): [p for p in planned if (p.layer, p.gemm) == (o.layer, o.gemm)] for o in planned}
    gathers = {name: module.fp8_gather for name, module in model.named_modules() if hasattr(module, "fp8_gather")}
    once: dict[tuple, torch.Tensor] = {}  # of operands that two GEMMs take

    def measured(operand: Operand, seen: Observed) -> torch.Tensor:
        gather = gathers.get(operand.layer) if operand.role == "weight" else None
        spec, axis = operand.cast, seen.axis
        key = (operand.layer, operand.role, spec, None if spec.granularity == "tensorwise" else axis)
        if key not in once:
            codes, x = seen.codes.view(cast.DTYPES[spec.fmt.name]), seen.hp
            if gather is not None:  # its own rows are what this rank cast, by the scale that the others cast theirs by
                x = gather.shard.to(gather.dtype)
                codes = scaling.quantize_with(x, seen.scale, spec.fmt).codes if x.numel() else codes
            once[key] = measure(x, Quantized(codes, seen.scale, seen.scale_inv, spec.fmt, spec.granularity, axis))
        return once[key]

    def observer(name: str, gemm, a: Observed, b: Observed, out: torch.Tensor) -> None:
        if gemm == "output":  # of the next microbatch
            for key in [key for key in once if key[0] == name]:
                del once[key]
        with _disable_current_modes():
            for role, seen in zip(OPERANDS[gemm], (a, b), strict=True):
                for operand in by_gemm.get((name, gemm), ()):
                    if operand.role == role:
                        found.setdefault(operand.name, []).append(measured(operand, seen))

    with observing.observed(model, observer):
        yield


def of_ranks(parts: torch.Tensor) -> torch.Tensor:
    """[operands, ranks, ...] of every rank's [operands, ...], by one all-gather; of this process alone without a group."""
    if not distributed.is_initialized():
        return parts[:, None]
    found = [torch.empty_like(parts) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, parts)
    return torch.stack(found, dim=1)


def stacked(planned: list[Operand], found: Parts) -> torch.Tensor:
    """float64 [operands, microbatches, FIELDS] in the order of the plan."""
    return torch.stack([torch.stack(found[operand.name]) for operand in planned])


def _squares(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def _overflow_bound(fmt: Format) -> tuple[float, bool]:
    """The tie between max and the number that would follow it, and whether only what lies above it rounds beyond max (C-4)."""
    step = fmt.max - cast.decode(torch.tensor(fmt.max_code - 1, dtype=torch.uint8), fmt).item()
    return fmt.max + step / 2, fmt.max_code % 2 == 0
