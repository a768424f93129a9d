"""Error through depth: a forward pass under each recipe next to the same pass in high precision."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fp8ref import recipe as recipes_of
from fp8ref.recipe import Recipe, fp8_recipes
from fp8ref.shared import console
from fp8ref.shared.result import Result, finite
from fp8ref.study import recording as recordings
from fp8ref.study.recording import Operand

if TYPE_CHECKING:
    from rich.console import Console


class Seen(NamedTuple):
    """A forward pass: linears' recorded inputs, its result, and how many ran in FP8."""

    inputs: dict[str, Operand]
    result: np.ndarray
    in_fp8: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One recipe's forward pass next to that in high precision.

    in_fp8        how many linears ran in FP8, but for sizes that the recipe does not take.
    inputs        by layer, ||x' - x|| / ||x|| of the linear's input, in the order in which layers
                  ran; without layers that had another number of tokens, as experts have.
    output        the same of the model's result.
    divergence    the mean over rows of KL(p || p') in nats, p being the softmax of the reference
                  result along its last dim: of logits, the mean change of a token's distribution.
    agreement     the share of rows whose largest entry is the same; of a row with a NaN none is.
    """

    in_fp8: int
    inputs: dict[str, float]
    output: float
    divergence: float
    agreement: float


@dataclass(frozen=True, kw_only=True)
class Depth(Result):
    """Outcomes by recipe, the smallest KL divergence first, one that is not a number last;
    ``refused``: why others could not run.

    The error of the result does not rank: a few outliers own its norm.
    """

    outcomes: dict[str, Outcome]
    refused: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether a recipe ran."""
        return bool(self.outcomes)

    def sentence(self) -> str:
        """Which recipe changes the model's output least, and which most."""
        if not self.outcomes:
            return "No recipe ran."
        numbers = [
            f"{name} (KL {outcome.divergence:.2e} nats, same top entry in "
            f"{outcome.agreement:.1%} of rows)"
            for name, outcome in self.outcomes.items()
        ]
        if len(numbers) == 1:
            return f"One recipe ran: {numbers[0]}."
        return (
            f"{numbers[0]} changes the model's output least of {len(numbers)} recipes, "
            f"{numbers[-1]} most."
        )

    def to_dict(self) -> dict:
        """Outcomes and refusals; None where a number is not finite."""
        outcomes = {
            name: {key: finite(value) for key, value in asdict(outcome).items()}
            | {"inputs": {layer: finite(error) for layer, error in outcome.inputs.items()}}
            for name, outcome in self.outcomes.items()
        }
        return {"outcomes": outcomes, "refused": self.refused}

    def render(self, console: "Console") -> None:
        """A row for each recipe, with the layer whose input is worst."""
        from rich.table import Table

        console.print(self.sentence(), markup=False, soft_wrap=True)
        table = Table(
            "recipe",
            "linears in FP8",
            "KL, nats",
            "same top entry",
            "error of the result",
            "worst input of a linear",
        )
        for name, outcome in self.outcomes.items():
            layer, worst = max(outcome.inputs.items(), key=lambda item: item[1], default=("-", 0.0))
            table.add_row(
                name,
                f"{outcome.in_fp8} of {len(outcome.inputs)}",
                f"{outcome.divergence:.2e}",
                f"{outcome.agreement:.2%}",
                f"{outcome.output:.3%}",
                f"{layer} {worst:.3%}",
            )
        console.print(table)
        for name, why in self.refused.items():
            console.print(f"{name}: {why}", markup=False, soft_wrap=True)


def compare(
    first: Seen,
    again: Seen,
    under: Callable[[Recipe], Seen],
    recipes: Sequence[str | Recipe] | None,
) -> Depth:
    """Run each recipe and compare it with the pass in high precision.

    first, again  that pass, twice: they have the same bits.
    under         the pass under a recipe.
    recipes       None: all that train in FP8; the refused ones (ValueError) are noted.
    Raises:       ValueError: the two passes differ; a pass that calls another model than it is
                  given; what ``under`` raises for a recipe that was named.
    """
    if first.result.ndim == 0:
        raise ValueError(
            "run gives logits, or another tensor with a last dim to compare along; got a "
            "scalar. Give what the loss is of."
        )
    if not first.inputs:
        raise ValueError(
            "run calls the model that it is given; no linear of it was called. Write lambda "
            "model: model(...)."
        )
    if not np.array_equal(first.result, again.result, equal_nan=True):
        raise ValueError(
            "run gives the same result each time; two runs differed. Turn dropout off, as "
            "model.eval() does, and fix seeds."
        )
    outcomes: dict[str, Outcome] = {}
    refused: dict[str, str] = {}
    recordings.listed(recipes, "recipes")
    every = list(fp8_recipes().values())
    chosen = every if recipes is None else [recipes_of.by_name(r) for r in recipes]
    for recipe in console.counted("run the model", chosen):
        try:
            seen = under(recipe)
        except ValueError as error:
            if recipes is not None:
                raise
            refused[recipe.name] = str(error)
            continue
        if not seen.inputs:
            raise ValueError(
                f"run calls the model that it is given; under {recipe.name!r} no linear of the "
                "copy was called, as where run names the model of outside. Write lambda model: "
                "model(...)."
            )
        outcomes[recipe.name] = _outcome(first, seen)
    return Depth(
        outcomes=dict(sorted(outcomes.items(), key=lambda item: _rank(item[1]))), refused=refused
    )


def _rank(outcome: Outcome) -> tuple[float, ...]:
    """By KL, then agreement, then the error of the result; not a number: infinite."""
    return tuple(
        np.nan_to_num([outcome.divergence, -outcome.agreement, outcome.output], nan=np.inf)
    )


def _outcome(first: Seen, seen: Seen) -> Outcome:
    log_p, log_q = (
        _log_softmax(one.result.reshape(-1, one.result.shape[-1])) for one in (first, seen)
    )
    same = log_p.argmax(axis=-1) == log_q.argmax(axis=-1)
    return Outcome(
        in_fp8=seen.in_fp8,
        inputs={
            name: _distance(other.kept, x.kept)
            for name, x in first.inputs.items()
            if (other := seen.inputs.get(name))
            and (x.rows, x.kept.shape) == (other.rows, other.kept.shape)
        },
        output=_distance(seen.result, first.result),
        divergence=_divergence(log_p, log_q),
        agreement=float((same & ~np.isnan(log_p + log_q).any(axis=-1)).mean()),
    )


def _distance(x: np.ndarray, to: np.ndarray) -> float:
    """||x - to|| / ||to||, in float64; 0 where both are 0.

    Equal infinities, as of masked logits, count in neither.
    """
    masked = np.isinf(to) & (x == to)
    x, to = (np.where(masked, 0.0, v).astype(np.float64) for v in (x, to))
    difference, size = float(np.linalg.norm(x - to)), float(np.linalg.norm(to))
    return difference / size if size else (0.0 if difference == 0 else float("inf"))


def _divergence(log_p: np.ndarray, log_q: np.ndarray) -> float:
    """The mean over rows of KL(p || q) in nats; what p gives no probability counts nothing."""
    possible = np.isfinite(log_p)
    difference = np.where(possible, log_p, 0.0) - np.where(possible, log_q, 0.0)
    return float((np.exp(log_p) * difference).sum(axis=-1).mean())


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
