"""Seeds of stochastic operands (spec S-24).

    for step, batch in enumerate(batches):
        rounding.seed_(model, rounding.pass_seed(seed, step))
        loss(model(batch)).backward()

A linear keeps the seeds of its three GEMMs in a buffer, ``keys``, which a pass reads, a pass that
checkpointing runs again too. So compiled graphs take them as inputs, and no device waits.
"""

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from fp8ref.recipe import OPERANDS
from fp8ref.shared import errors
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.quantize import philox

__all__ = ["pass_seed", "seed_", "stochastic_linears"]

_PASS, _LINEAR, _GEMM = 4, 3, 2  # the streams of S-24
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile and checkpointing


def pass_seed(seed: int, step: int, microbatch: int = 0) -> int:
    """The seed of a pass of a step, both from 0 and below 2^32, of a run's seed; ValueError for
    others."""
    for name, number in (("step", step), ("microbatch", microbatch)):
        whole = isinstance(number, int | np.integer) and 0 <= number < 1 << 32
        errors.require(whole, f"a {name} is an integer in [0, 2^32); got {number!r}.")
    return _derived(seed, int(step), _PASS + int(microbatch))


def stochastic_linears(model: nn.Module) -> dict[str, Linear]:
    """The linears of a model that round stochastically, by their names when it was converted; by
    their names in the model, where its parts were converted each by itself and names are alike."""
    linears = {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): m
        for name, m in model.named_modules()
        if isinstance(m, Linear) and m.recipe.stochastic
    }
    named = {m.fqn or name: m for name, m in linears.items()}
    return named if len(named) == len(linears) else linears


@torch.inference_mode(False)  # seeds that inference mode made could not be set for training
@torch.no_grad()
def seed_(model: nn.Module, seed: int | Mapping[str, int]) -> None:
    """Seed the linears of a model that round stochastically, for its next pass.

    seed      of the pass, from which each linear's is made by its name; or {name: a linear's seed}.
    Raises:   ValueError: a seed outside [0, 2^64); a mapping that lacks a linear, or names another.
    """
    linears = stochastic_linears(model)
    if not isinstance(seed, Mapping):
        seed = {name: _derived(seed, zlib.crc32(bytes(name, "utf-8")), _LINEAR) for name in linears}
    errors.require(
        seed.keys() == linears.keys(),
        f"seeds are for {', '.join(linears) or 'no linear'}; got {', '.join(seed) or 'none'}.",
    )
    keys = [[_halves(_derived(seed[n], i, _GEMM)) for i in range(len(OPERANDS))] for n in linears]
    table = torch.tensor(keys, dtype=torch.int64, device="cpu")
    if any(linear.weight.is_cuda for linear in linears.values()):
        table = table.pin_memory()  # so that the host does not wait for the device
    for linear, words in zip(linears.values(), table, strict=True):
        if linear.keys is None:
            linear.keys = torch.empty_like(words, device=linear.weight.device)
        linear.keys.copy_(words, non_blocking=True)


def _derived(seed: int, counter: int, stream: int) -> int:
    errors.seed(seed)
    low, high, *_ = philox.words(counter, stream, _halves(seed))
    return high << 32 | low


def _halves(seed: int) -> tuple[int, int]:
    return seed & 0xFFFFFFFF, seed >> 32
