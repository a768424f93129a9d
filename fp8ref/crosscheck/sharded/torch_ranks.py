"""Compare FSDP2 and tensor parallelism in PyTorch with the simulator and with replicated training.

spec P-4, P-6, P-11, P-13, P-14, H-4.

On every mesh data x fsdp x tensor of N gloo ranks, or data x fsdp x expert of a model with experts:

- codes and scales of every FP8 operand on every rank, before and after training, are compared with
  the simulator's sharded quantization (``sharded.operands``);
- losses, weights and delayed states are compared with one process that trains without FSDP2,
  for every way of gathering weights; under tensor parallelism ranks and ways are compared with each
  other, because ranks round parts of outputs (P-16), and so are ranks with experts, whose loss and
  experts' gradients are of the tokens of all (M-8, X-13);
- amax histories are compared with the simulator's, and the bytes of all-gathers are counted.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from fp8ref.conformance.kit.compare import Report, compare_bits, compare_values
from fp8ref.crosscheck import fsdp_run, process_group
from fp8ref.crosscheck.fsdp_run import Run, Watcher
from fp8ref.crosscheck.operands import States, initial_states, states_after
from fp8ref.crosscheck.sharded.operands import check_first_layer, check_pass, check_ranks
from fp8ref.recipe import RECIPES, Recipe
from fp8ref.shared import console
from fp8ref.shared.errors import ConfigError, require
from fp8ref.spec import llama
from fp8ref.train.config import device_shapes
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import ParallelConfig
from fp8ref.train.data import loader

__all__ = ["STEPS", "crosscheck"]

SCOPES = ("local", "global")
"""The amax scopes that are tried where the config has ``global`` and no delayed scaling."""

STEPS = 5
"""The default number of optimizer steps."""


def crosscheck(
    config: Config, n: int, *, steps: int = STEPS, prepare: Watcher | None = None
) -> tuple[Report, dict[str, str]]:
    """Train on every mesh data x fsdp x tensor (with experts: x expert) of n ranks, and compare.

    All values of ``parallel``'s data, fsdp, expert, tensor, sequence, gather, precompute_scales and
    reduction are tried, not only the config's. If the config has amax_scope global, local is tried
    too, on meshes without tensor: only local scales can be repeated by one process without the
    others. Delayed scaling and stochastic rounding have no local scope.

    prepare   is called on every rank with every trainer before it trains; it is pickled.
    Returns:  the report, whose backends are named "torch 2x2 local" for data x fsdp and the scope,
              "torch 1x2x2 global sequence" where there is tensor parallelism, or "torch 1x2x2
              expert global" where ranks hold other experts, followed by the way of gathering
              weights where runs are compared; and what was left out, with the reason, by name.
    Raises:   ConfigError: a recipe without FP8 or not shared by both backends, a batch that the
              ranks do not share evenly, keys that this check does not take.
              process_group.RankError: a rank failed.
    """
    _check(config, n, steps)
    recipes = {d.path: d.recipe for d in config.decisions() if d.fp8}
    chosen = config.parallel.amax_scope
    scopes: tuple[str, ...] = SCOPES
    recipe = RECIPES[config.numerics.recipe]
    if chosen == "local" or recipe.delayed or recipe.stochastic:
        scopes = (chosen,)
    tried, unfit = [], {}
    for mesh in _meshes_of_experts(n) if config.model.num_experts else _meshes(n):
        for scope in scopes if mesh.tensor == 1 else (chosen,):
            if misfit := _misfit(mesh.of(config, scope)):
                unfit[mesh.name(scope)] = misfit
            else:
                tried.append((mesh, scope))
    batches = loader.open_batches(config)
    tokens = [batches.step(step) for step in range(steps + 1)]
    check = _Check(config, n, recipes, tokens, prepare)
    with console.bar(f"crosscheck {config.numerics.recipe} on {n} ranks", len(tried)) as advance:
        for mesh, scope in tried:
            check.mesh(mesh, scope)
            name = mesh.name(scope)
            if why := _not_repeated(mesh, config):
                only = f"{why}; runs are compared with each other"
                unfit[f"{name} against one process"] = only
            advance(name)
    return check.report, unfit


def _misfit(config: Config) -> str:
    """Why a mesh that tries other axes than data and fsdp does not fit the model; "" if it does.

    Raises:   ConfigError: a mesh of data and fsdp alone does not.
    """
    if refused := config.parallel.unreduced("torch"):
        return refused[0]
    try:
        device_shapes.check(config, "torch")
    except ConfigError as error:
        if config.parallel.tensor == 1 and not config.model.num_experts:
            raise
        return str(error)
    return ""


def _not_repeated(mesh: "_Mesh", config: Config) -> str:
    """Why one process does not repeat the runs of a mesh; "" if it does."""
    if mesh.tensor > 1:
        return "ranks round their parts of outputs (P-16)"
    if config.model.num_experts:
        return "experts' gradients and the loss are of the tokens of all ranks"
    if mesh.data > 2:
        return f"gloo adds the gradients of {mesh.data} copies in an order of its own (P-13)"
    return ""


class _Check:
    """The report being filled, and the runs that other runs are compared with."""

    def __init__(
        self,
        config: Config,
        n: int,
        recipes: dict[str, Recipe],
        tokens: list[np.ndarray],
        prepare: Watcher | None,
    ) -> None:
        self.config, self.n, self.recipes = config, n, recipes
        self.tokens, self.prepare = tokens, prepare
        self.report = Report()
        self._replicated: dict[tuple[int, int], Run] = {}
        self._first: dict[tuple, tuple[str, Run]] = {}

    def mesh(self, mesh: "_Mesh", scope: str) -> None:
        """Run every comparison on one mesh under one scope."""
        name = mesh.name(scope)
        model = self.config.model  # whose experts' weights are gathered in the compute dtype
        gathered_in_fp8 = [
            p
            for p, recipe in self.recipes.items()
            if recipe.serves_both("weight") and llama.experts_of(p, model) is None
        ]
        config = mesh.of(self.config, scope)
        variants = dict(_variants(mesh, fp8=bool(gathered_in_fp8)))
        rank_runs = self._run(self.n, fsdp_run.train, config, variants, self.tokens, self.prepare)
        watched = [runs[next(iter(variants))] for runs in rank_runs]
        states = self._states(name, watched)
        check_ranks(self.report, name, config, self.recipes, watched, states)
        one = self._one_pass() if model.num_experts else self._one_process(mesh)
        if scope == "global":
            check_first_layer(self.report, name, watched, one, tensor=mesh.tensor)
        # The one process takes each rank's rows in turn. Its dynamic scales are those of one rank's
        # rows, and so not those that global scope takes from the rows of all ranks.
        whole = mesh.tensor == 1 and not model.num_experts
        key: tuple = (scope, *self._sum_order(mesh)) if whole else (scope, mesh)
        if (scope == "local" or states) and not _not_repeated(mesh, self.config):
            self._first[key] = "one process", one
        for rank, runs in enumerate(rank_runs):
            for variant, run in runs.items():
                against, expected = self._first.setdefault(key, (f"{name} {variant}", run))
                if run is not expected:
                    self._compare(f"{name} {variant}", f"rank {rank}", run, against, expected)
        if gathered_in_fp8 and config.parallel.shards > 1:
            pairs = [(runs["fp8"], runs["compute"]) for runs in rank_runs]
            self._bytes(name, config, gathered_in_fp8, pairs)

    def _run(self, n: int, *what) -> list:
        return process_group.run(n, *what, timeout_s=self.config.parallel.timeout_s)

    def _sum_order(self, mesh: "_Mesh") -> tuple[int, int]:
        """The order of the sum over ranks, as a key: a sum of two has only one order."""
        return (1, 2) if self.n == 2 else (mesh.data, mesh.fsdp)

    def _one_process(self, mesh: "_Mesh") -> Run:
        """One process's run in a mesh's order of sums; next to tensor parallelism, in any order."""
        if mesh.tensor > 1 and self._replicated:
            return next(iter(self._replicated.values()))
        order = self._sum_order(mesh)
        if order not in self._replicated:
            self._replicated[order] = self._run(
                1, fsdp_run.replicate, self.config, *order, self.tokens
            )[0]
        return self._replicated[order]

    def _one_pass(self) -> Run:
        """One process's operands of the first batch, compared with the simulator too."""
        if not self._replicated:
            one = self._run(1, fsdp_run.replicate, self.config, 1, 1, self.tokens[:1])[0]
            self._replicated[1, 1] = one
            config = self.config.replace(parallel={"data": 1, "fsdp": 1, "expert": 1})
            check_pass(self.report, "torch one process", config, self.recipes, one.operands[0])
        return self._replicated[1, 1]

    def _compare(self, backend: str, rank: str, run: Run, against: str, expected: Run) -> None:
        """Compare two runs bit for bit."""
        names = f"{backend}, {rank}", against
        for i, metric in enumerate(("losses", "grad_norms")):
            check = self.report.check(f"model/{metric}/value/{backend}")
            compare_values(check, run.metrics[:, i], expected.metrics[:, i], 1.0, names=names)
        for parameter, value in expected.weights.items():
            layer = parameter.removesuffix(".weight")
            check = self.report.check(f"{layer}/weights/value/{backend}")
            compare_bits(check, run.weights[parameter], value, names=names)
        for mine, theirs in zip(run.states, expected.states, strict=True):
            for name, state in theirs.items():
                check = self.report.check(f"{name} state/value/{backend}")
                compare_bits(check, mine[name], state, names=names)

    def _states(self, backend: str, runs: list[Run]) -> list[States]:
        """Compare every rank's delayed states with the simulator's of all ranks' amaxes (H-4).

        Returns:  the simulator's states before every step and after the last.
        """
        states = [initial_states(self.recipes)]
        if not states[0]:
            return []
        for step in range(len(self.tokens) - 1):
            amaxes = {name: [run.amaxes[step][name] for run in runs] for name in states[0]}
            states.append(states_after(states[-1], self.recipes, amaxes))
            for name, s in states[-1].items():
                expected = np.concatenate([[s.stored], [s.step], s.amax_history]).astype(np.float32)
                check = self.report.check(f"{name} history/value/{backend}")
                for rank, run in enumerate(runs):
                    names = f"{backend}, rank {rank}", "sim"
                    compare_bits(check, run.states[step][name], expected, names=names)
        return states

    def _bytes(
        self, name: str, config: Config, layers: list[str], runs: list[tuple[Run, Run]]
    ) -> None:
        """Check that gathering FP8 codes saves half of bfloat16's bytes in each of two passes."""
        weights = {name: runs[0][0].weights[name] for name in (f"{p}.weight" for p in layers)}
        shapes = [
            device_shapes.at_rest(name, weight.shape, config, "torch")
            for name, weight in weights.items()
        ]
        # one byte less an element, in each of two passes; shards are padded to equal lengths
        codes = 2 * sum(rows * columns for rows, columns in shapes)
        check = self.report.check(f"model/bytes saved/value/{name} fp8")
        names = "fewer bytes than in bfloat16", "bytes of FP8 codes"
        for fp8, compute in runs:
            compare_values(check, compute.gathered - fp8.gathered, codes, 1.0, names=names)


