"""Train with FSDP2 on one rank and record operands and states; or train replicated, in one process.

``sharded.torch_ranks`` compares these runs. All functions are called in processes that
``process_group.run`` starts, so that all compute with one thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8ref.formats import BFLOAT16
from fp8ref.recipe import OPERANDS, Gemm, Role, delayed_casts
from fp8ref.sim.distributed import gradient_reduction
from fp8ref.sim.quantize import cast, scaling
from fp8ref.spec import llama
from fp8ref.torch import delayed
from fp8ref.train.config.config import Config
from fp8ref.train.torch.trainer import Trainer

Watcher = Callable[[Trainer], None]
"""A function that is called with a trainer before it trains."""


@dataclass
class Operands:
    """The operands of the FP8 GEMMs in one forward and backward pass on one rank.

    step   the optimizer steps before it.
    hp     input and grad_output, float32 holding bfloat16, by layer and role. Weights are left out:
           one that was gathered in FP8 has no high-precision copy.
    fp8    (codes uint8, scale float32) by layer, GEMM and role.
    experts
           (a, b, out) of experts' GEMMs, by layer, GEMM and the expert's number on this rank: as
           ``sharded.experts`` takes them.
    """

    hp: dict[tuple[str, Role], np.ndarray] = field(default_factory=dict)
    fp8: dict[tuple[str, Gemm, Role], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    experts: dict[tuple[str, Gemm, int], tuple[tuple, tuple, np.ndarray]] = field(
        default_factory=dict
    )
    step: int = 0

    def add(self, layer: str, which: Gemm, a: tuple, b: tuple, out: np.ndarray) -> None:
        """Keep one GEMM's operands; the signature is an observer's."""
        for role, (hp, codes, scale) in zip(OPERANDS[which], (a, b), strict=True):
            if role != "weight":
                self.hp[layer, role] = hp
            self.fp8[layer, which, role] = codes, scale

    def add_expert(
        self, layer: str, which: Gemm, e: int, a: tuple, b: tuple, out: np.ndarray
    ) -> None:
        """Keep one expert's GEMM."""
        self.experts[layer, which, e] = a, b, out

    @classmethod
    def of(cls, trainer: Trainer, tokens: np.ndarray) -> "Operands":
        """Those of one pass of a trainer, of its coming step."""
        operands = cls(step=trainer.count)
        trainer.observe(tokens, operands.add, experts=operands.add_expert)
        return operands

    def amax(self, layer: str, role: Role) -> np.ndarray:
        """The largest magnitude of an input or grad_output, of all experts' rows; 0 of none."""
        if (layer, role) in self.hp:
            return scaling.amax(self.hp[layer, role])
        which: Gemm = "output" if role == "input" else "grad_input"
        amaxes = [
            scaling.amax(a[0])
            for (name, gemm, _), (a, *_) in self.experts.items()
            if (name, gemm) == (layer, which)
        ]
        return np.asarray(np.max(amaxes, initial=np.float32(0)))


@dataclass(kw_only=True)
class Run:
    """One training run on one rank.

    Amaxes and operands are of a watched run only (but see ``replicate``).

    metrics   float64 [steps, 2]: loss and gradient norm.
    weights   whole, after the last step.
    states    of delayed scaling after each step, float32 [2 + history]: scale, number of updates,
              history; by "<layer>/<role>".
    amaxes    of each role under delayed scaling in each step, on this rank, by the simulator.
    operands  before the first step and after the last.
    gathered  bytes that this rank sent into all-gathers in one forward and backward pass.
    """

    metrics: np.ndarray
    weights: dict[str, np.ndarray]
    states: list[dict[str, np.ndarray]]
    amaxes: list[dict[str, np.ndarray]]
    operands: list[Operands]
    gathered: int


def train(
    config: Config,
    variants: Mapping[str, dict],
    tokens: Sequence[np.ndarray],
    prepare: Watcher | None,
) -> dict[str, Run]:
    """Train once from the initial weights for each variant of ``parallel``.

    The first run is watched.

    tokens   the batches: one step for each except the last, which shows operands after training.
    prepare  is called with every trainer before it trains.
    """
    runs: dict[str, Run] = {}
    for name, keys in variants.items():
        trainer = Trainer(config.replace(parallel=keys))
        if prepare is not None:
            prepare(trainer)
        runs[name] = _run(trainer, tokens, watched=not runs)
    return runs


