"""The JAX trainer: one model in training on one device or a mesh; it compiles ``step.Step``."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fp8ref.jax.attention import observer as attention_observer
from fp8ref.jax.distributed.persistent_cache import MeshProgram
from fp8ref.jax.gemm import blackwell, hardware
from fp8ref.jax.kernels import casts
from fp8ref.jax.linear import linear
from fp8ref.jax.quantize import stats
from fp8ref.jax.states import health
from fp8ref.selection.statistics import merged, planned
from fp8ref.shared.errors import ConfigError, require
from fp8ref.spec import llama
from fp8ref.spec.attention import products as attention_products
from fp8ref.spec.hardware import Multiply
from fp8ref.spec.states.health import recorded
from fp8ref.train.config.config import Config
from fp8ref.train.jax import operand_statistics, step_proof
from fp8ref.train.jax.checkpoint import Store, filled
from fp8ref.train.jax.llama.model import LlamaModel
from fp8ref.train.jax.mesh import Layout
from fp8ref.train.jax.model import Read
from fp8ref.train.jax.step import State, Step, compiler_options
from fp8ref.train.run import train_state
from fp8ref.train.run.trainer import check_products, kernels_of


class _Programs(NamedTuple):
    """The step of a recipe, and its functions as JAX compiles them, when they first run."""

    step: Step
    train: Any  # as ``jax.jit`` returns, or a ``MeshProgram``
    loss: Callable
    measure: Callable
    gradients: Callable
    observed: Callable
    watched: Callable
    health: Callable
    logits: Callable
    amaxes: Callable


class Trainer:
    """One model being trained: the trainer's Llama, or one of a user's (spec T-10).

    ``step`` and ``evaluate`` take tokens [B, T + 1], integers: inputs and the targets after them.
    """

    backend = "jax"

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, llama.Weight] | None = None,
        *,
        devices: Sequence[jax.Device] | None = None,
        multiply: Multiply | None = None,
    ) -> None:
        """weights: float32 by name; None: ``llama.lazy_initial_weights``, or the user's model's.

        devices   of a topology description: the step is lowered, not run. None: jax's own.
        multiply  the simulated hardware of numerics.accumulate, for FP8 GEMMs (spec G-19).
        Raises:   ConfigError: as ``Layout``; numerics.accumulate without multiply, or on devices
                  that cannot use it; as ``custom.build.build`` and ``Model.initial``.
        """
        self.config, self._multiply = config, multiply
        self._layout = Layout(config, devices)
        config.numerics.check_multiply(multiply)
        platform = self._layout.devices[0].platform
        if multiply is not None:
            try:
                hardware.check_devices(
                    config.parallel.devices, mapped=self._layout.mapped, platform=platform
                )
            except ValueError as error:
                raise ConfigError(
                    f"numerics.accumulate {config.numerics.accumulate!r}: {error}"
                ) from error
        own = self._layout.own_device
        check_products(config, "jax", blackwell.capability(own), own.device_kind)
        ran = kernels_of(config, self._layout.kernels, casts.share)
        # now: a recipe that the model refuses would end the run in its middle
        first, *others = (Step(config, self._layout, multiply, name) for name in config.recipes)
        specs: State
        self._state, specs = first.begin(weights, others)
        # A step leaves the state placed as before, so that the second is not compiled again.
        self._placed: tuple | None = None
        if self._layout.mesh is not None:
            self._placed = jax.tree.map(self._layout.sharding, specs), None, None
        self._programs = {
            name: self._compile(step)
            for name, step in zip(config.recipes, (first, *others), strict=True)
        }
        self.switch(config.numerics.recipe)
        self._observer: Callable
        self._watcher: Callable
        self.count, self._store, self.device = 0, Store(), self._layout.description
        self.kernels = {self.device: ran}

    def switch(self, recipe: str) -> None:
        """Compute in this recipe of the config's from now on; the state stays (spec T-9).

        Each recipe's programs are compiled once, when they first run.
        Raises:   ValueError: a recipe that the config does not have.
        """
        if recipe not in self._programs:
            raise ValueError(
                "a trainer switches to a recipe of its config, "
                f"{', '.join(self.config.recipes)}; got {recipe!r}."
            )
        self.recipe, programs = recipe, self._programs[recipe]
        self._step, self._train, self._loss, self._measure, self._gradients, *others = programs
        self._observed, self._watched, self._health, self._logits, self._amaxes = others
        self.decisions = self._step.decisions

    def _compiled(self, function: Callable, **placed: Any) -> Any:
        platform = self._layout.devices[0].platform
        program = jax.jit(function, compiler_options=compiler_options(platform), **placed)
        alone = self._layout.mesh is None or platform != "cpu"
        return program if alone else MeshProgram(program)

    def _compile(self, step: Step) -> _Programs:
        compiled = self._compiled
        return _Programs(
            step,
            train=compiled(step.train, donate_argnums=0, out_shardings=self._placed),
            loss=compiled(step.mean_loss),
            measure=compiled(step.statistics),
            gradients=compiled(step.gradients),
            # A function of its own, as its GEMMs report: to ``_observer``, whichever a pass has.
            observed=compiled(lambda *arguments: step.gradients(*arguments)[1]),
            watched=compiled(lambda *arguments: step.gradients(*arguments)[1]),
            health=compiled(step.optimizer.health),
            logits=compiled(functools.partial(step.forward, step.model.logits)),
            amaxes=compiled(step.amaxes, out_shardings=self._placed and self._placed[0].amaxes),
        )

    def step(self, tokens: np.ndarray) -> dict[str, float]:
        """One optimizer step: {"loss", "grad_norm"}; unless finite, nothing changes (T-4)."""
        self._state, loss, norm = self._train(*self._arguments(tokens))
        metrics = {"loss": float(loss), "grad_norm": float(norm)}
        self.count += all(map(np.isfinite, metrics.values()))
        return metrics

    def evaluate(self, tokens: np.ndarray) -> float:
        """The loss of a batch; no state changes."""
        return float(self._loss(self._params, self._read, self._parts(tokens)))

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [B, T, vocab_size] from tokens [B, T]."""
        return self._forward(self._logits, tokens)

    def first_input(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [B, T, hidden]: the input of the Llama's first linears, after the norm."""
        assert isinstance(self._step.model, LlamaModel)
        run = functools.partial(self._step.forward, self._step.model.first_input)
        return self._forward(self._compiled(run), tokens)

    def gradients(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """float32 gradients of a batch's loss by parameter, before clipping; nothing is updated."""
        grads = self._step.stacks.named(self._gradients(*self._passed(tokens))[1])
        return {name: self._layout.fetch(value) for name, value in grads.items()}

    def weights(self) -> dict[str, np.ndarray]:
        """The masters by name, float32: what they are worth, where a layout stores them (O-14)."""
        masters = self._step.optimizer.float32_masters(self._params)
        return {name: self._layout.fetch(value) for name, value in masters.items()}

    def moments(self) -> dict[str, dict[str, np.ndarray]]:
        """Both of Adam's moments, float32, as the next step reads them: by which, by parameter."""
        moments = self._step.optimizer.moments(self._state.optimizer)
        return {
            key: {name: self._layout.fetch(value) for name, value in values.items()}
            for key, values in moments.items()
        }

    def save(self, directory: Path) -> Callable[[], None]:
        """Copy the state to host memory and begin to write it.

        Returns a function that waits for all processes.
        """
        tensors = self._step.tensors(self._state)
        train_state.check(tensors, self.config, self.backend)
        return self._store.save(directory, tensors)

    def load(self, directory: Path, step: int) -> None:
        """Restore the state that ``save`` wrote after so many steps, on this mesh or another."""
        tensors = self._store.load(directory, self._step.tensors(self._state))
        self._state = self._step.restored(self._state, tensors)
        self.count = step

    def adopt(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        """Take a state of so many steps, {name in ``train_state.schema``: array}, on one device."""
        self._state = self._step.restored(
            self._state, filled(self._step.tensors(self._state), arrays)
        )
        self.count = step

    def fp8_states(self) -> dict[str, tuple[np.ndarray, ...]]:
        """States of delayed scaling, (stored, amax_history, step) by "<linear>/<role>"."""
        states = self._step.stacks.apart(self._state.fp8)
        return {
            f"{name}/{role}": tuple(map(np.asarray, state))
            for name, roles in states.items()
            for role, state in roles.items()
        }

    def gradient_factors(self) -> dict[str, dict[str, float]]:
        """mu of each linear's gradients, and elements saturated last (P-22); {} where mu is 1."""
        factors = self._step.stacks.apart(self._state.mu)
        # Above 2^24 a count is not exact.
        return {
            name: {"mu": float(factor.mu), "saturated": min(float(factor.saturated), 2.0**24)}
            for name, factor in factors.items()
        }

    def peak_memory(self) -> int | None:
        """The most bytes in use on any of this process's devices; None if not counted (CPUs)."""
        peaks = [
            (device.memory_stats() or {}).get("peak_bytes_in_use")
            for device in self._layout.devices
            if device in jax.local_devices()
        ]
        return max((peak for peak in peaks if peak is not None), default=None)

    def observe(self, tokens: np.ndarray, observer, attention: Callable | None = None) -> None:
        """A forward and backward pass whose FP8 GEMMs call observer (see ``linear.observing``), and
        whose attention by a variant calls attention (see ``attention.observer.watching``), on one
        device.

        Each microbatch reports once; nothing is updated.
        """
        text = "operands can be observed on one device only. Set parallel.* to 1."
        require(self._layout.mesh is None, text, ConfigError)
        keys = self.config.parallel
        # layers by their own names, and no GEMM twice: the same operands (T-8)
        if keys.scan or keys.checkpointing != "none":
            plain = self.config.replace(parallel={"scan": False, "checkpointing": "none"})
            apart = Trainer(plain, self.weights(), multiply=self._multiply)
            apart._state = apart._step.restored(apart._state, self._step.tensors(self._state))
            apart.switch(self.recipe)
            apart.count = self.count
            apart.observe(tokens, observer, attention)
            return
        self._observer, self._watcher = observer, attention or (lambda *shown: None)
        with contextlib.ExitStack() as observing:
            observing.enter_context(linear.observing(lambda *gemm: self._observer(*gemm)))
            if attention is not None:
                observing.enter_context(
                    attention_observer.watching(lambda *shown: self._watcher(*shown))
                )
            run = self._observed if attention is None else self._watched
            gradients = run(*self._passed(tokens))
        jax.block_until_ready(gradients)
        jax.effects_barrier()

    def statistics(self, tokens: np.ndarray) -> dict[str, dict]:
        """Quantization statistics of every FP8 operand of a batch (spec Q-8, Q-13), from a pass
        that updates nothing: in the program, or on the host."""
        linears = planned(self.decisions)
        if self._step.model.measure is None:
            return operand_statistics.on_host(
                linears, lambda observer: self.observe(tokens, observer)
            )
        layers, variant = self.config.attention_in_fp8, self.config.attention_variant
        attention = attention_products.planned(layers, variant)
        microbatches, read = [], self._read
        for i, part in enumerate(self.config.data.parts(tokens) if linears or attention else ()):
            own = read if read.step is None else read._replace(part=np.uint32(i))  # type: ignore[arg-type]
            measured = self._measure(self._params, own, self._tokens(part))
            microbatches.append(jax.tree.map(self._layout.fetch, measured))
        parts: list[np.ndarray] = []
        if linears:
            values = stats.parts(np.stack([part["linears"] for part in microbatches]))
            names = [d.path for d in self.decisions if d.fp8]
            parts += operand_statistics.linear_parts(linears, names, values, self._layout)
        if variant is not None and attention:
            values = stats.parts(np.stack([part["attention"] for part in microbatches]))
            parts += operand_statistics.attention_parts(attention, layers, values, variant)
        return merged([*linears, *attention], parts)

    def measured_step(
        self, tokens: np.ndarray
    ) -> tuple[dict[str, float], dict[str, dict], dict[str, dict]]:
        """``step`` and ``statistics`` of one batch, and the health of the states that the step
        makes (spec Q-12), compiled apart.

        A step that also measures would round differently.
        """
        statistics, states = self.statistics(tokens), self._states(tokens)
        return self.step(tokens), statistics, states

    def _states(self, tokens: np.ndarray) -> dict[str, dict]:
        """The health of the states that a step on this batch would make; {} without a layout."""
        layout = self.config.optimizer.moment_layout
        if layout is None:
            return {}
        # Gradients of ``gradients``'s program: one for passes and health would be compiled anew.
        grads = self._gradients(*self._passed(tokens))[1]
        measured = self._health(grads, self._params, self._state.optimizer)
        return recorded(
            list(self._step.stacks.named(grads)),
            health.numbers(jax.tree.map(self._layout.fetch, measured)),
            layout,
        )

    def prove(self, tokens: np.ndarray) -> dict:
        """The GEMMs and gathers of the step, for the manifest, by its lowered program (B-7, B-15).

        Raises:   ConfigError: a planned FP8 GEMM or gather, or a product of attention by a variant,
                  is missing, on a GPU also from the compiled program; unless run.allow_fallback.
        """
        return step_proof.prove(
            self.lowered(tokens), self._step, self._layout, self.config, self._multiply
        )

    def lowered(self, tokens: np.ndarray) -> jax.stages.Lowered:
        """The step's lowered program, before XLA compiles it."""
        return self._train.lower(*self._arguments(tokens))

    @property
    def _params(self):
        return self._state.params

    @property
    def _read(self) -> Read:
        """What the passes of the coming step read; a recipe rounds by its number."""
        rounds = any(recipe.stochastic for recipe in self._step.model.linears.values())
        return Read(self._state.fp8, np.uint32(self.count) if rounds else None)  # type: ignore[arg-type]

    def _forward(self, run: Callable, tokens: np.ndarray) -> np.ndarray:
        """What run gives of tokens [B, T], whole on the host."""
        return self._layout.fetch(run(self._params, self._read, self._tokens(tokens)))

    def _arguments(self, tokens: np.ndarray) -> tuple:
        lr = self.config.optimizer.learning_rate_at(self.count, self.config.run.steps)
        if self._state.amaxes is None and self._step.weighed:
            # now, so that the first step is compiled as those after it
            self._state = self._state._replace(amaxes=self._amaxes(self._params))
        return self._state, self._parts(tokens), np.float32(lr), self._read.step

    def _passed(self, tokens: np.ndarray) -> tuple:
        """The arguments of passes that make gradients."""
        return self._params, self._read, self._parts(tokens), self._state.mu

    def _tokens(self, tokens: np.ndarray) -> jax.Array:
        llama.check_tokens(tokens, self.config.model)
        return self._layout.put(np.asarray(tokens, np.int32), self._layout.tokens)

    def _parts(self, tokens: np.ndarray) -> jax.Array:
        """A batch [B, T + 1] on the devices, or [microbatches, B, T + 1] in parts (spec T-7)."""
        if self.config.data.microbatches == 1:
            return self._tokens(tokens)
        llama.check_tokens(tokens, self.config.model)
        parts = self.config.data.parts(np.asarray(tokens, np.int32))
        return self._layout.put(parts, self._layout.parts)
