"""The training step in PyTorch (spec T): float32 masters, bfloat16 compute, AdamW.

Under a layout with masters (O-14) the optimizer keeps them, and parameters are bfloat16, with
float32 gradients; those of linears that cast their weight once are FP8 codes (O-16).

``backward`` runs one rank's passes, ``mean`` averages the loss over ranks, ``update`` clips and
takes the optimizer's step.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref.spec import llama
from fp8ref.spec.hardware import Multiply
from fp8ref.spec.states.health import recorded
from fp8ref.torch import delayed
from fp8ref.torch.delayed import shared_inputs
from fp8ref.torch.distributed.fsdp import keep_reduced_dtype
from fp8ref.torch.distributed.gradient_factors import Factors
from fp8ref.torch.gemm import blocks, hardware
from fp8ref.torch.linear import rounding
from fp8ref.torch.linear.cast_once import cast_once
from fp8ref.torch.model.parallel import check_copies
from fp8ref.torch.model.switch import Switch
from fp8ref.torch.states import copies, health, states
from fp8ref.torch.tensors.local_part import local_part
from fp8ref.train.config import device_shapes
from fp8ref.train.config.config import Config
from fp8ref.train.run import train_state
from fp8ref.train.torch import optimizer, rank_parts
from fp8ref.train.torch.custom.model import CustomModel
from fp8ref.train.torch.llama.cross_entropy import cross_entropy
from fp8ref.train.torch.llama.model import LlamaModel
from fp8ref.train.torch.model import Model
from fp8ref.train.torch.processes import context_of


class Step:
    """The model, its ``params`` by name and the optimizer, with the functions of a training step.

    params    float32 masters; what the model computes with, where the optimizer keeps the masters.
    copies    the weights that the model keeps in FP8, made from such masters; None without any.
    factors   mu of gradients that are exchanged in FP8 (P-22); None where it is 1.
    mesh      the processes, as ``mesh_of`` makes it; None for one process.
    device    this process's.
    multiply  simulated hardware for FP8 GEMMs (spec G-19), or None.
    count     the steps that are done: of the next one the learning rate and seeds (S-24).
    """

    factors: Factors | None = None
    count = 0

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, llama.Weight] | None,
        mesh: DeviceMesh | None,
        device: torch.device,
        multiply: Multiply | None,
    ) -> None:
        """weights: float32 by name; None: ``llama.lazy_initial_weights`` of run.seed, or those of a
        user's model. Raises:   ConfigError: as the model."""
        self.config = config
        self.mesh = mesh
        self.device = device
        self.multiply = multiply
        self.context = context_of(config)
        keys, self._keeps_masters = config.parallel, config.optimizer.keeps_masters
        built = LlamaModel if config.architecture.kind == "llama" else CustomModel
        self._model: Model = built(config, weights, mesh, self.context, device)
        self.model = self._model.module
        self.params = dict(self.model.named_parameters())
        self.optimizer = optimizer.build(
            self.params.values(), config.optimizer, config.numerics.kernels
        )
        for name, weight in self._model.weights.items():
            p = self.params[name]
            if self._keeps_masters and isinstance(self.optimizer, states.AdamW):
                p.grad_dtype = torch.float32  # also of the sum over microbatches (T-7)
                states.set_weight(self.optimizer, p, rank_parts.shard(p, weight).to(device))
            else:
                rank_parts.fill(p, weight)
        self._model.weights = {}  # the parameters have them
        self.switch = Switch(self.model, config.numerics.recipe, self._model.twins)
        models = self.model, *self._model.twins.values()
        self._stochastic = any(map(rounding.stochastic_linears, models))
        if mesh is not None and keys.data > 1:
            check_copies(self.model, mesh)
        if self._keeps_masters and isinstance(self.model, FSDPModule):
            keep_reduced_dtype(self.model)
        self.copies = self._kept_in_fp8()
        auto = keys.auto_scale
        if auto is not None:
            self.factors = Factors(self.model, auto)
        self._casts_anew = False
        self._norm = optimizer.GradientNorm(mesh, keys.devices)

    def backward(self, tokens: np.ndarray) -> torch.Tensor:
        """This rank's losses [microbatches], detached; gradients add up in ``grad`` (T-7)."""
        self.optimizer.zero_grad()
        parts, losses = self.config.data.parts(tokens), []
        with self.computing():
            for i, part in enumerate(parts):
                self.seed(i)
                loss = self.training_loss(self.own(part))
                # FSDP2 reduces each microbatch's gradient, and adds it to the float32 shard
                loss.backward()
                losses.append(loss.detach())
        if len(parts) > 1:
            grads = [local_part(g) for g in optimizer.gradients(self.params.values())]
            # the product with a float32 reciprocal, as in JAX, and not a quotient (T-7)
            torch._foreach_mul_(grads, float(np.float32(1 / len(parts))))
        return torch.stack(losses)

    def seed(self, microbatch: int = 0) -> None:
        """Seed the next pass: that of a microbatch of the coming step, or as the first (S-24)."""
        if self._stochastic:
            seed = rounding.pass_seed(self.config.run.seed, self.count, microbatch)
            rounding.seed_(self.model, seed)

    def update(
        self, loss: torch.Tensor, lr: float, measured: health.Found | None = None
    ) -> dict[str, float]:
        """Clip the masters' gradients and take the optimizer's step.

        loss      as ``mean`` returns it.
        measured  filled with the health of the states that the step makes (spec O-12).
        Returns "loss" and "grad_norm".

        If either is not finite, no rank's state changes (T-4). Both are read once: after all
        launches, if a flag on the device can skip the optimizer's step, else before it.
        """
        grads = optimizer.gradients(self.params.values())
        norm = self._norm(grads)
        metrics = torch.stack([loss, norm.double()])
        finite = metrics.isfinite().all()
        skips = optimizer.skips(self.optimizer)
        read = None if skips else metrics.tolist()
        if read is None or all(map(math.isfinite, read)):
            # on local shards: every rank scales its own by the same factor, without communication
            torch._foreach_mul_(
                [local_part(g) for g in grads],
                torch.clamp(self.config.optimizer.max_norm / norm, max=1.0),
            )
            if skips:
                delayed.forget_unless(self.model, finite)
            first = self.mesh is None  # ranks compare states after their first step (H-12)
            if first:
                delayed.update(self.model, before_step=True)
            optimizer.step(self.optimizer, finite, lr, measured)
            if not first:
                delayed.update(self.model)
        else:
            # the observations of this step are as unusable as its gradients
            delayed.forget(self.model)
        if self.factors is not None:
            self.factors.update(finite)
        return dict(zip(("loss", "grad_norm"), read or metrics.tolist(), strict=True))

    def forget(self) -> None:
        """Drop gradients and observations of a backward pass that no update follows."""
        self.optimizer.zero_grad()
        delayed.forget(self.model)
        if self.factors is not None:
            self.factors.forget()

    def health(self, measured: health.Found) -> dict[str, dict]:
        """What ``update`` measured of whole parameters, by name (spec Q-12), on every rank."""
        layout = self.config.optimizer.moment_layout
        if layout is None or not measured:
            return {}
        names = {id(p): name for name, p in self.params.items()}
        return recorded(
            [names[id(p)] for p in measured], health.merge_ranks(measured).cpu().numpy(), layout
        )

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors that training writes in place, by the names of ``train_state``, nested."""
        optimizer.begin(self.optimizer)
        names = {id(p): name for name, p in self.params.items()}
        # The sharded parameters. While FSDP2 has gathered a module, for instance after an
        # evaluation, its attributes hold others.
        own = {} if self._keeps_masters else self.params
        tensors = {train_state.MASTERS: {name: p.detach() for name, p in own.items()}}
        for p, key, parts in optimizer.tensors(self.optimizer):
            tensors.setdefault(key, {}).update(
                {names[id(p)] + suffix: part for suffix, part in parts.items()}
            )
        roles = self.switch.states()
        tensors[train_state.FP8] = {
            f"{name}.{key}": getattr(state, key)
            for name, state in roles
            for key in delayed.DelayedState._fields
        }
        if self.factors is not None:
            tensors[train_state.MU] = self.factors.tensors()
        return tensors

    def resume(self, step: int) -> None:
        """Continue from ``tensors`` that were read from a checkpoint of so many steps."""
        self.count = step
        optimizer.begin(self.optimizer, step)
        optimizer.check_states(self.optimizer)
        shared_inputs.check(self.model)
        delayed.forget(self.model)
        if self.factors is not None:
            self.factors.saturated.zero_()
            self.factors.forget()
        if isinstance(self.optimizer, states.AdamW) and self._keeps_masters:
            for p in self.params.values():
                if not isinstance(p, Float8TrainingTensor):
                    states.write(self.optimizer, p)
            if self.copies:
                self.copies.refresh()

    def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, float32 weight) of all parameters: of a master beside it, what that is worth."""
        optimizer.begin(self.optimizer)
        names = {id(p): name for name, p in self.params.items()}
        return ((names[id(p)], w) for p, w in optimizer.masters(self.optimizer))

    @contextmanager
    def casting_anew(self) -> Iterator[None]:
        """In this context linears ignore the codes that they keep and cast their weights again, to
        the same bits: for passes that are measured.
        """
        self._casts_anew = True
        try:
            yield
        finally:
            self._casts_anew = False

    def _kept_in_fp8(self) -> copies.Copies | None:
        """Keep the weights of linears in FP8 (O-16); ``params`` are then the FP8 tensors. Shards
        stay bfloat16, and codes of them are gathered."""
        if not device_shapes.copied(self.config, "torch"):
            return None
        assert isinstance(self.optimizer, states.AdamW)
        kept = copies.keep(self.model, self.optimizer)
        self.params = dict(self.model.named_parameters())
        return kept

    def loss(self, tokens: np.ndarray) -> torch.Tensor:
        """The mean loss of tokens [B, T + 1], in nats: a float32 scalar."""
        batch = self.tokens(tokens)
        logits = self.logits(batch[:, :-1])  # [B, T, V]
        return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).mean()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """The model's logits [B, T, V] of tokens [B, T]."""
        if not self._keeps_masters or self.config.parallel.compile == "none":
            return self._model.logits(tokens)
        # Dynamo (torch 2.13) traces no parameter beside a gradient of another dtype. It meets one
        # where it traces again: of a later microbatch, or of an evaluation.
        held = {p: p.grad for p in self.params.values()}
        try:
            for p in held:
                p.grad = None
            return self._model.logits(tokens)
        finally:
            for p, grad in held.items():
                p.grad = grad

    def training_loss(self, tokens: np.ndarray) -> torch.Tensor:
        """What a step differentiates: ``loss``, and unbalanced experts' times its factor (M-8)."""
        loss = self.loss(tokens)
        if not self.config.model.num_experts:
            return loss
        ranks = None if self.mesh is None else distributed.group.WORLD  # the mesh has all processes
        return loss + self.config.model.router_aux_loss_coef * self.model.balancing_loss(ranks)  # type: ignore[operator]

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """Mean over all ranks' losses [microbatches]: float64 (), on the device."""
        return rank_parts.gather_ranks(losses.double().mean(), self.mesh).mean()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """In this context the model computes as a step does: in bfloat16, on weights cast once."""
        wide = self.copies.uncast() if self.copies and self._casts_anew else nullcontext()
        # CUDA graphs need codes at fixed addresses, and cast weights themselves
        anew = self._casts_anew or self.config.parallel.cuda_graphs
        kept = nullcontext() if anew else cast_once(self.model)
        by = blocks.multiplying(self.config.numerics.products)
        with hardware.simulating(self.multiply), by, self._rounded(), wide, kept:
            yield

    def tokens(self, tokens: np.ndarray) -> torch.Tensor:
        """Tokens as int64 on this process's device; ValueError as ``llama.check_tokens``."""
        llama.check_tokens(tokens, self.config.model)
        host_tokens = torch.from_numpy(np.asarray(tokens, np.int64))
        # from pinned memory, so that the host does not wait for the device
        if self.device.type != "cuda":
            return host_tokens.to(self.device)
        return host_tokens.pin_memory().to(self.device, non_blocking=True)

    def own(self, tokens: np.ndarray) -> np.ndarray:
        """This rank's part of a batch [B, T + 1] (P-10, A-24)."""
        return rank_parts.own(tokens, self.config, self.mesh, self.context)

    @contextmanager
    def _rounded(self) -> Iterator[None]:
        """In this context modules hold parameters rounded to bfloat16, one that several share
        rounded once, except those that the model keeps (spec M-2, T-10).

        FSDP2 rounds while it gathers, and ``fp8_gather`` before it casts. Without it, rounded
        copies replace the masters in the modules. Autograd carries the copies' gradients to the
        masters, widened to float32. The copies stay during the backward pass: checkpointed layers
        run their forward pass again there.
        """
        if isinstance(self.model, FSDPModule) or self._keeps_masters:
            yield
            return
        rounded = {
            p: p if name in self._model.unrounded else optimizer.rounded(p)
            for name, p in self.params.items()
        }
        places = [
            (module._parameters, key, p)
            for module in self.model.modules()
            for key, p in module._parameters.items()
            if p is not None
        ]
        try:
            for parameters, key, p in places:
                parameters[key] = rounded[p]  # type: ignore[assignment]
            yield
        finally:
            for parameters, key, p in places:
                parameters[key] = p
