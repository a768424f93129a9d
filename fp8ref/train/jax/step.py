"""The training step in JAX (spec T): float32 masters, bfloat16 compute, AdamW.

The passes of a ``model.Model``, and what follows them: ``optimizer`` clips gradients and changes
masters and moments. Masters that a layout keeps narrower than float32 (O-14) are the state's
parameters as they are stored; each program reads weights and FP8 copies from them
(``Step.computed``).

Pure functions of the state, which ``trainer.Trainer`` compiles.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from fp8ref.jax import delayed
from fp8ref.jax.distributed import gradient_reduction
from fp8ref.jax.distributed.gradient_reduction import Factor
from fp8ref.jax.quantize.scales import Scales
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.spec import llama
from fp8ref.spec.hardware import Multiply
from fp8ref.train.config.config import Config
from fp8ref.train.jax.custom.model import CustomModel
from fp8ref.train.jax.gradient_sums import GradientSums
from fp8ref.train.jax.llama import weight_scales
from fp8ref.train.jax.llama.model import LlamaModel
from fp8ref.train.jax.mesh import Layout
from fp8ref.train.jax.model import Gradients, Inputs, Model, Read, States
from fp8ref.train.jax.optimizer import Optimizer, OptimizerState, new_if
from fp8ref.train.jax.parameter_trees import named
from fp8ref.train.run import train_state

EVERY_ROUNDING = {"xla_allow_excess_precision": False}
"""XLA's option under which it leaves out no rounding to bfloat16 between fused operations."""


def compiler_options(platform: str) -> dict[str, bool]:
    """XLA's options for the step on a platform, such as "cpu": ``EVERY_ROUNDING`` there.

    On a GPU XLA would round the scales of cuBLASLt's GEMMs under that option, and Triton's GEMMs
    would multiply dequantized operands, so both are off (spec G-22). The model's own roundings
    (M-3) hold under either (``jax.kernels.plain.rounded``).
    """
    return EVERY_ROUNDING if platform == "cpu" else {"xla_gpu_enable_triton_gemm": False}


class State(NamedTuple):
    """All that a step changes.

    params     the masters, a tree: float32 arrays, or ``MomentState`` where a layout stores.
    optimizer  the optimizer's state: both of Adam's moments, and the steps counted; no masters.
    fp8        delayed-scaling states by linear, of all recipes.
    mu         automatic factors of gradients that are exchanged in FP8, by linear (P-22).
    amaxes     of the weights in ``params``, as ``Step.amaxes`` takes them: a step makes both. None
               where no step did, as of restored weights: they are not part of a checkpoint.
    """

    params: Any
    optimizer: OptimizerState
    fp8: States
    mu: dict[str, Factor]
    amaxes: Any = None


