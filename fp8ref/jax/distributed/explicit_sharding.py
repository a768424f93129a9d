"""Linears on a mesh with Explicit axes, which ``jax.make_mesh`` makes by default (spec P-20).

There the types of arrays say how they are cut. ``run`` reads the layout of a linear from them, as
``lax.dot_general`` reads the sharding of its result, and runs the linear where all axes are Auto:
as under plain jit with a ``Placement``.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp8ref.jax.distributed.placement import Sharding
from fp8ref.jax.distributed.sharding import FREE, Axes, Cut, Layout, Placement, check_under_jit
from fp8ref.jax.transforms import derivatives
from fp8ref.recipe import ROLES, Role

Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""The dimension numbers of ``lax.dot_general``: (contracted dims, batch dims) of both operands."""


def run(
    body: Callable,
    x: Array,
    w: Array,
    constants: Any,
    carried: Any,
    numbers: Numbers,
    placement: Placement | None,
    name: str,
) -> tuple[Array, Any]:
    """body(x, w, constants, carried, layout) -> (y, carried), where y has the shape of
    lax.dot_general(x, w, numbers).

    Without Explicit axes, and for arrays that are on no mesh, the layout is None. Otherwise body
    runs where all axes are Auto, y has the sharding that lax.dot_general gives its result, and what
    is carried is whole on every device. Body multiplies by w as it is if that is [..., K, N].

    placement     says what types leave open: which sums cross devices, what is gathered, and the
                  sharding of y, out_sharding as of lax.dot_general.
    Raises:       what lax.dot_general raises for these types, naming the layer; ValueError: a
                  placement of another type, of other axes than the types', or of scope local; an
                  unreduced type.
    """
    placement, out_sharding = parts(placement, name)
    mesh = _mesh(x, w)
    if not mesh.explicit_axes:
        if out_sharding is not None:
            _dot_general_sharding(x, w, numbers, out_sharding, name)  # which refuses Auto axes
        return body(x, w, constants, carried, None)
    layout, cut = None, _Dims(x, w, numbers)
    if placement and out_sharding is None and not mesh.manual_axes:
        y_sharding = NamedSharding(mesh, PartitionSpec(*cut.result_axes(placement)))
    else:
        y_sharding = _dot_general_sharding(x, w, numbers, out_sharding, name)
    # neither x nor w is on the mesh of jax.set_mesh, and the result is not
    if y_sharding.mesh.empty:
        return body(x, w, constants, carried, None)
    if not mesh.manual_axes:  # inside shard_map over other axes collectives are ours
        if placement:
            _check(cut, placement, mesh, name)
        layout = cut.layout(y_sharding.spec, mesh, placement, turned(numbers, w.ndim))
    x, w = (derivatives.reverse_only(v, name) for v in (x, w))
    return _on_auto_axes(_Region(body, layout, mesh, y_sharding), x, w, constants, carried)


def parts(placement: Placement | None, name: str) -> tuple[Placement | None, Sharding | None]:
    """A placement and its out_sharding; None in place of one that has nothing else, so that types
    say the rest. ValueError, naming the layer, for anything else."""
    if not isinstance(placement, Placement | None):
        raise ValueError(
            f"{name}: placement is a sharding.Placement or None; got {type(placement).__name__}. "
            "Use Placement(out_sharding=...)."
        )
    if placement is None or placement.out_sharding is None:
        return placement, None
    out_sharding = placement.out_sharding
    return None if placement == Placement(out_sharding=out_sharding) else placement, out_sharding


def joined(placement: Placement | None, out_sharding: Sharding | None) -> Placement | None:
    """A placement with this sharding of the output, if there is one."""
    if out_sharding is None:
        return placement
    return dataclasses.replace(placement or Placement(), out_sharding=out_sharding)


def turned(numbers: Numbers, w_ndim: int) -> bool:
    """Whether a weight is [batch, K, N] already, as Flax keeps kernels."""
    contracted, batch = numbers[0][1], numbers[1][1]
    others = [d for d in range(w_ndim) if d not in (*contracted, *batch)]
    return [*batch, *contracted, *others] == list(range(w_ndim))


