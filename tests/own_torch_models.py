"""Models of a user's, for PyTorch, as ``architecture.source`` names them."""

import torch
from torch import nn
from torch.nn import functional


class Tied(nn.Module):
    """Two linears in FP8, one of them with a bias, and logits by the embedding's own table."""

    def __init__(self, vocab_size: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steepness", torch.tensor(1.5), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(functional.gelu(self.up(x)) * self.steepness.to(x.dtype)))


class Dropping(Tied):
    """With a dropout."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.drop = nn.Dropout(0.1)


class Uncalling(Tied):
    """With a linear that it does not call."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.spare = nn.Linear(32, 32)


class Misshapen(Tied):
    """Whose logits are of the last token alone."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens)[:, -1]


def nothing(vocab_size: int) -> str:
    return "no module"


def broken(vocab_size: int):
    raise KeyError("width")
