"""What ``states.AdamW`` reads of a group of parameters, checked: its numbers and its layout (spec
O-2, O-17)."""

from typing import Any

from fp8ref.spec.states import layouts as states
from fp8ref.spec.states import saved as layout_decisions
from fp8ref.spec.states.layouts import Layout, Scalars

KEYS = ("lr", "betas", "eps", "weight_decay", "seed", "layout", "decisions")
"""What a group has beside its parameters."""

LACKING = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")
"""Options of ``torch.optim.AdamW`` that this optimizer lacks: a group may have them, but not set
them."""


def check(group: dict[str, Any], layout: Layout) -> None:
    """ValueError for a group that lacks numbers, has them outside their ranges, sets an option that
    this optimizer lacks, or has a layout of its own."""
    if missing := [key for key in KEYS if key not in group]:
        raise ValueError(
            "saved groups have numbers and their layout's decisions; got a group without "
            f"{', '.join(missing)}. Save optimizer.state_dict()."
        )
    if group["layout"] != layout.name:
        raise ValueError(
            f"parameters of an optimizer have one layout, {layout.name!r}; a group has "
            f"{group['layout']!r}. Use an optimizer per layout."
        )
    if unlike := layout_decisions.differences(layout, group["decisions"]):
        raise ValueError(
            f"layout {layout.name!r} has {'; '.join(unlike)}. States of another layout are not "
            "converted: use the old layout, or a new name for a changed one."
        )
    if options := [key for key in LACKING if group.get(key)]:
        raise ValueError(
            f"fp8ref.torch.states has no {', '.join(options)}; a group sets it. Leave it out."
        )
    states.check_seed(group["seed"], layout)
    scalars(group, layout, 1)


def scalars(group: dict[str, Any], layout: Layout, step: int) -> Scalars:
    """The numbers of a group's step with that number (O-3).

    Raises:   ValueError: numbers outside their ranges, and what is no number.
    """
    try:
        b1, b2 = group["betas"]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"betas are two numbers, such as (0.9, 0.95); got {group['betas']!r}."
        ) from error
    b1, b2 = _number("b1", b1), _number("b2", b2)
    eps, weight_decay = (_number(key, group[key]) for key in ("eps", "weight_decay"))
    states.check(layout=layout, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    learning_rate = _number("lr", group["lr"])
    return states.scalars(
        step, learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay
    )


def _number(name: str, value: Any) -> float:
    """A number, or a tensor of one element, as Python's number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} is a number, or a tensor of one element; got {value!r}."
        ) from error
