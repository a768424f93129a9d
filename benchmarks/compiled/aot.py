"""What XLA compiles the training step to for an H200, on a machine without one: make aot, or
python benchmarks/compiled/aot.py [--show] [--parts rows --cases rowwise]

Two blocks of an 8-billion-parameter Llama with a small vocabulary, lowered from shapes alone and
compiled ahead of time for one device and for eight. Counted are kernels and bytes of the compiled
program; nothing runs, so that nothing here is a time. An autotuner has no GPU to try kernels on
either: GEMMs are the library's unless a case says Triton, and a GPU may choose otherwise.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}  # before jax starts

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen import fp8_ops
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import aot_attention
import aot_blackwell
import aot_blocks
import aot_moe
import fp8ref.jax as fj
from fp8ref.jax import proof
from fp8ref.jax.experts import operands as grouped_operands
from fp8ref.jax.kernels import TritonKernels, casting
from fp8ref.jax.proof import hlo
from fp8ref.jax.states import states
from fp8ref.recipe import RECIPES
from fp8ref.spec.llama import LlamaConfig
from fp8ref.spec.states.layouts import LAYOUTS, WITH_MASTERS, by_name
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import DataConfig, ParallelConfig
from fp8ref.train.jax.trainer import Trainer

MODEL = LlamaConfig(
    vocab_size=1024,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=2,
    num_attention_heads=32,
    num_key_value_heads=8,
)
LENGTH, SEQUENCES = 1024, 4  # of tokens; per device
MEBIBYTE = 2**20
HERE = Path(__file__).parent
COLUMNS = [
    "recipe",
    "mesh",
    "FP8 GEMMs planned, in kernels",
    "of their multiplications in FP8",
    "linears' GEMMs write",
    "outside GEMMs, GB in kernels",
    "between devices, MiB",
    "ratio to bf16",
    "casts that transpose, MiB in kernels",
    "moves, MiB in kernels",
    "temporary, MiB",
]
EXPLANATION = """\
# The training step compiled for an H200, ahead of time

Written by `make aot`; kernels and bytes of compiled programs, per device, of which none has run. Two blocks of an 8-billion-parameter Llama,
a vocabulary of 1024, four sequences of 1024 tokens a device, unless the mesh says other blocks or a tied last linear. Gradients are summed in
float32 unless the mesh says bfloat16. Linears' GEMMs
write their results in the dtypes listed, with their number. Bytes outside GEMMs are what all other kernels but collectives read and write.
Bytes between devices are those of collectives, the larger of what goes in and what comes out of each; the ratio is to bf16 on the same mesh.
Casts that transpose write FP8 in a second order, with or without the first; moves are kernels that only transpose, copy or concatenate, a MiB
or more, of a linear. Temporary memory is all but arguments and results."""
LAYERS = """\
## Flax layers

Two `nn.Dense` layers of linen, 4096 to 14336 to 4096 features with a GELU between, forward and backward, of float32 parameters in bfloat16: Flax's
own, in bfloat16 and with its `Fp8DirectDotGeneralOp`, and with fp8ref's hooks. Four sequences of 1024 tokens a device; on eight, parameters and
batch are cut along one axis, or along three: the batch by data and fsdp, weights by fsdp, and the features between both layers by tensor. XLA inserts the
collectives. Must move is the least on one device, if no kernel keeps a tensor for the next: a
tensor is read for its amax, read again to be cast, and its codes are written once for each order in which a GEMM reads them; under `rowwise` a row
or a column fits into registers, and is read once for each axis. By XLA is that of
kernels as XLA fuses them: GELU's tanh is kept, a kernel takes maxima along one axis, and one that transposes takes none.

| layers | H200s | GEMMs write | outside GEMMs, GB in kernels | must move, GB | by XLA, GB | between devices, MiB | temporary, MiB |
|---|---|---|---|---|---|---|---|"""
KERNELS = """\
| reads | writes | GB |
|---|---|---|"""
MODELS = """\
## Whole models

The step with its training state, by XLA's memory analysis: Llama's published sizes, sequences of 8,192 tokens, one on each device; layers
scanned, attention in chunks, the loss of all logits or of parts of the vocabulary (P-29). The state is masters and moments. Compile times are seconds
on a machine of two processors that others used too, and those that the processors worked.

