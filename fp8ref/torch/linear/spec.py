"""What is constant of a linear, and how each of its GEMMs takes its operands (spec L-2, L-3)."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import _get_default_store, _resolve_process_group

from fp8ref.recipe import OPERANDS, REDUCED_AXES, ROLES, CastSpec, Gemm, Recipe, Role
from fp8ref.shared.errors import require
from fp8ref.spec.kernels import Choice
from fp8ref.torch.delayed import rank_checks
from fp8ref.torch.kernels import choice
from fp8ref.torch.linear import both_orders
from fp8ref.torch.linear.both_orders import Use
from fp8ref.torch.quantize.philox import Draw
from fp8ref.torch.quantize.scaling import Groups

__all__ = ["Spec", "casts_by_kernels", "roles_by_kernels"]


@dataclass(frozen=True)
class Spec:
    """A linear's constants: recipe, process groups that share amaxes, and what casts. autocast: the
    weight was cast to torch.autocast's dtype for this pass; nothing else keeps it. sharded: FSDP2
    frees the weight after this pass, and codes kept for the backward pass would fill its place."""

    recipe: Recipe
    groups: Groups
    kernels: Choice
    autocast: bool = False
    sharded: bool = False

    @classmethod
    def numbered(cls, number: int) -> "Spec":
        """The spec of a ``number``, which dynamo reads as a constant."""
        return list(_NUMBERS)[number]

    @property
    def number(self) -> int:
        """The number of equal specs in this process."""
        return _NUMBERS.setdefault(self, len(_NUMBERS))

    @functools.cached_property
    def uses(self) -> dict[tuple[Gemm, Role], Use]:
        """How each GEMM takes both its operands."""
        uses = {}
        for which, spec in self.recipe.gemms.items():
            operands = zip(OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True)
            for role, cast, axis in operands:
                group = None
                if cast is not None:
                    two_level = cast.policy.two_level is not None  # the tensor's amax is shared
                    kind = "tensorwise" if two_level else cast.granularity
                    group = self.groups.sharing(role, kind, axis - 2)
                uses[which, role] = Use(cast, axis - 2, group, ragged=which == "grad_weight")
        return uses

    @functools.cached_property
    def role_uses(self) -> dict[Role, tuple[Use, Use]]:
        """How both GEMMs of a role take its tensor, in the order of a step."""
        uses = {r: [use for (_, role), use in self.uses.items() if role == r] for r in ROLES}
        return {role: (first, second) for role, (first, second) in uses.items()}

    @functools.cached_property
    def rows(self) -> int:
        """How many rows of zeros stand for no tokens: as many as grad_weight rotates together."""
        cast = self.recipe.grad_weight.a
        return 1 if cast is None or cast.rotation is None else cast.rotation.size

    @functools.cached_property
    def cast_once(self) -> dict[Role, CastSpec | None]:
        """The cast of each role whose two GEMMs take the same codes (L-3); None of any other."""
        return {
            role: first.cast if self.recipe.serves_both(role) else None
            for role, (first, _) in self.role_uses.items()
        }

    @functools.cached_property
    def pairs(self) -> dict[Role, tuple[Use, Use]]:
        """``role_uses`` of the roles that kernels can cast once for both."""
        return {
            role: uses for role, uses in self.role_uses.items() if both_orders.is_supported(uses)
        }

    @functools.cached_property
    def merges(self) -> bool:
        """Whether a pass merges amaxes of several ranks; under delayed scaling an update does."""
        shared = [use.cast for use in self.uses.values() if use.cast and use.group]
        return any(cast.delayed is None for cast in shared)

    def draw(self, which: Gemm, role: Role, x: Any, keys: Tensor | None) -> Draw | None:
        """What rounds an operand stochastically, of which this rank has x [rows, columns], in a
        GEMM, by the seeds of a linear's GEMMs; None to nearest.

        ValueError: no seed was set.
        """
        use = self.uses[which, role]
        if use.cast is None or not use.cast.stochastic:
            return None
        require(
            keys is not None,
            f"recipe {self.recipe.name!r} rounds {role} stochastically in {which}, by a seed "
            "(S-24); got none. Call fp8ref.torch.linear.rounding.seed_(model, seed) before a pass.",
        )
        assert keys is not None
        low, high = keys[list(OPERANDS).index(which)].unbind()
        bits = 8 if use.cast.rounding == "stochastic_8" else 48
        return Draw((low, high), bits, self._start(role, x, (0, 1) if use.axis == -1 else (1, 0)))

    def _start(self, role: Role, x: Tensor, order: tuple[int, int]) -> int | Tensor:
        """The places of x's elements in the whole operand, as of ``Draw``. order: its axes, the
        reduced one last."""
        outer, inner = order
        parts, shape = self.groups.parts(role), x.shape
        length = shape[inner] * parts[inner][1]
        first = parts[outer][0] * shape[outer] * length + parts[inner][0] * shape[inner]
        if parts[inner][1] == 1:
            return first
        rows, columns = (torch.arange(shape[axis], device=x.device) for axis in order)
        return first + rows[:, None] * length + columns

    def runs_kernels(self, device: torch.device) -> bool:
        """Whether Triton kernels cast on a device, and on all ranks that share amaxes.

        ValueError: as ``choice.explain``; another rank does otherwise.
        """
        if self.groups.every is None:
            return choice.resolve(self.kernels, device)
        return _run_kernels(self.kernels, device, self.groups.every, self.merges)

    def by_kernels(self, role: Role, device: torch.device) -> CastSpec | None:
        """The cast of a role's tensor for both its GEMMs, if kernels do it on a device."""
        if role not in self.pairs or not self.runs_kernels(device):
            return None
        return self.pairs[role][0].cast


