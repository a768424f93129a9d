"""What inductor generates of a Llama block and of a step of AdamW for an H200, on a machine without
one: make aot-torch, or python benchmarks/compiled/aot_torch.py [--show] [--parts states] [--recipes
tensorwise] [--shape 1x8192] [--count]

One block of an 8-billion-parameter Llama, forward and backward, and one matrix with its optimizer
states, compiled by inductor for a device that is faked (``fake_h200``). Counted are
the kernels that it schedules, the bytes of the buffers that they read and write, and the sectors of
memory that they touch (``sectors``); nothing runs, so that nothing here is a time. An operator of
fp8ref, which launches a kernel of ``fp8ref.kernels``, and a Triton kernel that inductor did not
write count by their arguments and results: accesses are 16 bytes wide. With Triton installed each
kernel of inductor's is also compiled to machine code of sm_90.
"""

import argparse
import collections
import copy
import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="aot-torch-"))
warnings.simplefilter("ignore")

import fake_h200
import sectors

B200 = "b200" in sys.argv
fake_h200.install(b200=B200)

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor import compile_fx, cudagraph_utils, ir
from torch._inductor.choices import InductorChoices
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import (
    BaseSchedulerNode,
    ExternKernelSchedulerNode,
    NopKernelSchedulerNode,
)
from torch._inductor.virtualized import V
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8ref.spec.kernels import Choice
from fp8ref.spec.llama import FIRST_READER, LlamaConfig
from fp8ref.spec.states.layouts import LAYOUTS, Scalars, by_name
from fp8ref.torch.delayed import shared_inputs
from fp8ref.torch.gemm import blocks, fusion
from fp8ref.torch.kernels import choice
from fp8ref.torch.linear import rounding
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.model import convert
from fp8ref.torch.states import moments
from fp8ref.torch.states import update as adamw_update
from fp8ref.train.torch.llama.llama import Layer

choice.failure = lambda device: ""  # nothing can run there
MODEL = LlamaConfig(
    vocab_size=1024,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=1,
    num_attention_heads=32,
    num_key_value_heads=8,
)
Shape = tuple[int, int]
"""Sequences, and tokens of each."""

SHAPES: tuple[Shape, ...] = ((1, 8192), (4, 2048))
MEBIBYTE = 2**20
PARTS = ("rows", "states")
RESULTS = Path(__file__).parents[1] / "results"
PRODUCTS = re.compile(r"mm|block_gemm")  # of GEMMs' operators
ATTENTION = re.compile(r"scaled_dot_product")
LINEARS = (
    ("bf16", "torch"),
    ("tensorwise", "torchao"),
    ("tensorwise", "fp8ref, Float8Linear"),
    ("tensorwise", "fp8ref, Linear"),
    ("tensorwise", "fp8ref, kernels"),
    ("tensorwise_pow2", "fp8ref, kernels"),
    ("rowwise", "torchao, inductor's own casts"),
    ("rowwise", "torchao"),
    ("rowwise", "fp8ref, Float8Linear"),
    ("rowwise", "fp8ref, Linear"),
    ("rowwise_native", "fp8ref, kernels"),
    ("rowwise_with_gw_hp", "torchao"),
    ("rowwise_with_gw_hp", "fp8ref, Float8Linear"),
    ("rowwise_with_gw_hp", "fp8ref, Linear"),
    ("delayed", "fp8ref, Linear"),
    ("delayed", "fp8ref, kernels"),
    ("blockwise", "fp8ref, Linear"),
    ("blockwise", "fp8ref, kernels"),
)
"""(recipe, whose linear)."""

BY_HARDWARE = (
    ("rowwise", "fp8ref, Linear"),
    *((recipe, "fp8ref, scaled_mm") for recipe in ("mxfp8", "mxfp8_32x32", "nvfp4")),
    *((recipe, "fp8ref, emulated") for recipe in ("mxfp8", "nvfp4")),
)
"""The same on a B200, which multiplies blocks by ``scaled_mm`` (G-26)."""


