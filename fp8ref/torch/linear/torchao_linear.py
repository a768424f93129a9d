"""torchao's Float8Linear: a recipe as its config, and checks that fp8ref adds."""

import math
import types
from collections.abc import Iterator

import torch
from torch import Tensor
from torchao.float8 import (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    ScalingType,
    float8_linear,
    float8_scaling_utils,
    float8_training_tensor,
    float8_utils,
)
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_training_tensor import Float8TrainingTensor, LinearMMConfig

from fp8ref.formats import FP8_FORMATS
from fp8ref.recipe import ROLES, CastSpec, Gemm, Recipe, Role
from fp8ref.selection.rules import casts_of
from fp8ref.spec import support
from fp8ref.torch import delayed
from fp8ref.torch.quantize import cast, float_values
from fp8ref.torch.tensors import linear_input

__all__ = ["GRANULARITIES", "Float8Linear", "expresses", "torchao_config"]

_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
"""The dispatch key under which autograd records views."""

GRANULARITIES = {
    "tensorwise": ScalingGranularity.TENSORWISE,
    "rowwise": ScalingGranularity.AXISWISE,
}
"""{granularity: torchao's scaling granularity}."""

KERNELS_TAKE_ANY_M = ("cpu",)
"""Kinds of device whose torch._scaled_mm reduces any length; others take multiples of 16."""


class Float8Linear(float8_linear.Float8Linear):
    """torchao's Float8Linear, bit for bit (R-1), with checks of its input.

    ``convert.convert`` makes it and sets its recipe.

    Shapes:   x [..., K] in any layout; output [..., N] of x's dtype, or of autocast's (L-7).
    fqn       its name in the model that was converted, for errors.
    Padding:  on devices other than a CPU, whose kernels take multiples of 16, grad_weight reduces
              codes that torchao pads with zeros (pad_inner_dim), if M is no multiple (L-5).
    Specials: no tokens give no outputs, and gradients of zeros (L-9).
    Raises:   ValueError: under torch.export; as ``linear_input.checked_input``.
    """

    recipe: Recipe
    fqn: str = ""

    @linear_input.weight_once
    def forward(self, input: Tensor) -> Tensor:
        """output [..., N] of input [..., K]."""
        if torch.compiler.is_exporting():
            raise ValueError(
                "torch.export does not trace torchao's FP8 tensors in "
                f"{linear_input.named(self.fqn)}, recipe {self.recipe.name!r}. Export the "
                "deconverted model, or use torch.compile."
            )
        config = self.config
        rowwise = config.cast_config_input.scaling_granularity is ScalingGranularity.AXISWISE
        x = linear_input.checked_input(input, self)
        if x.numel() == 0 or delayed.calibrating():
            w = self.weight.to(x.dtype)
            output = (
                linear_input.in_high_precision(x, w)
                if x.numel() == 0
                else linear_input.calibrated(x, w, self.fqn)
            )
            return output if self.bias is None else output + self.bias.to(output.dtype)
        if rowwise and x.ndim > 2 and not x.is_contiguous():
            # torchao flattens the codes, but cannot copy codes with rowwise scales
            x = x.contiguous()
        if (
            (rowwise or isinstance(self.weight, Float8TrainingTensor))
            and not torch.compiler.is_compiling()
            and torch.is_inference_mode_enabled()
        ):
            # In inference mode torchao cannot reshape rowwise codes or view gathered ones.
            with torch.inference_mode(False), torch.no_grad():
                return self._multiplied(x)
        return self._multiplied(x)

    def _multiplied(self, x: Tensor) -> Tensor:
        """torchao's forward, of an x in the autocast dtype."""
        config = self.linear_mm_config
        # codes that tensor parallelism made bring that config, and both operands have one
        if pads(x) and not isinstance(x, Float8TrainingTensor):
            config = LinearMMConfig(
                config.output, config.grad_input, config.grad_weight._replace(pad_inner_dim=True)
            )
        output = _Product.apply(x, self.weight.t(), config, self.config)
        if torch.compiler.is_compiling():  # a compiled graph records the view again
            output = torch.ops.aten._unsafe_view(output, output.shape)
        return output if self.bias is None else output + self.bias.to(output.dtype)


def _cast(x: Tensor, dtype: torch.dtype, mm_config, *, gemm_input_role, **options):
    """torchao's hp_tensor_to_float8_dynamic, by its own functions. On a CPU it casts pieces that
    stay in the cache, to the same codes; those have no gradient, so that torchao itself casts where
    gradients are differentiated (L-8)."""
    if type(x) is not Tensor or not float_values.eager_on_cpu(x) or torch.is_grad_enabled():
        return float8_scaling_utils.hp_tensor_to_float8_dynamic(
            x, dtype, mm_config, gemm_input_role=gemm_input_role, **options
        )
    scale = float8_utils.tensor_to_scale(x, dtype, **options)
    codes = float_values.in_pieces(
        lambda part, s: float8_training_tensor.to_fp8_saturated(part.float() * s, dtype),
        x,
        dtype,
        scale,
    )
    return Float8TrainingTensor(
        codes, scale, x.dtype, mm_config, gemm_input_role, options["axiswise_dim"]
    )


