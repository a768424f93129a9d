"""The training step in JAX (spec T): float32 masters, bfloat16 compute, AdamW.

The passes of a model, and what follows them: ``optimizer`` clips gradients and changes masters and
moments. Masters that a layout keeps narrower than float32 (O-14) are the state's parameters as they
are stored; each program reads weights and FP8 copies from them (``Step.computed``).

Pure functions of the state, which ``trainer.Trainer`` compiles.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from fp8ref.jax import delayed
from fp8ref.jax.distributed import gradient_reduction
from fp8ref.jax.distributed.gradient_reduction import Factor
from fp8ref.jax.quantize import stats
from fp8ref.jax.quantize.scales import Scales
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.recipe import Role
from fp8ref.spec import llama
from fp8ref.spec.attention.products import RECORDED
from fp8ref.spec.hardware import Multiply
from fp8ref.train.config import device_shapes
from fp8ref.train.config.config import Config
from fp8ref.train.jax import shared_inputs, weight_scales
from fp8ref.train.jax.gradient_sums import GradientSums
from fp8ref.train.jax.llama import chunked_loss
from fp8ref.train.jax.llama.cross_entropy import cross_entropy
from fp8ref.train.jax.llama.experts import balancing_loss
from fp8ref.train.jax.llama.forward_pass import Pass
from fp8ref.train.jax.llama.layer_stacks import LayerStacks
from fp8ref.train.jax.llama.llama import Llama
from fp8ref.train.jax.llama.parameter_names import name_of, named
from fp8ref.train.jax.mesh import Layout
from fp8ref.train.jax.optimizer import Optimizer, OptimizerState, new_if
from fp8ref.train.run import train_state

EVERY_ROUNDING = {"xla_allow_excess_precision": False}
"""XLA's option under which it leaves out no rounding to bfloat16 between fused operations."""


def compiler_options(platform: str) -> dict[str, bool]:
    """XLA's options for the step on a platform, such as "cpu": ``EVERY_ROUNDING`` there.

    On a GPU XLA would round the scales of cuBLASLt's GEMMs under that option, and Triton's GEMMs
    would multiply dequantized operands, so both are off (spec G-22). The model's own roundings
    (M-3) hold under either (``train.jax.elementwise.rounded``).
    """
    return EVERY_ROUNDING if platform == "cpu" else {"xla_gpu_enable_triton_gemm": False}