| model | layers | H200s | recipe | checkpointing | loss | state, GiB | most in use, GiB | compiles in, s | of work, s |
|---|---|---|---|---|---|---|---|---|---|"""
STATES = """\
## Optimizer states

A step of AdamW of one float32 matrix of 4096 x 4096 by optax and by `fp8ref.jax.states.step`, weights and states donated. Bytes a parameter are
what kernels read and write; those that must move are the weight twice, its gradient, and both moments twice. A scale of a whole tensor
needs the exact amax first: what makes it must be read once more. Layouts with a master of their own have it in the weight's place: no
parameter is kept. Where both moments share scales by blocks of exact amaxes, the step is one Triton kernel: XLA's own would read twice what a
block's amax is made of.

| AdamW | bytes a parameter, in kernels | must move | ratio |
|---|---|---|---|"""
EXPERTS = """\
## Experts

The three grouped GEMMs of one weight of Qwen3-30B-A3B's experts, 128 of 2048 to 1536 features, of 32,768 rows: 4,096 tokens that 8 experts
take; forward and backward. XLA makes of `lax.ragged_dot` one product of all rows with all weights. `fp8ref.jax.experts.grouped` multiplies blocks of
rows in loops. Rows are those that are multiplied by a weight in each of the three.

| | GEMMs take | rows | temporary, MiB |
|---|---|---|---|"""
EXPERT = {"experts": 128, "rows": 32768, "inputs": 2048, "outputs": 1536}
RAGGED = "`lax.ragged_dot`, bfloat16"
# others, a byte
BYTES = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
AXES = {"data": 2, "fsdp": 2, "tensor": 2}
FSDP, CUBE = {"fsdp": 8}, {**AXES, "sequence": True}
NARROW = {"reduce_dtype": "bfloat16"}
TIED = {"tie_word_embeddings": True}
NARROWER = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 3,
}
# recipe, mesh, GEMMs by Triton, and what else the model has
CASES = [
    *((name, {}, False) for name, r in RECIPES.items() if not r.in_blocks),
    *((name, FSDP, False) for name, r in RECIPES.items() if not r.in_blocks),
    *((recipe, {**FSDP, **NARROW}, False) for recipe in ("bf16", "tensorwise", "rowwise")),
    *((recipe, CUBE, False) for recipe in ("bf16", "tensorwise", "rowwise")),
    *(
        (recipe, {"fsdp": 4, "tensor": 2, "sequence": True, **NARROW}, False)
        for recipe in ("bf16", "tensorwise", "rowwise")
    ),
    *((recipe, {**FSDP, "through": "jit"}, False) for recipe in ("bf16", "tensorwise", "rowwise")),
    *((recipe, {}, True) for recipe in ("bf16", "tensorwise", "rowwise")),
    ("bf16", {"data": 2, "fsdp": 2}, False, TIED),
    ("bf16", {"data": 2, "fsdp": 2, "loss": "chunked"}, False, TIED),
    ("bf16", {**FSDP, "through": "jit"}, False, TIED),
    *((recipe, {}, False, NARROWER) for recipe in ("bf16", "tensorwise", "rowwise")),
    *((recipe, CUBE, False) for recipe in ("delayed", "rowwise_with_gw_hp")),
]
HOOKS = {"Flax, bfloat16": None, "Flax, FP8": fp8_ops.Fp8DirectDotGeneralOp} | {
    recipe: fj.flax.linen_dot_general(recipe)
    for recipe in ("bf16", "tensorwise", "rowwise", "delayed")
}
# model, layers, devices, recipe, checkpointing, loss
LARGE = [
    ("llama-8b", 8, 8, "bf16", "full", "whole"),
    ("llama-8b", 32, 8, "bf16", "full", "whole"),
    ("llama-8b", 32, 8, "tensorwise", "full", "whole"),
    ("llama-8b", 32, 8, "tensorwise", "selective", "whole"),
    ("llama-8b", 32, 8, "rowwise", "full", "whole"),
    ("llama-8b", 32, 8, "delayed", "full", "whole"),
    ("llama-70b", 8, 64, "tensorwise", "full", "whole"),
    ("llama-70b", 80, 64, "tensorwise", "full", "whole"),
    ("llama-8b", 32, 8, "tensorwise", "full", "chunked"),
]
PARTS = ("rows", "layers", "models", "states", "experts", "moe", "attention", "blocks", "blackwell")
NO_KERNEL = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "while",
    "conditional",
    "call",
}
MOVING = {
    "parameter",
    "transpose",
    "copy",
    "bitcast",
    "reshape",
    "concatenate",
    "slice",
    "pad",
    "tuple",
    "get-tuple-element",
}


def moves(text: str) -> tuple[list[int], list[int]]:
    """Of the linears' kernels that write a mebibyte or more in another order than they read it: the
    bytes that each writes.

    Returns:  (of those that transpose while they cast to FP8, of those that only move data).
    """
    bodies = collections.defaultdict(list)
    for one in hlo.instructions(text):
        bodies[one.computation].append(one)
    called = set(re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", text))
    casting, moving = [], []
    for kernel in (one for name, body in bodies.items() if name not in called for one in body):
        inside = [kernel]
        if kernel.kind == "fusion":
            inside = bodies[re.search(r"calls=%?([\w.\-]+)", kernel.line)[1]]
        kinds = {one.kind for one in inside}
        written = sum(map(_bytes, kernel.types))
        if (
            written < MEBIBYTE
            or hlo.place(kernel.path)[0] is None
            or not kinds & {"transpose", "copy", "concatenate"}
        ):
            continue
        if kinds <= MOVING:
            moving.append(written)
        elif any(dtype.startswith("f8") for dtype, _ in kernel.types):
            casting.append(written)
    return casting, moving


def outside_gemms(text: str) -> dict[str, float]:
    """Bytes that kernels other than GEMMs and collectives read and write, in GB, and the number of
    these kernels.
    """
    moved = [
        sum(map(_bytes, (*one.types, *read))) for one, read in kernels(text) if not _collective(one)
    ]
    return {"gb": round(sum(moved) / 1e9, 2), "kernels": len(moved)}


def quantizing(text: str) -> dict[str, dict[str, float]]:
    """Kernels of a mebibyte or more that do no more than quantize, or scale a GEMM's result, by
    purpose (``fp8ref.estimate.kernels.Part``): their number and GB. A kernel that also writes a
    wide tensor is that tensor's. u8 are codes, and bits beside them (P-6). Amaxes that XLA
    partitions or splits by itself have lost their path."""
    found: dict[str, dict[str, float]] = {
        part: {"kernels": 0, "gb": 0.0} for part in ("amax", "cast", "layout", "rescale")
    }
    for one, read in kernels(text):
        moved = sum(map(_bytes, (*one.types, *read)))
        if moved < MEBIBYTE or _collective(one):
            continue
        made, given = (
            {
                "f8" if dtype.startswith("f8") or dtype == "u8" else dtype
                for dtype, shape in types
                if math.prod(shape) >= MEBIBYTE // 4
            }
            for types in (one.types, read)
        )
        made = made - {"s16", "u16"} or made  # an amax's parts beside
        if made == {"f8"}:
            part = "layout" if given == {"f8"} else "cast"
        elif ("_largest" in one.path or not one.path or hlo.place(one.path)[1]) and {
            dtype for dtype, _ in one.types
        } <= {"s16", "u16", "s32", "u32"}:
            part = "amax"
        elif (
            made == {"bf16"}
            and one.path.endswith("/convert_element_type")
            and hlo.place(one.path)[1]
            and "kind=kLoop" in one.line
        ):
            part = "rescale"
        else:
            continue
        found[part]["kernels"] += 1
        found[part]["gb"] += moved / 1e9
    return {
        part: {"kernels": of["kernels"], "gb": round(of["gb"], 3)} for part, of in found.items()
    }


def kernels(text: str) -> Iterator[tuple[hlo.Instruction, list[hlo.Typed]]]:
    """The kernels other than GEMMs, each with the types of what it reads."""
    called = set(re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", text))
    types: dict[str, tuple[hlo.Typed, ...]] = {}
    for one in hlo.instructions(text):
        types[one.name] = one.types
        if (
            one.computation not in called
            and one.kind not in NO_KERNEL
            and not one.kind.endswith("-done")
            and "matmul" not in one.line.partition("metadata=")[0]
        ):
            yield one, [typed for name in one.operands for typed in types.get(name, ())]


def measure(recipe: str, parallel: dict, triton: bool, *given) -> dict:
    """given: what else the model has, if anything, and the target."""
    *more, target = given
    model = more[0] if more else {}
    config = Config(
        model=dataclasses.replace(MODEL, **model), data=DataConfig(sequence_length=LENGTH)
    ).replace(numerics={"recipe": recipe}, parallel=parallel)
    devices = config.parallel.devices
    batch = SEQUENCES * devices
    config = config.replace(data={"batch_size": batch})
    lowered = Trainer(config, devices=_h200s(devices, target)).lowered(
        np.zeros((batch, LENGTH + 1), np.int32)
    )
    program = proof.read(lowered)
    compiled = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": triton})
    text = compiled.as_text()
    found = proof.read_compiled(text)
    planned, fp8 = ([dot for dot in proof.gemms(each) if dot.fp8] for each in (program, found))
    casting, moving = moves(text)
    return {
        "recipe": recipe,
        "mesh": parallel or {"data": 1},
        **({"model": model} if model else {}),
        "kernels": proof.kernels(found),
        "planned_fp8_gemms": sum(
            s.fp8 for d in config.decisions() for s in d.recipe.gemms.values()
        ),
        "fp8_dots": len(planned),
        "fp8_kernels": len(fp8),
        "fp8_share_of_planned_multiplications": sum(d.multiplications for d in fp8)
        / max(1, sum(d.multiplications for d in planned)),
        "lost": proof.lost(found, program),
        "written": dict(collections.Counter(dot.out for dot in proof.gemms(found) if dot.layer)),
        "outside_gemms": outside_gemms(text),
        "quantizing": quantizing(text),
        "collectives_mib": collectives(text),
        "casts_that_transpose": {"kernels": len(casting), "mib": round(sum(casting) / MEBIBYTE)},
        "moves": {"kernels": len(moving), "mib": round(sum(moving) / MEBIBYTE)},
        "temporary_mib": round(compiled.memory_analysis().temp_size_in_bytes / MEBIBYTE),
    }


def large(
    model: str, layers: int, devices: int, recipe: str, checkpointing: str, loss: str, target: str
) -> dict:
    """Memory of a whole model's step, and the seconds that it takes to compile."""
    config = configs.load(model).replace(
        model={"num_hidden_layers": layers},
        data={"sequence_length": 8192, "batch_size": devices, "microbatches": 1},
        numerics={"recipe": recipe},
        parallel={
            **vars(ParallelConfig()),
            "fsdp": devices,
            "scan": True,
            "checkpointing": checkpointing,
            "attention": "chunked",
            "loss": loss,
        },
    )
    lowered = Trainer(config, devices=_h200s(devices, target)).lowered(
        np.zeros((devices, 8193), np.int32)
    )
    # of this process and of ptxas, which XLA starts
    began, worked = (time.perf_counter(), sum(os.times()[:4]))
    memory = lowered.compile().memory_analysis()
    return {
        "model": model,
        "layers": layers,
        "devices": devices,
        "recipe": recipe,
        "checkpointing": checkpointing,
        "loss": loss,
        "compile_seconds": time.perf_counter() - began,
        "compile_processor_seconds": sum(os.times()[:4]) - worked,
        "state_gib": memory.argument_size_in_bytes / 2**30,
        "most_gib": memory.peak_memory_in_bytes / 2**30,
    }


