"""FP8 training in PyTorch: ``cast``, ``scaling``, ``linear`` (torchao's Float8Linear), the ``model`` and its ``train`` step.

Held to docs/SEMANTICS.md by ``fp8ref.check``; shares no code with the simulator.
"""

try:
    import torch
    import torchao
except ImportError as error:
    raise ImportError(f"fp8ref.torch needs torch and torchao; {error.name} is missing. Install them with: pip install 'fp8ref[torch]'") from error

from fp8ref.torch import cast, linear, model, scaling, train

__all__ = ["cast", "linear", "model", "scaling", "train"]
del torch, torchao
