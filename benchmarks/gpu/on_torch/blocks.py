"""A training step of blocks of Llama, without embedding and head: forward, backward and fused
AdamW, each block compiled.

Parameters, gradients and moments are bfloat16; all variants train the very same parameters, so that
what they hold is in memory once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._dynamo.utils import counters

from fp8ref.spec import llama
from fp8ref.spec.llama import LlamaConfig
from fp8ref.torch import delayed
from fp8ref.torch.delayed import state_checks as delayed_checks
from fp8ref.train.torch.llama.llama import Layer
from measuring import rounding, timing
from on_torch.bench import Bench
from on_torch.linears import differences
from on_torch.variants import BY_NVIDIA, CUDA_GRAPHS, compiled, convert

SETS = 3  # of inputs that are rotated
MOST = 50  # steps of a row
Step = Callable[[int], object]


@dataclass(frozen=True)
class Model:
    """One variant. forward_backward leaves gradients in the parameters; step takes an optimizer
    step by them, too.
    """

    layers: nn.ModuleList
    forward_backward: Callable[[int], torch.Tensor]
    step: Step


class Blocks:
    """Blocks of a config, from which variants are made. shape: sequences, and tokens of each."""

    def __init__(self, bench: Bench, config: LlamaConfig, shape: tuple[int, int]) -> None:
        self.bench, self.config = bench, config
        with torch.device(bench.device):
            self.shared = nn.ModuleList(
                [Layer(config) for _ in range(config.num_hidden_layers)]
            ).bfloat16()
        with torch.no_grad():
            for parameter in self.shared.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=config.initializer_range)
                else:
                    parameter.fill_(1.0)
        self.optimizer = torch.optim.AdamW(self.shared.parameters(), lr=1e-6, fused=True)
        self.tables = [
            torch.from_numpy(table).to(bench.device)
            for table in llama.rotary_tables(config, shape[1])
        ]
        whole = *shape, config.hidden_size
        self.xs = [bench.random(*whole).requires_grad_() for _ in range(SETS)]
        self.gs = [bench.random(*whole, scale=1e-3) for _ in range(SETS)]

    def model(self, variant: str) -> Model:
        with torch.device("meta"):
            layers = nn.ModuleList(
                [Layer(self.config) for _ in range(self.config.num_hidden_layers)]
            )
        layers.load_state_dict(dict(self.shared.named_parameters()), assign=True)
        convert(layers, variant)
        graphs, tables = variant.endswith(CUDA_GRAPHS), self.tables
        # a CUDA graph is of one layer's weights
        forwards = [compiled(self.bench, called, variant) for _ in (layers if graphs else [0])]
        states = any(delayed.states(layers))
        delayed_checks.unwatch(layers)  # all variants train these weights

        def forward_backward(i: int) -> torch.Tensor:
            h = self.xs[i % SETS]
            if graphs:
                torch.compiler.cudagraph_mark_step_begin()
            for j, layer in enumerate(layers):
                h = forwards[j % len(forwards)](layer, h, *tables)
            h.backward(self.gs[i % SETS])
            self.xs[i % SETS].grad = None
            return h.detach()

        def step(i: int) -> None:
            forward_backward(i)
            self.optimizer.step()
            if states:
                delayed.update(layers)
            self.optimizer.zero_grad()

        # scales of what they will see
        for i in range(2 if states or variant in BY_NVIDIA else 0):
            forward_backward(i)
            delayed.update(layers)
            self.optimizer.zero_grad()
        return Model(layers, forward_backward, step)

    def clear(self) -> None:
        """No gradients, of parameters or inputs, which all variants share."""
        self.optimizer.zero_grad()
        for x in self.xs:
            x.grad = None

    def gradients(self, model: Model) -> list[torch.Tensor]:
        """What blocks add to their first input, without the residual, which no linear touches; and
        two gradients.
        """
        added = model.forward_backward(0) - self.xs[0].detach()
        found = [
            added,
            *(
                self.shared.get_parameter(name).grad.clone()
                for name in ("0.mlp.gate_proj.weight", "0.mlp.down_proj.weight")
            ),
        ]
        self.optimizer.zero_grad()
        return found


def called(layer: nn.Module, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return layer(h, cos, sin)


def run(bench: Bench, config: LlamaConfig, shape: tuple[int, int], variants: Sequence[str]) -> dict:
    """Rows of steps, ``speedup`` over bfloat16; host and device together, as a step of training
    takes them.
    """
    blocks = Blocks(bench, config, shape)
    models: dict[str, Model] = {}
    errors: dict[str, str] = {}
    graphs: dict[str, int] = {}
    accuracy: dict[str, list[float]] = {}
    expected: list[torch.Tensor] | None = None
    for name in variants:
        before = counters["stats"]["unique_graphs"]
        try:
            model = blocks.model(name)
            found = blocks.gradients(model)
            expected = expected or found
            accuracy[name] = rounding.check(differences(found, expected), rounding.BLOCKS)
            models[name] = model
        except Exception as error:  # the others are still to be measured
            errors[name] = timing.message(error)
            blocks.clear()  # gradients of a pass that broke off
        graphs[name] = counters["stats"]["unique_graphs"] - before
    measured = bench.timed(
        {name: model.step for name, model in models.items()},
        most=MOST,
        queued=False,
        row_seconds=0.2,
    )
    measured.errors.update(errors)
    return {
        "sequences": shape[0],
        "tokens": shape[1],
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "parameters": "bfloat16",
        "rows": timing.rows(measured, "bf16"),
        "graphs": graphs,
        "relative_errors": accuracy,
    }
