"""The first non-finite value of a step and what caused it, and the report of a rerun.

SEMANTICS K-9.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8ref.conformance.compare import Check, Report
from fp8ref.result import Result
from fp8ref.sim.llama import Site
from fp8ref.train.failed_step import Failure

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """A value that is not finite.

    layer     full name of a module; role: which array of it.
    element   its index in that array.
    found_by  "sim" or the backend that computed it.
    """

    layer: str
    role: str
    element: tuple[int, ...]
    value: float
    why: str
    found_by: str

    def to_dict(self) -> dict:
        """As JSON, with the value as text: JSON has no infinity."""
        return asdict(self) | {"element": list(self.element), "value": str(self.value)}

    def __str__(self) -> str:
        at = f", element {list(self.element)}" if self.element else ""
        return f"{self.layer}, {self.role}{at}: {self.value}"


def first_index(value: np.ndarray) -> tuple[int, ...] | None:
    """The index of the first non-finite value in row-major order, or None."""
    bad = np.flatnonzero(~np.isfinite(value))
    return tuple(int(i) for i in np.unravel_index(bad[0], np.shape(value))) if bad.size else None


def check_site(site: Site, check: Check, *, by: str, why: str = "") -> NonFinite | None:
    """Count a site's finite values in check; return the first that is not finite, or None.

    why   the cause, if the site's parts do not show it.
    """
    finite = np.isfinite(site.value)
    check.compared += finite.size
    check.equal += int(finite.sum())
    index = first_index(site.value)
    if index is None:
        return None
    value = float(site.value[index])
    found = NonFinite(layer=site.module, role=site.role, element=index, value=value, why=why or cause(site, index), found_by=by)
    check.detail = (
        check.detail or f"{check.name}: {finite.size - int(finite.sum())} of {finite.size} are not finite, first {found}; {found.why}"
    )
    return found


def cause(site: Site, index: tuple[int, ...]) -> str:
    """Why a value is not finite: an overflow of finite parts, or a part that is not finite."""
    if site.factors:
        return _of_product(site, index)
    parts = {name: float(np.broadcast_to(part, site.value.shape)[index]) for name, part in site.parts.items()}
    shown = ", ".join(f"{name} {part:.9g}" for name, part in parts.items())
    if not shown:
        return "no part of it is known"
    if all(map(math.isfinite, parts.values())):
        return f"{shown}: {_overflow(site)}"
    return shown if site.role != "weight" else f"{shown}: an earlier step made it so"


def _overflow(site: Site) -> str:
    return f"beyond the largest {site.fmt}, {site.fmt.max:.4g}"


def _of_product(site: Site, index: tuple[int, ...]) -> str:
    (first, a), (second, b) = site.factors.items()
    row, column = a[index[:-1]], b[(*(index[:-2] if b.ndim == len(index) else ()), index[-1])]
    terms = row.astype(np.float64) * column  # in float64 the sum does not overflow: its size shows the cause
    for name, line in ((first, row), (second, column)):
        if not np.isfinite(line).all():
            [k] = first_index(line) or (0,)
            return f"its factor {name} is {line[k]:.9g} at k = {k} of {len(line)}"
    k = int(np.abs(terms).argmax())
    return (
        f"a sum of {len(terms)} products, {terms.sum():.4g} in float64, {_overflow(site)}; the largest of them is "
        f"{first} {row[k]:.9g} times {second} {column[k]:.9g}, at k = {k}"
    )


@dataclass(frozen=True, kw_only=True)
class RerunReport(Result):
    """What the rerun of a failed step found.

    metrics   loss and grad_norm of the rerun.
    operands  how many operands had their codes and scales compared.
    """

    path: Path
    failed: Failure
    metrics: Mapping[str, float]
    first: NonFinite | None
    report: Report
    operands: int

    @property
    def reproduced(self) -> bool:
        """True if the step fails on one device too."""
        return not all(map(math.isfinite, self.metrics.values()))

    @property
    def faithful(self) -> bool:
        """True if the backend's codes and scales are the simulator's.

        Then the numbers diverged, and the implementation is right.
        """
        return all(check.ok for name, check in self.report.checks.items() if "/finite/" not in name)

    @property
    def ok(self) -> bool:
        """True if nothing was found."""
        return self.first is None and not self.reproduced and self.report.ok

    def to_dict(self) -> dict[str, Any]:
        """The report and the first non-finite value, as --json writes them."""
        about: dict[str, Any] = {"first": self.first and self.first.to_dict(), "reproduced": self.reproduced, "faithful": self.faithful}
        about |= {
            "backend": self.failed.backend,
            "metrics": {k: str(v) for k, v in self.metrics.items()},
            "failed": dict(self.failed.metrics),
        }
        return self.report.to_dict() | {"ok": self.ok} | about

    def render(self, console: "Console") -> None:
        """Print how the step failed, whether it failed again, and the first non-finite value."""

        def say(text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        config, (rows, length) = self.failed.config, self.failed.tokens.shape
        devices, then = config.parallel.devices, self.failed.metrics
        say(f"{self.path}: step {then['step']}, {self.failed.backend}, recipe {config.numerics.recipe}")
        say(f"as it failed, on {devices} device{'s' * (devices > 1)}: loss {then['loss']}, gradient norm {then['grad_norm']}")
        say(
            f"on one device, with all {rows} sequences of {length - 1} tokens: loss {self.metrics['loss']}, gradient norm {self.metrics['grad_norm']}"
        )
        if config.data.microbatches > 1:
            say(
                "in the run, scales covered each of data.microbatches = "
                f"{config.data.microbatches} parts of the batch; here they cover the whole batch"
            )
        if devices > 1 and config.parallel.amax_scope == "local":
            say(
                "in the run, scales of input and grad_output covered each device's part of the "
                "batch (parallel.amax_scope); here they cover the whole batch"
            )
        if self.first:
            say(f"first not finite, by {self._who(self.first.found_by)}: {self.first}\n  {self.first.why}")
            if not self.reproduced:
                say(f"{self.failed.backend}'s own loss and gradient are finite on one device.")
        elif self.reproduced:
            say("the step fails again, but every value checked is finite.")
        else:
            say("not reproduced: every value is finite on one device. The cause was a fault of another device, or sums in another order.")
        for check in self.report.failures if not self.faithful else []:
            if "/finite/" not in check.name:
                say(check.detail)
        if not self.operands:
            say("no operand is in FP8")
        elif self.faithful:
            verdict = ": the numbers diverged, and the quantization is right" if self.first else ""
            say(f"codes and scales of all {self.operands} FP8 operands are the simulator's{verdict}")
        else:
            say(f"codes or scales of {self.failed.backend} are not the simulator's, as above: a fault of the implementation")

    def _who(self, by: str) -> str:
        return "the simulator" if by == "sim" else by
