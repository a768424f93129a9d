"""Attention's inputs, checked: shapes, dtypes, documents, scales, sinks, devices (A-3, A-12, A-23).

``DeviceCall`` has what is static about one call, ``Inputs`` its arrays.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8ref.jax.attention.operands import heads as head_scaling
from fp8ref.jax.distributed import sharding
from fp8ref.jax.gemm import hardware
from fp8ref.spec import support
from fp8ref.spec.attention import delayed as attention_delayed
from fp8ref.spec.attention import variants as attention
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import Mask, Variant
from fp8ref.spec.hardware import Multiply


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceCall(Call):
    """A call of attention, and what JAX adds to it.

    over       mesh axes, inside shard_map, that cut batch and heads: amaxes of whole tensors are
               taken along them too.
    tokens     the mesh axis, inside shard_map and among ``over``, that cuts the tokens of q, k and
               v: codes of k and v are gathered (A-21); "" if none does.
    layer      whose attention this is, by which ``proof`` knows its products; "" if it has no name.
    simulated  what multiplies codes in place of XLA's dots (G-19): ``resolve`` sets it to that of
               ``hardware.simulating``, whose backward pass may be traced outside it.
    measures   whether operands are measured (Q-13), and
    watcher    who is told what both passes made (``observer``): ``apply`` sets both.

    Raises:    ValueError: as ``Call``; a string as ``over``; a layer with '/', '(' or ')'.
    """

    over: tuple[str, ...] = ()
    tokens: str = ""
    layer: str = ""
    simulated: Multiply | None = None
    measures: bool = False
    watcher: Callable | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.over, str):
            raise ValueError(
                f"over is a tuple of mesh axes; got the string {self.over!r}. Use ({self.over!r},)."
            )
        object.__setattr__(self, "over", tuple(self.over))  # a list is not hashed
        if any(sign in self.layer for sign in "/()"):
            raise ValueError(
                f"the name of attention has no '/', '(' or ')'; got {self.layer!r}. Use dots."
            )

    @classmethod
    def resolve(cls, variant: str | Variant | Call, mask: Mask | None = None) -> Self:
        """As ``Call.resolve``; of simulated hardware inside ``hardware.simulating``.

        Raises:   ValueError: as there; simulated hardware that came in the call.
        """
        call = super().resolve(variant, mask)
        if call.simulated is not None:
            raise ValueError(
                f"{call.name}: simulated hardware comes from the context; got "
                f"{call.simulated.name!r} in the Call. Use hardware.simulating."
            )
        # products of higher precision stay XLA's
        multiply = hardware.active() if call.variant.fmt.bits <= 8 else None
        return dataclasses.replace(call, simulated=multiply)

    @property
    def name(self) -> str:
        """What errors begin with."""
        return f"attention by variant {self.variant.name!r}"

    def unnamed(self) -> "DeviceCall":
        """What decides the numbers: neither whose call it is nor who watches."""
        return dataclasses.replace(self, layer="", watcher=None)

    def scope(self, part: str):
        """A context that names a product, or a kernel's pass, in the program:
        ``<layer>/attention:<part>``."""
        return jax.named_scope(f"{self.layer or 'attention'}/attention:{part}")

    @property
    def fast(self) -> bool:
        """Whether this is the fast form (A-18)."""
        return self.arithmetic == "fast"


class Inputs(NamedTuple):
    """The arrays of one call: q [B, H, Tq, D], k and v [B, Hkv, Tk, D]; documents of queries [B,
    Tq] and keys [B, Tk], int32, or None; sinks [H], or None."""

    q: Array
    k: Array
    v: Array
    documents: tuple[Array, Array] | None
    sinks: Array | None = None


def prepare(q, k, v, call: DeviceCall, documents, sinks) -> Inputs:
    """Check the inputs of either pass, in the call's layout. Raises as ``attention.forward``."""
    q, k, v = attention.heads_first(call.layout, q, k, v)
    q, k, v = checked("q", q), checked("k", k), checked("v", v)
    (b, h, tq, d), tk = q.shape, k.shape[2]
    attention.check_shapes((b, h, tq, d), k.shape, v.shape)
    dtypes = [str(x.dtype) for x in (q, k, v)]
    if len(set(dtypes)) > 1:
        raise ValueError(
            f"attention takes q, k and v of one dtype; got {', '.join(dtypes)}. Cast them first."
        )
    call.check_features(d)
    support.require("promotion of attention's sums", "jax", call.variant)
    if call.variant.granularity is not None:
        head_scaling.implemented(call.variant.policy)
    if call.simulated is not None:
        _check_simulated(call, q)
    ids = _documents(documents, b, tq, tk)
    if ids is not None:
        q = without_padding(q, ids[0])
        k, v = (without_padding(x, ids[1]) for x in (k, v))
    return _on_devices(Inputs(q, k, v, ids, _sinks(sinks, h)), call)


