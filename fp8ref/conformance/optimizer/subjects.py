"""Somebody's optimizer, run on chosen gradients: weights after each step, and some of its state.

It is one of these, and is told apart by what it takes:

    torch     a class of torch.optim, or a function of params that makes one
    optax     a GradientTransformation, or a function of learning_rate that makes one
    function  step(p, g, state) -> (p, state), of one tensor; the first state is None

Learning rate, betas, eps and decay are passed to those that take them by name.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fp8ref.conformance.kit import arrays, subject
from fp8ref.conformance.optimizer.forms import Numbers

KINDS = ("torch", "optax", "function")  # what an optimizer is handed over as
STEPS = 6  # the steps that are asked

NAMES = (("m_codes", "v_codes"), ("exp_avg", "exp_avg_sq"), ("mu", "nu"), ("m", "v"))
"""The names under which libraries keep both moments."""

COUNTERS = ("step", "t", "count")
"""The names under which states count steps."""

NUMBERS = ("learning_rate", "b1", "b2", "eps", "weight_decay")
"""What optax's functions take by name; torch's take lr, betas, eps and weight_decay."""


class Moment(NamedTuple):
    """What is read of a stored moment: uint8 codes, or float32 numbers; and the scales of these
    codes, float32 of any shape, or None."""

    codes: np.ndarray
    scale_inv: np.ndarray | None = None


class Snapshot(NamedTuple):
    """A tensor's weight after a step; its moments and master, None if the state hides them."""

    weight: np.ndarray
    m: Moment | None = None
    v: Moment | None = None
    master: Moment | None = None


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What an optimizer is asked: weights, and their gradients at each step, float32.

    jumps  {index of a step, from 0: the count of steps that states are given before it}.
    """

    weights: Mapping[str, np.ndarray]
    gradients: Sequence[Mapping[str, np.ndarray]]
    jumps: Mapping[int, int] = field(default_factory=dict)


def inputs(steps: int = STEPS) -> Inputs:
    """Tensors that tell layouts apart: ``spread`` has values over many binades; ``late`` has blocks
    without a gradient at first, and elements without one later; ``ragged`` and ``small`` are not
    made of whole blocks; ``zeros`` never has a gradient."""
    rng = np.random.default_rng(0)
    shapes = {
        "spread": (32, 256),
        "late": (16, 256),
        "ragged": (17, 253),
        "small": (257,),
        "zeros": (16, 256),
    }
    weights = {k: rng.standard_normal(shape).astype(np.float32) for k, shape in shapes.items()}
    gradients = []
    for step in range(steps):
        g = {}
        for name, shape in shapes.items():
            g[name] = rng.standard_t(3, shape) * 2.0 ** rng.uniform(-14, -2, (*shape[:-1], 1))
        g["late"] = np.where((np.arange(16)[:, None] % 3 == 0) & (step < 3), 0, g["late"])
        g["late"][:, ::5] *= step < 2
        g["zeros"] = np.zeros(shapes["zeros"])
        gradients.append({name: value.astype(np.float32) for name, value in g.items()})
    return Inputs(weights=weights, gradients=gradients)


def kind_of(optimizer: Any) -> str | None:
    """Which of KINDS an object is; None for any other."""
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        return "optax"
    torch = sys.modules.get("torch")
    is_class = torch is not None and isinstance(optimizer, type)
    if is_class and issubclass(optimizer, torch.optim.Optimizer):  # type: ignore[union-attr]
        return "torch"
    required = [name for name in subject.needed(optimizer) if name not in NUMBERS]
    if required and required[0] == "params":
        return "torch"
    names = subject.parameters(optimizer)
    if "learning_rate" in names and "state" not in names:
        return "optax"
    return "function" if len(required) == 3 else None


def run(
    name: str, optimizer: Any, kind: str, asked: Inputs, settings: Numbers
) -> list[dict[str, Snapshot]]:
    """The snapshots of all tensors after each step.

    Raises:   RefusedError: it raises. ConformanceError: it returns something else than it should.
    """
    try:
        with np.errstate(all="ignore"):
            steps = {"torch": _torch, "optax": _optax, "function": _function}[kind]
            return steps(optimizer, asked, settings)
    except subject.ConformanceError as error:
        raise type(error)(f"{name} {error}") from error
    except (Exception, SystemExit) as error:  # an optimizer under test may raise anything
        text = " ".join(str(error).split())[:300]
        raise subject.RefusedError(
            f"{name}, taken as {kind}, raised {type(error).__name__}: {text}. It is run on "
            f"float32 tensors of {', '.join(str(w.shape) for w in asked.weights.values())}."
        ) from error


def _torch(factory: Any, asked: Inputs, settings: Numbers) -> list[dict[str, Snapshot]]:
    import torch

    params = {name: torch.nn.Parameter(torch.tensor(w)) for name, w in asked.weights.items()}
    numbers = {"lr": settings.learning_rate, "betas": (settings.b1, settings.b2)}
    numbers |= {name: getattr(settings, name) for name in ("eps", "weight_decay")}
    optimizer = factory(list(params.values()), **_accepted(factory, numbers))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise subject.ConformanceError(
            f"returned a {type(optimizer).__name__}; a torch.optim.Optimizer is needed."
        )
    snapshots = []
    for i, g in enumerate(asked.gradients):
        for name, p in params.items():
            p.grad = torch.tensor(g[name])
            if i in asked.jumps:
                optimizer.state[p] |= counted(optimizer.state[p], asked.jumps[i])
        optimizer.step()
        snapshot = {}
        for name, p in params.items():
            moments = _moments(optimizer.state[p])
            snapshot[name] = Snapshot(_weight(p, asked.weights[name]), *moments)
        snapshots.append(snapshot)
    return snapshots


def _optax(optimizer: Any, asked: Inputs, settings: Numbers) -> list[dict[str, Snapshot]]:
    import jax.numpy as jnp
    import optax

    if not hasattr(optimizer, "update"):
        numbers = {name: getattr(settings, name) for name in NUMBERS}
        optimizer = optimizer(**_accepted(optimizer, numbers))
    params = {name: jnp.asarray(w) for name, w in asked.weights.items()}
    state, snapshots = optimizer.init(params), []
    for g in asked.gradients:
        # operation by operation: under jit XLA fuses products and sums, in an order of its own
        own = {name: jnp.asarray(x) for name, x in g.items()}
        changes, state = optimizer.update(own, state, params)
        params = optax.apply_updates(params, changes)
        kept, snapshot = _kept(state), {}
        for name, p in params.items():
            moments = [_moment(_parameter_state(tree, name)) for tree in kept]
            snapshot[name] = _trained(Snapshot(_weight(p, asked.weights[name]), *moments))
        snapshots.append(snapshot)
    return snapshots


def _parameter_state(kept: Any, name: str) -> Any:
    """What a state keeps of a parameter: of fp8ref's a tree for each field."""
    if isinstance(getattr(kept, "codes", None), Mapping):
        trees = {key: getattr(kept, key) for key in ("codes", "scale_inv")}
        return {key: tree and tree[name] for key, tree in trees.items()}
    return kept[name]


