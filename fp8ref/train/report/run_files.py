"""Read a run's manifest.json, metrics.jsonl and statistics.jsonl, validated by pydantic.

Dataclasses declare the keys that reports use. An error names file, line, value and remedy.
"""

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, Field

from fp8ref.formats import FLOAT32
from fp8ref.recipe import OPERANDS
from fp8ref.shared import console, files
from fp8ref.shared.errors import ConfigError, require
from fp8ref.spec.attention import products as attention_products
from fp8ref.train.run import file_checks, log

Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e100, le=1e100)]
"""A loss or another number of either sign, at most 1e100 in magnitude.

Norms are summed in float64 and may exceed float32. Up to 1e100, sums of their squares stay finite.
"""

Size = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e100)]
"""A number from 0 to 1e100, such as a norm or a speed."""

Magnitude = Annotated[float, Field(allow_inf_nan=False, ge=0, le=FLOAT32.max)]
"""A number from 0 to float32's largest, such as an amax."""

Whole = Annotated[int, Field(ge=0, le=2**53)]
"""An integer from 0 to 2^53, which a float64 holds exactly."""

Count = Annotated[int, Field(ge=1, le=2**53)]  # an integer from 1 to 2^53

GEMM_OPERANDS = (
    *(f"{gemm}/{role}" for gemm, roles in OPERANDS.items() for role in roles),
    *(f"{product}/{role}" for product, role in attention_products.RECORDED),
)
"""The operands of a linear's GEMMs and recorded ones of attention's products, ``<gemm>/<role>``."""


SET = "val_loss_"
"""How the key of a validation loss on a set of data.evaluation begins, before the set's name."""


def _name(text: str) -> str:
    if console.one_line(text) != text:
        raise ValueError("a name is one line, without control characters")
    return text


Name = Annotated[str, AfterValidator(_name)]
"""A text that reports put into lines, tables and figures."""


def _operand(name: str) -> str:
    layer, *rest = name.split("/", 1)
    if not layer or rest[:1] not in [[operand] for operand in GEMM_OPERANDS]:
        raise ValueError(f"an operand is <layer>/ and one of {', '.join(GEMM_OPERANDS)}")
    return name


def _set(name: str) -> str:
    text = "a set of data.evaluation is named by letters, digits and underscores"
    require(name.removeprefix(SET).isidentifier(), text)
    return name


@file_checks.record
class Metrics:
    """A line of metrics.jsonl; defaults only mark optional keys."""

    step: Whole
    loss: Number
    grad_norm: Size = 0
    tokens_per_second: Size = 0
    val_loss: Number = 0


@file_checks.record
class Measures:
    """One operand's statistics; null if not finite. count, saturated and lost: of P and dS."""

    amax: Magnitude | None = None
    underflow_rate: Size | None = None
    saturation_rate: Size | None = None
    non_finite: Whole = 0
    sqnr: Number | None = None
    count: Whole = 0
    saturated: Whole = 0
    lost: Whole = 0


@file_checks.record
class States:
    """The health of one parameter's optimizer states, or of all together, in a line of
    statistics.jsonl; null if a figure was not finite."""

    count: Count
    v_lost: Whole
    bounded: Whole
    clipped_m: Whole
    clipped_v: Whole
    stalled_m: Whole
    stalled_v: Whole
    bytes_per_parameter: Size
    root_bias: Number | None = None
    update_error: Size | None = None
    largest_ratio: Size | None = None


@file_checks.record
class Statistics:
    """A line of statistics.jsonl. states: by parameter, "" for all together."""

    step: Whole
    statistics: dict[Annotated[Name, AfterValidator(_operand)], Measures]
    states: dict[Name, States] = field(default_factory=dict)


@file_checks.record
class RunKeys:
    """Keys of section run: seed and number of steps."""

    seed: int
    steps: Count


@file_checks.record
class DataKeys:
    """Keys of section data: seed, and the size of a batch."""

    seed: int
    batch_size: Count
    sequence_length: Count


@file_checks.record
class NumericsKeys:
    """Keys of section numerics."""

    recipe: Name


@file_checks.record
class StatisticsKeys:
    """Section statistics: steps between records; 0: none, None: the first and last step."""

    every: Whole | None = 0


@file_checks.record
class Sections:
    """The config's keys that a report uses. model and optimizer are compared as a whole."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    data: DataKeys
    numerics: NumericsKeys
    run: RunKeys
    statistics: StatisticsKeys = field(default_factory=StatisticsKeys)


@file_checks.record
class Linear:
    """A linear, of weight shape [N, K], and the recipe that was planned for it."""

    path: Name
    shape: list[int]
    recipe: Name
    fp8: bool
    reason: Name


@file_checks.record
class Gemm:
    """A GEMM in the proof. gemm: <layer>/<which>; a, b: dtypes of its operands."""

    gemm: Name
    a: Name
    b: Name
    fp8: bool
    accumulate: Name | None


@file_checks.record
class Simulated:
    """A GEMM in the proof that ran under simulated hardware; plan: its accumulation plan."""

    gemm: str
    a: str
    b: str
    accumulate: str
    plan: str


@file_checks.record
class AttentionProof:
    """The products of attention by a variant in a traced step, each distinct one once; or a
    library's kernels, as ``<layer>: <call>``."""

    variant: str
    gemms: list[Gemm]
    on_dequantised_operands: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)


