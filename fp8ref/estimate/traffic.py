"""Communication of a step: bytes that a device receives, by purpose.

As configured, and as if all tensors were bfloat16 or float32, by ring algorithms.
"""

from dataclasses import dataclass

from fp8ref.estimate.collectives import collectives
from fp8ref.estimate.collectives.collectives import SIZES
from fp8ref.train.config.config import Config


@dataclass
class Flow:
    """Elements that are received for one purpose in any dtype, and their bytes."""

    elements: float = 0.0
    bytes: float = 0.0


def flows(config: Config, backend: str) -> dict[str, Flow]:
    """{purpose: what a device receives for it in one optimizer step}."""
    by_purpose: dict[str, Flow] = {}
    for collective, times in collectives.step_collectives(config, backend):
        flow = by_purpose.setdefault(collective.purpose, Flow())
        flow.elements += times * collective.received * (not collective.beside)
        flow.bytes += times * collective.received * SIZES[collective.dtype]
    return by_purpose
