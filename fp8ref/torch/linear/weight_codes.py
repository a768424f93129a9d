"""A weight's codes in both orders, cast once for the passes of a step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8ref.shared.errors import require
from fp8ref.torch.tensors import linear_input

__all__ = ["WeightCodes"]


@dataclass(frozen=True)
class WeightCodes:
    """The codes of a weight, and what they were made of.

    tensors   those of ``both_orders.Pair``, and its parts.
    versions  torch's counts of the operations that had changed the weight and the scale of its
              delayed state; they count no write through ``.data``.
    """

    tensors: tuple[Tensor | None, ...]
    weight: Tensor
    scale: Tensor | None
    versions: tuple[int, int]

    @classmethod
    def of(
        cls, tensors: tuple[Tensor | None, ...], weight: Tensor, scale: Tensor | None
    ) -> "WeightCodes":
        """The tensors of a weight that was cast just now."""
        return cls(tensors, weight, scale, _versions(weight, scale))

    def check(self, name: str) -> None:
        """ValueError if the weight, or the scale of its state, has changed since."""
        require(
            _versions(self.weight, self.scale) == self.versions,
            "weights stay as they are within cast_once; the weight of "
            f"{linear_input.named(name)}, or its scale, has changed. Leave the context before the "
            "optimizer's step.",
        )

    def serving(self, w: Tensor, name: str) -> tuple[Tensor | None, ...]:
        """The tensors for a pass by the weight w; () if the pass has to cast it: another tensor, as
        under autocast, or a CUDA graph that is captured, which would keep these codes.

        Raises as ``check``; in a compiled graph no change is seen.
        """
        if torch.compiler.is_compiling():
            return self.tensors if w is self.weight else ()
        if w is not self.weight or (w.is_cuda and torch.cuda.is_current_stream_capturing()):
            return ()
        self.check(name)
        return self.tensors


def _versions(weight: Tensor, scale: Tensor | None) -> tuple[int, int]:
    # inference tensors count nothing
    counts = [0 if x is None or x.is_inference() else x._version for x in (weight, scale)]
    return counts[0], counts[1]
