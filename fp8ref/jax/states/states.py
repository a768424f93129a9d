"""AdamW whose moments are stored in FP8 and other narrow formats, as an optax transformation
(spec O).

    optimizer = states.adamw(1e-3, weight_decay=0.1, layout="sqrt_e4m3")
    state = optimizer.init(params)
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)

The bits are those of ``fp8ref.sim.states``, jitted or not, on one device or a mesh. ``moments``
says what XLA would change in them, and prevents it.

A layout with masters (O-14) keeps them in the state. Parameters are what the model computes with,
and ``weights`` reads them from the state, in place of optax.apply_updates:

    optimizer = states.adamw(1e-3, layout="msamp_o2")
    state = optimizer.init(params)                                 # float32 or bfloat16
    params = states.weights(state, "msamp_o2", jnp.bfloat16)       # may be dropped after each step
    _, state = optimizer.update(grads, state, params)

A parameter may be a *stack*: tensors of one shape, along its first dim, as a scan over layers takes
them. Each has its own scales and blocks, as if it were a parameter of its own.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from fp8ref import recipe as recipes
from fp8ref.jax.quantize import cast, philox, scaling
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.jax.states import moments, parameter_stacks
from fp8ref.jax.states import state as adamw_state
from fp8ref.jax.states.moments import MomentState, Scalars
from fp8ref.jax.states.parameter_stacks import ALL_ALIKE, Parameters
from fp8ref.jax.states.state import AdamWState
from fp8ref.jax.transforms import array_types
from fp8ref.recipe import Recipe
from fp8ref.spec.kernels import Choice
from fp8ref.spec.states import layouts as states
from fp8ref.spec.states.layouts import Layout

__all__ = ["AdamW", "Parameters", "adamw", "copies", "decode", "step", "weights"]


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """The numbers, the layout and the parameters of an AdamW, as ``adamw`` takes them; ``step``
    makes its steps.

    kernels   plain: not by its kernel. Else by it on a GPU where kernels pass their self-check.

    Raises:   ValueError: as ``adamw``, before ``init``.
    """

    learning_rate: optax.ScalarOrSchedule
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    layout: str | Layout = "sqrt_e4m3"
    parameters: Parameters = ALL_ALIKE
    seed: int = 0
    kernels: Choice = "auto"

    def __post_init__(self) -> None:
        names = ("b1", "b2", "eps", "weight_decay", "seed")
        numbers = {name: getattr(self, name) for name in names}
        adamw_state.check_numbers(self.learning_rate, numbers, states.by_name(self.layout))

    def transformation(self) -> optax.GradientTransformation:
        """The optimizer for optax."""
        return optax.GradientTransformation(self._init, self._update)

    def _init(self, params) -> AdamWState:
        structure: Any
        layout = states.by_name(self.layout)
        leaves, structure = jax.tree.flatten(params)
        stacks = structure.flatten_up_to(self.parameters.stacks(params))
        pairs = list(zip(leaves, stacks, strict=True))
        kept = [
            [moments.zeros(p, _layout_of(layout, p, s), i, stacked=s) for p, s in pairs]
            for i in (0, 1)
        ]
        if layout.keeps_master:
            kept.append(
                [parameter_stacks.each(lambda w: moments.master(w, layout), s)(p) for p, s in pairs]
            )
        trees = [
            adamw_state.by_field(each, structure, moment, stacks)
            for each, moment in zip(kept, layout.kept, strict=True)
        ]
        decisions = adamw_state.decisions(layout)
        return AdamWState(jnp.zeros((), jnp.int32), *trees)._replace(decisions=decisions)

    def _update(self, grads, state: AdamWState, params=None):
        if params is None:
            raise ValueError("AdamW needs the parameters: call update(grads, state, params).")
        return _step_leaves(_updated, params, grads, state, self)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    layout: str | Layout = "sqrt_e4m3",
    parameters: Parameters = ALL_ALIKE,
    seed: int = 0,
) -> optax.GradientTransformation:
    """AdamW with the moments of a layout.

    learning_rate  a number, an array, or a schedule of the count of steps before this one, from 0.
                   The rate of a schedule, or of an array under jit, is known only when a program
                   runs: outside of [0, 1024] it is NaN then, and so is every weight (O-2). The
                   other numbers are Python's: under ``optax.inject_hyperparams`` they are among the
                   static_args.
    parameters     which of them decay, and which are stacks.
    seed           of a layout that rounds stochastically. Tensors are numbered as jax.tree flattens
                   the parameters, those of a stack one after the other.

    Shapes:   parameters float32 of any shape, under a layout with masters also bfloat16; gradients
              float32, float16 or bfloat16 of theirs.
    Order:    spec O-2 to O-10, O-14, O-15; the updates are to be added to the parameters. Under a
              layout with masters the sum may miss the new weight by a rounding, in float32, of the
              old one; the next step does not read it. ``weights`` gives the new weight itself.
    Specials: a gradient that is not finite makes its weight NaN, and the moments of its group
              (O-2).
    Raises:   ValueError: an unknown layout; a seed of a layout that does not round stochastically;
              numbers outside their ranges (O-2); at ``init`` and ``update``, parameters that are
              not float32 or empty, or missing; a state of another layout. Under jit, where
              decisions are known only when the program runs, a state of other decisions makes every
              weight NaN (O-17).
    Source:   spec O.
    """
    return AdamW(
        learning_rate=learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        weight_decay=weight_decay,
        layout=layout,
        parameters=parameters,
        seed=seed,
    ).transformation()


def step(
    params,
    grads,
    state: AdamWState,
    optimizer: AdamW,
    *,
    factor: Array | float = 1.0,
    finite: Array | bool = True,
) -> tuple[Any, AdamWState]:
    """The parameters and the state after ``adamw``'s update: its bits, and fewer bytes on an NVIDIA
    GPU.

    There one kernel (``kernel``) reads and writes what a layout in blocks of exact amaxes has of a
    parameter, if the blocks divide its last dim. ``update`` cannot: what it returns is added to the
    parameters after it. Without such blocks, elsewhere, under jax.vmap, and on Explicit axes or
    those of shard_map it is update and ``optax.apply_updates``.

    factor    multiplies the gradients first, RN32(g * factor), such as what clips their norm.
    finite    false: nothing changes, the count included.

    Shapes:   as ``adamw``; factor and finite of shape ().
    Order, specials: as ``adamw``. Under a layout with masters the new parameters are ``weights``.
    Raises:   ValueError: as ``adamw``.
    Source:   spec O.
    """
    factor, finite = jnp.asarray(factor, jnp.float32), jnp.asarray(finite)
    from fp8ref.jax.states import kernel  # whose launch imports what imports this package

    kernels = kernel.chosen(optimizer.kernels)
    stepped = functools.partial(_stepped, factor=factor, finite=finite, kernels=kernels)
    new, after = _step_leaves(stepped, params, grads, state, optimizer)
    return new, after._replace(count=jnp.where(finite, after.count, state.count))


def decode(
    state: AdamWState, layout: str | Layout = "sqrt_e4m3", *, stacked: Any = None
) -> tuple[Any, Any]:
    """Trees of m and v, float32, as the next step reads them (spec O-4).

    stacked   as ``Parameters`` has it; a function takes the tree of codes.
    Raises:   ValueError: an unknown layout, or a state of another.
    """
    layout = states.by_name(layout)
    return _read(state, layout, 0, stacked), _read(state, layout, 1, stacked)


def weights(
    state: AdamWState, layout: str | Layout, dtype=jnp.bfloat16, *, stacked: Any = None
) -> Any:
    """The tree of parameters that the masters hold, in a dtype: what a model computes with after
    the step (spec O-14).

    stacked   as ``Parameters`` has it; a function takes the tree of codes.
    Order:    code * scale_inv, exactly, then one rounding to the dtype.
    Raises:   ValueError: an unknown layout, or one without masters; a state of another layout.
    """
    layout = states.by_name(layout)
    if not layout.keeps_master:
        raise ValueError(
            f"the masters of layout {layout.name!r} are the parameters themselves. Use these."
        )
    return jax.tree.map(lambda w: w.astype(dtype), _read(state, layout, 2, stacked))


def copies(
    state: AdamWState,
    layout: str | Layout,
    recipe: str | Recipe,
    dtype=jnp.bfloat16,
    *,
    stacked: Any = None,
) -> Any:
    """The tree of FP8 copies of the weights that the masters hold, ``Quantized``, which linears of
    a recipe take as they are: ``linear.apply(x, w, recipe=recipe, prepared=copy)`` (spec O-16).

    dtype     that the model computes in.
    stacked   as ``weights`` has it. The copies of a stack have a scale for each of its tensors, as
              a scan over them takes it.
    Order:    ``weights`` in that dtype, then ``scaling.quantize`` by the cast that the recipe has
              for weights. The amax of a copy is that which a predicted master keeps, and no pass
              over the weights; else it is taken of them.
    Raises:   ValueError: as ``weights`` and ``recipe.weight_copy``.
    """
    layout, spec = states.by_name(layout), recipes.weight_copy(recipe)

    def copy_tensor(w, stored: MomentState) -> Quantized:
        if stored.amax is None:
            return scaling.quantize(w, spec.fmt, policy=spec.policy)
        # Rounding is monotone: the largest weight has the largest master.
        largest = moments.not_tiny(stored.amax, layout).astype(dtype)
        return scaling.quantize_with(
            w, scaling.scale_from_amax(cast.to_f32(largest), spec.fmt, spec.policy), spec.fmt
        )

    each = iter(jax.tree.leaves(weights(state, layout, dtype, stacked=stacked)))
    return _map_stored(
        lambda stored, s: parameter_stacks.each(copy_tensor, s)(next(each), stored),
        state.master,
        layout,
        2,
        stacked,
    )


def _read(state: AdamWState, layout: Layout, which: int, stacked) -> Any:
    """The tree of float32 numbers that the next step reads of m, v or the masters."""
    trees = adamw_state.trees(state, layout)[which]
    adamw_state.check_decisions(state, layout)

    def read(stored: MomentState, is_stack: bool) -> Array:
        shape = getattr(stored.codes, "shape", ())
        own = _sized_layout(layout, shape, is_stack)
        adamw_state.check_moment(stored, shape, own, which, stacked=is_stack)
        return parameter_stacks.each(lambda x: moments.read(x, own.kept[which], own), is_stack)(
            stored
        )

    return _map_stored(read, trees, layout, which, stacked)


def _map_stored(f, trees: MomentState, layout: Layout, which: int, stacked) -> Any:
    """The tree of f(stored moment of a parameter, whether it is a stack)."""
    structure: Any
    codes, structure = jax.tree.flatten(getattr(trees, "codes", None))
    flags = Parameters(stacked=stacked).stacks(structure.unflatten(codes))
    stacks = structure.flatten_up_to(flags)
    owns = [
        _sized_layout(layout, x.shape, s).kept[which] for x, s in zip(codes, stacks, strict=True)
    ]
    each = adamw_state.by_parameter(trees, structure, layout.kept[which], owns)
    return structure.unflatten([f(stored, s) for stored, s in zip(each, stacks, strict=True)])


def _sized_layout(layout: Layout, shape: tuple[int, ...], is_stack: bool) -> Layout:
    """The layout of a tensor of that shape, or of each in a stack."""
    return layout.of(math.prod(shape[1:] if is_stack else shape))


class _Leaf(NamedTuple):
    """A parameter, or a stack, in a step: stored moments, own layout; for stochastic rounding seed,
    step, and tensor number (a stack's first)."""

    p: Array
    g: Array
    stored: list[MomentState]
    at: Scalars
    layout: Layout
    draw: tuple
    is_stack: bool


def _step_leaves(
    step_leaf: Callable[[_Leaf], tuple], params, grads, state: AdamWState, optimizer: AdamW
):
    """step_leaf of each parameter: (the tree of its first results, the state after the step)."""
    layout = states.by_name(optimizer.layout)
    held = adamw_state.trees(state, layout)
    adamw_state.check_decisions(state, layout)
    count = optax.safe_increment(state.count)
    at = _scalars(state, count, layout, optimizer)
    decays = optimizer.parameters.decays(params)
    stacks = optimizer.parameters.stacks(params)

    structure: Any
    leaves, structure = jax.tree.flatten(params)
    columns = [structure.flatten_up_to(tree) for tree in (grads, decays, stacks)]
    owns = [_layout_of(layout, p, s) for p, s in zip(leaves, columns[2], strict=True)]
    columns += [
        adamw_state.by_parameter(trees, structure, layout.kept[i], [own.kept[i] for own in owns])
        for i, trees in enumerate(held)
    ]
    new, number = [], 0
    for p, own, g, d, is_stack, *stored in zip(leaves, owns, *columns, strict=True):
        adamw_state.check_leaf(p, g, stored, own, is_stack)
        decayed = at._replace(weight_decay=jnp.where(d, at.weight_decay, 0))
        draw = (optimizer.seed, count, number)
        new.append(step_leaf(_Leaf(p, g, stored, decayed, own, draw, is_stack)))
        number += p.shape[0] if is_stack else 1
    if not new:
        return grads, state._replace(count=count)
    first, *kept = zip(*new, strict=True)
    trees = [
        adamw_state.by_field(each, structure, moment, columns[2])
        for each, moment in zip(kept, layout.kept, strict=True)
    ]
    return structure.unflatten(first), AdamWState(count, *trees)._replace(decisions=state.decisions)


def _scalars(state: AdamWState, count: Array, layout: Layout, optimizer: AdamW) -> Scalars:
    """The step's numbers (O-2, O-3)."""
    b1, b2, learning_rate = optimizer.b1, optimizer.b2, optimizer.learning_rate
    table = np.array(states.corrections(b1, b2), np.float32)
    at_step = jnp.asarray(table)[jnp.minimum(count, len(table)) - 1]
    rate = jnp.asarray(
        learning_rate(state.count) if callable(learning_rate) else learning_rate, jnp.float32
    )
    if rate.shape != ():
        raise ValueError(
            f"a schedule gives a number or an array of shape (); got one of shape {rate.shape}."
        )
    # too late to refuse it
    rate = jnp.where((rate >= 0) & (rate <= 1024) & adamw_state.is_of(state, layout), rate, jnp.nan)
    scalars = (b1, 1 - b1, b2, 1 - b2, *at_step, rate, optimizer.eps, optimizer.weight_decay)
    return Scalars(*(jnp.asarray(x, jnp.float32) for x in scalars))


def _updated(leaf: _Leaf) -> tuple:
    """(update, m, v) of one parameter, and its master if kept."""
    if not leaf.is_stack:
        return _tensor(leaf)
    (seed, count, number), p = leaf.draw, leaf.p
    numbers = jnp.arange(number, number + p.shape[0], dtype=jnp.uint32)

    def updated(p, g, stored, number):
        return _tensor(leaf._replace(p=p, g=g, stored=stored, draw=(seed, count, number)))

    return jax.vmap(updated)(p, leaf.g, leaf.stored, numbers)


def _stepped(leaf: _Leaf, *, factor: Array, finite: Array, kernels) -> tuple:
    """(new parameter, m, v), and its master if kept."""
    from fp8ref.jax.states import kernel  # whose launch imports what imports this package

    own = leaf.layout

    def by_xla(p, g, stored, at, factor, finite):
        scaled = cast.to_f32(g) * factor
        update, *after = _updated(leaf._replace(p=p, g=scaled, stored=stored, at=at))
        new = p + update
        if own.keeps_master:
            read = parameter_stacks.each(lambda x: moments.read(x, own.master, own), leaf.is_stack)
            new = read(after[2]).astype(p.dtype)
        return jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (new, *after), (p, *stored)
        )

    args = (leaf.p, leaf.g, leaf.stored, leaf.at, factor, finite)
    # Of a stack the kernel takes all blocks at once. Scales of masters, one for each of its
    # tensors, it does not. Its results have no types of a mesh.
    if (
        kernels is None
        or not kernel.takes(leaf.p.shape[leaf.is_stack :], own)
        or (leaf.is_stack and own.keeps_master)
        or any(map(array_types.on_a_mesh, (leaf.p, leaf.g)))
    ):
        return by_xla(*args)
    on_gpu = functools.partial(kernel.step, layout=own, kernels=kernels)
    choice = functools.partial(lax.platform_dependent, cuda=on_gpu, default=by_xla)
    return parameter_stacks.batched_by(by_xla)(lambda *args: choice(*args))(*args)


