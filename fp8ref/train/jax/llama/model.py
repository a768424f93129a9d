"""The trainer's Llama in one recipe, as a step has it (spec M, T): scanned layers, a loss in parts,
experts, attention in FP8, on one device or a mesh."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fp8ref.jax import delayed
from fp8ref.jax.kernels import choice as kernel_choice
from fp8ref.jax.linear import rounding
from fp8ref.jax.quantize import stats
from fp8ref.recipe import Recipe
from fp8ref.spec import llama
from fp8ref.spec.attention.products import RECORDED
from fp8ref.spec.hardware import Multiply
from fp8ref.train.config import device_shapes
from fp8ref.train.config.config import Config
from fp8ref.train.jax.llama import chunked_loss, shared_inputs
from fp8ref.train.jax.llama.cross_entropy import cross_entropy
from fp8ref.train.jax.llama.experts import balancing_loss
from fp8ref.train.jax.llama.forward_pass import Carried, Pass
from fp8ref.train.jax.llama.llama import Llama
from fp8ref.train.jax.mesh import Layout
from fp8ref.train.jax.model import Gradients, Inputs, Model
from fp8ref.train.jax.parameter_trees import LayerStacks, name_of


class LlamaModel(Model):
    """``Llama`` under a layout.

    measured   the linears, and layers' attention, in FP8, in the order of the statistics.
    """

    def __init__(self, config: Config, layout: Layout, multiply: Multiply | None) -> None:
        """config: in one recipe, ``config.under`` that of a phase."""
        self._config, self._layout = config, layout
        self.stacks = LayerStacks(config.model.num_hidden_layers, layout)
        self.linears = config.program_linears()
        self._graph, self.params = jax.eval_shape(self._split, self._shapes())
        in_program = llama.stack_of if config.parallel.scan else str
        attention_casts = config.attention_casts.items()
        self.keepers = {
            **self.linears,
            **{in_program(path): casts for path, casts in attention_casts},
        }
        self._first_readers = shared_inputs.first_readers(self.linears)
        copied = device_shapes.copied(config, "jax")
        self.copied = {in_program(path): recipe for path, recipe in copied.items()}
        self.attention = list(dict.fromkeys(map(in_program, config.attention_in_fp8)))
        self.measured = {
            "linears": [d.path for d in config.decisions() if d.fp8],
            "attention": config.attention_in_fp8,
        }
        operands = {layer: config.attention_operands(layer) for layer in config.attention_layers}
        self._run = Pass(
            layout=layout,
            attention=config.parallel.attention,
            variant=config.attention_variant,
            arithmetic=config.numerics.attention_arithmetic,
            checkpointing=config.parallel.checkpointing,
            multiply=multiply,
            products=config.numerics.products,
            kernels=kernel_choice.kernels(
                layout.kernels(config.numerics.kernels), layout.own_device
            ),
            casts={layer: casts for layer, casts in operands.items() if casts is not None},
        )

    def initial(self, weights: Mapping[str, llama.Weight] | None) -> Mapping[str, llama.Weight]:
        """As ``Model.initial``, by default ``llama.lazy_initial_weights``."""
        model = self._config.model
        if weights is None:
            weights = llama.lazy_initial_weights(model, seed=self._config.run.seed)
        llama.check_weights(weights, model)
        return weights

    def states(self) -> dict[str, Any]:
        """As ``Model.states``."""
        return {
            name: delayed.init(casts, self.stacks.leading(name))
            for name, casts in self.keepers.items()
            if delayed.keeps_state(casts)
        }

    def unseen(self) -> dict[str, delayed.Seen]:
        """As ``Model.unseen``."""
        return {
            name: delayed.unseen(casts, self.stacks.leading(name))
            for name, casts in self.keepers.items()
            if delayed.keeps_state(casts)
        }

    def check_states(self, states: Mapping[str, delayed.State]) -> None:
        """As ``Model.check_states``: linears that read one tensor have one state of it."""
        shared_inputs.check(states, self._first_readers)

    @staticmethod
    def scaled(config: Config) -> dict[str, Recipe]:
        """As ``Model.scaled``."""
        in_program = llama.stack_of if config.parallel.scan else str
        scaled = device_shapes.scaled_first(config)
        return {in_program(path): recipe for path, recipe in scaled.items()}

    def differentiate(self, weights, inputs: Inputs, tokens: jax.Array) -> Gradients:
        """As ``Model.differentiate``; seen is of this device's passes."""
        # Forward observations come out as aux. grad_output is known in the backward pass alone: its
        # observations come out as the gradient by ``seen`` (fp8ref.jax.delayed), and saturated
        # elements as that by ``mu`` (fp8ref.jax.linear).
        gradient = jax.value_and_grad(self._observed_loss, argnums=(0, 1, 2), has_aux=True)
        # The model rounds what is widened here, exactly, so that gradients are float32 (M-2).
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), weights)
        (loss, forward), (grads, backward, saturated) = gradient(
            wide, self.unseen(), inputs.mu, inputs, tokens
        )
        seen = {name: delayed.merge(forward[name], backward[name]) for name in forward}
        return Gradients(loss, grads, seen, saturated)

    def loss(self, weights, inputs: Inputs, tokens: jax.Array) -> jax.Array:
        """As ``Model.loss``."""
        return self._loss_in(self._pass(inputs, self.unseen()), weights, tokens, trains=False)

    def logits(self, weights, inputs: Inputs, tokens: jax.Array) -> jax.Array:
        """As ``Model.logits``, of a device's part of the tokens."""
        return self._forward(Llama.__call__, weights, inputs, tokens)

    def first_input(self, weights, inputs: Inputs, tokens: jax.Array) -> jax.Array:
        """float32 [B, T, hidden]: the input of the first layer's linears, after its norm."""
        return self._forward(Llama.first_input, weights, inputs, tokens)

    def measure(self, weights, inputs: Inputs, tokens: jax.Array) -> dict[str, jax.Array]:
        """As ``Model.measure``."""
        rows = {name: len(stats.ROWS) for name, recipe in self.linears.items() if recipe.fp8}
        rows |= dict.fromkeys(self.attention, len(RECORDED))
        taps = {
            name: self._layout.apart(jnp.zeros((*self.stacks.leading(name), count, stats.LENGTH)))
            for name, count in rows.items()
        }

        def loss(taps, weights, inputs, tokens):
            run = self._pass(inputs, self.unseen(), taps)
            return self._loss_in(run, weights, tokens), run.taps

        # taps collect as the observations do: forward as aux, backward as a gradient
        (_, forward), backward = jax.value_and_grad(loss, has_aux=True)(
            taps, weights, inputs, tokens
        )
        collected = self.stacks.apart({name: forward[name] + backward[name] for name in taps})
        return {
            key: jnp.stack([collected[layer] for layer in layers])[None]
            for key, layers in self.measured.items()
            if layers
        }

    def _split(self, weights: dict) -> tuple[Any, dict]:
        """The model's graph and its parameters, a tree."""
        graph, params = nnx.split(Llama(self._config.model, weights, self.linears), nnx.Param)
        return graph, nnx.to_pure_dict(params)

    def _shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Every parameter of the tree; of the layers together under parallel.scan."""
        shapes = llama.parameter_shapes(self._config.model)
        if self._config.parallel.scan:
            shapes = {
                stack: (*self.stacks.leading(stack), *shape)
                for name, shape in shapes.items()
                if (stack := llama.stack_of(name))
            }
        shaped = functools.partial(jax.ShapeDtypeStruct, dtype=np.float32)
        return {name: shaped(shape) for name, shape in shapes.items()}

    def _pass(
        self, inputs: Inputs, seen: Mapping[str, delayed.Seen], taps: dict | None = None
    ) -> Pass:
        states = {name: inputs.states[name] for name in seen}
        states = shared_inputs.states(states, self._first_readers)
        seeds: dict[str, jax.Array] = {}
        if (pass_seed := inputs.seed(self._config.run.seed)) is not None:
            rounded = [name for name, recipe in self.linears.items() if recipe.stochastic]
            seeds = {
                name: rounding.linear_seeds(pass_seed, self.stacks.names(name)) for name in rounded
            }
        return self._run.begun(Carried(states, seen, taps or {}, inputs.prepared, inputs.mu, seeds))

    def _model(self, weights) -> Llama:
        """The model on parameters rounded to bfloat16, except the embedding table (spec M-2)."""

        def rounded(path, value):
            if name_of(path) == llama.EMBEDDING:
                return value
            return value.astype(jnp.bfloat16)

        compute = jax.tree_util.tree_map_with_path(rounded, weights)
        return nnx.merge(self._graph, nnx.State(compute))

    def _forward(self, f, weights, inputs: Inputs, tokens: jax.Array) -> jax.Array:
        """f(model, tokens, run) as float32."""
        run, own = self._pass(inputs, self.unseen()), self._layout.own_context(tokens)
        return f(self._model(weights), own, run).astype(jnp.float32)

    def _observed_loss(
        self, weights, seen, mu, inputs: Inputs, tokens: jax.Array
    ) -> tuple[jax.Array, dict[str, delayed.Seen]]:
        """(mean loss of the whole batch, amax observations of this device's forward pass)."""
        run = self._pass(inputs._replace(mu=mu), seen)
        return self._loss_in(run, weights, tokens), run.seen

    def _loss_in(self, run: Pass, weights, tokens: jax.Array, *, trains: bool = True) -> jax.Array:
        """The mean loss; trains: with the load-balancing loss of experts times its factor (M-8)."""
        layout, sizes = self._layout, self._config.model
        own, targets = map(layout.own_context, (tokens[:, :-1], tokens[:, 1:]))
        model, targets = self._model(weights), layout.own_sequence(targets)
        if self._config.parallel.loss == "chunked":
            h = model.hidden(own, run)
            head = layout.whole_head(model.head(h.dtype))
            losses = chunked_loss.losses(h, head, targets, chunked_loss.WORDS)
        else:
            losses = cross_entropy(model(own, run), targets)  # of [B, T, V]
        loss = layout.mean(losses)  # losses.mean(), and then the mean over devices
        if not (trains and run.balance):
            return loss
        return loss + sizes.router_aux_loss_coef * balancing_loss(
            layout.total(list(run.balance.values())), sizes.num_experts_per_tok
        )
