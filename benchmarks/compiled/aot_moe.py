"""A part of ``aot.py``: the trainer's step of one layer of Qwen3-30B-A3B, with all its experts,
compiled for H200s.
"""

import collections
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np

from fp8ref.jax import proof
from fp8ref.jax.proof import hlo
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.jax.trainer import Trainer

LENGTH, SEQUENCES = 1024, 4
CASES = [
    *(
        (recipe, mesh)
        for recipes in (("bf16", "rowwise"), ("tensorwise", "delayed"))
        for mesh in ({}, {"expert": 4})
        for recipe in recipes
    ),
    *(
        (recipe, {"fsdp": 2, "expert": 2})
        for recipe in ("bf16", "rowwise", "tensorwise", "delayed")
    ),
    *(
        (recipe, {"expert": 4, "checkpointing": "full"})
        for recipe in ("bf16", "tensorwise", "delayed")
    ),
]
EXPLANATION = """\
## The trainer's step with experts

One layer of Qwen3-30B-A3B, its 128 experts of which 8 take each token, a vocabulary of 1,024, four sequences of 1,024 tokens a device;
`fp8ref train`'s step. On several H200s `parallel.expert` holds experts apart. Grouped GEMMs are one dot in a loop over blocks of rows, with a
block's expert's weight: those of the three projections, three each and under full checkpointing four, and what they write. Bytes outside GEMMs
are as above, those of a loop's body times the loop's rounds, each of one block, weight or sum of what the loop's arrays hold. The trainer calls
no `lax.ragged_dot`: XLA makes one product of all rows with all weights of it (the table above).

| recipe | H200s | grouped GEMMs take | linears' GEMMs take | outside GEMMs, GB in kernels | between devices, MiB | ratio to bf16 | temporary, MiB |
|---|---|---|---|---|---|---|---|"""


def of_step(recipe: str, mesh: dict, target: str, tools: SimpleNamespace) -> dict:
    """GEMMs, bytes and collectives of a step; tools: functions of ``aot``."""
    config = case(recipe, mesh)
    lowered = Trainer(config, devices=tools.h200s(config.parallel.devices, target)).lowered(
        np.zeros((config.data.batch_size, LENGTH + 1), np.int32)
    )
    compiled = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
    text = compiled.as_text()
    rounds = dict(trips(text))
    taken: dict[str, collections.Counter] = {
        "grouped": collections.Counter(),
        "linears": collections.Counter(),
    }
    types = {one.name: one.types[0][0] for one in hlo.instructions(text) if one.types}
    for one in hlo.instructions(text):
        if one.kind == "dot" or "matmul" in one.line.partition("metadata=")[0]:
            layer = hlo.place(one.path)[0]
            if layer is None or len(one.operands) < 2:  # a transposition beside a GEMM has its name
                continue
            of = "grouped" if ".experts." in layer else "linears"
            operands = " x ".join(types[name] for name in one.operands[:2])
            taken[of][f"{operands} -> {one.types[0][0]}"] += 1
    moved = []
    for one, read in (kernel for kernel in tools.kernels(text) if not tools.collective(kernel[0])):
        arrays, count = [*one.types, *read], rounds.get(one.computation)
        # a round takes and writes one of the blocks, weights or sums that a loop's arrays hold
        if count is not None:
            arrays = [(dtype, shape[1:] if len(shape) == 3 else shape) for dtype, shape in arrays]
        moved.append((count or 1) * sum(map(tools.bytes, arrays)))
    return {
        "recipe": recipe,
        "mesh": mesh or {"data": 1},
        "taken": {of: dict(counts) for of, counts in taken.items()},
        "lost": proof.lost(proof.read_compiled(text), proof.read(lowered)),
        "outside_gemms": {"gb": round(sum(moved) / 1e9, 2), "kernels": len(moved)},
        "collectives_mib": tools.collectives(text),
        "temporary_mib": round(compiled.memory_analysis().temp_size_in_bytes / 2**20),
    }


def case(recipe: str, mesh: dict) -> Config:
    """The config of a row."""
    config = configs.load("qwen3-30b-a3b")
    keys = {**vars(type(config.parallel)()), **mesh}
    config = config.replace(
        model={"num_hidden_layers": 1, "vocab_size": 1024},
        numerics={"recipe": recipe},
        parallel=keys,
    )
    return config.replace(
        data={
            "sequence_length": LENGTH,
            "batch_size": SEQUENCES * config.parallel.devices,
            "microbatches": 1,
        }
    )


def trips(text: str) -> Iterator[tuple[str, int]]:
    """(computation, rounds) of the bodies of loops whose rounds XLA knows, and of what loops in
    them call.
    """
    for line in text.splitlines():
        if (body := re.search(r" while\(.*body=%?([\w.\-]+)", line)) and (
            count := re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
        ):
            yield body[1], int(count[1])


def markdown(rows: list[dict], moved: Callable[[dict], str]) -> str:
    """The table."""
    bf16 = {
        str(row["mesh"]): sum(row["collectives_mib"].values())
        for row in rows
        if row["recipe"] == "bf16"
    }
    lines = ["", EXPLANATION]
    for row in sorted(rows, key=lambda row: str(row["mesh"])):
        taken = [
            ", ".join(f"{types} {count}" for types, count in row["taken"][of].items())
            for of in ("grouped", "linears")
        ]
        whole = bf16[str(row["mesh"])]
        ratio = f"{sum(row['collectives_mib'].values()) / whole:.2f}" if whole else "-"
        devices = " ".join(f"{axis} {size}" for axis, size in row["mesh"].items())
        outside = "{gb} in {kernels}".format(**row["outside_gemms"])
        measured = f"{outside} | {moved(row) or '-'} | {ratio} | {row['temporary_mib']:,} |"
        lines.append(f"| {row['recipe']} | {devices} | {' | '.join(taken)} | {measured}")
    return "\n".join(lines) + "\n"
