"""What a difference of quantization rules between trainer and rollout costs, as a KL divergence.

Usage: python benchmarks/losses/rollout.py [--seeds 4] [--backends jax torch] [--json FILE]

A tiny model of bytes is trained by each backend under ``blockwise``, and exported. An engine then
computes its policy: transformers' model, whose linears take weights and inputs that a rule of
``fp8ref.checkpoints.rule`` has quantized, to the bit as the simulator does; all else is float32.
Each pair of engines differs in one thing. The second engine, the rollout, continues pieces of a
module of Python's library by sampling, and the divergence of every next byte, sum p_rollout (log
p_rollout - log p_trainer), is averaged over them. Intervals are over seeds of training and of
sampling: Student's, 95%. Two engines of one rule have a divergence of 0: nothing but the rule
differs.
"""

import argparse
import dataclasses
import inspect
import json
import math
import statistics
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fp8ref.checkpoints.rule import WeightRule, by_name
from fp8ref.sim.quantize import scaling
from fp8ref.train import loop
from fp8ref.train.config import config as configs
from fp8ref.train.models import export

RESULTS = Path(__file__).parents[1] / "results" / "rollout.json"
T_95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's quantile of 97.5% for 0, 1, ... degrees of freedom."""

PROMPT, LENGTH, SEQUENCES = 32, 128, 16


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What computes a policy: rules of weights and inputs, None: bfloat16; linears left out."""

    weight: WeightRule | None
    inputs: WeightRule | None
    left_out: str = "lm_head"

    def load(self, path: Path) -> nn.Module:
        """The exported model with this engine's linears; weights are quantized once."""
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                skip = any(part in name for part in self.left_out.split())
                weight, inputs = (None, None) if skip else (self.weight, self.inputs)
                module.weight.data = quantized(module.weight.data, weight)
                module.register_forward_pre_hook(
                    lambda _, args, rule=inputs: (quantized(args[0], rule),)
                )
        return model


def quantized(x: torch.Tensor, rule: WeightRule | None) -> torch.Tensor:
    """x rounded to bfloat16, or cast by a rule and back, float32."""
    if rule is None:
        return x.bfloat16().float()
    rows = x.detach().reshape(-1, x.shape[-1]).numpy()
    return torch.from_numpy(scaling.dequantize(rule.quantize(rows))).reshape(x.shape)


def rules(weight: str, inputs: str, **changes) -> dict[str, WeightRule]:
    pair = {"weight": by_name(weight), "inputs": by_name(inputs)}
    return {role: dataclasses.replace(rule, **changes) for role, rule in pair.items()}


TRAINER = Engine(**rules("torchao_block:bfloat16", "torchao_group:bfloat16"))
UE8M0 = Engine(**rules("deepgemm_ue8m0_block:bfloat16", "deepgemm_ue8m0_group:bfloat16"))
BF16 = Engine(weight=None, inputs=None)


def _with_policy(**changes) -> Engine:
    """The trainer's engine with other decisions of its policy."""
    policy = dataclasses.replace(by_name("torchao_block").policy, **changes)
    pair = {"weight": TRAINER.weight, "inputs": TRAINER.inputs}
    return Engine(**{r: dataclasses.replace(rule, policy=policy) for r, rule in pair.items()})


MASTERS = dataclasses.replace(TRAINER, weight=by_name("torchao_block:float32"))
PAIRS = {
    "the same rule": (TRAINER, TRAINER),
    "amax floor: 1e-12 against 1e-4": (TRAINER, _with_policy(eps=1e-4)),
    "multiply by max / amax against divide by amax / max": (
        TRAINER,
        _with_policy(ratio="amax/max", stored="scale_inv"),
    ),
    "float32 masters against their bfloat16 copies": (MASTERS, TRAINER),
    "float32 scales against UE8M0": (TRAINER, UE8M0),
    "UE8M0 against UE8M0 rounded after the codes": (
        UE8M0,
        Engine(
            **rules(
                "deepgemm_ue8m0_block:bfloat16",
                "deepgemm_ue8m0_group:bfloat16",
                codes_by="unrounded",
            )
        ),
    ),
    "blocks against rows": (
        TRAINER,
        Engine(**rules("torchao_row:bfloat16", "torchao_row:bfloat16")),
    ),
    "gate_proj in FP8 against bfloat16": (
        TRAINER,
        dataclasses.replace(TRAINER, left_out="lm_head gate_proj"),
    ),
    "bfloat16 against FP8, float32 scales": (BF16, TRAINER),
    "bfloat16 against FP8, UE8M0": (BF16, UE8M0),
}
"""{what differs: (trainer's engine, rollout's engine)}."""


