"""The blocks of the GPU benchmark (benchmarks/gpu/on_jax/blocks.py), compiled ahead of time for an
H200: bytes that four Llama-8B blocks with AdamW move in a step, by the dtype of their linears."""

import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import SingleDeviceSharding

import aot_attention
from fp8ref.jax import proof
from fp8ref.jax.kernels import TritonKernels, casting
from fp8ref.spec import llama
from fp8ref.spec.llama import LlamaConfig
from fp8ref.train.jax.llama.llama import Layer
from fp8ref.train.jax.step import compiler_options

sys.path.append(str(Path(__file__).parent.parent / "gpu"))
from on_jax.variants import FLAX, Variant

MODEL = LlamaConfig(
    vocab_size=1024,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=4,
    num_attention_heads=32,
    num_key_value_heads=8,
)
TOKENS = 8192
WITH_KERNELS = ", Triton's kernels"
CASES = [
    *((name,) for name in ("bf16", "fp8ref tensorwise", "fp8ref delayed", FLAX)),
    *((f"fp8ref {recipe}{WITH_KERNELS}",) for recipe in ("tensorwise", "delayed")),
]
HEADER = """
## Four blocks, one sequence of 8,192 tokens

The step that benchmarks/gpu measures, for one H200: four blocks of an 8-billion-parameter Llama without embedding and head, forward, backward and
AdamW, of bfloat16 parameters and moments, with cuDNN's attention. AdamW alone moves 12.2 GB. Bytes are what kernels other than GEMMs and attention read
and write. A tensor that one kernel reads twice counts once: under `delayed` a norm's second reading is of the cache, if that holds the rows.

| linears | FP8 GEMMs of cuBLASLt | GB in kernels | temporary, MiB |
|---|---|---|---|"""


def of_step(name: str, target: str, tools: SimpleNamespace) -> dict:
    """GEMMs, bytes and temporary memory of a step; name: of a variant of ``on_jax.variants``."""
    compiled = compiled_step(name, tools.h200s(1, target)[0])
    text = compiled.as_text()
    moved = [
        sum(map(tools.bytes, (*one.types, *read)))
        for one, read in tools.kernels(text)
        if 'custom_call_target="__cudnn' not in one.line
    ]
    return {
        "linears": name,
        "fp8_gemms": sum(dot.fp8 for dot in proof.gemms(proof.read_compiled(text))),
        "gb": round(sum(moved) / 1e9, 2),
        "kernels": len(moved),
        "temporary_mib": round(compiled.memory_analysis().temp_size_in_bytes / 2**20),
    }


def markdown(rows: list[dict]) -> str:
    """The table of the part."""
    lines = [
        f"| {row['linears']} | {row['fp8_gemms'] or '-'} | {row['gb']} in {row['kernels']} | "
        f"{row['temporary_mib']:,} |"
        for row in rows
    ]
    return "\n".join([HEADER, *lines]) + "\n"


def compiled_step(name: str, h200) -> jax.stages.Compiled:
    """The step of ``on_jax.blocks``, compiled from shapes alone."""
    cudnn.check_cudnn_version = lambda: aot_attention.CUDNN
    cudnn.check_compute_capability = lambda capability: True
    variant = Variant(name.removesuffix(WITH_KERNELS), "cudnn")
    kernels = TritonKernels(capability=90) if name.endswith(WITH_KERNELS) else None
    shapes = {
        key: shape
        for key, shape in llama.parameter_shapes(MODEL).items()
        if key.startswith("model.layers.")
    }
    linears = [linear for linear in llama.linear_shapes(MODEL) if linear != "lm_head"]
    optimizer, x_shape = optax.adamw(1e-6), (1, TOKENS, MODEL.hidden_size)

    def initial():
        weights = {
            key: jnp.zeros(shape[::-1] if variant.turned else shape, jnp.bfloat16)
            for key, shape in shapes.items()
        }
        recipes = dict.fromkeys(linears, variant.recipe)
        blocks = [
            Layer(f"model.layers.{i}", MODEL, weights, recipes)
            for i in range(MODEL.num_hidden_layers)
        ]
        graph.append(nnx.split(nnx.List(blocks))[0])
        params = nnx.split(nnx.List(blocks))[1]
        tables = [jnp.asarray(table) for table in llama.rotary_tables(MODEL, TOKENS)]
        x = jnp.zeros(x_shape, jnp.bfloat16)
        kept = variant.initial(linears) | variant.weighed(params)
        return (params, optimizer.init(params), kept), tables, x, x

    def step(state, tables, x, g):
        params, opt_state, kept = state

        def forward(params, x, run):
            for layer in nnx.merge(graph[0], params):
                x = layer(x, *tables, run)
            return x

        y, by_params, by_x, kept = variant.gradients(forward, params, x, g, kept)
        updates, opt_state = optimizer.update(by_params, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state, kept | variant.weighed(params)), y, by_x

    graph: list = []
    arguments = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=SingleDeviceSharding(h200)),
        jax.eval_shape(initial),
    )
    options = compiler_options("cuda") if variant.options is None else variant.options
    # without a GPU nothing could choose among Triton's GEMMs
    options = {**options, "xla_gpu_enable_triton_gemm": False}
    with casting(kernels):
        lowered = jax.jit(step, donate_argnums=0).lower(*arguments)
    return lowered.compile(compiler_options=options)
