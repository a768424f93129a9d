"""The PyTorch trainer: one model in training by ``step.Step``, in one process or several."""

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fp8ref.recipe import ROLES
from fp8ref.selection.statistics import Operand, merged, planned
from fp8ref.shared.errors import ConfigError
from fp8ref.spec import llama
from fp8ref.spec.attention import products as attention_products
from fp8ref.spec.attention.products import AttentionOperand
from fp8ref.spec.hardware import Multiply
from fp8ref.torch import delayed
from fp8ref.torch.attention import kernel as attention_kernel
from fp8ref.torch.attention import observer as attention_observer
from fp8ref.torch.attention import statistics as attention_stats
from fp8ref.torch.gemm import blocks
from fp8ref.torch.kernels import choice
from fp8ref.torch.linear.spec import roles_by_kernels
from fp8ref.torch.model.parallel import AXES
from fp8ref.torch.observe import statistics as stats
from fp8ref.torch.observe.gemms import group_gemms, observe_gemms
from fp8ref.torch.proof.records import unwrapped
from fp8ref.torch.states import health
from fp8ref.train.config import device_shapes
from fp8ref.train.config.config import Config
from fp8ref.train.run import train_state
from fp8ref.train.run.trainer import check_products, kernels_of
from fp8ref.train.torch import optimizer, rank_parts, step_proof
from fp8ref.train.torch.checkpoint import Store
from fp8ref.train.torch.llama.llama import Attention, Llama
from fp8ref.train.torch.processes import mesh_of
from fp8ref.train.torch.step import Step


