"""The automatic factors mu of weights whose gradients FSDP2 exchanges in FP8 (spec P-22).

    gradient_reduction.reduce_in_fp8(model)
    factors = gradient_factors.Factors(model)      # once the model has its memory
    loss.backward()                                # counts what casts saturate
    optimizer.step()
    factors.update()

All are in one tensor: a step has one all-reduce of counts for all weights that ranks cut alike.
"""

import torch
from torch import Tensor, distributed, nn

from fp8ref.spec.gradient_reduction import AUTO, MU_MAX, MU_MIN, AutoScale
from fp8ref.torch.distributed.gradient_reduction import FP8ReduceScatter, reductions
from fp8ref.torch.tensors.local_part import cut_groups

__all__ = ["Factors"]


class Factors:
    """mu of each weight that is reduced in FP8, and the rule that tunes it.

    names      of the weights, in the order of the tensors.
    mu         float32 [weights], 1 at first: by which gradients are cast.
    saturated  int64 [weights]: elements of all ranks that casts saturated between the last two
               updates.

    Raises:    ValueError: a model without weights that ``reduce_in_fp8`` reduces, or on the meta
               device.
    """

    def __init__(self, model: nn.Module, auto: AutoScale = AUTO) -> None:
        reduced_weights = [
            (reduction, param) for reduction in reductions(model) for param in reduction.weights()
        ]
        if not reduced_weights:
            raise ValueError(
                "factors need gradients reduced in FP8; got none. Call reduce_in_fp8 first."
            )
        names = {module: f"{name}.weight" for name, module in model.named_modules()}
        device = reduced_weights[0][1].sharded_param.device
        if device.type == "meta":
            raise ValueError(
                "factors need weights with values; got the meta device. Call model.to_empty first."
            )
        self.auto = auto
        self.names = [names[param._module_info.module] for _, param in reduced_weights]
        allowed = [auto.allowed(param.sharded_param.numel()) for _, param in reduced_weights]
        self._allowed = torch.tensor(allowed, dtype=torch.int64, device=device)
        self.mu = torch.ones(len(reduced_weights), device=device, dtype=torch.float32)
        self.saturated = torch.zeros_like(self._allowed)
        self._counts = torch.zeros_like(self._allowed)
        self._cut: dict[tuple[distributed.ProcessGroup, ...], list[int]] = {}
        unit_indices: dict[FP8ReduceScatter, list[int]] = {}
        for i, (reduction, param) in enumerate(reduced_weights):
            unit_indices.setdefault(reduction, []).append(i)
            self._cut.setdefault(cut_groups(param.sharded_param), []).append(i)
        for reduction, indices in unit_indices.items():
            part = slice(indices[0], indices[-1] + 1)  # those of a unit follow each other
            reduction.factors = self.mu[part], self._counts[part]

    @torch.no_grad()
    def update(self, finite: Tensor | None = None) -> None:
        """Tune mu by the counts of the passes since the last update, of all ranks; forget them.

        finite  bool (), on the device: where it is false nothing changes (T-4). None: true.
        """
        counts = self._counts.clone()
        for groups, indices in self._cut.items():
            cut_counts = counts if len(indices) == len(counts) else counts[indices]
            for group in groups:
                distributed.all_reduce(cut_counts, group=group)
            if cut_counts is not counts:
                counts[indices] = cut_counts
        mu = torch.where(
            counts > self._allowed, self.mu * 0.5, self.mu * float(self.auto.growth)
        ).clamp(MU_MIN, MU_MAX)
        if finite is not None:
            mu = torch.where(finite, mu, self.mu)
            counts = torch.where(finite, counts, self.saturated)
        self.mu.copy_(mu)
        self.saturated.copy_(counts)
        self.forget()

    def forget(self) -> None:
        """Drop the counts of passes that no update follows."""
        self._counts.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """mu by weight name, () each: views, for a checkpoint to save and load."""
        return dict(zip(self.names, self.mu.unbind(), strict=True))
