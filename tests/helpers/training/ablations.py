"""An ablation by keys, whatever object has them."""

import dataclasses

from fp8ref.train.experiments.ablate import Ablation, Measurement, ablate
from fp8ref.train.experiments.ablation_operands import Studied


def ablated(run, **keys) -> Ablation:
    """``ablate``; fields of ``Studied`` and ``Measurement`` are keys too."""
    studied, measurement = (
        kind(**{f.name: keys.pop(f.name) for f in dataclasses.fields(kind) if f.name in keys})
        for kind in (Studied, Measurement)
    )
    return ablate(run, studied, measurement, **keys)
