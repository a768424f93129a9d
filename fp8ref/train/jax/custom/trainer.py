"""Train a user's Flax NNX model on one device: what ``trainer.Trainer`` offers, by ``step`` (spec
T-10).
"""

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fp8ref.jax import proof
from fp8ref.jax.gemm import hardware
from fp8ref.jax.linear import linear
from fp8ref.jax.states import health
from fp8ref.recipe import Gemm
from fp8ref.selection.statistics import merged, planned
from fp8ref.shared.errors import ConfigError
from fp8ref.spec import llama
from fp8ref.spec.hardware import Multiply
from fp8ref.spec.states.health import recorded
from fp8ref.train.config.config import Config
from fp8ref.train.jax import operand_statistics
from fp8ref.train.jax.checkpoint import Store, filled
from fp8ref.train.jax.custom.step import CustomStep
from fp8ref.train.jax.mesh import Layout
from fp8ref.train.jax.step import compiler_options
from fp8ref.train.run import train_state


class _Programs(NamedTuple):
    """A step in one recipe, and its compiled functions."""

    step: CustomStep
    train: jax.stages.Wrapped
    gradients: Callable
    loss: Callable
    logits: Callable
    health: Callable
    observed: Callable


class Trainer:
    """One user's model being trained.

    ``step`` and ``evaluate`` take tokens [B, T + 1], integers.
    """

    backend = "jax"
    _step: CustomStep
    _train: jax.stages.Wrapped

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, llama.Weight] | None = None,
        *,
        multiply: Multiply | None = None,
    ) -> None:
        """weights: float32 by name; None: the model's own initial weights, from run.seed.

        Raises:   ConfigError: as ``model.build`` and ``CustomStep.begin``; simulated hardware on a
                  GPU.
        """
        self.config, self._multiply = config, multiply
        self._layout = Layout(config)
        config.numerics.check_multiply(multiply)
        if multiply is not None:
            try:
                hardware.check_devices(1, mapped=False, platform=self._layout.devices[0].platform)
            except ValueError as error:
                raise ConfigError(
                    f"numerics.accumulate {config.numerics.accumulate!r}: {error}"
                ) from error
        self._programs: dict[str, _Programs] = {}
        self.recipe = config.numerics.recipe
        self._fp8: dict[str, Any] = {}
        self.switch(config.numerics.recipe)
        self._state = self._step.begin(weights)
        # now: a recipe that the model refuses would end the run in its middle
        for recipe in config.recipes[1:]:
            self._programs[recipe] = self._compile(recipe)
            self._fp8[recipe] = self._programs[recipe].step.fp8
        self._observer: Callable
        self._count, self._store, self.device = 0, Store(), self._layout.description

    def switch(self, recipe: str) -> None:
        """Compute in this recipe of the config's from now on; the state stays, that of delayed
        scaling as its last phase left it (spec T-9).

        Each recipe's programs are compiled once, when they first run.
        Raises:   ValueError: a recipe that the config does not have.
        """
        if recipe not in self.config.recipes:
            raise ValueError(
                "a trainer switches to a recipe of its config, "
                f"{', '.join(self.config.recipes)}; got {recipe!r}."
            )
        if recipe not in self._programs:
            self._programs[recipe] = self._compile(recipe)
        elif recipe != self.recipe:
            self._fp8[self.recipe] = self._state.fp8
            self._state = self._state._replace(fp8=self._fp8.pop(recipe))
        self.recipe = recipe
        (
            self._step,
            self._train,
            self._gradients,
            self._loss,
            self._logits,
            self._health,
            self._observed,
        ) = self._programs[recipe]
        self.decisions = self._step.decisions

    def _compile(self, recipe: str) -> "_Programs":
        step = CustomStep(self.config.under(recipe), self._layout, self._multiply)
        compiled = functools.partial(
            jax.jit, compiler_options=compiler_options(self._layout.devices[0].platform)
        )
        return _Programs(
            step,
            train=compiled(step.train, donate_argnums=0),
            gradients=compiled(step.gradients),
            loss=compiled(step.mean_loss),
            logits=compiled(step.logits),
            health=compiled(
                lambda grads, state: step.optimizer.health(grads, state.params, state.optimizer)
            ),
            # A function of its own, as its GEMMs report: to ``_observer``, whichever a pass has.
            observed=compiled(lambda *arguments: step.gradients(*arguments)[1]),
        )

    def step(self, tokens: np.ndarray) -> dict[str, float]:
        """One optimizer step: {"loss", "grad_norm"} before the update.

        If either is not finite, nothing changes (T-4).
        """
        self._state, loss, norm = self._train(*self._arguments(tokens))
        metrics = {"loss": float(loss), "grad_norm": float(norm)}
        self._count += all(map(np.isfinite, metrics.values()))
        return metrics

    def evaluate(self, tokens: np.ndarray) -> float:
        """The loss of a batch; no state changes."""
        return float(self._loss(self._state.params, self._state.fp8, self._parts(tokens)))

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [B, T, vocab_size] from tokens [B, T]."""
        llama.check_tokens(tokens, self.config.model)
        return np.asarray(
            self._logits(self._state.params, self._state.fp8, np.asarray(tokens, np.int32))
        )

    def gradients(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """float32 gradients of a batch's loss by parameter, before clipping; nothing is updated."""
        gradients = self._gradients(self._state.params, self._state.fp8, self._parts(tokens))[1]
        return {name: np.asarray(value) for name, value in gradients.items()}

    def weights(self) -> dict[str, np.ndarray]:
        """The float32 masters by name."""
        return {name: np.asarray(value) for name, value in self._state.params.items()}

    def moments(self) -> dict[str, dict[str, np.ndarray]]:
        """Both of Adam's moments, float32: by which, then by parameter."""
        moments = self._step.optimizer.moments(self._state.optimizer)
        return {
            key: {name: np.asarray(value) for name, value in values.items()}
            for key, values in moments.items()
        }

    def save(self, directory: Path) -> Callable[[], None]:
        """Copy the state to host memory and begin to write it.

        Returns a function that waits for it.
        """
        tensors = self._tensors()
        train_state.check(tensors, self.config, self.backend)
        return self._store.save(directory, tensors)

    def load(self, directory: Path, step: int) -> None:
        """Restore the state that ``save`` wrote after so many steps."""
        like = jax.tree.map(
            lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding), self._tensors()
        )
        self._restore(self._store.load(directory, like))
        self._count = step

    def adopt(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        """Take a state of so many steps, of arrays by the names of ``train_state.schema``; on one
        device.
        """
        self._restore(filled(self._tensors(), arrays))
        self._count = step

    def fp8_states(self) -> dict[str, tuple[np.ndarray, ...]]:
        """States of delayed scaling, (stored, amax_history, step) by "<linear>/<role>"."""
        states = self._delayed()
        return {
            f"{name}/{role}": tuple(map(np.asarray, state))
            for name, roles in states.items()
            for role, state in roles.items()
        }

    def gradient_factors(self) -> dict[str, dict[str, float]]:
        """{}: gradients of one device are not exchanged."""
        return {}

    def peak_memory(self) -> int | None:
        """The most bytes in use on the device; None if it does not count them, as CPUs."""
        return (self._layout.devices[0].memory_stats() or {}).get("peak_bytes_in_use")

    def observe(self, tokens: np.ndarray, observer) -> None:
        """A forward and backward pass whose FP8 GEMMs call observer (see ``linear.observing``);
        nothing is updated.
        """
        self._observer = observer
        with linear.observing(lambda *gemm: self._observer(*gemm)):
            jax.block_until_ready(
                self._observed(self._state.params, self._state.fp8, self._parts(tokens))
            )
        jax.effects_barrier()

    def statistics(self, tokens: np.ndarray) -> dict[str, dict]:
        """Quantization statistics of every FP8 operand of a batch (spec Q-8), measured on the
        host.
        """
        operands = planned(self.decisions)
        parts: dict[str, list[np.ndarray]] = {operand.name: [] for operand in operands}
        casts = {operand.name: operand for operand in operands}

        def measured(layer: str, gemm: Gemm, a, b) -> None:
            for name, numbers in operand_statistics.measured(casts, layer, gemm, a, b):
                parts[name].append(numbers)

        # The simulator needs subnormals, which XLA's threads flush. A thread has its parent's mode.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(int).result()
            if operands:
                self.observe(tokens, lambda *gemm: thread.submit(measured, *gemm[:4]).result())
        called = [operand for operand in operands if parts[operand.name]]
        return merged(called, [np.stack(parts[operand.name]) for operand in called])

    def measured_step(
        self, tokens: np.ndarray
    ) -> tuple[dict[str, float], dict[str, dict], dict[str, dict]]:
        """``step`` and ``statistics`` of one batch, and the health of the states that the step
        makes (spec Q-12).
        """
        statistics, states = self.statistics(tokens), self._states(tokens)
        return self.step(tokens), statistics, states

    def prove(self, tokens: np.ndarray) -> dict:
        """The GEMMs of the step, for the manifest, read from its lowered program (spec B-7).

        Raises:   ConfigError: a planned FP8 GEMM is missing, unless run.allow_fallback.
        """
        lowered = self._train.lower(*self._arguments(tokens))
        program, plan = proof.read(lowered), self._multiply.name if self._multiply else None
        missing = proof.missing(program, self._step.linears, {}, plan)
        compiled = proof.read_compiled(lowered.compile()) if self._layout.on_gpu else None
        missing += proof.lost(compiled, program) if compiled else []
        if missing and not self.config.run.allow_fallback:
            raise ConfigError(
                "the compiled step lacks planned GEMMs:\n  "
                + "\n  ".join(missing)
                + "\nSet run.allow_fallback to train anyway."
            )
        return proof.manifest(program, self._step.linears, missing, compiled, plan)

    def _tensors(self) -> dict[str, Any]:
        """The arrays of the state by the names of ``train_state``, nested, with those that another
        phase left.
        """
        tensors = self._step.tensors(self._state)
        if states := self._delayed():
            tensors[train_state.FP8] = {
                name: {role: entry._asdict() for role, entry in roles.items()}
                for name, roles in states.items()
            }
        return tensors

    def _restore(self, tensors: dict[str, Any]) -> None:
        """Take a state of arrays named as ``_tensors`` names them."""
        for recipe, fp8 in self._fp8.items():
            self._fp8[recipe] = (
                self._programs[recipe].step.restored(self._state._replace(fp8=fp8), tensors).fp8
            )
        self._state = self._step.restored(self._state, tensors)

    def _delayed(self) -> dict[str, dict[str, Any]]:
        """The states of delayed scaling, which one recipe has at most (T-10), whether or not it is
        that of this phase.
        """
        fp8_states = [
            (self._step, self._state.fp8),
            *((self._programs[recipe].step, fp8) for recipe, fp8 in self._fp8.items()),
        ]
        return next((states for step, fp8 in fp8_states if (states := step.states(fp8))), {})

    def _states(self, tokens: np.ndarray) -> dict[str, dict]:
        layout = self.config.optimizer.moment_layout
        if layout is None:
            return {}
        grads = self._gradients(self._state.params, self._state.fp8, self._parts(tokens))[1]
        measured = self._health(grads, self._state)
        return recorded(list(grads), health.numbers(jax.tree.map(np.asarray, measured)), layout)

    def _arguments(self, tokens: np.ndarray) -> tuple:
        return (
            self._state,
            self._parts(tokens),
            np.float32(self.config.optimizer.learning_rate_at(self._count, self.config.run.steps)),
        )

    def _parts(self, tokens: np.ndarray) -> np.ndarray:
        """[microbatches, B, T + 1] of a batch [B, T + 1] (spec T-7)."""
        llama.check_tokens(tokens, self.config.model)
        return self.config.data.parts(np.asarray(tokens, np.int32))
