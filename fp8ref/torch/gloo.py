"""FP8 gathers of activations on CPU ranks: gloo knows no FP8 type ("Invalid scalar type"). NCCL does, and is left alone."""

import functools

import torch
import torch.distributed._functional_collectives  # defines the operator
from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


@functools.cache
def gather_fp8_as_bytes() -> None:
    """From now on, in this process, torchao's all-gather of a Float8TrainingTensor on a CPU moves its codes as uint8. Idempotent.

    It is done to torchao's handler, not to the operator: a kernel of one's own in Python would enter gloo holding the interpreter lock,
    for which gloo's threads wait when they let tensors go, and both would wait for ever.
    """
    theirs = FLOAT8_OPS_TABLE[_GATHER]

    def gather(op, args, kwargs=None):
        def as_bytes(codes: torch.Tensor, *rest, **named) -> torch.Tensor:
            return op(codes.view(torch.uint8), *rest, **named).view(codes.dtype)  # waiting goes by storage, and a view shares it

        return theirs(as_bytes if args[0].device.type == "cpu" else op, args, kwargs or {})

    FLOAT8_OPS_TABLE[_GATHER] = gather
