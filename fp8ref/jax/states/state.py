"""The state of AdamW with narrow moments in JAX, and whether it and the numbers of a step are what
a layout takes (spec O-2, O-4, O-17).

A state is arrays alone, so that any pytree library keeps it: orbax, flax, optax's own states around
it. So the decisions of its layout are an array too, their text in ASCII. And what it keeps of the
parameters are trees of their structure, one for each field, as optax's own: nnx.Optimizer and
optax.tree.map_params take no tuple in a parameter's place.
"""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fp8ref.jax.states import moments
from fp8ref.jax.states.moments import MomentState
from fp8ref.spec.states import layouts as states
from fp8ref.spec.states import saved as layout_decisions
from fp8ref.spec.states.layouts import Layout, Moment


class AdamWState(NamedTuple):
    """The steps that were made, int32; ``MomentState`` of trees in the structure of the parameters,
    where ``master`` is None if parameters are the masters; and the decisions of the layout, as
    ``decisions`` makes them.

    A field of the layout has an array for every parameter. One that the layout keeps in float32, as
    too small, has the values of before the first step there, which nothing reads.
    """

    count: Array  # type: ignore[assignment]  # optax's name, which tuples have too
    m: Any
    v: Any
    master: Any = None
    decisions: Any = None


def decisions(layout: Layout) -> Array:
    """uint8 [layout_decisions.BYTES]: the text of a layout, which its states hold (O-17)."""
    return jnp.asarray(_text(layout))


def is_of(state: AdamWState, layout: Layout) -> Array:
    """bool (): whether a state has the decisions of a layout.

    Of what is known only when a program runs.
    """
    return jnp.all(jnp.asarray(state.decisions) == _text(layout))


def check_decisions(state: AdamWState, layout: Layout) -> None:
    """ValueError for a state of other decisions, naming them. Of a tracer nothing is known."""
    held = state.decisions
    kind = (
        None
        if held is None
        else (str(getattr(held, "dtype", type(held).__name__)), tuple(getattr(held, "shape", ())))
    )
    if kind != (expected := ("uint8", (layout_decisions.BYTES,))):
        raise ValueError(
            f"a state holds the decisions of its layout, {expected}; got {kind}. Use init (O-17)."
        )
    if isinstance(held, jax.core.Tracer) or not isinstance(held, Array | np.ndarray):
        return
    # whole on every device
    own = held if isinstance(held, np.ndarray) else held.addressable_data(0)
    layout_decisions.check(layout, np.asarray(own).tobytes().decode("ascii", "replace"))


def trees(state: AdamWState, layout: Layout) -> list[Any]:
    """m, v and, where the layout keeps them, the masters.

    ValueError for a state that is none of the layout.
    """
    if not isinstance(state, AdamWState):
        raise ValueError(
            f"a state is an AdamWState of fp8ref.jax.states; got {type(state).__name__}. From an "
            "optax.chain use its part, state[1]."
        )
    if (state.master is not None) != layout.keeps_master:
        raise ValueError(
            f"a state of layout {layout.name!r} has {'' if layout.keeps_master else 'no '}masters; "
            f"got one with{'out' if layout.keeps_master else ''}. States of another layout are not "
            "converted: use init."
        )
    return [state.m, state.v, state.master][: len(layout.kept)]


def fields(moment: Moment) -> dict[str, bool]:
    """Whether a stored moment has each field of ``MomentState``."""
    scaled = moment.scaling is not None
    has = (True, scaled, scaled and moment.amax != "exact", moment.expansion, moment.expansion)
    return dict(zip(MomentState._fields, has, strict=True))


def by_field(
    each: Sequence[MomentState], structure: Any, moment: Moment, stacks: list[bool]
) -> MomentState:
    """A tree for each field of the layout's moment, of what is stored of each parameter.

    structure  that of the parameters, in whose order they are given.
    stacks     which parameters are stacks.
    """

    def array(stored: MomentState, field: str, is_stack: bool) -> Array:
        x = getattr(stored, field)
        unread = stored.codes.shape[:is_stack]  # its own moment lacks the field
        return jnp.full(unread, float(field != "amax"), jnp.float32) if x is None else x

    def tree(field: str) -> Any:
        return structure.unflatten(
            [array(stored, field, s) for stored, s in zip(each, stacks, strict=True)]
        )

    return MomentState(**{field: tree(field) for field, has in fields(moment).items() if has})


