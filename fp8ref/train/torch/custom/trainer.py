"""Train a user's PyTorch model by the step and the trainer of the trainer's own (spec T-10)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from fp8ref.shared.errors import ConfigError
from fp8ref.spec import llama
from fp8ref.spec.hardware import Multiply
from fp8ref.torch.model.convert import convert
from fp8ref.torch.model.switch import Switch
from fp8ref.train.config.config import Config
from fp8ref.train.torch import optimizer
from fp8ref.train.torch import trainer as trainers
from fp8ref.train.torch.checkpoint import Store
from fp8ref.train.torch.custom import model as custom_model
from fp8ref.train.torch.custom import probe
from fp8ref.train.torch.llama.cross_entropy import cross_entropy
from fp8ref.train.torch.step import Step


class CustomStep(Step):
    """``Step`` of a user's model, on one device: masters are its parameters, in float32.

    In a pass every parameter is rounded to bfloat16, tied ones once; buffers stay as they are.
    """

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, llama.Weight] | None,
        device: torch.device,
        multiply: Multiply | None,
    ) -> None:
        self.config, self.mesh, self.device, self.multiply = config, None, device, multiply
        self._keeps_masters, self.copies, self.factors, self._casts_anew = False, None, None, False
        self.context, self._norm = None, optimizer.GradientNorm(None, 1)
        model = custom_model.build(
            config.architecture, config.model.vocab_size, seed=config.run.seed
        )
        if weights is not None:
            _set(model, weights)
        model.to(device)
        probe.check(
            model,
            f"architecture.source {config.architecture.source!r}",
            config.model.vocab_size,
            config.data.sequence_length,
        )
        twins = {recipe: custom_model.on_meta(model) for recipe in config.recipes[1:]}
        self.model = self._converted(model, config.numerics.recipe, config)
        self.params = dict(self.model.named_parameters())
        self.optimizer = optimizer.build(self.params.values(), config.optimizer)
        self.switch = Switch(
            self.model,
            config.numerics.recipe,
            {name: self._converted(twin, name, config) for name, twin in twins.items()},
        )

    def _converted(self, model: nn.Module, recipe: str, config: Config) -> nn.Module:
        keys = config.numerics
        return convert(
            model,
            recipe,
            filter_fqns=config.filter_fqns,
            fp8_fqns=keys.fp8_fqns,
            rules=keys.rules or (),
        )

    def loss(self, tokens: np.ndarray) -> torch.Tensor:
        """The mean loss of tokens [B, T + 1], in nats: a float32 scalar.

        Raises:   ConfigError: logits without a gradient, in a step.
        """
        batch = self.tokens(tokens)
        logits = self.logits(batch[:, :-1])  # [B, T, V]
        if torch.is_grad_enabled() and not logits.requires_grad:
            raise ConfigError(
                "a step differentiates the logits; those of architecture.source "
                f"{self.config.architecture.source!r} have no gradient. Give a parameter "
                "requires_grad=True, and leave out torch.no_grad and detach in the forward pass."
            )
        return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).mean()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, T, V] of tokens [B, T]."""
        return probe.logits_of(self.model(tokens), tokens, self.config.model.vocab_size)

    @contextmanager
    def _rounded(self) -> Iterator[None]:
        """In this context modules hold parameters rounded to bfloat16, whose gradients reach the
        masters.
        """
        modules = [module for _, module in self.model.named_modules()]
        places = [
            (module, key, p)
            for module in modules
            for key, p in module._parameters.items()
            if p is not None
        ]
        rounded = {id(p): p.to(torch.bfloat16) for _, _, p in places}
        try:
            for module, key, p in places:
                module._parameters[key] = rounded[id(p)]
            yield
        finally:
            for module, key, p in places:
                module._parameters[key] = p


class Trainer(trainers.Trainer):
    """One user's model being trained: as ``trainer.Trainer``."""

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, llama.Weight] | None = None,
        *,
        multiply: Multiply | None = None,
    ) -> None:
        """weights: float32 by name; None: the model's own initial weights, from run.seed.

        Raises:   ConfigError: as ``custom.model.build`` and ``custom.probe.check``; weights of
                  other names or shapes; numerics.accumulate with a GPU.
        """
        self.config = config
        config.numerics.check_multiply(multiply)
        if multiply is not None and torch.cuda.is_available():
            raise ConfigError(
                "numerics.accumulate multiplies on the host's CPU, and torch has a GPU. Hide it "
                "with CUDA_VISIBLE_DEVICES=."
            )
        self.recipe, self.decisions = config.numerics.recipe, config.decisions()
        self._device = (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
        self._step: CustomStep = CustomStep(config, weights, self._device, multiply)
        self.model, self._params, self._optimizer = (
            self._step.model,
            self._step.params,
            self._step.optimizer,
        )
        self._count, self._store = 0, Store()
        self.device = (
            f"cuda: {torch.cuda.get_device_name()}" if self._device.type == "cuda" else "cpu"
        )

    @torch.no_grad()
    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [B, T, vocab_size] from tokens [B, T]."""
        with self._step.computing():
            return self._step.logits(self._step.tokens(tokens)).float().cpu().numpy()


@torch.no_grad()
def _set(model: nn.Module, weights: Mapping[str, llama.Weight]) -> None:
    """Fill a model's parameters; of tied ones any name will do, and several that agree.

    Raises:   ConfigError: names or shapes that are not the model's; weights of tied names that
              differ.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    named = {
        parameter: [name for name in tied if name in weights] for parameter, tied in names.items()
    }
    missing = sorted(names[parameter][0] for parameter, present in named.items() if not present)
    unknown = sorted(weights.keys() - {name for tied in names.values() for name in tied})
    if missing or unknown:
        raise ConfigError(
            f"weights are named as the model's parameters; missing {missing[:3]}, unknown "
            f"{unknown[:3]}."
        )
    for parameter, present in named.items():
        for name in present:
            if tuple(weights[name].shape) != tuple(parameter.shape):
                raise ConfigError(
                    f"{name} is {list(parameter.shape)}; the weights have "
                    f"{list(weights[name].shape)}."
                )
        first, *others = (np.array(weights[name][...], np.float32) for name in present)
        for name, other in zip(present[1:], others, strict=True):
            if not np.array_equal(first, other, equal_nan=True):
                raise ConfigError(
                    f"{present[0]} and {name} are one parameter of the model; their weights "
                    "differ. Leave one of them out."
                )
        parameter.copy_(torch.from_numpy(first))
