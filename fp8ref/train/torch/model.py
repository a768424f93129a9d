"""What the PyTorch step asks of a model: ``llama/model.py``, or a user's, ``custom/model.py``."""

from collections.abc import Collection, Mapping

import torch
from torch import nn

from fp8ref.spec import llama


class Model:
    """One model on this process's device, or its shards there.

    module     in the config's first recipe.
    twins      by further recipe, the module on the meta device, for a switch's linears (T-9).
    weights    float32 by name, which the step gives to the parameters; {}: they have theirs.
    unrounded  names of the parameters that no pass rounds.
    """

    module: nn.Module
    twins: Mapping[str, nn.Module]
    weights: Mapping[str, llama.Weight] = {}
    unrounded: Collection[str] = ()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, T, V] of tokens [B, T]."""
        return self.module(tokens)
