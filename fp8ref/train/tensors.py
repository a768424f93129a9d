"""Real GEMM operands and recorded amaxes of a run, for notebooks and studies of formats.

One .npz file, which NumPy reads without pickle:

    <layer>/<role>        uint16, the bits of bfloat16: input [M, K], weight [N, K], grad_output [M,
                          N], of the first ROWS tokens
    <layer>/<role>/amax   float32 [recorded steps]: the largest magnitude of the whole tensor, NaN
                          where it was not finite
    about                 JSON: backend, recipe, step, recorded steps, the data's hash
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp8ref import configs as shipped
from fp8ref.recipe import OPERANDS
from fp8ref.shared import files
from fp8ref.shared.errors import ConfigError, require
from fp8ref.train import loop
from fp8ref.train.data import loader
from fp8ref.train.report import run_files
from fp8ref.train.run import run_dir

__all__ = ["read"]

FILE = "tensors.npz"
"""The name of the file that ``fp8ref demo`` writes."""

ROWS = 384
"""The most tokens of input and grad_output that are kept."""


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Operands and amaxes by "<layer>/<role>".

    operands  float32 arrays that bfloat16 holds exactly, of the chosen layers.
    amaxes    float32 [recorded steps], of every FP8 linear.
    about     backend, recipe, step, recorded steps and the data's hash.
    """

    operands: dict[str, np.ndarray]
    amaxes: dict[str, np.ndarray]
    about: dict[str, Any]


def of_run(run: Path, layers: Sequence[str]) -> Tensors:
    """The operands of ``layers`` in the step after the last checkpoint, and the recorded amaxes.

    One forward and backward pass with the checkpoint's weights and the next batch, no update.

    Raises:   ConfigError: no run; a run of several devices; no checkpoint; a layer that does not
              run in FP8, or is of experts.
    """
    manifest, lines = run_files.manifest(run), run_files.statistics(run)
    config, last = run_dir.on_one_device(run, "tensors are taken from runs")
    recipe = config.scheduled(last.manifest.get("measured", [])).recipe(last.step)
    planned = [decision.path for decision in config.under(recipe).decisions() if decision.fp8]
    if expert_layers := [d.path for d in config.decisions() if d.experts and d.path in layers]:
        raise ConfigError(
            f"tensors are taken from linears with one weight; {expert_layers[0]} has one for each "
            "expert. Name others."
        )
    if absent := [layer for layer in layers if layer not in planned]:
        raise ConfigError(
            f"tensors are taken from linears that run in FP8; {run} has no {absent[0]} among "
            f"{', '.join(planned) or 'none'}."
        )
    trainer = loop.trainer(manifest["backend"], config)
    trainer.load(last.state, last.step)
    trainer.switch(recipe)
    operands: dict[str, np.ndarray] = {}

    def keep(layer, gemm, a, b, out) -> None:
        for role, (hp, _, _) in zip(OPERANDS[gemm], (a, b), strict=True):
            if layer in layers:
                operands[f"{layer}/{role}"] = np.array(
                    hp if role == "weight" else hp[:ROWS], np.float32
                )

    trainer.observe(loader.open_batches(config).step(last.step), keep)
    about = {
        "backend": manifest["backend"],
        "recipe": recipe,
        "step": last.step,
        "recorded": [line["step"] for line in lines],
        "data": manifest["data"]["sha256"],
    }
    return Tensors(operands=dict(sorted(operands.items())), amaxes=_amaxes(lines), about=about)


def write(path: Path, tensors: Tensors) -> None:
    """Write one .npz, operands as bfloat16 bits; ValueError for one that bfloat16 does not hold."""
    arrays: dict[str, np.ndarray] = {"about": np.array(json.dumps(tensors.about))}
    for name, value in tensors.operands.items():
        bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
        if np.any(bits & 0xFFFF):
            raise ValueError(
                f"operands are kept as bfloat16, which does not hold all of {name}. Round it "
                "with sim.cast.round_to first."
            )
        arrays[name] = (bits >> 16).astype(np.uint16)
    arrays |= {
        f"{name}/amax": np.asarray(value, np.float32) for name, value in tensors.amaxes.items()
    }
    files.write_arrays(path, arrays)


def read(path: Path | str) -> Tensors:
    """Read a file of ``write``, or the package's by its name, "tiny" (``fp8ref.configs``).

    bfloat16 bits are widened to float32, which is exact.

    Raises:   ConfigError: no such file, or a file of another kind.
    """
    path = shipped.find(path, ".npz")
    try:
        arrays = files.read_arrays(path)
        about = files.parse_json(str(arrays.pop("about")))
        for name, value in arrays.items():
            dtype, axes = (np.float32, 1) if name.endswith("/amax") else (np.uint16, 2)
            text = f"{name} is {value.dtype} of {value.ndim} axes, not {np.dtype(dtype)} of {axes}"
            require(value.dtype == dtype and value.ndim == axes, text)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{path} is not a file of tensors, such as fp8ref demo writes into its directory "
            f"({FILE}): {error}"
        ) from error
    operands, amaxes = {}, {}
    for name, value in arrays.items():
        if name.endswith("/amax"):
            amaxes[name.removesuffix("/amax")] = value
        else:
            operands[name] = (value.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return Tensors(operands=operands, amaxes=amaxes, about=about)


def _amaxes(lines: Sequence[dict]) -> dict[str, np.ndarray]:
    """{"<layer>/<role>": float32 [recorded steps]}: a tensor has one amax in all of its GEMMs."""
    traces: dict[str, np.ndarray] = {}
    for row, line in enumerate(lines):
        for name, measured in line["statistics"].items():
            layer, _, role = name.rsplit("/", 2)
            trace = traces.setdefault(f"{layer}/{role}", np.full(len(lines), np.nan, np.float32))
            if measured["amax"] is not None:
                trace[row] = measured["amax"]
    return traces
