"""The JAX trainer's device mesh: shardings of parameters, tokens and linears (spec P, A-24).

Tensor parallelism cuts attention by heads and the MLP by inner features: q, k, v, gate and up are
column-parallel, o and down row-parallel. fsdp cuts every matrix along its first dim, and gathers it
for use: weights of linears in FP8. context cuts every sequence, and matrices as fsdp does. Norms
and routers are replicated. Experts are cut by their number, over expert, which holds them apart,
and fsdp; all else is cut over expert as over fsdp.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from fp8ref.jax.distributed import sharding
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.kernels import choice as kernel_choice
from fp8ref.recipe import Role
from fp8ref.shared.errors import ConfigError
from fp8ref.spec import llama
from fp8ref.spec.kernels import Choice, Kernels
from fp8ref.train.config import device_shapes
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import ParallelConfig
from fp8ref.train.jax import gathers


class Layout:
    """The shardings of one config.

    On one device ``mesh`` is None: ``map`` returns its function, ``placement`` None.
    """

    def __init__(self, config: Config, devices: Sequence[jax.Device] | None = None) -> None:
        """devices   of a topology description, on which arrays are only shapes. None: jax's own.

        Raises:   ConfigError: cuDNN attention without a GPU or on unsupported heads; too few
                  devices; a batch, heads or dims that the mesh does not cut into equal pieces.
        """
        self.config = config.parallel
        self.abstract = devices is not None
        every = jax.devices() if devices is None else list(devices)
        self.devices = every[: config.parallel.devices]
        self.axes = config.parallel.axes
        sizes = {axis: getattr(config.parallel, axis) for axis in self.axes}

        def cutting(*axes: str) -> tuple[str, ...]:
            """Those of more than one device: placements omit the others, which cut nothing and
            would add collectives to the program."""
            return tuple(axis for axis in axes if sizes.get(axis, 1) > 1)

        self._batch = cutting("data", "fsdp", "expert")
        self._fsdp = cutting("fsdp", "context", "expert")
        self._context, self._tensor = cutting("context"), cutting("tensor")
        # Of experts: what gathers their weights, what has the same ones, and what holds them apart.
        self._gathering, self._copying = cutting("fsdp"), cutting("data")
        self._apart = cutting("expert")
        self._check_attention(config)
        self.mesh: Mesh | None = None
        if config.parallel.devices == 1 and jax.process_count() == 1:
            return
        self._check_devices(sizes)
        self._check(config, sizes)
        self.mesh = jax.make_mesh(
            tuple(sizes.values()),
            self.axes,
            axis_types=(AxisType.Auto,) * len(self.axes),
            devices=self.devices,
        )

    def _check_attention(self, config: Config) -> None:
        keys, platform = config.parallel, self.devices[0].platform
        if faults := keys.unattended(config.model.head_dim):
            raise ConfigError(faults[0])
        if keys.attention == "kernel" and config.numerics.attention != "cudnn":
            raise ConfigError(
                f"JAX has no kernel of variant {config.numerics.attention!r}: cuDNN's computes "
                "'cudnn'. Set parallel.attention to tiles, or train in PyTorch (--backend "
                "torch)."
            )
        instead = {"cudnn": "xla", "kernel": "tiles"}.get(keys.attention)
        if instead and not self.on_gpu:
            raise ConfigError(
                f"parallel.attention {keys.attention!r} needs an NVIDIA GPU; jax runs on "
                f"{platform}. Set parallel.attention to {instead}."
            )

    def _check_devices(self, sizes: dict[str, int]) -> None:
        asked = self.config.devices
        processes = jax.process_count()
        there = jax.device_count()
        if asked > len(self.devices):
            raise ConfigError(
                f"parallel asks for {asked} devices ({sizes}); jax has {len(self.devices)}. Make "
                "it smaller; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=8 makes "
                "eight."
            )
        if processes > 1 and asked != there:
            raise ConfigError(
                f"{processes} processes train on all their devices, {there}; parallel asks for "
                f"{asked} ({sizes}). Make {', '.join(self.axes)} multiply to {there}."
            )

    @property
    def on_gpu(self) -> bool:
        """Whether the devices are GPUs."""
        return self.devices[0].platform == "gpu"

    @property
    def own_device(self) -> jax.Device:
        """The first device of this process: one of another process runs nothing here."""
        process = jax.process_index()
        return next((d for d in self.devices if d.process_index == process), self.devices[0])

    def kernels(self, choice: Choice) -> Kernels:
        """What casts operands of linears on each device; ValueError as ``choice.explain``."""
        partitioned = self.mesh is not None and not self.mapped
        return kernel_choice.explain(
            choice, self.own_device, partitioned=partitioned, abstract=self.abstract
        )

    @property
    def description(self) -> str:
        """The devices, for the manifest: platform, kind, number, and number of processes."""
        first, processes = self.devices[0], jax.process_count()
        many = f", {self.config.devices} devices" * (self.config.devices > 1)
        many += f" in {processes} processes" * (processes > 1)
        return f"{first.platform}: {first.device_kind}{many}"

    @property
    def mapped(self) -> bool:
        """Whether the model runs inside shard_map, on shards; otherwise plain jit partitions it."""
        return self.mesh is not None and self.config.through == "shard_map"

    @property
    def tokens(self) -> P:
        """PartitionSpec of tokens [B, T]."""
        return P(self._batch)

    @property
    def parts(self) -> P:
        """PartitionSpec of tokens [microbatches, B, T]."""
        return P(None, self._batch)

    @property
    def cutting_tokens(self) -> tuple[str, ...]:
        """The mesh axes that cut the tokens, after the embedding."""
        tokens = self._tensor if self.config.sequence else ()
        return (*self._batch, *self._context, *tokens)

    @property
    def logits(self) -> P:
        """PartitionSpec of what the model returns, [B, T, ...]."""
        return P(
            self._batch, tuple(axis for axis in self.cutting_tokens if axis not in self._batch)
        )

    @property
    def cutting_heads(self) -> tuple[str, ...]:
        """The axes of shard_map that cut the batch, tokens and heads of attention; () under plain
        jit, which takes amaxes over all devices by itself."""
        return (*self._batch, *self._context, *self._tensor) if self.mapped else ()

    @property
    def context(self) -> str:
        """The axis of shard_map that cuts every sequence; "" if none does."""
        return self._context[0] if self._context else ""

    def placement(self, linear: str) -> Placement | None:
        """Placement of a linear's operands; None on one device, of grouped linears and routers."""
        if self.config.devices == 1 or f"{llama.EXPERTS}." in linear or llama.is_router(linear):
            return None
        config, last = self.config, linear.split(".")[-1]
        place = functools.partial(
            Placement,
            fsdp=self._fsdp,
            positions=self._context,
            scope=config.amax_scope,
            reduce_grads=_gradient_parts(config),
            reduce_outputs=_parts(config.reduce, config.tensor_reduce_dtype or "bfloat16"),
        )
        tokens = *self._batch, *self._context
        if last in llama.COLUMN:
            return place(m=tokens, n=self._tensor, sequence=config.sequence)
        if last in llama.ROW:
            return place(m=tokens, k=self._tensor, sequence=config.sequence)
        cutting = self.cutting_tokens
        return place(m=cutting, positions=tuple(a for a in cutting if a not in self._batch))

    def parameter(self, name: str, shape: tuple[int, ...]) -> P:
        """PartitionSpec of a stored parameter.

        Weights follow ``placement``, fsdp cuts the embedding table, and norms are replicated.
        Stacks of layers are not cut along their first dim.
        """
        if "*" in name:
            return P(None, *self.parameter(name.replace("*", "0"), shape[1:]))
        if f"{llama.EXPERTS}." in name and self.mesh is not None:
            return P((*self._apart, *self._gathering))
        placement = self.placement(name.removesuffix(".weight"))
        if placement is None or len(shape) < 2:
            return P()
        if name == llama.EMBEDDING:
            return P(self._fsdp)
        return P(*placement.at_rest("weight"))

    def sharding(self, spec: P) -> Sharding:
        """The jax Sharding of a PartitionSpec."""
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0])
        # A None at the end places nothing, but makes another key of a compiled program.
        cut = [i for i, axes in enumerate(spec, 1) if axes is not None]
        return NamedSharding(self.mesh, P(*spec[: max(cut, default=0)]))

    def put(self, value: np.ndarray | llama.Weight, spec: P) -> jax.Array:
        """Put a value on the devices: each process reads its own shards, each of them once.

        On a topology description, returns a shape with its sharding.
        """
        if self.abstract:
            return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=self.sharding(spec))  # type: ignore[return-value, union-attr]
        if self.mesh is None:
            return jnp.asarray(value[...])
        shards: dict[str, np.ndarray] = {}

        def shard(index) -> np.ndarray:
            if (key := str(index)) not in shards:
                shards[key] = value[index]
            return shards[key]

        return jax.make_array_from_callback(value.shape, self.sharding(spec), shard)

    def fetch(self, value: jax.Array) -> np.ndarray:
        """The whole array, on the host of every process."""
        return np.asarray(
            value
            if value.is_fully_addressable
            else multihost_utils.process_allgather(value, tiled=True)
        )

    def map(self, f: Callable, in_specs, out_specs) -> Callable:
        """f under shard_map, if the model runs inside it; else f."""
        if not self.mapped:
            return f
        return jax.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    def whole(self, table: jax.Array, dtype) -> jax.Array:
        """A float32 table that fsdp cuts, on every device: rounded to dtype and all-gathered so, if
        the model runs inside shard_map; else as it is.

        Its gradient is float32, scattered over fsdp first: fewer rows are summed after.
        """
        if not (self.mapped and self._fsdp):
            return table
        others = tuple(axis for axis in self.cutting_tokens if axis not in self._fsdp)
        return gathers.rounded_table(table, jnp.dtype(dtype), self._fsdp, others)

    def own_context(self, value: jax.Array, axis: int = 1) -> jax.Array:
        """Under context parallelism, a device's part of tokens [B, T], or along another axis."""
        if not self._context:
            return value
        length = value.shape[axis] // self.config.context
        begin = lax.axis_index(self._context) * length
        return lax.dynamic_slice_in_dim(value, begin, length, axis=axis)

    def own_sequence(self, tokens: jax.Array) -> jax.Array:
        """Under sequence parallelism inside shard_map, a device's part of tokens [B, T] along T."""
        if not (self.mapped and self.config.sequence):
            return tokens
        length = tokens.shape[1] // self.config.tensor
        begin = lax.axis_index("tensor") * length
        return lax.dynamic_slice_in_dim(tokens, begin, length, axis=1)

    def cut_sequence(self, h: jax.Array) -> jax.Array:
        """Under sequence parallelism and plain jit, constrain h [B, T, hidden] to cuts along T."""
        if self.mesh is None or self.mapped or not self.config.sequence:
            return h
        cut = NamedSharding(self.mesh, P(self._batch, self._tensor, None))
        return lax.with_sharding_constraint(h, cut)

    def apart(self, value: jax.Array) -> jax.Array:
        """Mark a replicated value as varying over devices, for shard_map's type check."""
        return lax.pcast(value, self.axes, to="varying") if self.mapped else value

    @property
    def expert_axis(self) -> str | None:
        """The mesh axis whose devices hold different experts (X-13)."""
        return "expert" if self.mapped and self._apart else None

    @property
    def moves_codes(self) -> bool:
        """Whether rows are sent to their experts in FP8, where that changes no bit (X-14)."""
        return self.expert_axis is not None and self.config.expert_dispatch == "fp8"

    @property
    def sharing_groups(self) -> tuple[str, ...]:
        """The mesh axes along which devices have rows of the same experts, and share their scales:
        under scope global those along which they have the same experts."""
        if not (self.mapped and self.config.amax_scope == "global"):
            return ()
        return (*self._copying, *self._gathering)

    @property
    def gathers_experts(self) -> bool:
        """Whether experts' weights are gathered for use."""
        return self.mapped and bool(self._gathering)

    def expert_weights(self, w: jax.Array) -> jax.Array:
        """The weights [E, N, K] of this device's experts, all-gathered over fsdp in their dtype.
        Their gradient is summed over fsdp and data, in reduce_dtype, and rounded to it."""
        if not (self.mapped and (self._gathering or self._copying)):
            return w
        return gathers.weights(w, self._gathering, self._copying, self.config.reduce_dtype)

    def whole_head(self, w: jax.Array) -> jax.Array:
        """The last linear's weight [V, K], all-gathered in its dtype; its gradient is summed over
        devices with other tokens, in reduce_dtype, and rounded to it (P-9)."""
        others = tuple(axis for axis in self.cutting_tokens if axis not in self._fsdp)
        if not (self.mapped and (self._fsdp or others)):
            return w
        return gathers.weights(w, self._fsdp, others, self.config.reduce_dtype)

    def shared(self, w: jax.Array) -> jax.Array:
        """A weight that every device has, whose gradient is summed over the devices in float32."""
        if not (self.mapped and self._batch):
            return w
        return lax.pcast(w.astype(jnp.float32), self._batch, to="varying").astype(w.dtype)

    def total(self, tree):
        """The sums over the devices that share the batch."""
        if not (self.mapped and self._batch):
            return tree
        return jax.tree.map(lambda v: lax.psum(v, self._batch), tree)

    def own_parts(self, values: np.ndarray, linear: str, role: Role) -> np.ndarray:
        """Of values [devices, ...], those of devices that together hold a linear's tensor once.

        Without shard_map there is one value, for all devices.
        """
        if not self.mapped:
            return values
        placement = self.placement(linear)
        # whose weights are measured once they are gathered
        cutting = set(self._apart if role == "weight" else self._batch)
        if placement is not None:
            cutting = {axis for axes in placement.at_rest(role) for axis in axes}
        sizes = [getattr(self.config, axis) for axis in self.axes]
        parts = values.reshape(*sizes, *values.shape[1:])
        own = tuple(slice(None) if axis in cutting else slice(1) for axis in self.axes)
        return parts[own].reshape(-1, *values.shape[1:])

    def mean(self, values: jax.Array) -> jax.Array:
        """The mean of all devices' means of values [B, T], which have one shape."""
        mean = values.mean()
        if not (self.mapped and self.cutting_tokens):
            return mean
        return lax.pmean(mean, self.cutting_tokens)

    def _check(self, config: Config, sizes: dict[str, int]) -> None:
        if faults := device_shapes.uncut(config, "jax"):
            raise ConfigError(faults[0])
        data = config.data
        tokens = data.batch_size // data.microbatches * data.sequence_length
        try:
            for name, shape in llama.linear_shapes(config.model).items():
                placement = self.placement(name)
                if placement is not None:
                    sharding.check_shapes(name, tokens, shape, placement, sizes)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _parts(reduce: str, dtype: str) -> sharding.Parts:
    """What linears sum over devices; the compute dtype, their results' own, is bfloat16 (M-2)."""
    if reduce == "accumulators":
        return "accumulators"
    return "float32" if dtype == "float32" else "result"


def _gradient_parts(config: ParallelConfig) -> sharding.GradParts:
    """What linears sum over devices to make a weight's gradient."""
    if config.reduce_dtype == "float8_e4m3fn":
        return config.reduce_dtype
    return _parts(config.reduce, config.reduce_dtype)
