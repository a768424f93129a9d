"""Where a step that failed began to (SEMANTICS K-9): its forward pass in the simulator, its backward pass as the backend computes it.

The step is what ``run.failure`` kept. It runs again on one device, whichever mesh it failed on.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp8ref import llama
from fp8ref.check import nonfinite, quantizers
from fp8ref.check.compare import Report
from fp8ref.check.crosscheck import Observation, compare_quantized
from fp8ref.check.nonfinite import First
from fp8ref.check.states import States
from fp8ref.formats import FLOAT32
from fp8ref.recipe import OPERANDS, REDUCED_AXES, Recipe
from fp8ref.run import failure, loop, progress
from fp8ref.run.config import Config, ConfigError
from fp8ref.run.failure import Failure
from fp8ref.run.sections import ParallelConfig
from fp8ref.sim import delayed, model, scaling
from fp8ref.sim.model import Site


@dataclass(frozen=True, kw_only=True)
class Replay:
    """metrics: loss and grad_norm of the step as it ran again; operands: those whose codes and scales were compared."""

    path: Path
    failed: Failure
    metrics: Mapping[str, float]
    first: First | None
    report: Report
    operands: int

    @property
    def reproduced(self) -> bool:
        """Whether the step fails on one device too."""
        return not all(map(math.isfinite, self.metrics.values()))

    @property
    def faithful(self) -> bool:
        """Whether the backend's codes and scales are the simulator's: then the numbers went wrong, and not what computes with them."""
        return all(check.ok for name, check in self.report.checks.items() if "/finite/" not in name)

    @property
    def ok(self) -> bool:
        """Nothing was found."""
        return self.first is None and not self.reproduced and self.report.ok

    def write(self, path: Path) -> None:
        about: dict[str, Any] = {"first": self.first and self.first.to_dict(), "reproduced": self.reproduced, "faithful": self.faithful}
        about |= {
            "backend": self.failed.backend,
            "metrics": {k: str(v) for k, v in self.metrics.items()},
            "failed": dict(self.failed.metrics),
        }
        path.write_text(json.dumps(self.report.to_dict() | {"ok": self.ok} | about, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def print(self) -> None:
        console = progress.console()

        def say(text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        config, (rows, length) = self.failed.config, self.failed.tokens.shape
        devices, then = config.parallel.devices, self.failed.metrics
        say(f"{self.path}: step {then['step']}, {self.failed.backend}, recipe {config.numerics.recipe}")
        say(f"as it failed, on {devices} device{'s' * (devices > 1)}: loss {then['loss']}, gradient norm {then['grad_norm']}")
        say(
            f"on one device, with all {rows} sequences of {length - 1} tokens: loss {self.metrics['loss']}, gradient norm {self.metrics['grad_norm']}"
        )
        if config.data.microbatches > 1:
            say(f"scales were of each of data.microbatches = {config.data.microbatches} parts of the batch, and are of all of it here")
        if devices > 1 and config.parallel.amax_scope == "local":
            say("scales of input and grad_output were of each device's part of the batch (parallel.amax_scope), and are of all of it here")
        if self.first:
            say(f"first not finite, by {self._who(self.first.found_by)}: {self.first}\n  {self.first.why}")
            if not self.reproduced:
                say(f"{self.failed.backend}'s own loss and gradient are finite on one device.")
        elif self.reproduced:
            say("the step fails again, and every value that was looked at is finite.")
        else:
            say("not reproduced: every value is finite on one device. Another device's fault, or sums in another order, made it otherwise.")
        for check in self.report.failures if not self.faithful else []:
            if "/finite/" not in check.name:
                say(check.detail)
        if not self.operands:
            say("no operand is in FP8")
        elif self.faithful:
            verdict = ": numbers went wrong, not what quantises them" if self.first else ""
            say(f"codes and scales of all {self.operands} FP8 operands are the simulator's{verdict}")
        else:
            say(f"codes or scales of {self.failed.backend} are not the simulator's, as above: a fault of the implementation")

    def _who(self, by: str) -> str:
        return "the simulator" if by == "sim" else by


def replay(path: Path) -> Replay:
    """Run a failed step again; path: its directory or its manifest.json.

    Raises:   ConfigError: it cannot be read, or not on one device; ImportError: its backend is not installed.
    """
    if not path.exists():
        raise ConfigError(f"--replay names a step that a run kept, such as RUN/{failure.FOLDER}/step-00000012; {path} is not there.")
    failed = failure.read(path)
    if failed.config.parallel.devices > 1 and failed.config.optimizer.kind == "adamw_fp8":
        raise ConfigError(
            f"{path}: moments in FP8 lie in blocks of each process's piece (T-6), so that a step of {failed.config.parallel.devices} processes is not "
            "read by one. Train with optimizer.kind 'adamw' to replay what fails."
        )
    config = dataclasses.replace(failed.config, parallel=ParallelConfig()).replace(data={"microbatches": 1})
    tokens = failed.tokens
    progress.say(
        f"replaying step {failed.metrics['step']} of {failed.backend} on one device: its global batch of {tokens[:, 1:].size:,} tokens at once"
    )
    # the state has all weights: those that a trainer would start from are not drawn
    trainer = loop.trainer(failed.backend, config, {k: np.zeros(s, np.float32) for k, s in llama.parameter_shapes(config.model).items()})
    trainer.load(failed.state, int(failed.metrics["step"]))
    recipes = {d.path: d.recipe for d in config.decisions()}
    states = {name: delayed.DelayedState(*parts) for name, parts in trainer.fp8_states().items()}
    report = Report()
    with progress.bar(f"replay {config.numerics.recipe}", 4) as advance, np.errstate(all="ignore"):  # infinities are what is looked for
        first, finite = simulated(report, tokens, trainer.weights(), config, recipes, states)
        advance("the simulator's forward pass")
        seen = observed(trainer, tokens, config)
        operands = check_codes(report, seen, recipes, states)
        advance("every FP8 GEMM")
        metrics = trainer.step(tokens)  # last: were it finite, it would change the weights
        advance("the step")
        before = [o for o in seen if o.gemm == "output" and (o.layer, "output") in finite]  # where the simulator's values are finite
        sites: Iterable[tuple[Site, str]] = of_gemms(before, recipes, tokens.shape)
        if first is None:
            sites = itertools.chain(sites, in_backend(trainer, tokens, config, recipes, seen, metrics))
        for site, why in sites:
            found = nonfinite.look(site, report.check(f"{site.module}/{site.role}/finite/{failed.backend}"), by=failed.backend, why=why)
            if found:
                first = found
                break
        advance("its gradients")
    return Replay(path=path, failed=failed, metrics=metrics, first=first, report=report, operands=operands)


def simulated(
    report: Report, tokens: np.ndarray, weights: Mapping[str, np.ndarray], config: Config, recipes: Mapping[str, Recipe], states: States
) -> tuple[First | None, set[tuple[str, str]]]:
    """The first value of the simulated forward pass that is not finite, the loss included; module and role of all values before it."""
    first: First | None = None
    finite: set[tuple[str, str]] = set()

    def watch(site: Site) -> None:
        nonlocal first
        if first is None:
            first = nonfinite.look(site, report.check(f"{site.module}/{site.role}/finite/sim"), by="sim")
        if first is None:
            finite.add((site.module, site.role))

    logits = model.forward(tokens[:, :-1], weights, config.model, recipes, states=states, watch=watch)
    if first is None:
        losses = model.losses(logits, tokens[:, 1:])
        target = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        watch(
            Site(
                module="loss", role="of a token", value=losses, parts={"largest logit": logits.max(-1), "its target's": target}, fmt=FLOAT32
            )
        )
        total = model.in_range(losses.sum())
        watch(
            Site(module="loss", role="mean", value=np.asarray(total / losses.size), parts={"sum over the batch": losses.sum()}, fmt=FLOAT32)
        )
    return first, finite


def observed(trainer: loop.Trainer, tokens: np.ndarray, config: Config) -> list[Observation]:
    """Every FP8 GEMM of a pass, in the order of the forward pass and then of the backward one; callbacks come in any."""
    seen: list[Observation] = []
    trainer.observe(tokens, lambda layer, which, a, b, out: seen.append(Observation(trainer.backend, layer, which, a, b, out)))
    place = {name: i for i, name in enumerate(llama.linear_shapes(config.model))}
    gemms = list(OPERANDS)
    return sorted(seen, key=lambda o: (o.gemm != "output", place[o.layer] if o.gemm == "output" else -place[o.layer], gemms.index(o.gemm)))


def check_codes(report: Report, seen: Sequence[Observation], recipes: Mapping[str, Recipe], states: States) -> int:
    """Codes and scales of every operand against the simulator's, bit for bit. Returns how many operands."""
    count = 0
    who = quantizers.create({o.backend for o in seen})
    for o in seen:
        spec = recipes[o.layer].gemms[o.gemm]
        for role, (hp, codes, scale), how, axis in zip(OPERANDS[o.gemm], (o.a, o.b), (spec.a, spec.b), REDUCED_AXES[o.gemm], strict=True):
            assert how is not None
            state = states[f"{o.layer}/{role}"] if how.delayed else None
            compare_quantized(report, f"{o.layer}/{role}", hp, how, axis, {o.backend: (codes, scale)}, who, state)
            count += 1
    return count


