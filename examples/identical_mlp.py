"""A small MLP trained by JAX, by PyTorch and by the simulator under one hardware: the same weights,
bit for bit.

    python examples/identical_mlp.py [--recipe tensorwise] [--plan hopper_fast] [--steps 50] [--lr
    0.5]

The FP8 GEMMs are the plan's in all of them; everything else is an operation that has one order
(docs/spec, B-13). Prints the SHA-256 of the weights of each, and exits with 1 if they differ, as
they do under --plan native, which is JAX and PyTorch as they are.
"""

import argparse
import hashlib
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from fp8ref import jax as fj
from fp8ref import torch as ft
from fp8ref.formats import FLOAT32
from fp8ref.sim import linear as simulator
from fp8ref.sim.gemm import hardware

SIZES = (64, 128, 128, 16)
BATCH = 64  # times 16 outputs: a power of two, so that the mean's factor is one


def start() -> list[np.ndarray]:
    """float32 [N, K] of each linear."""
    rng = np.random.Generator(np.random.PCG64(0))
    return [
        (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32)
        for k, n in itertools.pairwise(SIZES)
    ]


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [BATCH, 64] and targets [BATCH, 16], float32: a fixed rotation of some of the inputs,
    squashed.
    """
    rng = np.random.Generator(np.random.PCG64(1 + step))
    x = rng.standard_normal((BATCH, SIZES[0])).astype(np.float32)
    return x, np.tanh(x[:, : SIZES[-1]] - x[:, SIZES[-1] : 2 * SIZES[-1]])


def of_jax(
    recipe: str, plan: hardware.Hardware | None, steps: int, lr: np.float32
) -> tuple[list[np.ndarray], list[float]]:
    def model(weights, x):
        for i, w in enumerate(weights):
            with fj.hardware.simulating(plan):
                # [BATCH, K] x [N, K] -> [BATCH, N]
                x, _ = fj.linear.apply(x, w, recipe=recipe)
            x = jnp.where(x > 0, x, 0) if i < len(weights) - 1 else x
        return x

    @jax.jit
    def step(weights, x, target):
        y, backward = jax.vjp(lambda weights: model(weights, x), weights)
        d = y - target
        (grads,) = backward(d * np.float32(2 / d.size))
        return grads, d

    # Apart: in one program XLA fuses the product into the difference, and rounds once, barriers and
    # reduce_precision notwithstanding.
    scaled = jax.jit(lambda grads: [lr * g for g in grads])
    moved = jax.jit(lambda weights, by: [w - v for w, v in zip(weights, by, strict=True)])
    weights, losses = [jnp.asarray(w) for w in start()], []
    for i in range(steps):
        grads, d = step(weights, *batch(i))
        weights = moved(weights, scaled(grads))
        losses.append(float(np.square(np.asarray(d, np.float64)).mean()))
    return [np.asarray(w) for w in weights], losses


def of_torch(
    recipe: str, plan: hardware.Hardware | None, steps: int, lr: np.float32
) -> tuple[list[np.ndarray], list[float]]:
    model = nn.ModuleList(nn.Linear(k, n, bias=False) for k, n in itertools.pairwise(SIZES))
    for linear, w in zip(model, start(), strict=True):
        linear.weight.data = torch.from_numpy(w)
    model, losses = ft.convert(model, recipe), []
    with ft.hardware.simulating(plan):
        for i in range(steps):
            x, target = map(torch.from_numpy, batch(i))
            for j, linear in enumerate(model):
                x = linear(x)
                x = torch.where(x > 0, x, 0) if j < len(model) - 1 else x
            d = (x - target).detach()
            x.backward(d * (2 / d.numel()))
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(
                        p.grad * float(lr)
                    )  # a product, then a difference: sub_ with alpha would round once
                    p.grad = None
            losses.append(d.double().square().mean().item())
    return [p.detach().numpy() for p in model.parameters()], losses


def of_simulator(
    recipe: str, plan: hardware.Hardware, steps: int, lr: np.float32
) -> tuple[list[np.ndarray], list[float]]:
    how = {"accumulate": plan.name, "out_dtype": FLOAT32}
    weights, losses = start(), []
    for i in range(steps):
        x, target = batch(i)
        inputs = [x]
        for w in weights:
            y = simulator.forward(inputs[-1], w, recipe, **how)
            inputs.append(np.where(y > 0, y, np.float32(0)))
        d = y - target
        g, grads = d * np.float32(2 / d.size), []
        for j in reversed(range(len(weights))):
            g = g if j == len(weights) - 1 else np.where(inputs[j + 1] > 0, g, np.float32(0))
            g, grad = simulator.backward(g, inputs[j], weights[j], recipe, **how)
            grads.insert(0, grad)
        weights = [w - lr * grad for w, grad in zip(weights, grads, strict=True)]
        losses.append(float(np.square(d, dtype=np.float64).mean()))
    return weights, losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--recipe",
        default="tensorwise",
        choices=("tensorwise", "rowwise"),
        help="one that has no GEMM in high precision",
    )
    parser.add_argument("--plan", default="hopper_fast", choices=(*hardware.HARDWARE, "native"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=0.5)
    given = parser.parse_args()
    plan = None if given.plan == "native" else hardware.by_name(given.plan)
    sums: list[str] = []
    for name, train in {
        "jax": of_jax,
        "torch": of_torch,
        **({"sim": of_simulator} if plan else {}),
    }.items():
        weights, losses = train(given.recipe, plan, given.steps, np.float32(given.lr))
        sums.append(hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest())
        print(f"{name:5} loss {losses[0]:.6f} -> {losses[-1]:.6f}, weights {sums[-1]}")
    alike = len(set(sums)) == 1
    print(
        f"{given.steps} steps of {given.recipe} under {given.plan}: "
        f"{'the same weights, bit for bit' if alike else 'other weights'}"
    )
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
