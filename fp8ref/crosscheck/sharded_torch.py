"""Compare FSDP2 in PyTorch with the simulator and with replicated training.

SEMANTICS P-4, P-6, P-11, P-13, H-4.

On every mesh data x fsdp of N gloo ranks:

- codes and scales of every FP8 operand on every rank, before and after training, are compared with
  the simulator's sharded quantization;
- losses, weights and delayed states are compared with one process that trains without FSDP2,
  for every way of gathering weights;
- amax histories are compared with the simulator's, and the bytes of all-gathers are counted.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fp8ref import console, llama
from fp8ref.conformance.compare import Report, compare_bits, compare_codes, compare_scales, compare_values
from fp8ref.crosscheck import fsdp_run, process_group
from fp8ref.crosscheck.fsdp_run import Operands, Run, Watcher
from fp8ref.crosscheck.operands import States, initial_states, states_after
from fp8ref.errors import ConfigError
from fp8ref.formats import BFLOAT16
from fp8ref.recipe import OPERANDS, RECIPES, REDUCED_AXES, CastSpec, Gemm, Recipe, Role
from fp8ref.sim import cast, delayed, scaling, sharding
from fp8ref.sim.mesh import Layout, Mesh
from fp8ref.sim.scaling import Quantized
from fp8ref.train.config import Config
from fp8ref.train.data import loader
from fp8ref.train.sections import ParallelConfig

SCOPES = ("local", "global")
"""The amax scopes that are tried where the config has ``global`` and no delayed scaling."""

STEPS = 5
"""The default number of optimizer steps."""

FIRST = tuple(f"model.layers.0.self_attn.{x}_proj" for x in "qkv")
"""The linears with no FP8 in front of them: every scaling gives them the same input."""


def crosscheck(config: Config, n: int, *, steps: int = STEPS, prepare: Watcher | None = None) -> tuple[Report, dict[str, str]]:
    """Train on every mesh data x fsdp of n ranks, and compare.

    All values of ``parallel``'s data, fsdp, gather, precompute_scales and reduction are tried, not
    only the config's. If the config has amax_scope global, local is tried too: only local scales
    can be repeated by one process without the others. Delayed scaling has no local scope.

    prepare   is called on every rank with every trainer before it trains; it is pickled.
    Returns:  the report, whose backends are named "torch 2x2 local" for data x fsdp and the scope,
              followed by the way of gathering weights where runs are compared; and what was left
              out, with the reason, by name.
    Raises:   ConfigError: a recipe without FP8 or not shared by both backends, a batch that the
              ranks do not share evenly, keys that this check does not take.
              process_group.RankError: a rank failed.
    """
    _check(config, n, steps)
    recipes = {d.path: d.recipe for d in config.decisions() if d.fp8}
    chosen = config.parallel.amax_scope
    scopes = (chosen,) if chosen == "local" or RECIPES[config.numerics.recipe].delayed else SCOPES
    meshes, unfit = _meshes(n), {}
    for copies, parts in meshes[:]:
        if refused := config.replace(parallel={"data": copies, "fsdp": parts}).parallel.unreduced("torch"):
            unfit[f"torch {copies}x{parts}"] = refused[0]
            meshes.remove((copies, parts))
    batches = loader.open_batches(config)
    tokens = [batches.step(step) for step in range(steps + 1)]
    check = _Check(config, n, recipes, tokens, prepare)
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
    """The report being filled, and the runs that other runs are compared with."""

    def __init__(self, config: Config, n: int, recipes: dict[str, Recipe], tokens: list[np.ndarray], prepare: Watcher | None) -> None:
        self.config, self.n, self.recipes, self.tokens, self.prepare = config, n, recipes, tokens, prepare
        self.report = Report()
        self._replicated: dict[tuple[int, int], Run] = {}
        self._first: dict[tuple, tuple[str, Run]] = {}

    def mesh(self, copies: int, parts: int, scope: str) -> str:
        """Run every comparison on one mesh under one scope; return the mesh's name."""
        name = f"torch {copies}x{parts} {scope}"
        gathered_in_fp8 = [path for path, recipe in self.recipes.items() if recipe.serves_both("weight")]
        config = self.config.replace(parallel={"data": copies, "fsdp": parts, "amax_scope": scope})
        variants = dict(_variants(copies, self.n, fp8=bool(gathered_in_fp8)))
        found = self._run(self.n, fsdp_run.train, config, variants, self.tokens, self.prepare)
        watched = [runs[next(iter(variants))] for runs in found]
        one = self._one_process(copies, parts)
        states = self._states(name, watched)
        check_ranks(self.report, name, config, self.recipes, watched, states)
        if scope == "global":
            check_first_layer(self.report, name, watched, one)
        # The one process takes each rank's rows in turn. Its dynamic scales are those of one rank's
        # rows, and so not those that global scope takes from the rows of all ranks.
        exact = scope == "local" or bool(states)
        key = (scope, *self._sum_order(copies, parts))
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

    def _sum_order(self, copies: int, parts: int) -> tuple[int, int]:
        """The order of the sum over ranks, as a key: a sum of two has only one order."""
        return (1, 2) if self.n == 2 else (copies, parts)

    def _one_process(self, copies: int, parts: int) -> Run:
        order = self._sum_order(copies, parts)
        if order not in self._replicated:
            self._replicated[order] = self._run(1, fsdp_run.replicate, self.config, *order, self.tokens)[0]
        return self._replicated[order]

    def _compare(self, backend: str, rank: str, run: Run, against: str, expected: Run) -> None:
        """Compare two runs bit for bit."""
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
        """Compare every rank's delayed states with the simulator's of all ranks' amaxes (H-4).

        Returns:  the simulator's states before every step and after the last.
        """
        found = [initial_states(self.recipes)]
        if not found[0]:
            return []
        for step in range(len(self.tokens) - 1):
            amaxes = {name: [run.amaxes[step][name] for run in runs] for name in found[0]}
            found.append(states_after(found[-1], self.recipes, amaxes))
            for name, s in found[-1].items():
                expected = np.concatenate([[s.stored], [s.step], s.amax_history]).astype(np.float32)
                for rank, run in enumerate(runs):
                    check = self.report.check(f"{name} history/value/{backend}")
                    compare_bits(check, run.states[step][name], expected, names=(f"{backend}, rank {rank}", "sim"))
        return found

    def _bytes(self, name: str, parts: int, layers: list[str], runs: list[tuple[Run, Run]]) -> None:
        """Check that gathering FP8 codes saves half of bfloat16's bytes in each of two passes."""
        shapes = {layer: runs[0][0].weights[f"{layer}.weight"].shape for layer in layers}
        # one byte less an element, in each of two passes; shards are padded to equal lengths
        codes = 2 * sum(-(-rows // parts) * columns for rows, columns in shapes.values())
        check = self.report.check(f"model/bytes saved/value/{name} fp8")
        for fp8, compute in runs:
            compare_values(check, compute.gathered - fp8.gathered, codes, 1.0, names=("fewer bytes than in bfloat16", "bytes of FP8 codes"))


def _meshes(n: int) -> list[tuple[int, int]]:
    """Every (data, fsdp) of n ranks."""
    return [(n // fsdp, fsdp) for fsdp in range(n, 0, -1) if n % fsdp == 0]


def _variants(copies: int, n: int, *, fp8: bool) -> Iterator[tuple[str, dict]]:
    """Settings of ``parallel`` that must not change a bit. The first is the run that is watched."""
    # An ordered reduction takes at most two copies (P-13); gloo adds more in an order of its own.
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
        raise ConfigError(f"--sharded takes recipes {', '.join(taken)}; got {config.numerics.recipe!r}. Set --recipe to one of these.")
    if foreign := keys.foreign("torch"):
        raise ConfigError(f"{', '.join(foreign)} is not a key of --backend torch. Leave it out.")
    if RECIPES[config.numerics.recipe].delayed and keys.amax_scope == "local":
        raise ConfigError(
            f"recipe {config.numerics.recipe!r} keeps one state for all ranks, from the amaxes "
            "of all ranks. Set parallel.amax_scope to global."
        )
    other = [f"parallel.{key}" for key in ("tensor", "compile", "checkpointing") if getattr(keys, key) != getattr(ParallelConfig(), key)]
    if other:  # compiled or recomputed layers call no observer
        raise ConfigError(
            "--sharded N --backend torch shards over data x fsdp only, without compile or "
            f"checkpointing; got {', '.join(other)}. Leave it out."
        )
    if n < 2 or config.data.batch_size % n:
        raise ConfigError(
            f"--sharded N takes 2 ranks or more that share data.batch_size evenly; got {n} and {config.data.batch_size}. Give --data.batch_size a multiple."
        )
    if not 1 <= steps <= config.run.steps:
        raise ConfigError(f"--steps must be between 1 and run.steps = {config.run.steps}; got {steps}.")


def check_ranks(
    report: Report,
    backend: str,
    config: Config,
    recipes: Mapping[str, Recipe],
    runs: Sequence[Run],
    states: Sequence[States],
) -> None:
    """Compare codes and scales of every rank's operands, before and after training (P-4, P-6).

    config   whose data, fsdp and amax_scope are those of the runs.
    runs     the watched run of each rank.
    states   the simulator's delayed states, first and last among them; empty if every scale is
             dynamic.
    """
    initial = llama.initial_weights(config.model, seed=config.run.seed)
    for when, masters in ((0, initial), (-1, runs[0].weights)):
        weights = {layer: cast.round_to(masters[f"{layer}.weight"], BFLOAT16) for layer in recipes}
        of_ranks = [run.operands[when] for run in runs]
        for layer, r in recipes.items():
            for which, spec in r.gemms.items():
                _check_ran(report, backend, layer, which, spec.fp8, of_ranks)
                for role, how, axis in zip(OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True):
                    if how is None or any((layer, which, role) not in mine.fp8 for mine in of_ranks):
                        continue
                    whole = role == "weight"
                    shards = [weights[layer] if whole else mine.hp[layer, role] for mine in of_ranks]
                    state = states[when][f"{layer}/{role}"] if how.delayed else None
                    expected = _simulated(shards, how, axis, config, whole=whole, state=state)
                    for rank, q in enumerate(expected):
                        codes, scale = of_ranks[rank].fp8[layer, which, role]
                        _compare(report, layer, role, backend, q, codes, scale, shards[rank])


def check_first_layer(report: Report, backend: str, runs: Sequence[Run], one: Run) -> None:
    """Under scope global, compare each rank's first input with its rows of one process's (P-4)."""
    whole, names = one.operands[0], (backend, "one process")
    for layer, which, role in whole.fp8:
        if layer not in FIRST or role != "input":
            continue
        codes, scale = whole.fp8[layer, which, role]
        for rank, run in enumerate(runs):
            mine, own = run.operands[0].fp8[layer, which, role]
            rows = slice(rank * len(mine), (rank + 1) * len(mine))
            compare_values(report.check(f"{layer}/{role}/codes/{backend} one process"), mine, codes[rows], 1.0, names=names)
            of_rows = scale[rows] if scale.ndim and len(scale) == len(codes) else scale  # one a row, or one for all
            compare_bits(report.check(f"{layer}/{role}/scale/{backend} one process"), own, of_rows, names=names)


def _check_ran(report: Report, backend: str, layer: str, which: Gemm, planned: bool, of_ranks: Sequence[Operands]) -> None:
    for rank, mine in enumerate(of_ranks):
        if planned != ((layer, which, OPERANDS[which][0]) in mine.fp8):
            problem = "was planned in FP8 and did not run" if planned else "ran in FP8 and was not planned"
            report.check(f"{layer}/{which}/value/{backend}", bound=1.0).fail(f"the GEMM {problem} on rank {rank}")


def _simulated(
    shards: Sequence[np.ndarray], how: CastSpec, axis: int, config: Config, *, whole: bool, state: delayed.DelayedState | None
) -> list[Quantized]:
    """The simulator's operand on every rank.

    shards   rows [m, K] that follow each other in rank order; or, if ``whole``, the same tensor.
    """
    options = {"granularity": how.granularity, "policy": how.policy, "axis": axis}
    if state is not None:
        assert how.delayed is not None
        scales = delayed.scales(state, how.delayed, how.fmt)
        return [scaling.quantize_with(shard, scales, how.fmt, **options) for shard in shards]  # type: ignore[arg-type]
    if whole:
        return [scaling.quantize(shards[0], how.fmt, **options)] * len(shards)  # type: ignore[arg-type]
    mesh = Mesh(axes={"data": config.parallel.data, "fsdp": config.parallel.fsdp})
    layout = Layout(mesh=mesh, shape=(sum(map(len, shards)), shards[0].shape[1]), splits={0: ("data", "fsdp")})
    by_device = dict(zip(mesh.devices, shards, strict=True))
    found = sharding.quantize(by_device, layout, how.fmt, scope=config.parallel.amax_scope, **options)  # type: ignore[arg-type]
    return [found[device] for device in mesh.devices]


def _compare(report: Report, layer: str, role: Role, backend: str, q: Quantized, codes: np.ndarray, scale: np.ndarray, hp) -> None:
    name = f"{layer}/{role}"
    compare_codes(report.check(f"{name}/codes/{backend}"), {"sim": q.codes, backend: codes}, backend, q.fmt, hp)
    compare_scales(report.check(f"{name}/scale/{backend}"), {"sim": q.scale, backend: scale}, backend)
