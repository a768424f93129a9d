"""Statistics of FP8 operands (spec Q-8, Q-13): parts of them from a program that measures, or, of
GEMMs that report to the host, in NumPy."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fp8ref.jax.quantize import stats as in_program
from fp8ref.recipe import OPERANDS, REDUCED_AXES, Gemm
from fp8ref.selection.statistics import FIELDS, Operand, merged
from fp8ref.sim.attention.operands import hadamard
from fp8ref.sim.quantize import scaling, stats
from fp8ref.spec import granularity
from fp8ref.spec.attention import products as attention_products
from fp8ref.spec.attention.products import AttentionOperand
from fp8ref.spec.attention.variants import Variant
from fp8ref.train.jax.mesh import Layout


def linear_parts(
    operands: Sequence[Operand], layers: Sequence[str], values: np.ndarray, layout: Layout
) -> list[np.ndarray]:
    """Parts of each operand, of float64 [microbatches, devices, layers, rows, fields]."""
    rows = {row: i for i, row in enumerate(in_program.ROWS)}
    parts = []
    for operand in operands:
        layer_parts = values[:, :, layers.index(operand.layer)]
        row = rows[operand.gemm, operand.role]
        # Nothing counted: a tensor of two GEMMs with the same codes is measured in the first.
        if not layer_parts[:, :, row, 0].any():
            row = next(i for (_, role), i in rows.items() if role == operand.role)
        own = [layout.own_parts(p[:, row], operand.layer, operand.role) for p in layer_parts]
        parts.append(np.concatenate(own))
    return parts


def attention_parts(
    operands: Sequence[AttentionOperand],
    layers: Sequence[str],
    values: np.ndarray,
    variant: Variant,
) -> list[np.ndarray]:
    """Parts of each operand, of float64 [microbatches, devices, layers, ROWS, fields]: every device
    has its own sequences and heads."""
    rows = attention_products.RECORDED
    first = (attention_products.first_use(o.product, o.role, variant) for o in operands)
    return [
        values[:, :, layers.index(operand.layer), rows.index(use)].reshape(-1, values.shape[-1])
        for operand, use in zip(operands, first, strict=True)
    ]


def on_host(operands: Sequence[Operand], observe: Callable[[Callable], None]) -> dict[str, dict]:
    """Statistics by operand of a pass that ``observe`` runs, whose GEMMs call its argument."""
    casts = {operand.name: operand for operand in operands}
    parts: dict[str, list[np.ndarray]] = {name: [] for name in casts}

    def take(layer: str, gemm: Gemm, a, b) -> None:
        for name, numbers in measured(casts, layer, gemm, a, b):
            parts[name].append(numbers)

    # The simulator needs subnormals, which XLA's threads flush. A thread has its parent's mode.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(int).result()
        if operands:
            observe(lambda *gemm: thread.submit(take, *gemm[:4]).result())
    called = [operand for operand in operands if parts[operand.name]]
    return merged(called, [np.stack(parts[operand.name]) for operand in called])


def measured(
    planned: Mapping[str, Operand], layer: str, gemm: Gemm, a, b
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, float64 in the order of ``FIELDS``) of each operand in FP8 of a GEMM.

    planned   operands by name.
    a, b      (hp, codes, scale) as ``linear.observing`` reports, in their tensors' layouts.
    """
    for role, axis, (hp, codes, scale) in zip(
        OPERANDS[gemm], REDUCED_AXES[gemm], (a, b), strict=True
    ):
        operand = planned.get(f"{layer}/{gemm}/{role}")
        if operand is None:
            continue
        hp, codes, scale = (np.asarray(x) for x in (hp, codes, scale))
        hp = hp.astype(np.float32).reshape(codes.shape)
        codes = codes.view(np.uint8)
        kind = operand.cast.granularity
        # Flax's weight is [K, N]: the reduced axis may be the other, which its scales show.
        axes = [axis % 2, 1 - axis % 2] if codes.ndim == 2 else [axis % codes.ndim]
        fits = [
            candidate
            for candidate in (reversed(axes) if role == "weight" else axes)
            if granularity.scale_shape(kind, codes.shape, candidate, ragged=True) == scale.shape
        ]
        if operand.cast.rotation is not None:  # what was quantized
            lines = hadamard.rotate_blocks(np.swapaxes(hp, fits[0], -1), operand.cast.rotation)
            hp = np.swapaxes(lines, fits[0], -1)
        own = codes, scale.astype(np.float32), _inverse(scale)
        of = scaling.Quantized(*own, operand.cast.fmt, kind, fits[0])
        counts = stats.statistics(hp, of)
        ends = {"amax": np.max(np.abs(hp)), "scale_min": scale.min(), "scale_max": scale.max()}
        numbers = [ends[f] if f in ends else getattr(counts, f) for f in FIELDS]
        yield operand.name, np.array(numbers, np.float64)


def _inverse(scale: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return (np.float32(1) / scale.astype(np.float32)).astype(np.float32)
