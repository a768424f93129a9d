"""Holds FSDP2 in PyTorch to the simulator and to replicated data parallelism (SEMANTICS P-4, P-6, P-11, P-13, H-4).

On every mesh data x fsdp of N gloo ranks: codes and scales of every FP8 operand on every rank, before and after some steps, against the
simulator's sharded quantisation; losses, weights and delayed states of those steps, however weights are gathered, against a run in one process
that knows no FSDP; histories against the simulator's; bytes gathered.
"""

from collections.abc import Iterator

import numpy as np

from fp8ref import console
from fp8ref.conformance.compare import Report, compare_bits, compare_values
from fp8ref.crosscheck import delayed_states, fsdp_run, process_group, sharded_operands
from fp8ref.crosscheck.delayed_states import States
from fp8ref.crosscheck.fsdp_run import Run, Watcher
from fp8ref.errors import ConfigError
from fp8ref.recipe import RECIPES, Recipe
from fp8ref.train.config import Config
from fp8ref.train.data import loader
from fp8ref.train.sections import ParallelConfig

SCOPES = ("local", "global")
STEPS = 5


def crosscheck(config: Config, n: int, *, steps: int = STEPS, prepare: Watcher | None = None) -> tuple[Report, dict[str, str]]:
    """Train on every mesh data x fsdp of n ranks, and compare.

    Of ``parallel`` it goes through data, fsdp, gather, precompute_scales and reduction, whatever the config has; and where amax_scope is global,
    through both scopes (``delayed`` has but that one), for under local alone one process without the others can do what a rank does.
    prepare   is called on every rank with every trainer before it trains; it is pickled.
    Returns:  the report, its backends named "torch 2x2 local" for data x fsdp and the scope, with how weights are gathered where runs are
              compared; and what was left out, by name, and why.
    Raises:   ConfigError: a recipe without FP8 or that is not shared, ranks that do not share a batch evenly, keys that are not of this check.
              ranks.RankError: a rank failed.
    """
    _check(config, n, steps)
    recipes = {d.path: d.recipe for d in config.decisions() if d.fp8}
    asked = config.parallel.amax_scope
    scopes = (asked,) if asked == "local" or RECIPES[config.numerics.recipe].delayed else SCOPES
    meshes = _meshes(n)
    batches = loader.open_batches(config)
    tokens = [batches.step(step) for step in range(steps + 1)]
    check, unfit = _Check(config, n, recipes, tokens, prepare), {}
    with console.bar(f"crosscheck {config.numerics.recipe} on {n} ranks", len(meshes) * len(scopes)) as advance:
        for scope in scopes:
            for copies, parts in meshes:
                name = check.mesh(copies, parts, scope)
                if copies > 2:
                    why = f"gloo adds the gradients of {copies} copies in an order of its own (P-13); runs are compared with each other"
                    unfit[f"{name} against one process"] = why
                advance(name)
    return check.report, unfit


