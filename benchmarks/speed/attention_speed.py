"""How long attention by each variant takes on a CPU, next to the framework's own: python
benchmarks/speed/attention_speed.py [--json FILE]

PyTorch's scaled_dot_product_attention and jax.nn.dot_product_attention in bfloat16, causal, and
``attention.apply`` by the variants in both forms of arithmetic take turns. A ratio is the median of
those of neighbors in this one run; one above 1 says slower than the framework's own. Times are CPU
times of this process, all threads together. A CPU has no FP8 GEMM: these times say what is around
the GEMMs, and nothing of a GPU.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fp8ref.jax.attention import DeviceCall
from fp8ref.jax.attention import attention as jax_attention
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import ARITHMETIC, VARIANTS, Mask
from fp8ref.torch.attention import attention as torch_attention

NAMES = ("bf16", "fa3", "cudnn", "mxfp8")
OWN, MASK, AT_MOST = "framework's", Mask(causal=True), 3.0
SHAPE = (2, 8, 64)  # batch, heads, features


def in_torch(
    tensors: list[np.ndarray], names: list[str]
) -> dict[tuple[str, str, str], Callable[[], object]]:
    """{(variant, arithmetic, pass): a call}."""
    q, k, v, do = (torch.from_numpy(x).bfloat16() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def own(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def by(variant: str, arithmetic):
        call = Call(variant=variant, mask=MASK, arithmetic=arithmetic)
        return lambda q, k, v: torch_attention.apply(q, k, v, variant=call)

    def forward(function):
        with torch.no_grad():
            return function(*leaves)

    def both(function):
        return torch.autograd.grad(function(*leaves), leaves, do)

    return _calls(names, own, by, lambda f: lambda: forward(f), lambda f: lambda: both(f))


def in_jax(
    tensors: list[np.ndarray], names: list[str]
) -> dict[tuple[str, str, str], Callable[[], object]]:
    """As ``in_torch``, compiled."""
    q, k, v, do = (jnp.asarray(x, jnp.bfloat16) for x in tensors)

    def own(q, k, v):
        heads_last = (x.swapaxes(1, 2) for x in (q, k, v))
        return jax.nn.dot_product_attention(
            *heads_last, is_causal=True, implementation="xla"
        ).swapaxes(1, 2)

    def by(variant: str, arithmetic):
        return lambda q, k, v: jax_attention.apply(
            q, k, v, variant=DeviceCall(variant=variant, mask=MASK, arithmetic=arithmetic)
        )

    def forward(function):
        compiled = jax.jit(function)
        return lambda: jax.block_until_ready(compiled(q, k, v))

    def both(function):
        compiled = jax.jit(lambda q, k, v, do: jax.vjp(function, q, k, v)[1](do))
        return lambda: jax.block_until_ready(compiled(q, k, v, do))

    return _calls(names, own, by, forward, both)


def _calls(names, own, by, forward, both) -> dict[tuple[str, str, str], Callable[[], object]]:
    functions = {(OWN, "-"): own} | {
        (name, how): by(name, how) for name in names for how in ARITHMETIC
    }
    found = {}
    for (name, how), function in functions.items():
        found[name, how, "forward"] = forward(function)
        if name == OWN or VARIANTS[name].backward:
            found[name, how, "forward and backward"] = both(function)
    return found


def measure(
    backend: str, length: int, names: list[str], repetitions: int, *, quick: bool
) -> list[dict]:
    batch, heads, features = (1, 2, 32) if quick else SHAPE
    rng = np.random.default_rng(0)
    tensors = [
        rng.standard_normal((batch, heads, length, features)).astype(np.float32) for _ in range(4)
    ]
    calls = (in_torch if backend == "torch" else in_jax)(tensors, names)
    if quick:
        calls = {key: call for key, call in calls.items() if key[2] == "forward"}
    taken: dict[tuple, list[float]] = {key: [] for key in calls}
    for i in range(repetitions + 1):
        for key, call in calls.items():
            begin = time.process_time()
            call()
            if i:  # the first one warms up, or compiles
                taken[key].append(time.process_time() - begin)
    return [
        {
            "backend": backend,
            "tokens": length,
            "variant": name,
            "arithmetic": how,
            "pass": which,
            "clock": "CPU time",
            "seconds": statistics.median(times),
            "ratio": statistics.median(np.divide(times, taken[OWN, "-", which])),
        }
        for (name, how, which), times in taken.items()
    ]


def table(rows: list[dict]) -> Table:
    """A row a variant: ratios by backend, length and pass."""
    shown = Table(
        "backend", "tokens", "variant", "arithmetic", "pass", "ms", "times the framework's"
    )
    for row in rows:
        mark = (
            ""
            if row["variant"] == OWN or row["arithmetic"] != "fast"
            else " (asked: at most 3)"
            if row["ratio"] > AT_MOST
            else ""
        )
        shown.add_row(
            row["backend"],
            str(row["tokens"]),
            row["variant"],
            row["arithmetic"],
            row["pass"],
            f"{1e3 * row['seconds']:.1f}",
            f"{row['ratio']:.2f}{mark}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", choices=("jax", "torch"), default=["jax", "torch"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--variants", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="sizes too small to say anything: whether it runs"
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="write the results to this file, in place of those of the same backend and length",
    )
    known = parser.parse_args()
    tokens, repetitions = ([64], 1) if known.quick else (known.tokens, known.repetitions)
    rows = []
    for backend in known.backends:
        for length in tokens:
            rows += measure(
                backend,
                length,
                ["cudnn"] if known.quick else known.variants,
                repetitions,
                quick=known.quick,
            )
    Console(width=120).print(table(rows))
    if known.json:
        machine = {
            "cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
        }
        versions = {"jax": jax.__version__, "torch": torch.__version__}
        measured = {(row["backend"], row["tokens"]) for row in rows}
        kept = json.loads(known.json.read_text())["rows"] if known.json.exists() else []
        rows = [row for row in kept if (row["backend"], row["tokens"]) not in measured] + rows
        known.json.write_text(
            json.dumps({"machine": machine | versions, "shape": SHAPE, "rows": rows}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
