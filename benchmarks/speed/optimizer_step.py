"""The time of the optimizer alone with states of every layout, on a CPU: python
benchmarks/speed/optimizer_step.py [--json FILE]

One step over the parameters of a small Llama: torch's foreach AdamW and ft.states.AdamW, eager and
compiled; optax.adamw and fj.states.adamw, jitted with donated buffers. In each round all of a
framework run once, one after the other; a ratio is the median over rounds of a time by that of the
framework's own AdamW in the same round. A CPU says nothing of a GPU, where bytes decide.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from rich.console import Console
from rich.table import Table

from fp8ref import jax as fj
from fp8ref import torch as ft
from fp8ref.spec.states.layouts import LAYOUTS

HYPER = {"weight_decay": 0.1, "eps": 1e-8}


def shapes(width: int, layers: int) -> list[tuple[int, ...]]:
    layer = [(width, width)] * 4 + [(3 * width, width)] * 2 + [(width, 3 * width)] + [(width,)] * 2
    return [(8 * width, width), *layer * layers, (width,)]


def in_torch(sizes: list[tuple[int, ...]], build: Callable) -> Callable[[], None]:
    rng = np.random.default_rng(0)
    params = []
    for shape in sizes:
        params.append(
            torch.nn.Parameter(torch.tensor(rng.standard_normal(shape), dtype=torch.float32))
        )
        params[-1].grad = torch.tensor(1e-3 * rng.standard_normal(shape), dtype=torch.float32)
    return build(params).step


def in_jax(
    sizes: list[tuple[int, ...]], optimizer: optax.GradientTransformation
) -> Callable[[], None]:
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in sizes]
    grads = [jnp.asarray(1e-3 * rng.standard_normal(shape), jnp.float32) for shape in sizes]

    def step(params, state):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled, held = jax.jit(step, donate_argnums=(0, 1)), [(params, optimizer.init(params))]

    def run() -> None:
        held[0] = jax.block_until_ready(compiled(*held[0]))

    return run


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> list[dict]:
    """Of each, the median time in ms, and that of its ratios to the first's time in the same
    round.
    """
    for step in steps.values():
        step()
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    first = next(iter(times.values()))
    ratios = {
        name: [one / of_first for one, of_first in zip(each, first, strict=True)]
        for name, each in times.items()
    }
    return [
        {
            "optimizer": name,
            "ms": 1e3 * statistics.median(times[name]),
            "ratio": statistics.median(ratios[name]),
        }
        for name in steps
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    parser.add_argument("--quick", action="store_true", help="sizes too small to say anything")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument(
        "--only", choices=("eager", "compiled", "jax"), help="one of the three parts"
    )
    parser.add_argument("--threads", type=int, help="threads of PyTorch")
    known = parser.parse_args()
    if known.threads:
        torch.set_num_threads(known.threads)
    sizes, rounds = (shapes(64, 1), 2) if known.quick else (shapes(512, 4), 15)
    results: dict[str, list[dict]] = {}
    for part in ("eager", "compiled", "jax"):
        if known.only not in (None, part):
            continue
        if part == "jax":
            steps = {"optax.adamw": in_jax(sizes, optax.adamw(1e-3, b2=0.95, **HYPER))}
            steps |= {
                name: in_jax(sizes, fj.states.adamw(1e-3, layout=name, **HYPER))
                for name in known.layouts
            }
        else:
            steps = {
                "torch.optim.AdamW, foreach": in_torch(
                    sizes, lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True, **HYPER)
                )
            }
            for name in known.layouts:
                steps[name] = in_torch(
                    sizes,
                    lambda p, name=name, part=part: ft.states.AdamW(
                        p, lr=1e-3, layout=name, compiled=part == "compiled", **HYPER
                    ),
                )
        results[part] = measure(steps, rounds)
    elements = sum(int(np.prod(shape)) for shape in sizes)
    for part, rows in results.items():
        table = Table(
            "optimizer",
            "ms",
            "by the first",
            title=f"{part}, {elements / 1e6:.1f} M parameters in {len(sizes)} tensors",
        )
        for row in rows:
            table.add_row(row["optimizer"], f"{row['ms']:.1f}", f"{row['ratio']:.2f}")
        Console().print(table)
    if known.json:
        versions = {
            "torch": torch.__version__,
            "jax": jax.__version__,
            "threads": torch.get_num_threads(),
        }
        result = {
            "machine": platform.platform(),
            **versions,
            "parameters": elements,
            "tensors": len(sizes),
            "rounds": rounds,
            **results,
        }
        known.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
