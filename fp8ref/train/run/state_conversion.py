"""A training state under another config: other layouts, other delayed scales (spec E-8).

    source = Source(weights=trainer.weights(), moments=trainer.moments(), step=step)  # in float32
    other.adopt(converted(source, config, backend), step)

An ablation (``ablation_start``) begins variants from a checkpoint with other names or formats.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from fp8ref.formats import Format
from fp8ref.shared.errors import ConfigError
from fp8ref.sim import delayed as sim_delayed
from fp8ref.sim.states import moments as sim_moments
from fp8ref.sim.states import states as sim_states
from fp8ref.spec.delayed import DelayedScaling
from fp8ref.spec.states.layouts import Layout, Scalars
from fp8ref.train.config.config import Config
from fp8ref.train.run import train_state

_NO_STEP = Scalars(*[0.0] * len(Scalars._fields))

Delayed = Mapping[str, tuple[np.ndarray, ...]]
"""{"<linear>/<role>": (scale, amax history, observed updates)}."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a state is worth.

    weights  float32 by parameter.
    moments  by ``train_state.MOMENTS``, then by parameter; {}: none was made yet, and all are 0.
    step     steps taken.
    delayed  states of delayed scaling that the run has.
    casts    format and scaling of those states; one that the other config has otherwise is not
             taken. {}: as that has them.
    amaxes   () -> {"<linear>/<role>": amax} of a batch, which fills other states' histories.
    """

    weights: Mapping[str, np.ndarray]
    moments: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    step: int = 0
    delayed: Delayed = field(default_factory=dict)
    casts: Mapping[str, tuple[Format, DelayedScaling]] = field(default_factory=dict)
    amaxes: Callable[[], Mapping[str, float]] = dict


def converted(source: Source, config: Config, backend: str) -> dict[str, np.ndarray]:
    """The arrays of a state of ``config`` by the names of ``train_state.schema``.

    Order:    a moment in a layout is stored by the scale of its own amax, rounded to nearest even
              (O-7, O-8); a master likewise (O-14). A delayed state is the source's; of a tensor
              without one, a history full of its amax.
    """
    arrays: dict[str, np.ndarray] = {}
    layout = config.optimizer.moment_layout
    for kind in train_state.PER_PARAMETER:
        of = source.moments.get(kind.name, {}) if kind.moment else source.weights
        for name, shape in config.shapes.parameters.items():
            value = np.asarray(of[name] if name in of else np.zeros(shape), np.float32)
            if layout is None or kind.stored(config.optimizer, math.prod(shape)) is None:
                arrays[f"{kind.name}.{name}"] = value
                continue
            assert kind.kept is not None
            if kind.kept == 2:
                stored = sim_states.master(value, layout)
            else:
                stored = _stored(value, layout.of(value.size), kind.kept)
            fields = {key: x for key, x in stored._asdict().items() if x is not None}
            arrays |= {f"{kind.name}.{name}.{key}": x for key, x in fields.items()}
    if backend == "jax":
        arrays[train_state.COUNT] = np.array(source.step, np.int32)
    module, scale = (".states", "scale") if backend == "torch" else ("", "stored")
    for name, (stored_scale, history, step) in _delayed(source, config).items():
        linear, _, role = name.rpartition("/")
        prefix = f"{train_state.FP8}.{linear}{module}.{role}"
        arrays[f"{prefix}.{scale}"] = np.asarray(stored_scale)
        arrays[f"{prefix}.amax_history"] = np.asarray(history)
        arrays[f"{prefix}.step"] = np.asarray(step)
    return arrays


def _stored(x: np.ndarray, layout: Layout, which: int) -> sim_moments.MomentState:
    """A moment as a layout stores it, by its own amax."""
    moment = layout.kept[which]
    x = np.maximum(x, 0) if moment.root else x
    old = sim_moments.zeros(x.shape, moment)
    if moment.amax != "exact":
        raise ValueError(
            f"a moment is converted by its own amax; layout {layout.name!r} has "
            f"{moment.amax!r}. Use a layout of LAYOUTS."
        )
    pieces = [(0, x.reshape(-1), x.reshape(-1))]
    with np.errstate(all="ignore"):
        return sim_moments.store(pieces, old, moment, which, x.shape, _NO_STEP, None, layout)


def _delayed(source: Source, config: Config) -> dict[str, tuple[np.ndarray, ...]]:
    """Every delayed state of a config."""
    delayed = train_state.delayed_states(config)
    casts = {f"{path}/{role}": cast for (path, role), cast in delayed.items()}
    states = {
        name: state
        for name, state in source.delayed.items()
        if source.casts.get(name, casts.get(name)) == casts.get(name)
    }
    amaxes = source.amaxes() if casts.keys() - states.keys() else {}
    if absent := sorted(casts.keys() - states.keys() - amaxes.keys()):
        raise ConfigError(
            "a delayed state goes on from the checkpoint's, or from an amax; got neither of "
            f"{absent[0]}. Use another recipe."
        )
    return {name: states.get(name) or _full_of(amaxes[name], *cast) for name, cast in casts.items()}


def _full_of(amax: float, fmt: Format, rule: DelayedScaling) -> tuple[np.ndarray, ...]:
    """A state whose history is full of one amax, after one update."""
    observed = sim_delayed.observe(np.float32(amax))
    state = sim_delayed.update(sim_delayed.init(rule), observed, config=rule, fmt=fmt)
    return state.stored, np.full_like(state.amax_history, np.float32(amax)), state.step
