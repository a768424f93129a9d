"""What ``import fp8ref`` offers by name: quantize a tensor, read its error, compare recipes, sweep.

quantized    quantize and dequantize for arrays of NumPy, PyTorch and JAX; Quantized, Accuracy
comparison   compare: what each recipe does to one tensor
sweeps       sweep: what casts and sums of GEMMs cost tensors of named distributions
card         how a notebook shows them
"""

from fp8ref import policy, recipe
from fp8ref.front.comparison import Comparison, compare
from fp8ref.front.quantized import Accuracy, Quantized, dequantize, quantize
from fp8ref.front.sweeps import Distribution, sweep
from fp8ref.shared import package_data
from fp8ref.shared.tables import Listing

__all__ = [
    "Accuracy",
    "Comparison",
    "Distribution",
    "Quantized",
    "compare",
    "dequantize",
    "policies",
    "quantize",
    "recipes",
    "sweep",
]

recipes = Listing(recipe.RECIPES, package_data.tables(__file__, "recipes"))
"""The recipes by name; printed, a line on each."""

policies = Listing(policy.POLICIES | policy.FP4_POLICIES, policy.SUMMARIES)
"""The scale policies by name; printed, a line on each."""