class MLP(nn.Module):
    """Two dense layers, their products by ``dot``."""

    dot: Any = None

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(
            nn.Dense, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=self.dot
        )
        hidden = nn.gelu(dense(MODEL.intermediate_size, name="up")(x))
        return dense(MODEL.hidden_size, name="down")(hidden)


def flax_layers(name: str, devices: int, *given) -> dict:
    """Kernels and bytes of a pass of two dense layers under plain jit. given: the sizes of the
    mesh's axes, by default all devices along fsdp, and the target."""
    *sizes, target = given
    sizes = sizes[0] if sizes else {"fsdp": devices}
    h200s = _h200s(devices, target)
    mesh = Mesh(np.array(h200s).reshape(*sizes.values()), tuple(sizes))

    def shape(array, *spec) -> jax.ShapeDtypeStruct:
        spec = [tuple(axis for axis in axes if axis in sizes) or None for axes in spec]
        placed = NamedSharding(mesh, P(*spec)) if devices > 1 else SingleDeviceSharding(h200s[0])
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed)

    def cut(path, weight) -> jax.ShapeDtypeStruct:
        """The first layer's output features and the second's input features over tensor."""
        return shape(
            weight, *((("tensor",), ("fsdp",)) if "down" in str(path) else (("fsdp",), ("tensor",)))
        )

    model = MLP(HOOKS[name])
    x = jax.ShapeDtypeStruct((SEQUENCES * devices, LENGTH, MODEL.hidden_size), jnp.bfloat16)
    variables = jax.tree.map(shape, jax.eval_shape(model.init, jax.random.key(0), x))
    variables |= {"params": jax.tree_util.tree_map_with_path(cut, variables["params"])}

    def loss(variables, x):
        y, updated = model.apply(variables, x, mutable=[fj.flax.SEEN])
        return (y.astype(jnp.float32) ** 2).mean(), updated

    ours = (
        fj.flax.value_and_grad(loss)
        if name in RECIPES
        else jax.value_and_grad(loss, has_aux=True, allow_int=True)
    )
    compiled = (
        jax.jit(ours)
        .lower(variables, shape(x, ("data", "fsdp")))
        .compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
    )
    text = compiled.as_text()
    return {
        "layers": name,
        "devices": devices,
        **({"mesh": sizes} if "tensor" in sizes else {}),
        "written": dict(
            collections.Counter(dot.out for dot in proof.gemms(proof.read_compiled(text)))
        ),
        "outside_gemms": outside_gemms(text),
        "collectives_mib": collectives(text),
        "temporary_mib": round(compiled.memory_analysis().temp_size_in_bytes / MEBIBYTE),
        "kernels": [
            {"reads": _shapes(read), "writes": _shapes(one.types), "gb": round(moved / 1e9, 3)}
            for one, read in kernels(text)
            if devices == 1 and (moved := sum(map(_bytes, (*one.types, *read)))) >= MEBIBYTE
        ],
    }