def _check_simulated(call: DeviceCall, q: Array) -> None:
    """ValueError for what simulated hardware cannot run: MX blocks, other devices than CPUs, a mesh
    outside shard_map."""
    if call.variant.granularity == "mx_1x32":
        hardware.refuse(
            call.name,
            "does not multiply MX blocks, which are dequantized; got some",
            ", or use variant 'cudnn'",
        )
    mesh = jax.typeof(q).sharding.mesh
    mapped, platform = bool(getattr(mesh, "manual_axes", ())), jax.default_backend()
    try:
        hardware.check_devices(mesh.size or 1, mapped=mapped, platform=platform)
    except ValueError as error:
        raise ValueError(f"{call.name}: {error}") from error


def without_padding(x: Array, documents: Array) -> Array:
    """x [B, heads, T, D] with zeros for tokens of negative documents (A-3)."""
    return jnp.where((documents < 0)[:, None, :, None], jnp.zeros((), x.dtype), x)


def _sinks(sinks, heads: int) -> Array | None:
    if sinks is None:
        return None
    dtype, shape = getattr(sinks, "dtype", type(sinks).__name__), jnp.shape(sinks)
    if dtype not in (jnp.float32, jnp.float16, jnp.bfloat16) or shape != (heads,):
        raise ValueError(
            f"sinks are float32, float16 or bfloat16 [{heads}], one for each query head; got "
            f"{dtype} {shape}."
        )
    return jnp.asarray(sinks)


