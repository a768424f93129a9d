"""An operand cast once for both its GEMMs, by Triton kernels that write codes in both orders.

The first GEMM of a role reduces the last axis of its tensor [M, K], the second the first one: FP8
tensor cores take codes along the reduced axis, as [M, K] and as [K, M]. The codes and scales are
those of ``scaling.quantize``, which casts and copies once for each GEMM.

    tensorwise       amax, then one cast; under delayed scaling one cast, which observes its amax;
                     by a guess of a power of two one cast, which is checked by its amax
    rowwise          amaxes of rows and of columns, then one cast by both
    blockwise        one kernel: a tile has the amaxes of its own blocks
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8ref.policy import POLICIES
from fp8ref.recipe import CastSpec
from fp8ref.spec import granularity as granularities
from fp8ref.torch.kernels import casts
from fp8ref.torch.quantize import cast, scales, scaling
from fp8ref.torch.quantize.scaling import Quantized

__all__ = ["Pair", "Use", "columns", "is_guessed", "is_supported", "pair", "quantize"]


class Use(NamedTuple):
    """How one GEMM takes a role's tensor.

    cast    None in high precision.
    axis    the reduced one.
    group   the process group that shares amaxes, or None.
    ragged  whether the last block may be short (L-5).
    """

    cast: CastSpec | None
    axis: int
    group: str | None
    ragged: bool


class Pair(NamedTuple):
    """A tensor as its two GEMMs take it.

    rows     reduced along its last axis.
    columns  along its first.
    parts    int32, partial amaxes of the tensor, under delayed scaling; else None.
    """

    rows: Quantized
    columns: Quantized
    parts: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What ``pair`` makes it of."""
        rows, columns = self.rows, self.columns
        assert columns.transposed is not None
        by_columns = (columns.transposed, columns.scale, columns.scale_inv)
        return (rows.codes, rows.scale, rows.scale_inv, *by_columns)


def is_supported(uses: tuple[Use, Use]) -> bool:
    """Whether kernels cast a role's tensor for both its GEMMs at once."""
    first, second = (use.cast for use in uses)
    if first is None or first != second or first.fmt.name not in ("e4m3fn", "e5m2"):
        return False
    if not first.plain:
        return False
    if first.granularity.startswith("blockwise"):
        return first.policy == POLICIES["torchao"]
    return first.granularity in ("tensorwise", "rowwise")


def is_guessed(uses: tuple[Use, Use]) -> bool:
    """Whether kernels may cast a role's tensor, if they cast it, by a guess of its scale: one power
    of two, of this rank alone."""
    spec, _, group, _ = uses[0]
    assert spec is not None
    by_tensor = spec.granularity == "tensorwise"
    return by_tensor and spec.policy == POLICIES["torchao_pow2"] and group is None


def quantize(
    x: Tensor, uses: tuple[Use, Use], scale: Tensor | None = None, guess: Tensor | None = None
) -> Pair:
    """x [M, K] cast for two GEMMs, along its last axis and its first.

    scale     (), of a delayed state; None: x is scaled by its own amaxes.
    guess     (), int32: the bits of the scale of the last step, which become those of this one.
              Where ``is_guessed``, a right one spares a pass over x; no bit depends on it.
    Order:    as ``scaling.quantize`` and ``scaling.quantize_with``.
    Raises:   ValueError: as these.
    """
    cast.checked(x)
    spec = uses[0].cast
    assert spec is not None
    for use in uses:
        granularities.blocks(spec.granularity, tuple(x.shape), use.axis, ragged=use.ragged)
    e5m2, kind = spec.fmt.name == "e5m2", spec.granularity
    if kind == "rowwise":
        parts, power = casts.amax_lines(x), spec.policy.power_of_two is not None
        if kernels_scale(uses):
            return pair(spec, casts.cast_lines_by_amaxes(x, *parts, e5m2=e5m2, power=power))
        rows, columns = line_scales(parts, uses)
        codes, transposed = casts.cast_lines(x, rows.scale, columns.scale, e5m2=e5m2)
        return pair(spec, (codes, *rows, transposed, *columns))
    if kind == "blockwise_128x128":
        codes, transposed, *both = casts.squares(x, e5m2=e5m2)
        return pair(spec, (codes, *both, transposed, *both))
    if kind == "blockwise_1x128":
        codes, transposed, *four = casts.lines(x, e5m2=e5m2)
        return pair(spec, (codes, *four[:2], transposed, *four[2:]))
    if guess is not None and is_guessed(uses):
        codes, transposed, *both = casts.cast_by_guess_(x, guess, e5m2)
        return pair(spec, (codes, *both, transposed, *both))
    return _by_one_scale(x, uses, scale)