def _shapes(types: Iterable[hlo.Typed]) -> str:
    """Arrays of a quarter of a mebielement or more, largest first."""
    large = sorted(
        (typed for typed in types if math.prod(typed[1]) >= MEBIBYTE // 4), key=_bytes, reverse=True
    )
    return ", ".join(f"{dtype} {' x '.join(map(str, shape))}" for dtype, shape in large)


def must_move(name: str, *, by_xla: bool = False) -> float | None:
    """The least bytes, in GB, that kernels outside GEMMs move in the pass of ``flax_layers`` on one
    device; by_xla: of kernels as XLA fuses them, which keep GELU's tanh, take maxima along one axis
    each, and none where they transpose."""
    if name not in ("bf16", "tensorwise", "rowwise", "delayed"):
        return None
    tokens = SEQUENCES * LENGTH
    weight, x, hidden = (
        MODEL.hidden_size * MODEL.intermediate_size,
        tokens * MODEL.hidden_size,
        tokens * MODEL.intermediate_size,
    )
    # bytes an element: float32 masters; x and GEMMs' results in bfloat16; up has no grad_input:
    # nothing asks for x's gradient
    if name == "bf16":
        of = {
            "up": 4 + 2,
            "down": 4 + 2,
            "x": 0,
            "gelu": 2 + 2,
            "loss and its gradient": 2 + 2,
            "gelu's gradient": 2 + 2 + 2,
        }
        if by_xla:  # GELU's kernel writes its tanh, which the gradient's reads
            of |= {"gelu": 2 + 2 + 2, "gelu's gradient": 2 + 2 + 2 + 2}
    else:
        # another reading; a delayed scale's amax is taken by the cast
        amax = 0 if name == "delayed" and not by_xla else 1
        of = {
            "up": 4 * amax + 4 + 1,
            "down": 4 * amax + 4 + 2,
            "x": 2 * amax + 2 + 2,
            "gelu": 2 * amax + 2 + 2,
            "loss and its gradient": 2 * amax + 2 + 2,
            "gelu's gradient": 4 * amax + 4 + 1,
        }
        if by_xla:
            # the amax's kernel writes tanh, the cast's reads it; the gradient is written by the
            # kernel that takes its amax
            of |= {"gelu": (2 + 2) + (4 + 2), "gelu's gradient": (6 + 2) + (2 + 1)}
        if name == "rowwise" and not by_xla:
            # a row or a column fits into a program's registers: each axis is one reading, and the
            # second layer's weight has two
            of |= {
                "up": 4 + 1,
                "down": 2 * (4 + 1),
                "x": 2 * (2 + 1),
                "gelu": 2 * (2 + 1),
                "loss and its gradient": 2 * (2 + 1),
            }
            of |= {"gelu's gradient": 4 + 1}
        if by_xla and name == "rowwise":
            # one kernel takes the first amax, and writes what is dear to make again; the cast by it
            # takes the second
            casts = (2 + 1) + (2 + 1)
            of |= {
                "down": (4 + 2) + casts,
                "x": 2 + casts,
                "gelu": (2 + 4) + casts,
                "loss and its gradient": 2 + casts,
            }
    sizes = {
        "up": weight,
        "down": weight,
        "x": x,
        "gelu": hidden,
        "loss and its gradient": x,
        "gelu's gradient": hidden,
    }
    gradients = 2 * (2 + 4) * weight  # widened to the masters' dtype
    return (gradients + sum(of[what] * size for what, size in sizes.items())) / 1e9


def of_states(layout: str, target: str) -> dict:
    """Bytes that a step of AdamW moves; layout: of its states, or optax, for ``optax.adamw``."""
    optimizer = optax.adamw(1e-3) if layout == "optax" else states.adamw(1e-3, layout=layout)
    [h200] = _h200s(1, target)
    p = jax.ShapeDtypeStruct(
        (MODEL.hidden_size, MODEL.hidden_size), np.float32, sharding=SingleDeviceSharding(h200)
    )
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=p.sharding),
        jax.eval_shape(optimizer.init, p),
    )

    def step(p, state, g):
        if layout == "optax":
            updates, state = optimizer.update(g, state, p)
            return optax.apply_updates(p, updates), state
        # a master's, where it is used
        weights = states.weights(state, layout, g.dtype) if p is None else p
        by = states.AdamW(learning_rate=1e-3, layout=layout)
        new, state = states.step(weights, g, state, by)
        return None if p is None else new, state

    given = (None if layout in WITH_MASTERS else p, state, p)
    with casting(TritonKernels(capability=90)):
        text = jax.jit(step, donate_argnums=(0, 1)).lower(*given).compile().as_text()
    moved = [sum(map(_bytes, (*one.types, *read))) for one, read in kernels(text)]
    least = by_name("float32" if layout == "optax" else layout).step_bytes(p.size)
    return {
        "layout": layout,
        "kernels": len(moved),
        "bytes": sum(moved) / p.size,
        "must_move": least,
    }