def _with_cast(function: types.FunctionType) -> types.FunctionType:
    """torchao's function, which calls ``_cast``."""
    # a snapshot: what replaces a name of torchao's module later is not called
    names = function.__globals__ | {"hp_tensor_to_float8_dynamic": _cast}
    return types.FunctionType(function.__code__, names, function.__name__)


_forward = _with_cast(float8_linear.matmul_with_hp_or_float8_args.forward)
_backward = _with_cast(float8_linear.matmul_with_hp_or_float8_args.backward)


@torch._dynamo.allow_in_graph
class _Product(float8_linear.matmul_with_hp_or_float8_args):
    """torchao's three GEMMs and operators. Autograd refuses in-place changes of a Function's view,
    which torchao's reshaped output is; none is recorded here."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, *configs) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(_VIEWS):
            return _forward(ctx, x, w, *configs)

    backward = staticmethod(_backward)


def pads(x: Tensor) -> bool:
    """Whether a device's kernels need M of an input [..., K] padded."""
    return x.device.type not in KERNELS_TAKE_ANY_M and math.prod(x.shape[:-1]) % 16 != 0


def expresses(recipe: Recipe) -> bool:
    """Whether torchao_config takes the recipe."""
    return next(_obstacles(recipe), None) is None


def _obstacles(recipe: Recipe) -> Iterator[str]:
    """What torchao cannot express."""
    casts = casts_of(recipe)
    present = [c for c in casts.values() if c is not None]
    powers = {c.policy.power_of_two for c in present}
    if len(powers) > 1 or "mask" in powers:
        yield f"power_of_two is None or 'exp2_log2' in every cast; got {sorted(map(str, powers))}"
    for c in present:
        if c.delayed is not None:
            yield "it scales dynamically; this recipe is delayed"
        if not c.plain:
            yield "it neither rotates nor rounds stochastically; this recipe does"
        if c.policy.unscaled:
            yield f"it scales every cast; policy {c.policy.name!r} does not"
        if c.fmt.name not in FP8_FORMATS:
            yield f"formats are FP8's; got {c.fmt}"
        if c.granularity not in GRANULARITIES:
            yield f"granularity is tensorwise or rowwise; got {c.granularity!r}"
        for feature in ("scale policies", "floors of scale policies"):
            if refusal := support.refusal(feature, "torch", c.policy):
                yield refusal.rstrip(".")
    for role in ROLES:
        formats = {c.fmt.name for (_, r), c in casts.items() if r == role and c is not None}
        if len(formats) > 1:
            yield f"a role has one format in both its GEMMs; got {role} in {sorted(formats)}"
    for gemm, spec in recipe.gemms.items():
        if spec.one_sided:
            yield f"{gemm} casts one operand alone (L-4)"
        unit = spec.rowwise and spec.accumulate == "slow"
        meant = "unit_round_scale_round" if unit else "scale_then_round"
        if spec.fp8 and spec.epilogue != meant:
            yield f"the epilogue of {gemm} is {meant!r}; got {spec.epilogue!r}"


def torchao_config(recipe: Recipe) -> Float8LinearConfig:
    """The Float8LinearConfig of a recipe, of fresh parts: torchao mutates those that it is given.

    Raises:   ValueError: what torchao cannot express, by name: delayed scaling, an eps, a power of
              two or an epilogue of its own choosing, a role in two formats, FP4, scales not
              tensorwise or rowwise.
    """
    for reason in _obstacles(recipe):
        raise ValueError(
            f"torchao cannot run recipe {recipe.name!r}: {reason}. Use 'tensorwise' or 'rowwise'."
        )
    casts = casts_of(recipe)
    rounds = any(c is not None and c.policy.power_of_two is not None for c in casts.values())

    def cast_config(gemm: Gemm, role: Role) -> CastConfig:
        spec: CastSpec | None = casts[gemm, role]
        other = next((c for (_, r), c in casts.items() if r == role and c is not None), None)
        if spec is None:
            # unused, but torchao wants one a role
            dtype = cast.DTYPES[other.fmt.name] if other else torch.float8_e4m3fn
            return CastConfig(scaling_type=ScalingType.DISABLED, target_dtype=dtype)
        return CastConfig(
            scaling_granularity=GRANULARITIES[spec.granularity],
            target_dtype=cast.DTYPES[spec.fmt.name],
        )

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
        round_scales_to_power_of_2=rounds,
    )
