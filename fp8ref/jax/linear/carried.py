"""What a linear carries through a training step: each thing has one name, and one life.

Layer         what is static of one call. It is made where the linear is traced, and both passes
              read it.
state         of delayed scaling (``delayed``): the scales of this step. A pass reads it, and
              ``delayed.update`` makes the next one.
prepared      of a weight: codes or scales that were made before the pass, which reads them.
Observations  ``seen``: what the forward pass adds comes out beside the result, what the backward
              pass adds as the gradient by seen.
Operand       of one role: its tensor, its scale and its codes, from the forward to the backward
              pass of one call.

docs/concepts/jax-linear.md draws them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jax import Array

from fp8ref.jax import delayed
from fp8ref.jax.distributed import sharding
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.kernels import casts as kernel_casts
from fp8ref.jax.kernels.launch import TritonKernels
from fp8ref.jax.quantize.scales import Scales
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.recipe import OPERANDS, REDUCED_AXES, CastSpec, Gemm, Recipe, Role
from fp8ref.spec.hardware import Multiply
from fp8ref.spec.products import Products

Scale = Array | Scales | Quantized
"""What is settled of a role before its tensor is read: the number that a state holds; the scales of
an amax that was taken before (P-9); or the codes that an optimizer made (O-16)."""


class Observations(NamedTuple):
    """What the uses of one linear observe in a step: ``seen`` of ``linear.apply``. None: not asked.

    Each use takes those of the use before it, and gives them back with its own.

    amaxes      of delayed scaling, from ``delayed.unseen`` on: the largest amaxes, and flags (H-4).
                Those of input and weight are in the result, that of grad_output in the gradient.
    statistics  float32 zeros [6, stats.LENGTH]; inside shard_map they vary along all axes of its
                mesh (Q-8). Measurements of this device's part of the output GEMM's operands are
                added in the result; those of the backward GEMMs in the gradient, in other rows. An
                operand that a GEMM takes over from an earlier one is measured once, there.
    mu          float32 (), the same on all devices: the factor of the scale by which the gradient
                of w is exchanged in FP8, where the placement asks for that (P-22). No use changes
                it. The gradient by it is the number of elements that the cast of w's gradient
                saturated, on all devices: what ``gradient_reduction.next_mu`` takes.
    seed        uint32 [2], low and high half: of a linear that rounds stochastically, its own
                (S-24). None: one made of the seed of ``rounding.seeded``. No use changes it.
    """

    amaxes: delayed.Seen | None = None
    statistics: Array | None = None
    mu: Array | None = None
    seed: Array | None = None


Seen = delayed.Seen | Observations
"""``seen`` of a linear: ``Observations``, or their amaxes alone."""


def observations(seen: Seen | None) -> Observations:
    """seen, with its parts by name."""
    return seen if isinstance(seen, Observations) else Observations(seen)


def after(seen: Seen | None, amaxes: delayed.Seen, statistics) -> Seen | None:
    """seen with these parts in place of those that it has."""
    if not isinstance(seen, Observations):
        return None if seen is None else amaxes
    return seen._replace(
        amaxes=None if seen.amaxes is None else amaxes,
        statistics=None if seen.statistics is None else statistics,
    )


class Operand(NamedTuple):
    """A role of one call. None: not there.

    tensor  in high precision.
    scale   what is settled before the tensor is read.
    own     the codes of this device's piece, where they are made already.
    whole   these codes gathered from all devices, for the next GEMM alone.
    seed    uint32 [2]: the linear's, if it rounds stochastically.
    """

    tensor: Array | None = None
    scale: Scale | None = None
    own: Quantized | None = None
    whole: Quantized | None = None
    seed: Array | None = None


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One call of a linear: all that is static about it. Hashable, so that custom_vjp passes it by.

    placed    whether a placement was given.
    layout    how XLA finds the tensors, under plain jit.
    batched   leading dims are batch dims, not flattened to M.
    turned    the weight is [K, N].
    outer     the number of sequences in M.
    dtypes    those of the results, in the order of recipe.gemms.
    observer  of ``observing``, or None.
    measures  statistics are collected.
    multiply  simulated hardware that runs its FP8 GEMMs.
    products  what multiplies operands in blocks.
    kernels   Triton's kernels that make its casts; None: XLA does.
    """

    recipe: Recipe
    name: str
    placement: Placement
    placed: bool = True
    mode: sharding.Mode = "one"
    layout: sharding.Layout | None = None
    batched: bool = False
    turned: bool = False
    outer: int = 1
    dtypes: tuple = ()
    observer: Callable | None = None
    measures: bool = False
    multiply: Multiply | None = None
    products: Products = "auto"
    kernels: TritonKernels | None = None

    def by_kernel(self, role: Role, cast: CastSpec) -> bool:
        """Whether a kernel casts a tensor, and writes its codes in both orders.

        XLA does where it partitions, under plain jit with a placement; codes that are gathered from
        other devices, as transposed ones would lie wrong; and what has batch dims.
        """
        return (
            self.kernels is not None
            and kernel_casts.takes(cast)
            and not self.batched
            and self.mode != "jit"
            and not self.placement.gathered(role)
        )

    def over(self, role: Role, granularity: str, axis: int) -> sharding.Axes:
        """The mesh axes over which we reduce an amax; none under jit, where XLA does."""
        if self.mode == "shard_map":
            return self.placement.amax_axes(role, granularity, axis)
        return ()

    def collective(self, which: Gemm) -> sharding.Reduction | None:
        """The sum over devices that completes a GEMM; None if there is none, or XLA's."""
        reduction = self.placement.reduction(which, 1 if which == "grad_weight" else self.outer)
        return reduction if self.mode == "shard_map" and reduction.axes else None

    def summed_by_compiler(self, which: Gemm) -> bool:
        """True if XLA sums a GEMM's float32 accumulators over devices, under plain jit."""
        return (
            self.layout is not None
            and self.layout.summed(which)
            and self.placement.reduction(which, 1).parts != "result"
        )

    def scales_own_results(self) -> bool:
        """True if each device scales its own results of the backward GEMMs, not sums over devices
        (``parallel.reduce``): then their scales may be a device's own, too."""
        reductions = [self.collective(which) for which in ("grad_input", "grad_weight")]
        return all(each is None or each.parts != "accumulators" for each in reductions)

    def axis(self, which: Gemm, role: Role) -> int:
        """The axis, -1 or -2, of a tensor along which a GEMM reduces it."""
        axis = REDUCED_AXES[which][OPERANDS[which].index(role)] - 2
        return -3 - axis if self.turned and role == "weight" else axis

    def ragged(self, role: Role, axis: int) -> bool:
        """True if a device's last block of rows may be shorter (L-5). Rows that are gathered hold
        whole blocks: else those of one device would lie elsewhere."""
        return (
            role != "weight"
            and axis == -2
            and not (self.mode == "shard_map" and self.placement.gathered(role))
        )

    def serves_backward(self, role: Role) -> bool:
        """Whether the output GEMM's operand of this role also serves the backward GEMM."""
        return self.recipe.serves_both(role)

    def gathers_again(self, role: Role) -> bool:
        """True if the backward pass gathers again what the forward pass gathered."""
        return (
            self.mode == "shard_map"
            and bool(self.placement.gathered(role))
            and self.serves_backward(role)
        )

    def gathers_pair(self) -> bool:
        """True if one gather of grad_output serves both backward GEMMs, each with its own scales
        (``paired_codes``).
        """
        return (
            self.mode == "shard_map"
            and bool(self.placement.gathered("grad_output"))
            and self.recipe.pairs_gradients
        )