def of_experts(name: str, target: str) -> dict:
    """Products and temporary memory of a grouped linear, forward and backward; name: of a grouped
    recipe, or RAGGED.
    """
    [h200] = _h200s(1, target)
    placed = SingleDeviceSharding(h200)
    rows, experts = EXPERT["rows"], EXPERT["experts"]
    x = jax.ShapeDtypeStruct((rows, EXPERT["inputs"]), jnp.bfloat16, sharding=placed)
    w = jax.ShapeDtypeStruct(
        (experts, EXPERT["inputs"], EXPERT["outputs"]), jnp.bfloat16, sharding=placed
    )
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32, sharding=placed)

    def step(x, w, sizes):
        def product(x, w):
            return (
                jax.lax.ragged_dot(x, w, sizes)
                if name == RAGGED
                else fj.grouped.apply(x, w, sizes, recipe=name)[0]
            )

        y, vjp = jax.vjp(product, x, w)
        return y, vjp(y)

    compiled = jax.jit(step).lower(x, w, sizes).compile()
    text = compiled.as_text()
    types = {one.name: one.types[0][0] for one in hlo.instructions(text)}
    taken = collections.Counter(
        " x ".join(types[name] for name in one.operands[:2])
        for one in hlo.instructions(text)
        if one.kind == "dot"
    )
    multiplied = (
        rows * experts if name == RAGGED else grouped_operands.rows_multiplied(rows, experts)
    )
    return {
        "of": name,
        "taken": dict(taken),
        "rows": multiplied,
        "temporary_mib": round(compiled.memory_analysis().temp_size_in_bytes / MEBIBYTE),
    }


