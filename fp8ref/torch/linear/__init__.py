"""fp8ref's own linear layer (spec L), how ranks share one, and torchao's Float8Linear."""

from fp8ref.torch.linear.linear import Linear, check_recipe

__all__ = ["Linear", "check_recipe"]