class Trainer:
    """One model being trained: the trainer's Llama, or one of a user's (spec T-10).

    ``step`` and ``evaluate`` take tokens [B, T + 1], integers: inputs and the targets after them.
    """

    backend = "torch"

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, llama.Weight] | None = None,
        *,
        multiply: Multiply | None = None,
    ) -> None:
        """weights: float32 by name; None: ``llama.lazy_initial_weights``, or the user's model's.

        multiply  the simulated hardware of numerics.accumulate, for FP8 GEMMs (spec G-19).
        Raises:   ConfigError: as ``mesh_of``; numerics.accumulate without multiply, or with a GPU;
                  numerics.kernels 'triton' where Triton's do not run; as
                  ``custom.model.CustomModel``.
        """
        self.config = config
        config.numerics.check_multiply(multiply)
        if config.parallel.attention == "kernel":
            if config.numerics.attention not in attention_kernel.VARIANTS:
                raise ConfigError(
                    f"PyTorch has no FP8 kernel of variant {config.numerics.attention!r} with "
                    "gradients: FlashAttention-3's computes "
                    f"{' and '.join(attention_kernel.VARIANTS)}. Set parallel.attention to "
                    "tiles, or train in JAX (--backend jax)."
                )
            _check_kernel()
        if multiply is not None and torch.cuda.is_available():
            raise ConfigError(
                f"numerics.accumulate {config.numerics.accumulate!r}: simulated hardware "
                f"multiplies on the host's CPU; torch has {torch.cuda.get_device_name()}. Hide "
                "it with CUDA_VISIBLE_DEVICES=, or use accumulate 'native'."
            )
        self.recipe, self.decisions = config.numerics.recipe, config.decisions()
        mesh = mesh_of(config)
        self._device, self.device = torch.device("cpu"), "cpu"
        if torch.cuda.is_available():
            self._device = torch.device("cuda", torch.cuda.current_device())
            self.device = f"cuda: {torch.cuda.get_device_name()}"
            device_shapes.check_on_gpu(config, self.backend)
            torch.cuda.reset_peak_memory_stats(self._device)
        elif config.parallel.cuda_graphs:
            raise ConfigError(
                "parallel.cuda_graphs need an NVIDIA GPU; torch has none here. Leave the key out."
            )
        self.device += f", {config.parallel.devices} processes" * (config.parallel.devices > 1)
        check_products(config, "torch", blocks.capability(self._device), self.device)
        ran = kernels_of(
            config,
            lambda kind: choice.explain(kind, self._device),
            lambda recipe: len(roles_by_kernels(recipe)) / len(ROLES),
        )
        self.kernels = {self.device: ran}
        self._step = Step(config, weights, mesh, self._device, multiply)
        self.model = self._step.model
        self._params = self._step.params
        self._optimizer = self._step.optimizer
        self._store = Store()

    def switch(self, recipe: str) -> None:
        """Compute in this recipe of the config's from now on; the state stays (spec T-9)."""
        self._step.switch.to(recipe)
        self.recipe, self.decisions = recipe, self.config.under(recipe).decisions()

    @property
    def count(self) -> int:
        """The optimizer's steps that were taken."""
        return self._step.count

    def step(self, tokens: np.ndarray) -> dict[str, float]:
        """One optimizer step: {"loss", "grad_norm"}; unless finite, no rank's state changes."""
        return self._updated(self._step.backward(tokens))

    def _updated(
        self, losses: torch.Tensor, measured: health.Found | None = None
    ) -> dict[str, float]:
        """The second half of a step: the update. losses: this rank's, of the backward passes;
        measured: as ``Step.update``."""
        lr = self.config.optimizer.learning_rate_at(self._step.count, self.config.run.steps)
        metrics = self._step.update(self._step.mean(losses), lr, measured)
        self._step.count += all(map(math.isfinite, metrics.values()))
        return metrics

    @torch.no_grad()
    def evaluate(self, tokens: np.ndarray) -> float:
        """The loss of a batch; no state changes."""
        self._step.seed()
        with self._step.computing():
            parts = self.config.data.parts(tokens)
            losses = [self._step.loss(self._step.own(part)) for part in parts]
            return self._step.mean(torch.stack(losses)).item()

    @torch.no_grad()
    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [B, T, vocab_size] of tokens [B, T]; parallel.context's ranks divide T."""
        context = self._step.context
        own = tokens[:, rank_parts.own_tokens(tokens.shape[1], context)]
        self._step.seed()
        with self._step.computing():
            logits = self._step.logits(self._step.tokens(own)).float()
            return rank_parts.gather_context(logits, context).cpu().numpy()

    def gradients(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """float32 gradients of a batch's loss by parameter, before clipping; nothing is updated."""
        self._step.backward(tokens)
        grads = {name: p.grad for name, p in self._params.items()}
        gradients = {name: _whole(g) for name, g in grads.items() if g is not None}
        self._step.forget()
        return gradients

    def weights(self) -> dict[str, np.ndarray]:
        """The masters by name, float32: what they are worth, where a layout stores them (O-14)."""
        return {name: _whole(w) for name, w in self._step.masters()}

    def moments(self) -> dict[str, dict[str, np.ndarray]]:
        """Both of Adam's moments, float32, as the next step reads them: by which, by parameter."""
        optimizer.begin(self._optimizer)
        names = {id(p): name for name, p in self._params.items()}
        moments: dict[str, dict[str, np.ndarray]] = {key: {} for key in train_state.MOMENTS}
        for p, key, value in optimizer.values(self._optimizer):
            moments[key][names[id(p)]] = _whole(value)
        return moments

    def save(self, directory: Path) -> Callable[[], None]:
        """Copy the state to host memory and begin to write it.

        Returns a function that waits for all processes.
        """
        tensors = self._step.tensors()
        train_state.check(tensors, self.config, self.backend)
        return self._store.save(directory, train_state.flat(tensors))

    def load(self, directory: Path, step: int) -> None:
        """Restore the state that ``save`` wrote after so many steps, on this mesh or another."""
        self._store.load(directory, train_state.flat(self._step.tensors()))
        self._step.resume(step)

    @torch.no_grad()
    def adopt(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        """Take a state of so many steps, {name in ``train_state.schema``: array}, on one device."""
        mine = train_state.flat(self._step.tensors())
        assert mine.keys() == arrays.keys(), sorted(mine.keys() ^ arrays.keys())
        for name, tensor in mine.items():
            value = torch.from_numpy(np.array(arrays[name]))
            tensor.copy_(value.view(tensor.dtype) if value.dtype == torch.uint8 else value)
        self._step.resume(step)

    def fp8_states(self) -> dict[str, tuple[np.ndarray, ...]]:
        """States of delayed scaling, (scale, amax_history, step) by "<linear>/<role>"."""
        states = {}
        for name, state in self._step.switch.states():
            linear, _, role = name.rpartition(".states.")
            states[f"{linear}/{role}"] = tuple(
                _copy(getattr(state, key)) for key in delayed.DelayedState._fields
            )
        return states

    def gradient_factors(self) -> dict[str, dict[str, float]]:
        """mu of each linear's gradients, and elements saturated last (P-22); {} where mu is 1."""
        factors = self._step.factors
        if factors is None:
            return {}
        # Above 2^24 a count has no float32 in JAX.
        counts = factors.saturated.clamp(max=1 << 24).tolist()
        rows = zip(factors.names, factors.mu.tolist(), counts, strict=True)
        return {
            name.removesuffix(".weight"): {"mu": mu, "saturated": float(count)}
            for name, mu, count in rows
        }

    def peak_memory(self) -> int | None:
        """The most bytes of GPU memory in tensors since the trainer was made; None on a CPU."""
        if self._device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._device)

    def observe(
        self,
        tokens: np.ndarray,
        observer,
        attention: Callable | None = None,
        experts: Callable | None = None,
    ) -> None:
        """A forward and backward pass whose FP8 GEMMs call observer (see ``observe_gemms``), and
        whose attention by a variant calls attention (see ``observe_attention``).

        experts  called in place of observer for each expert's GEMM that this rank computes, with
                 the expert's number here after the GEMM.

        Nothing is updated.

        Each microbatch reports once.
        """

        def arrays(a, b, out):
            # as float32, which holds every bfloat16 value: NumPy has no bfloat16
            return *(
                (_copy(hp.float()), _copy(codes), _copy(scale)) for hp, codes, scale, *_ in (a, b)
            ), _copy(out.float())

        def as_numpy(name, gemm, a, b, out):
            observer(name, gemm, *arrays(a, b, out))

        def report_experts(name, gemm, *groups):
            for e, (a, b), out in group_gemms(gemm, *groups):
                experts(name, gemm, e, *arrays(a, b, out))  # type: ignore[misc]

        def shown(name, phase, tensors):
            values = {
                key: _copy(x if x.dtype == torch.uint8 else x.float()) for key, x in tensors.items()
            }
            attention(name, phase, values)  # type: ignore[misc]

        with contextlib.ExitStack() as observing:
            observing.enter_context(self._step.casting_anew())
            observing.enter_context(
                observe_gemms(self.model, as_numpy, None if experts is None else report_experts)
            )
            if attention is not None:
                observing.enter_context(
                    attention_observer.observe_attention(dict(self._attention()), None, shown)
                )
            self._step.backward(tokens)
        self._step.forget()

    def statistics(self, tokens: np.ndarray) -> dict[str, dict]:
        """Statistics of every FP8 operand of a batch (Q-8, Q-13), by an eager pass alone."""
        with torch.compiler.set_stance("force_eager"):
            _, statistics = self._measured(tokens)
        self._step.forget()
        return statistics

    def measured_step(
        self, tokens: np.ndarray
    ) -> tuple[dict[str, float], dict[str, dict], dict[str, dict]]:
        """``step`` and ``statistics`` of one batch, with the step's results unchanged, and the
        health of the states that it made (spec Q-12).

        The step's own passes are measured, unless they are compiled: then a second, eager pass is.
        """
        measured: health.Found | None = None if self.config.optimizer.moment_layout is None else {}
        if self.config.parallel.compile != "none":
            statistics = self.statistics(tokens)
            losses = self._step.backward(tokens)
        else:
            losses, statistics = self._measured(tokens)
        metrics = self._updated(losses, measured)
        return metrics, statistics, self._step.health(measured or {})

    def _measured(self, tokens: np.ndarray) -> tuple[torch.Tensor, dict[str, dict]]:
        """A step's losses of backward passes, statistics of all FP8 operands over all ranks."""
        linears, variant = planned(self.decisions), self.config.attention_variant
        products = attention_products.planned(self.config.attention_in_fp8, variant)
        operands: list[Operand | AttentionOperand] = [*linears, *products]
        if not operands:
            return self._step.backward(tokens), {}
        values: stats.Parts = {}
        with contextlib.ExitStack() as measuring:
            measuring.enter_context(self._step.casting_anew())
            measuring.enter_context(stats.measuring(self.model, linears, values))
            if variant is not None and products:
                layers = {
                    name: module
                    for name, module in self._attention()
                    if name in self.config.attention_in_fp8
                }
                measuring.enter_context(
                    attention_stats.measuring(layers, variant, products, values)
                )
            losses = self._step.backward(tokens)
        # not of linears without a call, under run.allow_fallback
        operands = [operand for operand in operands if operand.name in values]
        if not operands:
            return losses, {}
        parts = stats.gather_ranks(stats.stacked(operands, values)).cpu().numpy()
        return losses, merged(
            operands,
            [
                part[self._own_parts(operand)].reshape(-1, part.shape[-1])
                for operand, part in zip(operands, parts, strict=True)
            ],
        )

    def _attention(self) -> list[tuple[str, nn.Module]]:
        """The modules of attention, by their names before they were wrapped."""
        return [
            (unwrapped(name), module)
            for name, module in self.model.named_modules()
            if isinstance(module, Attention)
        ]

    def _own_parts(self, operand: Operand | AttentionOperand) -> np.ndarray:
        """The ranks that together hold exactly one copy of an operand (spec P-10): of attention
        all, each of which has its own sequences and heads."""
        keys = self.config.parallel
        if isinstance(operand, AttentionOperand):
            return np.arange(keys.devices)
        is_expert = f"{llama.EXPERTS}." in operand.layer
        gathered = isinstance(self.model, FSDPModule) and hasattr(
            self.model.get_submodule(operand.layer), "fp8_gather"
        )
        style = Llama.tensor_plan.styles.get(operand.layer.rpartition(".")[2])
        whole = "input" if style == "colwise" else "grad_output"  # along tensor
        # Along an axis that cuts the operand, every rank holds a part. Along the others all ranks
        # hold copies, of which the first counts.
        cut = {
            "data": operand.role != "weight",
            "fsdp": operand.role != "weight" or gathered,
            "expert": operand.role != "weight" or gathered or is_expert,
            "tensor": style is not None and operand.role != whole,
        }
        ranks = np.arange(keys.devices).reshape(
            keys.data, keys.fsdp * keys.context, keys.expert, keys.tensor
        )
        return ranks[tuple(slice(None if cut[axis] else 1) for axis in AXES)].ravel()

    def prove(self, tokens: np.ndarray) -> dict:
        """The GEMMs and gathers of a step, for the manifest (spec B-8, B-15).

        Call it before the first step.

        They are traced in a pass that updates nothing.
        Raises:   ConfigError: a planned FP8 GEMM or gather, or a product of attention by a variant,
                  is missing, unless run.allow_fallback.
        """
        return step_proof.prove(self._step, tokens, self.decisions, dict(self._attention()))


def _check_kernel() -> None:
    """ConfigError where FlashAttention-3's kernel does not run."""
    try:
        attention_kernel.library(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"parallel.attention 'kernel': {error} In the trainer set parallel.attention to tiles."
        ) from error


def _whole(x: torch.Tensor) -> np.ndarray:
    """A copy of the whole tensor, on every rank."""
    return _copy(x.full_tensor() if isinstance(x, DTensor) else x)


def _copy(x: torch.Tensor) -> np.ndarray:
    """A copy in its own memory: FSDP2 frees that of gathered weights."""
    return x.detach().cpu().clone().numpy()