def collectives(text: str) -> dict[str, float]:
    """MiB that a device's collectives move, not rounded, by kind and dtype: the larger of operands
    and results.
    """
    of_results: dict[str, tuple[hlo.Typed, ...]] = {}
    bytes_: collections.Counter = collections.Counter()
    for one in hlo.instructions(text):
        of_results[one.name] = one.types
        if _collective(one):
            kind = one.kind.removesuffix("-start")
            # XLA combines collectives, of several dtypes too
            given, made = (collections.Counter() for _ in range(2))
            for dtype, shape in (
                typed for name in one.operands for typed in of_results.get(name, ())
            ):
                given[dtype] += _bytes((dtype, shape))
            for dtype, shape in one.types:
                made[dtype] += _bytes((dtype, shape))
            # its type holds the operands too
            if one.kind.endswith("-start") and kind != "all-reduce":
                made -= given
            for dtype in given | made:
                bytes_[f"{kind} {dtype}"] += max(given[dtype], made[dtype])
    return {what: size / MEBIBYTE for what, size in bytes_.items()}


def _collective(one: hlo.Instruction) -> bool:
    return one.kind.removesuffix("-start").replace("-", "_") in hlo.COLLECTIVES


def _h200s(devices: int, target: str):
    return topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology=f"1x1x{devices}", target_config=target
    ).devices


