"""Where a step of blocks in JAX spends its time, by kind of kernel: jax.profiler's record of some
steps, which is itself some of what is idle.
"""

import tempfile
from pathlib import Path

import jax
from jax.profiler import ProfileData

from measuring import timing
from on_jax.bench import Bench
from on_jax.blocks import Blocks, inputs
from on_jax.variants import BY_TRITON, FLAX, OTHERS, QWIX
from reporting import breakdown
from reporting.breakdown import Event

STEPS = 3
NEEDED = 25  # seconds of a variant, compiling included
VARIANTS = (
    "bf16",
    "fp8ref tensorwise",
    "fp8ref delayed",
    FLAX,
    *BY_TRITON,
    *([QWIX] if QWIX in OTHERS else []),
    "fp8ref rowwise_native",
    "fp8ref rowwise",
)
# a plane of a profile, and how its lines that hold kernels begin
ON_DEVICE, STREAM = ("/device:GPU:0", "Stream")
ON_HOST, POOL = "/host:CPU", "tf_"  # of a dry run: XLA's threads


def run(bench: Bench) -> dict:
    """Rows: seconds of a step by kind (``breakdown.NAMES``), and the longest kernels by name."""
    config, rows = bench.sizes.blocks, []
    sets = inputs(bench, config, (1, bench.sizes.tokens))
    for variant in VARIANTS:
        if bench.budget.left < NEEDED and not bench.dry:
            rows.append({"name": variant, "error": "no time was left"})
            continue
        try:
            events = recorded(bench, Blocks(bench, variant, config, sets))
            kinds = breakdown.seconds(events, STEPS)
            rows.append(
                {
                    "name": variant,
                    "kinds": kinds,
                    "seconds": sum(kinds.values()),
                    "longest": breakdown.longest(events, STEPS),
                }
            )
        except Exception as error:  # the others are still to be measured
            rows.append({"name": variant, "error": timing.message(error)})
    return {"steps": STEPS, "rows": rows}


def recorded(bench: Bench, blocks: Blocks) -> list[Event]:
    """Kernels and copies of STEPS steps; of a dry run what XLA's threads did."""
    for i in range(3):
        jax.block_until_ready(blocks.step(i))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for i in range(STEPS):
                found = blocks.step(i)
            jax.block_until_ready(found)
        (written,) = Path(folder).rglob("*.xplane.pb")
        return read(written, *((ON_HOST, POOL) if bench.dry else (ON_DEVICE, STREAM)))


def read(profile: Path, plane: str, lines: str) -> list[Event]:
    """The events of a profile's plane, of lines whose names begin so."""
    found = [
        line
        for p in ProfileData.from_file(str(profile)).planes
        if p.name == plane
        for line in p.lines
        if line.name.startswith(lines)
    ]
    return [
        Event(e.name, e.start_ns * 1e-9, (e.start_ns + e.duration_ns) * 1e-9, line.name)
        for line in found
        for e in line.events
    ]
