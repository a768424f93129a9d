"""What JAX's linears share beside tensors: amaxes, and gathered scales of rows (P-2, P-6).

An amax is reduced over the mesh axes that cut its group of elements. The scales of rows go with the
rows. The two GEMMs that take one cast share its amax. Inside shard_map linears that read one input
share its amaxes too. Under plain jit they do not, and the partitioner reduces amaxes of columns of
an input or a weight twice, as int32 and as uint32, and scatters those of a grad_output, whose
scales it then gathers. Where checkpointing runs a forward pass again, it shares again what it casts
by, but not what it observes, which nothing wants. Amaxes of weights that a step takes first (P-9)
are shared once (``step_amaxes``). Experts' amaxes are those of ``experts``.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fp8ref.estimate.collectives import experts
from fp8ref.recipe import ROLES, Role
from fp8ref.selection.linears import Decision
from fp8ref.spec import llama
from fp8ref.train.config.config import Config
from fp8ref.train.config.device_shapes import runs_output_again, scaled_first, tokens, used


@dataclass(frozen=True)
class Shared:
    """Numbers of 32 bits that devices share: amaxes, whose largest counts, or gathered scales.

    elements  of amaxes as many as each device has; of scales all that are gathered.
    """

    devices: int
    elements: float
    kind: Literal["all-reduce", "reduce-scatter", "all-gather"] = "all-reduce"
    dtype: Literal["int32", "uint32", "float32"] = "int32"


def part_amaxes(config: Config) -> Iterator[Shared]:
    """Those of one microbatch on a mesh."""
    seen: set[tuple] = set()
    first = scaled_first(config)
    for decision in config.decisions():
        if decision.experts is None:
            yield from _linear_amaxes(
                decision,
                config,
                seen,
                [role for role in ROLES if role != "weight" or decision.path not in first],
            )
    yield from (Shared(devices, count) for devices, count in experts.amaxes(config))


def step_amaxes(config: Config) -> Iterator[Shared]:
    """Those of a step, however many microbatches it has: amaxes of weights, all in one.

    Under plain jit each over its own devices.
    """
    first = scaled_first(config)
    devices = [
        math.prod(
            _count(axes, "weight", config)
            for axes in _cut("weight", path.rpartition(".")[2], config)
        )
        for path in first
    ]
    if config.parallel.through == "jit":
        yield from (Shared(own, 1) for own in devices)
    elif first:
        yield Shared(max(devices), len(first))


def _linear_amaxes(
    decision: Decision, config: Config, seen: set[tuple], roles: Sequence[Role]
) -> Iterator[Shared]:
    layer, _, last = decision.path.rpartition(".")
    jit = config.parallel.through == "jit"
    again = runs_output_again(decision.path, config, "jax")
    for role in roles:
        sizes, cut = _sizes(role, decision, config), _cut(role, last, config)
        owner = llama.FIRST_READER.get(last, last) if role == "input" and not jit else last
        for which, of, cast, axis in decision.recipe.operand_casts:
            if of != role or cast.granularity not in ("tensorwise", "rowwise"):
                continue  # no layout cuts a block (P-5)
            whole = cast.granularity == "tensorwise"
            key = (layer, owner, role, cast, None if whole else axis)
            if key in seen:
                continue
            seen.add(key)
            times = 1 + (again and which == "output" and cast.delayed is None)
            # one state for all (H-4)
            if cast.delayed is None:
                scope = config
            else:
                scope = config.replace(parallel={"amax_scope": "global"})
            devices = tuple(_count(axes, role, scope) for axes in cut)
            if whole:
                yield Shared(math.prod(devices), times)
                continue
            amaxes = Shared(devices[axis], times * sizes[1 - axis])
            if jit and role == "grad_output" and axis == 0:
                yield dataclasses.replace(amaxes, kind="reduce-scatter")
                yield dataclasses.replace(amaxes, kind="all-gather", dtype="float32")
            else:
                yield amaxes
                if jit:
                    yield dataclasses.replace(amaxes, dtype="uint32")
            if axis == 1:
                gathered = _gathered(role, last, config)
                # also what undoes each scale
                pair = role == "grad_output" and decision.recipe.pairs_gradients and not jit
                yield Shared(
                    gathered, times * gathered * sizes[0] * (1 + pair), "all-gather", "float32"
                )


def _sizes(role: Role, decision: Decision, config: Config) -> tuple[float, float]:
    """[rows, columns] of a device's own piece, before any gather."""
    keys, last = config.parallel, decision.path.split(".")[-1]
    n, k = used(decision.path, decision.shape, config)
    if role == "weight":
        return n / keys.shards, k
    pieces = _gathered(role, last, config)
    if last not in llama.COLUMN + llama.ROW and keys.sequence:  # lm_head has a device's own tokens
        pieces = keys.tensor
    return tokens(config) / pieces, k if role == "input" else n


def _cut(role: Role, last: str, config: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes that cut the rows and the columns of a tensor at rest."""
    keys = config.parallel
    batch = ("data", "fsdp", "expert", "context")
    in_rows = {"input": last in llama.COLUMN, "grad_output": last in llama.ROW, "weight": False}[
        role
    ]
    if role == "weight":
        return ("fsdp", "context", "expert", *(["tensor"] if last in llama.COLUMN else [])), (
            "tensor",
        ) if last in llama.ROW else ()
    parallel_linear = last in llama.COLUMN + llama.ROW
    spread = keys.sequence and (in_rows or not parallel_linear)
    rows = (*batch, "tensor") if spread else batch
    features = {"input": last in llama.ROW, "grad_output": last in llama.COLUMN}[role]
    return rows, ("tensor",) if features else ()


def _count(axes: tuple[str, ...], role: Role, config: Config) -> int:
    """Devices along some axes, within the scope of an amax."""
    local = config.parallel.amax_scope == "local" and role != "weight"
    return math.prod(
        getattr(config.parallel, axis) for axis in axes if not (local and axis != "tensor")
    )


def _gathered(role: Role, last: str, config: Config) -> int:
    """The devices whose rows are gathered for use."""
    keys = config.parallel
    if role == "weight":
        return keys.shards
    if keys.sequence and last in (llama.COLUMN if role == "input" else llama.ROW):
        return keys.tensor
    return 1
