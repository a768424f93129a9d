"""The operands that an ablation switches: of linears, attention and AdamW (spec E-8, E-9)."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fp8ref import recipe
from fp8ref.recipe import OPERANDS, Gemm
from fp8ref.selection import attention_casts
from fp8ref.selection.linears import listed, matches
from fp8ref.selection.rules import GEMMS
from fp8ref.shared.errors import ConfigError
from fp8ref.spec.states import parts as layout_parts
from fp8ref.train.config.config import Config
from fp8ref.train.experiments import variants

__all__ = ["KINDS", "ROLES", "Studied"]

By = Literal["layer", "linear", "kind", "model"]
"""How linears are grouped: by layer, each alone, by last name over all layers, or together."""

Kind = Gemm | Literal["attention", "states"]
"""What an operand is of: a GEMM of linears, attention, or the optimizer."""

KINDS: tuple[Kind, ...] = (*GEMMS, "attention", "states")
"""All of them."""

FORWARD: tuple[Kind, ...] = ("output", "attention")
"""Those that a forward pass has operands of."""

ROLES_OF: dict[Kind, tuple[str, ...]] = {
    **{gemm: OPERANDS[gemm] for gemm in GEMMS},
    "attention": attention_casts.ROLES,
    "states": layout_parts.PARTS,
}
"""The roles of each."""

ROLES: tuple[str, ...] = tuple(
    dict.fromkeys((*recipe.ROLES, *attention_casts.ROLES, *layout_parts.PARTS))
)
"""Every role."""

OF_GRADIENTS = ("do", "ds")  # the roles of attention that no forward pass has


@dataclass(frozen=True, kw_only=True)
class Studied:
    """Which operands an ablation studies.

    by, layers, gemms, roles
                how linears are grouped; patterns (R-3) of linears, none: all; of what, and which.
    attention   the variant whose casts are studied; None: the run's own, if it has one.
    states      the layout whose m, v and master are studied, under steps; None: the run's own.
    """

    by: By = "layer"
    layers: Sequence[str] = ()
    gemms: Sequence[str] = KINDS
    roles: Sequence[str] = ROLES
    attention: str | None = None
    states: str | None = None

    def in_forward_passes(self) -> "Studied":
        """Without what no forward pass has."""
        gemms = [gemm for gemm in self.gemms if gemm in FORWARD]
        roles = [role for role in self.roles if role not in OF_GRADIENTS]
        return dataclasses.replace(self, gemms=gemms, roles=roles)

    @property
    def options(self) -> tuple[tuple[str, str | None, Kind], ...]:
        """(option, its value, what it studies operands of)."""
        return (("--attention", self.attention, "attention"), ("--states", self.states, "states"))


EVERYTHING = Studied()  # every operand that a run casts, by layer


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A role of a GEMM, of attention or of the states (without linears), in a group."""

    group: str
    gemm: Kind
    role: str
    linears: tuple[str, ...]

    @property
    def name(self) -> str:
        """``group/gemm/role``."""
        return f"{self.group}/{self.gemm}/{self.role}"

    @property
    def key(self) -> str:
        """The name, and a digest of the casts: --layers may give a group of this name others."""
        digest = hashlib.sha256(json.dumps(sorted(self.casts)).encode()).hexdigest()
        return f"{self.name} {digest[:16]}"

    @property
    def casts(self) -> set[variants.Cast]:
        """The casts that it is."""
        return {(path, self.gemm, self.role) for path in self.linears or ("",)}


def chosen(config: Config, studied: Studied) -> list[Operand]:
    """The operands that a config casts, grouped, in the order of the model.

    Raises:   ConfigError: a pattern that names no linear; none is left.
    """
    layers, cast = studied.layers, variants.cast_operands(config)
    paths = dict.fromkeys(path for path, *_ in cast if path)
    for pattern in layers:
        if not any(matches(pattern, path) for path in paths):
            raise ConfigError(
                f"--layers {pattern!r} names no linear in FP8, nor attention; there are "
                f"{listed(paths)}."
            )
    groups: dict[tuple[str, bool], list[str]] = {}
    attention = {path for path, gemm, _ in cast if gemm == "attention"}
    for path in paths:
        if not layers or any(matches(pattern, path) for pattern in layers):
            groups.setdefault((_group(path, studied.by), path in attention), []).append(path)
    if not layers:
        whole = groups.setdefault(("model", False), [])
        whole += [""] if any(gemm == "states" for _, gemm, _ in cast) else []
    operands = []
    for (group, _), inside in groups.items():
        for gemm in KINDS:
            for role in ROLES_OF[gemm]:
                of = tuple(path for path in inside if (path, gemm, role) in cast)
                if of and gemm in studied.gemms and role in studied.roles:
                    linears = tuple(path for path in of if path)
                    operands.append(Operand(group=group, gemm=gemm, role=role, linears=linears))
    if not operands:
        raise ConfigError(
            "no operand in FP8 is left. Those of gradients take --steps, those of attention "
            "--attention cudnn, and those of states --steps with --states te, unless the run "
            "has its own. Add these, or name other --layers, --gemms or --roles."
        )
    return operands


def _group(path: str, by: By) -> str:
    parts = path.split(".")
    if by == "layer":
        number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
        return ".".join(parts[max(0, number - 1) : number + 1])
    return {"linear": path, "kind": parts[-1], "model": "model"}[by]
