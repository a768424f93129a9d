"""A step of AdamW whose moments share scales by blocks, in one kernel on an NVIDIA GPU (spec O).

XLA takes the amaxes of the blocks in one kernel and rounds in another, and both read the gradient
and the moments. This kernel, by Pallas, holds its blocks in registers between the two.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import triton
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8ref.jax.quantize import division
from fp8ref.jax.states import moments
from fp8ref.jax.states.moments import MomentState, Scalars
from fp8ref.spec.states.layouts import Layout

ROWS = 16
"""Blocks that a program of the kernel holds, at most: of 128 elements, 16 elements a thread."""


def takes(shape: tuple[int, ...], layout: Layout) -> bool:
    """Whether the kernel makes a step of a parameter of that shape, under its own layout: both
    moments in FP8 and in blocks of one length, which divides the last dim, of exact amaxes, and a
    float32 parameter or a master in float16 of a predicted amax; all rounded to nearest."""
    both, master, block = (layout.m, layout.v), layout.master, layout.m.block
    return (
        block is not None
        and layout.v.block == block
        and layout.m.expansion == layout.v.expansion
        and all(
            moment.fmt.bits == 8 and moment.amax == "exact" and moment.rounding == "nearest_even"
            for moment in both
        )
        and (
            not layout.keeps_master
            or (master.amax == "predicted" and master.rounding == "nearest_even")
        )
        and len(shape) > 0
        and shape[-1] % block == 0
    )


@functools.partial(
    jax.jit, static_argnames=("layout", "interpret")
)  # traced once for all parameters of a shape
def step(
    p,
    g,
    stored: list[MomentState],
    at: Scalars,
    factor,
    finite,
    *,
    layout: Layout,
    interpret: bool = False,
):
    """(the new weight, m, v and a master if one is kept): ``states.step`` of one parameter that the
    kernel ``takes``, on one device or a mesh.

    Shapes:   p, and g, [..., n * block]; factor and finite ().
    interpret runs the kernel by XLA, on any platform.
    """
    lead = *p.shape[:-1], p.shape[-1] // _block(layout)
    master = stored[2] if layout.keeps_master else None
    scalars = jnp.stack(
        [
            *at,
            factor,
            finite.astype(jnp.float32),
            *((master.scale_inv, master.amax) if master else ()),
        ]
    )
    structure: Any
    arrays, structure = jax.tree.flatten(tuple(stored[:2]))
    shaped = [x.reshape(lead) if x.shape != p.shape else x for x in arrays]
    weight, *new = _partitioned(p.ndim, layout, interpret)(
        scalars, g, master.codes if master else p, *shaped
    )
    both = structure.unflatten([x.reshape(old.shape) for x, old in zip(new, arrays, strict=False)])
    if master is None:
        return weight, *both
    new_master = MomentState(weight, *map(moments.largest, new[len(arrays) :]))
    return moments.read(new_master, layout.master, layout).astype(p.dtype), *both, new_master


@functools.lru_cache(maxsize=64)
def _partitioned(ndim: int, layout: Layout, interpret: bool):
    """The kernel of arrays of that rank, by piece of each device."""

    @custom_partitioning
    def call(*arrays):
        return _call(*arrays, layout=layout, interpret=interpret)

    fields = 4 if layout.m.expansion else 2

    def partition(mesh, arguments, results):
        spec = P(*(*arguments[1].sharding.spec, *[None] * ndim)[:ndim])
        spec = P(*spec[:-1], _cut(spec[-1], arguments[1].shape[-1], mesh, _block(layout)))
        placed = NamedSharding(mesh, spec)
        return (
            mesh,
            call.fun,
            jax.tree.map(lambda _: placed, results),
            (NamedSharding(mesh, P()), *[placed] * (len(arguments) - 1)),
        )

    lead = " ".join(f"d{i}" for i in range(ndim - 1))
    whole, blocks = f"{lead} (b k)", f"{lead} b"
    both = [whole, *[blocks] * (fields - 1)] * 2
    call.def_partition(
        partition=partition,
        sharding_rule=f"s, {', '.join([whole, whole, *both])} -> "
        f"{', '.join([whole, *both, *[blocks] * 2 * layout.keeps_master])}",
        need_replication_factors=("s", "k"),
        k=_block(layout),
    )
    return call


def _block(layout: Layout) -> int:
    assert layout.m.block is not None
    return layout.m.block


def _cut(axes, length: int, mesh, block: int):
    """The mesh axes of the last dim; None where they would split a block."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    parts = math.prod(mesh.shape[name] for name in names)
    return axes if length % (parts * block) == 0 else None


def _call(scalars, g, weight, *stored, layout: Layout, interpret: bool):
    """The kernel over one device's blocks, and a master's scale_inv and amax by block."""
    block = _block(layout)
    total = weight.size // block
    rows = math.gcd(total, ROWS)
    wide = pl.BlockSpec((rows, block), lambda i: (i, 0))
    narrow = pl.BlockSpec((rows,), lambda i: (i,))
    flat = [
        x.reshape(total, block) if x.size == weight.size else x.reshape(total)
        for x in (g, weight, *stored)
    ]
    like = [*flat[1:], *[jax.ShapeDtypeStruct((total,), jnp.float32)] * 2 * layout.keeps_master]
    outputs = pl.pallas_call(
        functools.partial(_kernel, layout=layout),
        grid=(total // rows,),
        in_specs=[
            pl.BlockSpec(scalars.shape, lambda i: (0,)),
            *(wide if x.ndim == 2 else narrow for x in flat),
        ],
        out_specs=[wide if len(x.shape) == 2 else narrow for x in like],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        input_output_aliases={2 + i: i for i in range(len(flat) - 1)},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="fp8ref_adamw",
    )(scalars, *flat)
    lead = (*weight.shape[:-1], weight.shape[-1] // block)
    return tuple(x.reshape(weight.shape if x.size == weight.size else lead) for x in outputs)


def _kernel(scalars, g, weight, *refs, layout: Layout):
    """One program: refs of [rows, block], and of [rows] for what a block has one of."""
    count = 2 * (4 if layout.m.expansion else 2)
    fields, outputs = refs[:count], refs[count:]
    with division.in_kernel():
        at = Scalars(*(scalars[i] for i in range(10)))
        factor = scalars[10]
        finite = scalars[11] != 0
        before = [weight[...], *(ref[...] for ref in fields)]
        both = before[1 : 1 + count // 2], before[1 + count // 2 :]
        old = [_state(part, layout) for part in both]
        if layout.keeps_master:
            master_scalars = [scalars[12], scalars[13]]
            old.append(MomentState(before[0], *master_scalars))
            before += [jnp.full(before[2].shape, x) for x in master_scalars]
        (_, *new), change = moments.new(
            before[0], g[...].astype(jnp.float32) * factor, old, at, layout
        )
        after = []
        for i, (x, stored) in enumerate(zip(new, old, strict=True)):
            maxima = moments.extremes(x, None, layout.kept[i], i)
            after += jax.tree.leaves(moments.store(x, maxima, stored, i, at, layout, None))
        if layout.keeps_master:
            *after, codes, scale_inv, amax = after
            after = [codes, *after, jnp.full(amax.shape, scale_inv), amax]
        else:
            after = [before[0] - change, *after]
        for ref, x, kept in zip(outputs, after, before, strict=True):
            ref[...] = jnp.where(finite, x, kept)


def _state(fields: list[jax.Array], layout: Layout) -> MomentState:
    codes, scale_inv, *more = fields
    if layout.m.expansion:
        return MomentState(codes, scale_inv, None, *more)
    return MomentState(codes, scale_inv)