class State(NamedTuple):
    """All that a step changes.

    params     the model's masters, a tree: of float32 arrays, or of ``MomentState`` where a layout
               stores them.
    optimizer  the optimizer's state: both of Adam's moments, and the steps counted; no masters.
    fp8        delayed-scaling states by linear.
    mu         factors of gradients that are exchanged in FP8, by linear; of an automatic mu alone
               (P-22).
    """

    params: Any
    optimizer: OptimizerState
    fp8: dict[str, dict[Role, delayed.DelayedState | delayed.FlaxState]]
    mu: dict[str, Factor]


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
        self.config, self.layout, self._multiply = config, layout, multiply
        self.stacks = LayerStacks(config.model.num_hidden_layers, layout)
        own = config.under(recipe or config.numerics.recipe)
        self.decisions = own.decisions()
        self.linears = own.program_linears()
        shapes = {
            name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in self._shapes().items()
        }
        self._graph, self._params = jax.eval_shape(self._split, shapes)
        self.optimizer = Optimizer(config.optimizer, layout, self.stacks, self._params)
        self._specs = self.optimizer.parameter_specs
        name = llama.stack_of if config.parallel.scan else str
        self.attention_casts = {name(path): casts for path, casts in config.attention_casts.items()}
        self._keepers: dict[str, Any] = {**self.linears, **self.attention_casts}
        self._first_readers = shared_inputs.first_readers(self.linears)
        self._copied = {
            name(path): recipe for path, recipe in device_shapes.copied(own, "jax").items()
        }
        self._scaled = {
            name(path): recipe for path, recipe in device_shapes.scaled_first(own).items()
        }

    def begin(self, weights: Mapping[str, llama.Weight] | None) -> tuple[State, State]:
        """The state before the first step, on the layout's devices, and the PartitionSpec of each
        of its arrays.

        Where the layout is abstract, the state holds shapes instead of arrays.

        weights: float32 by name, by default ``llama.lazy_initial_weights`` of run.seed.
        """
        config, layout = self.config, self.layout
        if weights is None:
            weights = llama.lazy_initial_weights(config.model, seed=config.run.seed)
        llama.check_weights(weights, config.model)
        planned = (
            item
            for recipe in config.recipes
            for item in config.under(recipe).program_linears().items()
        )
        fp8 = {
            name: delayed.init(recipe, self.stacks.leading(name))
            for name, recipe in planned
            if delayed.keeps_state(recipe)
        }
        fp8 |= {
            name: delayed.init(casts, self.stacks.leading(name))
            for name, casts in self.attention_casts.items()
        }
        names = self.linears if config.parallel.auto_scale else ()
        mu = {
            name: Factor(
                *(np.full(self.stacks.leading(name), start, np.float32) for start in (1, 0))  # type: ignore[arg-type]
            )
            for name in names
        }
        specs = State(*self.optimizer.specs, *jax.tree.map(lambda _: P(), (fp8, mu)))
        if layout.abstract:
            return jax.tree.map(layout.put, State(*self.optimizer.shapes(), fp8, mu), specs), specs
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
        self, state: State, tokens: jax.Array, lr: jax.Array
    ) -> tuple[State, jax.Array, jax.Array]:
        """One step at this learning rate: the new state, the loss, and the norm of the gradients.

        Where loss or norm is not finite, the state is the old one (T-4).
        """
        loss, grads, seen, saturated = self.gradients(state.params, state.fp8, tokens, state.mu)
        params, optimizer, norm, finite = self.optimizer.update(
            state.params, state.optimizer, grads, loss, lr
        )
        # States of a recipe that this step does not use stay as they are (T-9).
        fp8 = state.fp8 | {
            name: delayed.update(state.fp8[name], amaxes, recipe=self._keepers[name])
            for name, amaxes in seen.items()
        }
        mu = {name: self._tuned(name, factor, saturated[name]) for name, factor in state.mu.items()}
        return (
            State(params, optimizer, *new_if(finite, (fp8, mu), (state.fp8, state.mu))),
            loss,
            norm,
        )

    def _tuned(self, name: str, factor: Factor, saturated: jax.Array) -> Factor:
        """The factor of a linear for the next step (P-22); of a stack each layer's."""
        auto = self.config.parallel.auto_scale
        assert auto is not None
        elements = math.prod(llama.linear_shapes(self.config.model)[name.replace("*", "0")])
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
        shared_inputs.check(fp8, self._first_readers)
        saved = tensors.get(train_state.MU, {})
        mu = {
            name: Factor(
                self.stacks.together(f"{name}.weight", saved),
                jax.tree.map(jnp.zeros_like, factor.saturated),
            )
            for name, factor in state.mu.items()
        }
        return State(*self.optimizer.restored(state.params, state.optimizer, tensors), fp8, mu)

    def computed(self, params) -> tuple[Any, dict[str, Quantized | Scales]]:
        """What passes compute with, of ``State.params``: weights, and what linears take that is
        prepared of them, FP8 copies in place of a cast or scales in place of an amax."""
        weights = self.optimizer.weights(params)

        def scales(weights):
            arrays = named(weights)
            return weight_scales.of(
                {name: arrays[f"{name}.weight"].astype(jnp.bfloat16) for name in self._scaled},
                self._scaled,
            )

        return weights, self.optimizer.copies(params, self._copied) | self.layout.map(
            scales, (self._specs,), P()
        )(weights)

    def gradients(self, params, fp8_state, tokens: jax.Array, factors: Mapping[str, Factor]):
        """(loss, gradients, amax observations of both passes, elements that casts of gradients
        saturated) of a batch, or of its parts: the last by linear, for those of ``factors``."""
        params, prepared = self.computed(params)
        mu = {name: factor.mu for name, factor in factors.items()}

        def differentiate(params, prepared, mu, fp8_state, tokens):
            # Forward observations come out as aux. grad_output is known in the backward pass alone:
            # its observations come out as the gradient by ``seen`` (fp8ref.jax.delayed), and
            # saturated elements as that by ``mu`` (fp8ref.jax.linear).
            gradient = jax.value_and_grad(self._loss_of, argnums=(0, 1, 2), has_aux=True)
            # The model rounds what is widened here, exactly, so that gradients are float32 (M-2).
            wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
            (loss, forward), (grads, backward, saturated) = gradient(
                wide, self._unseen(), mu, prepared, fp8_state, tokens
            )
            return (
                loss,
                grads,
                {name: delayed.merge(forward[name], backward[name]) for name in forward},
                saturated,
            )

        sums = GradientSums(
            self.config.parallel.accumulate_dtype,
            self.linears,
            self._specs if self.layout.mapped else None,
        )

        def accumulate(params, prepared, mu, fp8_state, parts):
            def add(before, tokens):
                (loss, grads, seen, saturated), terms = (
                    before,
                    differentiate(params, prepared, mu, fp8_state, tokens),
                )
                return (
                    loss + terms[0],
                    sums.add(grads, terms[1]),
                    {name: delayed.merge(seen[name], terms[2][name]) for name in seen},
                    {name: count + terms[3][name] for name, count in saturated.items()},
                ), None

            # A scan keeps one microbatch's activations at a time, and compiles the passes once.
            begin = (
                jnp.float32(0),
                sums.zeros(params),
                self._unseen(),
                jax.tree.map(jnp.zeros_like, mu),
            )
            (loss, grads, seen, saturated), _ = lax.scan(add, begin, parts)
            share = np.float32(1 / len(parts))
            return loss.astype(jnp.float32) * share, sums.scaled(grads, share), seen, saturated

        f = accumulate if tokens.ndim == 3 else differentiate
        specs = (self._specs, self._specs_of(prepared), P(), P(), self._cut(tokens))
        return self.layout.map(f, specs, (P(), self._specs, P(), P()))(
            params, prepared, mu, fp8_state, tokens
        )

    def mean_loss(self, params, fp8_state, tokens: jax.Array) -> jax.Array:
        """The loss of a batch, or of its parts."""

        params, prepared = self.computed(params)

        def loss_of(params, prepared, fp8_state, tokens):
            if tokens.ndim == 3:
                return lax.map(
                    lambda part: loss_of(params, prepared, fp8_state, part), tokens
                ).mean()
            return self._loss_of(
                params, self._unseen(), {}, prepared, fp8_state, tokens, trains=False
            )[0]

        specs = (self._specs, self._specs_of(prepared), P(), self._cut(tokens))
        return self.layout.map(loss_of, specs, P())(params, prepared, fp8_state, tokens)

    def statistics(self, params, fp8_state, tokens: jax.Array) -> dict[str, jax.Array]:
        """Statistics of "linears" float32 [devices, layers, 6, stats.LENGTH], and of "attention"
        [devices, layers, len(attention_products.RECORDED), stats.LENGTH], where either is in FP8.

        Each device measures its own shards of the operands.

        Without shard_map there is one row, of the whole operands.
        """

        params, prepared = self.computed(params)

        def loss(taps, params, prepared, fp8_state, tokens):
            run = self._pass(fp8_state, self._unseen(), prepared, dict(taps))
            return self._loss_in(run, params, tokens), run.taps

        def measure(params, prepared, fp8_state, tokens):
            rows = {name: len(stats.ROWS) for name, recipe in self.linears.items() if recipe.fp8}
            if self.measured_attention:
                rows |= dict.fromkeys(self.attention_in_program, len(RECORDED))
            taps = {
                name: self.layout.apart(
                    jnp.zeros((*self.stacks.leading(name), count, stats.LENGTH))
                )
                for name, count in rows.items()
            }
            (_, forward), backward = jax.value_and_grad(loss, has_aux=True)(
                taps, params, prepared, fp8_state, tokens
            )
            # taps collect as the observations do: forward as aux, backward as a gradient
            layer_statistics = self.stacks.apart(
                {name: forward[name] + backward[name] for name in taps}
            )
            measured = {"linears": self.measured_layers, "attention": self.measured_attention}
            return {
                key: jnp.stack([layer_statistics[layer] for layer in layers])[None]
                for key, layers in measured.items()
                if layers
            }

        specs = (self._specs, self._specs_of(prepared), P(), self.layout.tokens)
        return self.layout.map(measure, specs, P(self.layout.axes))(
            params, prepared, fp8_state, tokens
        )

    def forward(
        self, f: Callable[[Llama, jax.Array, Pass], jax.Array], params, fp8_state, tokens: jax.Array
    ) -> jax.Array:
        """f(model, tokens [B, T], run) -> float32 [B, T, ...], inside shard_map if the layout is
        mapped."""
        params, prepared = self.computed(params)

        def mapped(params, prepared, fp8_state, tokens):
            return f(
                self._model(params),
                self.layout.own_context(tokens),
                self._pass(fp8_state, self._unseen(), prepared),
            ).astype(jnp.float32)

        specs = (self._specs, self._specs_of(prepared), P(), self.layout.tokens)
        return self.layout.map(mapped, specs, self.layout.logits)(
            params, prepared, fp8_state, tokens
        )

    @property
    def measured_layers(self) -> list[str]:
        """The names of the linears in FP8, in the order of the statistics."""
        return [d.path for d in self.decisions if d.fp8]

    @property
    def measured_attention(self) -> list[str]:
        """The names of the layers' attention in FP8, in the order of the statistics."""
        return self.config.attention_in_fp8

    @property
    def attention_in_program(self) -> list[str]:
        """The same as the program names them: under a scan one name for all layers."""
        return (
            [f"{llama.STACK}.self_attn"]
            if self.config.parallel.scan and self.measured_attention
            else self.measured_attention
        )

    def _split(self, weights: dict) -> tuple[Any, dict]:
        """The model's graph and its parameters, a tree."""
        graph, params = nnx.split(Llama(self.config.model, weights, self.linears), nnx.Param)
        return graph, nnx.to_pure_dict(params)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter of the tree; of the layers together under parallel.scan."""
        shapes = llama.parameter_shapes(self.config.model)
        if not self.config.parallel.scan:
            return shapes
        return {
            stack: (*self.stacks.leading(stack), *shape)
            for name, shape in shapes.items()
            if (stack := llama.stack_of(name))
        }

    def _specs_of(self, prepared: Mapping[str, Quantized | Scales]) -> dict[str, Any]:
        """PartitionSpecs of what is prepared of weights: codes lie on the mesh as their weight
        does, scales are whole (O-16).
        """
        specs = named(self._specs)

        # specs in place of arrays
        def of(name: str, value: Quantized | Scales) -> Quantized | Scales:
            whole = {"scale": P(), "scale_inv": P()}
            if isinstance(value, Scales):
                return Scales(**whole)  # type: ignore[arg-type]
            return dataclasses.replace(value, codes=specs[f"{name}.weight"], **whole)  # type: ignore[arg-type]

        return {name: of(name, value) for name, value in prepared.items()}

    def _pass(
        self,
        fp8_state,
        seen: dict[str, delayed.Seen],
        prepared: Mapping[str, Quantized],
        taps: dict[str, jax.Array] | None = None,
        mu: Mapping[str, jax.Array] | None = None,
    ) -> Pass:
        keys = self.config.parallel
        return Pass(
            shared_inputs.states({name: fp8_state[name] for name in seen}, self._first_readers),
            seen,
            self.layout,
            taps or {},
            attention=keys.attention,
            variant=self.config.attention_variant,
            arithmetic=self.config.numerics.attention_arithmetic,
            checkpointing=keys.checkpointing,
            multiply=self._multiply,
            prepared=prepared,
            mu=mu or {},
            casts={
                layer: casts
                for layer in self.config.attention_layers
                if (casts := self.config.attention_operands(layer)) is not None
            },
        )

    def _unseen(self) -> dict[str, delayed.Seen]:
        return {
            name: delayed.unseen(recipe, self.stacks.leading(name))
            for name, recipe in self._keepers.items()
            if delayed.keeps_state(recipe)
        }

    def _model(self, params) -> Llama:
        """The model on parameters rounded to bfloat16, except the embedding table (spec M-2)."""
        compute = jax.tree_util.tree_map_with_path(
            lambda path, value: (
                value if name_of(path) == llama.EMBEDDING else value.astype(jnp.bfloat16)
            ),
            params,
        )
        return nnx.merge(self._graph, nnx.State(compute))

    def _loss_of(
        self, params, seen, mu, prepared, fp8_state, tokens: jax.Array, *, trains: bool = True
    ) -> tuple[jax.Array, dict[str, delayed.Seen]]:
        """(mean loss of the whole batch, amax observations of this device's forward pass). trains:
        with what a step adds to it, the load-balancing loss of experts times its factor (M-8)."""
        run = self._pass(fp8_state, dict(seen), prepared, mu=mu)
        return self._loss_in(run, params, tokens, trains=trains), run.seen

    def _loss_in(self, run: Pass, params, tokens: jax.Array, *, trains: bool = True) -> jax.Array:
        own, targets = map(self.layout.own_context, (tokens[:, :-1], tokens[:, 1:]))
        model, targets = self._model(params), self.layout.own_sequence(targets)
        if self.config.parallel.loss == "chunked":
            h = model.hidden(own, run)
            losses = chunked_loss.losses(
                h, self.layout.whole_head(model.head(h.dtype)), targets, chunked_loss.WORDS
            )
        else:
            losses = cross_entropy(model(own, run), targets)  # of [B, T, V]
        loss = self.layout.mean(losses)  # losses.mean(), and then the mean over devices
        if not (trains and run.balance):
            return loss
        sizes = self.config.model
        return loss + sizes.router_aux_loss_coef * balancing_loss(
            self.layout.total(list(run.balance.values())), sizes.num_experts_per_tok
        )

    def _cut(self, tokens: jax.Array) -> P:
        return self.layout.parts if tokens.ndim == 3 else self.layout.tokens
