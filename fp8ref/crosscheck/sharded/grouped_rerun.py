"""Rerun experts' linears of one device's pass on a mesh of JAX devices (spec X-13, X-15).

    tensors = expert_tensors(observations, weights)    # of one device: rows by expert
    gemms, grad_weight = rerun(tensors, ...)           # of each device of the mesh

Each expert's rows are dealt to devices in uneven, also empty runs, and move to the expert's device
as in the trainer. What fills a device's buffer is NaN, in no group.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8ref.crosscheck.operands import Observation
from fp8ref.crosscheck.sharded.experts import ExpertGemm
from fp8ref.jax.attention.operands import inputs as attention_inputs
from fp8ref.jax.experts import grouped
from fp8ref.jax.experts import operands as grouped_operands
from fp8ref.jax.experts import parallel as expert_parallel
from fp8ref.jax.experts import reports as grouped_reports
from fp8ref.jax.quantize import cast
from fp8ref.recipe import OPERANDS, Gemm, Recipe, Role
from fp8ref.selection import grouped as recipes
from fp8ref.train.jax.llama.forward_pass import Pass
from fp8ref.train.jax.mesh import Layout


class Experts(NamedTuple):
    """The tensors of a grouped linear, float32 holding bfloat16, by expert: rows of input [M_e, K]
    and of grad_output [M_e, N]; weight [E, N, K]."""

    input: list[np.ndarray]
    grad_output: list[np.ndarray]
    weight: np.ndarray


def expert_tensors(observations: Sequence[Observation], weight: np.ndarray) -> Experts:
    """A layer's tensors, from its experts' GEMMs on one device. weight: [E, N, K], in bfloat16.

    An observation does not say whose it is: its weight does.
    """
    count, n, k = weight.shape
    experts = Experts(
        [np.zeros((0, k), np.float32)] * count, [np.zeros((0, n), np.float32)] * count, weight
    )
    for observed in observations:
        if observed.gemm == "grad_weight":
            continue
        e = next(
            e
            for e, expert_weight in enumerate(weight)
            if np.array_equal(expert_weight, np.asarray(observed.b[0], np.float32))
        )
        rows = experts.input if observed.gemm == "output" else experts.grad_output
        rows[e] = np.asarray(observed.a[0], np.float32)
    return experts


def dealt(rows: Sequence[int], devices: int) -> np.ndarray:
    """int [devices, E]: how many of each expert's rows each device begins with; some have none."""
    rng = np.random.default_rng(0)
    cuts = [np.sort(rng.integers(0, n + 1, devices - 1)) for n in rows]
    return np.stack(
        [np.diff(cut, prepend=0, append=n) for cut, n in zip(cuts, rows, strict=True)], axis=1
    )


