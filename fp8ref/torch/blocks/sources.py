"""Values of a block before they are cast: computed and cast in one pass where kernels are on, else
computed, rounded and cast as a linear casts its operands, to the same codes (spec M-11)."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8ref.recipe import ROLES, CastSpec, Role
from fp8ref.torch.kernels import fused
from fp8ref.torch.linear import both_orders
from fp8ref.torch.linear.both_orders import Pair
from fp8ref.torch.linear.passes import Operand, Pass
from fp8ref.torch.quantize import scales, scaling
from fp8ref.torch.quantize.scales import Scales

__all__ = ["Kernels", "Source"]


class Kernels(NamedTuple):
    """Operators of ``kernels.fused`` that compute n values and cast them, all in one pass.

    amax          -> partial amaxes of each.
    cast          a scale () of each -> codes and transposed codes of each, then partial
                  amaxes of each.
    amax_lines    -> partial amaxes of rows and columns of each.
    cast_lines    scales of rows and columns of each -> codes and transposed codes of each.
    lines         -> as ``kernels.casts.lines``, of each; or None.

    Each takes the tensors that the values are computed of first.
    """

    amax: Callable[..., Any]
    cast: Callable[..., Any]
    amax_lines: Callable[..., Any]
    cast_lines: Callable[..., Any]
    lines: Callable[..., Any] | None

    @classmethod
    def of(cls, value: str) -> "Kernels":
        """The operators whose names begin with a value's, such as ``swiglu_cast``."""
        operators: list[Any] = [getattr(fused, f"{value}_{key}", None) for key in cls._fields]
        return cls(*operators)


@dataclass
class Source:
    """Values [M, K] that are computed where they are needed: one, or two that one kernel casts.

    device    where they are.
    compute   returns them in high precision.
    kernels   what casts them, if anything does, from tensors, with options.
    """

    device: torch.device
    compute: Callable[[], Sequence[Tensor]]
    kernels: Kernels | None = None
    tensors: tuple[Tensor, ...] = ()
    options: Mapping[str, bool | str] = field(default_factory=dict)

    @functools.cached_property
    def values(self) -> Sequence[Tensor]:
        """The values in high precision, computed once."""
        return self.compute()

    @property
    def value(self) -> Tensor:
        """The one value in high precision."""
        return self.values[0]

    def shared(self, role: Role, linears: Sequence[Pass]) -> list[Operand]:
        """The one value as an operand of several linears; those of one scale, whose state is one,
        or that compute the same scale, cast and observe it once."""
        operands: dict[tuple, Operand] = {}
        keys = []
        for linear in linears:
            scale = linear.scales[ROLES.index(role)]
            number = None if scale is None else id(scale)
            key = linear.spec.role_uses[role], linear.spec.kernels, number
            keys.append(key)
            if key not in operands:
                (operands[key],) = self.operands(role, [linear])
        return [operands[key] for key in keys]

    def operands(self, role: Role, linears: Sequence[Pass]) -> list[Operand]:
        """Each value as an operand of a linear of its own, observed."""
        casts = {linear.spec.by_kernels(role, self.device) for linear in linears}
        cast = casts.pop()
        pairs = self._cast(role, cast, linears) if cast is not None and not casts else None
        if pairs is None:
            return [
                linear.operand(role, value)
                for linear, value in zip(linears, self.values, strict=True)
            ]
        return [linear.observed(role, pair) for linear, pair in zip(linears, pairs, strict=True)]

    def _cast(self, role: Role, cast: CastSpec, linears: Sequence[Pass]) -> list[Pair] | None:
        """The values, cast by kernels of their own; None if there are none for this cast."""
        kernels, e5m2, numbers = self.kernels, cast.fmt.name == "e5m2", range(len(linears))
        if kernels is None:
            return None
        if cast.granularity == "blockwise_1x128" and kernels.lines is not None:
            results = kernels.lines(*self.tensors, e5m2=e5m2, **self.options)
            six = [results[6 * i : 6 * i + 6] for i in numbers]
            return [
                both_orders.pair(cast, (codes, *four[:2], transposed, *four[2:]))
                for codes, transposed, *four in six
            ]
        if cast.granularity == "rowwise":
            amaxes = kernels.amax_lines(*self.tensors, **self.options)
            lines = [
                both_orders.line_scales(amaxes[2 * i : 2 * i + 2], linears[i].spec.pairs[role])
                for i in numbers
            ]
            factors = [line.scale.contiguous() for both in lines for line in both]
            codes = kernels.cast_lines(*self.tensors, *factors, e5m2=e5m2, **self.options)
            return [
                both_orders.pair(cast, (codes[2 * i], *rows, codes[2 * i + 1], *columns))
                for i, (rows, columns) in enumerate(lines)
            ]
        if cast.granularity == "tensorwise":
            whole = self._scales(role, linears, kernels)
            factors = [scale for scale, _ in whole]
            results = kernels.cast(*self.tensors, *factors, e5m2=e5m2, **self.options)
            parts = results[2 * len(linears) :]
            return [
                both_orders.pair(cast, (results[2 * i], *both, results[2 * i + 1], *both), parts[i])
                for i, both in enumerate(whole)
            ]
        return None

    def _scales(self, role: Role, linears: Sequence[Pass], kernels: Kernels) -> list[Scales]:
        """The scale () and scale_inv () of each value: the state's, or by the value's amax."""
        delayed = [linear.scales[ROLES.index(role)] for linear in linears]
        settled = [Scales(scale, scale.reciprocal()) for scale in delayed if scale is not None]
        if settled:
            return settled
        parts = kernels.amax(*self.tensors, **self.options)
        by_amax = []
        for linear, each in zip(linears, [parts] if len(linears) == 1 else parts, strict=True):
            use = linear.spec.pairs[role][0]
            assert use.cast is not None
            amax = each.amax().view(torch.float32)
            if use.group is not None:
                amax = scaling.merge_amax(amax, use.group)
            by_amax.append(scales.scales_from_amax(amax, use.cast.fmt, use.cast.policy))
        return by_amax
