"""What an optimizer's kernel leaves of the weights that it writes, for the linears that read them.

A linear casts a weight by its amax, or under delayed scaling by a scale that is known before. The
kernel of a step has the new weight in registers, so that amax and codes cost no reading.
"""

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary


class Left(NamedTuple):
    """What a step left of a parameter.

    weight    in the dtype in which linears read it; the parameter's memory if that is its own.
    parts     int32, partial amaxes of ``weight``: bits of magnitudes, the largest are S-2's.
    codes     of ``weight`` and transposed, uint8; () if the step did not cast.
    scale     float32 (), by which it did, and its ``versions`` then.
    """

    weight: Tensor
    parts: Tensor
    codes: tuple[Tensor, ...] = ()
    scale: Tensor | None = None
    scaled: tuple[int, ...] = ()

    def is_cast_by(self, scale: Tensor) -> bool:
        """Whether codes are by a scale as it is now."""
        return self.scale is scale and self.scaled == versions(scale)


@dataclass
class Trace:
    """What steps leave of one parameter, and what linears ask of them.

    dtype     in which linears read the weight.
    scale     float32 (), by which the next step casts; None: it does not.
    e5m2      whether it casts to e5m2, or to e4m3fn.
    late      whether a scale changed after a step had cast by it: later steps do not.
    counted   ``versions`` of the parameter after the last step.
    """

    parameter: weakref.ref[Tensor]
    dtype: torch.dtype
    scale: Tensor | None = None
    e5m2: bool = False
    late: bool = False
    left: Left | None = None
    counted: tuple[int, ...] = ()

    def ask(self, scale: Tensor, *, e5m2: bool) -> None:
        """Have the next steps cast by a scale, unless it changed after the last one had: steps are
        then too early for it."""
        left = self.left
        self.late |= left is not None and left.scale is scale and not left.is_cast_by(scale)
        self.scale, self.e5m2 = (None if self.late or not versions(scale) else scale), e5m2


_traces = WeakTensorKeyDictionary()
"""{parameter, or a copy of it in the dtype of the model: its Trace}."""


def trace(p: Tensor) -> Trace:
    """The trace of a parameter, or of the one whose copy it is."""
    if p not in _traces:
        _traces[p] = Trace(weakref.ref(p), p.dtype)
    return _traces[p]


def share(copy: Tensor, p: Tensor) -> None:
    """Say that linears read a parameter by a copy, which may have another dtype."""
    _traces[copy] = trace(p)
    _traces[copy].dtype = copy.dtype


def fresh(p: Tensor, dtype: torch.dtype | None = None) -> Left | None:
    """What the last step left of a parameter, or of the one whose copy it is, in a dtype, by
    default p's; None if an operation has changed the parameter since."""
    record: Trace | None = _traces.get(p)
    source = None if record is None else record.parameter()
    if record is None or source is None or record.left is None:
        return None
    same = record.left.weight.dtype == (dtype or p.dtype) and record.counted == versions(source)
    return record.left if same and record.counted else None


def versions(p: Tensor) -> tuple[int, ...]:
    """torch's count of the operations that changed a tensor, and where its memory is: ``.data`` may
    be other memory, but what is written through it counts no operation.

    () where not every operation is counted: of DTensors, and in inference mode.
    """
    return () if isinstance(p, DTensor) or p.is_inference() else (p._version, p.data_ptr())
