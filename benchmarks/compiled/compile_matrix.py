"""What torch.compile makes of a sharded model in FP8, on 2 gloo ranks: python
benchmarks/compiled/compile_matrix.py

Every cell trains blocks of linears and ReLU for three steps, and tells the graphs it was compiled
to, what is in them, and whether losses, weights and states are those of eager FSDP2, bit for bit.
Then the trainer's own blocks, with norms and attention, under inductor. A CPU's graphs: how many,
of what, and their bits; nothing of speed.
"""

import argparse
import collections
import contextlib
import inspect
import itertools
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torch._inductor.config as inductor_config
from torch import distributed, nn
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives  # noqa: F401  defines the operators
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from helpers.processes.ranks import run

from fp8ref.crosscheck import bounds
from fp8ref.recipe import by_name
from fp8ref.spec.llama import initial_weights
from fp8ref.torch import delayed
from fp8ref.torch.distributed import compiled_fsdp
from fp8ref.torch.distributed.fp8_gather import FP8Gather
from fp8ref.torch.model import convert
from fp8ref.torch.model.parallel import Parallelism, parallelize
from fp8ref.train.config.config import Config
from fp8ref.train.torch.trainer import Trainer

RECIPES = ("tensorwise", "delayed")
HOW = ("block", "model", "traced")
GATHERS = ("fp8", "bf16")
BLOCK_RECIPES = ("bf16", *RECIPES, "rowwise")
BACKENDS = ("aot_eager", "inductor")
RESULTS = Path(__file__).parents[1] / "results"
_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
COUNTED = {
    _aten._scaled_mm.default: "scaled_mm",
    _c10d.all_gather_into_tensor.default: "all_gather",
    _c10d.all_gather_into_tensor_out.default: "all_gather",
    _c10d.all_reduce.default: "all_reduce",
    _c10d.all_reduce_.default: "all_reduce",
    _c10d.reduce_scatter_tensor.default: "reduce_scatter",
}
NODES = ("scaled_mm", "all_gather", "all_reduce", "reduce_scatter")


class Graphs:
    """Counts the graphs of a backend, each forward and backward one by itself, and nodes in
    them.
    """

    def __init__(self, backend: str) -> None:
        self.name, self.count, self.nodes = backend, 0, collections.Counter()
        self.gathered = 0  # bytes that this rank puts into the graphs' gathers

    @property
    def backend(self):
        return self._aot_eager if self.name == "aot_eager" else "inductor"

    @contextlib.contextmanager
    def counting(self):
        """In this context, which holds the compilation; inductor as its own, but for
        emulate_precision_casts.
        """
        if self.name == "aot_eager":
            yield
            return
        with inductor_config.patch(
            emulate_precision_casts=True, post_grad_custom_post_pass=_Pass(self._read)
        ):
            yield

    def _aot_eager(self, module, inputs):
        """torch's aot_eager, whose graphs are read before they run."""
        from functorch.compile import min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop

        def take(graph_module, example):
            self._read(graph_module.graph)
            return boxed_nop(graph_module, example)

        compiler = aot_autograd(
            fw_compiler=take,
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )
        return compiler(module, inputs)

    def _read(self, graph: torch.fx.Graph) -> None:
        self.count += 1
        for node in graph.nodes:
            if kind := COUNTED.get(node.target):
                self.nodes[kind] += 1
                if kind == "all_gather":
                    self.gathered += node.args[0].meta["val"].nbytes


class _Pass(torch._inductor.custom_graph_pass.CustomGraphPass):
    def __init__(self, read) -> None:
        self._read = read

    def __call__(self, graph: torch.fx.Graph) -> None:
        self._read(graph)

    def uuid(self) -> None:
        """None: inductor leaves its caches alone, which would hide the graphs."""


@contextlib.contextmanager
def eager_gathers():
    """Bytes that this rank puts into gathers of FSDP2, as a list of one number."""
    # torch 2.13's, earlier ones'
    name = (
        "all_gather_single"
        if hasattr(distributed, "all_gather_single")
        else "all_gather_into_tensor"
    )
    theirs, found = getattr(distributed, name), [0]

    def gather(*args, **kwargs):
        given = inspect.signature(theirs).bind(*args, **kwargs).arguments
        found[0] += next(value for key, value in given.items() if key.startswith("input")).nbytes
        return theirs(*args, **kwargs)

    setattr(distributed, name, gather)
    try:
        yield found
    finally:
        setattr(distributed, name, theirs)


