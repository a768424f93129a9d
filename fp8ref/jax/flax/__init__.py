"""FP8 in Flax layers, linen and NNX, by any recipe.

    # linen: nn.Dense and nn.DenseGeneral; nn.Einsum has no hook, so there is one of ours
    nn.Dense(64, dot_general_cls=fj.flax.linen_dot_general("rowwise"))
    fj.flax.Einsum((32, 4, 16), "btd,dhk->bthk", recipe="rowwise")

    # NNX: a fresh hook for each layer
    nnx.Linear(32, 64, dot_general=fj.flax.nnx_dot_general("rowwise"), rngs=rngs)
    op = fj.flax.nnx_einsum("rowwise")
    nnx.Einsum("btd,dhk->bthk", (32, 4, 16), einsum_op=op, rngs=rngs)

``convert`` puts them into a model; filter_fqns takes patterns as everywhere in fp8ref (R-3):

    model = fj.flax.convert(model, "rowwise", filter_fqns=["lm_head"])  # linen: inputs=(x,) too
    print(fj.flax.report(model, (x,)))  # what is in FP8, what is not, and why
    model = fj.flax.deconvert(model)

A ``GroupedLinear`` is a projection of experts, which ``convert`` takes as a linear.

Under delayed scaling a step observes amaxes, backward too. ``value_and_grad`` collects them:

    # NNX: loss_fn(model, batch) -> loss
    loss, grads, seen = fj.flax.value_and_grad(loss_fn)(model, batch)
    fj.flax.update(model, seen)  # once an optimizer step

    # linen: loss_fn returns the observations too, and grads is of variables["params"]
    def loss_fn(variables, batch):
        y, updated = model.apply(variables, batch, mutable=[fj.flax.SEEN])
        return (y ** 2).mean(), updated

    loss, grads, seen = fj.flax.value_and_grad(loss_fn)(variables, batch)
    variables = fj.flax.update(variables, seen)

``merge`` joins the observations of several microbatches. The state is not among the parameters: no
optimizer sees it, and a step only reads it. Flax casts the weight to the compute dtype before the
hook sees it, and adds the bias after the output is rounded.
"""

from fp8ref.jax.flax.amax_observations import SEEN, STATE, Observed, merge
from fp8ref.jax.flax.calibration import calibrate
from fp8ref.jax.flax.convert import Inputs, convert, deconvert, report
from fp8ref.jax.flax.fp8_ops_state import flax_recipe, from_flax, to_flax
from fp8ref.jax.flax.grouped_linear import GroupedLinear
from fp8ref.jax.flax.linen import Einsum, linen_dot_general, linen_einsum
from fp8ref.jax.flax.nnx import Fp8State, Seen, nnx_dot_general, nnx_einsum
from fp8ref.jax.flax.shared_inputs import share_inputs
from fp8ref.jax.flax.training import unseen, unset_layers, update, value_and_grad

__all__ = [
    "SEEN",
    "STATE",
    "Einsum",
    "Fp8State",
    "GroupedLinear",
    "Inputs",
    "Observed",
    "Seen",
    "calibrate",
    "convert",
    "deconvert",
    "flax_recipe",
    "from_flax",
    "linen_dot_general",
    "linen_einsum",
    "merge",
    "nnx_dot_general",
    "nnx_einsum",
    "report",
    "share_inputs",
    "to_flax",
    "unseen",
    "unset_layers",
    "update",
    "value_and_grad",
]
