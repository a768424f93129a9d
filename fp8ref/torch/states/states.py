"""AdamW whose moments are stored in FP8 and other narrow formats, as a torch optimizer (spec O).

    optimizer = states.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, layout="sqrt_e4m3")

The bits are those of ``fp8ref.sim.states``, eager or compiled, and for any cut of parameters that
FSDP2 makes. ``addcmul`` and ``lerp`` round once where O rounds twice; they are not used.

Under FSDP2 codes are cut as their parameter is. Scales are whole on every rank: those of blocks
take 4 bytes for each 128 or 256 elements of the whole tensor. A step has one all-reduce of amaxes,
and another under ``predicted``.

``update`` computes what changes of flat tensors.

A layout with masters (O-14) takes parameters in the dtype that the model computes with, bfloat16 or
float32. A float16 master is in the state, and each step writes the parameter anew from it. A
bfloat16 parameter is its own bfloat16 master.
"""

import contextlib
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref.spec.kernels import Choice
from fp8ref.spec.states import layouts as states
from fp8ref.spec.states import saved as layout_decisions
from fp8ref.spec.states.layouts import Layout, Scalars
from fp8ref.torch.states import kernel, moments, parameter_groups, parameter_state, update
from fp8ref.torch.states.moments import MomentState, Part
from fp8ref.torch.states.parameter_state import keeps_apart, moment_state, place, reduce_amaxes
from fp8ref.torch.states.update import Update, Work
from fp8ref.torch.tensors.local_part import local_part


