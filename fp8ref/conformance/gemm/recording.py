"""Record a GEMM's results bit for bit, and verify recordings without the hardware.

A recording is NAME.json, which holds the GEMM, the formats and the identified plan, and NAME.npz,
which holds operands and results.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import fp8ref
from fp8ref.conformance.gemm import epilogues, instruction, plans
from fp8ref.conformance.gemm.identify import Identified
from fp8ref.conformance.gemm.scaled_gemm import OUT_DTYPES, operand, rows_of
from fp8ref.conformance.gemm.wgmma import Multiply
from fp8ref.formats import FP8_FORMATS
from fp8ref.shared import files
from fp8ref.shared.errors import require
from fp8ref.shared.result import Result
from fp8ref.sim.gemm import gemm
from fp8ref.sim.gemm.accumulate import Accumulation

if TYPE_CHECKING:
    from rich.console import Console

ROWS = 24  # most rows of a and of b that a recording keeps: about 400 KB at K = 8192
FORMAT = "fp8ref recording 1"  # the name and version of the format of recordings


@dataclass(frozen=True, kw_only=True)
class Verified:
    """One verified recording.

    compared   results that were computed again; equal: those with the recorded bits.
    """

    path: Path
    compared: int
    equal: int

    @property
    def ok(self) -> bool:
        """True if there are results and all have the recorded bits."""
        return 0 < self.compared == self.equal


@dataclass(frozen=True)
class Recordings(Result):
    """Several verified recordings; damaged: why others cannot be read."""

    verified: Sequence[Verified]
    damaged: Sequence[str]

    @property
    def ok(self) -> bool:
        """True if none is damaged and all have their recorded bits."""
        return not self.damaged and all(recording.ok for recording in self.verified)

    def to_dict(self) -> dict[str, Any]:
        """As --json writes it."""
        recordings = [asdict(one) | {"path": str(one.path)} for one in self.verified]
        return {"ok": self.ok, "recordings": recordings, "damaged": list(self.damaged)}

    def render(self, console: "Console") -> None:
        """Print a line for each that was verified."""
        for one in self.verified:
            console.out(
                f"{one.path}: {one.equal:,} of {one.compared:,} recorded results have the "
                "simulator's bits",
                highlight=False,
            )


def verify_all(paths: Iterable[Path]) -> Recordings:
    """Verify each recording; a damaged one does not stop the others."""
    verified, damaged = [], []
    for path in paths:
        try:
            verified.append(verify(path))
        except ValueError as error:
            damaged.append(str(error))
    return Recordings(verified, damaged)


def record_gemm(identified: Identified, folder: Path) -> Path:
    """Record some rows and columns of a GEMM.

    Its operands are those that identified it, under new random scales.
    """
    bench, rng = identified.bench, np.random.default_rng(1)
    a, b, out = epilogues.under_scales(bench, [identified.drawn.a, identified.drawn.b], rng)
    rows, columns = (np.sort(rng.permutation(count)[:ROWS]) for count in out.shape)
    a, b = rows_of(a, rows), rows_of(b, columns)
    arrays = {"rows": bench.sampled[0][rows], "columns": bench.sampled[1][columns]}
    arrays |= {"a": a.codes, "b": b.codes, "scale_a": a.scale, "scale_b": b.scale}
    arrays["out"] = out[np.ix_(rows, columns)].view(np.uint32)
    about = bench.gemm.about
    words = [about[key] for key in ("accumulate", "out_dtype") if key in about]
    words += [bench.gemm.granularity, f"{bench.m}x{bench.n}x{bench.k}"]
    name = "-".join([bench.gemm.name, *words, bench.fmt_a.name, bench.fmt_b.name])
    return _write(folder, name, {"kind": "gemm", **identified.to_dict()}, arrays)


def record_instruction(
    identified: instruction.Instruction, multiply: Multiply, folder: Path, *, count: int = 4000
) -> Path:
    """Record the groups of instructions that were run, and ``count`` random ones."""
    fmt_a, fmt_b = identified.fmt_a, identified.fmt_b
    parts = {key: [getattr(group, key) for group in identified.groups] for key in "abcd"}
    for i in range(-(-count // instruction.SIDE)):
        a, b, c = instruction.random_operands(fmt_a, fmt_b, 1 + i)
        drawn = (a, b, np.diagonal(c), np.diagonal(multiply(a, b, c, fmt_a, fmt_b)))
        for key, part in zip("abcd", drawn, strict=True):
            parts[key].append(part)
    arrays = {key: np.concatenate(own) for key, own in parts.items()}
    arrays |= {key: arrays[key].view(np.uint32) for key in "cd"}
    name, plan = f"{identified.name}-{fmt_a}-{fmt_b}", identified.to_dict()
    return _write(folder, name, {"kind": "instruction", **plan}, arrays)


def verify(path: Path) -> Verified:
    """Compute a recording, NAME.json, again by its plan.

    Raises:   ValueError: not a recording, a damaged one, or one without a whole plan.
    """
    try:
        metadata, arrays = _read(path)
        compute = _instruction if metadata["kind"] == "instruction" else _gemm
        computed, recorded = compute(metadata, arrays)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read as a recording of a probe ({error}). Name the .json, with "
            "its .npz next to it."
        ) from error
    except Exception as error:  # damaged archives and arrays raise all kinds of errors
        invalid = isinstance(error, ValueError)
        why = error if invalid else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is not a complete recording of a probe ({why}). A recording is a "
            f"{FORMAT!r} file with an .npz file next to it. Record it again."
        ) from error
    equal = int((computed.view(np.uint32) == recorded).sum())
    return Verified(path=path, compared=recorded.size, equal=equal)


def _instruction(
    metadata: dict[str, Any], arrays: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Computed and recorded results [Q], the latter as bits."""
    fmt_a, fmt_b = (FP8_FORMATS[name] for name in metadata["formats"])
    accumulate = _accumulation(metadata)
    if not isinstance(accumulate, Accumulation):
        raise ValueError("an instruction needs the plan of a tensor core")
    a, b, c, recorded = (arrays[key] for key in ("a", "b", "c", "d"))
    if not (len(a) == len(b) == len(c) and recorded.shape == (len(a),)):
        raise ValueError("its arrays differ in length")
    computed = instruction.results(a, b, c.view(np.float32), accumulate.unit, fmt_a, fmt_b)
    return computed.astype(np.float32), recorded


