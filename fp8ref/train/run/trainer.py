"""What a trainer offers, in either backend: one model in training, and the proof of its step."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from fp8ref.recipe import Recipe
from fp8ref.selection.linears import Decision
from fp8ref.shared.errors import ConfigError, require
from fp8ref.spec import products
from fp8ref.spec.kernels import Choice, Kernels
from fp8ref.train.config import device_shapes
from fp8ref.train.config.config import Config

__all__ = ["Provable", "Trainer", "check_products", "kernels_of"]


def check_products(
    config: Config, backend: str, capability: tuple[int, int] | None, device: str
) -> None:
    """ConfigError for numerics.products that a backend, device or linear lacks."""
    refused = device_shapes.unmultiplied(config, backend)
    require(not refused, "".join(refused), ConfigError)
    try:
        products.check(config.numerics.products, backend, capability, device)
    except ValueError as error:
        raise ConfigError(f"numerics.{error}") from error


def kernels_of(
    config: Config, explain: Callable[[Choice], Kernels], share: Callable[[Recipe], float]
) -> Kernels:
    """What casts operands of linears on a device, in every recipe of a config.

    explain   what casts on the device by a choice.
    share     of a recipe's roles, that kernels can cast; of experts they cast none.
    Raises:   ConfigError: a choice that does not fit the device, or the linears.
    """
    choice = config.numerics.kernels
    configs = [config.under(recipe) for recipe in config.recipes]
    decisions = [d for each in configs for d in each.decisions() if d.fp8]
    shares = [(d.recipe.name, 0 if d.experts else share(d.recipe)) for d in decisions]
    try:
        return explain(choice).over_linears(shares, choice)
    except ValueError as error:
        raise ConfigError(f"numerics.kernels: {error}") from error


class Trainer(Protocol):
    """One model in training: what ``jax.trainer.Trainer`` and ``torch.trainer.Trainer`` both offer.

    A batch is integers [B, T + 1], inputs and the targets after them. Weights and gradients are
    float32 arrays by parameter name, whole on every process.
    """

    backend: str
    config: Config
    count: int
    """The optimizer's steps that were taken."""
    decisions: list[Decision]
    device: str
    kernels: Mapping[str, Kernels]
    """What casts on each of this process's devices, by its name."""

    def switch(self, recipe: str) -> None:
        """Compute in another of the config's recipes from now on; no state changes (T-9)."""
        ...

    def step(self, tokens: np.ndarray) -> dict[str, float]:
        """Train on a batch: {"loss", "grad_norm"}; unless both are finite, no state changes."""
        ...

    def evaluate(self, tokens: np.ndarray) -> float:
        """The mean loss of a batch, in nats; no state changes."""
        ...

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [B, T, vocab_size] of inputs [B, T]."""
        ...

    def weights(self) -> dict[str, np.ndarray]:
        """The float32 masters."""
        ...

    def moments(self) -> dict[str, dict[str, np.ndarray]]:
        """AdamW's moments: {"exp_avg": {parameter: array}, "exp_avg_sq": ...}."""
        ...

    def save(self, directory: Path) -> Callable[[], None]:
        """Copy the state and write it in the background.

        Returns a function that waits until it is written.
        """
        ...

    def load(self, directory: Path, step: int) -> None:
        """Restore the state that was saved after ``step`` steps."""
        ...

    def adopt(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        """Take a state of so many steps, of arrays by the names of ``train_state.schema``."""
        ...

    def gradients(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """The gradients of a batch's mean loss, before clipping; no state changes."""
        ...

    def observe(self, tokens: np.ndarray, observer, attention=None) -> None:
        """Run one forward and backward pass.

        Each FP8 GEMM calls observer(layer, gemm, a, b, out); each pass of attention by a variant
        calls attention(layer, phase, arrays), if given, with what it made
        (``attention.products.SHOWN``).
        """
        ...

    def statistics(self, tokens: np.ndarray) -> dict[str, dict]:
        """Quantization statistics of every FP8 operand of a batch (Q-8); no state changes."""
        ...

    def measured_step(
        self, tokens: np.ndarray
    ) -> tuple[dict[str, float], dict[str, dict], dict[str, dict]]:
        """The results of ``step`` and of ``statistics`` on one batch, and the health of the states
        that the step made, by parameter (Q-12); none of an optimizer without a layout."""
        ...

    def gradient_factors(self) -> dict[str, dict[str, float]]:
        """Of each linear whose gradient is exchanged in FP8 by an automatic mu: mu after the last
        step, and the elements that its casts saturated (P-22)."""
        ...

    def fp8_states(self) -> dict[str, tuple[np.ndarray, ...]]:
        """States of delayed scaling by ``<layer>/<role>``: (scale, amax_history, step)."""
        ...

    def peak_memory(self) -> int | None:
        """The most bytes in use on a device; None if it does not count them, as CPUs."""
        ...


@runtime_checkable
class Provable(Protocol):
    """A trainer that can prove which GEMMs of its step run in FP8."""

    def prove(self, tokens: np.ndarray) -> dict:
        """The proof of a step on this batch; ConfigError if a planned FP8 GEMM is missing."""
        ...
