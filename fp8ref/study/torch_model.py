"""Record a PyTorch model's linears by hooks, and run copies of it under recipes."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch import nn

from fp8ref.recipe import Recipe
from fp8ref.selection.report import quiet
from fp8ref.study import depth_error, torch_attention
from fp8ref.study import recording as recordings
from fp8ref.study.depth_error import Depth, Seen
from fp8ref.study.recording import Operand, Recording


@contextlib.contextmanager
def record(
    model: nn.Module, *, rows: int, layers: str, heads: int = 0, tokens: int = 0
) -> Iterator[Recording]:
    """As ``fp8ref.study.record``.

    Raises:   ValueError: as there; a compiled model.
    """
    from fp8ref.torch.linear import model_checks

    compiled = [
        name or "the model"
        for name, module in model.named_modules()
        if model_checks.is_compiled(module)
    ]
    if compiled:
        raise ValueError(
            f"a study records a model that runs eagerly; {compiled[0]} is compiled, and may not "
            "call hooks. Record it before torch.compile."
        )
    linears = _linears(model)
    names = recordings.chosen(linears, layers, rows)
    recording = Recording(framework="torch", chosen=tuple(names))
    handles = [
        linears[name].register_forward_hook(
            _keep(recording, name, rows), prepend=True, with_kwargs=True
        )
        for name in names
    ]
    attending = (
        torch_attention.record(model, recording, heads=heads, tokens=tokens)
        if heads
        else contextlib.nullcontext()
    )
    try:
        with attending:
            yield recording
    finally:
        for handle in handles:
            handle.remove()


def depth(
    model: nn.Module,
    run: Callable,
    recipes: Sequence[str | Recipe] | None,
    *,
    rows: int,
    options: dict,
) -> Depth:
    """As ``fp8ref.study.depth``.

    Raises:   ValueError: as there.
    """
    from fp8ref.torch import delayed
    from fp8ref.torch.model import convert

    def under(recipe: Recipe) -> nn.Module:
        with quiet():
            converted = convert.convert(copy.deepcopy(model), recipe, **options)
        if recipe.delayed:  # a pass before, whose amaxes scale the one that is compared
            delayed.calibrate(_Run(converted, run), [()])
        return converted

    def seen(model: nn.Module) -> Seen:
        with torch.no_grad(), record(model, rows=rows, layers="*") as recording:
            out = run(model)
        if not isinstance(out, torch.Tensor) or not out.is_floating_point():
            raise ValueError(
                f"run gives a tensor of floats, such as logits; got {type(out).__name__}."
            )
        in_fp8 = sum(isinstance(module, convert.FP8_LINEARS) for module in model.modules())
        return Seen(recordings.inputs(recording), _numpy(out), in_fp8)

    return depth_error.compare(
        seen(model), seen(model), lambda recipe: seen(under(recipe)), recipes
    )


class _Run(nn.Module):
    """A model that is called by ``run``, as a module without arguments."""

    def __init__(self, model: nn.Module, run: Callable) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self):
        return self.run(self.model)


def attention(model: nn.Module, run: Callable, *, heads: int, tokens: int) -> Recording:
    """What one forward pass has of attention."""
    recording = Recording(framework="torch")
    with torch.no_grad(), torch_attention.record(model, recording, heads=heads, tokens=tokens):
        run(model)
    return recording


def _linears(model: nn.Module) -> dict[str, nn.Module]:
    """nn.Linear, its subclasses, and transformers' Conv1D, whose weight is [K, N]."""
    return {
        name or type(model).__name__: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        or (type(module).__name__, type(module).__module__)
        == ("Conv1D", "transformers.pytorch_utils")
    }


def _keep(recording: Recording, name: str, rows: int) -> Callable:
    hooked = False

    def hook(module: nn.Module, args: tuple, keywords: dict, out: torch.Tensor) -> None:
        nonlocal hooked
        x = (args[0] if args else keywords["input"]).detach()
        if hooked or not x.numel():  # a later call, or no tokens
            return
        first = recording.operands.get(f"{name}/input")
        if first is not None and not np.array_equal(
            _operand(x, rows).kept, first.kept, equal_nan=True
        ):
            # not the first call again, which reentrant checkpointing runs twice
            return
        hooked = out.requires_grad
        weight = cast(torch.Tensor, module.weight).detach()
        recording.operands[f"{name}/input"] = _operand(x, rows)
        recording.operands[f"{name}/weight"] = _operand(
            weight if isinstance(module, nn.Linear) else weight.t(), rows
        )
        if out.requires_grad:
            out.register_hook(keep_grad)

    def keep_grad(grad: torch.Tensor) -> None:
        recording.operands[f"{name}/grad_output"] = _operand(grad.detach(), rows)

    return hook


def _operand(x: torch.Tensor, most: int) -> Operand:
    x = x.reshape(-1, x.shape[-1])
    columns = x.abs().amax(0)
    kept = torch.cat([x[begin:end] for begin, end in recordings.spans(len(x), most)])
    return Operand(
        kept=_numpy(kept), amax=_numpy(columns.amax()), columns=_numpy(columns), rows=len(x)
    )


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().float().cpu().numpy()
