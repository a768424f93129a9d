"""Build a user's PyTorch model: a causal model of transformers, or what an import path makes (spec T-10)."""

import copy
import json
from pathlib import Path

import torch
from torch import nn

import fp8ref.torch  # noqa: F401  # before transformers, which loads torchao: its warnings are hidden there
from fp8ref.errors import ConfigError
from fp8ref.train import architecture
from fp8ref.train.architecture import Shapes
from fp8ref.train.sections import ArchitectureConfig


def build(keys: ArchitectureConfig, vocab_size: int, *, seed: int) -> nn.Module:
    """The model, in float32 on the CPU, with its own initial weights from this seed; no state of torch's generators changes.

    transformers    ``source`` is a directory with config.json, or the file; the class is AutoModelForCausalLM's.
    torch           ``source`` is an import path of a function or class; it is called with vocab_size=.
    Raises:         ConfigError: it cannot be imported or made; a vocabulary of another size; dropout, batch norms or
                    buffers that training changes, which have no place in a step.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            made = _transformers(keys) if keys.kind == "transformers" else architecture.imported(keys.source or "")(vocab_size=vocab_size)
        except ConfigError:
            raise
        except Exception as error:  # whatever a user's code or a configuration raises
            raise ConfigError(f"architecture.source {keys.source!r} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"architecture.source {keys.source!r} makes a torch.nn.Module; got {type(made).__name__}.")
    _check(made, keys, vocab_size)
    return made.float().train()


def shapes(keys: ArchitectureConfig, vocab_size: int) -> Shapes:
    """As ``architecture.shapes``.

    Raises:   ConfigError: as ``build``; a model without linears.
    """
    model = build(keys, vocab_size, seed=0)
    linears = {name: (m.out_features, m.in_features) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if not linears:
        raise ConfigError(f"architecture.source {keys.source!r} has no nn.Linear, which is what a recipe converts.")
    return Shapes(
        kind=f"{type(model).__module__}.{type(model).__qualname__}",
        parameters={name: tuple(p.shape) for name, p in model.named_parameters()},
        linears=linears,
        heads=_heads(model, linears, vocab_size),
    )


def on_meta(model: nn.Module) -> nn.Module:
    """A copy without memory."""
    return copy.deepcopy(model).to("meta")


def logits_of(out, tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The logits [B, T, V] of what a model returned: a tensor, or an object that has ``logits``.

    Raises:   ConfigError: neither, or of another shape.
    """
    logits = out if isinstance(out, torch.Tensor) else getattr(out, "logits", None)
    if not isinstance(logits, torch.Tensor) or logits.shape != (*tokens.shape, vocab_size):
        got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(out).__name__
        raise ConfigError(
            f"a model returns logits [B, T, V] = {(*tuple(tokens.shape), vocab_size)} of tokens [B, T], or an object with logits; got {got}."
        )
    return logits


def _transformers(keys: ArchitectureConfig) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("architecture.kind 'transformers' needs transformers. Install it with: pip install transformers") from error
    path = Path(keys.source or "")
    file = path / "config.json" if path.is_dir() else path
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        config = transformers.AutoConfig.for_model(**given)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"architecture.source {keys.source!r} is no configuration of transformers ({error}). Name a directory with config.json, or the file."
        ) from error
    config.use_cache = False
    return transformers.AutoModelForCausalLM.from_config(config)


def _check(model: nn.Module, keys: ArchitectureConfig, vocab_size: int) -> None:
    name, own = f"architecture.source {keys.source!r}", getattr(model, "config", None)
    size = getattr(own, "vocab_size", vocab_size)
    if size != vocab_size:
        raise ConfigError(f"{name} has a vocabulary of {size}; model.vocab_size is {vocab_size}. Set it to {size}.")
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ConfigError(f"{name} has dropout ({path}, {module.p}), and a step has no random numbers. Set it to 0.")
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(f"{name} has a batch norm ({path}), whose statistics are no parameters. Use another norm.")
    rates = (
        {key: value for key, value in vars(own).items() if key.endswith(("dropout", "pdrop")) and isinstance(value, float)} if own else {}
    )
    if random := [key for key, value in rates.items() if value > 0]:
        raise ConfigError(f"{name} has {random[0]} = {rates[random[0]]}, and a step has no random numbers. Set it to 0.")


def _heads(model: nn.Module, linears: dict[str, tuple[int, int]], vocab_size: int) -> tuple[str, ...]:
    """The linear that makes the logits: transformers' own word, or the last of as many outputs as the vocabulary."""
    own = getattr(model, "get_output_embeddings", None)
    head = own() if callable(own) else None
    named = [name for name, module in model.named_modules() if module is head and name in linears]
    return tuple(named or [name for name, (n, _) in linears.items() if n == vocab_size][-1:])