class AdamW(torch.optim.Optimizer):
    """AdamW with the moments and the masters of a layout.

    lr, betas, eps, weight_decay
                  as in ``torch.optim.AdamW``; each group of parameters may have its own.
    compiled      whether ``torch.compile`` compiles the update of a parameter; the bits are the
                  same.
    seed          of a layout that rounds stochastically; saved with the states.
    kernels       an attribute. "auto": matrices by a Triton kernel (``kernel``) on a GPU with FP8,
                  under layouts without scales; "plain": all by torch's operations; "triton": by the
                  kernel on a CPU too, interpreted. The bits are the same.

    Shapes:       parameters float32, of any shape, on any device, plain or DTensors; under a layout
                  with masters also bfloat16; gradients float32, float16 or bfloat16.
    State:        of each parameter ``step``, and the fields of ``MomentState`` as ``m_codes``,
                  ``v_scale_inv``, ``master_codes`` and so on; codes of a DTensor are one, cut in
                  the same way. A master in the state is made of the parameter at its first step; a
                  parameter that is changed later from outside is overwritten.
    Order:        spec O-2 to O-10, O-14, O-15.
    Specials:     a gradient that is not finite makes its weight NaN, and the moments of its group
                  (O-2). A parameter without a gradient keeps its weight and its state.
    Raises:       ValueError: an unknown layout, or kernels that there are not, at a step; a seed of
                  a layout that does not round stochastically; numbers outside their ranges (O-2);
                  options of torch's AdamW that it lacks; parameters that are empty, or of a dtype
                  that the layout does not take, at a step too, as of a model that is cast later;
                  gradients that are sparse, or of another dtype; states of another layout at load,
                  of the same name too; a DTensor that a layout with blocks is cut in another way
                  than by Shard(0). Nothing is changed then.
    Source:       spec O.
    """

    kernels: Choice = "auto"

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
        seed: int = 0,
    ) -> None:
        self.layout = states.by_name(layout)
        states.check_seed(seed, self.layout)
        self._updates = Update(compiled)
        self._layout_of = functools.cache(self.layout.of)
        decisions = layout_decisions.written(self.layout)
        values = (lr, betas, eps, weight_decay, seed, self.layout.name, decisions)
        super().__init__(params, dict(zip(parameter_groups.KEYS, values, strict=True)))

    def __getstate__(self) -> dict[str, Any]:
        """The state for copy and pickle; torch's leaves out a subclass's attributes."""
        return super().__getstate__() | {
            key: getattr(self, key) for key in ("layout", "_updates", "kernels")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._layout_of = functools.cache(self.layout.of)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own numbers. Raises as the class, and then adds nothing."""
        super().add_param_group(param_group)
        try:
            parameter_groups.check(self.param_groups[-1], self.layout)
            for p in self.param_groups[-1]["params"]:
                parameter_state.check(p, self.layout)
        except ValueError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of the same layout, bit for bit.

        Raises:   ValueError: states of another layout or of other shapes, and numbers outside their
                  ranges, before anything is changed.
        """
        loaded: dict[str, Any] = {}

        # the last hook: what the user's gave is loaded
        def check(_, final_dict: dict[str, Any]) -> None:
            self._check_loaded(final_dict)
            loaded.update(final_dict)

        # the first hook: torch has cast every tensor to its parameter's dtype
        def restore(_) -> None:
            for index, p in zip(_indices(loaded["param_groups"]), _parameters(self), strict=True):
                for key, value in loaded["state"].get(index, {}).items():
                    self.state[p][key] = (
                        value.clone() if key == "step" else value.to(p.device, copy=True)
                    )

        hooks = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _check_loaded(self, state_dict: dict[str, Any]) -> None:
        if missing := {"state", "param_groups"} - set(state_dict):
            raise ValueError(
                "load what optimizer.state_dict() returned; got no "
                f"{' and no '.join(sorted(missing))}."
            )
        groups = state_dict["param_groups"]
        layouts = {group.get("layout") for group in groups}
        if layouts != {self.layout.name}:
            raise ValueError(
                f"states of layout {self.layout.name!r} are loaded; got "
                f"{sorted(map(str, layouts))}. States of another layout are not converted: use "
                "that layout."
            )
        for group in groups:
            parameter_groups.check(group, self.layout)
        # torch refuses another number of parameters
        for index, p in zip(_indices(groups), _parameters(self), strict=False):
            parameter_state.check_saved(self._layout(p), p, state_dict["state"].get(index, {}))

    @torch.no_grad()
    def step(self, closure=None):
        """One step of every parameter that has a gradient; the loss of closure, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with contextlib.ExitStack() as compiling:
            if self._updates.compiled:
                # Layouts and shapes of a model are finite, and each compiles once: dynamo's limit
                # of recompilations is for others.
                compiling.enter_context(torch._dynamo.utils.disable_cache_limit())
            self._steps()
        return loss

    def _steps(self) -> None:
        for group in self.param_groups:  # refused before anything changes
            parameter_groups.scalars(group, self.layout, 1)
            for p in group["params"]:
                parameter_state.check_step(p, self.state.get(p, {}), self._layout(p))
                kernel.takes(p, self._layout(p), self.kernels)
        cut: list[tuple[Work, tuple[distributed.ProcessGroup, ...]]] = []
        small: dict[tuple, list[Work]] = {}
        steps, apart = [], []
        number = -1  # of a tensor, among those of the optimizer
        for index, group in enumerate(self.param_groups):
            numbers: dict[int, Scalars] = {}
            for p in group["params"]:
                number += 1
                if p.grad is None:
                    continue
                state, layout = self._state(p), self._layout(p)
                steps.append(state["step"])
                step = int(state["step"].item()) + 1
                at = numbers[step] = numbers.get(step) or parameter_groups.scalars(
                    group, self.layout, step
                )
                start, ranks = place(p)
                in_fp8 = isinstance(p, Float8TrainingTensor)  # ``copies`` makes it from the master
                master = moment_state(p, state, "master").codes if in_fp8 else None
                flat = parameter_state.flat(p) if master is None else master
                if not in_fp8 and flat.data_ptr() != local_part(p).data_ptr():  # not contiguous
                    apart.append((local_part(p), flat))
                keys = parameter_state.keys(group["seed"], step, number, layout)
                kept = parameter_state.kept(p, state, flat, layout)
                gradient = parameter_state.flat_gradient(p)
                part = Part(p.numel(), start)
                work = Work(flat, gradient, kept, at, layout, part, keys)
                if not in_fp8 and kernel.takes(p, layout, self.kernels):
                    kernel.step(p, work)
                elif ranks:
                    cut.append((work, ranks))
                elif p.numel() <= update.PIECE // 4 and not any(keys):
                    small.setdefault(
                        (index, step, p.device, flat.dtype, layout is self.layout), []
                    ).append(work)
                else:
                    self._updates.update(work)
        for works in small.values():
            self._updates.update_together(works)
        amaxes = [self._updates.begin(work) for work, _ in cut]
        both = list(zip(cut, amaxes, strict=True))
        reduce_amaxes([(ranks, maxima) for (_, ranks), maxima in both])
        reduce_amaxes(
            [(ranks, self._updates.update(work, maxima)) for (work, ranks), maxima in both]
        )
        for p, flat in apart:
            p.copy_(flat.view(p.shape))
        if steps:
            torch._foreach_add_(steps, 1)

    def _layout(self, p: Tensor) -> Layout:
        return self._layout_of(p.numel())

    def begin(self) -> None:
        """Make the states that the first step would make: zeros.

        A checkpoint is then read into them.
        """
        for group in self.param_groups:
            for p in group["params"]:
                self._state(p)

    def _state(self, p: Tensor, w: Tensor | None = None) -> dict[str, Tensor]:
        """A parameter's state, made if it has none; its master from w, else from the parameter."""
        state = self.state[p]
        if not state:
            layout = self._layout(p)
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            kept = {"m": moments.zeros(p, layout.m), "v": moments.zeros(p, layout.v)}
            if keeps_apart(layout):
                kept["master"] = parameter_state.master(p, p if w is None else w, layout)
            for key, stored in kept.items():
                for field, x in stored._asdict().items():
                    if x is not None:
                        state[f"{key}_{field}"] = x
        return state


def _parameters(optimizer: AdamW) -> list[Tensor]:
    """All parameters in the order of their numbers."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _indices(groups: list[dict[str, Any]]) -> list[int]:
    """The parameter numbers of saved groups."""
    return [index for group in groups for index in group["params"]]


def decode(optimizer: AdamW, p: Tensor) -> tuple[Tensor, Tensor]:
    """m and v of a parameter, float32, as the next step reads them; of a DTensor this rank's part
    (spec O-4).

    Raises:   ValueError: a parameter that made no step.
    """
    if not optimizer.state.get(p):
        raise ValueError(
            "a parameter has moments after its first step; got none. Call optimizer.step() first."
        )
    held = stored(optimizer, p)
    m, v = (
        moments.read(kept, moment, held.layout, held.part).view(local_part(p).shape)
        for kept, moment in zip(held[:2], held.layout.kept, strict=False)
    )
    return m, v


class Stored(NamedTuple):
    """Both moments of this rank's part of a parameter, flat; which part it is; the steps that were
    made; and on how many ranks each element is."""

    m: MomentState
    v: MomentState
    layout: Layout
    part: Part
    step: int
    copies: int


def stored(optimizer: AdamW, p: Tensor) -> Stored:
    """What is stored of a parameter, not copied."""
    state, layout = optimizer._state(p), optimizer.layout.of(p.numel())
    start, ranks = place(p)
    copies = (distributed.get_world_size() if distributed.is_initialized() else 1) // math.prod(
        map(distributed.get_world_size, ranks)
    )
    return Stored(
        moment_state(p, state, "m"),
        moment_state(p, state, "v"),
        layout,
        Part(p.numel(), start),
        int(state["step"].item()),
        copies,
    )


def scalars_of(optimizer: AdamW, p: Tensor, step: int) -> Scalars:
    """The numbers of a parameter's step with that number (O-3)."""
    group = next(
        group for group in optimizer.param_groups if any(p is other for other in group["params"])
    )
    return parameter_groups.scalars(group, optimizer.layout, step)


@torch.no_grad()
def set_weight(optimizer: AdamW, p: Tensor, w: Tensor) -> None:
    """Make a parameter's state before its first step, with the master of a float32 weight, and set
    the parameter to what the master holds (spec O-14). A parameter in bfloat16 would have rounded
    the weight first.

    w         of the parameter's shape; of a DTensor this rank's part.
    Raises:   ValueError: a layout without masters in its state; a parameter that has a state; a
              weight of another shape or dtype.
    """
    if not keeps_apart(optimizer.layout):
        raise ValueError(
            f"layout {optimizer.layout.name!r} keeps no masters. Copy w into the parameter."
        )
    if optimizer.state.get(p):
        raise ValueError(
            "a weight is set before the first step; the parameter has a state. Use a new optimizer."
        )
    if w.dtype != torch.float32 or w.shape != local_part(p).shape:
        raise ValueError(
            f"w is float32 {tuple(local_part(p).shape)}, the parameter's shape here; got {w.dtype} "
            f"{tuple(w.shape)}."
        )
    optimizer._state(p, w)
    write(optimizer, p)


@torch.no_grad()
def write(optimizer: AdamW, p: Tensor) -> None:
    """Write a parameter anew from its master in the state, as each step does: after masters were
    loaded without their parameters."""
    local_part(p).copy_(weight(optimizer, p))


@torch.no_grad()
def keep_master(optimizer: AdamW, p: Tensor) -> None:
    """Put the master of a parameter into its state, if it is not there: the parameter is its own,
    and ``copies`` replaces it by codes."""
    optimizer._state(p).setdefault(
        "master_codes", p.detach().clone(memory_format=torch.contiguous_format)
    )


def weight(optimizer: AdamW, p: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The weight that the master of a parameter in the state holds, in the parameter's shape and
    dtype, or in another (spec O-14).

    Raises:   ValueError: a parameter without a master in the state.
    """
    if "master_codes" not in optimizer.state.get(p, {}):
        raise ValueError(
            "a parameter has a float16 master after its first step, with a layout as 'msamp_o2'; "
            f"got none under layout {optimizer.layout.name!r}. Read the parameter, or call "
            "optimizer.begin()."
        )
    master = moment_state(p, optimizer.state[p], "master")
    layout, part = optimizer.layout.of(p.numel()), Part(p.numel(), place(p)[0])
    w = moments.read(master, optimizer.layout.master, layout, part)
    return w.to(dtype or p.dtype).view(local_part(p).shape)


def largest_weight(optimizer: AdamW, p: Tensor) -> Tensor:
    """The amax of ``weight``, float32, before it is rounded to the parameter's dtype, that a
    predicted master keeps."""
    return moments.not_below(
        optimizer.layout.of(p.numel()).smallest_moment, optimizer.state[p]["master_amax"]
    )
