"""What the JAX step asks of a model: ``llama/model.py``, or a user's, ``custom/model.py``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fp8ref.jax import delayed
from fp8ref.jax.linear import rounding
from fp8ref.jax.quantize.scales import Scales
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.recipe import Recipe, Role
from fp8ref.spec import llama
from fp8ref.spec.attention.delayed import Casts
from fp8ref.train.config.config import Config
from fp8ref.train.jax.parameter_trees import LayerStacks

States = Mapping[str, Mapping[Role, delayed.DelayedState | delayed.FlaxState]]
"""States of delayed scaling by linear or attention, then by role."""


class Inputs(NamedTuple):
    """What a pass reads beside weights and tokens, each by linear.

    prepared   of weights: FP8 copies to multiply (O-16), or scales in place of amaxes (P-9).
    mu         factors by which gradients of weights are exchanged in FP8 (P-22).
    states     of delayed scaling.
    step       uint32 (): the step, from 0, where linears round stochastically (S-24), else None.
    part       uint32 (): the microbatch, from 0; None: the first.
    """

    prepared: Mapping[str, Quantized | Scales]
    mu: Mapping[str, jax.Array]
    states: States
    step: jax.Array | None = None
    part: jax.Array | None = None

    def seed(self, run_seed: int) -> jax.Array | None:
        """The seed of a pass, uint32 [2], of the run's; None where nothing rounds by one."""
        if self.step is None:
            return None
        return rounding.pass_seed(run_seed, self.step, 0 if self.part is None else self.part)


class Read(NamedTuple):
    """What a pass reads of a run beside weights: these fields of ``Inputs``."""

    states: States
    step: jax.Array | None = None
    part: jax.Array | None = None


class Gradients(NamedTuple):
    """What a forward and a backward pass give.

    loss       mean of the whole batch, float32 ().
    grads      float32, of the structure of the parameters.
    seen       amax observations of both passes, by linear.
    saturated  elements that casts of gradients saturated, by the linears of ``Inputs.mu``.
    """

    loss: jax.Array
    grads: Any
    seen: Mapping[str, delayed.Seen]
    saturated: Mapping[str, jax.Array]


class Model(ABC):
    """One model in one recipe, by pure functions; inside shard_map they take a device's shards.

    params     the shapes of its parameters, a tree or {name: shape}.
    stacks     takes stacks of layers apart, if the parameters have some.
    linears    the recipe of each linear of the program, by name.
    keepers    what has a delayed state, by name: recipes of linears, casts of attention.

    What a model may offer beside them:

    copied     recipes of linears whose weights the optimizer gives a pass in FP8 (O-16).
    attention  names of attention in FP8, as the program has them.
    measure    (weights, inputs, tokens) -> statistics of "linears" and "attention", as
               ``Step.statistics`` returns them; None: they are measured on the host.
    """

    params: Any
    stacks: LayerStacks
    linears: Mapping[str, Recipe]
    keepers: Mapping[str, Recipe | Casts]
    copied: Mapping[str, Recipe] = {}
    attention: Sequence[str] = ()
    measure: Callable[[Any, Inputs, jax.Array], dict[str, jax.Array]] | None = None

    @abstractmethod
    def initial(self, weights: Mapping[str, llama.Weight] | None) -> Mapping[str, llama.Weight]:
        """The weights that training begins with, float32 by name, which have the model's names and
        shapes; None: the model's own, from run.seed."""

    @abstractmethod
    def states(self) -> dict[str, Any]:
        """``States`` before the first step."""

    @abstractmethod
    def unseen(self) -> dict[str, delayed.Seen]:
        """Empty observations of each state."""

    def check_states(self, states: States) -> None:  # noqa: B027  # a model may refuse none
        """ConfigError for states that no run has."""

    @staticmethod
    def scaled(config: Config) -> Mapping[str, Recipe]:
        """Linears whose weights have one scale a step, made of amaxes that the step before hands on
        (P-9), and their recipes; config: in one recipe."""
        return {}

    @abstractmethod
    def differentiate(self, weights, inputs: Inputs, tokens: jax.Array) -> Gradients:
        """Both passes of tokens [B, T + 1]."""

    @abstractmethod
    def loss(self, weights, inputs: Inputs, tokens: jax.Array) -> jax.Array:
        """The mean loss of tokens [B, T + 1], without what a step adds to it."""

    @abstractmethod
    def logits(self, weights, inputs: Inputs, tokens: jax.Array) -> jax.Array:
        """float32 [B, T, V] of tokens [B, T]."""
