"""Weights cast in both orders by Triton kernels, one launch for a list of them.

Codes and scales are those of ``casts``. No operators: compiled graphs take results as inputs.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fp8ref.torch.kernels import launch
from fp8ref.torch.quantize import cast as quantizing
from fp8ref.torch.quantize.cast import DTYPES

_Name = TypeVar("_Name")


class Weight(NamedTuple):
    """A weight [M, N] of any strides, float32, float16 or bfloat16, and what it is cast by.

    fmt     e4m3fn or e5m2.
    scale   (), that of a delayed state; else by policy torchao, or torchao_pow2 if ``power``.
    parts   int32, its partial amaxes, if they are known.
    guess   (), int32: as that of ``casts.cast_by_guess_``.
    """

    tensor: Tensor
    fmt: str
    power: bool = False
    scale: Tensor | None = None
    parts: Tensor | None = None
    guess: Tensor | None = None


def cast(weights: Mapping[_Name, Weight]) -> dict[_Name, tuple[Tensor, ...]]:
    """Of each weight codes [M, N], scale () and scale_inv (); transposed codes [N, M], scale and
    scale_inv; partial amaxes, int32.

    Launches: one for a dtype, format and policy if scales or amaxes are known, else two; others for
              weights with a side that 16 does not divide, or not contiguous.
    Raises:   ValueError: a weight of another dtype.
    """
    lists: dict[tuple, dict[_Name, Weight]] = defaultdict(dict)
    for name, (x, fmt, power, *options) in weights.items():
        quantizing.checked(x)
        kind = x.device, x.dtype, _is_wide(x), fmt, power, *(each is None for each in options)
        lists[kind][name] = weights[name]
    results: dict[_Name, tuple[Tensor, ...]] = {}
    for each in lists.values():
        results |= dict(zip(each, _cast([*each.values()]), strict=True))
    return results


def _is_wide(x: Tensor) -> bool:
    from fp8ref.kernels.cast_lists import UNIT

    sides = *x.shape, x.data_ptr() // x.itemsize
    return x.is_contiguous() and not any(n % UNIT for n in sides)


def _cast(weights: Sequence[Weight]) -> Iterable[tuple[Tensor, ...]]:
    """``cast`` of weights that have the same launches."""
    from fp8ref.kernels import cast_lists

    x, fmt, power, scale, amaxes, guess = weights[0]
    tensors, wide = [w.tensor for w in weights], _is_wide(x)
    shapes = [(w.shape[0], w.shape[1]) for w in tensors]
    prepare = functools.partial(cast_lists.cast, shapes, wide=wide, e5m2=fmt == "e5m2")
    codes = [w.new_empty(w.shape, dtype=DTYPES[fmt]) for w in tensors]
    transposed = [w.new_empty(w.shape[::-1], dtype=DTYPES[fmt]) for w in tensors]
    scales = x.new_empty((2, len(weights), 4), dtype=torch.float32)
    observe = cast_lists.amax(shapes, wide=wide)
    parts = [w.parts for w in weights if w.parts is not None]
    parts = parts or [*x.new_empty(observe.grid[::-1], dtype=torch.int32)]
    sources = [w.scale if guess is None else w.guess for w in weights]
    given = [scales if each is None else each.view(torch.float32) for each in sources]
    distances = map(_distances, (tensors, codes, transposed, given, parts))
    rows = zip(shapes, (w.stride() for w in tensors), *distances, map(len, parts), strict=True)
    table = _table(tuple((*shape, *strides, *row) for shape, strides, *row in rows), x.device)
    memory = x, table, given[0], parts[0], codes[0], transposed[0], *scales
    if scale is not None or guess is not None:
        launch.run(prepare(), *memory)
    elif amaxes is None:
        launch.run(observe, x, table, parts[0])
    if scale is None:
        launch.run(prepare(power=power, given=guess is not None, by_amax=True), *memory)
    if guess is not None:
        torch._foreach_copy_(given, [*scales[0, :, 0]])
    by = [*zip(*scales[..., 0], strict=True)]
    results = zip(codes, by, transposed, parts, strict=True)
    return ((q, *both, t, *both, part) for q, both, t, part in results)


def _distances(tensors: Sequence[Tensor]) -> list[int]:
    """How many elements from the first tensor each one begins."""
    return [(x.data_ptr() - tensors[0].data_ptr()) // x.itemsize for x in tensors]


@functools.lru_cache(maxsize=16)
def _table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """A table on a device: one for all steps in which weights and codes lie as before."""
    columns = [*zip(*rows, strict=True)]
    table = torch.tensor(columns, dtype=torch.int64, device="cpu").view(torch.int32)
    # from pinned memory, so that the host does not wait for the device
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)
