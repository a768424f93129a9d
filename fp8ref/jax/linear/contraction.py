"""``dot_general`` and ``einsum`` of an input and a weight by a recipe, batch dims included: for
layers that are not linears."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from fp8ref.jax import delayed
from fp8ref.jax.distributed import explicit_sharding
from fp8ref.jax.distributed.explicit_sharding import Numbers
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.linear import arguments, linear, rounding
from fp8ref.jax.linear.carried import Seen
from fp8ref.recipe import Recipe

__all__ = ["Contraction", "dot_general", "einsum"]


@dataclass(frozen=True)
class Contraction:
    """What a contraction computes: ``dimension_numbers`` of lax.dot_general, or subscripts of
    jnp.einsum, and the dtype of its result; None: the operands'."""

    dims: Any
    preferred_element_type: Any = None


def dot_general(
    x: Array,
    w: Array,
    dimension_numbers: Numbers | Contraction,
    *,
    recipe: str | Recipe,
    state: delayed.State | None = None,
    seen: Seen | None = None,
    placement: Placement | None = None,
    name: str = "dot_general",
) -> tuple[Array, Seen | None]:
    """``lax.dot_general`` by a recipe: x is the input, w the weight, and the contracted dims are K.

    Shapes:   as lax.dot_general; output dims: batch, then x's other dims, then w's. Each element of
              a batch is a linear by itself, and no row or block spans two. A tensorwise scale is of
              the whole tensor, as S-6 says, with all elements of the batch; vmap over linears gives
              each its own (L-10).
    Order:    transposed to x [..., M, K] and w [N, K], or w [K, N] if it has that order; with batch
              dims to x [batch, M, K] and w [batch, N, K] or [batch, K, N]; then as apply.
    placement as in apply. M are x's other dims, N are w's. Of several, a mesh axis cuts the first.
    Returns:  (output, seen), as apply, with the same gradients.
    Raises:   ValueError: as apply; sizes of contracted or batch dims that differ; dtypes that
              differ without a preferred_element_type of a ``Contraction``, which is the output's;
              batch dims under ``hardware.simulating`` or inside shard_map.
    """
    contraction = dimension_numbers
    if not isinstance(contraction, Contraction):
        contraction = Contraction(dimension_numbers)
    layer = arguments.layer(recipe, name, placement)
    dims = _dims(x, w, contraction.dims, name)
    in_shard_map = layer.placed and bool(jax.typeof(x).sharding.mesh.manual_axes)
    if in_shard_map and dims.batch_x:
        raise ValueError(
            f"{name}: inside shard_map a contraction has no batch dims; got {x.shape} and "
            f"{w.shape} with {contraction.dims}. Use jax.vmap, or plain jit."
        )
    # A weight that is [batch, K, N] already, as Flax keeps kernels, is not transposed. Inside
    # shard_map it is: devices gather and scatter the first dim.
    turned = explicit_sharding.turned(dims.numbers, w.ndim) and not in_shard_map

    def body(x, w, constants, seen, layout):
        state, seed = constants
        own = dataclasses.replace(layer, layout=layout, turned=turned)
        a, b = dims.matrices(x, w, turned)
        out_dtype = contraction.preferred_element_type
        with rounding.seeded(seed):
            y, seen = linear.contract(a, b, own, state, seen, out_dtype=out_dtype)
        return dims.unflattened(y, x, w), seen

    constants = state, rounding.traced_seed()
    return explicit_sharding.run(body, x, w, constants, seen, dims.numbers, placement, name)


def einsum(
    subscripts: str | Contraction,
    x: Array,
    w: Array,
    *,
    recipe: str | Recipe,
    state: delayed.State | None = None,
    seen: Seen | None = None,
    placement: Placement | None = None,
    name: str = "einsum",
) -> tuple[Array, Seen | None]:
    """``jnp.einsum`` of input x and weight w by a recipe. A letter in both is contracted, or a
    batch dim if the output has it.

    Shapes:   by the subscripts, ``"btd,dhk->bthk"``. The dims of ``...`` are in the output too;
              where both operands have it, they are batch dims: ``"...qhd,...khd->...hqk"``.
    Raises:   ValueError: as dot_general; subscripts that are not one contraction: a letter twice in
              one term, summed in one term alone, or without an output.
    """
    contraction = subscripts if isinstance(subscripts, Contraction) else Contraction(subscripts)
    x_term, w_term, out = _terms(contraction.dims, x.ndim, w.ndim, name)
    batch = [letter for letter in x_term if letter in w_term and letter in out]
    contracted = [letter for letter in x_term if letter in w_term and letter not in out]
    numbers = tuple(
        tuple(tuple(term.index(letter) for letter in letters) for term in (x_term, w_term))
        for letters in (contracted, batch)
    )
    x_alone = [letter for letter in x_term if letter not in w_term]
    w_alone = [letter for letter in w_term if letter not in x_term]
    order = [*batch, *x_alone, *w_alone]
    if placement is not None and placement.out_sharding is not None:
        axes = [out.index(letter) for letter in order]
        out_sharding = explicit_sharding.permuted(placement.out_sharding, axes)
        placement = dataclasses.replace(placement, out_sharding=out_sharding)
    y, seen = dot_general(
        x,
        w,
        dataclasses.replace(contraction, dims=numbers),
        recipe=recipe,
        state=state,
        seen=seen,
        placement=placement,
        name=name,
    )
    return y.transpose([order.index(letter) for letter in out]), seen


