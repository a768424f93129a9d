"""What every section of the PyTorch benchmark is given: sizes, the device, its clock, how to
compile.
"""

import gc
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fp8ref.torch.kernels import choice
from measuring import timing
from measuring.sizes import Sizes
from measuring.timing import Budget, Call, Clock, Rounds


@dataclass(frozen=True, kw_only=True)
class Bench:
    device: str
    clock: Clock
    sizes: Sizes
    backend: str  # of torch.compile
    budget: Budget

    @property
    def dry(self) -> bool:
        return self.device == "cpu"

    @property
    def casts(self) -> str:
        """What casts tensors of fp8ref's variants, and why."""
        return choice.explain("auto", torch.device(self.device)).text

    def timed(
        self,
        variants: dict[str, Call],
        *,
        most: int = 20,
        queued: bool = True,
        row_seconds: float | None = None,
    ) -> Rounds:
        return timing.interleaved(
            variants,
            self.clock,
            row_seconds=row_seconds or self.sizes.row_seconds,
            most=1 if self.dry else most,
            queued=queued,
            rounds=self.sizes.rounds,
            budget=self.budget,
        )

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """bfloat16, normal, never zeros: zeros multiply faster."""
        return torch.randn(shape, device=self.device).mul_(scale).bfloat16()

    def codes(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """FP8 codes of normal values that fill the format's range, as a scale of their amax would
        have them do.
        """
        limit = torch.finfo(dtype).max
        x = torch.randn(shape, device=self.device)
        return (x * (limit / x.abs().max())).to(dtype)

    def compiled(
        self, function: Callable, *, whole: bool = True, cuda_graphs: bool = False
    ) -> Callable:
        """Compiled on its own: dynamo keeps graphs by code object, and variants that shared one
        would guard against each other. whole: as one graph.
        """
        mode = "reduce-overhead" if cuda_graphs and not self.dry else None
        own = types.FunctionType(
            function.__code__.replace(), function.__globals__, function.__name__
        )
        return torch.compile(own, dynamic=False, fullgraph=whole, mode=mode, backend=self.backend)

    def free(self) -> None:
        """Give back what a section held."""
        torch._dynamo.reset()
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()
