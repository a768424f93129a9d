"""Launch a kernel of ``fp8ref.kernels`` from JAX, under any transformation but differentiation.

On an NVIDIA GPU jax-triton compiles it. On other platforms the program calls Triton's interpreter
on the host, which is slow, for tests. Kernels see what one device holds: inside shard_map its
piece. On a mesh that only the inputs of a jit bring, they are refused: XLA would gather tensors.
"""

import contextlib
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from fp8ref.jax.distributed import one_device, sharding
from fp8ref.jax.gemm import hardware

if TYPE_CHECKING:
    from fp8ref.kernels.jit import Launch

_ON_A_MESH = (
    "on a mesh, Triton's kernels cast inside shard_map, each device its own pieces; under plain "
    "jit XLA would gather whole tensors for them. Set parallel.through to shard_map, or "
    "numerics.kernels to plain."
)


@dataclass(frozen=True, kw_only=True)
class TritonKernels:
    """That Triton's kernels cast.

    capability  the GPU's compute capability that is compiled for ahead of time, such as 90; None:
                that of the process's first GPU.
    """

    capability: int | None = None


_chosen = jax.make_user_context(default_value=None)


def casting(kernels: TritonKernels | None):
    """In this context kernels cast operands of linears (``casts.takes``). None changes nothing.

    Scope:    what is traced, or runs eagerly, in it: linears, contractions and Flax's hooks, in
              both passes. jax.jit compiles a program for each choice.
    """
    return contextlib.nullcontext() if kernels is None else _chosen(kernels)


def active() -> TritonKernels | None:
    """The choice of the innermost context; None outside all contexts."""
    return _chosen.value


Result = tuple[tuple[int, ...], Any]
"""Shape and dtype of an output."""


@dataclass(frozen=True)
class _Call:
    """A launch with its outputs, of which some are written over inputs (``bind``)."""

    launch: "Launch"
    outputs: tuple[Result, ...]
    capability: int | None
    aliases: tuple[tuple[int, int], ...]

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self.outputs]


def run(launch: "Launch", inputs: Sequence[Array], kernels: TritonKernels) -> list[Array]:
    """The outputs of a launch on contiguous inputs; codes are uint8.

    Raises:   ValueError: on the mesh of a plain jit; on devices of a CPU that would deadlock.
    """
    axes = frozenset().union(*(sharding.varying(x) for x in inputs))
    arrays = []
    for x in inputs:
        missing = tuple(axes - frozenset(sharding.varying(x)))
        arrays.append(lax.pcast(x, missing, to="varying") if missing else x)
    mesh = jax.typeof(arrays[0]).sharding.mesh
    if not getattr(mesh, "manual_axes", ()):
        arrays[0] = one_device.check(arrays[0], _ON_A_MESH)
    elif kernels.capability is None and jax.default_backend() == "cpu":
        hardware.check_devices(mesh.size, mapped=True, platform="cpu")
    return bind(launch, arrays, launch.memory(inputs[0].dtype.name), kernels)


def bind(
    launch: "Launch",
    inputs: Sequence[Array],
    outputs: Sequence[Result],
    kernels: TritonKernels,
    aliases: Sequence[tuple[int, int]] = (),
) -> list[Array]:
    """``run`` without its checks of a mesh, and with other outputs.

    aliases   places of inputs, and of the outputs that are written over them.
    """
    kinds = tuple((tuple(shape), jnp.dtype(dtype)) for shape, dtype in outputs)
    call = _Call(launch, kinds, kernels.capability, tuple(aliases))
    return _launch.bind(*inputs, call=call)


_launch = Primitive("fp8ref_kernel")
_launch.multiple_results = True


@functools.partial(jax.jit, static_argnames="call")
def _eager(*arrays: Array, call: _Call) -> list[Array]:
    """Compiled once for a call, however often it is made outside of a program."""
    return _launch.bind(*arrays, call=call)


_launch.def_impl(_eager)


@_launch.def_abstract_eval
def _types(first, *_, call: _Call):
    """Outputs vary along the same axes of shard_map as inputs."""

    def like(shape: tuple[int, ...], dtype):
        spec = PartitionSpec(*[None] * len(shape))
        return first.update(shape=shape, dtype=dtype, sharding=first.sharding.update(spec=spec))

    return [like(shape, dtype) for shape, dtype in call.outputs]


def _batched(arrays, dims, *, call: _Call):
    """One launch after the other: a kernel has no batch dims."""
    [size] = {x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None}
    stacked = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(arrays, dims, strict=True)
    ]
    outputs = lax.map(lambda each: _launch.bind(*each, call=call), stacked)
    return outputs, [0] * len(outputs)


batching.primitive_batchers[_launch] = _batched


def _compiled(*arrays: Array, call: _Call) -> list[Array]:
    """On an NVIDIA GPU."""
    import jax_triton

    launch = functools.partial(jax_triton.triton_call, **call.launch.numbers)
    return launch(
        *arrays,
        kernel=call.launch.kernel,
        grid=call.launch.grid,
        out_shape=call.shapes,
        num_warps=call.launch.warps,
        enable_fp_fusion=False,
        compute_capability=call.capability,
        input_output_aliases=dict(call.aliases),
    )


def _interpreted(*arrays: Array, call: _Call) -> list[Array]:
    """On any other platform: on the host, in Triton's interpreter."""
    thread = _thread()  # of a thread that XLA runs it would inherit that it flushes subnormals

    def on_host(*arrays: Array) -> list[np.ndarray]:
        return thread.submit(_on_host, call, [np.ascontiguousarray(x) for x in arrays]).result()

    return jax.pure_callback(on_host, call.shapes, *arrays, vmap_method="sequential")


def _on_host(call: _Call, inputs: list[np.ndarray]) -> list[np.ndarray]:
    from fp8ref.kernels import jit

    outputs = [np.zeros(shape, dtype) for shape, dtype in call.outputs]
    for source, place in call.aliases:
        outputs[place] = inputs[source].copy()
    arrays = [*inputs, *outputs]
    jit.interpret(call.launch, arrays, [x.dtype.name for x in arrays])
    return outputs


@functools.cache
def _thread() -> ThreadPoolExecutor:
    """One thread, started while tracing: XLA's threads flush subnormals, and the interpreter runs
    one launch at a time."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="fp8ref-interpreted")
    thread.submit(int).result()
    return thread


mlir.register_lowering(_launch, mlir.lower_fun(_interpreted, multiple_results=True))
mlir.register_lowering(_launch, mlir.lower_fun(_compiled, multiple_results=True), platform="cuda")