def _bytes(typed: hlo.Typed) -> int:
    return BYTES.get(typed[0], 1) * math.prod(typed[1])


TOOLS = SimpleNamespace(
    h200s=_h200s,
    kernels=kernels,
    outside_gemms=outside_gemms,
    bytes=_bytes,
    collective=_collective,
    collectives=collectives,
)
"""What ``aot_moe``, ``aot_blocks`` and ``aot_blackwell`` take from here."""


def markdown(found: dict) -> str:
    """The tables of both kinds of rows."""
    bf16 = {
        _mesh(row): sum(row["collectives_mib"].values())
        for row in found["rows"]
        if row["recipe"] == "bf16"
    }
    lines = [EXPLANATION, "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(cells(row, bf16[_mesh(row)]))} |" for row in found["rows"]]
    lines += ["", LAYERS]
    for row in found["layers"]:
        least = [
            must_move(row["layers"], by_xla=by_xla) if row["devices"] == 1 else None
            for by_xla in (False, True)
        ]
        measured = "{gb} in {kernels} | ".format(**row["outside_gemms"]) + " | ".join(
            f"{gb:.2f}" if gb else "-" for gb in least
        )
        measured += f" | {_moved(row) or '-'} | {row['temporary_mib']} |"
        lines.append(
            f"| {row['layers']} | {_mesh(row) if 'mesh' in row else row['devices']} | "
            f"{_written(row)} | {measured}"
        )
    for row in found["layers"]:
        if row["devices"] == 1 and row["layers"] in ("tensorwise", "rowwise"):
            lines += [
                "",
                f"Kernels of `{row['layers']}` on one device, in the order of the program, with "
                "what they read and write:",
                "",
                KERNELS,
            ]
            lines += [
                f"| {one['reads']} | {one['writes'] or 'an amax or a sum'} | {one['gb']:.3f} |"
                for one in row["kernels"]
            ]
    lines += ["", MODELS]
    for row in found["models"]:
        # recorded before it was counted
        worked = (
            f"{row['compile_processor_seconds']:.0f}" if "compile_processor_seconds" in row else "-"
        )
        measured = (
            f"{row['state_gib']:.1f} | {row['most_gib']:.1f} | {row['compile_seconds']:.0f} | "
            f"{worked} |"
        )
        lines.append(
            f"| {row['model']} | {row['layers']} | {row['devices']} | {row['recipe']} | "
            f"{row['checkpointing']} | {row['loss']} | {measured}"
        )
    lines += ["", STATES]
    for row in found["states"]:
        ratio = row["bytes"] / row["must_move"]
        lines.append(
            f"| {row['layout']} | {row['bytes']:.2f} in {row['kernels']} | "
            f"{row['must_move']:.2f} | {ratio:.2f} |"
        )
    lines += ["", EXPERTS]
    for row in found["experts"]:
        taken = ", ".join(f"{types} {count}" for types, count in row["taken"].items())
        lines.append(f"| {row['of']} | {taken} | {row['rows']:,} | {row['temporary_mib']:,} |")
    return (
        "\n".join(lines)
        + "\n"
        + aot_moe.markdown(found["moe"], _moved)
        + aot_attention.markdown(found["attention"])
        + aot_blocks.markdown(found["blocks"])
        + aot_blackwell.markdown(found["blackwell"])
    )


