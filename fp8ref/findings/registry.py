"""The claims by name: the tables of claims.toml."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType

from fp8ref.findings.claim import Claim, Sample, Trial
from fp8ref.shared import package_data

CLAIMS = {
    name: Claim(name=name, **table)
    for name, table in package_data.tables(__file__, "claims").items()
}
"""{name: the claim}, in the order of the page."""


@functools.cache
def sources() -> Mapping[ModuleType, str]:
    """{each module that measures: its text when it was imported}, also if a file is edited while a
    process measures.
    """
    # frameworks are imported when something is measured
    from fp8ref.findings import casts, proxies, sums, training

    return {room: inspect.getsource(room) for room in (casts, sums, training, proxies)}


def measure_of(claim: Claim) -> Callable[[Trial], Sample]:
    """The function that has the name of a claim; of one with arms, what trains them."""
    modules = sources()
    if claim.arms:
        return next(room.loss_of_arms for room in modules if hasattr(room, "loss_of_arms"))
    return next(getattr(room, claim.name) for room in modules if hasattr(room, claim.name))
