"""Models of a user's, for PyTorch, as ``architecture.source`` names them."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fp8ref.torch.experts.layer import GroupedLinear


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


class Sometimes(Uncalling):
    """With a linear that it calls where the first token is even."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        return (
            logits
            if tokens[0, 0] % 2
            else logits + self.spare(self.embed(tokens)).sum(-1, keepdim=True)
        )


class Misshapen(Tied):
    """Whose logits are of the last token alone."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens)[:, -1]


class HeadFirst(nn.Module):
    """Whose head is made before a linear of as many outputs."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, 64), nn.Linear(64, vocab_size)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return torch.tanh(self.head(x + self.down(torch.relu(self.up(x)))).float())


class Headless(nn.Module):
    """Logits by the embedding's table without a linear, after a linear of as many outputs."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed, self.down = nn.Embedding(vocab_size, 256), nn.Linear(256, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.down(self.embed(tokens)), self.embed.weight)


class Averaging(Tied):
    """With a buffer that every pass changes."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.register_buffer("average", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.5).add_(1)
        return super().forward(tokens)


class Replacing(Averaging):
    """With a buffer that every pass replaces."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.average = self.average + 1
        return Tied.forward(self, tokens)


class Renorming(Tied):
    """With a table that every pass scales."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.embed.max_norm = 0.5


class DroppingInPlace(Tied):
    """With a dropout that is no module."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.dropout(super().forward(tokens), 0.5, training=self.training)


class Rolling(Tied):
    """With random numbers of NumPy."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * float(np.random.rand())  # noqa: NPY002  # what a model may draw from


class Widening(Tied):
    """With a float32 buffer in the residual stream."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.register_buffer("offset", torch.ones(32))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens) + self.offset)


class Grouped(Tied):
    """With a grouped linear."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.experts = GroupedLinear(2, 32, 32)


class Lazy(Tied):
    """With a linear whose input decides its shape."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.up = nn.LazyLinear(64)


class Frozen(Tied):
    """Of which nothing is trained."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.requires_grad_(False)


class Detached(Tied):
    """Whose logits have no gradient."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens).detach()


def nothing(vocab_size: int) -> str:
    return "no module"


def broken(vocab_size: int):
    raise KeyError("width")
