"""Which linears FP8 makes slower, the patterns that leave them out, and the config without them."""

from collections.abc import Callable, Sequence

from fp8ref.estimate.ledger import Ledger
from fp8ref.recipe import Recipe
from fp8ref.selection.linears import Decision, matches
from fp8ref.selection.rules import Rule
from fp8ref.spec.llama import FIRST_READER
from fp8ref.train.config.config import Config

Kind = tuple[str, Recipe]
"""A linear's path without the number of its layer, such as mlp.up_proj, and its recipe."""


def kind(decision: Decision) -> Kind:
    """What the linears of a row of the table have in common."""
    path = decision.path
    short = path.split(".", 3)[-1] if path.startswith("model.layers.") else path
    return short, decision.recipe


def slower(ledgers: Sequence[tuple[Decision, Ledger]], *, cast_once: bool) -> list[set[Kind]]:
    """Kinds of linears that take longer in FP8, by the last of each, in sets left out together.

    cast_once: linears that share an input quantize it once, at the cost of the first. So others are
    judged by their own costs, and the first together with those that gain.
    """
    groups: dict[tuple, dict[Kind, tuple[bool, Ledger]]] = {}
    for decision, ledger in ledgers:
        if ledger.parts:
            path, recipe = kind(decision)
            parent, _, name = path.rpartition(".")
            first = name
            if cast_once and decision.experts is None:
                first = FIRST_READER.get(name, name)
            groups.setdefault((parent, first, recipe), {})[path, recipe] = (name == first, ledger)
    lost: list[set[Kind]] = []
    for members in groups.values():
        alone = {
            which
            for which, (first, ledger) in members.items()
            if not first and ledger.bf16 < ledger.seconds
        }
        rest = [ledger for which, (_, ledger) in members.items() if which not in alone]
        together = sum(ledger.bf16 for ledger in rest) < sum(ledger.seconds for ledger in rest)
        lost += [set(members)] if together else [{which} for which in alone]
    return lost


def worthwhile(groups: Sequence[set[Kind]], seconds: Callable[[set[Kind]], float]) -> set[Kind]:
    """Those slower sets without which the step is faster: what FP8 costs a linear may spare a norm.

    seconds: of a step without FP8 in some kinds.
    """
    kept: set[Kind] = set().union(*groups)
    best = seconds(kept)
    for group in groups:
        if (less := seconds(kept - group)) <= best:
            kept, best = kept - group, less
    return kept


def patterns(lost: set[Kind], ledgers: Sequence[tuple[Decision, Ledger]]) -> list[str]:
    """What to add to filter_fqns: names, longer where a linear of that name gains by FP8."""
    in_fp8 = dict.fromkeys(kind(decision) for decision, ledger in ledgers if ledger.parts)
    paths = dict.fromkeys(each[0] for each in in_fp8 if each in lost)
    short_names = []
    for path in paths:
        parts = path.split(".")
        for i in reversed(range(len(parts))):
            name = ".".join(parts[i:])
            if all(other in paths for other, _ in in_fp8 if matches(name, other)):
                break
        short_names.append(name)
    return list(dict.fromkeys(short_names))


def without(config: Config, lost: set[Kind], ledgers: Sequence[tuple[Decision, Ledger]]) -> Config:
    """The config with these kinds in high precision."""
    if not lost:
        return config
    keys, names = config.numerics, patterns(lost, ledgers)
    paths = [
        decision.path
        for decision, ledger in ledgers
        if ledger.parts and any(matches(name, decision.path) for name in names)
    ]
    if len(paths) == sum(bool(ledger.parts) for _, ledger in ledgers):
        return in_bf16(config)
    if keys.rules:  # which would change what is filtered
        return config.replace(
            numerics={"rules": (*keys.rules, Rule(layers=tuple(names), recipe="bf16"))}
        )
    by_name = tuple(
        pattern for pattern in keys.fp8_fqns if not any(matches(pattern, path) for path in paths)
    )
    return config.replace(
        numerics={"filter_fqns": (*keys.filter_fqns, *names), "fp8_fqns": by_name}
    )


def in_bf16(config: Config) -> Config:
    """The config with every linear in high precision."""
    return config.replace(numerics={"recipe": "bf16", "fp8_fqns": (), "rules": None})