def _tensor(leaf: _Leaf) -> tuple:
    p, g, stored, at, layout, (seed, count, number), _ = leaf
    new, change = moments.new(p, g, stored, at, layout)
    extremes = [
        moments.extremes(x, new[0], moment, i)
        for i, (x, moment) in enumerate(zip(new[1:], layout.kept, strict=True))
    ]
    if any(extremes):
        # The moments are computed again: kept, they would be 8 bytes a parameter to write and to
        # read.
        g, stored, extremes = lax.optimization_barrier((g, stored, extremes))
        new, change = moments.new(p, g, stored, at, layout)
    keys = [
        philox.key_of(seed, count, 2 * number + i % 2, master=i == 2)
        if moment.rounding == "stochastic"
        else None
        for i, moment in enumerate(layout.kept)
    ]
    after = [
        moments.store(x, extremes[i], stored[i], i, at, layout, keys[i])
        for i, x in enumerate(new[1:])
    ]
    if not layout.keeps_master:
        return -change, *after
    weight = moments.read(after[2], layout.master, layout).astype(p.dtype)
    return weight.astype(jnp.float32) - cast.to_f32(p), *after


def _layout_of(layout: Layout, p, is_stack: bool) -> Layout:
    """The layout of a parameter, or of each tensor in a stack."""
    dtypes = (jnp.float32, jnp.bfloat16)[: 1 + layout.keeps_master]
    if getattr(p, "dtype", None) not in dtypes or p.size == 0:
        has = f"{p.dtype} {p.shape}" if hasattr(p, "dtype") else type(p).__name__
        raise ValueError(
            f"layout {layout.name!r} takes non-empty {' or '.join(d.dtype.name for d in dtypes)} "
            f"parameters; got {has}. Keep float32 masters."
        )
    if is_stack and p.ndim == 0:
        raise ValueError(
            f"a stack has its tensors along its first dim; got one of shape {p.shape}. Leave it "
            "out of stacked."
        )
    if is_stack and any(jax.typeof(p).sharding.spec[:1]):
        raise ValueError(
            f"Explicit axes shard any dim of a stack but its first; got {jax.typeof(p)}. Reshard "
            "it, or use a mesh of Auto axes."
        )
    if layout.stochastic and math.prod(p.shape[is_stack:]) >= 1 << 32:
        raise ValueError(
            f"stochastic rounding takes tensors of fewer than 2^32 elements; got {p.shape} under "
            f"layout {layout.name!r}. Use another layout."
        )
    return _sized_layout(layout, p.shape, is_stack)
