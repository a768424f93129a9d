"""A user's PyTorch model as a step has it (spec T-10)."""

import copy
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fp8ref.selection.report import quiet
from fp8ref.shared.errors import ConfigError
from fp8ref.spec import llama
from fp8ref.torch.model.convert import convert
from fp8ref.train.config.config import Config
from fp8ref.train.torch.custom import probe
from fp8ref.train.torch.custom.build import build
from fp8ref.train.torch.model import Model


class CustomModel(Model):
    """A user's model on one device: its parameters are the masters, in float32."""

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, llama.Weight] | None,
        mesh: DeviceMesh | None,
        context: ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """weights: float32 by name; None: the model's own, from run.seed.

        Raises:   ConfigError: as ``build`` and ``probe.check``; weights of other names or shapes.
        """
        assert mesh is None
        assert context is None
        self._config = config
        self._name = f"architecture.source {config.architecture.source!r}"
        size, length = config.model.vocab_size, config.data.sequence_length
        model = build(config.architecture, size, seed=config.run.seed)
        if weights is not None:
            _set(model, weights)
        model.to(device)
        probe.check(model, self._name, size, length)
        self.twins = {
            recipe: self._converted(copy.deepcopy(model).to("meta"), recipe)
            for recipe in config.recipes[1:]
        }
        self.module = self._converted(model, config.numerics.recipe)

    def _converted(self, model: nn.Module, recipe: str) -> nn.Module:
        keys = self._config.numerics
        with quiet():
            return convert(
                model,
                recipe,
                filter_fqns=self._config.filter_fqns,
                fp8_fqns=keys.fp8_fqns,
                rules=keys.rules or (),
                kernels=keys.kernels,
            )

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """As ``Model.logits``. Raises:   ConfigError: logits without a gradient, in a step."""
        size = self._config.model.vocab_size
        logits = probe.logits_of(self.module(tokens), tokens, size)
        if torch.is_grad_enabled() and not logits.requires_grad:
            raise ConfigError(
                f"a step differentiates the logits; those of {self._name} have no gradient. Give a "
                "parameter requires_grad=True, and leave out torch.no_grad and detach in the "
                "forward pass."
            )
        return logits


@torch.no_grad()
def _set(model: nn.Module, weights: Mapping[str, llama.Weight]) -> None:
    """Fill a model's parameters; of tied ones any name will do, and several that agree.

    Raises:   ConfigError: other names or shapes than the model's; tied weights that differ.
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