def of_gemms(seen: Sequence[Observation], recipes: Mapping[str, Recipe], batch: tuple[int, ...]) -> Iterator[tuple[Site, str]]:
    """Operands and output of FP8 GEMMs as sites, and why one would not be finite where its parts do not say."""
    for o in seen:
        operands = dict(zip(OPERANDS[o.gemm], (o.a, o.b), strict=True))
        for role, (hp, _, scale) in operands.items():
            why = f"it comes from {_before(o.layer, recipes)}" if role == "grad_output" else _elsewhere(o.backend)
            yield Site(module=o.layer, role=role, value=_whole(hp, role, batch)), why
            yield Site(module=o.layer, role=f"{role} scale", value=np.asarray(scale)), "the tensor's values are finite"
        out = np.asarray(o.out)
        factors = {} if np.isfinite(out).all() else _factors(o, recipes[o.layer], batch)
        yield Site(module=o.layer, role=o.gemm, value=_whole(out, o.gemm, batch), factors=factors), ""


def _elsewhere(backend: str) -> str:
    return f"the simulator's is finite: {backend} sums in another order, or has a fault"


def in_backend(
    trainer: loop.Trainer,
    tokens: np.ndarray,
    config: Config,
    recipes: Mapping[str, Recipe],
    seen: Sequence[Observation],
    metrics: Mapping[str, float],
) -> Iterator[tuple[Site, str]]:
    """What a backend computed after the FP8 GEMMs of the forward pass: logits, loss; then GEMMs and parameters' gradients from the last layer to
    the first; their norm. Each with why it would not be finite, where its parts do not say: the simulator's forward pass is."""
    elsewhere = _elsewhere(trainer.backend)
    if not math.isfinite(metrics["loss"]):
        yield Site(module="lm_head", role="output", value=trainer.logits(tokens[:, :-1])), elsewhere
        yield Site(module="loss", role="mean", value=np.asarray(metrics["loss"])), elsewhere
    if all(map(math.isfinite, metrics.values())):
        yield from of_gemms([o for o in seen if o.gemm != "output"], recipes, tokens.shape)
        return
    gradients = trainer.gradients(tokens)
    for module in _backward(config.model):
        yield from of_gemms([o for o in seen if o.layer == module and o.gemm != "output"], recipes, tokens.shape)
        why = f"a sum over {tokens[:, 1:].size} tokens; no FP8 operand or output before it is other than finite"
        yield Site(module=module, role="weight's gradient", value=gradients[f"{module}.weight"]), why
    name, largest = max(gradients.items(), key=lambda item: float(np.abs(item[1]).max()))
    index = tuple(int(i) for i in np.unravel_index(np.abs(largest).argmax(), largest.shape))
    squares = math.fsum(float(np.square(g.astype(np.float64)).sum()) for g in gradients.values())
    why = f"all gradients are finite; the sum of their squares is {squares:.4g}, the largest {name} {list(index)}: {largest[index]:.9g}"
    yield Site(module="gradient", role="norm", value=np.asarray(metrics["grad_norm"])), why


