"""``parallelize`` as the trainer calls it, compiled by another backend than inductor."""

import dataclasses

from torch import nn

from fp8ref.torch.model import parallel
from fp8ref.torch.model.parallel import Parallelism


def parallelize_by(backend: str):
    """A function in place of the trainer's ``parallelize``, whose compiler is ``backend``."""

    def parallelize(*args, parallelism: Parallelism, **options) -> nn.Module:
        chosen = dataclasses.replace(parallelism, compile_backend=backend)
        return parallel.parallelize(*args, parallelism=chosen, **options)

    return parallelize
