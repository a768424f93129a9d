"""``dot_general`` and ``einsum`` of an input and a weight by a recipe, batch dims included: for
layers that are not linears."""

import functools
import math

import jax

from fp8ref.jax import delayed
from fp8ref.jax.distributed import explicit_sharding
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.linear import linear
from fp8ref.recipe import Recipe
from fp8ref.spec.hardware import Multiply


def dot_general(
    x: jax.Array,
    w: jax.Array,
    dimension_numbers,
    *,
    recipe: str | Recipe,
    state: delayed.State | None = None,
    seen: delayed.Seen | None = None,
    placement: Placement | None = None,
    out_sharding: explicit_sharding.Sharding | None = None,
    name: str = "dot_general",
    preferred_element_type=None,
    multiply: Multiply | None = None,
) -> tuple[jax.Array, delayed.Seen | None]:
    """``lax.dot_general`` by a recipe: x is the input, w the weight, and the contracted dims are K.

    Shapes:   as lax.dot_general; output dims: batch, then x's other dims, then w's. Each element of
              a batch is a linear by itself, and no row or block spans two. A tensorwise scale is of
              the whole tensor, as S-6 says, with all elements of the batch; vmap over linears gives
              each its own (L-10).
    Order:    transposed to x [..., M, K] and w [N, K], or w [K, N] if it has that order; with batch
              dims to x [batch, M, K] and w [batch, N, K] or [batch, K, N]; then as apply.
    placement, out_sharding
              as in apply. M are x's other dims, N are w's. Of several, a mesh axis cuts the first.
    multiply  as in apply, for contractions without batch dims.
    Returns:  (output, seen), as apply, with the same gradients.
    Raises:   ValueError: as apply; sizes of contracted or batch dims that differ; dtypes that
              differ without a preferred_element_type, which is the output's; batch dims under
              multiply or inside shard_map.
    """
    (contract_x, contract_w), (batch_x, batch_w) = (
        (tuple(map(int, dims)) for dims in pair) for pair in dimension_numbers
    )
    for of, dims in ((x, (*contract_x, *batch_x)), (w, (*contract_w, *batch_w))):
        if len(set(dims)) != len(dims) or any(not 0 <= d < of.ndim for d in dims):
            raise ValueError(
                f"{name}: dimension_numbers name each dim once, counted from 0; got "
                f"{dimension_numbers} for {x.shape} and {w.shape}."
            )
    kept_x, kept_w = (
        [d for d in range(v.ndim) if d not in (*c, *b)]
        for v, c, b in ((x, contract_x, batch_x), (w, contract_w, batch_w))
    )
    # The output's dims: batch, then x's other dims, then w's.
    sizes = [
        [x.shape[d] for d in batch_x],
        [x.shape[d] for d in kept_x],
        [w.shape[d] for d in kept_w],
    ]
    pairs = ((contract_x, contract_w), (batch_x, batch_w))
    if any(
        [x.shape[d] for d in x_dims] != [w.shape[d] for d in w_dims] for x_dims, w_dims in pairs
    ):
        raise ValueError(
            f"{name}: contracted and batch dims have equal sizes; got {x.shape} and {w.shape} "
            f"with {dimension_numbers}."
        )
    in_shard_map = placement is not None and bool(jax.typeof(x).sharding.mesh.manual_axes)
    if in_shard_map and batch_x:
        raise ValueError(
            f"{name}: inside shard_map a contraction has no batch dims, as a placement cuts "
            f"only M, N and K; got {x.shape} and {w.shape} with {dimension_numbers}. Use "
            "jax.vmap over them, or plain jit."
        )
    # A weight that is [batch, K, N] already, as Flax keeps kernels, is not transposed. Inside
    # shard_map it is: devices gather and scatter the first dim.
    turned = [*batch_w, *contract_w, *kept_w] == list(range(w.ndim)) and not in_shard_map

    def body(x, w, state, seen, layout):
        batch = [math.prod(sizes[0])] if batch_x else []
        rows = [math.prod(sizes[1])] if batch_x or not kept_x else sizes[1]
        k, n = math.prod(x.shape[d] for d in contract_x), math.prod(sizes[2])
        # [batch, M, K], or [..., M, K] with all its leading dims: what reads the same x saves the
        # same x for its backward pass, and a mesh that cuts several dims of it gathers none.
        a = x.transpose(*batch_x, *kept_x, *contract_x).reshape(*batch, *rows, k)
        b = w if turned else w.transpose(*batch_w, *kept_w, *contract_w)
        b = b.reshape(*batch, *((k, n) if turned else (n, k)))
        options = {
            "out_dtype": preferred_element_type,
            "turned": turned,
            "multiply": multiply,
            "layout": layout,
        }
        y, seen, _ = linear.contract(a, b, recipe, state, seen, placement, name, **options)
        # Inside shard_map a placement gathers the weight's first output dim, and gathers or
        # scatters rows.
        m_sizes = sizes[1] if batch_x or not kept_x else y.shape[:-1]
        n_sizes = [y.shape[-1] // math.prod(sizes[2][1:]), *sizes[2][1:]] if kept_w else []
        return y.reshape(*sizes[0], *m_sizes, *n_sizes), seen

    run = functools.partial(
        explicit_sharding.run,
        placement=placement,
        out_sharding=out_sharding,
        turned=turned,
        name=name,
    )
    return run(body, x, w, state, seen, pairs)


def einsum(
    subscripts: str,
    x: jax.Array,
    w: jax.Array,
    *,
    recipe: str | Recipe,
    state: delayed.State | None = None,
    seen: delayed.Seen | None = None,
    placement: Placement | None = None,
    out_sharding: explicit_sharding.Sharding | None = None,
    name: str = "einsum",
    preferred_element_type=None,
    multiply: Multiply | None = None,
) -> tuple[jax.Array, delayed.Seen | None]:
    """``jnp.einsum`` of input x and weight w by a recipe. A letter in both is contracted, or a
    batch dim if the output has it.

    Shapes:   by the subscripts, ``"btd,dhk->bthk"``. The dims of ``...`` are in the output too;
              where both operands have it, they are batch dims: ``"...qhd,...khd->...hqk"``.
    Raises:   ValueError: as dot_general; subscripts that are not one contraction: a letter twice in
              one term, summed in one term alone, or without an output.
    """
    terms = _terms(subscripts, x.ndim, w.ndim, name)
    x_term, w_term, out = terms
    batch = [letter for letter in x_term if letter in w_term and letter in out]
    contracted = [letter for letter in x_term if letter in w_term and letter not in out]
    numbers = tuple(
        tuple(tuple(term.index(letter) for letter in letters) for term in (x_term, w_term))
        for letters in (contracted, batch)
    )
    order = [
        *batch,
        *(letter for letter in x_term if letter not in w_term),
        *(letter for letter in w_term if letter not in x_term),
    ]
    y, seen = dot_general(
        x,
        w,
        numbers,
        recipe=recipe,
        state=state,
        seen=seen,
        placement=placement,
        out_sharding=explicit_sharding.permuted(
            out_sharding, [out.index(letter) for letter in order]
        ),
        name=name,
        preferred_element_type=preferred_element_type,
        multiply=multiply,
    )
    return y.transpose([order.index(letter) for letter in out]), seen


def _terms(subscripts: str, ndim_x: int, ndim_w: int, name: str) -> tuple[str, str, str]:
    """The letters of x, w and the output; an ellipsis becomes letters of its own, the same ones for
    the last dims of both. ValueError unless they are one contraction."""
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
            f"{requirement}. The dims of an ellipsis are in the output too: write '...' there."
        )
    out = out.replace("...", spelled)
    if len(x_term) != ndim_x or len(w_term) != ndim_w:
        raise ValueError(f"{requirement} for operands of {ndim_x} and {ndim_w} dims.")
    for term in (x_term, w_term, out):
        if len(set(term)) != len(term) or not set(term) <= set(x_term) | set(w_term):
            raise ValueError(
                f"{requirement}. Each letter occurs once in a term, and each letter of the "
                "output occurs in an operand."
            )
    if alone := [
        letter
        for letter in (*x_term, *w_term)
        if letter not in out and not (letter in x_term and letter in w_term)
    ]:
        raise ValueError(
            f"{requirement}, where {alone[0]!r} is summed in one operand alone. Sum it first."
        )
    return x_term, w_term, out
