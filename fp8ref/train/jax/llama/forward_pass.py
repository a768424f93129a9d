"""What a forward pass of the trainer's Llama carries to its linears, and collects from them.

``llama.Llama`` passes it down; linears, experts' projections and attention compute through it.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fp8ref.jax import delayed
from fp8ref.jax.attention import attention
from fp8ref.jax.attention import kernel as attention_kernel
from fp8ref.jax.attention.attention import DeviceCall
from fp8ref.jax.attention.operands import casts as attention_casts
from fp8ref.jax.experts import grouped
from fp8ref.jax.experts.operands import Codes, Slot
from fp8ref.jax.gemm import blackwell, hardware
from fp8ref.jax.kernels import TritonKernels, casting
from fp8ref.jax.linear import fused, linear
from fp8ref.jax.linear.carried import Observations, Seen, observations
from fp8ref.jax.quantize.scales import Scales
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.recipe import Recipe
from fp8ref.selection.attention_casts import Casts
from fp8ref.spec.attention.variants import Arithmetic, Mask, Variant
from fp8ref.spec.hardware import Multiply
from fp8ref.spec.products import Products
from fp8ref.train.jax.llama.experts import Balance
from fp8ref.train.jax.mesh import Layout

_T = TypeVar("_T")

KEPT = ("linear", "attention")
"""What selective checkpointing keeps, by ``checkpoint_name``: outputs of linears and attention."""

QUERIES = 512
"""The queries that chunked attention takes at a time."""


class Carried(NamedTuple):
    """What a pass or one of its layers begins with, by name: the fields of ``Pass``."""

    state: Mapping[str, delayed.State]
    seen: Mapping[str, delayed.Seen]
    taps: Mapping[str, jax.Array]
    prepared: Mapping[str, Quantized | Scales]
    mu: Mapping[str, jax.Array]
    seeds: Mapping[str, jax.Array]


@dataclass
class Pass:
    """What a forward pass carries to its linears, and collects from them.

    state      delayed-scaling states by linear, which the pass reads.
    seen       amax observations by linear; each linear replaces its own.
    layout     places a linear on the mesh; None places none, as a layout of one device does.
    taps       statistics accumulators by linear and attention, each replaced by its own.
    attention  "xla" or "cudnn": the implementation of jax.nn.dot_product_attention; "chunked":
               XLA's, of QUERIES queries at a time.
    variant    of ``fp8ref.spec.attention.variants``, computed by "tiles", or cuDNN's "kernel" (spec
               A-20); None: none.
    arithmetic of the variant.
    checkpointing
               what the backward pass finds of a layer: everything ("none"), what is ``KEPT``
               ("selective"), or its input ("full").
    multiply   simulated hardware for FP8 GEMMs; None: XLA's own.
    products   what multiplies operands in blocks (G-26).
    kernels    Triton's kernels, which cast for linears; None: XLA does.
    prepared   of weights by linear: FP8 copies, which are multiplied in place of a cast (O-16), or
               scales, in place of an amax (P-9).
    mu         factors by which gradients of weights are exchanged in FP8, by linear (P-22).
    seeds      of linears that round stochastically (S-24).
    balance    of experts, by layer (M-8); each replaces its own.
    casts      of single operands of attention, by layer, in place of the variant's (E-9).
    """

    state: Mapping[str, delayed.State] = field(default_factory=dict)
    seen: dict[str, delayed.Seen] = field(default_factory=dict)
    layout: Layout | None = None
    taps: dict[str, jax.Array] = field(default_factory=dict)
    attention: Literal["xla", "chunked", "cudnn", "tiles", "kernel"] = "xla"
    variant: Variant | None = None
    arithmetic: Arithmetic = "fast"
    checkpointing: Literal["none", "selective", "full"] = "none"
    multiply: Multiply | None = None
    products: Products = "auto"
    kernels: TritonKernels | None = None
    prepared: Mapping[str, Quantized | Scales] = field(default_factory=dict)
    mu: Mapping[str, jax.Array] = field(default_factory=dict)
    seeds: Mapping[str, jax.Array] = field(default_factory=dict)
    balance: dict[str, Balance] = field(default_factory=dict)
    casts: Mapping[str, Casts] = field(default_factory=dict)

    def attended(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        name: str,
        softcap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Causal attention of the layer ``name``: q [B, T, H, D]; k and v may have fewer heads;
        softcap and sinks [H] of a variant by tiles."""
        if self.variant is None and self.attention == "chunked":
            y = _attended_in_chunks(q, k, v)
        elif self.variant is None:
            assert self.attention in ("xla", "cudnn")
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.attention)
        else:
            heads = q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)
            if name in self.casts:
                y = attention_casts.apply(*heads, self.casts[name])
            elif self.attention == "kernel":
                y = self._by_kernel(heads, name)
            else:
                y = self._by_tiles(heads, name, softcap, sinks)
            y = y.swapaxes(1, 2)
        return checkpoint_name(y, "attention")

    def _by_kernel(self, heads: tuple[jax.Array, jax.Array, jax.Array], name: str) -> jax.Array:
        """Attention of q, k and v [B, H, T, D] by the variant, by cuDNN's kernel."""
        assert self.variant is not None
        scales = {role: entry.stored for role, entry in self.state[name].items()}
        call = DeviceCall(variant=self.variant, mask=Mask(causal=True), layer=name)
        y, seen = attention_kernel.apply(
            *heads, scales=scales, variant=call, seen=self.seen[name], platform="cuda"
        )
        self._observe(name, Observations(seen))
        return y

    def _by_tiles(
        self,
        heads: tuple[jax.Array, jax.Array, jax.Array],
        name: str,
        softcap: float | None,
        sinks: jax.Array | None,
    ) -> jax.Array:
        """Attention of q, k and v [B, H, T, D] by the variant, a tile of keys after another."""
        assert self.variant is not None
        layout, state = self.layout, self.state.get(name)
        call = DeviceCall(
            variant=self.variant,
            mask=Mask(causal=True),
            softcap=softcap,
            arithmetic=self.arithmetic,
            over=layout.cutting_heads if layout else (),
            tokens=layout.context if layout else "",
            layer=name,
        )
        carried = attention.Carried(tap=self.taps.get(name))
        if state is not None:
            scales = {role: entry.stored for role, entry in state.items()}
            carried = carried._replace(scales=scales, seen=self.seen[name])
        with hardware.simulating(self.multiply if self.variant.fmt.bits == 8 else None):
            y, carried = attention.apply_with_stats(
                *heads, variant=call, sinks=sinks, carried=carried
            )
        self._observe(name, Observations(carried.seen, carried.tap))
        return y

    def linear(self, x: jax.Array, w: jax.Array, recipe: str | Recipe, name: str) -> jax.Array:
        """x [..., K] x w [N, K] -> [..., N], by the state and placement of linear ``name``."""
        placement = self.layout.placement(name) if self.layout else None
        observed = self._observations(name)
        with self._computing():
            y, after = linear.apply(
                x,
                w,
                recipe=recipe,
                state=self.state.get(name),
                seen=observed,
                placement=placement,
                name=name,
                prepared=self.prepared.get(name),
            )
        self._observe(name, after)
        return checkpoint_name(y, "linear")

    def reader(self, w: jax.Array, recipe: str | Recipe, name: str) -> fused.Reader:
        """The linear ``name``, with its state, observations and placement."""
        return fused.Reader(
            w,
            recipe,
            name,
            self.state.get(name),
            self._observations(name),
            self.layout.placement(name) if self.layout else None,
            self.prepared.get(name),
        )

    def fuses(self, h: jax.Array, readers: list[fused.Reader]) -> bool:
        """Whether kernels cast what is before and between these linears (M-11)."""
        with self._computing():
            return fused.takes(h, readers)

    def fused(
        self,
        h: jax.Array,
        residual: jax.Array | None,
        norm: fused.Norm,
        readers: list[fused.Reader],
        *,
        swiglu: bool = False,
        rotary: fused.Rotary | None = None,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """(h + residual or h, the outputs of linears that read its norm), as ``fused.apply``."""
        with self._computing():
            total, outputs, after = fused.apply(
                h, readers, norm=norm, residual=residual, swiglu=swiglu, rotary=rotary
            )
        for reader, seen in zip(readers, after, strict=True):
            self._observe(reader.name, seen)
        return total, [checkpoint_name(y, "linear") for y in outputs]

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Within it linears are cast and multiplied by what the pass says."""
        by = blackwell.multiplying(self.products, self.layout and self.layout.own_device)
        with hardware.simulating(self.multiply), by, casting(self.kernels):
            yield

    def _observations(self, name: str) -> Observations:
        """What a use of the linear ``name`` takes."""
        amaxes, statistics, mu = self.seen.get(name), self.taps.get(name), self.mu.get(name)
        return Observations(amaxes, statistics, mu, self.seeds.get(name))

    def _observe(self, name: str, seen: Seen | None) -> None:
        """Replace what a linear or attention carries by what it gave back."""
        observed = observations(seen)
        if observed.amaxes is not None:
            self.seen[name] = observed.amaxes
        if observed.statistics is not None:
            self.taps[name] = observed.statistics

    def grouped_codes(
        self,
        rows: jax.Array,
        w: jax.Array,
        sizes: jax.Array,
        recipe: str | Recipe,
        name: str,
        codes: Codes | None = None,
        grad_codes: bool = False,
    ) -> tuple[jax.Array, Slot | None]:
        """rows [M, K] in groups x w [E, N, K], this device's piece, -> [M, N], with the state and
        observations of the grouped linear ``name``; of rows that came in FP8, or whose gradient
        will, and the slot of that (X-14).
        """
        layout = self.layout
        over = layout.sharing_groups if layout else ()

        def product(rows, w, state, seen, codes):
            w = (layout.expert_weights(w) if layout else w).swapaxes(-1, -2)
            coded = grouped.CodedRows(rows, codes, grad_codes)
            return grouped.apply_codes(
                coded, w, sizes, recipe=recipe, state=state, seen=seen, over=over, name=name
            )

        # gathered again in the backward pass, as fsdp does; nothing there wants the result
        if layout and layout.gathers_experts:
            product = jax.checkpoint(product)
        observed = Observations(self.seen.get(name), self.taps.get(name))
        y, after, slot = product(rows, w, self.state.get(name), observed, codes)
        self._observe(name, after)
        return checkpoint_name(y, "linear"), slot

    def begun(self, carried: Carried) -> "Pass":
        """One of the same model that begins with these."""
        own = carried._replace(seen=dict(carried.seen), taps=dict(carried.taps))
        return dataclasses.replace(self, **own._asdict(), balance={})

    def of(self, layer: str) -> Carried:
        """What the linears and the attention of a layer have."""

        def own(by_name: Mapping[str, _T]) -> dict[str, _T]:
            return {name: v for name, v in by_name.items() if name.startswith(f"{layer}.")}

        return Carried(*(own(getattr(self, key)) for key in Carried._fields))

    @property
    def collected(self) -> tuple[dict, dict, dict]:
        """(observations, taps, balance of experts), for ``collect`` of the pass around it."""
        return self.seen, self.taps, self.balance

    def collect(self, collected: tuple[dict, dict, dict]) -> None:
        """Take what a layer collected."""
        for mine, theirs in zip(self.collected, collected, strict=True):
            mine |= theirs


def _attended_in_chunks(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention whose scores exist for QUERIES queries at a time, in both passes.

    Each query's probabilities and output are those of XLA's attention.
    """
    batch, length, heads, dim = q.shape
    size = min(QUERIES, length)
    padded = -length % size
    whole = jnp.pad(q, ((0, 0), (0, padded), (0, 0), (0, 0)))
    chunks = whole.reshape(batch, -1, size, heads, dim).swapaxes(0, 1)
    # In float32 the loop adds up the gradients of k and v unrounded.
    wide = k.astype(jnp.float32), v.astype(jnp.float32)

    @jax.checkpoint
    def attended(first: jax.Array, queries: jax.Array) -> jax.Array:
        # Past the barrier the mask depends on what is differentiated: it is computed again too.
        first, queries = lax.optimization_barrier((first, queries))
        mask = first + jnp.arange(size)[:, None] >= jnp.arange(length)
        keys, values = (x.astype(q.dtype) for x in wide)
        return jax.nn.dot_product_attention(
            queries, keys, values, mask=mask[None, None], implementation="xla"
        )

    y = lax.map(lambda chunk: attended(*chunk), (jnp.arange(0, length + padded, size), chunks))
    return y.swapaxes(0, 1).reshape(batch, -1, heads, dim)[:, :length]
