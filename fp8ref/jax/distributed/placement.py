"""The placement of one linear on a mesh (spec P): amax scopes, FP8 gathers and reductions.

A ``Placement`` says which mesh axes cut the linear's three dims. All else follows from it: over
which axes an amax is reduced (P-2), what is gathered in FP8, and what is summed, as results or as
accumulators (``Reduction``, P-7, P-8). ``sharding`` runs it.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from fp8ref.formats import E4M3FN
from fp8ref.jax.distributed import gradient_reduction
from fp8ref.recipe import Gemm, Role
from fp8ref.shared import errors

Axes = tuple[str, ...]
"""Names of mesh axes."""

Sharding = NamedSharding | PartitionSpec
"""The sharding of an array, as lax.dot_general takes its ``out_sharding``."""

Parts = Literal["accumulators", "float32", "result"]
"""What devices sum to complete a GEMM: raw float32 accumulators, which are scaled and rounded
afterwards (P-7); or results that each device has scaled and rounded (P-8), in float32 or in their
own dtype."""

GradParts = Parts | Literal["float8_e4m3fn"]
"""What devices sum for a weight's gradient: ``Parts``, or FP8 results by a shared scale (P-21)."""

_GRAD_PARTS = (*get_args(Parts), "float8_e4m3fn")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The mesh axes that cut a linear's tokens M, output features N and input features K.

    m         cut the tokens: data parallelism.
    n         cut the output features: column-parallel.
    k         cut the input features: row-parallel.
    fsdp      among m; cut the weight's first dim, within n, until it is gathered in FP8 for use.
    positions among m; cut a sequence's positions, the last dim but one of tokens with leading dims;
              the others of m cut the first. Random numbers depend on it, and nothing else (S-24).
    sequence  n cuts the tokens of the input too (k those of the output): gathered in FP8 before,
              reduce-scattered after.
    scope     the devices whose amaxes make the scales of input and grad_output: ``global``, all;
              ``local``, those along n and k, which share a GEMM, so that each piece of the batch
              has its own scales. A weight's are always global.
    reduce_grads
              what is summed over m to make the gradient of a weight. Under scope ``local``
              accumulators have different scales, so results are summed, in float32. FP8 needs
              shard_map.
    reduce_outputs
              what is summed over k to make an output, and over n to make a grad_input. Under plain
              jit XLA sums accumulators, unless a field says ``result`` and the device is an NVIDIA
              GPU (P-9).
    out_sharding
              that of the output on Explicit axes, as of ``lax.dot_general``. Without it types and
              the fields above say it; with it alone, types say those (P-20).

    Raises:   ValueError: an axis that cuts two of m, n and k; fsdp not among m; sequence of a
              linear that is cut along both of n and k, or neither; a string for a tuple; another
              value of scope or of a reduce field.
    """

    m: Axes = ()
    n: Axes = ()
    k: Axes = ()
    fsdp: Axes = ()
    positions: Axes = ()
    sequence: bool = False
    scope: Literal["global", "local"] = "global"
    reduce_grads: GradParts = "float32"
    reduce_outputs: Parts = "result"
    out_sharding: Sharding | None = None

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "fsdp", "positions"):
            if isinstance(value := getattr(self, name), str):
                raise ValueError(
                    f"{name} is a tuple of mesh axes; got the string {value!r}. Use ({value!r},)."
                )
        errors.one_of("scope", self.scope, ("global", "local"))
        for name, allowed in (("reduce_grads", _GRAD_PARTS), ("reduce_outputs", get_args(Parts))):
            errors.one_of(name, getattr(self, name), allowed)
        cutting = (*self.m, *self.n, *self.k)
        if twice := sorted({axis for axis in cutting if cutting.count(axis) > 1}):
            raise ValueError(
                f"a mesh axis shards one of m, n, k; got {', '.join(twice)} twice in {self}."
            )
        if missing := sorted({*self.fsdp, *self.positions} - set(self.m)):
            raise ValueError(
                "fsdp axes, and those of positions, also shard tokens, so m has them; got "
                f"{', '.join(missing)}, m={self.m}."
            )
        if self.sequence and bool(self.n) == bool(self.k):
            raise ValueError(
                f"sequence needs n or k, column- or row-parallel; got n={self.n}, k={self.k}."
            )

    @property
    def axes(self) -> Axes:
        """All mesh axes that cut a dim."""
        return (*self.m, *self.n, *self.k)

    def at_rest(self, role: Role) -> tuple[Axes, Axes]:
        """The mesh axes that cut the two dims of a tensor before any gather.

        Input is [M, K], weight [N, K], grad_output [M, N].
        """
        rows, columns = {
            "input": (self.m, self.k),
            "weight": (self.n, self.k),
            "grad_output": (self.m, self.n),
        }[role]
        return (*rows, *self.gathered(role)), columns

    def gathered(self, role: Role) -> Axes:
        """The mesh axes along which the rows of a tensor are gathered for use."""
        if role == "weight":
            return self.fsdp
        return (self.n if role == "input" else self.k) if self.sequence else ()

    def amax_axes(self, role: Role, granularity: str, axis: int) -> Axes:
        """The mesh axes that reduce an amax: those that cut a scale's group, within the scope.

        Layouts cut no block (P-5), so block scales need none (P-2).
        """
        rows, columns = self.at_rest(role)
        if granularity not in ("tensorwise", "rowwise"):
            return ()
        cutting = (*rows, *columns) if granularity == "tensorwise" else (rows, columns)[axis % 2]
        local = self.scope == "local" and role != "weight"
        return tuple(name for name in cutting if not (local and name in self.m))

    def reduction(self, which: Gemm, outer: int) -> "Reduction":
        """How devices complete a GEMM's partial results: sum, or sum and scatter the result's rows.

        outer     the number of groups of rows; each group is scattered by itself.
        """
        if which == "grad_weight":
            left = tuple(name for name in self.m if name not in self.fsdp)
            # Accumulators under different scales have no common sum.
            parts: GradParts = (
                "float32"
                if (self.scope, self.reduce_grads) == ("local", "accumulators")
                else self.reduce_grads
            )
            return Reduction(sum=left, scatter=self.fsdp, parts=parts, outer=outer)
        reduced, column = (self.k, False) if which == "output" else (self.n, True)
        scattered = self.sequence and bool(self.n) == column
        return Reduction(
            sum=() if scattered else reduced,
            scatter=reduced if scattered else (),
            parts=self.reduce_outputs,
            outer=outer,
        )


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """A sum over some mesh axes; over others a sum of which each device keeps its own rows.

    outer     the number of groups of rows; a device keeps its rows of each.
    parts     what is summed.
    """

    sum: Axes = ()
    scatter: Axes = ()
    parts: GradParts = "accumulators"
    outer: int = 1

    @property
    def axes(self) -> Axes:
        """All mesh axes that are summed over."""
        return (*self.sum, *self.scatter)

    def total(self, partial: Array) -> Array:
        """The sum over devices of [rows, columns], whose rows are ``arranged``: in float32, or in
        partial's dtype if results are summed in it."""
        if self.parts == "float8_e4m3fn":
            return gradient_reduction.completed(partial, self.sum, self.scatter, E4M3FN).value
        if self.parts != "result":
            partial = partial.astype(jnp.float32)
        if self.scatter:  # first, as it leaves fewer rows to sum
            partial = lax.psum_scatter(partial, self.scatter, scatter_dimension=0, tiled=True)
        if self.sum:
            partial = lax.psum(partial, self.sum)
        return partial

    def arranged(self, operand: Array) -> Array:
        """The rows [rows, K] of an operand, ordered by the device that will keep their results.

        ``total`` then scatters contiguous pieces. Reordering the operand moves fewer bytes than
        reordering its float32 products.

        Raises:   ValueError: squares of rows (scales, one for several rows) that devices would cut.
        """
        if not self.scatter or self.outer == 1:
            return operand
        pieces = self.outer * lax.axis_size(self.scatter)
        text = f"each device keeps whole rows or squares of them; got {len(operand)} for {pieces}."
        errors.require(len(operand) % pieces == 0, text)
        by_device = operand.reshape(
            self.outer, lax.axis_size(self.scatter), -1, operand.shape[-1]
        ).swapaxes(0, 1)
        return by_device.reshape(operand.shape)

    def own_rows(self, scale: Array) -> Array:
        """This device's rows of scales [rows, 1]; a single scale [1, 1] belongs to all rows."""
        if not self.scatter or scale.size == 1:
            return scale
        grouped = scale.reshape(self.outer, -1)
        rows = grouped.shape[1] // lax.axis_size(self.scatter)
        own = lax.dynamic_slice_in_dim(grouped, lax.axis_index(self.scatter) * rows, rows, axis=1)
        return own.reshape(-1, 1)
