"""Named checks of compared values, and the report that collects them."""

import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fp8ref.conformance.kit import arrays
from fp8ref.formats import Format
from fp8ref.shared.result import Result
from fp8ref.sim.quantize import cast

if TYPE_CHECKING:
    from rich.console import Console

WHOLE_MODEL = ("weights", "logits", "loss", "grad_norm", "model")
"""First parts of check names that are no layer's: they compare the whole model."""


@dataclass(kw_only=True)
class Check:
    """How many elements were compared, how many were equal, and the worst difference.

    name      "<layer>/<role or gemm>/<codes|scale|value>/<backend>".
    worst     in the units of the function that compared: codes, ulps or multiples of a bound.
    bound     of ``worst``; 0 requires equal bits.
    """

    name: str
    compared: int = 0
    equal: int = 0
    worst: float = 0.0
    bound: float = 0.0
    detail: str = ""  # the first difference, for a person

    @property
    def ok(self) -> bool:
        """Whether the check holds; it does not if nothing was compared."""
        return self.compared > 0 and (
            self.equal == self.compared if self.bound == 0 else self.worst <= self.bound
        )

    def fail(self, message: str) -> None:
        """Fail by a difference that has no elements to count, such as another shape."""
        self.compared += 1
        self.worst = sys.float_info.max
        self.detail = self.detail or f"{self.name}: {message}"

    def add(self, equal: np.ndarray, distance: np.ndarray, describe) -> None:
        """Count elements; ``describe(index)`` says in words what the first beyond the bound is."""
        equal, distance = np.atleast_1d(equal), np.atleast_1d(distance)
        self.compared += equal.size
        self.equal += int(equal.sum())
        # JSON has no infinity
        self.worst = max(self.worst, min(float(distance.max(initial=0)), sys.float_info.max))
        broken = ~equal & ((distance > self.bound) | (self.bound == 0))
        if broken.any() and not self.detail:
            index = tuple(int(i) for i in np.argwhere(broken)[0])
            self.detail = (
                f"{self.name}: {int(broken.sum())} of {equal.size} differ, first at "
                f"{list(index)}: {describe(index)}"
            )


@dataclass
class Report(Result):
    """All checks of one run, by name."""

    checks: dict[str, Check] = field(default_factory=dict)

    def check(self, name: str, *, bound: float = 0.0) -> Check:
        """The check of that name, created on first use; comparisons under one name add up."""
        return self.checks.setdefault(name, Check(name=name, bound=bound))

    @property
    def ok(self) -> bool:
        """Whether there are checks and all of them hold."""
        return bool(self.checks) and all(check.ok for check in self.checks.values())

    @property
    def failures(self) -> list[Check]:
        """The checks that do not hold."""
        return [check for check in self.checks.values() if not check.ok]

    def to_dict(self) -> dict:
        """What --json writes: ok, and every check's name, compared, equal, worst, bound and ok."""
        checks = [
            {k: v for k, v in asdict(c).items() if k != "detail" or v} | {"ok": c.ok}
            for c in self.checks.values()
        ]
        return {"ok": self.ok, "checks": checks}

    def table(self) -> list[Check]:
        """The checks with their layers added up, named "layers/<role>/<kind>/<backend>"."""
        rows: dict[str, Check] = {}
        for check in self.checks.values():
            layer, middle, *rest = check.name.split("/")
            if layer.startswith("synthetic."):
                layer, middle = "synthetic", "cast" if layer == "synthetic.cast" else "tensors"
            elif layer not in WHOLE_MODEL:
                layer = "layers"
            name = "/".join([layer, middle, *rest])
            row = rows.setdefault(name, Check(name=name, bound=check.bound))
            row.compared += check.compared
            row.equal += check.equal
            row.worst = max(row.worst, check.worst)
        return list(rows.values())

    def render(self, console: "Console") -> None:
        """The table, then the first difference of every check that failed."""
        from rich.table import Table

        table = Table("what", "backend", "compared", "equal", "worst", "bound", "")
        for row in self.table():
            name, backend = row.name.rsplit("/", 1)
            numbers = f"{row.compared:,}", f"{row.equal:,}", f"{row.worst:.3g}", f"{row.bound:.3g}"
            table.add_row(name, backend, *numbers, "ok" if row.ok else "FAILS")
        console.print(table)
        for check in self.failures:
            detail = check.detail or f"{check.name}: nothing was compared"
            console.print(detail, markup=False, soft_wrap=True)
        console.print(f"{len(self.checks)} checks, {len(self.failures)} failed")


