"""Measured ceilings in the form that ``fp8ref estimate --ceilings`` reads
(fp8ref/estimate/gpu_rates.py).
"""

import json
from pathlib import Path

from fp8ref.estimate.gpu_rates import NAMES

KEYS = {  # of fp8ref estimate, and of a benchmark's ``ceilings``
    "bf16": "bf16_flops",
    "fp8": "fp8_flops",
    "fp8_rowwise": "fp8_rowwise_flops",
    "attention": "attention_flops",
    "bandwidth": "bandwidth",
    "launch": "launch_in_graph_seconds",
}

# cards of these names that have other clocks and memory than the SXM ones
OTHERS = {"pcie", "nvl", "mig"}


def ceilings(data: dict) -> dict | None:
    """Those of a benchmark's results; None of a dry run, of a GPU that estimates do not know, or
    where one was not measured.
    """
    found, words = data["ceilings"], set(data["device"].lower().split())
    gpu = (
        None
        if words & OTHERS
        else next((sheet for name, sheet in NAMES.items() if name in words), None)
    )
    if data["dry"] or gpu is None or not all(found.get(key) for key in KEYS.values()):
        return None
    versions = ", ".join(
        f"{name} {version}" for name, version in data["versions"].items() if version
    )
    rates = {key: found[measured] for key, measured in KEYS.items()}
    return {
        "gpu": gpu,
        **rates,
        "source": f"benchmarks/gpu/gpu_torch.py on {data['device']}, driver {data['driver']}: "
        f"{versions}",
    }


def write(data: dict, folder: Path) -> Path | None:
    """ceilings_h100.json or ceilings_h200.json; None where there is nothing to write."""
    made = ceilings(data)
    if made is None:
        return None
    short = next(name for name, sheet in NAMES.items() if sheet == made["gpu"])
    path = folder / f"ceilings_{short}.json"
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return path