def _gemm(metadata: dict[str, Any], arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Computed and recorded results [M, N], the latter as bits."""
    if metadata["kind"] != "gemm":
        raise ValueError(f"its kind is {metadata['kind']!r}, not gemm or instruction")
    fmts = (FP8_FORMATS[name] for name in metadata["formats"])
    a, b = (
        operand(arrays[x], fmt, metadata["granularity"], arrays[f"scale_{x}"])
        for x, fmt in zip("ab", fmts, strict=True)
    )
    recorded = arrays["out"]
    if recorded.shape != (len(a.codes), len(b.codes)):
        raise ValueError(
            f"its results are {list(recorded.shape)}, of operands {list(a.codes.shape)} and "
            f"{list(b.codes.shape)}"
        )
    computed = gemm.matmul(
        a,
        b,
        accumulate=_accumulation(metadata),
        epilogue=plans.epilogue(metadata["plan"]),
        out_dtype=OUT_DTYPES[metadata["plan"]["out_dtype"]],
    )
    return computed, recorded


def _accumulation(metadata: dict[str, Any]) -> str | Accumulation:
    return plans.accumulation(
        metadata["plan"] or {},
        evidence=f"{metadata['subject']} on {metadata['about'].get('device', 'a device')}",
    )


def _write(
    folder: Path, name: str, metadata: dict[str, Any], arrays: dict[str, np.ndarray]
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in name)
    files.write_arrays(folder / f"{name}.npz", arrays)
    path = folder / f"{name}.json"
    metadata = {"format": FORMAT, "fp8ref": fp8ref.__version__, **metadata}
    path.write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
    return path


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    metadata = files.read_object(path)
    require(metadata["format"] == FORMAT, f"its format is {metadata['format']!r}")
    archive = path.with_suffix(".npz")
    require(archive.exists(), f"{archive.name} is missing")
    return metadata, files.read_arrays(archive)
