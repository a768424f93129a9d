"""torchao's Float8Linear, which checks what it is given and gives torchao's kernels what they take."""

import torch
from torchao.float8 import ScalingType, float8_linear
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref.recipe import Recipe
from fp8ref.torch import linear_input


class Float8Linear(float8_linear.Float8Linear):
    """torchao's, bit for bit (R-1), of the recipe that ``linear.convert`` says.

    Shapes:   x [..., K] in any layout; output [..., N] of x's dtype, or of autocast's (L-7).
    fqn       its name in the model that was converted, for errors.
    Raises:   ValueError: as ``linear_input.taken``; an x without rows is taken where no GEMM reduces M and no scale is of a tensor.
    """

    recipe: Recipe
    fqn: str = ""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """output [..., N] of input [..., K]."""
        config = self.config
        rowwise = config.cast_config_input.scaling_granularity is ScalingGranularity.AXISWISE
        empty = rowwise and config.cast_config_input_for_grad_weight.scaling_type is ScalingType.DISABLED
        x = linear_input.taken(input, self, empty=empty)
        if rowwise and x.ndim > 2 and not x.is_contiguous():
            x = x.contiguous()  # torchao flattens the codes, and has no copy of codes with scales of rows
        if (
            (rowwise or isinstance(self.weight, Float8TrainingTensor))
            and not torch.compiler.is_compiling()
            and torch.is_inference_mode_enabled()
        ):
            with torch.inference_mode(False), torch.no_grad():  # nor a reshape of them, or a view of gathered ones, but in other modes
                return super().forward(x)
        return super().forward(x)