def replicate(config: Config, data: int, fsdp: int, tokens: Sequence[np.ndarray]) -> Run:
    """Run the training of data x fsdp ranks in one process; its operands are of the first batch."""
    trainer = Replicated(config, data, fsdp)
    whole = Operands.of(trainer, tokens[0])
    run = _run(trainer, tokens, watched=False)
    run.operands.append(whole)
    return run


class Replicated(Trainer):
    """Data parallelism in one process: each rank's rows in turn, averaged in the order of P-13."""

    def __init__(self, config: Config, data: int, fsdp: int) -> None:
        super().__init__(config.replace(parallel={"data": 1, "fsdp": 1, "reduce_dtype": "float32"}))
        self._ranks, self._dtype = (data, fsdp), config.parallel.reduce_dtype
        linears = llama.linear_shapes(config.model) if self._dtype == "float8_e4m3fn" else ()
        self._in_fp8 = {f"{name}.weight" for name in linears}

    def step(self, tokens: np.ndarray) -> dict[str, float]:
        """Take one optimizer step, as Trainer does, from the batch's rows rank by rank."""
        losses, gradients = [], []
        for rows in np.split(tokens, self._ranks[0] * self._ranks[1]):
            losses.append(self._step.backward(rows))  # delayed scaling merges the amaxes of all
            gradients.append([p.grad for p in self._params.values()])
        for (name, p), parts in zip(
            self._params.items(), zip(*gradients, strict=True), strict=True
        ):
            p.grad = self._average(name, parts)
        return self._updated(torch.stack(losses))

    def _average(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum over fsdp in ascending order and divide, then over data. FP8 is simulated (P-25)."""
        if name in self._in_fp8:
            return torch.from_numpy(
                gradient_reduction.reduce([part.numpy() for part in parts]).value
            )
        # Sums depend on the order: this is the one that P-13 prescribes for FSDP2.
        dtype = torch.bfloat16 if self._dtype == "bfloat16" else torch.float32
        (data, fsdp), parts = self._ranks, [part.to(dtype) for part in parts]
        return _mean([_mean(parts[i * fsdp :][:fsdp]) for i in range(data)]).float()


def _mean(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total / len(parts)


def _run(trainer: Trainer, tokens: Sequence[np.ndarray], *, watched: bool) -> Run:
    metrics, states, amaxes, kept = [], [], [], []
    with _Gathers() as gathered:
        operands = Operands.of(trainer, tokens[0])
    for i, batch in enumerate(tokens[:-1]):
        if watched and any(delayed.states(trainer.model)):
            # The step calls no observer: a pass before it, at the same weights, shows its amaxes.
            if i:
                operands = Operands.of(trainer, batch)
            amaxes.append(_amaxes(trainer, operands))
        if i == 0:
            kept.append(operands)
        metrics.append(list(trainer.step(batch).values()))
        states.append(
            {_name(name): _vector(state) for name, state in delayed.states(trainer.model)}
        )
    if watched:
        kept.append(Operands.of(trainer, tokens[-1]))
    return Run(
        metrics=np.array(metrics),
        weights=trainer.weights(),
        states=states,
        amaxes=amaxes,
        operands=kept if watched else [],
        gathered=gathered.bytes,
    )


def _amaxes(trainer: Trainer, operands: Operands) -> dict[str, np.ndarray]:
    """Amaxes that delayed scaling observes: of this rank's rows, and of whole rounded weights."""
    weights = trainer.weights()
    amaxes = {}
    for decision in trainer.decisions:
        for role in delayed_casts(decision.recipe) if decision.fp8 else ():
            name = decision.path
            amaxes[f"{name}/{role}"] = (
                scaling.amax(cast.round_to(weights[f"{name}.weight"], BFLOAT16))
                if role == "weight"
                else operands.amax(name, role)
            )
    return amaxes


def _name(state: str) -> str:
    """The layer and role of a state: "q_proj.states.input" -> "q_proj/input"."""
    layer, _, role = state.rpartition(".")
    return f"{layer.removesuffix('.states')}/{role}"


def _vector(state: delayed.RoleState) -> np.ndarray:
    parts = (state.scale[None], state.step[None].float(), state.amax_history)
    return np.concatenate([part.cpu() for part in parts])


class _Gathers(TorchDispatchMode):
    """Counts the bytes that this rank sends into all-gathers in this context."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allgather" in str(func):
            tensor = args[1]
            self.bytes += tensor.numel() * tensor.element_size()
        return func(*args, **(kwargs or {}))