def cells(row: dict, bf16: float) -> list[str]:
    """A row of the first table. bf16: MiB between devices under recipe bf16."""
    return [
        row["recipe"],
        _mesh(row),
        f"{row['planned_fp8_gemms']} in {row['fp8_kernels']}" if row["planned_fp8_gemms"] else "-",
        f"{row['fp8_share_of_planned_multiplications']:.0%}" if row["planned_fp8_gemms"] else "-",
        _written(row),
        "{gb} in {kernels}".format(**row["outside_gemms"]),
        _moved(row) or "-",
        f"{sum(row['collectives_mib'].values()) / bf16:.2f}" if bf16 else "-",
        "{mib} in {kernels}".format(**row["casts_that_transpose"]),
        "{mib} in {kernels}".format(**row["moves"]),
        str(row["temporary_mib"]),
    ]


def _written(row: dict) -> str:
    return ", ".join(f"{dtype} {count}" for dtype, count in row["written"].items())


def _moved(row: dict) -> str:
    """MiB between devices by what they are for and dtype, from a MiB."""
    found: collections.Counter = collections.Counter()
    for what, size in row["collectives_mib"].items():
        found[
            what.replace("all-reduce", "reduce")
            .replace("reduce-scatter", "reduce")
            .replace("all-gather", "gather")
        ] += size
    return ", ".join(f"{what} {size:.0f}" for what, size in found.items() if size >= 1)


def _mesh(row: dict) -> str:
    sizes = " ".join(
        f"{axis} {size}" for axis, size in row["mesh"].items() if axis in ("data", "fsdp", "tensor")
    )
    model = row.get("model", {})
    more = ["bfloat16 sums"] * ("reduce_dtype" in row["mesh"]) + ["plain jit"] * (
        "through" in row["mesh"]
    )
    more += ["chunked loss"] * ("loss" in row["mesh"])
    if model:
        more += [
            "tied"
            if "tie_word_embeddings" in model
            else f"{model['num_hidden_layers']} blocks of {model['hidden_size']}"
        ]
    more += ["Triton's GEMMs"] * any("triton" in kernel for kernel in row["kernels"])
    return ", ".join([sizes, *more])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json",
        type=Path,
        default=HERE.parent / "results" / "aot.json",
        help="the results; the table is written next to them",
    )
    parser.add_argument(
        "--show",
        action="store_true",
        help="compile nothing: only print the table of the results that are there",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="compile these; the others stay as they are",
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="WORD",
        default=[],
        help="of the parts only cases with all these words, as printed",
    )
    arguments = parser.parse_args()
    if set(arguments.parts) != set(PARTS) and not arguments.json.exists():
        parser.error(
            f"--parts adds to results that are there; {arguments.json} is not. Leave it out."
        )
    if not arguments.show:
        target = (HERE / "h200_target.txtpb").read_text()
        cases: dict[str, tuple[Callable, list]] = {
            "rows": (measure, CASES),
            "layers": (
                flax_layers,
                [
                    *((name, devices) for devices, name in itertools.product((1, 8), HOOKS)),
                    *((name, 8, AXES) for name in HOOKS),
                ],
            ),
            "models": (large, LARGE),
            "states": (of_states, [(layout,) for layout in ("optax", *LAYOUTS, *WITH_MASTERS)]),
            "experts": (
                of_experts,
                [(name,) for name in (RAGGED, "rowwise", "tensorwise", "blockwise", "mxfp8")],
            ),
            "moe": (functools.partial(aot_moe.of_step, tools=TOOLS), aot_moe.CASES),
            "attention": (aot_attention.of_attention, aot_attention.CASES),
            "blocks": (functools.partial(aot_blocks.of_step, tools=TOOLS), aot_blocks.CASES),
            "blackwell": (
                functools.partial(aot_blackwell.of_step, tools=TOOLS),
                aot_blackwell.CASES,
            ),
        }
        found = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        for part in arguments.parts:
            count, of_part = cases[part]
            # new cases are last
            rows = (
                dict(zip(map(str, of_part), found.get(part, []), strict=False))
                if arguments.cases
                else {}
            )
            for case in of_part:
                if str(case) not in rows or all(word in str(case) for word in arguments.cases):
                    rows[str(case)] = count(*case, target)
                    print(rows[str(case)], flush=True)
            found[part] = [rows[str(case)] for case in of_part]
        found["versions"] = {"jax": jax.__version__, "python": platform.python_version()}
        found["model"] = {
            **vars(MODEL),
            "sequence_length": LENGTH,
            "sequences_per_device": SEQUENCES,
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    text = markdown(json.loads(arguments.json.read_text()))
    print(text, end="")
    if not arguments.show:
        arguments.json.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