_NUMBERS: dict[Spec, int] = {}


_USED: dict[tuple[str, str], list[bool]] = {}
"""{process group, kind of device: what casts there, by first use; True: Triton kernels}."""


@functools.cache
def _run_kernels(kernels: Choice, device: torch.device, group: str, merges: bool) -> bool:
    """``Spec.runs_kernels`` for the ranks of a group, by name.

    Kernels merge amaxes another number of times than plain operations: ranks that differ would
    hang, or take one amax for another. Models of one group may have choices of their own: the first
    kind that casts on a rank is compared with the first one on others, and so is the second.
    """
    used = _USED.setdefault((group, device.type), [])
    key = f"fp8ref/kernels/{group}/{device.type}/{len(used)}"
    compares = rank_checks.several_ranks() and distributed.get_backend() != "fake"
    try:
        own = choice.explain(kernels, device)
    except ValueError:
        if compares:
            _get_default_store().set(f"{key}/alike", "no")
        raise
    if compares and own.triton not in used:
        what = "Triton kernels" if own.triton else "plain operations"
        require(
            _are_alike(key, own.triton, group, waits=merges),
            f"ranks that share amaxes cast by one kind of kernels; on this rank {what} cast "
            f"({own.reason}), on another one they do not. Use kernels 'plain' on every rank, which "
            "gives the same bits.",
        )
        used.append(own.triton)
    return own.triton


def _are_alike(key: str, triton: bool, group: str, *, waits: bool) -> bool:
    """Whether all ranks of a group do as this one, by the store of the job.

    waits     for the other ranks, as merging their amaxes does; else for those that came before.
              A trace never waits: another rank may have its graph from a cache.
    """
    store = _get_default_store()
    size = _resolve_process_group(group).size()  # type: ignore[arg-type]  # a name is a string
    traces = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    # a rank that asks again, as after an error, counts once
    first = store.add(f"{key}/{triton}/{distributed.get_rank()}", 1) == 1
    alike = store.add(f"{key}/{triton}", int(first))
    if store.add(f"{key}/{not triton}", 0):
        store.set(f"{key}/alike", "no")
    elif alike == size:
        store.compare_set(f"{key}/alike", "", "yes")  # a rank's "no" stays
    elif not waits or traces:
        return True
    return store.get(f"{key}/alike") == b"yes"


def casts_by_kernels(recipe: Recipe) -> bool:
    """Whether Triton kernels, where they run, cast every operand of a recipe."""
    return len(roles_by_kernels(recipe)) == len(ROLES)


def roles_by_kernels(recipe: Recipe) -> frozenset[Role]:
    """The roles whose tensors Triton kernels, where they run, cast for both GEMMs at once."""
    return frozenset(Spec(recipe, Groups(), "auto").pairs)
