"""What a run's files hold that reports use, as pydantic checks it; keys that nothing here uses may be anything."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, Field

from fp8ref.errors import ConfigError
from fp8ref.formats import FLOAT32
from fp8ref.recipe import OPERANDS
from fp8ref.train import log

# Beyond float32, as norms summed in float64 are, and within what sums of squares stay finite of
Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e100, le=1e100)]
Size = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e100)]
Magnitude = Annotated[float, Field(allow_inf_nan=False, ge=0, le=FLOAT32.max)]
Whole = Annotated[int, Field(ge=0, le=2**53)]
Count = Annotated[int, Field(ge=1, le=2**53)]
GEMM_OPERANDS = tuple(f"{gemm}/{role}" for gemm, roles in OPERANDS.items() for role in roles)


def _operand(name: str) -> str:
    layer, *rest = name.split("/", 1)
    if not layer or rest[:1] not in [[known] for known in GEMM_OPERANDS]:
        raise ValueError(f"an operand is <layer>/ and one of {', '.join(GEMM_OPERANDS)}")
    return name


@dataclass
class Metrics:
    """A line of metrics.jsonl; what may be left out has some value here, which nobody reads."""

    step: Whole
    loss: Number
    grad_norm: Size = 0
    tokens_per_second: Size = 0
    val_loss: Number = 0


@dataclass
class Measures:
    """What a line of statistics.jsonl has of one operand; null where it was not finite."""

    amax: Magnitude | None = None
    underflow_rate: Size | None = None
    saturation_rate: Size | None = None
    non_finite: Whole = 0
    sqnr: Number | None = None


@dataclass
class Statistics:
    """A line of statistics.jsonl."""

    step: Whole
    statistics: dict[Annotated[str, AfterValidator(_operand)], Measures]


@dataclass
class Seed:
    """A section's seed."""

    seed: int


@dataclass
class RunKeys(Seed):
    """Of section run: its seed, and how many steps it was to have."""

    steps: Count


@dataclass
class DataKeys(Seed):
    """Of section data: its seed, and the size of a batch in sequences and tokens."""

    batch_size: Count
    sequence_length: Count


@dataclass
class NumericsKeys:
    """Of section numerics."""

    recipe: str


@dataclass
class StatisticsKeys:
    """Of section statistics: steps between records, 0 for none."""

    every: Whole = 0


@dataclass
class Sections:
    """Of a config what a report uses; of model and optimizer it compares all."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    data: DataKeys
    numerics: NumericsKeys
    run: RunKeys
    statistics: StatisticsKeys = field(default_factory=StatisticsKeys)


@dataclass
class Linear:
    """What became of a linear: shape is [N, K]."""

    path: str
    shape: list[int]
    recipe: str
    fp8: bool
    reason: str


@dataclass
class Gemm:
    """A GEMM that the proof saw: ``gemm`` is <layer>/<which>, a and b are its operands' types."""

    gemm: str
    a: str
    b: str
    fp8: bool
    accumulate: str | None


@dataclass
class Simulated:
    """A GEMM that the proof saw under simulated hardware, by the name of its plan."""

    gemm: str
    a: str
    b: str
    accumulate: str
    plan: str


@dataclass
class Proof:
    """What a step really ran, and what was planned and is not there; gathers are counted by type."""

    read_from: str
    gemms: list[Gemm]
    missing: list[str] = field(default_factory=list)
    gathers: dict[str, int] = field(default_factory=dict)
    on_dequantised_operands: list[str] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)
    simulated: list[Simulated] = field(default_factory=list)


@dataclass
class Memory:
    """The most memory in use, and what of."""

    peak_bytes: Whole
    of: str


@dataclass
class Manifest:
    """manifest.json."""

    fp8ref: str
    status: str
    backend: str
    device: str
    versions: dict[str, str]
    config: Sections
    data: dict[str, Any]
    linears: list[Linear]
    proof: Proof | None = None
    memory: Memory | None = None
    error: str = ""


for _kind in (
    Metrics,
    Measures,
    Statistics,
    Seed,
    RunKeys,
    DataKeys,
    NumericsKeys,
    StatisticsKeys,
    Sections,
    Linear,
    Gemm,
    Simulated,
    Proof,
    Memory,
    Manifest,
):
    _kind.__pydantic_config__ = pydantic.ConfigDict(strict=True, extra="ignore")  # type: ignore[union-attr]
_MANIFEST, _METRICS, _STATISTICS = (pydantic.TypeAdapter(kind) for kind in (Manifest, Metrics, Statistics))


def manifest(run: Path) -> dict:
    """manifest.json.

    Raises:   ConfigError: no directory, no such file, or one that no run leaves.
    """
    if not run.is_dir():
        raise ConfigError(f"{run} is no directory. Name a run, as fp8ref train --run.out wrote it.")
    found = log.read_manifest(run)
    _check(_MANIFEST, json.dumps(found, ensure_ascii=False), f"{run / 'manifest.json'}", f"{run} is no intact run. Leave it out.")
    return found


def metrics(run: Path) -> list[dict]:
    """The lines of metrics.jsonl, in the order of their steps; none of a file that is not there.

    Raises:   ConfigError: a line that is no JSON object, lacks a step or loss, has a value of another kind, or a step out of order.
    """
    return list(_lines(run / log.METRICS, _METRICS))


def statistics(run: Path) -> list[dict]:
    """The same of statistics.jsonl, whose lines have a step and statistics."""
    return list(_lines(run / log.STATISTICS, _STATISTICS))


def _lines(path: Path, kind: pydantic.TypeAdapter) -> Iterator[dict]:
    """A torn last line is left out."""
    if not path.exists():
        return
    remedy = f"Mend it, or leave {path.parent} out."
    try:
        *whole, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}). {remedy}") from error
    before = -1
    for number, text in enumerate(whole, 1):
        where = f"{path}, line {number},"
        _check(kind, text, where, remedy)
        line = json.loads(text)
        if line["step"] <= before:
            raise ConfigError(f"{where} has step {line['step']} after step {before}; every step is there once, in their order. {remedy}")
        before = line["step"]
        yield line


def _check(kind: pydantic.TypeAdapter, text: str, where: str, remedy: str) -> None:
    try:
        kind.validate_json(text.encode(errors="replace"))  # half a surrogate pair, as names of files may hold, is text too
    except pydantic.ValidationError as error:
        raise ConfigError(f"{where} {_problem(error.errors()[0])}. {remedy}") from error


def _problem(error) -> str:
    """What pydantic found, in a few words."""
    dotted = ".".join(str(part) for part in error["loc"] if part != "[key]")
    if not dotted:
        return "is not a JSON object"
    if error["type"] == "missing":
        return f"has no {dotted}"
    if error["type"] == "value_error":
        return f"has {dotted}: {error['ctx']['error']}"
    got = json.dumps(error["input"])
    return f"has {dotted} = {got if len(got) <= 60 else got[:57] + '...'}: {error['msg'].replace('Input', 'it', 1)}"