class Rerun:
    """One recipe's grouped linears on one mesh: compiled once for each shape."""

    def __init__(self, layout: Layout, recipe: Recipe) -> None:
        assert layout.mesh is not None
        self._layout = layout
        self._recipe = recipes.by_name(recipe)
        self._mesh = layout.mesh
        self._devices = layout.mesh.devices.size
        self._about: dict[Gemm, tuple] = {}
        cut = P(layout.axes)
        self._weight = layout.parameter("model.layers.0.mlp.experts.up_proj.weight", (1, 1, 1))
        operand_cuts = {
            which: ((cut,) * 3, (cut,) * 3)
            for which, spec in self._recipe.recipe.gemms.items()
            if spec.fp8
        }
        out = operand_cuts, {"output": cut, "grad_input": cut}, cut, self._weight
        cuts = (cut, cut, cut, self._weight)
        run = jax.shard_map(self._on_device, mesh=self._mesh, in_specs=cuts, out_specs=out)
        self._run = jax.jit(run)

    def __call__(
        self, tensors: Experts, rows: int
    ) -> tuple[list[dict[tuple[Gemm, int], ExpertGemm]], np.ndarray]:
        """Each device's GEMMs by the expert's number there, grad_weight without its result; and
        grad_weight [E, N, K], summed over devices. rows: of a device's buffer."""
        sizes = dealt([len(x) for x in tensors.input], self._devices)
        x, g = (
            self._buffers(expert_rows, sizes, rows)
            for expert_rows in (tensors.input, tensors.grad_output)
        )
        cut = NamedSharding(self._mesh, P(self._layout.axes))
        inputs = (jax.device_put(jnp.asarray(v, jnp.bfloat16), cut) for v in (x, g))
        w = jax.device_put(
            jnp.asarray(tensors.weight, jnp.bfloat16), NamedSharding(self._mesh, self._weight)
        )
        operands, results, ends, grad_weight = jax.tree.map(
            np.asarray, self._run(*inputs, jax.device_put(sizes, cut), w)
        )
        return [
            self._device_gemms(d, operands, results, ends) for d in range(self._devices)
        ], np.asarray(grad_weight, np.float32)

    def _buffers(
        self, expert_rows: Sequence[np.ndarray], sizes: np.ndarray, rows: int
    ) -> np.ndarray:
        """[devices * rows, C]: each device's rows, by expert; then NaN."""
        buffers = np.full((self._devices, rows, expert_rows[0].shape[1]), np.nan, np.float32)
        begin = np.cumsum(sizes, axis=0) - sizes  # of each device's run among an expert's rows
        for d, own in enumerate(sizes):
            runs = np.concatenate(
                [
                    x[begin[d, e] :][:n]
                    for e, (x, n) in enumerate(zip(expert_rows, own, strict=True))
                ]
            )
            buffers[d, : len(runs)] = runs
        return buffers.reshape(-1, buffers.shape[-1])

    def _on_device(self, x: jax.Array, g: jax.Array, sizes: jax.Array, w: jax.Array):
        """The operands of each GEMM, the results of two, the ends of groups, and grad_weight."""
        layout, axis, own = self._layout, self._layout.expert_axis, sizes[0]
        if axis is not None:
            moved = expert_parallel.dispatch(x, own, axis)
            x = moved.rows
            g = expert_parallel.dispatch(g, own, axis).rows
            own = moved.sizes
        run = Pass(layout=layout)

        def multiplied(x: jax.Array, w: jax.Array) -> jax.Array:
            return run.grouped_codes(x, w, own, self._recipe.recipe, "rerun")[0]

        y, vjp = jax.vjp(multiplied, x, w)
        grad_input, grad_weight = vjp(g)
        groups = grouped_operands.groups_of(own, len(x))
        tensors: dict[Role, jax.Array] = {"input": groups.only(x), "grad_output": groups.only(g)}
        tensors["weight"] = layout.expert_weights(w).swapaxes(-1, -2)
        operands = {}
        for which, spec in self._recipe.recipe.gemms.items():
            if spec.fp8:
                quantized = [
                    self._quantized(which, role, tensors[role], groups) for role in OPERANDS[which]
                ]
                operands[which] = tuple(arrays for arrays, _ in quantized)
                self._about[which] = tuple(about for _, about in quantized)
        return (
            operands,
            {"output": y[None], "grad_input": grad_input[None]},
            groups.ends[None],
            grad_weight,
        )

    def _quantized(
        self, which: Gemm, role: Role, tensor: jax.Array, groups: grouped_operands.Groups
    ) -> tuple[tuple, tuple]:
        """((tensor, codes, scales), what ``experts.reports.of_groups`` has to know of them)."""
        q = grouped.quantize_operand(
            which, role, tensor, groups, self._recipe, over=self._layout.sharing_groups
        )
        assert not isinstance(q, jax.Array)
        # also what copies of it have: each device reports its own
        whole = frozenset(self._layout.axes)
        arrays = (tensor, cast.code_bits(q.codes, q.fmt), q.scale)
        return tuple(attention_inputs.as_varying(v, whole)[None] for v in arrays), (
            grouped_reports.is_rows(q),
            q.granularity,
            q.axis,
        )

    def _device_gemms(
        self, d: int, operands: Mapping, results: Mapping, ends: np.ndarray
    ) -> dict[tuple[Gemm, int], ExpertGemm]:
        gemms = {}
        for which, pair in operands.items():
            a, b = (tuple(np.asarray(v[d]) for v in operand) for operand in pair)
            if which == "grad_weight":
                out = np.zeros((len(ends[d]), 1, 1))
            else:
                out = np.asarray(results[which][d])
            for e, parts, group_out in grouped_reports.group_gemms(
                which, self._about[which], ends[d], a, b, out
            ):
                hp = [(np.asarray(x, np.float32), codes, scale) for x, codes, scale in parts]
                gemms[which, e] = (
                    *hp,
                    None if which == "grad_weight" else np.asarray(group_out, np.float32),
                )
        return gemms  # type: ignore[return-value]
