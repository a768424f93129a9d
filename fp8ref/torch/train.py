"""The training step in PyTorch (SEMANTICS T): float32 masters, bfloat16 compute, torch's AdamW."""

import math

import numpy as np
import torch
from torch.func import functional_call
from torch.nn import functional

from fp8ref import llama
from fp8ref.run.config import Config
from fp8ref.torch import delayed, linear
from fp8ref.torch.model import Llama
from fp8ref.torch.observing import observing


class Trainer:
    """One model being trained. ``step`` and ``evaluate`` take tokens [B, T + 1], integers: inputs and the targets after them."""

    backend = "torch"

    def __init__(self, config: Config, weights: dict[str, np.ndarray] | None = None) -> None:
        """weights: float32 arrays by name, by default ``llama.initial_weights`` of run.seed."""
        self.config = config
        self.decisions = config.decisions()
        weights = llama.initial_weights(config.model, seed=config.run.seed) if weights is None else weights
        llama.check_weights(weights, config.model)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        numerics = config.numerics
        model = Llama(config.model, weights).to(self._device)
        self.model = linear.convert(model, numerics.recipe, filter_fqns=config.filter_fqns, fp8_fqns=numerics.fp8_fqns)
        self._params = dict(self.model.named_parameters())
        optimizer = config.optimizer
        groups = [
            {"params": [p for p in self._params.values() if p.ndim > 1], "weight_decay": optimizer.weight_decay},
            {"params": [p for p in self._params.values() if p.ndim == 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps, foreach=True)
        self._count = 0
        self.device = f"cuda: {torch.cuda.get_device_name()}" if self._device.type == "cuda" else "cpu"

    def step(self, tokens: np.ndarray) -> dict[str, float]:
        """One optimizer step: {"loss", "grad_norm"} before the update. Where either is not finite nothing changes (T-4)."""
        self._optimizer.zero_grad()
        loss = self._loss(tokens)
        loss.backward()
        grads = [p.grad for p in self._params.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        metrics = {"loss": loss.item(), "grad_norm": norm.item()}
        if all(map(math.isfinite, metrics.values())):
            torch._foreach_mul_(grads, torch.clamp(self.config.optimizer.max_norm / norm, max=1.0))
            lr = self.config.optimizer.learning_rate_at(self._count, self.config.run.steps)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            delayed.update(self.model)
            self._count += 1
        else:
            delayed.forget(self.model)
        return metrics

    @torch.no_grad()
    def evaluate(self, tokens: np.ndarray) -> float:
        """The loss of a batch."""
        return self._loss(tokens).item()

    @torch.no_grad()
    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [B, T, vocab_size] from tokens [B, T]."""
        return self._forward(self._tokens(tokens)).float().cpu().numpy()

    def gradients(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """float32 gradients of the loss of a batch by parameter, not clipped; nothing is updated."""
        grads = torch.autograd.grad(self._loss(tokens), list(self._params.values()))
        delayed.forget(self.model)
        return {name: g.cpu().numpy() for name, g in zip(self._params, grads, strict=True)}

    def weights(self) -> dict[str, np.ndarray]:
        """The float32 masters by name."""
        return {name: p.detach().cpu().numpy().copy() for name, p in self._params.items()}

    def observe(self, tokens: np.ndarray, observer) -> None:
        """A forward and backward pass, no update, in which every FP8 GEMM reports to observer (see ``observing``)."""

        def as_numpy(name, gemm, a, b, out):
            # float32 holds every bfloat16; NumPy has no bfloat16 of its own
            operands = [(hp.float().cpu().numpy(), codes.cpu().numpy(), scale.cpu().numpy()) for hp, codes, scale in (a, b)]
            observer(name, gemm, *operands, out.float().cpu().numpy())

        with observing(self.model, as_numpy):
            self._loss(tokens).backward()
        self._optimizer.zero_grad()
        delayed.forget(self.model)

    def _tokens(self, tokens: np.ndarray) -> torch.Tensor:
        llama.check_tokens(tokens, self.config.model)
        return torch.from_numpy(np.asarray(tokens, np.int64)).to(self._device)

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The model on parameters rounded to the compute dtype, all but the embedding table (SEMANTICS M-2)."""
        compute = {name: p if name == llama.EMBEDDING else p.to(torch.bfloat16) for name, p in self._params.items()}
        return functional_call(self.model, compute, (tokens,))

    def _loss(self, tokens: np.ndarray) -> torch.Tensor:
        batch = self._tokens(tokens)
        logits = self._forward(batch[:, :-1]).float()  # [B, T, V]
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