@file_checks.record
class Proof:
    """The GEMMs of a traced step, and what was planned but missing. gathers: number by dtype;
    emulated: GEMMs of FP4 operands."""

    read_from: str
    gemms: list[Gemm]
    missing: list[str] = field(default_factory=list)
    gathers: dict[str, int] = field(default_factory=dict)
    on_dequantised_operands: list[str] = field(default_factory=list)
    emulated: list[str] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)
    simulated: list[Simulated] = field(default_factory=list)
    attention: AttentionProof | None = None


@file_checks.record
class Planned:
    """What was planned and proven of a recipe of a schedule."""

    linears: list[Linear]
    proof: Proof | None = None


@file_checks.record
class Schedule:
    """The recipes of a schedule. ran: [first step, recipe] of each that ran, in order."""

    ran: list[tuple[Whole, Name]]
    recipes: dict[Name, Planned]


@file_checks.record
class Casts:
    """What cast tensors on a device, by "triton" or "plain", and why."""

    by: Name
    reason: Name


@file_checks.record
class Memory:
    """Peak memory, of the device or the process."""

    peak_bytes: Whole
    of: str


@file_checks.record
class Manifest:
    """manifest.json."""

    fp8ref: str
    status: str
    backend: Name
    device: Name
    versions: dict[Name, Name]
    config: Sections
    data: dict[str, Any]
    linears: list[Linear]
    kernels: dict[Name, Casts] = field(default_factory=dict)
    proof: Proof | None = None
    schedule: Schedule | None = None
    memory: Memory | None = None
    error: str = ""


_MANIFEST, _METRICS, _STATISTICS = (
    pydantic.TypeAdapter(kind) for kind in (Manifest, Metrics, Statistics)
)
_SETS = pydantic.TypeAdapter(
    dict[Annotated[str, AfterValidator(_set)], Number], config=pydantic.ConfigDict(strict=True)
)


def manifest(run: Path) -> dict:
    """The manifest of a run.

    Raises:   ConfigError: no directory; no manifest; one with missing or invalid keys.
    """
    text = f"{run} is not a directory. Name a run, as fp8ref train --run.out wrote it."
    require(run.is_dir(), text, ConfigError)
    manifest = log.read_manifest(run)
    remedy = f"{run} is not an intact run. Leave it out."
    file_checks.check(_MANIFEST, manifest, f"{run / 'manifest.json'}", remedy)
    return manifest


def metrics(run: Path) -> list[dict]:
    """The lines of metrics.jsonl, in the order of steps; none if there is no file.

    Raises:   ConfigError: a line is not a JSON object; lacks step or loss; has an invalid value, or
              an invalid name of a set; is out of order.
    """
    path = run / log.METRICS
    lines = list(_lines(path, _METRICS))
    for line in lines:
        if sets := {key: value for key, value in line.items() if key.startswith(SET)}:
            where = f"{path}, step {line['step']},"
            file_checks.check(_SETS, sets, where, f"Repair it, or leave {run} out.")
    return lines


def statistics(run: Path) -> list[dict]:
    """The lines of statistics.jsonl, as ``metrics``."""
    return list(_lines(run / log.STATISTICS, _STATISTICS))


def _lines(path: Path, kind: pydantic.TypeAdapter) -> Iterator[dict]:
    """The lines of a JSON Lines file, checked; a torn last one, of a killed run, is skipped."""
    if not path.exists():
        return
    remedy = f"Repair it, or leave {path.parent} out."
    before = -1
    for number, text in enumerate(_whole(path, remedy), 1):
        where = f"{path}, line {number},"
        file_checks.check_text(kind, text, where, remedy)
        try:
            line = files.parse_json(text)
        except ValueError as error:
            raise ConfigError(f"{where} cannot be used: {error}. {remedy}") from error
        if line["step"] <= before:
            raise ConfigError(
                f"{where} has step {line['step']} after step {before}; each step occurs once, "
                f"in order. {remedy}"
            )
        before = line["step"]
        yield line


def _whole(path: Path, remedy: str) -> Iterator[str]:
    """The lines of a text that have an end."""
    try:
        for line in files.read_lines(path):
            if line.endswith(b"\n"):
                yield line[:-1].decode(errors="replace")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error}). {remedy}"
        ) from error
