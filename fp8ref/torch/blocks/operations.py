"""RMSNorm, SwiGLU and rotary embedding with their gradients, as autograd computes them (spec M-3).

Each is computed in float32 and rounded to its tensor's dtype where the module that it stands for
rounds: M-3's once, at the end; transformers' and torchtitan's modules twice (``twice``). Gradients
repeat the operations of autograd's own formulas, so that no bit of theirs changes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Norm", "rotate", "rotate_gradient", "swiglu", "swiglu_gradient"]


@dataclass(frozen=True)
class Norm:
    """The constants of x * rsqrt(mean(x^2) + eps) * weight, over the last dim.

    twice     whether the normalized x is rounded before it is multiplied by the weight, in x's
              dtype, as transformers does.
    """

    eps: float
    twice: bool = False

    def rstd(self, x: Tensor) -> Tensor:
        """rsqrt(mean(x^2) + eps) of x [..., K], float32 [..., 1]."""
        return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)

    def value(self, x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
        """The norm of x [..., K], in x's dtype; rstd as of ``rstd``, weight [K]."""
        if self.twice:
            return weight * (x.float() * rstd).to(x.dtype)
        return (x.float() * rstd * weight.float()).to(x.dtype)

    def gradient(self, g: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x [..., K] and weight [K], from that of the norm [..., K]."""
        wide = x.float()
        normalized = wide * rstd
        if self.twice:
            grad_weight = (g * normalized.to(x.dtype)).sum_to_size(weight.shape)
            scaled = (g * weight).float()
        else:
            g = g.float()
            grad_weight = (g * normalized).sum_to_size(weight.shape).to(weight.dtype)
            scaled = g * weight.float()
        grad_rstd = (scaled * wide).sum(-1, keepdim=True)
        grad_mean = -0.5 * grad_rstd * rstd.pow(3)
        grad_square = grad_mean.expand(x.shape) / x.shape[-1]
        return (scaled * rstd + grad_square * (2.0 * wide)).to(x.dtype), grad_weight


def swiglu(gate: Tensor, up: Tensor, *, twice: bool = False) -> Tensor:
    """silu(gate) * up, of one shape and dtype. twice: silu(gate) is rounded to that dtype first."""
    if twice:
        return torch.nn.functional.silu(gate) * up
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def swiglu_gradient(
    g: Tensor, gate: Tensor, up: Tensor, *, twice: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, from that of ``swiglu``; each of one shape and dtype."""
    dtype = gate.dtype
    if not twice:
        g, gate, up = g.float(), gate.float(), up.float()
    grad_gate = torch.ops.aten.silu_backward(g * up, gate)
    return grad_gate.to(dtype), (g * torch.nn.functional.silu(gate)).to(dtype)


Table = Tensor
"""cos or sin, which broadcasts to heads [..., D]."""


def rotate(x: Tensor, cos: Table, sin: Table, form: str = "halves") -> Tensor:
    """Rotary embedding of heads x [..., D], rounded once to x's dtype, or in another form of
    ``kernels.rotary``."""
    wide = x if form == "rounded halves" else x.float()
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    # first, so that autograd adds its gradient last, and q's keeps the layout of q
    turned = _quarter_turn(wide, form)
    return (wide * cos + turned * sin).to(x.dtype)


def rotate_gradient(g: Tensor, cos: Table, sin: Table, form: str = "halves") -> Tensor:
    """The gradient of x, from that of ``rotate``, of one shape and dtype."""
    wide = g if form == "rounded halves" else g.float()
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    grad = wide * cos - _quarter_turn(wide * sin, form)
    # autograd adds each half's gradient beside zeros, which make -0 a 0
    return grad + 0.0 if form == "rounded halves" else grad.to(g.dtype)


def _quarter_turn(x: Tensor, form: str) -> Tensor:
    """(-second, first) in place of each (first, second)."""
    if form == "pairs":
        return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
