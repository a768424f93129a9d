"""The claims by name: the tables of claims.toml."""

from collections.abc import Callable

from fp8ref.findings.claim import Claim, Sample, Trial
from fp8ref.shared import package_data
from fp8ref.shared.errors import require

CLAIMS = {
    name: Claim(name=name, **table)
    for name, table in package_data.tables(__file__, "claims").items()
}
"""{name: the claim}, in the order of the page."""


def measure_of(claim: Claim) -> Callable[[Trial], Sample]:
    """The function that has the name of a claim; of one with arms, what trains them."""
    # frameworks are imported when something is measured
    from fp8ref.findings import casts, proxies, sums, training

    if claim.arms:
        return training.loss_of_arms
    modules = casts, sums, training, proxies
    rooms = [room for room in modules if hasattr(room, claim.name)]
    text = f"a claim of your own needs the function that measures it; got none for {claim.name}."
    require(claim.name in CLAIMS and len(rooms) == 1, f"{text} Pass function=.")
    return getattr(rooms[0], claim.name)