@dataclass(frozen=True)
class _Dims:
    """The contracted, batch and other dims of both operands."""

    contract_x: tuple[int, ...]
    contract_w: tuple[int, ...]
    batch_x: tuple[int, ...]
    batch_w: tuple[int, ...]
    other_x: tuple[int, ...]
    other_w: tuple[int, ...]

    @property
    def numbers(self) -> Numbers:
        """The dimension numbers of lax.dot_general."""
        return (self.contract_x, self.contract_w), (self.batch_x, self.batch_w)

    def matrices(self, x: Array, w: Array, turned: bool) -> tuple[Array, Array]:
        """x [..., M, K], w [N, K], or batched [batch, M, K], [batch, N, K]; turned, w is [K, N].

        x keeps all its leading dims: what reads the same x saves the same x for its backward pass,
        and a mesh that cuts several dims of it gathers none.
        """
        x_sizes = [x.shape[d] for d in self.other_x]
        batch = [math.prod(x.shape[d] for d in self.batch_x)] if self.batch_x else []
        rows = [math.prod(x_sizes)] if self.batch_x or not x_sizes else x_sizes
        k = math.prod(x.shape[d] for d in self.contract_x)
        n = math.prod(w.shape[d] for d in self.other_w)
        a = x.transpose(*self.batch_x, *self.other_x, *self.contract_x).reshape(*batch, *rows, k)
        b = w if turned else w.transpose(*self.batch_w, *self.other_w, *self.contract_w)
        return a, b.reshape(*batch, *((k, n) if turned else (n, k)))

    def unflattened(self, y: Array, x: Array, w: Array) -> Array:
        """The product of ``matrices`` with dims: batch, then x's others, then w's."""
        m_sizes = [x.shape[d] for d in self.other_x]
        n_sizes = [w.shape[d] for d in self.other_w]
        # In shard_map a placement gathers the weight's first output dim, and moves rows.
        if m_sizes and not self.batch_x:
            m_sizes = list(y.shape[:-1])
        if n_sizes:
            n_sizes[0] = y.shape[-1] // math.prod(n_sizes[1:])
        return y.reshape(*(x.shape[d] for d in self.batch_x), *m_sizes, *n_sizes)


def _dims(x: Array, w: Array, dimension_numbers, name: str) -> _Dims:
    """The dims by lax.dot_general's numbers; ValueError if they do not fit."""
    (contract_x, contract_w), (batch_x, batch_w) = (
        (tuple(map(int, dims)) for dims in pair) for pair in dimension_numbers
    )
    for operand, dims in ((x, (*contract_x, *batch_x)), (w, (*contract_w, *batch_w))):
        if len(set(dims)) != len(dims) or any(not 0 <= d < operand.ndim for d in dims):
            raise ValueError(
                f"{name}: dimension_numbers have each dim once, from 0; got {dimension_numbers} "
                f"for {x.shape} and {w.shape}."
            )
    sizes_x = [[x.shape[d] for d in dims] for dims in (contract_x, batch_x)]
    if sizes_x != [[w.shape[d] for d in dims] for dims in (contract_w, batch_w)]:
        raise ValueError(
            f"{name}: contracted and batch dims have equal sizes; got {x.shape}, {w.shape}, "
            f"{dimension_numbers}."
        )
    other_x = tuple(d for d in range(x.ndim) if d not in (*contract_x, *batch_x))
    other_w = tuple(d for d in range(w.ndim) if d not in (*contract_w, *batch_w))
    return _Dims(contract_x, contract_w, batch_x, batch_w, other_x, other_w)


def _terms(subscripts: str, ndim_x: int, ndim_w: int, name: str) -> tuple[str, str, str]:
    """The letters of x, w and the output, with new ones for an ellipsis; ValueError unless they are
    one contraction."""
    requirement = (
        f"{name}: subscripts are one contraction of an input and a weight, such as "
        f"'btd,dhk->bthk'; got {subscripts!r}"
    )
    left, arrow, out = subscripts.replace(" ", "").partition("->")
    if not arrow or left.count(",") != 1:
        raise ValueError(f"{requirement}. Write both operands and the output.")
    x_term, w_term = left.split(",")
    counts = [
        max(0, ndim - len(term.replace("...", ""))) if "..." in term else 0
        for term, ndim in ((x_term, ndim_x), (w_term, ndim_w))
    ]
    spelled = "".join(chr(i) for i in range(0x391, 0x391 + max(counts)))  # letters no one writes
    x_term, w_term = (
        term.replace("...", spelled[len(spelled) - count :])
        for term, count in zip((x_term, w_term), counts, strict=True)
    )
    if spelled and "..." not in out:
        raise ValueError(
            f"{requirement}. The output has the dims of an ellipsis too: write '...' there."
        )
    out = out.replace("...", spelled)
    if len(x_term) != ndim_x or len(w_term) != ndim_w:
        raise ValueError(f"{requirement} for operands of {ndim_x} and {ndim_w} dims.")
    for term in (x_term, w_term, out):
        if len(set(term)) != len(term) or not set(term) <= set(x_term) | set(w_term):
            raise ValueError(
                f"{requirement}. Letters occur once in a term, output letters in an operand."
            )
    if alone := sorted((set(x_term) ^ set(w_term)) - set(out)):
        raise ValueError(
            f"{requirement}, where {alone[0]!r} is summed in one operand alone. Sum it first."
        )
    return x_term, w_term, out
