"""Weights that a model keeps in FP8, made by the optimizer that has their masters (spec O-16).

    ft.convert(model, "tensorwise")
    optimizer = states.AdamW(model.parameters(), layout="msamp_o2")
    copies.keep(model, optimizer)

``keep`` replaces the weight of each linear that casts it once, in the model and in the optimizer,
by torchao's FP8 tensor: codes, a byte an element, and one scale. Linears multiply by the codes as
they are, and gradients have the ``grad_dtype`` that the weight had, by default its dtype. After
each step of the optimizer the codes are made anew from the masters. A weight that is its own
master, in float32 or bfloat16, moves into the optimizer's state.

Under FSDP2 the sharded weight stays as it is, and ``fp8_gather`` gathers codes that each step makes
once, where it would cast the shard for each gather.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

from fp8ref import recipe as recipes
from fp8ref.recipe import CastSpec
from fp8ref.torch.distributed.fp8_gather import FP8Gather, check_unshared, compute_scales
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.quantize import scales, scaling
from fp8ref.torch.states import states

__all__ = ["Copies", "keep", "quantized_copy"]


@dataclass(frozen=True, eq=False)
class Copies:
    """The FP8 copies of a model's weights; ``keep`` makes them.

    weights   by the name of their linear, those that are in FP8 in the model itself.
    gathers   those of sharded weights.
    """

    weights: dict[str, tuple[nn.Parameter, CastSpec]]
    gathers: list[FP8Gather]
    _model: nn.Module
    _optimizer: states.AdamW

    @torch.no_grad()
    def refresh(self) -> None:
        """Make all codes anew, from masters. All ranks call it."""
        self._refresh_whole()
        compute_scales(self.gathers)

    @torch.no_grad()
    def _refresh_whole(self) -> None:
        """Recast weights that are not sharded, from masters."""
        for p, spec in self.weights.values():
            copied = quantized_copy(self._optimizer, p, spec)
            p._data.copy_(copied.codes)  # type: ignore[attr-defined]
            p._scale.copy_(copied.scale)  # type: ignore[attr-defined]

    @contextmanager
    def uncast(self) -> Iterator[None]:
        """In this context linears have their weights in high precision, and cast them, to the same
        bits: for passes that measure the casts. Gradients go to the parameters in FP8 when it ends.
        """
        wide = {}
        for name, (p, _) in self.weights.items():
            w = nn.Parameter(states.weight(self._optimizer, p), requires_grad=p.requires_grad)
            w.grad_dtype, w.grad = p.grad_dtype, p.grad
            self._model.get_submodule(name).weight = wide[p] = w
        try:
            yield
        finally:
            for name, (p, _) in self.weights.items():
                self._model.get_submodule(name).weight, p.grad = p, wide[p].grad


def keep(model: nn.Module, optimizer: states.AdamW) -> Copies:
    """Keep the weights of a model's FP8 linears as codes. Call it before the first step, or after
    states are loaded; a sharded model after ``fsdp.gather_in_fp8``.

    Order:    the master, rounded once to the weight's dtype, cast by the recipe (spec O-16).
    Returns:  the copies. Each step of the optimizer refreshes them, and so does loading its states,
              or weights that FSDP2 shards; call ``refresh`` after masters or local shards were
              written otherwise. The model's state_dict holds codes and scales, and loads into a
              model with or without copies.
    Raises:   ValueError: no linear that casts its weight once; another optimizer, or one without a
              weight of these; a weight that another module shares, or that is kept already.
    """
    linears: dict[str, Any] = {
        name: linear
        for name, linear in model.named_modules()
        if isinstance(linear, Float8Linear | Linear)
    }
    specs = {
        name: recipes.weight_copy(linear.recipe)
        for name, linear in linears.items()
        if recipes.casts_weight_once(linear.recipe)
    }
    if not specs:
        raise ValueError(
            "FP8 weight copies need linears that cast a weight once for both GEMMs, by its own "
            "amax, and the model has none. Convert it with recipe 'tensorwise' (O-16)."
        )
    gathers = {name: g for name in specs if (g := getattr(linears[name], "fp8_gather", None))}
    plain = {name: linears[name].weight for name in specs if name not in gathers}
    for name, kept in {**plain, **gathers}.items():
        if isinstance(kept, Float8TrainingTensor) or getattr(kept, "keeps_codes", False):
            raise ValueError(  # a step would cast it twice
                f"a model's weights are kept in FP8 once; {name}.weight is already. Use what "
                "copies.keep returned; call refresh() after a load."
            )
    _check(model, plain, optimizer)
    optimizer.begin()
    weights = {}
    for name, p in plain.items():
        states.keep_master(optimizer, p)
        copied = quantized_copy(optimizer, p, specs[name])
        # torchao's multiplication asks the tensor for it
        config = getattr(linears[name], "linear_mm_config", None)
        parts = copied.codes, copied.scale.clone(), p.dtype, config
        fp8 = Float8TrainingTensor(*parts, GemmInputRole.WEIGHT)
        replacing = nn.Parameter(fp8, requires_grad=p.requires_grad)
        replacing.grad_dtype = p.grad_dtype
        for group in optimizer.param_groups:
            group["params"] = [replacing if param is p else param for param in group["params"]]
        optimizer.state[replacing] = optimizer.state.pop(p)
        linears[name].weight = replacing
        linears[name].register_load_state_dict_pre_hook(_take_scale)
        weights[name] = (replacing, specs[name])
    for g in gathers.values():
        g.keeps_codes = True
    copies = Copies(weights, list(gathers.values()), model, optimizer)
    copies.refresh()
    optimizer.register_step_post_hook(lambda *_: copies.refresh())
    optimizer.register_load_state_dict_post_hook(lambda _: copies._refresh_whole())
    return copies


@torch.no_grad()
def quantized_copy(optimizer: states.AdamW, p: nn.Parameter, spec: CastSpec) -> scaling.Quantized:
    """The copy of a parameter's weight, from its master: by the amax that a predicted master keeps,
    which is that of the weight, or by a pass over the weight."""
    w = states.weight(optimizer, p)
    kept = optimizer.state[p].get("master_amax")
    if kept is None:
        return scaling.quantize(w, spec.fmt, policy=spec.policy)
    # Rounding is monotone: the largest weight has the largest master.
    scale = scales.scale_from_amax(
        states.largest_weight(optimizer, p).to(w.dtype).float(), spec.fmt, spec.policy
    )
    return scaling.quantize_with(w, scale, spec.fmt)


def _take_scale(linear: nn.Module, saved: dict[str, Any], prefix: str, *_: object) -> None:
    """Load codes of another scale, which torchao refuses; cast high-precision weights."""
    saved_weight, mine = saved.get(f"{prefix}weight"), linear.weight
    if not isinstance(mine, Float8TrainingTensor) or saved_weight is None:
        return
    if not isinstance(saved_weight, Float8TrainingTensor):
        spec = recipes.weight_copy(linear.recipe)  # type: ignore[arg-type]
        copied = scaling.quantize(
            saved_weight.to(mine.device, mine.dtype), spec.fmt, policy=spec.policy
        )
        saved_weight = Float8TrainingTensor(
            copied.codes, copied.scale, mine.dtype, mine._linear_mm_config, GemmInputRole.WEIGHT
        )
        saved[f"{prefix}weight"] = saved_weight
    with torch.no_grad():
        mine._scale.copy_(saved_weight._scale)


def _check(model: nn.Module, plain: dict[str, nn.Parameter], optimizer: states.AdamW) -> None:
    if not isinstance(optimizer, states.AdamW):
        raise ValueError(
            "copies need masters that fp8ref.torch.states.AdamW keeps in its state; got "
            f"{type(optimizer).__name__}. Use it; for float16 masters layout 'msamp_o2' or "
            "'sqrt_e4m3_f16'."
        )
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, p in plain.items():
        if isinstance(p, DTensor):
            raise ValueError(
                f"{name}.weight is sharded, without an FP8 gather. Call fsdp.gather_in_fp8 before."
            )
        if id(p) not in trained:
            raise ValueError(
                f"{name}.weight is not in the optimizer. Build it with model.parameters()."
            )
    check_unshared(model, plain)