def sample(model: nn.Module, prompts: torch.Tensor, seed: int) -> torch.Tensor:
    """Prompts [S, PROMPT] continued to [S, LENGTH] by the model's own policy, temperature 1."""
    torch.manual_seed(seed)
    with torch.no_grad():
        return model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_length=LENGTH,
            min_length=LENGTH,
            pad_token_id=0,
        )


def log_policy(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """float64 log-probabilities of the bytes behind the prompts: [S, LENGTH - PROMPT, 256]."""
    with torch.no_grad():
        logits = model(tokens).logits[:, PROMPT - 1 : -1]
    return logits.double().log_softmax(-1)


def divergence(trainer: nn.Module, rollout: nn.Module, tokens: torch.Tensor) -> dict[str, float]:
    """The mean divergence in nats of a byte, and the largest |log ratio| of a sampled byte."""
    p, q = log_policy(rollout, tokens), log_policy(trainer, tokens)
    sampled = tokens[:, PROMPT:, None]
    ratio = (p - q).gather(-1, sampled).abs().max()
    return {"kl": float((p.exp() * (p - q)).sum(-1).mean()), "largest_log_ratio": float(ratio)}


def codes_that_differ(a: Engine, b: Engine, model: nn.Module) -> float | None:
    """The share of the codes of weights that differ; None where a side has none."""
    if a.weight is None or b.weight is None:
        return None
    weights = [m.weight.detach().numpy() for n, m in model.named_modules() if n.endswith("_proj")]
    with torch.no_grad():
        pairs = [(a.weight.quantize(w).codes, b.weight.quantize(w).codes) for w in weights]
    return sum(int((x != y).sum()) for x, y in pairs) / sum(x.size for x, _ in pairs)


def study(backend: str, seed: int, steps: int) -> list[dict]:
    """The rows of one training run, a pair each."""
    config = configs.load("tiny")
    config = config.replace(
        model={"num_key_value_heads": 4},  # whose projections blocks of 128 divide
        numerics={"recipe": "blockwise"},
        run={"seed": config.run.seed + seed, "steps": steps, "eval_every": steps},
        data={"seed": config.data.seed + seed},
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        run, out = Path(folder, "run"), Path(folder, "weights")
        lines = loop.train(config, backend, run)
        export.export(run, out, say=lambda _: None)
        plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        text = np.frombuffer(inspect.getsource(textwrap).encode(), np.uint8).astype(np.int64)
        starts = np.random.default_rng(seed).integers(0, len(text) - PROMPT, SEQUENCES)
        prompts = torch.from_numpy(np.stack([text[s : s + PROMPT] for s in starts]))
        for what, (trainer, rollout) in PAIRS.items():
            models = trainer.load(out), rollout.load(out)
            tokens = sample(models[1], prompts, seed)
            row = {"backend": backend, "seed": seed, "pair": what, **divergence(*models, tokens)}
            row["codes"] = codes_that_differ(trainer, rollout, plain)
            rows.append(row | {"val_loss": lines[-1]["val_loss"]})
    return rows


def summary(rows: list[dict], backend: str, what: str, key: str = "kl") -> tuple[float, float]:
    """(mean over seeds, half the width of its interval of 95%)."""
    values = [r[key] for r in rows if (r["backend"], r["pair"]) == (backend, what)]
    if len(values) < 2:
        return values[0], math.nan
    half = T_95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), half


def difference(rows: list[dict], what: str, less: str) -> tuple[float, float]:
    """(mean over backends and seeds of one pair's divergence less another's, half the width of its
    interval of 95%)."""
    by = {(r["pair"], r["backend"], r["seed"]): r["kl"] for r in rows}
    values = [kl - by[less, b, seed] for (pair, b, seed), kl in by.items() if pair == what]
    half = T_95[min(len(values), len(T_95)) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), half


def table(rows: list[dict]) -> str:
    """A row a pair, a column a backend, in Markdown, as docs/rollout.md has it."""
    backends = list(dict.fromkeys(r["backend"] for r in rows))
    heads = ["trainer against rollout", "codes of weights", *(f"KL, {b}" for b in backends)]
    lines = [heads, ["---"] * len(heads)]
    for what in PAIRS:
        codes = [r["codes"] for r in rows if r["pair"] == what and r["codes"] is not None]
        cells = ["{:.2e} ± {:.1e}".format(*summary(rows, b, what)) for b in backends]
        cells = ["0" if cell.startswith("0.00") else cell for cell in cells]
        lines.append([what, f"{statistics.mean(codes):.2%}" if codes else "-", *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--backends", nargs="+", default=["jax", "torch"])
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows: list[dict] = []
    for backend in arguments.backends:
        for seed in range(arguments.seeds):
            rows += study(backend, seed, arguments.steps)
            text = json.dumps({"steps": arguments.steps, "rows": rows}, indent=1)
            arguments.json.write_text(text + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
