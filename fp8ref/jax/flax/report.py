"""What of a Flax model runs in FP8 and what does not, and why: a table of its layers and products.

Parameters are read from the model. With inputs a forward pass is traced, not computed: it counts
multiplications, shows layers that are never called, and finds what has no layer: hand-written
products and the ragged products of experts.
"""

import collections
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import flax.linen as nn
import jax
import jax.extend.core
from flax import nnx, traverse_util
from jax import lax

from fp8ref.jax.flax import linen
from fp8ref.jax.flax.grouped_linear import GroupedLinear
from fp8ref.jax.flax.nnx import Hook
from fp8ref.recipe import Recipe
from fp8ref.selection import report as fp8_report
from fp8ref.selection.linears import Decision
from fp8ref.selection.report import Row

PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
"""The primitives that multiply."""

LINEARS = (
    nnx.Linear,
    nnx.LinearGeneral,
    nnx.Einsum,
    GroupedLinear,
    nn.Dense,
    nn.DenseGeneral,
    nn.Einsum,
)
"""The layers that ``convert`` chooses from."""

OWN_CALL = "its own __call__ multiplies without the layer's hook"
"""Why a subclass of a linear has no FP8."""

RAGGED = "experts: a ragged product has no hook"
"""Why lax.ragged_dot has no FP8."""


_REASONS = {"ragged_dot_general": RAGGED, "conv_general_dilated": "convolutions have no hook"}


class Report(fp8_report.Report):
    """``selection.report.Report`` of a Flax model."""

    @property
    def left_out(self) -> list[Row]:
        """The rows that multiply matrices without FP8, or may do so: no lookups."""
        return [row for row in super().left_out if row.kind != "Embed"]

    @property
    def surprising(self) -> bool:
        """True if something other than linears, lookups and convolutions has no FP8: experts, or
        parameters that no layer of Flax's multiplies."""
        return any(
            row.recipe is None and row.reason in (RAGGED, OWN_CALL, _outside(row.shape))
            for row in self.rows
        )


def nnx_report(
    model: nnx.Module,
    inputs: tuple | None,
    dims: Mapping[str, tuple[int, int]],
    decisions: Mapping[str, Decision] | None = None,
) -> Report:
    """An NNX model's report, from [N, K] of its linears; decisions: of its conversion, or None."""
    traced = None if inputs is None else _traced(model, inputs, dims)
    rows: list[Row] = []
    counted: set[int] = set()
    nodes = [
        (path, v)
        for path, v in nnx.iter_graph(model, graph=True)
        if isinstance(v, nnx.Module) and not isinstance(v, Hook)
    ]
    stacks = _stacks(
        (_name(path, model), v, v.kernel.get_value().shape)
        for path, v in nodes
        if isinstance(v, LINEARS)
    )
    for path, node in nodes:
        own = {
            key: v.get_value()
            for key, v in vars(node).items()
            if isinstance(v, nnx.Param) and id(v) not in counted
        }
        counted |= {id(v) for v in vars(node).values() if isinstance(v, nnx.Variable)}
        shapes = {key: value.shape for key, value in own.items() if hasattr(value, "shape")}
        if not shapes:
            continue
        name = _name(path, model)
        hooks = [v for v in vars(node).values() if isinstance(v, Hook)] or [
            bridge.to_nnx__module for bridge in _bridged(node)
        ]
        recipes, decision = [hook.recipe for hook in hooks], (decisions or {}).get(name)
        stack, shape = _stack_at(name, stacks), dims.get(name)
        row = _row(name, node, shapes, stack, shape, recipes, decision, traced)
        rows.append(row)
    return _report(rows, traced)


def _bridged(layer: nnx.Module) -> list[nnx.Module]:
    """The linen module inside an NNX layer, as in ``nnx.bridge.ToNNX`` or MaxText's."""
    bridges = (v for v in vars(layer).values() if hasattr(v, "to_nnx__module"))
    return [v for v in bridges if isinstance(v.to_nnx__module, linen.Hook)]


def _named(hook: linen.Hook, name: str) -> linen.Hook:
    """A linen hook in a scope of this name: its class's, as it is in no linen module."""
    return type(name, (type(hook),), {})(hook.recipe, hook.multiply, hook.placement)


def _traced(model: nnx.Module, inputs: tuple, dims: Mapping) -> "_Traced":
    """Trace a forward pass of a copy, with each layer's matmuls in a scope named after its path."""
    graph, state = nnx.split(model)

    def scoped(function, name: str):
        def call(*args, **kwargs):
            with jax.named_scope(f"{name}/output"):
                return function(*args, **kwargs)

        return call

    def run(state, *args):
        copy = nnx.merge(graph, state)
        for path, layer in nnx.iter_graph(copy, graph=True):
            if isinstance(layer, Hook):
                layer.name = _name(path[:-1], copy)
            elif (name := _name(path, copy)) in dims and isinstance(layer, GroupedLinear):
                # Not by its hook, whose loops multiply rows of padding too.
                layer.ragged_dot = nnx.static(scoped(lax.ragged_dot, name))
            elif name in dims:
                attribute = "einsum_op" if hasattr(layer, "einsum_op") else "dot_general"
                if not isinstance(own := getattr(layer, attribute), Hook):
                    setattr(layer, attribute, scoped(own or lax.dot_general, name))
            elif isinstance(layer, nnx.Module):
                for bridge in _bridged(layer):
                    bridge.to_nnx__module = _named(bridge.to_nnx__module, name)
        return [leaf for leaf in jax.tree.leaves(copy(*args)) if hasattr(leaf, "shape")]

    return _Traced(jax.make_jaxpr(run)(state, *inputs).jaxpr)


