"""AdamW whose moments are stored in FP8 and other narrow formats, as a torch optimizer (SEMANTICS O).

    optimizer = states.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, layout="sqrt_e4m3")

The bits are those of ``fp8ref.sim.states``, eager or compiled, and for any cut of parameters that
FSDP2 makes. torch would change them in three ways on a CPU:

    sqrt              is not rounded correctly; that of float64 is, rounded once more
    number / tensor   is a product with a reciprocal; a tensor of the number is divided instead
    addcmul, lerp     round once where O rounds twice; they are not used

Under FSDP2 codes are cut as their parameter is. Scales are whole on every rank: those of blocks take
4 bytes for each 128 or 256 elements of the whole tensor. A step has one all-reduce of amaxes, and
another under ``predicted``.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fp8ref import states
from fp8ref.formats import BFLOAT16, FLOAT16, FLOAT32
from fp8ref.states import Layout, Moment, Scalars
from fp8ref.torch import cast

_DTYPES = {FLOAT16.name: torch.float16, BFLOAT16.name: torch.bfloat16, FLOAT32.name: torch.float32}


class MomentState(NamedTuple):
    """A stored moment. codes are uint8 of an FP8 format, or the format's own dtype; the rest is
    float32 of shape () or [blocks], None where the layout has none. Fields as in
    ``fp8ref.sim.states``."""

    codes: Tensor
    scale_inv: Tensor | None = None
    amax: Tensor | None = None
    exponent: Tensor | None = None
    center: Tensor | None = None


class _Part(NamedTuple):
    """Which part of a tensor is here: its elements from ``start`` on, of ``size`` in all; the groups
    of ranks that have the others."""

    size: int
    start: int
    groups: tuple[distributed.ProcessGroup, ...]


class AdamW(torch.optim.Optimizer):
    """AdamW with the moments of a layout.

    lr, betas, eps, weight_decay
                  as in ``torch.optim.AdamW``; each group of parameters may have its own.
    compiled      whether ``torch.compile`` compiles the update of a parameter; the bits are the same.

    Shapes:       parameters float32, of any shape, on any device, plain or DTensors; gradients
                  float32, float16 or bfloat16.
    State:        of each parameter ``step``, and the fields of ``MomentState`` as ``m_codes``,
                  ``v_scale_inv`` and so on; codes of a DTensor are one, cut in the same way.
    Order:        SEMANTICS O-2 to O-10.
    Specials:     a gradient that is not finite makes its weight NaN, and the moments of its group
                  (O-2). A parameter without a gradient keeps its weight and its state.
    Raises:       ValueError: an unknown layout, or one with stochastic rounding; numbers outside
                  their ranges (O-2); parameters that are not float32, or empty; states of another
                  layout at load; a DTensor that a layout with blocks is cut in another way than by
                  Shard(0).
    Source:       SEMANTICS O.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        layout: str | Layout = "sqrt_e4m3",
        compiled: bool = False,
    ) -> None:
        self.layout = states.by_name(layout)
        if self.layout.stochastic:
            raise ValueError(f"fp8ref.torch does not round stochastically; layout {self.layout.name!r} does. Use rounding='nearest_even'.")
        self._compiled = compiled
        compiles: Callable = functools.partial(torch.compile, fullgraph=True, dynamic=False) if compiled else lambda function: function
        self._begin: Callable[..., list[Tensor]] = compiles(_begin)
        self._finish: Callable[..., tuple] = compiles(_finish)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "layout": self.layout.name})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own numbers. Raises as the class."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._scalars(group, 1)
        for p in group["params"]:
            if p.dtype != torch.float32 or p.numel() == 0:
                raise ValueError(
                    f"fp8ref.torch.states takes float32 parameters with at least one element; got {p.dtype} {tuple(p.shape)}. "
                    "Keep float32 masters."
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of the same layout, bit for bit.

        Raises:   ValueError: states of another layout, before anything is changed.
        """
        found = {group.get("layout") for group in state_dict["param_groups"]}
        if found != {self.layout.name}:
            raise ValueError(
                f"states of layout {self.layout.name!r} are loaded; got {sorted(map(str, found))}. States of another layout are not "
                "converted: build the optimizer with the layout that they were made with."
            )
        super().load_state_dict(state_dict)
        # torch has cast every tensor to its parameter's dtype.
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        here = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved, here, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                self.state[p][key] = value.clone() if key == "step" else value.to(p.device, copy=True)

    @torch.no_grad()
    def step(self, closure=None):
        """One step of every parameter that has a gradient; the loss of closure, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Layouts and shapes of a model are finite, and each compiles once: dynamo's limit of recompilations is for others.
        with torch._dynamo.utils.disable_cache_limit() if self._compiled else contextlib.nullcontext():
            self._steps()
        return loss

    def _steps(self) -> None:
        for group in self.param_groups:  # refused before anything changes
            self._scalars(group, 1)
            for p in group["params"]:
                _check_cut(p, self.layout.of(p.numel()))
        cut = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self._state(p)
                part, layout = _part(p), self.layout.of(p.numel())
                at = _tensors(self._scalars(group, int(state["step"].item()) + 1), p.device)
                given = (_local(p.grad), _moment_state(state, "m"), _moment_state(state, "v"), at, layout, part._replace(groups=()))
                if part.groups:
                    cut.append((p, part.groups, given, self._begin(*given)))
                else:
                    self._update(p, given, None)
        _reduce([(groups, found) for _, groups, _, found in cut])
        _reduce([(groups, self._update(p, given, found)) for p, groups, given, found in cut])

    def _update(self, p: Tensor, given: tuple, found: list[Tensor] | None) -> list[Tensor]:
        """Update a parameter and its state in place; the amaxes that other ranks complete."""
        _, m, v, _, layout, _ = given
        weight, *new = self._finish(_local(p), *given, found)
        _local(p).copy_(weight)
        for old, changed in zip((m, v), new, strict=True):
            for mine, value in zip(old, changed, strict=True):
                if mine is not None:
                    mine.copy_(value)
        self.state[p]["step"] += 1
        return [old.amax for old, moment in ((m, layout.m), (v, layout.v)) if moment.amax == "predicted"]

    def _scalars(self, group: dict[str, Any], step: int) -> Scalars:
        b1, b2 = group["betas"]
        rest = {"eps": float(group["eps"]), "weight_decay": float(group["weight_decay"])}
        states.check(b1=b1, b2=b2, layout=self.layout, **rest)
        return states.scalars(step, learning_rate=float(group["lr"]), b1=b1, b2=b2, **rest)

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, made where it has none."""
        state = self.state[p]
        if not state:
            layout = self.layout.of(p.numel())
            state["step"] = torch.zeros(())
            for key, moment in (("m", layout.m), ("v", layout.v)):
                state.update({f"{key}_{field}": x for field, x in _zeros(p, moment)._asdict().items() if x is not None})
        return state


def decode(optimizer: AdamW, p: Tensor) -> tuple[Tensor, Tensor]:
    """m and v of a parameter, float32, as the next step reads them; of a DTensor this rank's part
    (SEMANTICS O-4).

    Raises:   ValueError: a parameter that made no step.
    """
    if not optimizer.state.get(p):
        raise ValueError("a parameter has moments after its first step; got one without. Call optimizer.step() first.")
    layout, part = optimizer.layout.of(p.numel()), _part(p)
    both = (("m", layout.m), ("v", layout.v))
    m, v = (_read(_moment_state(optimizer.state[p], key), moment, layout, part) for key, moment in both)
    return m, v


def _begin(g: Tensor, m: MomentState, v: MomentState, at: Scalars, layout: Layout, part: _Part) -> list[Tensor]:
    """What ranks have to reduce by maximum before they store: of each moment its amax and, where the
    layout needs it, the gradient's or the negative of its smallest magnitude."""
    g = _in_range(cast.to_f32(g))
    found = []
    for x, moment in zip(_averages(g, _read(m, layout.m, layout, part), _read(v, layout.v, layout, part), at, layout),
                         (layout.m, layout.v), strict=True):  # fmt: skip
        found += _extremes(_sqrt(x) if moment.root else x, g, moment, part)
    return found


def _finish(p: Tensor, g: Tensor, m: MomentState, v: MomentState, at: Scalars, layout: Layout, part: _Part, found):
    """The weight and both stored moments; found is ``_begin``'s, of all ranks, or None."""
    g = _in_range(cast.to_f32(g))
    new_m, new_v = _averages(g, _read(m, layout.m, layout, part), _read(v, layout.v, layout, part), at, layout)
    ratio = (new_m * at.inverse1) / (_sqrt(new_v) * at.inverse2 + at.eps)
    if layout.bounded:
        ratio = torch.clamp(ratio, -at.bound, at.bound)
    change = at.learning_rate * (ratio + at.weight_decay * p)
    change = torch.where(change.abs() < states.STEP_MIN, 0.0, change)
    stored, rest = [], found
    for which, (x, old, moment) in enumerate(((new_m, m, layout.m), (new_v, v, layout.v))):
        x = _sqrt(x) if moment.root else x
        extremes = _extremes(x, g, moment, part) if rest is None else rest[: _reduced(moment)]
        rest = None if rest is None else rest[_reduced(moment) :]
        stored.append(_store(x, extremes, old, moment, which, at, layout, part))
    return p - change, *stored


def _reduced(moment: Moment) -> int:
    """How many reductions a moment needs."""
    return 0 if moment.scaling is None else 2 if moment.expansion or moment.amax == "predicted" else 1


def _extremes(x: Tensor, g: Tensor, moment: Moment, part: _Part) -> list[Tensor]:
    if moment.scaling is None:
        return []
    found = [_group_max(x.abs(), moment, part)]
    if moment.amax == "predicted":
        found.append(_group_max(g.abs(), moment, part))
    if moment.expansion:
        found.append(_group_max(torch.where(x == 0, -torch.inf, -x.abs()), moment, part, empty=-torch.inf))
    return found


def _in_range(g: Tensor) -> Tensor:
    """O-2."""
    magnitude = g.abs()
    kept = torch.where(magnitude < states.GRADIENT_MIN, 0.0, g)
    return torch.where(magnitude <= states.GRADIENT_MAX, kept, torch.nan)


def _sqrt(x: Tensor) -> Tensor:
    return x.sqrt() if x.is_cuda else x.double().sqrt().float()


def _averages(g: Tensor, m: Tensor, v: Tensor, at: Scalars, layout: Layout) -> tuple[Tensor, Tensor]:
    """O-5."""
    square = g * g
    if layout.average == "products":
        m = at.b1 * m + at.a1 * g
        v = at.b2 * v + at.a2 * square
    else:
        m = m + at.a1 * (g - m)
        v = v + at.a2 * (square - v)
    return _not_tiny(m, layout), _not_tiny(v, layout)


def _not_tiny(x: Tensor, layout: Layout) -> Tensor:
    return torch.where(x.abs() < layout.smallest_moment, 0.0, x)


def _read(stored: MomentState, moment: Moment, layout: Layout, part: _Part) -> Tensor:
    """O-4."""
    x = _values(stored.codes, moment)
    if stored.scale_inv is not None:
        x = x * _spread(stored.scale_inv, x, moment, part)
    if stored.exponent is not None and stored.center is not None:
        magnitude = _root_of_power(x.abs(), _spread(stored.exponent, x, moment, part))
        x = torch.copysign(magnitude * _spread(stored.center, x, moment, part), x)
    if moment.root:
        x = x * x
    return _not_tiny(x, layout)


def _store(
    x: Tensor, extremes: list[Tensor], old: MomentState, moment: Moment, which: int, at: Scalars, layout: Layout, part: _Part
) -> MomentState:
    """O-7 to O-10."""
    if moment.scaling is None:
        return MomentState(_codes(x, x, moment))
    own = amax = extremes[0]
    if moment.amax == "previous":
        assert old.amax is not None
        amax = torch.where(old.amax == 0, own, old.amax)
    elif moment.amax == "predicted":
        assert old.amax is not None
        kept = old.amax * old.amax if moment.root else old.amax
        amax = _averages(extremes[1], kept, kept, at, layout)[which]
        amax = _sqrt(amax) if moment.root else amax
    if moment.expansion:
        return _store_expanded(x, amax, -extremes[1], moment, part)
    scale, scale_inv = _scales(amax, moment)
    factor = _spread(scale_inv if scale is None else scale, x, moment, part)
    scaled = x / factor if scale is None else x * factor
    codes = _codes(scaled, x, moment)
    if moment.amax != "predicted":
        return MomentState(codes, scale_inv, own if moment.amax == "previous" else None)
    # Rounding is monotone: the largest code has the largest product.
    return MomentState(codes, scale_inv, _group_max(_values(codes, moment).abs(), moment, part) * scale_inv)


def _store_expanded(x: Tensor, amax: Tensor, smallest: Tensor, moment: Moment, part: _Part) -> MomentState:
    """O-10."""
    floor = torch.full_like(amax, moment.floor)
    top = torch.maximum(amax, floor)
    bottom = torch.minimum(torch.maximum(smallest, floor), top)
    center = _sqrt(top) * _sqrt(bottom)
    ratio = top / bottom
    exponent = torch.full_like(ratio, states.EXPONENTS[-1])
    for k in reversed(states.EXPONENTS[:-1]):
        exponent = torch.where(ratio <= states.float32(states.EXPANDED_RANGE ** (1 / k)), k, exponent)
    scale_inv = _power(top / center, exponent) / torch.full_like(center, moment.fmt.max)
    of, k, inverse = (_spread(a, x, moment, part) for a in (center, exponent, scale_inv))
    scaled = torch.copysign(_power(x.abs() / of, k), x) / inverse
    return MomentState(_codes(scaled, x, moment), scale_inv, None, exponent, center)


def _power(x: Tensor, exponent: Tensor) -> Tensor:
    square = x * x
    low = torch.where(exponent == 1, x, _sqrt(x))
    return torch.where(exponent == 4, square * square, torch.where(exponent == 2, square, low))


def _root_of_power(y: Tensor, exponent: Tensor) -> Tensor:
    root = _sqrt(y)
    low = torch.where(exponent == 1, y, y * y)
    return torch.where(exponent == 4, _sqrt(root), torch.where(exponent == 2, root, low))


def _scales(amax: Tensor, moment: Moment) -> tuple[Tensor | None, Tensor]:
    """(scale, scale_inv) (O-7); scale is None under ``divide``."""
    amax = torch.maximum(amax, torch.full_like(amax, moment.floor))
    one, top = torch.ones_like(amax), torch.full_like(amax, moment.fmt.max)
    if moment.scaling == "divide":
        return None, amax / top
    scale = one / (amax / top) if moment.scaling == "reciprocal" else top / amax
    if moment.scaling == "power_of_two":
        bits = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
        scale = torch.where(scale.isnan(), scale, bits)
    return scale, one / scale


def _codes(scaled: Tensor, x: Tensor, moment: Moment) -> Tensor:
    """O-8."""
    fmt = moment.fmt
    if fmt == FLOAT32:
        return scaled
    if fmt.bits == 8:
        codes = cast.encode(scaled, fmt)
        return torch.where((x != 0) & (codes & 0x7F == 0), codes | 1, codes) if moment.keep else codes
    if moment.keep:
        # Asked before the cast, which the compiler leaves out where a cast back follows.
        lost = (x != 0) & (scaled.abs() <= fmt.smallest_subnormal / 2)
        scaled = torch.where(lost, torch.copysign(torch.full_like(x, fmt.smallest_subnormal), x), scaled)
    return scaled.clamp(-fmt.max, fmt.max).to(_DTYPES[fmt.name])


def _values(codes: Tensor, moment: Moment) -> Tensor:
    return cast.decode(codes, moment.fmt) if moment.fmt.bits == 8 else codes.float()


def _group_max(x: Tensor, moment: Moment, part: _Part, empty: float = 0.0) -> Tensor:
    """() or [blocks]: the maximum of each group over the elements that are here; empty where none
    is."""
    block = moment.block
    if block is None:
        return x.amax() if x.numel() else x.new_full((), empty)
    before, after = part.start % block, -(part.start + x.numel()) % block
    here = torch.nn.functional.pad(x.reshape(-1), (before, after), value=empty).view(-1, block).amax(1)
    first = part.start // block
    return torch.nn.functional.pad(here, (first, moment.groups(part.size) - first - here.numel()), value=empty)


def _spread(of_groups: Tensor, x: Tensor, moment: Moment, part: _Part) -> Tensor:
    """The values of the groups, for each element of x."""
    block = moment.block
    if block is None:
        return of_groups
    first, last = part.start // block, -(-(part.start + x.numel()) // block)
    skip = part.start - first * block
    each = of_groups[first:last].unsqueeze(1).expand(-1, block).reshape(-1)
    return each[skip : skip + x.numel()].view(x.shape)


def _zeros(p: Tensor, moment: Moment) -> MomentState:
    dtype = torch.uint8 if moment.fmt.bits == 8 else _DTYPES[moment.fmt.name]
    codes = torch.zeros_like(p, dtype=dtype, memory_format=torch.contiguous_format)
    if moment.scaling is None:
        return MomentState(codes)
    groups = () if moment.block is None else (moment.groups(p.numel()),)
    new = functools.partial(torch.full, groups, dtype=torch.float32, device=p.device)
    amax = None if moment.amax == "exact" else new(fill_value=0.0)
    rest = [new(fill_value=1.0) if moment.expansion else None for _ in range(2)]
    return MomentState(codes, new(fill_value=1.0), amax, *rest)


def _moment_state(state: dict[str, Tensor], key: str) -> MomentState:
    found = [state.get(f"{key}_{field}") for field in MomentState._fields]
    codes, *rest = (None if x is None else _local(x) for x in found)
    assert codes is not None
    return MomentState(codes, *rest)


def _tensors(at: Scalars, device: torch.device) -> Scalars:
    """The numbers of a step as tensors: a compiled update takes new ones without compiling again."""
    return Scalars(*torch.tensor(at, dtype=torch.float32, device=device).unbind())  # type: ignore[arg-type]


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _part(p: Tensor) -> _Part:
    """What this rank has of a parameter."""
    if not isinstance(p, DTensor):
        return _Part(p.numel(), 0, ())
    cut = [i for i, placement in enumerate(p.placements) if not isinstance(placement, Replicate)]
    _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    row = p.numel() // p.shape[0] if p.ndim else 1
    start = min(offset[0] * row if offset else 0, p.numel())
    return _Part(p.numel(), start, tuple(p.device_mesh.get_group(i) for i in cut))


def _check_cut(p: Tensor, layout: Layout) -> None:
    """ValueError unless a rank's part is a range of flat indices where the layout has blocks."""
    if not isinstance(p, DTensor):
        return
    blocks = any(moment.block is not None for moment in (layout.m, layout.v))
    if blocks and not all(isinstance(x, Replicate) or (type(x) is Shard and x.dim == 0) for x in p.placements):
        raise ValueError(
            f"layout {layout.name!r} has blocks of consecutive elements, so parameters are cut by Shard(0) alone (O-11); got "
            f"{p.placements} of {tuple(p.shape)}. Use a layout with one scale a tensor, such as 'sqrt_e5m2'."
        )


def _reduce(found: list[tuple[tuple[distributed.ProcessGroup, ...], list[Tensor]]]) -> None:
    """Replace each tensor by its maximum over the ranks of its groups, in one all-reduce a group."""
    of_groups: dict[tuple[distributed.ProcessGroup, ...], list[Tensor]] = {}
    for groups, tensors in found:
        of_groups.setdefault(groups, []).extend(tensors)
    for groups, tensors in of_groups.items():
        if not tensors:
            continue
        flat = torch.cat([x.reshape(-1) for x in tensors])
        # Backends may drop a NaN from a maximum (P-3). No amax is infinite (O-2), so infinity stands for it.
        flat = torch.where(flat.isnan(), torch.inf, flat)
        for group in groups:
            distributed.all_reduce(flat, distributed.ReduceOp.MAX, group=group)
        flat = torch.where(flat == torch.inf, torch.nan, flat)
        for x, value in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.copy_(value.view(x.shape))