@dataclass(frozen=True, eq=False)
class _Region:
    """A linear on Auto axes inside Explicit ones: its function, and its result's sharding."""

    body: Callable
    layout: Layout | None
    mesh: Any
    of_y: NamedSharding

    def enter(self, *args: Any) -> Any:
        """The arguments, typed by Auto axes; called within ``axes``."""
        return jax.tree.map(
            lambda v: jax.sharding.reshard(v, PartitionSpec(*[None] * v.ndim)), args
        )

    def axes(self):
        """The context in which all axes are Auto."""
        return jax.sharding.use_abstract_mesh(
            self.mesh.update_axis_types(dict.fromkeys(self.mesh.explicit_axes, AxisType.Auto))
        )

    def leave(self, y: Array, carried: Any) -> tuple[Array, Any]:
        """The results, with the types they have outside."""
        return jax.sharding.reshard(y, self.of_y), self.whole(carried)

    def whole(self, carried: Any) -> Any:
        """What is carried, whole on every device outside."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda v: jax.sharding.reshard(v, whole), carried)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _on_auto_axes(
    region: _Region, x: Array, w: Array, constants: Any, carried: Any
) -> tuple[Array, Any]:
    """The linear; its backward pass saves x and w with their outer shardings."""
    with region.axes():
        out = region.body(*region.enter(x, w, constants, carried), region.layout)
    return region.leave(*out)


def _forward(region: _Region, x: Array, w: Array, constants: Any, carried: Any) -> tuple:
    with region.axes():
        auto_x, auto_w, constants_, carried_ = region.enter(x, w, constants, carried)

        def linear(x: Array, w: Array, carried: Any) -> Any:
            return region.body(x, w, constants_, carried, region.layout)

        out, vjp = jax.vjp(linear, auto_x, auto_w, carried_)
    leaves, tree = jax.tree.flatten(vjp)
    places = tuple("x" if leaf is auto_x else "w" if leaf is auto_w else "" for leaf in leaves)
    saved = _Saved(
        given={place: v for place, v in (("x", x), ("w", w)) if place in places},
        others=[leaf for leaf, place in zip(leaves, places, strict=True) if not place],
        places=places,
        tree=tree,
        of_grads=(jax.typeof(x).sharding, jax.typeof(w).sharding),
    )
    return region.leave(*out), saved


def _backward(region: _Region, saved: "_Saved", cotangents: tuple) -> tuple:
    with region.axes():
        arrays, (grad_y, grad_carried) = region.enter(saved.given, cotangents)
        others = iter(saved.others)
        vjp = jax.tree.unflatten(
            saved.tree, [arrays[place] if place else next(others) for place in saved.places]
        )
        *grads, carried = vjp((grad_y, grad_carried))
    grad_x, grad_w = map(jax.sharding.reshard, grads, saved.of_grads)
    return grad_x, grad_w, None, region.whole(carried)


derivatives.defvjp(_on_auto_axes, _forward, _backward)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["given", "others"],
    meta_fields=["places", "tree", "of_grads"],
)
@dataclass(frozen=True, kw_only=True)
class _Saved:
    """Residuals of a linear: the leaves of a vjp function; x and w with their outer shardings.
    places: for each leaf ``x``, ``w`` or empty. tree: of the vjp function. of_grads: shardings of x
    and w, and of their gradients."""

    given: dict[str, Array]
    others: list[Array]
    places: tuple[str, ...]
    tree: Any
    of_grads: tuple[NamedSharding, NamedSharding]


def permuted(sharding: Sharding | None, order: Sequence[int]) -> Sharding | None:
    """The sharding of an array whose dim i is dim order[i] of the array with this one."""
    if sharding is None:
        return None
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    entries = (*spec, *[None] * (len(order) - len(spec)))
    sums = spec.unreduced, spec.reduced
    moved = PartitionSpec(*(entries[i] for i in order), unreduced=sums[0], reduced=sums[1])
    return NamedSharding(sharding.mesh, moved) if isinstance(sharding, NamedSharding) else moved


def cutting(x: Array) -> Axes:
    """The Explicit axes that cut an array, as its type says."""
    return _union(_entries(jax.typeof(x).sharding.spec, x.ndim))


class _Dims:
    """The dims of a contraction (batch, M, K, N) and the mesh axes that shard them by type."""

    def __init__(self, x: Array, w: Array, numbers: Numbers) -> None:
        (contract_x, contract_w), (batch_x, batch_w) = numbers
        x_axes, w_axes = (_entries(jax.typeof(v).sharding.spec, v.ndim) for v in (x, w))
        self.batch = [x_axes[d] for d in batch_x]
        self.m = [x_axes[d] for d in range(x.ndim) if d not in (*contract_x, *batch_x)]
        self.n = [w_axes[d] for d in range(w.ndim) if d not in (*contract_w, *batch_w)]
        self.k_of_x = [x_axes[d] for d in contract_x]
        self.k_of_w = [w_axes[d] for d in contract_w]

    def result_axes(self, placement: Placement) -> list[Axes]:
        """For each dim of the result, the mesh axes that cut it under a placement."""
        gathered = placement.gathered("input")
        scattered = placement.gathered("grad_output")
        m = [_without(axes, gathered) for axes in self.m]
        m[-1:] = [(*axes, *scattered) for axes in m[-1:]]
        return [*self.batch, *m, *(_without(axes, placement.fsdp) for axes in self.n)]

    def layout(
        self, y_spec: PartitionSpec, mesh, placement: Placement | None, turned: bool
    ) -> Layout:
        """The layout of the operands, as types and placement say.

        Without a placement an operand is gathered along the axes that cut a dim of a GEMM's result
        that it lacks, and so cannot cut the operand too.
        """
        b, m = len(self.batch), len(self.m)
        entries = _entries(y_spec, b + m + len(self.n))
        y_rows, y_n = entries[b : b + m], entries[b + m :]
        gathered: dict[Role, Axes]
        if placement:
            gathered = {role: placement.gathered(role) for role in ROLES}
        else:
            w_gathered = _both([*self.n, *self.k_of_w], entries[: b + m])
            x_gathered = _both(
                [*self.m, *self.k_of_x], [_without(_union(self.n), w_gathered), *y_n]
            )
            k_axes = [
                _without(_union(self.k_of_x), x_gathered),
                _without(_union(self.k_of_w), w_gathered),
            ]
            g_gathered = _both([*y_rows, *y_n], k_axes)
            gathered = {"input": x_gathered, "weight": w_gathered, "grad_output": g_gathered}
        batch = [_joined(self.batch)] if self.batch else []

        def cut(role: Role, rows: list[Axes], columns: list[Axes], *, flat: bool) -> Cut:
            entries = [*batch, *([_joined(rows)] if flat else rows or [()]), _joined(columns)]
            # A dim that types do not cut may be cut by an Auto axis.
            rest = tuple(FREE if axes == () and mesh.auto_axes else axes for axes in entries)
            return Cut(
                rest=rest, rows=_union(rows), columns=_union(columns), gathered=gathered[role]
            )

        first, last = (self.k_of_w, self.n) if turned else (self.n, self.k_of_w)
        return Layout(
            input=cut("input", self.m, self.k_of_x, flat=bool(batch)),
            weight=cut("weight", first, last, flat=True),
            grad_output=cut("grad_output", y_rows, y_n, flat=bool(batch)),
            turned=turned,
        )


def _check(cut: _Dims, placement: Placement, mesh, name: str) -> None:
    """ValueError unless types shard M, N and K as placement says."""
    check_under_jit(placement, name)
    if unknown := [axis for axis in placement.axes if axis not in mesh.axis_names]:
        raise ValueError(
            f"{name}: placement axes are {', '.join(mesh.axis_names)}; got {', '.join(unknown)}."
        )
    rows, columns = placement.at_rest("input")
    n_axes, k_axes = placement.at_rest("weight")
    by_dim = {
        "x's M": (rows, cut.m),
        "x's K": (columns, cut.k_of_x),
        "w's N": (n_axes, cut.n),
        "w's K": (k_axes, cut.k_of_w),
    }
    for dim, (expected, entries) in by_dim.items():
        planned, got = (
            {axis for axis in axes if axis in mesh.explicit_axes}
            for axes in (expected, _union(entries))
        )
        if planned != got:
            raise ValueError(
                f"{name}: placement shards {dim} along {', '.join(sorted(planned)) or 'no axis'}; "
                f"its type along {', '.join(sorted(got)) or 'none'}. Reshard the array, or leave "
                "placement out on Explicit axes."
            )


def _dot_general_sharding(
    x: Array, w: Array, numbers: Numbers, out_sharding: Sharding | None, name: str
) -> NamedSharding:
    """The sharding of lax.dot_general's result; its errors name the layer."""

    shardings = []

    def dot(x: Array, w: Array) -> Array:
        y = lax.dot_general(
            x, w, numbers, preferred_element_type=jnp.float32, out_sharding=out_sharding
        )
        # eval_shape's result has none where some axes are Auto
        shardings.append(jax.typeof(y).sharding)
        return y

    try:
        jax.eval_shape(dot, x, w)
    except Exception as error:
        # Types as lax.dot_general wants them; its errors know no layer.
        error.args = (f"{name}: {str(error).partition(' This error occurs at source')[0]}",)
        raise
    (sharding,) = shardings
    if sharding.spec.unreduced or sharding.spec.reduced:
        raise ValueError(
            f"{name}: a linear rounds after the sum over devices, so its output is never "
            f"unreduced; got out_sharding={out_sharding} (P-7)."
        )
    return sharding


def _mesh(*arrays: Array):
    """The mesh of the first array that has one, else of the context."""
    meshes = [jax.typeof(v).sharding.mesh for v in arrays]
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())


def _entries(spec: PartitionSpec, ndim: int) -> list[Axes]:
    """The mesh axes of each dim."""
    whole = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    return whole + [()] * (ndim - len(whole))


def _joined(dims: list[Axes]) -> Any:
    """The axes of dims flattened to one; open if they do not shard it in order."""
    return FREE if any(dims[1:]) else dims[0] if dims else ()


def _union(dims: Iterable[Axes]) -> Axes:
    return tuple(dict.fromkeys(axis for axes in dims for axis in axes))


def _without(axes: Axes, gone: Axes) -> Axes:
    return tuple(axis for axis in axes if axis not in gone)


def _both(some: list[Axes], others: list[Axes]) -> Axes:
    return tuple(axis for axis in _union(some) if axis in _union(others))