def _trained(snapshot: Snapshot) -> Snapshot:
    """With the weight of a shown master: optax's sum may miss it by a rounding (O-14)."""
    if snapshot.master is None:
        return snapshot
    master, inverse = snapshot.master.codes, snapshot.master.scale_inv
    weight = master * (np.float32(1) if inverse is None else inverse)
    return snapshot._replace(weight=_weight(weight, snapshot.weight))


def _function(step: Callable, asked: Inputs, settings: Numbers) -> list[dict[str, Snapshot]]:
    numbers = {name: getattr(settings, name) for name in NUMBERS}
    step = functools.partial(step, **_accepted(step, numbers))
    params, snapshots = dict(asked.weights), []
    states: dict[str, Any] = dict.fromkeys(asked.weights)
    for i, g in enumerate(asked.gradients):
        snapshot = {}
        for name in asked.weights:
            if i in asked.jumps:
                states[name] = counted(states[name], asked.jumps[i])
            result = step(params[name].copy(), g[name].copy(), states[name])
            if not isinstance(result, tuple) or len(result) != 2:
                raise subject.ConformanceError(
                    f"returned a {type(result).__name__}; step(p, g, state) returns (p, state)."
                )
            params[name] = _weight(result[0], asked.weights[name])
            states[name] = result[1]
            snapshot[name] = Snapshot(params[name], *_moments(states[name]))
        snapshots.append(snapshot)
    return snapshots


