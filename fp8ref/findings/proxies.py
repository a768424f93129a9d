"""Claims about architectures and norms, measured by small PyTorch models of their own."""

import copy

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fp8ref.findings import training
from fp8ref.findings.claim import Sample, Trial
from fp8ref.policy import POLICIES
from fp8ref.sim.quantize import scaling
from fp8ref.torch import convert
from fp8ref.train.data import loader

WIDTH, DEPTH, ROWS, STEPS = 128, 3, 256, 150
"""Of the student of 2506.20752: its width, blocks, inputs of a step, and steps."""

SHIFTS = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
"""Added to the trained norm weights, which are near 1."""

LABELS = {None: "linears alone", "mx_rceil": "+ norms, rounded up", "mx_floor": "+ norms, floor"}
"""{policy of the norms' casts: its line}."""

RECORDED = (0, 30, 60, 90, 119)
"""Steps at which kurtosis is measured."""


class Norm(nn.LayerNorm):
    """A LayerNorm whose weight goes through mxfp8's cast, with gradients as if it did not."""

    policy: str | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The norm by the weight as it is cast."""
        weight: torch.Tensor = self.weight
        if self.policy is not None:
            row = weight.detach().numpy()[None]
            q = scaling.quantize(row, "e4m3fn", granularity="mx_1x32", policy=self.policy)
            weight = weight + (torch.from_numpy(scaling.dequantize(q)[0]) - weight).detach()
        return functional.layer_norm(input, self.normalized_shape, weight, self.bias, self.eps)


class Residual(nn.Module):
    """x + fc2(gelu(fc1(norm(x))))."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.fc1 = Norm(width), nn.Linear(width, 4 * width, bias=False)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, of x's shape."""
        return x + self.fc2(functional.gelu(self.fc1(self.norm(x))))


def mx_norm_weights(trial: Trial) -> Sample:
    """The squared error of the gradient, in percent of the gradient's square, with norm weights
    cast by the floor of OCP's rule, minus with linears cast alone: the mean over SHIFTS.
    """
    torch.manual_seed(trial.seed)
    student = nn.Sequential(*(Residual(WIDTH) for _ in range(DEPTH)))
    teacher = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    optimizer = torch.optim.Adam(student.parameters(), 1e-3)
    for step in range(STEPS):
        _gradient(student, teacher, trial.seed * STEPS + step)
        optimizer.step()
    norms = [module for module in student.modules() if isinstance(module, Norm)]
    trained = [norm.weight.data.clone() for norm in norms]
    lines: dict[str, list[float]] = {}
    for shift in SHIFTS:  # to where trained weights may be: near the top of a binade
        for policy in ("float32", None, "mx_rceil", "mx_floor"):
            for norm, weight in zip(norms, trained, strict=True):
                norm.weight.data = weight + shift
                norm.policy = policy if policy in POLICIES else None
            model = student if policy == "float32" else convert(copy.deepcopy(student), "mxfp8")
            gradient = _gradient(model, teacher, -1 - trial.seed)
            if policy == "float32":
                exact = gradient
                continue
            off, label = gradient - exact, LABELS[policy]
            lines.setdefault(label, []).append(100 * float((off @ off) / (exact @ exact)))
    alone, _, floor = lines.values()
    return Sample(float(np.mean(floor) - np.mean(alone)), lines)


def _gradient(student: nn.Module, teacher: nn.Module, seed: int) -> torch.Tensor:
    """The gradients of all parameters, one after the other, of a step's inputs."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed % 2**63))
    student.zero_grad()
    with torch.no_grad():
        target = x
        for layer in teacher.children():
            target = functional.gelu(layer(target))
    functional.mse_loss(student(x), target).backward()
    return torch.cat([p.grad.ravel() for p in student.parameters() if p.grad is not None])


class Block(nn.Module):
    """A block of a decoder: norms before attention and MLP (SwiGLU), or after them (GELU), with
    queries and keys normalized.
    """

    def __init__(self, width: int, *, post: bool):
        super().__init__()
        self.post, self.heads = post, 4
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up = nn.Linear(width, 6 * width if not post else 4 * width, bias=False)
        self.down = nn.Linear(3 * width if not post else 4 * width, width, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, C] -> [B, T, C]."""
        for norm, branch in zip(self.norms, (self.attend, self.expand), strict=True):
            x = x + (norm(branch(x)) if self.post else branch(norm(x)))
        return x

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Causal attention."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.post:
            q, k = (functional.rms_norm(each, each.shape[-1:]) for each in (q, k))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP."""
        if self.post:
            return self.down(functional.gelu(self.up(x)))
        gate, up = self.up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * up)


def post_norm_kurtosis(trial: Trial) -> Sample:
    """How much the kurtosis of what down projections take grows in a model with norms before its
    branches and SwiGLU, less how much in one with norms after them and GELU.
    """
    lines = {"norms before, SwiGLU": _kurtosis(trial, False), "after, GELU": _kurtosis(trial, True)}
    before, after = lines.values()
    return Sample(before[-1] - before[0] - (after[-1] - after[0]), lines)


def _kurtosis(trial: Trial, post: bool) -> list[float]:
    """By recorded step, the mean over tokens and blocks of mean(x^4) / mean(x^2)^2."""
    torch.manual_seed(trial.seed)
    config = training.tiny(trial, "bf16")
    batches, width = loader.open_batches(config), 64
    blocks = [Block(width, post=post) for _ in range(2)]
    model = nn.Sequential(
        nn.Embedding(256, width), *blocks, nn.RMSNorm(width), nn.Linear(width, 256)
    )
    optimizer, measured = torch.optim.AdamW(model.parameters(), 2e-3), []
    values: list[float] = []

    def measure(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        x = inputs[0].detach().double()
        values.append(float(((x**4).mean(-1) / (x**2).mean(-1) ** 2).mean()))

    for block in blocks:
        block.down.register_forward_pre_hook(measure)
    for step in range(RECORDED[-1] + 1):
        tokens = torch.from_numpy(np.asarray(batches.step(step), np.int64))
        values.clear()
        loss = functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        if step in RECORDED:
            measured.append(float(np.mean(values)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return measured
