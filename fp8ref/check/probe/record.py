"""Recordings: what a GEMM or an instruction gave, bit for bit, with all that is needed to compute it again without the hardware.

A recording is NAME.json beside NAME.npz. The one says what was asked of what and what was found; the other holds operands and results.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fp8ref
from fp8ref.check.probe import plans
from fp8ref.check.probe.identify import Identified
from fp8ref.check.probe.instruction import SIDE, Instruction, random_operands
from fp8ref.check.probe.subject import OUT_DTYPES, operand
from fp8ref.check.probe.wgmma import Multiply
from fp8ref.formats import FP8_FORMATS
from fp8ref.sim import gemm
from fp8ref.sim.accumulate import Accumulation

ROWS = 24  # of a and of b that a recording of a GEMM keeps: at K = 8192 some 400 KB
FORMAT = "fp8ref recording 1"


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """How many results of a recording were computed again, and how many have the recorded bits."""

    path: Path
    compared: int
    equal: int

    @property
    def ok(self) -> bool:
        return 0 < self.compared == self.equal


def of_gemm(found: Identified, folder: Path, *, seed: int = 1) -> Path:
    """Write what a GEMM gives for the random operands it was identified by, under new random scales; some of its rows and columns."""
    bench, rng = found.bench, np.random.default_rng(seed)
    rowwise = bench.subject.granularity == "rowwise"
    a, b = (
        operand(codes, fmt, bench.subject.granularity, 2.0 ** rng.uniform(-1, 1, (len(codes), 1) if rowwise else ()))
        for codes, fmt in ((found.drawn.a, bench.fmt_a), (found.drawn.b, bench.fmt_b))
    )
    out, _ = bench.subject.multiply(a, b)
    kept = {name: np.sort(rng.permutation(count)[:ROWS]) for name, count in (("rows", bench.m), ("columns", bench.n))}
    arrays = {
        **kept,
        "a": a.codes[kept["rows"]],
        "b": b.codes[kept["columns"]],
        "scale_a": a.scale[kept["rows"]] if rowwise else a.scale,
        "scale_b": b.scale[kept["columns"]] if rowwise else b.scale,
        "out": out[np.ix_(kept["rows"], kept["columns"])].view(np.uint32),
    }
    words = [bench.subject.name, *(bench.subject.about[key] for key in ("accumulate", "out_dtype") if key in bench.subject.about)]
    words += [f"{bench.m}x{bench.n}x{bench.k}", bench.fmt_a.name, bench.fmt_b.name]
    return _write(folder, "-".join(words), {"kind": "gemm", **found.to_dict()}, arrays)


def of_instruction(found: Instruction, multiply: Multiply, folder: Path, *, count: int = 4000, seed: int = 1) -> Path:
    """Write the instructions that were asked, and ``count`` random ones."""
    arrays = {key: np.concatenate([getattr(asked, key) for asked in found.asked]) for key in ("a", "b", "c", "d")}
    for i in range(-(-count // SIDE)):
        a, b, c = random_operands(found.fmt_a, found.fmt_b, seed + i)
        d = np.diagonal(multiply(a, b, c, found.fmt_a, found.fmt_b))
        arrays = {key: np.concatenate([arrays[key], value]) for key, value in (("a", a), ("b", b), ("c", np.diagonal(c)), ("d", d))}
    arrays |= {key: arrays[key].view(np.uint32) for key in ("c", "d")}
    return _write(folder, f"{found.name}-{found.fmt_a}-{found.fmt_b}", {"kind": "instruction", **found.to_dict()}, arrays)


def replay(path: Path) -> Replayed:
    """Compute a recording, NAME.json, again by the plan that it states.

    Raises:   ValueError: not a recording, or of a GEMM whose plan could not be told.
    """
    said, arrays = _read(path)
    fmt_a, fmt_b = (FP8_FORMATS[name] for name in said["formats"])
    evidence = f"{said['subject']} on {said['about'].get('device', 'a device')}"
    accumulate = plans.accumulation(said["plan"] or {}, evidence=evidence)
    if said["kind"] == "instruction":
        assert isinstance(accumulate, Accumulation)
        recorded, c = arrays["d"], arrays["c"].view(np.float32)
        each = (
            gemm.mma(x[None], y[None], z[None, None], fmt_a=fmt_a, fmt_b=fmt_b, unit=accumulate.unit)[0, 0]
            for x, y, z in zip(arrays["a"], arrays["b"], c, strict=True)
        )
        computed = np.array(list(each), np.float32)
    else:
        recorded = arrays["out"]
        granularity = said["granularity"]
        a, b = (operand(arrays[x], fmt, granularity, arrays[f"scale_{x}"]) for x, fmt in (("a", fmt_a), ("b", fmt_b)))
        out_dtype = OUT_DTYPES[said["plan"]["out_dtype"]]
        computed = gemm.matmul(a, b, accumulate=accumulate, epilogue=plans.epilogue(said["plan"]), out_dtype=out_dtype)
    return Replayed(path=path, compared=recorded.size, equal=int((computed.view(np.uint32) == recorded).sum()))


def _write(folder: Path, name: str, said: dict[str, Any], arrays: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in name)
    np.savez_compressed(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"format": FORMAT, "fp8ref": fp8ref.__version__, **said}, indent=1) + "\n", encoding="utf-8")
    return path


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        if said["format"] != FORMAT:
            raise ValueError(f"its format is {said['format']!r}")
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as file:
            arrays = dict(file)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no recording of a probe ({error}); it is {FORMAT!r}, with an .npz file beside it. Record it again."
        ) from error
    return said, arrays