COLUMNS = [
    "tokens",
    "recipe",
    "linears",
    "GEMMs write",
    "forward, GB in kernels",
    "backward, GB in kernels",
    "both, GB in kernels",
    "both, GB by sectors",
    "scattered kernels",
    "kept, MiB",
    "CUDA graphs of",
    "compiled by Triton",
]
EXPLANATION = """\
# A Llama block that inductor compiles for an H200, without one

Written by `make aot-torch`; kernels compiled, of which none has run. One block of an 8-billion-parameter Llama in bfloat16,
forward and backward, on 8,192 tokens: sequences x tokens of each. torchao is its `Float8Linear` as its own recipes make it. `fp8ref, kernels` is what `convert` makes on
such a GPU: Triton kernels cast, and compute norms and SwiGLU in the pass that casts them; in other rows of fp8ref plain operations cast. Bytes are what all kernels
but GEMMs and flash attention read and write, with the number of these kernels. GB by sectors (-: a kernel has indices of quotients) are of the sectors of 32 bytes that their loads and
stores touch, each load and store by itself: a kernel that reads a buffer twice counts twice, though a cache may serve it. The kernels of `fp8ref.kernels`
access 16 bytes at a time, and count what they read and write once. Scattered kernels have a load or a store of which a sector serves fewer than 8 bytes.
fp8ref's rows fuse by `fp8ref.torch.gemm.fusion`, which keeps casts that transpose out of
reductions; torch's and torchao's as inductor does by itself. Kept is what the forward pass writes and returns: what the backward
pass reads, and the output. Recipes with rows compile under `emulate_precision_casts`, but for the row that says so. CUDA graphs are of the graphs that
inductor's rules let become one (`mode="reduce-overhead"`), with the number of tensors that they write in place. The last column is of
inductor's different kernels that Triton compiles to machine code, - where it was not asked."""
HARDWARE = """\
## On a B200

The same block for a faked B200 (`aot_torch.py --gpu b200`), whose kernels Triton compiles for sm_100. Under `scaled_mm` PyTorch's operator multiplies codes and scales of
blocks (`numerics.products`, G-26); emulated GEMMs are of dequantized operands. Bytes are also those of rotations, random numbers and of scales in the operator's layout."""
STATES = """\
## Optimizer states

A step of `fp8ref.torch.states.AdamW(compiled=True)` of a float32 matrix of 4096 x 4096, by the layout of its moments. Bytes a parameter are what
kernels read and write; those that must move are the weight twice, its gradient, and both moments twice. A scale of a whole tensor needs the
exact amax first: the gradient and such moments must be read once more.

| layout | bytes a parameter, in kernels | must move | ratio |
|---|---|---|---|"""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What inductor launches once.

    kind     gemm or attention, which libraries have; ours, an operator of fp8ref or a Triton kernel
             that inductor did not write; else other.
    bytes    of the buffers that it reads and writes, each once, as inductor counts them.
    written  the dtype of its result.
    """

    name: str
    kind: str
    bytes: int
    written: str

    @property
    def library(self) -> bool:
        """Whether it is a GEMM or attention."""
        return self.kind in ("gemm", "attention")


@dataclasses.dataclass(frozen=True)
class Graph:
    """A compiled graph: its kernels, their sources, and what CUDA graphs would refuse of it.

    launches    how often its wrapper's text launches a Triton kernel of inductor's.
    sectors     bytes of the sectors that all launches touch.
    scattered   a name for each launch of a kernel with a scattered access.
    kept        bytes of results that are no inputs; of a forward graph, mostly what the backward
                pass reads.
    mutated     inputs that it writes into, at addresses that another call may change.
    refused     inductor's reason for no CUDA graph; None where it makes one.
    """

    kernels: list[Kernel]
    launches: int
    sources: dict[str, str]
    sectors: int | None
    scattered: list[str]
    kept: int
    refused: str | None
    mutated: int


class Recorder(cudagraph_utils.CUDAGraphPolicy):
    """Is asked for a CUDA graph of each graph that may become one, and records what inductor would
    check where it runs.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing was asked yet."""
        self.refused: str | None = "none was asked for"
        self.mutated = 0

    def cudagraphify(self, model, example_inputs, static_input_idxs, **keys):
        """Return the model as it is.

        Inductor makes CUDA graphs unless inputs are mutated that have no fixed address.
        """
        static = {i for i in static_input_idxs if isinstance(i, int)}
        self.mutated = len(keys["mutated_input_idxs"])
        function = cudagraph_utils.WrappedFunction(
            model,
            sorted(static),
            cudagraph_utils.FunctionID(0),
            keys["constants"],
            keys["placeholders"],
            keys["mutated_input_idxs"],
        )
        self.refused = cudagraph_utils.check_for_mutation(
            function, list(example_inputs), lambda _: False
        )
        return model


def generate(
    model: Callable,
    *inputs: Any,
    backward: bool = True,
    choices: type[InductorChoices] = InductorChoices,
) -> list[Graph]:
    """Inductor's graphs of a model or a function, and of its backward pass; all tensors are fake.

    ``choices`` say what it fuses.
    """
    found: list[Graph] = []
    recorder = Recorder()

    def compiled(module: torch.fx.GraphModule, example_inputs, **keys):
        run = copy.deepcopy(module)
        recorder.forget()
        seen: list[tuple] = []

        def to_module(self: GraphLowering):
            source, _ = self.codegen()
            launched, sources = (
                re.findall(r"^\s*(triton_\w+)\.run\(", source.value, re.MULTILINE),
                triton_sources(source.value),
            )
            touched = {name: accessed(sources[name]) for name in set(launched)}
            found = kernels(self)
            counted = [access.sectors for name in launched for access in touched[name] or ()]
            counted += [-(-one.bytes // sectors.SECTOR) for one in found if one.kind == "ours"]
            scattered = [name for name in launched if any(a.scattered for a in touched[name] or ())]
            moved = None if None in touched.values() else sum(counted) * sectors.SECTOR
            seen.append((found, len(launched), sources, moved, scattered, kept(self)))
            return argparse.Namespace(call=run, __file__=os.devnull)

        usual, GraphLowering._compile_to_module = GraphLowering._compile_to_module, to_module
        try:
            # of this thread: a backward pass compiles in another one
            with V.set_choices_handler(choices()):
                made = compile_fx.compile_fx_inner(module, example_inputs, **keys)
        finally:
            GraphLowering._compile_to_module = usual
        (counted,) = seen
        refused = getattr(made, "disabled_cudagraphs_reason", None) or recorder.refused
        found.append(Graph(*counted, refused, recorder.mutated))

        def call(arguments: list):
            return run(*arguments)

        call._boxed_call = True
        return call

    def backend(module, example_inputs):
        return compile_fx.compile_fx(module, example_inputs, inner_compile=compiled)

    torch._dynamo.reset()
    with (
        inductor_config.patch(
            {"fx_graph_cache": False, "triton.cudagraphs": True, "cudagraph_policy": recorder}
        ),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        out = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
        if backward:
            out.backward(torch.empty_like(out))
    return found


def accessed(source: str) -> list[sectors.Access] | None:
    """What a kernel touches; None where an index is of quotients of its axes."""
    try:
        return sectors.accesses(source)
    except ValueError:
        return None


def kernels(graph: GraphLowering) -> list[Kernel]:
    """What a graph launches: each node of the schedule that computes is one kernel."""
    return [kernel(node) for node in graph.scheduler.nodes if not free(node)]


def free(node: BaseSchedulerNode) -> bool:
    """Whether a node of the schedule launches nothing."""
    return isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput)


def kernel(node: BaseSchedulerNode) -> Kernel:
    """A node of the schedule as a kernel."""
    name, kind = node.get_name(), "other"
    if isinstance(node.node, ir.UserDefinedTritonKernel):
        return Kernel(node.node.get_kernel_and_metadata()[0].__name__, "ours", moved(node.node), "")
    if isinstance(node, ExternKernelSchedulerNode):
        name = str(
            getattr(node.node, "op_overload", None)
            or getattr(node.node, "python_kernel_name", None)
            or node.node
        )
        kind = (
            "gemm"
            if PRODUCTS.search(name)
            else "attention"
            if ATTENTION.search(name)
            else "ours"
            if name.startswith("fp8ref.")
            else "other"
        )
    written = ""
    if kind == "gemm":
        # of an operator of one's own, its first result
        first, *_ = getattr(node.node, "outputs", None) or [node.node]
        written = str(first.get_dtype()).removeprefix("torch.")
    if kind == "ours":
        return Kernel(name, kind, moved_by_operator(node.node), written)
    return Kernel(name, kind, node.get_read_write_buffers_sizes(), written)


def moved(node: ir.UserDefinedTritonKernel) -> int:
    """Bytes of the arguments that a Triton kernel reads, and of those that it writes."""
    accesses = node.arg_accesses.read_writes
    read, written = ({dep.name for dep in deps} for deps in (accesses.reads, accesses.writes))
    if read == written:  # of a kernel that torch could not analyze: it warns, and takes all
        raise ValueError(
            f"a kernel reads some arguments and writes others; torch found {sorted(read)} both "
            f"read and written by {node.get_kernel_and_metadata()[0].__name__}. See its warning."
        )
    return sum(size(node.kwargs[name]) for name in [*read, *written])


def moved_by_operator(node: ir.FallbackKernel) -> int:
    """Bytes of an operator's tensors: arguments, once more those that it writes into, and
    results.
    """
    schema = node.op_overload._schema
    places = {a.name: i for i, a in enumerate(schema.arguments)}
    changed = {places[a.name] for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    tensors, _ = node.unflatten_args(node.inputs, node.constant_args)
    arguments = [
        (x, 2 if i in changed else 1)
        for i, given in enumerate(tensors)
        for x in (given if isinstance(given, (list, tuple)) else [given])
        if isinstance(x, ir.IRNode)
    ]
    results = [] if changed else node.outputs
    return sum(n * size(x) for x, n in arguments) + sum(map(size, results))


def size(x: ir.IRNode) -> int:
    """Bytes of a tensor's elements."""
    return math.prod(map(int, x.get_size())) * x.get_dtype().itemsize


