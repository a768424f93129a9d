"""``dot_general`` and ``einsum`` of an input and a weight by a recipe, batch dims included: for
layers that are not linears."""

import math

import jax

from fp8ref.hardware import Multiply
from fp8ref.jax import delayed, linear
from fp8ref.recipe import Recipe


def dot_general(
    x: jax.Array,
    w: jax.Array,
    dimension_numbers,
    *,
    recipe: str | Recipe,
    state: delayed.State | None = None,
    seen: delayed.Seen | None = None,
    name: str = "dot_general",
    preferred_element_type=None,
    multiply: Multiply | None = None,
) -> tuple[jax.Array, delayed.Seen | None]:
    """``lax.dot_general`` by a recipe: x is the input, w the weight, and the contracted dims are K.

    Shapes:   as lax.dot_general; output dims: batch, then x's other dims, then w's. Each element of
              a batch is a linear by itself, but has the tensor's scale under tensorwise and
              delayed.
    Order:    transposed to x [batch, M, K] and w [batch, N, K], or w [batch, K, N] if it has that
              order; then as apply.
    multiply  as in apply, for contractions without batch dims.
    Returns:  (output, seen), as apply, with the same gradients.
    Raises:   ValueError: as apply; sizes of contracted or batch dims that differ; dtypes that
              differ without a preferred_element_type, which is the output's; batch dims under
              multiply.
    """
    (contract_x, contract_w), (batch_x, batch_w) = ((tuple(map(int, dims)) for dims in pair) for pair in dimension_numbers)
    kept_x, kept_w = ([d for d in range(v.ndim) if d not in (*c, *b)] for v, c, b in ((x, contract_x, batch_x), (w, contract_w, batch_w)))
    # The output's dims: batch, then x's other dims, then w's.
    sizes = [[x.shape[d] for d in batch_x], [x.shape[d] for d in kept_x], [w.shape[d] for d in kept_w]]
    batch = [math.prod(sizes[0])] if batch_x else []
    a = x.transpose(*batch_x, *kept_x, *contract_x).reshape(*batch, math.prod(sizes[1]), -1)  # [batch, M, K]
    # A weight that is [batch, K, N] already, as Flax keeps kernels, is not transposed.
    turned = [*batch_w, *contract_w, *kept_w] == list(range(w.ndim))
    b = w if turned else w.transpose(*batch_w, *kept_w, *contract_w)
    b = b.reshape(*batch, -1, math.prod(sizes[2])) if turned else b.reshape(*batch, math.prod(sizes[2]), -1)
    if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2 if turned else -1]:
        raise ValueError(f"{name}: contracted and batch dims have equal sizes; got {x.shape} and {w.shape} with {dimension_numbers}.")
    y, seen, _ = linear.contract(a, b, recipe, state, seen, None, name, out_dtype=preferred_element_type, turned=turned, multiply=multiply)
    return y.reshape([size for part in sizes for size in part]), seen


def einsum(
    subscripts: str,
    x: jax.Array,
    w: jax.Array,
    *,
    recipe: str | Recipe,
    state: delayed.State | None = None,
    seen: delayed.Seen | None = None,
    name: str = "einsum",
    preferred_element_type=None,
    multiply: Multiply | None = None,
) -> tuple[jax.Array, delayed.Seen | None]:
    """``jnp.einsum`` of input x and weight w by a recipe. A letter in both is contracted, or a
    batch dim if the output has it.

    Shapes:   by the subscripts, ``"btd,dhk->bthk"``, ``...`` allowed in x and in the output.
    Raises:   ValueError: as dot_general; subscripts that are not one contraction: a letter twice in
              one term, summed in one term alone, or without an output.
    """
    terms = _terms(subscripts, x.ndim, w.ndim, name)
    of_x, of_w, out = terms
    batch = [letter for letter in of_x if letter in of_w and letter in out]
    contracted = [letter for letter in of_x if letter in of_w and letter not in out]
    numbers = tuple(tuple(tuple(term.index(letter) for letter in letters) for term in (of_x, of_w)) for letters in (contracted, batch))
    y, seen = dot_general(
        x, w, numbers, recipe=recipe, state=state, seen=seen, name=name, preferred_element_type=preferred_element_type, multiply=multiply
    )
    given = [*batch, *(letter for letter in of_x if letter not in of_w), *(letter for letter in of_w if letter not in of_x)]
    return y.transpose([given.index(letter) for letter in out]), seen


def _terms(subscripts: str, ndim_x: int, ndim_w: int, name: str) -> tuple[str, str, str]:
    """The letters of x, w and the output; an ellipsis becomes letters of its own. ValueError unless
    they are one contraction."""
    requirement = f"{name}: subscripts are one contraction of an input and a weight, such as 'btd,dhk->bthk'; got {subscripts!r}"
    left, arrow, out = subscripts.replace(" ", "").partition("->")
    if not arrow or left.count(",") != 1:
        raise ValueError(f"{requirement}. Write both operands and the output.")
    of_x, of_w = left.split(",")
    spelled = "".join(chr(i) for i in range(0x391, 0x391 + max(0, ndim_x - len(of_x.replace("...", "")))))  # letters no one writes
    of_x, out = of_x.replace("...", spelled), out.replace("...", spelled)
    if len(of_x) != ndim_x or len(of_w) != ndim_w:
        raise ValueError(f"{requirement} for operands of {ndim_x} and {ndim_w} dims. An ellipsis is allowed in x and in the output only.")
    for term in (of_x, of_w, out):
        if len(set(term)) != len(term) or not set(term) <= set(of_x) | set(of_w):
            raise ValueError(f"{requirement}. Each letter occurs once in a term, and each letter of the output occurs in an operand.")
    if alone := [letter for letter in (*of_x, *of_w) if letter not in out and not (letter in of_x and letter in of_w)]:
        raise ValueError(f"{requirement}, where {alone[0]!r} is summed in one operand alone. Sum it first.")
    return of_x, of_w, out
