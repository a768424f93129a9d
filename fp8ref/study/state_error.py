"""Keep AdamW's moments in each layout on recorded gradients, and measure the cost (spec O-12)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8ref.shared import console
from fp8ref.shared.result import Result, finite
from fp8ref.sim.states import health, states
from fp8ref.spec.states import health as healths
from fp8ref.spec.states import layouts as layouts_of
from fp8ref.spec.states.health import Health
from fp8ref.spec.states.layouts import LAYOUTS, Layout
from fp8ref.study import recording as recordings

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("v_lost", "clipped_m", "clipped_v", "stalled_v")
"""The counts of a row of the table, as shares of the elements."""


@dataclass(frozen=True, kw_only=True)
class JudgedStates(Result):
    """What layouts cost at the last step, by layout, then by parameter; "": all together.

    steps     how many gradients there were.
    """

    steps: int
    layouts: Mapping[str, Mapping[str, Health]]

    @property
    def ok(self) -> bool:
        """Whether anything was judged."""
        return bool(self.layouts)

    def worst(self, layout: str, count: int = 10) -> list[tuple[str, Health]]:
        """The parameters with the largest errors of an update first; before them no numbers."""
        rows = [(name, one) for name, one in self.layouts[layout].items() if name]

        def rank(row: tuple[str, Health]) -> tuple[bool, float]:
            error = row[1].update_error
            return not np.isnan(error), -np.nan_to_num(error)

        return sorted(rows, key=rank)[:count]

    def ranked(self) -> list[str]:
        """The layouts, the smallest error of an update first; one that is not a number last."""
        return sorted(
            self.layouts,
            key=lambda layout: np.nan_to_num(self.layouts[layout][""].update_error, nan=np.inf),
        )

    def to_dict(self) -> dict:
        """Figures by layout and parameter; None where a number is not finite."""
        recorded = {
            layout: {
                name: {key: finite(value) for key, value in vars(one).items()}
                for name, one in of.items()
            }
            for layout, of in self.layouts.items()
        }
        return {"steps": self.steps, "layouts": recorded}

    def render(self, console: "Console") -> None:
        """A row for each layout, the smallest error of an update first."""
        from rich.table import Table

        table = Table(
            "layout", "bytes a parameter", "error of the update", *COLUMNS, "worst parameter"
        )
        for layout in self.ranked():
            whole, (name, one) = self.layouts[layout][""], self.worst(layout, 1)[0]
            shares = [f"{getattr(whole, key) / whole.count:.2%}" for key in COLUMNS]
            table.add_row(
                layout,
                f"{whole.bytes_per_parameter:.3g}",
                f"{whole.update_error:.3%}",
                *shares,
                f"{name} {one.update_error:.3%}",
            )
        console.print(table)


def judge_states(
    gradients: Iterable[Mapping[str, np.ndarray]],
    layouts: Sequence[str | Layout] | None = None,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    most: int = 2**16,
) -> JudgedStates:
    """Run AdamW's moments in each layout over the gradients of consecutive steps.

    gradients   of each step, by parameter: tensors of PyTorch, or what NumPy makes an array of, in
                the model's own shapes; of floats, which are rounded to float32.
    layouts     names or Layouts of moments; None: all. Weights are zeros: they are in no figure.
    most        the most elements of a parameter that are taken, in whole blocks of 1024 from its
                beginning; its scales are theirs.
    Memory:     both moments of so many elements, and a step's gradients.
    Raises:     ValueError: no step; gradients that are no floats; steps of other parameters or
                shapes; an unknown layout, or one with masters.
    Source:     spec O-1 to O-12.
    """
    recordings.listed(layouts, "layouts")
    named = map(layouts_of.by_name, LAYOUTS if layouts is None else layouts)
    chosen = {layout.name: layout for layout in named}
    if kept := [name for name, layout in chosen.items() if layout.keeps_master]:
        raise ValueError(
            f"a study judges layouts of moments; {kept[0]!r} stores masters too. Leave it out."
        )
    now: dict[tuple[str, str], states.State] = {}
    last: dict[tuple[str, str], np.ndarray] = {}
    steps, first = 0, {}  # type: ignore[var-annotated]
    for step_gradients in console.counted("judge states", gradients):
        whole = {name: _array(name, g) for name, g in step_gradients.items()}
        sizes = {name: g.shape for name, g in whole.items()}
        if steps and sizes != first:
            raise ValueError(
                f"every step has the gradients of the same parameters; step {steps} has others. "
                "Record them alike."
            )
        first, steps = sizes, steps + 1
        for name, gradient in whole.items():
            g = gradient.reshape(-1)[: _kept(gradient.size, most)]
            for layout in chosen.values():
                key = layout.name, name
                before = now.get(key) or states.init(g.shape, layout)
                w = np.zeros(g.shape, np.float32)
                optimizer = states.AdamW(learning_rate=0.0, b1=b1, b2=b2, eps=eps, layout=layout)
                _, now[key] = states.step(w, g, before, optimizer)
                last[key] = health.numbers(
                    g, before, now[key], b1=b1, b2=b2, eps=eps, layout=layout
                )
    if not steps or not first:
        raise ValueError(
            "a study of states takes the gradients of at least one step and one parameter; got "
            "none."
        )
    judged = {name: _layout_health(layout, last) for name, layout in chosen.items()}
    return JudgedStates(steps=steps, layouts=judged)


def _layout_health(layout: Layout, last: Mapping[tuple[str, str], np.ndarray]) -> dict[str, Health]:
    mine = {name: numbers for (of, name), numbers in last.items() if of == layout.name}
    sizes = {name: int(numbers[0]) for name, numbers in mine.items()}
    parameter_bytes = {name: layout.bytes_per_parameter(size) for name, size in sizes.items()}
    whole = healths.of(
        healths.total(np.stack(list(mine.values()))),
        sum(parameter_bytes[n] * sizes[n] for n in mine) / sum(sizes.values()),
    )
    return {"": whole} | {
        name: healths.of(numbers, parameter_bytes[name]) for name, numbers in mine.items()
    }


def _array(name: str, gradient: Any) -> np.ndarray:
    """A gradient as float32; ValueError unless it is of floats."""
    if hasattr(gradient, "detach"):  # PyTorch's: NumPy knows neither bfloat16 nor FP8
        gradient = gradient.detach().float().cpu().numpy()
    array = np.asarray(gradient)
    if array.dtype.kind in "biucOSU":
        raise ValueError(
            f"gradients are of floats; got {array.dtype} for {name!r}. Give those of parameters "
            "alone."
        )
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _kept(size: int, most: int) -> int:
    return size if size <= most else max(1024, most // 1024 * 1024)
