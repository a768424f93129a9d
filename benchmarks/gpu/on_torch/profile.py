"""Where a step of blocks spends its time, by kind of kernel: torch.profiler's record of some steps,
which is itself some of what is idle.
"""

import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from measuring import timing
from on_torch.bench import Bench
from on_torch.blocks import Blocks
from on_torch.variants import MINIMAL, TRANSFORMER_ENGINE
from reporting import breakdown

STEPS = 3
NEEDED = 25  # seconds of a variant, compiling included
VARIANTS = (
    "bf16",
    "fp8ref tensorwise",
    "fp8ref delayed",
    "torchao tensorwise",
    *TRANSFORMER_ENGINE,
    "fp8ref rowwise_native",
    MINIMAL,
    "fp8ref rowwise",
)
ON_DEVICE, ON_HOST = ("kernel", "gpu_memcpy", "gpu_memset"), ("cpu_op",)


def run(bench: Bench) -> dict:
    """Rows: seconds of a step by kind (``breakdown.NAMES``), and the longest kernels by name."""
    blocks, rows = Blocks(bench, bench.sizes.blocks, (1, bench.sizes.tokens)), []
    for variant in VARIANTS:
        if bench.budget.left < NEEDED and not bench.dry:
            rows.append({"name": variant, "error": "no time was left"})
            continue
        try:
            events = recorded(bench, blocks.model(variant).step)
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


def recorded(bench: Bench, step) -> list[breakdown.Event]:
    """Kernels and copies of STEPS steps; of a dry run the operators."""
    for i in range(3):
        step(i)
    activities = (
        [ProfilerActivity.CPU] if bench.dry else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    )
    with profile(activities=activities, acc_events=True) as record:
        for i in range(STEPS):
            step(i)
        if not bench.dry:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        record.export_chrome_trace(str(trace))
        return breakdown.read(trace, ON_HOST if bench.dry else ON_DEVICE)
