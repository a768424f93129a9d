"""Kernels, bytes and waits of one linear's step in eager PyTorch, next to bf16 and torchao: python benchmarks/torch_launches.py

A step is a forward pass, a backward pass, fused AdamW, and ``delayed.update`` under delayed scaling, on a CPU, seen by a dispatch mode: every
operator that is not a view counts as one kernel, and moves the bytes of its tensors. What a GPU's libraries launch in one operator is not seen.
Each linear of a model has the same kernels, but for those of an update, which are for all linears together.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref.torch import convert, delayed

RESULT = Path(__file__).parent / "results" / "torch_launches.json"
TOKENS, SIZE = 256, 256
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view", "lift_fresh"}
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
    """Counts operators that are no views, inside torchao's tensors too, and the bytes that they read and write."""

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
        if name not in FREE and not func.is_view and not self.copying:
            self.names.append(name)
            self.bytes += sum(x.nbytes for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor))
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


def model_of(recipe: str, who: str) -> nn.Module:
    """One linear in bfloat16, converted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False)).bfloat16()
    if who == "bf16":
        return model
    if who == "torchao":
        return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    if who == "fp8ref, Linear":
        model[0] = convert.Linear.of(model[0], recipe)
        return model
    return convert.convert(model, recipe)


def measured(recipe: str, who: str) -> dict:
    """What one step does, the second of two, so that nothing is made for the first time."""
    model = model_of(recipe, who)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, kept = torch.randn(TOKENS, SIZE).bfloat16().requires_grad_(), []

    def passes() -> None:
        x.grad = None
        optimizer.zero_grad()
        model(x).backward(torch.ones(TOKENS, SIZE, dtype=torch.bfloat16))

    passes()
    optimizer.step()
    delayed.update(model)
    with Waits() as waits:
        with Kernels() as in_passes:
            passes()
        with Kernels() as in_update:
            optimizer.step()
            delayed.update(model)
    optimizer.zero_grad()
    known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x)
    own = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept if t.untyped_storage()._cdata not in known}
    return {
        "recipe": recipe,
        "who": who,
        "kernels": len(in_passes.names),
        "update": len(in_update.names),
        "bytes": in_passes.bytes,
        "kept": sum(own.values()),
        "waits": waits.count,
    }


def main() -> None:
    """Print the table, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help=f"write the rows here, such as {RESULT.name}")
    options = parser.parse_args()
    rows = [measured(*linear) for linear in LINEARS]
    print("| recipe | linear | kernels | of an update | KiB moved | KiB kept | waits |\n|---|---|---|---|---|---|---|")
    for row in rows:
        print(line(row))
    if options.json:
        options.json.write_text(json.dumps({"tokens": TOKENS, "size": SIZE, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def line(row: dict) -> str:
    """A row of the table."""
    kib = [f"{row[key] / 1024:,.0f}" for key in ("bytes", "kept")]
    return f"| {row['recipe']} | {row['who']} | {row['kernels']} | {row['update']} | {kib[0]} | {kib[1]} | {row['waits']} |"


if __name__ == "__main__":
    main()
