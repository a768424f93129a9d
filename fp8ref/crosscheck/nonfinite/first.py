"""The first value that is not finite: where it is, and what made it so."""

import math
from dataclasses import asdict, dataclass

import numpy as np

from fp8ref.conformance.compare import Check
from fp8ref.sim.llama import Site


@dataclass(frozen=True, kw_only=True)
class First:
    """layer: full name of a module; role: what of it; element: index; found_by: whose value it is, "sim" or a backend's."""

    layer: str
    role: str
    element: tuple[int, ...]
    value: float
    why: str
    found_by: str

    def to_dict(self) -> dict:
        """As JSON, which has no infinity."""
        return asdict(self) | {"element": list(self.element), "value": str(self.value)}

    def __str__(self) -> str:
        at = f", element {list(self.element)}" if self.element else ""
        return f"{self.layer}, {self.role}{at}: {self.value}"


def element(value: np.ndarray) -> tuple[int, ...] | None:
    """The index of the first value that is not finite, in the order of rows."""
    bad = np.flatnonzero(~np.isfinite(value))
    return tuple(int(i) for i in np.unravel_index(bad[0], np.shape(value))) if bad.size else None


def look(site: Site, check: Check, *, by: str, why: str = "") -> First | None:
    """Count a site's finite values in check; the first that is not, if any. why: instead of what its parts say."""
    finite = np.isfinite(site.value)
    check.compared += finite.size
    check.equal += int(finite.sum())
    index = element(site.value)
    if index is None:
        return None
    value = float(site.value[index])
    found = First(layer=site.module, role=site.role, element=index, value=value, why=why or explain(site, index), found_by=by)
    check.detail = (
        check.detail or f"{check.name}: {finite.size - int(finite.sum())} of {finite.size} are not finite, first {found}; {found.why}"
    )
    return found


def explain(site: Site, index: tuple[int, ...]) -> str:
    """What made a value not finite, from finite parts, or which of its parts is not."""
    if site.factors:
        return _of_product(site, index)
    parts = {name: float(np.broadcast_to(part, site.value.shape)[index]) for name, part in site.parts.items()}
    told = ", ".join(f"{name} {part:.9g}" for name, part in parts.items())
    if not told:
        return "no part of it is known"
    if all(map(math.isfinite, parts.values())):
        return f"{told}: {_beyond(site)}"
    return told if site.role != "weight" else f"{told}: the steps before left it so"


def _beyond(site: Site) -> str:
    return f"beyond the largest {site.fmt}, {site.fmt.max:.4g}"


def _of_product(site: Site, index: tuple[int, ...]) -> str:
    (first, a), (second, b) = site.factors.items()
    row, column = a[index[:-1]], b[(*(index[:-2] if b.ndim == len(index) else ()), index[-1])]
    terms = row.astype(np.float64) * column
    for name, line in ((first, row), (second, column)):
        if not np.isfinite(line).all():
            [k] = element(line) or (0,)
            return f"its factor {name} is {line[k]:.9g} at k = {k} of {len(line)}"
    k = int(np.abs(terms).argmax())
    return (
        f"a sum of {len(terms)} products, {terms.sum():.4g} in float64, {_beyond(site)}; the largest of them is "
        f"{first} {row[k]:.9g} times {second} {column[k]:.9g}, at k = {k}"
    )
