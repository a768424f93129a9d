"""Run directories with losses of our choosing, written as a training run writes them."""

import json
from pathlib import Path

import numpy as np

from fp8ref.train.config.config import Config
from fp8ref.train.report import runs
from fp8ref.train.run import log

DATA = {"source": "text", "files": 3, "sha256": "ab" * 32}


def make(
    path: Path,
    config: Config,
    losses,
    *,
    recipe: str = "bf16",
    seed: int = 0,
    backend: str = "torch",
    status: str = "finished",
    statistics=(),
    more=None,
    data=DATA,
    proof=None,
    speed: float = 1000.0,
) -> runs.Run:
    """Write a run and read it back. more: keys for the manifest; validation every tenth step, a
    tenth above the loss.
    """
    losses = np.asarray(losses, np.float64)
    config = config.replace(
        numerics={"recipe": recipe}, run={"seed": seed, "steps": 60}, data={"seed": seed}
    )
    path.mkdir(parents=True, exist_ok=True)
    proofs = {recipe: proof} if proof else None
    manifest = manifest_of(config, backend, data=data, proofs=proofs)
    written = log.create(path, config, manifest)
    for step, loss in enumerate(losses.tolist()):
        line = {"step": step, "loss": loss, "grad_norm": 1.0 + loss, "tokens_per_second": speed}
        written.step(
            line | ({"val_loss": loss + 0.1} if step % 10 == 9 else {}) | {"seconds": 0.1 * step}
        )
    written.status(status, **(more or {}))
    written.close()
    if statistics:
        (path / "statistics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in statistics)
        )
    return runs.read(path)


def begin(out: Path, config: Config, backend: str = "jax", start: int = 0) -> log.RunLog:
    """A run that has taken no step."""
    out.mkdir(parents=True, exist_ok=True)
    return log.create(out, config, manifest_of(config, backend), start=start)


def manifest_of(config: Config, backend: str, *, data=DATA, proofs=None) -> dict:
    """The manifest of a run on a device of no name."""
    return log.manifest(
        config, backend, data=data, decisions=config.decisions(), device="cpu: test", proofs=proofs
    )


def finished(out: Path, config: Config, backend: str = "jax") -> None:
    """A run of one step."""
    run = begin(out, config, backend)
    run.step({"step": 0, "loss": 5.5, "seconds": 0.5})
    run.status("finished", final={"step": 0})
    run.close()


def contents(folder: Path) -> dict[Path, bytes]:
    """All files but the lock, which stays when a process has left."""
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def falling(steps: int = 60, *, above: float = 0.0, wobble: int | None = None) -> np.ndarray:
    """A loss that falls from 5.5 to about 2, and by ``above`` less as it does; wobble: a seed of
    noise from step to step.
    """
    step = np.arange(steps)
    noise = 0 if wobble is None else 0.02 * np.random.default_rng(wobble).standard_normal(steps)
    return 2 + 3.5 * np.exp(-step / 10) + above * (1 - np.exp(-step / 10)) + noise


def three_seeds(root: Path, config: Config, backend: str = "torch") -> list[runs.Run]:
    """bf16 runs whose losses end about 2, a few hundredths apart: their s is 0.05, t s sqrt(2)
    0.206 and t s sqrt(4/3) 0.169.
    """
    offsets = {0: 0.0, 1: 0.05, 2: -0.05}
    return [
        make(
            root / f"bf16-{seed}",
            config,
            falling(above=above, wobble=seed),
            seed=seed,
            backend=backend,
        )
        for seed, above in offsets.items()
    ]