def kernels_scale(uses: tuple[Use, Use]) -> bool:
    """Whether kernels make a role's scales of its amaxes, which are of this rank alone."""
    policies = POLICIES["torchao"], POLICIES["torchao_pow2"]
    return all(use.cast and use.cast.policy in policies and not use.group for use in uses)


def _by_one_scale(x: Tensor, uses: tuple[Use, Use], scale: Tensor | None) -> Pair:
    (spec, _, group, _), parts = uses[0], None
    assert spec is not None
    e5m2, compiles = spec.fmt.name == "e5m2", torch.compiler.is_compiling()
    if scale is not None:
        codes, transposed, parts = casts.cast(x, scale, e5m2=e5m2)
        scale_inv = scale.reciprocal()
    elif kernels_scale(uses) and not compiles:
        power = spec.policy.power_of_two is not None
        codes, transposed, scale, scale_inv = casts.cast_by_amax(
            x, casts.amax(x), e5m2=e5m2, power=power
        )
    else:
        # A compiler takes the amax in the kernel that makes x, which no kernel of ours is part of.
        amax = scaling.amax(x) if compiles else casts.amax(x).amax().view(torch.float32)
        if group is not None:
            amax = scaling.merge_amax(amax, group)
        scale, scale_inv = scales.scales_from_amax(amax, spec.fmt, spec.policy)
        codes, transposed, _ = casts.cast(x, scale, e5m2=e5m2)
    return pair(spec, (codes, scale, scale_inv, transposed, scale, scale_inv), parts)


def line_scales(
    amaxes: Sequence[Tensor], uses: tuple[Use, Use]
) -> tuple[scales.Scales, scales.Scales]:
    """The scales of rows [M, 1] and columns [1, K], by partial amaxes of ``casts.amax_lines``."""
    by_axis = []
    for parts, axis, use in zip(amaxes, (1, 0), uses, strict=True):
        assert use.cast is not None
        amax = parts.amax(0).view(torch.float32).unsqueeze(axis)  # [M, 1] and [1, K]
        if use.group is not None:
            amax = scaling.merge_amax(amax, use.group)
        by_axis.append(scales.scales_from_amax(amax, use.cast.fmt, use.cast.policy))
    return by_axis[0], by_axis[1]


def pair(spec: CastSpec, tensors: Sequence[Tensor], parts: Tensor | None = None) -> Pair:
    """The Pair of ``Pair.tensors``: codes [M, K], scale and scale_inv; transposed codes [K, M],
    their scale and scale_inv."""
    codes, *by_rows, transposed, scale, scale_inv = tensors
    fmt, kind = spec.fmt, spec.granularity
    shares = transposed if by_rows[0] is scale else None
    return Pair(
        Quantized(codes, by_rows[0], by_rows[1], fmt, kind, -1, shares),
        columns(spec, (transposed, scale, scale_inv)),
        parts,
    )


def columns(spec: CastSpec, tensors: Sequence[Tensor]) -> Quantized:
    """A tensor [M, K] reduced along its first axis: transposed codes [K, M], scale, scale_inv."""
    transposed, scale, scale_inv = tensors
    return Quantized(transposed.t(), scale, scale_inv, spec.fmt, spec.granularity, -2, transposed)
