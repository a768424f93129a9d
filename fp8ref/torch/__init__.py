"""FP8 training in PyTorch: ``convert.convert`` puts FP8 into a model on one device, ``parallel.parallelize`` into one on a mesh.

A linear becomes torchao's Float8Linear, or fp8ref's own ``linear.Linear``; a recipe with delayed scaling needs ``delayed.update`` once a step.
``cast``, ``scaling`` and ``gemm`` are the parts; for several devices ``fsdp``, ``tensor_parallel`` and ``compiled_fsdp``; ``proof`` shows that a step
ran in FP8, ``hardware`` puts simulated hardware in place of torch's FP8 GEMMs.

Held to docs/SEMANTICS.md by ``fp8ref.crosscheck``; shares no code with the simulator. The trainer is ``fp8ref.train.torch``.
"""

import logging

from fp8ref import extras, moved

extras.require("torch", "fp8ref.torch", "torch", "torchao")

# torchao and torch.utils._pytree warn on import about GPU extensions of other builds and about each other, whatever a user does.
_loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
_levels = [logger.level for logger in _loggers]
for _logger in _loggers:
    _logger.setLevel(logging.ERROR)

from fp8ref.torch import cast, compiled_fsdp, convert, delayed, fsdp, gemm, hardware, linear, parallel, proof, scaling, tensor_parallel

for _logger, _level in zip(_loggers, _levels, strict=True):
    _logger.setLevel(_level)

__all__ = [
    "cast",
    "compiled_fsdp",
    "convert",
    "delayed",
    "fsdp",
    "gemm",
    "hardware",
    "linear",
    "parallel",
    "proof",
    "scaling",
    "tensor_parallel",
]


def __getattr__(name: str):
    raise moved.attribute_error(__name__, name)