def triton_sources(wrapper: str) -> dict[str, str]:
    """{name: source} of the kernels that a wrapper's text defines."""
    return dict(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", wrapper, re.DOTALL))


def kept(graph: GraphLowering) -> int:
    """Bytes of a graph's results that are buffers of its own, each once."""
    names = {name for name in graph.get_output_names() if name in graph.name_to_buffer}
    return sum(
        int(graph.get_buffer(name).get_layout().storage_size()) * graph.get_dtype(name).itemsize
        for name in names
    )


def converted(model: nn.Module, recipe: str, who: str) -> nn.Module:
    """A model in bfloat16 whose linears are those of a library."""
    if who == "torch":
        return model
    if who.startswith("torchao"):
        return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    if who == "fp8ref, Linear":
        for name, linear in list(model.named_modules()):
            if isinstance(linear, nn.Linear):
                parent, _, key = name.rpartition(".")
                setattr(model.get_submodule(parent), key, Linear.of(linear, recipe, None, "plain"))
        return model
    kernels: Choice = "triton" if who == "fp8ref, kernels" else "plain"
    model = convert.convert(model, recipe, kernels=kernels)
    shared_inputs.share(model, FIRST_READER)  # as the trainer does
    return model


def block(recipe: str, who: str, shape: Shape, config: LlamaConfig = MODEL) -> list[Graph]:
    """The graphs of a Llama block: forward, backward."""
    sequences, length = shape
    with fake_h200.tensors():
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Layer(config)
        finally:
            torch.set_default_dtype(torch.float32)
        model = converted(model, recipe, who)
        for linear in rounding.stochastic_linears(model).values():
            linear.keys = torch.empty(3, 2, dtype=torch.int64)
        h = torch.empty(
            sequences, length, config.hidden_size, dtype=torch.bfloat16, requires_grad=True
        )
        tables = [torch.empty(length, config.head_dim) for _ in "cs"]
        # as torchtitan sets it for rows (pytorch#150859), for all linears alike
        emulates = recipe == "nvfp4" or ("rowwise" in recipe and not who.endswith("own casts"))
        products = "scaled_mm" if who.endswith("scaled_mm") else "auto"
        with inductor_config.patch(emulate_precision_casts=emulates), blocks.multiplying(products):
            return generate(
                model,
                h,
                *tables,
                choices=fusion.Choices if who.startswith("fp8ref") else InductorChoices,
            )


def optimizer_step(layout: str, size: int = MODEL.hidden_size**2) -> list[Graph]:
    """The graphs of a step of AdamW of one tensor: of its amaxes, where they come first, and of the
    rest.
    """
    kind = by_name(layout)
    with fake_h200.tensors(), inductor_config.patch(adamw_update.GPU_OPTIONS):
        p, g = torch.empty(size), torch.empty(size)
        numbers = Scalars(*torch.empty(len(Scalars._fields)).unbind())
        kept = tuple(moments.zeros(p, moment) for moment in kind.kept)
        work = adamw_update.in_blocks(
            adamw_update.Work(p, g, kept, numbers, kind, moments.Part(size), (None,) * len(kept))
        )
        if not adamw_update.amaxes_first(kind):
            return generate(adamw_update.finish_part, *work, None, backward=False)
        found = [
            torch.empty(())
            for which, moment in enumerate(kind.kept)
            for _ in range(moments.reductions(moment, which))
        ]
        return generate(adamw_update.begin_part, *work[:-1], backward=False) + generate(
            adamw_update.finish_part, *work, found, backward=False
        )


def state_row(layout: str) -> dict:
    """A row of the table of optimizer states, as JSON has it."""
    size = MODEL.hidden_size**2
    made = [kernel for graph in optimizer_step(layout, size) for kernel in graph.kernels]
    least = LAYOUTS[layout].step_bytes(size)
    return {
        "layout": layout,
        "kernels": len(made),
        "bytes": sum(kernel.bytes for kernel in made) / size,
        "must_move": least,
    }


def machine_code(sources: dict[str, str]) -> int | None:
    """How many kernels Triton compiles to machine code for the device, the first configuration of
    each; None without Triton.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    with inductor_config.patch(use_static_triton_launcher=False):
        for name, source in sources.items():
            tuner = getattr(PyCodeCache.load(source), name)
            made = tuner._precompile_config(tuner.configs[0]).kernel
            assert made.metadata.target.arch == (100 if B200 else 90), made.metadata
            assert made.asm["cubin"], name
    return len(sources)


def row(shape: Shape, recipe: str, who: str, graphs: list[Graph], *, compiles: bool = True) -> dict:
    """A row of the table, as JSON has it."""
    others = [[k for k in graph.kernels if not k.library] for graph in graphs]
    return {
        "shape": list(shape),
        "recipe": recipe,
        "who": who,
        "gemms": dict(
            collections.Counter(
                f"{k.name.split('.')[1]} {k.written}"
                for g in graphs
                for k in g.kernels
                if k.kind == "gemm"
            )
        ),
        "kernels": [len(found) for found in others],
        "ours": [sum(k.kind == "ours" for k in found) for found in others],
        "bytes": [sum(k.bytes for k in found) for found in others],
        "sectors": [graph.sectors for graph in graphs],
        "scattered": [graph.scattered for graph in graphs],
        "kept": graphs[0].kept,
        "mutated": [graph.mutated for graph in graphs],
        "cuda_graph_refused": [graph.refused for graph in graphs],
        "machine_code": machine_code(
            {name: text for graph in graphs for name, text in graph.sources.items()}
        )
        if compiles
        else None,
    }


def markdown(found: dict) -> str:
    """The table of all rows."""
    lines = [EXPLANATION, "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [line(each) for each in found["rows"]]
    if "b200" in found:
        lines += ["", HARDWARE, "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        lines += [line(each) for each in found["b200"]]
    lines += ["", STATES]
    for each in found["states"]:
        measured = (
            f"{each['bytes']:.2f} in {each['kernels']} | {each['must_move']:.2f} | "
            f"{each['bytes'] / each['must_move']:.2f}"
        )
        lines.append(f"| {each['layout']} | {measured} |")
    return "\n".join(lines) + "\n"


def line(row: dict) -> str:
    """A row of the table, as text."""
    passes = [f"{b / 1e9:.2f} in {n}" for b, n in zip(row["bytes"], row["kernels"], strict=True)]
    refused = [reason for reason in row["cuda_graph_refused"] if reason]
    cells = [
        text(row["shape"]),
        row["recipe"],
        row["who"],
        ", ".join(f"{dtype} {n}" for dtype, n in row["gemms"].items()),
        *passes,
        f"{sum(row['bytes']) / 1e9:.2f} in {sum(row['kernels'])}",
        "-" if None in row["sectors"] else f"{sum(row['sectors']) / 1e9:.2f}",
        str(sum(map(len, row["scattered"]))),
        f"{row['kept'] / MEBIBYTE:.0f}",
        "; ".join(refused) or f"both; {sum(row['mutated'])} written in place",
        "-" if row["machine_code"] is None else str(row["machine_code"]),
    ]
    return f"| {' | '.join(cells)} |"


def text(shape: Shape) -> str:
    """A shape as --shape takes it."""
    return "x".join(map(str, shape))


def keep(found: dict) -> None:
    """Write what was generated so far, and its tables."""
    found |= {"torch": torch.__version__, "torchao": importlib.metadata.version("torchao")}
    (RESULTS / "aot_torch.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "aot_torch.md").write_text(markdown(found))


def main() -> None:
    """Print the tables, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--show", action="store_true", help="print the kept tables, and generate nothing"
    )
    parser.add_argument(
        "--count",
        action="store_true",
        help="print a line for each row, and neither compile machine code nor keep anything",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="generate these; the others stay as they are",
    )
    parser.add_argument(
        "--recipes",
        nargs="+",
        help="of the rows, generate those of these recipes; the others stay as they are",
    )
    parser.add_argument(
        "--shape",
        nargs="+",
        choices=[text(shape) for shape in SHAPES],
        help="of the rows, generate those of these sequences x tokens",
    )
    parser.add_argument("--gpu", choices=("h200", "b200"), default="h200", help="default: h200")
    arguments = parser.parse_args()
    linears, part = (BY_HARDWARE, "b200") if B200 else (LINEARS, "rows")
    keys = [
        (shape, recipe, who)
        for shape in SHAPES
        for recipe, who in linears
        if recipe in (arguments.recipes or [recipe])
        and text(shape) in (arguments.shape or [text(shape)])
    ]
    if arguments.count:
        for shape, recipe, who in keys:
            print(line(row(shape, recipe, who, block(recipe, who, shape), compiles=False)))
        return
    kept_json = RESULTS / "aot_torch.json"
    found = json.loads(kept_json.read_text()) if kept_json.exists() else {}
    if not arguments.show:
        if "rows" in arguments.parts:
            rows = {
                (tuple(each["shape"]), each["recipe"], each["who"]): each
                for each in found.get(part, [])
            }
            ordered = [(shape, *own) for shape in SHAPES for own in linears]
            for shape, recipe, who in keys:
                rows[shape, recipe, who] = row(shape, recipe, who, block(recipe, who, shape))
                found[part] = [rows[key] for key in ordered if key in rows]
                keep(found)
        if "states" in arguments.parts and not B200:
            found["states"] = [state_row(layout) for layout in LAYOUTS]
        keep(found)
    print(markdown(found), end="")


if __name__ == "__main__":
    main()
