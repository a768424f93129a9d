"""Which framework a model is of, by what is imported: a model of torch has imported torch."""

import importlib
import sys
from types import ModuleType


def of(model) -> ModuleType:
    """``torch_model`` or ``nnx_model`` of this room.

    Raises:   ValueError: neither a torch.nn.Module nor a flax.nnx.Module.
    """
    for package, kind, name in (
        ("torch", "nn.Module", "torch_model"),
        ("flax.nnx", "Module", "nnx_model"),
    ):
        attribute: object = sys.modules.get(package)
        for part in kind.split("."):
            attribute = getattr(attribute, part, None)
        if isinstance(attribute, type) and isinstance(model, attribute):
            return importlib.import_module(f"fp8ref.study.{name}")
    raise ValueError(
        f"a study takes a torch.nn.Module or a flax.nnx.Module; got {type(model).__name__}. "
        "Layers of linen are not seen, in nnx.bridge.ToNNX neither: study the model in NNX, or "
        "give its tensors to study.tensors."
    )