def _factors(o: Observation, recipe: Recipe, batch: tuple[int, ...]) -> dict[str, np.ndarray]:
    """The operands as values, the reduced axis last: what ``Site.factors`` asks for."""
    found: dict[str, np.ndarray] = {}
    spec = recipe.gemms[o.gemm]
    for role, (hp, codes, scale), how, axis in zip(OPERANDS[o.gemm], (o.a, o.b), (spec.a, spec.b), REDUCED_AXES[o.gemm], strict=True):
        del hp
        assert how is not None
        scale = np.asarray(scale, np.float32)
        q = scaling.Quantized(np.asarray(codes), scale, scaling.scale_inv_from_scale(scale), how.fmt, how.granularity, axis)
        value = scaling.dequantize(q)
        found[role] = value if axis == 1 else value.T
    if o.gemm != "grad_weight":  # whose rows are no tokens
        first = OPERANDS[o.gemm][0]
        found[first] = _whole(found[first], first, batch)
    return found


def _whole(value: np.ndarray, role: str, batch: tuple[int, ...]) -> np.ndarray:
    """[tokens, ...] as [sequence, position, ...]; what has no tokens as it is."""
    if role in ("weight", "grad_weight"):
        return value
    return value.reshape(batch[0], batch[1] - 1, -1)


def _backward(config: llama.LlamaConfig) -> list[str]:
    """Modules with parameters, in the order in which the backward pass reaches them."""
    found = [llama.EMBEDDING.removesuffix(".weight")]
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        found += [f"{layer}.input_layernorm", *(f"{layer}.self_attn.{p}_proj" for p in "qkvo")]
        found += [f"{layer}.post_attention_layernorm", *(f"{layer}.mlp.{p}_proj" for p in ("gate", "up", "down"))]
    found += ["model.norm"] if config.tie_word_embeddings else ["model.norm", "lm_head"]
    return found[::-1]


def _before(linear: str, linears: Container[str]) -> str:
    """What the backward pass goes through just before a linear."""
    layer, _, name = linear.rpartition(".")
    if name in ("gate_proj", "up_proj"):
        return f"silu(gate) * up of {layer}, after down_proj's grad_input"
    if name in ("q_proj", "k_proj", "v_proj"):
        return f"the attention of {layer}, after o_proj's grad_input"
    if name == "o_proj":
        return f"{layer.removesuffix('.self_attn')}.post_attention_layernorm, or the residual beside it"
    if name == "down_proj":
        block, _, index = layer.removesuffix(".mlp").rpartition(".")
        after = f"{block}.{int(index) + 1}"
        return f"{after}.input_layernorm, or the residual beside it" if f"{after}.mlp.down_proj" in linears else "model.norm"
    return "the loss"