class Step:
    """The functions of a training step. ``begin`` makes the state; batches are tokens [B, T + 1].

    A batch that is trained in parts is [microbatches, B, T + 1] (spec T-7).

    multiply  the simulated hardware that FP8 GEMMs are multiplied by (spec G-19), or None.
    recipe    the one of the config's recipes that the functions compute in, by default the first.
              All recipes have one state (T-9).
    """

    def __init__(
        self, config: Config, layout: Layout, multiply: Multiply | None, recipe: str | None = None
    ) -> None:
        self.config, self.layout = config, layout
        own = config.under(recipe or config.numerics.recipe)
        self.decisions = own.decisions()
        built = LlamaModel if config.architecture.kind == "llama" else CustomModel
        self.model: Model = built(own, layout, multiply)
        self.stacks = self.model.stacks
        self._scaled = built.scaled(own)
        # a phase in another recipe begins with the amaxes that the one before leaves
        self.weighed = {
            name: self.stacks.leading(name)
            for each in config.recipes
            for name in built.scaled(config.under(each))
        }
        self.optimizer = Optimizer(config, layout, self.stacks, self.model.params)
        self._specs = self.optimizer.parameter_specs

    def begin(
        self, weights: Mapping[str, llama.Weight] | None, others: Sequence["Step"] = ()
    ) -> tuple[State, State]:
        """The state before the first step, on the layout's devices, and each array's PartitionSpec.

        Where the layout is abstract, the state holds shapes instead of arrays.

        weights: float32 by name, by default the model's own; others: the steps in further recipes.
        """
        layout = self.layout
        weights = self.model.initial(weights)
        fp8: dict[str, Any] = {}
        for step in (self, *others):
            fp8 |= step.model.states()
        names = self.model.linears if self.config.parallel.auto_scale else ()
        mu = {
            name: Factor(
                *(np.full(self.stacks.leading(name), start, np.float32) for start in (1, 0))  # type: ignore[arg-type]
            )
            for name in names
        }
        length = sum(map(math.prod, self.weighed.values()))
        amaxes = jax.ShapeDtypeStruct((length,), np.float32) if self.weighed else None
        specs = State(*self.optimizer.specs, *jax.tree.map(lambda _: P(), (fp8, mu, amaxes)))
        if layout.abstract:
            shapes = State(*self.optimizer.shapes(), fp8, mu, amaxes)
            return jax.tree.map(layout.put, shapes, specs), specs
        # One after the other: a host holds its shards of one weight
        placed = (
            (name, layout.put(value, layout.parameter(name, value.shape)))
            for name, value in weights.items()
        )
        return State(
            *self.optimizer.begin(placed),
            *jax.tree.map(layout.put, (fp8, mu), (specs.fp8, specs.mu)),
        ), specs

    def train(
        self, state: State, tokens: jax.Array, lr: jax.Array, step: jax.Array | None = None
    ) -> tuple[State, jax.Array, jax.Array]:
        """One step at this learning rate: the new state, the loss, and the norm of the gradients.

        step: as of ``Inputs``. Where loss or norm is not finite, the state is the old one (T-4).
        """
        loss, grads, seen, saturated = self.gradients(
            state.params, Read(state.fp8, step), tokens, state.mu, state.amaxes
        )
        params, optimizer, norm, finite = self.optimizer.update(
            state.params, state.optimizer, grads, loss, lr
        )
        # States of a recipe that this step does not use stay as they are (T-9).
        fp8 = {**state.fp8} | {
            name: delayed.update(state.fp8[name], amaxes, recipe=self.model.keepers[name])
            for name, amaxes in seen.items()
        }
        mu = {name: self._tuned(name, factor, saturated[name]) for name, factor in state.mu.items()}
        fp8, mu = new_if(finite, (fp8, mu), (state.fp8, state.mu))
        return State(params, optimizer, fp8, mu, self.amaxes(params)), loss, norm

    def amaxes(self, params) -> jax.Array | None:
        """Of ``State.params``, those that the next pass scales weights by: of linears of all
        recipes, ``weighed``, one after the other (P-9)."""
        if not self.weighed:
            return None

        def of(weights) -> jax.Array:
            arrays = named(weights)
            return weight_scales.amaxes({name: arrays[f"{name}.weight"] for name in self.weighed})

        return self.layout.map(of, (self._specs,), P())(self.optimizer.weights(params))

    def _tuned(self, name: str, factor: Factor, saturated: jax.Array) -> Factor:
        """The factor of a linear for the next step (P-22); of a stack each layer's."""
        auto = self.config.parallel.auto_scale
        assert auto is not None
        elements = math.prod(self.config.shapes.linears[name.replace("*", "0")])
        return Factor(gradient_reduction.next_mu(factor.mu, saturated, elements, auto), saturated)

    def tensors(self, state: State) -> dict[str, Any]:
        """The arrays of a state by the names of ``train_state``, nested."""
        tensors = self.optimizer.tensors(state.params, state.optimizer)
        if state.fp8:
            tensors[train_state.FP8] = {
                name: {role: entry._asdict() for role, entry in roles.items()}
                for name, roles in self.stacks.apart(state.fp8).items()
            }
        if state.mu:
            tensors[train_state.MU] = {
                f"{name}.weight": factor.mu for name, factor in self.stacks.apart(state.mu).items()
            }
        return tensors

    def restored(self, state: State, tensors: dict[str, Any]) -> State:
        """A state of the structure of this one, of arrays named as ``tensors`` names them."""
        saved = tensors.get(train_state.FP8, {})
        fp8 = {
            name: {
                role: type(entry)(
                    **self.stacks.together(
                        name, {n: v[role] for n, v in saved.items() if role in v}
                    )
                )
                for role, entry in roles.items()
            }
            for name, roles in state.fp8.items()
        }
        self.model.check_states(fp8)
        saved = tensors.get(train_state.MU, {})
        mu = {
            name: Factor(
                self.stacks.together(f"{name}.weight", saved),
                jax.tree.map(jnp.zeros_like, factor.saturated),
            )
            for name, factor in state.mu.items()
        }
        return State(*self.optimizer.restored(state.params, state.optimizer, tensors), fp8, mu)

    def computed(
        self, params, read: Read, factors: Mapping[str, Factor], amaxes: jax.Array | None = None
    ) -> tuple[Any, Inputs]:
        """What passes compute with, of ``State.params``: weights, and what is prepared of them, FP8
        copies or scales; with what is read and mu. Without their amaxes these are taken here."""
        weights = self.optimizer.weights(params)
        prepared: dict[str, Any] = {**self.optimizer.copies(params, self.model.copied)}
        amaxes = self.amaxes(params) if amaxes is None else amaxes
        if amaxes is not None:
            prepared |= weight_scales.of(amaxes, self.weighed, self._scaled)
        mu = {name: factor.mu for name, factor in factors.items()}
        return weights, Inputs(prepared, mu, *read)

    def gradients(
        self,
        params,
        read: Read,
        tokens: jax.Array,
        factors: Mapping[str, Factor],
        amaxes: jax.Array | None = None,
    ) -> Gradients:
        """Those of a batch, or of its parts, and what both passes show."""
        f = self._accumulate if tokens.ndim == 3 else self.model.differentiate
        out = Gradients(P(), self._specs, P(), P())  # type: ignore[arg-type]  # specs in place of arrays
        return self._mapped(f, out, tokens, self.computed(params, read, factors, amaxes))

    def _accumulate(self, weights, inputs: Inputs, parts: jax.Array) -> Gradients:
        sums = GradientSums(
            self.config.parallel.accumulate_dtype,
            self.model.linears,
            self._specs if self.layout.mapped else None,
        )

        def add(before: Gradients, each: tuple) -> tuple[Gradients, None]:
            tokens, number = each
            part = self.model.differentiate(weights, inputs._replace(part=number), tokens)
            seen, saturated = before.seen, before.saturated
            return Gradients(
                before.loss + part.loss,
                sums.add(before.grads, part.grads),
                {name: delayed.merge(seen[name], part.seen[name]) for name in seen},
                {name: count + part.saturated[name] for name, count in saturated.items()},
            ), None

        # A scan keeps one microbatch's activations at a time, and compiles the passes once.
        none = jax.tree.map(jnp.zeros_like, inputs.mu)
        begin = Gradients(jnp.float32(0), sums.zeros(weights), self.model.unseen(), none)
        numbers = None if inputs.step is None else jnp.arange(len(parts), dtype=jnp.uint32)
        total, _ = lax.scan(add, begin, (parts, numbers))
        share = np.float32(1 / len(parts))
        loss = total.loss.astype(jnp.float32) * share
        return total._replace(loss=loss, grads=sums.scaled(total.grads, share))

    def mean_loss(self, params, read: Read, tokens: jax.Array) -> jax.Array:
        """The loss of a batch, or of its parts."""

        def loss(weights, inputs, tokens):
            of = functools.partial(self.model.loss, weights, inputs)
            return lax.map(of, tokens).mean() if tokens.ndim == 3 else of(tokens)

        return self._mapped(loss, P(), tokens, self.computed(params, read, {}))

    def statistics(self, params, read: Read, tokens: jax.Array) -> dict[str, jax.Array]:
        """Statistics of "linears" float32 [devices, layers, 6, stats.LENGTH], and of "attention"
        [devices, layers, len(attention_products.RECORDED), stats.LENGTH], where either is in FP8;
        of a model that measures in its program.

        Each device measures its own shards of the operands.

        Without shard_map there is one row, of the whole operands.
        """
        assert self.model.measure is not None
        computed = self.computed(params, read, {})
        return self._mapped(self.model.measure, P(self.layout.axes), tokens, computed)

    def forward(self, f: Callable, params, read: Read, tokens: jax.Array) -> jax.Array:
        """f of the model, such as its logits, of tokens [B, T]: float32 [B, T, ...], inside
        shard_map if the layout is mapped."""
        computed = self.computed(params, read, {})
        return self._mapped(f, self.layout.logits, tokens, computed)

    def _mapped(self, f: Callable, out_specs, tokens: jax.Array, computed) -> Any:
        """f(weights, inputs, tokens) on a device's shards, if the layout is mapped."""
        weights, inputs = computed
        specs = named(self._specs)

        def prepared(name: str, value: Quantized | Scales) -> Quantized | Scales:
            """Codes lie on the mesh as their weight does, scales are whole (O-16)."""
            if isinstance(value, Scales):
                return Scales(P(), P())  # type: ignore[arg-type]  # specs in place of arrays
            codes = specs[f"{name}.weight"]
            return dataclasses.replace(value, codes=codes, scale=P(), scale_inv=P())  # type: ignore[arg-type]

        kept = {n: prepared(n, v) for n, v in inputs.prepared.items()}
        whole = Inputs(kept, P(), P(), P(), P())  # type: ignore[arg-type]
        cut = self.layout.parts if tokens.ndim == 3 else self.layout.tokens
        return self.layout.map(f, (self._specs, whole, cut), out_specs)(weights, inputs, tokens)
