"""Run configuration: one TOML file for both backends.

Every key is also a command-line option, by its dotted name (``options``). ``load`` reads a file.
The keys are the fields of the dataclasses in ``sections``.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import pydantic

from fp8ref import configs as shipped
from fp8ref.recipe import Recipe
from fp8ref.selection import grouped
from fp8ref.selection import linears as linear_selection
from fp8ref.selection import rules as linear_rules
from fp8ref.selection.linears import Decision
from fp8ref.selection.rules import Rule
from fp8ref.shared import files, registry
from fp8ref.shared.errors import ConfigError
from fp8ref.spec import llama
from fp8ref.train.config import architecture as architectures
from fp8ref.train.config import checks, user_model
from fp8ref.train.config.base import Sections

__all__ = ["load"]


@dataclass(frozen=True, kw_only=True)
class Config(Sections):
    """The full run configuration, shared by both backends."""

    def __post_init__(self) -> None:
        """Raises:   ValueError: what ``checks`` refuses. ``load`` and ``from_dict`` raise it, and
        what the sections raise, as a ConfigError."""
        checks.check(self)

    def under(self, recipe: str) -> "Config":
        """The config of a run in this recipe alone."""
        return self.replace(numerics={"recipe": recipe, "schedule": None})

    def require_one_recipe(self, who: str) -> None:
        """ConfigError for a schedule, which ``who`` does not take."""
        if self.numerics.schedule is not None:
            raise ConfigError(
                f"{who} takes one recipe; got numerics.schedule with {', '.join(self.recipes)}. "
                "Leave it out, on the command line by --numerics.schedule None, and name one by "
                "--recipe."
            )

    def require_tiles(self, who: str) -> None:
        """ConfigError for attention by a library's kernel, whose passes ``who`` cannot look into,
        and for one whose operands are cast one by one, which is no kernel's."""
        if self.numerics.attention_operands is not None:
            raise ConfigError(
                f"{who} takes attention by its variant; got numerics.attention_operands. Leave "
                "them out."
            )
        if self.parallel.attention == "kernel":
            raise ConfigError(
                f"{who} takes attention by tiles; got parallel.attention 'kernel', which shows "
                "nothing. Set it to tiles."
            )

    def require_no_experts(self, who: str) -> None:
        """ConfigError for a model with experts, which ``who`` does not take."""
        if self.model.num_experts:
            raise ConfigError(
                f"{who} takes no experts; got model.num_experts {self.model.num_experts}. Leave "
                "them out."
            )

    @property
    def filter_fqns(self) -> tuple[str, ...]:
        """numerics.filter_fqns, plus lm_head, or what makes the logits of a user's model.

        It stays in high precision unless fp8_fqns names it (spec R-2).
        """
        named = self.numerics.filter_fqns
        return *named, *(head for head in self.shapes.heads if head not in named)

    @property
    def shapes(self) -> user_model.Shapes:
        """Names and shapes of the model's parameters and linears; a user's model is built once.

        Raises as ``architecture.shapes``.
        """
        return architectures.shapes(self)

    def decisions(self) -> list[Decision]:
        """For every linear of the model, its recipe and the reason (spec R-2).

        Raises as ``selection.linears.select`` and ``selection.rules.apply``.
        """
        chosen = linear_selection.select(
            self.shapes.linears,
            self.numerics.recipe,
            filter_fqns=self.filter_fqns,
            fp8_fqns=self.numerics.fp8_fqns,
        )
        return linear_rules.apply(
            self.numerics.rules or (), [self._grouped_decision(decision) for decision in chosen]
        )

    def _grouped_decision(self, decision: Decision) -> Decision:
        """A decision; of experts with the number of weights and the grouped recipe (X-8)."""
        experts = llama.experts_of(decision.path, self.model)
        if experts is None:
            return decision
        return dataclasses.replace(
            decision, experts=experts, recipe=grouped.grouped_recipe(decision.recipe).recipe
        )

    def program_linears(self) -> dict[str, Recipe]:
        """The recipe of each linear of JAX's program, by name: of each layer's, or under
        parallel.scan of all layers' together, ``llama.STACK``.

        Raises:   ConfigError: a scan over layers whose recipes differ.
        """
        recipes: dict[str, Recipe] = {}
        for decision in self.decisions():
            name = llama.stack_of(decision.path) if self.parallel.scan else decision.path
            if recipes.setdefault(name, decision.recipe) != decision.recipe:
                raise ConfigError(
                    "parallel.scan compiles one layer for all, so a linear has the same recipe "
                    f"in each; {decision.path} has {decision.recipe.name!r}, and the same "
                    f"linear of the first layer {recipes[name].name!r}. Change "
                    "numerics.filter_fqns and fp8_fqns, or set parallel.scan to false."
                )
        return recipes

    def replace(self, **sections) -> "Config":
        """A copy with keys of sections replaced: ``config.replace(run={"steps": 3})``."""
        return dataclasses.replace(
            self,
            **{
                name: dataclasses.replace(getattr(self, name), **sections[name])
                for name in sections
            },
        )