class _Check:
    """The report under way, and the runs that others are compared with."""

    def __init__(self, config: Config, n: int, recipes: dict[str, Recipe], tokens: list[np.ndarray], prepare: Watcher | None) -> None:
        self.config, self.n, self.recipes, self.tokens, self.prepare = config, n, recipes, tokens, prepare
        self.report = Report()
        self._replicated: dict[tuple[int, int], Run] = {}
        self._first: dict[tuple, tuple[str, Run]] = {}

    def mesh(self, copies: int, parts: int, scope: str) -> str:
        """Everything that is compared on one mesh, by one scope; its name."""
        name = f"torch {copies}x{parts} {scope}"
        gathered_in_fp8 = [path for path, recipe in self.recipes.items() if recipe.serves_both("weight")]
        config = self.config.replace(parallel={"data": copies, "fsdp": parts, "amax_scope": scope})
        variants = dict(_variants(copies, self.n, fp8=bool(gathered_in_fp8)))
        found = self._run(self.n, fsdp_run.train, config, variants, self.tokens, self.prepare)
        watched = [runs[next(iter(variants))] for runs in found]
        one = self._one_process(copies, parts)
        held = self._states(name, watched)
        sharded_operands.check(self.report, name, config, self.recipes, watched, held)
        if scope == "global":
            sharded_operands.check_first_layer(self.report, name, watched, one)
        exact = scope == "local" or bool(held)  # of dynamic scales of all ranks' amaxes, one process would need those of the whole batch
        key = (scope, *self._tree(copies, parts))
        if exact and copies <= 2:
            self._first[key] = "one process", one
        for rank, runs in enumerate(found):
            for variant, run in runs.items():
                against, expected = self._first.setdefault(key, (f"{name} {variant}", run))
                if run is not expected:
                    self._compare(f"{name} {variant}", f"rank {rank}", run, against, expected)
        if gathered_in_fp8 and parts > 1:
            self._bytes(name, parts, gathered_in_fp8, [(runs["fp8"], runs["compute"]) for runs in found])
        return name

    def _run(self, n: int, *what) -> list:
        return process_group.run(n, *what, timeout_s=self.config.parallel.timeout_s)

    def _tree(self, copies: int, parts: int) -> tuple[int, int]:
        """Names the order of the sum over ranks: that of two has but one."""
        return (1, 2) if self.n == 2 else (copies, parts)

    def _one_process(self, copies: int, parts: int) -> Run:
        tree = self._tree(copies, parts)
        if tree not in self._replicated:
            self._replicated[tree] = self._run(1, fsdp_run.replicate, self.config, *tree, self.tokens)[0]
        return self._replicated[tree]

    def _compare(self, backend: str, rank: str, run: Run, against: str, expected: Run) -> None:
        """Two runs, bit for bit."""
        names = f"{backend}, {rank}", against
        for i, metric in enumerate(("losses", "grad_norms")):
            check = self.report.check(f"model/{metric}/value/{backend}")
            compare_values(check, run.metrics[:, i], expected.metrics[:, i], 1.0, names=names)
        for parameter, value in expected.weights.items():
            check = self.report.check(f"{parameter.removesuffix('.weight')}/weights/value/{backend}")
            compare_bits(check, run.weights[parameter], value, names=names)
        for mine, theirs in zip(run.states, expected.states, strict=True):
            for name, state in theirs.items():
                compare_bits(self.report.check(f"{name} state/value/{backend}"), mine[name], state, names=names)

    def _states(self, backend: str, runs: list[Run]) -> list[States]:
        """The simulator's delayed states before every step and after the last, of what the ranks had in each; compared with each rank's."""
        found = [delayed_states.initial(self.recipes)]
        if not found[0]:
            return []
        for step in range(len(self.tokens) - 1):
            found.append(
                delayed_states.after(found[-1], self.recipes, {name: [run.amaxes[step][name] for run in runs] for name in found[0]})
            )
            for name, s in found[-1].items():
                expected = np.concatenate([[s.stored], [s.step], s.amax_history]).astype(np.float32)
                for rank, run in enumerate(runs):
                    check = self.report.check(f"{name} history/value/{backend}")
                    compare_bits(check, run.states[step][name], expected, names=(f"{backend}, rank {rank}", "sim"))
        return found

    def _bytes(self, name: str, parts: int, layers: list[str], runs: list[tuple[Run, Run]]) -> None:
        """FP8 codes are half of bfloat16, in the forward pass and in the backward pass; everything else is gathered alike."""
        shapes = {layer: runs[0][0].weights[f"{layer}.weight"].shape for layer in layers}
        codes = 2 * sum(-(-rows // parts) * columns for rows, columns in shapes.values())  # shards are padded to equal lengths
        check = self.report.check(f"model/bytes saved/value/{name} fp8")
        for fp8, compute in runs:
            compare_values(check, compute.gathered - fp8.gathered, codes, 1.0, names=("fewer bytes than in bfloat16", "bytes of FP8 codes"))


def _meshes(n: int) -> list[tuple[int, int]]:
    """Every (data, fsdp) of n ranks."""
    return [(n // fsdp, fsdp) for fsdp in range(n, 0, -1) if n % fsdp == 0]


def _variants(copies: int, n: int, *, fp8: bool) -> Iterator[tuple[str, dict]]:
    """Keys of ``parallel`` that change no bit; the first is the one that is watched."""
    ordered = {"gather": "compute", "precompute_scales": True, "reduction": "ordered" if copies <= 2 else "native"}
    if fp8:
        yield "fp8", {**ordered, "gather": "fp8"}
        yield "fp8 each", {**ordered, "gather": "fp8", "precompute_scales": False}
    yield "compute", ordered
    if n == 2:
        yield "native", {**ordered, "gather": "fp8", "reduction": "native"}


def _check(config: Config, n: int, steps: int) -> None:
    keys = config.parallel
    taken = [name for name, recipe in RECIPES.items() if recipe.fp8 and not recipe.in_blocks]
    if config.numerics.recipe not in taken:
        raise ConfigError(f"--sharded is of recipes {', '.join(taken)}; got {config.numerics.recipe!r}. Give --recipe one of these.")
    if foreign := keys.foreign("torch"):
        raise ConfigError(f"{', '.join(foreign)} is not a key of --backend torch. Leave it out.")
    if RECIPES[config.numerics.recipe].delayed and keys.amax_scope == "local":
        raise ConfigError(
            f"recipe {config.numerics.recipe!r} keeps one state for all ranks, of amaxes of all. Set parallel.amax_scope to global."
        )
    other = [f"parallel.{key}" for key in ("tensor", "compile", "checkpointing") if getattr(keys, key) != getattr(ParallelConfig(), key)]
    if other:  # what is compiled or runs again shows its operands to no observer
        raise ConfigError(f"--sharded N --backend torch is of data x fsdp, layer after layer; got {', '.join(other)}. Leave it out.")
    if n < 2 or config.data.batch_size % n:
        raise ConfigError(
            f"--sharded N takes 2 ranks or more that share data.batch_size evenly; got {n} and {config.data.batch_size}. Give --data.batch_size a multiple."
        )
    if not 1 <= steps <= config.run.steps:
        raise ConfigError(f"--steps lies between 1 and run.steps = {config.run.steps}; got {steps}.")