@dataclass(frozen=True)
class _Mesh:
    """A mesh of ranks, with or without sequence parallelism."""

    data: int
    fsdp: int
    tensor: int = 1
    sequence: bool = False
    expert: int = 1

    def name(self, scope: str) -> str:
        """As backends are named in reports."""
        tensor = f"x{self.tensor}" * (self.tensor > 1)
        expert = f"x{self.expert} expert" * (self.expert > 1)
        sequence = " sequence" * self.sequence
        return f"torch {self.data}x{self.fsdp}{tensor}{expert} {scope}{sequence}"

    def of(self, config: Config, scope: str) -> Config:
        """The config of a run on this mesh."""
        return config.replace(parallel={**asdict(self), "amax_scope": scope})


def _meshes(n: int) -> list[_Mesh]:
    """Every mesh of n ranks, those without tensor parallelism first."""
    meshes = []
    for tensor in (t for t in range(1, n + 1) if n % t == 0):
        shared = n // tensor
        for fsdp in (f for f in range(shared, 0, -1) if shared % f == 0):
            ways = (False, True) if tensor > 1 else (False,)
            meshes += [_Mesh(shared // fsdp, fsdp, tensor, sequence) for sequence in ways]
    return meshes


def _meshes_of_experts(n: int) -> list[_Mesh]:
    """Every mesh data x fsdp x expert of n ranks."""
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    return [
        _Mesh(n // fsdp // expert, fsdp, expert=expert)
        for expert in divisors
        for fsdp in divisors[::-1]
        if n % (fsdp * expert) == 0
    ]


def _variants(mesh: _Mesh, *, fp8: bool) -> Iterator[tuple[str, dict]]:
    """Settings of ``parallel`` that must not change a bit. The first is the run that is watched."""
    if mesh.data * mesh.fsdp * mesh.expert == 1:  # nothing is gathered or reduced
        yield "alone", {}
        return
    # An ordered reduction takes at most two copies (P-13); gloo adds more in an order of its own.
    reduction = "ordered" if mesh.data <= 2 else "native"
    compute = {"gather": "compute", "precompute_scales": True, "reduction": reduction}
    in_fp8 = compute | {"gather": "fp8"}
    if fp8:
        yield "fp8", in_fp8
        if mesh.tensor == 1:
            yield "fp8 each", in_fp8 | {"precompute_scales": False}
    yield "compute", compute
    if mesh.expert > 1:  # rows in the compute dtype too
        yield "compute rows", compute | {"expert_dispatch": "compute"}
    if mesh.data * mesh.fsdp * mesh.expert == 2 and mesh.tensor == 1:
        yield "native", in_fp8 | {"reduction": "native"}


def _check(config: Config, n: int, steps: int) -> None:
    keys = config.parallel
    supported = [name for name, recipe in RECIPES.items() if recipe.fp8]
    if config.numerics.recipe not in supported:
        raise ConfigError(
            f"--sharded takes recipes {', '.join(supported)}; got {config.numerics.recipe!r}. Set "
            "--recipe to one of these."
        )
    if foreign := keys.foreign("torch"):
        raise ConfigError(foreign[0])
    if keys.reduce_mu == "automatic":
        raise ConfigError(
            "--sharded compares with one process, which has no mu of ranks (P-22); got "
            "parallel.reduce_mu 'automatic'. Set it to one, and leave parallel.mu_threshold and "
            "mu_window out."
        )
    if RECIPES[config.numerics.recipe].delayed and keys.amax_scope == "local":
        raise ConfigError(
            f"recipe {config.numerics.recipe!r} keeps one state for all ranks, from the amaxes "
            "of all ranks. Set parallel.amax_scope to global."
        )
    other = [
        f"parallel.{key}"
        for key in ("expert", "tensor", "sequence", "compile", "checkpointing")
        if getattr(keys, key) != getattr(ParallelConfig(), key)
    ]
    if other:  # compiled or recomputed layers call no observer
        raise ConfigError(
            "--sharded N --backend torch tries every expert, tensor and sequence, without "
            f"compile or checkpointing; got {', '.join(other)}. Leave it out."
        )
    if n < 2 or config.data.batch_size % n:
        raise ConfigError(
            f"--sharded N takes 2 ranks or more that share data.batch_size evenly; got {n} and "
            f"{config.data.batch_size}. Give --data.batch_size a multiple."
        )
    rows = config.data.batch_size * config.data.sequence_length // n
    multiple = RECIPES[config.numerics.recipe].rows
    if rows % multiple:
        raise ConfigError(
            f"--sharded compares with one process, whose blocks of {multiple} tokens are those "
            f"of ranks if each rank has a multiple of {multiple} under recipe "
            f"{config.numerics.recipe!r} (P-5); got {rows}. Give --data.sequence_length or "
            "--data.batch_size a multiple."
        )
    text = f"--steps must be between 1 and run.steps = {config.run.steps}; got {steps}."
    require(1 <= steps <= config.run.steps, text, ConfigError)