def compare_codes(
    check: Check, codes_by_backend: dict[str, np.ndarray], backend: str, fmt: Format, hp: np.ndarray
) -> None:
    """Compare codes of a backend with those of "sim". A difference is described by all codes found
    and the input's bits; worst: in codes.
    """
    canonical = {
        who: cast.canonical_nans(np.asarray(codes), fmt) for who, codes in codes_by_backend.items()
    }
    sim, mine = canonical["sim"], canonical[backend]
    if sim.shape != mine.shape:
        return check.fail(f"codes of shape {sim.shape} in sim, {mine.shape} in {backend}")
    distance = np.abs(_ordered(sim, fmt) - _ordered(mine, fmt))

    def describe(index):
        codes = ", ".join(f"{who} 0x{codes[index]:02X}" for who, codes in canonical.items())
        return (
            f"{codes}; input {hp[index]:.9g} (float32 bits "
            f"0x{np.float32(hp[index]).view(np.uint32):08X})"
        )

    check.add(sim == mine, distance, describe)


def compare_scales(check: Check, scales: dict[str, np.ndarray], backend: str) -> None:
    """Compare scales of a backend with those of "sim" bit for bit, NaNs equal; worst: in ulps."""
    compare_bits(check, scales[backend], scales["sim"], names=(backend, "sim"), quantity="scales")


def compare_bits(
    check: Check,
    value: np.ndarray,
    reference: np.ndarray,
    *,
    names: tuple[str, str],
    quantity: str = "values",
) -> None:
    """Compare float32 values with a reference bit for bit, all NaNs equal; worst: in ulps."""
    if reference.shape != value.shape:
        return check.fail(
            f"{quantity} of shape {reference.shape} in {names[1]}, {value.shape} in {names[0]}"
        )
    expected, mine = (np.atleast_1d(np.asarray(v, np.float32)) for v in (reference, value))
    equal = arrays.same_bits(expected, mine)
    distance = np.abs(expected.view(np.int32).astype(np.int64) - mine.view(np.int32))

    def describe(index):
        both = ((names[1], expected[index]), (names[0], mine[index]))
        return ", ".join(f"{who} {v!r} (0x{v.view(np.uint32):08X})" for who, v in both)

    check.add(equal, np.where(equal, 0, distance), describe)


def compare_values(check: Check, value, reference, bound, *, names: tuple[str, str]) -> None:
    """Compare values within an elementwise bound; worst: the largest difference in its units."""
    value, reference, bound = (
        np.asarray(v, np.float64) for v in np.broadcast_arrays(value, reference, bound)
    )
    equal = arrays.equal(value, reference)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(equal, 0, np.abs(value - reference) / bound)
    ratio = np.where(np.isnan(ratio), np.inf, ratio)  # NaN on one side only is beyond any bound

    def describe(index):
        mine, other, most = (np.atleast_1d(v)[index] for v in (value, reference, bound))
        return f"{names[0]} {mine!r}, {names[1]} {other!r}, bound {most:.3g}"

    check.add(equal, ratio, describe)


def _ordered(codes: np.ndarray, fmt: Format) -> np.ndarray:
    """Codes as integers that increase with the value."""
    # codes are sign and magnitude: negated magnitudes put both zeros at 0 and neighbors 1 apart
    magnitude = (codes & ~np.uint8(fmt.sign_bit)).astype(int)
    return np.where(codes & fmt.sign_bit, -magnitude, magnitude)
