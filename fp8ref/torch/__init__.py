"""FP8 training in PyTorch: begin with ``linear.convert``, of a model on one device, or ``parallel.parallelize``, on a mesh of them.

A linear becomes torchao's Float8Linear, or fp8ref's own ``layer.Linear``; ``delayed.update`` is due once a step where recipes scale by the past.
``cast``, ``scaling`` are what that is made of; on several devices ``gather``, ``tensor``, ``traced``, ``processes``; ``proof`` that a step ran in
FP8, ``simulated`` hardware for it; ``model`` and ``train`` are the trainer's own.

Held to docs/SEMANTICS.md by ``fp8ref.check``; shares no code with the simulator.
"""

import logging

# torchao and torch.utils._pytree warn on import about GPU extensions of other builds and about each other, whatever a user does.
_loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
_levels = [logger.level for logger in _loggers]
for _logger in _loggers:
    _logger.setLevel(logging.ERROR)

try:
    import torch
    import torchao
except ImportError as error:
    raise ImportError(
        f"fp8ref.torch needs torch and torchao; {error.name} is missing. Install them with: pip install 'fp8ref[torch]'"
    ) from error

from fp8ref.torch import cast, delayed, gather, layer, linear, model, parallel, processes, proof, scaling, simulated, tensor, traced, train

for _logger, _level in zip(_loggers, _levels, strict=True):
    _logger.setLevel(_level)

__all__ = [
    "cast",
    "delayed",
    "gather",
    "layer",
    "linear",
    "model",
    "parallel",
    "processes",
    "proof",
    "scaling",
    "simulated",
    "tensor",
    "traced",
    "train",
]
del torch, torchao
