"""Kernels, bytes and waits of one linear and of a model's step in eager PyTorch, next to bf16 and
torchao.

Usage: python benchmarks/compiled/torch_launches.py

A step is a forward pass, a backward pass, fused AdamW, and ``delayed.update`` under delayed
scaling, on a CPU, seen by a dispatch mode: every operator that is not a view counts as one kernel,
and moves the bytes of its tensors. What a GPU's libraries launch in one operator is not seen. Each
linear of a model has the same kernels, but for those of an update, which are for all linears
together. The model is the trainer's Llama, of two layers in bfloat16, with its loss.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref.spec.llama import LlamaConfig
from fp8ref.torch import delayed
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.model import convert
from fp8ref.train.torch.llama.cross_entropy import cross_entropy
from fp8ref.train.torch.llama.llama import Llama

RESULT = Path(__file__).parents[1] / "results" / "torch_launches.json"
TOKENS, SIZE = 256, 256
MODEL = LlamaConfig(
    hidden_size=SIZE,
    intermediate_size=2 * SIZE,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "lift_fresh",
}
WAITS = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero"}
CONTIGUOUS = torch.Tensor.contiguous
LINEARS = (
    ("bf16", "bf16"),
    ("tensorwise", "torchao"),
    ("tensorwise", "fp8ref, Float8Linear"),
    ("tensorwise", "fp8ref, Linear"),
    ("rowwise", "torchao"),
    ("rowwise", "fp8ref, Float8Linear"),
    ("rowwise", "fp8ref, Linear"),
    ("rowwise_with_gw_hp", "torchao"),
    ("rowwise_with_gw_hp", "fp8ref, Float8Linear"),
    ("rowwise_with_gw_hp", "fp8ref, Linear"),
    ("delayed", "fp8ref, Linear"),
)


class Kernels(TorchDispatchMode):
    """Counts operators that are no views, inside torchao's tensors too, and the bytes that they
    read and write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes = 0
        self.copying = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if Float8TrainingTensor in types:
            return NotImplemented  # it dispatches again, on its codes
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if (
            name not in FREE
            and not name.startswith("profiler::")
            and not func.is_view
            and not self.copying
        ):
            self.names.append(name)
            # which is the result
            given = {key: x for key, x in (kwargs or {}).items() if key != "out"}
            self.bytes += sum(
                x.nbytes for x in tree_leaves((args, given, out)) if isinstance(x, torch.Tensor)
            )
        return out

    def contiguous(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """torch.Tensor.contiguous, whose copy the mode does not see inside torchao's tensors."""
        if not x.is_contiguous():
            self.names.append("contiguous")
            self.bytes += 2 * x.nbytes
        self.copying = True
        try:
            return CONTIGUOUS(x, *args, **kwargs)
        finally:
            self.copying = False

    def __enter__(self):
        torch.Tensor.contiguous = lambda x, *args, **kwargs: self.contiguous(x, *args, **kwargs)
        return super().__enter__()

    def __exit__(self, *error):
        torch.Tensor.contiguous = CONTIGUOUS
        return super().__exit__(*error)


class Waits(TorchFunctionMode):
    """Counts reads of tensors' elements on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") in WAITS
        return func(*args, **(kwargs or {}))


def converted(model: nn.Module, recipe: str, who: str) -> nn.Module:
    """A model's linears in FP8, but lm_head."""
    if who == "bf16":
        return model
    if who == "torchao":
        config = Float8LinearConfig.from_recipe_name(recipe)
        return convert_to_float8_training(
            model, config=config, module_filter_fn=lambda module, name: "lm_head" not in name
        )
    if who == "fp8ref, Linear":
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and name != "lm_head":
                model.set_submodule(name, Linear.of(module, recipe))
        return model
    return convert.convert(
        model, recipe, filter_fqns=["lm_head"] if hasattr(model, "lm_head") else []
    )


def measured(recipe: str, who: str) -> dict:
    """What one step of a linear does, and what its forward pass keeps."""
    torch.manual_seed(0)
    model = converted(nn.Sequential(nn.Linear(SIZE, SIZE, bias=False)).bfloat16(), recipe, who)
    x, kept = torch.randn(TOKENS, SIZE).bfloat16().requires_grad_(), []

    def passes() -> None:
        x.grad = None
        model(x).backward(torch.ones(TOKENS, SIZE, dtype=torch.bfloat16))

    found = counted(model, passes)
    known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x)
    own = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in kept
        if t.untyped_storage()._cdata not in known
    }
    return {"recipe": recipe, "who": who, **found, "kept": sum(own.values())}


def of_model(recipe: str, who: str) -> dict:
    """What one step of the model does."""
    torch.manual_seed(0)
    model = converted(Llama(MODEL).bfloat16(), recipe, who)
    tokens = torch.randint(0, MODEL.vocab_size, (2, TOKENS // 2 + 1))

    def passes() -> None:
        cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        ).mean().backward()

    return {"recipe": recipe, "who": who, **counted(model, passes)}


def counted(model: nn.Module, passes: Callable[[], None]) -> dict:
    """What one step does, the second of two, so that nothing is made for the first time."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    passes()
    optimizer.step()
    delayed.update(model)
    optimizer.zero_grad()
    with Waits() as waits:
        with Kernels() as in_passes:
            passes()
        with Kernels() as in_update:
            optimizer.step()
            delayed.update(model)
    optimizer.zero_grad()
    return {
        "kernels": len(in_passes.names),
        "update": len(in_update.names),
        "bytes": in_passes.bytes,
        "waits": waits.count,
    }


def main() -> None:
    """Print the table, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help=f"write the rows here, such as {RESULT.name}")
    options = parser.parse_args()
    rows, steps = (
        [measured(*linear) for linear in LINEARS],
        [of_model(*linear) for linear in LINEARS],
    )
    print(
        "| recipe | linear | kernels | of an update | KiB moved | KiB kept | waits |\n"
        "|---|---|---|---|---|---|---|"
    )
    for row in rows:
        kib = [f"{row[key] / 1024:,.0f}" for key in ("bytes", "kept")]
        print(
            f"| {row['recipe']} | {row['who']} | {row['kernels']} | {row['update']} | {kib[0]} "
            f"| {kib[1]} | {row['waits']} |"
        )
    print(
        "\n| recipe | linears of a model | kernels | of an update | MiB moved | waits |\n"
        "|---|---|---|---|---|---|"
    )
    for row in steps:
        print(
            f"| {row['recipe']} | {row['who']} | {row['kernels']} | {row['update']} | "
            f"{row['bytes'] / 2**20:,.1f} | {row['waits']} |"
        )
    if options.json:
        found = {
            "tokens": TOKENS,
            "size": SIZE,
            "torch": torch.__version__,
            "rows": rows,
            "steps": steps,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
