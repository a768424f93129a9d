"""FP8 linears by torchao: a recipe becomes a Float8LinearConfig, and chosen ``nn.Linear`` become ``Float8Linear``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import CastConfig, Float8GemmConfig, Float8LinearConfig, ScalingType, convert_to_float8_training
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref import recipe as recipes
from fp8ref.recipe import OPERANDS, CastSpec, Gemm, Recipe, Role
from fp8ref.torch import cast, cpu, scales

GRANULARITIES = {"tensorwise": ScalingGranularity.TENSORWISE, "rowwise": ScalingGranularity.AXISWISE}


def convert(model: nn.Module, recipe: str | Recipe, *, filter_fqns: Sequence[str] = (), fp8_fqns: Sequence[str] = ()) -> nn.Module:
    """Replace the linears that SEMANTICS R-2 chooses by torchao's Float8Linear, keeping their parameters.

    Returns:  the model, changed in place (a model that is itself one nn.Linear: its replacement). Recipe 'bf16' changes nothing.
    Raises:   ValueError: as ``fp8ref.recipe.plan``; a recipe that torchao cannot express; a chosen linear that is a subclass of
              nn.Linear (its forward would be lost), already FP8, or registered under two names.
    """
    recipe = recipes.by_name(recipe)
    modules = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    shapes = {name: (m.out_features, m.in_features) for name, m in modules.items()}
    chosen = {d.path for d in recipes.plan(shapes, recipe, filter_fqns=filter_fqns, fp8_fqns=fp8_fqns) if d.fp8}
    if not chosen:
        return model
    config = torchao_config(recipe)
    for name in chosen:
        module, others = modules[name], [n for n, m in modules.items() if m is modules[name] and n != name]
        if isinstance(module, Float8Linear):
            raise ValueError(f"{name} is already FP8; convert a model once. Build it afresh to change its recipe.")
        if type(module) is not nn.Linear:
            raise ValueError(f"{name} is a {type(module).__name__}, whose forward Float8Linear would replace. Name it in filter_fqns.")
        if others:
            raise ValueError(
                f"{name} is the same module as {others[0]}, and only one of them would be converted. Name both in filter_fqns."
            )
    if any(p.device.type == "cpu" for p in model.parameters()):
        cpu.use_native_scaled_mm()
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in chosen)


def torchao_config(recipe: Recipe) -> Float8LinearConfig:
    """The Float8LinearConfig that means this recipe, built from fresh parts (torchao mutates the ones it is given).

    Raises:   ValueError: what torchao cannot express, by name: an eps, a power of two or an epilogue of its own choosing, a role
              in two formats, scales not tensorwise or rowwise.
    """

    def refuse(what: str) -> ValueError:
        return ValueError(f"torchao cannot run recipe {recipe.name!r}: {what}. Use a recipe of fp8ref.recipe.SHARED_RECIPES.")

    casts = {
        (gemm, role): cast_spec
        for gemm, spec in recipe.gemms.items()
        for role, cast_spec in zip(OPERANDS[gemm], (spec.a, spec.b), strict=True)
    }
    present = [c for c in casts.values() if c is not None]
    powers = {c.policy.power_of_two for c in present}
    if len(powers) > 1 or "mask" in powers:
        raise refuse(f"power_of_two is None or 'exp2_log2', the same for every cast; got {sorted(map(str, powers))}")
    for c in present:
        if c.delayed is not None:
            raise refuse("it scales dynamically, and this recipe is delayed")
        if c.granularity not in GRANULARITIES:
            raise refuse(f"granularity is tensorwise or rowwise; got {c.granularity!r}")
        try:
            scales.implemented(c.policy)
        except ValueError as error:
            raise refuse(str(error).rstrip(".")) from None
    for role in ("input", "weight", "grad_output"):
        formats = {c.fmt.name for (_, r), c in casts.items() if r == role and c is not None}
        if len(formats) > 1:
            raise refuse(f"a role has one format in both its GEMMs; got {role} in {sorted(formats)}")
    for gemm, spec in recipe.gemms.items():
        meant = "unit_round_scale_round" if spec.rowwise and spec.accumulate == "slow" else "scale_then_round"
        if spec.fp8 and spec.epilogue != meant:
            raise refuse(f"the epilogue of {gemm} is {meant!r}; got {spec.epilogue!r}")

    def cast_config(gemm: Gemm, role: Role) -> CastConfig:
        spec: CastSpec | None = casts[gemm, role]
        other = next((c for (_, r), c in casts.items() if r == role and c is not None), None)
        if spec is None:
            dtype = cast.DTYPES[other.fmt.name] if other else torch.float8_e4m3fn  # unused, but torchao wants one a role
            return CastConfig(scaling_type=ScalingType.DISABLED, target_dtype=dtype)
        return CastConfig(scaling_granularity=GRANULARITIES[spec.granularity], target_dtype=cast.DTYPES[spec.fmt.name])

    def gemm_config(gemm: Gemm) -> Float8GemmConfig:
        return Float8GemmConfig(use_fast_accum=recipe.gemms[gemm].accumulate == "fast")

    return Float8LinearConfig(
        cast_config_input=cast_config("output", "input"),
        cast_config_weight=cast_config("output", "weight"),
        cast_config_grad_output=cast_config("grad_input", "grad_output"),
        cast_config_input_for_grad_weight=cast_config("grad_weight", "input"),
        cast_config_weight_for_grad_input=cast_config("grad_input", "weight"),
        cast_config_grad_output_for_grad_weight=cast_config("grad_weight", "grad_output"),
        gemm_config_output=gemm_config("output"),
        gemm_config_grad_input=gemm_config("grad_input"),
        gemm_config_grad_weight=gemm_config("grad_weight"),
        round_scales_to_power_of_2="exp2_log2" in powers,
    )


@contextmanager
def observing(model: nn.Module, observer: Callable) -> Iterator[None]:
    """In this context, every FP8 GEMM of the model's linears reports the operands and the result it had.

    observer(name, gemm, a, b, out) gets tensors: a and b as (hp, codes uint8, scale), hp and codes in the tensors' own
    layout (SEMANTICS L-2's input [M, K], weight [N, K], grad_output [M, N]).
    """
    watch = _Watch(observer)
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, Float8Linear):
            handles.append(module.register_forward_pre_hook(watch.entering(name)))
            handles.append(module.register_full_backward_pre_hook(watch.returning(name)))
    try:
        with watch:
            yield
    finally:
        for handle in handles:
            handle.remove()


class _Watch(TorchDispatchMode):
    """Sees each matrix product of FP8 tensors before torchao unwraps it, while hooks tell in which layer it happens."""

    def __init__(self, observer: Callable) -> None:
        super().__init__()
        self._observer = observer
        self._name = ""
        self._hp: dict[str, dict[str, torch.Tensor]] = {}

    def entering(self, name: str):
        def hook(module, args):
            self._name = name
            self._hp[name] = {"input": args[0].detach().reshape(-1, args[0].shape[-1]), "weight": module.weight.detach()}

        return hook

    def returning(self, name: str):
        def hook(module, grad_output):
            self._name = name
            self._hp[name]["grad_output"] = grad_output[0].detach().reshape(-1, grad_output[0].shape[-1])

        return hook

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and isinstance(args[0], Float8TrainingTensor):
            roles = tuple(t._gemm_input_role.value for t in args)
            gemm = next(g for g, operands in OPERANDS.items() if operands == roles)
            hp = self._hp[self._name]
            operands = []
            # torchao multiplies input x weight.t() and grad_output.t() x input: back to the tensors' own layout
            for role, tensor, transposed in zip(roles, args, (gemm == "grad_weight", gemm == "output"), strict=True):
                codes, scale = tensor._data.view(torch.uint8), tensor._scale
                if transposed:
                    codes, scale = codes.t(), scale.t()
                operands.append((hp[role], codes, scale))
            self._observer(self._name, gemm, *operands, out)
        return out
