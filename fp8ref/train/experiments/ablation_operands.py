"""The operands that an ablation switches: of linears, of attention, and the stored states of AdamW
(spec E-8, E-9).
"""

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

By = Literal["layer", "linear", "kind", "model"]
"""How linears are grouped: by layer of the model; each alone; by their last name, over all layers;
together.
"""

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

OF_GRADIENTS = ("do", "ds")
"""The roles of attention that no forward pass has."""


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A role of a GEMM, of attention or of the states, in a group of linears or layers; of states
    linears is empty.
    """

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
        """The name, and a digest of the casts: of other --layers a group of the same name has
        others.
        """
        return (
            f"{self.name} "
            f"{hashlib.sha256(json.dumps(sorted(self.casts)).encode()).hexdigest()[:16]}"
        )

    @property
    def casts(self) -> set[variants.Cast]:
        """The casts that it is."""
        return {(path, self.gemm, self.role) for path in self.linears or ("",)}


def chosen(
    config: Config, by: By, layers: Sequence[str], gemms: Sequence[str], roles: Sequence[str]
) -> list[Operand]:
    """The operands that a config casts, grouped, in the order of the model.

    Raises:   ConfigError: a pattern that names no linear; none is left.
    """
    cast = variants.cast_operands(config)
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
            groups.setdefault((_group(path, by), path in attention), []).append(path)
    if not layers:
        groups["model", False] = [
            *groups.get(("model", False), []),
            *([""] if any(gemm == "states" for _, gemm, _ in cast) else []),
        ]
    operands = []
    for (group, _), inside in groups.items():
        for gemm in KINDS:
            for role in ROLES_OF[gemm]:
                of = tuple(path for path in inside if (path, gemm, role) in cast)
                if of and gemm in gemms and role in roles:
                    operands.append(
                        Operand(
                            group=group,
                            gemm=gemm,
                            role=role,
                            linears=tuple(path for path in of if path),
                        )
                    )
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
