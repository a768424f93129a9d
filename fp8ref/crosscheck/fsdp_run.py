"""What the ranks of ``sharded_torch`` do: train with FSDP2 and watch; and the same training in one process, without it.

Everything here is called in processes that ``ranks.run`` starts, so that all compute with one thread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8ref.formats import BFLOAT16
from fp8ref.recipe import OPERANDS, Gemm, Role, delayed_casts
from fp8ref.sim import cast, scaling
from fp8ref.torch import delayed
from fp8ref.train.config import Config
from fp8ref.train.torch.trainer import Trainer

Watcher = Callable[[Trainer], None]


@dataclass
class Operands:
    """What the FP8 GEMMs of one forward and backward pass took on one rank.

    hp     of input and grad_output, float32 of bfloat16 values, by layer and role. A weight that was gathered in FP8 has none.
    fp8    (codes uint8, scale float32) by layer, GEMM and role.
    """

    hp: dict[tuple[str, Role], np.ndarray] = field(default_factory=dict)
    fp8: dict[tuple[str, Gemm, Role], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def add(self, layer: str, which: Gemm, a: tuple, b: tuple, out: np.ndarray) -> None:
        """Keep what a GEMM took, as an observer is told it."""
        for role, (hp, codes, scale) in zip(OPERANDS[which], (a, b), strict=True):
            if role != "weight":
                self.hp[layer, role] = hp
            self.fp8[layer, which, role] = codes, scale


@dataclass(kw_only=True)
class Run:
    """One training run as one rank saw it.

    metrics   float64 [steps, 2]: loss and gradient norm.
    weights   whole, after the last step.
    states    delayed scaling's after each step, float32 [2 + history]: scale, number of updates, history; by "<layer>/<role>".
    amaxes    what each step had of each of them on this rank, taken by the simulator; of the run that is watched alone.
    operands  before the first step and after the last; of the run that is watched alone (but see ``replicate``).
    gathered  bytes that this rank put into all-gathers in one forward and backward pass.
    """

    metrics: np.ndarray
    weights: dict[str, np.ndarray]
    states: list[dict[str, np.ndarray]]
    amaxes: list[dict[str, np.ndarray]]
    operands: list[Operands]
    gathered: int


def train(config: Config, variants: Mapping[str, dict], tokens: Sequence[np.ndarray], prepare: Watcher | None) -> dict[str, Run]:
    """A run from the initial weights for each variant of the config's ``parallel``, one step for each batch but the last; the first is watched.

    prepare  is given every trainer before it trains.
    """
    runs: dict[str, Run] = {}
    for name, keys in variants.items():
        trainer = Trainer(config.replace(parallel=keys))
        if prepare is not None:
            prepare(trainer)
        runs[name] = _run(trainer, tokens, watched=not runs)
    return runs


def replicate(config: Config, data: int, fsdp: int, tokens: Sequence[np.ndarray]) -> Run:
    """The run of data x fsdp ranks in one process. Its operands are of the first batch as a whole, before the first step."""
    trainer, whole = Replicated(config, data, fsdp), Operands()
    trainer.observe(tokens[0], whole.add)
    run = _run(trainer, tokens, watched=False)
    run.operands.append(whole)
    return run


class Replicated(Trainer):
    """Data parallelism without FSDP2, in one process: every rank's rows in turn at the same weights, gradients averaged as P-13 says."""

    def __init__(self, config: Config, data: int, fsdp: int) -> None:
        super().__init__(config.replace(parallel={"data": 1, "fsdp": 1}))
        self._ranks = data, fsdp

    def step(self, tokens: np.ndarray) -> dict[str, float]:
        """One optimizer step, as Trainer's, of the batch's rows rank by rank."""
        losses, found = [], []
        for rows in np.split(tokens, self._ranks[0] * self._ranks[1]):
            losses.append(self._step.backward(rows))  # states of delayed scaling merge what each shows
            found.append([p.grad for p in self._params.values()])
        for p, parts in zip(self._params.values(), zip(*found, strict=True), strict=True):
            p.grad = self._average(parts)
        return self._updated(torch.stack(losses))

    def _average(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """In ascending order over fsdp, divided; then over data, divided."""
        data, fsdp = self._ranks
        return _mean([_mean(parts[i * fsdp :][:fsdp]) for i in range(data)])


def _mean(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total / len(parts)


def _run(trainer: Trainer, tokens: Sequence[np.ndarray], *, watched: bool) -> Run:
    metrics, states, amaxes, operands = [], [], [], []
    seen = Operands()
    with gathers() as gathered:
        trainer.observe(tokens[0], seen.add)
    for i, batch in enumerate(tokens[:-1]):
        if watched and any(delayed.states(trainer.model)):
            if i:
                seen = Operands()
                trainer.observe(batch, seen.add)
            amaxes.append(_amaxes(trainer, seen))
        if i == 0:
            operands.append(seen)
        metrics.append(list(trainer.step(batch).values()))
        states.append({_name(name): _vector(state) for name, state in delayed.states(trainer.model)})
    if watched:
        operands.append(Operands())
        trainer.observe(tokens[-1], operands[-1].add)
    return Run(
        metrics=np.array(metrics),
        weights=trainer.weights(),
        states=states,
        amaxes=amaxes,
        operands=operands if watched else [],
        gathered=gathered.bytes,
    )


def _amaxes(trainer: Trainer, seen: Operands) -> dict[str, np.ndarray]:
    """Of whatever delayed scaling observes of this rank's rows, and of whole weights in the compute dtype."""
    weights = trainer.weights()
    found = {}
    for decision in trainer.decisions:
        for role in delayed_casts(decision.recipe) if decision.fp8 else ():
            whole = role == "weight"
            hp = cast.round_to(weights[f"{decision.path}.weight"], BFLOAT16) if whole else seen.hp[decision.path, role]
            found[f"{decision.path}/{role}"] = scaling.amax(hp)
    return found


def _name(state: str) -> str:
    """Of a state "q_proj.states.input": "q_proj/input"."""
    layer, _, role = state.rpartition(".")
    return f"{layer.removesuffix('.states')}/{role}"


def _vector(state: delayed.RoleState) -> np.ndarray:
    return np.concatenate([state.scale[None].cpu(), state.step[None].float().cpu(), state.amax_history.cpu()])


class _Gathers(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allgather" in str(func):
            tensor = args[1]
            self.bytes += tensor.numel() * tensor.element_size()
        return func(*args, **(kwargs or {}))


@contextmanager
def gathers() -> Iterator[_Gathers]:
    """Counts the bytes that this rank puts into all-gathers, in this context."""
    with _Gathers() as seen:
        yield seen
