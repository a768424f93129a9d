"""Build a user's PyTorch model: of transformers, or what an import path makes (spec T-10)."""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

import fp8ref.torch  # noqa: F401  # before transformers, which loads torchao: its warnings are hidden there
from fp8ref.shared.errors import ConfigError
from fp8ref.torch.experts import layer as grouped_linear
from fp8ref.train.config import user_model
from fp8ref.train.config.sections import ArchitectureConfig
from fp8ref.train.config.user_model import Shapes
from fp8ref.train.torch.custom import probe


def build(keys: ArchitectureConfig, vocab_size: int, *, seed: int) -> nn.Module:
    """The model, in float32 on the CPU, with initial weights from this seed alone.

    transformers    ``source``: a config.json or its directory, for AutoModelForCausalLM.
    torch           ``source``: the import path of a callable, which takes vocab_size=.
    Raises:         ConfigError: it cannot be imported or made; a vocabulary of another size; lazy
                    modules, dropout or batch norms, which have no place in a step; grouped linears.
                    ``custom.probe.check`` finds what only a pass shows.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            if keys.kind == "transformers":
                model = _transformers(keys)
            else:
                model = user_model.imported(keys.source or "")(vocab_size=vocab_size)
        except ConfigError:
            raise
        except Exception as error:  # whatever a user's code or a configuration raises
            raise ConfigError(
                f"architecture.source {keys.source!r} cannot be made: {type(error).__name__}: "
                f"{error}"
            ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"architecture.source {keys.source!r} makes a torch.nn.Module; got "
            f"{type(model).__name__}."
        )
    _check(model, keys, vocab_size)
    return model.float().train()


def shapes(keys: ArchitectureConfig, vocab_size: int, length: int) -> Shapes:
    """As ``architecture.shapes``.

    length    tokens of the pass that shows the head where the model does not tell.
    Raises:   ConfigError: as ``build`` and ``custom.probe.heads``; a model without linears.
    """
    model = build(keys, vocab_size, seed=0)
    linears = {
        name: (m.out_features, m.in_features)
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear)
    }
    if not linears:
        raise ConfigError(
            f"architecture.source {keys.source!r} has no nn.Linear, which is what a recipe "
            "converts."
        )
    return Shapes(
        kind=f"{type(model).__module__}.{type(model).__qualname__}",
        parameters={name: tuple(p.shape) for name, p in model.named_parameters()},
        linears=linears,
        heads=_heads(model, f"architecture.source {keys.source!r}", linears, vocab_size, length),
    )


def _transformers(keys: ArchitectureConfig) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "architecture.kind 'transformers' needs transformers. Install it with: pip install "
            "transformers"
        ) from error
    content = user_model.configuration(keys)
    try:
        config = transformers.AutoConfig.for_model(**user_model.without_code(content))
    except Exception as error:  # whatever a class of transformers says of its own keys
        raise ConfigError(
            f"architecture.source {keys.source!r} is no configuration of transformers "
            f"({error}). Name a directory with config.json, or the file."
        ) from error
    config.use_cache = False
    return transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, trust_remote_code=False
    )


def _check(model: nn.Module, keys: ArchitectureConfig, vocab_size: int) -> None:
    name, own = f"architecture.source {keys.source!r}", getattr(model, "config", None)
    size = getattr(own, "vocab_size", vocab_size)
    if size != vocab_size:
        raise ConfigError(
            f"{name} has a vocabulary of {size}; model.vocab_size is {vocab_size}. Set it to "
            f"{size}."
        )
    if lazy := [key for key, p in model.named_parameters() if is_lazy(p)]:
        raise ConfigError(
            f"{name} has a lazy module ({lazy[0]}), whose shape its first forward pass decides. "
            "Give it its input's features."
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ConfigError(
                f"{name} has dropout ({path}, {module.p}), and a step has no random numbers. "
                "Set it to 0."
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"{name} has a batch norm ({path}), whose statistics are no parameters. Use "
                "another norm."
            )
    if grouped := list(grouped_linear.grouped_linears(model)):
        raise ConfigError(
            f"{name} has a GroupedLinear ({grouped[0]}), of which a config plans no recipe. Use "
            "an nn.Linear for each expert."
        )
    for key, value in vars(own).items() if own else ():
        drops = isinstance(value, float) and value > 0
        if drops and key.endswith(("dropout", "pdrop")):
            raise ConfigError(
                f"{name} has {key} = {value}, and a step has no random numbers. Set it to 0."
            )


def _heads(
    model: nn.Module, name: str, linears: dict[str, tuple[int, int]], vocab_size: int, length: int
) -> tuple[str, ...]:
    """The linears of the logits: transformers' own word, or those that a pass shows."""
    own = getattr(model, "get_output_embeddings", None)
    head = own() if callable(own) else None
    if named := tuple(
        path for path, module in model.named_modules() if module is head and path in linears
    ):
        return named
    could = [path for path, (n, _) in linears.items() if n == vocab_size]
    return probe.heads(model, name, could, vocab_size, length) if could else ()