def visible(tq: int, tk: int, mask: Mask) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) int32 [Tq]: query i sees the keys from low[i] to below high[i] (A-3)."""
    position = np.arange(tq) + (tk - tq if mask.alignment == "end" else 0)
    low, high = visible_from(position, tk, mask)
    return low.astype(np.int32), high.astype(np.int32)


def visible_from(position, keys: int, mask: Mask) -> tuple:
    """(low, high) of queries at these positions among the keys, arrays of NumPy or of JAX."""
    left, right = mask.window or (None, None)
    right = 0 if mask.causal else right  # a window's is at least 0
    low = position * 0 if left is None else position - left
    high = position * 0 + keys if right is None else position + right + 1
    return low.clip(0, keys), high.clip(0, keys)


def check_seen(seen: Mapping, variant: Variant) -> None:
    """ValueError for observations of roles without a state, or of another shape."""
    observed_roles = attention_delayed.roles(variant)
    for role, x in seen.items():
        if role not in observed_roles:
            raise ValueError(
                f"variant {variant.name!r} observes {', '.join(observed_roles) or 'no role'}; got "
                f"{role!r}. Leave it out."
            )
        if jnp.shape(x) != (3,):
            raise ValueError(
                f"an observation is float32 [3], from delayed.unseen; got {jnp.shape(x)} of {role}."
            )


def checked(name: str, x) -> Array:
    """x as an array [B, heads, T, D] of float32, float16 or bfloat16.

    ValueError for anything else.
    """
    dtype, shape = getattr(x, "dtype", type(x).__name__), jnp.shape(x)
    if dtype not in (jnp.float32, jnp.float16, jnp.bfloat16) or len(shape) != 4 or 0 in shape:
        raise ValueError(
            f"{name} is non-empty float32, float16 or bfloat16 [B, heads, T, D]; got {dtype} "
            f"{list(shape)}."
        )
    return jnp.asarray(x)


def _documents(documents, b: int, tq: int, tk: int) -> tuple[Array, Array] | None:
    """(documents of queries, of keys), integers [B, T]; padding gets -2 and -1, which differ."""
    if documents is None:
        return None
    pair = documents if isinstance(documents, tuple) else (documents, documents)
    shapes = [jnp.shape(ids) for ids in pair]
    if shapes != [(b, tq), (b, tk)] or any(
        not jnp.issubdtype(getattr(ids, "dtype", float), jnp.integer) for ids in pair
    ):
        dtypes = [str(getattr(ids, "dtype", type(ids).__name__)) for ids in pair]
        raise ValueError(
            f"documents are integers: [{b}, {tq}] for queries, [{b}, {tk}] for keys; got "
            f"{list(zip(dtypes, shapes, strict=True))}."
        )
    q_ids, k_ids = map(_numbers_of_documents, pair)
    return jnp.where(q_ids < 0, -2, q_ids), jnp.where(k_ids < 0, -1, k_ids)


def _numbers_of_documents(ids) -> Array:
    """Documents as an array; ValueError for numbers that JAX would truncate to 32 bits."""
    bits = jax.dtypes.canonicalize_dtype(np.int64).itemsize * 8
    wide = isinstance(ids, np.ndarray) and ids.dtype.itemsize * 8 > bits
    if wide and int(ids.max()) >= 1 << (bits - 1):
        raise ValueError(
            f"documents have numbers below 2^{bits - 1} in {bits}-bit JAX; got {int(ids.max())}. "
            "Number them from 0 in each batch."
        )
    if isinstance(ids, np.ndarray) and ids.dtype.kind == "i":
        ids = np.maximum(ids, -1)  # cut to 32 bits, -2^32 would be document 0
    numbers = jnp.asarray(ids)
    return numbers.astype(jnp.int64 if numbers.dtype.itemsize > 4 else jnp.int32)


def _on_devices(inputs: Inputs, call: DeviceCall) -> Inputs:
    """The inputs, inside shard_map marked as varying along the axes of any of them."""
    mesh = jax.typeof(inputs.q).sharding.mesh
    manual = set(getattr(mesh, "manual_axes", ()))
    if unknown := [axis for axis in call.over if axis not in manual]:
        raise ValueError(
            f"{call.name}: over has axes of the shard_map around it, "
            f"{', '.join(sorted(manual)) or 'none'}; got {', '.join(unknown)}. Leave over out "
            "under plain jit."
        )
    if explicit := [axis for axis in getattr(mesh, "explicit_axes", ()) if axis not in manual]:
        raise ValueError(
            f"{call.name}: arrays are on a mesh of Explicit axes, {', '.join(explicit)}. Use "
            "jax.shard_map with over=..., or a mesh of AxisType.Auto."
        )
    if not manual:
        return inputs
    axes = [sharding.varying(x) for x in (inputs.q, inputs.k, inputs.v)]
    if sharding.checks_variance(inputs.q):
        if axes[1] != axes[2] or (axes[0] != axes[1] and inputs.k.shape[1] != 1):
            raise ValueError(
                f"{call.name}: q, k and v are sharded along the same mesh axes (k and v of one "
                f"head aside); got {', '.join(str(sorted(v)) for v in axes)}. Fix in_specs."
            )
        varying_axes = axes[0] | axes[1]
    else:
        varying_axes = frozenset(manual)
    if whole_scales(call.variant) and (apart := sorted(varying_axes - set(call.over))):
        raise ValueError(
            f"{call.name}: a scale of a whole tensor has the amax of all devices; q, k and v vary "
            f"along {', '.join(apart)}. Use over={tuple(sorted(varying_axes))}."
        )
    if not sharding.checks_variance(inputs.q):
        return inputs
    return jax.tree.map(lambda x: as_varying(x, varying_axes), inputs)


def whole_scales(variant: Variant) -> bool:
    """True if a tensor of the variant has one scale of its own."""
    return not variant.real and (variant.granularity == "tensor" or variant.out.bits == 8)


def as_varying(x: Array, axes: frozenset[str]) -> Array:
    """x, marked as varying along these mesh axes."""
    missing = tuple(sorted(axes - sharding.varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def like(x: Array, other: Array) -> Array:
    """x, marked as varying along the mesh axes that another array varies along."""
    return as_varying(x, sharding.varying(other))
