"""GPU rates: peaks of data sheets, and the ceilings that programs reach, published or measured.

Published ceilings are here. Measured ones are a JSON file with just the keys of ``Ceilings``:

    {"gpu": "H200 SXM", "bf16": 7.5e14, "fp8": 1.4e15, "fp8_rowwise": 1.3e15, "attention": 5e14,
    "bandwidth": 4.2e12, "launch": 2e-6,
     "source": "what was run, on which machine, with which versions"}

The figures in this example only show the units; nobody measured them.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pydantic

from fp8ref.shared import files, package_data
from fp8ref.shared.errors import ConfigError, one_of, require


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU's data sheet: peaks, which no program reaches.

    bf16, fp8, fp4  dense FLOP a second of the tensor cores; fp4 0: they have none.
    bandwidth       bytes a second of memory.
    memory          bytes.
    processors      streaming multiprocessors (SMs).
    capability      major compute capability.
    """

    name: str
    bf16: float
    fp8: float
    bandwidth: float
    memory: float
    source: str
    fp4: float = 0.0
    processors: int = 132
    capability: int = 9


_SHEETS = {name: Gpu(**sheet) for name, sheet in package_data.tables(__file__, "gpus").items()}
GPUS = {gpu.name: gpu for gpu in _SHEETS.values()}
"""The data sheets of GPUs by name."""

TILES = ((128, 256), (256, 128), (128, 128))
"""Height and width of the tiles of a result that one processor computes, as in cuBLAS on Hopper."""

PIECES = (1, 2, 4, 8)  # the numbers of pieces that split-K may cut a sum over K into
NAMES = {name: gpu.name for name, gpu in _SHEETS.items()}  # {value of --gpu: name in GPUS}


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Rates that kernels reach.

    gpu           a name in GPUS
    bf16          FLOP a second of a large GEMM
    fp8           the same, operands with one scale each
    fp8_rowwise   the same, with a scale for every row
    attention     FLOP a second of fused attention in bfloat16; causal products count half
    bandwidth     bytes a second of a kernel on arrays that no cache holds
    launch        seconds of the smallest kernel, with the gap before it
    source        where the rates come from

    Raises:       ValueError: an unknown GPU; a rate outside 1 to 100 % of the data sheet's; a
                  launch outside 10 ns to 1 ms; fp8 slower than bf16; no source.
    """

    gpu: str
    bf16: float
    fp8: float
    fp8_rowwise: float
    attention: float
    bandwidth: float
    launch: float
    source: str
    measured: ClassVar[bool] = False

    def __post_init__(self) -> None:
        one_of("gpu", self.gpu, GPUS)
        peaks = {
            "bf16": self.sheet.bf16,
            "attention": self.sheet.bf16,
            "bandwidth": self.sheet.bandwidth,
        }
        peaks |= dict.fromkeys(("fp8", "fp8_rowwise"), self.sheet.fp8)
        for key, peak in peaks.items():
            if not peak / 100 <= getattr(self, key) <= peak:  # false for NaN too
                unit = "bytes" if key == "bandwidth" else "FLOP"
                raise ValueError(
                    f"{key} is in {unit} a second, from 1 % to 100 % of the data sheet's "
                    f"{peak:.3g}; got {getattr(self, key):.3g}."
                )
        text = f"launch is in seconds, from 1e-8 to 1e-3; got {self.launch:.3g}."
        require(1e-8 <= self.launch <= 1e-3, text)
        if not self.bf16 <= self.fp8:
            raise ValueError(
                f"fp8 is at least bf16; got {self.fp8:.3g} and {self.bf16:.3g}. Check whether "
                "they are swapped."
            )
        if not self.source.strip():
            raise ValueError("source says where the rates come from; got nothing.")

    @property
    def sheet(self) -> Gpu:
        """The GPU's data sheet."""
        return GPUS[self.gpu]

    @property
    def caption(self) -> str:
        """One sentence: whether the rates were measured, their values and source."""
        figures = (
            f"{self.bf16 / 1e12:.0f} and {self.fp8 / 1e12:.0f} TFLOP/s "
            f"({self.fp8_rowwise / 1e12:.0f} with rowwise scales)"
        )
        rest = (
            f"attention {self.attention / 1e12:.0f}, {self.bandwidth / 1e12:.2f} TB/s, "
            f"{self.launch * 1e6:.1f} us a kernel"
        )
        return (
            f"{'MEASURED' if self.measured else 'Published, NOT MEASURED here'}: {self.gpu} "
            f"reaches {figures}, {rest}. {self.source}"
        )


