"""How long a training step of FP8 layers takes in JAX on a CPU, next to Flax's own: python
benchmarks/speed/jax_cpu.py [--json FILE]

One linen model of dense layers, bfloat16 compute, float32 parameters, AdamW; its layers in
bfloat16, with Flax's Fp8DirectDotGeneralOp, and with hooks of fp8ref by three recipes. They take
turns, and a ratio is the median of those of neighbors in this one run.
A CPU has no FP8 kernels: these times say what is around the GEMMs, and nothing of a GPU.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from fp8ref import jax as fj

RECIPES = ("tensorwise", "rowwise", "delayed")
# variant, measure, peer, at most
ASKED = [
    ("tensorwise", "step", "Flax's FP8", 1.0),
    ("delayed", "step", "Flax's FP8", 1.0),
    ("rowwise", "step", "Flax's FP8", 1.2),
    *((recipe, "step", "bf16", 3.0) for recipe in RECIPES),
    *((recipe, "compile", "bf16", 2.0) for recipe in RECIPES),
]
PEERS = {"Flax's FP8": "flax", "bf16": "bf16"}


class Model(nn.Module):
    """Pre-norm MLP blocks over tokens [M, width], the inner layers four times as wide."""

    width: int
    blocks: int
    dot_general_cls: Callable | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.blocks):
            h = nn.LayerNorm(dtype=jnp.bfloat16)(x)
            h = nn.Dense(4 * self.width, dtype=jnp.bfloat16, dot_general_cls=self.dot_general_cls)(
                h
            )
            x = x + nn.Dense(self.width, dtype=jnp.bfloat16, dot_general_cls=self.dot_general_cls)(
                nn.gelu(h)
            )
        return x


class Variant:
    """The model by one kind of dense layer, compiled and ready to step."""

    def __init__(self, name: str, *, width: int, blocks: int, x: jax.Array) -> None:
        hooks = {
            "bf16": None,
            "flax": nn.Fp8DirectDotGeneralOp,
            **{recipe: fj.flax.linen_dot_general(recipe) for recipe in RECIPES},
        }
        self.model, self.optimizer = Model(width, blocks, hooks[name]), optax.adamw(1e-3)
        variables = self.model.init(jax.random.key(0), x)
        step = {"bf16": self._plain, "flax": self._flax}.get(name, self._ours)
        self.state = (variables, self.optimizer.init(variables["params"]))
        jitted = jax.jit(step, donate_argnums=0)
        begin = time.perf_counter()
        self.compiled = jitted.lower(self.state, x).compile()
        self.compile_seconds = time.perf_counter() - begin
        self.x, self.jitted = x, jitted

    def step(self) -> None:
        self.state, loss = self.compiled(self.state, self.x)
        loss.block_until_ready()

    def compilations(self) -> int:
        """How often three steps by the jitted function are compiled."""
        state = self.state
        for _ in range(3):
            state, _ = self.jitted(state, self.x)
        self.state = state
        return self.jitted._cache_size()

    def _plain(self, state, x):
        variables, opt_state = state
        loss, grads = jax.value_and_grad(
            lambda params: _loss(self.model.apply({"params": params}, x), x)
        )(variables["params"])
        return self._updated({**variables}, opt_state, grads), loss

    def _flax(self, state, x):
        variables, opt_state = state
        loss, grads = jax.value_and_grad(lambda v: _loss(self.model.apply(v, x), x))(variables)
        replaced = {name: of_name for name, of_name in grads.items() if name != "params"}
        return self._updated({**variables, **replaced}, opt_state, grads["params"]), loss

    def _ours(self, state, x):
        variables, opt_state = state

        def loss_fn(variables, x):
            y, updated = self.model.apply(variables, x, mutable=[fj.flax.SEEN])
            return _loss(y, x), updated

        loss, grads, seen = fj.flax.value_and_grad(loss_fn)(variables, x)
        return self._updated(dict(fj.flax.update(variables, seen)), opt_state, grads), loss

    def _updated(self, variables, opt_state, grads):
        updates, opt_state = self.optimizer.update(grads, opt_state, variables["params"])
        return {**variables, "params": optax.apply_updates(variables["params"], updates)}, opt_state


def _loss(y: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((y.astype(jnp.float32) - jnp.roll(x, 1, axis=1).astype(jnp.float32)) ** 2)


def measure(*, width: int, blocks: int, tokens: int, repetitions: int) -> dict:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((tokens, width)), jnp.bfloat16)
    names = ("bf16", "flax", *RECIPES)
    taken: dict[str, dict[str, list[float]]] = {
        what: {name: [] for name in names} for what in ("step", "compile")
    }
    for _ in range(min(7, repetitions)):
        for name in names:
            jax.clear_caches()
            taken["compile"][name].append(
                Variant(name, width=width, blocks=blocks, x=x).compile_seconds
            )
    variants = {name: Variant(name, width=width, blocks=blocks, x=x) for name in names}
    for i in range(repetitions + 1):
        for name, variant in variants.items():
            begin = time.perf_counter()
            variant.step()
            if i:  # the first one warms up
                taken["step"][name].append(time.perf_counter() - begin)
    seconds = {
        what: {name: statistics.median(times) for name, times in of.items()}
        for what, of in taken.items()
    }
    rows = [
        {
            "variant": variant,
            "measure": what,
            "peer": peer,
            "ratio": statistics.median(np.divide(taken[what][variant], taken[what][PEERS[peer]])),
            "at_most": at_most,
        }
        for variant, what, peer, at_most in ASKED
    ]
    return {
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "jax": jax.__version__,
            "python": platform.python_version(),
        },
        "model": {"width": width, "blocks": blocks, "tokens": tokens},
        "seconds": seconds,
        "compilations_in_three_steps": {
            name: variant.compilations() for name, variant in variants.items()
        },
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="sizes too small to say anything")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    sizes = {"width": 32, "blocks": 1, "tokens": 32, "repetitions": 1} if arguments.quick else {}
    result = measure(**({"width": 512, "blocks": 3, "tokens": 1024, "repetitions": 15} | sizes))
    table = Table("recipe", "what", "next to", "ratio", "at most", "")
    for row in result["rows"]:
        verdict = "ok" if row["ratio"] <= row["at_most"] else "slower"
        table.add_row(
            row["variant"],
            row["measure"],
            row["peer"],
            f"{row['ratio']:.2f}x",
            f"{row['at_most']:.1f}x",
            verdict,
        )
    Console().print(table)
    print("compilations in three steps:", result["compilations_in_three_steps"])
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