def model() -> nn.Module:
    """Two blocks and a linear: three weights and as many biases."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2)), nn.Linear(64, 32)
    )


def built(recipe: str, how: str, gather: str, backend="aot_eager") -> tuple[nn.Module, nn.Module]:
    """What is trained, and what is called; how also none, eager FSDP2."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    fp8, made = gather == "fp8", model()
    if how == "traced":
        converted = convert.convert(
            made, recipe, amax_group=mesh.get_group() if by_name(recipe).delayed else None
        )
        sharded = compiled_fsdp.shard(converted, mesh.get_group(), gather_fp8=fp8)
        return sharded, torch.compile(sharded, fullgraph=True, backend=backend)
    scope = "global" if by_name(recipe).delayed else "local"
    sharded = parallelize(
        made,
        recipe,
        mesh=mesh,
        blocks=list(made)[:2],
        parallelism=Parallelism(
            amax_scope=scope, compile=how, compile_backend=backend, gather_fp8=fp8
        ),
    )
    return sharded, sharded


def batch(step: int) -> torch.Tensor:
    """This rank's rows."""
    generator = torch.Generator().manual_seed(10 * step + distributed.get_rank())
    return torch.randn(32, 64, generator=generator).bfloat16()


def trained(sharded: nn.Module, called: nn.Module, steps: int = 3) -> dict[str, torch.Tensor]:
    """Losses, gradients of the last step, whole weights and states."""
    optimizer, found = torch.optim.AdamW(sharded.parameters(), lr=1e-2), {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = called(batch(step)).float().square().mean()
        loss.backward()
        optimizer.step()
        delayed.update(sharded)
        found[f"loss {step}"] = loss.detach()
    cut = {name.removeprefix("model."): p for name, p in sharded.named_parameters()}
    found |= {
        f"grad of {name}": getattr(p.grad, "_local_tensor", p.grad).clone()
        for name, p in cut.items()
    }
    whole = (
        sharded.weights()
        if isinstance(sharded, compiled_fsdp.Sharded)
        else {name: p.full_tensor() for name, p in cut.items()}
    )
    return (
        found
        | whole
        | {name.removeprefix("model."): b.clone() for name, b in sharded.named_buffers()}
    )


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name].detach(), b[name].detach())]


def cells(backend: str, asked: list[tuple[str, str, str]]) -> list[dict]:
    """On each rank: what became of every cell (recipe, how, gather)."""
    with warnings.catch_warnings():
        # within torch, as it imports its backends
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        eager = {
            key: trained(*built(key[0], "none", key[1]))
            for key in dict.fromkeys((recipe, gather) for recipe, _, gather in asked)
        }
        return [_cell(backend, *cell, eager[cell[0], cell[2]]) for cell in asked]


def _cell(backend: str, recipe: str, how: str, gather: str, eager: dict[str, torch.Tensor]) -> dict:
    torch._dynamo.reset()
    counters.clear()
    graphs = Graphs(backend)
    steps = 3
    with graphs.counting(), eager_gathers() as moved:
        sharded, called = built(recipe, how, gather, graphs.backend)
        lost = differing(eager, trained(sharded, called, steps))
    fp8 = [
        m.fp8_gather.moved
        for m in sharded.modules()
        if isinstance(getattr(m, "fp8_gather", None), FP8Gather)
    ]
    assert all(dtype is torch.uint8 for dtype in fp8)
    return {
        "backend": backend,
        "recipe": recipe,
        "compiled": how,
        "gather": gather,
        "graphs": graphs.count,
        "graph_breaks": sum(counters["graph_break"].values()),
        **{kind: graphs.nodes[kind] for kind in NODES},
        "gathered_bytes": graphs.gathered + moved[0] // steps,
        "differs": lost,
    }