def _name(path: tuple, model: nnx.Module) -> str:
    return ".".join(map(str, path)) or type(model).__name__


def linen_report(
    modules: Mapping[str, nn.Module], params: Mapping, decisions: Mapping[str, Decision], jaxpr
) -> Report:
    """A linen model's report: its modules by path, its parameters' shapes, its forward pass."""
    traced = _Traced(jaxpr, decisions)
    by_module: dict[str, dict] = collections.defaultdict(dict)
    for path, value in traverse_util.flatten_dict(params).items():
        (array,) = jax.tree.leaves(value)  # nn.unbox would also constrain its sharding
        by_module[".".join(path[:-1]) or next(iter(modules), "")][path[-1]] = array.shape
    linears = (
        (name, modules[name], by_module[name]["kernel"])
        for name in decisions
        if "kernel" in by_module[name]
    )
    stacks = _stacks(linears)
    rows: list[Row] = []
    for name, shapes in by_module.items():
        decision, layer = decisions.get(name), modules.get(name)
        recipes = [decision.recipe] if decision else []
        dims, stack = decision.shape if decision else None, _stack_at(name, stacks)
        row = _row(name, layer, shapes, stack, dims, recipes, decision, traced)
        rows.append(row)
    return _report(rows, traced)


class _Traced:
    """The products of a jaxpr by their layer's scope, the others by primitive and result."""

    def __init__(self, jaxpr, linears: Iterable[str] = ()) -> None:
        """linears: names of those that linen's scopes show."""
        scopes = {f"/{name.replace('.', '/')}": name for name in linears}
        self.layers: collections.Counter[str] = collections.Counter()
        self.others: collections.Counter[tuple[str, tuple[int, ...]]] = collections.Counter()
        for eqn, scope, times in _products(jaxpr, "", 1):
            # linen's end in its layer, such as "vmap(up)", or in the subscripts of its einsum
            parts = scope.split("/")
            at = next((i for i, part in enumerate(parts) if part == "output"), 0)
            path = "/".join(parts[:-1] if "->" in parts[-1] else parts)
            path = re.sub(r"\w+\(([^()]*)\)", r"\1", path)
            named = (name for end, name in scopes.items() if path.endswith(end))
            name = parts[at - 1] if at else next(named, None)
            count = times * _multiplications(eqn)
            if name:
                self.layers[name] += count
            else:
                self.others[eqn.primitive.name, eqn.outvars[0].aval.shape] += count


def _products(jaxpr, scope: str, times: int) -> Iterator[tuple]:
    """(equation, scope, times) of every product; of a branch the last, which is not for a GPU."""
    for eqn in jaxpr.eqns:
        inner = f"{scope}/{eqn.source_info.name_stack}"
        if eqn.primitive.name in PRODUCTS:
            yield eqn, inner, times
            continue
        nested = list(jax.extend.core.jaxprs_in_params(eqn.params))
        if eqn.primitive.name == "cond":
            nested = nested[-1:]
        if eqn.primitive.name in ("custom_vjp_call", "custom_jvp_call"):
            nested = nested[:1]
        if traced := getattr(eqn.params.get("_prim"), "traced", None):  # a custom_vjp of jax 0.12
            nested = [traced.jaxpr]
        repeated = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for program in nested:
            yield from _products(getattr(program, "jaxpr", program), inner, repeated)


def _multiplications(eqn) -> int:
    (a, b), name = (v.aval.shape for v in eqn.invars[:2]), eqn.primitive.name
    out = math.prod(eqn.outvars[0].aval.shape)
    if name == "conv_general_dilated":
        out_channels = b[eqn.params["dimension_numbers"].rhs_spec[0]]
        return out * math.prod(b) // out_channels
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
    else:
        (contracted, _), _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    return out * math.prod(a[d] for d in contracted)


def kernel_ndim(layer: nnx.Module | nn.Module) -> int:
    """The number of dims of the kernel of one linear; a stacked kernel has more."""
    if isinstance(layer, nnx.Einsum):
        return len(layer.kernel_shape)
    if isinstance(layer, nn.Einsum):
        return len(layer.shape)
    if isinstance(layer, GroupedLinear):
        return 3
    if isinstance(layer, nnx.Linear | nn.Dense):
        return 2
    if isinstance(layer, nnx.LinearGeneral):
        return len(layer.batch_axis) + len(layer.in_features) + len(layer.out_features)
    assert isinstance(layer, nn.DenseGeneral)
    dims = (layer.batch_dims, layer.axis, layer.features)
    return sum(1 if isinstance(each, int) else len(each) for each in dims)


