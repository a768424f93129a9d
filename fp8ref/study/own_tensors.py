"""Judge single tensors, or a file of them, as operands: without a model or a framework."""

import fnmatch
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np

from fp8ref import configs as shipped
from fp8ref.recipe import Role
from fp8ref.shared import extras, files
from fp8ref.shared.console import one_line
from fp8ref.shared.errors import require
from fp8ref.study import recording as recordings
from fp8ref.study.recording import Operand, Recording

__all__ = ["read_file", "tensors"]

ROLES: dict[str, Role] = {
    "input": "input",
    "weight": "weight",
    "kernel": "weight",
    "grad_output": "grad_output",
}
"""{last part of a tensor's name: the operand that it is}."""

KINDS = (".npz", ".npy", ".safetensors")
"""The files that are read."""

DTYPES = ("F16", "BF16", "F32", "F64")
"""The dtypes of safetensors that are judged."""


def tensors(
    arrays: Mapping[str, Any], *, roles: Role | Mapping[str, Role] | None = None, rows: int = 512
) -> Recording:
    """A recording of tensors of your own, which ``judge`` takes.

        judged = study.judge(study.tensors({"layer.input": x, "layer.weight": w}))

    Each is cast as an operand of its role, which the last part of its name states: ``input``,
    ``weight``, ``kernel`` (Flax's weight) or ``grad_output``. Others are inputs.

    arrays    {name: array} of NumPy, PyTorch or JAX, of floats; float64 is rounded to float32.
    roles     one role for all tensors, or {pattern of names: role} (fnmatch), which comes first.
    rows      as in ``record``: of a longer tensor, so many rows are kept; amaxes are of the whole.
    Shapes:   input and grad_output [..., K], each [K] a token; weight [N, K]; kernel [K, N].
    Returns:  the Recording; ``refused`` says why a tensor was left out, such as a bias.
    Raises:   ValueError: no tensor that can be judged; an unknown role; rows as in ``record``.
    """
    got = type(arrays).__name__
    require(
        isinstance(arrays, Mapping),
        f"tensors takes {{name: array}}; got {got}. Write study.tensors({{'x': x}}).",
    )
    return _record(arrays.items(), roles, rows)


def _record(
    arrays: Iterable[tuple[str, Any]], roles: Role | Mapping[str, Role] | None, rows: int
) -> Recording:
    recordings.check_rows(rows)
    patterns = {"*": roles} if isinstance(roles, str) else dict(roles or {})
    for role in patterns.values():
        choices = get_args(Role)
        require(role in choices, f"a role is {', '.join(choices)}; got {role!r}.")
    recording = Recording(framework="tensors")
    for name, array in arrays:
        name = one_line(str(name))
        head, _, last = re.sub("[./]", "\0", name).rpartition("\0")
        matches = fnmatch.fnmatchcase
        chosen = [role for pattern, role in patterns.items() if matches(name, pattern)]
        role = chosen[0] if chosen else ROLES.get(last, "input")
        try:
            operand = _operand(array, role, last == "kernel", rows)
        except ValueError as error:
            recording.refused[name] = str(error)
            continue
        layer = name[: len(head)] if head and ROLES.get(last) == role else name
        if f"{layer}/{role}" in recording.operands:  # a.weight beside a/weight
            layer = name
        recording.operands[f"{layer}/{role}"] = operand
        recording.titles[f"{layer}/{role}"] = name
    if not recording.operands:
        why = "; ".join(f"{name}: {text}" for name, text in list(recording.refused.items())[:3])
        raise ValueError(
            f"a study takes at least one matrix of floats; got {why or 'no tensor of that name'}."
        )
    return recording


def _operand(array: Any, role: Role, transposed: bool, rows: int) -> Operand:
    """What is kept of an array; ValueError if it cannot be judged."""
    x = recordings.floats(array)
    shape = f"shape {x.shape} is no matrix"
    require(x.size > 0, f"shape {x.shape} is empty")
    require(x.ndim > 1, f"{shape}; reshape it to [tokens, K]")
    require(role != "weight" or x.ndim == 2, f"a weight of {shape}; give each [N, K] by itself")
    x = x.T if transposed and role == "weight" else x.reshape(-1, x.shape[-1])
    return recordings.kept(x, rows)


def read_file(
    path: Path | str,
    pattern: str = "*",
    *,
    roles: Role | Mapping[str, Role] | None = None,
    rows: int = 512,
) -> Recording:
    """The tensors of a .npz, .npy or .safetensors, or a recording that ``Recording.write`` wrote.

    pattern   of names of tensors; of a recording, of "<layer>/<role>".
    roles, rows
              as in ``tensors``; a recording has its own.
    Raises:   ValueError: the file is damaged, of another kind, or has no such tensor. OSError: it
              cannot be read. ImportError: safetensors is missing. Nothing is unpickled.
    """
    path = shipped.find(Path(path), ".npz")
    try:
        if path.suffix == ".safetensors":
            return _record(_safetensors(path, pattern), roles, rows)
        if path.suffix == ".npy":
            return _record({path.stem: files.read_array(path)}.items(), roles, rows)
        arrays = files.read_arrays(path)
        about = files.parse_json(str(arrays["about"])) if "about" in arrays else None
        if not isinstance(about, dict) or "rows" not in about:
            return _record(_npz(arrays, pattern, about is not None), roles, rows)
    except ValueError as error:
        readable = f" A study reads {', '.join(KINDS)}, and no pickle."
        kinds = "" if path.suffix in KINDS else readable
        raise ValueError(f"{path}: {str(error).rstrip('.')}.{kinds}") from error
    require(roles is None, f"{path} is a recording, which has its roles. Leave --role out.")
    recording = recordings.read(path)
    named = fnmatch.filter(recording.operands, pattern)
    kept = named or (pattern == "*" and recording.attention)
    require(bool(kept), f"{path} has no operand that matches {pattern!r}. See its layers.")
    recording.operands = {name: recording.operands[name] for name in named}
    return recording


def _npz(
    arrays: Mapping[str, np.ndarray], pattern: str, ours: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Arrays by name; ours: those that fp8ref wrote, with bits of bfloat16 and amaxes."""
    for name, array in arrays.items():
        if ours and (name == "about" or name.endswith("/amax")):
            continue
        if fnmatch.fnmatchcase(name, pattern):
            yield name, recordings.wide(array, array.ndim) if ours else array


def _safetensors(path: Path, pattern: str) -> Iterator[tuple[str, Any]]:
    """Tensors by name; one is in memory at a time."""
    files.open_regular(path).close()  # safe_open would wait for the writer of a pipe
    try:
        import ml_dtypes  # noqa: F401  safetensors finds bfloat16 where it has defined it
        from safetensors import SafetensorError, safe_open
    except ImportError:
        extras.require("train", "a file of safetensors", "safetensors", "ml_dtypes")
        raise
    try:
        with safe_open(path, framework="numpy") as file:
            for name in fnmatch.filter(file.keys(), pattern):
                dtype = file.get_slice(name).get_dtype()
                other = types.SimpleNamespace(dtype=dtype)  # which NumPy may not know
                yield name, file.get_tensor(name) if dtype in DTYPES else other
    except SafetensorError as error:
        raise ValueError(f"it is no intact file of safetensors ({one_line(str(error))})") from error