def config(recipe: str, how: str = "none") -> Config:
    """Two blocks of the trainer's Llama."""
    return Config().replace(
        model={
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        data={"sequence_length": 32, "batch_size": 4},
        numerics={"recipe": recipe},
        parallel={"compile": how},
    )


def llama(recipe: str, cases: list[tuple[str, bool]]) -> list[dict]:
    """The trainer's whole blocks under inductor, in one process, against eager ones: distances in
    units of their bounds B-2, B-3 and B-5.

    Norms, softmax and SiLU are other sequences of float32 operations in inductor's kernels than in
    torch's (how a sum is ordered, which exp and rsqrt), and a last bit that differs may move a
    bfloat16 rounding, then an FP8 one, which the layers after it spread.

    cases   (how, emulated): blocks or the whole model; under emulate_precision_casts, or as users
            train, where results that a kernel keeps to itself are not rounded.
    """
    plain = config(recipe)
    tokens = np.random.default_rng(0).integers(0, 256, (4, 33))
    weights = bounds.probe_weights(initial_weights(plain.model, seed=0), seed=0)
    recipes = {d.path: d.recipe for d in plain.decisions()}
    _, _, logits_bound, loss_bound = bounds.forward(tokens, weights, plain.model, recipes)

    def found(given: Config) -> tuple[np.ndarray, float, dict[str, np.ndarray]]:
        torch._dynamo.reset()
        trainer = Trainer(given, weights)
        return trainer.logits(tokens[:, :-1]), trainer.evaluate(tokens), trainer.gradients(tokens)

    logits, loss, gradients = found(plain)
    replicates = [
        Trainer(plain, bounds.rerounded(weights, seed=seed)).gradients(tokens)
        for seed in range(bounds.REPLICATES)
    ]
    limits = {
        name: bounds.gradient(g, [r[name] for r in replicates]) for name, g in gradients.items()
    }
    rows = []
    for how, emulated in cases:
        counters.clear()
        with warnings.catch_warnings(), inductor_config.patch(emulate_precision_casts=emulated):
            warnings.simplefilter("ignore", DeprecationWarning)
            mine = found(config(recipe, how))
        rows.append(
            {
                "recipe": recipe,
                "compiled": how,
                "emulated": emulated,
                "graphs": counters["stats"]["unique_graphs"],
                "logits": float(np.max(np.abs(mine[0] - logits) / logits_bound)),
                "loss": float(abs(mine[1] - loss) / loss_bound),
                "gradients": max(
                    float(np.linalg.norm(mine[2][name] - g)) / limits[name]
                    for name, g in gradients.items()
                ),
            }
        )
    return rows


def table(rows: list[dict], blocks: list[dict]) -> str:
    """Markdown."""
    heads = [
        "backend",
        "recipe",
        "compiled",
        "gather",
        "graphs",
        "breaks",
        *NODES,
        "bytes gathered a step",
        "equal to eager",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for r in rows:
        values = [
            r["backend"],
            r["recipe"],
            r["compiled"],
            r["gather"],
            r["graphs"],
            r["graph_breaks"],
            *(r[kind] for kind in NODES),
        ]
        values += [
            r["gathered_bytes"],
            "bit for bit" if not r["differs"] else f"differs in {len(r['differs'])} tensors",
        ]
        lines.append("| " + " | ".join(map(str, values)) + " |")
    heads = [
        "recipe",
        "compiled",
        "precision casts",
        "graphs",
        "logits / B-2",
        "loss / B-3",
        "gradients / B-5",
    ]
    lines += [
        "",
        "Llama's blocks under inductor: the largest distance from eager ones in units of the "
        "bound (docs/spec, B):",
        "",
    ]
    lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for r in blocks:
        values = [
            r["recipe"],
            r["compiled"],
            "emulated" if r["emulated"] else "inductor's own",
            r["graphs"],
        ]
        values += [f"{r[what]:.3f}" for what in ("logits", "loss", "gradients")]
        lines.append("| " + " | ".join(map(str, values)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--show", action="store_true", help="print the table of the results that are kept"
    )
    if not parser.parse_args().show:
        asked = list(itertools.product(RECIPES, HOW, GATHERS))
        ranks = [run(2, cells, backend, asked, timeout=1800) for backend in BACKENDS]
        assert all(first == second for first, second in ranks), (
            "ranks compiled other graphs, or differ"
        )
        blocks = [
            row
            for recipe in BLOCK_RECIPES
            for row in llama(recipe, list(itertools.product(("block", "model"), (True, False))))
        ]
        kept = {
            "torch": torch.__version__,
            "rows": [row for first, _ in ranks for row in first],
            "blocks": blocks,
        }
        (RESULTS / "compile_matrix.json").write_text(json.dumps(kept, indent=1) + "\n")
    kept = json.loads((RESULTS / "compile_matrix.json").read_text())
    printed = table(kept["rows"], kept["blocks"])
    (RESULTS / "compile_matrix.md").write_text(printed)
    print(printed, end="")


if __name__ == "__main__":
    main()