def _stacks(
    linears: Iterable[tuple[str, nnx.Module | nn.Module, tuple[int, ...]]],
) -> dict[str, tuple[int, ...]]:
    """The leading dims of each kernel (path, layer, shape), as nnx.vmap adds them."""
    leading = {name: shape[: max(0, len(shape) - kernel_ndim(v))] for name, v, shape in linears}
    return leading if any(leading.values()) else {}


def _stack_at(name: str, stacks: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The stack dims of a module: those of the linear that shares most of its path."""

    def shared(linear: str) -> int:
        pairs = zip(name.split("."), linear.split("."), strict=False)
        return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))

    nearest = max(stacks, key=shared, default="")
    return stacks[nearest] if nearest and shared(nearest) else ()


def _row(
    name: str,
    layer: nnx.Module | nn.Module | None,
    shapes: Mapping,
    stack: tuple[int, ...],
    dims: tuple[int, int] | None,
    recipes: Sequence[Recipe],
    decision: Decision | None,
    traced: "_Traced | None",
) -> Row:
    """The row of one layer, from the shapes of its parameters. stack: leading dims to ignore; dims:
    [N, K] of a linear; layer: None if never called; recipes: of its hooks, perhaps several."""
    kind = "module" if layer is None else type(layer).__name__
    sizes = {key: math.prod(shape) for key, shape in shapes.items()}
    shapes = {
        key: shape[len(stack) :] if shape[: len(stack)] == stack else shape
        for key, shape in shapes.items()
    }
    largest = dims or max(shapes.values(), key=math.prod)
    names = ", ".join(dict.fromkeys(recipe.name for recipe in recipes if recipe.fp8))
    fp8 = bool(recipes) and all(recipe.fp8 for recipe in recipes)
    matrices = sum(sizes[key] for key, shape in shapes.items() if len(shape) > 1)
    if dims is None and not fp8 and max(map(len, shapes.values())) < 2:
        return _other(path=name, kind="vectors", reason="no matrix", parameters=sum(sizes.values()))
    count = None if traced is None else traced.layers.get(name, 0)
    some = f"only some of its hooks have FP8: {names}" if names and not fp8 else ""
    reason = some or (
        decision.reason if decision else "has a hook" if fp8 else _why_not(layer, kind, largest)
    )
    return Row(
        path=name,
        kind=kind,
        shape=largest,
        recipe=names if fp8 else None,
        reason=(OWN_CALL if _has_own_call(layer) else "never called")
        if dims and count == 0
        else reason,
        parameters=sum(sizes.values()),
        in_fp8=sizes.get("kernel", matrices) if fp8 else 0,
        multiplications=count,
    )


def _has_own_call(layer: nnx.Module | nn.Module | None) -> bool:
    """Whether a linear's class has its own __call__, whose products no hook sees."""
    return isinstance(layer, LINEARS) and not any(
        type(layer).__call__ is kind.__call__ for kind in LINEARS
    )


def _why_not(layer: nnx.Module | nn.Module | None, kind: str, shape: tuple[int, ...]) -> str:
    """Why convert does not choose a layer."""
    if isinstance(layer, LINEARS):
        if any(size % 16 for size in shape[-2:]):
            return "dims that are not multiples of 16 (L-5)"
        return "no hook: filtered, or not converted"
    if kind == "Embed":
        return "a table: lookups multiply nothing, and attend has no hook"
    if isinstance(layer, nnx.LoRA):
        return "an adapter of low rank: its products have no hook"
    if kind.startswith("Conv"):
        return _REASONS["conv_general_dilated"]
    return _outside(shape)


def _outside(shape: tuple[int, ...]) -> str:
    return (
        f"a parameter of {len(shape)} dims outside linears: experts (lax.ragged_dot) or a "
        "hand-written product have no hook"
    )


_other = functools.partial(Row, path="", shape=(), recipe=None)
"""The row of what is no layer that a recipe may have."""


def _report(rows: list[Row], traced: _Traced | None) -> Report:
    """The rows; one for all vectors, one for products without a layer."""
    vectors = [row for row in rows if row.kind == "vectors"]
    rows = [row for row in rows if row.kind != "vectors"]
    if vectors:
        count, reason = sum(v.parameters for v in vectors), f"of {len(vectors)} modules"
        rows.append(_other(kind="vectors", reason=reason, parameters=count))
    if traced:
        held = {row.path for row in rows}
        unheld = "by a hook of fp8ref's that no layer with parameters holds"
        rows += [
            _other(path=name, kind="product", reason=unheld, multiplications=count)
            for name, count in traced.layers.items()
            if name not in held
        ]
    for (primitive, shape), count in traced.others.items() if traced else ():
        reason = _REASONS.get(primitive, "outside layers in FP8")
        rows.append(_other(kind=primitive, shape=shape, reason=reason, multiplications=count))
    return Report(rows=rows)