def counted(state: Any, count: int) -> Any:
    """The state with another count of steps: its own is under a name of ``COUNTERS``, or the only
    integer of a tuple. Without one it is as it was."""
    if hasattr(state, "_make") or isinstance(state, Mapping):
        parts = dict(state) if isinstance(state, Mapping) else state._asdict()
        kept = {name: parts[name] * 0 + count for name in COUNTERS if name in parts}
        return state._make((parts | kept).values()) if hasattr(state, "_make") else parts | kept
    integers = [isinstance(part, int | np.integer) for part in state or ()]
    if not isinstance(state, tuple) or sum(integers) != 1:
        return state
    parts = zip(state, integers, strict=True)
    return tuple(part * 0 + count if counts else part for part, counts in parts)


def _weight(value: Any, like: np.ndarray) -> np.ndarray:
    new = arrays.as_numpy(value)
    if new.dtype != np.float32 or new.shape != like.shape:
        raise subject.ConformanceError(
            f"made a weight {new.dtype} {new.shape}; it is float32 {like.shape}, as it was given."
        )
    return new


def _moments(state: Any) -> tuple[Moment | None, ...]:
    """Both moments of the state of one tensor, and its master under fp8ref's names."""
    for first, second in NAMES:
        if (m := _field(state, first)) is not None and (v := _field(state, second)) is not None:
            if first == "m_codes":
                parts = []
                codes = {"m": m, "v": v, "master": _field(state, "master_codes")}
                for key, x in codes.items():
                    pair = {"codes": x, "scale_inv": _field(state, f"{key}_scale_inv")}
                    parts.append(None if x is None else _moment(pair))
                return tuple(parts)
            return _moment(m), _moment(v)
    return ()


def _kept(state: Any) -> tuple[Any, ...]:
    """Both trees of moments in optax's states, and that of masters if there is one."""
    for first, second in NAMES[2:]:
        if hasattr(state, first) and hasattr(state, second):
            trees = getattr(state, first), getattr(state, second)
            master = getattr(state, "master", None)
            return trees if master is None else (*trees, master)
    if isinstance(state, tuple | list):
        return next((kept for part in state if (kept := _kept(part))), ())
    return ()


def _moment(moment: Any) -> Moment | None:
    """A moment: an array, or codes with their scales, under the names of fp8ref or torchao."""
    codes = _field(moment, "codes")
    scale = _field(moment, "scale_inv")
    if scale is None and codes is not None and not isinstance(moment, Mapping):
        scale = _field(moment, "scale")  # torchao's, by which codes are multiplied
    try:
        values = arrays.as_numpy(moment if codes is None else codes)
        inverse = None if scale is None else arrays.as_numpy(scale).astype(np.float32)
    except Exception:  # no array: the state does not show it
        return None
    if values.dtype != np.uint8:
        if values.dtype.kind not in "fV":
            return None
        values = values.astype(np.float32)
    return Moment(values, inverse)


def _field(of: Any, name: str) -> Any:
    return of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)


def _accepted(function: Any, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that a callable takes by name."""
    names = subject.parameters(function)
    every = any(p.kind is p.VAR_KEYWORD for p in names.values())
    return {name: value for name, value in numbers.items() if every or name in names}
