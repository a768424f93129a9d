"""The training step in PyTorch (SEMANTICS T): float32 masters, bfloat16 compute, AdamW; on one device, or one of several processes."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional

from fp8ref import llama
from fp8ref.multiply import Multiply
from fp8ref.run.config import Config, ConfigError
from fp8ref.run.plan import fit
from fp8ref.statistics import Operand, merged, planned
from fp8ref.torch import delayed, optimizer, proof, simulated, stats, tensor
from fp8ref.torch.checkpoint import Store
from fp8ref.torch.model import Llama
from fp8ref.torch.observing import observing
from fp8ref.torch.parallel import AXES, parallelize


class Trainer:
    """One model being trained. ``step`` and ``evaluate`` take tokens [B, T + 1], integers: inputs and the targets after them."""

    backend = "torch"

    def __init__(self, config: Config, weights: dict[str, np.ndarray] | None = None, *, multiply: Multiply | None = None) -> None:
        """weights: float32 arrays by name, by default ``llama.initial_weights`` of run.seed.

        multiply  the hardware that numerics.accumulate names, simulated: what FP8 GEMMs are multiplied by (SEMANTICS G-19).
        Raises:   ConfigError: as ``mesh_of``; numerics.accumulate without multiply, or with a GPU.
        """
        self.config = config
        self._multiply = multiply
        config.numerics.check_multiply(multiply)
        if multiply is not None and torch.cuda.is_available():
            raise ConfigError(
                f"numerics.accumulate {config.numerics.accumulate!r}: simulated hardware multiplies on the host's CPU; torch has "
                f"{torch.cuda.get_device_name()}. Hide it with CUDA_VISIBLE_DEVICES=, or use accumulate 'native'."
            )
        self.decisions = config.decisions()
        weights = llama.initial_weights(config.model, seed=config.run.seed) if weights is None else weights
        llama.check_weights(weights, config.model)
        self._mesh = mesh_of(config)
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        if self._device.type == "cuda":
            fit.check_on_gpu(config, self.backend)
            torch.cuda.reset_peak_memory_stats(self._device)
        model = Llama(config.model, weights).to(self._device)
        keys = config.parallel
        self.model = parallelize(
            model,
            config.numerics.recipe,
            mesh=self._mesh,
            blocks=model.model.layers,
            keep_dtype=[] if keys.compile == "model" else [model.model.embed_tokens],  # P-19
            filter_fqns=config.filter_fqns,
            fp8_fqns=config.numerics.fp8_fqns,
            amax_scope=keys.amax_scope,
            sequence=keys.sequence,
            checkpointing=keys.checkpointing,
            compile=keys.compile,
            gather_fp8=keys.gather == "fp8",
            precompute_scales=keys.precompute_scales,
            ordered_reduction=keys.reduction == "ordered",
        )
        self._params = dict(self.model.named_parameters())
        self._optimizer = optimizer.build(self._params.values(), config.optimizer)
        self._count = 0
        self._store = Store(self.model, self._params, self._optimizer)
        self.device = f"cuda: {torch.cuda.get_device_name()}" if self._device.type == "cuda" else "cpu"
        self.device += f", {keys.devices} processes" * (keys.devices > 1)

    def step(self, tokens: np.ndarray) -> dict[str, float]:
        """One optimizer step: {"loss", "grad_norm"} before the update. Where either is not finite nothing changes (T-4), on any rank."""
        return self._update(self._mean(self._backward(tokens)))

    def _update(self, loss: float) -> dict[str, float]:
        """The second half of a step: by the gradients that lie in the masters, of a batch of this loss."""
        grads = [p.grad for p in self._params.values() if p.grad is not None]
        norm = self._norm(grads)
        metrics = {"loss": loss, "grad_norm": norm.item()}
        if all(map(math.isfinite, metrics.values())):
            torch._foreach_mul_([optimizer.local(g) for g in grads], torch.clamp(self.config.optimizer.max_norm / norm, max=1.0))
            lr = self.config.optimizer.learning_rate_at(self._count, self.config.run.steps)
            optimizer.set_learning_rate(self._optimizer, lr)
            self._optimizer.step()
            delayed.update(self.model)
            self._count += 1
        else:
            delayed.forget(self.model)
        return metrics

    @torch.no_grad()
    def evaluate(self, tokens: np.ndarray) -> float:
        """The loss of a batch."""
        with self._computing():
            return self._mean(torch.stack([self._loss(self._own(part)) for part in self.config.data.parts(tokens)]))

    @torch.no_grad()
    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [B, T, vocab_size] from tokens [B, T]."""
        with self._computing():
            return self.model(self._tokens(tokens)).float().cpu().numpy()

    def gradients(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """float32 gradients of the loss of a batch by parameter, not clipped; nothing is updated."""
        self._backward(tokens)
        found = {name: _whole(p.grad) for name, p in self._params.items() if p.grad is not None}
        self._optimizer.zero_grad()
        delayed.forget(self.model)
        return found

    def weights(self) -> dict[str, np.ndarray]:
        """The float32 masters by name."""
        return {name: _whole(p.detach()) for name, p in self._params.items()}

    def moments(self) -> dict[str, dict[str, np.ndarray]]:
        """Both of Adam's, float32: by which, then by parameter. Of those kept in FP8 (T-6), what their codes stand for."""
        optimizer.begin(self._optimizer)
        names = {id(p): name for name, p in self._params.items()}
        found: dict[str, dict[str, np.ndarray]] = {key: {} for key in optimizer.MOMENTS}
        for p, key, moment in optimizer.moments(self._optimizer):
            found[key][names[id(p)]] = _whole(moment.dequantize() if optimizer.in_fp8(moment) else moment)
        return found

    def save(self, directory: Path) -> Callable[[], None]:
        """Copy the state to host memory and begin to write it into a directory; the result waits until it is written, by every process."""
        return self._store.save(directory)

    def load(self, directory: Path, step: int) -> None:
        """Continue from the state of so many steps that ``save`` wrote, on this mesh or another."""
        self._store.load(directory, step)
        self._count = step

    def fp8_states(self) -> dict[str, tuple[np.ndarray, ...]]:
        """What linears that scale by their past keep: (stored, amax_history, step) by "<linear>/<role>"."""
        found = {}
        for name, state in delayed.states(self.model):
            linear, _, role = name.rpartition(".states.")
            found[f"{linear}/{role}"] = tuple(_copy(getattr(state, key)) for key in delayed.DelayedState._fields)
        return found

    def peak_memory(self) -> int | None:
        """Bytes of GPU memory in tensors at most since the trainer was made; None on a CPU."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None

    def observe(self, tokens: np.ndarray, observer) -> None:
        """A forward and backward pass, no update, in which every FP8 GEMM reports to observer (see ``observing``), once a part of the batch."""

        def as_numpy(name, gemm, a, b, out):
            # float32 holds every bfloat16; NumPy has no bfloat16 of its own
            operands = [(_copy(hp.float()), _copy(codes), _copy(scale)) for hp, codes, scale in (a, b)]
            observer(name, gemm, *operands, _copy(out.float()))

        with observing(self.model, as_numpy):
            self._backward(tokens)
        self._optimizer.zero_grad()
        delayed.forget(self.model)

    def statistics(self, tokens: np.ndarray) -> dict[str, dict]:
        """What quantising did to every FP8 operand of a step on this batch (SEMANTICS Q-8): an eager forward and backward pass, no update."""
        with torch.compiler.set_stance("force_eager"):
            _, found = self._measured(tokens)
        self._optimizer.zero_grad()
        delayed.forget(self.model)
        return found

    def measured_step(self, tokens: np.ndarray) -> tuple[dict[str, float], dict[str, dict]]:
        """``step`` and ``statistics`` of one batch: of the step's own passes, but where those are compiled, and with the same results as without."""
        if self.config.parallel.compile != "none":
            found = self.statistics(tokens)
            return self.step(tokens), found
        loss, found = self._measured(tokens)
        return self._update(self._mean(loss)), found

    def _measured(self, tokens: np.ndarray) -> tuple[torch.Tensor, dict[str, dict]]:
        """``_backward``, and what it shows of every FP8 operand of all ranks."""
        operands = planned(self.decisions)
        if not operands:
            return self._backward(tokens), {}
        found: stats.Parts = {}
        with stats.measuring(self.model, operands, found):
            loss = self._backward(tokens)
        parts = stats.of_ranks(stats.stacked(operands, found)).cpu().numpy()
        return loss, merged(
            operands,
            [of_one[self._own_parts(operand)].reshape(-1, of_one.shape[-1]) for operand, of_one in zip(operands, parts, strict=True)],
        )

    def _own_parts(self, operand: Operand) -> np.ndarray:
        """Of all ranks, those that together hold one copy of an operand (SEMANTICS P-10)."""
        keys = self.config.parallel
        gathered = isinstance(self.model, FSDPModule) and hasattr(self.model.get_submodule(operand.layer), "fp8_gather")
        style = tensor.PLAN.get(operand.layer.rpartition(".")[2])
        whole = "input" if style == "colwise" else "grad_output"  # along tensor
        cut = {
            "data": operand.role != "weight",
            "fsdp": operand.role != "weight" or gathered,
            "tensor": style is not None and operand.role != whole,
        }
        ranks = np.arange(keys.devices).reshape(keys.data, keys.fsdp, keys.tensor)
        return ranks[tuple(slice(None if cut[axis] else 1) for axis in AXES)].ravel()

    def prove(self, tokens: np.ndarray) -> dict:
        """What a step multiplies and gathers, for the manifest: seen in one that updates nothing (SEMANTICS B-8). Before the first step.

        Raises:   ConfigError: an FP8 GEMM or gather that was planned and is not there, unless run.allow_fallback.
        """
        keys = self.config.parallel
        planned = {d.path: d.recipe for d in self.decisions if d.fp8}
        with (proof.compiled if keys.compile != "none" else proof.watching)(self.model) as seen:
            self._backward(tokens)
        self._optimizer.zero_grad()
        delayed.forget(self.model)
        plan = self._multiply.name if self._multiply else None
        missing = proof.missing(seen, planned, plan)
        if isinstance(self.model, FSDPModule) and keys.gather == "fp8":
            missing += proof.missing_gathers(self.model, [path for path, recipe in planned.items() if recipe.serves_both("weight")])
        if missing and not self.config.run.allow_fallback:
            raise ConfigError("the step lacks what was planned:\n  " + "\n  ".join(missing) + "\nSet run.allow_fallback to train anyway.")
        return proof.manifest(seen, planned, missing, proof.gathers(self.model), plan)

    def _tokens(self, tokens: np.ndarray) -> torch.Tensor:
        llama.check_tokens(tokens, self.config.model)
        return torch.from_numpy(np.asarray(tokens, np.int64)).to(self._device)

    def _own(self, tokens: np.ndarray) -> np.ndarray:
        """This rank's sequences of a batch (SEMANTICS P-10)."""
        if self._mesh is None:
            return tokens
        keys = self.config.parallel
        rows = len(tokens) // (keys.data * keys.fsdp)
        index = self._mesh.get_local_rank("data") * keys.fsdp + self._mesh.get_local_rank("fsdp")
        return tokens[index * rows :][:rows]

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """In this context the model computes as in a step: under its simulated hardware, and in the compute dtype."""
        with simulated.simulating(self._multiply), self._rounded():
            yield

    @contextmanager
    def _rounded(self) -> Iterator[None]:
        """In this context the model computes with parameters rounded to the compute dtype, all but the embedding table (SEMANTICS M-2).

        FSDP2 rounds what it gathers. Elsewhere rounded ones stand in for the masters, in the backward pass too, where checkpointed layers run again.
        """
        if isinstance(self.model, FSDPModule):
            yield
            return
        places = [(self.model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], p) for name, p in self._params.items()]
        table = self._params[llama.EMBEDDING]
        try:
            for module, key, p in places:
                module._parameters[key] = p if p is table else p.to(torch.bfloat16)  # type: ignore[assignment]
            yield
        finally:
            for module, key, p in places:
                module._parameters[key] = p

    def _backward(self, tokens: np.ndarray) -> torch.Tensor:
        """This rank's losses of a batch's parts, [microbatches] without a graph; gradients are left in the masters (T-7)."""
        self._optimizer.zero_grad()
        parts, losses = self.config.data.parts(tokens), []
        with self._computing():
            for part in parts:
                loss = self._loss(self._own(part))
                loss.backward()  # FSDP2 reduces each part's gradient, and adds it to the float32 shard
                losses.append(loss.detach())
        if len(parts) > 1:
            grads = [optimizer.local(p.grad) for p in self._params.values() if p.grad is not None]
            torch._foreach_mul_(grads, float(np.float32(1 / len(parts))))
        return torch.stack(losses)

    def _loss(self, tokens: np.ndarray) -> torch.Tensor:
        batch = self._tokens(tokens)
        logits = self.model(batch[:, :-1]).float()  # [B, T, V]
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def _mean(self, losses: torch.Tensor) -> float:
        """Of every rank's losses, one of each part."""
        return self._of_ranks(losses.double().mean()).mean().item()

    def _norm(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """float32 (): of all gradients together (T-2). In float64, so that how they are cut changes no more than the last of its bits."""
        held = [g for g in grads if optimizer.local(g).numel()]
        squares = torch.stack(torch._foreach_norm([optimizer.local(g) for g in held], 2, torch.float64)).square()
        copies = squares.new_tensor([self._copies(g) for g in held])  # how many ranks hold the same of it
        return self._of_ranks((squares / copies).sum()).sum().sqrt().float()

    def _copies(self, x: torch.Tensor) -> int:
        if not isinstance(x, DTensor):
            return 1
        cut = math.prod(x.device_mesh.size(i) for i, placement in enumerate(x.placements) if not placement.is_replicate())
        return self.config.parallel.devices // cut

    def _of_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """[ranks] of a number of each."""
        if self._mesh is None:
            return value[None]
        found = [torch.empty_like(value) for _ in range(distributed.get_world_size())]
        distributed.all_gather(found, value)
        return torch.stack(found)


def mesh_of(config: Config) -> DeviceMesh | None:
    """The processes that ``processes.join`` met, data x fsdp x tensor; None of a process alone.

    Raises:   ConfigError: another number of processes than config.parallel asks for; a batch that they do not share evenly; a scope that
              tensor parallelism does not have beside other axes.
    """
    keys = config.parallel
    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    if keys.devices != ranks:
        raise ConfigError(
            f"parallel asks for data x fsdp x tensor = {keys.data} x {keys.fsdp} x {keys.tensor} = {keys.devices} processes; there are {ranks}. "
            f"Start as many: torchrun --nproc-per-node {keys.devices} -m fp8ref train ... --distributed."
        )
    shared = keys.data * keys.fsdp
    if config.data.batch_size % (shared * config.data.microbatches):
        raise ConfigError(config.data.indivisible(shared, "processes"))
    if keys.tensor > 1 and shared > 1 and keys.amax_scope == "global" and config.numerics.recipe != "bf16":
        raise ConfigError(
            "in PyTorch, amaxes over data and fsdp beside tensor are each rank's own (P-14). Set parallel.amax_scope to local."
        )
    if ranks == 1:
        return None
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(kind, (keys.data, keys.fsdp, keys.tensor), mesh_dim_names=AXES)


def _whole(x: torch.Tensor) -> np.ndarray:
    """A copy of all of it, on every rank."""
    return _copy(x.full_tensor() if isinstance(x, DTensor) else x)


def _copy(x: torch.Tensor) -> np.ndarray:
    """With memory of its own: FSDP2 frees a gathered weight's, which an array must not share."""
    return x.detach().cpu().clone().numpy()
