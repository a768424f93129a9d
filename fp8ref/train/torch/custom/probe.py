"""One forward pass of a user's PyTorch model: its logits' linears, and what a step loses (T-10)."""

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8ref.shared.errors import ConfigError

_PRODUCTS = (
    *("Addmm", "Mm", "Bmm", "Baddbmm", "Mv", "Dot", "Linear", "MkldnnLinear"),
    *("Convolution", "ScaledDotProduct", "Embedding"),
)
"""How autograd's nodes of products begin, and those of look-ups."""


def check(model: nn.Module, name: str, vocab_size: int, length: int) -> None:
    """Compute tokens [1, length] as a step, forward alone; generators and buffers are restored.

    name      of the model, for messages.
    Raises:   ConfigError: the pass fails or gives other logits; it draws random numbers, of torch,
              a torch.Generator of its own, NumPy or Python; it changes a buffer or a parameter.
    """
    masters, held = dict(model.named_parameters()), dict(model.named_buffers())
    buffers = {key: value.clone() for key, value in held.items()}
    rounded, device = _rounded(model), next(iter(masters.values())).device
    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002  # what a model may draw from
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        before, private = _generators(device), _OwnGenerators()
        try:
            with private:
                _logits(model, rounded, name, vocab_size, length)
            drawable = np.random.get_state()  # noqa: NPY002  # what a model may draw from
            same = [np.array_equal(a, b) for a, b in zip(drawable, numpy_state, strict=True)]
            pairs = zip(before, _generators(device), strict=True)
            same += [torch.equal(a, b) for a, b in pairs]
            drawn = private.drawn or not all(same) or random.getstate() != python
            # with those that the pass made, such as tables of positions
            now = dict(model.named_buffers())
            changed = [
                key
                for key, value in buffers.items()
                if key not in now or not _equal(now[key], value)
            ]
            changed += [
                key
                for key, value in rounded.items()
                if not _equal(value, masters[key].to(value.dtype))
            ]
        finally:
            private.restore()
            random.setstate(python)
            np.random.set_state(numpy_state)  # noqa: NPY002  # what a model may draw from
            for key, value in buffers.items():
                module, _, own = key.rpartition(".")
                model.get_submodule(module)._buffers[own] = held[key]
                if not _equal(held[key], value):
                    held[key].copy_(value)
    if drawn:
        raise ConfigError(
            f"{name} draws random numbers in its forward pass, and a step has none. Set its "
            "dropout, jitter or noise to 0."
        )
    if changed:
        raise ConfigError(
            f"{name} changes {', '.join(changed[:3])} in its forward pass, which a checkpoint "
            "would not have. Compute it anew in each pass, or leave it as it is."
        )


def heads(
    model: nn.Module, name: str, candidates: Sequence[str], vocab_size: int, length: int
) -> tuple[str, ...]:
    """Those linears that make the logits: no other product is between their outputs and the logits.

    The graph of a forward pass of tokens [1, length] says which.
    Raises:   ConfigError: the pass fails or gives other logits.
    """
    paths: dict = {}
    with ExitStack() as hooks, torch.random.fork_rng(devices=[]), torch.enable_grad():
        for path in candidates:
            hook = model.get_submodule(path).register_forward_hook(
                lambda module, inputs, out, path=path: paths.update({out.grad_fn: path})
            )
            hooks.callback(hook.remove)
        out = _logits(model, _rounded(model), name, vocab_size, length)
    reached, seen, nodes = [], set(), [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in paths:
            reached.append(paths[node])
        elif not node.name().startswith(_PRODUCTS):
            nodes += [before for before, _ in node.next_functions]
    return tuple(path for path in candidates if path in reached)


def logits_of(out, tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The logits [B, T, V] of what a model returned: a tensor, or an object that has ``logits``.

    Raises:   ConfigError: neither, or of another shape.
    """
    logits = out if isinstance(out, torch.Tensor) else getattr(out, "logits", None)
    shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else None
    if shape != (*tokens.shape, vocab_size):
        got = type(out).__name__ if shape is None else shape
        raise ConfigError(
            f"a model returns logits [B, T, V] = {(*tuple(tokens.shape), vocab_size)} of tokens "
            f"[B, T], or an object with logits; got {got}."
        )
    assert isinstance(logits, torch.Tensor)
    return logits


def _rounded(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        key: p.detach().to(torch.bfloat16).requires_grad_() for key, p in model.named_parameters()
    }


def _logits(
    model: nn.Module, rounded: Mapping[str, torch.Tensor], name: str, vocab_size: int, length: int
) -> torch.Tensor:
    device = next(iter(rounded.values())).device
    tokens = (torch.arange(length, device=device) % vocab_size)[None]
    try:
        out = torch.func.functional_call(model, dict(rounded), (tokens,), tie_weights=True)
    except Exception as error:  # whatever a user's code raises
        why = "It takes tokens [B, T], int64."
        if "dtype" in str(error) or "scalar type" in str(error):
            why = (
                "Parameters are bfloat16 in a pass, and buffers stay as they are: cast those where "
                "they meet activations, by .to(x.dtype)."
            )
        raise ConfigError(
            f"{name} fails on tokens {list(tokens.shape)}: {type(error).__name__}: {error}. {why}"
        ) from error
    return logits_of(out, tokens, vocab_size)


class _OwnGenerators(TorchDispatchMode):
    """Sees every torch.Generator that an operator is given; some do not draw from it."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[torch.Generator, torch.Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for x in (*args, *(kwargs or {}).values()):
            if isinstance(x, torch.Generator):
                self._before.setdefault(x, x.get_state())
        return func(*args, **(kwargs or {}))

    @property
    def drawn(self) -> bool:
        """Whether one of them is not in its first state."""
        return any(not torch.equal(x.get_state(), state) for x, state in self._before.items())

    def restore(self) -> None:
        """Put all of them into their first states."""
        for x, state in self._before.items():
            x.set_state(state)


def _generators(device: torch.device) -> list[torch.Tensor]:
    on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_gpu]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same values, NaN being one."""
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and bool(((a == b) | ((a != a) & (b != b))).all())
