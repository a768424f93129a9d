"""Experts in place of an MLP in PyTorch (spec M-8): router, grouped linears, weighted sum.

``fp8ref.torch.experts.layer`` multiplies; a layer's ``balance`` is what the load-balancing loss
needs of its last forward pass.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from fp8ref.spec.llama import LlamaConfig
from fp8ref.torch.experts import codes as expert_codes
from fp8ref.torch.experts import parallel as expert_parallel
from fp8ref.torch.experts.layer import GroupedLinear
from fp8ref.torch.quantize.scaling import Quantized


class Balance(NamedTuple):
    """Of a layer's forward pass: rows, float32 [E], those that each expert took; probabilities,
    float32 [E], summed over tokens."""

    rows: torch.Tensor
    probabilities: torch.Tensor


class Router(nn.Module):
    """The experts of each token and their weights, in float32."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.chosen, self.normalizes = config.num_experts_per_tok, config.norm_topk_prob

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, hidden] -> (experts int64 [T, k], weights [T, k], probabilities [T, E])."""
        # [T, hidden] x [E, hidden] -> [T, E]
        logits = functional.linear(x.float(), self.weight.float())
        probabilities = torch.softmax(logits, dim=-1)
        # stable: of equal probabilities the first expert's counts as larger
        values, experts = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        values, experts = values[:, : self.chosen], experts[:, : self.chosen]
        if self.normalizes:
            values = values / values.sum(-1, keepdim=True)
        return experts, values, probabilities


class Projections(nn.Module):
    """SwiGLU of each expert, as grouped linears: rows [M, hidden] in groups -> [M, hidden]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        experts = config.num_experts
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = GroupedLinear(experts, hidden, inner)
        self.up_proj = GroupedLinear(experts, hidden, inner)
        self.down_proj = GroupedLinear(experts, inner, hidden)

    def forward(
        self,
        rows: torch.Tensor,
        ends: torch.Tensor,
        codes: Quantized | None = None,
        slot: expert_codes.Slot | None = None,
    ) -> torch.Tensor:
        """rows [M, hidden] of groups that end at ends; in FP8 codes, where rows only stand for
        them. slot: that of the result's gradient.
        """
        gate, up = (
            of(rows, ends, input_codes=codes).float() for of in (self.gate_proj, self.up_proj)
        )
        return self.down_proj((functional.silu(gate) * up).to(rows.dtype), ends, grad_codes=slot)


class MixtureMLP(nn.Module):
    """The weighted sum of a token's experts, and a shared MLP's output, if any: [B, T, hidden].

    group   of ranks that have different experts, to which rows are sent (X-13); None: this rank has
            all.
    in_codes
            whether rows and gradients of results are sent in FP8 where that changes no bit (X-14).
    """

    group: ProcessGroup | None = None
    in_codes = True

    def __init__(self, config: LlamaConfig, shared: nn.Module | None) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Projections(config)
        self.shared_expert = shared
        self.count = config.num_experts
        self.balance: Balance | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, T, hidden] after its experts."""
        tokens = x.reshape(-1, x.shape[-1])
        experts, weights, probabilities = self.gate(tokens)
        # in a group by token, then by choice
        chosen, order = torch.sort(experts.reshape(-1), stable=True)
        numbers = torch.arange(self.count, device=x.device)
        ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).float()
        self.balance = Balance(counts, probabilities.sum(0))
        # Copies in float32, which sums a token's gradients. [T k, hidden]
        copies = tokens.float()[:, None].expand(-1, weights.shape[1], -1)
        copies = copies.reshape(-1, x.shape[-1])
        rows = self._grouped(copies.to(x.dtype)[order], ends)
        places = torch.arange(len(order), device=x.device)
        back = torch.empty_like(order).index_copy(0, order, places)
        choice_outputs = rows[back].view(*weights.shape, -1).float()  # [T, k, hidden]
        y = (weights[..., None] * choice_outputs).sum(1)
        if self.shared_expert is not None:
            y = y + self.shared_expert(tokens).float()
        return y.to(x.dtype).view(x.shape)

    def _grouped(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """rows [M, hidden] of all experts, in groups that end at ends -> [M, hidden]."""
        if self.group is None:
            return self.experts(rows, ends)
        of, codes, slot = self.experts, None, None
        if self.in_codes:
            moved, codes = expert_codes.dispatch(rows, ends, self.group, (of.gate_proj, of.up_proj))
            if expert_codes.cast_of([of.down_proj], "grad_output") and torch.is_grad_enabled():
                slot = expert_codes.Slot()
        else:
            moved = expert_parallel.dispatch(rows, ends, self.group)
        y = of(moved.rows, moved.ends, codes, slot)
        if slot is None:
            return expert_parallel.combine(y, moved, self.group)
        return expert_codes.combine(y, moved, ends, self.group, of.down_proj, slot)


def balancing_loss(
    balances: Sequence[Balance], chosen: int, ranks: ProcessGroup | None = None
) -> torch.Tensor:
    """E times the sum over experts of their share of the tokens times their mean probability, each
    over all layers together; float32 (). chosen: a token's experts (M-8).

    ranks   share a batch evenly: shares are of all their tokens, probabilities of this rank's, so
            that the loss is the mean over ranks, as its gradients are.
    """
    rows, probabilities = (
        torch.stack(layer_values).sum(0) for layer_values in zip(*balances, strict=True)
    )
    tokens, total = rows.sum() / chosen, rows  # of all layers
    if ranks is not None:
        total = rows.clone()
        distributed.all_reduce(total, group=ranks)
    return len(rows) * (total / (total.sum() / chosen) * (probabilities / tokens)).sum()
