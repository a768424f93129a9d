"""Amaxes of experts' operands that JAX's devices share, in 32 bits (spec X-3, X-9, X-14).

A dynamic scale that covers rows of a group, of all of them or of a column, is of that group's rows
on all devices that have its expert: along data and fsdp. Rows that move as codes are cast before,
by the amaxes of all experts on all devices. A delayed cast's amax is of all devices and all groups,
one number; so is whether any group has rows, which is asked where something is observed. gate and
up read one input and share its amax. But where fsdp gathers experts, the backward pass of each
projection runs behind a barrier, and takes by itself what it wants. Under full checkpointing the
forward pass shares again what it casts by, and not what it has observed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fp8ref.recipe import Role
from fp8ref.selection.linears import Decision
from fp8ref.spec import granularity
from fp8ref.train.config.config import Config


@dataclass(frozen=True)
class Moving:
    """Whether rows of a layer's experts move between devices as FP8 codes (X-14): those that are
    sent, and gradients of results.
    """

    rows: bool
    gradients: bool


def moving(projections: dict[str, Decision], config: Config) -> Moving:
    """projections: of one layer, by their last names."""
    keys, (gate, up, down) = (
        config.parallel,
        (projections[f"{name}_proj"].recipe for name in ("gate", "up", "down")),
    )
    if keys.expert == 1 or keys.expert_dispatch != "fp8":
        return Moving(False, False)
    return Moving(
        gate == up and gate.fp8 and gate.serves_both("input"),
        down.fp8 and down.serves_both("grad_output"),
    )


def layers(config: Config) -> Iterator[dict[str, Decision]]:
    """Of each layer with experts {projection: its decision}."""
    decisions: dict[str, dict[str, Decision]] = {}
    for decision in config.decisions():
        if decision.experts is not None:
            layer, _, last = decision.path.rpartition(".")
            decisions.setdefault(layer, {})[last] = decision
    yield from decisions.values()


def amaxes(config: Config) -> Iterator[tuple[int, float]]:
    """(devices that take the largest, numbers that each has), for one microbatch on a mesh."""
    for projections in layers(config):
        yield from _observed(projections, config)
        yield from _scaled(projections, config)


def _observed(projections: dict[str, Decision], config: Config) -> Iterator[tuple[int, float]]:
    """What delayed scaling observes: each tensor's amax, and by pass whether there are rows."""
    keys, moved = config.parallel, moving(projections, config)
    barrier = keys.fsdp > 1 or keys.checkpointing == "full"
    seen: set[tuple] = set()
    for last, decision in projections.items():
        for which, role, cast, _ in decision.recipe.operand_casts:
            if cast.delayed is None:
                continue
            seen.add(("amax", role, _owner(role, last, apart=False)))
            if _moves(role, last, moved):
                continue  # observed before it moves, without that question
            if which == "output" or (role == "grad_output" and not barrier):
                seen.add(("rows", "forward"))
            elif role == "grad_output":
                seen.add(("rows", "backward", last if keys.fsdp > 1 else ""))
    yield keys.devices, len(seen)


def _scaled(projections: dict[str, Decision], config: Config) -> Iterator[tuple[int, float]]:
    """Amaxes that dynamic scales are made of."""
    keys, moved, seen = config.parallel, moving(projections, config), set()
    copies = keys.data * keys.fsdp if keys.amax_scope == "global" else 1
    again = keys.checkpointing == "full"
    for last, decision in projections.items():
        experts = decision.experts or 0
        n, k = decision.shape
        for which, role, cast, axis in decision.recipe.operand_casts:
            if role == "weight":
                continue  # whose amaxes are its device's own
            forward = which == "output"
            kind = granularity.by_name(cast.granularity)
            if (
                cast.delayed is not None
                or kind.reduced is not None
                or (cast.granularity != "tensorwise" and axis != 0)
            ):
                continue  # a state's, of blocks, or of each row by itself
            moves = _moves(role, last, moved)
            apart = keys.fsdp > 1 and not moves and not forward
            key = (role, cast, _owner(role, last, apart), apart)
            if key in seen:
                continue
            seen.add(key)
            times = 2 if again and forward else 1
            if moves:
                yield copies * keys.expert, times * experts
            else:
                by_row = k if role == "input" else n
                columns = 1 if cast.granularity == "tensorwise" else by_row
                yield copies, times * experts // keys.expert * columns


def _owner(role: Role, last: str, apart: bool) -> str:
    """The projection whose operand this is: up's input is gate's."""
    return "gate_proj" if role == "input" and last == "up_proj" and not apart else last


def _moves(role: Role, last: str, moved: Moving) -> bool:
    return (role == "input" and last != "down_proj" and moved.rows) or (
        role == "grad_output" and last == "down_proj" and moved.gradients
    )