@dataclass(frozen=True, kw_only=True)
class Measured(Ceilings):
    """Rates that were measured, from a file."""

    measured: ClassVar[bool] = True
    __pydantic_config__ = pydantic.ConfigDict(extra="forbid", strict=True)


_MADE_OF = (
    "Of NVIDIA's data sheet, GEMMs reach 78 % and copies 92 %, and a kernel takes 2 us: torchao "
    "0.18, testing/training/roofline_utils.py, seen there on an H100. Rowwise GEMMs reach 95 % "
    "of tensorwise ones (90 to 100 %: pytorch/pytorch#147971); attention 35 % of bf16's peak "
    "(FlashAttention-2 on an H100: arXiv 2407.08608)"
)
GEMM, ROWWISE, ATTENTION, COPY, LAUNCH = 0.78, 0.95, 0.35, 0.92, 2e-6
PUBLISHED = {
    name: Ceilings(
        gpu=gpu.name,
        bf16=GEMM * gpu.bf16,
        fp8=GEMM * gpu.fp8,
        fp8_rowwise=ROWWISE * GEMM * gpu.fp8,
        attention=ATTENTION * gpu.bf16,
        bandwidth=COPY * gpu.bandwidth,
        launch=LAUNCH,
        source=_MADE_OF,
    )
    for name, gpu in _SHEETS.items()
}
"""{value of --gpu: ceilings that others published}; this project did not measure them."""


def of(gpu: str, file: Path | None = None) -> Ceilings:
    """The rates of a GPU, by its name on the command line.

    file      of measured rates; None: published ones.

    Raises:   ConfigError: an unknown GPU; a file that is unreadable, of other keys or another GPU.
    """
    if gpu not in NAMES:
        raise ConfigError(f"--gpu is one of {', '.join(NAMES)}; got {gpu!r}.")
    if file is None:
        return PUBLISHED[gpu]
    try:
        rates = _FILE.validate_json(files.read_bytes(file), strict=True)
    except pydantic.ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'all'}: {e['msg'].rstrip('.')}"
            for e in error.errors()
        )
        raise ConfigError(
            f"{file}: not a file of measured rates: {wrong}. The keys are {', '.join(_KEYS)}."
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: cannot be read ({error}). --ceilings takes a JSON file of measured rates."
        ) from error
    if rates.gpu != NAMES[gpu]:
        raise ConfigError(
            f"{file}: holds rates of {rates.gpu}, but --gpu is {gpu} ({NAMES[gpu]}). Name the "
            "GPU that was measured."
        )
    return rates


_KEYS = [field.name for field in dataclasses.fields(Measured)]
_FILE = pydantic.TypeAdapter(Measured)


def gemm_seconds(
    m: int, n: int, k: int, rate: float, bytes_: float, ceilings: Ceilings, *, experts: int = 0
) -> float:
    """Time of [M, K] x [N, K] -> [M, N] at ``rate`` FLOP a second, with bytes_ of memory traffic.
    experts: so many GEMMs of this size in one kernel, which cuts no sum into pieces; 0: one alone.
    """
    processors, fastest = ceilings.sheet.processors, math.inf
    count = experts or 1
    traffic = count * bytes_ / ceilings.bandwidth
    for height, width in TILES:
        tiles = count * math.ceil(m / height) * math.ceil(n / width)
        for pieces in (1,) if experts else PIECES:
            # every wave takes a tile's time on all processors, even if only one of them has a tile
            waves = math.ceil(tiles * pieces / processors)
            busy = waves * processors * 2 * height * width * k / pieces / rate
            # float32, written and read
            summed = 8 * pieces * m * n / ceilings.bandwidth if pieces > 1 else 0.0
            fastest = min(fastest, max(busy, traffic) + summed)
    return max(fastest, ceilings.launch)
