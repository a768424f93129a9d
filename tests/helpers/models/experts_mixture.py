"""A small model of torchtitan's experts, for tests of conversions."""

import torch
from torch import nn
from torch.nn import functional


def mixture(device="cpu"):
    """Two of torchtitan's GroupedExperts by name, with a linear before; experts take 4, 0, 9 and 3
    of 16 rows.
    """

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts = 4
            for name in ("w1", "w2", "w3"):
                self.register_parameter(name, nn.Parameter(torch.randn(4, 32, 32) / 6))

        def forward(self, x, counts):
            rows = x[: int(counts.sum())].split(counts.tolist())
            return torch.cat(
                [
                    functional.silu(r @ self.w1[e].mT) * (r @ self.w3[e].mT) @ self.w2[e].mT
                    for e, r in enumerate(rows)
                ]
            )

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.first, self.second = nn.Linear(32, 32), Experts(), Experts()

        def forward(self, x):
            counts = torch.tensor([4, 0, 9, 3])
            return self.second(self.first(self.up(x), counts), counts)

    torch.manual_seed(1)
    return Model().bfloat16().to(device)