for _section in (
    *(section.default_factory for section in dataclasses.fields(Config)),
    Rule,
    Config,
):
    _section.__pydantic_config__ = pydantic.ConfigDict(extra="forbid", strict=True)  # type: ignore[union-attr]
_ADAPTER = pydantic.TypeAdapter(Config)

_TRACED = ("parallel.compile", "traced")
INSTEAD = {
    _TRACED: "parallel.compile is none, block or model; got 'traced'. The trainer shards with "
    "FSDP2, whose collectives no graph contains. Use 'model', which gives the same bits, "
    "or fp8ref.torch.distributed.compiled_fsdp.shard in your own training loop."
}
"""Values that a key does not take, and what to use instead."""

TABLES = ("numerics.rules",)
"""Keys that are tables of a file, and no options."""


def load(path: str | Path) -> Config:
    """The configuration in a TOML file, or the package's of that name (``fp8ref.configs``).

    Raises:   ConfigError: no such file, no TOML, an unknown key (naming the nearest known one), a
              value of the wrong type or range.
    """
    path = shipped.find(path)
    try:
        keys = files.read_toml(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}). Name a TOML file, or one of "
            f"{', '.join(shipped.NAMES)}.{registry.nearest(str(path), shipped.NAMES)}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not TOML: {error}.") from error
    return from_dict(keys, source=str(path))


def from_dict(keys: dict, *, source: str = "config") -> Config:
    """The configuration in a nested dict, as TOML gives it.

    Raises as ``load``; messages begin with ``source``.
    """
    try:
        return _ADAPTER.validate_json(json.dumps(keys, default=str), strict=True)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {_explain(e)}" for e in error.errors())) from error


def to_dict(config: Config) -> dict:
    """The nested dict that ``from_dict`` reads, without keys that are None: TOML has no null."""

    def prune(value):
        if isinstance(value, list):
            return [prune(v) for v in value]
        if isinstance(value, dict):
            return {k: prune(v) for k, v in value.items() if v is not None}
        return value

    return prune(json.loads(_ADAPTER.dump_json(config)))


def completed(keys: dict) -> dict:
    """A manifest's config with the keys that came after it was written, which take their defaults.

    One that is no config of this version is given back as it is.
    """
    try:
        return to_dict(from_dict(keys))
    except ConfigError:
        return keys


def differences(a, b, path: str = "") -> dict:
    """{dotted key: (value in a, value in b)} where two nested dicts differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        changes: dict = {}
        for key in {**a, **b}:
            changes |= differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        return changes
    return {} if a == b else {path: (a, b)}


def _explain(error) -> str:
    *parents, key = [str(part) for part in error["loc"]] or [""]
    dotted = ".".join([*parents, key])
    if error["type"] == "unexpected_keyword_argument":
        section = "".join(parents[:1])
        siblings = [key for key in _known_keys() if key.rpartition(".")[0] == section]
        near = (
            registry.nearest(dotted, _known_keys(), 0.7) or f" Known keys: {', '.join(siblings)}."
        )
        return f"unknown key {dotted!r}.{near}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "literal_error" and (instead := INSTEAD.get((dotted, str(error["input"])))):
        return instead
    return f"{dotted}: {error['msg']}; got {error['input']!r}."


def _known_keys() -> list[str]:
    sections = dataclasses.fields(Config)
    return [s.name for s in sections] + [
        f"{s.name}.{f.name}"
        for s in sections
        for f in dataclasses.fields(s.default_factory)  # type: ignore[arg-type]
    ]
