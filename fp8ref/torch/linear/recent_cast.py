"""The last input that an eager linear cast, for the linears after it that read the same tensor.

Query, key and value, or gate and up, cast one input once. Compiled graphs merge equal casts.
"""

import threading
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from fp8ref.torch.linear import both_orders
from fp8ref.torch.linear.both_orders import Pair, Use

__all__ = ["quantize"]


@dataclass(frozen=True)
class _Entry:
    """A cast of a tensor.

    key     what its codes depend on beside the tensor: versions, uses, stream.
    scale   of a delayed state, or None.
    """

    tensor: "weakref.ref[Tensor]"
    key: tuple
    scale: Tensor | None
    pair: Pair


_recent = threading.local()


def quantize(
    x: Tensor,
    rows: Tensor,
    uses: tuple[Use, Use],
    scale: Tensor | None,
    guess: Tensor | None = None,
) -> Pair:
    """``both_orders.quantize`` of rows [M, K], a view of x [..., K]; the last one again, if neither
    x nor the scale has changed since. A write through ``.data`` is not seen.

    It is kept until another input is cast, or x is freed.
    """
    # Ranks merge amaxes once for each linear: one without tokens has no cast to reuse.
    if uses[0].group or uses[1].group or not _is_kept(x, scale):
        return both_orders.quantize(rows, uses, scale, guess=guess)
    stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
    key = x._version, None if scale is None else scale._version, uses, stream
    last: _Entry | None = getattr(_recent, "entry", None)
    if last and last.tensor() is x and last.scale is scale and last.key == key:
        return last.pair
    pair = both_orders.quantize(rows, uses, scale, guess=guess)
    _recent.entry = _Entry(weakref.ref(x, _forget), key, scale, pair)
    return pair


def _forget(tensor: weakref.ref) -> None:
    last = getattr(_recent, "entry", None)
    if last is not None and last.tensor is tensor:
        _recent.entry = None


def _is_kept(x: Tensor, scale: Tensor | None) -> bool:
    """Whether a cast may serve later linears: of plain tensors that an operation of autograd made,
    which count their changes; buffers that others fill, as a collective does, may not. Not in
    inference mode, whose tensors no backward pass can keep; nor while a CUDA graph is captured,
    whose replays see other values; nor within selective checkpointing, which expects the same
    operators when it runs a block again."""
    if not x.requires_grad or torch.is_inference_mode_enabled():
        return False
    tensors = [t for t in (x, scale) if t is not None]
    if torch.compiler.is_compiling() or any(
        type(t) not in (Tensor, torch.nn.Parameter) or t.is_inference() for t in tensors
    ):
        return False
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    checkpoints = _CachedTorchDispatchMode, _CachingTorchDispatchMode
    return not any(isinstance(mode, checkpoints) for mode in _get_current_dispatch_mode_stack())
