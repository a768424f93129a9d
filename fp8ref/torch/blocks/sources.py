"""Values of a block before they are cast: computed and cast in one pass where kernels are on, else
computed, rounded and cast as a linear casts its operands, to the same codes (spec M-11)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8ref.recipe import ROLES, Role
from fp8ref.torch.delayed import delayed
from fp8ref.torch.kernels import casts, choice
from fp8ref.torch.linear import both_orders
from fp8ref.torch.linear.linear import _Operand, _operand, _Spec, _States
from fp8ref.torch.quantize import scales, scaling

__all__ = ["Codes", "Source", "fuses", "operands"]


class Codes(NamedTuple):
    """What a kernel returns: codes [M, K], transposed codes [K, M], and partial amaxes."""

    codes: torch.Tensor
    transposed: torch.Tensor
    parts: torch.Tensor


class ByRows(NamedTuple):
    """Kernels that cast a value by rows and columns.

    amaxes    as ``kernels.casts.amax_lines``.
    cast      as ``kernels.casts.cast_lines``.
    """

    amaxes: Callable[[], Sequence[torch.Tensor]]
    cast: Callable[..., Sequence[torch.Tensor]]


@dataclass
class Source:
    """A value [M, K] that is computed where it is needed.

    device    where it is.
    compute   returns it in high precision.
    amax      returns its partial amaxes, by a kernel.
    cast      casts it by a scale (), to e5m2 or else to e4m3fn, by a kernel; None: no kernel does.
    lines     casts it by blocks of 1 x 128 along both axes: as ``kernels.casts.lines``, or None.
    by_rows   casts it by a scale for each row, and transposed for each column, or None.
    """

    device: torch.device
    compute: Callable[[], torch.Tensor]
    amax: Callable[[], torch.Tensor] | None = None
    cast: Callable[[torch.Tensor, bool], Codes] | None = None
    lines: Callable[[bool], Sequence[torch.Tensor]] | None = None
    by_rows: ByRows | None = None
    _value: torch.Tensor | None = None
    _parts: torch.Tensor | None = None

    @property
    def value(self) -> torch.Tensor:
        """The value in high precision, computed once."""
        if self._value is None:
            self._value = self.compute()
        return self._value

    def operand(self, role: Role, spec: _Spec, states: _States) -> _Operand:
        """The value as a linear's operand, observed by its state."""
        if self.lines is not None and fuses(spec, role, self.device, "blockwise_1x128"):
            cast = spec.pairs[role][0].cast
            assert cast is not None
            codes, transposed, *four = self.lines(cast.fmt.name == "e5m2")
            pair = both_orders.pair(cast, (codes, *four[:2], transposed, *four[2:]))
            return _Operand(role, pair.rows, None, pair.columns)
        if self.by_rows is not None and fuses(spec, role, self.device, "rowwise"):
            cast = spec.pairs[role][0].cast
            assert cast is not None
            rows, columns = both_orders.line_scales(self.by_rows.amaxes(), spec.pairs[role])
            factors = rows.scale.contiguous(), columns.scale.contiguous()
            by_rows = self.by_rows.cast(*factors, e5m2=cast.fmt.name == "e5m2")
            pair = both_orders.pair(cast, (by_rows[0], *rows, by_rows[1], *columns))
            return _Operand(role, pair.rows, None, pair.columns)
        if self.cast is None or not fuses(spec, role, self.device):
            return _operand(spec, role, self.value, states)
        scale, scale_inv = self.scale(role, spec, states)
        cast = spec.pairs[role][0].cast
        assert cast is not None
        codes, transposed, self._parts = self.cast(scale, cast.fmt.name == "e5m2")
        pair = both_orders.pair(cast, (codes, scale, scale_inv, transposed, scale, scale_inv))
        if (seen := states.seen[ROLES.index(role)]) is not None:
            self.observe(seen)
        return _Operand(role, pair.rows, states.scales[ROLES.index(role)], pair.columns)

    def scale(self, role: Role, spec: _Spec, states: _States) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale () and scale_inv () of a kernel's cast: the state's, or by the value's amax."""
        delayed_scale = states.scales[ROLES.index(role)]
        if delayed_scale is not None:
            return delayed_scale, delayed_scale.reciprocal()
        use = spec.pairs[role][0]
        assert self.amax is not None
        assert use.cast is not None
        amax = self.amax().amax().view(torch.float32)
        if use.group is not None:
            amax = scaling.merge_amax(amax, use.group)
        return scales.scales_from_amax(amax, use.cast.fmt, use.cast.policy)

    def observe(self, seen: torch.Tensor) -> None:
        """Merge the value's observation into seen, after the cast."""
        if self._parts is None:
            delayed.merge_(seen, self.value)
        else:
            casts.merge_(seen, self._parts)


def fuses(spec: _Spec, role: Role, device: torch.device, granularity: str = "tensorwise") -> bool:
    """Whether kernels cast a role's value, by scales of this granularity, in the pass that computes
    it."""
    if role not in spec.pairs or not choice.resolve(spec.kernels, device):
        return False
    cast = spec.pairs[role][0].cast
    return cast is not None and cast.granularity == granularity


def operands(
    source: Source, role: Role, linears: Sequence[tuple[_Spec, _States]]
) -> list[_Operand]:
    """A value as an operand of several linears; those of one scale, whose state is one, or that
    compute the same scale, cast and observe it once."""
    place = ROLES.index(role)
    cast: dict[tuple, _Operand] = {}
    found = []
    for spec, states in linears:
        scale = states.scales[place]
        uses = tuple(use for (_, each), use in spec.uses.items() if each == role)
        key = uses, spec.kernels, None if scale is None else id(scale)
        if key not in cast:
            cast[key] = source.operand(role, spec, states)
        found.append(cast[key])
    return found
