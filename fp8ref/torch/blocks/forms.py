"""What a module's forward computes, read off its source: SwiGLU's MLP, an attention that reads its
input by linears alone, a block that calls a norm for one of them."""

import ast
import inspect
import re
import textwrap

from torch import nn
from torch.nn import functional

from fp8ref.torch.blocks.operations import Norm

__all__ = ["input_name", "norm_constants", "norm_name", "swiglu_input"]

_ACTIVATIONS = {"SiLU", "SiLUActivation"}


def _forward(module: nn.Module) -> ast.FunctionDef | None:
    """A module's forward without its docstring; None without a source, or of an instance."""
    if "forward" in vars(module):
        return None
    try:
        source = inspect.getsource(type(module).forward)
        tree = ast.parse(textwrap.dedent(source)).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    return tree


def _text(forward: ast.FunctionDef) -> str:
    return "\n".join(map(ast.unparse, forward.body))


def swiglu_input(mlp: nn.Module, names: tuple[str, ...]) -> str:
    """The one parameter x of a forward that returns down(silu(gate(x)) * up(x)); "" of any other
    forward. names: of gate, up and down."""
    forward = _forward(mlp)
    if forward is None:
        return ""
    gate, up, down = names
    text = re.sub(r"^(\w+) = (.*)\nreturn \1$", r"return \2", _text(forward))
    found = re.fullmatch(
        rf"return self\.{down}\((\S+)\(self\.{gate}\((\w+)\)\) \* self\.{up}\(\2\)\)", text
    )
    if found is None or [each.arg for each in forward.args.args[1:]] != [found.group(2)]:
        return ""
    return found.group(2) if _is_silu(mlp, found.group(1)) else ""


def _is_silu(mlp: nn.Module, name: str) -> bool:
    """Whether a forward's name of a function is silu's: ``self.act_fn``, ``F.silu``."""
    first, *rest = name.split(".")
    value = mlp if first == "self" else type(mlp).forward.__globals__.get(first)
    for key in rest:
        value = getattr(value, key, None)
    return value is functional.silu or type(value).__name__ in _ACTIVATIONS


def input_name(module: nn.Module, names: tuple[str, ...]) -> str:
    """The parameter of a forward that reads it for its shape, and calls each of these linears with
    it once; "" if it does anything else with it."""
    forward = _forward(module)
    if forward is None or len(forward.args.args) < 2:
        return ""
    name, text = forward.args.args[1].arg, _text(forward)
    for linear in names:
        text, calls = re.subn(rf"self\.{linear}\({name}\)", "", text)
        if calls != 1 or f"self.{linear}" in text:
            return ""
    return "" if re.search(rf"\b{name}\b", text.replace(f"{name}.shape", "")) else name


def norm_name(block: nn.Module, reader: str) -> str:
    """The child of a block whose result a forward gives its child ``reader``, and nothing else; ""
    if there is none."""
    forward = _forward(block)
    text = "" if forward is None else _text(forward)
    if len(re.findall(rf"self\.{reader}\b", text)) != 1:
        return ""
    nested = re.search(rf"self\.{reader}\(self\.(\w+)\(\w+\)[,)]", text)
    after = re.search(
        rf"^(\w+) = self\.(\w+)\(\w+\)\n\1(?:, _)? = self\.{reader}\((?:\w+=)?\1([,)].*)$",
        text,
        re.MULTILINE,
    )
    if nested:
        name = nested.group(1)
    elif after and not re.search(rf"\b{after.group(1)}\b", after.group(3)):
        name = after.group(2)
    else:
        return ""
    return name if len(re.findall(rf"self\.{name}\b", text)) == 1 else ""


_RMS_NORM = """\
input_dtype = hidden_states.dtype
hidden_states = hidden_states.to(torch.float32)
variance = hidden_states.pow(2).mean(-1, keepdim=True)
hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
return self.weight * hidden_states.to(input_dtype)"""
"""RMSNorm's forward in transformers' Llama, Qwen3 and Mistral."""


def norm_constants(norm: nn.Module) -> Norm | None:
    """The constants of torch's RMSNorm of one dim, or of transformers'; None of another module."""
    if getattr(norm, "weight", None) is None:
        return None
    if type(norm) is nn.RMSNorm:
        return Norm(norm.eps) if norm.eps is not None and len(norm.normalized_shape) == 1 else None
    forward = _forward(norm)
    if forward is None or _text(forward) != _RMS_NORM:
        return None
    return Norm(norm.variance_epsilon, twice=True)  # type: ignore[arg-type]
