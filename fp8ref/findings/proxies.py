"""Claims about architectures and norms, measured by small PyTorch models of their own."""

import copy
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fp8ref.findings import training
from fp8ref.findings.casts import error
from fp8ref.findings.claim import Sample, Trial
from fp8ref.policy import POLICIES
from fp8ref.selection.rules import Rule
from fp8ref.sim.quantize import scaling
from fp8ref.spec.attention.variants import Mask
from fp8ref.torch import attention, convert
from fp8ref.train.data import loader
from fp8ref.train.report import gap as gaps

WIDTH, DEPTH, ROWS, STEPS = 128, 3, 256, 150
"""Of the student of 2506.20752: its width, blocks, inputs of a step, and steps."""

SHIFTS = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
"""Added to the trained norm weights, which are near 1."""

LABELS = {None: "linears alone", "mx_rceil": "+ norms, rounded up", "mx_floor": "+ norms, floor"}
"""{policy of the norms' casts: its line}."""

RECORDED = (0, 30, 60, 90, 119)
"""Steps at which activations are measured."""

ARCHITECTURES = {"norms before, SwiGLU": False, "after, GELU": True}
"""{a line: whether its blocks have norms after their branches}."""


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


class Attention(nn.Module):
    """Causal attention of q, k and v [B, H, T, D]."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[B, H, T, D]."""
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class UnitScaled(nn.Module):
    """A linear whose weights begin at unit variance, times 1 / sqrt(K)."""

    def __init__(self, k: int, n: int):
        super().__init__()
        self.linear = nn.Linear(k, n, bias=False)
        nn.init.normal_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        return self.linear(x) * self.linear.in_features**-0.5


class Block(nn.Module):
    """A block of a decoder: norms before attention and MLP (SwiGLU), or after them (GELU), with
    queries and keys normalized.
    """

    def __init__(self, width: int, *, post: bool, linear: Callable[[int, int], nn.Module]):
        super().__init__()
        self.post, self.heads, inner = post, 4, (4 if post else 3) * width
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up = linear(width, inner if post else 2 * inner)
        self.down, self.attention = linear(inner, width), Attention()
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
        return self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP."""
        if self.post:
            return self.down(functional.gelu(self.up(x)))
        gate, up = self.up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * up)


def _linear(k: int, n: int) -> nn.Module:
    return nn.Linear(k, n, bias=False)


def _steps(trial: Trial, blocks: nn.Sequential, width: int = 64) -> Iterator[float]:
    """Train a decoder of some blocks on text: the loss of each step."""
    model = nn.Sequential(
        nn.Embedding(256, width), blocks, nn.RMSNorm(width), nn.Linear(width, 256)
    )
    # an update changes a unit-scaled product by as much as a plain one
    groups = [
        {"params": [p], "lr": 2e-3 * (p.shape[-1] ** 0.5 if ".linear." in name else 1)}
        for name, p in model.named_parameters()
    ]
    batches = loader.open_batches(training.tiny(trial, "bf16"))
    optimizer = torch.optim.AdamW(groups)
    for step in range(training.STEPS):
        tokens = torch.from_numpy(np.asarray(batches.step(step), np.int64))
        logits, labels = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        optimizer.zero_grad()
        loss = functional.cross_entropy(logits, labels)
        (len(labels) * loss).backward()  # gradients that e5m2 holds; AdamW divides them out
        optimizer.step()
        yield loss.item()


def _watched(trial: Trial, place: str, measure: Callable[..., float], *, post: bool) -> list[float]:
    """By recorded step, what is measured of the inputs of a module of each block, on average."""
    torch.manual_seed(trial.seed)
    blocks = nn.Sequential(*(Block(64, post=post, linear=_linear) for _ in range(2)))
    inputs: dict[nn.Module, tuple[torch.Tensor, ...]] = {}
    for block in blocks:
        getattr(block, place).register_forward_pre_hook(inputs.__setitem__)
    measured = []
    for step, _ in enumerate(_steps(trial, blocks)):
        if step in RECORDED:
            tensors = [[x.detach() for x in each] for each in inputs.values()]
            measured.append(float(np.mean([measure(*each) for each in tensors])))
    return measured


def post_norm_kurtosis(trial: Trial) -> Sample:
    """How much the kurtosis of what down projections take, mean(x^4) / mean(x^2)^2 of a token on
    average, grows in a model with norms before its branches and SwiGLU, less how much in one with
    norms after them and GELU.
    """

    def kurtosis(x: torch.Tensor) -> float:
        x = x.double()
        return float(((x**4).mean(-1) / (x**2).mean(-1) ** 2).mean())

    lines = {
        label: _watched(trial, "down", kurtosis, post=post) for label, post in ARCHITECTURES.items()
    }
    before, after = lines.values()
    return Sample(before[-1] - before[0] - (after[-1] - after[0]), lines)


def post_norm_attention(trial: Trial) -> Sample:
    """Percent of error of attention in FP8 after training, in a model with norms before its
    branches, minus in one with norms after them and of queries and keys.
    """

    def off(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
        low = attention.apply(q, k, v, variant="cudnn", mask=Mask(causal=True))
        return 100 * error(low.numpy(), Attention()(q.double(), k.double(), v.double()).numpy())

    lines = {
        label: _watched(trial, "attention", off, post=post) for label, post in ARCHITECTURES.items()
    }
    before, after = lines.values()
    return Sample(before[-1] - after[-1], lines)


def unit_scaling(trial: Trial) -> Sample:
    """The loss of a unit-scaled model with current scales, minus that by scales of 1."""
    lines: dict[str, list[float]] = {"current scales": [], "no scales": []}
    for linear in (UnitScaled, _linear):
        plain = _last_loss(trial, linear, None)
        for line, rules in zip(
            lines.values(), ((), (Rule(layers=("0", "1"), policy="unscaled"),)), strict=True
        ):
            line.append(_last_loss(trial, linear, rules) - plain)
    return Sample(lines["current scales"][0] - lines["no scales"][0], lines)


def _last_loss(
    trial: Trial, linear: Callable[[int, int], nn.Module], rules: tuple[Rule, ...] | None
) -> float:
    """The loss of the last steps, as ``training.loss``: under tensorwise with rules, or, for None,
    without casts.
    """
    torch.manual_seed(trial.seed)
    blocks = nn.Sequential(*(Block(64, post=True, linear=linear) for _ in range(2)))
    if rules is not None:
        convert(blocks, "tensorwise", rules=rules)
    losses = list(_steps(trial, blocks))
    last = float(np.mean(losses[-gaps.window(training.STEPS) :]))
    return last if np.isfinite(losses).all() else math.log(256)  # what knows nothing has
