"""A step of AdamW whose moments share scales by blocks, in one kernel on an NVIDIA GPU (spec O).

XLA takes the amaxes of the blocks in one kernel and rounds in another, and both read the gradient
and the moments. ``fp8ref.kernels.adamw_blocks`` holds its blocks in registers between the two.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8ref.formats import E4M3FN
from fp8ref.jax.kernels import choice, launch
from fp8ref.jax.kernels.launch import TritonKernels
from fp8ref.jax.quantize import cast
from fp8ref.jax.states import moments
from fp8ref.jax.states.moments import MomentState, Scalars
from fp8ref.spec.kernels import Choice
from fp8ref.spec.states.layouts import Layout


def chosen(asked: Choice) -> TritonKernels | None:
    """How the kernel is launched on a GPU, unless plain operations are asked for: as the context
    says (``launch.casting``), else on the process's own GPU, where kernels run; None without."""
    device = jax.local_devices()[0]
    if asked == "plain":
        return None
    with jax.ensure_compile_time_eval():
        return launch.active() or choice.kernels(choice.explain("auto", device), device)


def takes(shape: tuple[int, ...], layout: Layout) -> bool:
    """Whether the kernel makes a step of a parameter of that shape, under its own layout: both
    moments in e4m3fn and in blocks of one length, which divides the last dim, of exact amaxes, and
    a float32 parameter or a master in float16 of a predicted amax; all rounded to nearest."""
    m, master = layout.m, layout.master
    return (
        m.block is not None
        and m.fmt == E4M3FN
        and (m.amax, m.rounding, m.keep) == ("exact", "nearest_even", False)
        and m.scaling in ("multiply", "divide")
        and dataclasses.replace(layout.v, root=False, keep=False) == m
        and (
            not layout.keeps_master
            or (master.amax == "predicted" and master.rounding == "nearest_even")
        )
        and len(shape) > 0
        and shape[-1] % m.block == 0
    )


# traced once for all parameters of a shape
@functools.partial(jax.jit, static_argnames=("layout", "kernels"))
def step(p, g, stored: list, at: Scalars, factor, finite, *, layout: Layout, kernels):
    """(the new weight, m, v and a master if one is kept): ``states.step`` of one parameter that the
    kernel ``takes``, on one device or a mesh.

    stored    a ``MomentState`` of m, v and, if one is kept, the master.
    kernels   as ``chosen``. On another platform than CUDA the kernel is interpreted.
    Shapes:   p, and g, [..., n * block]; factor and finite ().
    """
    lead = *p.shape[:-1], p.shape[-1] // _block(layout)
    master = stored[2] if layout.keeps_master else None
    read = scale = inverse = amax = jnp.float32(1)
    if master is not None:
        read, amax = jnp.float32(master.scale_inv), jnp.float32(master.amax)
        scale, inverse = moments.scales(moments.predicted(master, at), layout.master)
    numbers = jnp.stack([*at, factor, finite.astype(jnp.float32), read, scale])
    structure: Any
    arrays, structure = jax.tree.flatten(tuple(stored[:2]))
    shaped = [x.reshape(lead) if x.shape != p.shape else x for x in arrays]
    weight, *new = _partitioned(p.ndim, layout, kernels)(
        numbers, g, master.codes if master else p, *shaped
    )
    both = structure.unflatten([x.reshape(old.shape) for x, old in zip(new, arrays, strict=False)])
    if master is None:
        return weight, *both
    largest = cast.from_magnitude_bits(jnp.max(new[-1]), jnp.float32)
    scale_inv = jnp.where(finite, inverse, read)
    amax = jnp.where(finite, moments.product(largest, inverse), amax)
    new_master = MomentState(weight, scale_inv, amax)
    return moments.read(new_master, layout.master, layout).astype(p.dtype), *both, new_master


@functools.lru_cache(maxsize=64)
def _partitioned(ndim: int, layout: Layout, kernels: TritonKernels):
    """The kernel of arrays of that rank, by piece of each device."""

    @custom_partitioning
    def call(*arrays):
        return _call(*arrays, layout=layout, kernels=kernels)

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
        f"{', '.join([whole, *both, *[blocks] * layout.keeps_master])}",
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


def _call(numbers, g, weight, *stored, layout: Layout, kernels: TritonKernels):
    """The kernel over one device's blocks; of a master also the largest codes by block, as bits."""
    from fp8ref.kernels import adamw_blocks

    built = adamw_blocks.step(weight.size // _block(layout), layout)
    dtype, half = stored[0].dtype, len(stored) // 2
    both = [
        [lax.bitcast_convert_type(codes, jnp.uint8), *rest]
        for codes, *rest in (stored[:half], stored[half:])
    ]
    # in place of an expansion's fields, which the kernel then does not touch
    padded = [x for fields in both for x in (*fields, *[numbers] * (4 - half))]
    inputs = [weight, g, numbers, *padded]
    kept = [0, *(3 + 4 * i + j for i in (0, 1) for j in range(half))]
    places = {i: i - 2 if i else 0 for i in kept}
    outputs = [((1,), jnp.float32)] * 9
    for i, place in places.items():
        outputs[place] = (inputs[i].shape, inputs[i].dtype)
    lead = (*weight.shape[:-1], weight.shape[-1] // _block(layout))
    outputs.append((lead if layout.keeps_master else (1,), jnp.int32))
    results = launch.bind(built, inputs, outputs, kernels, tuple(places.items()))
    new = [results[place] for place in places.values()]
    for i in (1, 1 + half):
        new[i] = lax.bitcast_convert_type(new[i], dtype)
    return (*new, *results[-1:] * layout.keeps_master)