def by_parameter(
    trees: MomentState, structure: Any, moment: Moment, owns: list[Moment]
) -> list[MomentState]:
    """What is stored of each parameter: the fields that its own moment has.

    Raises:   ValueError: a state of other fields than the layout's moment has, or of another
              structure.
    """
    names = [field for field, has in fields(moment).items() if has]
    if not isinstance(trees, MomentState) or names != [
        field for field, tree in trees._asdict().items() if tree is not None
    ]:
        raise ValueError(
            f"a state has a tree of the parameters for each of {', '.join(names)}, as "
            f"state.m.codes; got {type(trees).__name__} of {jax.tree.structure(trees)}. States of "
            "another layout or an older fp8ref are not converted: use init."
        )
    columns = {}
    for field in names:
        try:
            columns[field] = structure.flatten_up_to(getattr(trees, field))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{field} of a state has the structure of the parameters, {structure}; got "
                f"{jax.tree.structure(getattr(trees, field))}. Use init."
            ) from error
    return [
        MomentState(**{field: columns[field][i] for field, has in fields(own).items() if has})
        for i, own in enumerate(owns)
    ]


def check_moment(
    stored, shape: tuple[int, ...], layout: Layout, which: int, *, stacked: bool = False
) -> None:
    """ValueError unless a stored moment has this layout and shape."""
    expected = jax.eval_shape(
        lambda: moments.zeros(jnp.zeros(shape, jnp.float32), layout, which, stacked=stacked)
    )
    described = [
        [None if a is None else (jnp.dtype(a.dtype).name, tuple(a.shape)) for a in s]
        if isinstance(s, MomentState)
        else s
        for s in (stored, expected)
    ]
    if described[0] != described[1]:
        raise ValueError(
            f"the state of a moment under layout {layout.name!r} is {described[1]}; got "
            f"{described[0]}. States of another layout are not converted: use init."
        )


def check_numbers(learning_rate, numbers: Mapping[str, Any], layout: Layout) -> None:
    """ValueError for numbers of a step outside their ranges, for what is no number, and for what a
    jitted step cannot read (O-2).

    numbers  by name: b1, b2, eps, weight_decay and seed.
    """
    for name, value in numbers.items():
        if isinstance(value, Array):
            raise ValueError(
                f"{name} is a Python number; got a jax array. With optax.inject_hyperparams name "
                "b1, b2, eps, weight_decay and seed in static_args."
            )
    states.check_seed(numbers["seed"], layout)
    b1, b2, eps, weight_decay = (numbers[key] for key in ("b1", "b2", "eps", "weight_decay"))
    states.check(b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, layout=layout)
    if callable(learning_rate):
        return
    if not isinstance(learning_rate, Real) and getattr(learning_rate, "shape", None) != ():
        raise ValueError(
            f"learning_rate is a number, an array of shape () or a schedule; got {learning_rate!r}."
        )
    if not isinstance(learning_rate, jax.core.Tracer):
        states.scalars(
            1, learning_rate=float(learning_rate), b1=b1, b2=b2, eps=eps, weight_decay=weight_decay
        )


def check_leaf(p, g, stored: list, layout: Layout, is_stack: bool) -> None:
    """ValueError unless gradient and state are a parameter's."""
    if getattr(g, "shape", None) != p.shape:
        raise ValueError(
            f"a gradient has its parameter's shape, {p.shape}; got "
            f"{getattr(g, 'shape', type(g).__name__)}."
        )
    for i, moment_state in enumerate(stored):
        check_moment(moment_state, p.shape, layout, i, stacked=is_stack)


def _text(layout: Layout) -> np.ndarray:
    return np.frombuffer(layout_decisions.in_bytes(layout), np.uint8)
