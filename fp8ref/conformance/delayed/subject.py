"""Somebody's delayed scaling state, as functions or as a class, given sequences (spec H-13)."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8ref.conformance.delayed.sequences import Operation, Sequence
from fp8ref.conformance.kit.arrays import as_numpy
from fp8ref.conformance.kit.subject import FRAMEWORKS
from fp8ref.shared.errors import one_of, require


@dataclass(frozen=True, kw_only=True)
class Functions:
    """A delayed scaling state as functions.

    init     () -> state, before the first step.
    observe  (state, amax) -> state, once for each use of the tensor in a step. None: ``update``
             takes the step's amaxes, (state, *amaxes).
    update   (state) -> state, at the end of every step.
    scale    (state) -> the scale of the coming step, a number or an array of one element.
    reset    (state) -> the state before the first step.
    save     (state) -> anything; load: (what save gave) -> state.
    """

    init: Callable[[], Any]
    update: Callable[..., Any]
    scale: Callable[[Any], Any]
    observe: Callable[[Any, Any], Any] | None = None
    reset: Callable[[Any], Any] | None = None
    save: Callable[[Any], Any] | None = None
    load: Callable[[Any], Any] | None = None


def of_step(init: Callable[[], Any], step: Callable[..., tuple[Any, Any]]) -> Functions:
    """Functions of one pure function: step(state, *amaxes) -> (state, the scale that this step's
    tensor is cast by)."""
    return Functions(
        init=lambda: (init(), ()),
        observe=lambda held, amax: (held[0], (*held[1], amax)),
        update=lambda held: (step(held[0], *held[1])[0], ()),
        scale=lambda held: step(held[0], *held[1])[1],
    )


def class_functions(make: Callable[[], Any]) -> Functions:
    """Functions of a class, or of any function that makes an object with methods ``observe(amax)``
    and ``update()``, and ``scale``, an attribute or a method.

    Optional: ``reset``, and ``save`` with ``load`` or ``state_dict`` with ``load_state_dict``.

    Raises:   ValueError: a method is missing.
    """
    example = make()
    if absent := [name for name in ("observe", "update", "scale") if not hasattr(example, name)]:
        raise ValueError(
            "a delayed scaling state has observe(amax), update() and scale; "
            f"{type(example).__name__} has no {' and no '.join(absent)}. Give "
            "conformance.delayed.Functions with functions under these names."
        )
    save, load = "save", "load"
    if not hasattr(example, "save"):
        save, load = "state_dict", "load_state_dict"

    def loaded(saved: Any) -> Any:
        new = make()
        getattr(new, load)(saved)
        return new

    saves = hasattr(example, save) and hasattr(example, load)
    resets = hasattr(example, "reset")
    return Functions(
        init=make,
        observe=lambda state, amax: _then(state, state.observe(amax)),
        update=lambda state: _then(state, state.update()),
        scale=lambda state: state.scale() if callable(state.scale) else state.scale,
        reset=(lambda state: _then(state, state.reset())) if resets else None,
        save=(lambda state: getattr(state, save)()) if saves else None,
        load=loaded if saves else None,
    )


def _then(state: Any, _: Any) -> Any:
    """The object, after a method that changed it."""
    return state


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Somebody's state, and how it is called.

    takes      ``amax``: a float32 number; ``tensor``: float32 [2, 3] with that amax.
    """

    functions: Functions
    name: str
    takes: str = "amax"
    framework: str = "numpy"

    @property
    def lacks(self) -> tuple[str, ...]:
        """The difficulties that it cannot be given, for want of functions."""
        of = self.functions
        lacks = {"load": of.save is None or of.load is None, "reset": of.reset is None}
        return tuple(word for word, lacking in lacks.items() if lacking)

    def run(self, sequence: Sequence) -> "list[Shown]":
        """What it shows before each operation and after the last, up to the first that raises."""
        shown: list[Shown] = []
        try:
            held = Held(self)
            shown.append(Shown(scale=held.scale()))
            for operation in sequence:
                shown[-1] = dataclasses.replace(shown[-1], observed=held.do(operation))
                shown.append(Shown(scale=held.scale()))
        except (Exception, SystemExit) as error:  # somebody's code: its answer
            shown.append(Shown(raised=f"{type(error).__name__}: {error}".rstrip(".: ")))
        return shown

    def observation(self, amax: float) -> Any:
        """An amax, or a tensor of that amax, in the framework."""
        x: Any = np.float32(amax)
        if self.takes == "tensor":
            small = x / 2 if np.isfinite(x) else np.float32(1)
            x = np.array([[small, 0, -small], [0, -x, small]], np.float32)
        return FRAMEWORKS[self.framework](x)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The scale that a state shows, and again after a step's observations; or what was raised."""

    scale: float = 0.0
    observed: float | None = None
    raised: str = ""


class Held:
    """A state in use: operations, one at a time."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.functions = subject, subject.functions
        self.state = self.functions.init()
        self.saved: Any = None

    def do(self, operation: Operation) -> float | None:
        """One operation; of a step with uses, the scale then shown. ValueError: an unknown word."""
        of = self.functions
        if operation == "save":
            assert of.save is not None
            self.saved = of.save(self.state)
        elif operation == "load":
            assert of.load is not None
            self.state = of.load(self.saved)
        elif operation == "reset":
            assert of.reset is not None
            self.state = of.reset(self.state)
        elif isinstance(operation, str):
            raise ValueError(f"an operation is a step, save, load or reset; got {operation!r}.")
        elif of.observe is None:
            self.state = of.update(self.state, *map(self.subject.observation, operation))
        else:
            for amax in operation:
                self.state = of.observe(self.state, self.subject.observation(amax))
            observed = self.scale() if operation else None
            self.state = of.update(self.state)
            return observed
        return None

    def scale(self) -> float:
        """The scale shown. ValueError if it is not one number."""
        value = as_numpy(self.functions.scale(self.state))
        require(value.size == 1, f"scale gives one number; got shape {value.shape}.")
        return float(value.reshape(-1)[0])


def subject_of(implementation: Any, *, takes: str = "amax", framework: str = "numpy") -> Subject:
    """The subject of a class, a function that makes an object, or Functions.

    Raises:   ValueError: no such thing, or an unknown word.
    """
    one_of("takes", takes, ("amax", "tensor"))
    one_of("framework", framework, FRAMEWORKS)
    if isinstance(implementation, Subject):
        return implementation
    if not isinstance(implementation, Functions) and not callable(implementation):
        raise ValueError(
            "a delayed scaling state is a class, or conformance.delayed.Functions; got "
            f"{type(implementation).__name__}. Of an object give the class, or a function that "
            "makes one."
        )
    functions = implementation
    if not isinstance(implementation, Functions):
        functions = class_functions(implementation)
    name = getattr(implementation, "__name__", "the implementation")
    return Subject(functions=functions, name=name, takes=takes, framework=framework)
