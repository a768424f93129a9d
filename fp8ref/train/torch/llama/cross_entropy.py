"""The loss of bfloat16 logits, of which a part at a time is widened to float32 (spec M-5)."""

import torch
from torch.nn import functional

CHUNK = 1 << 24
"""The most logits in float32 at a time: 64 MiB, thrice as much with softmax and gradients."""


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Each token's ``logsumexp(logits) - logits[target]``, in nats, computed in float32.

    Shapes:   logits [N, V] hp, targets [N] int64; float32 [N].
    Order:    torch's cross_entropy of float32 logits, of some rows at a time. Rows are independent:
              losses and gradients have the bits of all rows at once.
    Memory:   the backward pass keeps logits in their own dtype, and widens them again.
    Gradient: of logits, in their dtype; once.
    Source:   spec M-5.
    """
    return _CrossEntropy.apply(logits, targets)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        ctx.save_for_backward(logits, targets)
        losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        for rows in _chunks(logits):
            losses[rows] = _row_losses(logits[rows].float(), targets[rows])
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_losses):
        logits, targets = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for rows in _chunks(logits):
            wide = logits[rows].float().requires_grad_()
            with torch.enable_grad():
                losses = _row_losses(wide, targets[rows])
            grad_logits[rows] = torch.autograd.grad(losses, wide, grad_losses[rows])[0]
        return grad_logits, None


def _row_losses(wide: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(wide, targets, reduction="none")


def _chunks(logits: torch.Tensor) -> list[slice]:
    """The rows [N, V] in parts of CHUNK elements at most, or of one row."""
    size = max(1, CHUNK // logits.shape[1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]
